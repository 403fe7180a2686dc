"""The classes by which vLLM runs attention: backend, builder of metadata, and implementation.

`flash_attn_vllm.register` puts them behind FLASH_ATTN and CUSTOM. A layer of a batch is one call of
`flash_attn.flash_attn_varlen_func` over vLLM's pages; the keys are written there by vLLM's own op.

Caches are (blocks, heads_k, block size, 2 * head_dim), keys before values, whatever the order in memory; or, for a vLLM
that asks the backend for the shape, (2, blocks, block size, heads_k, head_dim). In 8 bits they are uint8 that hold
float8_e4m3fn, with the scales of the layer; queries stay in 16 bits.
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
from flash_attn.functional import merge_attn_states, to_float8
from flash_attn_vllm.interface import row_positions

__all__ = [
    "CustomAttentionBackend",
    "FlashAttentionBackend",
    "FlashAttentionImpl",
    "FlashAttentionMetadata",
    "FlashAttentionMetadataBuilder",
]

if not hasattr(AttentionBackend, "forward_includes_kv_cache_update"):
    raise ImportError(
        "flash_attn_vllm needs a vLLM that writes keys to the cache by do_kv_cache_update, found one without "
        "AttentionBackend.forward_includes_kv_cache_update"
    )

_FLOAT8 = ("fp8", "fp8_e4m3")  # both float8_e4m3fn
_ENCODER = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
# A common prefix is attended to once if that spares a layer so many bytes of keys and values. It costs two launches and
# a pass over the outputs more, about 10 us, in which a GPU with 3.3 TB/s reads this much. Not measured within vLLM.
_LEAST_SPARED_BYTES = 32 << 20
_ALL = 2**31 - 1  # a prefix with all keys


class FlashAttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses: see docs/guides/engines.md for the same as a table."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *_FLOAT8]
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
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why these do not go together, or None."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype must be auto or that of queries, {dtype}, found {kv_cache_dtype}"
        return None

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
    common_prefix_len: so many first keys, whole blocks, are the same for all requests. Then shared_lens is int32 (3,):
        0, the rows, and these keys; and own_lens int32 (requests,), the keys behind them.
    mm_prefix_query_range_tensor: int32 (tokens, 2), first and last position of the image that a row is of, -1 for none.
        Models set it to None for layers that do not look ahead, by this name. Then positions is int32 (tokens,), and
        image_ranges has what rows see in layers with a window (left, clamp), int32 (1, tokens, 2).
    prefix_ranges: int32 (1, tokens, 4), what rows see in all layers: a prefix beside a window.
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
    shared_lens: Tensor | None = None
    own_lens: Tensor | None = None
    positions: Tensor | None = None
    mm_prefix_query_range_tensor: Tensor | None = None
    image_ranges: dict[tuple[int, bool], Tensor] | None = None
    prefix_ranges: Tensor | None = None

    def key_ranges(self, left: int, clamp: bool) -> Tensor | None:
        """What each row sees, for `flash_attn.flash_attn_varlen_func`; None if flags say it.

        left: how many keys before its own a row sees, -1 for all. clamp: it is so for rows of an image, too.
        """
        images = self.mm_prefix_query_range_tensor
        if self.causal is not True:
            return None
        if images is None or self.prefix_ranges is not None:
            return self.prefix_ranges
        # A layer that the builder did not know makes its own. A CUDA graph holds that, since it reads kept tensors.
        made = self.image_ranges.get((left, clamp))
        return _image_ranges(self.positions, images, left, clamp) if made is None else made


class FlashAttentionMetadataBuilder(AttentionMetadataBuilder[FlashAttentionMetadata]):
    """Makes the metadata of a batch. It allocates nothing per batch that a CUDA graph would hold on to."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.block_size, self.head_size = kv_cache_spec.block_size, kv_cache_spec.head_size
        model, tokens = vllm_config.model_config, vllm_config.scheduler_config.max_num_batched_tokens
        self._window: int | None = getattr(model, "rswa_window", None)
        self._images: Tensor | None = None
        self._image_ranges: dict[tuple[int, bool], Tensor] | None = None  # made when all layers are there
        if getattr(model, "is_mm_prefix_lm", False):
            self._positions, self._images = self._zeros(tokens), self._zeros(tokens, 2)
        if self._window is not None:
            self._prefixes, self._prefix_ranges = self._zeros(tokens), self._zeros(1, tokens, 4)
        # Otherwise nothing here depends on a draft's step: all of it are vLLM's own tensors.
        self.supports_draft_decode_metadata_update = not self._has_ranges

    @property
    def _has_ranges(self) -> bool:
        return self._images is not None or self._window is not None

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
        )
        shared = common_prefix_len // self.block_size * self.block_size
        if self._has_ranges:
            self._fill_ranges(metadata, common)
        elif shared > 0 and causal is True and _level() == 0:
            metadata.common_prefix_len = shared
            lengths = torch.tensor([0, common.num_actual_tokens, shared], dtype=torch.int32)
            metadata.shared_lens = lengths.to(common.seq_lens.device, non_blocking=True)
            metadata.own_lens = (common.seq_lens - shared).clamp(min=0)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """The metadata that a graph is captured with. It serves batches with more keys, and, if graphs are to hold
        prompts as well, with more queries of a request: these bounds are then unknown.
        """
        metadata = self.build(0, common_attn_metadata)
        if self._images is not None:
            metadata.mm_prefix_query_range_tensor = self._images[: metadata.num_actual_tokens]
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
        if use_alibi or use_sliding_window or use_local_attention or dcp_world_size > 1 or self._has_ranges:
            return False
        token = 2 * num_kv_heads * self.head_size * 2  # bytes: keys and values of 16 bits
        return _level() == 0 and (len(query_lens) - 1) * common_prefix_len * token >= _LEAST_SPARED_BYTES

    def _fill_ranges(self, metadata: FlashAttentionMetadata, common: CommonAttentionMetadata) -> None:
        """Write what rows see into the tensors of this builder, which CUDA graphs hold, and refer to them."""
        rows = common.num_actual_tokens
        entry, position = row_positions(common.query_start_loc, common.seq_lens, rows)
        if self._images is not None:
            metadata.positions = self._positions[:rows].copy_(position)
            images = self._images[:rows]
            if common.mm_req_doc_ranges or _level() > 0:  # else there is nothing to see ahead: flags say it faster
                metadata.mm_prefix_query_range_tensor = images
            images.copy_(_image_of_each_row(common, rows), non_blocking=True)
            if self._image_ranges is None:
                tokens = len(self._positions)
                self._image_ranges = {window: self._zeros(1, tokens, 2) for window in self._windows()}
            metadata.image_ranges = {
                window: kept[:, :rows].copy_(_image_ranges(metadata.positions, images, *window))
                for window, kept in self._image_ranges.items()
            }
        if self._window is not None:
            prefixes = self._prefixes[: common.num_reqs].fill_(_ALL)
            given = getattr(common, "rswa_prefix_lens", None)  # may be on the CPU, and without requests that pad
            if given is not None:
                prefixes[: len(given)].copy_(given[: common.num_reqs], non_blocking=True)
            end = position + 1
            seen = [torch.zeros_like(end), torch.minimum(prefixes[entry], end), end - self._window, end]
            metadata.prefix_ranges = self._prefix_ranges[:, :rows].copy_(torch.stack(seen, -1))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _windows(self) -> set[tuple[int, bool]]:
        """(left, clamp) of the model's layers, as `FlashAttentionMetadata.key_ranges` takes them."""
        layers = getattr(self.vllm_config.compilation_config, "static_forward_context", {}).values()
        ours = [layer for layer in layers if isinstance(getattr(layer, "impl", None), FlashAttentionImpl)]
        return {(layer.impl.sliding_window[0], _clamps(layer)) for layer in ours}


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
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window must be None or at least 1, found {sliding_window}")
        if not FlashAttentionBackend.supports_attn_type(attn_type):
            raise ValueError(f"attn_type must be one of {[kind.value for kind in AttentionType]}, found {attn_type!r}")
        if kv_cache_dtype not in FlashAttentionBackend.supported_kv_cache_dtypes:
            raise NotImplementedError(
                f"kv_cache_dtype must be one of {FlashAttentionBackend.supported_kv_cache_dtypes}, found "
                f"{kv_cache_dtype!r}"
            )
        for name, size in (("decode", "dcp_world_size"), ("prefill", "pcp_world_size")):  # vLLM sets them before this
            if getattr(self, size, 1) > 1:
                raise NotImplementedError(
                    f"{name}_context_parallel_size must be 1, found {getattr(self, size)}: it is not computed here"
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
            layer: asked whether rows of images keep to its window (mm_prefix_clamp_sliding_window), and with a cache
                in 8 bits for its scales (_k_scale, _v_scale).
            query, output: (tokens, heads, head_dim). key, value: (tokens, heads_k, head_dim); read by encoders only.
            kv_cache: (blocks, heads_k, block size, 2 * head_dim), keys before values, whatever the order in memory;
                or (2, blocks, block size, heads_k, head_dim), for a vLLM that asks the backend for the shape.
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
        if self.kv_cache_dtype in _FLOAT8:
            keys, values = (x.view(torch.float8_e4m3fn) for x in (keys, values))
            scales = dict(k_descale=layer._k_scale, v_descale=layer._v_scale)
        else:
            scales = {}
        paged = dict(
            **scales,
            k=keys,
            v=values,
            seqused_k=attn_metadata.seq_lens,
            max_seqlen_k=attn_metadata.max_seq_len,
            block_table=attn_metadata.block_table,
        )
        causal = attn_metadata.causal
        left, right = self.sliding_window
        if attn_metadata.common_prefix_len > 0 and left < 0 and self.alibi_slopes is None:
            self._attend_in_two(query[:rows], output[:rows], attn_metadata, paged)
            return output
        if causal is not True:  # rows that are not causal look as far ahead as they look back
            right = left
        ranges = attn_metadata.key_ranges(left, _clamps(layer))
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
        key, value = key[used], value[used]
        if self.kv_cache_dtype in _FLOAT8:
            scaled = (key, layer._k_scale), (value, layer._v_scale)
            key, value = (to_float8(x, scale).view(keys.dtype) for x, scale in scaled)
        keys[place], values[place] = key, value

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
        shared = metadata.common_prefix_len
        everywhere = {name: paged[name] for name in ("k", "v", "k_descale", "v_descale") if name in paged}
        prefix = flash_attn.flash_attn_varlen_func(
            query,
            **everywhere,
            cu_seqlens_q=metadata.shared_lens[:2],
            max_seqlen_q=query.shape[0],
            max_seqlen_k=shared,
            softmax_scale=self.scale,
            softcap=self.logits_soft_cap,
            block_table=metadata.block_table[:1],
            seqused_k=metadata.shared_lens[2:],
            return_lse=True,
        )
        own = dict(
            block_table=metadata.block_table[:, shared // paged["k"].shape[1] :],
            seqused_k=metadata.own_lens,
            max_seqlen_k=None if metadata.max_seq_len is None else metadata.max_seq_len - shared,
        )
        suffix = self._attend(query, None, metadata, causal=True, window=(-1, -1), return_lse=True, **{**paged, **own})
        merge_attn_states(output, None, *prefix, *suffix)


def _clamps(layer: Any) -> bool:
    return bool(getattr(layer, "mm_prefix_clamp_sliding_window", False))


def _image_ranges(positions: Tensor, images: Tensor, left: int, clamp: bool) -> Tensor:
    """int32 (1, rows, 2): what rows see that are causal, but see all of the image that they are of."""
    start = positions - left if left >= 0 else torch.zeros_like(positions)
    first, last = images.unbind(-1)
    if not clamp:  # a row is within its image, so that what it sees is one interval
        start = torch.where(first < 0, start, torch.minimum(start, first))
    return torch.stack([start, torch.maximum(positions, last) + 1], -1)[None]


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
