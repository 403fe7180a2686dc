"""Build flash-attn: the Python package always, its CUDA library `flash_attn/_kernels.so` where that is possible.

The library is made of everything under csrc/ and uses PyTorch's stable ABI alone: one build serves every Python
from 3.10 and every torch from 2.10, on machines with and without a GPU. It is built if there is an nvcc and torch (of
this environment; of the one that pip installs into; else one that build_backend.py asks for) is a CUDA build.
Otherwise the package installs without it and works on its slower reference backend. The last line that is printed says
what was built and for which GPUs; or why nothing was, and what to do about it. Installers hide what is printed, so the
package keeps that line: `python -m flash_attn` shows it.

Environment variables, all optional:
    FLASH_ATTENTION_FORCE_BUILD=TRUE      build the library or fail; CPU-only torch will do
    FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE  never build it
    FLASH_ATTN_CUDA_ARCHS="80;90"         compute capabilities without the dot, in place of ARCHS; 80 has PTX, too
    FLASH_ATTN_INSTANCES="*128*"          build only some kernels, for development: see csrc/instances.py
    FLASH_ATTN_LOCAL_VERSION=cu13         local version label: 2.8.3.post101+cu13
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    found = setuptools.__version__
    raise SystemExit(f"flash-attn: setuptools >= 77 is needed to build, found {found}: `pip install -U setuptools`.")

# Older ones have no bdist_wheel.
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
BUILD_COMMANDS = {"bdist_wheel", "build", "build_ext", "develop", "editable_wheel", "install"}
NO_KERNELS = """\
installed without CUDA kernels, since {reason}. Then install this package again: \
`pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall .` or `uv pip install \
--no-build-isolation --no-deps --no-cache --reinstall .`, with what you had installed it from in place of the dot."""
# Code for 8.0 also runs on 8.6 to 8.9, that for 10.0 on 10.3, and that for 12.0 on 12.1; 90 is built as sm_90a, the
# target that has wgmma. The PTX of 80 is for all others: their drivers compile it at the first use.
ARCHS = ("80", "90", "100", "120")
# The last line that a build has printed, in installations without and with kernels.
KEPT = "flash_attn/_no_kernels.txt"
BUILT = "_built.txt"  # beside the library


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


class WithoutKernels(build_py):
    """A build of the Python files that keeps the reason why there are no kernels."""

    reason = ""

    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, KEPT).write_text(NO_KERNELS.format(reason=self.reason) + "\n")


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


def find_ninja(env) -> str | None:
    """The ninja that torch will find, or None."""
    return shutil.which("ninja", path=_path(env))


def _path(env):
    return os.pathsep.join([sysconfig.get_path("scripts"), env.get("PATH", "")])  # where pip puts ninja


def obstacle(torch: Torch | None, toolkit: Toolkit | str, ninja: str | None, forced: bool) -> str | None:
    """Why the library is not built and what to do, or None if it is. SystemExit if it is wanted by force but cannot be.

    The reason ends in what to do, to which the sentence goes on with "Then".
    """
    if isinstance(toolkit, str):  # first, since without it an isolated build has no torch of its own
        reason = f"{toolkit}: install the CUDA toolkit, or set CUDA_HOME to its folder, beside a CUDA build of torch"
    elif torch is None:
        reason = f"there is no torch in {sys.prefix}: install it"
    elif torch.version < (2, 10):
        reason = "torch is older than 2.10: install a newer one"
    elif torch.cuda is None and not forced:
        reason = "torch is CPU-only: install a CUDA build of it, or set FLASH_ATTENTION_FORCE_BUILD=TRUE"
    elif ninja is None:  # torch would run one compiler at a time, for hours, and say nothing
        reason = "there is no ninja: `pip install ninja`"
    elif torch.cuda and torch.cuda.split(".")[0] != toolkit.cuda.split(".")[0]:
        reason = f"nvcc is of CUDA {toolkit.cuda}, torch of CUDA {torch.cuda}: install either for the other's CUDA"
    else:
        return None
    if forced:
        raise SystemExit(f"flash-attn: FLASH_ATTENTION_FORCE_BUILD=TRUE, but {reason}.")
    return reason


def build_requirements(env) -> list[str]:
    """The requirements of a build beyond pyproject.toml: torch, if there is an nvcc but this environment has no torch.

    PyPI's torch 2.10 is for CUDA 12, its newer ones are for CUDA 13.
    """
    toolkit = find_toolkit(env)
    if env.get("FLASH_ATTENTION_SKIP_CUDA_BUILD") == "TRUE" or isinstance(toolkit, str) or find_torch():
        return []
    return ["torch==2.10.*" if toolkit.cuda.startswith("12.") else "torch>=2.11"]


def architectures(env, toolkit: Toolkit) -> list[str]:
    """The architectures to build for, as "80": those that FLASH_ATTN_CUDA_ARCHS names, or those of ARCHS that nvcc has.

    SystemExit if the variable names others than nvcc has, or older ones than the kernels run on.
    """
    nvcc = f"{toolkit.home}/bin/nvcc"
    offered = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True).stdout.split()
    known = [number for code in offered if int(number := code.removeprefix("sm_")) >= 80]
    wanted = env.get("FLASH_ATTN_CUDA_ARCHS")
    if wanted is None:
        return [arch for arch in ARCHS if arch in known]
    found = f"found {wanted!r}"
    if not re.fullmatch(r"\d{2,3}[af]?(;\d{2,3}[af]?)*", wanted):
        raise SystemExit(f"flash-attn: FLASH_ATTN_CUDA_ARCHS must be a list like '80;90', {found}.")
    archs = list(dict.fromkeys(wanted.split(";")))
    if not {arch.rstrip("af") for arch in archs} <= set(known):
        choice = ", ".join(known)
        raise SystemExit(f"flash-attn: FLASH_ATTN_CUDA_ARCHS must be of {choice} with nvcc {toolkit.cuda}, {found}.")
    # Which of them have targets that end in a or f, only a compilation tells.
    trial = [nvcc, "--dryrun", *arch_flags(archs), "-x", "cu", "-c", os.devnull, "-o", os.devnull]
    run = subprocess.run(trial, capture_output=True, text=True, errors="replace")
    if run.returncode:
        said = run.stderr.strip().splitlines()[-1:]
        raise SystemExit(f"flash-attn: FLASH_ATTN_CUDA_ARCHS must be what nvcc {toolkit.cuda} takes, {found}: {said}.")
    return archs


def arch_flags(archs: Iterable[str]) -> list[str]:
    """nvcc's flags for architectures."""
    code = {"80": "arch=compute_80,code=[compute_80,sm_80]", "90": "arch=compute_90a,code=sm_90a"}
    return ["-gencode=" + code.get(arch, f"arch=compute_{arch},code=sm_{arch}") for arch in archs]


