"""The classes by which vLLM runs attention: backend, builder of metadata, and implementation.

`flash_attn_vllm.register` puts them behind FLASH_ATTN and CUSTOM. A layer of a batch is one call of
`flash_attn.flash_attn_varlen_func` over vLLM's pages; the keys are written there by vLLM's own op.

Caches are (blocks, heads_k, block size, 2 * head_dim), keys before values, whatever the order in memory; or, for a vLLM
that asks the backend for the shape, (2, blocks, block size, heads_k, head_dim).
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)

import flash_attn
from flash_attn.functional import merge_attn_states
from flash_attn_vllm.interface import row_positions

__all__ = [
    "CustomAttentionBackend",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
]

_ENCODER = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_LEAST_PREFIX, _LEAST_REQUESTS = 256, 8  # from where on a common prefix is attended to once for all requests


class FlashAttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses: see docs/guides/engines.md for the same as a table."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls() -> type["FlashAttentionImpl"]:
        return FlashAttentionImpl

    @staticmethod
    def get_builder_cls() -> type["FlashAttentionMetadataBuilder"]:
        return FlashAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return 2, num_blocks, block_size, num_kv_heads, head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return tuple(range(6 if include_num_layers_dimension else 5))

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in tuple(AttentionType)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return hasattr(flash_attn, "set_batch_invariant")


class CustomAttentionBackend(FlashAttentionBackend):
    """The same by the name CUSTOM, beside which vLLM's own FLASH_ATTN can be put back."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


@dataclass
class FlashAttentionMetadata:
    """What the calls of all layers of a batch have in common.

    num_actual_tokens: rows of queries that count. max_query_len, max_seq_len: upper bounds; None if none is known, as
        where a CUDA graph is captured that shall serve other batches.
    query_start_loc: int32 (requests + 1,). seq_lens: int32 (requests,). block_table: int32 (requests, blocks).
    slot_mapping: (tokens,), where the new keys are written.
    causal: bool, or int32 (requests,).
    common_prefix_len: so many first keys, whole blocks, are the same for all requests.
    positions: int32 (tokens,) of each row, where ranges of keys are needed.
    mm_prefix_query_range_tensor: int32 (tokens, 2), first and last position of the image that a row is of, -1 for none.
        Models set it to None for layers that do not look ahead, by this name.
    rswa_prefix_lens: int32 (tokens,), how many first keys each row sees beside those in rswa_window.
    """

    num_actual_tokens: int
    max_query_len: int | None
    query_start_loc: Tensor
    max_seq_len: int | None
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    common_prefix_len: int = 0
    positions: Tensor | None = None
    mm_prefix_query_range_tensor: Tensor | None = None
    rswa_prefix_lens: Tensor | None = None
    rswa_window: int | None = None

    def key_ranges(self, window: tuple[int, int], clamp: bool) -> Tensor | None:
        """What each row sees, for `flash_attn.flash_attn_varlen_func`; None if flags say it.

        clamp: rows of an image see no further back than the window, either.
        """
        if self.positions is None or self.causal is not True:
            return None
        end = self.positions + 1
        if self.rswa_prefix_lens is not None and self.rswa_window is not None:
            prefix = torch.minimum(self.rswa_prefix_lens, end)
            return torch.stack([torch.zeros_like(end), prefix, end - self.rswa_window, end], -1)[None]
        if self.mm_prefix_query_range_tensor is None:
            return None
        start = end - 1 - window[0] if window[0] >= 0 else torch.zeros_like(end)
        first, last = self.mm_prefix_query_range_tensor.unbind(-1)
        if not clamp:  # a row is within its image, so that what it sees is one interval
            start = torch.where(first < 0, start, torch.minimum(start, first))
        return torch.stack([start, torch.maximum(end, last + 1)], -1)[None]


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Makes the metadata of a batch. It allocates nothing per batch that a CUDA graph would hold on to."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size = kv_cache_spec.block_size
        self.rswa_window: int | None = getattr(vllm_config.model_config, "rswa_window", None)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._images = self._positions = self._prefixes = None
        if getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
            self._images = torch.full((tokens, 2), -1, dtype=torch.int32, device=device)
        if self.rswa_window is not None:
            self._prefixes = torch.zeros(tokens, dtype=torch.int32, device=device)
        if self._images is not None or self._prefixes is not None:
            self._positions = torch.zeros(tokens, dtype=torch.int32, device=device)
        # Otherwise nothing here depends on a draft's step: all of it are vLLM's own tensors.
        self.supports_draft_decode_metadata_update = self._positions is None

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """The metadata of a batch. fast_build has no effect, since there is no schedule to make."""
        common = common_attn_metadata
        causal = common.causal
        if isinstance(causal, Tensor) and causal.dtype != torch.int32:
            raise ValueError(
                f"causal must be a bool or an int32 tensor (requests,), found {causal.dtype}: a copy would be lost to "
                "a CUDA graph"
            )
        metadata = FlashAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=causal,
            rswa_window=self.rswa_window,
        )
        if self._positions is not None:
            self._fill_ranges(metadata, common)
        elif common_prefix_len > 0 and causal is True and _level() == 0:
            metadata.common_prefix_len = common_prefix_len // self.block_size * self.block_size
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """The metadata that a graph is captured with. It serves batches with more keys, and, if graphs are to hold
        prompts as well, with more queries of a request: these bounds are then unknown.
        """
        metadata = self.build(0, common_attn_metadata)
        metadata.max_seq_len = None
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode.mixed_mode().has_full_cudagraphs():
            metadata.max_query_len = None
        return metadata

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashAttentionMetadata:
        """The metadata for another group of layers, whose pages are others."""
        other = copy.copy(metadata)
        other.block_table, other.slot_mapping = blk_table, slot_mapping
        return other

    def update_draft_decode_metadata(self, metadata: FlashAttentionMetadata) -> None:
        """Nothing to do: the metadata refers to tensors that vLLM itself updates."""

    def use_cascade_attention(
        self,
        common_prefix_len: int,
        query_lens: Any,
        num_query_heads: int,
        num_kv_heads: int,
        use_alibi: bool,
        use_sliding_window: bool,
        use_local_attention: bool,
        num_sms: int,
        dcp_world_size: int = 1,
    ) -> bool:
        """Whether vLLM, in versions that ask, shall say how many first keys all requests share."""
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1 or _level() > 0:
            return False
        return self._positions is None and common_prefix_len >= _LEAST_PREFIX and len(query_lens) >= _LEAST_REQUESTS

    def _fill_ranges(self, metadata: FlashAttentionMetadata, common: CommonAttentionMetadata) -> None:
        """Write positions, images and prefixes of the rows into the tensors of this builder, and refer to them."""
        rows = common.num_actual_tokens
        entry, position = row_positions(common.query_start_loc, common.seq_lens, rows)
        metadata.positions = self._positions[:rows].copy_(position)
        if self._images is not None:
            images = _image_of_each_row(common, rows)
            metadata.mm_prefix_query_range_tensor = self._images[:rows].copy_(images, non_blocking=True)
        prefixes = getattr(common, "rswa_prefix_lens", None)
        if self._prefixes is not None and prefixes is not None:
            metadata.rswa_prefix_lens = self._prefixes[:rows].copy_(prefixes[entry])


