"""Rotary embedding in plain torch, with fp32 maths, or fp64 for fp64. Arguments as in `flash_attn._ops.rotary`."""

import torch
from torch.nn import functional


def rotary(x, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, interleaved, conjugate):
    """The rotated copy of x."""
    if len(cos) == 0:  # the tables have no rows, so nothing rotates
        return x.clone()
    position, inside = _positions(x, seqlen_offsets, seqlen_offset, cu_seqlens)
    rotated = (inside & (position >= 0) & (position < len(cos)))[..., None, None]
    row = position.clamp(0, len(cos) - 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    c, s = cos.to(wide)[row][..., None, :], sin.to(wide)[row][..., None, :]  # the same for all heads
    s = -s if conjugate else s
    turning, rest = x.tensor_split((2 * cos.shape[1],), -1)
    low, high = (half.to(wide) for half in _pairs(turning, interleaved))
    turned = torch.where(rotated, low * c - high * s, low), torch.where(rotated, low * s + high * c, high)
    turned = [half.to(x.dtype) for half in turned]
    if interleaved:
        turned = [torch.stack(turned, -1).flatten(-2)]
    return torch.cat((*turned, rest), -1)


def rotary_(x, *arguments):
    """Rotate x in place."""
    x.copy_(rotary(x, *arguments))


def rotary_into(x, out, *arguments):
    """Rotate x into out."""
    out.copy_(rotary(x, *arguments))


def _pairs(x, interleaved):
    """The first and the second elements of the pairs in the last dimension."""
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


def _positions(x, seqlen_offsets, seqlen_offset, cu_seqlens):
    """Returns the position of each token, (batch, seqlen) or (tokens,), and whether it belongs to a sequence."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        offset = 0 if seqlen_offsets is None else seqlen_offsets[:, None]
        return index + offset + seqlen_offset, torch.ones_like(index, dtype=torch.bool)
    token = torch.arange(x.shape[0], device=x.device)
    # 1 + the index of the sequence; 0 before the first one, num_sequences + 1 after the last one
    slot = torch.searchsorted(cu_seqlens.long(), token, right=True)
    start = functional.pad(cu_seqlens, (1, 0))[slot]
    offset = 0 if seqlen_offsets is None else functional.pad(seqlen_offsets, (1, 1))[slot]
    return token - start + offset + seqlen_offset, (slot > 0) & (slot < len(cu_seqlens))
