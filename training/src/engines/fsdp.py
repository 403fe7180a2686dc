"""Models whose parameters, gradients and optimiser states are divided over the processes (FSDP2: ZeRO-2 and ZeRO-3)."""

import contextlib
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from src.engines.mesh import MeshStrategy, allocate
from src.utils import checkpoint as checkpoints

_REDUCE_DTYPES = ("float32", "bfloat16", "float16")
_LISTS = ("layers", "blocks", "h")  # names of the lists of layers, in our models and in others'
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")  # through which Lightning calls a module


class FSDPStrategy(MeshStrategy):
    """Each process has a part of every parameter, and gathers those of a layer when it comes to it.

    Arguments:
        reshard_after_forward: free the gathered parameters of a layer after its forward, and gather them again for the
            backward (ZeRO-3). False keeps them from forward to backward (ZeRO-2): less is sent, more memory is used.
            None is False if all parameters together, in the dtype in which layers compute, take at most an eighth of
            a GPU's memory, and otherwise True, as it is on a CPU.
        reduce_dtype: the dtype in which gradients are summed, with a precision of 16 bits: "float32", "bfloat16" or
            "float16".
        dp_replicate: copies of the parameters. Each is divided over the other processes of data and of context
            parallelism; gradients are summed within a copy, and then their parts between copies (HSDP).
        kwargs: of `MeshStrategy`. With tensor_parallel_size, the part of each layer is divided further by FSDP.

    Layers in a list called `layers`, `blocks` or `h` are gathered one by one, all other parameters together. With
    precision=bf16-mixed or 16-mixed, parameters and optimiser states are float32, and layers compute in 16 bits.
    Evaluation runs under torch.no_grad(), whatever Trainer(inference_mode=…) says.
    """

    strategy_name = "fsdp"

    def __init__(
        self,
        reshard_after_forward: bool | None = None,
        reduce_dtype: str = "float32",
        dp_replicate: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(reshard_after_forward, bool | None):
            raise ValueError(
                f"trainer.strategy.reshard_after_forward must be true, false or null, found {reshard_after_forward!r}"
            )
        if reduce_dtype not in _REDUCE_DTYPES:
            raise ValueError(
                f"trainer.strategy.reduce_dtype must be one of {', '.join(_REDUCE_DTYPES)}, found {reduce_dtype!r}"
            )
        self.reshard_after_forward, self.reduce_dtype = reshard_after_forward, reduce_dtype
        self.dp_replicate = dp_replicate

    def distribute(self) -> None:
        module = self.lightning_module
        with _keep_attributes(module):
            if not isinstance(module, FSDPModule):
                shard(module, self.mesh.hsdp, self._reshards(module), self._policy())
            allocate(module, self.root_device)
            self.model_to_device()

    def prepare(self, trainer: L.Trainer) -> None:
        super().prepare(trainer)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False  # FSDP2 reads version counters, which tensors of inference mode lack

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided_again(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided_again(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._divided_again(super().predict_step(*args, **kwargs))

    def _divided_again(self, result):
        """Free parameters that a forward has kept for a backward that does not come.

        The module would have them in place of those that optimisers and EMACallback change, and the next forward would
        take them as they were before a change.
        """
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return result

    def _reshards(self, module):
        if self.reshard_after_forward is not None or self.root_device.type != "cuda":
            return self.reshard_after_forward is not False
        dtype = self._policy().param_dtype
        size = sum(x.numel() * (dtype or x.dtype).itemsize for x in module.parameters())
        memory = torch.cuda.get_device_properties(self.root_device).total_memory
        # Processes that disagreed would wait for each other's collectives.
        return any(checkpoints.gather(8 * size > memory))

    def _policy(self):
        precision = self.precision_plugin.precision
        if not precision.startswith(("bf16", "16")):
            return MixedPrecisionPolicy()
        param_dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
        return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=getattr(torch, self.reduce_dtype))


def shard(module: nn.Module, mesh: DeviceMesh, reshard_after_forward: bool, policy: MixedPrecisionPolicy) -> None:
    """Divide a module in place, over a mesh of one dimension, or over the second in copies over the first."""
    options: dict[str, Any] = dict(mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    lists = [each for name, each in module.named_modules() if name.rpartition(".")[2] in _LISTS]
    for layer in [layer for each in lists if isinstance(each, nn.ModuleList) for layer in each]:
        fully_shard(layer, **options)
    fully_shard(module, **options | {"reshard_after_forward": False})  # the backward needs these at once
    for step in _STEPS:
        if isinstance(module, L.LightningModule) and is_overridden(step, module):
            register_fsdp_forward_method(module, step)


@contextlib.contextmanager
def _keep_attributes(module):
    """Copy attributes such as `_optim` and `_no_weight_decay` to the parameters that replace others in this block."""
    attributes = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
    yield
    for name, parameter in module.named_parameters():
        for key, value in attributes[name].items():
            if not hasattr(parameter, key):
                setattr(parameter, key, value)
