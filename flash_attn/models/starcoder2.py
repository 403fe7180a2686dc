"""StarCoder 2: its configuration and its tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family
from flash_attn.models._llama_like import CONSTANT, COPIED, llama_like_keys, windows
from flash_attn.models._rope import whole_rope_fields


def _biases(read):
    names = ("qkv_proj_bias", "out_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    return dict.fromkeys(names, read("use_bias", default=True))


CONFIG = ConfigMap(
    copied=COPIED
    | {
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "norm_epsilon",
        "resid_pdrop": "residual_dropout",
        "embd_pdrop": "embedding_dropout",
    },
    constant=CONSTANT | {"rms_norm": False, "tie_word_embeddings": True},
    computed=(whole_rope_fields, _biases, windows),
    only={"mlp_type": ("default",), "norm_type": ("layer_norm",), "scale_attn_weights": (True,)},
)

KEYS = llama_like_keys(
    {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
)


def starcoder2_config_to_gpt2_config(starcoder2_config: Any) -> Any:
    """The GPT2Config of a Starcoder2Config of transformers.

    Example:
        >>> from flash_attn.models.starcoder2 import starcoder2_config_to_gpt2_config
        >>> from transformers import Starcoder2Config
        >>> starcoder2_config_to_gpt2_config(Starcoder2Config(hidden_size=64, num_attention_heads=4)).n_embd
        64
    """
    return CONFIG(starcoder2_config)


FAMILY = Family(
    name="starcoder2",
    model_types=("starcoder2",),
    hub_names=("bigcode/starcoder2-",),
    to_gpt2_config=starcoder2_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_starcoder2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' Starcoder2ForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import starcoder2
        >>> from transformers import Starcoder2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = starcoder2.starcoder2_config_to_gpt2_config(Starcoder2Config(**sizes))
        >>> names = ("c_fc", "c_proj")
        >>> theirs = {f"model.layers.0.mlp.{each}.weight": torch.ones(8, 8) for each in names}
        >>> sorted(starcoder2.remap_state_dict_hf_starcoder2(theirs, config))
        ['transformer.layers.0.mlp.fc1.weight', 'transformer.layers.0.mlp.fc2.weight']
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_starcoder2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' Starcoder2ForCausalLM from ours.

    Example:
        >>> from flash_attn.models import starcoder2
        >>> from transformers import Starcoder2Config
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = starcoder2.starcoder2_config_to_gpt2_config(Starcoder2Config(**sizes))
        >>> names = ("fc1", "fc2")
        >>> ours = {f"transformer.layers.0.mlp.{each}.weight": torch.ones(8, 8) for each in names}
        >>> sorted(starcoder2.inv_remap_state_dict_hf_starcoder2(ours, config))
        ['model.layers.0.mlp.c_fc.weight', 'model.layers.0.mlp.c_proj.weight']
    """
    return KEYS.invert(state_dict, config)
