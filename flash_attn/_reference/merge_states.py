"""The merging of two results of attention, in plain torch. Arguments as in `flash_attn._ops.merge_states`."""

import math

import torch


def merge_states_(out, lse, out_a, lse_a, out_b, lse_b):
    """Write the merged result to out and, unless it is None, to lse."""
    dtype = torch.promote_types(torch.promote_types(out_a.dtype, out_b.dtype), torch.float32)
    lses = torch.stack([x.to(dtype) for x in (lse_a, lse_b)])
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    unseen = lses == -math.inf
    empty = unseen.all(0)
    both = lses.masked_fill(empty, 0).logsumexp(0)
    share_a, share_b = (lses - both).exp().masked_fill(unseen, 0)[..., None]
    # Where a part saw no key, its out may hold anything, also NaN, which a share of 0 would not remove.
    out_a, out_b = (x.to(dtype).masked_fill(none[..., None], 0) for x, none in zip((out_a, out_b), unseen, strict=True))
    out.copy_(out_a * share_a + out_b * share_b)
    if lse is not None:
        lse.copy_(both.masked_fill(empty, math.inf))
