"""Kernels in Triton as ops want them: imported, and Triton with them, when they are first launched."""

import importlib
from collections.abc import Callable
from typing import Any


def find(family: str, name: str) -> Any:
    """What `flash_attn._triton.<family>` calls `name`."""
    return getattr(importlib.import_module(f"flash_attn._triton.{family}"), name)


def names(module: str, family: str, *known: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has `known` names of `flash_attn._triton.<family>`, without its import.

    Where Triton cannot be imported the names are not there, as hasattr expects: AttributeError.
    """

    def getattr_of_module(name):
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        try:
            return find(family, name)
        except ImportError as error:
            raise AttributeError(f"module {module!r} has no attribute {name!r}: {error}") from error

    return getattr_of_module


def launch(family: str, name: str) -> Callable:
    """The function `name` of `flash_attn._triton.<family>`."""

    def launched(*args):
        return find(family, name)(*args)

    return launched
