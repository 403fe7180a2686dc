"""FlashAttention-3's functions, by its names and arguments, computed by this project's `flash_attn`.

    from flash_attn_interface import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)          # (batch, seqlen, heads, head_dim)

What is computed, the shapes and the errors are those of `flash_attn.flash_attn_interface`. Different are:

- softmax_lse is -inf where a row sees no key. It is float32 (batch, heads, seqlen_q), or (heads, total_q) where queries
  are packed, and has a gradient.
- page_table is `block_table`, qkv may hold fewer heads of keys than of queries, and s_aux (heads,), which
  FlashAttention-3 itself does not have but its copies in other packages do, is `learnable_sink`. SGLang's copy calls it
  sinks: where sequences are packed and with a cache, both names are taken.
- pack_gqa, sm_margin and scheduler_metadata change nothing, and num_splits only matters with a cache and where
  sequences are packed.
- Keys and values may be in float8_e4m3fn with a cache and where sequences are packed; float8 of dense batches is a
  TypeError.
- qv and rotary_seqlens must be None, only_qv False, and cu_seqlens_k_new must be None where keys are appended: anything
  else raises a NotImplementedError that names it.

Any head_dim, GPU and CPU that `flash_attn` serves will do.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn._errors import ArgumentError
from flash_attn._ops import checks
from flash_attn._ops.lse import unseen_as_minus_inf
from flash_attn.flash_attn_interface import (
    _function_class,
    get_scheduler_metadata,
    maybe_contiguous,
    round_multiple,
)
from flash_attn_3._C import attention, bwd, fwd, fwd_combine

__all__ = [
    "FlashAttnFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "flash_attn_3_cuda",
    "flash_attn_3_gpu",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "round_multiple",
    "round_up_headdim",
]

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor]

flash_attn_3_gpu = flash_attn_3_cuda = torch.ops.flash_attn_3


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """`flash_attn.flash_attn_func` by FlashAttention-3's arguments.

        from flash_attn_interface import flash_attn_func

    softmax_lse is -inf where a row sees no key. s_aux (heads,) is `learnable_sink`. num_splits, pack_gqa and sm_margin
    change nothing. qv must be None: else a NotImplementedError names it. Tensors in float8 are a TypeError. All else is
    as in `flash_attn.flash_attn_func`.

    Returns:
        out (batch, seqlen_q, heads, head_dim of v); with return_attn_probs (out, softmax_lse).

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        >>> out.shape, softmax_lse.shape
        (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    """
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        s_aux=s_aux,
    )
    return (out, unseen_as_minus_inf(lse)) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    page_table: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    only_qv: bool = False,
) -> Result:
    """`flash_attn.flash_attn_varlen_func` by FlashAttention-3's arguments.

        from flash_attn_interface import flash_attn_varlen_func

    softmax_lse is -inf where a row sees no key. page_table is `block_table`; s_aux or sinks, (heads,), is
    `learnable_sink`. pack_gqa, sm_margin and scheduler_metadata change nothing. k and v may be in float8_e4m3fn, with
    k_descale and v_descale. qv must be None, and only_qv False: else a NotImplementedError names them. All else is as
    in `flash_attn.flash_attn_varlen_func`.

    Arguments:
        page_table: int32 (batch, pages of an entry); k and v are then (num_pages, page_size, heads_k, head_dim), and
            the lengths of keys come from seqused_k, or else from cu_seqlens_k. Keys in pages have no gradient.
        out: a tensor to write the result to, and to return.
        return_softmax_lse: another name of return_attn_probs, as SGLang's copy has it.
        only_qv: must be False, like qv.

    Returns:
        out (total_q, heads, head_dim of v); with return_attn_probs (out, softmax_lse). Rows that seqused_q leaves out
        are 0.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
        torch.Size([7, 8, 64])
    """
    _refuse_only_qv(only_qv)
    checks.tensor("cu_seqlens_q", cu_seqlens_q)
    if page_table is None or seqused_k is None:
        checks.tensor("cu_seqlens_k", cu_seqlens_k)
    if page_table is not None:  # a cache, whose lengths are those used
        seqused_k = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        cu_seqlens_k = None
    result, lse = attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        s_aux=_one_of(s_aux=s_aux, sinks=sinks),
        out=out,
    )
    return (result, unseen_as_minus_inf(lse)) if return_attn_probs or return_softmax_lse else result


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Result:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim); or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim), first the
            heads of the queries, then those of the keys, then those of the values.
        num_heads_q: for the second form.

    Returns:
        out (batch, seqlen, heads, head_dim); with return_attn_probs (out, softmax_lse).

    Example:
        >>> qkv = torch.randn(2, 128, 8 + 2 * 2, 64, dtype=torch.bfloat16)
        >>> flash_attn_qkvpacked_func(qkv, num_heads_q=8).shape
        torch.Size([2, 128, 8, 64])
    """
    checks.tensor("qkv", qkv)
    if qkv.dim() == 5:
        checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
        q, k, v = qkv, None, None
    else:
        checks.ndim("qkv", qkv, "(batch, seqlen, num_heads_q + 2 * heads_k, head_dim)")
        q, k, v = _split_heads(qkv, num_heads_q)
    out, lse = attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        s_aux=s_aux,
    )
    return (out, unseen_as_minus_inf(lse)) if return_attn_probs else out


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
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    only_qv: bool = False,
) -> Result:
    """`flash_attn.flash_attn_with_kvcache` by FlashAttention-3's arguments.

        from flash_attn_interface import flash_attn_with_kvcache

    softmax_lse is -inf where a row sees no key. page_table is `block_table`; s_aux or sinks, (heads,), is
    `learnable_sink`. pack_gqa, sm_margin and scheduler_metadata change nothing. Caches may be in float8_e4m3fn, with
    k_descale and v_descale. qv, rotary_seqlens, and cu_seqlens_k_new where keys are appended, must be None, and only_qv
    False: else a NotImplementedError names them. All else is as in `flash_attn.flash_attn_with_kvcache`.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim); or packed, (total_q, heads, head_dim) with cu_seqlens_q (batch + 1,).
        k_cache, v_cache: (batch_cache, capacity, heads_k, head_dim), or (num_pages, page_size, heads_k, head_dim) with
            page_table (batch, pages of an entry).
        k, v: (batch, seqlen_new, heads_k, head_dim), written to positions cache_seqlens and on; or None.
        rotary_interleaved: neighbouring channels are pairs, the default here as there; GPT-NeoX and Llama mean halves.
        out: a tensor to write the result to, and to return.
        only_qv: must be False, like qv.

    Returns:
        out, shaped like q; with return_softmax_lse (out, softmax_lse), two values as 2.8 has them and not the four of
        FlashAttention-3, since what calls this takes two.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        >>> q, k, v = (torch.randn(2, 1, heads, 64, dtype=torch.bfloat16) for heads in (8, 4, 4))
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=100, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    _refuse_only_qv(only_qv)
    result, lse = attention(
        q,
        k_cache,
        v_cache,
        k_new=k,
        v_new=v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        seqused_k=cache_seqlens,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        s_aux=_one_of(s_aux=s_aux, sinks=sinks),
        out=out,
    )
    return (result, unseen_as_minus_inf(lse)) if return_softmax_lse else result


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over parts of the keys; see `flash_attn.functional.combine`.

    Arguments:
        out_partial: (parts, batch, seqlen_q, heads, head_dim).
        lse_partial: float32 (parts, batch, seqlen_q, heads), with heads last; -inf where a row saw nothing of a part.
        out: written and returned, if given.
        out_dtype: that of out_partial by default.

    Returns:
        out (batch, seqlen_q, heads, head_dim) and lse float32 (batch, seqlen_q, heads).

    Example:
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 8, 4, 16), torch.randn(3, 2, 8, 4))
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 4, 16]), torch.Size([2, 8, 4]))
    """
    return fwd_combine(out_partial, lse_partial, out, out_dtype)


