"""How ops are defined: one registration a backend, autograd attached once, and no silent fallback."""

import warnings

import pytest
import torch

from flash_attn import _library


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.fixture
def announced(monkeypatch):
    """The identity, registered as the reference of the op `name`."""
    monkeypatch.setattr(_library, "load_error", lambda: None)
    _library.warn_once.cache_clear()
    return lambda name: _library._announced(name, lambda x: x)


def test_a_fallback_is_announced_once(announced):
    kernel = announced("test_doubled")
    with pytest.warns(RuntimeWarning, match="test_doubled runs on the slower reference .* no kernel for test_doubled"):
        kernel(OnGpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel(OnGpu())


def test_the_reference_is_silent_where_it_is_the_backend(announced):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        announced("test_doubled")(torch.zeros(1))


def test_the_reason_is_told(announced, monkeypatch):
    monkeypatch.setattr(_library, "load_error", lambda: "the library is of another world")
    with pytest.warns(RuntimeWarning, match="another world"):
        announced("test_doubled")(OnGpu())


def test_why_there_are_no_kernels(monkeypatch, tmp_path):
    """No file, and a file that cannot be loaded."""
    load_error = _library.load_error.__wrapped__
    monkeypatch.setattr(_library, "_PATH", tmp_path / "_kernels.so")
    assert "without CUDA kernels" in load_error()
    (tmp_path / "_kernels.so").write_bytes(b"no library")
    with pytest.warns(RuntimeWarning, match=r"_kernels\.so cannot be loaded beside torch"):
        assert torch.__version__ in load_error()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return DOUBLED.below_autograd(x, bias)

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


DOUBLED = _library.define(
    "test_doubled(Tensor x, Tensor? bias) -> Tensor",
    reference=lambda x, bias: 2 * x if bias is None else 2 * x + bias,
    fake=lambda x, bias: torch.empty_like(x),
    autograd=Doubled,
    differentiable=1,
)


@pytest.mark.parametrize("call", [DOUBLED, torch.ops.flash_attn.test_doubled], ids=["called", "through torch.ops"])
def test_gradients_of_a_defined_op(call, device):
    x = torch.randn(3, device=device, requires_grad=True)
    assert torch.equal(call(x, None), 2 * x)
    assert torch.autograd.grad(call(x, None).sum(), x)[0].tolist() == [2.0] * 3
    assert not call(x.detach(), None).requires_grad
    with torch.no_grad():
        assert not call(x, None).requires_grad


def test_a_defined_op_is_what_torch_expects(device):
    x = torch.randn(3, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.flash_attn.test_doubled.default, (x, None))
    assert not _library.has_kernel("test_doubled")