def capabilities(archs: Sequence[str]) -> str:
    """What code for architectures runs on, for people: "compute capabilities 8.0, 9.0 and, as PTX, newer ones"."""
    numbers = [re.sub(r"(\d)([af]?)$", r".\1\2", arch) for arch in archs]
    newer = " and, as PTX, newer ones" if "80" in archs else ""
    return f"compute capabilit{'ies' if newer or len(numbers) > 1 else 'y'} {', '.join(numbers)}{newer}"


def compression_flags(cuda: str) -> list[str]:
    """Returns flags for compressed code: of the best kind that every driver can read which runs code of this CUDA."""
    return ["--compress-mode=size"] if int(cuda.split(".")[0]) >= 13 else ["-Xfatbin=-compress-all"]


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


def in_short(lines: Iterable[str], clock: Callable[[], float] = time.monotonic) -> Iterator[str]:
    """The lines of a build with `[3/137] file.cu, 12 min left` for ninja's commands, of all lines up to a failure."""
    start, failed = clock(), False
    for line in lines:
        failed = failed or line.startswith("FAILED")
        step = re.match(r"\[(\d+)/(\d+)\] .* -c (\S+) -o ", line)
        if step and not failed:
            done, total = int(step[1]), int(step[2])
            seconds = (clock() - start) / done * (total - done)
            left = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
            line = f"[{done}/{total}] {os.path.basename(step[3])}, {left} left\n"
        elif len(line) > 500 and not failed:  # the linker's command
            line = f"{line[:100]} ... ({len(line)} characters)\n"
        yield line


