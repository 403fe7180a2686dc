"""BigCode (StarCoder, WizardCoder): its configuration and its tensors.

All query heads share one key and one value head. Unless the model has n_head_kv = 1, they are repeated for each query
head when they are loaded.
"""

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
    reordered,
)
from flash_attn.models._config import ConfigMap
from flash_attn.models._family import Family

_ALSO_COPIED = """
    max_batch_size max_sequence_length multi_query scale_attn_weights summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj use_cache
""".split()


def _one_key_head(rows, s):
    queries, key, value = torch.arange(rows).split((s.n_embd, s.width_of_head, s.width_of_head))
    return torch.cat([queries, key.repeat(s.heads_kv), value.repeat(s.heads_kv)])


# In the inverse, the first of the repeated heads is the one.
_REPEATED = Order(take=_one_key_head, length=lambda rows, s: s.n_embd + 2 * s.width_of_head)

CONFIG = ConfigMap(
    copied={
        "n_positions": "n_positions",
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
        **{name: name for name in _ALSO_COPIED},
    },
    only={"multi_query": (True,)},
    without_effect=("num_key_value_heads", "inference_runner", "pre_allocate_kv_cache", "validate_runner_input"),
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
                "mixer.Wqkv": reordered("attn.c_attn", _REPEATED),
                "mixer.out_proj": "attn.c_proj",
                "norm2": "ln_2",
                "mlp.fc1": "mlp.c_fc",
                "mlp.fc2": "mlp.c_proj",
            },
        ),
    },
    spellings=[(r"^(wte|wpe|ln_f|h)\.", r"transformer.\1.")],
    dropped=[r"\.attn\.bias$"],
)


def bigcode_config_to_gpt2_config(bigcode_config: Any) -> Any:
    """The GPT2Config of a GPTBigCodeConfig of transformers.

    Example:
        >>> from flash_attn.models.bigcode import bigcode_config_to_gpt2_config
        >>> from transformers import GPTBigCodeConfig
        >>> bigcode_config_to_gpt2_config(GPTBigCodeConfig(n_embd=64, n_head=4)).n_embd
        64
    """
    return CONFIG(bigcode_config)


FAMILY = Family(
    name="bigcode",
    model_types=("gpt_bigcode",),
    hub_names=("bigcode/", "WizardLM/"),
    to_gpt2_config=bigcode_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_bigcode(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' GPTBigCodeForCausalLM, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import bigcode
        >>> from transformers import GPTBigCodeConfig
        >>> sizes = dict(n_embd=2, n_head=2, n_layer=1)
        >>> config = bigcode.bigcode_config_to_gpt2_config(GPTBigCodeConfig(**sizes))
        >>> theirs = {"transformer.h.0.attn.c_attn.bias": torch.arange(4)}
        >>> {name: rows.tolist() for name, rows in bigcode.remap_state_dict_hf_bigcode(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.bias': [0, 1, 2, 2, 3, 3]}
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_bigcode(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' GPTBigCodeForCausalLM from ours: of repeated key and value heads, the first.

    Example:
        >>> from flash_attn.models import bigcode
        >>> from transformers import GPTBigCodeConfig
        >>> sizes = dict(n_embd=2, n_head=2, n_layer=1)
        >>> config = bigcode.bigcode_config_to_gpt2_config(GPTBigCodeConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.bias": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in bigcode.inv_remap_state_dict_hf_bigcode(ours, config).items()}
        {'transformer.h.0.attn.c_attn.bias': [0, 1, 2, 4]}
    """
    return KEYS.invert(state_dict, config)
