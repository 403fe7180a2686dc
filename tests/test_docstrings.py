"""Everything public has a docstring that says what each argument is, and the examples in them give what they say."""

import ast
import doctest
import importlib
import inspect
import pathlib
import re

import pytest
import torch
from public import public_modules, public_names

ROOT = pathlib.Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted([*ROOT.glob("flash_attn/**/*.py"), *ROOT.glob("extras/*/**/*.py")])
    if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize("file", FILES)
def test_examples(file):
    name = re.sub(r"^extras/[\w-]+/", "", file)
    module = importlib.import_module(name.removesuffix(".py").replace("/", "."))
    assert not doctest.testmod(module, extraglobs={"torch": torch}).failed


# Of extras, what others import from. Its other modules belong to servers, which call them themselves.
INTERFACES = (
    "flash_attn_interface flash_attn.cute.interface flash_attn_sglang.interface flash_attn_vllm.interface".split()
)
WITHOUT_EXAMPLE = {"flash_attn.models.bert.Config": "a protocol, to annotate arguments with"}


@pytest.mark.parametrize("name", [*public_modules(), *INTERFACES])
def test_everything_public_has_an_example(name):
    """Each function and class in its own docstring, so that its help() is enough to call it."""
    module = importlib.import_module(name)
    named = {f"{name}.{each}": getattr(module, each) for each in public_names(module)}
    objects = {each: value for each, value in named.items() if inspect.isfunction(value) or inspect.isclass(value)}
    missing = {each for each, value in objects.items() if ">>> " not in (value.__doc__ or "")}
    excepted = objects.keys() & WITHOUT_EXAMPLE
    assert missing == excepted, f"an example is needed, or a reason in WITHOUT_EXAMPLE: {missing ^ excepted}"


MODULES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted(ROOT.glob("flash_attn/**/*.py"))
    if not re.search(r"/_(?!_init__)", path.as_posix().removeprefix(ROOT.as_posix()))
]
AS_IN_TORCH = {"self", "cls", "ctx", "device", "dtype"}
# Functions of a whole family of models, whose names say what they take: a state dict or a configuration.
BY_NAME = re.compile(r"(inv_)?remap_state_dict\w*|\w+_config_to_gpt2_config")


def _public(body, prefix=""):
    """(name, node, node of the class around it) of what is public and is defined in these statements."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            if not any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{node.name}.")


@pytest.mark.parametrize("file", MODULES)
def test_everything_public_says_what_it_is(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    missing = [name for name, node in _public(tree.body) if not ast.get_docstring(node)]
    assert ast.get_docstring(tree) and not missing, f"without a docstring: {missing}"


@pytest.mark.parametrize("file", MODULES)
def test_each_argument_is_described(file):
    """In functions and classes. A docstring may name, in `backticks`, another function that has the same arguments."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for name, node in _public(tree.body):
        if "." in name or BY_NAME.fullmatch(name):
            continue
        text, function = ast.get_docstring(node), node
        if isinstance(node, ast.ClassDef):
            function = next((each for each in node.body if getattr(each, "name", "") == "__init__"), None)
        arguments = function.args if function else ast.arguments([], [], None, [], [], None, [])
        names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)} - AS_IN_TORCH
        unknown = sorted(each for each in names if not re.search(rf"\b{each}\b", text))
        if re.search(r"`\w+(\.\w+)*`", text) or len(names) == 1:
            continue
        assert not unknown, f"{name} does not say what these arguments are: {unknown}"
