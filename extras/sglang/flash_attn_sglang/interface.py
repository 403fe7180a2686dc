"""The two functions that SGLang's loader of FlashAttention-3 wants, computed by this project's `flash_attn`.

scheduler_metadata, pack_gqa and sm_margin change nothing but speed there, so they are accepted and have no effect; so
are the descales of tensors in 16 bits. Keys and values may be in float8_e4m3fn, and queries then, too. What is not
computed raises a NotImplementedError that names the argument: qv and only_qv, other tensors in 8 bits, float8 of dense
batches, and rotary_seqlens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flash_attn

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLOAT8 = torch.float8_e4m3fn


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn.flash_attn_with_kvcache` by the arguments of SGLang, whose 28 first ones are positional.

    Returns:
        out, shaped like q; with return_softmax_lse (out, softmax_lse).

    Raises:
        NotImplementedError: for qv, only_qv, rotary_seqlens, float8 of dense batches, and tensors in 8 bits other than
            float8_e4m3fn, which are not computed here.
        ValueError, TypeError: for what `flash_attn.flash_attn_with_kvcache` refuses.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 512, 4, 64, dtype=torch.bfloat16)
        >>> q = torch.randn(2, 1, 8, 64, dtype=torch.bfloat16)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=100, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    new = None if k is None else cu_seqlens_k_new  # engines pass it without new keys, too
    _refuse(qv=qv, only_qv=only_qv or None, rotary_seqlens=rotary_seqlens, cu_seqlens_k_new=new)
    descales = _descales(q, k_cache, q_descale, k_descale, v_descale)
    _check_dtypes(bool(descales), q=q, k_cache=k_cache, v_cache=v_cache)
    return flash_attn.flash_attn_with_kvcache(
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
        page_table,
        softmax_scale,
        causal,
        tuple(window_size),
        softcap,
        rotary_interleaved,
        None,
        num_splits,
        return_softmax_lse,
        learnable_sink=sinks,
        attention_chunk=attention_chunk or 0,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=None if cu_seqlens_q is None else max_seqlen_q,
        out=out,
        **descales,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int | None = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn.flash_attn_varlen_func` by the arguments of SGLang; without cu_seqlens_q, of dense batches.

    Returns:
        out, shaped like q; with return_softmax_lse (out, softmax_lse).

    Raises:
        NotImplementedError: for qv, only_qv, rotary_seqlens, float8 of dense batches, and tensors in 8 bits other than
            float8_e4m3fn, which are not computed here.
        ValueError, TypeError: for what `flash_attn.flash_attn_varlen_func` refuses, and pages of dense batches.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    _refuse(qv=qv, only_qv=only_qv or None)
    descales = {} if cu_seqlens_q is None else _descales(q, k, q_descale, k_descale, v_descale)
    _check_dtypes(bool(descales), q=q, k=k, v=v)
    options: dict[str, Any] = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=tuple(window_size),
        softcap=softcap,
        learnable_sink=sinks,
        attention_chunk=attention_chunk or 0,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        return_lse=return_softmax_lse,
    )
    if cu_seqlens_q is None:
        for name, value in (("page_table", page_table), ("cu_seqlens_k", cu_seqlens_k), ("out", out)):
            if value is not None:
                raise ValueError(f"{name} must be None without cu_seqlens_q, found a {type(value).__name__}")
        return flash_attn.flash_attn_func(q, k, v, **options)
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        block_table=page_table,
        num_splits=num_splits,
        out=out,
        **options,
        **descales,
    )


def _descales(q: Any, k: Any, q_descale: Any, k_descale: Any, v_descale: Any) -> dict[str, Any]:
    """The scales of keys in float8, and of queries if they are; of keys in 16 bits, no scales."""
    if getattr(k, "dtype", None) != _FLOAT8:
        return {}
    q_descale = q_descale if getattr(q, "dtype", None) == _FLOAT8 else None
    return dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def _check_dtypes(float8: bool, **tensors: Any) -> None:
    dtypes = (*_DTYPES, _FLOAT8) if float8 else _DTYPES
    for name, x in tensors.items():
        if isinstance(x, Tensor) and x.dtype not in dtypes:
            raise NotImplementedError(f"{name} must be {' or '.join(map(str, dtypes))} here, found {x.dtype}")


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must not be given, found a {type(value).__name__}: it is not computed")
