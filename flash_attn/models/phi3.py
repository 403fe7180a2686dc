"""Phi-3, Phi-3.5 and Phi-4: their configuration and their tensors, with projections that are one tensor."""

from typing import Any

import torch
from torch import Tensor

from flash_attn.models._checkpoints.key_map import Order, reordered
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._llama_like import CONSTANT, COPIED, gated_activation, llama_like_keys, windows
from flash_attn.models._rope import rope_fields

# The gate comes first in theirs, the value in ours.
_SWAPPED = Order(take=lambda rows, s: torch.arange(rows).roll(rows // 2))

CONFIG = ConfigMap(
    copied=COPIED | {"resid_pdrop": "resid_pdrop"},
    constant=CONSTANT,
    computed=(rope_fields, gated_activation, windows),
    only={"full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,)},
    without_effect=("embd_pdrop",),
)

KEYS = llama_like_keys(
    {
        "norm1": "input_layernorm",
        "mixer.Wqkv": "self_attn.qkv_proj",
        "norm2": "post_attention_layernorm",
        "mlp.fc1": reordered("mlp.gate_up_proj", _SWAPPED),
    }
)


def phi3_config_to_gpt2_config(phi3_config: Any) -> Any:
    """The GPT2Config of a Phi3Config of transformers.

    Example:
        >>> from flash_attn.models.phi3 import phi3_config_to_gpt2_config
        >>> from transformers import Phi3Config
        >>> phi3_config_to_gpt2_config(Phi3Config(hidden_size=64, num_attention_heads=4, pad_token_id=0)).n_embd
        64
    """
    return CONFIG(phi3_config)


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    hub_names=("microsoft/Phi-3-mini", "microsoft/Phi-3-medium", "microsoft/Phi-3.5-mini", "microsoft/phi-4"),
    to_gpt2_config=phi3_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_phi3(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' Phi3ForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import phi3
        >>> from transformers import Phi3Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, pad_token_id=0)
        >>> config = phi3.phi3_config_to_gpt2_config(Phi3Config(**sizes))
        >>> theirs = {"model.layers.0.mlp.gate_up_proj.weight": torch.arange(4)}
        >>> {name: rows.tolist() for name, rows in phi3.remap_state_dict_hf_phi3(theirs, config).items()}
        {'transformer.layers.0.mlp.fc1.weight': [2, 3, 0, 1]}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_phi3(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' Phi3ForCausalLM from ours.

    Example:
        >>> from flash_attn.models import phi3
        >>> from transformers import Phi3Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, pad_token_id=0)
        >>> config = phi3.phi3_config_to_gpt2_config(Phi3Config(**sizes))
        >>> ours = {"transformer.layers.0.mlp.fc1.weight": torch.arange(4)}
        >>> {name: rows.tolist() for name, rows in phi3.inv_remap_state_dict_hf_phi3(ours, config).items()}
        {'model.layers.0.mlp.gate_up_proj.weight': [2, 3, 0, 1]}
    """
    return KEYS.invert(state_dict, config)
