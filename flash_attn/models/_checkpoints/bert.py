"""Checkpoints of BERT, in the format of transformers: loaded, saved, and their tensors renamed."""

import copy
import logging
import pathlib
import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flash_attn.models._bert_config import OPTIONS, WITHOUT_FLOAT64, Config, option
from flash_attn.models._checkpoints.arguments import (
    divided,
    dtype_of_config,
    of_hub,
    overridden,
    refuse_float64,
    the_dtype,
)
from flash_attn.models._checkpoints.key_map import KeyMap, padded, stacked
from flash_attn.models._checkpoints.tied_weights import check_tied
from flash_attn.models._checkpoints.writing import state_to_save, write_folder
from flash_attn.models._config import Settings
from flash_attn.utils.pretrained import (
    checkpoint_files,
    config_is_missing,
    config_of_pretrained,
    dtype_of_pretrained,
    existing_device,
    load_file,
    pieces_of_file,
)

_log = logging.getLogger(__name__)
_LEGACY_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")  # which older checkpoints hold
_DECODER = "cls.predictions.decoder.weight"
_BIAS, _DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"  # one parameter, if weights are tied


def load(
    cls: Any,
    model_name: str | pathlib.Path,
    config: Any,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    strict: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    torch_dtype: torch.dtype | str | None,
) -> Any:
    """`BertPreTrainedModel.from_pretrained`."""
    hub = of_hub(kwargs)
    fields, kwargs = divided(cls, kwargs, {*Config.__annotations__, *OPTIONS})
    config = overridden(_config_from_pretrained(model_name, hub) if config is None else config, fields)
    dtype = the_dtype(dtype, torch_dtype, lambda: dtype_of_config(config) or dtype_of_pretrained(model_name, **hub))
    device = torch.get_default_device() if device is None else existing_device(device)
    refuse_float64(dtype, {name: option(config, name) for name in WITHOUT_FLOAT64})
    with torch.device("meta"):
        model = cls(config, *inputs, **kwargs)
    files = checkpoint_files(model_name, **hub)
    found = {name: tensor for path in files for name, tensor in load_file(path, device="meta").items()}
    has_both = found.keys() >= {_BIAS, _DECODER_BIAS}
    found = _named_alike(model, _with_todays_names(found))
    fresh = _check_checkpoint(model, model_name, found, strict)
    embedding = f"{model._input_name()}.weight"
    tied = [embedding, _DECODER] if model._tied_modules() and _DECODER in found else []
    model.to(dtype=dtype).to_empty(device=device)
    model.tie_weights()
    first_weights = model._first_weights()
    for name, module in model.named_modules():
        if any(f"{name}.{parameter}" in fresh for parameter, _ in module.named_parameters(recurse=False)):
            module.reset_parameters()
            first_weights(module)
    pending: dict[str, Tensor] = {}
    for piece in (piece for path in files for piece in pieces_of_file(path)):
        if has_both:  # they may differ, and be in different pieces
            piece.pop(_BIAS, None)
        pending |= _named_alike(model, _with_todays_names(piece))
        piece.clear()
        waiting = {}
        if tied and all(name in pending for name in tied):
            check_tied(embedding, pending[embedding], _DECODER, pending.pop(_DECODER))
            tied = []
        elif tied:  # the two are compared
            waiting = {name: pending.pop(name) for name in tied if name in pending}
        _load_from(model, pending)
        pending |= waiting
    return model


def save(model: Any, folder: str | pathlib.Path) -> None:
    """`BertPreTrainedModel.save_pretrained`."""
    if option(model.config, "position_embedding_type") == "rotary":
        raise ValueError(
            "config.position_embedding_type must be 'absolute' to be saved for transformers, which would load "
            "'rotary' as 'absolute', found 'rotary': save the state_dict instead"
        )
    write_folder(folder, {"config.json": _their_config(model)}, _their_state_dict(model), 5 * 10**9)


def _load_from(model, pending):
    """Load what can be made of `pending`, tensors with transformers' names, and remove from it what was used."""
    ours = _converted(pending, model.config)
    ours |= {name: pending.pop(name) for name in model.state_dict() if name in pending}  # those with the same name
    nn.Module.load_state_dict(model, ours, strict=False)


