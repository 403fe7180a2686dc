"""Statistics of attention (weights, their sums, maxima, entropy), merging of partial results, and codes of float8.

None of these functions holds a seqlen_q x seqlen_k tensor, except `weights`, which returns one, and `column_sums` with
some biases. q is (batch, seqlen_q, heads, head_dim) and k (batch, seqlen_k, heads_k, head_dim); `combine` also takes
packed tokens. Where a function takes `**options`, these are the arguments of `flash_attn.flash_attn_func` that change
scores and masks: softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, attn_bias, key_ranges,
attention_chunk, seqused_q and seqused_k.
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from flash_attn._errors import ArgumentError, ArgumentTypeError
from flash_attn._ops import checks, flash_attn, flash_attn_features
from flash_attn._ops.merge_states import merge_states_

__all__ = [
    "column_sums",
    "combine",
    "entropy",
    "float8_descale",
    "merge_attn_states",
    "row_max",
    "row_max_and_sum",
    "to_float8",
    "weights",
]

_FLOATS = (*flash_attn.DTYPES, torch.float64)
_OPTIONS = tuple(inspect.signature(flash_attn.score_arguments).parameters)[2:]  # after q and k


def combine(
    outs: Tensor, lses: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over parts of the keys into the result over all of them.

        from flash_attn.functional import combine

        lse = log sum_n exp lse_n;   out = sum_n exp(lse_n - lse) out_n

    If there is a learnable_sink, give it to the call for one part only: each lse that includes it would count it again.
    Differentiable, through both results. An lse is as exact as float32: of rows whose keys all carry a bias of -1e9 it
    does not say how many they are, so their parts count alike.

    Arguments:
        outs: (parts, .., seqlen_q, heads, head_dim), packed or dense.
        lses: floating-point (parts, .., heads, seqlen_q); +inf or -inf means that a row sees no key of that part.
        out: a tensor to write the result to, and to return; or None.
        out_dtype: the dtype of the result; None means that of `out` if it is given, else that of outs. Sums are float32
            at least.

    Returns:
        (out, lse) without the first dimension; lse is float32. A row that sees no key has 0 and +inf.

    Example:
        >>> from flash_attn import flash_attn_func
        >>> q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
        >>> parts = [flash_attn_func(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 3), slice(3, 8))]
        >>> out, lse = combine(*(torch.stack(x) for x in zip(*parts)))
        >>> torch.allclose(out, flash_attn_func(q, k, v), atol=1e-5)
        True
    """
    checks.tensor("outs", outs, dtypes=_FLOATS)
    checks.tensor("lses", lses, dtypes=_FLOATS, device=outs.device)
    if outs.dim() < 4 or lses.shape != (*outs.shape[:-3], outs.shape[-2], outs.shape[-3]):
        raise ArgumentError(
            "lses must have shape (parts, .., heads, seqlen_q) for outs (parts, .., seqlen_q, heads, head_dim), found "
            f"{tuple(lses.shape)} for {tuple(outs.shape)}"
        )
    if out_dtype is not None and out_dtype not in _FLOATS:
        raise ArgumentTypeError(f"out_dtype must be {' or '.join(map(str, _FLOATS))}, found {out_dtype!r}")
    if out is not None:
        dtypes = _FLOATS if out_dtype is None else (out_dtype,)
        checks.tensor("out", out, dtypes=dtypes, shape=tuple(outs.shape[1:]), device=outs.device)
    dtype = out_dtype or (outs if out is None else out).dtype
    lses = lses.to(torch.promote_types(lses.dtype, torch.float32))
    lses = lses.masked_fill(lses == math.inf, -math.inf)
    empty = (lses == -math.inf).all(0)
    lse = lses.masked_fill(empty, 0).logsumexp(0)
    share = (lses - lse).exp().masked_fill(lses == -math.inf, 0)
    # Where a part saw no key, its out may hold anything, also NaN, which a share of 0 would not remove.
    held = outs.masked_fill((lses == -math.inf).transpose(-1, -2)[..., None], 0)
    merged = (held * share.transpose(-1, -2)[..., None]).sum(0).to(dtype)
    return merged if out is None else out.copy_(merged), lse.masked_fill(empty, math.inf).float()


