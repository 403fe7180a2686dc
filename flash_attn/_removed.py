"""Names of older releases: what is imported under them is not there, and the error says what to use."""

import dis
import inspect
from collections.abc import Callable, Mapping
from types import FrameType

UNPADDED = {
    "flash_attn_unpadded_func": "flash_attn_varlen_func",
    "flash_attn_unpadded_kvpacked_func": "flash_attn_varlen_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func": "flash_attn_varlen_qkvpacked_func",
    "flash_attn_unpadded_qkvpacked_split_func": "flash_attn_varlen_qkvpacked_func",
}


def getattr_of(module: str, instead: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module with removed names, each with the name to use instead.

    `from module import name` raises an ImportError that says so. An AttributeError would lose its text there, but is
    what hasattr and getattr need.
    """

    def __getattr__(name: str) -> object:
        if name not in instead:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        hint = f"use {instead[name]}"
        if _is_import(inspect.stack(0)[1].frame):
            raise ImportError(f"cannot import name {name!r} from {module!r}: {hint}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}: {hint}")

    return __getattr__


def _is_import(frame: FrameType) -> bool:
    """Whether the frame runs an import statement; where the module is a package, that looks from importlib."""
    importing = frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
    return importing or frame.f_globals.get("__name__") == "importlib._bootstrap"
