"""Attention as modules: without parameters, on projected heads, and multi-head attention with its projections.

    mha = MHA(embed_dim=768, num_heads=12, causal=True, use_flash_attn=True, rotary_emb_dim=64)
    out = mha(torch.randn(2, 512, 768))                                        # (2, 512, 768)

With `use_flash_attn` the modules call `flash_attn_func` and its like, which have ALiBi, windows and packed sequences of
different lengths; without it torch's scaled_dot_product_attention, which takes a padding mask. Both give the same
results up to rounding.

For decoding, the modules append keys and values to a cache, `inference_params.key_value_memory_dict[layer_idx]`. See
`flash_attn.utils.generation.InferenceParams`.

Modules: `inner_attention` is attention without parameters, `_cache` the rules of the cache of keys and values, `_base`
what `multihead` (MHA) and `parallel` (ParallelMHA, its heads divided over processes) share. Names from elsewhere are
here because other packages import them from this module.
"""

from flash_attn import _removed
from flash_attn.flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.mha._cache import _update_kv_cache
from flash_attn.modules.mha.inner_attention import (
    CrossAttention,
    FlashCrossAttention,
    FlashSelfAttention,
    SelfAttention,
    get_alibi_slopes,
)
from flash_attn.modules.mha.multihead import MHA, LinearResidual
from flash_attn.modules.mha.parallel import ParallelMHA
from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedDense, RowParallelLinear
from flash_attn.utils.distributed import get_dim_for_local_rank

__all__ = [
    "MHA",
    "ColumnParallelLinear",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "FusedDense",
    "LinearResidual",
    "ParallelMHA",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SelfAttention",
    "_update_kv_cache",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_alibi_slopes",
    "get_dim_for_local_rank",
]

__getattr__ = _removed.getattr_of(__name__, {})
