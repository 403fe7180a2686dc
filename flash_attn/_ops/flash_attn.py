"""Attention ops: forward, backward and decoding from a key-value cache.

`forward`, `backward` and `decode` check their arguments and make one call into the dispatcher. Optional arguments are
keywords: the fields of `Options` or `CacheOptions`. `_checked` puts the given ones at their places among the arguments
of the op, and spends almost no time on the others. The other arguments are positional only: else Python would compare
each keyword with the name of each of them. `plain_forward`, `plain_packed`, `plain_varlen` and `plain_decode` are a
shorter way for calls with no options but those of servers: they leave most checks to the kernel, and most of them call
ops with fewer arguments.

Dense and variable-length batches use the same op; `cu_seqlens_q` is given for variable lengths. Queries, keys and
values may be separate tensors, or packed: with `v=None`, `k` holds keys and values, (..., 2, heads_k, head_dim); with
`k=None` too, `q` holds all three, (..., 3, heads, head_dim). Gradients are then packed in the same way. The ops take
the packed tensors themselves, because torch 2.13 miscompiles graphs with dynamic shapes in which an op writes to
several views of one tensor.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _library, _torch_private
from flash_attn._errors import ArgumentError, ArgumentTypeError
from flash_attn._library import define_composite as define_composite
from flash_attn._ops import autograd, checks, flops, invariance, rng, schema, sharding
from flash_attn._ops import flash_attn_features as with_features
from flash_attn._ops.flash_attn_features import FeatureArguments
from flash_attn._ops.rotary import rotary
from flash_attn._reference import attention as reference
from flash_attn._reference.attention.options import CacheOptions, Options

KERNEL_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (*KERNEL_DTYPES, torch.float32)
TABLE_DTYPES = (*DTYPES, torch.float64)  # of rotary_cos and rotary_sin
FLOAT8 = with_features.FLOAT8
_OTHER_BYTES = (torch.uint8, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)  # no codes of e4m3
_BYTES = (FLOAT8, *_OTHER_BYTES)
MAX_HEAD_DIM = with_features.KERNEL_HEAD_DIM
MAX_SPLITS = 128
MANY_HEADS = 256  # more than models have: then the dimensions of heads and sequence are likely swapped
_LAYOUT = "If the layout is (batch, heads, seqlen, head_dim), as in scaled_dot_product_attention, transpose(1, 2)"
block_size_n = reference.block_size_n
unpack = with_features.unpack
S_DMASK_MULTIPLE = 128
_FEW = 8  # channels of 16 bits in one 16-byte load, the fewest that kernels read of a row
_INT32 = torch.int32
_NO_WINDOW, _CAUSAL, _FAR = (-1, -1), (-1, 0), 2**31 - 1  # windows as ops take them, and a side that reaches all keys
exact_gradients = False  # the option of this name in every call of `forward`; flash_attn/precision.py sets it


def forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    softmax_scale: float | None,
    causal: bool | Tensor,
    window_size: Sequence[int],
    return_softmax: bool = False,
    given: FeatureArguments | None = None,
    out: Tensor | None = None,
    in_float: bool = False,
    /,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Attention. Returns (out, softmax_lse, S_dmask, rng_state, max_logit).

    S_dmask and rng_state are None if neither S_dmask nor dropout is wanted; without dropout, S_dmask is empty.
    max_logit is None if it is not wanted; so is softmax_lse where `out` is given and nothing asks for it.

    For shapes, dtypes and meaning see `flash_attn.flash_attn_func` and `flash_attn.flash_attn_varlen_func`.
    given: the arguments that flash-attn 2.8 does not have. With None, shapes that need an op with features are refused.
    out: a tensor to write the result to, and to return; it has no gradient.
    in_float: k and v are float32, with values of the dtype of q, which has 16 bits. So their gradients are not rounded:
        for a caller that adds them. At least one requires its gradient; there is no second derivative.
    options: fields of `Options`; None means the default.
    """
    queries: Tensor
    keys: Any
    values: Any
    (queries, keys, values), names = (q, k, v), ("q", "k", "v")
    if v is None:
        (queries, keys, values), names = unpack(q, k, v), ("q", "kv", "kv") if k is not None else ("qkv", "qkv", "qkv")
    elif given is not None and options.get("cu_seqlens_q") is not None:
        q = queries = with_features.in_16_bits(q, keys, given, out)
    if options.get("block_table") is not None:
        _take_lengths_from_seqused_k(given, options)
    batch, head_dim, is_plain = _check_qkv(names, queries, keys, values, options, given is not None, in_float)
    if return_softmax is not False:
        checks.flag("return_attn_probs", return_softmax)
    if keys.dtype is FLOAT8:
        _check_needs_no_training(return_softmax, options)
    elif exact_gradients:
        options["exact_gradients"] = True
    features = None
    if given is not None and (not is_plain or isinstance(causal, Tensor) or given.any_given()):
        features, causal = _features(given, causal, queries, keys, batch, options)
        if return_softmax:
            _check_results(given, features, options)
    if options.get("dropout_p", 0) is None and softmax_scale is not None and softmax_scale == 0:
        raise ArgumentError(
            "dropout_p must be a number if softmax_scale is 0, found None: to call with the attn_mask, dropout_p and "
            "is_causal of scaled_dot_product_attention, give dropout_p and causal by name"
        )
    scores = _check_scores(head_dim, softmax_scale, causal, window_size, given is not None)
    arguments = _checked(Options, scores, options, (names, queries, batch))
    if out is not None:
        _check_out(out, names, queries, keys, values)
        _check_wants_no_gradient(names, (queries, keys, values), features)
    s_dmask = rng_state = max_logit = None
    if drops := bool(options.get("dropout_p")):
        invariance.refuse_unkept(dropout_p=options["dropout_p"])
        arguments = Options(*arguments)
        if return_softmax and arguments.cu_seqlens_q is not None:
            arguments = _with_bounds(arguments, names, options)
        rng_state = rng.draw_state(q.device) if arguments.rng_state is None else arguments.rng_state
        arguments = arguments._replace(rng_state=rng_state)
    features_op, inputs = with_features.fwd_features, (queries, keys, values)
    if out is not None:
        wants_lse = return_softmax or given is None or given.return_lse
        op = with_features.fwd_features_into
        softmax_lse, max_logit = _call_into(op, out, wants_lse, inputs, features, Options, arguments)
    elif _needs_op(features, is_plain):
        out, softmax_lse, max_logit = _call_with_features(features_op, inputs, features, Options, arguments)
    else:
        out, softmax_lse = fwd(q, k, v, *arguments)
    if return_softmax:
        with torch.no_grad():
            s_dmask = probabilities(q, k, v, *arguments) if drops else q.new_empty(0)
    return out, softmax_lse, s_dmask, rng_state, max_logit


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    softmax_scale: float | None,
    causal: bool | Tensor,
    window_size: Sequence[int],
    /,
    rng_state: Tensor | None = None,
    dlse: Tensor | None = None,
    given: FeatureArguments | None = None,
    accumulate: bool = False,
    **options: Any,
) -> Tensor:
    """Gradients of `forward`, written into dq, dk and dv. Returns softmax_d, the row sums of dout * out in float32.

    dk and dv may be float32 beside a q of 16 bits, if their channels are adjacent: they are then not rounded.

    Its shape is (batch, heads, seqlen_q rounded up to a multiple of 128), or for packed tokens (heads, total_q + 128 *
    batch), where the rows of entry b start at cu_seqlens_q[b] + 128 * b. Calls that need the op with features return an
    empty tensor.

    softmax_lse is used as it is given. A caller that merged the results of several blocks of keys passes the merged
    lse; a caller with a sink passes the lse that includes it, and then `given` need not hold the sink.
    rng_state: as the forward returned it; needed with dropout, ignored without.
    dlse: the gradient of softmax_lse; None means 0.
    given: the arguments that flash-attn 2.8 does not have. With None, shapes that need an op with features are refused.
        A bias gets no gradient here.
    accumulate: add to dk and dv, which must be float32, and do not overwrite them.
    options: fields of `Options`; None means the default.
    """
    names = "q", "k", "v"
    batch, head_dim, is_plain = _check_qkv(names, q, k, v, options, given is not None)
    features = None
    if given is not None and (not is_plain or isinstance(causal, Tensor) or given.any_given()):
        features, causal = _features(given, causal, q, k, batch, options)
    if options.get("dropout_p") is not None:
        options["dropout_p"] = _check_dropout("dropout_p", options["dropout_p"], None)
    if options.get("dropout_p"):
        options["rng_state"] = rng_state
    scores = _check_scores(head_dim, softmax_scale, causal, window_size, given is not None)
    arguments = _checked(Options, scores, options, (names, q, batch))
    shape = (*q.shape[:-1], v.shape[-1])
    for name, value, expected in (("dout", dout, shape), ("out", out, shape), ("dq", dq, q.shape)):
        checks.tensor(name, value, dtypes=(q.dtype,), shape=tuple(expected), device=q.device)
    dtypes = (torch.float32,) if accumulate else (q.dtype, torch.float32)
    checks.tensor("dk", dk, dtypes=dtypes, shape=tuple(k.shape), device=q.device)
    checks.tensor("dv", dv, dtypes=(dk.dtype,), shape=tuple(v.shape), device=q.device)
    if dk.dtype is not q.dtype:
        for name, value in (("dk", dk), ("dv", dv)):
            adjacent = value.shape[-1] == 1 or value.stride(-1) == 1
            checks.number(f"{name}.stride(-1)", value.stride(-1), adjacent, "1 where it is float32")
    checks.own_memory(dq=dq, dk=dk, dv=dv)
    lse_shape = _lse_shape(q, options.get("cu_seqlens_q"))
    checks.tensor("softmax_lse", softmax_lse, dtypes=(torch.float32,), shape=lse_shape, device=q.device)
    if dlse is not None:
        checks.tensor("dlse", dlse, dtypes=(torch.float32,), shape=lse_shape, device=q.device)
    if options.get("dropout_p") and rng_state is None:
        raise ArgumentError("rng_state must be what the forward returned when dropout_p > 0, found None")
    if features is None or (is_plain and features.none_but_sink()):
        if accumulate:
            arguments = (*Options(*arguments), True)
        return bwd(dout, q, k, v, out, softmax_lse, dlse, None, dq, dk, dv, *arguments)
    terms, rest = features[:2], features[2:]
    in_float = dk.dtype != q.dtype
    grads = with_features.bwd_features(
        dout, q, k, v, out, softmax_lse, dlse, None, None, False, *terms, *Options(*arguments), *rest, in_float
    )
    dq.copy_(grads[0])
    for target, grad in zip((dk, dv), grads[1:3], strict=True):
        target.add_(grad) if accumulate else target.copy_(grad)
    return softmax_lse.new_empty(0)


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    softmax_scale: float | None,
    causal: bool | Tensor,
    window_size: Sequence[int],
    cache_seqlens: int | Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    given: FeatureArguments | None = None,
    out: Tensor | None = None,
    /,
    **options: Any,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of new queries over a cache, appending k and v to it first. Returns (out, softmax_lse, max_logit).

    max_logit is None if it is not wanted; so is softmax_lse where `out` is given and nothing asks for it.

    For shapes, dtypes and meaning see `flash_attn.flash_attn_with_kvcache`.
    given: the arguments that flash-attn 2.8 does not have. out: a tensor to write the result to, and to return.
    options: the other fields of `CacheOptions`; None means the default.
    """
    if given is not None:
        q = with_features.in_16_bits(q, k_cache, given, out, k)
    batch, head_dim, capacity, is_plain = _check_cache(q, k_cache, v_cache, options, given is not None)
    names, packed = ("q", "k_cache", "v_cache"), options.get("cu_seqlens_q") is not None
    features = None
    if given is not None and (not is_plain or isinstance(causal, Tensor) or given.any_given()):
        features = with_features.checked(given, causal, q, k_cache, batch, capacity, varlen=packed)
        features, causal = _simplified(features, causal)
    if cache_seqlens is not None:
        paged = options.get("block_table") is not None
        name, length = _check_cache_seqlens(q, batch, cache_seqlens, capacity, paged)
        options[name] = length
    if k is not None or v is not None:
        if given is not None and given.q_descale is not None:  # which is in the scale of keys by now
            raise ArgumentError("q_descale must be None where k is appended, found one: convert q to the dtype of k")
        _check_appended(q, k_cache, v_cache, k, v, batch, capacity, options)
        if given is not None:
            with_features.check_divisors(given)
        options["k"], options["v"] = k, v
    if rotary_cos is not None or rotary_sin is not None:
        options["rotary_cos"], options["rotary_sin"] = _check_rotary(q, k, rotary_cos, rotary_sin, capacity)
    scores = _check_scores(head_dim, softmax_scale, causal, window_size, given is not None)
    arguments = _checked(CacheOptions, scores, options, (names, q, batch))
    if out is not None:
        _check_out(out, (*names, "k", "v"), q, k_cache, v_cache, k, v)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        _warn_of_gradients(q, k_cache, v_cache, k, v, *(() if features is None else features[:2]))
    if packed and rotary_cos is not None:
        q, arguments = _rotated(q, CacheOptions(*arguments), features)
    features_op, inputs = with_features.fwd_kvcache_features, (q, k_cache, v_cache)
    if out is not None:
        wants_lse = given is None or given.return_lse
        op = with_features.fwd_kvcache_features_into
        return out, *_call_into(op, out, wants_lse, inputs, features, CacheOptions, arguments)
    if _needs_op(features, is_plain):
        return _call_with_features(features_op, inputs, features, CacheOptions, arguments)
    return *fwd_kvcache(q, k_cache, v_cache, *arguments), None


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None, is_causal: bool, window_size: Sequence[int], /
) -> Tensor | None:
    """Returns out of a dense call without other arguments; None if `forward` has to look at the call.

    In small calls a GPU waits for Python. So here is only what the ops need and what their kernels do not check. A call
    that a kernel refuses, before it writes anything, goes to `forward`, too, whose errors say more.
    """
    if torch.compiler.is_compiling() or exact_gradients:
        return None
    scale = _scale_if_plain("fwd", q, k, v, softmax_scale, 4, 4)
    window = _plain_window(window_size, is_causal)
    if scale is None or window is None:
        return None
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            if invariance.level():  # the backward of a plain call is not deterministic
                return None
            return _apply_plain(q, k, v, (scale, *window))
        return _refusable(fwd_plain_out, q, k, v, scale, *window)
    except _Refused:
        return None


def plain_packed(
    q: Tensor,
    kv: Tensor | None,
    softmax_scale: float | None,
    is_causal: Any,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    /,
) -> Tensor | None:
    """Returns out of a call without gradients whose q holds keys and values, too, or whose kv does; None as in
    `plain_forward`. With cu_seqlens_q, sequences are packed."""
    if torch.compiler.is_compiling() or exact_gradients:
        return None
    keys, dims = q if kv is None else kv, 4 if cu_seqlens_q is None else 3
    scale = _scale_if_plain("fwd", q, keys, keys, softmax_scale, dims + (kv is None), dims + 1)
    window = _plain_window(window_size, is_causal)
    if scale is None or window is None or (torch.is_grad_enabled() and (q.requires_grad or keys.requires_grad)):
        return None
    arguments = q, kv, None, scale, *window
    if cu_seqlens_q is not None:
        if not (_is_plain_index(cu_seqlens_q, 1) and _is_plain_index(cu_seqlens_k, 1)) or not (
            _is_plain_bound(max_seqlen_q) and _is_plain_bound(max_seqlen_k)
        ):
            return None
        arguments = *arguments, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    try:
        return fwd.below_autograd(*arguments)[0]
    except RuntimeError:
        return None


def plain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None,
    is_causal: bool,
    window_size: Sequence[int],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    block_table: Tensor | None,
    seqused_k: Tensor | None,
    num_splits: int,
    out: Tensor | None,
    wants_lse: bool,
    k_descale: float | Tensor | None,
    v_descale: float | Tensor | None,
    /,
) -> Any:
    """Returns out, or (out, softmax_lse), of packed queries without other arguments; None as in `plain_forward`."""
    if torch.compiler.is_compiling():
        return None
    has_scales = not k_descale is v_descale is None
    if block_table is not None and seqused_k is not None:
        cu_seqlens_k = None
    elif cu_seqlens_k is None or not _is_plain_index(cu_seqlens_k, 1):
        return None
    scale = _scale_if_plain("fwd", q, k, v, softmax_scale, 3, 3 if block_table is None else 4)
    window = _plain_window(window_size, is_causal)
    if (
        scale is None
        or window is None
        or not _is_plain_index(cu_seqlens_q, 1)
        or not (seqused_k is None or _is_plain_index(seqused_k, 1))
        or not (block_table is None or _is_plain_index(block_table, 2))
        or not (_is_plain_bound(max_seqlen_q) and _is_plain_bound(max_seqlen_k))
        or not (type(num_splits) is int and num_splits <= MAX_SPLITS)
        or not _is_constant(out)
        or (has_scales and not (_is_plain_scale(k_descale) and _is_plain_scale(v_descale)))
    ):
        return None
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table, seqused_k
    try:
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            if out is not None or has_scales or exact_gradients or invariance.level():
                return None
            out, lse = _apply_varlen(q, k, v, (scale, *window, *lengths, num_splits))
        else:
            if out is None:
                out = _new_out(q, v)
            lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32) if wants_lse else None
            if has_scales:
                k_descale, v_descale = _scale_tensors(q, k_descale, v_descale)
            arguments = k_descale, v_descale, scale, *window, *lengths, num_splits
            _refusable(fwd_plain_into, q, k, v, out, lse, *arguments)
    except _Refused:
        return None
    return (out, lse) if wants_lse else out


def plain_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    softmax_scale: float | None,
    is_causal: bool,
    window_size: Sequence[int],
    cache_seqlens: int | Tensor | None,
    block_table: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_interleaved: bool,
    num_splits: int,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: Any,
    out: Tensor | None,
    wants_lse: bool,
    k_descale: float | Tensor | None,
    v_descale: float | Tensor | None,
    /,
) -> Any:
    """Returns out, or (out, softmax_lse), of `decode` without other arguments; None as in `plain_forward`."""
    if torch.compiler.is_compiling():
        return None
    has_scales = not k_descale is v_descale is None
    scale = _scale_if_plain("fwd_kvcache", q, k_cache, v_cache, softmax_scale, 4 if cu_seqlens_q is None else 3, 4)
    window = _plain_window(window_size, is_causal)
    if cu_seqlens_q is None and type(max_seqlen_q) is int and max_seqlen_q >= 0:
        max_seqlen_q = None  # q says how many queries an entry has
    length = None  # of all entries
    if type(cache_seqlens) is int:
        length, cache_seqlens = cache_seqlens, None
    if (
        scale is None
        or window is None
        or not (cache_seqlens is None or _is_plain_index(cache_seqlens, 1))
        or not (block_table is None or _is_plain_index(block_table, 2))
        or not (type(num_splits) is int and num_splits <= MAX_SPLITS)
        or not (_has_adjacent_channels(k_cache) and _has_adjacent_channels(v_cache))  # _check_cache refuses others
        or (torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad))
        or (
            has_scales and not (_is_plain_scale(k_descale, k is not None) and _is_plain_scale(v_descale, v is not None))
        )
    ):
        return None
    appends = not (k is v is rotary_cos is rotary_sin is None)
    if appends and not (
        _appends_plainly(k_cache, v_cache, k, v)
        and (rotary_cos is rotary_sin is None or _rotates_plainly(k_cache, block_table, rotary_cos, rotary_sin))
        and not length is cache_seqlens is None
    ):
        return None
    if (
        not (length is None or 0 <= length <= _capacity(k_cache, block_table) - (0 if k is None else k.shape[1]))
        or not _is_plain_bound(max_seqlen_q)
        or not (cu_seqlens_q is None or (rotary_cos is None and _is_plain_index(cu_seqlens_q, 1)))
        or not _is_constant(out)
    ):
        return None
    if has_scales:
        k_descale, v_descale = _scale_tensors(q, k_descale, v_descale)
    # The dispatcher takes time for each argument, so the last ones are left out where they have their defaults.
    arguments = k_descale, v_descale, scale, *window, cache_seqlens, block_table
    if appends or not length is cu_seqlens_q is max_seqlen_q is None or num_splits != 0:
        new = k, v, rotary_cos, rotary_sin, rotary_interleaved, length
        arguments = *arguments, cu_seqlens_q, max_seqlen_q, num_splits, *new
    elif out is None and not wants_lse:
        try:
            return fwd_kvcache_plain_out.below_autograd(q, k_cache, v_cache, *arguments)
        except RuntimeError:
            return None
    if out is None:
        out = _new_out(q, v_cache)
    lse = q.new_empty(_lse_shape(q, cu_seqlens_q), dtype=torch.float32) if wants_lse else None
    try:
        fwd_kvcache_plain_into.below_autograd(q, k_cache, v_cache, out, lse, *arguments)
    except RuntimeError:
        return None
    return (out, lse) if wants_lse else out


class _Refused(Exception):
    """A kernel refuses the arguments of a plain call."""


def _refusable(op, *args):
    """Calls `op`, whose kernel says by a RuntimeError that it refuses the arguments.

    Or that it has no memory: then the long way tries again, and raises that.
    """
    try:
        return op.below_autograd(*args)
    except RuntimeError as error:
        raise _Refused from error


def _scale_if_plain(op, q, k, v, scale, dims_q, dims_v):
    """Returns the scale of the scores for a plain form of `op`; None if it does not suit these arguments.

    dims_q, dims_v: the dimensions that q must have, and k and v.
    """
    if not (type(q) is type(k) is type(v) is Tensor) or q.dtype not in KERNEL_DTYPES:
        return None
    # Modes that look at each op know those with all arguments. With a meta tensor among the arguments, the dispatcher
    # would call no kernel, and nothing would check the others.
    if k.is_meta or v.is_meta or _torch_private.in_any_mode() or not _library.runs_in_kernel(op, q):
        return None
    # Nested tensors have no sizes to look at.
    if q.dim() != dims_q or not k.dim() == v.dim() == dims_v or q.is_nested or k.is_nested or v.is_nested:
        return None
    *_, heads, head_dim = q.shape
    if heads > MANY_HEADS or not 1 <= head_dim <= MAX_HEAD_DIM:
        return None
    if scale is None:
        return head_dim**-0.5
    return scale if type(scale) is float and 0 <= scale < math.inf else None


def _is_plain_index(x, dims):
    """Whether `x` holds indices as kernels read them, in rows of any stride, but for its sizes and its device."""
    return (
        type(x) is Tensor
        and x.dtype is _INT32
        and x.dim() == dims
        and (x.is_contiguous() or x.stride(-1) == 1)
        and not x.is_meta
    )


def _has_adjacent_channels(x):
    """Whether the last dimension is contiguous, of a tensor that often is as a whole, which takes less time to ask."""
    return x.is_contiguous() or x.stride(-1) == 1


def _is_plain_bound(bound):
    """Whether `bound` is an upper bound of lengths as ops take it."""
    return bound is None or (type(bound) is int and bound >= 0)


def _plain_window(window_size, is_causal):
    """Returns window_size as ops take it, (left, right); None if it has to be looked at."""
    kind = type(window_size)
    if kind is tuple and window_size == _NO_WINDOW:
        return _CAUSAL if is_causal else _NO_WINDOW
    if (kind is not tuple and kind is not list) or len(window_size) != 2:
        return None
    left, right = window_size
    if type(left) is not int or type(right) is not int or left > _FAR or right > _FAR:
        return None
    return max(left, -1), 0 if is_causal else max(right, -1)


def _is_constant(x):
    """Whether `x`, an out or a scale, is None or a tensor without a gradient. The rest of it, kernels check."""
    return x is None or (type(x) is Tensor and not x.is_meta and not (x.requires_grad and torch.is_grad_enabled()))


def _is_plain_scale(x, divides=False):
    """Whether `x` is a scale of float8: a number, or a tensor or None, of which kernels check the rest.

    divides: whether new keys are divided by it. No tensor of a device with kernels can be read at once.
    """
    if type(x) is float:
        return 0 <= x < math.inf and not (divides and x == 0)
    return _is_constant(x)


def _scale_tensors(q, *scales):
    """Returns scales that have passed for plain as ops take them, on the device of q."""
    numbers = [None if type(x) is float and x == 1 else x for x in scales]
    return [torch.full((), x, device=q.device, dtype=torch.float32) if type(x) is float else x for x in numbers]


def _new_out(q, v):
    """A new out, which in most calls is like q."""
    return torch.empty_like(q) if q.shape[-1] == v.shape[-1] else with_features.out_fake(q, v)


def _capacity(k_cache, block_table):
    """The positions of an entry of a cache that has passed for plain."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


