"""Attention as modules: without parameters, on projected heads, and multi-head attention with its projections.

    mha = MHA(embed_dim=768, num_heads=12, causal=True, use_flash_attn=True, rotary_emb_dim=64)
    out = mha(torch.randn(2, 512, 768))                                        # (2, 512, 768)

`use_flash_attn` chooses `flash_attn_func` and its like, which have ALiBi, windows and sequences of different lengths,
in place of torch's scaled_dot_product_attention, which takes a padding mask. Both give the same numbers.

For decoding, the modules keep keys and values in `inference_params.key_value_memory_dict[layer_idx]`, (max_batch_size,
max_seqlen, 2, heads_kv, head_dim), and append to them. See `flash_attn.utils.generation.InferenceParams`.
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flash_attn._ops import checks
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedDense, Linear, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank


def get_alibi_slopes(nheads):
    """The slopes of ALiBi for `nheads` heads, a list of floats (Press et al., arXiv:2108.12409).

    They are 2 ** (-8 i / n), i = 1 ... n, for a power of two n; else those of the power of two below, followed by every
    second of the power of two above.

    >>> get_alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    checks.integer("nheads", nheads)
    checks.number("nheads", nheads, nheads > 0, "positive")
    below = 2 ** math.floor(math.log2(nheads))
    slopes = [2 ** (-8 * i / below) for i in range(1, below + 1)]
    return slopes + [2 ** (-4 * i / below) for i in range(1, 2 * (nheads - below), 2)]


# ---------------------------------------------------------------------------------------------------------------------
# Attention without parameters


class _FlashAttention(nn.Module):
    """The options of FlashSelfAttention and FlashCrossAttention."""

    def __init__(self, causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def _apply(self, fn, recurse=True):
        """Let the slopes follow the module to its device only: 16 bits would round them, to_empty would lose them."""
        slopes = self.alibi_slopes
        super()._apply(fn, recurse)
        if slopes is not None and not slopes.is_meta:
            self.alibi_slopes = slopes if self.alibi_slopes.is_meta else slopes.to(self.alibi_slopes.device)
        return self

    def slopes_on(self, device):
        """The slopes on the device of the inputs, where they stay, since a CUDA graph cannot copy them from the CPU.

        They are elsewhere in a module that is on the meta device, or that was and has been given parameters since.
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

    def _options(self, causal, device):
        return dict(
            dropout_p=self.drop.p if self.training else 0.0,
            softmax_scale=self.softmax_scale,
            causal=self.causal if causal is None else causal,
            window_size=self.window_size,
            alibi_slopes=self.slopes_on(device),
            deterministic=self.deterministic,
        )


class FlashSelfAttention(_FlashAttention):
    """`flash_attn_qkvpacked_func`, or `flash_attn_varlen_qkvpacked_func`, as a module.

    Arguments:
        attention_dropout: probability of dropout, in training only.
        The others are those of `flash_attn_func`. alibi_slopes becomes a buffer outside the state dict.
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        window_size=(-1, -1),
        alibi_slopes=None,
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(self, qkv, causal=None, cu_seqlens=None, max_seqlen=None):
        """Attention of qkv (batch, seqlen, 3, heads, head_dim), or (total, 3, heads, head_dim) with cu_seqlens.

        causal: replaces that of the module unless None. cu_seqlens: int32 (batch + 1,), where each sequence starts.
        max_seqlen: their greatest length. Returns (batch, seqlen, heads, head_dim) or (total, heads, head_dim).
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self._options(causal, qkv.device))
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self._options(causal, qkv.device))


class FlashCrossAttention(_FlashAttention):
    """`flash_attn_kvpacked_func`, or `flash_attn_varlen_kvpacked_func`, as a module.

    The arguments are those of `FlashSelfAttention`, but in another order.
    """

    def __init__(
        self,
        causal=False,
        softmax_scale=None,
        attention_dropout=0.0,
        alibi_slopes=None,
        window_size=(-1, -1),
        deterministic=False,
    ):
        super().__init__(causal, softmax_scale, attention_dropout, window_size, alibi_slopes, deterministic)

    def forward(
        self, q, kv, causal=None, cu_seqlens=None, max_seqlen=None, cu_seqlens_k=None, max_seqlen_k=None
    ):  # fmt: skip
        """Attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, heads_kv, head_dim).

        With cu_seqlens and cu_seqlens_k, q is (total_q, heads, head_dim) and kv (total_k, 2, heads_kv, head_dim).
        Returns a tensor like q.
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self._options(causal, q.device))
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self._options(causal, q.device)
        )


