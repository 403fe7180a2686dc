"""GPT-NeoX and Pythia: their configuration and their tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    GROUPED,
    HEAD,
    KeyMap,
    each_layer,
    padded,
    reordered,
)
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._rope import rope_fields, same_head_dim


def _rotary(read):
    return rope_fields(read, older=("rotary_emb_base", "rotary_pct"), usual_fraction=0.25)


CONFIG = ConfigMap(
    copied={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "activation_function": "hidden_act",
        "resid_pdrop": "hidden_dropout",
        "embd_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "layer_norm_eps",
        "parallel_block": "use_parallel_residual",
        "qkv_proj_bias": "attention_bias",
        "out_proj_bias": "attention_bias",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "prenorm": True,
        "parallel_block_tied_norm": False,
        "tie_word_embeddings": False,
    },
    computed=(_rotary, same_head_dim),
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("gpt_neox.embed_in"),
        FINAL_NORM: "gpt_neox.final_layer_norm",
        HEAD: padded("lm_head"),
        **each_layer(
            "gpt_neox.layers.{i}.",
            {
                "norm1": "input_layernorm",
                "mixer.Wqkv": reordered("attention.query_key_value", GROUPED),
                "mixer.out_proj": "attention.dense",
                "norm2": "post_attention_layernorm",
                "mlp.fc1": "mlp.dense_h_to_4h",
                "mlp.fc2": "mlp.dense_4h_to_h",
            },
        ),
    },
    spellings=[(r"^embed_out\.", "lm_head."), (r"^(embed_in|final_layer_norm|layers)\.", r"gpt_neox.\1.")],
    dropped=[r"\.attention\.(masked_)?bias$", r"rotary_emb\.inv_freq$"],
)


def gpt_neox_config_to_gpt2_config(gpt_neox_config: Any) -> Any:
    """The GPT2Config of a GPTNeoXConfig of transformers.

    Example:
        >>> from flash_attn.models.gpt_neox import gpt_neox_config_to_gpt2_config
        >>> from transformers import GPTNeoXConfig
        >>> gpt_neox_config_to_gpt2_config(GPTNeoXConfig(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(gpt_neox_config)


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    hub_names=("EleutherAI/gpt-neox-", "EleutherAI/pythia-", "togethercomputer/RedPajama-INCITE-"),
    to_gpt2_config=gpt_neox_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_gpt_neox(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' GPTNeoXForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import gpt_neox
        >>> from transformers import GPTNeoXConfig
        >>> sizes = dict(hidden_size=2, num_attention_heads=2, num_hidden_layers=1)
        >>> config = gpt_neox.gpt_neox_config_to_gpt2_config(GPTNeoXConfig(**sizes))
        >>> theirs = {"gpt_neox.layers.0.attention.query_key_value.bias": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in gpt_neox.remap_state_dict_hf_gpt_neox(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.bias': [0, 3, 1, 4, 2, 5]}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_gpt_neox(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' GPTNeoXForCausalLM from ours, with the name that transformers 5 has for the head.

    Older releases call it embed_out instead of lm_head.

    Example:
        >>> from flash_attn.models import gpt_neox
        >>> from transformers import GPTNeoXConfig
        >>> sizes = dict(hidden_size=2, num_attention_heads=2, num_hidden_layers=1)
        >>> config = gpt_neox.gpt_neox_config_to_gpt2_config(GPTNeoXConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.bias": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in gpt_neox.inv_remap_state_dict_hf_gpt_neox(ours, config).items()}
        {'gpt_neox.layers.0.attention.query_key_value.bias': [0, 2, 4, 1, 3, 5]}
    """
    return KEYS.invert(state_dict, config)
