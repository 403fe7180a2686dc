"""Attention ops: forward, backward and decoding from a key-value cache.

`forward`, `backward` and `decode` check their arguments and make one call into the dispatcher. Dense and
variable-length batches are the same op, told apart by `cu_seqlens_q`. Queries, keys and values may be separate
tensors, or packed: with `v=None`, `k` holds keys and values, (..., 2, heads_k, head_dim); with `k=None` too, `q` holds
all three, (..., 3, heads, head_dim). Gradients then are packed in the same way. The ops take packed tensors as they
are, since a graph in which an op writes to several views of one tensor is compiled wrongly when its shapes are dynamic
(torch 2.13).
"""

import torch

from flash_attn import _library
from flash_attn._ops import autograd, checks, rng
from flash_attn._reference import flash_attn as reference

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float32)
MAX_HEAD_DIM = 256
MAX_SPLITS = 128
block_size_n = reference.block_size_n
define_composite = _library.define_composite
S_DMASK_MULTIPLE = 128


def forward(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    alibi_slopes,
    deterministic=False,
    return_softmax=False,
    seqused_k=None,
    leftpad_k=None,
    block_table=None,
):
    """Attention. Returns (out, softmax_lse, S_dmask, rng_state).

    The last two are None where no S_dmask and no dropout was asked for; without dropout, S_dmask is empty.

    Shapes, dtypes and meaning are those of `flash_attn.flash_attn_func` and `flash_attn.flash_attn_varlen_func`;
    seqused_k and leftpad_k, int32 (batch,), say how many keys of an entry are used and how many of these to skip.
    """
    _check_dropout(dropout_p)
    checks.flags(causal=causal, deterministic=deterministic, return_attn_probs=return_softmax)
    queries, keys, values = unpack(q, k, v)
    names = _argument_names(k, v)
    batch = _check_qkv(names, queries, keys, values, cu_seqlens_q, cu_seqlens_k, block_table)
    scale = _check_scores(queries, batch, softmax_scale, softcap, alibi_slopes)
    args = q, k, v, scale, window_left, 0 if causal else window_right
    s_dmask = rng_state = None
    dense = cu_seqlens_q is alibi_slopes is seqused_k is leftpad_k is block_table is None
    if dense and dropout_p == 0 and softcap == 0 and not deterministic:
        out, softmax_lse = fwd(*args)  # arguments that are not given take no time
    else:
        _check_per_entry(queries, batch, seqused_k=seqused_k, leftpad_k=leftpad_k)
        drops = dropout_p > 0
        bound_needed = return_softmax and drops and cu_seqlens_q is not None
        of_q, of_k = _suffixes(names)
        bound_q = _check_bound("max_seqlen" + of_q, max_seqlen_q, needed=bound_needed)
        bound_k = _check_bound("max_seqlen" + of_k, max_seqlen_k, needed=bound_needed)
        rng_state = rng.draw_state(q.device) if drops else None
        args += (
            float(softcap), bool(deterministic), cu_seqlens_q, cu_seqlens_k, bound_q, bound_k, alibi_slopes, seqused_k,
            leftpad_k, rng_state, float(dropout_p), block_table,
        )  # fmt: skip
        out, softmax_lse = fwd(*args)
        if return_softmax and drops:
            with torch.no_grad():
                s_dmask = probabilities(*args)
    if return_softmax and s_dmask is None:
        s_dmask = q.new_empty(0)
    return out, softmax_lse, s_dmask, rng_state


