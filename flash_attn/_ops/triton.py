"""Access to the Triton kernels. They are imported, together with Triton, when one is first launched."""

import importlib
from collections.abc import Callable
from typing import Any


def find(family: str, name: str) -> Any:
    """Returns `flash_attn._triton.<family>.<name>`."""
    return getattr(importlib.import_module(f"flash_attn._triton.{family}"), name)


def names(module: str, family: str, *known: str) -> Callable[[str], Any]:
    """Returns a `__getattr__` for a module that offers the `known` names of `flash_attn._triton.<family>`.

    The family is imported at the first use of a name. If Triton cannot be imported, the result raises AttributeError,
    so that hasattr is false.
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
    """Returns a function that calls `name` of `flash_attn._triton.<family>`, imported at the first call."""

    def launched(*args):
        return find(family, name)(*args)

    return launched
