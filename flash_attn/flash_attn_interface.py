"""Attention, as flash-attn 2.8 calls it: seven public functions, and the private ones that other packages call.

    from flash_attn import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)  # (batch, seqlen, heads, head_dim)

Each says in its docstring what it computes. The work is done in flash_attn/_ops/flash_attn.py. (Dao et al. 2022,
arXiv:2205.14135; Dao 2023, arXiv:2307.08691.)
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, Protocol, cast, overload

import torch
from torch import Tensor

from flash_attn import _flash_attn_gpu as flash_attn_gpu  # noqa: F401  (other packages import this name from here)
from flash_attn import _removed
from flash_attn._ops import checks, flash_attn
from flash_attn._ops.flash_attn_features import FeatureArguments

USE_TRITON_ROCM = False
Length = int | Tensor | None  # an upper bound of lengths; a tensor has no dimensions
__path__: list[str] = []  # as `getattr_of` needs it
__getattr__ = _removed.getattr_of(__name__, _removed.UNPADDED)

_Arguments = ParamSpec("_Arguments")


class _Attention(Protocol[_Arguments]):
    """What a type checker knows of the functions below: a flag that is given by name tells what comes back."""

    # The last overload takes every call, so mypy says that others overlap with it. The first one that fits counts.
    @overload
    def __call__(self, *args: Any, return_max_logit: bool, **kwargs: Any) -> Any: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_attn_probs: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, *args: Any, return_softmax_lse: Literal[True], **kwargs: Any
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(self, *args: Any, return_attn_probs: bool, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_lse: bool, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: Any, return_softmax_lse: bool, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Tensor: ...


def _attention(function: Callable[_Arguments, Any]) -> _Attention[_Arguments]:
    """Returns the function as it is; type checkers see an `_Attention` with its arguments."""
    return cast("_Attention[_Arguments]", function)


@_attention
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention of dense batches, softmax(q k^T) v, forward and backward, in memory linear in the sequence.

        from flash_attn import flash_attn_func

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    float16 and bfloat16 run in kernels on an NVIDIA GPU; float32, and everything on other devices, in plain PyTorch.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads: query head h uses head
            h // (heads / heads_k). NaN or infinity in v may spoil the same channel of rows that do not see it.
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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); numbers to add to the scores, or bool, where False
            hides a key; or None.
        key_ranges: int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), the interval or two of keys that each row sees, as
            `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (batch, heads, seqlen_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

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
        (causal is True or causal is False)
        and alibi_slopes is None
        and deterministic is False
        and type(dropout_p) is float
        and dropout_p == 0
        and type(softcap) is float
        and softcap == 0
        and return_attn_probs is return_lse is return_max_logit is False
        and learnable_sink is attn_bias is key_ranges is seqused_q is seqused_k is None
        and type(attention_chunk) is int
        and attention_chunk == 0
    ):
        plain = flash_attn.plain_forward(q, k, v, softmax_scale, causal, window_size)
        if plain is not None:
            return plain
    _check_given("v", v)
    features = FeatureArguments(
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit
    )
    results = flash_attn.forward(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _wanted(results, return_lse)


@_attention
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, softmax(q k^T) v, with keys and values in one tensor, whose gradient is packed in the same way.

        from flash_attn import flash_attn_kvpacked_func

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    The same as `flash_attn_func(q, kv[:, :, 0], kv[:, :, 1])`.

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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); numbers to add to the scores, or bool, where False
            hides a key; or None.
        key_ranges: int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), the interval or two of keys that each row sees, as
            `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (batch, heads, seqlen_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

    Returns:
        out, shaped like q; or (out, softmax_lse, S_dmask). With return_lse (out, softmax_lse); return_max_logit appends
        max_logit.

    Example:
        >>> q, kv = torch.randn(2, 128, 8, 64).bfloat16(), torch.randn(2, 256, 2, 4, 64).bfloat16()
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 128, 8, 64])
    """
    checks.packed("kv", kv, 2, "(batch, seqlen_k, 2, heads_k, head_dim)")
    features = FeatureArguments(
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit
    )
    if _has_no_options(causal, dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, features):
        plain = flash_attn.plain_packed(q, kv, softmax_scale, causal, window_size)
        if plain is not None:
            return plain
    results = flash_attn.forward(
        q,
        kv,
        None,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _wanted(results, return_lse)


@_attention
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, softmax(q k^T) v, with q, k and v in one tensor, whose gradient is packed in the same way.

        from flash_attn import flash_attn_qkvpacked_func

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    The same as `flash_attn_func(*qkv.unbind(2))`, with one copy less where they come from one projection.

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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (batch, heads, seqlen_q, seqlen_k); numbers to add to the scores, or bool, where False
            hides a key; or None.
        key_ranges: int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), the interval or two of keys that each row sees, as
            `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (batch, heads, seqlen_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

    Returns:
        out (batch, seqlen, heads, head_dim); or (out, softmax_lse, S_dmask). With return_lse (out, softmax_lse);
        return_max_logit appends max_logit.

    Example:
        >>> qkv = torch.randn(2, 128, 3, 8, 64, dtype=torch.bfloat16)
        >>> flash_attn_qkvpacked_func(qkv, causal=True).shape
        torch.Size([2, 128, 8, 64])
    """
    checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
    features = FeatureArguments(
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit
    )
    if _has_no_options(causal, dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, features):
        plain = flash_attn.plain_packed(qkv, None, softmax_scale, causal, window_size)
        if plain is not None:
            return plain
    results = flash_attn.forward(
        qkv,
        None,
        None,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return _wanted(results, return_lse)


@_attention
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Length = None,
    max_seqlen_k: Length = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    scheduler_metadata: Tensor | None = None,
    qv: None = None,
    q_v: None = None,
    q_descale: float | Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, softmax(q k^T) v, of packed sequences of different lengths, whose keys may be in pages.

        from flash_attn import flash_attn_varlen_func

    Each entry is a sequence that sees no other one.

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    Arguments:
        q: (total_q, heads, head_dim).
        k, v: (total_k, heads_k, head_dim); with block_table, (num_pages, page_size, heads_k, head_dim), any page size.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), starting at 0: entry b has the tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. Entries may be empty. Tokens after the last entry give 0. With block_table and
            seqused_k, cu_seqlens_k is ignored, whatever it holds, and may be left out.
        max_seqlen_q, max_seqlen_k: int, 0-d integer tensor or None: an upper bound of the lengths; None and 0 mean that
            none is known, as where a CUDA graph is captured before the lengths are. A tensor is not read, because that
            would wait for the device, except with dropout and return_attn_probs, where it sets the shape of S_dmask and
            must be given.
        block_table: int32 (batch, pages of an entry) or None: key j of entry b is at position j % page_size of
            page block_table[b, j // page_size]. Lengths come from seqused_k, or from cu_seqlens_k, limited to what the
            pages of the entry can hold: on the CPU, more is an error. A part of a larger table is read where it lies.
            The backward raises, because keys in pages have no gradient.
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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (heads, total_q, max_seqlen_k), whose columns count from the first key of each entry;
            numbers to add to the scores, or bool, where False hides a key; or None.
        key_ranges: int32 (heads or 1, total_q, 2 or 4), the interval or two of keys that each row sees, counted from
            the first key of its entry, as `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (heads, total_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).
        out: a tensor like q, with the head_dim of v, to write the result to, and to return; its last dimension must be
            contiguous. It must share no memory with the inputs, and nothing may require grad. None makes a new one.
        return_softmax_lse: another name of return_lse.
        num_splits: the most parts into which the keys of an entry are divided, at most 128, so that a small batch
            occupies the whole device; 1 means none, and the library chooses if it is below 1. Overridden where the
            level of `flash_attn.set_batch_invariant` is 2.
        scheduler_metadata: int32, what `get_scheduler_metadata` returned, or None; it changes nothing.
        qv, q_v: must be None: queries of the values are not supported. Concatenate them to q, and v to k.
        k_descale, v_descale: for k and v in torch.float8_e4m3fn beside a q of 16 bits, what their codes are multiplied
            by: a number, or float32 that broadcasts to (batch, heads_k), such as (heads_k,); None means 1. The result
            has the bits of the call with k, v and q converted to float16, but for its dtype, with softmax_scale times
            k_descale in float32, and with out times v_descale before it is rounded. There is no gradient, no dropout
            and no S_dmask, and what q has beyond float16's range becomes infinite. Long rows over a cache take memory
            for all keys that the block table has room for in 16 bits, or for the whole cache if that is less.
            `flash_attn.functional` makes codes.
        q_descale: the same for a q in float8, which is converted; None otherwise. out has then the dtype of the
            argument out, or bfloat16.

    Returns:
        out, shaped like q, with the head_dim of v; or (out, softmax_lse, S_dmask), where softmax_lse is
        (heads, total_q). With return_lse (out, softmax_lse); return_max_logit appends max_logit.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    if scheduler_metadata is not None:
        _check_hint(scheduler_metadata)
    if (  # as in flash_attn_func
        (causal is True or causal is False)
        and alibi_slopes is None
        and deterministic is False
        and type(dropout_p) is float
        and dropout_p == 0
        and type(softcap) is float
        and softcap == 0
        and return_attn_probs is return_max_logit is False
        and (return_lse is True or return_lse is False)
        and (return_softmax_lse is True or return_softmax_lse is False)
        and learnable_sink is attn_bias is key_ranges is seqused_q is qv is q_v is q_descale is None
        and type(attention_chunk) is int
        and attention_chunk == 0
    ):
        plain = flash_attn.plain_varlen(
            q,
            k,
            v,
            softmax_scale,
            causal,
            window_size,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            block_table,
            seqused_k,
            num_splits,
            out,
            return_lse or return_softmax_lse,
            k_descale,
            v_descale,
        )
        if plain is not None:
            return plain
    _refuse_qv(qv=qv, q_v=q_v)
    checks.flag("return_softmax_lse", return_softmax_lse)
    _check_given("v", v)
    _check_given("cu_seqlens_q", cu_seqlens_q)
    features = FeatureArguments(
        learnable_sink,
        attn_bias,
        key_ranges,
        attention_chunk,
        seqused_q,
        seqused_k,
        return_lse or return_softmax_lse,
        return_max_logit,
        q_descale,
        k_descale,
        v_descale,
    )
    results = flash_attn.forward(
        q,
        k,
        v,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        out,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=block_table,
        num_splits=num_splits,
    )
    return _wanted(results, return_lse or return_softmax_lse)


