"""README and the pages of docs/: their examples run as written, their tables say what the sources say."""

import ast
import builtins
import importlib
import pathlib
import re

import pytest

from flash_attn import models
from flash_attn.models._family import families

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "extras").glob("*/README.md")),
]
MATRIX = (ROOT / "docs/support.md").read_text().split("<!-- support matrix")[1].split("\n\n")[0]
ROWS = [row.strip("|").split("|") for row in MATRIX.splitlines()[3:]]
OLDER_TYPES = {"RefinedWeb", "RefinedWebModel"}  # as Falcon's first checkpoints have it
OPS = {  # a word of the row: the ops that must have kernels before it may say so
    "varlen": {"fwd", "bwd"},
    "cache": {"fwd_kvcache"},
    "rotary": {"rotary", "rotary_", "rotary_into"},
    "cross entropy": {"xentropy_fwd", "xentropy_bwd", "xentropy_bwd_", "xentropy_fwd_bwd", "xentropy_fwd_bwd_"},
    "softmax": {"softmax_fwd", "softmax_bwd"},
    "LayerNorm": {"layer_norm_fwd", "layer_norm_bwd"},
    "MLPs": {"fused_dense_fwd", "fused_dense_dgrad", "fused_dense_wgrad", "gated_dense_fwd"},
    "SwiGLU": {"activation_fwd", "activation_bwd"},
}


def _examples(page):
    """The blocks that are marked as python; those marked as py need what is not everywhere."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if _examples(page)], ids=lambda page: page.stem)
def test_examples(page, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    for example in _examples(page):
        for library in re.findall(r"^(?:from|import) (accelerate|peft|transformers)\b", example, re.MULTILINE):
            pytest.importorskip(library)
        exec(compile(example, str(page), "exec"), names)
    if "accelerator" in names:
        names["accelerator"].state._reset_state(reset_partial_state=True)  # which would hold for later tests


@pytest.mark.parametrize("page", [page for page in PAGES if "```py" in page.read_text()], ids=lambda page: page.stem)
def test_examples_define_what_they_name(page):
    """Also in blocks marked as py, which do not run here."""
    known = {*dir(builtins), "__name__"}
    for block in re.findall(r"^```py(?:thon)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        nodes = list(ast.walk(ast.parse(block)))
        known |= {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
        known |= {(node.asname or node.name).split(".")[0] for node in nodes if isinstance(node, ast.alias)}
        known |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler))}
        known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        assert {node.id for node in nodes if isinstance(node, ast.Name)} <= known, block


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_support_matrix(row):
    title, _, gpu = row
    bindings = "".join(path.read_text() for path in (ROOT / "csrc/binding").rglob("*.cpp"))
    registered = set(re.findall(r'm\.impl\("(\w+)"', bindings))
    (ops,) = (ops for word, ops in OPS.items() if word in title)
    assert ("kernel" in gpu) == (ops <= registered)


def test_every_operation_is_in_the_matrix():
    assert len(ROWS) == len(OPS)


def test_families_of_models():
    """The page and the docstring have the same table and the same limits; the table has every family with its types."""
    table = models.__doc__[models.__doc__.index("| module") :].strip()
    assert table in (ROOT / "docs/guides/models.md").read_text()
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    listed = {name.strip(" `"): set(types.strip().split(", ")) for _, name, types, *_ in rows}
    expected = {family.name.replace("gpt2", "gpt"): set(family.model_types) - OLDER_TYPES for family in families()}
    assert listed == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_code_is_narrow(page):
    """At the width of an ordinary window a block of 78 columns has no scroll bar."""
    blocks = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for kind, block in blocks if kind != "pipeline" for line in block.splitlines()]
    assert [line for line in lines if len(line) > 78] == []


def test_files_that_pages_name_are_there():
    """Paths in `backticks` with a folder of the repository in front, also with a star."""
    folders = "benchmarks|compat|csrc|docs|examples|extras|flash_attn|tests|training"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w./*<>-]+)`", page.read_text()):
            assert "<" in path or list(ROOT.glob(path.rstrip("/"))), f"{page.name} names {path}"


def test_reference_has_every_public_module():
    """A module that has code of its own, or gathers what private modules have, is on a page."""
    listed = set(re.findall(r"^::: (\S+)", "".join(page.read_text() for page in PAGES), re.MULTILINE))
    for path in (ROOT / "flash_attn").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        private = any(part.startswith("_") and part != "__init__" for part in parts)
        if private or any(name.startswith(f"{each}.") for each in listed) or name == "flash_attn":
            continue
        empty = path.name == "__init__.py" and not hasattr(importlib.import_module(name), "__all__")
        assert name in listed or (empty and name != "flash_attn.models"), f"{name} is on no page of docs/reference"
