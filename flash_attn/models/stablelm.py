"""StableLM: its configuration and its tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._llama_like import CONSTANT, COPIED, gated_activation, llama_like_keys
from flash_attn.models._rope import rope_fields, same_head_dim


def _rotary(read):
    return rope_fields(read, usual_fraction=0.25)


def _block(read):
    parallel = read("use_parallel_residual", default=False)
    return {"parallel_block": parallel, "parallel_block_tied_norm": parallel}


CONFIG = ConfigMap(
    copied=COPIED
    | {
        "layer_norm_epsilon": "layer_norm_eps",
        "qkv_proj_bias": "use_qkv_bias",
        "resid_pdrop": "hidden_dropout",
    },
    constant=CONSTANT | {"rms_norm": False},
    computed=(_rotary, same_head_dim, gated_activation, _block),
    only={"qk_layernorm": (False,)},
)

KEYS = llama_like_keys({"norm1": "input_layernorm", "norm2": "post_attention_layernorm"})


def stablelm_config_to_gpt2_config(stablelm_config: Any) -> Any:
    """The GPT2Config of a StableLmConfig of transformers.

    Example:
        >>> from flash_attn.models.stablelm import stablelm_config_to_gpt2_config
        >>> from transformers import StableLmConfig
        >>> stablelm_config_to_gpt2_config(StableLmConfig(num_attention_heads=4, num_key_value_heads=2)).n_head_kv
        2
    """
    return CONFIG(stablelm_config)


FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    hub_names=("stabilityai/stablelm-",),
    to_gpt2_config=stablelm_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_stablelm(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' StableLmForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import stablelm
        >>> from transformers import StableLmConfig
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
        >>> config = stablelm.stablelm_config_to_gpt2_config(StableLmConfig(**sizes))
        >>> theirs = {f"model.layers.0.mlp.{each}_proj.weight": torch.randn(32, 16) for each in ("up", "gate")}
        >>> {name: tuple(x.shape) for name, x in stablelm.remap_state_dict_hf_stablelm(theirs, config).items()}
        {'transformer.layers.0.mlp.fc1.weight': (64, 16)}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_stablelm(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' StableLmForCausalLM from ours.

    Example:
        >>> from flash_attn.models import stablelm
        >>> from transformers import StableLmConfig
        >>> sizes = dict(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
        >>> config = stablelm.stablelm_config_to_gpt2_config(StableLmConfig(**sizes))
        >>> ours = {"transformer.layers.0.mlp.fc1.weight": torch.randn(64, 16)}
        >>> sorted(stablelm.inv_remap_state_dict_hf_stablelm(ours, config))
        ['model.layers.0.mlp.gate_proj.weight', 'model.layers.0.mlp.up_proj.weight']
    """
    return KEYS.invert(state_dict, config)
