"""Llama, and what is built like it: Mistral, Qwen2, Qwen3, Gemma. Checkpoints of transformers and of Meta.

    config = llama_config_to_gpt2_config(transformers.LlamaConfig.from_pretrained(path))
    model = GPTLMHeadModel.from_pretrained(path, config)

Meta's files are shards of a tensor parallel model:

    config = llama_config_to_gpt2_config(config_from_checkpoint(path, "7B"))
    shards = [remap_state_dict_meta_llama(each, config) for each in state_dicts_from_checkpoint(path, "7B")]
    model.load_state_dict(combine_state_dicts_tp(shards, config))
"""

import importlib.util
import json
import os
import pathlib
import types
from typing import Any

import torch
from torch import Tensor

from flash_attn.models._config import ConfigMap, refuse_unless, round_up
from flash_attn.models._family import Family
from flash_attn.models._keys import (
    EMBEDDINGS,
    FINAL_NORM,
    HEAD,
    INTERLEAVED,
    INTERLEAVED_HEAD,
    KeyMap,
    each_layer,
    padded,
    queries_keys_values,
    reordered,
    stacked,
)  # fmt: skip
from flash_attn.models._rope import whole_rope_fields

_ACTIVATIONS = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh",
}  # fmt: skip


def _biases(read):
    qkv = read("attention_bias", default=_type(read) == "qwen2")
    return {"qkv_proj_bias": qkv, "out_proj_bias": read("attention_bias", default=False)} | dict.fromkeys(
        ("mlp_fc1_bias", "mlp_fc2_bias"), read("mlp_bias", default=False)
    )


def _gated_activation(read):
    name = read("hidden_activation", "hidden_act", default="silu")
    if name not in _ACTIVATIONS:
        raise ValueError(f"config.hidden_act must be one of {', '.join(map(repr, _ACTIVATIONS))}, found {name!r}")
    gemma = _type(read) == "gemma" and name == "gelu"  # which Gemma's configurations say, but do not mean
    return {"activation_function": "geglu_tanh" if gemma else _ACTIVATIONS[name]}


def _windows(read):
    """The window of each layer; a token sees as many tokens as this, with itself."""
    window, kinds = read("sliding_window"), read("layer_types")
    first = read("max_window_layers", default=0)
    if window is None or not read("use_sliding_window", default=True):
        return {}
    if kinds is not None:
        for kind in kinds:
            refuse_unless("layer_types", kind, ("full_attention", "sliding_attention"))
        window = [window if kind == "sliding_attention" else None for kind in kinds]
    elif first > 0:
        window = [None if i < first else window for i in range(read("num_hidden_layers"))]
    if isinstance(window, list) and not any(window):
        return {}
    return {"sliding_window": window, "use_flash_attn": True}


def _gemma(read):
    """Gemma's norms multiply by 1 + weight, and its embeddings are multiplied by the root of their features."""
    if _type(read) != "gemma":
        return {}
    factor, tied = read("hidden_size") ** 0.5, read("tie_word_embeddings", default=True)
    return {"norm_zero_centered": True, "mup_embeddings_multiplier": factor, "tie_word_embeddings": tied}


def _qk_norm(read):
    return {"qk_norm": _type(read) == "qwen3"}


def _type(read):
    return read("model_type", default="llama")


CONFIG = ConfigMap(
    copied={
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_key_value_heads",
        "n_inner": "intermediate_size",
        "head_dim": "head_dim",
        "attn_pdrop": "attention_dropout",
        "layer_norm_epsilon": "rms_norm_eps",
        "pad_token_id": "pad_token_id",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    constant={
        "n_positions": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "rms_norm": True,
        "rotary_emb_interleaved": True,
        "tie_word_embeddings": False,
        "mlp_multiple_of": 1,
    },
    computed=(whole_rope_fields, _biases, _gated_activation, _windows, _gemma, _qk_norm),
)

_OF_META = each_layer(
    "layers.{i}.",
    {
        "norm1": "attention_norm",
        "mixer.Wqkv": queries_keys_values("attention.wq", "attention.wk", "attention.wv"),
        "mixer.out_proj": "attention.wo",
        "norm2": "ffn_norm",
        "mlp.fc1": stacked("feed_forward.w3", "feed_forward.w1"),
        "mlp.fc2": "feed_forward.w2",
    },
)

META_KEYS = KeyMap(
    {
        EMBEDDINGS: padded("tok_embeddings", from_rows=True),
        FINAL_NORM: "norm",
        HEAD: padded("output", from_rows=True),
        **_OF_META,
    },
    dropped=[r"rope\.freqs$"],
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
                "mixer.Wqkv": queries_keys_values(
                    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", order=INTERLEAVED
                ),
                "mixer.q_norm": reordered("self_attn.q_norm", INTERLEAVED_HEAD),
                "mixer.k_norm": reordered("self_attn.k_norm", INTERLEAVED_HEAD),
                "mixer.out_proj": "self_attn.o_proj",
                "norm2": "post_attention_layernorm",
                "mlp.fc1": stacked("mlp.up_proj", "mlp.gate_proj"),
                "mlp.fc2": "mlp.down_proj",
            },
        ),
    },
    spellings=[(r"^(embed_tokens|norm|layers)\.", r"model.\1.")],
)  # fmt: skip


