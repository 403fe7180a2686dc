"""Attention: exact, with memory linear in the sequence, on tensors as models have them.

    from flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)          # (batch, seqlen, heads, head_dim)

Six functions differ in layout only: queries, keys and values apart, keys and values packed, or all three packed; dense
or of variable length. The seventh, `flash_attn_with_kvcache`, decodes. All compute, for query i and key j of one
sequence of the batch (here called an entry),

    s(i, j) = softmax_scale * <q[i], k[j]>
    s(i, j) = softcap * tanh(s(i, j) / softcap)                         if softcap > 0
    s(i, j) = s(i, j) - alibi_slope * abs(i + seqlen_k - seqlen_q - j)  if alibi_slopes are given
    s(i, j) = s(i, j) + attn_bias(i, j)                                 if attn_bias is given
    lse(i)  = log(sum over the allowed j of exp(s(i, j)))
    lse(i)  = log(exp(lse(i)) + exp(learnable_sink))                    if learnable_sink is given
    out[i]  = sum over the allowed j of exp(s(i, j) - lse(i)) * keep(i, j) / (1 - dropout_p) * v[j]

where keep(i, j) is 0 with probability dropout_p, else 1. Scores and sums are float32 whatever the input dtype. Kernels
round the probabilities to the input dtype before they multiply v, and their backward uses out as it was rounded to that
dtype, unless `flash_attn.precision.use_exact_gradients` is on. (FlashAttention: Dao et al. 2022, arXiv:2205.14135; Dao
2023, arXiv:2307.08691.)

Terms that all of them share:

- Heads. k and v may have fewer heads than q, a divisor: query head h uses key head h // (heads / heads_k) (GQA, MQA).
- causal. Aligned to the bottom right: the last query sees the last key. With seqlen_q = 2 and seqlen_k = 5, row 0 sees
  keys 0 to 3 and row 1 sees all. A row that sees no key has out = 0 and lse = +inf, and passes no gradient.
- window_size. (left, right): query i sees keys i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, both
  included; -1 means no bound. causal=True sets right to 0.
- alibi_slopes. float32 (heads,) or (batch, heads); no gradient (Press et al. 2021, arXiv:2108.12409).
- dropout_p. Probability, drawn from the default generator of the device. Pass 0 in evaluation.
- deterministic. Gradients are bitwise equal in every run of a call on the same kind of GPU; without it, the order in
  which blocks add to dq may vary.
- return_attn_probs. Return (out, softmax_lse, S_dmask) instead of out. softmax_lse is float32, (batch, heads, seqlen_q)
  or, for variable length, (heads, total_q), and has a gradient. S_dmask is for tests of dropout, and empty without it.
  It has the dtype of q and shape (batch, heads, seqlen_q, seqlen_k), both lengths rounded up to multiples of 128 (with
  variable length, max_seqlen_q and max_seqlen_k are). It holds the unnormalised probabilities exp(s - m), negated
  where dropout removed them; m is the running maximum of the row over blocks of `_get_block_size_n` keys, taken from
  the last block to the first.

Keyword-only arguments go beyond flash-attn 2.8. "Slow" below means that no kernel supports this: the whole call then
runs on the reference backend, in plain torch, with memory that grows with the sequence and not with its square, and
with a warning that names the argument. All combine with each other and with all of the above.

- learnable_sink. float16, bfloat16 or float32 (heads,): for each head the score of one extra key whose value is 0, as
  in gpt-oss. It is neither scaled nor capped nor dropped. lse includes it: a row that sees no key has lse = sink. A
  sink of -inf has no effect. It has a gradient.
- attn_bias. Numbers that are added to the scores (float16, bfloat16, float32 or float64; -inf hides a key), or bool,
  where False hides a key. Numbers have a gradient, summed in float32 over the dimensions that were broadcast.
  Shapes: with dense batches it broadcasts to (batch, heads, seqlen_q, seqlen_k), or to (batch1, batch2, heads,
  seqlen_q, seqlen_k) with batch1 * batch2 = batch and batch2 varying fastest; with a cache, seqlen_k is its capacity;
  with variable length it is (heads or 1, total_q or 1, at least max_seqlen_k, or 1). Columns count from the first key
  of each entry.
  Speed: kernels read keys in pairs, so a bias with an odd number of keys, or whose keys are not adjacent in memory, is
  copied first. Kernels for Hopper also copy, in the forward and in the backward, a bias whose rows do not start at
  multiples of 16 bytes, and a bool mask, to two bytes for each element; with them, a float32 bias takes several times
  as long as one in the dtype of q. The gradient of a bias is computed by a kernel of its own after the backward, the
  same in every run. Slow: float64; one number for all keys.
- key_ranges. int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), for variable length (heads or 1, total_q, 2 or 4): row i
  sees only the keys from start to end - 1, or with four numbers also from start2 to end2 - 1. They are intersected with
  all other masks; bounds may lie outside of the keys, and a range whose end is not above its start is empty.
  `flash_attn.masks` builds them. Kernels take one range: two are two calls, whose results are merged.
- attention_chunk. C above 0: with D = seqlen_k - seqlen_q, row i sees the keys of its chunk only, from
  C * floor((i + D) / C) to that + C - 1. 0 means no chunks.
- causal as a tensor. bool or int32 (batch,): which entries are causal. Slow: together with rotary_cos.
- seqused_q, seqused_k. int32 (batch,): how many rows and keys of each entry are used; masks and ALiBi count as if there
  were no others. Unused rows have out = 0 and lse = +inf, even with a sink, and pass no gradient. Slow: seqused_q with
  learnable_sink or alibi_slopes.
- v may have another head_dim than k; out has that of v. Kernels for sm_90 are built for keys of 129 to 192 channels
  with values of up to 128, as in DeepSeek's models; for other pairs the narrower one is padded with zeros on chip.
- Head dims of 257 to 576. Slow: those above 512.
- return_lse. Return (out, softmax_lse). Not with return_attn_probs, which returns softmax_lse as well.
- return_max_logit. Append float32 (heads,), the largest score of each head in the whole call, without the sink; -inf
  if no key is seen. No gradient.

With dropout, return_attn_probs cannot be combined with the arguments of this list that change which keys a row sees,
nor with attn_bias or return_max_logit.

Tensors are float16 or bfloat16, all of one dtype and on one device, with any strides; float32 runs on the reference
backend. Kernels take head dims of 1 to 512, and 1 to 256 where S_dmask is computed; larger ones run on the reference
backend. None as an optional argument means its default. Numbers may be Python's, numpy's, or tensors without
dimensions.

Wrong types raise TypeError, wrong shapes and values ValueError, before anything is written. Both errors are also
RuntimeErrors, because that is what flash-attn raises. The contents of cu_seqlens, cache_seqlens, block_table and
similar tensors are checked on the CPU only, because reading them on a GPU would wait for the device. On a GPU,
positions beyond the capacity of a cache are neither written nor attended to; any other wrong entry in these tensors
has undefined results.

Second derivatives, forward mode, and `jvp` and `grad` of torch.func, nested to any depth, are computed by operations of
plain torch, on every device, with memory quadratic in the sequence and one warning. First derivatives with
create_graph=True still come from the kernels. `vmap` alone calls them for one entry after the other, and torch warns of
that. Third derivatives by torch.autograd are not supported: they raise a RuntimeError that names once_differentiable.
In compiled graphs `jvp`, `grad` and `vmap` work; torch refuses second derivatives of torch.autograd, and tangents of
torch.autograd.forward_ad are lost.

Keys and values that lengths, causality, windows, chunks and key_ranges hide from all rows of an entry may hold
anything, also NaN. Those that attn_bias hides, by False or -inf, must be finite: their scores are computed, and NaN
plus -inf is NaN, as is, on a GPU, a weight of 0 times NaN. If some row sees a value that is NaN or infinite, other
rows of that entry and head may become NaN in the same channel although a mask hides the value from them: a GPU
multiplies whole tiles of rows, in which a weight of 0 times NaN is NaN. On the CPU only rows that see it do.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from flash_attn import _flash_attn_gpu as flash_attn_gpu  # noqa: F401  (other packages import this name from here)
from flash_attn import _removed
from flash_attn._ops import checks, flash_attn

if TYPE_CHECKING:
    from typing_extensions import Unpack

USE_TRITON_ROCM = False
_NO_WINDOW = (-1, -1)
Length = int | Tensor | None  # an upper bound of lengths; a tensor has no dimensions
__getattr__ = _removed.getattr_of(__name__, _removed.UNPADDED)


class _CacheFeatures(TypedDict, total=False):
    learnable_sink: Tensor | None
    attn_bias: Tensor | None
    key_ranges: Tensor | None
    attention_chunk: int


class _Features(_CacheFeatures, total=False):
    seqused_q: Tensor | None
    seqused_k: Tensor | None


class _CacheFeaturesAndResults(_CacheFeatures, total=False):
    return_max_logit: bool


class _FeaturesAndResults(_Features, total=False):
    return_lse: bool
    return_max_logit: bool


@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: Literal[False] = False,
    **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Literal[True],
    **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Attention of dense batches. The top of this module says what is computed.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads: query head h uses head
            h // (heads / heads_k). NaN or infinity in v may also spoil rows that do not see it; see the top of this
            module.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); numbers to add to the scores, or bool, where False
            hides a key; or None.
        key_ranges: int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), the interval or two of keys that each row sees, as
            `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (batch, heads, seqlen_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

    The top of this module says more of the arguments from return_attn_probs on.

    Returns:
        out, shaped like q, with the head_dim of v; or (out, softmax_lse, S_dmask). With return_lse (out, softmax_lse);
        return_max_logit appends max_logit.

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    # Without options, by a shorter way. Types are compared, so that all that needs a check goes the other.
    if (
        (causal is True or causal is False) and alibi_slopes is None and deterministic is False
        and type(dropout_p) is float and dropout_p == 0 and type(softcap) is float and softcap == 0
        and type(window_size) is tuple and window_size == _NO_WINDOW
        and return_attn_probs is return_lse is return_max_logit is False
        and learnable_sink is attn_bias is key_ranges is seqused_q is seqused_k is None
        and type(attention_chunk) is int and attention_chunk == 0
    ):  # fmt: skip
        plain = flash_attn.plain_forward(q, k, v, softmax_scale, causal)
        if plain is not None:
            return plain
    _check_given("v", v)
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        q, k, v,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_func` with keys and values in one tensor. Its gradient is packed in the same way.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim), keys first.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit: as
            in `flash_attn_func`.

    Returns:
        out, shaped like q; or (out, softmax_lse, S_dmask). With return_lse (out, softmax_lse); return_max_logit appends
        max_logit.

    Example:
        >>> q, kv = torch.randn(2, 128, 8, 64).bfloat16(), torch.randn(2, 256, 2, 4, 64).bfloat16()
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 128, 8, 64])
    """
    checks.packed("kv", kv, 2, "(batch, seqlen_k, 2, heads_k, head_dim)")
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        q, kv, None,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_func` with queries, keys and values in one tensor. Its gradient is packed in the same way.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim): queries, keys, values.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit: as
            in `flash_attn_func`.

    Returns:
        out (batch, seqlen, heads, head_dim); or (out, softmax_lse, S_dmask). With return_lse (out, softmax_lse);
        return_max_logit appends max_logit.

    Example:
        >>> qkv = torch.randn(2, 128, 3, 8, 64, dtype=torch.bfloat16)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        qkv, None, None,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, block_table: Tensor | None = None,
    **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], block_table: Tensor | None = None,
    **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Attention of sequences of different lengths, concatenated without padding.

    Arguments:
        q: (total_q, heads, head_dim).
        k, v: (total_k, heads_k, head_dim); with block_table, (num_pages, page_size, heads_k, head_dim), any page size.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), starting at 0: entry b has the tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. Entries may be empty. Tokens after the last entry give 0.
        max_seqlen_q, max_seqlen_k: int, 0-d integer tensor or None: an upper bound of the lengths. A tensor is not
            read, because that would wait for the device, except with dropout and return_attn_probs, where it sets the
            shape of S_dmask and must be given.
        block_table: int32 (batch, pages of an entry) or None: key j of entry b is at position j % page_size of
            page block_table[b, j // page_size]; lengths still come from cu_seqlens_k, limited to what the pages of the
            entry can hold. The backward raises, because keys in pages have no gradient.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit: as
            in `flash_attn_func`; for their shapes with variable length see the top of this module.

    Returns:
        out, shaped like q, with the head_dim of v; or (out, softmax_lse, S_dmask), where softmax_lse is
        (heads, total_q). With return_lse (out, softmax_lse); return_max_logit appends max_logit.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    _check_given("v", v)
    _check_given("cu_seqlens_q", cu_seqlens_q)
    _check_given("cu_seqlens_k", cu_seqlens_k)
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        q, k, v,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        block_table=block_table,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool | Tensor = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_varlen_func` with keys and values in one tensor. Its gradient is packed in the same way.

    Arguments:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, heads_k, head_dim), keys first.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as in `flash_attn_varlen_func`.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit: as
            in `flash_attn_func`; for their shapes with variable length see the top of this module.

    Returns:
        out, shaped like q, with the head_dim of v; or (out, softmax_lse, S_dmask), where softmax_lse is
        (heads, total_q). With return_lse (out, softmax_lse); return_max_logit appends max_logit.

    Example:
        >>> q, kv = torch.randn(7, 8, 64).bfloat16(), torch.randn(9, 2, 8, 64).bfloat16()
        >>> cu_q, cu_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 4, 9], dtype=torch.int32)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_q, cu_k, 4, 5).shape
        torch.Size([7, 8, 64])
    """
    checks.packed("kv", kv, 2, "(total_k, 2, heads_k, head_dim)")
    _check_given("cu_seqlens_q", cu_seqlens_q)
    _check_given("cu_seqlens_k", cu_seqlens_k)
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        q, kv, None,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: Literal[False] = False,
    **features: "Unpack[_Features]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, *, return_attn_probs: Literal[True],
    **features: "Unpack[_Features]",
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    **features: "Unpack[_FeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Length, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_lse: bool = False, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`flash_attn_varlen_func` with queries, keys and values in one tensor. Its gradient is packed in the same way.

    Arguments:
        qkv: (total, 3, heads, head_dim): queries, keys, values.
        cu_seqlens: int32 (batch + 1,), starting at 0: entry b has the tokens cu_seqlens[b] to cu_seqlens[b + 1] - 1.
        max_seqlen: int, 0-d integer tensor or None: an upper bound of the lengths.
        dropout_p: probability, at least 0 and less than 1, with which a weight is dropped; the others are divided by
            1 - dropout_p. Pass 0 in evaluation.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less (aligned to the bottom right). A
            row that sees no key gives 0. Or bool or int32 (batch,): which entries are causal.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None. They
            have no gradient and must not require one.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and S_dmask; the top of this module says what they are.
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit: as
            in `flash_attn_func`; for their shapes with variable length see the top of this module.

    Returns:
        out (total, heads, head_dim); or (out, softmax_lse, S_dmask), where softmax_lse is (heads, total). With
        return_lse (out, softmax_lse); return_max_logit appends max_logit.

    Example:
        >>> qkv, cu_seqlens = torch.randn(7, 3, 8, 64).bfloat16(), torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    checks.packed("qkv", qkv, 3, "(total, 3, heads, head_dim)")
    _check_given("cu_seqlens", cu_seqlens)
    out, softmax_lse, s_dmask, _, max_logit = flash_attn.forward(
        qkv, None, None,
        softmax_scale, causal, window_size, return_attn_probs,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit),
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
        cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
    )  # fmt: skip
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    return _several(out, softmax_lse, s_dmask, max_logit, return_lse)


@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: Literal[False] = False, **features: "Unpack[_CacheFeatures]",
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0, *,
    return_softmax_lse: Literal[True], **features: "Unpack[_CacheFeatures]",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False, **features: "Unpack[_CacheFeaturesAndResults]",
) -> Any: ...  # fmt: skip
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None, cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None, cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool | Tensor = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, rotary_interleaved: bool = True, alibi_slopes: Tensor | None = None, num_splits: int = 0,
    return_softmax_lse: bool = False,
    *, learnable_sink: Tensor | None = None, attn_bias: Tensor | None = None, key_ranges: Tensor | None = None,
    attention_chunk: int = 0, return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Attention of new queries over cached keys and values; appends new keys and values to the cache first.

    Entry b of the batch uses row cache_batch_idx[b] (or b) of the cache; n = cache_seqlens[b] of its positions are
    filled. If k and v are given, they are written, in place, to positions n, n + 1, ... The keys attended to are
    positions cache_leftpad[b] (or 0) to n + seqlen_new - 1; masks, windows and ALiBi count from the first of them, and
    the last query is aligned with the last key. cache_seqlens is not changed. The result has no gradient.

    If rotary_cos and rotary_sin are given, new key t is rotated as position n + t before it is stored. Query i is
    rotated as position n + i if its entry is causal or the call has a window, chunks or key_ranges; otherwise all
    queries are rotated as position n.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, capacity, heads_k, head_dim), the last dimension contiguous; with block_table,
            (num_pages, page_size, heads_k, head_dim), any page size.
        k, v: (batch, seqlen_new, heads_k, head_dim), or None.
        rotary_cos, rotary_sin: (at least capacity, rotary_dim / 2), contiguous, of one floating-point dtype, where
            rotary_dim is a multiple of 16; only together with k.
        cache_seqlens: int, or int32 or int64 (batch,); None means that the whole capacity is filled. A negative length
            in a tensor marks an entry that only pads the batch: whatever the other arguments hold there, nothing is
            read or appended, out is 0, and softmax_lse is +inf, or the sink if there is one.
        cache_batch_idx: int32 (batch,), the row of the cache for each entry; None means its own. Not with block_table.
            If two entries append to the same position, through this argument or through block_table, the results of
            both are undefined.
        cache_leftpad: int32 (batch,), how many positions at the start of each entry are skipped; None means 0.
        block_table: int32 (batch, pages of an entry), or None: position m of entry b is in page
            block_table[b, m // page_size]. A part of a larger table is read where it lies, without a copy.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.
        causal: the last query sees the last key, each query before it one key less.
        window_size: (left, right): how many keys before and after its own position a query sees; -1 means no bound.
        softcap: above 0, a score s becomes softcap * tanh(s / softcap).
        alibi_slopes: float32 (heads,) or (batch, heads): slope * distance is subtracted from a score; or None.
        learnable_sink, attn_bias, key_ranges, attention_chunk, return_max_logit: as in `flash_attn_func`, without a
            gradient.
        rotary_interleaved: rotate pairs (2t, 2t + 1) if true, which is the default here; else pairs
            (t, t + rotary_dim / 2), which is the default of `flash_attn.layers.rotary` and of the modules, and what
            GPT-NeoX and Llama mean.
        num_splits: into how many parts the keys of each entry are divided, at most 128, so that a small batch
            occupies the whole device; the library chooses if it is below 1.
        return_softmax_lse: also return softmax_lse.

    Returns:
        out, shaped like q; or (out, softmax_lse), softmax_lse float32 (batch, heads, seqlen_q). return_max_logit
        appends max_logit.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        >>> q, k, v = (torch.randn(2, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 4, 4))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=100, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    if (  # as in flash_attn_func
        (causal is True or causal is False) and k is v is rotary_cos is rotary_sin is None
        and cache_batch_idx is cache_leftpad is alibi_slopes is None
        and type(softcap) is float and softcap == 0 and type(num_splits) is int and num_splits == 0
        and rotary_interleaved is True and type(window_size) is tuple and window_size == _NO_WINDOW
        and learnable_sink is attn_bias is key_ranges is None and return_softmax_lse is return_max_logit is False
        and type(attention_chunk) is int and attention_chunk == 0
    ):  # fmt: skip
        plain = flash_attn.plain_decode(q, k_cache, v_cache, softmax_scale, causal, cache_seqlens, block_table)
        if plain is not None:
            return plain
    out, softmax_lse, max_logit = flash_attn.decode(
        q, k_cache, v_cache, softmax_scale, causal, window_size,
        cache_seqlens, k, v, rotary_cos, rotary_sin,
        (learnable_sink, attn_bias, key_ranges, attention_chunk, None, None, False, return_max_logit),
        rotary_interleaved=rotary_interleaved,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits,
    )  # fmt: skip
    if max_logit is None:
        return (out, softmax_lse) if return_softmax_lse else out
    return (out, softmax_lse, max_logit) if return_softmax_lse else (out, max_logit)


def _several(
    out: Tensor, softmax_lse: Tensor, s_dmask: Tensor | None, max_logit: Tensor | None, return_lse: bool
) -> tuple[Tensor, ...]:
    """Returns out and the other results that are wanted, in the order in which the functions return them."""
    lse = softmax_lse if return_lse or s_dmask is not None else None
    return tuple(x for x in (out, lse, s_dmask, max_logit) if x is not None)


def _check_given(name: str, value: object) -> None:
    if value is None:
        checks.tensor(name, value)


# ---------------------------------------------------------------------------------------------------------------------
# Names that other packages call (context parallelism, ring attention). Arguments and results are in the order of
# flash-attn 2.8.


def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int,
    window_size_right: int, softcap: float, alibi_slopes: Tensor | None, return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (out, softmax_lse, S_dmask, rng_state); rng_state is int64 (2,), zeros where dropout_p is 0."""
    results = flash_attn.forward(
        q, k, v, softmax_scale, causal, (window_size_left, window_size_right), return_softmax,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return flash_attn.with_tensors(results)


def _flash_attn_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length,
    max_seqlen_k: Length, dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
    block_table: Tensor | None = None, leftpad_k: Tensor | None = None, seqused_k: Tensor | None = None,
    zero_tensors: bool = False, num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (out, softmax_lse, S_dmask, rng_state).

    seqused_k, leftpad_k: int32 (batch,), how many keys of each entry are used and how many of these are skipped.
    zero_tensors changes nothing, since every element is written. num_splits changes nothing; with block_table it must
    be at most 1.
    """
    _check_given("cu_seqlens_q", cu_seqlens_q)
    _check_given("cu_seqlens_k", cu_seqlens_k)
    flash_attn.check_splits_of_pages(num_splits, block_table)
    results = flash_attn.forward(
        q, k, v, softmax_scale, causal, (window_size_left, window_size_right), return_softmax,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, block_table=block_table, leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )  # fmt: skip
    return flash_attn.with_tensors(results)


def _flash_attn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    dropout_p: float, softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int,
    softcap: float, alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Writes dq, dk and dv, and returns softmax_d.

    softmax_lse is used as given, so a caller that holds part of the keys may pass that of all of them.
    """
    return flash_attn.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv,
        softmax_scale, causal, (window_size_left, window_size_right), rng_state,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor, dk: Tensor, dv: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: Length, max_seqlen_k: Length, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size_left: int, window_size_right: int, softcap: float,
    alibi_slopes: Tensor | None, deterministic: bool, rng_state: Tensor | None = None, zero_tensors: bool = False,
) -> Tensor:  # fmt: skip
    """`_flash_attn_backward` for variable length. zero_tensors changes nothing, since every element is written."""
    _check_given("cu_seqlens_q", cu_seqlens_q)
    _check_given("cu_seqlens_k", cu_seqlens_k)
    return flash_attn.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv,
        softmax_scale, causal, (window_size_left, window_size_right), rng_state,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip


