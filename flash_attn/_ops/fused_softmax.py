"""Softmax over the last dimension of scaled, masked scores: the ops `softmax_fwd` and `softmax_bwd`.

    softmax_fwd(x, mask, scale, causal) -> y        softmax_bwd(dy, y, scale, causal) -> dx

x, y, dy  (batch, heads, seqlen_q, seqlen_k), fp32, fp16 or bf16, any strides
mask      bool or uint8, nonzero where x is left out; it broadcasts to x, with four dimensions. None: no mask
causal    column j of row i is left out if j > i; needs seqlen_q = seqlen_k

    y = softmax(scale x) over the columns that are left, 0 elsewhere   dx = scale y (dy - sum_j y_j dy_j)

The maths is in fp32. A row is 0 if all its columns are left out or -inf. Differentiable in x, twice.
"""

import torch

from flash_attn import _library
from flash_attn._ops import autograd, checks
from flash_attn._reference import fused_softmax as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MASK_DTYPES = (torch.bool, torch.uint8)


def softmax(x, mask, scale, causal):
    """Check the arguments and compute the softmax of x, which has four dimensions."""
    checks.tensor("inputs", x, dtypes=DTYPES)
    checks.ndim("inputs", x, "(batch, heads, seqlen_q, seqlen_k)")
    if causal:
        checks.number("seqlen_q", x.shape[2], x.shape[2] == x.shape[3], "seqlen_k = {} for a causal mask", x.shape[3])
    if mask is not None:
        checks.tensor("mask", mask, dtypes=MASK_DTYPES, device=x.device)
        checks.ndim("mask", mask, "(batch, heads, seqlen_q, seqlen_k)")
        if any(size not in (1, full) for size, full in zip(mask.shape, x.shape, strict=True)):
            raise ValueError(f"mask must have shape {tuple(x.shape)} or ones in it, found {tuple(mask.shape)}")
    return fwd(x, mask, checks.as_float("scale", scale), causal)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rest):
        _, ctx.scale, ctx.causal = rest
        y = fwd(x, *rest)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        options = ctx.scale, ctx.causal

        def first(dy, y):
            return (bwd(dy, y, *options),)

        @autograd.in_plain_torch
        def again(dy, y):
            return (reference.bwd(dy, y, *options),)

        return *autograd.first_or_second(first, again, dy, y), None


def _fake(x, *_):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


fwd = _library.define(
    "softmax_fwd(Tensor x, Tensor? mask, float scale, bool causal) -> Tensor",
    reference=reference.fwd,
    fake=_fake,
    autograd=_Softmax,
    differentiable=1,
    composite=autograd.in_plain_torch(reference.fwd),
)
bwd = _library.define(
    "softmax_bwd(Tensor dy, Tensor y, float scale, bool causal) -> Tensor",
    reference=reference.bwd,
    fake=_fake,
)
