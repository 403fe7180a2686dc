"""Attention with more features than flash-attn 2.8 has: the checks of their arguments, and the ops that compute them.

The features are the fields of `Features`: a sink, an additive bias, key ranges, chunks, causality and lengths of each
entry, and scales of keys and values in float8; and, seen from the inputs, head dims beyond those of the other ops, and
keys and values in float8. The ops take all of them together, and all options of the ops without features.
`beyond_kernels` says which calls no kernel takes: these run in plain torch on every device, except those that are two
calls of kernels, one for each of two key ranges.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn import _library
from flash_attn._errors import ArgumentError
from flash_attn._ops import autograd, checks, flops, invariance, schema, sharding
from flash_attn._ops.lse import merge_parts
from flash_attn._reference import attention as reference
from flash_attn._reference.attention import differentiable, float8
from flash_attn._reference.attention.options import CacheOptions, Features, Options

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
FLOAT8, LARGEST_FLOAT8 = float8.DTYPE, float8.LARGEST  # of keys and values beside queries of 16 bits
encoded = float8.encoded
SINK_DTYPES = (*KERNEL_DTYPES, torch.float32)
BIAS_DTYPES = (*SINK_DTYPES, torch.float64, torch.bool)
MAX_HEAD_DIM = 576  # of queries and keys, and of values
KERNEL_HEAD_DIM = 512  # the largest that kernels of attention and its gradients take, and ops without features
DMASK_KERNEL_HEAD_DIM = 256  # the largest that kernels of S_dmask take


class FeatureArguments(NamedTuple):
    """The arguments that flash-attn 2.8 does not have, as the caller gave them, unchecked."""

    learnable_sink: Any = None
    attn_bias: Any = None
    key_ranges: Any = None
    attention_chunk: Any = 0
    seqused_q: Any = None
    seqused_k: Any = None
    return_lse: Any = False
    return_max_logit: Any = False
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None

    def any_given(self) -> bool:
        """Whether any of these is not its default. Every call asks, so this is fast, and torch.compile can trace it."""
        sink, bias, ranges, chunk, seqused_q, seqused_k, lse, max_logit, q_descale, k_descale, v_descale = self
        no_tensors = sink is bias is ranges is seqused_q is seqused_k is q_descale is k_descale is v_descale is None
        return not (no_tensors and lse is max_logit is False and type(chunk) is int and chunk == 0)


def checked(
    given: FeatureArguments, causal: object, q: Tensor, k: Tensor, batch: int, max_seqlen_k: Any, varlen: bool
) -> Features:
    """Check the arguments, except seqused_k, and return them as the ops take them.

    causal: only a tensor is checked here. q: as `in_16_bits` returns it. max_seqlen_k: the number of keys of a dense
    batch; for packed tokens, the bound that the caller gave, which is used if it is an int.
    """
    sink, bias, ranges, chunk, seqused_q, _, lse, max_logit, *_ = given
    heads, rows = q.shape[-2], q.shape[-3]
    checks.flags(return_lse=lse, return_max_logit=max_logit)
    invariance.refuse_unkept(return_max_logit=bool(max_logit))
    if sink is not None:
        checks.tensor("learnable_sink", sink, dtypes=SINK_DTYPES, shape=(heads,), device=q.device)
    if bias is not None:
        bias = (
            _packed_bias(bias, q, max_seqlen_k) if varlen else _dense_bias(bias, q, (batch, heads, rows, max_seqlen_k))
        )
    if ranges is not None:
        ranges = _key_ranges(ranges, q, (heads, rows) if varlen else (batch, heads, rows))
    chunk = checks.whole("attention_chunk", chunk)
    checks.number("attention_chunk", chunk, chunk >= 0, "at least 0")
    if seqused_q is not None:
        checks.int32_vector("seqused_q", seqused_q, batch, q.device)
    entries = causal if isinstance(causal, Tensor) else None
    if entries is not None:
        if entries.dim() == 0:
            checks.flag("causal", entries, "a bool or a tensor (batch,)")
        checks.tensor("causal", entries, dtypes=(torch.bool, torch.int32), shape=(batch,), device=q.device)
    k_descale, v_descale = _descales(given, k, batch)
    return Features(sink, bias, ranges, chunk, entries, seqused_q, bool(max_logit), k_descale, v_descale)


def _dense_bias(bias, q, whole):
    """Check a bias of a dense batch; return it in the five dimensions of `Features`."""
    bias = _converted_bias(bias, q)
    shape, batch = tuple(bias.shape), whole[0]
    if len(shape) == 5:
        batch1, batch2 = shape[:2]
        divide = all(size in (1, batch) or (size > 0 and batch % size == 0) for size in (batch1, batch2))
        if (
            not divide
            or (1 not in (batch1, batch2) and batch1 * batch2 != batch)
            or not _broadcasts(shape[2:], whole[1:])
        ):
            raise ArgumentError(
                "attn_bias must broadcast to (batch1, batch2, heads, seqlen_q, seqlen_k), where batch1 * batch2 is the "
                f"batch size, {batch}, and the others are {whole[1:]}, found shape {shape}"
            )
        return bias
    if not 1 <= len(shape) <= 4 or not _broadcasts(shape, whole[4 - len(shape) :]):
        raise ArgumentError(
            f"attn_bias must broadcast to (batch, heads, seqlen_q, seqlen_k) = {whole}, found shape {shape}"
        )
    return bias[(None,) * (4 - len(shape))].unsqueeze(1)


def _packed_bias(bias, q, max_seqlen_k):
    """Check a bias of packed tokens; return it in the five dimensions of `Features`."""
    bias = _converted_bias(bias, q)
    shape, whole = tuple(bias.shape), (q.shape[-2], q.shape[-3])
    if not 1 <= len(shape) <= 3 or not _broadcasts(shape[:-1], whole[3 - len(shape) :]):
        raise ArgumentError(
            "attn_bias must have shape (heads or 1, total_q or 1, at least max_seqlen_k, or 1) with heads, total_q = "
            f"{whole}, found shape {shape}"
        )
    if type(max_seqlen_k) is int and shape[-1] != 1 and shape[-1] < max_seqlen_k:
        raise ArgumentError(f"attn_bias must have 1 key or at least max_seqlen_k, {max_seqlen_k}, found {shape[-1]}")
    return bias[(None,) * (5 - len(shape))]


def _converted_bias(bias, q):
    """Check the dtype of a bias. If it is float16 and q bfloat16, or the reverse, no kernel takes both: use float32."""
    checks.tensor("attn_bias", bias, dtypes=BIAS_DTYPES, device=q.device)
    return bias.float() if bias.dtype in KERNEL_DTYPES and bias.dtype != q.dtype else bias


def _key_ranges(ranges, q, whole):
    """Check key ranges; return them as (batch or 1, heads or 1, rows, 2 or 4)."""
    checks.tensor("key_ranges", ranges, dtypes=(torch.int32,), device=q.device)
    shape = tuple(ranges.shape)
    if not shape or shape[-1] not in (2, 4) or len(shape) != len(whole) + 1 or not _broadcasts(shape[:-1], whole):
        names = "(heads, total_q" if len(whole) == 2 else "(batch, heads, seqlen_q"
        raise ArgumentError(
            f"key_ranges must have {len(whole) + 1} dimensions, {names}, 2 or 4), where {names}) = {whole} and any of "
            f"them may be 1, found shape {shape}"
        )
    ranges = ranges[None] if len(whole) == 2 else ranges
    return ranges.expand(-1, -1, whole[-1], -1)


def disjoint(ranges: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two key ranges of each row (.., 4) as tensors (.., 2) that share no key: if they overlap, one is both."""
    start, end, start2, end2 = ranges.unbind(-1)
    overlap = start.maximum(start2) < end.minimum(end2)
    first = torch.where(overlap, start.minimum(start2), start), torch.where(overlap, end.maximum(end2), end)
    return torch.stack(first, -1), torch.stack((start2, torch.where(overlap, start2, end2)), -1)


