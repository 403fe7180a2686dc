"""What MHA and ParallelMHA share: all but the projections, for the heads of one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from flash_attn._ops import checks, fusing
from flash_attn.context_parallel import Plan
from flash_attn.flash_attn_interface import flash_attn_with_kvcache
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb_qkv_
from flash_attn.modules.mha import _cache as caches
from flash_attn.modules.mha._heads import can_be_divided, heads_of_process
from flash_attn.modules.mha.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.ops.triton.layer_norm import RMSNorm


class MultiHeadAttention(nn.Module):
    """Rotation, cache and attention of projected queries, keys and values. The arguments are those of `ParallelMHA`.

    Classes that derive from this add the projections; the one of the output is called out_proj.
    """

    inner_attn: FlashSelfAttention | SelfAttention
    inner_cross_attn: FlashCrossAttention | CrossAttention
    rotary_emb: RotaryEmbedding
    q_norm: RMSNorm
    k_norm: RMSNorm
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None,
        process_group: ProcessGroup | None,
        *,
        softmax_scale: float | None,
        causal: bool,
        dropout: float,
        layer_idx: int | None,
        rotary_emb_dim: int,
        rotary_emb_base: float,
        rotary_emb_scale_base: float | None,
        rotary_emb_interleaved: bool,
        use_alibi: bool,
        window_size: tuple[int, int],
        use_flash_attn: bool,
        checkpointing: bool,
        head_dim: int | None,
        qk_norm: bool,
        qk_norm_eps: float,
        qk_norm_zero_centered: bool,
        qk_norm_over_heads: bool,
        softcap: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        world_size, rank = (
            (1, 0) if process_group is None else (dist.get_world_size(process_group), dist.get_rank(process_group))
        )
        embed_dim, num_heads, num_heads_kv, head_dim = _sizes(embed_dim, num_heads, num_heads_kv, head_dim, world_size)
        _check_needs_of_flash(use_flash_attn, use_alibi, window_size, softcap)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads_kv
        self.head_dim = head_dim
        self._heads = heads_of_process(num_heads, num_heads_kv, world_size, rank)
        self.num_heads_per_rank, self.num_heads_kv_per_rank = map(len, self._heads)
        self.causal = causal
        self.layer_idx = layer_idx
        rotary_emb_dim = checks.whole("rotary_emb_dim", rotary_emb_dim)
        fits = rotary_emb_dim <= self.head_dim
        checks.number("rotary_emb_dim", rotary_emb_dim, fits, "at most head_dim, {}", self.head_dim)
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.checkpointing = checkpointing
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim, rotary_emb_base, rotary_emb_interleaved, rotary_emb_scale_base, device
            )
        if qk_norm_zero_centered and not qk_norm:
            raise ValueError("qk_norm_zero_centered must be False without qk_norm, found True")
        if qk_norm_over_heads and not qk_norm:
            raise ValueError("qk_norm_over_heads must be False without qk_norm, found True")
        self.qk_norm = qk_norm
        self.qk_norm_over_heads = qk_norm_over_heads
        if qk_norm:
            widths = [self.head_dim * (n if qk_norm_over_heads else 1) for n in (num_heads, num_heads_kv)]
            norms: dict[str, Any] = dict(zero_centered_weight=qk_norm_zero_centered, device=device, dtype=dtype)
            self.q_norm, self.k_norm = (RMSNorm(width, qk_norm_eps, **norms) for width in widths)
        options: dict[str, Any] = dict(causal=causal, softmax_scale=softmax_scale, attention_dropout=dropout)
        if use_flash_attn:
            slopes = _alibi_slopes(num_heads, self._heads.q) if use_alibi else None
            options |= dict(window_size=window_size, alibi_slopes=slopes, softcap=softcap)
        where = torch.get_default_device() if device is None else device
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**options).to(where)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**options).to(where)

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_heads_kv={self.num_heads_kv}, "
            f"head_dim={self.head_dim}, causal={self.causal}, use_flash_attn={self.use_flash_attn}"
        )

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised cache (batch_size, max_seqlen, 2, heads_kv, head_dim), by default like out_proj.weight.

        For a block table give num_pages and page_size in the place of batch_size and max_seqlen. Raises TypeError or
        ValueError for what is no size.
        """
        sizes = checks.count("batch_size", batch_size), checks.count("max_seqlen", max_seqlen)
        shape = *sizes, 2, self.num_heads_kv_per_rank, self.head_dim
        weight = self.out_proj.weight  # not new_empty: of a DTensor that would be divided, too
        return torch.empty(shape, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _self_attention(self, qkv: Tensor, inference_params: Any, **kwargs: Any) -> Tensor:
        """Attention of projected qkv (..., (heads + 2 heads_kv) * head_dim), which it may write to.

        Returns (..., heads * head_dim).
        """
        if kwargs.get("cp_plan") is not None:
            self._check_plan(kwargs["cp_plan"], qkv, inference_params)
        if self.qk_norm:
            qkv = self._with_normed_heads(qkv)
        leftpad = caches.leftpad_of_prompt(inference_params, qkv)
        if leftpad is None:
            return self._attention_of_projected(qkv, inference_params, **kwargs)
        # Moved behind the tokens, the padding is hidden by the causal mask, and token i is at position i.
        checks.number("causal", self.causal, bool(self.inner_cross_attn.causal), "true for prompts with padding")
        context = self._attention_of_projected(shifted(qkv, leftpad), inference_params, **kwargs)
        return shifted(context, -leftpad)

    def _attention_of_projected(self, qkv: Tensor, inference_params: Any, **kwargs: Any) -> Tensor:
        """`_self_attention` of sequences without padding on their left."""
        heads = self.num_heads_per_rank
        packed = inference_params is None and heads == self.num_heads_kv_per_rank
        # Not the method, which torch.compile cannot look into within batch_invariant_layers().
        qkv = torch.unflatten(qkv, -1, (3, heads, self.head_dim) if packed else (-1, self.head_dim))
        if self._rotates_in_kernel(qkv, inference_params):
            return self._decode(*self._split(qkv), inference_params, rotary=True).flatten(-2)
        if self.rotary_emb_dim > 0 and kwargs.get("cp_plan") is not None:
            qkv = self._rotated_by_plan(qkv, kwargs["cp_plan"])
        elif self.rotary_emb_dim > 0:
            qkv = self._rotated(qkv, inference_params, kwargs.get("cu_seqlens"), kwargs.get("max_seqlen"))
        if packed:
            return self._inner(self.inner_attn, qkv, **kwargs).flatten(-2)
        if "cu_seqlens" in kwargs:
            kwargs = dict(cu_seqlens_k=kwargs["cu_seqlens"], max_seqlen_k=kwargs.get("max_seqlen")) | kwargs
        elif "key_padding_mask" in kwargs:
            kwargs |= dict(same_tokens=True)
        return self._cross_attention(*self._split(qkv), inference_params, **kwargs)

    def _cross_attention(self, q: Tensor, kv: Tensor, inference_params: Any, **kwargs: Any) -> Tensor:
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

    def _inner(self, attention: nn.Module, *args: Tensor, **kwargs: Any) -> Tensor:
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(attention, *args, use_reentrant=False, **kwargs)
        return attention(*args, **kwargs)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """q (..., heads, head_dim) and kv (..., 2, heads_kv, head_dim) of qkv (..., heads + 2 heads_kv, head_dim)."""
        sizes = self.num_heads_per_rank, 2 * self.num_heads_kv_per_rank
        q, kv = torch.split_with_sizes(qkv, sizes, dim=-2)  # which qkv.split calls, 1 us later
        return q, torch.unflatten(kv, -2, (2, self.num_heads_kv_per_rank))

    def _with_normed_heads(self, qkv: Tensor) -> Tensor:
        """qkv (..., (heads + 2 heads_kv) * head_dim) with the norms of its queries and its keys."""
        heads = self.num_heads_per_rank, self.num_heads_kv_per_rank, self.num_heads_kv_per_rank
        q, k, v = qkv.split([n * self.head_dim for n in heads], dim=-1)
        if self.qk_norm_over_heads:
            q, k = self._norm_of_heads(self.q_norm, q), self._norm_of_heads(self.k_norm, k)
        else:
            q, k = (torch.unflatten(x, -1, (-1, self.head_dim)) for x in (q, k))
            q, k = self._norm_of_heads(self.q_norm, q).flatten(-2), self._norm_of_heads(self.k_norm, k).flatten(-2)
        return torch.cat([q, k, v], dim=-1)

    def _norm_of_heads(self, norm: RMSNorm, x: Tensor) -> Tensor:
        return norm(x)

    def _rotated(self, qkv: Tensor, inference_params: Any, cu_seqlens: Tensor | None, max_seqlen: int | None) -> Tensor:
        options: dict[str, Any] = dict(cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
        if inference_params is not None:
            rows, capacity = caches.size(inference_params, self.layer_idx)
            caches.check_room(qkv, inference_params, rows, capacity)
            options = dict(seqlen_offset=caches.lengths(inference_params, qkv), max_seqlen=capacity)
        return self.rotary_emb(qkv, num_heads_q=self.num_heads_per_rank, **options)

    def _rotated_by_plan(self, qkv: Tensor, plan: Plan) -> Tensor:
        """qkv of the tokens of this rank, rotated by their positions in their documents."""
        embedding, kind = self.rotary_emb, type(self.rotary_emb)
        computes_tables = isinstance(embedding, RotaryEmbedding) and kind.forward is RotaryEmbedding.forward
        if not (computes_tables and fusing.may_fuse(embedding, (kind,), qkv, hooks_of_all=False)):
            raise TypeError(  # what else its call would do would be lost, since only its tables are asked for
                "rotary_emb must be a RotaryEmbedding without hooks or a forward of its own with cp_plan, found "
                f"{kind.__name__}"
            )
        cos, sin, cos_k, sin_k = embedding._rows_at(plan.position_ids.to(qkv.device), plan.longest, qkv.dtype)
        heads = self.num_heads_per_rank
        return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, embedding.interleaved, num_heads_q=heads)

    def _check_plan(self, plan: Plan, qkv: Tensor, inference_params: Any) -> None:
        """Check a cp_plan before anything is rotated or sent."""
        if not self.use_flash_attn:
            raise ValueError("cp_plan can be given only with use_flash_attn")
        if inference_params is not None:
            raise ValueError("cp_plan can be given only without inference_params")
        if not isinstance(plan, Plan):
            raise TypeError(f"cp_plan must be a flash_attn.context_parallel.Plan, found {type(plan).__name__}")
        checks.number("the number of dimensions of x", qkv.dim(), qkv.dim() == 3, "3 with cp_plan")
        checks.number("seqlen", qkv.shape[1], qkv.shape[1] == plan.tokens, "cp_plan.tokens, {}", plan.tokens)

    def _update_kv_cache(self, kv: Tensor, inference_params: Any) -> Tensor:
        if self.layer_idx is None:
            raise ValueError("layer_idx must be given to the constructor for a cache, found None")
        caches.claim_cache(self, self.layer_idx, inference_params)
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if self.use_flash_attn and cache is not None:  # torch's attention casts by itself under autocast
            checks.tensor(f"key_value_memory_dict[{self.layer_idx!r}]", cache, dtypes=(kv.dtype,))
        return caches._update_kv_cache(kv, inference_params, self.layer_idx)

    def _decodes_in_kernel(self, inference_params: Any) -> bool:
        """Whether `flash_attn_with_kvcache` serves this call: all calls with pages, and else steps after the prompt.

        Without use_flash_attn it serves, of these steps, only those of batches whose rows may differ in length: torch's
        attention has no mask for these.
        """
        if inference_params is None or caches.has_pages(inference_params):
            return inference_params is not None
        if inference_params.seqlen_offset == 0:
            return False
        return self.use_flash_attn or caches.has_rows_of_different_lengths(inference_params)

    def _rotates_in_kernel(self, qkv: Tensor, inference_params: Any) -> bool:
        """Whether the decoding kernel can rotate: it takes several queries only if they are causal, and no xPos.

        It has the tables of rotary_emb, so it stands for a class that makes other tables, but not for another forward.
        """
        if not self._decodes_in_kernel(inference_params) or self.rotary_emb_dim == 0 or self.rotary_emb_dim % 16 != 0:
            return False
        embedding = self.rotary_emb
        return (
            isinstance(embedding, RotaryEmbedding)
            and type(embedding).forward is RotaryEmbedding.forward
            and fusing.may_fuse(embedding, (type(embedding),), qkv)
            and embedding.scale_base is None
            and (qkv.shape[1] == 1 or self.inner_cross_attn.causal)
            and (not caches.has_pages(inference_params) or self._has_angles_of_pages(embedding, inference_params))
        )

    def _has_angles_of_pages(self, embedding: RotaryEmbedding, inference_params: Any) -> bool:
        """Whether tables for all positions of the pages serve sequences of max_seqlen, where angles depend on that."""
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if cache is None:  # an error that `_decode` raises
            return True
        return embedding._serves(caches.num_positions(cache, inference_params), inference_params.max_seqlen)

    def _decode(self, q: Tensor, kv: Tensor, inference_params: Any, rotary: bool = False) -> Tensor:
        """Append kv to the cache, and attend to all of it."""
        cache = inference_params.key_value_memory_dict.get(self.layer_idx)
        if cache is None:
            raise ValueError(f"key_value_memory_dict must hold layer_idx={self.layer_idx} to decode, found no such key")
        caches.claim_cache(self, self.layer_idx, inference_params)
        block_table = None
        if caches.has_pages(inference_params):
            block_table = caches.pages_of_batch(cache, kv, inference_params)
        else:
            cache = caches.cache_rows(cache, kv, inference_params)
        cache = cache.detach()  # the prompt may have left it with a gradient, which this kernel does not have
        cos = sin = None
        interleaved = False
        if rotary:
            embedding = self.rotary_emb
            positions = caches.num_positions(cache, inference_params)
            cos, sin, *_ = embedding._tables_for_decoding(positions, q.device, q.dtype)
            interleaved = embedding.interleaved
        inner = self.inner_cross_attn
        (k_cache, v_cache), (k, v) = cache.unbind(2), kv.unbind(2)
        return flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=caches.lengths(inference_params, q),
            block_table=block_table,
            softmax_scale=inner.softmax_scale,
            causal=inner.causal,
            window_size=inner.window_size,
            softcap=inner.softcap,
            rotary_interleaved=interleaved,
            alibi_slopes=inner.slopes_on(q.device),
        )