def round_up_headdim(head_size: int) -> int:
    """The head_dim among those that FlashAttention-3 has kernels for: 64, 96, 128, 192, 256.

    Raises ValueError above 256.

    Example:
        >>> from flash_attn_interface import round_up_headdim
        >>> round_up_headdim(80)
        96
    """
    for size in (64, 96, 128, 192, 256):
        if head_size <= size:
            return size
    raise ArgumentError(f"head_size must be at most 256, found {head_size}")


# ---------------------------------------------------------------------------------------------------------------------
# Names that other packages call (context parallelism, ring attention). These have had several signatures: arguments are
# taken by all their names.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    out: Tensor | None = None,
    window_size: Window | None = None,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, and two empty tensors), without a gradient.

    out and out_ are two names of one argument, and so are window_size and the pair of window_size_left and _right.
    """
    return fwd(
        q,
        k,
        v,
        k_new,
        v_new,
        qv,
        _one_of(out=out, out_=out_),
        cu_seqlens_q,
        cu_seqlens_k,
        cu_seqlens_k_new,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_batch_idx,
        leftpad_k,
        rotary_cos,
        rotary_sin,
        seqlens_rotary,
        q_descale,
        k_descale,
        v_descale,
        softmax_scale,
        causal,
        *_window(window_size, window_size_left, window_size_right),
        attention_chunk,
        softcap,
        rotary_interleaved,
        scheduler_metadata,
        num_splits,
        pack_gqa,
        sm_margin,
        s_aux=s_aux,
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    *,
    causal: bool | None = None,
    window_size: Window | None = None,
) -> Tensor:
    """Writes dq, dk and dv, and returns softmax_d. softmax_lse is used as given: it may be that of more keys.

    causal and is_causal are two names of one argument. sequed_q and sequed_k are the lengths used, as they are spelled
    there.
    """
    return bwd(
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
        sequed_q,
        sequed_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        _one_of(causal=causal, is_causal=is_causal or None) or False,
        *_window(window_size, window_size_left, window_size_right),
        softcap,
        deterministic,
        sm_margin,
    )[0]


FlashAttnFunc = _function_class("FlashAttnFunc", flash_attn_func, "*torch.randn(3, 1, 7, 4, 16)")
FlashAttnVarlenFunc = _function_class(
    "FlashAttnVarlenFunc", flash_attn_varlen_func, "*torch.randn(3, 7, 4, 16), cu_seqlens, cu_seqlens, 4, 4"
)
FlashAttnQKVPackedFunc = _function_class(
    "FlashAttnQKVPackedFunc", flash_attn_qkvpacked_func, "torch.randn(1, 7, 3, 4, 16)"
)


def _split_heads(qkv, num_heads_q):
    """Views of q, k and v in one tensor that holds the heads of each after those of the other."""
    if num_heads_q is None:
        raise ArgumentError("num_heads_q must be given for qkv of 4 dimensions, found None")
    heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2)
    if rest or heads_k < 1:
        raise ArgumentError(
            f"num_heads_q must leave as many heads for k as for v of {qkv.shape[2]}, found {num_heads_q}"
        )
    return qkv.split([num_heads_q, heads_k, heads_k], dim=2)


def _refuse_only_qv(only_qv: bool) -> None:
    """Refuse SGLang's flag of a call whose scores come from qv alone."""
    checks.flag("only_qv", only_qv)
    if only_qv:
        raise NotImplementedError("only_qv must be False, found True: queries of the values (qv) are not supported")


def _one_of(**names: Any) -> Any:
    """The value of an argument that has two names; at most one of them may be given."""
    (one, first), (other, second) = names.items()
    if first is not None and second is not None and first is not second:
        raise ArgumentError(f"{one} must be None where {other} is given, found both: they are the same argument")
    return second if first is None else first


def _window(window_size: Window | None, left: int, right: int) -> Window:
    given = None if (left, right) == (-1, -1) else (left, right)
    if window_size is not None and given is not None and given != tuple(window_size):
        raise ArgumentError(f"window_size must be {given} as window_size_left and _right say, found {window_size}")
    return given or window_size or (-1, -1)
