"""A linear layer in plain torch whose bits do not depend on the number of rows. Arguments as in `_ops/linear.py`.

Each row is a product of its own, (1, in) by (in, out), in a batch of ROWS of them. It cannot be a row of one larger
product: for some sizes, libraries add up the rows at the end of a block in another order than those before, and all
rows in an order that depends on their number. Rows and weight are aligned, as addresses also choose instructions.
"""

import torch
from torch.nn import functional

from flash_attn._reference.fused_dense import matrix

ROWS = 8
_ALIGNED = 16  # elements; of at least 32 bits, they are a line of a cache
_BYTES = 64


def fwd(x, weight, bias):
    """x weight^T + bias, computed in fp32, or fp64 for fp64, and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, columns = _aligned(matrix(x).to(wide)), _aligned(weight.to(wide)).mT.expand(ROWS, -1, -1)
    batches = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS)).unflatten(0, (-1, ROWS))[:, :, None]
    out = rows.new_empty(len(batches), ROWS, 1, len(weight))
    for batch, product in zip(batches, out, strict=True):
        torch.bmm(batch, columns, out=product)
    out = out.flatten(0, 2)[: len(rows)]
    if bias is not None:
        out += bias.to(wide)
    return out.reshape(*x.shape[:-1], len(weight)).to(x.dtype)


def _aligned(x):
    """Returns x (rows, in), contiguous, with zeros after each row so that the next one begins at an aligned address."""
    missing = -x.shape[1] % _ALIGNED
    if missing or x.data_ptr() % _BYTES:
        x = functional.pad(x, (0, missing))
    return x.contiguous()
