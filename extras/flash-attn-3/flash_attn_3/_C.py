"""FlashAttention-3's ops, computed by flash_attn: as functions, and as torch.ops.flash_attn_3.*

    fwd, bwd, fwd_combine, get_scheduler_metadata

have the arguments of FlashAttention-3 in its order. The ops are registered when this module is imported, unless someone
has registered them before. They are made of the ops of flash_attn, so that graphs and fake tensors pass through them,
and have no gradient; the functions of `flash_attn_interface` have.

What flash_attn does not compute raises a NotImplementedError that names the argument. pack_gqa, sm_margin and
scheduler_metadata change nothing but speed there, so they are accepted and have no effect.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn import functional
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, flash_attn
from flash_attn._ops.flash_attn_features import FeatureArguments
from flash_attn._ops.lse import unseen_as_minus_inf, unseen_as_plus_inf
from flash_attn.flash_attn_interface import _refuse_qv, flash_attn_with_kvcache

__all__ = ["bwd", "fwd", "fwd_combine", "get_scheduler_metadata"]


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: int | Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    deterministic: bool = False,
    s_aux: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every call of FlashAttention-3 but the backward. Returns (out, lse); lse is +inf where a row sees no key.

    Queries are dense or packed (cu_seqlens_q), and so are keys (cu_seqlens_k); or keys are in a cache, whose rows are
    those of the batch, or those of kv_batch_idx, or pages (page_table). k and v may be None where q holds all three.
    """
    _refuse_qv(qv=qv)
    _refuse(
        cu_seqlens_k_new=None if k_new is None else cu_seqlens_k_new,  # engines pass it without new keys, too
        rotary_seqlens=rotary_seqlens,
    )
    scores = softmax_scale, causal, window_size
    descales = dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    features = FeatureArguments(s_aux, attention_chunk=attention_chunk, seqused_q=seqused_q, **descales)
    if cu_seqlens_k is not None and cu_seqlens_q is None:
        raise ArgumentError("cu_seqlens_q must be given with cu_seqlens_k, found None")
    if cu_seqlens_k is not None and (page_table is not None or kv_batch_idx is not None):
        raise ArgumentError("cu_seqlens_k must be None with page_table and kv_batch_idx, found a tensor")
    if cu_seqlens_k is not None and any(x is not None for x in (k_new, v_new, rotary_cos, rotary_sin)):
        raise NotImplementedError(
            "k_new, v_new, rotary_cos and rotary_sin must be None with cu_seqlens_k, found a tensor"
        )
    cached = seqused_k, k_new, v_new, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, cu_seqlens_q
    if cu_seqlens_k is None and any(x is not None for x in cached):
        max_seqlen_q = None if cu_seqlens_q is None else max_seqlen_q
        if seqused_q is None:  # by its short way, if it has one for this call
            return flash_attn_with_kvcache(
                q,
                k,
                v,
                k_new,
                v_new,
                rotary_cos,
                rotary_sin,
                seqused_k,
                kv_batch_idx,
                leftpad_k,
                page_table,
                *scores,
                softcap,
                rotary_interleaved,
                None,
                num_splits,
                return_softmax_lse=True,
                learnable_sink=s_aux,
                attention_chunk=attention_chunk,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=max_seqlen_q,
                out=out,
                **descales,
            )
        out, lse, _ = flash_attn.decode(
            q,
            k,
            v,
            *scores,
            seqused_k,
            k_new,
            v_new,
            rotary_cos,
            rotary_sin,
            features._replace(return_lse=out is not None),
            out,
            rotary_interleaved=rotary_interleaved,
            cache_batch_idx=kv_batch_idx,
            cache_leftpad=leftpad_k,
            block_table=page_table,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            softcap=softcap,
            num_splits=num_splits,
        )
        return out, lse
    packed: dict[str, Any] = {}
    if cu_seqlens_k is not None:
        packed = dict(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            leftpad_k=leftpad_k,
            num_splits=num_splits,
        )
        features = features._replace(seqused_k=seqused_k)
    out, lse, *_ = flash_attn.forward(
        q,
        k,
        v,
        *scores,
        False,
        features._replace(return_lse=out is not None),
        out,
        softcap=softcap,
        deterministic=deterministic,
        **packed,
    )
    return out, lse


