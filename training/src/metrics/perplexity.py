"""Perplexity of a language model."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from src.metrics.mean import Mean


class Perplexity(Mean):
    """exp(mean negative log-likelihood of a token), over all batches and ranks.

    >>> metric = Perplexity()
    >>> metric(torch.zeros(6, 10), torch.arange(6))
    tensor(10.0000, dtype=torch.float64)

    The likelihoods are averaged over tokens, not perplexities over batches. Tokens whose label is `ignore_index` have
    no likelihood: they are in neither the sum nor the count.

    Arguments:
        ignore_index: the label of tokens that do not count.
        kwargs: of torchmetrics.Metric.
    """

    is_differentiable = True
    higher_is_better = False
    total_name = "total_log_probs"

    def __init__(self, ignore_index: int = -100, **kwargs: Any) -> None:
        super().__init__(torch.float64, **kwargs)
        self.ignore_index = ignore_index

    def sums(self, preds: Tensor, target: Tensor, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The negative log-likelihood of all tokens of a batch, and how many they are.

        Arguments:
            preds: logits (..., classes).
            target: labels (...).
            loss: the mean cross entropy of the tokens that count, if it is known; it is computed if None.
        """
        count = (target != self.ignore_index).sum()
        if loss is None:
            logits = preds.flatten(0, -2).float()
            total = F.cross_entropy(logits, target.flatten(), ignore_index=self.ignore_index, reduction="sum").double()
        else:
            total = torch.where(count > 0, loss.detach().double() * count, 0.0)  # the mean of no tokens is NaN
        return total, count

    def value(self, total: Tensor, count: Tensor) -> Tensor:
        return torch.exp(total / count)
