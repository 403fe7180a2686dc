"""Fused dense layers that are divided among processes."""

import pytest
import torch
import torch.distributed as dist
from cases import DTYPES
from processes import over_processes
from torch import nn

from flash_attn.ops.fused_dense import (
    ColumnParallelLinear,
    FusedDense,
    FusedMLP,
    ParallelFusedMLP,
    RowParallelLinear,
    fused_dense_func,
    fused_mlp_func,
)

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)]


def device_of(group):
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def synced(module, group):
    """The module with parameters of its own, drawn alike wherever they are alike."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator).mul(0.1))
    return module.to(device_of(group))


def share(x, group, dim=0):
    return x.tensor_split(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()


def units(full, group, multiple_of):
    """The rows of this process, in units of multiple_of, of which the first processes have one more."""
    return share(torch.arange(full).view(-1, multiple_of), group).flatten().to(device_of(group))


def check_alike(found, right, dtype):
    """Up to rounding in another order."""
    tolerance = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 3e-2}[dtype]
    torch.testing.assert_close(found, right, rtol=tolerance, atol=tolerance * right.abs().max().clamp_min(1).item())


def check_linears(group, sequence_parallel, dtype, multiple_of):
    """Column- and row-parallel layers, one behind the other and each alone, against layers of one process."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    device, kind = device_of(group), DTYPES[dtype]
    hidden = multiple_of * (2 * world + 1)  # which do not divide evenly
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(4 * world, 3, width, generator=generator).to(device, kind) for width in (24, 16))
    first, second = nn.Linear(24, hidden), nn.Linear(hidden, 16)
    for module in (first, second):
        synced(module, group).to(kind)
    mine = units(hidden, group, multiple_of)
    options = dict(sequence_parallel=sequence_parallel, multiple_of=multiple_of, device=device, dtype=kind)
    column = ColumnParallelLinear(24, hidden, group, **options)
    row = RowParallelLinear(hidden, 16, group, **options)
    assert column.weight.shape == (len(mine), 24) and row.weight.shape == (16, len(mine))
    assert (row.bias is None) == (rank > 0)
    with torch.no_grad():
        column.weight.copy_(first.weight[mine])
        column.bias.copy_(first.bias[mine])
        row.weight.copy_(second.weight[:, mine])
        if rank == 0:
            row.bias.copy_(second.bias)

    divided = (lambda tensor: share(tensor, group)) if sequence_parallel else (lambda tensor: tensor)
    full, part = x.clone().requires_grad_(), divided(x).clone().requires_grad_()
    right_hidden, hidden_part = first(full), column(part)
    check_alike(hidden_part, right_hidden[..., mine], dtype)
    right, found = second(right_hidden), row(hidden_part)
    check_alike(found, divided(right), dtype)
    right.backward(dout)
    found.backward(divided(dout))
    check_alike(part.grad, divided(full.grad), dtype)
    check_alike(column.weight.grad, first.weight.grad[mine], dtype)
    check_alike(column.bias.grad, first.bias.grad[mine], dtype)
    check_alike(row.weight.grad, second.weight.grad[:, mine], dtype)
    if rank == 0:
        check_alike(row.bias.grad, second.bias.grad, dtype)


