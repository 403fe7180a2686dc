"""All that is public in the package has annotations, so that py.typed tells the truth. `make lint` checks them."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="this is not a source tree")


def is_public(name):
    return not name.startswith("_") or name in ("__init__", "__main__")


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def public_files():
    files = sorted((ROOT / "flash_attn").rglob("*.py"))
    return [path for path in files if all(map(is_public, path.relative_to(ROOT).with_suffix("").parts))]


def incomplete(body, owner=""):
    """Public functions and methods without annotations of all parameters and of what they return."""
    for node in body:
        if isinstance(node, ast.ClassDef) and is_public(node.name):
            yield from incomplete(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and is_public(node.name) and not is_complete(node, owner):
            yield owner + node.name


def is_complete(function, owner):
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    if owner and not static:
        parameters = parameters[1:]  # self
    returns = function.returns is not None or function.name == "__init__"
    return returns and all(each.annotation for each in parameters if each is not None)


@pytest.mark.parametrize("path", public_files(), ids=module_of)
def test_public_functions_are_annotated(path):
    missing = list(incomplete(ast.parse(path.read_text()).body))
    assert not missing, f"annotate all parameters and results of {missing}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x: int, *args: int, y: int = 1, **kwargs: int) -> None: ...", []),
        ("def f(x) -> None: ...", ["f"]),
        ("def f(*, y=1) -> None: ...", ["f"]),
        ("def f(*args) -> None: ...", ["f"]),
        ("def f(x: int): ...", ["f"]),
        ("def _f(x): ...", []),
        ("class C:\n  def __init__(self, x: int): ...\n  def f(self, x): ...\n  def __repr__(self): ...", ["C.f"]),
        ("class C:\n  @staticmethod\n  def f(x, y: int) -> None: ...", ["C.f"]),
        ("class _C:\n  def f(self, x): ...", []),
    ],
)
def test_incomplete(source, expected):
    assert list(incomplete(ast.parse(source).body)) == expected
