"""Helpers that time and measure: what they run, return and print. No time is compared."""

import json

import pytest
import torch
from torch.utils.benchmark import Measurement, Timer

from flash_attn.utils import benchmark

FUNCTIONS = {
    "benchmark_forward": ["Forward"],
    "benchmark_backward": ["Backward"],
    "benchmark_combined": ["Forward + Backward"],
    "benchmark_fwd_bwd": ["Forward", "Backward"],
    "benchmark_all": ["Forward", "Backward", "Forward + Backward"],
}


class Recorded:
    """x * y summed over the last dimension; counts its calls and its backwards."""

    def __init__(self):
        self.forwards = self.backwards = 0
        self.dtypes = set()

    def __call__(self, x, *, y=1.0, as_tuple=False):
        self.forwards += 1
        out = (x @ x.t()) * y
        self.dtypes.add(out.dtype)
        if out.requires_grad:
            out.register_hook(lambda grad: setattr(self, "backwards", self.backwards + 1))
        return (out, None) if as_tuple else out


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("as_tuple", [False, True])
def test_times(as_tuple, name, device, capsys):
    x, fn = torch.randn(4, 4, device=device, requires_grad=True), Recorded()
    result = getattr(benchmark, name)(fn, x, y=2.0, as_tuple=as_tuple, repeats=3, desc="this")
    results = result if name in ("benchmark_fwd_bwd", "benchmark_all") else (result,)
    assert len(results) == len(FUNCTIONS[name])
    for timer, measurement in results:
        assert isinstance(timer, Timer) and isinstance(measurement, Measurement)
        assert measurement.number_per_run == 3
    printed = capsys.readouterr().out
    assert all(f"this - {each} pass" in printed for each in FUNCTIONS[name])
    assert (fn.backwards >= 3) == (name != "benchmark_forward")
    getattr(benchmark, name)(fn, x, repeats=1, verbose=False)
    assert not capsys.readouterr().out


def test_gradients_do_not_add_up(device):
    x = torch.randn(4, 4, device=device, requires_grad=True)
    grad = torch.randn(4, 4, device=device)
    benchmark.benchmark_backward(Recorded(), x, grad=grad, repeats=5, verbose=False)
    torch.testing.assert_close(x.grad, (grad + grad.t()) @ x.detach())


def test_autocast(device):
    x, fn = torch.randn(4, 4, device=device), Recorded()
    benchmark.benchmark_forward(fn, x, amp=True, amp_dtype=torch.bfloat16, repeats=1, verbose=False)
    assert fn.dtypes == {torch.bfloat16}


def test_errors(device):
    x = torch.randn(4, 4, device=device, requires_grad=True)
    for name in ("benchmark_backward", "benchmark_combined", "benchmark_fwd_bwd", "benchmark_all"):
        with pytest.raises(RuntimeError, match="grad must have the shape of the output"):
            getattr(benchmark, name)(Recorded(), x, grad=torch.zeros(3, device=device), repeats=1, verbose=False)


@pytest.mark.parametrize("backward", [False, True])
def test_profiler(backward, tmp_path, device, capsys):
    x, fn = torch.randn(4, 4, device=device, requires_grad=True), Recorded()
    assert benchmark.pytorch_profiler(fn, x, backward=backward, cpu=True) is None
    assert "aten::mm" in capsys.readouterr().out
    assert fn.backwards == (31 if backward else 0)
    trace = tmp_path / "trace.json"
    assert benchmark.pytorch_profiler(fn, x, trace_filename=trace, verbose=False, cpu=True) is None
    assert any(event.get("name") == "aten::mm" for event in json.loads(trace.read_text())["traceEvents"])
    assert not capsys.readouterr().out


def test_memory(device, capsys):
    """Three tensors at a time, of which two are new."""
    x = torch.zeros(1000, 2**10, device=device)
    grown = benchmark.benchmark_memory(lambda x: ((x + 1) + 1) + 1, x, desc="this")
    assert f"this max memory: {grown}GB" in capsys.readouterr().out
    beside = torch.cuda.memory_allocated() / (2**20 * 1000) if device.type == "cuda" else 0.0
    megabytes = (grown - beside) * 1000
    assert 2 * 3.90 < megabytes < 2 * 3.92
    assert benchmark.benchmark_memory(lambda x: x, x, verbose=False) < grown
