"""The functions of vLLM's fork of flash-attn, by its names and arguments, computed by this project's `flash_attn`.

    from flash_attn_vllm.interface import flash_attn_varlen_func, get_scheduler_metadata

Without effect are fa_version (2, 3 and 4 are the same here) and scheduler_metadata, and the descales of tensors in 16
bits, which need none. What is not computed raises a NotImplementedError that names the argument: q_v,
output_scale, keys that are gathered (gather_kv_*), and masks written for a compiler (mask_mod and the arguments beside
it).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import flash_attn

__all__ = ["flash_attn_varlen_func", "get_scheduler_metadata"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FLOAT8 = torch.float8_e4m3fn


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    output_scale: Tensor | None = None,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    gather_kv_valid_length: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn.flash_attn_varlen_func` in vLLM's order, where the longest lengths come before cu_seqlens.

    Arguments:
        q: float16 or bfloat16 (total_q, heads, head_dim).
        k, v: (total_k, heads_k, head_dim), or (num_pages, page_size, heads_k, head_dim) with block_table; like q, or
            in float8_e4m3fn. q may then be in float8, too.
        q_descale, k_descale, v_descale: float32 (batch, heads_k), or what expands to it: what float8 is multiplied by.
        cu_seqlens_k, seqused_k: one of them, int32 (batch + 1,) or (batch,); with block_table, seqused_k. With
            fa_version 4 and no block_table also both: where the keys of an entry begin, and how many of them count.
        window_size: [left, right], or None for no window.
        s_aux: (heads,), the score of each head's sink.
        cp_world_size, cp_rank, cp_tot_seqused_k: of the keys 0, 1, 2, .. of an entry, this process has the keys
            cp_rank, cp_rank + cp_world_size, ..; seqused_k counts these, and cp_tot_seqused_k, int32 (batch,), all.
        dynamic_causal: int32 (batch,), which entries are causal, in the place of causal.
        fa_version, scheduler_metadata, and descales of tensors in 16 bits change nothing.
        q_v, output_scale, gather_kv_* and mask_mod with what is beside it must be None: they are not computed here.
        The others are as in `flash_attn.flash_attn_varlen_func`.

    Returns:
        out like q; with return_softmax_lse (out, softmax_lse), softmax_lse (heads, total_q), +inf where a row sees no
        key and there is no sink; with return_attn_probs as `flash_attn.flash_attn_varlen_func`.

    Raises:
        ValueError, TypeError: for what `flash_attn.flash_attn_varlen_func` refuses, and lengths given twice or not.
        NotImplementedError: for what is not computed here.

    Example:
        >>> q, k, v = (torch.randn(7, 8, 64, dtype=torch.bfloat16) for _ in range(3))
        >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, 4, ends, 4, ends, causal=True, fa_version=3).shape
        torch.Size([7, 8, 64])
    """
    _refuse(
        q_v=q_v,
        output_scale=output_scale,
        mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors,
        aux_tensor_leading_dims=aux_tensor_leading_dims,
        gather_kv_indices=gather_kv_indices,
        gather_kv_valid_length=gather_kv_valid_length,
    )
    float8 = isinstance(k, Tensor) and k.dtype == _FLOAT8
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_dtype(name, x, (*_DTYPES, _FLOAT8) if float8 else _DTYPES)
    if fa_version not in (2, 3, 4):
        raise ValueError(f"fa_version must be 2, 3 or 4, found {fa_version!r}")
    if cu_seqlens_k is None and seqused_k is None:
        raise ValueError("seqused_k must be given if cu_seqlens_k is None, found neither of them")
    if cu_seqlens_k is not None and seqused_k is not None and (fa_version != 4 or block_table is not None):
        raise ValueError(
            "cu_seqlens_k must be None with seqused_k, except with fa_version 4 without block_table, found both of them"
        )
    if block_table is not None and seqused_k is None:
        raise ValueError("seqused_k must be given with block_table, found None")
    if cu_seqlens_k is None and block_table is None:
        raise ValueError("block_table must be given with seqused_k, found None")
    window = (-1, -1) if window_size is None else tuple(window_size)
    causality: bool | Tensor = causal
    if dynamic_causal is not None:
        causality = dynamic_causal
    key_ranges = None
    if cp_world_size != 1:
        causality, window, key_ranges = _interleaved(
            q, cu_seqlens_q, causality, window, cp_world_size, cp_rank, cp_tot_seqused_k
        )
    return flash_attn.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causality,
        window,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        block_table,
        learnable_sink=s_aux,
        key_ranges=key_ranges,
        seqused_k=seqused_k,
        out=out,
        return_softmax_lse=return_softmax_lse,
        num_splits=num_splits,
        scheduler_metadata=scheduler_metadata,
        q_descale=q_descale if getattr(q, "dtype", None) == _FLOAT8 else None,
        k_descale=k_descale if float8 else None,
        v_descale=v_descale if float8 else None,
    )


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
    causal: bool | Tensor = False,
    window_size: Sequence[int] | None = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A hint that changes nothing, int32 (1,) on the device of cache_seqlens: kernels make their own schedules.

    Example:
        >>> get_scheduler_metadata(2, 1, 100, 8, 8, 64, torch.tensor([7, 100], dtype=torch.int32)).shape
        torch.Size([1])
    """
    if not isinstance(cache_seqlens, Tensor):
        raise TypeError(f"cache_seqlens must be a tensor, found a {type(cache_seqlens).__name__}")
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def row_positions(cu_seqlens_q: Tensor, seqlens_k: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(entry, position) of each row, (rows,): the last row of an entry is at its last key. Of rows behind the
    last entry, those of that entry. The device decides, so a CUDA graph may hold it.

    Example:
        >>> from flash_attn_vllm.interface import row_positions
        >>> entry, position = row_positions(torch.tensor([0, 2, 3]), torch.tensor([5, 9]), rows=3)
        >>> entry.tolist(), position.tolist()
        ([0, 0, 1], [3, 4, 8])
    """
    ends = cu_seqlens_q[1:]
    row = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    entry = torch.bucketize(row, ends, right=True).clamp(max=ends.shape[0] - 1)
    return entry, row - ends[entry] + seqlens_k[entry]


