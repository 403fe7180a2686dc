"""Decoding over a cache whose positions are divided among ranks: each attends to its part, and the results are merged.

Position j of the sequence is on rank (j // cp_interleave) % ranks, next to the positions before it that are there:

    owned(x) = x // (P I) * I + min(max(x % (P I) - r I, 0), I)      positions below x on rank r of P, I = cp_interleave

So a rank has owned(n) keys of n, and a row that sees positions [a, b) sees its keys [owned(a), owned(b)).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn import _library
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, collectives, flash_attn
from flash_attn._ops.flash_attn_features import SINK_DTYPES
from flash_attn._ops.lse import merge_parts
from flash_attn._ops.rotary import rotary
from flash_attn.context_parallel._plan import group_of
from flash_attn.flash_attn_interface import flash_attn_with_kvcache


def cp_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    group: Any,
    cp_interleave: int = 1,
    divided_heads: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn.flash_attn_with_kvcache` over a cache whose positions are divided among the ranks of a group.

    All ranks must call it with the same arguments but for their parts of the cache. Position j of a sequence is on rank
    (j // cp_interleave) % ranks, behind the earlier ones that are there. The result has no gradient.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim), the same on all ranks; with divided_heads, this rank's heads.
        k_cache, v_cache: this rank's part, (batch_cache, capacity, heads_k, head_dim) with all key heads; with
            block_table, (num_pages, page_size, heads_k, head_dim).
        k, v: (batch, seqlen_new, heads_k, head_dim), new keys and values, the same on all ranks; each appends those of
            its positions, in place. Not with block_table: write pages before the call.
        rotary_cos, rotary_sin, rotary_interleaved: as in `flash_attn_with_kvcache`, by positions of the sequence.
        cache_seqlens: int, or int32 or int64 (batch,): how many positions of each sequence are filled on all ranks
            together, without k. It must be given.
        cache_batch_idx, block_table, softmax_scale, softcap, num_splits: as in `flash_attn_with_kvcache`, for this
            rank's part of the cache.
        causal, window_size, attention_chunk: as there, by positions of the sequence; causal must be a bool.
        cache_leftpad, alibi_slopes: must be None.
        return_softmax_lse: also return softmax_lse.
        group: a ProcessGroup, or a DeviceMesh of one dimension.
        cp_interleave: how many neighbouring positions are on one rank.
        divided_heads: q and the result are this rank's heads of ranks * heads, as tensor parallelism over the same
            group divides them: queries are gathered, and one exchange brings each rank the parts of its heads.
        learnable_sink: (heads of q,), the score of one more key for each head, whose value is 0; or None.

    Returns:
        out, shaped like q with the head_dim of v_cache; or (out, softmax_lse), float32 (batch, heads, seqlen_q).

    Raises:
        ValueError, TypeError: before anything is written or sent, for arguments that do not fit together.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
        >>> k_cache, v_cache = torch.zeros(2, 64, 2, 16), torch.zeros(2, 64, 2, 16)
        >>> q, k, v = (torch.randn(2, 1, heads, 16) for heads in (4, 2, 2))
        >>> cp_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=10, causal=True, group=dist.group.WORLD).shape
        torch.Size([2, 1, 4, 16])
        >>> dist.destroy_process_group()
    """
    group = group_of(group)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    interleave = checks.count("cp_interleave", cp_interleave, 1)
    checks.flags(causal=causal, divided_heads=divided_heads, return_softmax_lse=return_softmax_lse)
    chunk = checks.count("attention_chunk", attention_chunk)
    left, right = checks.window(window_size)
    _check(q, k_cache, v_cache, k, v, cache_leftpad, alibi_slopes, cache_seqlens, block_table)
    if learnable_sink is not None:
        checks.tensor("learnable_sink", learnable_sink, dtypes=SINK_DTYPES, shape=(q.shape[2],), device=q.device)
    batch, seqlen_q, own_heads, _ = q.shape
    lengths = torch.as_tensor(cache_seqlens, device=q.device).to(torch.int64).expand(batch)
    new = 0 if k is None else k.shape[1]

    def owned(position: Tensor) -> Tensor:
        whole = world_size * interleave
        rest = (position % whole - rank * interleave).clamp(0, interleave)
        return position.div(whole, rounding_mode="floor") * interleave + rest

    _check_room(cache_seqlens, new, k_cache, block_table, world_size, interleave)
    is_bounded = causal or left >= 0 or right >= 0 or chunk > 0
    if rotary_cos is not None or rotary_sin is not None:
        q, k = _rotated(q, k, rotary_cos, rotary_sin, lengths, rotary_interleaved, is_bounded)
    with torch.no_grad():
        if k is not None and v is not None:
            _append(k_cache, v_cache, k, v, lengths, owned, cache_batch_idx, rank, world_size, interleave)
        ranges = None
        if is_bounded and not (seqlen_q == 1 and left < 0 and chunk == 0):
            ranges = _ranges(lengths + new, seqlen_q, left, 0 if causal else right, chunk, owned)
        if divided_heads:
            q = collectives.gather_rows(q.movedim(2, 0), group)[0].movedim(0, 2)
        out, lse = flash_attn_with_kvcache(
            q.contiguous(),
            k_cache,
            v_cache,
            cache_seqlens=owned(lengths + new).int(),
            cache_batch_idx=cache_batch_idx,
            block_table=block_table,
            softmax_scale=softmax_scale,
            softcap=softcap,
            num_splits=num_splits,
            return_softmax_lse=True,
            key_ranges=ranges,
        )
        # One transfer for both: softmax_lse is one more channel.
        part = torch.cat([out.float(), lse.transpose(1, 2)[..., None]], -1).movedim(2, 0).contiguous()
        if divided_heads:
            arrived = torch.empty_like(part)
            dist.all_to_all_single(arrived, part, group=group)
        else:
            arrived = collectives.gather_rows(part, group)[0]
        parts = arrived.unflatten(0, (world_size, own_heads)).unbind()  # of the keys of each rank
        merged, lse, _ = merge_parts(
            [(each[..., :-1].movedim(0, 2), each[..., -1].transpose(0, 1), None) for each in parts], learnable_sink
        )
    merged = merged.to(out.dtype)
    return (merged, lse) if return_softmax_lse else merged


