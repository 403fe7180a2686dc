"""What is built, and what is in it: the decision for or against the CUDA library, wheels, source archives, metadata."""

import email
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile

import pytest

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools >= 77")
from packaging.version import Version
from setuptools import Distribution, Extension

ROOT = pathlib.Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="this is not a source tree")


@pytest.fixture(scope="module")
def setup():
    """The functions of setup.py, which builds nothing unless it is the main program."""
    return types.SimpleNamespace(**runpy.run_path(ROOT / "setup.py"))


def _build(kind, source, target, **env):
    """Run one of the build backend's hooks (PEP 517, 660) as pip does; return what it made and what it printed."""
    command = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(target)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", command], cwd=source, env=os.environ | env, check=True, capture_output=True, text=True
    )
    return target / run.stdout.splitlines()[-1], run.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the tree that holds what must not get into a package: a stale library and compiled Python."""
    tree = tmp_path_factory.mktemp("source") / "flash-attn"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "_kernels.so", "results")
    shutil.copytree(ROOT, tree, ignore=ignored)
    (tree / "flash_attn/_kernels.so").write_bytes(b"stale")
    (tree / "csrc/__pycache__").mkdir(parents=True, exist_ok=True)
    (tree / "csrc/__pycache__/instances.cpython-311.pyc").write_bytes(b"stale")
    return tree


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return _build("wheel", source, tmp_path_factory.mktemp("wheel"), FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")


@pytest.fixture(scope="module")
def sdist(source, tmp_path_factory):
    return _build("sdist", source, tmp_path_factory.mktemp("sdist"))[0]


def _modules():
    """Every Python file of the package, and the top-level modules beside it."""
    files = [*(ROOT / "flash_attn").rglob("*.py"), *ROOT.glob("*.py")]
    return {path.relative_to(ROOT).as_posix() for path in files} - {"setup.py"}


def _installed(wheel, folder):
    """Unpack a wheel as an installer would."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _ask(folder, expression):
    """What a Python finds that has the standard library and `folder` on its path, nothing else."""
    code = f"import sys; sys.path.append({str(folder)!r}); from importlib import metadata; print({expression})"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


CUDA_TORCH, CPU_TORCH = ((2, 13), "13.0"), ((2, 13), None)
NVCC = ("/usr/local/cuda", "13.0")
DECISIONS = {  # torch, toolkit: None if the library is built, or a part of the reason; the same if forced
    "all there": (CUDA_TORCH, NVCC, None, None),
    "older nvcc of the same CUDA": (CUDA_TORCH, ("/usr/local/cuda", "13.2"), None, None),
    "no torch": (None, NVCC, "there is no torch in", "there is no torch in"),
    "old torch": (((2, 9), "13.0"), NVCC, "older than 2.10", "older than 2.10"),
    "CPU-only torch": (CPU_TORCH, NVCC, "CPU-only", None),
    "no nvcc": (CUDA_TORCH, None, "no nvcc", "no nvcc"),
    "neither": (CPU_TORCH, None, "CPU-only", "no nvcc"),
    "other CUDA": (CUDA_TORCH, ("/usr/local/cuda", "12.8"), "nvcc is of CUDA 12.8", "nvcc is of CUDA 12.8"),
}


@pytest.mark.parametrize(("torch", "toolkit", "reason", "_"), DECISIONS.values(), ids=DECISIONS)
def test_decision(setup, torch, toolkit, reason, _):
    found = setup.obstacle(torch and setup.Torch(*torch), toolkit and setup.Toolkit(*toolkit), forced=False)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize(("torch", "toolkit", "_", "error"), DECISIONS.values(), ids=DECISIONS)
def test_forced_decision(setup, torch, toolkit, _, error):
    def decide():
        return setup.obstacle(torch and setup.Torch(*torch), toolkit and setup.Toolkit(*toolkit), forced=True)

    if error is None:
        assert decide() is None
    else:
        with pytest.raises(SystemExit, match=f"FORCE_BUILD.*{error}"):
            decide()


