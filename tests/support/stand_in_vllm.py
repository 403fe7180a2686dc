"""A stand-in for the parts of vLLM that a backend of attention touches, by the names and signatures that vLLM has.

It holds no code of vLLM: base classes whose methods a backend must override, and a registry that remembers.
"""

import enum
import types
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False


class AttentionImpl(Generic[T]):
    pass


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: torch.Tensor | None = None


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    for slot, k, v in zip(slot_mapping.tolist(), key, value):
        if slot >= 0:
            block, place = divmod(slot, key_cache.shape[1])
            key_cache[block, place], value_cache[block, place] = k, v


def modules():
    """name -> module, for sys.modules; `registered` of the registry is what has been registered."""
    made = {
        name: types.ModuleType(name)
        for name in (
            "vllm",
            "vllm._custom_ops",
            "vllm.envs",
            "vllm.v1",
            "vllm.v1.attention",
            "vllm.v1.attention.backend",
            "vllm.v1.attention.backends",
            "vllm.v1.attention.backends.registry",
        )
    }
    made["vllm"].envs = made["vllm.envs"]
    made["vllm.envs"].VLLM_BATCH_INVARIANT = False
    made["vllm._custom_ops"].reshape_and_cache_flash = reshape_and_cache_flash
    backend, registry = made["vllm.v1.attention.backend"], made["vllm.v1.attention.backends.registry"]
    for each in (
        AttentionType,
        AttentionCGSupport,
        MultipleOf,
        AttentionBackend,
        AttentionImpl,
        AttentionMetadataBuilder,
        CommonAttentionMetadata,
    ):
        setattr(backend, each.__name__, each)
    registry.AttentionBackendEnum, registry.registered = AttentionBackendEnum, {}

    def register_backend(backend, class_path=None, is_mamba=False):
        registry.registered[backend] = class_path

    registry.register_backend = register_backend
    for name, module in made.items():
        if name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
            module.__path__ = []
    return made
