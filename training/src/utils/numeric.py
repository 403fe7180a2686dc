"""Numbers in the configuration of an object: text in their place would fail late, in a message without its key."""

import contextlib
import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

_TAKES_TEXT = {"str", "Any", "object", "Literal", "Callable"}  # words in the annotation of a parameter


def check_numbers(options: Mapping[str, Any], key: str) -> None:
    """Raise ValueError for text where the class or function options["_target_"] takes a number, as it is annotated.

    A parameter without an annotation takes a number if that is its default. What is computed from other values,
    ${...}, is not checked, nor is what has a _target_ that cannot be imported: making the object will tell.

    >>> check_numbers({"_target_": "torch.optim.SGD", "lr": "3e-3x"}, "train.optimizer")
    Traceback (most recent call last):
    ValueError: train.optimizer.lr must be a number, found '3e-3x'

    Arguments:
        options: what an entry of the configuration has.
        key: of the entry.
    """
    text = {name: value for name, value in options.items() if not name.startswith("_") and _has_text(value)}
    numbers = _numbers(options) if text else {}
    for name in text.keys() & numbers.keys():
        expected = "numbers" if isinstance(text[name], list) else numbers[name]
        raise ValueError(f"{key}.{name} must be {expected}, found {text[name]!r}")


def _has_text(value):
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str) and "${" not in value


def _numbers(options):
    """{name: what it must be} of parameters that are numbers."""
    classes = [options.get("_target_")]
    if isinstance(options.get("optimizer_class"), Mapping):  # that of ZeroRedundancyOptimizer, which gets the rest
        classes.append(options["optimizer_class"].get("path"))
    parameters: dict[str, inspect.Parameter] = {}
    for target in map(_located, classes):
        if callable(target):
            with contextlib.suppress(ValueError, TypeError):  # as of some that are written in C
                parameters |= inspect.signature(target).parameters
    kinds = {name: _kind(parameter) for name, parameter in parameters.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _located(target):
    """What has this name, or None."""
    module, _, name = str(target).rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception:  # whatever a module raises: the message of the one who needs it says more
        return None


def _kind(parameter):
    """What a parameter must be if it is a number, else None."""
    if parameter.annotation is inspect.Parameter.empty:
        words = {type(parameter.default).__name__}
    else:
        words = set(re.findall(r"\w+", inspect.formatannotation(parameter.annotation)))
    if words & _TAKES_TEXT or not words & {"int", "float"}:
        return None
    return "a number" if "float" in words else "an integer"
