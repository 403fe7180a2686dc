"""Checkpoints of the decoder: found, compared with the model, loaded file by file, saved."""

import contextlib
import logging
import types
import warnings

import torch
import torch.distributed as dist
from torch import nn

from flash_attn.models._checkpoints.arguments import divided, dtype_of_config, of_hub, overridden, the_dtype
from flash_attn.models._checkpoints.reading import listed, pieces, wrong_tensors
from flash_attn.models._checkpoints.tensor_parallel import shard_state_dict_tp
from flash_attn.models._checkpoints.writing import number_of_bytes, state_to_save, write_folder
from flash_attn.models._config import FIELDS, gpt2_config, is_gpt2_config, settings
from flash_attn.models._family import find_family
from flash_attn.utils.pretrained import (
    checkpoint_files,
    config_is_missing,
    config_of_pretrained,
    dtype_of_pretrained,
    existing_device,
    load_file,
)

_log = logging.getLogger(__name__)


def to_gpt2_config(config):
    """The GPT2Config of a configuration of any supported family. A GPT2Config is returned unchanged."""
    if is_gpt2_config(config):
        return config
    return find_family(model_type=_model_type(config)).to_gpt2_config(config)


def build(cls, config, kwargs, *, dtype, torch_dtype):
    """`GPTPreTrainedModel.from_config`."""
    fields, kwargs = divided(cls, kwargs, FIELDS)
    dtype = the_dtype(dtype, torch_dtype, lambda: dtype_of_config(config))
    return cls(overridden(to_gpt2_config(config), fields), dtype=dtype, **kwargs)


def load(
    cls, model_name, config, args, kwargs, *, strict, device, dtype, world_size, rank, family, progress, torch_dtype
):
    """`GPTPreTrainedModel.from_pretrained`."""
    hub = of_hub(kwargs)
    fields, kwargs = divided(cls, kwargs, FIELDS)
    family, config = _family_and_config(model_name, config, family, hub)
    device = existing_device("cpu" if device is None else device)
    dtype = the_dtype(dtype, torch_dtype, lambda: dtype_of_config(config) or dtype_of_pretrained(model_name, **hub))
    model = cls(overridden(config, fields), *args, device="meta", dtype=dtype, **kwargs)
    group = getattr(model, "process_group", None)
    processes = 1 if group is None else dist.get_world_size(group)
    if world_size != processes:
        told = f"{processes} without one" if group is None else processes
        raise ValueError(f"world_size must be the number of processes of process_group, {told}, found {world_size}")
    config, files = model.config, checkpoint_files(model_name, **hub)
    theirs = _names_and_shapes(family, files)
    tied = [name for name in family.keys.tied_sources(config) if name in theirs]
    absent = _compare(model, family, theirs, world_size, rank, strict)
    pending = {}
    for piece in pieces(files, progress):
        pending |= piece
        piece.clear()  # so that nothing else holds the tensors
        family.keys.spell(pending)
        waiting = {}
        if not all(name in pending for name in tied):  # the two are compared
            waiting = {name: pending.pop(name) for name in tied if name in pending}
        _give(model, _converted(family, pending, config, world_size, rank), device)
        pending |= waiting
    _materialise(model, absent, device)
    model.to(device)  # buffers
    model._generation_config = config_of_pretrained(model_name, "generation_config.json", **hub)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model


def _converted(family, theirs, config, world_size, rank):
    """This process's part of what our tensors can be made of; the rest stays in `theirs`."""
    ours = family.keys.convert(theirs, config)
    return ours if world_size == 1 else shard_state_dict_tp(ours, config, world_size, rank)


def _family_and_config(model_name, config, name, hub):
    """The family of a checkpoint, and the GPT2Config of its model."""
    found = config_of_pretrained(model_name, **hub) if config is None or name is None else None
    if config is None and found is None:
        raise config_is_missing(model_name, **hub)
    given = None if config is None or is_gpt2_config(config) else _model_type(config)
    model_type = (found or {}).get("model_type", given)
    family = find_family(name=name, model_type=model_type, hub_name=str(model_name))
    if name is None and given is not None and given not in family.model_types:
        raise ValueError(
            f"config must be of the checkpoint's family, {family.name}, or a GPT2Config, found model_type {given!r}"
        )
    config = _config_object(found) if config is None else config
    return family, config if is_gpt2_config(config) else family.to_gpt2_config(config)


