"""Checkpoints of ViT, in the format of timm: loaded, saved, and their tensors renamed."""

import copy
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flash_attn.layers.patch_embed import PatchEmbed
from flash_attn.models._checkpoints.arguments import divided, of_hub, the_dtype
from flash_attn.models._checkpoints.reading import listed, pieces, wrong_tensors
from flash_attn.models._checkpoints.writing import number_of_bytes, write_folder
from flash_attn.utils.pretrained import (
    checkpoint_files,
    config_is_missing,
    config_of_pretrained,
    dtype_of_pretrained,
    existing_device,
    load_file,
)

_log = logging.getLogger(__name__)

# Options that only timm has, and their defaults.
TIMM_OPTIONS = dict(
    global_pool="token", init_values=None, class_token=True, pre_norm=False, fc_norm=None, weight_init=""
)
_OURS = "img_size patch_size in_chans num_classes embed_dim depth num_heads mlp_ratio qkv_bias no_embed_class"
_MODEL_ARGS = (*_OURS.split(), *TIMM_OPTIONS)  # what timm's model_args may be here
_PATCHES = "patch_embed.proj.weight"
_NAMES = {".attn.qkv.": ".mixer.Wqkv.", ".attn.proj.": ".mixer.out_proj."}  # timm's, ours


def load(
    cls: Any,
    model_name: str | os.PathLike[str],
    architecture: str | None,
    kwargs: dict[str, Any],
    strict: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    progress: bool,
) -> Any:
    """`VisionTransformer.from_pretrained`."""
    hub = of_hub(kwargs)
    divided(cls, kwargs, ())
    config = {"architecture": architecture}
    if architecture is None:
        config = _config_of(model_name, hub)
    options = _options_of(config) | kwargs
    files = checkpoint_files(model_name, **hub)
    dtype = the_dtype(dtype, None, lambda: dtype_of_pretrained(model_name, **hub))
    device = torch.get_default_device() if device is None else existing_device(device)
    with torch.device("meta"):
        model = cls(**options)
    if _lacks(model, files, strict):
        with torch.device(device):
            model = cls(**options).to(dtype=dtype)  # with first weights for what the files lack
    else:
        model.to(dtype=dtype).to_empty(device=device)
    for piece in pieces(files, progress):
        model.load_state_dict(piece, strict=False)
        piece.clear()  # so that nothing else holds the tensors
    model._config = config
    return model


def save(model: Any, folder: str | os.PathLike[str], max_shard_size: int | str) -> None:
    """`VisionTransformer.save_pretrained`."""
    for name, is_usual in model._usual.items():
        if not is_usual:
            raise ValueError(f"{name} must be left at its default to be saved for timm: save the state_dict")
    linear = isinstance(model.head, nn.Linear) and model.head.bias is not None
    if not linear and not isinstance(model.head, nn.Identity):
        raise ValueError(
            "head must be an nn.Linear with a bias, or nn.Identity, to be saved for timm: save the state_dict; "
            f"found {model.head}"
        )
    tensors = inv_remap_state_dict_timm(model.state_dict(), model)
    write_folder(folder, {"config.json": _their_config(model)}, tensors, number_of_bytes(max_shard_size))


def _their_config(model):
    config = copy.deepcopy(model._config or {"architecture": "vit_base_patch16_224"})
    classes = model.head.out_features if isinstance(model.head, nn.Linear) else 0  # which may have been replaced
    pretrained_cfg = config.pop("pretrained_cfg", None) or {}
    if classes != config.get("num_classes", pretrained_cfg.get("num_classes")):
        for names in ("label_names", "label_descriptions"):  # of other classes
            config.pop(names, None)
            pretrained_cfg.pop(names, None)
    usual = model._defaults() | sizes_of(config["architecture"])
    changed = {name: value for name, value in model._described.items() if value != usual[name]}
    pretrained_cfg |= dict(num_classes=classes, input_size=model._input_size, fixed_input_size=True)
    pretrained_cfg |= dict(first_conv="patch_embed.proj", classifier="head")
    shown = dict(num_classes=classes, num_features=model.embed_dim, global_pool=model.global_pool)
    return config | shown | dict(model_args=changed, pretrained_cfg=pretrained_cfg)


def _lacks(model, files, strict):
    """The names of parameters that are not in the files. Raises ValueError if these do not fit."""
    theirs = {name: tensor for path in files for name, tensor in load_file(path, device="meta").items()}
    found, expected = remap_state_dict_timm(theirs, model), model.state_dict()
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    wrong = wrong_tensors(found, expected)
    if wrong or (strict and (missing or unknown)):
        raise ValueError(
            f"the checkpoint does not fit the model, a {type(model).__name__}:"
            + listed("missing", missing)
            + listed("not known", unknown)
            + listed("of a wrong shape or dtype", wrong)
        )
    if missing or unknown:
        told = listed("these keep their first, random weights", missing) + listed("these are left out", unknown)
        _log.warning("not all of the checkpoint and the model fit together:%s", told)
    return missing


def _config_of(model_name, hub):
    """The config.json of timm's checkpoint, with its pretrained_cfg, which is all of it in older ones."""
    config = config_of_pretrained(model_name, **hub)
    if config is None:
        raise config_is_missing(model_name, needed="architecture", **hub)
    if "architecture" not in config:
        raise ValueError(f"architecture must be given, as the config.json of {model_name} is not timm's and has none")
    if "pretrained_cfg" in config:
        return config
    return {"architecture": config["architecture"], "pretrained_cfg": config}