def llama_config_to_gpt2_config(llama_config: Any) -> Any:
    """The GPT2Config of a configuration of Llama, Mistral, Qwen2, Qwen3 or Gemma, or of Meta's files."""
    return CONFIG(llama_config)


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma"),
    hub_names=tuple(
        "meta-llama/ codellama/ TinyLlama/ mistralai/Mistral- Qwen/Qwen2 Qwen/Qwen3- google/gemma-".split()
    ),
    to_gpt2_config=llama_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' LlamaForCausalLM (or another of this family), which is consumed.

    config: the GPT2Config of our model. Queries and keys are reordered for interleaved rotary pairs. Tensors that are
    not known stay as they are.
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' LlamaForCausalLM from ours."""
    return KEYS.invert(state_dict, config)


def remap_state_dict_meta_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from Meta's, or this part of ours from one of Meta's shards. It is consumed."""
    return META_KEYS.remap(state_dict, config)


def inv_remap_state_dict_meta_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Meta's state dict from ours."""
    return META_KEYS.invert(state_dict, config)


def config_from_meta_checkpoint(checkpoint_path: str | os.PathLike, model_name: str) -> Any:
    """The configuration in <checkpoint_path>/<model_name>/params.json, as transformers' LlamaConfig if there is one.

    Where it does not say the size of the vocabulary, this is that of tokenizer.model beside it, which takes the package
    sentencepiece; 32000 without the file. Raises ValueError for use_scaled_rope (Llama 3.1 and later), as the file does
    not say how the rotary embedding is scaled: the configuration that transformers has does.
    """
    folder = pathlib.Path(checkpoint_path, model_name)
    params = json.loads((folder / "params.json").read_text())
    refuse_unless("use_scaled_rope", params.get("use_scaled_rope"), (None, False))
    dim = params["dim"]
    inner = int(2 * (4 * dim) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        inner = int(params["ffn_dim_multiplier"] * inner)
    fields = dict(
        hidden_size=dim, intermediate_size=round_up(inner, params.get("multiple_of", 1)),
        num_attention_heads=params["n_heads"], num_hidden_layers=params["n_layers"],
        num_key_value_heads=params.get("n_kv_heads") or params["n_heads"], rms_norm_eps=params["norm_eps"],
        vocab_size=_vocabulary_of(params, folder / "tokenizer.model"), hidden_act="silu", initializer_range=0.02,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if params.get("rope_theta") is not None:
        fields |= dict.fromkeys(("rotary_emb_base", "rope_theta"), params["rope_theta"])  # ours, transformers'
    if importlib.util.find_spec("transformers") is None:
        return types.SimpleNamespace(model_type="llama", **fields)
    from transformers import LlamaConfig

    return LlamaConfig(**fields)


def _vocabulary_of(params, tokenizer):
    if params.get("vocab_size", -1) > 0:
        return params["vocab_size"]
    if not tokenizer.is_file():
        return 32000
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(str(tokenizer)).vocab_size()


def config_from_hf_checkpoint(checkpoint_path: str | os.PathLike, model_name: str) -> Any:
    """transformers' LlamaConfig in <checkpoint_path>/<model_name>-hf/config.json."""
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(pathlib.Path(checkpoint_path, f"{model_name}-hf") / "config.json")


def config_from_checkpoint(checkpoint_path: str | os.PathLike, model_name: str, checkpoint_format: str = "meta") -> Any:
    """The configuration of a checkpoint.

    Arguments:
        checkpoint_path: the folder that holds the folders of checkpoints.
        model_name: the folder of this one.
        checkpoint_format: "meta" or "hf", that of transformers.
    """
    formats = {"meta": config_from_meta_checkpoint, "hf": config_from_hf_checkpoint}
    if checkpoint_format not in formats:
        raise ValueError(f"checkpoint_format must be 'meta' or 'hf', found {checkpoint_format!r}")
    return formats[checkpoint_format](checkpoint_path, model_name)


def state_dicts_from_checkpoint(checkpoint_path: str | os.PathLike, model_name: str) -> list[dict[str, Tensor]]:
    """The shards <checkpoint_path>/<model_name>/consolidated.*.pth, in the order of their names, on the CPU."""
    folder = pathlib.Path(checkpoint_path, model_name)
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        raise FileNotFoundError(f"{folder} must have files consolidated.*.pth, found none")
    return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