def _appends_plainly(k_cache, v_cache, k, v):
    """Whether new keys and values can be appended to these caches, as far as kernels do not check it."""
    return (
        type(k) is type(v) is Tensor
        and not (k.is_meta or v.is_meta)
        and k.dim() == v.dim() == 4
        and 0 not in k_cache.stride()  # no two positions share memory
        and 0 not in v_cache.stride()
        and k_cache.data_ptr() != v_cache.data_ptr()
        and not (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad))
    )


def _rotates_plainly(k_cache, block_table, cos, sin):
    """Whether these are tables for all positions of the cache, as far as kernels do not check it."""
    return (
        type(cos) is type(sin) is Tensor
        and not (cos.is_meta or sin.is_meta)
        and cos.dtype in DTYPES
        and cos.dim() == 2
        and cos.shape[0] >= _capacity(k_cache, block_table)
        and cos.shape[1] % 8 == 0
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def score_arguments(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Options, with_features.Features]:
    """Check queries and keys of a dense batch, and the arguments that change their scores; return these for the ops."""
    names = "q", "k", "k"
    batch, head_dim, _ = _check_qkv(names, q, k, k, {}, features=True)
    options = dict(softcap=softcap, alibi_slopes=alibi_slopes)
    given = FeatureArguments(learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k)
    features, causal = _features(given, causal, q, k, batch, options)
    scores = _check_scores(head_dim, softmax_scale, causal, window_size, given is not None)
    return Options(*_checked(Options, scores, options, (names, q, batch))), features


def row_statistics(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the largest score of each row, before the sink, and how much softmax_lse is above it.

    A row without keys has -inf and +inf. options: those of `score_arguments`.
    """
    arguments, features = score_arguments(q, k, **options)
    sink, bias, *rest = features._replace(row_max=True)
    _, lse, top, lse_lo = with_features.fwd_features(q, k, _few_values(k), sink, bias, *arguments, *rest)
    return top, lse - top if bias is None else (lse - top) + lse_lo


def _few_values(k):
    """Values as narrow as possible, for calls whose output is not used, only their lse or the gradient of scores."""
    return k[..., :_FEW]


def mean_keys(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Returns the mean of the keys by the weights of each row, float32 and 0 for a row without keys, and softmax_lse.

    Differentiable. options: those of `score_arguments`. Kernels round the weights to 16 bits, after which they do not
    quite sum to 1. So columns of ones are appended to the keys: their output is the sum of the rounded weights, by
    which the mean is divided.
    """
    arguments, features = score_arguments(q, k, **options)
    sink, bias, *rest = features
    values = F.pad(k, (0, _FEW), value=1)
    out, lse, _, _, out_lo = with_features.fwd_with_residue(q, k, values, sink, bias, *arguments, *rest)
    out = with_features.unrounded(out, out_lo)
    return out[..., :-_FEW] / out[..., -1:].clamp(min=0.5), lse  # the sum is nearly 1, or 0 in a row without keys


def weights(q: Tensor, k: Tensor, softmax_lse: Tensor | None, **options: Any) -> Tensor:
    """Returns the weights of all keys in all rows, float32. options: those of `score_arguments`."""
    arguments, features = score_arguments(q, k, **options)
    sink, bias, *rest = features
    if softmax_lse is not None:
        checks.tensor("softmax_lse", softmax_lse, dtypes=(torch.float32,), shape=_lse_shape(q, None), device=q.device)
    lse_lo = None
    if softmax_lse is None or bias is not None:
        lse, lse_lo = _lse_in_two(q, k, _few_values(k), sink, bias, *arguments, *rest)
        if softmax_lse is None:
            softmax_lse = lse
        elif lse_lo is not None:  # of the lse that is given, if that is this one
            lse_lo = lse_lo.masked_fill(softmax_lse != lse, 0)
    return with_features.weights(q, k, softmax_lse, lse_lo, sink, bias, *arguments, *rest)


def column_sums(q: Tensor, k: Tensor, last_rows: int | None, **options: Any) -> Tensor:
    """Returns the sum of the weights of each key in the last rows, or in all; float32 (batch, heads, seqlen_k).

    They are computed as the gradient of the sum of softmax_lse over these rows with respect to a bias for each key,
    because d lse_i / d bias_j is the weight of key j in row i. options: those of `score_arguments`.
    """
    arguments, features = score_arguments(q, k, **options)
    sink, bias, *rest = features
    values = _few_values(k)
    nothing = q.new_zeros(*q.shape[:-1], values.shape[-1])
    lse, lse_lo = _lse_in_two(q, k, values, sink, bias, *arguments, *rest)
    row = torch.arange(q.shape[1], device=q.device)
    end = q.shape[1] if features.seqused_q is None else features.seqused_q[:, None, None]
    counts = torch.ones_like(row, dtype=torch.bool) if last_rows is None else row >= end - last_rows
    bias = _bias_of_each_key(bias, lse, k.shape[1])
    *_, sums = with_features.bwd_features(
        nothing,
        q,
        k,
        values,
        nothing,
        lse,
        counts.float().expand_as(lse),
        None,
        lse_lo,
        True,
        sink,
        bias,
        *arguments,
        *rest,
    )
    return sums.sum(3).flatten(0, 1).float()


def _lse_in_two(q, k, v, sink, bias, *arguments):
    """Returns softmax_lse, and what rounding has taken off it; None for the latter where that does not matter."""
    _, lse, _, lse_lo = with_features.fwd_features(q, k, v, sink, bias, *arguments)
    return lse, None if bias is None else lse_lo


def _bias_of_each_key(bias, lse, seqlen_k):
    """Returns the bias, or zeros if it is None, in float32 and with a size of its own for each entry, head and key."""
    batch, heads, _ = lse.shape
    if bias is None:
        return lse.new_zeros(batch, 1, heads, 1, seqlen_k)
    if bias.dtype == torch.bool:
        bias = torch.zeros_like(bias, dtype=lse.dtype).masked_fill(~bias, -math.inf)
    batch2 = bias.shape[1] if bias.shape[1] > 1 else batch // max(1, bias.shape[0])
    return bias + lse.new_zeros(batch // max(1, batch2), batch2, heads, 1, seqlen_k)


def check_splits_of_pages(num_splits: int, block_table: Tensor | None) -> None:
    """Check the num_splits of forwards that other packages call by position: as in flash-attn 2.8, none with pages."""
    if block_table is not None and checks.whole("num_splits", num_splits) > 1:
        raise ArgumentError(
            f"num_splits must be at most 1 with block_table, found {num_splits}: num_splits > 1 is not supported here"
        )


def with_tensors(
    results: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the first four results of `forward`; if it is None, S_dmask as an empty tensor, or rng_state as zeros."""
    out, softmax_lse, s_dmask, rng_state, _ = results
    if s_dmask is None:
        s_dmask = out.new_empty(0)
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    return out, softmax_lse, s_dmask, rng_state


# ---------------------------------------------------------------------------------------------------------------------
# Features, and the calls with them that the ops without features can compute


def _features(given, causal, q, k, batch, options):
    """Check the arguments of `given` for `forward`. Returns them as `Features`, and causal as a flag.

    seqused_k goes into `options`, since the ops without features take it, too.
    """
    varlen, paged = options.get("cu_seqlens_q") is not None, options.get("block_table") is not None
    max_seqlen_k = options.get("max_seqlen_k") if varlen else k.shape[1]
    features = with_features.checked(given, causal, q, k, batch, max_seqlen_k, varlen)
    options["seqused_k"] = given.seqused_k
    # A graph may later be called with more keys; and where batches must not matter, their capacity must not.
    has_length = not (varlen or paged or torch.compiler.is_compiling() or invariance.level())
    if features.attention_chunk and has_length and features.attention_chunk >= k.shape[1]:
        whole = given.seqused_q is None and given.seqused_k is None
        if causal is True or (whole and q.shape[1] <= k.shape[1]):  # rows before the first key are in chunk -1
            features = features._replace(attention_chunk=0)
    return _simplified(features, causal)


def _simplified(features, causal):
    """Returns features, and causal as a flag: a tensor becomes one if its entries agree and are free to read.

    But not where batches must not matter: kernels compute masks of entries that differ in another way.
    """
    if features.causal is None or invariance.level():
        return features, causal
    if _library.can_be_read_at_once(features.causal) and features.causal.numel():
        values = features.causal != 0
        if bool(values.all()) or not bool(values.any()):
            return features._replace(causal=None), bool(values[0])
    return features, False


def _check_results(given, features, options):
    """Refuse what cannot be combined with S_dmask, which the caller wants."""
    if given.return_lse:
        raise ArgumentError("return_lse must be False with return_attn_probs, which returns softmax_lse; found True")
    others = features._replace(learnable_sink=None).given()
    if options.get("dropout_p") and others:
        raise ArgumentError(
            f"return_attn_probs must be False with dropout_p > 0 and {others[0]}, found True: S_dmask does not cover it"
        )


def _needs_op(features, is_plain):
    """Whether a call needs an op with features."""
    return not is_plain or (features is not None and not features.none())


def _call_with_features(op, inputs, features, kind, arguments):
    """Call an op with features, whose options are of this kind. Returns out, softmax_lse and max_logit."""
    sink, bias, *rest = features
    if features.none_but_sink():  # a call with fewer arguments is faster
        return *op(*inputs, sink, None, *arguments)[:2], None
    out, softmax_lse, row_max, *_ = op(*inputs, sink, bias, *kind(*arguments), *rest)
    return out, softmax_lse, _max_logit(row_max) if features.row_max else None


def _call_into(op, out, wants_lse, inputs, features, kind, arguments):
    """The same with a tensor for out, by an op that writes it. Returns softmax_lse, if it is wanted, and max_logit."""
    features, options = features or with_features.Features(), kind(*arguments)
    q, (sink, bias, *rest) = inputs[0], features
    shape = _lse_shape(q, options.cu_seqlens_q)
    lse = q.new_empty(shape, dtype=torch.float32) if wants_lse else None
    row_max = q.new_empty(shape, dtype=torch.float32) if features.row_max else None
    op(*inputs, out, lse, row_max, sink, bias, *options, *rest)
    return lse, None if row_max is None else _max_logit(row_max)


def _rotated(q, options, features):
    """Rotate packed queries and new keys, as kernels do by themselves where queries have a batch dimension.

    Returns the queries, and the options with rotated keys and without tables.
    """
    batch = options.k.shape[0]
    start = options.cache_seqlens
    if start is None:
        start = options.k.new_full((batch,), options.cache_seqlen, dtype=torch.int32)
    start, tables, interleaved = (
        start.clamp(min=0),
        (options.rotary_cos, options.rotary_sin),
        options.rotary_interleaved,
    )
    k = rotary(options.k, *tables, start, 0, None, interleaved, False)
    if batch > 0:
        positions = _positions(q, start, options, features)
        q = rotary(q[:, None], *tables, positions, 0, None, interleaved, False)[:, 0]
    return q, options._replace(k=k, rotary_cos=None, rotary_sin=None)


def _positions(q, start, options, features):
    """The position of each packed query by which it is rotated; start: that of each entry's first one."""
    token, ends = torch.arange(q.shape[0], dtype=torch.int32, device=q.device), options.cu_seqlens_q[1:]
    entry = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    advance = options.window_left >= 0 or options.window_right >= 0
    if features is not None:
        advance = advance or features.attention_chunk > 0 or features.key_ranges is not None
        if not advance and features.causal is not None:
            advance = features.causal[entry] != 0
    positions = (start[entry] + (token - options.cu_seqlens_q[entry]) * advance).int()
    if _library.can_be_read_at_once(positions):
        needed = max([position + 1 for position in positions[: ends[-1]].tolist()], default=0)
        if needed > options.rotary_cos.shape[0]:
            found = options.rotary_cos.shape[0]
            raise ArgumentError(f"rotary_cos and rotary_sin must have at least {needed} rows, found {found}")
    return positions


def _max_logit(row_max):
    """Returns the largest of row_max (batch, heads, rows) or (heads, rows) for each head; -inf if there are no rows."""
    rows = row_max.transpose(0, -2).flatten(1)
    return F.pad(rows, (0, 1), value=-math.inf).amax(1)


# ---------------------------------------------------------------------------------------------------------------------
# Argument checks


Call = tuple[tuple[str, str, str], Tensor, int]  # names of q, k and v, the queries, and the batch size


def _checked(
    kind: type[Options] | type[CacheOptions], scores: Sequence[Any], options: Mapping[str, Any], call: Call
) -> Sequence[Any]:
    """Returns the arguments of an op from softmax_scale on, up to the last one that is given.

    kind: Options or CacheOptions. scores: its first fields. options: the other fields by name; None means the default.

    The same call has the same bits at each level of batch invariance, so from 1 on gradients are deterministic. The
    level when the forward is called decides it, like the argument: a graph of torch's compiler has it as a constant.
    """
    if kind is Options and invariance.level():
        options = {**options, "deterministic": True}
    fields, values, end = _FIELDS[kind], None, 0
    for name, value in options.items():
        if value is None:
            continue
        place, default, check = fields[name]
        if value is default or (value.__class__ is float and value == default):
            continue
        if values is None:
            values = [*scores, *_DEFAULTS[kind]]
        values[place] = value if check is None else check(name, value, call)
        if place >= end:
            end = place + 1
    return scores if values is None else values[:end]


def _length_name(name, names):
    """Returns the caller's name for cu_seqlens_q or a similar argument, which has no _q or _k if qkv is one tensor."""
    return name[:-2] if names[1] == "qkv" else name


_NO_LENGTHS = "must be a torch.Tensor, found NoneType: seqused_k stands for it only with block_table"
_NO_LENGTHS_IN_PAGES = (
    "seqused_k must be a torch.Tensor with block_table, found NoneType: it says how many keys each entry has in its "
    "pages, where cu_seqlens_k does not"
)


def _check_qkv(names, q, k, v, options, features=False, in_float=False):
    """Check q, k, v, named `names`, and the arguments that divide them into entries.

    features: whether the caller may use an op with features, which takes a v of another head_dim and larger head dims,
        and in a call with cu_seqlens_q that names k, keys and values in float8.
    in_float: as in `forward`.
    Returns (batch, head_dim, is_plain); is_plain: whether the ops without features take these dtypes and head dims.
    """
    cu_seqlens_q, block_table = options.get("cu_seqlens_q"), options.get("block_table")
    varlen, paged = cu_seqlens_q is not None, block_table is not None
    if in_float:
        _check_dtypes_in_float(names, q, k, v)
        is_plain = False
    else:
        is_plain = not _check_dtypes(names, q, k, v, takes_float8=features and varlen and names[1] == "k")
    shape_q, shape_k, shape_v = q.shape, k.shape, v.shape
    dims = 3 if varlen else 4
    if len(shape_q) != dims or not len(shape_k) == len(shape_v) == (4 if paged else dims):
        layout = "(tokens, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
        layout_k = "(num_pages, page_size, heads_k, head_dim)" if paged else layout
        if varlen and not paged and len(shape_k) == 4:
            layout_k += " without block_table"
        for name, x, expected in zip(names, (q, k, v), (layout, layout_k, layout_k), strict=True):
            checks.ndim(name, x, expected)
    if varlen:
        device = q.device
        batch = _check_cu_seqlens(_length_name("cu_seqlens_q", names), cu_seqlens_q, device)
        if options.get("seqused_k") is None or not paged:
            name_k, cu_seqlens_k = _length_name("cu_seqlens_k", names), options.get("cu_seqlens_k")
            if cu_seqlens_k is None:
                raise ArgumentTypeError(_NO_LENGTHS_IN_PAGES if paged else f"{name_k} {_NO_LENGTHS}")
            checks.int32_vector(name_k, cu_seqlens_k, batch + 1, device)
    else:
        batch = shape_q[0]
    if paged:
        _check_block_table(block_table, batch, q.device)
    is_plain = _check_sizes(names[1], shape_q, shape_k, features) and is_plain
    if paged:
        checks.number("page_size", shape_k[1], shape_k[1] >= 1, "at least 1")
    elif not varlen:
        if shape_k[0] != batch:
            checks.number(names[1] + "'s batch size", shape_k[0], False, "q's, {}", batch)
        if shape_q[2] > MANY_HEADS >= shape_q[1] and not torch.compiler.is_compiling():
            _library.warn_once(f"flash_attn: {names[0]} has {shape_q[2]} heads. {_LAYOUT}")
    if shape_v != shape_k:
        is_plain = _check_values(names[2], v, k, features) and is_plain
    return batch, shape_q[-1], is_plain


def _check_dtypes(names, q, k, v, takes_float8):
    """Check that q, k and v, named `names`, have one dtype, or k and v float8 beside a q of 16 bits, if that is taken.

    Returns whether k and v are float8.
    """
    if getattr(k, "dtype", None) not in _BYTES and getattr(v, "dtype", None) not in _BYTES:
        checks.alike(names, (q, k, v), dtypes=DTYPES)
        return False
    if not takes_float8:
        name, x = (names[1], k) if getattr(k, "dtype", None) in _BYTES else (names[2], v)
        raise ArgumentTypeError(
            f"{name} must have dtype {' or '.join(map(str, DTYPES))} here, found {x.dtype}: flash_attn_varlen_func and "
            f"flash_attn_with_kvcache take keys and values of {FLOAT8}"
        )
    checks.tensor(names[0], q, dtypes=KERNEL_DTYPES)
    for name, x in zip(names[1:], (k, v), strict=True):
        if getattr(x, "dtype", None) in _OTHER_BYTES:
            raise ArgumentTypeError(
                f"{name} must have dtype {FLOAT8}, found {x.dtype}: where its bytes are codes of that format, give "
                f"{name}.view({FLOAT8}); flash_attn.functional.to_float8 makes codes of numbers"
            )
        checks.tensor(name, x, dtypes=(FLOAT8,), device=q.device)
    return True


def _check_dtypes_in_float(names, q, k, v):
    """Check that k and v are float32 beside a q of 16 bits."""
    checks.tensor(names[0], q, dtypes=KERNEL_DTYPES)
    for name, x in zip(names[1:], (k, v), strict=True):
        checks.tensor(name, x, dtypes=(torch.float32,), device=q.device)


def _check_needs_no_training(return_softmax, options):
    """Refuse what has no meaning, or no implementation, for a cache in float8."""
    with_float8 = f"with keys and values of {FLOAT8}, found"
    if return_softmax:
        raise ArgumentError(f"return_attn_probs must be False {with_float8} True: call with return_lse=True")
    dropout_p = options.get("dropout_p")
    if dropout_p is not None and _check_dropout("dropout_p", dropout_p, None):
        raise ArgumentError(f"dropout_p must be 0 {with_float8} {dropout_p}: they are of a cache, and have no gradient")


def _check_sizes(name_k, shape_q, shape_k, features=False):
    """Check the heads and the head_dim in the shapes of q and of the keys, which the caller calls `name_k`.

    Returns whether the ops without features take this head_dim.
    """
    heads, head_dim, heads_k, head_dim_k = shape_q[-2], shape_q[-1], shape_k[-2], shape_k[-1]
    divides = heads == heads_k or (heads_k > 0 and heads % heads_k == 0)
    if divides and 1 <= head_dim <= MAX_HEAD_DIM and head_dim_k == head_dim:
        return True
    most = with_features.MAX_HEAD_DIM if features else MAX_HEAD_DIM
    checks.number("head_dim", head_dim, 1 <= head_dim <= most, "between 1 and {}", most)
    checks.number(name_k + "'s head_dim", head_dim_k, head_dim_k == head_dim, "q's, {}", head_dim)
    if divides:
        return False
    layout = ""
    if (
        len(shape_q) == len(shape_k) == 4
        and shape_k[1]
        and shape_q[1] % shape_k[1] == 0
        and shape_q[1] < max(heads, heads_k)
    ):
        layout = f", in shapes {tuple(shape_q)} and {tuple(shape_k)}. {_LAYOUT}"
    raise ArgumentError(f"{name_k}'s number of heads must be a divisor of q's, {heads}, found {heads_k}{layout}")


def _check_values(name, v, k, features):
    """Check values whose shape differs from that of the keys; only their head_dim may, and only with `features`.

    Returns whether the ops without features take this head_dim.
    """
    if not features:
        checks.has_shape(name, v, k.shape)
    checks.has_shape(name, v, (*k.shape[:-1], None))
    most = with_features.MAX_HEAD_DIM
    checks.number(f"{name}'s head_dim", v.shape[-1], 1 <= v.shape[-1] <= most, "between 1 and {}", most)
    return v.shape[-1] <= MAX_HEAD_DIM


def _check_cu_seqlens(name, cu_seqlens, device):
    """Check the cu_seqlens that set the batch size; return the batch size."""
    checks.tensor(name, cu_seqlens, dtypes=(torch.int32,))
    checks.ndim(name, cu_seqlens, "(batch + 1)")
    length = cu_seqlens.shape[0]
    checks.number(name + "'s length", length, length > 0, "at least 1: batch + 1 entries that start at 0")
    checks.int32_vector(name, cu_seqlens, length, device)
    return length - 1


def _check_block_table(block_table, batch, device):
    checks.tensor("block_table", block_table, dtypes=(torch.int32,), shape=(batch, None), device=device)


def _check_scores(head_dim, softmax_scale, causal, window_size, features):
    """Check the arguments that every call has besides its tensors; return the first fields of the options.

    features: whether the caller also accepts causal as a tensor (it is a flag by now); only for the error message.
    """
    if causal is not True and causal is not False:
        checks.flag("causal", causal, "a bool or a tensor (batch,)" if features else "a bool")
    left, right = checks.window(window_size)
    if softmax_scale is None:
        softmax_scale = head_dim**-0.5
    else:
        softmax_scale = checks.as_float("softmax_scale", softmax_scale)
        checks.number("softmax_scale", softmax_scale, softmax_scale >= 0, "at least 0")
    return softmax_scale, left, 0 if causal else right


def _check_flag(name, value, call):
    checks.flag(name, value)
    return bool(value)


def _check_real(name, value, call):
    return checks.as_float(name, value)


def _check_dropout(name, dropout_p, call):
    dropout_p = checks.as_float(name, dropout_p)
    checks.number(name, dropout_p, 0 <= dropout_p < 1, "at least 0 and less than 1")
    return dropout_p


def _check_num_splits(name, num_splits, call):
    num_splits = checks.whole(name, num_splits)
    checks.number(name, num_splits, num_splits <= MAX_SPLITS, "at most {}", MAX_SPLITS)
    return num_splits


def _check_alibi_slopes(name, slopes, call):
    _, q, batch = call
    heads = q.shape[-2]
    checks.tensor(name, slopes, dtypes=(torch.float32,), device=q.device)
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ArgumentError(f"{name} must have shape ({heads},) or ({batch}, {heads}), found {tuple(slopes.shape)}")
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name} must not require grad, found requires_grad=True: slopes have no gradient here")
    return slopes


def _check_per_entry(name, value, call):
    _, q, batch = call
    checks.int32_vector(name, value, batch, q.device)
    return value


def _check_rng_state(name, value, call):
    checks.tensor(name, value, dtypes=(torch.int64,), shape=(2,), device=call[1].device)
    return value


def _check_bound(name, bound, call):
    """Returns max_seqlen_* as an int. A 0-d tensor counts as unknown, since reading it would wait for the device."""
    if bound.__class__ is int and not torch.compiler.is_compiling() and bound >= 0:
        return bound
    name = _length_name(name, call[0])
    if isinstance(bound, Tensor):
        if bound.dim() != 0 or bound.dtype not in checks.INTEGER_DTYPES:
            raise ArgumentTypeError(
                f"{name} must be an int or a 0-d integer tensor, found {bound.dtype} {tuple(bound.shape)}"
            )
        return None
    bound = checks.whole(name, bound, "an integer or a 0-d integer tensor")
    if not torch.compiler.is_compiling():  # in a graph, a bound may depend on data and cannot be compared
        checks.number(name, bound, bound >= 0, "at least 0")
    return bound


def _with_bounds(arguments, names, options):
    """Returns the arguments with max_seqlen_* as ints, read from the device if needed: S_dmask has these sizes."""
    bounds = {name: options.get(name) for name in ("max_seqlen_q", "max_seqlen_k")}
    for name, bound in bounds.items():
        if bound is None:
            shown = _length_name(name, names)
            raise ArgumentError(f"{shown} must be given for return_attn_probs, whose shape it sets; found None")
    return arguments._replace(**{name: int(bound) for name, bound in bounds.items()})


_CHECKS = {  # option -> the function that checks it and returns it as the op takes it; None: checked elsewhere
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "max_seqlen_q": _check_bound,
    "max_seqlen_k": _check_bound,
    "deterministic": _check_flag,
    "exact_gradients": _check_flag,
    "dropout_p": _check_dropout,
    "rng_state": _check_rng_state,
    "softcap": _check_real,
    "alibi_slopes": _check_alibi_slopes,
    "block_table": None,
    "seqused_k": _check_per_entry,
    "leftpad_k": _check_per_entry,
    "cache_seqlens": None,
    "cache_seqlen": None,
    "k": None,
    "v": None,
    "rotary_cos": None,
    "rotary_sin": None,
    "rotary_interleaved": _check_flag,
    "num_splits": _check_num_splits,
    "cache_batch_idx": _check_per_entry,
    "cache_leftpad": _check_per_entry,
}
_DEFAULTS = {kind: tuple(kind._field_defaults.values()) for kind in (Options, CacheOptions)}
_FIELDS = {  # name -> (place, default, check) of each field that has a default
    kind: {name: (kind._fields.index(name), default, _CHECKS[name]) for name, default in kind._field_defaults.items()}
    for kind in (Options, CacheOptions)
}


def _take_lengths_from_seqused_k(given, options):
    """Drop cu_seqlens_k where keys are in pages and seqused_k has their lengths: engines leave anything in it."""
    if given is not None and given.seqused_k is not None:
        options["seqused_k"] = given.seqused_k
    if options.get("seqused_k") is not None:
        options["cu_seqlens_k"] = None


def _check_out(out, names, q, k, v, *others):
    """Check a tensor for the result of a call with q, k, v and perhaps others (or None), which have these names."""
    checks.tensor("out", out, dtypes=(q.dtype,), shape=(*q.shape[:-1], v.shape[-1]), device=q.device)
    if out.stride(-1) != 1 and out.shape[-1] > 1:
        raise ArgumentError(f"out must have a contiguous last dimension, found strides {out.stride()}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError("out must not require grad where it is written, found requires_grad=True")
    checks.own_memory(out=out)
    checks.apart("out", out, dict(zip(names, (q, k, v, *others), strict=True)))


def _check_wants_no_gradient(names, tensors, features):
    """Refuse gradients, for which a result that is written to a tensor of the caller has no place."""
    if not torch.is_grad_enabled():
        return
    terms = () if features is None else features[:2]
    for name, x in zip((*names, "learnable_sink", "attn_bias"), (*tensors, *terms), strict=False):
        if x is not None and x.requires_grad:
            raise ArgumentError(
                f"{name} must not require grad with out, found requires_grad=True: what is written to out has no "
                "gradient. Leave out, or call under torch.no_grad()"
            )


def _check_cache(q, k_cache, v_cache, options, features):
    """Check queries and caches; return (batch, head_dim, positions in an entry of the cache, is_plain).

    features: as in `_check_qkv`. is_plain: whether the op without features takes these dtypes and head dims.
    """
    is_float8 = _check_dtypes(("q", "k_cache", "v_cache"), q, k_cache, v_cache, takes_float8=features)
    shape_q, shape_k = q.shape, k_cache.shape
    alike = v_cache.shape == shape_k
    cu_seqlens_q = options.get("cu_seqlens_q")
    dims_q = 4 if cu_seqlens_q is None else 3
    if len(shape_q) != dims_q or len(shape_k) != 4 or not alike:
        packed = "(total_q, heads, head_dim)"
        checks.ndim("q", q, "(batch, seqlen_q, heads, head_dim)" if cu_seqlens_q is None else packed)
        layout = "(batch_cache or num_pages, capacity or page_size, heads_k, head_dim)"
        checks.ndim("k_cache", k_cache, layout)
        checks.ndim("v_cache", v_cache, layout)
    head_dim, (rows, length, _, _) = shape_q[-1], shape_k
    if cu_seqlens_q is None:
        batch = shape_q[0]
    else:
        batch = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.device)
    is_plain = _check_sizes("k_cache", shape_q, shape_k, features) and not is_float8
    if not alike:
        is_plain = _check_values("v_cache", v_cache, k_cache, features) and is_plain
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        _check_contiguous_rows("k_cache", k_cache)
        _check_contiguous_rows("v_cache", v_cache)
    block_table, cache_batch_idx = options.get("block_table"), options.get("cache_batch_idx")
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ArgumentError(
                "cache_batch_idx must be None with block_table, which already says where an entry's keys are"
            )
        _check_block_table(block_table, batch, q.device)
        checks.number("page_size", length, length >= 1, "at least 1")
        return batch, head_dim, block_table.shape[1] * length, is_plain
    if cache_batch_idx is None and rows != batch:
        raise ArgumentError(
            f"k_cache must have q's batch size {batch} without cache_batch_idx or block_table, found {rows}"
        )
    return batch, head_dim, length, is_plain


def _warn_of_gradients(*tensors):
    """Warn if one of the tensors of a call with a cache requires grad; in the order of the names below."""
    wanted = [x is not None and x.requires_grad for x in tensors]
    if True in wanted:
        every = "q", "k_cache", "v_cache", "k", "v", "learnable_sink", "attn_bias"
        *others, last = itertools.compress(every, wanted)
        names, verb = (f"{', '.join(others)} and {last}", "require") if others else (last, "requires")
        _library.warn_once(
            f"flash_attn: {names} {verb} grad, but a call with a cache computes no gradients. Make such calls under "
            "torch.no_grad(), or train with flash_attn_func"
        )


def _check_contiguous_rows(name, cache):
    if cache.stride(-1) != 1 and cache.shape[-1] > 1:
        raise ArgumentError(f"{name} must have a contiguous last dimension, found strides {cache.stride()}")


def _check_cache_seqlens(q, batch, cache_seqlens, capacity, paged):
    """Check cache_seqlens; return the option for its type, an int or a tensor, as a name and a value."""
    if isinstance(cache_seqlens, Tensor):
        if cache_seqlens.dtype is not torch.int32:
            checks.tensor("cache_seqlens", cache_seqlens, dtypes=checks.INTEGER_DTYPES)
            cache_seqlens = cache_seqlens.clamp(-1, 2**31 - 1).int()  # must not wrap around to a valid length
        if cache_seqlens.dim() == 0:
            cache_seqlens = cache_seqlens.expand(batch).contiguous()
        checks.int32_vector("cache_seqlens", cache_seqlens, batch, q.device)
        return "cache_seqlens", cache_seqlens
    cache_seqlens = checks.whole("cache_seqlens", cache_seqlens, "an integer or an integer tensor (batch,)")
    within = 0 <= cache_seqlens <= capacity
    most = "the {} positions that the pages of block_table hold" if paged else "the cache's capacity {}"
    checks.number("cache_seqlens", cache_seqlens, within, f"between 0 and {most}", capacity)
    return "cache_seqlen", cache_seqlens


def _check_appended(q, k_cache, v_cache, k, v, batch, capacity, options):
    """Check new keys and values; the caller gave at least one of the two."""
    if k is None or v is None:
        missing, given = ("k", "v") if k is None else ("v", "k")
        raise ArgumentError(f"{missing} must be given together with {given}, found None")
    if "cache_seqlens" not in options and "cache_seqlen" not in options:
        raise ArgumentError("cache_seqlens must say where k and v are appended, found None")
    checks.own_memory(k_cache=k_cache, v_cache=v_cache)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{name} must not require grad where it is written, found requires_grad=True")
    checks.alike(("q", "k", "v"), (q, k, v), dtypes=(q.dtype,))
    _, _, heads_k, head_dim = k_cache.shape
    checks.has_shape("k", k, (batch, None, heads_k, head_dim))
    seqlen_new = k.shape[1]
    checks.has_shape("v", v, (batch, seqlen_new, heads_k, v_cache.shape[3]))
    length = options.get("cache_seqlen", 0)
    if seqlen_new + length > capacity:
        found = f"cache_seqlens {length} + {seqlen_new} new positions"
        raise ArgumentError(
            f"k must fit into the cache (block_table or k_cache) of {capacity} positions, found {found}"
        )


def _check_rotary(q, k, cos, sin, capacity):
    """Check the tables of a rotation; at least one is given. Returns both, with float64 converted to float32."""
    if cos is None or sin is None:
        missing, given = ("rotary_cos", "rotary_sin") if cos is None else ("rotary_sin", "rotary_cos")
        raise ArgumentError(f"{missing} must be given together with {given}, found None")
    if k is None:
        raise ArgumentError("k must be given with rotary_cos: rotary positions are those of appended keys; found None")
    device = q.device
    checks.tensor("rotary_cos", cos, dtypes=TABLE_DTYPES, device=device)
    checks.ndim("rotary_cos", cos, "(seqlen_rotary, rotary_dim / 2)")
    shape, head_dim = cos.shape, q.shape[-1]
    checks.tensor("rotary_sin", sin, dtypes=(cos.dtype,), shape=shape, device=device)
    positions, half = shape
    rotary_dim = 2 * half
    fits = rotary_dim % 16 == 0 and rotary_dim <= head_dim
    expected = "a multiple of 16 that is at most head_dim {}"
    checks.number("rotary_dim (twice rotary_cos's last size)", rotary_dim, fits, expected, head_dim)
    if positions < capacity:
        raise ArgumentError(f"rotary_cos must cover the cache's {capacity} positions, found {positions}")
    checks.contiguous("rotary_cos", cos)
    checks.contiguous("rotary_sin", sin)
    if cos.dtype == torch.float64:
        cos, sin = cos.float(), sin.float()
    return cos, sin


# ---------------------------------------------------------------------------------------------------------------------
# Shapes of results, and the ops


def _round_up(size, multiple=S_DMASK_MULTIPLE):
    return (size + multiple - 1) // multiple * multiple


def _lse_shape(q, cu_seqlens_q):
    if cu_seqlens_q is not None:
        return q.shape[1], q.shape[0]  # (heads, total_q)
    return q.shape[0], q.shape[2], q.shape[1]  # (batch, heads, seqlen_q)


def _fwd_fake(q, k, v, *options):
    order = torch.preserve_format if k is not None else torch.contiguous_format
    q, _, v = unpack(q, k, v)
    lse_shape = _lse_shape(q, Options(*options).cu_seqlens_q)
    return with_features.out_fake(q, v, order), q.new_empty(lse_shape, dtype=torch.float32)


def _probabilities_fake(q, k, v, *options):
    q, k, _ = unpack(q, k, v)
    options = Options(*options)
    if options.cu_seqlens_q is None:
        batch, seqlen_q, heads, _ = q.shape
        seqlen_k = k.shape[1]
    else:
        batch, heads = options.cu_seqlens_q.shape[0] - 1, q.shape[1]
        seqlen_q, seqlen_k = options.max_seqlen_q, options.max_seqlen_k
    return q.new_empty(batch, heads, _round_up(seqlen_q), _round_up(seqlen_k))


def _with_accumulate(arguments):
    """Returns the last arguments of `bwd` as options, and whether it adds to dk and dv."""
    count = len(Options._fields)
    return Options(*arguments[:count]), bool(*arguments[count:])


def _bwd_fake(dout, q, k, v, out, lse, dlse, out_lo, dq, dk, dv, *arguments):
    q, _, _ = unpack(q, k, v)
    cu_seqlens_q = _with_accumulate(arguments)[0].cu_seqlens_q
    if cu_seqlens_q is not None:
        total_q, heads, _ = q.shape
        shape = (heads, total_q + S_DMASK_MULTIPLE * (cu_seqlens_q.shape[0] - 1))
    else:
        shape = (q.shape[0], q.shape[2], _round_up(q.shape[1]))
    return q.new_empty(shape, dtype=torch.float32)


def _fwd_kvcache_fake(q, k_cache, v_cache, *options):
    lse_shape = _lse_shape(q, CacheOptions(*options).cu_seqlens_q)
    return with_features.out_fake(q, v_cache), q.new_empty(lse_shape, dtype=torch.float32)


def _fwd_reference(q, k, v, *options):
    out, softmax_lse = reference.fwd(*unpack(q, k, v), Options(*options), invariant=invariance.level() > 0)
    return out if k is not None else out.contiguous(), softmax_lse


def _probabilities_reference(q, k, v, *options):
    return reference.probabilities(*unpack(q, k, v), Options(*options))


def _bwd_reference(dout, q, k, v, out, softmax_lse, dlse, out_lo, dq, dk, dv, *arguments):
    out = with_features.unrounded(out, out_lo)
    options, accumulate = _with_accumulate(arguments)
    if accumulate and (dk is None or dk.dtype != torch.float32):
        raise ArgumentError("dk and dv must be float32 with accumulate, found others")
    dq, *sums = unpack(dq, dk, dv)
    if sums[0].dtype != sums[1].dtype:
        raise ArgumentError(f"dv must have the dtype of dk, {sums[0].dtype}, found {sums[1].dtype}")
    added = [torch.empty_like(x) for x in sums] if accumulate else sums
    softmax_d = reference.bwd(dout, *unpack(q, k, v), out, softmax_lse, dlse, dq, *added, options)
    if accumulate:
        for x, grad in zip(sums, added, strict=True):
            x.add_(grad)
    return softmax_d


def _bwd_plain_reference(dout, q, k, v, out, softmax_lse, *options):
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _bwd_reference(dout, q, k, v, out, softmax_lse, None, None, *gradients, *options)
    return gradients


def _fwd_kvcache_reference(q, k_cache, v_cache, *options):
    return reference.fwd_kvcache(q, k_cache, v_cache, CacheOptions(*options), invariant=invariance.level() > 0)


def _fwd_into_reference(q, k, v, out, lse, k_descale, v_descale, *options):
    options = Options(*options)
    batch = len(q) if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
    features = _only_descales(k_descale, v_descale, batch, k)
    results = reference.fwd_features(q, k, v, options, features, invariant=invariance.level() > 0)
    with_features.write_into(results[:2], out, lse)


def _fwd_kvcache_plain_reference(q, k_cache, v_cache, k_descale, v_descale, *options):
    options = CacheOptions(*options)
    batch = len(q) if options.cu_seqlens_q is None else len(options.cu_seqlens_q) - 1
    features = _only_descales(k_descale, v_descale, batch, k_cache)
    is_invariant = invariance.level() > 0
    return reference.fwd_kvcache_features(q, k_cache, v_cache, options, features, invariant=is_invariant)[:2]


def _fwd_kvcache_into_reference(q, k_cache, v_cache, out, lse, *arguments):
    with_features.write_into(_fwd_kvcache_plain_reference(q, k_cache, v_cache, *arguments), out, lse)


def _only_descales(k_descale, v_descale, batch, k):
    """The scales of a plain op, of any shapes that broadcast, as features."""
    k_descale, v_descale = (None if x is None else x.expand(batch, k.shape[-2]) for x in (k_descale, v_descale))
    return with_features.Features(k_descale=k_descale, v_descale=v_descale)


def _fwd_composite(q, k, v, *options):
    return with_features.composed(*unpack(q, k, v), Options(*options), with_features.Features())[:2]


class _Attention(torch.autograd.Function):
    """Gradients of `fwd` for q, k and v, through out and softmax_lse. `options` may lack its last fields."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, kept, softmax_lse, _ = with_features.with_kept_out(fwd, (q, k, v), (), options)
        _keep(ctx, (q, k, v, *kept, softmax_lse), options)
        return out, softmax_lse

    @staticmethod
    def backward(ctx, dout, dlse):
        q, k, v, out, out_lo, softmax_lse, *tensors = ctx.saved_tensors
        options = ctx.others
        if tensors:
            options = [x if tensor is None else tensor for x, tensor in zip(options, tensors, strict=True)]
        if dout is None:
            dout = torch.zeros_like(out, dtype=q.dtype)

        def first(dout, dlse, q, k, v):
            grads = [None if x is None else torch.empty_like(x) for x in (q, k, v)]
            bwd.below_autograd(dout, q, k, v, out, softmax_lse, dlse, out_lo, *grads, *options)
            return grads

        def again(q, k, v):
            return _fwd_composite(q, k, v, *options)

        return *autograd.first_or_second(first, autograd.gradients_of(again, 2), dout, dlse, q, k, v), None


class _PlainVarlenAttention(_Attention):
    """The same for a plain call, which a kernel may refuse."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, softmax_lse = _refusable(fwd, q, k, v, *options)
        _keep(ctx, (q, k, v, out, None, softmax_lse), options)
        return out, softmax_lse


def _keep(ctx, saved, options):
    """Save for the backward of `_Attention` its tensors and the options, some of which are tensors."""
    tensors, ctx.others = (), options
    if len(options) > _NUM_SCORES:  # before that, options are numbers, not tensors
        tensors = [x if isinstance(x, Tensor) else None for x in options]
        ctx.others = [x if tensor is None else None for x, tensor in zip(options, tensors, strict=True)]
    ctx.save_for_backward(*saved, *tensors)
    ctx.set_materialize_grads(False)


class _PlainAttention(torch.autograd.Function):
    """The out of `fwd_plain` with its gradients."""

    @staticmethod
    def forward(ctx, q, k, v, options):
        out, softmax_lse = _refusable(fwd_plain, q, k, v, *options)
        ctx.save_for_backward(q, k, v, out, softmax_lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, softmax_lse = ctx.saved_tensors
        options = ctx.options

        def first(dout, q, k, v):
            return bwd_plain.below_autograd(dout, q, k, v, out, softmax_lse, *options)

        def again(q, k, v):
            return _fwd_composite(q, k, v, *options)[:1]

        return *autograd.first_or_second(first, autograd.gradients_of(again, 1), dout, q, k, v), None


_apply_plain = _torch_private.bare_apply(_PlainAttention)
_apply_varlen = _torch_private.bare_apply(_PlainVarlenAttention)
_NUM_SCORES = len(Options._fields) - len(Options._field_defaults)
_OPTIONS = schema.arguments(Options)
_CACHE_OPTIONS = schema.arguments(CacheOptions)
_OUT = (3,)  # its place among the arguments of ops that write to it, beside a new softmax_lse

fwd = _library.define(
    f"fwd(Tensor q, Tensor? k, Tensor? v, {_OPTIONS}) -> (Tensor out, Tensor softmax_lse)",
    reference=_fwd_reference,
    fake=_fwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
    autograd=_Attention,
    differentiable=3,
    composite=invariance.refusing(_fwd_composite),
    flops=flops.attention_fwd,
    sharding=sharding.attention_fwd,
)

# The plain form of fwd lacks its last arguments and, where no gradient is wanted, softmax_lse: each argument of a
# schema takes time, given or not, and so does each result. The plain forms have no autograd of their own.
_PLAIN = f"Tensor q, Tensor k, Tensor v, {schema.arguments(Options, end=_NUM_SCORES)}"
fwd_plain = _library.define(
    f"fwd_plain({_PLAIN}) -> (Tensor out, Tensor softmax_lse)",
    reference=_fwd_reference,
    fake=_fwd_fake,
    flops=flops.attention_fwd,
    sharding=sharding.attention_fwd,
)
fwd_plain_out = _library.define(
    f"fwd_plain_out({_PLAIN}) -> Tensor out",
    reference=lambda *args: _fwd_reference(*args)[0],
    fake=lambda *args: _fwd_fake(*args)[0],
    flops=flops.attention_fwd,
    sharding=sharding.attention_fwd_plain_out,
)

# The plain form of packed queries writes to tensors of its caller, and softmax_lse only if it is given. Plain forms for
# servers also take keys and values in float8, with scales of any shapes that broadcast to (batch, heads_k).
_DESCALES = "Tensor? k_descale, Tensor? v_descale"
_PLAIN_OF_LENGTHS = schema.arguments(Options, end=Options._fields.index("num_splits") + 1)
fwd_plain_into = _library.define(
    "fwd_plain_into(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? softmax_lse, "
    f"{_DESCALES}, {_PLAIN_OF_LENGTHS}) -> ()",
    reference=_fwd_into_reference,
    fake=lambda *_: None,
    writes=lambda args: _OUT,
    flops=lambda *args: flops.attention_fwd(*args[:3], *args[7:]),
)

# Computes the S_dmask of a call of fwd with the same arguments.
probabilities = _library.define(
    f"probabilities(Tensor q, Tensor? k, Tensor? v, {_OPTIONS}) -> Tensor",
    reference=_probabilities_reference,
    fake=_probabilities_fake,
    kernel_dtypes=KERNEL_DTYPES,
    beyond_kernel=lambda args: with_features.beyond_dmask_kernels(args[0]),
    flops=flops.attention_probabilities,
)

# dk and dv may be float32, and are then added to with `accumulate`: for callers that sum those of several calls.
bwd = _library.define(
    "bwd(Tensor dout, Tensor q, Tensor? k, Tensor? v, Tensor out, Tensor softmax_lse, Tensor? dlse, Tensor? out_lo, "
    f"Tensor(a!) dq, Tensor(b!)? dk, Tensor(c!)? dv, {_OPTIONS}, bool accumulate=False) -> Tensor softmax_d",
    reference=_bwd_reference,
    fake=_bwd_fake,
    kernel_dtypes=KERNEL_DTYPES,
    flops=flops.attention_bwd,
    sharding=sharding.attention_bwd,
)

fwd_kvcache = _library.define(
    f"fwd_kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_CACHE_OPTIONS}) "
    "-> (Tensor out, Tensor softmax_lse)",
    reference=_fwd_kvcache_reference,
    fake=_fwd_kvcache_fake,
    kernel_dtypes=KERNEL_DTYPES,
    writes=lambda args: with_features.CACHES if with_features.appends(args[3:]) else (),
    flops=flops.attention_kvcache,
)

# The plain form of bwd, which returns new gradients.
bwd_plain = _library.define(
    "bwd_plain(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    f"{schema.arguments(Options, end=_NUM_SCORES)}) -> (Tensor dq, Tensor dk, Tensor dv)",
    reference=_bwd_plain_reference,
    fake=lambda dout, q, k, v, *args: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
    flops=flops.attention_bwd_plain,
    sharding=sharding.attention_bwd_plain,
)

# The plain form of fwd_kvcache, which appends nothing and so writes to no argument.
_PLAIN_OF_CACHE = schema.arguments(CacheOptions, end=CacheOptions._fields.index("block_table") + 1)
fwd_kvcache_plain_out = _library.define(
    f"fwd_kvcache_plain_out(Tensor q, Tensor k_cache, Tensor v_cache, {_DESCALES}, {_PLAIN_OF_CACHE}) -> Tensor out",
    reference=lambda *args: _fwd_kvcache_plain_reference(*args)[0],
    fake=lambda *args: _fwd_kvcache_fake(*args[:3], *args[5:])[0],
    flops=lambda *args: flops.attention_kvcache(*args[:3], *args[5:]),
)

# The plain form that may append, and writes to tensors of its caller like fwd_plain_into.
_NEW_KEYS = 7 + CacheOptions._fields.index("k")  # their place among the arguments
_CACHES_AND_OUT = with_features.CACHES + _OUT
_PLAIN_OF_APPENDING = schema.arguments(CacheOptions, end=CacheOptions._fields.index("cache_seqlen") + 1)
fwd_kvcache_plain_into = _library.define(
    "fwd_kvcache_plain_into(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor(c!) out, "
    f"Tensor(d!)? softmax_lse, {_DESCALES}, {_PLAIN_OF_APPENDING}) -> ()",
    reference=_fwd_kvcache_into_reference,
    fake=lambda *_: None,
    writes=lambda args: _CACHES_AND_OUT if len(args) > _NEW_KEYS and args[_NEW_KEYS] is not None else _OUT,
    flops=lambda *args: flops.attention_kvcache(*args[:3], *args[7:]),
)
