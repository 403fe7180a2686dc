"""The emulator of tests/emulator: it computes what a GPU does, and finds the mistakes that it promises to find."""

import functools

import pytest
import torch
from emulator import build_kernels
from native import Library


@functools.cache
def probe():
    missing = build_kernels.obstacle()
    if missing:
        pytest.skip(missing)
    return Library(build_kernels.build_file(build_kernels.HERE / "probe.cu"))


KERNELS = {"turn": 64, "copy": 128, "wait": 64, "swap": 256}


def run(kernel, mistake=False):
    x = torch.randn(KERNELS[kernel])
    out = torch.full_like(x, torch.nan)
    probe().run(kernel, out, x, mistake)
    expected = {"turn": x.roll(-1), "swap": x.view(2, -1).flip(0).flatten()}.get(kernel, x)
    return torch.equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels(kernel):
    assert all(run(kernel) for _ in range(20))


@pytest.mark.parametrize("kernel", ["turn", "copy", "swap"])
def test_missing_waits_give_wrong_values(kernel):
    """Not each time: chance decides who comes first."""
    assert not all(run(kernel, mistake=True) for _ in range(40))


def test_deadlock():
    with pytest.raises(RuntimeError, match="deadlock in block 0, 0, 0: thread 0 waits for a named barrier"):
        run("wait", mistake=True)


@pytest.mark.parametrize("against", [0, 1])
def test_votes(against):
    """Each vote counts once, in the call that it was given in."""
    for _ in range(20):
        out = torch.full((64,), torch.nan)
        probe().run("vote", out, out, against)
        assert torch.equal(out, torch.full_like(out, 8 - against))


def product(mistake=0):
    a, b = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))
    c = torch.full((64, 64), torch.nan)
    probe().run("product", c, a, b, mistake)
    return torch.allclose(c, a.float() @ b.float().T, rtol=1e-4, atol=1e-4)


def test_product():
    assert all(product() for _ in range(10))


@pytest.mark.parametrize("mistake", [1, 2])
def test_products_of_what_has_not_arrived(mistake):
    assert not all(product(mistake) for _ in range(40))
