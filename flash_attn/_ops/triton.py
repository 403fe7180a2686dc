"""Kernels in Triton as ops want them: imported, and Triton with them, when they are first launched."""

import importlib


def launch(family: str, name: str):
    """The function `name` of `flash_attn._triton.<family>`."""

    def launched(*args):
        return getattr(importlib.import_module(f"flash_attn._triton.{family}"), name)(*args)

    return launched
