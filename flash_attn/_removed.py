"""Names that are not there: the error of an import says what to use in place of those of older releases, or what is."""

import difflib
import dis
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
    """The `__getattr__` of a module: `instead` has names that were removed, each with the name to use.

    `from module import name` raises an ImportError that says so, or for other names, which there are. An AttributeError
    would lose its text there, but is what hasattr and getattr need, and what lets Python look for a submodule.
    """

    def __getattr__(name: str) -> object:
        frame = sys._getframe(1)
        imported = frame.f_code.co_code[frame.f_lasti] == dis.opmap["IMPORT_FROM"]
        if f"{module}.{name}" in sys.modules:  # being imported: Python takes it from there after an AttributeError
            raise AttributeError(f"module {module!r} has no attribute {name!r} yet")
        if name in instead:
            hint = f": use {instead[name]}"
            imported = imported or frame.f_globals.get("__name__") == "importlib._bootstrap"  # for packages
        else:
            hint = f": {_what_there_is(module, name)}" if imported else ""
        if imported:
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