class CrossAttention(nn.Module):
    """Attention by torch.nn.functional.scaled_dot_product_attention, with a padding mask.

    Arguments:
        causal: the last query sees the last key, aligned to the bottom right.
        softmax_scale: head_dim ** -0.5 if None.
        attention_dropout: probability of dropout, in training only.
    """

    def __init__(self, causal=False, softmax_scale=None, attention_dropout=0.0):
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(self, q, kv, causal=None, key_padding_mask=None, same_tokens=False):
        """Attention of q (batch, seqlen_q, heads, head_dim) to kv (batch, seqlen_k, 2, heads_kv, head_dim).

        key_padding_mask: (batch, seqlen_k) bool, true for keys that count; the causal mask is then aligned to their
        number in each row. causal: replaces that of the module unless None. same_tokens: queries and keys are of the
        same tokens, so that a query sees keys up to its own position, whatever the padding. Returns a tensor like q,
        0 for queries that see no key.
        """
        k, v = _unpacked("kv", kv, 2)
        checks.tensor("q", q, shape=(kv.shape[0], None, None, kv.shape[-1]), device=kv.device)
        fits = q.shape[2] == 0 if kv.shape[3] == 0 else q.shape[2] % kv.shape[3] == 0
        checks.number("kv's number of heads", kv.shape[3], fits, "a divisor of q's, {}", q.shape[2])
        return self._attend(q, k, v, causal, key_padding_mask, same_tokens)

    def _attend(self, q, k, v, causal, key_padding_mask, same_tokens):
        causal = self.causal if causal is None else causal
        seqlen_q, seqlen_k = q.shape[1], k.shape[1]
        mask, is_causal, end = None, False, seqlen_k  # end: behind the last key that the last query sees
        if key_padding_mask is not None:
            shape = q.shape[0], seqlen_k
            checks.tensor("key_padding_mask", key_padding_mask, dtypes=(torch.bool,), shape=shape, device=q.device)
            mask = key_padding_mask[:, None, None]
            end = seqlen_k if same_tokens else mask.sum(-1, keepdim=True)
        if causal and mask is None and seqlen_q == seqlen_k:
            is_causal = True  # by a branch: of sizes that a graph keeps open, a comparison is no bool
        elif causal and not (mask is None and seqlen_q == 1):
            last = torch.arange(seqlen_q, device=q.device)[:, None] - seqlen_q + end
            visible = torch.arange(seqlen_k, device=q.device) <= last
            mask = visible if mask is None else mask & visible
        no_key = None
        if mask is not None:
            # The softmax of a row without keys would be NaN: such a row attends to all of them, and is cleared after.
            no_key = ~mask.any(dim=-1, keepdim=True)
            mask = mask | no_key
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            attn_mask=mask,
            dropout_p=self.drop.p if self.training else 0.0,
            is_causal=is_causal,
            scale=self.softmax_scale or None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        out = out if no_key is None else out.masked_fill(no_key, 0.0)
        return out.transpose(1, 2)


class SelfAttention(CrossAttention):
    """`CrossAttention` of packed queries, keys and values."""

    def forward(self, qkv, causal=None, key_padding_mask=None):
        """Attention of qkv (batch, seqlen, 3, heads, head_dim).

        key_padding_mask: (batch, seqlen) bool, true for keys that count. causal: replaces that of the module unless
        None. Returns (batch, seqlen, heads, head_dim), 0 for queries that see no key.
        """
        return self._attend(*_unpacked("qkv", qkv, 3), causal, key_padding_mask, same_tokens=True)


def _unpacked(name, packed, parts):
    checks.tensor(name, packed)
    checks.has_shape(name, packed, (None, None, parts, None, None))
    return packed.unbind(2)


# ---------------------------------------------------------------------------------------------------------------------
# Multi-head attention


class LinearResidual(Linear):
    """`nn.Linear` that returns its input, too."""

    def forward(self, input):
        return super().forward(input), input


