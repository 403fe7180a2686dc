"""StableLM: its configuration and its tensors."""

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

FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    hub_names=("stabilityai/stablelm-",),
    to_gpt2_config=CONFIG,
    keys=KEYS,
)
