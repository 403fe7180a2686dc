"""The compiled library needs the stable ABI of PyTorch, the C and C++ runtimes, and nothing else.

That is what lets one file serve every Python and every torch from 2.10, and load beside CPU-only torch.
"""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from flash_attn import _build_id

LIBRARY = pathlib.Path(__file__).parents[1] / "flash_attn" / "_kernels.so"
LIBRARIES = re.compile(r"libtorch_cpu|libstdc\+\+|libgcc_s|lib(c|m|dl|rt|pthread)|ld-linux-.*")
# The loader and the runtimes version their symbols; the stable ABI of PyTorch is C functions of two prefixes.
SYMBOLS = re.compile(r"\S+@(GLIBC|GLIBCXX|CXXABI|GCC)_[\w.]+|(aoti_)?torch_\w+")
# These need not be there: hooks of the runtimes, and launches that no instance has (csrc/flash_attn/instances.h).
WEAK_SYMBOLS = re.compile(r"__gmon_start__|_ITM_\w+|__cxa_finalize@\S+|_ZN5flash10flash_attn\d+run_\w+")

pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="the CUDA library is not built here (make build)"),
    pytest.mark.skipif(not (shutil.which("nm") and shutil.which("readelf")), reason="binutils are not installed"),
]


def _output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _symbols(kind):
    """Name of each symbol -> its type, one letter of nm's."""
    return {line.split()[-1]: line.split()[-2] for line in _output("nm", "-D", kind, LIBRARY).splitlines()}


def test_needs_stable_symbols_only():
    symbols = _symbols("--undefined-only")
    weak = {symbol for symbol, kind in symbols.items() if kind == "w"}
    needed = symbols.keys() - weak
    assert "torch_library_impl" in needed or "aoti_torch_library_impl" in needed, "it registers no kernel"
    assert not {symbol for symbol in needed if not SYMBOLS.fullmatch(symbol)}
    assert not {symbol for symbol in weak if not WEAK_SYMBOLS.fullmatch(symbol)}


def test_links_torch_cpu_and_the_runtimes_only():
    dynamic = _output("readelf", "-d", LIBRARY)
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\.so", dynamic)
    assert "libtorch_cpu" in needed
    assert not [library for library in needed if not LIBRARIES.fullmatch(library)]
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_shows_no_cuda_runtime():
    """Its own copy of the CUDA runtime must not stand in for that of torch."""
    assert not {symbol for symbol in _symbols("--defined-only") if symbol.startswith(("cu", "__cuda"))}


def test_is_built_for_the_ops_of_today():
    assert _build_id.is_in(LIBRARY)


def test_loads_in_a_clean_interpreter():
    _output(sys.executable, "-c", f"import torch; torch.ops.load_library({str(LIBRARY)!r})")
