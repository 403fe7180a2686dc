"""OLMo 2, OLMo 3 and EXAONE 4: their configuration and their tensors.

Norms of what attention and MLP give, instead of what they take, and of queries and keys.
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


def _rotary(read):
    """OLMo 3: no scaling in layers with a window. EXAONE 4: if it has windows, only their layers rotate."""
    if _type(read) == "olmo2":
        return whole_rope_fields(read)
    kinds = kinds_of_layers(read, 4)
    if _type(read) == "olmo3":
        return whole_rope_fields(read, kinds)
    turns = [read("sliding_window") is None or kind == "sliding_attention" for kind in kinds]
    return turning_in(turns, whole_rope_fields(read))


def _windows(read):
    """Three of four layers of OLMo 3 and EXAONE 4 have a window, unless the configuration says which."""
    return {} if _type(read) == "olmo2" else windows(read, kinds_of_layers(read, 4))


def _biases(read):
    return {} if _type(read) == "exaone4" else biases(read)


def _qk_norm(read):
    """OLMo's norms of queries and keys are over all heads together."""
    return {"qk_norm": True, "qk_norm_over_heads": _type(read) != "exaone4"}


def _type(read):
    return read("model_type", default="olmo2")


CONFIG = ConfigMap(
    copied=COPIED,
    constant=CONSTANT | {"input_norms": False, "output_norms": True},
    computed=(_rotary, _biases, gated_activation, _windows, _qk_norm),
)

KEYS = llama_like_keys(
    {
        "mixer.q_norm": "self_attn.q_norm",
        "mixer.k_norm": "self_attn.k_norm",
        "output1": "post_attention_layernorm",
        "output2": "post_feedforward_layernorm",
    }
)


def olmo2_config_to_gpt2_config(olmo2_config: Any) -> Any:
    """The GPT2Config of an Olmo2Config, Olmo3Config or Exaone4Config of transformers.

    Example:
        >>> from flash_attn.models.olmo2 import olmo2_config_to_gpt2_config
        >>> from transformers import Olmo2Config
        >>> olmo2_config_to_gpt2_config(Olmo2Config(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(olmo2_config)


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3", "exaone4"),
    hub_names=("allenai/OLMo-2-", "allenai/Olmo-3-", "LGAI-EXAONE/EXAONE-4"),
    to_gpt2_config=olmo2_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_olmo2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' Olmo2-, Olmo3- or Exaone4ForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import olmo2
        >>> from transformers import Olmo2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = olmo2.olmo2_config_to_gpt2_config(Olmo2Config(**sizes))
        >>> names = ("post_attention", "post_feedforward")
        >>> theirs = {f"model.layers.0.{each}_layernorm.weight": torch.ones(8) for each in names}
        >>> sorted(olmo2.remap_state_dict_hf_olmo2(theirs, config))
        ['transformer.layers.0.output1.weight', 'transformer.layers.0.output2.weight']
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_olmo2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' Olmo2-, Olmo3- or Exaone4ForCausalLM from ours.

    Example:
        >>> from flash_attn.models import olmo2
        >>> from transformers import Olmo2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = olmo2.olmo2_config_to_gpt2_config(Olmo2Config(**sizes))
        >>> names = ("output1", "output2")
        >>> ours = {f"transformer.layers.0.{each}.weight": torch.ones(8) for each in names}
        >>> sorted(olmo2.inv_remap_state_dict_hf_olmo2(ours, config))
        ['model.layers.0.post_attention_layernorm.weight', 'model.layers.0.post_feedforward_layernorm.weight']
    """
    return KEYS.invert(state_dict, config)