def _named_alike(model, state_dict):
    """The state dict with "bert." before the encoder's keys if this model has it, else without."""
    ours = "bert." if hasattr(model, "bert") else ""
    of_encoder = ("embeddings.", "encoder.", "pooler.")
    result = {}
    for key, tensor in state_dict.items():
        bare = key.removeprefix("bert.")
        result[ours + bare if bare.startswith(of_encoder) else key] = tensor
    return result


def _their_state_dict(model):
    """Parameters by transformers' names; of two tied weights only that of the word embeddings."""
    state_dict = state_to_save(model)
    if model._tied_modules() and model.is_tied:
        del state_dict["cls.predictions.decoder.weight"]
    result = inv_remap_state_dict(state_dict, model.config, legacy_names=False)
    if "cls.predictions.decoder.weight" in result:  # untied, transformers has two biases and uses this one
        result[_DECODER_BIAS] = result[_BIAS].clone()
    return result


def _their_config(model):
    config = copy.copy(model.config)
    config.vocab_size = getattr(config, "orig_vocab_size", config.vocab_size)
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    fields = {name: value for name, value in fields.items() if name != "orig_vocab_size"}
    tied = {} if model.is_tied else dict(tie_word_embeddings=False)  # what it is, not what it was meant to be
    return fields | tied | dict(model_type="bert", architectures=[type(model).__name__])


def _check_checkpoint(model, model_name, found, strict):
    """The names of our parameters that a checkpoint with transformers' names does not have, all in heads.

    Raises ValueError if it does not fit.
    """
    expected = _with_todays_names(_their_state_dict(model))
    missing, unexpected = expected.keys() - found.keys(), found.keys() - expected.keys()
    if option(model.config, "tie_word_embeddings"):
        unexpected -= {"cls.predictions.decoder.weight"}
    wrong = [
        f"{key} {tuple(found[key].shape)} instead of {tuple(tensor.shape)}"
        for key, tensor in expected.items()
        if key in found and found[key].shape != tensor.shape
    ]
    problems = {"has no": missing, "has unexpected": unexpected}
    if not strict:
        for what, keys in problems.items():
            heads = {key for key in keys if not key.removeprefix("bert.").startswith(("embeddings.", "encoder."))}
            if heads:
                _log.warning("The checkpoint %s %s %s", model_name, what, ", ".join(sorted(heads)))
            problems[what] = keys - heads
    told = [f"{what} {', '.join(sorted(keys))}" for what, keys in problems.items() if keys]
    told += [f"has {', '.join(wrong)}"] if wrong else []
    if told:
        raise ValueError(
            f"model_name must be a checkpoint of transformers' BERT that fits {type(model).__name__} and its "
            f"configuration; {model_name} {'; it '.join(told)}"
        )
    return remap_state_dict({key: expected[key] for key in missing}, model.config).keys()


def _config_from_pretrained(model_name, hub):
    """The configuration of a checkpoint; without the package transformers, an object with its fields."""
    fields = config_of_pretrained(model_name, **hub)
    if fields is None:
        raise config_is_missing(model_name, **hub)
    if fields.get("model_type", "bert") != "bert":
        raise ValueError(f"model_name must be a checkpoint of model_type 'bert', found {fields['model_type']!r}")
    try:
        from transformers import BertConfig
    except ModuleNotFoundError:
        labels = len(fields.get("id2label", range(OPTIONS["num_labels"])))  # files name the labels, not their number
        return types.SimpleNamespace(**{"num_labels": labels} | fields)
    return BertConfig.from_dict(fields)


# ---------------------------------------------------------------------------------------------------------------------
# The tensors


def remap_state_dict(state_dict: Mapping[str, Tensor], config: Config) -> OrderedDict[str, Tensor]:
    """Our state dict from that of transformers' model with the same configuration.

    Keys that are not BERT's stay as they are. If vocab_size is rounded up, word embeddings and the decoder get more
    rows of zeros, and the decoder's bias more elements of -100.

    Example:
        >>> from flash_attn.models.bert import BertForMaskedLM, remap_state_dict
        >>> import transformers
        >>> config = transformers.BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> theirs = transformers.BertForMaskedLM(config).state_dict()
        >>> BertForMaskedLM(config).load_state_dict(remap_state_dict(theirs, config))
        <All keys matched successfully>
    """
    rest = _with_todays_names(state_dict)
    result = _converted(rest, config)
    return OrderedDict(result | rest)


