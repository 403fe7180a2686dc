"""Metrics of a training epoch that go on where a run that is resumed was interrupted."""

from typing import Any, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import MetricCollection

from src.metrics.mean import Mean
from src.metrics.num_tokens import NumTokens
from src.utils.distributed import tensor_parallel_size


class EpochTotals:
    """What the metrics of a training epoch have added up to, in the checkpoints of a run.

    A checkpoint has the state after a step of the optimiser: it is taken then or, where a run has failed, some batches
    later, which a run that goes on takes again. So what the metrics have is noted at each step. To note it costs
    nothing: it is tensors that no update changes. Metrics that are neither a `Mean` nor `NumTokens` begin with the rest
    of the epoch.

    Arguments:
        metrics: of the training.
        prefix: of their names in the state dict of the task.
    """

    def __init__(self, metrics: MetricCollection, prefix: str) -> None:
        metrics = dict(metrics.items(keep_base=True))
        self._means = {name: each for name, each in metrics.items() if isinstance(each, Mean)}
        self._counts = {f"{prefix}.{name}.count": each for name, each in metrics.items() if isinstance(each, NumTokens)}
        self._at_step: dict[int, _Totals] = {}
        self._restored: dict[str, list[float]] = {}

    def note(self, step: int) -> None:
        """Note what the metrics have before the optimiser takes its step of this number."""
        before = {number: totals for number, totals in self._at_step.items() if number == step - 1}
        means = {name: each.totals for name, each in self._means.items()}
        self._at_step = before | {step: _Totals(means, {name: each.count for name, each in self._counts.items()})}

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Put the totals over all ranks into a checkpoint, but for those of an epoch that is over. For all ranks."""
        noted = self._at_step.get(trainer.global_step)
        if noted is None:
            return
        checkpoint["state_dict"] |= noted.counts
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.processed < trainer.num_training_batches:
            copies = tensor_parallel_size(trainer)  # ranks that share a model have the same batches
            totals = {name: [_over_ranks(each) / copies for each in both] for name, both in noted.means.items()}
            checkpoint["train_totals"] = totals

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Take over what `save` has put into a checkpoint, when the training begins."""
        self._restored = checkpoint.get("train_totals", {})

    def begin(self, trainer: L.Trainer) -> None:
        """Go on from what was loaded: as the totals of the first rank, or of those that share a model with it."""
        first = trainer.global_rank < tensor_parallel_size(trainer)
        for name, totals in self._restored.items():
            if name in self._means and first:
                self._means[name].totals = tuple(torch.tensor(each, dtype=torch.float64) for each in totals)
        self._restored = {}
        self.note(trainer.global_step)


class _Totals(NamedTuple):
    means: dict[str, tuple[Tensor, Tensor]]  # (sum, count) of the batches of this rank
    counts: dict[str, Tensor]


def _over_ranks(x: Any) -> float:
    total = x.double()  # exact for counts up to 2^53
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()
