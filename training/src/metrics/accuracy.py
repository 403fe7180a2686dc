"""Accuracy of a classifier."""

from typing import Any

import torch
from torch import Tensor

from src.metrics.mean import Mean


class AccuracyMine(Mean):
    """The share of samples whose label is among the top_k classes with the highest scores.

    >>> metric = AccuracyMine(top_k=2)
    >>> metric(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]))
    tensor(0.5000)

    Arguments:
        top_k: how many classes may be named.
        ignore_index: the label of samples that do not count; None for none.
        kwargs: of torchmetrics.Metric.
    """

    higher_is_better = True
    total_name = "correct"

    def __init__(self, top_k: int = 1, ignore_index: int | None = -100, **kwargs: Any) -> None:
        super().__init__(torch.int64, **kwargs)
        self.top_k, self.ignore_index = top_k, ignore_index

    def sums(self, preds: Tensor, target: Tensor, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """How many samples of a batch are right, and how many there are.

        Arguments:
            preds: scores (batch, classes, ...).
            target: labels (batch, ...), or probabilities (batch, classes, ...) as mixup makes them, of which the
                largest counts.
            loss: not used; language models pass it to all metrics.

        Raises ValueError if the shapes do not fit.
        """
        if target.is_floating_point():
            target = target.argmax(dim=1)
        if preds.shape[:1] + preds.shape[2:] != target.shape:
            raise ValueError(
                "preds must have shape (batch, classes, ...) and target (batch, ...), "
                f"found {tuple(preds.shape)} and {tuple(target.shape)}"
            )
        chosen = preds.argmax(dim=1, keepdim=True) if self.top_k == 1 else preds.topk(self.top_k, dim=1).indices
        right = (chosen == target.unsqueeze(1)).any(dim=1)
        counts = torch.ones_like(right) if self.ignore_index is None else target != self.ignore_index
        return (right & counts).sum(), counts.sum()

    def value(self, total: Tensor, count: Tensor) -> Tensor:
        return total / count
