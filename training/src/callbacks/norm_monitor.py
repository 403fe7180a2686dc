"""The sizes of parameters and gradients."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from src.callbacks.loggers import is_logging_step, log_metrics, present_step


class NormMonitor(L.Callback):
    """Logs the size of each parameter of pl_module.model, and of its gradient, at logging steps.

    - `stats/{name}_max` and `stats/{name}_mean` are of the absolute values, `stats/{name}_grad_max` and
      `stats/{name}_grad_mean` those of the gradient, if there is one. Gradients are those of the whole batch, without a
      loss scale, before they are clipped.
    - `total_param_l1_norm` and `total_grad_l1_norm` are sums of absolute values.

    Where parameters are divided over processes (FSDP2), the values are those of whole parameters. They are computed on
    the device, with one collective for all of them, and read while it works on the next batch, so that no step waits.

    Arguments:
        layer_norm_only: only norms and embeddings.
    """

    def __init__(self, layer_norm_only: bool = False) -> None:
        self.layer_norm_only = layer_norm_only
        self._computed: tuple[int, list[str], Tensor, Any] | None = None  # step, names, values, event after their copy

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if is_logging_step(trainer):
            self._log(trainer)
            names, values = self.stats(pl_module.model)
            self._computed = present_step(trainer), names, values.to("cpu", non_blocking=True), _event(values.device)

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log(trainer)  # now that the device has the next batch to work on

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._log(trainer)

    def stats(self, model: nn.Module) -> tuple[list[str], Tensor]:
        """(names, values) of what is logged for a model; values float32, on the device of the parameters."""
        params = {
            f"{prefix}.{name}" if prefix else name: p
            for prefix, module in model.named_modules()
            if not self.layer_norm_only or isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
            for name, p in module.named_parameters(recurse=False)
        }
        params = dict(sorted((name, p) for name, p in params.items()))
        grads = {f"{name}_grad": p.grad for name, p in params.items() if p.grad is not None}
        tensors = {**params, **grads}
        if not tensors:
            return [], torch.zeros(0)
        totals, largest = _absolute(list(tensors.values()))
        sizes = torch.tensor([max(x.numel(), 1) for x in tensors.values()], dtype=torch.float32)
        means = totals / sizes.to(totals.device, non_blocking=True)
        sums = torch.stack([totals[: len(params)].sum(), totals[len(params) :].sum()])
        names = [f"stats/{name}_{kind}" for kind in ("max", "mean") for name in tensors]
        return [*names, "total_param_l1_norm", "total_grad_l1_norm"], torch.cat([largest, means, sums])

    def _log(self, trainer):
        """Log what was computed, if it is not logged yet."""
        if self._computed is not None:
            step, names, values, copied = self._computed
            self._computed = None
            if copied is not None:
                copied.synchronize()
            log_metrics(trainer, dict(sorted(zip(names, values.tolist(), strict=True))), step)


def _event(device):
    """An event after everything that this GPU has been given so far; None for the CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


@torch.no_grad()
def _absolute(tensors):
    """(sums, maxima) of the absolute values of each tensor, float32."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    local = [x if x.numel() else x.new_zeros(1) for x in local]  # a process may have no part of a small tensor
    sums = torch.stack(torch._foreach_norm(local, 1, dtype=torch.float32))
    maxima = torch.stack(torch._foreach_norm(local, float("inf"), dtype=torch.float32))
    for group, members in _shard_groups(tensors).items():
        index = torch.tensor(members).to(sums.device, non_blocking=True)
        for values, op in ((sums, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
            part = values[index]
            dist.all_reduce(part, op, group=group)
            values[index] = part
    return sums, maxima


def _shard_groups(tensors):
    """Which of the tensors are divided over the processes of each group."""
    groups = {}
    for i, x in enumerate(tensors):
        if isinstance(x, DTensor):
            for dim, placement in enumerate(x.placements):
                if isinstance(placement, Shard):
                    groups.setdefault(x.device_mesh.get_group(dim), []).append(i)
    return groups
