"""csrc/common: the choice of template arguments, texts of errors, launches, division. Few of these need a GPU."""

import pathlib
import re

import native
import pytest
import torch

HERE = pathlib.Path(__file__).parent
cuda = pytest.mark.cuda


@pytest.fixture(scope="module")
def probe():
    return native.library(HERE / "common_probe.cu", native.CUDA)


def test_dispatch_of_values(probe):
    assert [probe.text("find_value", value) for value in (64, 96, 128)] == ["64;", "96;", "128;"]
    assert probe.text("find_value", 80) == "no kernel is built for the value 80, only for: 64 96 128"


def test_dispatch_of_flags(probe):
    for digits in range(8):
        a, b, c = digits >> 2 & 1, digits >> 1 & 1, digits & 1
        assert probe.call("find_flags", a, b, c) == a * 100 + b * 10 + c


def test_dispatch_of_types(probe):
    assert [probe.call("find_element_size", dtype) for dtype in range(3)] == [4, 2, 2]


def test_error_of_the_runtime_says_what_and_where(probe):
    assert probe.text("check_status", 0) is None
    text = probe.text("check_status", 1)
    assert text.startswith("cudaProbe failed at ")
    assert "common_probe.cu:" in text
    assert text.endswith("cudaErrorInvalidValue: invalid argument")


@pytest.mark.parametrize(
    "status, advice",
    [
        (209, "cudaErrorNoKernelImageForDevice: .* without code for this GPU: .*FLASH_ATTN_CUDA_ARCHS$"),
        (222, "cudaErrorUnsupportedPtxVersion: .* newer than the driver: update the driver, .*FLASH_ATTN_CUDA_ARCHS$"),
    ],
)
def test_error_about_a_gpu_that_was_not_built_for_says_what_to_do(probe, status, advice):
    assert re.search(advice, probe.text("check_status", status))


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 0)], ids=str)
def test_empty_grid_launches_nothing(probe, grid):
    assert probe.text("count_threads", *grid, 32, 0, 0) is None  # a launch would write to address 0


def test_launch_that_fails_raises(probe):
    """A block of 2048 threads is more than any GPU has; without a GPU there is another error, in the same place."""
    text = probe.text("count_threads", 1, 2, 3, 2048, 16, 0)
    assert text.startswith("cudaLaunchKernelEx in ") and "launch.h:" in text and "cudaError" in text
    assert "count_kernel" in text
    assert "grid of 1 x 2 x 3 blocks of 2048 x 1 x 1 threads, 16 bytes of shared memory and clusters of 1 " in text


def test_too_much_shared_memory_raises(probe):
    text = probe.text("count_threads", 1, 1, 1, 32, 1 << 20, 0)
    assert "launch.h:" in text and "count_kernel" in text and f" {1 << 20} bytes of shared memory" in text


@cuda
def test_launch(probe, device):
    threads = torch.zeros((), dtype=torch.int32, device=device)
    probe.run("count_threads", 2, 3, 4, 96, 0, threads)
    assert threads.item() == 2 * 3 * 4 * 96


@cuda
def test_multiprocessors(probe):
    assert probe.call("multiprocessors", 0) == torch.cuda.get_device_properties(0).multi_processor_count


# ---------------------------------------------------------------------------------------------------------------------
# Division

LARGEST = 2**31 - 1
POWERS = [2**i + j for i in range(3, 31) for j in (-1, 0, 1)]


def test_constants_of_divisors():
    """The quotient n (2^32 + m) >> (32 + s) is right for n < 2^31 if 0 <= (2^32 + m) d - 2^(32 + s) <= 2^(s + 1)."""
    host = native.library(native.HERE / "host_probe.cpp", native.HOST)
    constants = torch.empty(2, dtype=torch.int64)
    for divisor in [*range(1, 1000), *POWERS, LARGEST]:
        host.run("find_divisor", divisor, constants)
        multiplier, shift = constants.tolist()
        assert 0 <= multiplier < 2**32
        assert 0 <= (2**32 + multiplier) * divisor - 2 ** (32 + shift) <= 2 ** (shift + 1)


@cuda
@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 16, 48, 641, 2**16 + 1, 2**30 - 1, 2**30 + 1, LARGEST])
def test_division(probe, device, divisor):
    multiples = torch.arange(1, 1 + min(2000, LARGEST // divisor)) * divisor
    largest = torch.tensor([LARGEST // divisor * divisor, LARGEST])
    n = torch.cat([torch.randint(LARGEST, (4096,)), multiples - 1, multiples, largest - 1, largest])
    quotients, remainders = torch.empty(2, len(n), dtype=torch.int32, device=device)
    probe.run("divide", divisor, n.int().to(device), quotients, remainders, len(n))
    assert torch.equal(quotients.cpu().long(), n // divisor)
    assert torch.equal(remainders.cpu().long(), n % divisor)