@torch.no_grad()
def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    q_v: Tensor | None = None,
    out: Tensor | None = None,
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
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    is_rotary_interleaved: bool = False,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    *,
    s_aux: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (out, softmax_lse, and two empty tensors). softmax_lse is -inf where a row sees no key.

    out: written and returned, if given. k_new, v_new: appended to k and v, which are then a cache.
    """
    result, lse = attention(
        q,
        k,
        v,
        k_new=k_new,
        v_new=v_new,
        qv=q_v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        cu_seqlens_k_new=cu_seqlens_k_new,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        page_table=page_table,
        kv_batch_idx=kv_batch_idx,
        leftpad_k=leftpad_k,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_seqlens=seqlens_rotary,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=(window_size_left, window_size_right),
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=is_rotary_interleaved,
        num_splits=num_splits,
        s_aux=s_aux,
        out=out,
    )
    return result, unseen_as_minus_inf(lse), lse.new_empty(0), lse.new_empty(0)


@torch.no_grad()
def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Writes dq, dk and dv, which must be given. Returns softmax_d and four empty tensors.

    softmax_lse is used as it is given: it may be that of more keys.
    """
    for name, value in (("dq", dq), ("dk", dk), ("dv", dv)):
        if value is None:
            raise ArgumentError(f"{name} must be given, since the gradients are written there; found None")
    checks.tensor("softmax_lse", softmax_lse, dtypes=(torch.float32,))
    softmax_d = flash_attn.backward(
        dout,
        q,
        k,
        v,
        out,
        unseen_as_plus_inf(softmax_lse),
        dq,
        dk,
        dv,
        softmax_scale,
        is_causal,
        (window_size_left, window_size_right),
        given=FeatureArguments(seqused_q=seqused_q, seqused_k=seqused_k),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softcap=softcap,
        deterministic=deterministic,
    )
    return softmax_d, *(softmax_d.new_empty(0) for _ in range(4))


def fwd_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge the results over parts of the keys; see `flash_attn_interface.flash_attn_combine`."""
    out, lse = functional.combine(out_partial, lse_partial.transpose(-1, -2), out=out, out_dtype=out_dtype)
    return out, unseen_as_minus_inf(lse).transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    headdim_v: int,
    qkv_dtype: torch.dtype,
    seqused_k: Tensor,
    *others: Any,
) -> Tensor:
    """Returns int32 (1,) on the device of seqused_k, a hint that changes nothing: kernels make their own schedules."""
    return torch.zeros(1, dtype=torch.int32, device=seqused_k.device)


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, found a {type(value).__name__}: it is not computed here")


_SEQUENCES = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, {}Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None"
)
_SCORES = (
    "float? softmax_scale=None, bool is_causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "{}float softcap=0.0"
)
_OPS = {
    fwd: (
        "(Tensor q, Tensor(a!) k, Tensor(b!) v, Tensor? k_new=None, Tensor? v_new=None, Tensor? q_v=None, "
        f"Tensor(c!)? out=None, {_SEQUENCES.format('Tensor? cu_seqlens_k_new=None, ')}, Tensor? page_table=None, "
        "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
        "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
        f"{_SCORES.format('SymInt attention_chunk=0, ')}, bool is_rotary_interleaved=False, "
        "Tensor? scheduler_metadata=None, SymInt num_splits=0, bool? pack_gqa=None, SymInt sm_margin=0) "
        "-> (Tensor(c!), Tensor, Tensor, Tensor)"
    ),
    bwd: (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a!)? dq=None, "
        f"Tensor(b!)? dk=None, Tensor(c!)? dv=None, {_SEQUENCES.format('')}, {_SCORES.format('')}, "
        "bool deterministic=False, SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    fwd_combine: (
        "(Tensor out_partial, Tensor lse_partial, Tensor(a!)? out=None, ScalarType? out_dtype=None) "
        "-> (Tensor(a!), Tensor)"
    ),
    get_scheduler_metadata: (
        "(SymInt batch_size, SymInt max_seqlen_q, SymInt max_seqlen_k, SymInt num_heads, SymInt num_heads_k, "
        "SymInt headdim, SymInt headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? leftpad_k=None, "
        "SymInt? page_size=None, SymInt max_seqlen_k_new=0, bool is_causal=False, SymInt window_size_left=-1, "
        "SymInt window_size_right=-1, SymInt attention_chunk=0, bool has_softcap=False, SymInt num_splits=0, "
        "bool? pack_gqa=None, SymInt sm_margin=0) -> Tensor"
    ),
}
_LIBRARY = torch.library.Library("flash_attn_3", "FRAGMENT")
for _function, _schema in _OPS.items():
    _name = _function.__name__
    if not hasattr(torch.ops.flash_attn_3, _name):  # else the original's, which was loaded before
        _LIBRARY.define(_name + _schema)
        _LIBRARY.impl(_name, _function, "CompositeImplicitAutograd")