def check_mlps(group, sequence_parallel, dtype, checkpoint_lvl, activation):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    device, kind = device_of(group), DTYPES[dtype]
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(4 * world, 24, generator=generator).to(device, kind) for _ in range(2))
    hidden = 4 * world + 2
    whole = synced(FusedMLP(24, hidden, activation=activation), group).to(kind)
    mine = units(hidden, group, 1)
    divided = (lambda tensor: share(tensor, group)) if sequence_parallel else (lambda tensor: tensor)
    module = ParallelFusedMLP(
        24,
        hidden,
        activation=activation,
        process_group=group,
        sequence_parallel=sequence_parallel,
        checkpoint_lvl=checkpoint_lvl,
        device=device,
        dtype=kind,
    )
    with torch.no_grad():
        module.fc1.weight.copy_(whole.fc1.weight[mine])
        module.fc1.bias.copy_(whole.fc1.bias[mine])
        module.fc2.weight.copy_(whole.fc2.weight[:, mine])
        if rank == 0:
            module.fc2.bias.copy_(whole.fc2.bias)
    full, part = x.clone().requires_grad_(), divided(x).clone().requires_grad_()
    right, found = whole(full), module(part)
    check_alike(found, divided(right), dtype)
    right.backward(dout)
    found.backward(divided(dout))
    check_alike(part.grad, divided(full.grad), dtype)
    for name in ("fc1.weight", "fc1.bias"):
        check_alike(module.get_parameter(name).grad, whole.get_parameter(name).grad[mine], dtype)
    check_alike(module.fc2.weight.grad, whole.fc2.weight.grad[:, mine], dtype)
    if rank == 0:
        check_alike(module.fc2.bias.grad, whole.fc2.bias.grad, dtype)


def check_residual(group, sequence_parallel):
    """What a residual stream adds to the gradient of x is counted once."""
    device = device_of(group)
    generator = torch.Generator().manual_seed(dist.get_rank(group) if sequence_parallel else 0)
    x = torch.randn(4, 24, generator=generator).to(device).requires_grad_()
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(dist.get_rank(group))).to(device)

    def grad(return_residual, function):
        out = function(return_residual)
        out, residual = out if return_residual else (out, x)
        return torch.autograd.grad(out.sum() + 3 * residual.sum(), x)[0]

    options = dict(process_group=group, sequence_parallel=sequence_parallel)
    for function in (
        lambda residual: fused_dense_func(x, weight, None, residual, **options),
        lambda residual: fused_mlp_func(x, weight, weight.T.contiguous(), return_residual=residual, **options),
    ):
        torch.testing.assert_close(grad(True, function), grad(False, function))


def check_fused_with_group(group):
    """FusedDense and FusedMLP gather x and, the latter, scatter the sum."""
    world, device = dist.get_world_size(group), device_of(group)
    x = torch.randn(2 * world, 24, generator=torch.Generator().manual_seed(0)).to(device)
    dense, mlp = synced(FusedDense(24, 16), group), synced(FusedMLP(24), group)
    check_alike(dense(share(x, group), process_group=group), dense(x), "fp32")
    check_alike(mlp(share(x, group), process_group=group), share(world * mlp(x), group), "fp32")


def check_errors(group):
    for make, message in (
        (lambda: ColumnParallelLinear(8, 10, group, multiple_of=4), "out_features must be a multiple of 4, found 10"),
        (lambda: RowParallelLinear(10, 8, group, multiple_of=4), "in_features must be a multiple of 4, found 10"),
        (lambda: ColumnParallelLinear(8, 8, group, multiple_of=0), "multiple_of must be positive, found 0"),
        (lambda: ColumnParallelLinear(8, 6, group, share=7), "share must be a multiple of 1 from 0 to out_features, 6"),
        (lambda: RowParallelLinear(8, 6, group, share=-1), "share must be .* to in_features, 8, found -1"),
        (lambda: ColumnParallelLinear(8, 8, group, multiple_of=2, share=3), "share must be a multiple of 2 .* found 3"),
    ):
        with pytest.raises(ValueError, match=message):
            make()


def check_processes(group):
    """All of the above, since starting the processes is what takes time."""
    for sequence_parallel in (True, False):
        check_linears(group, sequence_parallel, "fp32", 1)
        check_linears(group, sequence_parallel, "bf16", 8)
        for level, activation in ((0, "gelu_approx"), (1, "relu"), (2, "sqrelu")):
            check_mlps(group, sequence_parallel, "fp32", level, activation)
        check_mlps(group, sequence_parallel, "fp16", 1, "gelu_approx")
        check_residual(group, sequence_parallel)
    check_fused_with_group(group)
    check_errors(group)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [1, 2, 4])
def test_divided_among_processes(world, backend):
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    over_processes(world, check_processes, backend=backend)
