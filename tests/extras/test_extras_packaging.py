"""The distributions of extras/: what is in them, and the rules by which other packages find them."""

import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import interpreters
import pytest

pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools >= 77")
from packaging.requirements import Requirement
from packaging.version import Version

import flash_attn
import flash_attn.cute
import flash_attn_3
import flash_attn_sglang
import flash_attn_vllm

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "extras").exists(), reason="this is not a source tree")
FILES = {
    "flash-attn-3": {
        "flash_attn_3/__init__.py",
        "flash_attn_3/_C.py",
        "flash_attn_3/flash_attn_config.py",
        "flash_attn_3/flash_attn_interface.py",
        "flash_attn_config.py",
        "flash_attn_interface.py",
    },
    "flash-attn-4": {"flash_attn/cute/__init__.py", "flash_attn/cute/interface.py"},
    "flash-attn-sglang": {f"flash_attn_sglang/{name}.py" for name in ("__init__", "backend", "interface")},
    "flash-attn-vllm": {f"flash_attn_vllm/{name}.py" for name in ("__init__", "backend", "interface")},
}
ENTRY_POINTS = {
    "flash-attn-sglang": "[sglang.srt.plugins]\nflash_attn = flash_attn_sglang:register\n",
    "flash-attn-vllm": "[vllm.general_plugins]\nflash_attn = flash_attn_vllm:register\n",
}
VERSIONS = {
    "flash-attn-3": flash_attn_3.__version__,
    "flash-attn-4": flash_attn.cute.__version__,
    "flash-attn-sglang": flash_attn_sglang.__version__,
    "flash-attn-vllm": flash_attn_vllm.__version__,
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """All, made of a copy of the sources as pip makes them: by name."""
    made = {}
    for name in FILES:
        source = tmp_path_factory.mktemp("source") / name
        ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        folder = ROOT / "extras" / (name if (ROOT / "extras" / name).exists() else name.removeprefix("flash-attn-"))
        shutil.copytree(folder, source, ignore=ignored)
        command = "from setuptools import build_meta; build_meta.build_wheel('.')"
        subprocess.run([sys.executable, "-c", command], cwd=source, check=True, capture_output=True)
        (made[name],) = source.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory):
    """A folder with what installing them leaves beside flash-attn."""
    folder = tmp_path_factory.mktemp("site-packages")
    for wheel in wheels.values():
        _unpack(wheel, folder)
    (folder / "flash_attn-2.8.3.post101.dist-info").mkdir()
    (folder / "flash_attn-2.8.3.post101.dist-info/METADATA").write_text("Name: flash-attn\nVersion: 2.8.3.post101\n")
    (folder / "flash_attn-2.8.3.post101.dist-info/top_level.txt").write_text("flash_attn\n")
    return folder


def _unpack(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)


def _metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(path).decode()


@pytest.mark.parametrize("name", FILES)
def test_contents(name, wheels):
    with zipfile.ZipFile(wheels[name]) as archive:
        names = archive.namelist()
        licence = next(archive.read(path) for path in names if path.endswith("licenses/LICENSE"))
    assert wheels[name].name == f"{name.replace('-', '_')}-{VERSIONS[name]}-py3-none-any.whl"
    assert {path for path in names if ".dist-info/" not in path} == FILES[name]
    assert licence == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_engines_find_the_plugins(name, wheels):
    with zipfile.ZipFile(wheels[name]) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith("entry_points.txt"))
        assert archive.read(path).decode() == ENTRY_POINTS[name]


@pytest.mark.parametrize("name", FILES)
def test_needs_this_release_of_flash_attn(name, wheels):
    """Also with a label for CUDA, as wheels have it, but no flash-attn of others. The suffixes are the same."""
    (line,) = re.findall("^Requires-Dist: (.*)$", _metadata(wheels[name]), re.MULTILINE)
    requirement = Requirement(line)
    assert requirement.name == "flash-attn"
    for version in (flash_attn.__version__, f"{flash_attn.__version__}+cu13"):
        assert requirement.specifier.contains(version)
    assert not list(requirement.specifier.filter(["2.8.3", "2.8.3.post1", "2.8.4"]))
    assert Version(VERSIONS[name]).post == Version(flash_attn.__version__).post