def backward(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    alibi_slopes,
    deterministic=False,
    rng_state=None,
):
    """Gradients of `forward`, written into dq, dk and dv. Returns softmax_d, the row sums of dout * out in float32.

    Its shape is (batch, heads, seqlen_q rounded up to 128), or packed (heads, total_q + 128 batch), where the rows of
    entry b start at cu_seqlens_q[b] + 128 b.

    softmax_lse is used as it is given: a caller that merged several blocks of keys passes the merged one.
    """
    _check_dropout(dropout_p)
    checks.flags(causal=causal, deterministic=deterministic)
    batch = _check_qkv(("q", "k", "v"), q, k, v, cu_seqlens_q, cu_seqlens_k, None)
    scale = _check_scores(q, batch, softmax_scale, softcap, alibi_slopes)
    for name, value, like in (("dout", dout, q), ("out", out, q), ("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        checks.tensor(name, value, dtypes=(q.dtype,), shape=tuple(like.shape), device=q.device)
    checks.own_memory(dq=dq, dk=dk, dv=dv)
    lse_shape = _lse_shape(q, cu_seqlens_q)
    checks.tensor("softmax_lse", softmax_lse, dtypes=(torch.float32,), shape=lse_shape, device=q.device)
    if dropout_p > 0:
        if rng_state is None:
            raise ValueError("rng_state must be what the forward returned when dropout_p > 0, found None")
        checks.tensor("rng_state", rng_state, dtypes=(torch.int64,), shape=(2,), device=q.device)
    return bwd(
        dout, q, k, v, out, softmax_lse, None, dq, dk, dv,
        scale, window_left, 0 if causal else window_right, float(softcap), bool(deterministic),
        cu_seqlens_q, cu_seqlens_k,
        _check_bound("max_seqlen_q", max_seqlen_q), _check_bound("max_seqlen_k", max_seqlen_k),
        alibi_slopes, None, None, rng_state, float(dropout_p),
    )  # fmt: skip


def decode(
    q,
    k_cache,
    v_cache,
    k,
    v,
    rotary_cos,
    rotary_sin,
    cache_seqlens,
    cache_batch_idx,
    cache_leftpad,
    block_table,
    softmax_scale,
    causal,
    window_left,
    window_right,
    softcap,
    rotary_interleaved,
    alibi_slopes,
    num_splits,
):
    """Attention of new queries over a cache, appending k and v to it first. Returns (out, softmax_lse).

    Shapes, dtypes and meaning are those of `flash_attn.flash_attn_with_kvcache`.
    """
    checks.flags(causal=causal, rotary_interleaved=rotary_interleaved)
    capacity = _check_cache(q, k_cache, v_cache, cache_batch_idx, block_table)
    batch = q.shape[0]
    scale = _check_scores(q, batch, softmax_scale, softcap, alibi_slopes)
    lengths, length = _check_cache_seqlens(q, cache_seqlens, capacity)
    if cache_batch_idx is not None or cache_leftpad is not None:
        _check_per_entry(q, batch, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    _check_appended(q, k_cache, v_cache, k, v, cache_seqlens, capacity, length)
    rotary_cos, rotary_sin = _check_rotary(q, k, rotary_cos, rotary_sin, capacity)
    checks.integer("num_splits", num_splits)
    if num_splits > MAX_SPLITS:
        checks.number("num_splits", num_splits, False, "at most {}", MAX_SPLITS)
    args = q, k_cache, v_cache, scale, window_left, 0 if causal else window_right, float(softcap), num_splits, lengths
    if length is k is cache_batch_idx is cache_leftpad is alibi_slopes is None:
        return fwd_kvcache(*args, block_table)  # arguments that are not given take no time
    return fwd_kvcache(
        *args, block_table, length, k, v, rotary_cos, rotary_sin, bool(rotary_interleaved), cache_batch_idx,
        cache_leftpad, alibi_slopes,
    )  # fmt: skip


def with_tensors(results):
    """The results of `forward`, with an empty tensor for no S_dmask, and zeros for no rng_state."""
    out, softmax_lse, s_dmask, rng_state = results
    if s_dmask is None:
        s_dmask = out.new_empty(0)
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, softmax_lse, s_dmask, rng_state


def unpack(q, k, v):
    """Views (q, k, v) of separate or packed tensors; see the top of this file."""
    if v is not None:
        return q, k, v
    if k is not None:
        return (q, *k.unbind(-3))
    return q.unbind(-3)


# ---------------------------------------------------------------------------------------------------------------------
# Argument checks


def _argument_names(k, v):
    """Which arguments queries, keys and values came in; packed ones share one."""
    if v is not None:
        return "q", "k", "v"
    return ("qkv", "qkv", "qkv") if k is None else ("q", "kv", "kv")


def _suffixes(names):
    """What the names of lengths end in, of queries and of keys that came in as `names`; packed ones share theirs."""
    return ("", "") if names[1] == "qkv" else ("_q", "_k")


def _check_dropout(dropout_p):
    checks.real("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        checks.number("dropout_p", dropout_p, False, "at least 0 and less than 1")


def _check_qkv(names, q, k, v, cu_seqlens_q, cu_seqlens_k, block_table):
    """Check q, k, v, named `names`, and what tells their entries apart; return the batch size."""
    checks.alike(names, (q, k, v), dtypes=DTYPES)
    varlen, paged = cu_seqlens_q is not None, block_table is not None
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    dims = 3 if varlen else 4
    if len(shape_q) != dims or not len(shape_k) == len(shape_v) == (4 if paged else dims):
        layout = "(tokens, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
        layout_k = "(num_pages, page_size, heads_k, head_dim)" if paged else layout
        for name, x, expected in zip(names, (q, k, v), (layout, layout_k, layout_k), strict=True):
            checks.ndim(name, x, expected)
    if varlen:
        of_q, of_k = _suffixes(names)
        batch = _check_cu_seqlens("cu_seqlens" + of_q, cu_seqlens_q, q.device, None)
        _check_cu_seqlens("cu_seqlens" + of_k, cu_seqlens_k, q.device, batch)
    else:
        batch = shape_q[0]
    if paged:
        _check_block_table(block_table, batch, q.device)
    _check_sizes(names[1], shape_q[-2], shape_q[-1], shape_k[-2], shape_k[-1])
    if paged:
        checks.number("page_size", shape_k[1], shape_k[1] >= 1, "at least 1")
    elif not varlen and shape_k[0] != batch:
        checks.number(names[1] + "'s batch size", shape_k[0], False, "q's, {}", batch)
    if shape_v != shape_k:
        checks.has_shape(names[2], v, shape_k)
    return batch


def _check_sizes(name_k, heads, head_dim, heads_k, head_dim_k):
    """Check what q's heads and head_dim may be, and those of keys called `name_k` beside them."""
    divides = heads == heads_k or (heads_k > 0 and heads % heads_k == 0)
    if divides and 1 <= head_dim <= MAX_HEAD_DIM and head_dim_k == head_dim:
        return
    checks.number("head_dim", head_dim, 1 <= head_dim <= MAX_HEAD_DIM, "between 1 and {}", MAX_HEAD_DIM)
    checks.number(name_k + "'s head_dim", head_dim_k, head_dim_k == head_dim, "q's, {}", head_dim)
    checks.number(name_k + "'s number of heads", heads_k, divides, "a divisor of q's, {}", heads)


def _check_cu_seqlens(name, cu_seqlens, device, batch):
    shape = (None,) if batch is None else (batch + 1,)
    checks.tensor(name, cu_seqlens, dtypes=(torch.int32,), device=device)
    checks.ndim(name, cu_seqlens, "(batch + 1)")
    entries = cu_seqlens.shape[0] - 1
    if entries < 0:
        checks.number(name + "'s length", entries + 1, False, "at least 1: batch + 1 entries that start at 0")
    checks.has_shape(name, cu_seqlens, shape)
    _check_contiguous(name, cu_seqlens)
    return entries


def _check_contiguous(name, value):
    if not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, found strides {value.stride()} for shape {tuple(value.shape)}")


def _check_block_table(block_table, batch, device):
    checks.tensor("block_table", block_table, dtypes=(torch.int32,), shape=(batch, None), device=device)


def _check_scores(q, batch, softmax_scale, softcap, alibi_slopes):
    """Check what changes scores; return the scale to use."""
    checks.real("softcap", softcap)
    if alibi_slopes is not None:
        heads = q.shape[-2]
        checks.tensor("alibi_slopes", alibi_slopes, dtypes=(torch.float32,), device=q.device)
        if alibi_slopes.shape not in ((heads,), (batch, heads)):
            expected = f"({heads},) or ({batch}, {heads})"
            raise ValueError(f"alibi_slopes must have shape {expected}, found {tuple(alibi_slopes.shape)}")
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes must not require grad, found requires_grad=True: slopes have no gradient here"
            )
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    checks.real("softmax_scale", softmax_scale)
    checks.number("softmax_scale", softmax_scale, softmax_scale >= 0, "at least 0")
    return float(softmax_scale)


def _check_per_entry(q, batch, **lengths):
    for name, value in lengths.items():
        if value is not None:
            checks.tensor(name, value, dtypes=(torch.int32,), shape=(batch,), device=q.device)
            _check_contiguous(name, value)


def _check_bound(name, bound, needed=False):
    """max_seqlen_* as an int. A 0-d tensor counts as unknown, so that it is not read, unless a shape depends on it."""
    if isinstance(bound, torch.Tensor):
        if bound.dim() != 0 or bound.dtype not in checks.INTEGER_DTYPES:
            raise TypeError(f"{name} must be an int or a 0-d integer tensor, found {bound.dtype} {tuple(bound.shape)}")
        return int(bound) if needed else None
    if bound is None:
        if needed:
            raise ValueError(f"{name} must be given for return_attn_probs, whose shape it sets; found None")
        return None
    checks.integer(name, bound, "an integer or a 0-d integer tensor")
    if not torch.compiler.is_compiling():  # a bound may come from data, which a graph cannot ask
        checks.number(name, bound, bound >= 0, "at least 0")
    return bound


def _check_cache(q, k_cache, v_cache, cache_batch_idx, block_table):
    """Check queries and caches; return how many positions an entry of the cache has."""
    checks.alike(("q", "k_cache", "v_cache"), (q, k_cache, v_cache), dtypes=DTYPES)
    shape_q, shape_k = q.shape, k_cache.shape
    if len(shape_q) != 4 or len(shape_k) != 4 or v_cache.shape != shape_k:
        checks.ndim("q", q, "(batch, seqlen_q, heads, head_dim)")
        layout = "(batch_cache or num_pages, capacity or page_size, heads_k, head_dim)"
        checks.ndim("k_cache", k_cache, layout)
        checks.ndim("v_cache", v_cache, layout)
        checks.has_shape("v_cache", v_cache, shape_k)
    batch, _, heads, head_dim = shape_q
    rows, length, heads_k, head_dim_k = shape_k
    _check_sizes("k_cache", heads, head_dim, heads_k, head_dim_k)
    _check_contiguous_rows("k_cache", k_cache)
    _check_contiguous_rows("v_cache", v_cache)
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None with block_table, which already says where an entry's keys are"
            )
        _check_block_table(block_table, batch, q.device)
        checks.number("page_size", length, length >= 1, "at least 1")
        return block_table.shape[1] * length
    if cache_batch_idx is None and rows != batch:
        raise ValueError(
            f"k_cache must have q's batch size {batch} without cache_batch_idx or block_table, found {rows}"
        )
    return length


def _check_contiguous_rows(name, cache):
    if cache.stride(-1) != 1 and cache.shape[-1] > 1:
        raise ValueError(f"{name} must have a contiguous last dimension, found strides {cache.stride()}")


def _check_cache_seqlens(q, cache_seqlens, capacity):
    """cache_seqlens as (int32 tensor, None) or (None, int): no tensor is made of an int."""
    if cache_seqlens is None:
        return None, None
    if isinstance(cache_seqlens, torch.Tensor):
        if cache_seqlens.dim() == 0:
            cache_seqlens = cache_seqlens.expand(q.shape[0]).contiguous()
        dtypes = checks.INTEGER_DTYPES
        checks.tensor("cache_seqlens", cache_seqlens, dtypes=dtypes, shape=(q.shape[0],), device=q.device)
        _check_contiguous("cache_seqlens", cache_seqlens)
        if cache_seqlens.dtype == torch.int64:
            cache_seqlens = cache_seqlens.clamp(-1, 2**31 - 1).int()  # what does not fit stays out of range
        return cache_seqlens, None
    checks.integer("cache_seqlens", cache_seqlens, "an integer or an integer tensor (batch,)")
    within = 0 <= cache_seqlens <= capacity
    checks.number("cache_seqlens", cache_seqlens, within, "between 0 and the cache's capacity {}", capacity)
    return None, cache_seqlens


def _check_appended(q, k_cache, v_cache, k, v, cache_seqlens, capacity, length):
    if (k is None) != (v is None):
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ValueError(f"{missing} must be given together with {given}, found None")
    if k is None:
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens must say where k and v are appended, found None")
    checks.own_memory(k_cache=k_cache, v_cache=v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require grad where it is written, found requires_grad=True")
    shape = (q.shape[0], None, *k_cache.shape[2:])
    checks.tensor("k", k, dtypes=(q.dtype,), shape=shape, device=q.device)
    checks.tensor("v", v, dtypes=(q.dtype,), shape=tuple(k.shape), device=q.device)
    end = k.shape[1] + (length or 0)
    if end > capacity:
        found = f"cache_seqlens {length or 0} + {k.shape[1]} new positions"
        raise ValueError(f"k must fit into the cache (block_table or k_cache) of {capacity} positions, found {found}")


def _check_rotary(q, k, cos, sin, capacity):
    """Check the tables of a rotation; return those to use, in at most float32."""
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        missing, given = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        raise ValueError(f"{missing} must be given together with {given}, found None")
    if k is None:
        raise ValueError("k must be given with rotary_cos: rotary positions are those of appended keys; found None")
    checks.tensor("rotary_cos", cos, dtypes=(*DTYPES, torch.float64), device=q.device)
    checks.ndim("rotary_cos", cos, "(seqlen_rotary, rotary_dim / 2)")
    checks.tensor("rotary_sin", sin, dtypes=(cos.dtype,), shape=tuple(cos.shape), device=q.device)
    rotary_dim = 2 * cos.shape[1]
    fits = rotary_dim % 16 == 0 and rotary_dim <= q.shape[-1]
    expected = "a multiple of 16 that is at most head_dim {}"
    checks.number("rotary_dim (twice rotary_cos's last size)", rotary_dim, fits, expected, q.shape[-1])
    if cos.shape[0] < capacity:
        raise ValueError(f"rotary_cos must cover the cache's {capacity} positions, found {cos.shape[0]}")
    _check_contiguous("rotary_cos", cos)
    _check_contiguous("rotary_sin", sin)
    return (cos.float(), sin.float()) if cos.dtype == torch.float64 else (cos, sin)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of results, and the ops


def _round_up(size, multiple=S_DMASK_MULTIPLE):
    return (size + multiple - 1) // multiple * multiple


def _lse_shape(q, cu_seqlens_q):
    if cu_seqlens_q is not None:
        return q.shape[1], q.shape[0]  # (heads, total_q)
    return q.shape[0], q.shape[2], q.shape[1]  # (batch, heads, seqlen_q)


def _fwd_fake(q, k, v, scale, left, right, softcap=0.0, deterministic=False, cu_seqlens_q=None, *args):
    order = torch.preserve_format if k is not None else torch.contiguous_format  # as in csrc/binding/flash_attn.cpp
    q, _, _ = unpack(q, k, v)
    return torch.empty_like(q, memory_format=order), q.new_empty(_lse_shape(q, cu_seqlens_q), dtype=torch.float32)


def _probabilities_fake(
    q, k, v, scale, left, right, softcap=0.0, deterministic=False,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, *args,
):  # fmt: skip
    q, k, _ = unpack(q, k, v)
    if cu_seqlens_q is None:
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = k.shape[1]
    else:
        batch, heads, seqlen_q, seqlen_k = cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k
    return q.new_empty(batch, heads, _round_up(seqlen_q), _round_up(seqlen_k))


def _bwd_fake(
    dout, q, k, v, out, lse, dlse, dq, dk, dv, scale, left, right, softcap=0.0, deterministic=False, cu_seqlens_q=None,
    *args,
):  # fmt: skip
    q, _, _ = unpack(q, k, v)
    if cu_seqlens_q is not None:
        total_q, heads, _ = q.shape
        shape = (heads, total_q + S_DMASK_MULTIPLE * (cu_seqlens_q.shape[0] - 1))
    else:
        shape = (q.shape[0], q.shape[2], _round_up(q.shape[1]))
    return q.new_empty(shape, dtype=torch.float32)


def _fwd_kvcache_fake(q, *args):
    return torch.empty_like(q), q.new_empty(_lse_shape(q, None), dtype=torch.float32)


def _fwd_reference(q, k, v, *args):
    out, softmax_lse = reference.fwd(*unpack(q, k, v), *args)
    return out if k is not None else out.contiguous(), softmax_lse


def _probabilities_reference(q, k, v, *args):
    return reference.probabilities(*unpack(q, k, v), *args)


def _bwd_reference(dout, q, k, v, out, softmax_lse, dlse, dq, dk, dv, *args):
    return reference.bwd(dout, *unpack(q, k, v), out, softmax_lse, dlse, *unpack(dq, dk, dv), *args)


class _Attention(torch.autograd.Function):
    """Gradients of `fwd` for q, k and v, through out and softmax_lse. `rest` holds the op's other arguments."""

    @staticmethod
    def forward(ctx, q, k, v, rest):
        if len(rest) == _NUM_OTHERS:
            *rest, block_table = rest
            if block_table is not None:
                raise ValueError(
                    "block_table must be None when q, k or v require grad, found a tensor: pages have no gradient"
                )
        out, softmax_lse = fwd.below_autograd(q, k, v, *rest)
        tensors = [x if isinstance(x, torch.Tensor) else None for x in rest]
        ctx.save_for_backward(q, k, v, out, softmax_lse, *tensors)
        ctx.others = [x if tensor is None else None for x, tensor in zip(rest, tensors, strict=True)]
        ctx.set_materialize_grads(False)
        return out, softmax_lse

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx, dout, dlse):
        q, k, v, out, softmax_lse, *tensors = ctx.saved_tensors
        rest = [x if tensor is None else tensor for x, tensor in zip(ctx.others, tensors, strict=True)]
        grads = [None if x is None else torch.empty_like(x) for x in (q, k, v)]
        if dout is None:
            dout = torch.zeros_like(out)
        bwd.below_autograd(dout, q, k, v, out, softmax_lse, dlse, *grads, *rest)
        return *grads, None


# What is seldom given comes last and may be left out, for an argument takes 0.2 us of the host (torch 2.13).
_SCORES = "float softmax_scale, int window_left, int window_right, float softcap=0.0, bool deterministic=False"
_ENTRIES = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? alibi_slopes=None, Tensor? seqused_k=None, Tensor? leftpad_k=None, Tensor? rng_state=None, "
    "float dropout_p=0.0"
)
_NUM_OTHERS = 15  # arguments of fwd besides q, k and v

fwd = _library.define(
    f"fwd(Tensor q, Tensor? k, Tensor? v, {_SCORES}, {_ENTRIES}, Tensor? block_table=None) "
    "-> (Tensor out, Tensor softmax_lse)",
    reference=_fwd_reference,
    fake=_fwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
    autograd=_Attention,
    differentiable=3,
)

# S_dmask of fwd with these arguments.
probabilities = _library.define(
    f"probabilities(Tensor q, Tensor? k, Tensor? v, {_SCORES}, {_ENTRIES}, Tensor? block_table=None) -> Tensor",
    reference=_probabilities_reference,
    fake=_probabilities_fake,
    kernel_dtypes=KERNEL_DTYPES,
)

bwd = _library.define(
    "bwd(Tensor dout, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor softmax_lse, Tensor? dlse, Tensor(a!) dq, "
    f"Tensor(b!)? dk, Tensor(c!)? dv, {_SCORES}, {_ENTRIES}) -> Tensor softmax_d",
    reference=_bwd_reference,
    fake=_bwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
)

fwd_kvcache = _library.define(
    "fwd_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, float softmax_scale, int window_left, "
    "int window_right, float softcap, int num_splits, Tensor? cache_seqlens=None, Tensor? block_table=None, "
    "SymInt? cache_seqlen=None, Tensor? k=None, Tensor? v=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "bool rotary_interleaved=True, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None, "
    "Tensor? alibi_slopes=None) -> (Tensor out, Tensor softmax_lse)",
    reference=reference.fwd_kvcache,
    fake=_fwd_kvcache_fake,
    kernel_dtypes=KERNEL_DTYPES,
    writes=lambda args: len(args) > 11 and args[11] is not None,  # k
)
