"""Attention without parameters, as modules: by flash attention, or by torch with a padding mask.

out = FlashSelfAttention(causal=True)(qkv)                # (batch, seqlen, 3, heads, head_dim) -> (..., head_dim)
"""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flash_attn._ops import checks, invariance
from flash_attn.context_parallel import Plan, cp_attn_kvpacked_func, cp_attn_qkvpacked_func
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of ALiBi for `nheads` heads (Press et al., arXiv:2108.12409).

    For a power of two n they are 2 ** (-8 i / n), i = 1 ... n. For other numbers they are the slopes of the power of
    two below, followed by every second slope of the power of two above. Raises ValueError if nheads is not positive.

    >>> from flash_attn.modules.mha import get_alibi_slopes
    >>> get_alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    checks.integer("nheads", nheads)
    checks.number("nheads", nheads, nheads > 0, "positive")
    below = 2 ** math.floor(math.log2(nheads))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2 ** (-4 * i / below) for i in range(1, 2 * (nheads - below), 2)]


class _FlashAttention(nn.Module):
    """The options of FlashSelfAttention and FlashCrossAttention."""

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool,
        softmax_scale: float | None,
        attention_dropout: float,
        window_size: tuple[int, int],
        alibi_slopes: Tensor | None,
        deterministic: bool,
        softcap: float,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic
        self.softcap = softcap

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_FlashAttention":
        """Move the slopes with the module, but keep their values: a cast would round them, to_empty would lose them."""
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        moved = self.alibi_slopes
        if slopes is not None and moved is not None and not slopes.is_meta:
            self.alibi_slopes = slopes if moved.is_meta else slopes.to(moved.device)
        return self

    def slopes_on(self, device: torch.device) -> Tensor | None:
        """The slopes on the device of the inputs. They stay there, since a CUDA graph cannot copy them from the CPU.

        They are on another device only for a module on the meta device, and, if it was made there, until the first call
        after it got its parameters.
        """
        slopes = self.alibi_slopes
        if slopes is None or slopes.device == device:
            return slopes
        if torch.compiler.is_compiling():
            return slopes.to(device)
        with torch.inference_mode(False):  # training may follow, which cannot save an inference tensor
            moved = slopes.to(device)
        if not moved.is_meta:
            self.alibi_slopes = moved
        return moved

    def _options(self, causal: bool | None, device: torch.device) -> dict[str, Any]:
        return dict(
            dropout_p=_dropout_p(self.drop),
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            alibi_slopes=self.slopes_on(device),
            deterministic=self.deterministic,
            softcap=self.softcap,
        )


class FlashSelfAttention(_FlashAttention):
    """`flash_attn_qkvpacked_func`, or `flash_attn_varlen_qkvpacked_func`, as a module.

    Arguments:
        attention_dropout: probability of dropout, in training only.
        The others are those of `flash_attn_func`. alibi_slopes becomes a buffer outside the state dict.

    >>> from flash_attn.modules.mha import FlashSelfAttention
    >>> FlashSelfAttention(causal=True)(torch.randn(2, 16, 3, 4, 32)).shape
    torch.Size([2, 16, 4, 32])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic, softcap)

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        cp_plan: Plan | None = None,
    ) -> Tensor:
        """Attention of qkv (batch, seqlen, 3, heads, head_dim), or (total, 3, heads, head_dim) with cu_seqlens.

        causal: overrides that of the module unless None. cu_seqlens: int32 (batch + 1,), where each sequence starts.
        max_seqlen: the greatest length of a sequence. cp_plan: a `flash_attn.context_parallel.Plan`, if seqlen are the
        tokens of one rank of it. Returns (batch, seqlen, heads, head_dim) or (total, heads, head_dim). Raises what
        `flash_attn_qkvpacked_func` raises, and ValueError for cp_plan with cu_seqlens.
        """
        if cp_plan is not None:
            _refuse_lengths(cu_seqlens)
            return cast(Tensor, cp_attn_qkvpacked_func(qkv, plan=cp_plan, **self._options(causal, qkv.device)))
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal, qkv.device))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal, qkv.device))


class FlashCrossAttention(_FlashAttention):
    """`flash_attn_kvpacked_func`, or `flash_attn_varlen_kvpacked_func`, as a module.

    The arguments are those of `FlashSelfAttention`, but in another order.

    >>> from flash_attn.modules.mha import FlashCrossAttention
    >>> FlashCrossAttention()(torch.randn(2, 3, 4, 32), torch.randn(2, 16, 2, 4, 32)).shape
    torch.Size([2, 3, 4, 32])
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        softcap: float = 0.0,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic, softcap)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | Tensor | None = None,
        cp_plan: Plan | None = None,
    ) -> Tensor:
        """Attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, heads_kv, head_dim).

        With cu_seqlens and cu_seqlens_k, q is (total_q, heads, head_dim) and kv (total_k, 2, heads_kv, head_dim).
        max_seqlen, max_seqlen_k: the greatest length of a sequence of q and of kv. causal: overrides that of the module
        unless None. cp_plan: as in `FlashSelfAttention`; q and kv are then of the same tokens. Returns a tensor like q.
        Raises what `flash_attn_kvpacked_func` raises, and ValueError for cp_plan with cu_seqlens.
        """
        if cp_plan is not None:
            _refuse_lengths(cu_seqlens)
            return cast(Tensor, cp_attn_kvpacked_func(q, kv, plan=cp_plan, **self._options(causal, q.device)))
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal, q.device))
        if cu_seqlens_k is None:
            raise TypeError("cu_seqlens_k must be a tensor with cu_seqlens, found None")
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal, q.device)
        )


