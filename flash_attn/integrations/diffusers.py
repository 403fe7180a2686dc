"""Attention of diffusers' models, as a backend of its dispatcher.

    import flash_attn.integrations.diffusers
    name = flash_attn.integrations.diffusers.register()
    pipeline.transformer.set_attention_backend(name)

diffusers' own backends for flash-attn take no masks. This one takes bool masks and masks of numbers, fewer heads of
keys than of queries, and windows, on every device that the library runs on.
"""

from typing import Any

import torch
from torch import Tensor

from flash_attn import masks
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks
from flash_attn._ops.flash_attn_features import BIAS_DTYPES
from flash_attn.flash_attn_interface import flash_attn_func

__all__ = ["attention", "register"]


def register(name: str = "fused_attention") -> str:
    """Make the backend known to diffusers. Doing so again changes nothing.

    diffusers names its backends in an enumeration, which gets one more member.

    Arguments:
        name: lower-case, as `set_attention_backend` makes all names, and not one of diffusers' own.

    Returns:
        name.

    Raises:
        ImportError: diffusers is not installed, or has no dispatcher that takes backends; 0.42 has.
        ValueError: name is not lower-case, or taken.

    Example:
        >>> from flash_attn.integrations.diffusers import register
        >>> name = register()                                                              # doctest: +SKIP
        >>> pipeline.transformer.set_attention_backend(name)                               # doctest: +SKIP
    """
    try:
        from diffusers.models.attention_dispatch import AttentionBackendName as Names
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry
    except ImportError as error:
        raise ImportError(
            "flash_attn.integrations.diffusers needs a diffusers with an attention_dispatch, as 0.42 has: install it"
        ) from error
    if not isinstance(name, str) or name != name.lower():
        raise ArgumentError(f"name must be a lower-case string, found {name!r}")
    members: Any = Names._value2member_map_
    if name not in members:
        member: Any = str.__new__(Names, name)
        member._name_, member._value_ = name.upper(), name
        Names._member_map_[member._name_] = members[name] = member
        Names._member_names_.append(member._name_)
    elif registry._backends.get(members[name]) is not attention:
        raise ArgumentError(f"name must not be one of diffusers' own, found {name!r}")
    registry.register(members[name])(attention)
    return name


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    _parallel_config: object = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention as diffusers' dispatcher calls it.

    Arguments:
        query, key, value: (batch, seqlen, heads, head_dim); key and value may have fewer heads, enable_gqa or not.
        attn_mask: bool, true where a row sees a key, or numbers to add: (batch, seqlen_k), or what broadcasts to
            (batch, heads, seqlen_q, seqlen_k). The values of a bool mask are read, which waits for the device, except
            under torch.compile: a mask that only hides padding at the end becomes lengths, one with one or two ranges
            of keys in each row becomes key_ranges, and any other stays a bias.
        dropout_p, is_causal, scale, window_size: those of `flash_attn.flash_attn_func`; is_causal needs as many queries
            as keys.
        return_lse: also return the logarithm of the sum of exponentials, float32 (batch, heads, seqlen_q).
        _parallel_config: must be None, since the keys are on one device.

    Returns:
        out, (batch, seqlen_q, heads, head_dim of value), or (out, lse). Rows that see no key are 0.

    Example:
        >>> from flash_attn.integrations.diffusers import attention
        >>> q, k, v = torch.randn(3, 2, 5, 4, 16)
        >>> padding = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        >>> attention(q, k, v, attn_mask=padding).shape
        torch.Size([2, 5, 4, 16])
    """
    if _parallel_config is not None:
        raise ArgumentError(
            f"_parallel_config must be None, found a {type(_parallel_config).__name__}: use the backend "
            '"flash" for context parallelism'
        )
    if is_causal and query.shape[1] != key.shape[1]:
        raise ArgumentError(
            "is_causal must be false unless there are as many queries as keys, since backends align them differently, "
            f"found true for {query.shape[1]} and {key.shape[1]}: give attn_mask"
        )
    arguments: dict[str, Any] = {}
    if attn_mask is not None:
        is_whole = not is_causal and tuple(window_size) == (-1, -1)
        checks.tensor("attn_mask", attn_mask)
        arguments = _arguments(attn_mask, query, key.shape[1], is_whole)
    return flash_attn_func(
        query, key, value, dropout_p, scale, is_causal, window_size, **arguments, return_lse=return_lse
    )


def _arguments(mask: Tensor, query: Tensor, seqlen_k: int, is_whole: bool) -> dict[str, Tensor]:
    """A mask as arguments of attention. is_whole: no other mask is given, which lengths would align to the last key."""
    batch, seqlen_q, heads, _ = query.shape
    if mask.dim() == 2 and mask.shape == (batch, seqlen_k):
        mask = mask[:, None, None]
    checks.broadcasts("attn_mask", mask, (batch, heads, seqlen_q, seqlen_k), dtypes=BIAS_DTYPES, device=query.device)
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype != torch.bool or mask.shape[-1] != seqlen_k or torch.compiler.is_compiling():
        return {"attn_bias": mask}
    if mask.all():
        return {}
    ranges = masks.from_bool(mask)
    if ranges is None:
        return {"attn_bias": mask}
    if is_whole and ranges.shape[1:] == (1, 1, 2) and not ranges[..., 0].any():
        return {"seqused_k": ranges[:, 0, 0, 1].expand(batch).contiguous()}
    return {"key_ranges": ranges.expand(-1, -1, seqlen_q, -1)}
