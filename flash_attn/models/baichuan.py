"""Baichuan, 7B with rotary embedding and 13B with ALiBi, versions 1 and 2: their configuration and their tensors.

Their configurations do not say which of these they are: it follows from their sizes.
"""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import EMBEDDINGS, FINAL_NORM, HEAD, KeyMap, each_layer, padded, stacked
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family


def _positions(read):
    alibi = read.needed("hidden_size") >= 5000
    return {"rotary_emb_fraction": 0.0 if alibi else 1.0, "use_alibi": alibi, "use_flash_attn": alibi}


def _head(read):
    return {"norm_head": read.needed("vocab_size") > 70000}


CONFIG = ConfigMap(
    copied={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
        "pad_token_id": "pad_token_id",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "activation_function": "swiglu",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "rms_norm": True,
        "rotary_emb_interleaved": False,
        "tie_word_embeddings": False,
        "qkv_proj_bias": False,
        "out_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "mlp_multiple_of": 1,
    },
    computed=(_positions, _head),
    only={"hidden_act": ("silu",)},
    without_effect=("max_position_embeddings", "model_max_length", "z_loss_weight", "gradient_checkpointing"),
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("model.embed_tokens", from_rows=True),
        FINAL_NORM: "model.norm",
        HEAD: padded("lm_head", from_rows=True),
        **each_layer(
            "model.layers.{i}.",
            {
                "norm1": "input_layernorm",
                "mixer.Wqkv": "self_attn.W_pack",
                "mixer.out_proj": "self_attn.o_proj",
                "norm2": "post_attention_layernorm",
                "mlp.fc1": stacked("mlp.up_proj", "mlp.gate_proj"),
                "mlp.fc2": "mlp.down_proj",
            },
        ),
    },
    spellings=[(r"^(embed_tokens|norm|layers)\.", r"model.\1.")],
)


def baichuan_config_to_gpt2_config(baichuan_config: Any) -> Any:
    """The GPT2Config of the configuration that comes with Baichuan.

    Example:
        >>> from flash_attn.models.baichuan import baichuan_config_to_gpt2_config
        >>> from transformers import PretrainedConfig  # or AutoConfig.from_pretrained(name, trust_remote_code=True)
        >>> fields = dict(vocab_size=64000, hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
        >>> baichuan_config_to_gpt2_config(PretrainedConfig(**fields)).rotary_emb_fraction  # 0.0 of 13B
        1.0
    """
    return CONFIG(baichuan_config)


FAMILY = Family(
    name="baichuan",
    model_types=("baichuan",),
    hub_names=("baichuan-inc/",),
    to_gpt2_config=baichuan_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_baichuan(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of BaichuanForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import baichuan
        >>> from transformers import PretrainedConfig
        >>> sizes = dict(vocab_size=64000, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = baichuan.baichuan_config_to_gpt2_config(PretrainedConfig(**sizes))
        >>> theirs = {"model.layers.0.self_attn.W_pack.weight": torch.randn(24, 8)}
        >>> list(baichuan.remap_state_dict_hf_baichuan(theirs, config))
        ['transformer.layers.0.mixer.Wqkv.weight']
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_baichuan(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of BaichuanForCausalLM from ours.

    Example:
        >>> from flash_attn.models import baichuan
        >>> from transformers import PretrainedConfig
        >>> sizes = dict(vocab_size=64000, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = baichuan.baichuan_config_to_gpt2_config(PretrainedConfig(**sizes))
        >>> ours = {"transformer.layers.0.mlp.fc1.weight": torch.randn(32, 8)}
        >>> sorted(baichuan.inv_remap_state_dict_hf_baichuan(ours, config))
        ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    """
    return KEYS.invert(state_dict, config)
