"""A linear layer in plain torch whose bits do not depend on the number of rows. Arguments as in `_ops/linear.py`.

Every product has one shape, (ROWS, in) by (in, out), and strides that do not depend on those of x and the weight: the
rows are divided into blocks, the last one with zeros at its end. A library of matrix products computes a row of such a product alike wherever it stands and whatever the others are;
`tests/ops/test_linear.py` tests that. For another number of rows it may add in another order.
"""

import torch
from torch.nn import functional

from flash_attn._reference.fused_dense import matrix

ROWS = 32


def fwd(x, weight, bias):
    """x weight^T + bias, computed in fp32, or fp64 for fp64, and rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, columns = matrix(x).to(wide).contiguous(), weight.to(wide).contiguous().mT
    blocks = functional.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)
    out = rows.new_empty(ROWS * len(blocks), columns.shape[1])
    for block, product in zip(blocks, out.split(ROWS), strict=True):
        if len(block) > 0:
            torch.mm(block, columns, out=product)
    if bias is not None:
        out += bias.to(wide)
    return out[: len(rows)].reshape(*x.shape[:-1], len(weight)).to(x.dtype)
