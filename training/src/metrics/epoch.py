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
    """Keeps the totals of a training epoch's metrics in the checkpoints, so that a resumed run goes on from them.

    A checkpoint has the state after a step of the optimiser. Where a run has failed, it is written some batches after
    that step, and the resumed run repeats these batches; to count them once, the totals are noted at each step. That
    costs nothing: metrics replace their tensors instead of changing them, so a reference is enough. Metrics that are
    neither a `Mean` nor `NumTokens` start anew in the rest of the epoch.

    Arguments:
        metrics: the metrics of the training.
        prefix: what their names in the task's state dict begin with, without the dot.
    """

    def __init__(self, metrics: MetricCollection, prefix: str) -> None:
        metrics = dict(metrics.items(keep_base=True))
        self._means = {name: each for name, each in metrics.items() if isinstance(each, Mean)}
        self._counts = {f"{prefix}.{name}.count": each for name, each in metrics.items() if isinstance(each, NumTokens)}
        self._at_step: dict[int, _Totals] = {}
        self._restored: dict[str, list[float]] = {}

    def note(self, step: int) -> None:
        """Note what the metrics have before the optimiser takes step number `step`."""
        before = {number: totals for number, totals in self._at_step.items() if number == step - 1}
        means = {name: each.totals for name, each in self._means.items()}
        self._at_step = before | {step: _Totals(means, {name: each.count for name, each in self._counts.items()})}

    def save(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        """Put the totals over all ranks into a checkpoint, unless the epoch is over. To be called on all ranks."""
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
        """Go on from what was loaded: on the first rank, or those that share a model with it. Others begin at 0."""
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
    total = x.to(torch.float64, copy=True)  # exact for counts up to 2^53; all_reduce overwrites it
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()
