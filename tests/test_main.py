"""`python -m flash_attn`: what it tells, and that its self-check can fail."""

import platform
import re
import signal
import struct
import subprocess
import sys
from types import SimpleNamespace

import interpreters
import pytest
import torch

import flash_attn
from flash_attn import __main__ as report
from flash_attn import _library


@pytest.fixture
def run(device, capsys):
    """Run the command in this process; returns its exit status and what it printed."""

    def run():
        status = report.main(["--device", str(device)])
        return status, re.sub(" +", " ", capsys.readouterr().out)

    return run


def test_tells_what_a_bug_report_needs(run):
    status, printed = run()
    assert status == 0, printed
    for expected in (flash_attn.__version__, torch.__version__, platform.python_version(), platform.platform()):
        assert expected in printed
    if len({report.backend(name) for name in report.op_names()}) == 1:
        assert f"\nOps\n all {len(report.op_names())}: reference in plain torch: there " in printed
    else:
        for op in ("fwd", "bwd", "fwd_kvcache", "rotary"):
            assert f"\n {op} " in printed
    assert "\n batch invariance: level 0" in printed
    for check in report.CHECKS:
        assert f"\n {check} pass" in printed


def test_one_line_where_all_ops_are_alike(monkeypatch):
    monkeypatch.setattr(report, "backend", lambda name: "reference in plain torch: there are no kernels")
    assert report.backends() == [f"all {len(report.op_names())}: reference in plain torch: there are no kernels"]
    monkeypatch.setattr(report, "backend", lambda name: "kernel" if name == "fwd" else "reference")
    assert [line.split() for line in report.backends()] == [
        [name, "kernel" if name == "fwd" else "reference"] for name in report.op_names()
    ]


def test_errors_are_relative():
    exact = [torch.tensor([100.0, 1.0]), torch.tensor([1.0, -10.0])]
    assert report._error([torch.tensor([101.0, 1.0]), torch.tensor([0.5, -10.0])], exact) == pytest.approx(0.05)


def test_a_wrong_result_fails(run, monkeypatch):
    right = flash_attn.flash_attn_func
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda *args, **kwargs: 1.1 * right(*args, **kwargs))
    status, printed = run()
    assert status == 1
    assert "\n forward FAIL" in printed and "\n backward FAIL" in printed
    assert "\n rotary pass" in printed


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_result_that_is_not_finite_fails(run, monkeypatch, value):
    monkeypatch.setattr(flash_attn, "flash_attn_func", lambda q, k, v, causal: q * value)
    status, printed = run()
    assert status == 1 and "\n forward FAIL" in printed


