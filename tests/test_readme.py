"""The README's examples run as written, and its support matrix says what the sources register."""

import pathlib
import re

import pytest

from flash_attn import models
from flash_attn.models._family import families

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
OLDER_TYPES = {"RefinedWeb", "RefinedWebModel"}  # as Falcon's first checkpoints have it
ROWS = [row.strip("|").split("|") for row in README.split("<!-- support matrix")[1].splitlines()[3:] if row[:1] == "|"]
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


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: re.search(r"from flash_attn\S* import (\w+)", text)[1])
def test_example(example):
    if "transformers" in example:
        pytest.importorskip("transformers")
    exec(compile(example, "README.md", "exec"), {})


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_support_matrix(row):
    title, _, gpu = row
    bindings = "".join(path.read_text() for path in (ROOT / "csrc/binding").glob("*.cpp"))
    registered = set(re.findall(r'm\.impl\("(\w+)"', bindings))
    (ops,) = (ops for word, ops in OPS.items() if word in title)
    assert ("kernel" in gpu) == (ops <= registered)


def test_families_of_models():
    """README and the docstring have the same table and the same limits; the table has every family with its types."""
    table = models.__doc__[models.__doc__.index("| module") :].strip()
    assert table in README
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    listed = {name.strip(" `"): set(types.strip().split(", ")) for _, name, types, *_ in rows}
    expected = {family.name.replace("gpt2", "gpt"): set(family.model_types) - OLDER_TYPES for family in families()}
    assert listed == expected


def test_every_family_is_in_the_matrix():
    assert len(ROWS) == len(OPS)
