"""BTLM: its configuration and its tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    POSITIONS,
    KeyMap,
    each_layer,
    padded,
    stacked,
    transposed,
)
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family


def _positions(read):
    alibi = read("position_embedding_type", default="learned") == "alibi"
    positions = 0 if alibi else read("n_positions", "max_position_embeddings", default=0)
    return {"n_positions": positions, "use_alibi": alibi, "use_flash_attn": alibi}


CONFIG = ConfigMap(
    copied={
        "n_embd": ("n_embd", "hidden_size"),
        "n_layer": ("n_layer", "num_hidden_layers"),
        "n_head": ("n_head", "num_attention_heads"),
        "n_inner": "n_inner",
        "activation_function": "activation_function",
        "resid_pdrop": "resid_pdrop",
        "embd_pdrop": "embd_pdrop",
        "attn_pdrop": "attn_pdrop",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "scale_attn_weights": "scale_attn_weights",
        "scale_attn_by_inverse_layer_idx": "scale_attn_by_inverse_layer_idx",
        "tie_word_embeddings": "tie_word_embeddings",
        "mup_width_scale": "mup_width_scale",
        "mup_embeddings_multiplier": "mup_embeddings_scale",
        "mup_output_multiplier": "mup_output_alpha",
        "mup_scale_qk_dot_by_d": "mup_scale_qk_dot_by_d",
    },
    constant={"mlp_multiple_of": 1},
    computed=(_positions,),
    without_effect=("n_positions", "max_position_embeddings"),
    only={"position_embedding_type": ("learned", "alibi"), "alibi_scaling": (None,)},
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("transformer.wte"),
        POSITIONS: "transformer.wpe",
        FINAL_NORM: "transformer.ln_f",
        HEAD: padded("lm_head"),
        **each_layer(
            "transformer.h.{i}.",
            {
                "norm1": "ln_1",
                "mixer.Wqkv": transposed("attn.c_attn"),
                "mixer.out_proj": transposed("attn.c_proj"),
                "norm2": "ln_2",
                "mlp.fc1": stacked("mlp.c_fc", "mlp.c_fc2", transposed=True),
                "mlp.fc2": transposed("mlp.c_proj"),
            },
        ),
    },
    spellings=[(r"^(wte|wpe|ln_f|h|relative_pe)\.", r"transformer.\1.")],
    dropped=[r"\.attn\.(masked_)?bias$", r"relative_pe\.slopes$"],
)


def btlm_config_to_gpt2_config(btlm_config: Any) -> Any:
    """The GPT2Config of the configuration that comes with BTLM.

    Example:
        >>> from flash_attn.models.btlm import btlm_config_to_gpt2_config
        >>> from transformers import PretrainedConfig  # or AutoConfig.from_pretrained(name, trust_remote_code=True)
        >>> fields = dict(n_embd=64, n_head=4, n_layer=1, activation_function="swiglu", position_embedding_type="alibi")
        >>> btlm_config_to_gpt2_config(PretrainedConfig(**fields)).use_alibi
        True
    """
    return CONFIG(btlm_config)


FAMILY = Family(
    name="btlm",
    model_types=("btlm",),
    hub_names=("cerebras/btlm-",),
    to_gpt2_config=btlm_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_btlm(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of BTLMLMHeadModel, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import btlm
        >>> from transformers import PretrainedConfig
        >>> config = btlm.btlm_config_to_gpt2_config(PretrainedConfig(n_embd=8, n_head=2, n_layer=1))
        >>> theirs = {f"transformer.h.0.mlp.{each}.weight": torch.randn(8, 16) for each in ("c_fc", "c_fc2")}
        >>> {name: tuple(x.shape) for name, x in btlm.remap_state_dict_hf_btlm(theirs, config).items()}
        {'transformer.layers.0.mlp.fc1.weight': (32, 8)}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_btlm(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of BTLMLMHeadModel from ours, without the slopes of ALiBi.

    Example:
        >>> from flash_attn.models import btlm
        >>> from transformers import PretrainedConfig
        >>> config = btlm.btlm_config_to_gpt2_config(PretrainedConfig(n_embd=8, n_head=2, n_layer=1))
        >>> ours = {"transformer.layers.0.mlp.fc1.weight": torch.randn(32, 8)}
        >>> {name: tuple(x.shape) for name, x in btlm.inv_remap_state_dict_hf_btlm(ours, config).items()}
        {'transformer.h.0.mlp.c_fc.weight': (8, 16), 'transformer.h.0.mlp.c_fc2.weight': (8, 16)}
    """
    return KEYS.invert(state_dict, config)
