"""Keyword arguments of `from_pretrained` and `from_config`: which of them go where, and which dtype is meant."""

import copy
import difflib
import inspect
import warnings
from collections.abc import Callable, Collection
from typing import Any

import torch

from flash_attn.utils.pretrained import HUB_OPTIONS

_OF_TRANSFORMERS = {"attn_implementation": "use_flash_attn", "device_map": "device"}  # their name, and ours


def divided(cls: type, options: dict[str, Any], fields: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keyword arguments into (fields of the configuration, arguments of the constructor of `cls`).

    Raises TypeError for a name that is neither, and suggests similar names.
    """
    parameters = inspect.signature(cls).parameters
    own = {name for name in parameters if name != "config"}
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    of_config = {name: value for name, value in options.items() if name in fields and name not in own}
    rest = {name: value for name, value in options.items() if name not in of_config}
    for name in rest:
        if name not in own and not takes_all:
            near = _OF_TRANSFORMERS.get(name) or ", ".join(difflib.get_close_matches(name, [*fields, *own])) or "none"
            raise TypeError(
                f"keyword arguments must be fields of the configuration or arguments of {cls.__name__}, "
                f"found {name!r}; names like it: {near}"
            )
    return of_config, rest


def of_hub(options: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of the hub out of keyword arguments."""
    return {name: options.pop(name) for name in HUB_OPTIONS if name in options}


def overridden(config: Any, fields: dict[str, Any]) -> Any:
    """A copy of a configuration with these fields; the configuration itself without any."""
    if fields:
        config = copy.deepcopy(config)
        for name, value in fields.items():
            setattr(config, name, value)
    return config


def the_dtype(
    dtype: Any, torch_dtype: Any, of_checkpoint: Callable[[], Any], stacklevel: int = 4
) -> torch.dtype | None:
    """The dtype that is meant by the arguments dtype and torch_dtype: a torch.dtype, its name, "auto" or None.

    of_checkpoint: called for "auto", gives a torch.dtype, its name or None. stacklevel: of the warning for torch_dtype.
    """
    if torch_dtype is not None:
        if dtype is not None:
            raise ValueError(f"torch_dtype must not be given together with dtype, found {torch_dtype} and {dtype}")
        warnings.warn("torch_dtype is the older name of dtype: use dtype", FutureWarning, stacklevel=stacklevel)
        dtype = torch_dtype
    if isinstance(dtype, str) and dtype == "auto":
        dtype = of_checkpoint()
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be a floating torch.dtype, its name, 'auto' or None, found {dtype!r}")
    return found


def dtype_of_config(config: Any) -> Any:
    """The dtype that a configuration, or the dict of a config.json, has; None if it has none."""
    fields = config if isinstance(config, dict) else vars(config)
    source = fields.get("source_config") or {}
    found = (each.get(name) for each in (fields, source) for name in ("dtype", "torch_dtype"))
    return next((dtype for dtype in found if dtype is not None), None)


def refuse_float64(dtype: torch.dtype | None, needs: dict[str, bool]) -> None:
    """Raise ValueError if parameters would be float64 with an option whose operations do not take it.

    needs: the options that are on, by the names of their fields.
    """
    used = [name for name, is_on in needs.items() if is_on]
    if used and (torch.get_default_dtype() if dtype is None else dtype) == torch.float64:
        raise ValueError(
            f"dtype must be float32, float16 or bfloat16 with config.{used[0]}, whose operations have no float64, "
            "found torch.float64"
        )
