"""Linear layers whose results do not depend on the number of rows, bit for bit.

    out = batch_invariant_linear(x, weight, bias)

    with batch_invariant_layers():              # all linear layers within, also those of other packages' models
        logits = model(tokens).logits

Libraries of matrix products choose tiles, and an order of sums, by the number of rows: so a token of a batch gets other
bits than the same token alone. Here both are fixed. docs/guides/batch_invariance.md says what that costs.
"""

import contextlib

from torch import Tensor

from flash_attn._ops import fused_dense, linear
from flash_attn._ops.layers_in_force import FixedLayers

__all__ = ["batch_invariant_layers", "batch_invariant_linear"]


def batch_invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x weight^T + bias, differentiable, with bits of a row that depend on that row and the layer alone.

    On a GPU it is a Triton kernel with fixed tiles; for float64, and on a CPU, torch multiplies each row by itself.
    Sums are float32 (float64 for float64), without TF32, and rounded once, after the bias is added. The gradient of x
    is computed in the same way; those of the weight and the bias are sums over rows, by torch.

    Arguments:
        x: (..., in_features), float32, float16, bfloat16 or float64, any strides. Under autocast all three tensors are
            cast to its dtype.
        weight: (out_features, in_features), of the dtype of x.
        bias: (out_features,), of the dtype of x, or None.

    Returns (..., out_features). Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.ops.linear import batch_invariant_linear
    >>> x, weight = torch.randn(300, 64), torch.randn(128, 64)
    >>> torch.equal(batch_invariant_linear(x[7], weight), batch_invariant_linear(x, weight)[7])
    True
    """
    autocast = fused_dense.check_layer(x, weight, bias)
    if autocast is not None:
        x, weight, bias = x.to(autocast), weight.to(autocast), None if bias is None else bias.to(autocast)
    return linear.fwd(x, weight, bias)


def batch_invariant_layers() -> contextlib.AbstractContextManager:
    """A context in which torch's linear layers are computed by `batch_invariant_linear`, whoever calls them.

    These are torch.nn.functional.linear (so nn.Linear, and adapters made of it), and addmm, mm and matmul with a matrix
    as the second operand; not einsum, bmm and what is written in C++. On the CPU, gelu, silu, sigmoid and glu are
    computed by formulas, since torch's own give the last elements of a tensor other bits, as softplus, mish, elu, selu
    and celu still do. What is no layer of floating-point numbers, and what torch refuses, is left to torch; but a
    weight that is no plain tensor raises NotImplementedError. The context belongs to the thread that enters it.
    `GPTLMHeadModel` enters it by itself where the level of batch invariance is 2. What is computed again in a backward,
    by an activation checkpoint, is outside of it, also where the backward is called within: pass `context_fn` to
    `torch.utils.checkpoint.checkpoint`, as the guide shows.

    >>> from flash_attn.ops.linear import batch_invariant_layers
    >>> layer, x = torch.nn.Linear(64, 128), torch.randn(300, 64)
    >>> with torch.no_grad(), batch_invariant_layers():
    ...     torch.equal(layer(x[7]), layer(x)[7])
    True
    """
    return FixedLayers()
