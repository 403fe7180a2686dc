"""Phi-1 and Phi-2: their configuration and their tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    KeyMap,
    each_layer,
    padded,
    queries_keys_values,
)
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._rope import rope_fields


def _rotary(read):
    return rope_fields(read, usual_fraction=0.5)


CONFIG = ConfigMap(
    copied={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_key_value_heads",
        "n_inner": "intermediate_size",
        "head_dim": "head_dim",
        "activation_function": "hidden_act",
        "resid_pdrop": "resid_pdrop",
        "embd_pdrop": "embd_pdrop",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "layer_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "parallel_block": True,
        "parallel_block_tied_norm": True,
        "tie_word_embeddings": False,
        "lm_head_bias": True,
    },
    computed=(_rotary,),
    only={"qk_layernorm": (False,)},
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("model.embed_tokens"),
        FINAL_NORM: "model.final_layernorm",
        HEAD: padded("lm_head"),
        **each_layer(
            "model.layers.{i}.",
            {
                "norm1": "input_layernorm",
                "mixer.Wqkv": queries_keys_values("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "mixer.out_proj": "self_attn.dense",
                "mlp.fc1": "mlp.fc1",
                "mlp.fc2": "mlp.fc2",
            },
        ),
    },
    spellings=[(r"^(embed_tokens|final_layernorm|layers)\.", r"model.\1.")],
)


def phi_config_to_gpt2_config(phi_config: Any) -> Any:
    """The GPT2Config of a PhiConfig of transformers.

    Example:
        >>> from flash_attn.models.phi import phi_config_to_gpt2_config
        >>> from transformers import PhiConfig
        >>> phi_config_to_gpt2_config(PhiConfig(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(phi_config)


FAMILY = Family(
    name="phi",
    model_types=("phi",),
    hub_names=("microsoft/phi-1", "microsoft/phi-2"),
    to_gpt2_config=phi_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_phi(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' PhiForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import phi
        >>> from transformers import PhiConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = phi.phi_config_to_gpt2_config(PhiConfig(**sizes))
        >>> theirs = {f"model.layers.0.self_attn.{each}_proj.weight": torch.randn(8, 8) for each in "qkv"}
        >>> {name: tuple(x.shape) for name, x in phi.remap_state_dict_hf_phi(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.weight': (24, 8)}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_phi(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' PhiForCausalLM from ours.

    Example:
        >>> from flash_attn.models import phi
        >>> from transformers import PhiConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = phi.phi_config_to_gpt2_config(PhiConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.weight": torch.randn(24, 8)}
        >>> [name.split(".")[-2] for name in phi.inv_remap_state_dict_hf_phi(ours, config)]
        ['q_proj', 'k_proj', 'v_proj']
    """
    return KEYS.invert(state_dict, config)
