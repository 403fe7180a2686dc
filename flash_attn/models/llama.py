"""Llama, and what is built like it: Mistral, Qwen2, Qwen3, Gemma, Granite, SmolLM3, Ministral, Seed-OSS.

Checkpoints of transformers and of Meta.

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

from flash_attn.models._checkpoints.key_map import (
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
)
from flash_attn.models._config import ConfigMap, refuse_unless, round_up
from flash_attn.models._family import Family
from flash_attn.models._llama_like import CONSTANT, COPIED, biases, gated_activation, kinds_by, llama_like_keys, windows
from flash_attn.models._rope import turning_in, whole_rope_fields


def _biases(read):
    """Qwen2's queries, keys and values have biases, though its configuration does not say so; Mistral has none."""
    kind = _type(read)
    if kind in ("mistral", "ministral", "qwen2"):
        return {"qkv_proj_bias": kind == "qwen2"}
    fields = biases(read)
    if kind in ("llama", "granite", "smollm3", "seed_oss"):
        fields |= dict.fromkeys(("mlp_fc1_bias", "mlp_fc2_bias"), read("mlp_bias", default=False))
    if kind == "seed_oss":
        fields |= {"out_proj_bias": read("attention_out_bias", default=False)}
    return fields


def _dropout(read):
    return {"resid_pdrop": read("residual_dropout", default=0.0)} if _type(read) == "seed_oss" else {}


def _gemma(read):
    """Gemma's norms multiply by 1 + weight, and its embeddings are multiplied by the root of their features."""
    if _type(read) != "gemma":
        return {}
    fields = {"norm_zero_centered": True, "mup_embeddings_multiplier": read("hidden_size") ** 0.5}
    read("hidden_activation")  # without effect
    if read("hidden_act") == "gelu":  # Gemma's configurations say this, but the model uses the tanh form
        fields["activation_function"] = "geglu_tanh"
    return fields


def _tied(read):
    """The heads of Gemma and SmolLM3 are tied to the embeddings, unless their configurations say otherwise."""
    return {"tie_word_embeddings": read("tie_word_embeddings", default=_type(read) in ("gemma", "smollm3"))}


def _granite(read):
    """Granite's attention_multiplier stands for head_dim ** -0.5; its logits are divided by a number."""
    if _type(read) != "granite":
        return {}
    return {
        "scale_attn_weights": False,
        "mup_attn_multiplier": read("attention_multiplier", default=1.0),
        "mup_embeddings_multiplier": read("embedding_multiplier", default=1.0),
        "mup_residual_multiplier": read("residual_multiplier", default=1.0),
        "mup_output_multiplier": 1 / read("logits_scaling", default=1.0),
    }


def _rotary(read):
    """Every few layers of SmolLM3 do without a rotary embedding."""
    fields = whole_rope_fields(read)
    return turning_in(_turns(read), fields) if _type(read) == "smollm3" else fields


def _turns(read):
    """Which layers of SmolLM3 have a rotary embedding."""
    layers, interval = read("num_hidden_layers"), read("no_rope_layer_interval", default=4)
    return [bool(each) for each in read("no_rope_layers", default=[(i + 1) % interval != 0 for i in range(layers)])]


def _windows(read):
    """Mistral: all layers. Ministral: those that layer_types names. Qwen and SmolLM3: only with use_sliding_window."""
    if _type(read) == "mistral":
        return windows(read)
    if _type(read) == "ministral":
        return windows(read, read("layer_types", default=kinds_by([True] * read("num_hidden_layers"))))
    if _type(read) in ("qwen2", "qwen3", "smollm3"):
        return _windows_if_used(read)
    return {}


def _windows_if_used(read):
    """Qwen: from layer max_window_layers on. SmolLM3: layers without rotary embedding. Unless layer_types says it."""
    used, first = read("use_sliding_window", default=False), read("max_window_layers", default=28)
    read("sliding_window")  # without effect unless used
    qwen = [i >= first for i in range(read("num_hidden_layers"))]
    usual = [not each for each in _turns(read)] if _type(read) == "smollm3" else qwen
    kinds = read("layer_types", default=kinds_by(used and each for each in usual))
    if used:
        return windows(read, kinds)
    for kind in kinds:  # transformers would use a window in some of its implementations of attention only
        refuse_unless("layer_types", kind, ("full_attention",))
    return {}


def _qk_norm(read):
    return {"qk_norm": _type(read) == "qwen3"}


def _type(read):
    return read("model_type", default="llama")