def _model_type(config):
    """The model_type of a configuration that is given, None if it does not say. Raises TypeError for anything else."""
    if isinstance(config, dict):
        raise TypeError("config must be an object with the fields of a model's configuration, found a dict of them")
    if not hasattr(config, "vocab_size") and hasattr(config, "text_config"):
        raise TypeError(
            f"config must be of a text model, found {type(config).__name__} of a multimodal one: "
            "config.text_config is the configuration of its text model"
        )
    if not hasattr(config, "vocab_size"):
        raise TypeError(f"config must have the fields of a model's configuration, found {type(config).__name__}")
    return getattr(config, "model_type", None)


def _config_object(fields):
    """The configuration as transformers has it if it knows the model_type; else an object with these fields."""
    with contextlib.suppress(ImportError):
        from transformers import CONFIG_MAPPING

        if fields.get("model_type") in CONFIG_MAPPING:
            return CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    if fields.get("model_type") == "gpt2":
        return gpt2_config(**fields)
    return types.SimpleNamespace(**fields)


def _names_and_shapes(family, files):
    """Meta tensors like those of the files, by their usual names."""
    theirs = {}
    for path in files:
        theirs |= load_file(path, device="meta")
    family.keys.spell(theirs)
    return theirs


def _compare(model, family, theirs, world_size, rank, strict):
    """Compare what is in the files with the model; return the names of parameters that the files lack.

    For that, `theirs`, meta tensors, are converted as those of the files will be.
    """
    theirs = dict(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    ours = _converted(family, theirs, model.config, world_size, rank)
    expected = _parameters(model)
    prefix = _prefix(model)
    ours = {name.removeprefix(prefix): tensor for name, tensor in ours.items() if name.startswith(prefix)}
    missing = [name for name in expected if name not in ours]
    of_missing = {source for name in missing for source in family.keys.sources(prefix + name, model.config)}
    left_over = [name for name in theirs if name in of_missing]
    unknown = [*(name for name in ours if name not in expected), *(name for name in theirs if name not in of_missing)]

    def made_of(name):
        sources = family.keys.sources(prefix + name, model.config)
        found = ", ".join(f"{source} {shapes[source]}" for source in sources if source in shapes)
        return f", made of {found}" if found else ""

    wrong = wrong_tensors(ours, expected, made_of)
    absent = [f"{name} (from {_sources(family, prefix + name, model.config)})" for name in missing]
    if wrong or (strict and (missing or unknown)):
        raise ValueError(
            f"the checkpoint does not fit the model, a {type(model).__name__} of the family {family.name}:"
            + listed("missing", absent)
            + listed("left over, because other parts of the same tensor are missing", left_over)
            + listed("not known", unknown)
            + listed("of a wrong shape or dtype", wrong)
        )
    if missing or unknown:
        told = listed("these keep their first, random weights", absent) + listed(
            "these are left out", left_over + unknown
        )
        _log.warning("not all of the checkpoint and the model fit together:%s", told)
    return missing


def _sources(family, name, config):
    return ", ".join(family.keys.sources(name, config)) or "no tensor of this family"


def _prefix(model):
    """The start of the names of a whole model, which those of a model without a head lack."""
    return "" if hasattr(model, "transformer") else "transformer."


def _parameters(model):
    """All parameters by each of their names: a tied one has two."""
    return dict(model.named_parameters(remove_duplicate=False))


def _give(model, tensors, device):
    """Replace the model's parameters by copies of the tensors."""
    prefix, parameters = _prefix(model), _parameters(model)
    for name, tensor in tensors.items():
        name = name.removeprefix(prefix)
        if name in parameters:
            _replace(model, name, torch.empty_like(parameters[name], device=device).copy_(tensor))


def _replace(model, name, tensor):
    """Replace a parameter by a new one with its attributes, such as the marks of parallel layers."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    before = getattr(module, leaf)
    after = nn.Parameter(tensor, requires_grad=before.requires_grad)
    vars(after).update(vars(before))
    setattr(module, leaf, after)


def _materialise(model, names, device):
    """Give parameters that the checkpoint lacks the first weights of a new model."""
    owners, first_weights = {name.rpartition(".")[0] for name in names}, model._first_weights()
    for name in names:
        _replace(model, name, torch.empty_like(_parameters(model)[name], device=device))
    for owner in owners:
        module = model.get_submodule(owner)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        first_weights(module)


# ---------------------------------------------------------------------------------------------------------------------
# Saving


def save(model, folder, name, max_shard_size):
    """`GPTPreTrainedModel.save_pretrained`."""
    if getattr(model, "process_group", None) is not None:
        raise ValueError(
            "process_group must be None to save a model, found a group: combine_state_dicts_tp puts the parts together"
        )
    source = getattr(model.config, "source_config", None)
    if name is None and source is None:
        name = "gpt2"
    family = find_family(name=name, model_type=None if source is None else source["model_type"])
    prefix, config = _prefix(model), model.config
    ours = {prefix + key: tensor for key, tensor in state_to_save(model).items()}
    if settings(config).tie_word_embeddings and not prefix:
        if model.is_tied:
            del ours["lm_head.weight"]
        else:  # what it is, not what it was meant to be
            config = overridden(config, {"tie_word_embeddings": False})
            source = source and source | {"tie_word_embeddings": False}
    fields = _gpt2_fields(config) if family.name == "gpt2" else source
    if fields is None or fields["model_type"] not in family.model_types:
        raise ValueError(f"family must be that of the model's configuration, found {family.name!r}")
    if family.name != "gpt2":
        _check_described(config, family, source)
    max_shard_size = number_of_bytes(max_shard_size)
    known = {name for name, _ in family.keys.rules(settings(config))}
    unknown = [name for name in ours if name not in known]
    if unknown:
        raise ValueError(
            f"the model must have the tensors of the family {family.name} to be saved in its format, and no adapters: "
            "merge these, as by merge_and_unload(), or let their own package save them" + listed("not known", unknown)
        )
    theirs = family.keys.invert(ours, config)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    documents = {"config.json": fields | {"dtype": dtype, "torch_dtype": dtype}}
    generation = model._generation_config
    if generation is not None:
        documents["generation_config.json"] = generation if isinstance(generation, dict) else generation.to_diff_dict()
    write_folder(folder, documents, theirs, max_shard_size)


# Fields without effect on the logits of a model in evaluation: how it computes, and how it is trained.
_HOW = frozenset(
    """
        use_flash_attn fused_bias_fc fused_mlp fused_dense_sqrelu_dense mlp_checkpoint_lvl fused_dropout_add_ln
        residual_in_fp32 pad_vocab_size_multiple sequence_parallel gradient_checkpointing initializer_range resid_pdrop
        embd_pdrop attn_pdrop mlp_multiple_of
    """.split()
)


def _check_described(config, family, source):
    """Raise ValueError if a model is not what the configuration of its family, which is saved with it, says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's constructor has already warned of unknown fields
        said = settings(family.to_gpt2_config(_config_object(source)))
    found = _what(settings(config))
    for name, expected in sorted(_what(said).items()):
        repeated = name == "n_head_kv" and family.name == "bigcode"  # only one key head is saved
        if found[name] != expected and not repeated:
            raise ValueError(
                f"config.{name} must be {expected!r}, as in the configuration of {source['model_type']} that is saved "
                f"with the model, found {found[name]!r}"
            )


def _what(s):
    """The fields that say what a model computes."""
    fields = {name: getattr(s, name) for name in FIELDS - _HOW}
    return fields | {"n_inner": s.inner, "head_dim": s.width_of_head, "n_head_kv": s.heads_kv}


# Fields of ours that transformers' GPT-2 does not have, with the values that stand for its behaviour.
_OF_GPT2 = dict(
    mlp_fc1_bias=True,
    mlp_fc2_bias=True,
    prenorm=True,
    input_norms=True,
    output_norms=False,
    rms_norm=False,
    norm_bias=True,
    parallel_block=False,
    qkv_proj_bias=True,
    out_proj_bias=True,
    qk_norm=False,
    attn_dwconv=False,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    sliding_window=None,
    rotary_emb_fraction=0.0,
    use_alibi=False,
    mup_scale_qk_dot_by_d=False,
    mup_attn_multiplier=1.0,
    mup_embeddings_multiplier=1.0,
    mup_residual_multiplier=1.0,
    mup_width_scale=1.0,
    mup_output_multiplier=1.0,
    word_embed_proj_dim=None,
    lm_head_bias=False,
    norm_head=False,
    gated=False,
)


def _gpt2_fields(config):
    """The fields of config.json in the format of GPT-2. Raises ValueError for a model that GPT-2 cannot express."""
    s = settings(config)
    needed = {name: (value, getattr(s, name)) for name, value in _OF_GPT2.items()}
    needed |= {"n_head_kv": (s.n_head, s.heads_kv), "head_dim": (s.n_embd / s.n_head, s.width_of_head)}
    for field, (value, found) in needed.items():
        if found != value:
            raise ValueError(f"config.{field} must be {value!r} to save in the format of GPT-2, found {found!r}")
    names = """
        vocab_size n_embd n_layer n_head n_positions n_inner activation_function resid_pdrop embd_pdrop attn_pdrop
        layer_norm_epsilon initializer_range scale_attn_weights scale_attn_by_inverse_layer_idx tie_word_embeddings
    """.split()
    ids = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")}
    return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | {n: getattr(s, n) for n in names} | ids
