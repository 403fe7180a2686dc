"""The log-sum-exp of rows: +inf for a row that sees no key in flash_attn, -inf in FlashAttention-3 and -4."""

import math

import torch


def unseen_as_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns flash_attn's lse in the convention of FlashAttention-3 and -4."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def unseen_as_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns an lse of either convention in that of flash_attn."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def merge(outs: torch.Tensor, lses: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse) of attention over all keys, from those over parts of them; differentiable.

    See `flash_attn.functional.combine`. outs: (parts, .., seqlen_q, heads, head_dim). lses: (parts, .., heads,
    seqlen_q), of either convention. dtype: that of out.
    """
    lses = lses.to(torch.promote_types(lses.dtype, torch.float32))
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    empty = (lses == -math.inf).all(0)
    lse = lses.masked_fill(empty, 0).logsumexp(0)
    share = (lses - lse).exp().masked_fill(lses == -math.inf, 0)
    # Where a part saw no key, its out may hold anything, also NaN, which a share of 0 would not remove.
    held = outs.masked_fill((lses == -math.inf).transpose(-1, -2)[..., None], 0)
    out = (held * share.transpose(-1, -2)[..., None]).sum(0).to(dtype)
    return out, lse.masked_fill(empty, math.inf).float()