def merge_attn_states(
    out: Tensor | None,
    lse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    heads_first: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """`combine` for two parts of packed tokens, in one launch: a shared prefix and the rest, or keys on two devices.

    If there is a learnable_sink, give it to the call for one part only. No gradient is computed.

    Arguments:
        out: (tokens, heads, head_dim), floating point with any strides, where the result is written; None makes a new
            tensor like out_a. It may be out_a or out_b itself.
        lse: where the lse of the result is written, in the layout of lse_a; None makes a new float32 tensor. It may be
            lse_a or lse_b itself.
        out_a, out_b: (tokens, heads, head_dim), floating point.
        lse_a, lse_b: floating-point (heads, tokens), as `flash_attn.flash_attn_varlen_func` returns it, or (tokens,
            heads), any strides; +inf and -inf both mean that a row sees no key of that part.
        heads_first: whether the lse are (heads, tokens). None: their shape tells; where there are as many tokens as
            heads, it does not, and they count as (heads, tokens). So give it if yours are (tokens, heads).

    Returns:
        (out, lse). A row that sees no key of both has 0 and +inf.

    Example:
        >>> from flash_attn.functional import merge_attn_states
        >>> from flash_attn import flash_attn_varlen_func
        >>> q, k, v = (torch.randn(8, 4, 16) for _ in range(3))
        >>> def attend(keys):
        ...     ends = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k[keys]))
        ...     return flash_attn_varlen_func(q, k[keys], v[keys], *ends, 8, 8, return_lse=True)
        >>> out, lse = merge_attn_states(None, None, *attend(slice(0, 3)), *attend(slice(3, 8)))
        >>> torch.allclose(out, attend(slice(0, 8))[0], atol=1e-5)
        True
    """
    checks.tensor("out_a", out_a, dtypes=_FLOATS)
    checks.ndim("out_a", out_a, "(tokens, heads, head_dim)")
    shape, device = tuple(out_a.shape), out_a.device
    checks.tensor("out_b", out_b, dtypes=_FLOATS, shape=shape, device=device)
    tokens, heads, _ = shape
    checks.tensor("lse_a", lse_a, dtypes=_FLOATS, device=device)
    layouts = {True: (heads, tokens), False: (tokens, heads)}
    if heads_first is None:
        heads_first = tuple(lse_a.shape) != layouts[False] or tokens == heads
    checks.flag("heads_first", heads_first, "a bool or None")
    if tuple(lse_a.shape) != layouts[bool(heads_first)]:
        raise ArgumentError(
            f"lse_a must have shape {layouts[True]}, or {layouts[False]} with heads last, for out_a {shape}, found "
            f"{tuple(lse_a.shape)} with heads_first={heads_first}"
        )
    checks.tensor("lse_b", lse_b, dtypes=_FLOATS, shape=tuple(lse_a.shape), device=device)
    if out is None:
        out = torch.empty_like(out_a)
    if lse is None:
        lse = torch.empty_like(lse_a, dtype=torch.float32)
    checks.tensor("out", out, dtypes=_FLOATS, shape=shape, device=device)
    checks.tensor("lse", lse, dtypes=_FLOATS, shape=tuple(lse_a.shape), device=device)
    checks.own_memory(out=out, lse=lse)
    checks.apart("out", out, dict(out_a=out_a, out_b=out_b), or_same=True)
    checks.apart("lse", lse, dict(lse_a=lse_a, lse_b=lse_b), or_same=True)
    if torch.is_grad_enabled():
        named = dict(out=out, lse=lse, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
        for name, x in named.items():
            if x.requires_grad:
                raise ArgumentError(
                    f"{name} must not require grad, found requires_grad=True: `combine` computes gradients"
                )
    rows = [x.transpose(0, 1) if heads_first else x for x in (lse, lse_a, lse_b)]
    merge_states_(out, rows[0], out_a, rows[1], out_b, rows[2])
    return out, lse


@torch.no_grad()
def row_max(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The largest score of each row, max_j s(i, j), without the sink; no gradient.

        from flash_attn.functional import row_max

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        options: the arguments of `flash_attn.flash_attn_func` that change scores and masks: softmax_scale, causal,
            window_size, softcap, alibi_slopes, learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q and
            seqused_k.

    Returns:
        float32 (batch, heads, seqlen_q), -inf for a row without keys.

    Example:
        >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 16)
        >>> row_max(q, k, causal=True).shape
        torch.Size([2, 4, 8])
    """
    return flash_attn.row_statistics(q, k, **_named("row_max", options))[0]


@torch.no_grad()
def row_max_and_sum(q: Tensor, k: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The largest score m of each row, and the sum of exp(s - m) over its keys and the sink if there is one.

        from flash_attn.functional import row_max_and_sum

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        options: the arguments of `flash_attn.flash_attn_func` that change scores and masks: softmax_scale, causal,
            window_size, softcap, alibi_slopes, learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q and
            seqused_k.

    Returns:
        Two float32 tensors (batch, heads, seqlen_q) without a gradient; -inf and 0 for a row without keys.

    Example:
        >>> from flash_attn import flash_attn_func
        >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 16)
        >>> top, total = row_max_and_sum(q, k)
        >>> _, lse = flash_attn_func(q, k, k, return_lse=True)
        >>> torch.allclose(top + total.log(), lse, atol=1e-5)
        True
    """
    top, log_sum = flash_attn.row_statistics(q, k, **_named("row_max_and_sum", options))
    return top, torch.where(top == -math.inf, 0, log_sum.exp())


@torch.no_grad()
def weights(q: Tensor, k: Tensor, softmax_lse: Tensor | None = None, **options: Any) -> Tensor:
    """The weight of every key in every row, exp(s - lse): normalised, without dropout and without a gradient.

        from flash_attn.functional import weights

    For inspection: memory grows with seqlen_q * seqlen_k. With a sink, rows sum to less than 1: the sink has the rest.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        options: the arguments of `flash_attn.flash_attn_func` that change scores and masks: softmax_scale, causal,
            window_size, softcap, alibi_slopes, learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q and
            seqused_k.
        softmax_lse: float32 (batch, heads, seqlen_q), as a call with the same options returned it; None computes it.

    Returns:
        float32 (batch, heads, seqlen_q, seqlen_k).

    Example:
        >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 16)
        >>> weights(q, k).sum(-1).allclose(torch.ones(2, 4, 8))
        True
    """
    return flash_attn.weights(q, k, softmax_lse, **_named("weights", options))


@torch.no_grad()
def column_sums(q: Tensor, k: Tensor, last_rows: int | None = None, **options: Any) -> Tensor:
    """The weight that each key receives, sum_i exp(s(i, j) - lse(i)), over all rows or the last ones; no gradient.

        from flash_attn.functional import column_sums

    A measure of importance by which caches evict keys (H2O, arXiv:2306.14048; SnapKV, arXiv:2404.14469). It is computed
    as the gradient of softmax_lse with respect to a bias for each key, so by the backward's kernels. With an attn_bias
    that differs from row to row, it also takes memory for float32 (batch, heads, seqlen_q, seqlen_k).

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        options: the arguments of `flash_attn.flash_attn_func` that change scores and masks: softmax_scale, causal,
            window_size, softcap, alibi_slopes, learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q and
            seqused_k.
        last_rows: how many rows at the end are summed, of the used ones with seqused_q; None means all.

    Returns:
        float32 (batch, heads, seqlen_k), whatever the dtype of q.

    Example:
        >>> q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 9, 2, 16)
        >>> column_sums(q, k, last_rows=1).sum(-1).allclose(torch.ones(2, 4))
        True
    """
    if last_rows is not None:
        last_rows = checks.whole("last_rows", last_rows)
        checks.number("last_rows", last_rows, last_rows >= 0, "at least 0")
    return flash_attn.column_sums(q, k, last_rows, **_named("column_sums", options))


def entropy(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1),
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
) -> Tensor:
    """The entropy of the weights of each row in nats, -sum_j P log P = lse - <softmax_scale q, sum_j P k_j>.

    It takes one more attention, with the keys as values, and is differentiable. The scores must be softmax_scale times
    products of q and k, so there is no softcap, bias or sink.

    Accuracy: the entropy is a difference of two numbers as large as the scores s. For 16-bit inputs the mean of the
    keys is kept as the sum of two 16-bit numbers, so that the error is about max |s| / 2^22 in float16 and max |s| /
    2^16 in bfloat16. Kernels also round the weights, which adds at most 2^-11 (float16) or 2^-8 (bfloat16) of sum_j P
    |s_j - mean s|, a number about as large as the entropy.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        softmax_scale, causal, window_size, key_ranges, attention_chunk: as in `flash_attn.flash_attn_func`.

    Returns:
        float32 (batch, heads, seqlen_q), at least 0; 0 for a row without keys.

    Example:
        >>> from flash_attn.functional import entropy
        >>> q, k = torch.zeros(1, 4, 2, 16), torch.randn(1, 4, 2, 16)
        >>> entropy(q, k, causal=True)[0, 0].exp()
        tensor([1., 2., 3., 4.])
    """
    mean, lse = flash_attn.mean_keys(
        q,
        k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        key_ranges=key_ranges,
        attention_chunk=attention_chunk,
    )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    score = scale * (q.float() * mean).sum(-1).transpose(1, 2)
    empty = lse == math.inf
    found = (lse.masked_fill(empty, 0) - score).masked_fill(empty, 0)
    return found - found.detach().clamp(max=0)  # at least 0 despite rounding, with an unchanged derivative


@torch.no_grad()
def float8_descale(x: Tensor, *, per_head: bool = True) -> Tensor:
    """The scale with which float8 holds keys or values: the largest size among them, over 448, the largest code.

    Codes keep 4 bits of a number down to 2^-14 of the largest. So a scale may be several times too large without harm,
    while what is appended later beyond 448 times the scale is cut off there.

    Arguments:
        x: floating point (.., heads_k, head_dim): keys or values of a layer for a text like those to come. Infinite
            numbers and NaN are not counted.
        per_head: a scale for each key head; else one for all.

    Returns:
        float32 (heads_k,), or () if not per_head, for the argument k_descale or v_descale. It is never 0: where x is
        nothing but 0, it is 1.

    Example:
        >>> float8_descale(torch.tensor([[[448.0, -1.0], [0.0, 0.0], [7.0, -14.0]]]))
        tensor([1.0000, 1.0000, 0.0312])
    """
    checks.tensor("x", x, dtypes=_FLOATS)
    checks.number("x.dim()", x.dim(), x.dim() >= 2, "at least 2, (.., heads_k, head_dim)")
    checks.flag("per_head", per_head)
    sizes = x.abs().masked_fill(~x.isfinite(), 0).movedim(-2, 0)
    rows = sizes.flatten(1) if per_head else sizes.flatten()
    if rows.shape[-1] == 0:
        return rows.new_ones(rows.shape[:-1], dtype=torch.float32)
    descale = rows.amax(-1).float() / flash_attn_features.LARGEST_FLOAT8
    return torch.where(descale > 0, descale.clamp(min=torch.finfo(torch.float32).smallest_normal), 1)


@torch.no_grad()
def to_float8(x: Tensor, descale: float | Tensor = 1.0) -> Tensor:
    """Keys or values as codes of float8, as `flash_attn.flash_attn_with_kvcache` stores what it appends.

    Arguments:
        x: floating point (.., seqlen, heads_k, head_dim), such as a cache.
        descale: what codes are multiplied by where they are used, above 0: a number, or float32 (heads_k,) or (batch,
            heads_k), or what else broadcasts to x without its sequence and its head_dim.

    Returns:
        float8_e4m3fn, shaped like x: what is nearest to x / descale, and ties go to even; the largest code, 448, for
        what is beyond it, and NaN for NaN.

    Example:
        >>> k = torch.randn(1, 5, 2, 16)
        >>> descale = float8_descale(k)
        >>> torch.allclose(to_float8(k, descale).float() * descale[:, None], k, rtol=2**-4, atol=1e-4)
        True
    """
    checks.tensor("x", x, dtypes=_FLOATS)
    if not isinstance(descale, Tensor):
        descale = checks.as_float("descale", descale)
        checks.number("descale", descale, descale > 0, "above 0")
        descale = torch.full((), descale, device=x.device)
    checks.number("x.dim()", x.dim(), x.dim() >= 3, "at least 3, (.., seqlen, heads_k, head_dim)")
    checks.broadcasts("descale", descale, (*x.shape[:-3], x.shape[-2]), dtypes=(torch.float32,), device=x.device)
    return flash_attn_features.encoded(x, descale.unsqueeze(-1) if descale.dim() < 2 else descale[..., None, :, None])


def _named(function: str, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a public function, after a check of their names."""
    for name in options:
        if name not in _OPTIONS:
            raise ArgumentTypeError(f"{function}() takes the options {', '.join(_OPTIONS)}, found {name}")
    return options
