"""Rotary position embedding in plain torch."""

import torch


def rotary(x, cos, sin, seqlen_offsets, seqlen_offset, cu_seqlens, max_seqlen, interleaved, conjugate):
    """Stand-in."""
    seqlen = x.shape[1]
    offsets = seqlen_offset if seqlen_offsets is None else seqlen_offsets.long()[:, None]
    positions = torch.arange(seqlen, device=x.device)[None] + offsets
    cos, sin = (t[positions][:, :, None].float() for t in (cos, sin))
    r = 2 * cos.shape[-1]
    pairs = x[..., :r].float().unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    y = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1 if interleaved else -2).flatten(-2)
    return torch.cat([y.to(x.dtype), x[..., r:]], -1)
