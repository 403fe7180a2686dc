"""Signatures are as the table in signatures.py says, and every public function is in that table."""

import importlib
import inspect
import operator
import types

import pytest
import torch
from public import public_modules, public_names
from signatures import OTHER_NAMES, SIGNATURES


class Named:
    """A default that prints as its name."""

    def __init__(self, default):
        self.default = default

    def __repr__(self):
        return self.default.__name__


def shown(function):
    """The parameters of a function as text, without annotations."""
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    named = (type, types.FunctionType, types.BuiltinFunctionType)
    parameters = [
        each.replace(default=Named(each.default))
        if each.default is not each.empty and isinstance(each.default, named)
        else each
        for each in parameters
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))[1:-1]


def find(module, name):
    return operator.attrgetter(name)(importlib.import_module(module))


@pytest.mark.parametrize("module", SIGNATURES)
def test_signatures(module):
    assert {name: shown(find(module, name)) for name in SIGNATURES[module]} == SIGNATURES[module]


@pytest.mark.parametrize("module", public_modules())
def test_every_public_function_and_layer_is_in_the_table(module):
    known = [find(module, name) for module, names in SIGNATURES.items() for name in names]
    found = {name: find(module, name) for name in public_names(importlib.import_module(module))}
    functions = [name for name, value in found.items() if inspect.isfunction(value)]
    layers = [name for name, value in found.items() if inspect.isclass(value) and issubclass(value, torch.nn.Module)]
    missing = [name for name in functions + layers if not any(found[name] is each for each in known)]
    assert not missing, f"add them to tests/support/signatures.py: {missing}"


@pytest.mark.parametrize("module", OTHER_NAMES)
def test_other_names_can_be_imported(module):
    for name in OTHER_NAMES[module].split():
        exec(f"from {module} import {name}")


@pytest.mark.parametrize("module", public_modules())
def test_every_public_class_is_in_a_table(module):
    known = {*(name.split(".")[0] for name in SIGNATURES.get(module, ())), *OTHER_NAMES.get(module, "").split()}
    found = {
        name: getattr(importlib.import_module(module), name) for name in public_names(importlib.import_module(module))
    }
    missing = [name for name, value in found.items() if inspect.isclass(value) and name not in known]
    assert not missing, f"add them to OTHER_NAMES in tests/support/signatures.py: {missing}"


def of_parameters(a, /, b=1.0, *, c=torch.float16, d=max, e: int = 2) -> None: ...


def test_shown():
    assert shown(of_parameters) == "a, /, b=1.0, *, c=torch.float16, d=max, e=2"