RULES = {  # who looks -> an expression that is true if it finds what it looks for
    "transformers, 2": "util.find_spec('flash_attn') is not None and 'flash-attn' in owners('flash_attn')",
    "transformers, 3": (
        "util.find_spec('flash_attn_interface') is not None and 'flash-attn-3' in owners('flash_attn_interface')"
    ),
    "transformers, 4": "util.find_spec('flash_attn') is not None and 'flash-attn-4' in owners('flash_attn')",
    "diffusers": "util.find_spec('flash_attn_3') is not None and metadata.version('flash_attn_3') == '3.0.0.post101'",
    "TransformerEngine, no beta of 3": (
        "not Version('3.0.0b') < Version(metadata.version('flash-attn-3')) < Version('3.0.0')"
    ),
    "Megatron-LM, 4": "Version(metadata.version('flash-attn-4')) >= Version('4.0.0b20')",
    "before what comes after": "Version(metadata.version('flash-attn-4')) < Version('4.0.0b21')",
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_detection(rule, installed):
    """In a Python that sees only the folder, the standard library, and packaging."""
    code = f"""
import site, sys
from importlib import metadata, util
site.addsitedir({str(installed)!r})
sys.path.append({str(pathlib.Path(sys.modules["packaging"].__file__).parents[1])!r})
from packaging.version import Version
def owners(module):
    return [name.replace("_", "-") for name in metadata.packages_distributions().get(module, [])]
assert {rule}, metadata.packages_distributions()
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


IMPORTS = """
from flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # transformers
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn_3.flash_attn_interface import _flash_attn_forward, _flash_attn_backward  # TransformerEngine
from flash_attn.cute.interface import _validate_head_dims, flash_attn_func, flash_attn_varlen_func
from flash_attn_interface import flash_attn_3_gpu  # xtuner
flash_attn_3_gpu.fwd, flash_attn_3_gpu.bwd
import torch, flash_attn_3._C
torch.ops.flash_attn_3.fwd
from importlib.util import find_spec
assert find_spec("flash_attn.cute")  # flex attention
from flash_attn_config import CONFIG  # the original's tests
CONFIG["build_flags"]
"""
TRANSFORMERS = """
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX as matrix
assert all(matrix[version]["pkg_availability_check"]() for version in (2, 3, 4))
"""
WITHOUT_SOURCES = "import sys; sys.path = [path for path in sys.path if 'extras/flash-attn' not in path]\n"
UNINSTALLED = """
import sys
class Uninstalled:
    def find_spec(self, name, path=None, target=None):
        assert name not in ("flash_attn.cute", "flash_attn_3", "flash_attn_config", "flash_attn_interface"), name
sys.meta_path.insert(0, Uninstalled())
"""


def test_import_lines(installed):
    """Beside the sources of flash_attn, and not from those of extras/ nor what is installed where the tests run."""
    code = f"{WITHOUT_SOURCES}sys.path.insert(0, {str(installed)!r})\n{IMPORTS}"
    code += "import flash_attn_interface, flash_attn.cute\n"
    code += f"assert flash_attn_interface.__file__.startswith({str(installed)!r}), flash_attn_interface\n"
    code += f"assert flash_attn.cute.__file__.startswith({str(installed)!r}), flash_attn.cute"
    interpreters.run(code)


def test_transformers_finds_them(installed):
    """By its own functions, as far as they look for packages."""
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    if 4 not in getattr(utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}):
        pytest.skip("this transformers looks for packages in another way")
    code = f"{WITHOUT_SOURCES}sys.path.append({str(installed)!r})\n{TRANSFORMERS}"
    interpreters.run(code)


def test_flash_attn_does_without_them():
    """Its own import looks for none of these names, and whoever uninstalls them loses nothing else."""
    interpreters.run(f"{UNINSTALLED}import flash_attn")


def test_the_original_takes_the_place_of_the_stand_in(wheels, tmp_path):
    """Both have one name, so that an installer removes the one before it installs the other, whichever was first."""
    pip = pytest.importorskip("pip", reason="needs pip")
    runner = pathlib.Path(pip.__file__).with_name("__pip-runner__.py")  # what `pip --python` starts
    if not runner.exists():
        pytest.skip("needs a pip that has --python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    original = tmp_path / "flash_attn_4-4.0.0b31-py3-none-any.whl"
    info = "flash_attn_4-4.0.0b31.dist-info"
    contents = {
        "flash_attn/cute/__init__.py": "original = True\n",
        "flash_attn/cute/kernels.py": "",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b31\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(original, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in [*contents, f"{info}/RECORD"]))
    (site_packages,) = (tmp_path / "venv/lib").glob("python*/site-packages")

    def found():
        return sorted(path.name for path in (site_packages / "flash_attn/cute").glob("*.py"))

    for wheel, files in (
        (wheels["flash-attn-4"], ["__init__.py", "interface.py"]),
        (original, ["__init__.py", "kernels.py"]),
        (wheels["flash-attn-4"], ["__init__.py", "interface.py"]),
    ):
        command = [python, runner, "install", "--no-deps", "--no-index", "--no-compile"]
        subprocess.run([*command, "--quiet", wheel], check=True, capture_output=True)
        assert found() == files