def _broadcasts(shape, whole):
    return len(shape) == len(whole) and all(size in (1, full) for size, full in zip(shape, whole, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values in float8


def in_16_bits(q: Tensor, k: Tensor, given: FeatureArguments, *others: Tensor | None) -> Tensor:
    """Returns queries in float8 beside keys in float8 as the ops take them, in 16 bits; other queries as they are.

    others: tensors of the call, or None, that must have the dtype of the queries: the first one decides on it.
    """
    if getattr(k, "dtype", None) is not FLOAT8:
        return q
    if getattr(q, "dtype", None) is not FLOAT8:
        if given.q_descale is not None:
            found = getattr(q, "dtype", type(q).__name__)
            raise ArgumentError(f"q_descale must be None unless q has dtype {FLOAT8}, found one for a q of {found}")
        return q
    dtypes = [x.dtype for x in others if isinstance(x, Tensor) and x.dtype in KERNEL_DTYPES]
    return q.to(dtypes[0] if dtypes else torch.bfloat16)


def _descales(given, k, batch):
    """Check the scales of float8. Returns those of keys, which include that of queries, and of values, for the ops."""
    if k.dtype is not FLOAT8:
        for name in ("q_descale", "k_descale", "v_descale"):
            if getattr(given, name) is not None:
                raise ArgumentError(f"{name} must be None unless keys and values have dtype {FLOAT8}, found {k.dtype}")
        return None, None
    shape = batch, k.shape[-2]
    q_descale = _descale("q_descale", given.q_descale, shape, k.device)
    k_descale = _descale("k_descale", given.k_descale, shape, k.device)
    if q_descale is not None:
        k_descale = q_descale if k_descale is None else q_descale * k_descale
    return k_descale, _descale("v_descale", given.v_descale, shape, k.device)


def _descale(name, descale, shape, device):
    """Returns a scale as float32 (batch, heads_k), expanded, or None for 1."""
    if descale is None:
        return None
    if not isinstance(descale, Tensor):
        descale = checks.as_float(name, descale)
        checks.number(name, descale, descale >= 0, "at least 0")
        return None if descale == 1 else torch.full((), descale, dtype=torch.float32, device=device).expand(shape)
    checks.tensor(name, descale, dtypes=(torch.float32,), device=device)
    if descale.shape != shape:  # engines pass it expanded, for which this is the shorter way
        checks.broadcasts(name, descale, shape)
        descale = descale.expand(shape)
    if descale.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} must not require grad, found requires_grad=True: scales have no gradient here")
    return descale


def check_divisors(given: FeatureArguments) -> None:
    """Check that no scale by which appended keys and values are divided is known to be 0."""
    for name in ("k_descale", "v_descale"):
        descale = getattr(given, name)
        if isinstance(descale, Tensor) and _library.can_be_read_at_once(descale) and descale.numel() > 0:
            descale = descale.min().item()
        if descale is not None and not isinstance(descale, Tensor):
            checks.number(name, descale, descale > 0, "above 0 where k and v are appended, which it divides")


def refuse_gradients_of_float8(k: Tensor) -> None:
    """Raise for keys in float8 where a derivative is wanted."""
    if k.dtype is FLOAT8:
        raise NotImplementedError(
            f"k must not have dtype {FLOAT8} where a gradient or a tangent is wanted: a cache in float8 has none. Call "
            "under torch.no_grad()"
        )


# ---------------------------------------------------------------------------------------------------------------------
# The ops


def unpack(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns views (q, k, v) of separate or packed tensors; see the top of flash_attn.py."""
    if k is None:
        q, k, v = q.unbind(-3)
    elif v is None:
        k, v = k.unbind(-3)
    return q, k, v


def unrounded(out: Tensor, out_lo: Tensor | None) -> Tensor:
    """Returns out + out_lo in fp32, where out_lo is the rounding error of out; out itself if out_lo is None."""
    return out if out_lo is None else out.float() + out_lo


def _split(sink, bias, arguments, kind):
    """Returns the last arguments of an op as `kind` (Options or CacheOptions) and features, and drops what follows."""
    count = len(kind._fields)
    return kind(*arguments[:count]), Features(sink, bias, *arguments[count : count + _NUM_OTHERS])


def _beyond_head_dims(q, v, most):
    head_dim, head_dim_v = q.shape[-1], v.shape[-1]
    return [f"head dims {head_dim} of keys and {head_dim_v} of values"] if max(head_dim, head_dim_v) > most else []


def beyond_kernels(q: Tensor, v: Tensor, options: Options | CacheOptions, features: Features) -> list[str]:
    """Returns what in a call the kernels cannot compute, as a warning names it; empty if they can compute all."""
    _, bias, ranges, _, causal, seqused_q, *_ = features
    causes = []
    if bias is not None and bias.dtype not in (q.dtype, torch.float32, torch.bool):
        causes.append(f"attn_bias of dtype {bias.dtype}")
    if bias is not None and bias.shape[-1] == 1:
        causes.append("attn_bias with one key")
    if ranges is not None and ranges.shape[-1] > 2:
        causes.append("key_ranges with two intervals")
    if seqused_q is not None and (features.learnable_sink is not None or options.alibi_slopes is not None):
        causes.append("seqused_q with " + ("alibi_slopes" if features.learnable_sink is None else "learnable_sink"))
    if causal is not None and isinstance(options, CacheOptions) and options.rotary_cos is not None:
        causes.append("causal as a tensor with rotary_cos")
    return causes + _beyond_head_dims(q, v, KERNEL_HEAD_DIM)


def beyond_dmask_kernels(q: Tensor) -> list[str]:
    """Why the kernels cannot compute S_dmask of these queries, as a warning names it; empty if they can."""
    return _beyond_head_dims(q, q, DMASK_KERNEL_HEAD_DIM)


def _beyond_fwd(args):
    q, _, v, sink, bias, *arguments = args
    return beyond_kernels(q, v, *_split(sink, bias, arguments, Options))


def _beyond_fwd_with_residue(args):
    q, k, v, sink, bias, *arguments = args
    q, _, v = unpack(q, k, v)
    return beyond_kernels(q, v, *_split(sink, bias, arguments, Options))


def _beyond_bwd(args):
    _, q, _, v, _, _, _, _, _, _, sink, bias, *arguments = args
    return beyond_kernels(q, v, *_split(sink, bias, arguments, Options))


def _beyond_kvcache(args):
    q, _, v_cache, sink, bias, *arguments = args
    return beyond_kernels(q, v_cache, *_split(sink, bias, arguments, CacheOptions))


def _beyond_into(kind):
    """The same for the ops that write to tensors of their caller."""

    def beyond(args):
        q, _, v, _, _, _, sink, bias, *arguments = args
        return beyond_kernels(q, v, *_split(sink, bias, arguments, kind))

    return beyond


def out_fake(q: Tensor, v: Tensor, order: torch.memory_format = torch.preserve_format) -> Tensor:
    """An empty out with the strides that csrc/binding/flash_attn/ gives it. order: contiguous if qkv is packed."""
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q, memory_format=order)
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _invariant(q, v, options, features):
    """Whether the level in force asks the reference for bits that do not depend on the batch.

    At level 2 it is refused where kernels compute the same rows in another call.
    """
    if invariance.level() == 2 and q.dtype in KERNEL_DTYPES and _library.runs_in_kernel("fwd_features", q):
        if not _beyond_head_dims(q, v, KERNEL_HEAD_DIM):
            invariance.refuse_unkept(beyond_kernels=beyond_kernels(q, v, options, features))
    return invariance.level() > 0


def _results_fake(q, v, features, order=torch.preserve_format):
    out = out_fake(q, v, order)
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    wanted = features.row_max, features.attn_bias is not None
    return out, lse, *(torch.empty_like(lse) if each else lse.new_empty(0) for each in wanted)


def _fwd_fake(q, k, v, sink, bias, *arguments):
    _, features = _split(sink, bias, arguments, Options)
    return _results_fake(q, v, features)


def _fwd_reference(q, k, v, sink, bias, *arguments):
    options, features = _split(sink, bias, arguments, Options)
    return reference.fwd_features(q, k, v, options, features, invariant=_invariant(q, v, options, features))


def _fwd_with_residue_fake(q, k, v, sink, bias, *arguments):
    order = torch.preserve_format if k is not None else torch.contiguous_format
    q, _, v = unpack(q, k, v)
    _, features = _split(sink, bias, arguments, Options)
    out, *others = _results_fake(q, v, features, order)
    return out, *others, torch.empty_like(out)


def _fwd_with_residue_reference(q, k, v, sink, bias, *arguments):
    options, features = _split(sink, bias, arguments, Options)
    q, k, v = unpack(q, k, v)
    invariant = _invariant(q, v, options, features)
    unrounded, *others = reference.fwd_features(q.float(), k.float(), v.float(), options, features, invariant=invariant)
    out = unrounded.to(q.dtype)
    return out, *others, (unrounded - out).to(q.dtype)


def _bwd_fake(dout, q, k, v, out, lse, dlse, out_lo, lse_lo, wants_dbias, sink, bias, *arguments):
    dsink = q.new_empty(0) if sink is None else sink.new_empty(sink.shape)
    dbias = bias.new_empty(bias.shape) if wants_dbias else q.new_empty(0)
    if _in_float(arguments):
        dkv = [x.new_empty(x.shape, dtype=torch.float32) for x in (k, v)]
    else:
        dkv = [torch.empty_like(x) for x in (k, v)]
    return torch.empty_like(q), *dkv, dsink, dbias


def _in_float(arguments):
    """Whether the last argument of `bwd_features` is given and true."""
    return any(arguments[len(Options._fields) + _NUM_OTHERS :])


def _bwd_reference(dout, q, k, v, out, lse, dlse, out_lo, lse_lo, wants_dbias, sink, bias, *arguments):
    options, features = _split(sink, bias, arguments, Options)
    out = unrounded(out, out_lo)
    in_float = _in_float(arguments)
    return reference.bwd_features(dout, q, k, v, out, lse, dlse, lse_lo, options, features, wants_dbias, in_float)


def _fwd_kvcache_fake(q, k_cache, v_cache, sink, bias, *arguments):
    _, features = _split(sink, bias, arguments, CacheOptions)
    return _results_fake(q, v_cache, features)


def _fwd_kvcache_reference(q, k_cache, v_cache, sink, bias, *arguments):
    options, features = _split(sink, bias, arguments, CacheOptions)
    invariant = _invariant(q, v_cache, options, features)
    return reference.fwd_kvcache_features(q, k_cache, v_cache, options, features, invariant=invariant)


def write_into(results: Sequence[Tensor], *targets: Tensor | None) -> None:
    """Copy each result to its target, if there is one."""
    for target, result in zip(targets, results, strict=True):
        if target is not None:
            target.copy_(result)


def _fwd_into_reference(q, k, v, out, lse, row_max, *arguments):
    write_into(_fwd_reference(q, k, v, *arguments)[:3], out, lse, row_max)


def _fwd_kvcache_into_reference(q, k_cache, v_cache, out, lse, row_max, *arguments):
    write_into(_fwd_kvcache_reference(q, k_cache, v_cache, *arguments)[:3], out, lse, row_max)


# ---------------------------------------------------------------------------------------------------------------------
# Two key ranges of each row, of which kernels take one at a time


def _divided(name, places, kind, function):
    """Returns `in_parts` of the op `name` (see `_library.define`); function: computes two key ranges by two calls.

    places: of q, v and the sink among the op's arguments.
    """

    def in_parts(args):
        q, v = (args[place] for place in places[:2])
        sink, bias, *arguments = args[places[2] :]
        options, features = _split(sink, bias, arguments, kind)
        ranges = features.key_ranges
        if ranges is None or ranges.shape[-1] == 2 or q.dtype not in KERNEL_DTYPES or v is None:
            return None
        others = features._replace(key_ranges=None)
        has_kernel = _library.runs_in_kernel(name, q) and not beyond_kernels(q, v, options, others)
        return function if has_kernel else None

    return in_parts


def _merged(op, kind, q, k, v, sink, bias, *arguments):
    """Returns out, not rounded, and the other results of a forward op by a call for each of two key ranges.

    The second call over a cache appends once more: the same to the same place.
    """
    options, features = _split(sink, bias, arguments, kind)
    if isinstance(options, Options) and options.exact_gradients:
        invariance.refuse_unkept(exact_gradients=True)
    _, _, ranges, *rest = features
    parts, row_maxima = [], []
    for each in disjoint(ranges):
        out, lse, row_max, lse_lo, *out_lo = op.below_autograd(q, k, v, None, bias, *options, each, *rest)
        parts.append((unrounded(out, *out_lo) if out_lo else out, lse, None if bias is None else lse_lo))
        row_maxima.append(row_max)
    out, lse, lse_lo = merge_parts(parts, sink)
    return out, lse, torch.maximum(*row_maxima), lse.new_empty(0) if bias is None else lse_lo


def _rounded(unrounded, q, v, order=torch.preserve_format):
    return out_fake(q, v, order).copy_(unrounded)


def _fwd_of_two(q, k, v, *arguments):
    unrounded, *others = _merged(fwd_features, Options, q, k, v, *arguments)
    return _rounded(unrounded, q, v), *others


def _fwd_with_residue_of_two(q, k, v, *arguments):
    unrounded, *others = _merged(fwd_with_residue, Options, q, k, v, *arguments)
    out = _rounded(unrounded, q, v)
    return out, *others, _rounded(unrounded - out, q, v)


def _fwd_kvcache_of_two(q, k_cache, v_cache, *arguments):
    unrounded, *others = _merged(fwd_kvcache_features, CacheOptions, q, k_cache, v_cache, *arguments)
    return _rounded(unrounded, q, v_cache), *others


def _fwd_into_of_two(q, k, v, out, lse, row_max, *arguments):
    write_into(_merged(fwd_features, Options, q, k, v, *arguments)[:3], out, lse, row_max)


def _fwd_kvcache_into_of_two(q, k_cache, v_cache, out, lse, row_max, *arguments):
    write_into(_merged(fwd_kvcache_features, CacheOptions, q, k_cache, v_cache, *arguments)[:3], out, lse, row_max)


def _bwd_of_two(dout, q, k, v, out, lse, dlse, out_lo, lse_lo, wants_dbias, sink, bias, *arguments):
    """The gradients of each range, which need the out and lse of both, add up; that of the sink needs no range."""
    options, features = _split(sink, bias, arguments, Options)
    _, _, ranges, *rest = features
    given = dout, q, k, v, out, lse, dlse, out_lo, lse_lo, wants_dbias
    first, second = (
        bwd_features.below_autograd(*given, each_sink, bias, *options, each, *rest, _in_float(arguments))
        for each_sink, each in zip((sink, None), disjoint(ranges), strict=True)
    )
    *grads, dsink, dbias = first
    *more, _, more_dbias = second
    for x, y in zip((*grads, dbias), (*more, more_dbias), strict=True):
        x += y
    return *grads, dsink, dbias


# ---------------------------------------------------------------------------------------------------------------------


def appends(options: Sequence[Any]) -> bool:
    """Whether these options, of which the last ones may be missing, have new keys for the cache."""
    return len(options) > _K_OF_CACHE and options[_K_OF_CACHE] is not None


def _weights_fake(q, k, lse, lse_lo, *arguments):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], k.shape[1], dtype=torch.float32)


def _weights_reference(q, k, lse, lse_lo, sink, bias, *arguments):
    return reference.weights(q, k, lse, lse_lo, *_split(sink, bias, arguments, Options))


def composed(
    q: Tensor, k: Tensor, v: Tensor, options: Options, features: Features
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention in torch's operations, for second derivatives, tangents and transforms. Warns once that it is slow."""
    _library.warn_once(
        "flash_attn: attention runs as operations of plain torch, with memory quadratic in the sequence, for a second "
        "derivative, a tangent or a transform of torch.func"
    )
    with _library.without_autocast(q):
        return differentiable.attention(q, k, v, options, features)


def _fwd_composite(q, k, v, sink, bias, *arguments):
    refuse_gradients_of_float8(k)
    options, features = _split(sink, bias, arguments, Options)
    out, lse, row_max, lse_lo = composed(q, k, v, options, features)
    return out, lse, row_max if features.row_max else lse.new_empty(0), lse.new_empty(0) if bias is None else lse_lo


def _fwd_with_residue_composite(q, k, v, *arguments):
    unrounded, *others = _fwd_composite(q.float(), k.float(), v.float(), *arguments)
    out = unrounded.to(q.dtype)
    return out, *others, (unrounded - out).detach().to(q.dtype)


def with_kept_out(
    op: Any, tensors: Sequence[Tensor | None], terms: tuple[Tensor | None, ...], arguments: Sequence[Any]
) -> tuple[Tensor, tuple[Tensor, Tensor | None], Tensor, Sequence[Tensor]]:
    """Call a forward op with (q, k, v, *terms, *arguments); also return the out that the backward needs.

    The backward subtracts the row sums of dout * out from dP. Where few keys have all the weight of a row, the two
    nearly cancel, and rounding out to 16 bits would be most of the error of dS (arXiv:2510.04212). So without kernels,
    out is computed and kept in fp32. Kernels keep it in 16 bits, and with exact_gradients also its rounding error.

    terms: (sink, bias) of an op with features, or (). arguments: the options, which may lack the last ones, and after
        all of them the features.
    Returns out in the dtype of q; (out, out_lo), what the backward takes; softmax_lse; and (row_max, lse_lo) of an op
    with features, or an empty sequence.
    """
    q = tensors[0]
    assert q is not None
    if q.dtype in KERNEL_DTYPES:
        if not _library.runs_in_kernel(op.name, q):
            floats = (None if x is None else x.float() for x in tensors)
            unrounded, lse, *others = op.below_autograd(*floats, *terms, *arguments)
            return unrounded.to(q.dtype), (unrounded, None), lse, others
        if len(arguments) > _EXACT and arguments[_EXACT]:
            terms = terms or (None, None)
            out, lse, *others, out_lo = fwd_with_residue.below_autograd(*tensors, *terms, *arguments)
            return out, (out, out_lo), lse, others
    out, lse, *others = op.below_autograd(*tensors, *terms, *arguments)
    return out, (out, None), lse, others


class _Attention(torch.autograd.Function):
    """Gradients of `fwd_features` for q, k, v, the sink and the bias, through out and softmax_lse.

    k and v may be float32 beside a q of 16 bits: see `in_float` of `flash_attn.forward`. They are kept in 16 bits.
    """

    @staticmethod
    def forward(ctx, q, k, v, sink, bias, arguments):
        refuse_gradients_of_float8(k)
        in_float = k.dtype != q.dtype
        if in_float:
            k, v = k.to(q.dtype), v.to(q.dtype)
        out, kept, lse, (row_max, lse_lo) = with_kept_out(fwd_features, (q, k, v), (sink, bias), arguments)
        if in_float:
            options, features = _split(sink, bias, arguments, Options)
            arguments = *options, *features[2:], in_float
        _keep(ctx, (q, k, v, sink, bias, *kept, lse, None if bias is None else lse_lo), arguments)
        ctx.mark_non_differentiable(row_max, lse_lo)
        return out, lse, row_max, lse_lo

    @staticmethod
    def backward(ctx, dout, dlse, *_):
        q, k, v, sink, bias, out, out_lo, lse, lse_lo, *tensors = ctx.saved_tensors
        arguments = [x if tensor is None else tensor for x, tensor in zip(ctx.others, tensors, strict=True)]
        if dout is None:
            dout = torch.zeros_like(out, dtype=q.dtype)
        wants_dbias = bias is not None and ctx.needs_input_grad[4]

        def first(dout, dlse, q, k, v, sink, bias):
            *grads, dsink, dbias = bwd_features.below_autograd(
                dout, q, k, v, out, lse, dlse, out_lo, lse_lo, wants_dbias, sink, bias, *arguments
            )
            return *grads, None if sink is None else dsink, dbias if wants_dbias else None

        def again(q, k, v, sink, bias):
            return _fwd_composite(q, k, v, sink, bias, *arguments)[:2]

        second = _refuse_second if _in_float(arguments) else autograd.gradients_of(again, 2)
        return *autograd.first_or_second(first, second, dout, dlse, q, k, v, sink, bias), None


def _refuse_second(*_):
    raise RuntimeError("attention with gradients of k and v in float32 beside a q of 16 bits has no second derivative")


class _AttentionWithResidue(_Attention):
    """The same for `fwd_with_residue` with separate q, k and v. out_lo is a constant: out has all the gradient."""

    @staticmethod
    def forward(ctx, q, k, v, sink, bias, arguments):
        out, lse, row_max, lse_lo, out_lo = fwd_with_residue.below_autograd(q, k, v, sink, bias, *arguments)
        _keep(ctx, (q, k, v, sink, bias, out, out_lo, lse, None if bias is None else lse_lo), arguments)
        ctx.mark_non_differentiable(row_max, lse_lo, out_lo)
        return out, lse, row_max, lse_lo, out_lo


def _keep(ctx, saved, arguments):
    """Save for the backward of `_Attention` its tensors and the other arguments, some of which are tensors."""
    tensors = [x if isinstance(x, Tensor) else None for x in arguments]
    ctx.others = [None if isinstance(x, Tensor) else x for x in arguments]
    ctx.save_for_backward(*saved, *tensors)
    ctx.set_materialize_grads(False)


_TERMS = "Tensor? learnable_sink, Tensor? attn_bias"
_FEATURES = schema.arguments(Features, start=2)
_OPTIONS = f"{_TERMS}, {schema.arguments(Options)}, {_FEATURES}"
_CACHE_OPTIONS = f"{_TERMS}, {schema.arguments(CacheOptions)}, {_FEATURES}"
_EXACT = Options._fields.index("exact_gradients")
CACHES = 1, 2  # the places of the caches among the arguments of an op
# row_max is empty if it is not wanted; so is lse_lo without a bias. lse_lo is what rounding has taken off softmax_lse:
# where all keys that a row sees have a bias of -1e9, the logarithm of how many they are.
_RESULTS = "(Tensor out, Tensor softmax_lse, Tensor row_max, Tensor lse_lo)"
_K_OF_CACHE = CacheOptions._fields.index("k")
_NUM_OTHERS = len(Features._fields) - 2  # features besides the sink and the bias

fwd_features = _library.define(
    f"fwd_features(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> {_RESULTS}",
    reference=_fwd_reference,
    fake=_fwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_fwd,
    in_parts=_divided("fwd_features", (0, 2, 3), Options, _fwd_of_two),
    autograd=_Attention,
    differentiable=5,
    composite=invariance.refusing(_fwd_composite),
    flops=flops.attention_fwd_features,
    sharding=sharding.attention_fwd_features,
)

# fwd and fwd_features with one more result, out_lo: the rounding error of out, in the dtype of out. For exact
# gradients, and for results that the rounding would spoil.
fwd_with_residue = _library.define(
    f"fwd_with_residue(Tensor q, Tensor? k, Tensor? v, {_OPTIONS}) -> "
    "(Tensor out, Tensor softmax_lse, Tensor row_max, Tensor lse_lo, Tensor out_lo)",
    reference=_fwd_with_residue_reference,
    fake=_fwd_with_residue_fake,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_fwd_with_residue,
    in_parts=_divided("fwd_with_residue", (0, 2, 3), Options, _fwd_with_residue_of_two),
    autograd=_AttentionWithResidue,
    differentiable=5,
    composite=invariance.refusing(_fwd_with_residue_composite),
    flops=flops.attention_fwd_features,
    sharding=sharding.attention_fwd_with_residue,
)

# float_dkv: whether dk and dv are float32, not rounded to the dtype of k and v.
bwd_features = _library.define(
    f"bwd_features(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? dlse, "
    f"Tensor? out_lo, Tensor? lse_lo, bool wants_dbias, {_OPTIONS}, bool float_dkv=False) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
    reference=_bwd_reference,
    fake=_bwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_bwd,
    in_parts=_divided("bwd_features", (1, 3, 10), Options, _bwd_of_two),
    flops=flops.attention_bwd_features,
    sharding=sharding.attention_bwd_features,
)

# The weights of all keys in all rows of a dense batch; softmax_lse and lse_lo are what fwd_features returns for these
# arguments.
weights = _library.define(
    f"weights(Tensor q, Tensor k, Tensor softmax_lse, Tensor? lse_lo, {_OPTIONS}) -> Tensor",
    reference=_weights_reference,
    fake=_weights_fake,
    announces=False,
    flops=flops.attention_weights,
)

fwd_kvcache_features = _library.define(
    f"fwd_kvcache_features(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_CACHE_OPTIONS}) -> {_RESULTS}",
    reference=_fwd_kvcache_reference,
    fake=_fwd_kvcache_fake,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_kvcache,
    in_parts=_divided("fwd_kvcache_features", (0, 2, 3), CacheOptions, _fwd_kvcache_of_two),
    writes=lambda args: CACHES if appends(args[5:]) else (),
    flops=flops.attention_kvcache_features,
)

# The same with results in tensors of the caller. Those that are not wanted, softmax_lse and row_max (here row_maxima,
# since the feature has that name), are None.
_TARGETS = "Tensor({}!) out, Tensor({}!)? softmax_lse, Tensor({}!)? row_maxima"
fwd_features_into = _library.define(
    f"fwd_features_into(Tensor q, Tensor k, Tensor v, {_TARGETS.format(*'abc')}, {_OPTIONS}) -> ()",
    reference=_fwd_into_reference,
    fake=lambda *_: None,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_into(Options),
    in_parts=_divided("fwd_features_into", (0, 2, 6), Options, _fwd_into_of_two),
    flops=lambda *args: flops.attention_fwd_features(*args[:3], *args[6:]),
)
fwd_kvcache_features_into = _library.define(
    f"fwd_kvcache_features_into(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_TARGETS.format(*'cde')}, "
    f"{_CACHE_OPTIONS}) -> ()",
    reference=_fwd_kvcache_into_reference,
    fake=lambda *_: None,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=_beyond_into(CacheOptions),
    in_parts=_divided("fwd_kvcache_features_into", (0, 2, 6), CacheOptions, _fwd_kvcache_into_of_two),
    writes=lambda args: (*(CACHES if appends(args[8:]) else ()), 3, 4, 5),
    flops=lambda *args: flops.attention_kvcache_features(*args[:3], *args[6:]),
)
