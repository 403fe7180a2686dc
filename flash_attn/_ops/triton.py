"""Kernels in Triton as ops want them: imported, and Triton with them, when they are first launched."""

import importlib


def find(family: str, name: str):
    """What `flash_attn._triton.<family>` calls `name`."""
    return getattr(importlib.import_module(f"flash_attn._triton.{family}"), name)


def launch(family: str, name: str):
    """The function `name` of `flash_attn._triton.<family>`."""

    def launched(*args):
        return find(family, name)(*args)

    return launched
