"""The library of kernels for the CPU: csrc/ compiled by the host's compiler with the emulator of this folder.

    python tests/emulator/build_kernels.py                  # all kernels, to build/emulator/kernels.so
    python tests/emulator/build_kernels.py '*_128_*'        # of attention, those with such names (csrc/instances.py)

It needs g++, ninja, torch and the headers of the CUDA toolkit, but no nvcc and no GPU. What has not changed is not
compiled again. SANITIZE=address or SANITIZE=undefined adds a sanitizer, for which Python has to be started with
LD_PRELOAD=$(gcc -print-file-name=libasan.so).
"""

import argparse
import collections
import fnmatch
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "emulator"
FOLDER = ROOT / "build" / "emulator"
EMULATOR = [HERE / "block.cpp", HERE / "runtime.cpp"]
LEFT_OUT = [ROOT / "csrc/fused_dense/gemm.cpp", ROOT / "csrc/binding/fused_dense.cpp"]  # they call cuBLASLt
CXX = os.environ.get("CXX", "g++")


def obstacle() -> str | None:
    """Why nothing can be built here, or None."""
    if cuda_headers() is None:
        return "needs the headers of a CUDA toolkit"
    if ninja() is None or shutil.which(CXX) is None:
        return f"needs {CXX} and ninja"
    return None


def build(patterns: list[str]) -> Path:
    """The path of the library of kernels, made anew if something has changed. patterns: of instances of attention."""
    instances = runpy.run_path(str(ROOT / "csrc" / "instances.py"))["INSTANCES"]
    folder = FOLDER / "instances"
    folder.mkdir(parents=True, exist_ok=True)
    together = collections.defaultdict(str)  # those of one head dim: reading headers is more than half of compiling one
    for name in sorted({name for pattern in patterns for name in fnmatch.filter(instances, pattern)}):
        together[re.match(r".*?_(bf16|fp16)(_\d+)?", name)[0]] += instances[name]
    sources = []
    for name, text in together.items():
        sources.append(folder / f"{name}.cu")
        if not sources[-1].exists() or sources[-1].read_text() != text:
            sources[-1].write_text(text)
    csrc = [path for suffix in ("cu", "cpp") for path in sorted((ROOT / "csrc").rglob(f"*.{suffix}"))]
    return _build("kernels", sources + [path for path in csrc if path not in LEFT_OUT])


def build_file(source: Path) -> Path:
    """The path of a library of one CUDA file, made if something has changed."""
    return _build(source.stem, [source])


def _build(name, sources):
    import filelock  # which torch needs, too

    reason = obstacle()
    if reason:
        raise RuntimeError(f"The emulated kernels cannot be built: it {reason}.")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(FOLDER / "lock"):
        rules = FOLDER / f"{name}.ninja"
        rules.write_text("\n".join(_rules(name, sources)) + "\n")
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        command = [ninja(), "-C", FOLDER, "-f", rules.name, "-j", jobs]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"The emulated kernels do not compile:\n{done.stdout[-6000:]}")
    return FOLDER / f"{name}.so"


def ninja() -> str | None:
    return shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime.h, or None."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = (Path(home, "include") for home in homes if home)
    return next((folder for folder in folders if (folder / "cuda_runtime.h").exists()), None)


def _rules(name, sources):
    """The lines that ninja reads."""
    from torch.utils import cpp_extension

    compiler = f"ccache {CXX}" if shutil.which("ccache") else CXX
    sanitizer = os.environ.get("SANITIZE")
    sanitize = f"-fsanitize={sanitizer} -g" if sanitizer else ""
    torch_headers = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())
    yield f"headers = -I{HERE}/include -I{ROOT}/csrc -isystem {cuda_headers()}"
    # One definition of a block's shared memory for all files; jumps between fibers, which -D_FORTIFY_SOURCE forbids.
    yield f"flags = -std=c++20 -O1 -fPIC -w -fno-extern-tls-init -U_FORTIFY_SOURCE {sanitize}"
    yield "rule compile"
    yield f"  command = {compiler} $flags $headers $more -MD -MF $out.d -c $in -o $out"
    yield "  depfile = $out.d"
    yield "  deps = gcc"
    yield "rule link"
    yield f"  command = rm -f $out && {CXX} -shared -Wl,-Bsymbolic {sanitize} -o $out $in $libraries -lpthread"
    objects = []
    for path in [*sources, *EMULATOR]:
        objects.append(str(path.relative_to(ROOT)).replace("/", "_") + ".o")
        yield f"build {objects[-1]}: compile {path}"
        if path.suffix == ".cu":
            yield f"  more = -x c++ -include {HERE}/include/cuda_on_cpu.h"
        elif path not in EMULATOR:
            of_torch = "-DTORCH_TARGET_VERSION=0x020a000000000000 " + torch_headers
            yield f"  more = {of_torch} -include {HERE}/include/binding_on_cpu.h"
    yield f"build {name}.so: link {' '.join(objects)}"
    yield f"  libraries = -L{cpp_extension.library_paths()[0]} -ltorch_cpu"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="names of instances, such as '*sm90_bf16_128*'")
    try:
        print(build(parser.parse_args().patterns))
    except RuntimeError as error:
        sys.exit(str(error))
