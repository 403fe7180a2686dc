"""The library of kernels for the CPU: csrc/ compiled by the host's compiler against the emulator in this folder.

    python tests/emulator/build.py                     # all kernels, to build/emulator/kernels.so
    python tests/emulator/build.py '*sm90_bf16_128*'   # some instances of attention, by their names in csrc/instances.py

It needs g++, ninja, torch and the headers of the CUDA toolkit, but no nvcc and no GPU. What has not changed is not
compiled again. SANITIZE=address or undefined compiles it with a sanitizer: LD_PRELOAD=$(gcc -print-file-name=libasan.so)
lets Python load it.
"""

import argparse
import fnmatch
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import sysconfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "emulator"
FOLDER = ROOT / "build" / "emulator"
# Products of cuBLASLt and the conversions of its handles have no emulation.
LEFT_OUT = ("csrc/fused_dense/gemm.cpp", "csrc/binding/fused_dense.cpp")


def build(patterns=("*",), folder=FOLDER) -> pathlib.Path:
    """Compile what has changed and return the library's path. RuntimeError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text(_rules(patterns, folder))
    ninja = shutil.which("ninja", path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]]))
    if ninja is None:
        raise RuntimeError("ninja is needed to build the emulated kernels: pip install ninja")
    jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    done = subprocess.run([ninja, "-C", str(folder), "-j", jobs, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulated kernels do not compile:\n{(done.stdout + done.stderr)[-6000:]}")
    return folder / "kernels.so"


def cuda_headers() -> pathlib.Path | None:
    """The folder of cuda_runtime.h, or None."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and pathlib.Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
    folders = (pathlib.Path(home, "include") for home in homes if home)
    return next((folder for folder in folders if (folder / "cuda_runtime.h").exists()), None)


def _rules(patterns, folder):
    """What ninja reads."""
    from torch.utils import cpp_extension

    instances = runpy.run_path(str(ROOT / "csrc" / "instances.py"))["INSTANCES"]
    wanted = sorted({name for pattern in patterns for name in fnmatch.filter(instances, pattern)})
    for name in wanted:
        path = folder / f"{name}.cu"
        if not path.exists() or path.read_text() != instances[name]:
            path.write_text(instances[name])
    kernels = [folder / f"{name}.cu" for name in wanted] + sorted((ROOT / "csrc").rglob("*.cu"))
    bindings = sorted((ROOT / "csrc").rglob("*.cpp"))
    kept = [path for path in kernels + bindings if str(path.relative_to(ROOT)) not in LEFT_OUT]
    sanitizer = os.environ.get("SANITIZE")
    sanitize = f"-fsanitize={sanitizer} -g" if sanitizer else ""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which("ccache"):
        compiler = f"ccache {compiler}"
    torch_headers = " ".join(f"-isystem {path}" for path in cpp_extension.include_paths())
    rules = [
        f"flags = -std=c++20 -O1 -fPIC -w -U_FORTIFY_SOURCE -fno-extern-tls-init {sanitize} -I{HERE}/include"
        f" -I{ROOT}/csrc -isystem {cuda_headers()} -DTORCH_TARGET_VERSION=0x020a000000000000",
        f"rule compile\n  command = {compiler} $flags $more -MD -MF $out.d -c $in -o $out\n  depfile = $out.d\n  deps = gcc",
        f"rule link\n  command = rm -f $out && g++ -shared {sanitize} -o $out $in -L{cpp_extension.library_paths()[0]} -ltorch_cpu -lpthread -ldl",
    ]
    objects = []
    for path in [*kept, HERE / "block.cpp", HERE / "runtime.cpp"]:
        objects.append(str(path.relative_to(ROOT)).replace("/", "_") + ".o")
        rules.append(f"build {objects[-1]}: compile {path}")
        if path.suffix == ".cu":
            rules.append(f"  more = -x c++ -include {HERE}/include/cuda_on_cpu.h")
        elif path.parent != HERE:
            rules.append(f"  more = {torch_headers} -include {HERE}/include/binding_on_cpu.h")
    rules.append(f"build kernels.so: link {' '.join(objects)}")
    return "\n".join(rules) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("patterns", nargs="*", default=["*"], help="instances of attention kernels")
    try:
        print(build(parser.parse_args().patterns))
    except RuntimeError as error:
        sys.exit(str(error))