def test_an_exception_is_reported_and_the_other_checks_run(run, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(flash_attn, "flash_attn_with_kvcache", broken)
    status, printed = run()
    assert status == 1
    assert "key-value cache fail: RuntimeError: no such kernel" in printed and "\n rotary pass" in printed


@pytest.mark.parametrize(
    "load_error, has_kernel, in_triton, has_device, expected",
    [
        ("not built", False, False, True, "reference in plain torch: there are no kernels"),
        (None, False, False, True, "reference in plain torch: the library has no kernel for it"),
        (None, True, False, False, "reference in plain torch: there is a kernel, but no CUDA device"),
        (None, True, False, True, "kernel for CUDA tensors, reference in plain torch for others"),
        ("not built", True, True, False, "reference in plain torch: there is a Triton kernel, but no CUDA device"),
        ("not built", True, True, True, "Triton kernel for CUDA tensors, reference in plain torch for others"),
    ],
)
def test_backend_and_why(monkeypatch, load_error, has_kernel, in_triton, has_device, expected):
    monkeypatch.setattr(_library, "load_error", lambda: load_error)
    monkeypatch.setattr(_library, "has_kernel", lambda name: has_kernel)
    monkeypatch.setattr(_library, "is_in_triton", lambda name: in_triton)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    assert report.backend("fwd") == expected


_WITHOUT_SOME_KERNELS = """
import sys, warnings
import torch, flash_attn
from flash_attn import __main__ as report, _library
for name in ("fwd", "fwd_features", "bwd_features", "rotary"):
    print(name, "FLASH_ATTN_REFERENCE names it" in report.backend(name), _library.has_kernel(name))
x = torch.zeros(1, 8, 1, 64, dtype=torch.float16, device=sys.argv[1])
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    flash_attn.flash_attn_func(x, x, x)
    flash_attn.flash_attn_func(x, x, x, learnable_sink=x[0, 0, :, 0])
print(*[w.message for w in caught if "FLASH_ATTN_REFERENCE" in str(w.message)], sep="\\n")
"""


def test_ops_can_be_switched_off(device):
    code = f"import sys, warnings; sys.argv[1:] = [{str(device)!r}]; warnings.simplefilter('ignore')\n"
    result = interpreters.run(code + _WITHOUT_SOME_KERNELS, FLASH_ATTN_REFERENCE="*_features, rotary")
    assert not result.stderr, result.stderr
    fwd, *others, warned = result.stdout.splitlines()
    assert fwd == f"fwd False {_library.has_kernel('fwd')}"
    assert others == [f"{name} True False" for name in ("fwd_features", "bwd_features", "rotary")]
    slow = "flash_attn: fwd_features runs on the slower reference backend in plain torch: FLASH_ATTN_REFERENCE names it"
    assert warned == (slow if device.type == "cuda" else "")


def _fat_binary(*entries):
    """A fat binary with code of 24 bytes for each entry (kind, architecture, flags)."""
    body = b"".join(
        struct.pack("<HHIQIIHHIQQ16x", kind, 0x101, 64, 24, 0, 0, 8, 1, architecture, 0, flags) + b"\0" * 24
        for kind, architecture, flags in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_architectures(tmp_path):
    library = tmp_path / "library.so"
    first = _fat_binary((2, 80, 0x11), (2, 90, 0x100011))
    second = _fat_binary((1, 80, 0x8011), (2, 80, 0x11), (2, 100, 0x1200011))
    library.write_bytes(b"\x7fELF" + b"code" * 10 + first + b"padding" + second)
    assert report.architectures(library) == ["compute_80", "sm_100f", "sm_80", "sm_90a"]
    library.write_bytes(b"\x7fELF without a GPU's code")
    assert report.architectures(library) == []
    library.write_bytes(_fat_binary((0, 80, 0)))
    assert report.architectures(library) == []


WHEEL = ["compute_80", "sm_100", "sm_120", "sm_80", "sm_90a"]
PTX = "compute_80, PTX that the driver compiles at the first use and keeps"
NOT_RUN = "; compiled and emulated, not run on such a GPU"


@pytest.mark.parametrize(
    "capability, built, expected",
    [
        ((8, 0), WHEEL, f"sm_80{NOT_RUN}"),
        ((8, 9), WHEEL, f"sm_80{NOT_RUN}"),
        ((9, 0), WHEEL, "sm_90a"),
        ((10, 0), WHEEL, f"sm_100{NOT_RUN}"),
        ((10, 3), WHEEL, f"sm_100{NOT_RUN}"),
        ((11, 0), WHEEL, f"{PTX}{NOT_RUN}"),
        ((12, 0), WHEEL, f"sm_120{NOT_RUN}"),
        ((12, 1), WHEEL, f"sm_120{NOT_RUN}"),
        ((12, 1), [*WHEEL, "sm_121"], f"sm_121{NOT_RUN}"),
        ((12, 0), [*WHEEL, "sm_120a"], f"sm_120a{NOT_RUN}"),
        ((10, 3), ["compute_80", "sm_100a"], f"{PTX}{NOT_RUN}"),
        ((10, 3), ["compute_80", "sm_100f"], f"sm_100f{NOT_RUN}"),
        ((12, 0), ["sm_90a", "sm_121", "compute_121"], None),
        ((9, 0), ["sm_80"], None),
        ((7, 5), WHEEL, None),
    ],
)
def test_which_code_serves_a_gpu(capability, built, expected):
    line = report.serving(capability, built)
    gpu = "compute capability {}.{}: ".format(*capability)
    if expected is not None:
        assert line == gpu + expected
        return
    assert line.startswith(f"{gpu}the library has no code for it, and kernels raise an error; ")
    number = "{}{}".format(*capability)
    assert line.endswith("kernels need 8.0 or newer" if number == "75" else f"with FLASH_ATTN_CUDA_ARCHS={number}")


def test_each_compute_capability_is_explained_once(monkeypatch, tmp_path):
    """Beside the lines of the devices; what the build has said at last is there, too."""
    library = tmp_path / "_kernels.so"
    library.write_bytes(_fat_binary((2, 90, 0x100011), (2, 120, 0x11)))
    gpus = [SimpleNamespace(name="GPU", major=12, minor=0, total_memory=32 << 30)] * 2
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(_library, "load_error", lambda: None)
    monkeypatch.setattr(_library, "_find", lambda: (library, None))
    first, second, explained = report.devices()
    assert (first, second) == tuple(f"cuda:{i} GPU, compute capability 12.0, 32 GiB" for i in range(2))
    assert explained == f"compute capability 12.0: sm_120{NOT_RUN}"
    assert not [line for line in report.installation() if "built with CUDA kernels" in line]
    (tmp_path / "_built.txt").write_text("built with CUDA kernels for compute capability 12.0\n")
    assert "kernels: built with CUDA kernels for compute capability 12.0" in report.installation()
    monkeypatch.setattr(_library, "_find", lambda: (None, "none"))
    monkeypatch.setattr(_library, "load_error", lambda: "none")
    assert report.devices() == [first, second]


def test_architectures_of_the_built_library(run):
    if _library.library_path() is None:
        pytest.skip("this installation has no kernel library")
    found = report.architectures(_library.library_path())
    assert {"sm_80", "sm_90a"} & set(found), found  # or both: whoever builds for some GPUs alone has one


def test_help_explains_itself():
    command = [sys.executable, "-m", "flash_attn", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "self-check" in result.stdout and "--device" in result.stdout


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="needs signals of POSIX")
def test_a_reader_may_end_early():
    command = [sys.executable, "-W", "ignore", "-m", "flash_attn"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as report:
        report.stdout.close()
        assert report.stderr.read() == ""
    assert report.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("name", ["banana", "cuda:99", "meta", ""])
def test_a_device_that_cannot_be_used(name, capsys):
    with pytest.raises(SystemExit) as exit:
        report.main(["--device", name])
    assert exit.value.code == 2
    *_, error = capsys.readouterr().err.splitlines()
    assert "argument --device: must be a device that torch can compute on, found " + repr(name) + ": " in error
