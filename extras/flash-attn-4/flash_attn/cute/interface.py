"""FlashAttention-4's functions, by its names and arguments, computed by this project's `flash_attn`.

    from flash_attn.cute import flash_attn_func
    out, softmax_lse = flash_attn_func(q, k, v, causal=True, return_lse=True)      # (batch, seqlen, heads, head_dim)

What is computed, the shapes and the errors are those of `flash_attn.flash_attn_interface`. Different are:

- The functions return a pair. softmax_lse is float32 (batch, heads, seqlen_q), or (heads, total_q) where queries are
  packed; -inf where a row sees no key, or the sink; None unless return_lse or an input that requires grad asks for it.
- window_size is (left, right), where None means no bound and a negative number is an offset: (None, -2) hides a row's
  own key and the one before. Where the two leave no key, left + right < 0, there is no window: so (-1, -1) is one, too.
  causal makes right 0.
- page_table is `block_table`.
- pack_gqa, min_seqlen_k, scheduler_metadata and disable_scheduler_metadata change nothing, and num_splits only matters
  with pages and where sequences are packed.
- qv, gather_kv_indices, score_mod, score_mod_bwd, mask_mod, block_sparse_tensors, block_sparse_tensors_bwd,
  aux_tensors, aux_scalars and seqlen_k_per_split must be None: anything else raises a NotImplementedError. These take
  programs for FlashAttention-4's compiler, for which there is none here; many masks are `key_ranges` or `attn_bias` of
  `flash_attn.flash_attn_func`, others are for FlexAttention.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn import functional
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, flash_attn
from flash_attn._ops.flash_attn_features import FeatureArguments
from flash_attn._ops.lse import unseen_as_minus_inf, unseen_as_plus_inf

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func", "get_scheduler_metadata"]

MAX_HEAD_DIM = 512
_FAR = 2**31 - 1  # beyond every key
Window = tuple[int | None, int | None]
Pair = tuple[Tensor, Tensor | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> Pair:
    """`flash_attn.flash_attn_func` by FlashAttention-4's arguments.

        from flash_attn.cute import flash_attn_func

    softmax_lse is None unless return_lse or an input that requires grad asks for it, and -inf where a row sees no key.
    In window_size, None means no bound, and a negative number is an offset. pack_gqa, num_splits where nothing is
    packed, and scheduler_metadata change nothing. What FlashAttention-4 compiles (qv, score_mod, mask_mod, block-sparse
    tensors, and what belongs to them) must be None: else a NotImplementedError names it. All else is as in
    `flash_attn.flash_attn_func`.

    Returns:
        (out, softmax_lse or None), out (batch, seqlen_q, heads, head_dim of v).

    Example:
        >>> q, k, v = (torch.randn(2, 128, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> out, softmax_lse = flash_attn_func(q, k, v, causal=True)
        >>> out.shape, softmax_lse
        (torch.Size([2, 128, 8, 64]), None)
    """
    _refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    out, lse = _attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        deterministic=deterministic,
    )
    return out, _wanted_lse(lse, return_lse, q, k, v, learnable_sink)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Pair:
    """`flash_attn.flash_attn_varlen_func` by FlashAttention-4's arguments.

        from flash_attn.cute import flash_attn_varlen_func

    softmax_lse is None unless return_lse or an input that requires grad asks for it, and -inf where a row sees no key.
    In window_size, None means no bound, and a negative number is an offset. pack_gqa, num_splits where nothing is
    packed, and scheduler_metadata change nothing. What FlashAttention-4 compiles (qv, score_mod, mask_mod, block-sparse
    tensors, and what belongs to them) must be None: else a NotImplementedError names it. All else is as in
    `flash_attn.flash_attn_varlen_func`.

    Arguments:
        q: (total_q, heads, head_dim) with cu_seqlens_q, else (batch, seqlen_q, heads, head_dim).
        k, v: (total_k, heads_k, head_dim) with cu_seqlens_k, which must be given with cu_seqlens_q; or (num_pages,
            page_size, heads_k, head_dim) with page_table; else dense.
        page_table: int32 (batch, pages of an entry); seqused_k says how many of their keys are used.

    Returns:
        (out, softmax_lse or None), out shaped like q, with the head_dim of v. Rows that seqused_q leaves out are 0.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)[0].shape
        torch.Size([7, 8, 64])
    """
    _refuse(
        qv=qv,
        gather_kv_indices=gather_kv_indices,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    out, lse = _attention(
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
        window_size=window_size,
        learnable_sink=learnable_sink,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
    )
    return out, _wanted_lse(lse, return_lse, q, k, v, learnable_sink)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> Pair:
    """Merge the results of attention over parts of the keys; see `flash_attn.functional.combine`.

    Arguments:
        out_partial: (parts, batch, seqlen_q, heads, head_dim), or packed (parts, total_q, heads, head_dim).
        lse_partial: float32 (parts, .., seqlen_q, heads), with heads last; -inf where a row saw nothing of a part.
        out: written and returned, if given.
        out_dtype: that of out_partial by default.
        cu_seqlens: may be given for packed rows, and changes nothing.
        seqused, virtual_batch_idx: must be None.

    Returns:
        (out, lse), lse float32 (.., seqlen_q, heads), or None without return_lse.

    Example:
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 8, 4, 16), torch.randn(3, 2, 8, 4))
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 4, 16]), torch.Size([2, 8, 4]))
    """
    _refuse(seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    out, lse = functional.combine(out_partial, lse_partial.transpose(-1, -2), out=out, out_dtype=out_dtype)
    return out, unseen_as_minus_inf(lse).transpose(-1, -2) if return_lse else None


class SchedulerMetadata(NamedTuple):
    """What `get_scheduler_metadata` returns: a tensor that says nothing.

    Example:
        >>> from flash_attn.cute.interface import SchedulerMetadata, get_scheduler_metadata
        >>> seqused_k = torch.tensor([3, 5], dtype=torch.int32)
        >>> isinstance(get_scheduler_metadata(1, 512, 8, 4, 64, 1, seqused_k=seqused_k), SchedulerMetadata)
        True
    """

    metadata: Tensor


def get_scheduler_metadata(
    max_seqlen_q: int,
    max_seqlen_k: int,
    nheads: int,
    nheads_kv: int,
    headdim: int,
    num_splits: int,
    headdim_v: int | None = None,
    pack_gqa: bool | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqlen_k_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqlen_k_per_split: int | None = None,
    _arch: int | None = None,
) -> SchedulerMetadata:
    """Returns a tuple to be passed as scheduler_metadata. It says nothing: kernels here make their own schedules.

    Example:
        >>> seqused_k = torch.tensor([3, 5], dtype=torch.int32)
        >>> len(get_scheduler_metadata(1, 512, 8, 4, 64, 1, seqused_k=seqused_k))
        1
    """
    for lengths in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        if lengths is not None:
            return SchedulerMetadata(torch.zeros(1, dtype=torch.int32, device=lengths.device))
    raise ArgumentError("one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k must be given, found None")


# ---------------------------------------------------------------------------------------------------------------------
# Names that other packages call. The original's options of tiles are not here; what follows them is
# taken by keyword.


@torch.no_grad()
def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    learnable_sink: Tensor | None = None,
    *,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    _arch: int | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> Pair:
    """Returns (out, softmax_lse or None), without a gradient: two values, as PyTorch takes them up to 2.13 at least.

    out, lse: written and returned, if given.
    """
    _refuse(
        qv=qv,
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        gather_kv_indices=gather_kv_indices,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    result, found = _attention(
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
        window_size=(window_size_left, window_size_right),
        learnable_sink=learnable_sink,
        softcap=softcap or 0.0,
        num_splits=num_splits,
    )
    wanted = _wanted_lse(found, return_lse or lse is not None, q, k, v, learnable_sink)
    return _written("out", out, result), wanted if wanted is None else _written("lse", lse, wanted)


@torch.no_grad()
def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    deterministic: bool = False,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    score_mod: Any = None,
    score_mod_bwd: Any = None,
    mask_mod: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    dlse: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns (dq, dk, dv), written if they are given; with learnable_sink, which lse counts, (dq, dk, dv, dsink)."""
    _refuse(
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors,
    )
    checks.tensor("lse", lse, dtypes=(torch.float32,))
    lse = unseen_as_plus_inf(lse)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    window, ranges = _window(causal, window_size_left, window_size_right, q, k.shape[1], *lengths)
    grads = tuple(torch.empty_like(x) if dx is None else dx for x, dx in ((q, dq), (k, dk), (v, dv)))
    flash_attn.backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        *grads,
        softmax_scale,
        causal,
        window,
        dlse=dlse,
        given=FeatureArguments(key_ranges=ranges, seqused_q=seqused_q, seqused_k=seqused_k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softcap=softcap,
        deterministic=deterministic,
    )
    if learnable_sink is None:
        return grads
    # dsink[h] = - sum over rows of exp(sink[h] - lse) (<dout, out> - dlse)
    delta = (dout.float() * out.float()).sum(-1).transpose(-1, -2)
    delta = delta if dlse is None else delta - dlse
    per_row = (learnable_sink.float()[:, None] - lse).exp() * delta
    return *grads, -per_row.transpose(0, -2).flatten(1).sum(1).to(learnable_sink.dtype)