def test_arch_flags(setup):
    assert setup.arch_flags("80;90;120") == [
        "-gencode=arch=compute_80,code=[compute_80,sm_80]",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_120,code=sm_120",
    ]


@pytest.mark.parametrize("archs", ["", "8.0", "80,90", "80;", "native"])
def test_bad_archs(setup, archs):
    with pytest.raises(SystemExit, match=r"FLASH_ATTN_CUDA_ARCHS must be a list like '80;90', found"):
        setup.arch_flags(archs)


def test_nvcc_behind_a_wrapper(setup, tmp_path):
    """The toolkit is where nvcc really is, not where a script of that name is."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    wrapper = tmp_path / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {nvcc} "$@"\n')
    wrapper.chmod(0o755)
    toolkit = setup.find_toolkit({"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (pathlib.Path(toolkit.home) / "include/cuda.h").exists()
    assert int(toolkit.cuda.split(".")[0]) >= 12


@pytest.mark.parametrize(("ext_modules", "platform"), [([], "any"), ([Extension("flash_attn._kernels", [])], "linux")])
def test_wheel_tag(setup, ext_modules, platform):
    """A wheel with the library is for one platform, but for every Python."""
    command = setup.Wheel(Distribution({"name": "flash-attn", "ext_modules": ext_modules}))
    command.ensure_finalized()
    python, abi, found = command.get_tag()
    assert (python, abi, found.split("_")[0]) == ("py3", "none", platform)


def test_says_once_that_there_are_no_kernels(wheel):
    said = [line for line in wheel[1].splitlines() if "without CUDA kernels" in line]
    assert len(said) == 1
    assert "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE" in said[0]
    assert "pip install" in said[0]


def test_wheel_contents(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        recorded = {line.split(",")[0] for line in archive.read(record).decode().splitlines()}
    assert wheel[0].name.endswith("-py3-none-any.whl")
    assert {name for name in names if ".dist-info/" not in name} == _modules() | {"flash_attn/py.typed"}
    assert recorded == names


def test_metadata(wheel):
    with zipfile.ZipFile(wheel[0]) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(path))
        licence = archive.read(path.replace("METADATA", "licenses/LICENSE")).decode()
    assert metadata["Name"] == "flash-attn"
    assert metadata["Requires-Python"] == ">=3.10"
    assert {"torch>=2.10", "einops"} <= set(metadata.get_all("Requires-Dist"))
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert licence == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("local", ["", "cu13"])
def test_version(setup, local):
    """One number, inside what transformers (from 2.3.3) and TransformerEngine (from 2.7.3 to 2.8.3) accept."""
    version = Version(setup.version({"FLASH_ATTN_LOCAL_VERSION": local}))
    assert Version("2.7.3") <= version < Version("2.8.4")
    assert (version.local or "") == local


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_other_packages_find_the_distribution(kind, source, tmp_path):
    """transformers asks which distribution the module belongs to, and which version that is."""
    built, _ = _build(kind, source, tmp_path, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE", FLASH_ATTN_LOCAL_VERSION="x")
    folder = _installed(built, tmp_path / "site")
    for name in {path.split("/")[0].removesuffix(".py") for path in _modules()}:
        assert _ask(folder, f"metadata.packages_distributions()[{name!r}]") == "['flash-attn']"
    assert _ask(folder, "metadata.version('flash_attn')").endswith("+x")


def test_sdist_contents(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob("*.*") if path.suffix != ".pyc"}
    assert {"setup.py", "pyproject.toml", "LICENSE", "flash_attn/__init__.py", "flash_attn/py.typed"} <= names
    assert sources <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith(("build/", "tests/"))]


def test_sdist_makes_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    again, _ = _build("wheel", tree, tmp_path, FLASH_ATTENTION_SKIP_CUDA_BUILD="TRUE")
    with zipfile.ZipFile(wheel[0]) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())