def _sizes(
    embed_dim: int, num_heads: int, num_heads_kv: int, head_dim: int | None, world_size: int
) -> tuple[int, int, int, int]:
    """Checks sizes, which may be whole floats, and returns them as ints, with the default of head_dim."""
    embed_dim, num_heads = _positive("embed_dim", embed_dim), _positive("num_heads", num_heads)
    num_heads_kv = _positive("num_heads_kv", num_heads_kv)
    fits = head_dim is not None or embed_dim % num_heads == 0
    checks.number("embed_dim", embed_dim, fits, "a multiple of num_heads, {}", num_heads)
    fits = num_heads % num_heads_kv == 0
    checks.number("num_heads_kv", num_heads_kv, fits, "a divisor of num_heads, {}", num_heads)
    fits = num_heads >= world_size
    checks.number("num_heads", num_heads, fits, "at least the number of processes, {}", world_size)
    head_dim = embed_dim // num_heads if head_dim is None else _positive("head_dim", head_dim)
    fits = can_be_divided(num_heads_kv, head_dim, world_size)
    expected = "at least the number of processes, {0}, or 2 * num_heads_kv * head_dim a multiple of {0}"
    checks.number("num_heads_kv", num_heads_kv, fits, expected, world_size)
    return embed_dim, num_heads, num_heads_kv, head_dim


