"""Scaled, masked softmax in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.fused_softmax`.

`fwd` is differentiable by autograd. It also takes float64, and then computes in float64.
"""

import torch


def fwd(x, mask, scale, causal):
    """Returns the softmax of the rows of scale * x."""
    scores = x.to(torch.promote_types(x.dtype, torch.float32)) * scale
    if mask is not None:
        scores = scores.masked_fill(mask.bool(), float("-inf"))
    if causal:
        scores = scores.masked_fill(_above_diagonal(x), float("-inf"))
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    scores.masked_fill_(empty, 0)  # if all scores are -inf, their softmax and its gradient would be NaN
    return scores.softmax(dim=-1).masked_fill(empty, 0).to(x.dtype)


def bwd(dy, y, scale, causal):
    """Returns dx."""
    dy, weights = dy.float(), y.float()
    if causal:
        dy = dy.masked_fill(_above_diagonal(y), 0)
    product = dy * weights
    return (scale * (product - weights * product.sum(dim=-1, keepdim=True))).to(y.dtype).contiguous()


def _above_diagonal(x):
    return torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