def _converted(theirs, config):
    """Make our tensors from `theirs`, which have today's names, and remove from it what was used."""
    result = _key_map(config).convert(theirs, _settings(config))
    if _DECODER_BIAS in result:
        with torch.no_grad():  # a checkpoint may hold parameters
            result[_DECODER_BIAS][_settings(config).vocab_size :] = -100.0
    return result


def inv_remap_state_dict(
    state_dict: Mapping[str, Tensor], config: Config, legacy_names: bool = True
) -> OrderedDict[str, Tensor]:
    """The inverse of `remap_state_dict`, with vocab_size as it was before it was rounded up.

    legacy_names: norms have "gamma" and "beta", as in the first checkpoints of BERT, instead of "weight" and "bias".

    Example:
        >>> from flash_attn.models.bert import BertForMaskedLM, inv_remap_state_dict
        >>> import transformers
        >>> config = transformers.BertConfig(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
        >>> state_dict = inv_remap_state_dict(BertForMaskedLM(config).state_dict(), config, legacy_names=False)
        >>> transformers.BertForMaskedLM(config).load_state_dict(state_dict, strict=False).unexpected_keys
        []
    """
    endings = {_DECODER_BIAS: _BIAS}
    if legacy_names:
        endings |= {name: old for old, name in _LEGACY_NAMES.items()}
    result = _key_map(config).invert(state_dict, _settings(config))
    return OrderedDict((_replaced_ending(key, endings), tensor) for key, tensor in result.items())


def _key_map(config):
    """The table of tensors, of the encoder with and without "bert." in front."""
    table = {
        "cls.predictions.decoder": padded("cls.predictions.decoder"),
        "cls.predictions.transform.layer_norm": "cls.predictions.transform.LayerNorm",
    }
    for prefix in ("", "bert."):
        words, theirs = f"{prefix}embeddings.word_embeddings", f"{prefix}encoder.layer.{{i}}."
        table |= {words: padded(words), f"{prefix}emb_ln": f"{prefix}embeddings.LayerNorm"}
        layer = {
            "mixer.Wqkv": stacked(*(f"{theirs}attention.self.{name}" for name in ("query", "key", "value"))),
            "mixer.out_proj": f"{theirs}attention.output.dense",
            "norm1": f"{theirs}attention.output.LayerNorm",
            "mlp.fc1": f"{theirs}intermediate.dense",
            "mlp.fc2": f"{theirs}output.dense",
            "norm2": f"{theirs}output.LayerNorm",
        }
        if option(config, "last_layer_subset"):  # first: what one row of the table uses is gone for the next
            last = config.num_hidden_layers - 1
            attention = f"{prefix}encoder.layer.{last}.attention.self"
            table[f"{prefix}encoder.layers.{last}.mixer.Wq"] = f"{attention}.query"
            table[f"{prefix}encoder.layers.{last}.mixer.Wkv"] = stacked(f"{attention}.key", f"{attention}.value")
        table |= {f"{prefix}encoder.layers.{{i}}.{ours}": rule for ours, rule in layer.items()}
    return KeyMap(table)


def _settings(config):
    """What the table of tensors reads from a configuration."""
    return Settings(
        vocab_size=getattr(config, "orig_vocab_size", config.vocab_size),
        n_embd=config.hidden_size,
        n_layer=config.num_hidden_layers,
        n_head=config.num_attention_heads,
        n_positions=config.max_position_embeddings,
        pad_vocab_size_multiple=option(config, "pad_vocab_size_multiple"),
    )


def _replaced_ending(key, endings):
    for old, new in endings.items():
        if key.endswith(old):
            return key.removesuffix(old) + new
    return key


def _with_todays_names(state_dict):
    """A checkpoint of any age under the names that transformers uses today, with one bias of the decoder."""
    result = {
        _replaced_ending(key, _LEGACY_NAMES): tensor for key, tensor in state_dict.items() if not key.endswith(_BUFFERS)
    }
    if _BIAS in result:
        bias = result.pop(_BIAS)
        result.setdefault(_DECODER_BIAS, bias)  # where the two differ, transformers uses the decoder's
    return result
