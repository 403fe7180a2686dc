"""Build flash-attn: the Python package always, its CUDA library `flash_attn/_kernels.so` where that is possible.

The library is made of everything under csrc/ and uses PyTorch's stable ABI alone: one build serves every Python
from 3.10 and every torch from 2.10, on machines with and without a GPU. It is built if torch (of this environment,
or, in pip's isolated build, of the environment that is installed into) is a CUDA build and there is an nvcc.
Otherwise the package installs without it, works on its slower reference backend, and one line of output says why.

Environment variables, all optional:
    FLASH_ATTENTION_FORCE_BUILD=TRUE      build the library or fail; CPU-only torch will do
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE  never build it
    FLASH_ATTN_CUDA_ARCHS="80;90"         GPU architectures, without the dot; 80 includes PTX for newer GPUs
    FLASH_ATTN_INSTANCES="*128*"          build only some kernels, for development: see csrc/instances.py
    FLASH_ATTN_LOCAL_VERSION=cu13         local version label: 2.8.3.post100+cu13
    MAX_JOBS=8                            compiler processes at a time; by default as cores and memory allow
    NVCC_THREADS=2                        threads in each of them, one an architecture; 1 by default
    CUDA_HOME                             the CUDA toolkit; by default the one with the nvcc on the PATH
    CXX, PYTORCH_NVCC                     other compilers, or the same behind a cache ("ccache nvcc")
"""

import contextlib
import os
import re
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(f"flash-attn: setuptools >= 77 is needed to build, found {setuptools.__version__}.")

# Older ones have no bdist_wheel.
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
NO_KERNELS = """\
flash-attn: installing without CUDA kernels: {reason}. To get them, have a CUDA build of torch >= 2.10 and nvcc in \
place, then `pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall` this package again."""


class Torch(NamedTuple):
    version: tuple[int, int]
    cuda: str | None  # CUDA version it was built for, "13.0"; None if CPU-only


class Toolkit(NamedTuple):
    home: str
    cuda: str  # its version, "13.0"


class Build(build):
    """A build that starts from an empty folder: files of earlier builds would get into the wheel."""

    def run(self):
        if not any(self.distribution.have_run.get(step) for step in self.get_sub_commands()):
            for left in [*Path("build").glob("lib*"), *Path("build").glob("bdist*")]:
                shutil.rmtree(left)
        super().run()


class Wheel(bdist_wheel):
    """A wheel for every Python: the library holds no Python symbols."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]

    def run(self):
        super().run()
        *_, (_, _, made) = self.distribution.dist_files
        kernels = "its" if self.distribution.has_ext_modules() else "no"
        print(f"flash-attn: {os.path.basename(made)} has {kernels} CUDA kernels.")


COMMANDS = {"build": Build, "bdist_wheel": Wheel}


def version(env) -> str:
    """The version of the package, plus the local label if there is one."""
    base = re.search(r'^__version__ = "(.+)"$', (ROOT / "flash_attn/__init__.py").read_text(), re.MULTILINE)[1]
    label = env.get("FLASH_ATTN_LOCAL_VERSION")
    return f"{base}+{label}" if label else base


@contextlib.contextmanager
def target_environment():
    """Let imports fall back on the environment that is installed into, which pip's isolated build hides."""
    folders = site.getsitepackages() + [site.getusersitepackages()] * (sys.prefix == sys.base_prefix)
    hidden = [folder for folder in folders if folder not in sys.path]
    sys.path.extend(hidden)
    try:
        yield
    finally:  # or else setuptools would load the plugins that are installed there
        sys.path[:] = [folder for folder in sys.path if folder not in hidden]


def find_torch() -> Torch | None:
    with target_environment():
        try:
            import torch
        except (ImportError, OSError):  # OSError: a library of CUDA that it needs is not there
            return None
    return Torch(tuple(int(part) for part in torch.__version__.split(".")[:2]), torch.version.cuda)


