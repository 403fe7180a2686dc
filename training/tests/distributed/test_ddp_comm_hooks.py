"""Gradients that DDP sends in 16 bits, against their mean in float64."""

import pytest
import torch
from processes import half_of, over_processes
from torch.nn.parallel import DistributedDataParallel

from src.distributed.ddp_comm_hooks import bfloat16_compress_hook, fp16_compress_hook

SIZE = 1000


def gradients(group, scale):
    """What each rank's gradient is, (ranks, SIZE)."""
    generator = torch.Generator().manual_seed(1)
    return scale * (1 + torch.rand(group.size(), SIZE, generator=generator))


def mean_is_sent(group, hook, scale, eps, dtype, halves):
    subgroup = half_of(group) if halves else None
    module = torch.nn.Linear(SIZE, 1, bias=False, dtype=dtype)
    model = DistributedDataParallel(module, process_group=subgroup)
    model.register_comm_hook(subgroup, hook)
    members = subgroup or group
    own = gradients(group, scale).to(dtype)
    model(own[group.rank()]).backward()  # the gradient is the input
    ranks = torch.distributed.get_process_group_ranks(members)
    exact = own[ranks].double().mean(dim=0)
    grad = module.weight.grad.flatten()
    error = ((grad.double() - exact) / exact).abs().max()
    assert grad.dtype == dtype
    # A rounding of each rank's part, and one of each of the sums.
    assert error <= eps * members.size()


CASES = [
    (fp16_compress_hook, 1e-2, 2**-11, torch.float32),
    (fp16_compress_hook, 3e4, 2**-11, torch.float32),  # fp16 ends at 65504: it holds the mean, but no sum of two
    (fp16_compress_hook, 1e-2, 2**-11, torch.float64),
    (bfloat16_compress_hook, 1e-2, 2**-8, torch.float32),
    (bfloat16_compress_hook, 1e30, 2**-8, torch.float32),
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("hook, scale, eps, dtype", CASES)
def test_mean_of_all_ranks(world, hook, scale, eps, dtype):
    over_processes(world, mean_is_sent, hook, scale, eps, dtype, False)


def test_mean_of_a_group():
    over_processes(4, mean_is_sent, fp16_compress_hook, 1.0, 2**-11, torch.float32, True)