@_attention
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` with keys and values in one tensor, whose gradient is packed in the same way.

        from flash_attn import flash_attn_varlen_kvpacked_func

    Each entry is a sequence that sees no other one.

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    Arguments:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, heads_k, head_dim), keys first.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), starting at 0: entry b has the tokens cu_seqlens[b] to
            cu_seqlens[b + 1] - 1. Entries may be empty. Tokens after the last entry give 0.
        max_seqlen_q, max_seqlen_k: int, 0-d integer tensor or None: an upper bound of the lengths; None and 0 mean that
            none is known. A tensor is not read, except with dropout and return_attn_probs.
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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (heads, total_q, max_seqlen_k), whose columns count from the first key of each entry;
            numbers to add to the scores, or bool, where False hides a key; or None.
        key_ranges: int32 (heads or 1, total_q, 2 or 4), the interval or two of keys that each row sees, counted from
            the first key of its entry, as `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (heads, total_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

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
    features = FeatureArguments(
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit
    )
    if _has_no_options(causal, dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, features):
        plain = flash_attn.plain_packed(
            q, kv, softmax_scale, causal, window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        )
        if plain is not None:
            return plain
    results = flash_attn.forward(
        q,
        kv,
        None,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    return _wanted(results, return_lse)


@_attention
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: Length,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn_varlen_func` with q, k and v in one tensor, whose gradient is packed in the same way.

        from flash_attn import flash_attn_varlen_qkvpacked_func

    Each entry is a sequence that sees no other one.

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

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
        return_attn_probs: also return softmax_lse and S_dmask, the weights and which of them dropout has dropped (by
            their sign), which tests of dropout read; empty without dropout.
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (heads, total_q, max_seqlen_k), whose columns count from the first key of each entry;
            numbers to add to the scores, or bool, where False hides a key; or None.
        key_ranges: int32 (heads or 1, total_q, 2 or 4), the interval or two of keys that each row sees, counted from
            the first key of its entry, as `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        seqused_q, seqused_k: int32 (batch,), how many rows and keys of each entry are used; None means all.
        return_lse: also return softmax_lse, float32 (heads, total_q), without S_dmask.
        return_max_logit: also return the largest score of each head, float32 (heads,).

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
    features = FeatureArguments(
        learnable_sink, attn_bias, key_ranges, attention_chunk, seqused_q, seqused_k, return_lse, return_max_logit
    )
    if _has_no_options(causal, dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, features):
        plain = flash_attn.plain_packed(
            qkv, None, softmax_scale, causal, window_size, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
        )
        if plain is not None:
            return plain
    results = flash_attn.forward(
        qkv,
        None,
        None,
        softmax_scale,
        causal,
        window_size,
        return_attn_probs,
        features,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
    )
    return _wanted(results, return_lse)


@_attention
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attn_bias: Tensor | None = None,
    key_ranges: Tensor | None = None,
    attention_chunk: int = 0,
    return_max_logit: bool = False,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: Length = None,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    qv: None = None,
    q_v: None = None,
    q_descale: float | Tensor | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """A step of decoding: appends new keys and values to a cache, in place, and attends to all of it.

        from flash_attn import flash_attn_with_kvcache

    It rotates new queries and keys first, if it is given rotary_cos.

        s(i, j) = softmax_scale * <q[i], k[j]>, changed by softcap, alibi_slopes, attn_bias
        lse[i] = log(sum_j exp(s(i, j))), over the keys of the cache that row i sees
        out[i] = sum_j exp(s(i, j) - lse[i]) * v[j]

    Entry b of the batch uses row cache_batch_idx[b] (or b) of the cache; n = cache_seqlens[b] of its positions are
    filled. If k and v are given, they are written, in place, to positions n, n + 1, ... The keys attended to are
    positions cache_leftpad[b] (or 0) to n + seqlen_new - 1; masks, windows and ALiBi count from the first of them, and
    the last query is aligned with the last key. cache_seqlens is not changed. The result has no gradient.

    If rotary_cos and rotary_sin are given, new key t is rotated as position n + t before it is stored. Query i is
    rotated as position n + i if its entry is causal or the call has a window, chunks or key_ranges; otherwise all
    queries are rotated as position n.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim); or, with cu_seqlens_q, (total_q, heads, head_dim).
        k_cache, v_cache: (batch_cache, capacity, heads_k, head_dim), the last dimension contiguous; with block_table,
            (num_pages, page_size, heads_k, head_dim), any page size.
        k, v: (batch, seqlen_new, heads_k, head_dim), or None.
        rotary_cos, rotary_sin: (rows, rotary_dim / 2), contiguous, of one floating-point dtype, where rotary_dim is a
            multiple of 16; only together with k. A row for each position of the cache, and of each query: these are
            more where an entry at its end has more queries than new keys.
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
        learnable_sink: (heads,), the score of one extra key for each head, whose value is 0; or None.
        attn_bias: broadcasts to (batch, heads, seqlen_q, capacity); numbers to add to the scores, or bool, where False
            hides a key; or None.
        key_ranges: int32 (batch or 1, heads or 1, seqlen_q, 2 or 4), the interval or two of keys that each row sees, as
            `flash_attn.masks` builds them; or None.
        attention_chunk: above 0, a row sees only the keys of its own chunk of that many positions.
        return_max_logit: also return the largest score of each head, float32 (heads,).
        rotary_interleaved: rotate pairs (2t, 2t + 1) if true, which is the default here; else pairs
            (t, t + rotary_dim / 2), which is the default of `flash_attn.layers.rotary` and of the modules, and what
            GPT-NeoX and Llama mean.
        num_splits: into how many parts the keys of each entry are divided, at most 128, so that a small batch
            occupies the whole device; the library chooses if it is below 1. Overridden where the level of
            `flash_attn.set_batch_invariant` is 2.
        return_softmax_lse: also return softmax_lse.
        cu_seqlens_q: int32 (batch + 1,), starting at 0, for entries with different numbers of queries: entry b has the
            rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 of q; or None. Rows after the last entry give 0.
        max_seqlen_q: how many queries an entry has at most, as in `flash_attn_varlen_func`. Without cu_seqlens_q, where
            q says it, it has no effect.
        out: a tensor like q, with the head_dim of v_cache, to write the result to, and to return; its last dimension
            must be contiguous. It must share no memory with the inputs. None makes a new one.
        scheduler_metadata: int32, what `get_scheduler_metadata` returned, or None; it changes nothing.
        qv, q_v: must be None: queries of the values are not supported. Concatenate them to q, and v to k.
        k_descale, v_descale: for caches in torch.float8_e4m3fn beside q, k and v of 16 bits, what their codes are
            multiplied by, as in `flash_attn_varlen_func`. Keys and values that are appended, rotated and in 16 bits,
            are divided by them, and rounded to the nearest code, or to the largest, 448, if they are beyond it. So no
            scale may be 0 then; one on a GPU is not read to check it, and makes largest codes that stand for 0.
        q_descale: the same for a q in float8, which is converted; None otherwise, and where keys are appended. out has
            then the dtype of the argument out, that of k, or bfloat16.

    Returns:
        out, shaped like q; or (out, softmax_lse), softmax_lse float32 (batch, heads, seqlen_q), or (heads, total_q)
        with cu_seqlens_q. return_max_logit appends max_logit.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        >>> q, k, v = (torch.randn(2, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 4, 4))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=100, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    if scheduler_metadata is not None:
        _check_hint(scheduler_metadata)
    if (  # as in flash_attn_func
        (causal is True or causal is False)
        and cache_batch_idx is cache_leftpad is alibi_slopes is None
        and type(softcap) is float
        and softcap == 0
        and (rotary_interleaved is True or rotary_interleaved is False)
        and learnable_sink is attn_bias is key_ranges is qv is q_v is q_descale is None
        and (return_softmax_lse is True or return_softmax_lse is False)
        and return_max_logit is False
        and type(attention_chunk) is int
        and attention_chunk == 0
    ):
        plain = flash_attn.plain_decode(
            q,
            k_cache,
            v_cache,
            softmax_scale,
            causal,
            window_size,
            cache_seqlens,
            block_table,
            k,
            v,
            rotary_cos,
            rotary_sin,
            rotary_interleaved,
            num_splits,
            cu_seqlens_q,
            max_seqlen_q,
            out,
            return_softmax_lse,
            k_descale,
            v_descale,
        )
        if plain is not None:
            return plain
    checks.flag("return_softmax_lse", return_softmax_lse)
    _refuse_qv(qv=qv, q_v=q_v)
    features = FeatureArguments(
        learnable_sink,
        attn_bias,
        key_ranges,
        attention_chunk,
        return_lse=return_softmax_lse,
        return_max_logit=return_max_logit,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    out, softmax_lse, max_logit = flash_attn.decode(
        q,
        k_cache,
        v_cache,
        softmax_scale,
        causal,
        window_size,
        cache_seqlens,
        k,
        v,
        rotary_cos,
        rotary_sin,
        features,
        out,
        rotary_interleaved=rotary_interleaved,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )
    return _wanted((out, softmax_lse, None, None, max_logit), return_softmax_lse)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A tensor to pass as scheduler_metadata, for callers that make one for each step.

    It is a hint that changes no bit of a result: kernels here read the lengths on the device in every launch, so that a
    captured call stays right for other lengths, and need no schedule made before.

    Arguments:
        cache_seqlens: int32 (batch_size,), the lengths; the result is on its device. The others are those of the call
            of attention, by the names that FlashAttention-3 gives them: batch_size, max_seqlen_q, max_seqlen_k,
            num_heads_q, num_heads_kv, headdim, qkv_dtype, headdim_v, cu_seqlens_q, cu_seqlens_k_new, cache_leftpad,
            page_size, max_seqlen_k_new, causal, window_size, attention_chunk, has_softcap, num_splits, pack_gqa,
            sm_margin. They are not looked at.

    Returns:
        int32 (1,).

    Example:
        >>> from flash_attn.flash_attn_interface import get_scheduler_metadata
        >>> get_scheduler_metadata(2, 1, 512, 8, 4, 64, torch.tensor([3, 5], dtype=torch.int32))
        tensor([0], dtype=torch.int32)
    """
    checks.tensor("cache_seqlens", cache_seqlens)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def _has_no_options(causal, dropout_p, softcap, alibi_slopes, deterministic, return_attn_probs, features):
    """Whether a call has no arguments besides its tensors, softmax_scale, causal and window_size."""
    return (  # types are compared, so that all that needs a check goes the other way
        (causal is True or causal is False)
        and type(dropout_p) is float
        and dropout_p == 0
        and type(softcap) is float
        and softcap == 0
        and alibi_slopes is None
        and deterministic is return_attn_probs is False
        and not features.any_given()
    )


def _wanted(results: tuple[Tensor, Tensor | None, Tensor | None, Any, Tensor | None], return_lse: bool) -> Any:
    """Of the results of `flash_attn.forward`, returns those that the caller asked for: out alone, or a tuple."""
    out, softmax_lse, s_dmask, _, max_logit = results
    if s_dmask is None and max_logit is None and not return_lse:
        return out
    lse = softmax_lse if return_lse or s_dmask is not None else None
    return tuple(x for x in (out, lse, s_dmask, max_logit) if x is not None)


def _check_hint(scheduler_metadata: object) -> None:
    checks.tensor("scheduler_metadata", scheduler_metadata, dtypes=(torch.int32,))


def _refuse_qv(**values: object) -> None:
    """Refuse FlashAttention-3's queries of the values, which have two names."""
    for name, value in values.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} must be None, found a {type(value).__name__}: queries of the values are not supported. "
                f"Scores are the same with torch.cat([q, {name}], -1) for q and torch.cat([k, v], -1) for k, beside "
                "the same v; give the softmax_scale, or get that of both head dims together"
            )