@contextlib.contextmanager
def output_in_short():
    """Pass what this process and its children print on stdout through `in_short`."""

    def forward():
        with os.fdopen(reading, errors="replace") as lines, os.fdopen(os.dup(stdout), "w") as out:
            for line in in_short(lines):
                out.write(line)
                out.flush()

    sys.stdout.flush()
    stdout, (reading, writing) = os.dup(1), os.pipe()
    os.dup2(writing, 1)
    os.close(writing)
    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        thread.join(timeout=5)  # and no longer: a compiler may leave a server behind that holds the pipe
        os.close(stdout)


def kernels(env, toolkit: Toolkit, archs: Sequence[str], last_line: str) -> dict:
    """Arguments of setup() that build the library for `archs` and keep the last line beside it."""
    env["PATH"] = _path(env)
    env["NINJA_STATUS"] = "[%f/%t] "
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
            # gcc 12 warns at length of headers of torch that are right.
            "cxx": [*flags, "-fvisibility=hidden", "-Wno-maybe-uninitialized"],
            "nvcc": [*flags, *nvcc_flags, *compression_flags(toolkit.cuda), *arch_flags(archs)],
        },
        # Symbols of the library's static CUDA runtime must not replace another runtime in the process.
        extra_link_args=[
            "-Wl,--exclude-libs,ALL",
            "-Wl,--as-needed",
            "-Wl,--strip-debug",
            f"-Wl,--build-id=0x{build_id}",
        ],
    )

    class BuildExt(cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)):
        def run(self):
            super().run()
            keep_beside(self.get_ext_fullpath(library.name), last_line)

        def build_extensions(self):
            with output_in_short():
                super().build_extensions()

    return {"ext_modules": [library], "cmdclass": COMMANDS | {"build_ext": BuildExt}}


def keep_beside(library: str, last_line: str) -> None:
    """Write the last line of a build where `python -m flash_attn` finds it."""
    Path(library).with_name(BUILT).write_text(last_line + "\n")


def with_kernels(env, archs: Sequence[str], toolkit: Toolkit, torch: Torch) -> str:
    """The last line of a build that makes the library."""
    only = env.get("FLASH_ATTN_INSTANCES")
    part = f", of attention only those that match {only!r}" if only else ""
    beside = ".".join(map(str, torch.version))
    return (
        f"built with CUDA kernels for {capabilities(archs)}{part}, by nvcc {toolkit.cuda} beside torch {beside}; "
        "they serve every torch from 2.10 and every Python from 3.10."
    )


def plan(env) -> tuple[dict, str]:
    """Arguments of setup() that depend on the environment, and the last line to print."""
    if env.get("FLASH_ATTENTION_SKIP_CUDA_BUILD") == "TRUE":
        reason = "FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE: unset it"
    else:
        toolkit = find_toolkit(env)
        forced = env.get("FLASH_ATTENTION_FORCE_BUILD") == "TRUE"
        torch = find_torch()
        reason = obstacle(torch, toolkit, find_ninja(env), forced)
        if reason is None:
            archs = architectures(env, toolkit)
            last_line = with_kernels(env, archs, toolkit, torch)
            return kernels(env, toolkit, archs, last_line), f"flash-attn: {last_line}"
    without = type("build_py", (WithoutKernels,), {"reason": reason})
    return {"cmdclass": COMMANDS | {"build_py": without}}, "flash-attn: " + NO_KERNELS.format(reason=reason)


if __name__ == "__main__":
    # Only builds look for torch, because metadata and source archives do not depend on the library.
    arguments, last_line = plan(os.environ) if BUILD_COMMANDS & set(sys.argv) else ({}, None)
    setuptools.setup(
        version=version(os.environ),
        options={"egg_info": {"egg_base": "."}},  # not in compat/, the first folder of modules
        **arguments,
    )
    if last_line:
        print(last_line)