def _check(q, k_cache, v_cache, k, v, cache_leftpad, alibi_slopes, cache_seqlens, block_table):
    checks.alike(("q", "k_cache", "v_cache"), (q, k_cache, v_cache), dtypes=flash_attn.DTYPES)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.ndim(name, x, "(batch, seqlen, heads, head_dim)")
    for name, value in (("cache_leftpad", cache_leftpad), ("alibi_slopes", alibi_slopes)):
        if value is not None:
            raise ArgumentError(f"{name} must be None over a divided cache, found a {type(value).__name__}")
    if cache_seqlens is None:
        raise ArgumentError("cache_seqlens must say how long the sequences on all ranks together are, found None")
    if isinstance(cache_seqlens, Tensor):
        checks.tensor("cache_seqlens", cache_seqlens, dtypes=checks.INTEGER_DTYPES, device=q.device)
        fits = cache_seqlens.dim() == 0 or cache_seqlens.shape == q.shape[:1]
        checks.number("the shape of cache_seqlens", tuple(cache_seqlens.shape), fits, "({},)", q.shape[0])
    else:
        checks.count("cache_seqlens", cache_seqlens)
    if (k is None) != (v is None):
        raise ArgumentError("k and v must be given together, found only one of them")
    if k is None:
        return
    if block_table is not None:
        raise ArgumentError("k must be None with block_table over a divided cache: write its pages before the call")
    checks.alike(("q", "k", "v"), (q, k, v), dtypes=(q.dtype,))
    checks.has_shape("k", k, (q.shape[0], None, *k_cache.shape[2:]))
    checks.has_shape("v", v, (*k.shape[:2], *v_cache.shape[2:]))


def _check_room(cache_seqlens, new, k_cache, block_table, world_size, interleave):
    """Raise on all ranks if one lacks room, before the others wait for it: rank 0 has most positions.

    Lengths on a device are not read, which would wait for it.
    """
    shortest = longest = cache_seqlens
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.numel() == 0 or not _library.can_be_read_at_once(cache_seqlens):
            return
        shortest, longest = map(int, cache_seqlens.aminmax())
    checks.number("cache_seqlens", shortest, shortest >= 0, "at least 0")
    capacity = k_cache.shape[1]
    if isinstance(block_table, Tensor) and block_table.dim() == 2:
        capacity *= block_table.shape[1]
    whole, rest = divmod(longest + new, world_size * interleave)
    found = whole * interleave + min(rest, interleave)
    name = f"rank 0's part of cache_seqlens + seqlen_new = {longest + new} positions"
    checks.number(name, found, found <= capacity, "at most the capacity of its cache, {}", capacity)


def _rotated(q, k, cos, sin, lengths, interleaved, advances):
    """q and k, rotated by their positions; all queries by that of the first new key unless they advance."""
    if cos is None or sin is None or k is None:
        raise ArgumentError("rotary_cos must be given with rotary_sin and k, found only some of them")
    start = lengths.int().contiguous()
    checks.flags(rotary_interleaved=interleaved)
    options = cos, sin, start, 0, None, bool(interleaved), False
    if advances:
        return rotary(q, *options), rotary(k, *options)
    together = q.flatten(1, 2)[:, None]  # all as heads of one token
    return rotary(together, *options)[:, 0].unflatten(1, q.shape[1:3]), rotary(k, *options)


def _append(k_cache, v_cache, k, v, lengths, owned, rows, rank, world_size, interleave):
    """Write the new keys and values of this rank behind those that it has."""
    batch, new = k.shape[:2]
    capacity = k_cache.shape[1]
    most = min(new, -(-new // (world_size * interleave)) * interleave + interleave, capacity)
    slots = owned(lengths)[:, None] + torch.arange(most, device=k.device)
    whole, rest = slots // interleave, slots % interleave
    token = whole * (world_size * interleave) + rank * interleave + rest - lengths[:, None]
    is_new = (token < new) & (slots < capacity)  # a full cache, known on the device alone, keeps what it has
    # Slots that stay as they are get what they hold, each a place of its own: nothing waits for how many these are.
    slots = slots % capacity
    entries = torch.arange(batch, device=k.device)[:, None]
    rows = entries if rows is None else rows.to(torch.int64)[:, None]
    for cache, values in ((k_cache, k), (v_cache, v)):
        held = cache[rows, slots]
        cache[rows, slots] = torch.where(is_new[..., None, None], values[entries, token.clamp(max=new - 1)], held)


def _ranges(lengths, seqlen_q, left, right, chunk, owned):
    """The keys of this rank that each row sees, int32 (batch, 1, seqlen_q, 2). The last row is at the last position."""
    position = lengths[:, None] - seqlen_q + torch.arange(seqlen_q, device=lengths.device)
    first, end = torch.zeros_like(position), lengths[:, None].expand_as(position)
    if left >= 0:
        first = first.maximum(position - left)
    if right >= 0:
        end = end.minimum(position + right + 1)
    if chunk:
        begin = position.div(chunk, rounding_mode="floor") * chunk
        first, end = first.maximum(begin), end.minimum(begin + chunk)
    end = end.clamp(min=0)
    return torch.stack([owned(first.minimum(end)), owned(end)], -1).int()[:, None]
