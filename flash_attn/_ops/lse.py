"""The log-sum-exp of rows: +inf for a row that sees no key in flash_attn, -inf in FlashAttention-3 and -4."""

import functools
import math
from collections.abc import Sequence

import torch


def unseen_as_minus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns flash_attn's lse in the convention of FlashAttention-3 and -4."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def unseen_as_plus_inf(lse: torch.Tensor) -> torch.Tensor:
    """Returns an lse of either convention in that of flash_attn."""
    return torch.nan_to_num(lse, nan=math.nan, posinf=math.inf, neginf=math.inf)


def merge_parts(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]], sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (out, lse, lse_lo), float32, of attention over all keys and the sink, from results for parts of the keys.

    parts: out, lse and lse_lo of each part, computed without the sink; lse_lo, what rounding has taken off lse, may be
        None.
    sink: (heads,), the score of one more key, whose value is 0.

    Unlike `flash_attn.functional.combine`, it relies on an out of 0 where a part has no keys: NaN stays
    NaN.
    """
    scores = [lse.masked_fill(lse == math.inf, -math.inf) for _, lse, _ in parts]
    closed = None
    if sink is not None:
        sink = sink.float()[:, None].expand_as(scores[0])
        closed = sink == math.inf  # then the keys have no weight
        scores.append(sink.masked_fill(closed, -math.inf))
    # Relative to the largest, so that lse_lo is not lost again where they are large.
    largest = torch.stack(scores).amax(0)
    empty = largest == -math.inf
    largest = largest.masked_fill(empty, 0)
    rests = [lse_lo for _, _, lse_lo in parts] + [None]
    relative = torch.stack([x - largest if lo is None else x - largest + lo for x, lo in zip(scores, rests)])
    relative = relative.masked_fill(empty, 0)
    shares = relative.softmax(0)
    above = relative.logsumexp(0)
    lse = largest + above
    lse_lo = above - (lse - largest)
    lse = lse.masked_fill(empty, math.inf)
    if closed is not None:
        shares, lse = shares.masked_fill(closed, 0), lse.masked_fill(closed, math.inf)
    shares = shares[: len(parts)]  # the value of the sink is 0
    # out first: products have the strides of the first operand.
    outs = (out * share.transpose(-1, -2)[..., None] for share, (out, _, _) in zip(shares, parts, strict=True))
    return functools.reduce(torch.add, outs), lse, lse_lo
