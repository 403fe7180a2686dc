"""Kernels in Triton as ops want them: imported, and Triton with them, when they are first launched."""

import importlib


def find(family: str, name: str):
    """What `flash_attn._triton.<family>` calls `name`."""
    return getattr(importlib.import_module(f"flash_attn._triton.{family}"), name)


def names(module: str, family: str, *known: str):
    """The `__getattr__` of a module that has `known` names of `flash_attn._triton.<family>`, without its import."""

    def getattr_of_module(name):
        if name in known:
            return find(family, name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_of_module


def launch(family: str, name: str):
    """The function `name` of `flash_attn._triton.<family>`."""

    def launched(*args):
        return find(family, name)(*args)

    return launched
