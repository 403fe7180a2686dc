"""GPT-2, and checkpoints of Megatron-LM with rotary embedding: their tensors."""

from typing import Any

from torch import Tensor

from flash_attn.models._checkpoints.key_map import (
    EMBEDDINGS,
    FINAL_NORM,
    GROUPED,
    HEAD,
    POSITIONS,
    KeyMap,
    each_layer,
    padded,
    reordered,
    transposed,
)
from flash_attn.models._config import is_gpt2_config
from flash_attn.models._family import Family


def gpt2_config_to_gpt2_config(config: Any) -> Any:
    """The configuration itself, which the model reads as it is."""
    if not is_gpt2_config(config):
        raise ValueError(f"config must be a GPT2Config, found {type(config).__name__}")
    return config


GPT2_KEYS = KeyMap(
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
                "mlp.fc1": transposed("mlp.c_fc"),
                "mlp.fc2": transposed("mlp.c_proj"),
            },
        ),
    },
    spellings=[(r"^(wte|wpe|ln_f|h)\.", r"transformer.\1.")],
    dropped=[r"\.attn\.(masked_)?bias$"],
)

FAMILY = Family(
    name="gpt2",
    model_types=("gpt2",),
    hub_names=("gpt2", "openai-community/gpt2"),
    to_gpt2_config=gpt2_config_to_gpt2_config,
    keys=GPT2_KEYS,
)


MEGATRON_KEYS = KeyMap(
    {
        EMBEDDINGS: padded("language_model.embedding.word_embeddings", from_rows=True),
        POSITIONS: "wpe",
        FINAL_NORM: "language_model.encoder.final_layernorm",
        HEAD: padded("language_model.output_layer", from_rows=True),
        **each_layer(
            "language_model.encoder.layers.{i}.",
            {
                "norm1": "input_layernorm",
                "mixer.Wqkv": reordered("self_attention.query_key_value", GROUPED),
                "mixer.out_proj": "self_attention.dense",
                "norm2": "post_attention_layernorm",
                "mlp.fc1": "mlp.dense_h_to_4h",
                "mlp.fc2": "mlp.dense_4h_to_h",
            },
        ),
    },
    spellings=[
        (r"^(model|module)\.", ""),
        (r"^language_model\.transformer\.", "language_model.encoder."),
        (r"^language_model\.(?!encoder\.|embedding\.|output_layer\.)", "language_model.encoder."),
    ],
    dropped=[r"rotary_emb\.inv_freq$"],
)


def remap_state_dict_hf_gpt2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' GPT2LMHeadModel or GPT2Model, which is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel, remap_state_dict_hf_gpt2
        >>> import transformers
        >>> config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)
        >>> theirs = dict(transformers.GPT2LMHeadModel(config).state_dict())
        >>> GPTLMHeadModel(config).load_state_dict(remap_state_dict_hf_gpt2(theirs, config))
        <All keys matched successfully>
    """
    return GPT2_KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_gpt2(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' GPT2LMHeadModel from ours.

    Example:
        >>> from flash_attn.models.gpt import GPTLMHeadModel, inv_remap_state_dict_hf_gpt2
        >>> import transformers
        >>> config = transformers.GPT2Config(vocab_size=100, n_embd=64, n_layer=1, n_head=4)
        >>> state_dict = inv_remap_state_dict_hf_gpt2(GPTLMHeadModel(config).state_dict(), config)
        >>> transformers.GPT2LMHeadModel(config).load_state_dict(state_dict, strict=False).unexpected_keys
        []
    """
    return GPT2_KEYS.invert(state_dict, config)


def remap_state_dict_megatron(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of a GPT model with rotary embedding of Megatron-LM, which is consumed.

    The vocabulary is padded up to a multiple of pad_vocab_size_multiple from the rows that it has in the checkpoint.

    Example:
        >>> from flash_attn.models.gpt import remap_state_dict_megatron
        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_embd=2, n_layer=1, n_head=2)
        >>> theirs = {"language_model.encoder.layers.0.self_attention.query_key_value.bias": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in remap_state_dict_megatron(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.bias': [0, 3, 1, 4, 2, 5]}
    """
    return MEGATRON_KEYS.remap(state_dict, config)


def inv_remap_state_dict_megatron(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of a GPT model of Megatron-LM from ours, without an output layer that is tied to the embedding.

    Example:
        >>> from flash_attn.models.gpt import inv_remap_state_dict_megatron
        >>> from transformers import GPT2Config
        >>> config = GPT2Config(n_embd=2, n_layer=1, n_head=2)
        >>> ours = {"transformer.layers.0.mixer.Wqkv.bias": torch.arange(6)}
        >>> {name: rows.tolist() for name, rows in inv_remap_state_dict_megatron(ours, config).items()}
        {'language_model.encoder.layers.0.self_attention.query_key_value.bias': [0, 2, 4, 1, 3, 5]}
    """
    result = MEGATRON_KEYS.invert(state_dict, config)
    if getattr(config, "tie_word_embeddings", True):
        result.pop("language_model.output_layer.weight", None)
    return result
