"""What our metrics share: they are a mean over all that was seen, kept as a sum and a count."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


class Mean(Metric, ABC):
    """A function of a sum over all batches and ranks, and of how many terms it has.

    Calling the metric gives its value for one batch. torchmetrics would compute that from a state of its own, which it
    resets and merges; here it comes from the sums that `update` has anyway, and no step waits for the device.
    """

    full_state_update = False
    total_name, count_name = "total", "count"  # of the states

    def __init__(self, total_dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state(self.total_name, torch.zeros((), dtype=total_dtype), dist_reduce_fx="sum")
        self.add_state(self.count_name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self._batch: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def sums(self, preds: Tensor, target: Tensor, loss: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(sum, count) of a batch."""

    @abstractmethod
    def value(self, total: Tensor, count: Tensor) -> Tensor:
        """What is reported for a sum and a count."""

    def update(self, preds: Tensor, target: Tensor, loss: Tensor | None = None) -> None:
        """Add a batch. The arguments are those of `sums`."""
        self._batch = self.sums(preds, target, loss)
        self.totals = tuple(total + of_batch for total, of_batch in zip(self.totals, self._batch))

    def compute(self) -> Tensor:
        """The value for all batches since the last reset."""
        return self.value(*self.totals)

    @property
    def totals(self) -> tuple[Tensor, Tensor]:
        """(sum, count) of all batches of this rank since the last reset; they can be set, and are never changed."""
        return getattr(self, self.total_name), getattr(self, self.count_name)

    @totals.setter
    def totals(self, totals: tuple[Tensor, Tensor]) -> None:
        for name, total, before in zip((self.total_name, self.count_name), totals, self.totals):
            setattr(self, name, total.to(before))

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """Sums keep their dtype where a model is put into 16 bits; else they would soon stop to grow."""
        return super()._apply(lambda x: fn(x).to(x.dtype), *args, **kwargs)

    def _forward_reduce_state_update(self, *args: Any, **kwargs: Any) -> Tensor:
        self.update(*args, **kwargs)
        return self.value(*self._batch)
