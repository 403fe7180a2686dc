"""Attention as a composition of torch's own operations, which autograd, forward mode and vmap can look into.

It holds all scores of an entry at once, and serves what the blockwise functions have no formulas for: derivatives of
gradients, tangents, and transforms of torch.func.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from . import batch_layout
from .bias import Bias
from .dropout import keep_mask
from .head_groups import Group
from .mask import Mask, mask_of
from .options import Features, Options


def attention(
    q: Tensor, k: Tensor, v: Tensor, options: Options, features: Features
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what `fwd_features` in blockwise.py does, with row_max and lse_lo, which have no derivative."""
    options.check()
    parts = batch_layout.parts(
        q,
        k,
        options.cu_seqlens_q,
        options.cu_seqlens_k,
        options.seqused_k,
        options.leftpad_k,
        options.block_table,
        seqused_q=features.seqused_q,
    )
    packed = q.dim() == 3
    paged = options.block_table is not None
    rows = q[None] if packed else q
    keys, values = (x[None] if packed and not paged else x for x in (k, v))
    outs, lses, tops, los = [], [], [], []
    for i, part in enumerate(parts):
        out, lse, top, lo = _part(part, rows, keys, values, options, features)
        stop = (parts[i + 1].q[1].start if i + 1 < len(parts) else q.shape[0]) if packed else q.shape[1]
        more = stop - part.q[1].stop
        outs.append(F.pad(out, (0, 0, 0, 0, 0, more)))
        lses.append(F.pad(lse, (0, more), value=math.inf))
        tops.append(F.pad(top, (0, more), value=-math.inf))
        los.append(F.pad(lo, (0, more)))
    if not parts:
        lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.inf)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), lse, -lse, torch.zeros_like(lse)
    out = torch.cat(outs, 1 if packed else 0)
    lse, top, lo = (torch.cat(x, -1 if packed else 0) for x in (lses, tops, los))
    return (out[0], lse[0], top[0], lo[0]) if packed else (out, lse, top, lo)


def _part(part: batch_layout.Part, q: Tensor, k: Tensor, v: Tensor, options: Options, features: Features) -> tuple:
    """Returns out (entries, seqlen_q, heads, any), lse, row_max and lse_lo (entries, heads, seqlen_q) of one part."""
    batch, heads, heads_k = q.shape[0], q.shape[2], k.shape[2]
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows, cols = range(part.seqlen_q), range(part.seqlen_k)
    if not rows or not cols:
        lse = q.new_full((part.num_entries, heads, len(rows)), math.inf, dtype=dtype)
        top = -lse
        if features.learnable_sink is not None:
            lse = features.learnable_sink.to(dtype)[:, None].expand_as(lse)
            lse = lse.masked_fill(lse == -math.inf, math.inf)
        return q.new_zeros(part.num_entries, len(rows), heads, v.shape[-1]), lse, top, torch.zeros_like(top)
    group = Group(part, slice(0, heads_k), heads_k, len(rows), len(cols))
    mask = mask_of(Mask(len(rows), len(cols), options.window_left, options.window_right), features, group, q.device)
    q_rows = part.rows(q).to(dtype).unflatten(2, (heads_k, -1))
    keys, values = part.keys(k).to(dtype), part.keys(v).to(dtype)
    s = torch.einsum("bihgd,bjhd->bhgij", q_rows * options.softmax_scale, keys).flatten(0, 1)
    if options.softcap > 0:
        s = options.softcap * torch.tanh(s / options.softcap)
    if options.alibi_slopes is not None:
        s = s - group.per_head(options.alibi_slopes)[..., None, None] * mask.distance(rows, cols, s)
    hidden = mask.hidden(rows, cols, s).expand_as(s)
    if features.attn_bias is not None:
        bias = Bias(features.attn_bias, group, batch, heads).block(rows, cols)
        masked = ~bias if bias.dtype == torch.bool else bias == -math.inf
        hidden = hidden | masked
        s = s if bias.dtype == torch.bool else s + bias.to(dtype).masked_fill(masked, 0)
    empty = hidden.all(-1)
    top = s.detach().masked_fill(hidden, -math.inf).amax(-1)
    closed = None
    if features.learnable_sink is not None:  # one more key; where it is +inf, the others have no weight
        sink = group.per_head(features.learnable_sink.to(dtype))[..., None, None].expand(*s.shape[:-1], 1)
        closed = (sink == math.inf)[..., 0]
        sink = sink.masked_fill(closed[..., None], -math.inf)
        s, hidden = torch.cat([s, sink], -1), torch.cat([hidden, sink == -math.inf], -1)
        empty = hidden.all(-1)
    # Finite in empty rows: their gradient must not be nan. Elsewhere scores are taken relative to the largest: where
    # that is large, their differences are exact.
    s = s.masked_fill(hidden & ~empty[..., None], -math.inf).masked_fill(empty[..., None], 0)
    largest = s.detach().amax(-1)
    s = s - largest[..., None]
    log_sum = s.logsumexp(-1)
    p = (s - log_sum[..., None]).exp().masked_fill(hidden, 0)[..., : len(cols)]
    lse = largest + log_sum
    lo = ((largest - lse) + log_sum).detach().masked_fill(lse.isinf() | empty, 0)
    lse = lse.masked_fill(empty, math.inf)
    if closed is not None:
        p, lse = p.masked_fill(closed[..., None], 0), lse.masked_fill(closed, math.inf)
    if options.dropout_p > 0 and options.rng_state is not None:
        numbers = torch.arange(part.entries.stop * heads, device=q.device)
        keep = keep_mask(options.rng_state, options.dropout_p, group.per_head(numbers.view(-1, heads)), rows, cols)
        p = p * keep / (1 - options.dropout_p)
    out = torch.einsum("bhgij,bjhd->bihgd", p.unflatten(0, (-1, heads_k)), values)
    lse, top, lo = (x.unflatten(0, (-1, heads_k)).flatten(1, 2) for x in (lse, top, lo))
    return out.flatten(2, 3).to(q.dtype), lse, top, lo
