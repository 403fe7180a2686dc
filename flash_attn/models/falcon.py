"""Falcon: its configuration and its tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    GROUPED,
    HEAD,
    KeyMap,
    Rule,
    each_layer,
    padded,
    reordered,
)
from flash_attn.models._config import ConfigMap, Settings
from flash_attn.models._family import Family
from flash_attn.models._rope import whole_rope_fields


def _is_new(read):
    """Whether it has the new decoder. The first configurations of 40B do not say it, but have several key heads."""
    return read("new_decoder_architecture", default=read("n_head_kv", default=1) > 1)


def _heads(read):
    heads, kv = read("n_head", "num_attention_heads"), read("n_head_kv", "num_kv_heads")
    if not _is_new(read) and getattr(read.config, "n_head_kv", None) is None:
        kv = 1 if read("multi_query", default=True) else heads
    return {"n_head": heads, "n_head_kv": heads if kv is None else kv}


def _norms(read):
    """The new decoder is always parallel, with a norm for each branch unless it says otherwise."""
    new = _is_new(read)
    norms = read("num_ln_in_parallel_attn", default=2 if new else 1)
    parallel = read("parallel_attn", default=True) or new
    return {"parallel_block": parallel, "parallel_block_tied_norm": parallel and norms == 1}


def _biases(read):
    names = ("qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    return dict.fromkeys(names, read("bias", default=False))


def _positions(read):
    """ALiBi is added before the scores are scaled. transformers rounds it to bfloat16, which is not done here."""
    if not read("alibi", default=False):
        return whole_rope_fields(read)
    read("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")  # without effect
    return {"use_alibi": True, "alibi_scaled": True, "use_flash_attn": True}


def _inner(read):
    return {"n_inner": read("ffn_hidden_size", default=4 * read("hidden_size"))}


CONFIG = ConfigMap(
    copied={
        "n_embd": "hidden_size",
        "n_layer": ("n_layer", "num_hidden_layers"),
        "activation_function": "activation",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "activation_function": "gelu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "rotary_emb_interleaved": False,
        "tie_word_embeddings": True,
        "lm_head_bias": False,
    },
    computed=(_heads, _norms, _biases, _inner, _positions),
    without_effect=("apply_residual_connection_post_layernorm",),
)


def _table(s: Settings) -> dict[str, str | Rule]:
    """The norms have other names if a block has two of the same residual stream."""
    two = s.parallel_block and not s.parallel_block_tied_norm
    return {
        EMBEDDINGS: padded("transformer.word_embeddings"),
        FINAL_NORM: "transformer.ln_f",
        HEAD: padded("lm_head"),
        **each_layer(
            "transformer.h.{i}.",
            {
                "norm1": "ln_attn" if two else "input_layernorm",
                "mixer.Wqkv": reordered("self_attention.query_key_value", GROUPED),
                "mixer.out_proj": "self_attention.dense",
                "norm2": "ln_mlp" if two else "post_attention_layernorm",
                "mlp.fc1": "mlp.dense_h_to_4h",
                "mlp.fc2": "mlp.dense_4h_to_h",
            },
        ),
    }


KEYS = KeyMap(_table, spellings=[(r"^(word_embeddings|ln_f|h)\.", r"transformer.\1.")])


def falcon_config_to_gpt2_config(falcon_config: Any) -> Any:
    """The GPT2Config of a FalconConfig of transformers.

    Example:
        >>> from flash_attn.models.falcon import falcon_config_to_gpt2_config
        >>> from transformers import FalconConfig
        >>> falcon_config_to_gpt2_config(FalconConfig(hidden_size=64, num_attention_heads=4)).n_head_kv
        1
    """
    return CONFIG(falcon_config)


FAMILY = Family(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    hub_names=("tiiuae/falcon-",),
    to_gpt2_config=falcon_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_falcon(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' FalconForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import falcon
        >>> from transformers import FalconConfig
        >>> sizes = dict(hidden_size=4, num_attention_heads=2, num_hidden_layers=1, multi_query=False)
        >>> config = falcon.falcon_config_to_gpt2_config(FalconConfig(**sizes))
        >>> theirs = {"transformer.h.0.self_attention.query_key_value.bias": torch.arange(12)}
        >>> {name: rows.tolist() for name, rows in falcon.remap_state_dict_hf_falcon(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.bias': [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_falcon(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' FalconForCausalLM from ours.

    Example:
        >>> from flash_attn.models import falcon
        >>> from transformers import FalconConfig
        >>> sizes = dict(hidden_size=4, num_attention_heads=2, num_hidden_layers=1, multi_query=False)
        >>> config = falcon.falcon_config_to_gpt2_config(FalconConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.bias": torch.arange(12)}
        >>> {name: rows.tolist() for name, rows in falcon.inv_remap_state_dict_hf_falcon(ours, config).items()}
        {'transformer.h.0.self_attention.query_key_value.bias': [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]}
    """
    return KEYS.invert(state_dict, config)