CONFIG = ConfigMap(
    copied=COPIED,
    constant=CONSTANT | {"rotary_emb_interleaved": True},
    computed=(_rotary, _biases, _dropout, gated_activation, _windows, _tied, _gemma, _granite, _qk_norm),
    without_effect=("max_window_layers",),
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

KEYS = llama_like_keys(
    {
        "norm1": "input_layernorm",
        "mixer.Wqkv": queries_keys_values(
            "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", order=INTERLEAVED
        ),
        "mixer.q_norm": reordered("self_attn.q_norm", INTERLEAVED_HEAD),
        "mixer.k_norm": reordered("self_attn.k_norm", INTERLEAVED_HEAD),
        "norm2": "post_attention_layernorm",
    }
)


def llama_config_to_gpt2_config(llama_config: Any) -> Any:
    """The GPT2Config of a configuration of Llama or another model of this family, or of Meta's files.

    Example:
        >>> from flash_attn.models.llama import llama_config_to_gpt2_config
        >>> from transformers import LlamaConfig
        >>> llama_config_to_gpt2_config(LlamaConfig(num_attention_heads=4, num_key_value_heads=2)).n_head_kv
        2
    """
    return CONFIG(llama_config)


FAMILY = Family(
    name="llama",
    model_types=("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3", "ministral", "seed_oss"),
    hub_names=tuple(
        "meta-llama/ codellama/ TinyLlama/ mistralai/Mistral- Qwen/Qwen2 Qwen/Qwen3- google/gemma-2b google/gemma-7b "
        "ibm-granite/granite-3 HuggingFaceTB/SmolLM3- ByteDance-Seed/Seed-OSS-".split()
    ),
    to_gpt2_config=llama_config_to_gpt2_config,
    keys=KEYS,
)


def remap_state_dict_hf_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from that of transformers' LlamaForCausalLM (or another of this family), which is consumed.

    config: the GPT2Config of our model. Queries and keys are reordered for interleaved rotary pairs. Tensors that are
    not known stay as they are.

    Example:
        >>> from flash_attn.models import llama
        >>> from flash_attn.models.gpt import GPTLMHeadModel
        >>> import transformers
        >>> sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
        >>> theirs = transformers.LlamaConfig(**sizes, num_attention_heads=4)
        >>> config = llama.llama_config_to_gpt2_config(theirs)
        >>> state_dict = dict(transformers.LlamaForCausalLM(theirs).state_dict())
        >>> GPTLMHeadModel(config).load_state_dict(llama.remap_state_dict_hf_llama(state_dict, config))
        <All keys matched successfully>
    """
    return KEYS.remap(state_dict, config)


def inv_remap_state_dict_hf_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The state dict of transformers' LlamaForCausalLM from ours.

    Example:
        >>> from flash_attn.models import llama
        >>> from flash_attn.models.gpt import GPTLMHeadModel
        >>> import transformers
        >>> sizes = dict(vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
        >>> theirs = transformers.LlamaConfig(**sizes, num_attention_heads=4)
        >>> config = llama.llama_config_to_gpt2_config(theirs)
        >>> state_dict = llama.inv_remap_state_dict_hf_llama(GPTLMHeadModel(config).state_dict(), config)
        >>> transformers.LlamaForCausalLM(theirs).load_state_dict(state_dict)
        <All keys matched successfully>
    """
    return KEYS.invert(state_dict, config)


def remap_state_dict_meta_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Our state dict from Meta's, or this part of ours from one of Meta's shards. It is consumed.

    config: the GPT2Config of our model. Tensors that are not known stay as they are.

    Example:
        >>> from flash_attn.models import llama
        >>> from transformers import LlamaConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = llama.llama_config_to_gpt2_config(LlamaConfig(**sizes))
        >>> theirs = {f"layers.0.attention.{each}.weight": torch.randn(8, 8) for each in ("wq", "wk", "wv")}
        >>> {name: tuple(x.shape) for name, x in llama.remap_state_dict_meta_llama(theirs, config).items()}
        {'transformer.layers.0.mixer.Wqkv.weight': (24, 8)}
    """
    return META_KEYS.remap(state_dict, config)


def inv_remap_state_dict_meta_llama(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Meta's state dict from ours.

    Example:
        >>> from flash_attn.models import llama
        >>> from transformers import LlamaConfig
        >>> sizes = dict(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
        >>> config = llama.llama_config_to_gpt2_config(LlamaConfig(**sizes))
        >>> ours = {"transformer.layers.0.mixer.Wqkv.weight": torch.randn(24, 8)}
        >>> list(llama.inv_remap_state_dict_meta_llama(ours, config))
        ['layers.0.attention.wq.weight', 'layers.0.attention.wk.weight', 'layers.0.attention.wv.weight']
    """
    return META_KEYS.invert(state_dict, config)


def config_from_meta_checkpoint(checkpoint_path: str | os.PathLike, model_name: str) -> Any:
    """The configuration in <checkpoint_path>/<model_name>/params.json, as transformers' LlamaConfig if there is one.

    If it does not say the size of the vocabulary, that of tokenizer.model beside it is used, which needs the package
    sentencepiece; without this file, 32000. Raises ValueError for use_scaled_rope (Llama 3.1 and later): the file does
    not say how the rotary embedding is scaled, while transformers' configuration does.

    Example:
        >>> import json, pathlib, tempfile
        >>> from flash_attn.models.llama import config_from_meta_checkpoint
        >>> folder = pathlib.Path(tempfile.mkdtemp(), "7B")
        >>> folder.mkdir()
        >>> params = dict(dim=64, n_heads=4, n_layers=2, norm_eps=1e-5, multiple_of=32)
        >>> _ = (folder / "params.json").write_text(json.dumps(params))
        >>> config_from_meta_checkpoint(folder.parent, "7B").intermediate_size
        192
    """
    folder = pathlib.Path(checkpoint_path, model_name)
    params = json.loads((folder / "params.json").read_text())
    refuse_unless("use_scaled_rope", params.get("use_scaled_rope"), (None, False))
    dim = params["dim"]
    inner = int(2 * (4 * dim) / 3)
    if params.get("ffn_dim_multiplier") is not None:
        inner = int(params["ffn_dim_multiplier"] * inner)
    fields = dict(
        hidden_size=dim,
        intermediate_size=round_up(inner, params.get("multiple_of", 1)),
        num_attention_heads=params["n_heads"],
        num_hidden_layers=params["n_layers"],
        num_key_value_heads=params.get("n_kv_heads") or params["n_heads"],
        rms_norm_eps=params["norm_eps"],
        vocab_size=_vocabulary_of(params, folder / "tokenizer.model"),
        hidden_act="silu",
        initializer_range=0.02,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    if params.get("rope_theta") is not None:
        fields |= dict.fromkeys(("rotary_emb_base", "rope_theta"), params["rope_theta"])  # our name, and transformers'
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
    """transformers' LlamaConfig in <checkpoint_path>/<model_name>-hf/config.json.

    Example:
        >>> import tempfile, transformers
        >>> from flash_attn.models.llama import config_from_hf_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(f"{folder}/small-hf")
        >>> config_from_hf_checkpoint(folder, "small").hidden_size
        64
    """
    from transformers import LlamaConfig

    return LlamaConfig.from_pretrained(pathlib.Path(checkpoint_path, f"{model_name}-hf") / "config.json")


def config_from_checkpoint(checkpoint_path: str | os.PathLike, model_name: str, checkpoint_format: str = "meta") -> Any:
    """The configuration of a checkpoint.

    Arguments:
        checkpoint_path: the folder that holds the folders of checkpoints.
        model_name: the folder of this one, without the "-hf" that it ends in for "hf".
        checkpoint_format: "meta" or "hf", that of transformers.

    Example:
        >>> import tempfile, transformers
        >>> from flash_attn.models.llama import config_from_checkpoint
        >>> folder = tempfile.mkdtemp()
        >>> transformers.LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(f"{folder}/small-hf")
        >>> config_from_checkpoint(folder, "small", checkpoint_format="hf").hidden_size
        64
    """
    formats = {"meta": config_from_meta_checkpoint, "hf": config_from_hf_checkpoint}
    if checkpoint_format not in formats:
        raise ValueError(f"checkpoint_format must be 'meta' or 'hf', found {checkpoint_format!r}")
    return formats[checkpoint_format](checkpoint_path, model_name)


def state_dicts_from_checkpoint(checkpoint_path: str | os.PathLike, model_name: str) -> list[dict[str, Tensor]]:
    """The shards <checkpoint_path>/<model_name>/consolidated.*.pth, in the order of their names, on the CPU.

    Raises FileNotFoundError if there is none.

    Example:
        >>> import pathlib, tempfile
        >>> from flash_attn.models.llama import state_dicts_from_checkpoint
        >>> folder = pathlib.Path(tempfile.mkdtemp(), "7B")
        >>> folder.mkdir()
        >>> torch.save({"norm.weight": torch.ones(8)}, folder / "consolidated.00.pth")
        >>> [list(shard) for shard in state_dicts_from_checkpoint(folder.parent, "7B")]
        [['norm.weight']]
    """
    folder = pathlib.Path(checkpoint_path, model_name)
    paths = sorted(folder.glob("consolidated.*.pth"))
    if not paths:
        raise FileNotFoundError(f"{folder} must have files consolidated.*.pth, found none")
    return [torch.load(path, map_location="cpu", weights_only=True) for path in paths]