class FlashAttentionImpl(AttentionImpl[FlashAttentionMetadata]):
    """A layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}, found {num_kv_heads}")
        if kv_cache_dtype not in FlashAttentionBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype must be one of {FlashAttentionBackend.supported_kv_cache_dtypes}, found "
                f"{kv_cache_dtype!r}: caches in 8 bits are not read here"
            )
        if sinks is not None and tuple(sinks.shape) != (num_heads,):
            raise ValueError(f"sinks must have shape (num_heads,), {(num_heads,)}, found {tuple(sinks.shape)}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.num_queries_per_kv = num_heads // num_kv_heads
        self.scale = float(scale)
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = float(logits_soft_cap or 0)
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        left = -1 if sliding_window is None else sliding_window - 1
        self.sliding_window = left, (-1 if left < 0 else left if attn_type in _ENCODER else 0)
        if getattr(envs, "VLLM_BATCH_INVARIANT", False):
            _be_batch_invariant()

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write the attention of the batch to output, and return it.

        Arguments:
            layer: asked whether rows of images keep to its window (mm_prefix_clamp_sliding_window).
            query, output: (tokens, heads, head_dim). key, value: (tokens, heads_k, head_dim); read by encoders only.
            kv_cache: see the top of this module.
            attn_metadata: what the builder made; None where vLLM measures memory, which gives 0.

        Raises:
            NotImplementedError: output_scale or output_block_scale: outputs are not quantized here.
            ValueError: for a kv_cache of another shape.
        """
        for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
            if scale is not None:
                raise NotImplementedError(f"{name} must be None, found a tensor: outputs are not quantized here")
        if attn_metadata is None:
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        if self.attn_type in _ENCODER:
            ends, longest = attn_metadata.query_start_loc, attn_metadata.max_query_len
            keys = dict(k=key[:rows], v=value[:rows], cu_seqlens_k=ends, max_seqlen_k=longest)
            self._attend(query[:rows], output[:rows], attn_metadata, causal=False, window=self.sliding_window, **keys)
            return output
        keys, values = _keys_and_values(kv_cache, self.head_size)
        paged = dict(
            k=keys,
            v=values,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
        )
        if attn_metadata.common_prefix_len > 0:
            self._attend_in_two(query[:rows], output[:rows], attn_metadata, paged)
            return output
        causal = attn_metadata.causal
        left, right = self.sliding_window
        if causal is not True:  # rows that are not causal look as far ahead as they look back
            right = left
        ranges = attn_metadata.key_ranges((left, right), getattr(layer, "mm_prefix_clamp_sliding_window", False))
        if ranges is not None:
            causal, left, right = False, -1, -1
        self._attend(
            query[:rows], output[:rows], attn_metadata, causal=causal, window=(left, right), key_ranges=ranges, **paged
        )
        return output

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new keys and values to their slots, by vLLM's op on a GPU. Negative slots are skipped."""
        if self.attn_type in _ENCODER:
            return
        keys, values = _keys_and_values(kv_cache, self.head_size)
        if key.is_cuda:
            from vllm._custom_ops import reshape_and_cache_flash

            scales = layer._k_scale, layer._v_scale
            reshape_and_cache_flash(key, value, keys, values, slot_mapping, self.kv_cache_dtype, *scales)
            return
        used = (slot_mapping >= 0).nonzero()[:, 0]
        slots = slot_mapping[used]
        place = slots.div(keys.shape[1], rounding_mode="floor"), slots % keys.shape[1]
        keys[place], values[place] = key[used], value[used]

    def _attend(self, query, output, metadata, *, causal, window, **arguments):
        return flash_attn.flash_attn_varlen_func(
            query,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            softmax_scale=self.scale,
            causal=causal,
            window_size=window,
            softcap=self.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            out=output,
            **{"learnable_sink": self.sinks, **arguments},
        )

    def _attend_in_two(self, query, output, metadata, paged):
        """All rows over the keys that the requests share, each row over those of its own, and the two merged."""
        if self.alibi_slopes is not None or self.sliding_window != (-1, -1):
            raise NotImplementedError(
                "common_prefix_len must be 0 for a layer with a sliding window or ALiBi, found "
                f"{metadata.common_prefix_len}"
            )
        shared, rows = metadata.common_prefix_len, query.shape[0]
        keys = paged["k"], paged["v"]
        device = query.device
        lengths = torch.tensor([0, rows, shared], dtype=torch.int32, device=device)
        prefix = flash_attn.flash_attn_varlen_func(
            query,
            *keys,
            cu_seqlens_q=lengths[:2],
            max_seqlen_q=rows,
            max_seqlen_k=shared,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            block_table=metadata.block_table[:1],
            seqused_k=lengths[2:],
            return_lse=True,
        )
        own = dict(
            block_table=metadata.block_table[:, shared // keys[0].shape[1] :],
            seqused_k=metadata.seq_lens - shared,
            max_seqlen_k=None if metadata.max_seq_len is None else metadata.max_seq_len - shared,
        )
        suffix = self._attend(query, None, metadata, causal=True, window=(-1, -1), return_lse=True, **{**paged, **own})
        merge_attn_states(output, None, *prefix, *suffix)


def _keys_and_values(kv_cache: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Views (blocks, block size, heads_k, head_dim) of the keys and the values in a layer's cache."""
    if kv_cache.dim() == 4 and kv_cache.shape[-1] == 2 * head_size:
        keys, values = kv_cache.transpose(1, 2).split(head_size, -1)
    elif kv_cache.dim() == 5 and kv_cache.shape[0] == 2 and kv_cache.shape[-1] == head_size:
        keys, values = kv_cache.unbind(0)
    else:
        raise ValueError(
            f"kv_cache must have shape (blocks, heads_k, block size, {2 * head_size}) or "
            f"(2, blocks, block size, heads_k, {head_size}), found {tuple(kv_cache.shape)}"
        )
    return keys, values


def _image_of_each_row(common: CommonAttentionMetadata, rows: int) -> Tensor:
    """int32 (rows, 2) on the CPU: first and last position of the image that a row is of, -1 for none."""
    images = torch.full((rows, 2), -1, dtype=torch.int32, pin_memory=common.seq_lens.is_cuda)
    starts = common.query_start_loc_cpu.tolist()
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)  # exact for prompts, and images are in prompts
    for request, ranges in (common.mm_req_doc_ranges or {}).items():
        if lengths is None:
            raise ValueError("seq_lens_cpu_upper_bound must be given with mm_req_doc_ranges, found None")
        begin, end = starts[request], starts[request + 1]
        shift = end - int(lengths[request])  # from a position to its row
        for first, last in ranges:
            if first < last:
                images[max(begin, first + shift) : max(begin, min(end, last + 1 + shift))] = torch.tensor(
                    [first, last], dtype=torch.int32
                )
    return images


def _level() -> int:
    """The level of batch invariance in force; 0 where flash_attn has no levels."""
    get = getattr(flash_attn, "get_batch_invariant", None)
    return 0 if get is None else get()


def _be_batch_invariant() -> None:
    """Follow vLLM's switch, whose servers cut prompts into chunks: the level at which chunks do not matter. A level
    that somebody has chosen stays.
    """
    if not FlashAttentionBackend.supports_batch_invariance():
        raise RuntimeError(
            "VLLM_BATCH_INVARIANT must be unset with a flash_attn without set_batch_invariant, found it set"
        )
    if _level() == 0:
        flash_attn.set_batch_invariant(2)