def _interleaved(q, cu_seqlens_q, causal, window, world_size, rank, total):
    """causal, window_size and key_ranges for keys of which each of world_size processes has every world_size-th."""
    for name, value, least, most in (
        ("cp_world_size", world_size, 1, None),
        ("cp_rank", rank, 0, world_size - 1 if type(world_size) is int else None),
    ):
        if type(value) is not int or value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} must be an int {bounds}, found {value!r}")
    if isinstance(causal, Tensor):
        raise NotImplementedError("dynamic_causal must be None with cp_world_size above 1, found a tensor")
    left, right = window
    right = 0 if causal else right
    if left < 0 and right < 0:
        return False, (-1, -1), None
    if not isinstance(total, Tensor):
        raise ValueError(
            "cp_tot_seqused_k must be given with cp_world_size above 1 for causal attention and windows, found "
            f"{total!r}"
        )
    _, position = row_positions(cu_seqlens_q, total, q.shape[0])
    start = torch.zeros_like(position)
    if left >= 0:
        start = torch.div(position - left - rank + world_size - 1, world_size, rounding_mode="floor")
    end = torch.full_like(position, 2**31 - 1)
    if right >= 0:
        end = torch.div(position + right - rank, world_size, rounding_mode="floor") + 1
    return False, (-1, -1), torch.stack([start, end], -1).int()[None]


def _check_dtype(name: str, x: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if isinstance(x, Tensor) and x.dtype not in dtypes:
        raise NotImplementedError(
            f"{name} must be {' or '.join(map(str, dtypes))}, found {x.dtype}: of 8 bits, keys and values in {_FLOAT8} "
            "are read"
        )


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, found a {type(value).__name__}: it is not computed here")