def _update_kv_cache(kv, inference_params, layer_idx):
    """Write kv (batch, seqlen, 2, heads_kv, head_dim) behind what the cache of a layer holds.

    Returns the cache of these sequences up to the last key, (batch, seqlen_offset + seqlen, 2, heads_kv, head_dim).
    """
    cache = inference_params.key_value_memory_dict.get(layer_idx)
    if cache is None:
        cache = kv.new_empty(inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:])
        inference_params.key_value_memory_dict[layer_idx] = cache
    name = f"key_value_memory_dict[{layer_idx!r}]"
    checks.tensor(name, cache, shape=(None, None, *kv.shape[2:]), device=kv.device)
    rows = _cache_rows(cache, kv, inference_params)
    end = inference_params.seqlen_offset + kv.shape[1]
    rows[:, inference_params.seqlen_offset : end] = kv
    return rows[:, :end]


def _cache_rows(cache, kv, inference_params):
    """The rows of `cache` that belong to the sequences of kv; it must have room for them."""
    _check_room(kv, inference_params, *cache.shape[:2])
    first = inference_params.batch_size_offset
    return cache[first : first + kv.shape[0]]


def _check_room(x, inference_params, rows, capacity):
    """Check that x (batch, seqlen, ...) fits into a cache (rows, capacity, ...)."""
    for name, end, limit in (
        ("batch_size_offset + batch", inference_params.batch_size_offset + x.shape[0], rows),
        ("seqlen_offset + seqlen", inference_params.seqlen_offset + x.shape[1], capacity),
    ):
        checks.number(f"inference_params.{name}", end, end <= limit, "at most {}, as the cache", limit)