def find_toolkit(env) -> Toolkit | str:
    """The CUDA toolkit of the first nvcc in CUDA_HOME, on the PATH or in the usual place, or why there is none.

    nvcc itself is asked where it lives and what version it is, since the one on the PATH may be a wrapper.
    """
    home = env.get("CUDA_HOME") or env.get("CUDA_PATH")
    folders = [home and f"{home}/bin", env.get("PATH"), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(filter(None, folders)))
    if nvcc is None:
        return "there is no nvcc in CUDA_HOME, on the PATH or in /usr/local/cuda"
    command = [nvcc, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    try:
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        return f"{nvcc} does not work: {error}"
    patterns = [r"TOP=(.+)", r"__CUDACC_VER_MAJOR__=(\d+)", r"__CUDACC_VER_MINOR__=(\d+)"]
    found = [re.search(pattern, run.stderr) for pattern in patterns]
    if run.returncode or None in found:
        said = " ".join(run.stderr.split())[-200:]
        return f"{nvcc} does not work: with --dryrun it ends with status {run.returncode} and {said!r}"
    top, major, minor = (match[1] for match in found)
    return Toolkit(os.path.realpath(top), f"{major}.{minor}")


def obstacle(torch: Torch | None, toolkit: Toolkit | str, forced: bool) -> str | None:
    """Why the library is not built, or None if it is. SystemExit if it is wanted by force but cannot be."""
    if torch is None:
        reason = f"there is no torch in {sys.prefix}"
    elif torch.version < (2, 10):
        reason = "torch is older than 2.10"
    elif torch.cuda is None and not forced:
        reason = "torch is CPU-only"
    elif isinstance(toolkit, str):
        reason = toolkit
    elif torch.cuda and torch.cuda.split(".")[0] != toolkit.cuda.split(".")[0]:
        reason = f"nvcc is of CUDA {toolkit.cuda}, torch of CUDA {torch.cuda}"
    else:
        return None
    if forced:
        raise SystemExit(f"flash-attn: FLASH_ATTENTION_FORCE_BUILD=TRUE, but {reason}.")
    return reason


def arch_flags(archs: str) -> list[str]:
    """nvcc's flags for architectures like "80;90". 90 is built as sm_90a, the target that has wgmma."""
    if not re.fullmatch(r"\d{2,3}[af]?(;\d{2,3}[af]?)*", archs):
        raise SystemExit(f"flash-attn: FLASH_ATTN_CUDA_ARCHS must be a list like '80;90', found {archs!r}.")
    code = {"80": "arch=compute_80,code=[compute_80,sm_80]", "90": "arch=compute_90a,code=sm_90a"}
    return ["-gencode=" + code.get(arch, f"arch=compute_{arch},code=sm_{arch}") for arch in archs.split(";")]


def compression_flags(cuda: str) -> list[str]:
    """Returns flags for compressed code, which makes the library smaller; drivers before CUDA 12.4 cannot read it."""
    return ["--compress-mode=size"] if int(cuda.split(".")[0]) >= 13 else []


def max_jobs(root: Path = Path("/")) -> int:
    """Returns one job per core, fewer if a job would have less than 3 GB of memory, within limits of cgroups (v2)."""
    available = 1024 * int(re.search(r"MemAvailable: *(\d+) kB", (root / "proc/meminfo").read_text())[1])
    group = re.search(r"^0::/(.*)$", (root / "proc/self/cgroup").read_text(), re.MULTILINE)
    folder = root / "sys/fs/cgroup" / (group[1] if group else "")
    limits = [path.read_text() for each in (folder, *folder.parents) if (path := each / "memory.max").exists()]
    memory = min([available, *(int(limit) for limit in limits if limit.strip() != "max")])
    return max(1, min(len(os.sched_getaffinity(0)), memory // 3_000_000_000))


def sources() -> list[str]:
    """All of csrc/ and the instances that its table asks for."""
    written = [path for suffix in ("cu", "cpp") for path in Path("csrc").rglob(f"*.{suffix}")]
    generated = runpy.run_path("csrc/instances.py")["generate"](Path("build/instances"))
    return sorted(str(path) for path in [*written, *generated])


def kernels(env, toolkit: Toolkit) -> dict:
    """Arguments of setup() that build the library."""
    env["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), env["PATH"]])  # where pip puts ninja
    env.setdefault("MAX_JOBS", str(max_jobs()))
    with target_environment():
        import torch
        from torch.utils import cpp_extension
    # A CPU-only torch sets neither. Without the first there is no compiler; without the second, a changed header would
    # not recompile the .cu files that include it.
    cpp_extension.CUDA_HOME = toolkit.home
    torch.version.cuda = torch.version.cuda or toolkit.cuda

    flags = ["-O3", "-std=c++20", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    # BuildExtension hides the operators of CUDA's 16-bit types; we want the headers as they are.
    hidden = ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS")
    nvcc_flags = [f"-U__CUDA_NO_{name}__" for name in hidden]
    nvcc_flags += ["-Xcompiler=-fvisibility=hidden", f"--threads={env.get('NVCC_THREADS', '1')}"]
    build_id = runpy.run_path("flash_attn/_build_id.py")["build_id"]()
    library = setuptools.Extension(
        "flash_attn._kernels",
        sources(),
        language="c++",
        include_dirs=[str(ROOT / "csrc"), *cpp_extension.include_paths("cuda")],
        library_dirs=cpp_extension.library_paths("cuda"),
        # libtorch_cpu has the C functions of the stable ABI; torch loads it before this library.
        libraries=["torch_cpu", "cudart_static", "rt", "dl", "pthread"],
        extra_compile_args={
            "cxx": [*flags, "-fvisibility=hidden"],
            "nvcc": [
                *flags,
                *nvcc_flags,
                *compression_flags(toolkit.cuda),
                *arch_flags(env.get("FLASH_ATTN_CUDA_ARCHS", "80;90")),
            ],
        },
        # Symbols of the library's static CUDA runtime must not replace another runtime in the process.
        extra_link_args=[
            "-Wl,--exclude-libs,ALL",
            "-Wl,--as-needed",
            "-Wl,--strip-debug",
            f"-Wl,--build-id=0x{build_id}",
        ],
    )
    build_ext = cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)
    return {"ext_modules": [library], "cmdclass": COMMANDS | {"build_ext": build_ext}}


def plan(env) -> dict:
    """Arguments of setup() that depend on the environment."""
    if env.get("FLASH_ATTENTION_SKIP_CUDA_BUILD") == "TRUE":
        reason = "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE"
    else:
        toolkit = find_toolkit(env)
        reason = obstacle(find_torch(), toolkit, forced=env.get("FLASH_ATTENTION_FORCE_BUILD") == "TRUE")
        if reason is None:
            return kernels(env, toolkit)
    print(NO_KERNELS.format(reason=reason))
    return {"cmdclass": COMMANDS}


if __name__ == "__main__":
    setuptools.setup(
        version=version(os.environ),
        options={"egg_info": {"egg_base": "."}},  # not in compat/, the first folder of modules
        # Only builds look for torch, because metadata and source archives do not depend on the library.
        **(plan(os.environ) if BUILD_COMMANDS & set(sys.argv) else {}),
    )
