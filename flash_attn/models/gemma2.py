"""Gemma 2 and the text models of Gemma 3: their configuration and their tensors.

Norms, which multiply by 1 + weight, before and after attention and MLP; windows in some layers. Gemma 2 caps scores and
logits; Gemma 3 has norms of queries and keys, and another base of the rotary embedding where there is a window.
"""

from typing import Any

from torch import Tensor

from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._llama_like import (
    CONSTANT,
    COPIED,
    biases,
    gated_activation,
    kinds_of_layers,
    llama_like_keys,
    windows,
)
from flash_attn.models._rope import whole_rope_fields


def _rotary(read):
    """Layers of Gemma 3 with a window have another base, and no scaling."""
    if _type(read) == "gemma2":
        return whole_rope_fields(read)
    return whole_rope_fields(read, kinds_of_layers(read, 6), read("rope_local_base_freq", default=10000.0))


def _windows(read):
    """Every second layer of Gemma 2, and every sixth of Gemma 3, has none, unless the configuration says which."""
    return windows(read, kinds_of_layers(read, 2 if _type(read) == "gemma2" else 6))


def _scales(read):
    """The factor of the scores, in place of head_dim ** -0.5, and that of the embeddings."""
    scale, factor = read("query_pre_attn_scalar", default=256) ** -0.5, read("hidden_size") ** 0.5
    return {"scale_attn_weights": False, "mup_attn_multiplier": scale, "mup_embeddings_multiplier": factor}


def _attention(read):
    """Gemma 3 has norms of queries and keys in place of Gemma 2's cap of the scores."""
    if _type(read) == "gemma3_text":
        return {"qk_norm": True, "use_flash_attn": True}
    return {"attn_logit_softcapping": read("attn_logit_softcapping"), "use_flash_attn": True}


def _activation(read):
    read("hidden_act")  # without effect
    return gated_activation(read, "hidden_activation", default="gelu_pytorch_tanh")


def _type(read):
    return read("model_type", default="gemma2")


CONFIG = ConfigMap(
    copied=COPIED | {"final_logit_softcapping": "final_logit_softcapping"},
    constant=CONSTANT | {"norm_zero_centered": True, "output_norms": True, "tie_word_embeddings": True},
    computed=(_rotary, biases, _activation, _windows, _scales, _attention),
)

KEYS = llama_like_keys(
    {
        "norm1": "input_layernorm",
        "mixer.q_norm": "self_attn.q_norm",
        "mixer.k_norm": "self_attn.k_norm",
        "output1": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "output2": "post_feedforward_layernorm",
    }
)


def gemma2_config_to_gpt2_config(gemma2_config: Any) -> Any:
    """The GPT2Config of a Gemma2Config or Gemma3TextConfig of transformers.

    Example:
        >>> from flash_attn.models.gemma2 import gemma2_config_to_gpt2_config
        >>> from transformers import Gemma2Config
        >>> gemma2_config_to_gpt2_config(Gemma2Config(hidden_size=64, attn_logit_softcapping=30.0)).n_embd
        64
    """
    return CONFIG(gemma2_config)


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2", "gemma3_text"),
    hub_names=("google/gemma-2-", "google/gemma-3-1b", "google/gemma-3-270m"),
    to_gpt2_config=gemma2_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_gemma2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' Gemma2ForCausalLM or Gemma3ForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import gemma2
        >>> from transformers import Gemma2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
        >>> config = gemma2.gemma2_config_to_gpt2_config(Gemma2Config(**sizes))
        >>> names = ("post_attention", "pre_feedforward")
        >>> theirs = {f"model.layers.0.{each}_layernorm.weight": torch.ones(8) for each in names}
        >>> sorted(gemma2.remap_state_dict_hf_gemma2(theirs, config))
        ['transformer.layers.0.norm2.weight', 'transformer.layers.0.output1.weight']
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_gemma2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' Gemma2ForCausalLM or Gemma3ForCausalLM from ours.

    Example:
        >>> from flash_attn.models import gemma2
        >>> from transformers import Gemma2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
        >>> config = gemma2.gemma2_config_to_gpt2_config(Gemma2Config(**sizes))
        >>> names = ("output1", "norm2")
        >>> ours = {f"transformer.layers.0.{each}.weight": torch.ones(8) for each in names}
        >>> sorted(gemma2.inv_remap_state_dict_hf_gemma2(ours, config))
        ['model.layers.0.post_attention_layernorm.weight', 'model.layers.0.pre_feedforward_layernorm.weight']
    """
    return KEYS.invert(state_dict, config)