def _validate_head_dims(head_dim: int, head_dim_v: int, compute_capability: int, alignment: int) -> None:
    """Raise an AssertionError, by which other packages know, unless both head dims are between 1 and 512."""
    for name, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if not 1 <= value <= MAX_HEAD_DIM:
            raise AssertionError(f"{name} must be between 1 and {MAX_HEAD_DIM}, found {value}")


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse); lse is +inf where a row sees neither a key nor a sink."""
    checks.tensor("q", q)
    checks.tensor("k", k)
    seqlen_k = k.shape[1]
    if page_table is not None:
        if cu_seqlens_k is not None:
            raise ArgumentError("cu_seqlens_k must be None with page_table, found a tensor: seqused_k gives lengths")
        seqlen_k *= page_table.shape[1]
    elif (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise NotImplementedError("cu_seqlens_q and cu_seqlens_k must be given together without page_table, found one")
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    window, ranges = _window(causal, *window_size, q, seqlen_k, *lengths)
    scores = softmax_scale, causal, window
    if page_table is not None and cu_seqlens_q is None:
        out, lse, _ = flash_attn.decode(
            q,
            k,
            v,
            *scores,
            seqused_k,
            None,
            None,
            None,
            None,
            FeatureArguments(learnable_sink, key_ranges=ranges, seqused_q=seqused_q),
            block_table=page_table,
            softcap=softcap,
            num_splits=num_splits,
        )
        return out, lse
    if page_table is not None and seqused_k is None:
        seqused_k = page_table.new_full((len(page_table),), seqlen_k)
    features = FeatureArguments(learnable_sink, key_ranges=ranges, seqused_q=seqused_q, seqused_k=seqused_k)
    out, lse, *_ = flash_attn.forward(
        q,
        k,
        v,
        *scores,
        False,
        features,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        block_table=page_table,
        num_splits=None if cu_seqlens_q is None else num_splits,
        softcap=softcap,
        deterministic=deterministic,
    )
    return out, lse


def _window(causal, left, right, q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """Returns window_size and key_ranges of flash_attn for a window here; the latter only for an offset, else None."""
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        left = right = None
    if (left is None or left >= 0) and (right is None or right >= 0):
        return (-1 if left is None else left, -1 if right is None else right), None
    own = _own_key(q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    start = torch.zeros_like(own) if left is None else own - left
    end = torch.full_like(own, _FAR) if right is None else own + right + 1
    return (-1, -1), torch.stack([start, end], -1).int()[..., None, :, :]


def _own_key(q, seqlen_k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
    """The key at the position of each row, the last row being at the last key: (batch or 1, seqlen_q) or (total_q,)."""
    lengths_q = seqused_q if seqused_q is not None else q.shape[-3] if cu_seqlens_q is None else cu_seqlens_q.diff()
    lengths_k = seqused_k if seqused_k is not None else seqlen_k if cu_seqlens_k is None else cu_seqlens_k.diff()
    row = torch.arange(q.shape[-3], device=q.device)
    shift = torch.as_tensor(lengths_k - lengths_q, device=q.device)
    if cu_seqlens_q is None:
        return row + shift.reshape(-1, 1)
    entry = (torch.searchsorted(cu_seqlens_q, row, right=True) - 1).clamp(0, len(cu_seqlens_q) - 2)
    return row - cu_seqlens_q[entry] + shift[entry]


def _wanted_lse(lse, return_lse, *inputs):
    if return_lse or any(x is not None and x.requires_grad for x in inputs):
        return unseen_as_minus_inf(lse)
    return None


def _written(name, target, result):
    """`result`, in `target` if that is given."""
    if target is None:
        return result
    checks.tensor(name, target, dtypes=(result.dtype,), shape=tuple(result.shape), device=result.device)
    return target.copy_(result)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} must be None, found a {type(value).__name__}: it is not computed here. See key_ranges and "
                "attn_bias of flash_attn.flash_attn_func for masks, and FlexAttention for other changes of scores"
            )
