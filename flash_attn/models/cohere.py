"""Cohere's Command R, Command R7B and Aya Expanse: their configuration and their tensors.

Attention and MLP side by side behind one LayerNorm without bias; the second version has windows in most layers, and a
rotary embedding in these alone.
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
from flash_attn.models._rope import turning_in, whole_rope_fields


def _windows(read):
    """Three of four layers of the second version have a window, unless the configuration says which."""
    return {} if _type(read) == "cohere" else windows(read, kinds_of_layers(read, 4))


def _rotary(read):
    """Layers of the second version that have no window have no rotary embedding either."""
    fields = whole_rope_fields(read)
    if _type(read) == "cohere":
        return fields
    is_local = [kind == "sliding_attention" and read("sliding_window") is not None for kind in kinds_of_layers(read, 4)]
    return turning_in(is_local, fields)


def _type(read):
    return read("model_type", default="cohere")


CONFIG = ConfigMap(
    copied=COPIED | {"layer_norm_epsilon": "layer_norm_eps", "mup_output_multiplier": "logit_scale"},
    constant=CONSTANT
    | {
        "rms_norm": False,
        "norm_bias": False,
        "parallel_block": True,
        "parallel_block_tied_norm": True,
        "rotary_emb_interleaved": True,
        "mup_output_multiplier": 0.0625,
        "tie_word_embeddings": True,
    },
    computed=(_rotary, biases, gated_activation, _windows),
    only={
        "use_qk_norm": (False,),
        "use_parallel_block": (True,),
        "use_gated_activation": (True,),
        "position_embedding_type": ("rope_gptj",),
        "order_of_interleaved_layers": ("local_attn_first",),
    },
    without_effect=(
        "layer_switch",
        "model_max_length",
        "rotary_pct",
        "use_embedding_sharing",
        "use_parallel_embedding",
    ),
)

KEYS = llama_like_keys({"norm1": "input_layernorm"})


def cohere_config_to_gpt2_config(cohere_config: Any) -> Any:
    """The GPT2Config of a CohereConfig or Cohere2Config of transformers.

    Example:
        >>> from flash_attn.models.cohere import cohere_config_to_gpt2_config
        >>> from transformers import CohereConfig
        >>> cohere_config_to_gpt2_config(CohereConfig(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(cohere_config)


FAMILY = Family(
    name="cohere",
    model_types=("cohere", "cohere2"),
    hub_names=("CohereLabs/", "CohereForAI/"),
    to_gpt2_config=cohere_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_cohere(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' CohereForCausalLM or Cohere2ForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import cohere
        >>> from transformers import CohereConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = cohere.cohere_config_to_gpt2_config(CohereConfig(**sizes))
        >>> theirs = {f"model.layers.0.self_attn.{each}_proj.weight": torch.randn(8, 8) for each in "qkv"}
        >>> {name: tuple(x.shape) for name, x in cohere.remap_state_dict_hf_cohere(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.weight': (24, 8)}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_cohere(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' CohereForCausalLM or Cohere2ForCausalLM from ours.

    Example:
        >>> from flash_attn.models import cohere
        >>> from transformers import CohereConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = cohere.cohere_config_to_gpt2_config(CohereConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.weight": torch.randn(24, 8)}
        >>> [name.split(".")[-2] for name in cohere.inv_remap_state_dict_hf_cohere(ours, config)]
        ['q_proj', 'k_proj', 'v_proj']
    """
    return KEYS.invert(state_dict, config)