def _check_given(name: str, value: object) -> None:
    if value is None:
        checks.tensor(name, value)


# ---------------------------------------------------------------------------------------------------------------------
# Names that other packages call (context parallelism, ring attention). Arguments and results are in the order of
# flash-attn 2.8.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, S_dmask, rng_state); rng_state is int64 (2,), zeros where dropout_p is 0."""
    window = window_size_left, window_size_right
    options = dict(dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes)
    results = flash_attn.forward(q, k, v, softmax_scale, causal, window, return_softmax, **options)
    return flash_attn.with_tensors(results)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, S_dmask, rng_state).

    seqused_k, leftpad_k: int32 (batch,), how many keys of each entry are used and how many of these are skipped. With
    block_table and seqused_k, cu_seqlens_k may hold anything, or be None. zero_tensors changes nothing, since every
    element is written. With block_table, num_splits must be at most 1.
    """
    _check_given("cu_seqlens_q", cu_seqlens_q)
    flash_attn.check_splits_of_pages(num_splits, block_table)
    window = window_size_left, window_size_right
    options = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
        num_splits=num_splits,
    )
    results = flash_attn.forward(q, k, v, softmax_scale, causal, window, return_softmax, **options)
    return flash_attn.with_tensors(results)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes dq, dk and dv, and returns softmax_d.

    softmax_lse is used as given, so a caller that holds part of the keys may pass that of all of them.
    """
    window = window_size_left, window_size_right
    options: dict[str, Any] = dict(
        dropout_p=dropout_p, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic
    )
    return flash_attn.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window, rng_state, **options
    )


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: Length,
    max_seqlen_k: Length,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`_flash_attn_backward` for variable length. zero_tensors changes nothing, since every element is written."""
    _check_given("cu_seqlens_q", cu_seqlens_q)
    _check_given("cu_seqlens_k", cu_seqlens_k)
    window = window_size_left, window_size_right
    options: dict[str, Any] = dict(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return flash_attn.backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window, rng_state, **options
    )


# Other packages also call these four as torch.ops.flash_attn._flash_attn_forward and so on.
_QKV = "Tensor q, Tensor k, Tensor v"
_RESULTS = "Tensor out, Tensor softmax_lse"
_GRADIENTS = "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv"
_BOUNDS = "Tensor cu_seqlens_q, Tensor{} cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_SCORES = "float dropout_p, float softmax_scale, bool causal"
_WINDOW = "SymInt window_size_left, SymInt window_size_right, float softcap, Tensor? alibi_slopes"
_FORWARD_RETURNS = f"({_RESULTS}, Tensor S_dmask, Tensor rng_state)"

flash_attn.define_composite(
    f"_flash_attn_forward({_QKV}, {_SCORES}, {_WINDOW}, bool return_softmax) -> {_FORWARD_RETURNS}",
    _flash_attn_forward,
)
flash_attn.define_composite(
    f"_flash_attn_varlen_forward({_QKV}, {_BOUNDS.format('?')}, {_SCORES}, SymInt window_size_left=-1, "
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
    f"_flash_attn_varlen_backward(Tensor dout, {_QKV}, {_RESULTS}, {_GRADIENTS}, {_BOUNDS.format('')}, {_SCORES}, "
    f"{_WINDOW}, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) -> Tensor softmax_d",
    _flash_attn_varlen_backward,
)

_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Width of the key blocks over which S_dmask keeps its running maximum; see docs/guides/attention.md."""
    return flash_attn.block_size_n(head_dim, is_dropout)


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, copied if its last dimension is not contiguous; None stays None.

    Example:
        >>> from flash_attn.flash_attn_interface import maybe_contiguous
        >>> maybe_contiguous(torch.randn(8, 4).t()).stride()
        (8, 1)
    """
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x: int, m: int) -> int:
    """x rounded up to a multiple of m.

    Example:
        >>> from flash_attn.flash_attn_interface import round_multiple
        >>> round_multiple(100, 64)
        128
    """
    return (x + m - 1) // m * m


def _function_class(name: str, function: Callable, arguments: str) -> type:
    """A class as in flash-attn 2.8: `apply` takes the arguments of `function` by position, then is_grad_enabled.

    arguments: those of an example, for its docstring.
    """
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    num_parameters = sum(p.kind is positional for p in inspect.signature(function).parameters.values())

    def apply(*args):
        wanted = args[num_parameters] if len(args) > num_parameters else True
        with torch.set_grad_enabled(wanted and torch.is_grad_enabled()):
            return function(*args[:num_parameters])

    lengths = ["cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)"] if "Varlen" in name else []
    example = [f"from {function.__module__} import {name}", *lengths, f"{name}.apply({arguments}).shape"]
    doc = (
        f"`{name}.apply` is `{function.__name__}` by position, then is_grad_enabled, or without it.\n\nExample:\n"
        + "".join(f"    >>> {line}\n" for line in example)
        + f"    torch.Size([{'' if lengths else '1, '}7, 4, 16])\n"
    )
    return type(name, (), {"apply": staticmethod(apply), "__doc__": doc, "__module__": function.__module__})


FlashAttnFunc = _function_class("FlashAttnFunc", flash_attn_func, "*torch.randn(3, 1, 7, 4, 16)")
FlashAttnKVPackedFunc = _function_class(
    "FlashAttnKVPackedFunc", flash_attn_kvpacked_func, "torch.randn(1, 7, 4, 16), torch.randn(1, 7, 2, 4, 16)"
)
FlashAttnQKVPackedFunc = _function_class(
    "FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func, "torch.randn(1, 7, 3, 4, 16)"
)
FlashAttnVarlenFunc = _function_class(
    "FlashAttnVarlenFunc", flash_attn_varlen_func, "*torch.randn(3, 7, 4, 16), cu_seqlens, cu_seqlens, 4, 4"
)
FlashAttnVarlenKVPackedFunc = _function_class(
    "FlashAttnVarlenKVPackedFunc",
    flash_attn_varlen_kvpacked_func,
    "torch.randn(7, 4, 16), torch.randn(7, 2, 4, 16), cu_seqlens, cu_seqlens, 4, 4",
)
FlashAttnVarlenQKVPackedFunc = _function_class(
    "FlashAttnVarlenQKVPackedFunc", flash_attn_varlen_qkvpacked_func, "torch.randn(7, 3, 4, 16), cu_seqlens, 4"
)