def _positive(name: str, value: int) -> int:
    value = checks.whole(name, value)
    checks.number(name, value, value > 0, "positive")
    return value


def _check_needs_of_flash(use_flash_attn: bool, use_alibi: bool, window_size: tuple[int, int], softcap: float) -> None:
    if use_flash_attn:
        return
    if use_alibi:
        raise ValueError(f"use_alibi must be False without use_flash_attn, found {use_alibi}")
    if tuple(window_size) != (-1, -1):
        raise ValueError(f"window_size must be (-1, -1) without use_flash_attn, found {tuple(window_size)}")
    if softcap != 0:
        raise ValueError(f"softcap must be 0.0 without use_flash_attn, found {softcap}")


def _alibi_slopes(num_heads: int, own: range) -> Tensor:
    """The slopes of a process's own heads, on the CPU: they keep their values while parameters are on meta."""
    return torch.tensor(get_alibi_slopes(num_heads)[own.start : own.stop], dtype=torch.float32, device="cpu")


def shifted(x: Tensor, steps: Tensor) -> Tensor:
    """x (batch, seqlen, ...) with row b rolled left by steps[b] tokens: the first ones come back at the end."""
    columns = (torch.arange(x.shape[1], device=x.device) + steps[:, None]) % x.shape[1]
    return x.gather(1, columns.view(*columns.shape, *(1,) * (x.dim() - 2)).expand_as(x))
