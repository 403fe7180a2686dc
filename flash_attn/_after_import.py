"""Calls that wait for the import of another module, such as a part of torch that most programs never import."""

import sys
from collections.abc import Callable

_waiting: dict[str, list[Callable[[], object]]] = {}  # the full name of a module -> what is called after its import


def after_import(module: str, function: Callable[[], object]) -> None:
    """Call `function` once `module` has been imported: now if it has been, else at the end of its import."""
    if module in sys.modules:
        function()
        return
    _waiting.setdefault(module, []).append(function)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    """Finds what the others find, but whatever executes a module also makes the calls that wait for it."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in _waiting:
            return None
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not cls)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module):
                execute(module)
                for function in _waiting.pop(name, ()):
                    function()

            spec.loader.exec_module = execute_and_call
        return spec
