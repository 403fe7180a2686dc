"""Attention with an additive bias in plain torch, differentiable by autograd; memory is quadratic in the length."""

import math

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, softmax_scale: float, causal: bool
) -> torch.Tensor:
    """Attention with scores softmax_scale <q_i, k_j> + bias(i, j). Returns out (batch, seqlen_q, heads, head_dim).

    q: (batch, seqlen_q, heads, head_dim). k, v: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
    bias: broadcasts to (batch, heads, seqlen_q, seqlen_k). causal: the last row sees the last key. A row that sees no
    key gives 0. Scores and sums are kept in fp32.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2).to(dtype) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.to(dtype) * softmax_scale, k) + bias.to(dtype)
    if causal:
        hidden = s.new_ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        s = s.masked_fill(hidden, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return torch.einsum("bhij,bjhd->bihd", p, v).to(q.dtype)
