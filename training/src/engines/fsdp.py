"""Models whose parameters, gradients and optimiser states are divided over the processes (FSDP2: ZeRO-2 and ZeRO-3)."""

import contextlib
from collections.abc import Mapping
from typing import Any

import hydra
import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import distribute_tensor

from src.engines.mesh import MeshStrategy
from src.utils import checkpoint as checkpoints

_LISTS = ("layers", "blocks", "h")  # names of the lists of layers, in our models and in others'
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")  # through which Lightning calls a module


class FSDPStrategy(MeshStrategy):
    """Each process has a part of every parameter, and gathers those of a layer when it comes to it.

    Arguments:
        reshard_after_forward: free the gathered parameters of a layer after its forward, and gather them again for the
            backward (ZeRO-3). False keeps them from forward to backward (ZeRO-2): less is sent, more memory is used.
        reduce_dtype: in which gradients are summed with a precision of bf16.
        kwargs: of `MeshStrategy`; with tensor_parallel_size, the parts of layers are divided further.

    Only the first process needs to have the model with its first weights; the others may have it on the meta device,
    without memory, and get their parts from the first (`whole_on_first_process`).

    Layers in a list called `layers`, `blocks` or `h` are gathered one by one, and the rest at once. With
    precision=bf16-mixed, parameters and optimiser states are float32, and layers compute in bfloat16.
    """

    strategy_name = "fsdp"

    def __init__(self, reshard_after_forward: bool = True, reduce_dtype: str = "float32", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reshard_after_forward, self.reduce_dtype = reshard_after_forward, reduce_dtype

    def distribute(self) -> None:
        module = self.lightning_module
        with _keep_attributes(module):
            whole = {name: parameter.detach() for name, parameter in module.named_parameters()}
            anywhere_meta = any(checkpoints.gather(any(each.is_meta for each in whole.values())))
            if not isinstance(module, FSDPModule):
                shard(module, self.mesh["dp"], self.reshard_after_forward, self._policy())
            _allocate(module, self.root_device)
            self.model_to_device()
            if anywhere_meta:
                _fill(module, whole, self.root_device)

    def teardown(self) -> None:
        _allocate(self.lightning_module, "cpu")  # if an error has come before the weights: Lightning moves them
        super().teardown()

    def _policy(self):
        if not self.precision_plugin.precision.startswith("bf16"):
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, self.reduce_dtype))


def shard(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> None:
    """Divide a module over a mesh with one dimension, in place."""
    options: dict[str, Any] = dict(mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    lists = [each for name, each in module.named_modules() if name.rpartition(".")[2] in _LISTS]
    for layer in [layer for each in lists if isinstance(each, nn.ModuleList) for layer in each]:
        fully_shard(layer, **options)
    fully_shard(module, **options)
    for step in _STEPS:
        if isinstance(module, L.LightningModule) and is_overridden(step, module):
            register_fsdp_forward_method(module, step)


def whole_on_first_process(trainer: Mapping[str, Any]) -> contextlib.AbstractContextManager:
    """Where a model is made that the strategy of a trainer's options divides: in the first process with its weights,
    which are those of a run on one device with the same seed, and in all others on the meta device.

    It makes no difference for other strategies, and for tensor parallelism, which divides weights that are there.
    """
    options = trainer.get("strategy")
    target = options.get("_target_") if isinstance(options, Mapping) else None
    divides = target is not None and issubclass(hydra.utils.get_class(target), FSDPStrategy)
    if not divides or options.get("tensor_parallel_size", 1) > 1 or rank_zero_only.rank == 0:
        return contextlib.nullcontext()
    return torch.device("meta")


def _allocate(module, device):
    """Give parts of a module that are on the meta device memory on another."""
    for child in module.children():
        if any(parameter.is_meta for parameter in child.parameters()):
            child.to_empty(device=device)


def _fill(module, whole, device):
    """Give all processes their parts of the first one's parameters, and its buffers; one after the other."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = (
                whole[name].to(device)
                if dist.get_rank() == 0
                else torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            )
            dist.broadcast(values, src=0)
            part = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


@contextlib.contextmanager
def _keep_attributes(module):
    """Give the parameters that take the place of others their attributes, as `_optim` and `_no_weight_decay`."""
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        for key, value in attributes[name].items():
            if not hasattr(parameter, key):
                setattr(parameter, key, value)
