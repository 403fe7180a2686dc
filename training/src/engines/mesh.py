"""Processes in two dimensions: those that read other samples (dp), and those that share a model (tp)."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from src.engines import tensor_parallel
from src.engines.strategies import DDPStrategy
from src.utils import checkpoint as checkpoints


class MeshStrategy(DDPStrategy):
    """The base of strategies that divide a model. Neighbouring processes share a model: rank = dp rank * tp + tp rank.

    Arguments:
        tensor_parallel_size: over how many processes each layer is divided.
        sequence_parallel: divide by tokens what lies between the divided layers, as norms and dropout do.
        kwargs: of `DDPStrategy`.
    """

    mesh: DeviceMesh | None = None

    def __init__(self, tensor_parallel_size: int = 1, sequence_parallel: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.tensor_parallel_size, self.sequence_parallel = tensor_parallel_size, sequence_parallel

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // self.tensor_parallel_size

    @property
    def tensor_parallel_rank(self) -> int:
        return self.global_rank % self.tensor_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Processes that share a model read the same samples."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self.tensor_parallel_size}

    def setup_environment(self) -> None:
        size = self.tensor_parallel_size
        if size < 1 or self.world_size % size:
            raise ValueError(f"strategy.tensor_parallel_size must divide the {self.world_size} processes, found {size}")
        if self.precision_plugin.precision == "16-mixed":
            raise MisconfigurationException(
                f"trainer.precision must not be 16-mixed with strategy {self.strategy_name}, whose processes would not "
                "agree on the scale of the loss; bf16-mixed needs none"
            )
        super().setup_environment()
        shape = (self.data_parallel_size, size)
        self.mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("dp", "tp"))

    def setup(self, trainer: L.Trainer) -> None:
        """As Lightning's, but the model is divided before the optimiser is made, and for evaluation, too."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        if self.tensor_parallel_size > 1:
            tensor_parallel.divide(self.lightning_module, self.mesh["tp"].get_group(), self.sequence_parallel)
        self.model = self.lightning_module
        self.distribute()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self.clip_grad_by_norm
        self.prepare(trainer)

    def distribute(self) -> None:
        """Bring the model to the device, in copies or divided over the dp processes."""
        raise NotImplementedError

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def closure_and_sums():
            loss = closure()
            if self.tensor_parallel_size > 1:
                tensor_parallel.sum_gradients(self.lightning_module, self.mesh["tp"].get_group())
            return loss

        return super().optimizer_step(optimizer, closure_and_sums, model, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale all gradients such that the norm of the whole model's is at most clip_val."""
        parameters = [each for each in self.precision_plugin.main_params(optimizer) if each.grad is not None]
        if parameters:
            scale = (clip_val / (self._norm_of_gradients(parameters) + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([_local(each.grad) for each in parameters], scale)

    def _norm_of_gradients(self, parameters: list[Tensor]) -> Tensor:
        """The norm of the gradients of all processes, in which each element counts once, wherever it has copies."""
        norms = torch.stack(torch._foreach_norm([_local(each.grad) for each in parameters], 2, dtype=torch.float32))
        counts = [self.tensor_parallel_rank == 0 or not tensor_parallel.is_shared(each) for each in parameters]
        divided = [isinstance(each, DTensor) for each in parameters]  # over the dp processes
        own, parts = torch.tensor([counts, divided]).to(norms.device, non_blocking=True)
        squares = norms.double().square() * own
        divided, copied = (squares * parts).sum(), (squares * ~parts).sum()
        dist.all_reduce(divided, group=self.mesh["dp"].get_group())
        total = divided + copied
        dist.all_reduce(total, group=self.mesh["tp"].get_group())
        return total.sqrt().float()

    def _stored(self, name: str, prefix: str = checkpoints.WEIGHTS) -> str:
        """Parts of a layer have their own names: those of Wqkv, say, are not slices of it."""
        part = f"{checkpoints.PART}{self.tensor_parallel_rank}" if self.tensor_parallel_size > 1 else ""
        return prefix + name + part

    def _is_mine(self, name: str) -> bool:
        return self.tensor_parallel_size == 1 or name.endswith(f"{checkpoints.PART}{self.tensor_parallel_rank}")


class TensorParallelStrategy(MeshStrategy):
    """Each layer of a `flash_attn.models.gpt.GPTLMHeadModel` is divided over tensor_parallel_size processes.

    The other processes have copies of the parts, and read other samples; their gradients are averaged (DDP).
    """

    strategy_name = "tp"

    def distribute(self) -> None:
        self.model_to_device()
        if self.data_parallel_size > 1 and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._ddp_kwargs["process_group"] = self.mesh["dp"].get_group()
            self.configure_ddp()


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x
