"""Attention with an additive bias, under the names and signatures of flash-attn's module for Triton.

The functions are those of `flash_attn`, and run its kernels. The bias has a gradient, too.
"""

import torch

from flash_attn._ops import checks
from flash_attn.flash_attn_interface import flash_attn_func as _attend


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """softmax(softmax_scale * q k^T + bias) v, where the bias is added to the scaled scores.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        k, v: (batch, seqlen_k, heads_k, head_dim), where heads_k divides heads.
        bias: floating point, of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k); or None. A key of bias
            -inf is hidden; a row without keys gives 0.
        causal: bool; the last query sees the last key.
        softmax_scale: float, at least 0; None means head_dim ** -0.5.

    Returns:
        out, shaped like q.

    Errors are those of `flash_attn.flash_attn_func`.

    Example:
        >>> from flash_attn.flash_attn_triton import flash_attn_func
        >>> q, k, v = (torch.randn(2, 16, 4, 32) for _ in range(3))
        >>> flash_attn_func(q, k, v, torch.randn(4, 16, 16), True).shape
        torch.Size([2, 16, 4, 32])
    """
    return _attend(q, k, v, softmax_scale=softmax_scale, causal=causal, attn_bias=bias)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """`flash_attn_func` with keys and values in one tensor.

    Arguments:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim), keys first.
        bias: floating point, of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k), added to the scaled
            scores; or None.
        causal: the last query sees the last key.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.

    Returns:
        out, shaped like q.

    Example:
        >>> from flash_attn.flash_attn_triton import flash_attn_kvpacked_func
        >>> q, kv = torch.randn(2, 16, 4, 32), torch.randn(2, 24, 2, 4, 32)
        >>> flash_attn_kvpacked_func(q, kv).shape
        torch.Size([2, 16, 4, 32])
    """
    checks.packed("kv", kv, 2, "(batch, seqlen_k, 2, heads_k, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """`flash_attn_func` with queries, keys and values in one tensor.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim): queries, keys, values.
        bias: floating point, of a shape that broadcasts to (batch, heads, seqlen_q, seqlen_k), added to the scaled
            scores; or None.
        causal: the last query sees the last key.
        softmax_scale: factor of the scores, at least 0; None means head_dim ** -0.5.

    Returns:
        out (batch, seqlen, heads, head_dim).

    Example:
        >>> from flash_attn.flash_attn_triton import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 32), torch.randn(16, 16)).shape
        torch.Size([2, 16, 4, 32])
    """
    checks.packed("qkv", qkv, 3, "(batch, seqlen, 3, heads, head_dim)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, bias, causal, softmax_scale)