# Other packages also call these four as torch.ops.flash_attn._flash_attn_forward and so on.
_QKV = "Tensor q, Tensor k, Tensor v"
_RESULTS = "Tensor out, Tensor softmax_lse"
_GRADIENTS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_BOUNDS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_SCORES = "float dropout_p, float softmax_scale, bool causal"
_WINDOW = "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes"
_FORWARD_RETURNS = f"({_RESULTS}, Tensor S_dmask, Tensor rng_state)"

flash_attn.define_composite(
    f"_flash_attn_forward({_QKV}, {_SCORES}, {_WINDOW}, bool return_softmax) -> {_FORWARD_RETURNS}",
    _flash_attn_forward,
)
flash_attn.define_composite(
    f"_flash_attn_varlen_forward({_QKV}, {_BOUNDS}, {_SCORES}, SymInt window_size_left=-1, "
    "SymInt window_size_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, bool zero_tensors=False, "
    f"SymInt num_splits=0) -> {_FORWARD_RETURNS}",
    _flash_attn_varlen_forward,
)
flash_attn.define_composite(
    f"_flash_attn_backward(Tensor dout, {_QKV}, {_RESULTS}, {_GRADIENTS}, {_SCORES}, {_WINDOW}, bool deterministic, "
    "Tensor? rng_state=None) -> Tensor softmax_d",
    _flash_attn_backward,
)
flash_attn.define_composite(
    f"_flash_attn_varlen_backward(Tensor dout, {_QKV}, {_RESULTS}, {_GRADIENTS}, {_BOUNDS}, {_SCORES}, {_WINDOW}, "
    "bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor softmax_d",
    _flash_attn_varlen_backward,
)

_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Width of the key blocks over which S_dmask keeps its running maximum; see the top of this module."""
    return flash_attn.block_size_n(head_dim, is_dropout)


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, copied if its last dimension is not contiguous; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m."""
    return (x + m - 1) // m * m


def _function_class(name: str, function: Callable) -> type:
    """A class as in flash-attn 2.8: `apply` takes the arguments of `function` by position, then is_grad_enabled."""
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    num_parameters = sum(p.kind is positional for p in inspect.signature(function).parameters.values())

    def apply(*args):
        wanted = args[num_parameters] if len(args) > num_parameters else True
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args[:num_parameters])

    return type(name, (), {"apply": staticmethod(apply)})


FlashAttnFunc = _function_class("FlashAttnFunc", flash_attn_func)
FlashAttnKVPackedFunc = _function_class("FlashAttnKVPackedFunc", flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _function_class("FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _function_class("FlashAttnVarlenFunc", flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _function_class("FlashAttnVarlenKVPackedFunc", flash_attn_varlen_kvpacked_func)
FlashAttnVarlenQKVPackedFunc = _function_class("FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func)
