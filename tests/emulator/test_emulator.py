"""The emulator of tests/emulator: it computes what a GPU does, and finds the mistakes that it promises to find."""

import functools
import zlib

import build_kernels
import pytest
import torch
from native import Library


@functools.cache
def probe():
    missing = build_kernels.obstacle()
    if missing:
        pytest.skip(missing)
    return Library(build_kernels.build_file(build_kernels.HERE / "probe.cu"))


@pytest.fixture(autouse=True)
def schedules_of_the_test(request):
    probe().call("begin_schedules", zlib.crc32(request.node.nodeid.encode()))


KERNELS = {"turn": 64, "reuse": 64, "copy": 128, "rounds": 64, "wait": 64, "swap": 256}


def run(kernel, mistake=0):
    x = torch.randn(KERNELS[kernel])
    out = torch.full_like(x, torch.nan)
    probe().run(kernel, out, x, mistake)
    exchanged = x.view(2, -1).flip(0).flatten()
    expected = {"turn": x.roll(-1), "reuse": exchanged, "swap": exchanged}.get(kernel, x)
    return torch.equal(out, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_right_kernels(kernel):
    assert all(run(kernel) for _ in range(20))


@pytest.mark.parametrize(("kernel", "runs"), [("turn", 40), ("reuse", 400), ("copy", 40), ("swap", 40)])
def test_missing_waits_give_wrong_values(kernel, runs):
    """Not each time: chance decides who comes first."""
    assert not all(run(kernel, mistake=1) for _ in range(runs))


def test_deadlock():
    with pytest.raises(RuntimeError, match="deadlock in block 0, 0, 0: thread 0 waits for a named barrier"):
        run("wait", mistake=1)


@pytest.mark.parametrize("mistake", [1, 2])
def test_wrong_phases_of_a_barrier(mistake):
    """Who waits for one goes on too early or, if it has come late, not at all."""

    def goes_right():
        try:
            return run("rounds", mistake)
        except RuntimeError as error:
            assert "waits for a barrier in shared memory" in str(error)

    assert not all(goes_right() for _ in range(20))


@pytest.mark.parametrize(
    ("kernel", "mistake", "message"),
    [("copy", 2, "cp.async between addresses that are not aligned"), ("rounds", 3, "a bulk copy that is not aligned")],
)
def test_addresses_that_are_not_aligned(kernel, mistake, message):
    with pytest.raises(RuntimeError, match=message + r", in thread \d+ of block 0, 0, 0"):
        run(kernel, mistake)


def test_schedules_depend_on_nothing_but_the_seed():
    """So that a test gets in the suite what it gets alone."""

    def outcomes(seed):
        probe().call("begin_schedules", seed)
        return [product(mistake=2) for _ in range(40)]

    assert outcomes(1) == outcomes(1) != outcomes(2)


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
