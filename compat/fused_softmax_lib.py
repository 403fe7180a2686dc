"""The functions that other packages call in place of flash-attn 2.8's separate extension of this name.

They are thin: checks, kernels and the reference backend are those of `flash_attn`. They take any shape, record no
gradient, and return new tensors.
"""

import torch

from flash_attn import fused_softmax
from flash_attn._ops import checks
from flash_attn._ops import fused_softmax as ops


@torch.no_grad()
def scaled_masked_softmax_forward(input, mask, scale, /):
    """Softmax of scale * input (batch, heads, seqlen_q, seqlen_k) where mask, as bytes, is 0; 0 elsewhere."""
    return fused_softmax.scaled_masked_softmax(input, mask, scale)


@torch.no_grad()
def scaled_masked_softmax_backward(output_grads, softmax_results, scale, /):
    """The gradient of the input: scale * y * (dy - sum of y * dy over a row)."""
    return _backward(output_grads, softmax_results, scale, causal=False)


def scaled_masked_softmax_get_batch_per_block(query_seq_len, key_seq_len, batches, attn_heads, /):
    """How many rows a block of the original kernel took. Nothing here depends on it."""
    return fused_softmax.FusedScaleMaskSoftmax.get_batch_per_block(query_seq_len, key_seq_len, batches, attn_heads)


@torch.no_grad()
def scaled_upper_triang_masked_softmax_forward(input, scale, /):
    """Softmax of row i of scale * input (batches, seqlen, seqlen) over columns up to i; 0 right of them."""
    return fused_softmax.scaled_upper_triang_masked_softmax(input, None, scale)


@torch.no_grad()
def scaled_upper_triang_masked_softmax_backward(output_grads, softmax_results, scale, /):
    """The gradient of the input, as of scaled_masked_softmax_backward."""
    return _backward(output_grads, softmax_results, scale, causal=True)


def _backward(dy, y, scale, causal):
    checks.alike(("softmax_results", "output_grads"), (y, dy), dtypes=ops.DTYPES)
    checks.has_shape("output_grads", dy, tuple(y.shape))
    checks.number("the number of dimensions of softmax_results", y.dim(), y.dim() >= 2, "at least 2")
    if causal and y.shape[-2] != y.shape[-1]:
        raise ValueError(f"softmax_results must have as many rows as columns, found shape {tuple(y.shape)}")
    return ops.bwd(dy, y, checks.as_float("scale", scale), causal)
