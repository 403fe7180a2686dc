"""Packages that only some runs need."""

import importlib
from types import ModuleType


def optional_module(name: str, install: str | None = None) -> ModuleType:
    """The module of this name. Raises ImportError, which says what to install, where it cannot be imported.

    >>> optional_module("json").dumps([1])
    '[1]'

    Arguments:
        name: such as "timm.data".
        install: what pip should install; the first part of `name` if None.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:  # a build for another PyTorch fails with any of these
        package = install or name.partition(".")[0]
        raise ImportError(f"this run needs {name}: pip install {package}, as fits your PyTorch ({error})") from error
