"""Strategies that divide a model, on the meshes of `flash_attn.parallel.build_mesh`."""

import functools
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor

from flash_attn.context_parallel import Plan
from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.parallel import Meshes, build_mesh, set_mlp_chunks
from src.engines import tensor_parallel
from src.engines.strategies import DDPStrategy
from src.utils import checkpoint as checkpoints

_RECOMPUTE = ("none", "block")


class MeshStrategy(DDPStrategy):
    """The base of strategies that divide a model. Neighbouring processes share a model, and next, samples, and next,
    a copy of the parameters: rank = ((copy * shards + shard) * cp + cp rank) * tp + tp rank.

    Only the first process needs to have the model with its first weights; the others may have it on the meta device,
    without memory, and get their parts from the first (`src.engines.whole_on_first_process`).

    With precision=16-mixed all processes have the same loss scale: if gradients of one are not finite, all skip the
    step.

    Arguments:
        tensor_parallel_size: over how many processes each layer is divided.
        sequence_parallel: between the divided layers, in norms and dropout, also divide the tokens.
        context_parallel_size: over how many processes the tokens of each sample are divided, in all layers. It needs a
            flash_attn.models.gpt.GPTLMHeadModel with use_flash_attn, without dropout of attention.
        context_parallel: arguments of `flash_attn.context_parallel.Plan`, such as layout and method. It is told the
            numbers of heads and the windows of the model, by which method="auto" chooses.
        recompute: "block" computes each block of a GPTLMHeadModel again in the backward, but not its attention; "none".
        offload: with it, keep the inputs of blocks and the results of attention in the memory of the host.
        mlp_chunks: compute MLPs of a GPTLMHeadModel for so many parts of the tokens, one after the other.
        kwargs: of `DDPStrategy`.
    """

    mesh: Meshes | None = None
    dp_replicate = 1  # copies of parameters that are divided

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        sequence_parallel: bool = True,
        context_parallel_size: int = 1,
        context_parallel: Mapping[str, Any] | None = None,
        recompute: str = "none",
        offload: bool = False,
        mlp_chunks: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.tensor_parallel_size, self.sequence_parallel = tensor_parallel_size, sequence_parallel
        self.context_parallel_size, self.context_parallel = context_parallel_size, dict(context_parallel or {})
        if recompute not in _RECOMPUTE:
            raise ValueError(f"trainer.strategy.recompute must be one of {', '.join(_RECOMPUTE)}, found {recompute!r}")
        if offload and recompute == "none":
            raise ValueError("trainer.strategy.offload must be false with recompute=none, found true")
        self.recompute, self.offload, self.mlp_chunks = recompute, offload, mlp_chunks
        self._plans: dict[int, Plan] = {}

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (self.tensor_parallel_size * self.context_parallel_size)

    @property
    def tensor_parallel_rank(self) -> int:
        return self.global_rank % self.tensor_parallel_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Processes that share a model read the same samples."""
        sharing = self.tensor_parallel_size * self.context_parallel_size
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // sharing}

    def check_size(self, processes: int) -> None:
        """Raise ValueError if the sizes of this strategy do not divide the number of processes."""
        size = self.tensor_parallel_size
        if size < 1 or processes % size:
            raise ValueError(
                f"trainer.strategy.tensor_parallel_size must divide the number of processes, {processes}, found {size}"
            )
        ranks = self.context_parallel_size
        if ranks < 1 or processes // size % ranks:
            raise ValueError(
                "trainer.strategy.context_parallel_size must divide the number of processes over tensor_parallel_size, "
                f"{processes // size}, found {ranks}"
            )
        readers, copies = processes // (size * ranks), self.dp_replicate
        if copies < 1 or readers % copies:
            raise ValueError(
                "trainer.strategy.dp_replicate must divide the number of processes that read different samples, "
                f"{readers}, found {copies}"
            )

    def plan(self, seqlen: int) -> Plan | None:
        """How samples of so many tokens are divided over the processes that share them; None if they are not."""
        if self.context_parallel_size == 1:
            return None
        if seqlen not in self._plans:
            options = self._sizes_of_attention() | self.context_parallel
            self._plans[seqlen] = Plan(seqlen, self.mesh.cp, loss_group=self.mesh.loss, **options)
        return self._plans[seqlen]

    def _sizes_of_attention(self) -> dict[str, Any]:
        """What the layers call attention with, by which a plan chooses its method: the same in all processes."""
        layers = [each for each in self.lightning_module.modules() if isinstance(each, (MHA, ParallelMHA))]
        windows = [getattr(each.inner_attn, "window_size", (-1, -1))[0] for each in layers]
        size, heads, heads_k = self.tensor_parallel_size, layers[0].num_heads, layers[0].num_heads_kv
        if heads_k % size:  # processes have different numbers of heads, and must choose the same
            return {}
        widest = -1 if min(windows) < 0 else max(windows)
        return dict(heads=heads // size, heads_k=heads_k // size, window_size=(widest, -1))

    def setup_environment(self) -> None:
        self.check_size(self.world_size)
        super().setup_environment()
        cp, tp = self.context_parallel_size, self.tensor_parallel_size
        self.mesh = build_mesh(self.dp_replicate, cp=cp, tp=tp, device_type=self.root_device.type)

    def setup(self, trainer: L.Trainer) -> None:
        """As Lightning's, but divides the model, before the optimiser is created, and for evaluation as well."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.lightning_module)
        whole = {name: parameter.detach() for name, parameter in self.lightning_module.named_parameters()}
        anywhere_meta = any(checkpoints.gather(any(each.is_meta for each in whole.values())))
        if self.tensor_parallel_size > 1:
            tensor_parallel.divide(self.lightning_module, self.mesh.tp.get_group(), self.sequence_parallel)
        self._save_memory()
        self.model = self.lightning_module
        self.distribute()
        if anywhere_meta:
            self._fill(whole)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.precision_plugin.clip_grad_by_norm = self.clip_grad_by_norm
        scaler = getattr(self.precision_plugin, "scaler", None)
        if isinstance(scaler, GradScaler):
            scaler._unscale_grads_ = functools.partial(_unscale_together, type(scaler)._unscale_grads_, scaler)
        self.prepare(trainer)

    def on_train_start(self) -> None:
        super().on_train_start()
        self._seed_dropout()

    def _seed_dropout(self) -> None:
        """Give processes that share a sequence seeds of their own: equal ones would drop the same of all their tokens.

        Weights and the order of samples have been drawn by now. A resumed run has the seeds of its checkpoint, unless
        that was of another division. Processes that share tokens, by tensor parallelism, keep equal seeds.
        """
        ranks, size = self.context_parallel_size, self.tensor_parallel_size
        if ranks == 1:
            return
        seed, rank = torch.initial_seed(), self.global_rank // size % ranks
        seeds = checkpoints.gather(seed)
        if seed in (seeds[self.global_rank - before * size] for before in range(1, rank + 1)):
            torch.manual_seed(seed + rank)

    def _save_memory(self) -> None:
        """Set how the models' blocks are computed, and refuse what only these models have."""
        found = tensor_parallel.models(self.lightning_module)
        wanted = {
            "context_parallel_size": (self.context_parallel_size, 1),
            "recompute": (self.recompute, "none"),
            "mlp_chunks": (self.mlp_chunks, 1),
        }
        for name, (value, usual) in wanted.items():
            if value != usual and not found:
                raise ValueError(
                    f"trainer.strategy.{name} must be {usual} for this model, found {value}: only "
                    "flash_attn.models.gpt.GPTLMHeadModel has it"
                )
        for model in found.values():
            if self.recompute == "block":
                model.gradient_checkpointing_enable(offload=self.offload, keep_attention=True)
            if self.mlp_chunks != 1:
                set_mlp_chunks(model, self.mlp_chunks)

    def distribute(self) -> None:
        """Bring the model to the device, in copies or divided over processes with other tokens."""
        raise NotImplementedError

    @torch.no_grad()
    def _fill(self, whole: dict[str, Tensor]) -> None:
        """Give all processes their parts of the first one's parameters, and its buffers; one after the other."""
        size, rank = self.tensor_parallel_size, self.tensor_parallel_rank
        module, configs = self.lightning_module, self._configs() if size > 1 else {}
        mine = dict(module.named_parameters())
        for name, values in whole.items():
            values = values.to(self.root_device) if self.is_global_zero else _empty_like(values, self.root_device)
            dist.broadcast(values, src=0)
            part = checkpoints.part_of(name, values, configs, size, rank)
            if part is not None:
                checkpoints.copy_into(mine[name], part)
        for buffer in module.buffers() if size == 1 else ():  # with tensor parallelism each part has created its own
            dist.broadcast(buffer, src=0)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def closure_and_sums():
            loss = closure()
            if self.tensor_parallel_size > 1:
                tensor_parallel.sum_gradients(self.lightning_module, self.mesh.tp.get_group())
            return loss

        return super().optimizer_step(optimizer, closure_and_sums, model, **kwargs)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Scale all gradients so that their norm over the whole model is at most clip_val."""
        parameters = [each for each in self.precision_plugin.main_params(optimizer) if each.grad is not None]
        if parameters:
            scale = (clip_val / (self._norm_of_gradients(parameters) + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_([_local(each.grad) for each in parameters], scale)

    def _norm_of_gradients(self, parameters: list[Tensor]) -> Tensor:
        """The norm of the gradients of all processes, counting each element once even if several have it."""
        norms = torch.stack(torch._foreach_norm([_local(each.grad) for each in parameters], 2, dtype=torch.float32))
        counts = [self.tensor_parallel_rank == 0 or not tensor_parallel.is_shared(each) for each in parameters]
        divided = [isinstance(each, DTensor) for each in parameters]  # over the processes of a copy
        own, parts = torch.tensor([counts, divided]).to(norms.device, non_blocking=True)
        squares = norms.double().square() * own
        divided, copied = (squares * parts).sum(), (squares * ~parts).sum()
        dist.all_reduce(divided, group=self.mesh.fsdp.get_group())
        total = divided + copied
        dist.all_reduce(total, group=self.mesh.tp.get_group())
        return total.sqrt().float()

    def teardown(self) -> None:
        allocate(self.lightning_module, "cpu")  # an error may have left meta tensors, which Lightning cannot move
        super().teardown()

    def _stored(self, name: str, prefix: str = checkpoints.WEIGHTS) -> str:
        """With a suffix for parts of layers: a part, such as that of Wqkv, need not be a slice of the whole."""
        part = f"{checkpoints.PART}{self.tensor_parallel_rank}" if self.tensor_parallel_size > 1 else ""
        return prefix + name + part

    def _description(self) -> dict[str, Any]:
        if self.tensor_parallel_size == 1:
            return super()._description()
        return super()._description() | {"models": {name: c.to_dict() for name, c in self._configs().items()}}

    def _redivided(self, checkpoint: checkpoints.Checkpoint) -> checkpoints.Redivided:
        size, rank = self.tensor_parallel_size, self.tensor_parallel_rank
        return checkpoints.Redivided(checkpoint, size, rank, self._configs() if size > 1 else {})

    def _configs(self) -> dict[str, Any]:
        """The configurations of the models that are divided, by the names of their modules."""
        return {name: each.config for name, each in tensor_parallel.models(self.lightning_module).items()}

    def _is_mine(self, name: str) -> bool:
        return self.tensor_parallel_size == 1 or name.endswith(f"{checkpoints.PART}{self.tensor_parallel_rank}")


class TensorParallelStrategy(MeshStrategy):
    """Each layer of a `flash_attn.models.gpt.GPTLMHeadModel` is divided over tensor_parallel_size processes.

    The other processes have copies of the parts, and read other samples; their gradients are averaged (DDP).
    """

    strategy_name = "tp"

    def distribute(self) -> None:
        self.model_to_device()
        if self.mesh.loss.size() > 1 and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._ddp_kwargs["process_group"] = self.mesh.loss.get_group()
            self.configure_ddp()


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Allocate on `device` the parts of a module that are on the meta device; their values are arbitrary."""
    for child in module.children():
        if any(parameter.is_meta for parameter in child.parameters()):
            child.to_empty(device=device)


def _empty_like(x, device):
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _unscale_together(unscale, *args):
    """GradScaler._unscale_grads_, which then reports infinities that any process has found."""
    found = unscale(*args)
    for each in found.values():
        dist.all_reduce(each, dist.ReduceOp.MAX)
    return found


def _local(x):
    return x.to_local() if isinstance(x, DTensor) else x
