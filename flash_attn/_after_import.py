"""Calls that wait for the import of another module, such as a part of torch that most programs never import."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

_waiting: dict[str, list[Callable[[], object]]] = {}  # the full name of a module -> what is called after its import


def after_import(module: str, function: Callable[[], object]) -> None:
    """Call `function` once `module` has been imported: now if it has been, else at the end of its import.

    The import may be under way: in another thread, or because `module` itself imports what waits for it.
    """
    # Waiting comes before looking, since another thread may import the module in between.
    _waiting.setdefault(module, []).append(function)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    if (found := sys.modules.get(module)) is None:
        return
    spec = getattr(found, "__spec__", None)
    if getattr(spec, "_initializing", False):
        spec.__class__ = _Spec
    if not getattr(spec, "_initializing", False):
        _make_calls(module)


def _make_calls(module: str) -> None:
    for function in _waiting.pop(module, ()):
        function()


class _Spec(ModuleSpec):
    """The spec of a module at the end of whose import the calls are made."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Before other threads see that the module is ready. If the import has failed, the module is not there.
        if name == "_initializing" and not value and self.name in sys.modules:
            _make_calls(self.name)
        super().__setattr__(name, value)


class _Finder:
    """Finds what the others find, and gives it such a spec."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _waiting:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in tuple(sys.meta_path) if finder is not cls)
        specs = (find_spec(name, path, target) for find_spec in finders if find_spec is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        if isinstance(spec, ModuleSpec):
            spec.__class__ = _Spec
        return spec
