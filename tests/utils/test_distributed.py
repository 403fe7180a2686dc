"""Collectives: values, gradients, what they do to their input, helpers of parallel models, errors."""

import pytest
import torch
import torch.distributed as dist
from processes import compiled_on_last, half_of, over_processes

from flash_attn._ops import collectives
from flash_attn.utils import distributed
from flash_attn.utils.distributed import (
    all_gather,
    all_gather_raw,
    all_reduce,
    all_reduce_raw,
    allreduce_sequence_parallel_grad,
    get_dim_for_local_rank,
    reduce_scatter,
    reduce_scatter_raw,
    sync_shared_params,
)

BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.multi_gpu)]


def inputs(group, *shape):
    """The tensors of all processes, and this one's; on the device that the backend serves."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    generator = torch.Generator().manual_seed(0)
    each = torch.randn(dist.get_world_size(group), *shape, generator=generator).to(device)
    return each, each[dist.get_rank(group)].clone()


def gradient(function, x, dout):
    """What function(x) gives, and the gradient of x; x is no leaf, as within a model."""
    leaf = x.clone().requires_grad_()
    out = function(leaf * 1)
    return out.detach(), *torch.autograd.grad(out, leaf, dout)


# Each process runs all of these, since starting it is what takes time.


def check_values_and_gradients(group):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    each, x = inputs(group, 2 * world, 3)
    rows = slice(2 * rank, 2 * rank + 2)
    gathered, scattered = each.flatten(0, 1), each.sum(0)[rows]

    each_dout, dout = inputs(group, 2 * world * world, 3)
    out, dx = gradient(lambda x: all_gather(x, group), x, dout)
    assert torch.equal(out, gathered)
    torch.testing.assert_close(dx, each_dout.sum(0).view(world, -1, 3)[rank])

    each_dout, dout = inputs(group, 2, 3)
    out, dx = gradient(lambda x: reduce_scatter(x, group), x, dout)
    torch.testing.assert_close(out, scattered)
    assert torch.equal(dx, each_dout.flatten(0, 1))

    dout = torch.ones_like(x)
    out, dx = gradient(lambda x: all_reduce(x, group), x, dout)
    torch.testing.assert_close(out, each.sum(0))
    assert torch.equal(dx, dout)


def check_raw(group):
    each, x = inputs(group, 2 * dist.get_world_size(group), 3)
    rank = dist.get_rank(group)
    for function, expected in (
        (all_gather_raw, each.flatten(0, 1)),
        (reduce_scatter_raw, each.sum(0)[2 * rank : 2 * rank + 2]),
        (all_reduce_raw, each.sum(0)),
    ):
        for strided in (False, True):
            for async_op in (False, True):
                argument = x.t().contiguous().t() if strided else x.clone()
                out, handle = function(argument, group, async_op=async_op)
                assert (handle is not None) == async_op
                if async_op:
                    handle.wait()
                torch.testing.assert_close(out, expected)
                in_place = function is all_reduce_raw and not strided
                assert (out is argument) == in_place
                assert in_place or torch.equal(argument, x)


def check_memory_of_all_reduce(group):
    """The sum replaces a tensor in the middle of a graph, and autograd knows it; leaves and views are left alone."""
    each, x = inputs(group, 4)
    total = each.sum(0)
    leaf = x.clone().requires_grad_()
    inner = leaf * 1
    assert all_reduce(inner, group).data_ptr() == inner.data_ptr()
    torch.testing.assert_close(inner.detach(), total)
    saved = leaf.exp()  # whose backward needs the result
    all_reduce(saved, group)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()
    for kept in (leaf, (leaf * 1)[:], torch.stack([leaf, leaf], dim=1)[:, 0]):
        before = kept.detach().clone()
        out = all_reduce(kept, group)
        torch.testing.assert_close(out.detach(), total)
        assert torch.equal(kept, before)
        assert torch.equal(*torch.autograd.grad(out.sum(), leaf), torch.ones_like(leaf))
    strided = torch.stack([x, x], dim=1)[:, 0]
    torch.testing.assert_close(all_reduce(strided, group), total)
    assert torch.equal(strided, x)


def check_second_derivative(group):
    _, x = inputs(group, dist.get_world_size(group))
    for function in (all_gather, reduce_scatter, all_reduce):
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf**3, group).sum(), leaf, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.sum(), leaf)
        torch.testing.assert_close(dx / leaf**2, ddx / (2 * leaf))


def check_backend_gets_no_graph(group):
    """A graph holds the group, and a thread of the backend that is the last to hold the group aborts as Python ends."""
    _, x = inputs(group, 2 * dist.get_world_size(group))
    given = []

    def noted(collective):
        def call(*tensors, **kwargs):
            given.extend(tensors)
            return collective(*tensors, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (collectives, "all_gather_single"),
            (collectives, "reduce_scatter_single"),
            (dist, "all_reduce"),
        ):
            patch.setattr(module, name, noted(getattr(module, name)))
        outs = [
            function(x.clone().requires_grad_() * 1, group) for function in (all_gather, reduce_scatter, all_reduce)
        ]
    assert all(out.grad_fn is not None for out in outs)
    assert len(given) == 5 and all(tensor.grad_fn is None for tensor in given)


def check_compiled(group):
    _, x = inputs(group, 2 * dist.get_world_size(group), 3)
    for function in (all_gather, reduce_scatter, all_reduce):

        def layer(x, function=function):
            return function(x * 2, group) * 3

        expected = layer(x)
        compiled = compiled_on_last(group, layer, fullgraph=True, backend="aot_eager")
        found, dx = gradient(compiled, x, torch.ones_like(expected))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(dx, gradient(layer, x, torch.ones_like(expected))[1])
    for function in (all_gather_raw, reduce_scatter_raw, all_reduce_raw):

        def raw(x, function=function):
            out, handle = function(x * 2, group, async_op=True)
            if handle is not None:
                handle.wait()
            return out

        compiled = compiled_on_last(group, raw, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), raw(x))


def check_helpers(group):
    """Processes own different parameters beside those they share, and name them in different order."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    device = inputs(group, 1)[0].device
    model = torch.nn.Module()
    if rank == 0:
        model.bias = torch.nn.Parameter(torch.zeros(3, device=device))
    for name in ("b", "a") if rank else ("a", "b"):
        size, dtype = (5, torch.float32) if name == "a" else (2, torch.bfloat16)
        parameter = torch.nn.Parameter(torch.full((size,), rank + float(size), device=device, dtype=dtype))
        parameter._shared_params = parameter._sequence_parallel = True
        parameter.grad = torch.full_like(parameter, rank + size)
        model.register_parameter(name, parameter)
    sync_shared_params(model, group)
    buffers = [parameter.grad for parameter in model.parameters()]
    allreduce_sequence_parallel_grad(model, group)
    for name in ("a", "b"):
        parameter = model.get_parameter(name)
        size = len(parameter)
        assert (parameter == size).all()
        assert (parameter.grad == world * size + world * (world - 1) // 2).all()
        assert any(parameter.grad is buffer for buffer in buffers)
    if rank == 0:
        assert model.bias.grad is None and not model.bias.any()
    model.a.grad = None
    with pytest.raises(ValueError, match="a must have a gradient before it can be summed, found None"):
        allreduce_sequence_parallel_grad(model, group)
    allreduce_sequence_parallel_grad(torch.nn.Linear(2, 2), group)  # has nothing to sum


def check_shared_params_on_the_cpu(group):
    model = torch.nn.Linear(2, 3)
    for parameter in model.parameters():
        parameter.data.fill_(dist.get_rank(group) + 1)
        parameter._shared_params = True
    weight = model.weight
    sync_shared_params(model, group)
    assert model.weight is weight and weight.device.type == "cpu"
    assert all((parameter == 1).all() for parameter in model.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_params_of_a_model_on_the_cpu(backend):
    """As a model is before it is moved to a GPU; NCCL sends only what is there."""
    over_processes(2, check_shared_params_on_the_cpu, backend=backend)


def check_errors(group):
    for function in (reduce_scatter, reduce_scatter_raw):
        with pytest.raises(ValueError, match=r"input_.shape\[0\] must be divisible by the 2 processes, found 3"):
            function(torch.zeros(3, 2), group)
    for function in (all_gather, all_gather_raw, reduce_scatter, reduce_scatter_raw):
        with pytest.raises(ValueError, match="the number of dimensions of input_ must be at least 1, found 0"):
            function(torch.zeros(()), group)
    for function in (all_gather, reduce_scatter, all_reduce, all_gather_raw, reduce_scatter_raw, all_reduce_raw):
        with pytest.raises(TypeError, match=r"input_ must be a torch.Tensor, found list"):
            function([1.0], group)


def check_all(group):
    check_values_and_gradients(group)
    check_raw(group)
    check_memory_of_all_reduce(group)
    check_second_derivative(group)
    check_backend_gets_no_graph(group)
    check_helpers(group)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_processes(backend):
    over_processes(2, check_all, backend=backend)


@pytest.mark.parametrize("world", [1, 4])
def test_one_and_four_processes(world):
    over_processes(world, check_all)


def check_halves(group):
    check_all(half_of(group))


def test_groups_of_a_part_of_the_processes():
    """Whose ranks are not those among all processes."""
    over_processes(4, check_halves)


def test_compiled():
    over_processes(2, check_compiled)


def test_errors():
    over_processes(2, check_errors)


@pytest.mark.parametrize(
    ("dim", "world", "multiple_of", "expected"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (10, 4, 1, [3, 3, 2, 2]),
        (320, 4, 64, [128, 64, 64, 64]),
        (128, 4, 64, [64, 64, 0, 0]),
        (0, 2, 3, [0, 0]),
    ],
)
def test_dim_for_local_rank(dim, world, multiple_of, expected):
    assert [get_dim_for_local_rank(dim, world, rank, multiple_of) for rank in range(world)] == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10, 4, 0, 4), ValueError, "dim must be a multiple of 4, found 10"),
        ((8, 4, 4), ValueError, "local_rank must be from 0 to 3, found 4"),
        ((8, 4, -1), ValueError, "local_rank must be from 0 to 3, found -1"),
        ((8, 4, 0, 0), ValueError, "multiple_of must be positive, found 0"),
        ((8.0, 4, 0), TypeError, "dim must be an integer, found float"),
    ],
)
def test_errors_of_dim_for_local_rank(arguments, error, message):
    with pytest.raises(error, match=message):
        get_dim_for_local_rank(*arguments)


def test_autograd_functions():
    for name in ("AllGatherFunc", "ReduceScatterFunc", "AllReduceFunc"):
        assert issubclass(getattr(distributed, name), torch.autograd.Function)


@pytest.mark.parametrize(
    "backends, device, has_host",
    [
        ("cpu:gloo,cuda:gloo", "cpu", True),
        ("cpu:gloo", "cpu", True),
        ("cuda:nccl", "cuda", False),
        ("cpu:gloo,cuda:nccl", "cuda", True),  # also what a group has that is made without the name of a backend
    ],
)
def test_where_a_group_exchanges_tensors(monkeypatch, backends, device, has_host):
    group, made = type("Group", (), {})(), object()
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert distributed.device_of(group).type == device
    assert distributed.host_group(group) is (group if has_host else made)


def test_backends_of_a_group_without_a_name(tmp_path):
    dist.init_process_group(init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert distributed.backends_of()["cpu"] == "gloo"
        assert distributed.host_group(dist.group.WORLD) is dist.group.WORLD
    finally:
        dist.destroy_process_group()
