"""Attention in plain torch: forward, backward, and forward over a key-value cache.

    s(i, j) = softmax_scale <q_i, k_j>            scores of query row i and key j, in fp32
    s      <- softcap tanh(s / softcap)           if softcap > 0
    s      <- s - slope |i + D - j|               with ALiBi; D = seqlen_k - seqlen_q
    s      <- s + bias(i, j)                      with an additive bias
    lse(i)  = log sum_j exp s(i, j)               over the keys that row i sees; a sink is one more, of value 0
    P(i, j) = exp(s(i, j) - lse(i))
    out_i   = sum_j P(i, j) Z(i, j) / (1 - p) v_j     Z is the keep mask of dropout

The loops follow FlashAttention (Dao et al., 2022; Dao, 2023): each block of query rows visits blocks of keys with an
online softmax, and the backward recomputes P from lse. So memory grows with the sequence, not with its square. The
query heads that share a key head are folded into the rows: q is (key heads, query heads per key head * rows, head_dim)
and every product is one batched matmul over the key heads. Parts without modified scores, with a causal mask or none,
are left to torch's operator on the CPU (torch_cpu_operator.py), unless results must not depend on the batch.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn._errors import ArgumentError
from flash_attn._reference.rotary import rotary

from . import batch_layout, float8, torch_cpu_operator
from .head_groups import Group, aligned_groups, groups
from .options import CacheOptions, Features, Options
from .score_modifiers import Scores

_NO_FEATURES = Features()


def fwd(q: Tensor, k: Tensor, v: Tensor, options: Options, *, invariant: bool = False) -> tuple[Tensor, Tensor]:
    """Attention.

    q: (batch, seqlen_q, heads, head_dim), or packed tokens (total_q, heads, head_dim) with cu_seqlens_q.
    k, v: (batch, seqlen_k, heads_k, head_dim), packed with cu_seqlens_k, or (pages, page, heads_k, head_dim) with
        block_table (batch, pages per entry): key j of entry b is [block_table[b, j // page], j % page]. v may have
        another head_dim.

    invariant: whether the bits of a row must depend on nothing but its query and the keys that it sees: see
        head_groups.py. It is slower.

    Returns out, like q with the head_dim of v, and softmax_lse in fp32, (batch, heads, seqlen_q) or (heads, total_q),
    natural logarithm, +inf for rows that see no key.
    """
    batch_layout.require_matching_shapes(q, k, v)
    return _attend(q, k, v, _parts(q, k, options), options, _NO_FEATURES, invariant)[:2]


def fwd_features(
    q: Tensor, k: Tensor, v: Tensor, options: Options, features: Features, *, invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fwd` with features.

    Returns out; softmax_lse, which counts the sink; row_max, the largest score of each row before the sink, -inf for a
    row that sees no key; and lse_lo, what rounding has taken off softmax_lse. The last two are shaped like softmax_lse,
    but row_max is empty if it is not wanted, and lse_lo without a bias.

    k and v may be float8_e4m3fn beside a q of 16 bits, which is then converted to fp16. The scores are taken with the
    scale softmax_scale * k_descale of an entry and key head, rounded to fp32, and out is multiplied by v_descale before
    it is rounded to the dtype of q.
    """
    batch_layout.require_matching_shapes(q, k, v)
    return _attend(q, k, v, _parts(q, k, options, features), options, features, invariant)


def probabilities(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    """S_dmask of `fwd` with these arguments, (batch, heads, seqlen_q, seqlen_k); see `_softmax_dropped`.

    Lengths are rounded up to multiples of 128; with packed tokens they are max_seqlen_q and max_seqlen_k.
    """
    parts = _parts(q, k, options)
    if options.cu_seqlens_q is None:
        batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    else:
        batch, (seqlen_q, seqlen_k) = len(options.cu_seqlens_q) - 1, options.bounds()
    s_dmask = q.new_zeros(batch, q.shape[-2], _round_up(seqlen_q, 128), _round_up(seqlen_k, 128))
    _softmax_dropped(_batched(q), _batched(k), parts, options, s_dmask)
    return s_dmask


def weights(
    q: Tensor, k: Tensor, softmax_lse: Tensor, lse_lo: Tensor | None, options: Options, features: Features
) -> Tensor:
    """Returns P(i, j) without dropout, fp32 (batch, heads, seqlen_q, seqlen_k), 0 where a row does not see a key."""
    lse, lo = _per_row(softmax_lse), None if lse_lo is None else _per_row(lse_lo)
    p = lse.new_zeros(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    for group in groups(q, k, _parts(q, k, options, features)):
        scores = Scores(options, features, group, q)
        keys = group.load_keys(k, lse.dtype)
        by_pair = p[group.part.entries].unflatten(1, (group.heads_k, -1))[:, group.heads]
        for rows in group.row_blocks():
            q_rows = group.load_rows(q, rows, lse.dtype) * options.softmax_scale
            for cols in group.col_blocks(scores.keys(rows)):
                s, _ = scores.compute(q_rows, _at(keys, cols), rows, cols)
                s.sub_(group.load_rows(lse, rows, lse.dtype))
                if lo is not None:
                    s.sub_(group.load_rows(lo, rows, lse.dtype)).clamp_(max=0)
                s.exp_()
                scores.hide_(s, rows, cols, 0)
                target = by_pair[..., rows.start : rows.stop, cols.start : cols.stop]
                target.copy_(s.view(target.shape))
    return p


def _parts(q: Tensor, k: Tensor, options: Options, features: Features = _NO_FEATURES) -> list[batch_layout.Part]:
    """Check the options and return the batch as parts."""
    options.check()
    return batch_layout.parts(
        q,
        k,
        options.cu_seqlens_q,
        options.cu_seqlens_k,
        options.seqused_k,
        options.leftpad_k,
        options.block_table,
        seqused_q=features.seqused_q,
    )


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: Options,
) -> Tensor:
    """Write the gradients of `fwd` into every element of dq, dk and dv. Keys in pages have no gradient.

    dout, out: like out of `fwd`. softmax_lse: as from `fwd`; it is taken as it is, and a row where it is +inf has no
        gradient.
    dlse: the gradient of softmax_lse, or None. dq, dk, dv: of the shapes of q, k, v, with any strides and dtypes.

        delta_i  = <dout_i, out_i> - dlse_i                         0 for a row that sees no key
        dP(i, j) = <dout_i, v_j> Z(i, j) / (1 - p)
        dS(i, j) = P(i, j) (dP(i, j) - delta_i)                     times 1 - tanh^2 with softcap
        dq_i = softmax_scale sum_j dS(i, j) k_j;   dk_j = softmax_scale sum_i dS(i, j) q_i;
        dv_j = sum_i P(i, j) Z(i, j) / (1 - p) dout_i

    Returns delta in fp32, (batch, heads, seqlen_q rounded up to 128), or packed (heads, total_q + 128 batch), where the
    rows of entry b start at cu_seqlens_q[b] + 128 b. The rows between entries are zero.
    """
    batch_layout.require_matching_shapes(q, k, v)
    delta, parts = _differentiate(dout, q, k, v, out, softmax_lse, dlse, dq, dk, dv, options)
    return _spread(delta, parts, packed=options.cu_seqlens_q is not None)


def bwd_features(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    lse_lo: Tensor | None,
    options: Options,
    features: Features,
    wants_dbias: bool,
    float_dkv: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `fwd_features`: (dq, dk, dv, dsink, dbias). The last two are empty if there is none.

    lse_lo: as `fwd_features` returns it; None: softmax_lse counts as exact.
    float_dkv: whether dk and dv are fp32.

    dsink_h = - sum over the rows of head h of exp(sink_h - lse_i) delta_i
    dbias   = dS before the factor of softcap, summed in fp32 along the dimensions that were broadcast
    """
    batch_layout.require_matching_shapes(q, k, v)
    dq = torch.empty_like(q)
    dk, dv = (x.new_empty(x.shape, dtype=torch.float32) if float_dkv else torch.empty_like(x) for x in (k, v))
    dsink, dbias, bias, sink = q.new_empty(0), q.new_empty(0), features.attn_bias, features.learnable_sink
    total = None
    if bias is not None and wants_dbias:
        total = torch.zeros(bias.shape, dtype=torch.promote_types(bias.dtype, torch.float32), device=q.device)
    delta, _ = _differentiate(dout, q, k, v, out, softmax_lse, dlse, dq, dk, dv, options, features, total, lse_lo)
    if sink is not None:
        share = sink.to(softmax_lse.dtype)[:, None] - softmax_lse
        if lse_lo is not None:
            share -= lse_lo
        share = share.exp().masked_fill(softmax_lse == math.inf, 0)
        rows = [dim for dim in range(delta.dim()) if dim != delta.dim() - 2]
        dsink = -(share * delta).sum(rows).to(sink.dtype)
    if bias is not None and total is not None:
        dbias = total.to(bias.dtype)
    return dq, dk, dv, dsink, dbias


def _differentiate(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    options: Options,
    features: Features = _NO_FEATURES,
    dbias: Tensor | None = None,
    lse_lo: Tensor | None = None,
) -> tuple[Tensor, list[batch_layout.Part]]:
    """Write dq, dk and dv, and add to dbias. Returns delta, shaped like softmax_lse, and the parts."""
    if options.block_table is not None:
        raise ArgumentError("block_table must be None in the backward, found a tensor: keys in pages have no gradient")
    parts = _parts(q, k, options, features)
    for gradient in (dq, dk, dv):
        gradient.zero_()
    delta = torch.zeros_like(softmax_lse)
    inputs = [_batched(x) for x in (q, k, v, out, dout)]
    row_values = [None if x is None else _per_row(x) for x in (softmax_lse, dlse, delta)]
    gradients = [_batched(x) for x in (dq, dk, dv)]
    tensors: Any = *inputs, *row_values, *gradients
    plain = features.none_but_sink()  # then torch's operator may serve: lse already counts the sink
    others = [part for part in parts if not (plain and torch_cpu_operator.backward(part, options, *tensors))]
    for group in groups(inputs[0], inputs[1], others, without_keys=features.learnable_sink is not None):
        _backward(group, options, features, dbias, None if lse_lo is None else _per_row(lse_lo), *tensors)
    return delta, parts


def fwd_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: CacheOptions, *, invariant: bool = False
) -> tuple[Tensor, Tensor]:
    """Append k and v to the caches, in place, then attend to the keys in the caches.

    q: (batch, seqlen_q, heads, head_dim), or packed tokens (total_q, heads, head_dim) with cu_seqlens_q.
    k_cache, v_cache: (batch_cache, capacity, heads_k, head_dim), or (pages, page, heads_k, head_dim) with block_table.
        v_cache may have another head_dim.
    k, v: (batch, seqlen_new, heads_k, head_dim of the cache) or None, written at positions cache_seqlens ..
        + seqlen_new - 1.
    cache_seqlens (batch,) int32, or cache_seqlen for all: how many keys each entry has in the cache; None: its
        capacity. An entry of negative length is empty: nothing is read or appended, whatever its other arguments are.
    rotary_cos, rotary_sin: (rows, rotary_dim / 2). New key t is rotated by row cache_seqlens + t. Query i is rotated
        by row cache_seqlens + i with a causal mask or a window, however wide. Without them all queries are rotated
        by row cache_seqlens. Not with packed tokens.
    cache_batch_idx: (batch,) int32, the batch row of the cache that an entry uses.
    cache_leftpad: (batch,) int32, the first position that is used; masks and ALiBi count keys from there.
    num_splits: how a kernel divides its work; of no effect here. invariant: as for `fwd`.

    Returns out, like q with the head_dim of v_cache, and softmax_lse in fp32, as `fwd` does.
    """
    batch_layout.require_matching_shapes(q, k_cache, v_cache)
    return fwd_kvcache_features(q, k_cache, v_cache, options, _NO_FEATURES, invariant=invariant)[:2]


def fwd_kvcache_features(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: CacheOptions,
    features: Features,
    *,
    invariant: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fwd_kvcache` with features. Returns what `fwd_features` does.

    Queries are rotated by rows cache_seqlens + i also with chunks or key_ranges, and in entries that are causal.
    The caches may be float8_e4m3fn, as in `fwd_features`; k and v, of 16 bits, are then encoded, after the rotation.
    """
    block_table, cache_batch_idx, cu_seqlens_q = options.block_table, options.cache_batch_idx, options.cu_seqlens_q
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    k, v = options.k, options.v
    new = 0 if k is None else k.shape[1]
    batch_layout.require_matching_shapes(q, k_cache, v_cache)
    lengths = _check_cache(options, batch, new, k_cache)
    used = [length + new if length >= 0 else 0 for length in lengths]
    leftpad = [0] * batch if options.cache_leftpad is None else options.cache_leftpad.tolist()
    leftpad = [pad if length >= 0 else 0 for pad, length in zip(leftpad, lengths, strict=True)]
    parts = batch_layout.parts(
        q, k_cache, cu_seqlens_q, None, used, leftpad, block_table, cache_batch_idx, features.seqused_q
    )
    if k is not None and v is not None:
        filled = torch.tensor(lengths, dtype=torch.int64, device=q.device)
        start = filled.clamp(min=0)
        cos, sin = options.rotary_cos, options.rotary_sin
        if cos is not None and sin is not None:
            advance = options.window_left >= 0 or options.window_right >= 0
            advance = advance or features.attention_chunk > 0 or features.key_ranges is not None
            some = advance or features.causal is not None
            tables = cos, sin
            if cu_seqlens_q is not None:
                raise ArgumentError("rotary_cos must be None with cu_seqlens_q, found a tensor: rotate before this op")
            _check_tables(cos, max(lengths, default=0) + max(new, q.shape[1] if some else 1))
            k = rotary(k, *tables, start, 0, None, options.rotary_interleaved, False)
            advanced, q = q, _rotate_queries(q, tables, start, options.rotary_interleaved, advance)
            if features.causal is not None and not advance:
                advanced = _rotate_queries(advanced, tables, start, options.rotary_interleaved, True)
                q = torch.where(features.causal.view(-1, 1, 1, 1) != 0, advanced, q)
        if k_cache.dtype == float8.DTYPE:
            descales = features.k_descale, features.v_descale
            k, v = (
                float8.encoded(x, None if descale is None else descale[:, None, :, None])
                for x, descale in zip((k, v), descales, strict=True)
            )
        _append_(k_cache, v_cache, k, v, filled, cache_batch_idx, block_table)
    return _attend(q, k_cache, v_cache, parts, options.of_scores(), features, invariant)


def _check_cache(options: CacheOptions, batch: int, new: int, k_cache: Tensor) -> list[int]:
    """Check the values of the tensors of lengths and rows; return how many positions each entry has filled."""
    block_table = options.block_table
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    default = [capacity if options.cache_seqlen is None else options.cache_seqlen] * batch
    lengths = default if options.cache_seqlens is None else options.cache_seqlens.tolist()
    holder = "the cache holds" if block_table is None else "the pages of block_table hold"
    rows = None if options.cache_batch_idx is None else options.cache_batch_idx.tolist()
    leftpad = None if options.cache_leftpad is None else options.cache_leftpad.tolist()
    for entry, length in enumerate(lengths):
        if length < 0:
            continue
        if length > capacity - new:
            room = f"{holder} {capacity} keys" + f", of which {new} will be new" * (new > 0)
            raise ArgumentError(
                f"cache_seqlens must be at most {capacity - new}, since {room}, found {length} for entry {entry}"
            )
        if rows is not None:
            batch_layout.require_range("cache_batch_idx", entry, rows[entry], 0, k_cache.shape[0] - 1)
        if leftpad is not None:
            batch_layout.require_range("cache_leftpad", entry, leftpad[entry], 0, length)
    return lengths


def _check_tables(cos: Tensor, rows: int) -> None:
    if cos.shape[0] < rows:
        raise ArgumentError(f"rotary_cos and rotary_sin must have at least {rows} rows, found {cos.shape[0]}")


def _rotate_queries(
    q: Tensor, tables: tuple[Tensor, Tensor], start: Tensor, interleaved: bool, advance: bool
) -> Tensor:
    """Returns q (batch, seqlen_q, heads, head_dim) rotated by rows start + i of the tables, or all by row `start`."""
    folded = q if advance else q.flatten(1, 2)[:, None]
    return rotary(folded, *tables, start, 0, None, interleaved, False).view(q.shape)


def _append_(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    filled: Tensor,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Write k and v at positions filled .. filled + seqlen_new - 1 of each entry; none where `filled` is negative."""
    entries = (filled >= 0).nonzero()[:, 0]
    positions = filled[entries, None] + torch.arange(k.shape[1], device=filled.device)
    if block_table is not None:
        page = k_cache.shape[1]
        rows, positions = block_table[entries].gather(1, positions // page).long(), positions % page
    else:
        rows = (entries if cache_batch_idx is None else cache_batch_idx[entries].long())[:, None]
    k_cache[rows, positions] = k[entries]
    v_cache[rows, positions] = v[entries]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    parts: list[batch_layout.Part],
    options: Options,
    features: Features,
    invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out, softmax_lse, row_max and lse_lo. A row in no part gets 0, +inf, -inf and 0."""
    sink, descale, dtype = features.learnable_sink, features.v_descale, q.dtype
    scales = None if features.k_descale is None else features.k_descale * options.softmax_scale
    plain = features._replace(k_descale=None, v_descale=None).none_but_sink() and not invariant
    out = torch.zeros_like(q) if v.shape[-1] == q.shape[-1] else q.new_zeros(*q.shape[:-1], v.shape[-1])
    if k.dtype == float8.DTYPE:
        q = q.to(float8.PRODUCT_DTYPE)
    if sink is not None or k.dtype == float8.DTYPE:  # out is scaled, or of another dtype than q: it is rounded at last
        out = out.to(_accumulator(q))
    softmax_lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.inf, dtype=_accumulator(q))
    row_max = torch.full_like(softmax_lse, -math.inf) if features.row_max else softmax_lse.new_empty(0)
    lse_lo = torch.zeros_like(softmax_lse) if features.attn_bias is not None else softmax_lse.new_empty(0)
    tensors: Any = (*(_batched(x) for x in (q, k, v, out)), _per_row(softmax_lse))
    others = []
    for part in parts:
        if not (plain and torch_cpu_operator.forward(part, options, scales, *tensors)):
            others.append(part)
        elif sink is not None:
            _add_sink_(sink, part, *tensors[3:])
    tops, los = (_per_row(x) if x.numel() else None for x in (row_max, lse_lo))
    divide = aligned_groups if invariant else groups
    for group in divide(tensors[0], tensors[1], others, without_keys=sink is not None):
        _forward(group, options, features, scales, tops, los, *tensors)
    if descale is not None:
        factors = descale.repeat_interleave(q.shape[-2] // max(1, k.shape[-2]), 1)
        for part in parts:
            part.rows(tensors[3]).mul_(factors[part.entries, None, :, None])
    return out.to(dtype), softmax_lse, row_max, lse_lo


def _forward(
    group: Group,
    options: Options,
    features: Features,
    scales: Tensor | None,
    row_max: Tensor | None,
    lse_lo: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> None:
    scores = Scores(options, features, group, q)
    dtype = _accumulator(q)
    scale = options.softmax_scale if scales is None else group.per_key_head(scales)
    sinks = None if features.learnable_sink is None else group.per_head(features.learnable_sink.to(dtype))
    k, v = group.load_keys(k, dtype), group.load_keys(v, dtype)
    finite = _all_finite(v)
    for rows in group.row_blocks():
        q_rows = group.load_rows(q, rows, dtype) * scale
        o = q_rows.new_zeros(*q_rows.shape[:-1], v.shape[-1])
        top = o.new_full((*o.shape[:-1], 1), -math.inf)
        total = torch.zeros_like(top)
        for cols in group.col_blocks(scores.keys(rows)):
            s, _ = scores.compute(q_rows, _at(k, cols), rows, cols)
            scores.hide_(s, rows, cols, -math.inf)
            above, top = top, torch.maximum(top, s.amax(-1, keepdim=True))
            shift = top.masked_fill(top == -math.inf, 0)  # 0 for a row without keys so far, because -inf - -inf is nan
            p = s.sub_(shift).exp_()
            shrink = above.sub_(shift).exp_()
            total.mul_(shrink).add_(p.sum(-1, keepdim=True))
            keep = scores.keep(rows, cols, dtype)
            _add_product_(o.mul_(shrink), p if keep is None else p.mul_(keep), _at(v, cols), finite)
        if row_max is not None:
            group.store_rows(row_max, rows, top)
        unseen = ~(total > 0)  # also a row with a score that is NaN, as in kernels
        top, total = top.masked_fill(unseen, -math.inf), total.masked_fill(unseen, 0)
        if sinks is not None:
            top, total = _add_sinks_(o, top, total, sinks[..., None].expand(-1, -1, len(rows)).flatten(1)[..., None])
        empty = total == 0
        lse = (top + total.log()).masked_fill_(empty, math.inf)
        o.div_(total.masked_fill(empty, 1)).add_(0.0)  # no -0, which a block that a row sees nothing of might turn to 0
        group.store_rows(softmax_lse, rows, lse)
        group.store_rows(out, rows, o)
        if lse_lo is not None:
            group.store_rows(lse_lo, rows, (top - lse).add_(total.log()).masked_fill_(lse.isinf(), 0))


def _add_sinks_(o: Tensor, top: Tensor, total: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the sink of each row as one more key of value 0. Returns the row's maximum, and its sum relative to that.

    o: relative to `top`, changed to be relative to the new maximum. A sink of +inf leaves the keys no weight.
    """
    above = torch.maximum(top, sinks)
    shift = above.masked_fill(above.isinf(), 0)
    shrink = (top - shift).exp_().masked_fill_(above == math.inf, 0)
    o.mul_(shrink)
    return above, (total * shrink).add_((sinks - shift).exp_())


def _add_sink_(sink: Tensor, part: batch_layout.Part, out: Tensor, softmax_lse: Tensor) -> None:
    """Add the sink to results of a part, (batch, seqlen_q, heads, head_dim or 1)."""
    lse, share = _with_sink(part.rows(softmax_lse), sink.to(softmax_lse.dtype)[:, None])
    part.rows(softmax_lse).copy_(lse)
    part.rows(out).mul_(share)


def _with_sink(lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Returns lse with the sink as one more key, and the share of a row's weight that its other keys keep.

    An lse of +inf stands for a row without other keys: its lse becomes the sink.
    """
    own = lse.masked_fill(lse == math.inf, -math.inf)
    both = torch.logaddexp(own, sink)
    return both.masked_fill(both == -math.inf, math.inf), (own - both).exp().masked_fill(own == -math.inf, 0)


def _backward(
    group: Group,
    options: Options,
    features: Features,
    dbias: Tensor | None,
    lse_lo: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    softmax_lse: Tensor,
    dlse: Tensor | None,
    delta: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    scores = Scores(options, features, group, q)
    dtype = _accumulator(q)
    k, v = group.load_keys(k, dtype), group.load_keys(v, dtype)
    dk_sum, dv_sum = torch.zeros_like(k), torch.zeros_like(v)
    finite_keys = _all_finite(k) and _all_finite(v)
    for rows in group.row_blocks():
        q_rows = group.load_rows(q, rows, dtype) * options.softmax_scale
        dout_rows, lse = group.load_rows(dout, rows, dtype), group.load_rows(softmax_lse, rows, dtype)
        shift = (dout_rows * group.load_rows(out, rows, dtype)).sum(-1, keepdim=True)
        if dlse is not None:
            shift -= group.load_rows(dlse, rows, dtype)
        shift.masked_fill_(lse == math.inf, 0)
        lo = None if lse_lo is None else group.load_rows(lse_lo, rows, dtype)
        group.store_rows(delta, rows, shift)
        finite = finite_keys and _all_finite(q_rows) and _all_finite(dout_rows)
        dq_rows = torch.zeros_like(q_rows)
        for cols in group.col_blocks(scores.keys(rows)):
            k_cols, v_cols = _at(k, cols), _at(v, cols)
            s, slope = scores.compute(q_rows, k_cols, rows, cols)
            # Rounding may push a score with a large bias beyond lse, and its weight far beyond 1.
            p = (s.sub_(lse) if lo is None else s.sub_(lse).sub_(lo).clamp_(max=0)).exp_()
            scores.hide_(p, rows, cols, 0)
            keep = scores.keep(rows, cols, dtype)
            ds = torch.bmm(dout_rows, v_cols.mT)
            _add_product_(_at(dv_sum, cols), (p if keep is None else p * keep).mT, dout_rows, finite)
            ds = (ds if keep is None else ds.mul_(keep)).sub_(shift).mul_(p)
            if not finite:
                ds.masked_fill_(p == 0, 0)
            if dbias is not None:
                scores.add_bias_gradient_(dbias, ds, rows, cols)
            if slope is not None:
                ds.mul_(slope)
            _add_product_(_at(dk_sum, cols), ds.mT, q_rows, finite)
            _add_product_(dq_rows, ds, k_cols, finite)
        group.store_rows(dq, rows, dq_rows.mul_(options.softmax_scale))
    group.store_keys(dk, dk_sum)
    group.store_keys(dv, dv_sum)


def block_size_n(head_dim: int, is_dropout: bool) -> int:
    """Returns the width of the key blocks at which the running maximum of `S_dmask` advances."""
    if head_dim <= 32:
        return 128
    if head_dim <= 64:
        return 64 if is_dropout else 128
    return 32 if 96 < head_dim <= 128 and is_dropout else 64


def _softmax_dropped(q: Tensor, k: Tensor, parts: list[batch_layout.Part], options: Options, s_dmask: Tensor) -> None:
    """Fill s_dmask, as far as it reaches, with exp(s(i, j) - m(i, j)), negative where dropout drops the element.

    Here m(i, j) is the largest score of row i in the key block of `block_size_n` columns that holds j and in all
    blocks to its right: the running maximum of a kernel that visits its keys from the last to the first. Elements that
    a row does not see are zero, and so is padding.
    """
    width, dtype = block_size_n(q.shape[-1], options.dropout_p > 0), _accumulator(q)
    for group in groups(q, k, parts):
        scores = Scores(options, _NO_FEATURES, group, q)
        keys, cols = group.load_keys(k, dtype), range(group.part.seqlen_k)
        by_pair = s_dmask[group.part.entries].unflatten(1, (group.heads_k, -1))[:, group.heads]
        for rows in group.row_blocks():
            q_rows = group.load_rows(q, rows, dtype) * options.softmax_scale
            s, _ = scores.compute(q_rows, keys, rows, cols)
            scores.hide_(s, rows, cols, -math.inf)
            u = _relative_to_running_max(s, width)
            keep = scores.keep(rows, cols, dtype)
            u = u if keep is None else torch.where(keep > 0, u, -u)
            target = by_pair[..., rows.start : rows.stop, : len(cols)]
            u = u.view(*by_pair.shape[:3], len(rows), len(cols))
            target.copy_(u[..., : target.shape[-2], : target.shape[-1]])  # max_seqlen_* may be smaller


def _relative_to_running_max(s: Tensor, width: int) -> Tensor:
    """Returns exp(s - m), where m is the maximum over the column block of an element and all blocks to its right."""
    cols = s.shape[-1]
    blocks = F.pad(s, (0, -cols % width), value=-math.inf).unflatten(-1, (-1, width))
    top = blocks.amax(-1, keepdim=True).flip(-2).cummax(-2).values.flip(-2)
    return blocks.sub_(top.masked_fill_(top == -math.inf, 0)).exp_().flatten(-2)[..., :cols]


def _spread(delta: Tensor, parts: list[batch_layout.Part], packed: bool) -> Tensor:
    """Returns delta with the rows of each entry at the start of whole blocks of 128, as `bwd` returns it."""
    if not packed:
        return F.pad(delta, (0, -delta.shape[-1] % 128))
    spread = delta.new_zeros(delta.shape[0], delta.shape[1] + 128 * len(parts))
    for part in parts:
        rows, shift = part.q[1], 128 * part.entries.start
        spread[:, rows.start + shift : rows.stop + shift] = delta[:, rows]
    return spread


def _add_product_(out: Tensor, a: Tensor, b: Tensor, finite: bool) -> Tensor:
    """Add a @ b to out. If not all values are finite, 0 in `a` times inf or nan in `b` counts as 0."""
    if finite:
        return out.add_(torch.bmm(a, b))
    out.add_(torch.bmm(a, b.where(b.isfinite(), 0)))
    positive, negative = (a > 0).to(a.dtype), (a < 0).to(a.dtype)
    plus, minus, undefined = (b == math.inf).to(b.dtype), (b == -math.inf).to(b.dtype), b.isnan().to(b.dtype)
    for value, hits in (
        (math.inf, torch.bmm(positive, plus) + torch.bmm(negative, minus)),
        (-math.inf, torch.bmm(positive, minus) + torch.bmm(negative, plus)),
        (math.nan, torch.bmm(positive + negative, undefined)),
    ):
        out.add_(torch.where(hits > 0, value, 0.0))
    return out


def _all_finite(x: Tensor) -> bool:
    return x.numel() == 0 or bool(torch.stack(torch.aminmax(x)).isfinite().all())


def _accumulator(x: Tensor) -> torch.dtype:
    """Returns the dtype in which scores are computed and sums are kept."""
    return torch.promote_types(x.dtype, torch.float32)


def _at(x: Tensor, span: range) -> Tensor:
    return x[:, span.start : span.stop]


def _batched(x: Tensor) -> Tensor:
    """Returns x with a leading batch dimension: packed tokens are one batch row."""
    return x if x.dim() == 4 else x[None]


def _per_row(x: Tensor) -> Tensor:
    """Returns x (batch, heads, seqlen_q), or packed (heads, total_q), as a view (batch, seqlen_q, heads, 1)."""
    return (x if x.dim() == 3 else x[None]).transpose(1, 2)[..., None]


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
