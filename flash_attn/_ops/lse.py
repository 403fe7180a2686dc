"""The log-sum-exp of a row that sees no key: +inf in flash_attn, -inf in FlashAttention-3 and -4."""

import math

import torch


def unseen_as_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns flash_attn's lse in the convention of FlashAttention-3 and -4."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def unseen_as_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns an lse of either convention in that of flash_attn."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)
