"""OPT: its configuration and its tensors."""

from typing import Any

import torch
from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    POSITIONS,
    KeyMap,
    Order,
    each_layer,
    padded,
    queries_keys_values,
    reordered,
)
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family

# The table of positions begins with two rows that are never used: OPT counts positions from 2.
_WITHOUT_FIRST_TWO = Order(take=lambda rows, s: torch.arange(2, rows), length=lambda rows, s: rows + 2)


def _narrower_embeddings(read):
    width = read("word_embed_proj_dim")
    return {"word_embed_proj_dim": None if width == read("hidden_size") else width}


def _biases(read):
    return dict.fromkeys(
        ("qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), read("enable_bias", default=True)
    )


CONFIG = ConfigMap(
    copied={
        "n_positions": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_dim",
        "activation_function": "activation_function",
        "resid_pdrop": "dropout",
        "embd_pdrop": "dropout",
        "attn_pdrop": "attention_dropout",
        "initializer_range": "init_std",
        "prenorm": "do_layer_norm_before",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={"mlp_multiple_of": 1},
    computed=(_narrower_embeddings, _biases),
    only={
        "layerdrop": (0.0,),
        "layer_norm_elementwise_affine": (True,),
        "_remove_final_layer_norm": (False,),
    },
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("model.decoder.embed_tokens"),
        POSITIONS: reordered("model.decoder.embed_positions", _WITHOUT_FIRST_TWO),
        "transformer.embeddings.project_in": "model.decoder.project_in",
        "project_out": "model.decoder.project_out",
        FINAL_NORM: "model.decoder.final_layer_norm",
        HEAD: padded("lm_head"),
        **each_layer(
            "model.decoder.layers.{i}.",
            {
                "norm1": "self_attn_layer_norm",
                "mixer.Wqkv": queries_keys_values("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                "mixer.out_proj": "self_attn.out_proj",
                "norm2": "final_layer_norm",
                "mlp.fc1": "fc1",
                "mlp.fc2": "fc2",
            },
        ),
    },
    spellings=[
        (r"^decoder\.", "model.decoder."),
        (r"^model\.decoder\.layer_norm\.", "model.decoder.final_layer_norm."),
    ],
)


def opt_config_to_gpt2_config(opt_config: Any) -> Any:
    """The GPT2Config of an OPTConfig of transformers.

    Example:
        >>> from flash_attn.models.opt import opt_config_to_gpt2_config
        >>> from transformers import OPTConfig
        >>> opt_config_to_gpt2_config(OPTConfig(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(opt_config)


FAMILY = Family(
    name="opt",
    model_types=("opt",),
    hub_names=("facebook/opt",),
    to_gpt2_config=opt_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_opt(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' OPTForCausalLM or OPTModel, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import opt
        >>> from transformers import OPTConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = opt.opt_config_to_gpt2_config(OPTConfig(**sizes))
        >>> theirs = {"model.decoder.embed_positions.weight": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in opt.remap_state_dict_hf_opt(theirs, config).items()}
        {'transformer.embeddings.position_embeddings.weight': [2, 3, 4, 5]}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_opt(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' OPTForCausalLM from ours; the two positions that no token has are zeros.

    Example:
        >>> from flash_attn.models import opt
        >>> from transformers import OPTConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = opt.opt_config_to_gpt2_config(OPTConfig(**sizes))
        >>> ours = {"transformer.embeddings.position_embeddings.weight": torch.arange(4)}
        >>> {name: rows.tolist() for name, rows in opt.inv_remap_state_dict_hf_opt(ours, config).items()}
        {'model.decoder.embed_positions.weight': [0, 0, 0, 1, 2, 3]}
    """
    return KEYS.invert(state_dict, config)
