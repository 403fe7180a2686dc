"""Errors for names that a module does not have: they say what replaced a removed name, or which names there are."""

import difflib
import importlib.util
import pathlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping

UNPADDED = {
    "flash_attn_unpadded_func": "flash_attn_varlen_func",
    "flash_attn_unpadded_kvpacked_func": "flash_attn_varlen_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func": "flash_attn_varlen_qkvpacked_func",
    "flash_attn_unpadded_qkvpacked_split_func": "flash_attn_varlen_qkvpacked_func",
}


def getattr_of(module: str, instead: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of a module with a `__path__`. instead: names that were removed, each with the name to use now.

    `from module import name` gets an ImportError that says what to use, or which names there are: Python would drop the
    text of an AttributeError there. All else gets an AttributeError, which hasattr and getattr need.

    The caller shows which of the two it is. Before `from` reads a name of a package, importlib asks if it is there,
    to import it as a submodule if not. Python takes every module with a `__path__` for a package, even an empty one.
    """

    def __getattr__(name: str) -> object:
        hint = f": use {instead[name]}" if name in instead else ""
        is_import = sys._getframe(1).f_globals.get("__name__") == "importlib._bootstrap"
        if is_import and not name.startswith("__") and importlib.util.find_spec(f"{module}.{name}") is None:
            hint = hint or f": {_what_there_is(module, name)}"
            raise ImportError(f"cannot import name {name!r} from {module!r}{hint}", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return __getattr__


def _what_there_is(module: str, name: str) -> str:
    """Where `name` is below the module; or its public names like `name`; or where else `name` is; or all its names."""
    found = sys.modules[module]
    modules = [each.name for each in pkgutil.iter_modules(getattr(found, "__path__", []))]
    own = [each for each, value in vars(found).items() if getattr(value, "__module__", None) == module]
    names = sorted({each for each in (*getattr(found, "__all__", own), *modules) if not each.startswith("_")})
    homes = _homes_of(name)
    below = [home for home in homes if home.startswith(f"{module}.")]
    close = difflib.get_close_matches(name, names)
    if below or (homes and not close):
        return f"it is in {(below or homes)[0]}"
    return "there are " + ", ".join(close or names)


def _homes_of(name: str) -> list[str]:
    """The public modules of the package that define `name` or have it in `__all__`, those with short names first."""
    root = pathlib.Path(__file__).parent
    has_it = re.compile(rf'^(?:def|class) {name}\b|^    "{name}",$', re.MULTILINE)
    files = (path.relative_to(root.parent) for path in root.rglob("*.py") if has_it.search(path.read_text()))
    modules = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    return sorted((module for module in modules if "._" not in module), key=lambda module: (module.count("."), module))
