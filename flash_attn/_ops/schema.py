"""Schemas of ops from NamedTuples, so that an argument and its default are written once."""

import typing
from typing import Any

import torch

_TYPES = {
    float: "float",
    int: "int",
    bool: "bool",
    int | None: "SymInt?",
    torch.Tensor | None: "Tensor?",
}


def arguments(options: Any, start: int = 0, end: int | None = None) -> str:
    """Returns the fields of a NamedTuple class as part of a schema: "float softmax_scale, float softcap=0.0".

    start, end: only the fields from `start` to `end` - 1; by default all.
    """
    defaults = options._field_defaults
    return ", ".join(
        f"{_TYPES[kind]} {name}" + (f"={defaults[name]}" if name in defaults else "")
        for name, kind in list(typing.get_type_hints(options).items())[start:end]
    )