def _options_of(config):
    """The arguments of `VisionTransformer` that timm's config.json means."""
    options = sizes_of(config["architecture"])
    pretrained_cfg, args = config.get("pretrained_cfg") or {}, config.get("model_args") or {}
    if pretrained_cfg.get("input_size") is not None:
        channels, *img_size = pretrained_cfg["input_size"]
        options |= dict(in_chans=channels, **dict(img_size=img_size) if pretrained_cfg.get("fixed_input_size") else {})
    for fields in (pretrained_cfg, config):
        options |= {name: fields[name] for name in ("num_classes", "global_pool") if fields.get(name) is not None}
    for name in args:
        if name not in _MODEL_ARGS:
            raise ValueError(f"model_args must be among {', '.join(_MODEL_ARGS)}, which are covered, found {name!r}")
    return options | args


_SIZES: dict[str, dict[str, Any]] = {
    "tiny": dict(embed_dim=192, depth=12, num_heads=3),
    "small": dict(embed_dim=384, depth=12, num_heads=6),
    "base": dict(embed_dim=768, depth=12, num_heads=12),
    "large": dict(embed_dim=1024, depth=24, num_heads=16),
    "huge": dict(embed_dim=1280, depth=32, num_heads=16),
    "giant": dict(embed_dim=1408, depth=40, num_heads=16, mlp_ratio=48 / 11),
    "gigantic": dict(embed_dim=1664, depth=48, num_heads=16, mlp_ratio=64 / 13),
}
_ARCHITECTURE = re.compile(rf"(?:vit|deit)_({'|'.join(_SIZES)})_patch(\d+)_(\d+)")


def sizes_of(architecture: Any) -> dict[str, Any]:
    """The arguments of `VisionTransformer` that a name of timm's stands for."""
    found = _ARCHITECTURE.fullmatch(architecture) if isinstance(architecture, str) else None
    if found is None:
        raise ValueError(
            f"architecture must be vit_SIZE_patchN_M of timm's, or deit_, with {', '.join(_SIZES)} as SIZE, "
            f"found {architecture!r}"
        )
    size, patch, pixels = found.groups()
    return dict(img_size=int(pixels), patch_size=int(patch), **_SIZES[size])


# ---------------------------------------------------------------------------------------------------------------------
# The tensors


def remap_state_dict_timm(state_dict: Mapping[str, Any], model: Any) -> OrderedDict[str, Any]:
    """The state dict of timm's VisionTransformer, with the names of `model`, which has the same options.

    A state dict that already has the names of `model` is returned unchanged.

    Example:
        >>> from flash_attn.models.vit import VisionTransformer, inv_remap_state_dict_timm, remap_state_dict_timm
        >>> model = VisionTransformer(img_size=32, patch_size=16, embed_dim=64, depth=1, num_heads=4)
        >>> timm = inv_remap_state_dict_timm(model.state_dict(), model)
        >>> "blocks.0.attn.qkv.weight" in timm
        True
        >>> model.load_state_dict(remap_state_dict_timm(timm, model))
        <All keys matched successfully>
    """
    result = OrderedDict((_renamed(key, _NAMES.items()), tensor) for key, tensor in state_dict.items())
    if _PATCHES in result and isinstance(model.patch_embed, PatchEmbed):  # which has no convolution, as timm's has
        result[_PATCHES] = result[_PATCHES].flatten(1)
    for qkv, q, kv in _last_projections(model):
        if qkv in result:
            tensor = result.pop(qkv)
            result[q], result[kv] = tensor.tensor_split([tensor.shape[0] // 3])
    return result


def inv_remap_state_dict_timm(state_dict: Mapping[str, Any], model: Any) -> OrderedDict[str, Any]:
    """A state dict that timm's VisionTransformer with the same options loads, of one of `model`.

    Example:
        >>> from flash_attn.models.vit import VisionTransformer, inv_remap_state_dict_timm
        >>> model = VisionTransformer(img_size=32, num_classes=10, embed_dim=32, depth=1, num_heads=2)
        >>> "blocks.0.attn.qkv.weight" in inv_remap_state_dict_timm(model.state_dict(), model)
        True
    """
    result = OrderedDict(state_dict)
    for qkv, q, kv in _last_projections(model):
        if q in result:
            result[qkv] = torch.cat([result.pop(q), result.pop(kv)])
    if _PATCHES in result and isinstance(model.patch_embed, PatchEmbed):
        result[_PATCHES] = result[_PATCHES].unflatten(1, (-1, *model.patch_embed.patch_size))
    back = [(ours, theirs) for theirs, ours in _NAMES.items()]
    return OrderedDict((_renamed(key, back), tensor) for key, tensor in result.items())


def _renamed(key, names):
    for old, new in names:
        key = key.replace(old, new)
    return key


def _last_projections(model):
    """Names in the last block of one projection to queries, keys and values, and of the two that it has instead."""
    mixer = f"blocks.{len(model.blocks) - 1}.mixer"
    for kind in ("weight", "bias"):
        yield tuple(f"{mixer}.{name}.{kind}" for name in ("Wqkv", "Wq", "Wkv"))
