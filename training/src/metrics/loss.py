"""The loss that is trained, as a metric."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.metrics.mean import Mean


class MeanLoss(Mean):
    """The loss, averaged over samples, batches and ranks. Samples with the label -100 do not count.

    Calling it gives the loss of a batch: that of this rank, or, while `over_ranks` is true, the mean over the ranks.
    """

    is_differentiable = True
    higher_is_better = False

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.over_ranks = False

    def sums(self, preds: Tensor | None, target: Tensor, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """loss, the mean of a batch, times the number of its targets, and this number."""
        count = (target != -100).sum() if target.dim() == 1 else torch.full((), len(target), device=loss.device)
        return torch.where(count > 0, loss.detach().double() * count, 0.0), count  # the mean of no targets is NaN

    def _forward_reduce_state_update(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super()._forward_reduce_state_update(*args, **kwargs)
        if self.over_ranks and dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss

    def value(self, total: Tensor, count: Tensor) -> Tensor:
        return total / count