class _MultiHeadAttention(nn.Module):
    """What MHA and ParallelMHA share: all but their projections, for the heads of one process."""

    def __init__(
        self, embed_dim, num_heads, num_heads_kv, process_group, *, softmax_scale, causal, dropout, layer_idx,
        rotary_emb_dim, rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved, use_alibi, window_size,
        use_flash_attn, checkpointing, device,
    ):  # fmt: skip
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        world_size, rank = (
            (1, 0) if process_group is None else (dist.get_world_size(process_group), dist.get_rank(process_group))
        )
        _check_heads(embed_dim, num_heads, num_heads_kv, world_size)
        if not use_flash_attn:
            for name, value, without in (
                ("use_alibi", use_alibi, False),
                ("window_size", tuple(window_size), (-1, -1)),
            ):
                if value != without:
                    raise ValueError(f"{name} must be {without} without use_flash_attn, found {value}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim = embed_dim // num_heads
        self.num_heads_per_rank = get_dim_for_local_rank(num_heads, world_size, rank)
        self.num_heads_kv_per_rank = get_dim_for_local_rank(num_heads_kv, world_size, rank)
        self.causal = causal
        self.layer_idx = layer_idx
        checks.integer("rotary_emb_dim", rotary_emb_dim)
        fits = rotary_emb_dim <= self.head_dim
        checks.number("rotary_emb_dim", rotary_emb_dim, fits, "at most embed_dim / num_heads, {}", self.head_dim)
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.checkpointing = checkpointing
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        options = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if use_flash_attn:
            first_head = sum(get_dim_for_local_rank(num_heads, world_size, before) for before in range(rank))
            slopes = get_alibi_slopes(num_heads)[first_head:][: self.num_heads_per_rank] if use_alibi else None
            # On the CPU first, so that they survive where the parameters are only on the meta device.
            slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32, device="cpu")
            options |= dict(window_size=window_size, alibi_slopes=slopes)
        self_attn_cls, cross_attn_cls = (
            (FlashSelfAttention, FlashCrossAttention) if use_flash_attn else (SelfAttention, CrossAttention)
        )
        where = torch.get_default_device() if device is None else device
        self.inner_attn = self_attn_cls(**options).to(where)
        self.inner_cross_attn = cross_attn_cls(**options).to(where)

    def extra_repr(self):
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_heads_kv={self.num_heads_kv}, causal={self.causal}, "
            f"use_flash_attn={self.use_flash_attn}"
        )

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        """An uninitialised cache (batch_size, max_seqlen, 2, heads_kv, head_dim), by default like out_proj.weight."""
        shape = batch_size, max_seqlen, 2, self.num_heads_kv_per_rank, self.head_dim
        return self.out_proj.weight.new_empty(shape, dtype=dtype)

    def _self_attention(self, qkv, inference_params, **kwargs):
        """Attention of projected qkv (..., (heads + 2 heads_kv) * head_dim), which it may write to.

        Returns (..., heads * head_dim).
        """
        leftpad = _leftpad(inference_params, qkv.shape[0])
        if leftpad is not None:
            # Padding goes from the left to the right, where the causal mask hides it: then token i is at position i.
            checks.number("causal", self.causal, bool(self.inner_cross_attn.causal), "true for prompts with padding")
            context = self._attention_of_projected(_shifted(qkv, leftpad), inference_params, **kwargs)
            return _shifted(context, -leftpad)
        return self._attention_of_projected(qkv, inference_params, **kwargs)

    def _attention_of_projected(self, qkv, inference_params, **kwargs):
        heads = self.num_heads_per_rank
        packed = inference_params is None and heads == self.num_heads_kv_per_rank
        qkv = qkv.unflatten(-1, (3, heads, self.head_dim) if packed else (-1, self.head_dim))
        if self._rotates_in_kernel(qkv.shape[1], inference_params):
            return self._decode(*self._split(qkv), inference_params, rotary=True).flatten(-2)
        if self.rotary_emb_dim > 0:
            qkv = self._rotated(qkv, inference_params, kwargs.get("cu_seqlens"), kwargs.get("max_seqlen"))
        if packed:
            return self._inner(self.inner_attn, qkv, **kwargs).flatten(-2)
        if "cu_seqlens" in kwargs:
            kwargs = dict(cu_seqlens_k=kwargs["cu_seqlens"], max_seqlen_k=kwargs.get("max_seqlen")) | kwargs
        elif "key_padding_mask" in kwargs:
            kwargs |= dict(same_tokens=True)
        return self._cross_attention(*self._split(qkv), inference_params, **kwargs)

    def _cross_attention(self, q, kv, inference_params, **kwargs):
        """Attention of q (..., heads, head_dim) to kv (..., 2, heads_kv, head_dim), appended to the cache if any.

        Returns (..., heads * head_dim).
        """
        if inference_params is None:
            out = self._inner(self.inner_cross_attn, q, kv, **kwargs)
        elif self._decodes_in_kernel(inference_params):
            out = self._decode(q, kv, inference_params)
        else:
            out = self.inner_cross_attn(q, self._update_kv_cache(kv, inference_params))
        return out.flatten(-2)

    def _inner(self, attention, *args, **kwargs):
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)
        return attention(*args, **kwargs)

    def _split(self, qkv):
        """q (..., heads, head_dim) and kv (..., 2, heads_kv, head_dim) of qkv (..., heads + 2 heads_kv, head_dim)."""
        q, kv = qkv.split((self.num_heads_per_rank, 2 * self.num_heads_kv_per_rank), dim=-2)
        return q, kv.unflatten(-2, (2, self.num_heads_kv_per_rank))

    def _rotated(self, qkv, inference_params, cu_seqlens, max_seqlen):
        options = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if inference_params is not None:
            rows, capacity = self._cache_size(inference_params)
            _check_room(qkv, inference_params, rows, capacity)
            options = dict(seqlen_offset=_lengths(inference_params, qkv.shape[0]), max_seqlen=capacity)
        return self.rotary_emb(qkv, num_heads_q=self.num_heads_per_rank, **options)

    def _cache_size(self, inference_params):
        """(rows, capacity) of the cache, or of what it will be. The tables of the rotary embedding are as long."""
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        return (inference_params.max_batch_size, inference_params.max_seqlen) if cache is None else cache.shape[:2]

    def _update_kv_cache(self, kv, inference_params):
        if self.layer_idx is None:
            raise ValueError("layer_idx must be given to the constructor for a cache, found None")
        self._claim_cache(inference_params)
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if self.use_flash_attn and cache is not None:  # under autocast the other attention takes every dtype
            checks.tensor(f"key_value_memory_dict[{self.layer_idx!r}]", cache, dtypes=(kv.dtype,))
        return _update_kv_cache(kv, inference_params, self.layer_idx)

    def _claim_cache(self, inference_params):
        """Check that no other layer has written to the cache since the prompt, and note that this one does."""
        writers = getattr(inference_params, "writers", None)  # other classes than InferenceParams may have none
        if writers is None or torch.compiler.is_compiling():
            return
        is_own = inference_params.seqlen_offset == 0 or writers.get(self.layer_idx, id(self)) == id(self)
        checks.number("layer_idx", f"{self.layer_idx} in two", is_own, "another in each layer of a model")
        writers[self.layer_idx] = id(self)

    def _decodes_in_kernel(self, inference_params):
        """Behind a prompt; without flash attention only where sequences differ in length, which masks do not know."""
        if inference_params is None or inference_params.seqlen_offset == 0:
            return False
        lengths = inference_params.lengths_per_sample, getattr(inference_params, "leftpad_per_sample", None)
        return self.use_flash_attn or any(each is not None for each in lengths)

    def _rotates_in_kernel(self, seqlen, inference_params):
        """Whether decoding can leave rotation to the kernel, which rotates one query, or several if causal."""
        return (
            self._decodes_in_kernel(inference_params)
            and self.rotary_emb_dim > 0
            and self.rotary_emb_dim % 16 == 0
            and self.rotary_emb.scale_base is None
            and (self.inner_cross_attn.causal or seqlen == 1)
        )

    def _decode(self, q, kv, inference_params, rotary=False):
        """Append kv to the cache, and attend to all of it."""
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if cache is None:
            raise ValueError(f"key_value_memory_dict must hold layer_idx={self.layer_idx} to decode, found no such key")
        self._claim_cache(inference_params)
        # Detached, as the kernel has no gradient, while the prompt may have left one to the cache.
        cache = _cache_rows(cache, kv, inference_params).detach()
        cos = sin = None
        if rotary:
            cos, sin, *_ = self.rotary_emb._tables(cache.shape[1], q.device, q.dtype)
        inner = self.inner_cross_attn
        return flash_attn_with_kvcache(
            q,
            *cache.unbind(2),
            *kv.unbind(2),
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=_lengths(inference_params, len(q)),
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=inner.window_size if self.use_flash_attn else (-1, -1),
            rotary_interleaved=self.rotary_emb.interleaved if rotary else False,
            alibi_slopes=inner.slopes_on(q.device) if self.use_flash_attn else None,
        )


