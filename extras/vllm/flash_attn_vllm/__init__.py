"""vLLM's FLASH_ATTN backend, computed by this project's `flash_attn`.

vLLM finds `register` by its group of entry points `vllm.general_plugins` and runs it in each of its processes. After
that, FLASH_ATTN and CUSTOM are the backends of `flash_attn_vllm.backend`. `flash_attn_vllm.interface` has the functions
that vLLM's own modules import from its fork.
"""

import importlib
import logging
import os
import sys
from importlib import util

__version__ = "2.8.3.post101"

__all__ = ["register"]

BACKENDS = {"FLASH_ATTN": "FlashAttentionBackend", "CUSTOM": "CustomAttentionBackend"}


def register() -> None:
    """Put this package's classes behind vLLM's backends FLASH_ATTN and CUSTOM. Doing so again changes nothing.

    Raises:
        ImportError: vLLM is not installed, or has no registry of attention backends where this one looks for it.
    """
    own_flash_attn()
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        raise ImportError(
            f"flash_attn_vllm needs a vLLM that has vllm.v1.attention.backends.registry, found: {error}"
        ) from error
    for name, backend in BACKENDS.items():
        register_backend(AttentionBackendEnum[name], f"flash_attn_vllm.backend.{backend}")
    logging.getLogger("vllm.flash_attn_vllm").info("FLASH_ATTN and CUSTOM are the attention of flash_attn")


def own_flash_attn() -> None:
    """Import this project's `flash_attn`, and let `flash_attn.cute` be found where vLLM keeps its copy.

    vLLM's fork may put a bare module of that name into sys.modules, which has nothing but the folder with `cute`. What
    is imported from there stays as it is.
    """
    stub = sys.modules.get("flash_attn")
    if stub is not None and not hasattr(stub, "flash_attn_varlen_func"):
        del sys.modules["flash_attn"]
    else:
        stub = None
    package = importlib.import_module("flash_attn")
    if not hasattr(package, "flash_attn_varlen_func"):
        raise ImportError(
            f"flash_attn must be this project's package, found {getattr(package, '__file__', None)}: install flash-attn"
        )
    for folder in [*(stub.__path__ if stub is not None else ()), *_folders_with_cute()]:
        if folder not in package.__path__:
            package.__path__.append(folder)
    if "flash_attn.cute" in sys.modules:
        package.cute = sys.modules["flash_attn.cute"]  # type: ignore[attr-defined]


def _folders_with_cute() -> list[str]:
    """The folder above vLLM's `cute`, if that is a link: its files then import each other as `flash_attn.cute`."""
    spec = util.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    links = [os.path.join(folder, "vllm_flash_attn", "cute") for folder in folders]
    return [os.path.dirname(os.path.realpath(link)) for link in links if os.path.islink(link)]
