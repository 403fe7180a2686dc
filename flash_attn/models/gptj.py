"""GPT-J: its configuration and its tensors."""

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


def _rotary(read):
    width = read("n_embd") // read("n_head")
    rotary_dim = read("rotary_dim", default=width)
    return {"rotary_emb_fraction": rotary_dim / width}


CONFIG = ConfigMap(
    copied={
        "n_embd": "n_embd",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_inner": "n_inner",
        "activation_function": "activation_function",
        "resid_pdrop": "resid_pdrop",
        "embd_pdrop": "embd_pdrop",
        "attn_pdrop": "attn_pdrop",
        "layer_norm_epsilon": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "prenorm": True,
        "parallel_block": True,
        "parallel_block_tied_norm": True,
        "rotary_emb_interleaved": True,
        "tie_word_embeddings": False,
        "qkv_proj_bias": False,
        "out_proj_bias": False,
        "lm_head_bias": True,
    },
    computed=(_rotary,),
    only={"rotary": (True,), "scale_attn_weights": (True,)},
    without_effect=("n_positions",),
)

KEYS = KeyMap(
    {
        EMBEDDINGS: padded("transformer.wte"),
        FINAL_NORM: "transformer.ln_f",
        HEAD: padded("lm_head"),
        **each_layer(
            "transformer.h.{i}.",
            {
                "norm1": "ln_1",
                "mixer.Wqkv": queries_keys_values("attn.q_proj", "attn.k_proj", "attn.v_proj"),
                "mixer.out_proj": "attn.out_proj",
                "mlp.fc1": "mlp.fc_in",
                "mlp.fc2": "mlp.fc_out",
            },
        ),
    },
    spellings=[(r"^(wte|ln_f|h)\.", r"transformer.\1.")],
    dropped=[r"\.attn\.(masked_)?bias$", r"\.attn\.embed_positions$"],
)


def gptj_config_to_gpt2_config(gptj_config: Any) -> Any:
    """The GPT2Config of a GPTJConfig of transformers.

    Example:
        >>> from flash_attn.models.gptj import gptj_config_to_gpt2_config
        >>> from transformers import GPTJConfig
        >>> gptj_config_to_gpt2_config(GPTJConfig(n_embd=64, n_head=2, rotary_dim=16)).n_embd
        64
    """
    return CONFIG(gptj_config)


FAMILY = Family(
    name="gptj",
    model_types=("gptj",),
    hub_names=("EleutherAI/gpt-j-", "togethercomputer/GPT-JT-"),
    to_gpt2_config=gptj_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_gptj(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' GPTJForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import gptj
        >>> from transformers import GPTJConfig
        >>> sizes = dict(n_embd=8, n_head=2, n_layer=1, rotary_dim=4)
        >>> config = gptj.gptj_config_to_gpt2_config(GPTJConfig(**sizes))
        >>> theirs = {f"transformer.h.0.attn.{each}_proj.weight": torch.randn(8, 8) for each in "qkv"}
        >>> {name: tuple(x.shape) for name, x in gptj.remap_state_dict_hf_gptj(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.weight': (24, 8)}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_gptj(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' GPTJForCausalLM from ours.

    Example:
        >>> from flash_attn.models import gptj
        >>> from transformers import GPTJConfig
        >>> sizes = dict(n_embd=8, n_head=2, n_layer=1, rotary_dim=4)
        >>> config = gptj.gptj_config_to_gpt2_config(GPTJConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.weight": torch.randn(24, 8)}
        >>> [name.split(".")[-2] for name in gptj.inv_remap_state_dict_hf_gptj(ours, config)]
        ['q_proj', 'k_proj', 'v_proj']
    """
    return KEYS.invert(state_dict, config)