class MHA(_MultiHeadAttention):
    """Multi-head attention with its projections.

    Arguments:
        embed_dim: features of the input and the output, a multiple of num_heads.
        num_heads: query heads.
        num_heads_kv: key and value heads, a divisor of num_heads (GQA, MQA); None means num_heads.
        cross_attn: keys and values have a projection of their own, so that they can be those of another tensor.
        qkv_proj_bias, out_proj_bias: whether the projections have a bias.
        dropout: probability that an attention weight is dropped, in training.
        softmax_scale: factor of the scores, head_dim ** -0.5 if None.
        causal: a query sees keys up to its own position.
        layer_idx: the key of this layer's cache, needed for decoding; every layer of a model has one of its own.
        dwconv: a causal convolution of each channel over 3 tokens behind the first projection (Primer,
            arXiv:2109.08668).
        rotary_emb_dim: channels of each head that rotate with the position; 0 for no rotary embedding.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: as in `RotaryEmbedding`.
        use_alibi: add a bias linear in the distance; see `get_alibi_slopes`. Needs use_flash_attn.
        window_size: (left, right) as in `flash_attn_func`. Needs use_flash_attn.
        fused_bias_fc: use `FusedDense` for the projections.
        use_flash_attn: use `flash_attn_func` and its like.
        return_residual: return (out, x) instead of out, for a skip connection whose gradient joins that of the
            projection.
        checkpointing: compute attention again in the backward instead of keeping what it needs.

    Parameters: Wqkv ((heads + 2 heads_kv) * head_dim, embed_dim), whose rows are all query heads, then all key heads,
    then all value heads; with cross_attn instead Wq and Wkv. out_proj (embed_dim, embed_dim). With dwconv, dwconv_qkv,
    or where queries are apart or have more heads, dwconv_q and dwconv_kv.

    Raises ValueError for sizes and options that do not go together.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        num_heads_kv=None,
        cross_attn=False,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        dwconv=False,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        fused_bias_fc=False,
        use_flash_attn=False,
        return_residual=False,
        checkpointing=False,
        device=None,
        dtype=None,
    ):
        super().__init__(
            embed_dim, num_heads, num_heads_kv, None, softmax_scale=softmax_scale, causal=causal, dropout=dropout,
            layer_idx=layer_idx, rotary_emb_dim=rotary_emb_dim, rotary_emb_base=rotary_emb_base,
            rotary_emb_scale_base=rotary_emb_scale_base, rotary_emb_interleaved=rotary_emb_interleaved,
            use_alibi=use_alibi, window_size=window_size, use_flash_attn=use_flash_attn, checkpointing=checkpointing,
            device=device,
        )  # fmt: skip
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError(f"rotary_emb_dim must be 0 with cross_attn, found {rotary_emb_dim}")
        self.cross_attn = cross_attn
        self.dwconv = dwconv
        self.return_residual = return_residual
        factory = {"device": device, "dtype": dtype}
        linear_cls = FusedDense if fused_bias_fc else Linear
        first_cls = linear_cls
        if return_residual:
            first_cls = functools.partial(FusedDense, return_residual=True) if fused_bias_fc else LinearResidual
        kv_dim = 2 * self.num_heads_kv * self.head_dim
        if cross_attn:
            self.Wq = first_cls(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = linear_cls(embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = first_cls(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **factory)
        if dwconv and not cross_attn and self.num_heads_kv == num_heads:
            self.dwconv_qkv = _depthwise_conv(embed_dim + kv_dim, **factory)
        elif dwconv:
            self.dwconv_q = _depthwise_conv(embed_dim, **factory)
            self.dwconv_kv = _depthwise_conv(kv_dim, **factory)
        self.out_proj = linear_cls(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def forward(
        self,
        x,
        x_kv=None,
        key_padding_mask=None,
        cu_seqlens=None,
        max_seqlen=None,
        mixer_subset=None,
        inference_params=None,
        **kwargs,
    ):
        """Attention of x.

        Arguments:
            x: (batch, seqlen, embed_dim), or (total, embed_dim) with cu_seqlens.
            x_kv: (batch, seqlen_k, embed_dim), what keys and values are projected from; x if None. Needs cross_attn.
            key_padding_mask: (batch, seqlen_k) bool, true for tokens that count. Not with use_flash_attn.
            cu_seqlens: int32 (batch + 1,), where each sequence starts in x. Needs use_flash_attn.
            max_seqlen: the greatest length of a sequence, with cu_seqlens.
            mixer_subset: a slice or list that selects the tokens of x that are queries. Needs cross_attn.
            inference_params: `InferenceParams`: x follows what the cache holds, and is appended to it. seqlen_offset is
                left for the caller to advance.
            kwargs: more arguments of the inner attention: causal, and for cross attention with cu_seqlens
                cu_seqlens_k and max_seqlen_k. Without effect with inference_params.

        Returns (batch, seqlen, embed_dim) or (total, embed_dim), with mixer_subset only the tokens that it selects;
        with return_residual a pair of it and all of x.
        """
        self._check_call(x, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params)
        if cu_seqlens is not None:
            kwargs = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen) | kwargs
        elif key_padding_mask is not None:
            kwargs = dict(key_padding_mask=key_padding_mask) | kwargs
        if self.cross_attn:
            q, residual = self._project(self.Wq, x if mixer_subset is None else x[:, mixer_subset])
            residual = residual if mixer_subset is None else x
            kv = self.Wkv(x if x_kv is None else x_kv)
            if self.dwconv:
                q, kv = _convolve(self.dwconv_q, q), _convolve(self.dwconv_kv, kv)
            q, kv = q.unflatten(-1, (-1, self.head_dim)), kv.unflatten(-1, (2, -1, self.head_dim))
            context = self._cross_attention(q, kv, inference_params, **kwargs)
        else:
            qkv, residual = self._project(self.Wqkv, x)
            if self.dwconv and self.num_heads_kv == self.num_heads:
                qkv = _convolve(self.dwconv_qkv, qkv)
            elif self.dwconv:
                q, kv = qkv.split((self.embed_dim, qkv.shape[-1] - self.embed_dim), dim=-1)
                qkv = torch.cat([_convolve(self.dwconv_q, q), _convolve(self.dwconv_kv, kv)], dim=-1)
            context = self._self_attention(qkv, inference_params, **kwargs)
        out = self.out_proj(context)
        return (out, residual) if self.return_residual else out

    def _project(self, linear, x):
        """(linear(x), x) if there is a residual to be returned, else (linear(x), None)."""
        return linear(x) if self.return_residual else (linear(x), None)

    def _check_call(self, x, x_kv, key_padding_mask, cu_seqlens, max_seqlen, mixer_subset, inference_params):
        checks.tensor("x", x)
        checks.has_shape("x", x, (None,) * (2 if cu_seqlens is None else 1) + (self.embed_dim,))
        given = dict(
            x_kv=x_kv, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen,
            mixer_subset=mixer_subset, inference_params=inference_params,
        )  # fmt: skip
        given = {name for name, value in given.items() if value is not None}
        if "cu_seqlens" in given and "max_seqlen" not in given:
            raise ValueError("max_seqlen must be given with cu_seqlens, found None")
        for name, condition, where in (
            ("x_kv", self.cross_attn, "with cross_attn"),
            ("mixer_subset", self.cross_attn, "with cross_attn"),
            ("key_padding_mask", not self.use_flash_attn, "without use_flash_attn"),
            ("key_padding_mask", "inference_params" not in given, "without inference_params"),
            ("cu_seqlens", self.use_flash_attn, "with use_flash_attn"),
            ("cu_seqlens", "key_padding_mask" not in given, "without key_padding_mask"),
            ("cu_seqlens", "inference_params" not in given, "without inference_params"),
            ("cu_seqlens", "mixer_subset" not in given, "without mixer_subset"),
            ("cu_seqlens", not self.dwconv, "without dwconv"),
            ("inference_params", not self.dwconv, "without dwconv"),
        ):
            if name in given and not condition:
                raise ValueError(f"{name} can be given only {where}")
        leftpad = getattr(inference_params, "leftpad_per_sample", None)
        if self.cross_attn and leftpad is not None:
            raise ValueError("inference_params.leftpad_per_sample must be None with cross_attn, found a tensor")
        if x_kv is not None:
            leading = (x.shape[0], None) if cu_seqlens is None else (None,)
            checks.tensor("x_kv", x_kv, shape=(*leading, self.embed_dim))


class ParallelMHA(_MultiHeadAttention):
    """`MHA` whose heads are divided over the processes of a group, the first of which have more if they must.

    Arguments:
        process_group: the group. With num_heads_kv other than num_heads, its size must divide num_heads_kv.
        sequence_parallel: the first dimension of input and output is divided, too. Not for decoding.
        The others are those of `MHA`.

    Parameters of a process with h query heads and k key heads: Wqkv ((h + 2 k) * head_dim, embed_dim), its query, key
    and value heads; out_proj.weight (embed_dim, h * head_dim); out_proj.bias in the first process only.
    """

    def __init__(
        self,
        embed_dim,
        num_heads,
        process_group,
        num_heads_kv=None,
        qkv_proj_bias=True,
        out_proj_bias=True,
        dropout=0.0,
        softmax_scale=None,
        causal=False,
        layer_idx=None,
        rotary_emb_dim=0,
        rotary_emb_base=10000.0,
        rotary_emb_scale_base=None,
        rotary_emb_interleaved=False,
        use_alibi=False,
        window_size=(-1, -1),
        use_flash_attn=False,
        checkpointing=False,
        sequence_parallel=True,
        device=None,
        dtype=None,
    ):
        checks.process_group(process_group)
        super().__init__(
            embed_dim, num_heads, num_heads_kv, process_group, softmax_scale=softmax_scale, causal=causal,
            dropout=dropout, layer_idx=layer_idx, rotary_emb_dim=rotary_emb_dim, rotary_emb_base=rotary_emb_base,
            rotary_emb_scale_base=rotary_emb_scale_base, rotary_emb_interleaved=rotary_emb_interleaved,
            use_alibi=use_alibi, window_size=window_size, use_flash_attn=use_flash_attn, checkpointing=checkpointing,
            device=device,
        )  # fmt: skip
        self.process_group = process_group
        self.world_size, self.local_rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        factory = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        heads_of_a_group = self.num_heads // self.num_heads_kv + 2  # what query heads share, and they themselves
        self.Wqkv = ColumnParallelLinear(
            embed_dim, (num_heads + 2 * self.num_heads_kv) * self.head_dim, process_group, bias=qkv_proj_bias,
            multiple_of=heads_of_a_group * self.head_dim, **factory,
        )  # fmt: skip
        self.out_proj = RowParallelLinear(
            embed_dim, embed_dim, process_group, bias=out_proj_bias, multiple_of=self.head_dim, **factory
        )

    def forward(self, x, seqlen=None, inference_params=None, **kwargs):
        """Attention of x (batch, seqlen, embed_dim), or (batch * seqlen, embed_dim) if seqlen is given.

        With sequence_parallel, x and the result are this process's part of the first dimension. kwargs: more arguments
        of the inner attention, as cu_seqlens and max_seqlen without seqlen. inference_params: as in `MHA`. Returns a
        tensor like x.
        """
        qkv = self.Wqkv(x)
        if seqlen is not None:
            fits = qkv.shape[0] % seqlen == 0
            checks.number("the number of tokens", qkv.shape[0], fits, "a multiple of seqlen, {}", seqlen)
            qkv = qkv.unflatten(0, (-1, seqlen))
        context = self._self_attention(qkv, inference_params, **kwargs)
        return self.out_proj(context if seqlen is None else context.flatten(0, 1))


def _check_heads(embed_dim, num_heads, num_heads_kv, world_size):
    for name, value in dict(embed_dim=embed_dim, num_heads=num_heads, num_heads_kv=num_heads_kv).items():
        checks.integer(name, value)
        checks.number(name, value, value > 0, "positive")
    checks.number("embed_dim", embed_dim, embed_dim % num_heads == 0, "a multiple of num_heads, {}", num_heads)
    fits = num_heads % num_heads_kv == 0
    checks.number("num_heads_kv", num_heads_kv, fits, "a divisor of num_heads, {}", num_heads)
    fits = num_heads_kv == num_heads or num_heads_kv % world_size == 0
    checks.number("num_heads_kv", num_heads_kv, fits, "a multiple of the {} processes", world_size)


def _lengths(inference_params, batch):
    """How many keys the cache holds: an int, or (batch,) int32 where sequences differ."""
    lengths = _of_rows("lengths_per_sample", inference_params, batch)
    if lengths is not None:
        return lengths
    offset = inference_params.seqlen_offset
    leftpad = _of_rows("leftpad_per_sample", inference_params, batch)
    return offset if leftpad is None or offset == 0 else offset - leftpad


def _leftpad(inference_params, batch):
    """How many tokens of each prompt are padding, (batch,) int32; None after the prompt and without padding."""
    if inference_params is None or inference_params.seqlen_offset > 0:
        return None
    return _of_rows("leftpad_per_sample", inference_params, batch)


def _of_rows(name, inference_params, batch):
    """The part of a tensor of inference_params that belongs to the sequences of a batch; None if there is no such."""
    values, first = getattr(inference_params, name, None), inference_params.batch_size_offset
    if values is None:
        return None
    name, end = f"inference_params.{name}", first + batch
    checks.tensor(name, values)
    checks.number(f"the length of {name}", len(values), len(values) >= end, "at least {}, for each row", end)
    return values[first:end]


def _shifted(x, steps):
    """x (batch, seqlen, features) with each row b moved to the left by steps[b] (batch,), round the end."""
    columns = (torch.arange(x.shape[1], device=x.device) + steps[:, None]) % x.shape[1]
    return x.gather(1, columns[..., None].expand_as(x))


def _depthwise_conv(channels, **factory):
    return nn.Conv1d(channels, channels, kernel_size=3, padding=2, groups=channels, **factory)


def _convolve(conv, x):
    """x (batch, seqlen, channels) convolved causally over seqlen: what the padding adds at the end is dropped."""
    return conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)
