"""The package as the `kernels` library loads it (extras/kernels): what is written, and that it is loaded from there."""

import importlib.util
import json
import os
import pathlib
import platform
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "extras/kernels").exists(), reason="this is not a source tree")


@pytest.fixture(scope="module")
def write():
    return runpy.run_path(str(ROOT / "extras/kernels/make_package.py"))["write"]


@pytest.fixture
def package(tmp_path):
    """A package with a library, as far as it can be told from outside."""
    folder = tmp_path / "flash_attn"
    (folder / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "flash_attn_interface.py", "_kernels.so", "__pycache__/a.pyc"):
        (folder / name).write_text("")
    return folder


def test_variants(write, package, tmp_path):
    cuda = f"torch-stable-abi210-cu130-{platform.machine()}-linux"
    stale = tmp_path / "build/torch-cpu/stale.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    assert write(tmp_path, package, "13.0", "80;90;120") == ["torch-cpu", cuda]
    build = tmp_path / "build"
    files = {path.relative_to(build).as_posix() for path in build.rglob("*") if path.is_file()}
    both = {"metadata.json", "flash_attn/__init__.py", "flash_attn/flash_attn_interface.py"}
    assert files == {f"{name}/{file}" for name in ("torch-cpu", cuda) for file in both} | {
        f"{cuda}/flash_attn/_kernels.so"
    }
    metadata = json.loads((build / cuda / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0+PTX", "9.0a", "12.0"]}
    assert (metadata["id"], metadata["name"]) == ("flash_attn", "flash-attn")


ERRORS = {
    "no CUDA": ((None, "80"), r"cuda must be the version of CUDA of _kernels.so, such as '13\.0', found None"),
    "no version": (("13", "80"), "cuda must be .*, found '13'"),
    "no list": (("13.0", "8.0"), r"archs must be the capabilities of _kernels.so, such as '80;90', found '8\.0'"),
}


@pytest.mark.parametrize(("given", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(write, package, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, package, *given)


def test_another_folder(write, tmp_path):
    with pytest.raises(FileNotFoundError, match="source must be the folder flash_attn of this project, found"):
        write(tmp_path, tmp_path)


LOADED = """
import sys
from pathlib import Path
import torch
from kernels import get_kernel_variants, get_local_kernel
folder = Path(sys.argv[1])
kernel = get_local_kernel(folder, backend="cpu")
assert Path(kernel.__file__).is_relative_to(folder), kernel.__file__
q = torch.randn(1, 3, 2, 16)
assert kernel.flash_attn_func(q, q, q, causal=True).shape == q.shape
for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):  # which transformers looks for
    assert callable(getattr(kernel, name))
import flash_attn.bert_padding
assert sys.modules["flash_attn"] is kernel and Path(flash_attn.bert_padding.__file__).is_relative_to(folder)
print("loaded")
"""


def test_kernels_loads_it(write, tmp_path):
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("needs kernels")
    write(tmp_path, cuda="13.0", archs="80")
    command = [sys.executable, "-c", LOADED, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and "loaded" in run.stdout, run.stderr[-3000:]


TRANSFORMERS = """
import sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
config = LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = AutoModelForCausalLM.from_config(config, attn_implementation="me/flash-attn", dtype=torch.bfloat16)
assert sys.modules["flash_attn"].__file__.startswith(sys.argv[1]), sys.modules["flash_attn"]
tokens = torch.tensor([[1, 2, 3]])
found = model(tokens).logits
model.set_attn_implementation("eager")
torch.testing.assert_close(found, model(tokens).logits, atol=1e-2, rtol=1e-2)
print("equal")
"""


def test_transformers_takes_it_from_a_folder(write, tmp_path):
    """By a name of a hub, which kernels looks up in LOCAL_KERNELS."""
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("needs kernels")
    utils = pytest.importorskip("transformers.utils")
    if not utils.is_kernels_available():
        pytest.skip("this transformers wants another version of kernels")
    write(tmp_path, cuda="13.0", archs="80")
    command = [sys.executable, "-c", TRANSFORMERS, str(tmp_path)]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "LOCAL_KERNELS": f"me/flash-attn={tmp_path}"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0 and "equal" in run.stdout, run.stderr[-3000:]