def _refuse_lengths(cu_seqlens: Tensor | None) -> None:
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens must be None with cp_plan, which has the lengths of documents; found a tensor")


class _TorchAttention(nn.Module):
    """What SelfAttention and CrossAttention share: they have neither windows nor ALiBi nor a soft cap."""

    window_size = (-1, -1)
    softcap = 0.0

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def slopes_on(self, device: torch.device) -> None:
        """The slopes of ALiBi: none."""

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool | None,
        key_padding_mask: Tensor | None,
        same_tokens: bool,
    ) -> Tensor:
        invariance.refuse_torch_attention()
        causal = self.causal if causal is None else causal
        is_causal = False  # not the comparison itself: with symbolic sizes it would not be a bool
        if causal and key_padding_mask is None and q.shape[1] == k.shape[1]:
            is_causal = True
        mask = None if is_causal else _mask(q, k, causal, key_padding_mask, same_tokens)
        no_key = None
        if mask is not None:
            # The softmax of a row without keys would be NaN. So such a row attends to all keys, and is set to 0 later.
            no_key = ~mask.any(dim=-1, keepdim=True)
            mask = mask | no_key
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=_dropout_p(self.drop),
            is_causal=is_causal,
            scale=self.softmax_scale or None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out = out if no_key is None else out.masked_fill(no_key, 0.0)
        return out.transpose(1, 2)


class CrossAttention(_TorchAttention):
    """Attention by torch.nn.functional.scaled_dot_product_attention, with a padding mask.

    Arguments:
        causal: a query sees keys up to its own position; the last query is at the position of the last key.
        softmax_scale: head_dim ** -0.5 if None.
        attention_dropout: probability of dropout, in training only.

    >>> from flash_attn.modules.mha import CrossAttention
    >>> CrossAttention()(torch.randn(2, 3, 4, 32), torch.randn(2, 16, 2, 4, 32)).shape
    torch.Size([2, 3, 4, 32])
    """

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
        same_tokens: bool = False,
    ) -> Tensor:
        """Attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, heads_kv, head_dim).

        key_padding_mask: (batch, seqlen_k) bool, true for keys that count; with causal, the last query of a row is then
        at the position of the last of that many keys. causal: overrides that of the module unless None. same_tokens:
        queries and keys are of the same tokens, so that a query sees keys up to its own position, whatever the padding.
        Returns a tensor like q, 0 for queries that see no key. Raises TypeError or ValueError for tensors that do not
        fit together.
        """
        k, v = _unpacked("kv", kv, 2)
        checks.tensor("q", q, shape=(kv.shape[0], None, None, kv.shape[-1]), device=kv.device)
        fits = q.shape[2] == 0 if kv.shape[3] == 0 else q.shape[2] % kv.shape[3] == 0
        checks.number("kv's number of heads", kv.shape[3], fits, "a divisor of q's, {}", q.shape[2])
        return self._attend(q, k, v, causal, key_padding_mask, same_tokens)


class SelfAttention(_TorchAttention):
    """`CrossAttention` of packed queries, keys and values.

    >>> from flash_attn.modules.mha import SelfAttention
    >>> SelfAttention(causal=True)(torch.randn(2, 16, 3, 4, 32)).shape
    torch.Size([2, 16, 4, 32])
    """

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """Attention of qkv (batch, seqlen, 3, heads, head_dim).

        key_padding_mask: (batch, seqlen) bool, true for keys that count. causal: overrides that of the module unless
        None. Returns (batch, seqlen, heads, head_dim), 0 for queries that see no key. Raises TypeError or ValueError
        for tensors that do not fit together.
        """
        q, k, v = _unpacked("qkv", qkv, 3)
        return self._attend(q, k, v, causal, key_padding_mask, same_tokens=True)


def _mask(q: Tensor, k: Tensor, causal: bool, key_padding_mask: Tensor | None, same_tokens: bool) -> Tensor | None:
    """The keys that each query sees, bool, broadcast to (batch, heads, seqlen_q, seqlen_k); None means all."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    mask: Tensor | None = None
    end: int | Tensor = seqlen_k  # the position after the last query
    if key_padding_mask is not None:
        shape = q.shape[0], seqlen_k
        checks.tensor("key_padding_mask", key_padding_mask, dtypes=(torch.bool,), shape=shape, device=q.device)
        mask = key_padding_mask[:, None, None]
        end = seqlen_k if same_tokens else mask.sum(-1, keepdim=True)
    if not causal or (mask is None and seqlen_q == 1):
        return mask
    last = torch.arange(seqlen_q, device=q.device)[:, None] - seqlen_q + end
    visible = torch.arange(seqlen_k, device=q.device) <= last
    return visible if mask is None else mask & visible


def _unpacked(name: str, packed: Tensor, parts: int) -> tuple[Tensor, ...]:
    checks.tensor(name, packed)
    checks.has_shape(name, packed, (None, None, parts, None, None))
    return packed.unbind(2)


def _dropout_p(drop: nn.Module) -> float:
    """What `drop` drops of the weights of attention, which are never in memory for it to be called with."""
    if type(drop).forward is nn.Dropout.forward and isinstance(drop, nn.Dropout):
        return drop.p if drop.training else 0.0
    if isinstance(drop, nn.Identity):
        return 0.0
    raise TypeError(
        f"drop must be nn.Dropout or nn.Identity, found {type(drop).__name__}: attention never has its weights in "
        "memory, so another module cannot be called with them"
    )
