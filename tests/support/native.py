"""Small C++ and CUDA sources of the tests, compiled when they are first needed and called through ctypes.

The libraries stay in build/tests, under names that say what they were made of: source, headers and command. They can
be made on one machine and used on another, which then needs no compiler.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess

import pytest
import torch

HERE = pathlib.Path(__file__).parent  # of probe.h
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
FOLDER = ROOT / "build" / "tests"

# -Bsymbolic: the emulator's CUDA runtime is its own, also where a CUDA build of torch has loaded the real one.
HOST = (os.environ.get("CXX", "g++"), "-O1", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-Bsymbolic")
_NVCC = (
    "nvcc",
    "-Xcompiler=-fPIC",
    "-Werror=all-warnings",
    "--expt-relaxed-constexpr",  # tests on the host call constexpr functions of the device
)
CUDA = (*_NVCC, "-O2", "-gencode=arch=compute_80,code=[compute_80,sm_80]", "-gencode=arch=compute_90a,code=sm_90a")
CUDA_ON_THE_HOST = (
    *_NVCC,
    "-O0",
    "-gencode=arch=compute_90a,code=compute_90a",
)  # whose kernels are not made, nor called


class Library:
    """Calls of extern "C" functions. All arguments travel as 64 bits, tensors as the address of their first element."""

    def __init__(self, path):
        self._functions = ctypes.CDLL(str(path))

    def call(self, name, *args):
        """The int that a function returns."""
        return self._call(ctypes.c_int, name, args)

    def text(self, name, *args):
        """The text that a function returns; None for a null pointer."""
        text = self._call(ctypes.c_char_p, name, args)
        return None if text is None else text.decode()

    def run(self, name, *args):
        """Call a function that returns null, or the text of an error."""
        error = self.text(name, *args)
        if error is not None:
            raise RuntimeError(f"{name}: {error}")

    def _call(self, result, name, args):
        function = self._functions[name]
        function.restype = result
        return function(*(ctypes.c_int64(a.data_ptr() if isinstance(a, torch.Tensor) else int(a)) for a in args))


@functools.cache
def library(source, compiler):
    """`source` as a Library; loading one made by CUDA and calling its host functions takes no GPU.

    source: path of a C++ or CUDA file. compiler: HOST, CUDA or CUDA_ON_THE_HOST. Skips the test if it must compile and
    cannot.
    """
    path = FOLDER / f"{source.stem}-{_digest(source, compiler)}.so"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / f"{source.stem}.lock", "w") as lock:  # of several processes one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(path, source, compiler)
    return Library(path)


def _digest(source, compiler):
    """The hash of everything that a library is made of, except for system headers."""
    folders = (CSRC, HERE)
    headers = [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".h", ".cuh", ".cu")]
    parts = [repr(compiler).encode(), *(path.read_bytes() for path in [source, *headers])]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(path, source, compiler):
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"{compiler[0]} is not installed, which {source.name} is compiled with")
    made = path.with_suffix(".tmp")
    command = [*compiler, "-std=c++20", "-shared", f"-I{CSRC}", f"-I{HERE}", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    for older in FOLDER.glob(f"{source.stem}-*.so"):
        older.unlink()
    made.rename(path)
