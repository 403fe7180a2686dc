"""Sizes of parameters and gradients against sums over whole tensors in float64."""

import pytest
import torch
from processes import over_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from src.callbacks.norm_monitor import NormMonitor
from tests.callbacks.tiny import Recorder, TinyModel, TinyTask, loader, trainer


def exact(params, grads):
    """What should be logged, from whole tensors by name."""
    expected = {}
    for name, x in {**params, **{f"{name}_grad": grad for name, grad in grads.items()}}.items():
        expected[f"stats/{name}_max"] = x.double().abs().max().item()
        expected[f"stats/{name}_mean"] = x.double().abs().mean().item()
    expected["total_param_l1_norm"] = sum(x.double().abs().sum().item() for x in params.values())
    expected["total_grad_l1_norm"] = sum(x.double().abs().sum().item() for x in grads.values())
    return expected


def check(logged, expected):
    assert logged.keys() == expected.keys()
    for name, value in expected.items():
        assert logged[name] == pytest.approx(value, rel=1e-4), name


class Watches(TinyTask):
    """Remembers what the optimizer gets."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_before_optimizer_step(self, optimizer):
        params = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.seen[self.trainer.global_step] = params, grads


@pytest.mark.parametrize("accumulate", [1, 2])
def test_logged_at_logging_steps(accumulate):
    task, recorder = Watches(), Recorder()
    options = dict(max_steps=4, accumulate_grad_batches=accumulate, gradient_clip_val=1e-3)
    trainer([NormMonitor()], recorder, **options).fit(task, loader())
    rows = {step: row for step, row in recorder.rows if "total_grad_l1_norm" in row}
    assert list(rows) == [1, 3]
    for step, row in rows.items():
        check(row, exact(*task.seen[step]))
        assert list(row) == sorted(row)


def test_norms_and_embeddings_only():
    names, _ = NormMonitor(layer_norm_only=True).stats(TinyModel())
    assert {name.split("/")[1].rpartition(".")[0] for name in names if "/" in name} == {"embedding", "norm"}


def test_large_gradients_of_16_bits():
    model = nn.Linear(300, 300, bias=False).half()
    model.weight.grad = 1e4 * torch.rand_like(model.weight)
    names, values = NormMonitor().stats(model)
    check(dict(zip(names, values.tolist())), exact({"weight": model.weight}, {"weight": model.weight.grad}))


def test_computed_without_reading_from_the_device():
    class NoRead(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default  # item()
            return func(*args, **(kwargs or {}))

    with NoRead():
        NormMonitor().stats(TinyModel())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_computed_without_waiting_for_the_gpu():
    model = TinyModel().cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        NormMonitor().stats(model)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_model_without_parameters():
    assert NormMonitor().stats(nn.Identity())[0] == []


def divided(group, mesh_shape):
    """A model whose parameters are divided, and one with the same that are whole."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))  # some processes have no part of the last
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    fully_shard(model, mesh=mesh)
    x = torch.randn(group.size(), 4, 5)
    model(x[group.rank()]).square().mean().backward()
    whole(x.flatten(0, 1)).square().mean().backward()
    names, values = NormMonitor().stats(model)
    params = dict(whole.named_parameters())
    check(dict(zip(names, values.tolist())), exact(params, {name: p.grad for name, p in params.items()}))


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=["sharded", "sharded and replicated"])
def test_parameters_that_are_divided(mesh_shape):
    over_processes(torch.Size(mesh_shape).numel(), divided, mesh_shape)
