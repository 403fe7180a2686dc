"""How many tokens a model has been trained on."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from src.utils.distributed import get_world_size


class NumTokens(Metric):
    """Counts the tokens of all ranks since the run began: over epochs, and over restarts, as checkpoints have it.

    Each rank counts its own tokens times the number of models, and the ranks' counts are averaged. So what one rank
    saves is the count of all of them (they train on batches of one size), and another number of ranks can go on with
    it. The average is exact even when the ranks have seen unequal numbers of tokens.

    Attributes:
        copies: how many ranks share a model, and so have the same tokens, which count once. The task sets it.
        goes_on: whether the count goes on after an epoch; False after `of_each_epoch`.
    """

    full_state_update = False
    copies = 1
    goes_on = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx=_mean, persistent=True)

    def update(self, preds: Tensor | None, target: Tensor, loss: Tensor | None = None) -> None:
        """Count the elements of target that are not -100. preds and loss are not used."""
        models = get_world_size() // self.copies
        self.count = self.count.to(target.device) + (target != -100).sum() * models  # a checkpoint's is on the CPU

    def compute(self) -> Tensor:
        """The number of tokens, int64."""
        return self.count

    def of_each_epoch(self) -> None:
        """Count each epoch alone, and leave the count out of checkpoints: so it is for validation and test."""
        self.goes_on = False
        self.persistent(False)

    def reset(self) -> None:
        """Start a new epoch."""
        count = self.count
        super().reset()
        if self.goes_on:
            self.count = count

    def _forward_reduce_state_update(self, *args: Any, **kwargs: Any) -> Tensor:
        self.update(*args, **kwargs)
        return self.count


def _mean(counts):
    """The mean of int64 counts (ranks,), which torch has for floating-point numbers only."""
    return counts.sum(dim=0) // len(counts)
