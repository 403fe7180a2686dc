"""The log-sum-exp of rows: +inf for a row that sees no key in flash_attn, -inf in FlashAttention-3 and -4."""

import math

import torch


def unseen_as_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns flash_attn's lse in the convention of FlashAttention-3 and -4."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def unseen_as_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns an lse of either convention in that of flash_attn."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def merge_two(
    out: torch.Tensor, lse: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (out, lse), float32, of attention over all keys, from what ops return for two parts of them.

    Differentiable. Unlike `flash_attn.functional.combine`, it relies on an out of 0 where a part has no keys: NaN stays
    NaN.
    """
    first, second = (x.masked_fill(x == math.inf, -math.inf) for x in (lse, lse2))
    empty = (first == -math.inf) & (second == -math.inf)
    share = (first - second).masked_fill(empty, 0).sigmoid()
    merged = torch.lerp(out2.float(), out.float(), share.transpose(-1, -2)[..., None])
    total = torch.logaddexp(first.masked_fill(empty, 0), second.masked_fill(empty, 0))
    return merged, total.masked_fill(empty, math.inf)
