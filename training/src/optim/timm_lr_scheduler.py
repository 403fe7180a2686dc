"""The cosine schedule of timm, as a scheduler of PyTorch and without timm."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class TimmCosineLRScheduler(LRScheduler):
    """A linear warm-up, then half a cosine from lr to lr_min (Loshchilov and Hutter, arXiv:1608.03983).

    At step t, for a group whose learning rate is lr:

        t < warmup_t                 warmup_lr_init + t * (lr - warmup_lr_init) / warmup_t
        warmup_t <= t < t_initial    lr_min + (lr - lr_min) * (1 + cos(pi * t / t_initial)) / 2
        t_initial <= t               lr_min

    The cosine begins at t = 0, within the warm-up, unless warmup_prefix. lr_min is the same for all groups. The rates
    of step 0 are set at once. Arguments and values are those of timm's CosineLRScheduler without its noise.

    Arguments:
        optimizer: the lr of each of its groups is the one that is scheduled.
        t_initial: the length of the (first) cosine.
        lr_min: the rate at its end.
        cycle_mul, cycle_decay, cycle_limit: after a cosine comes another one, cycle_mul times as long and cycle_decay
            times as high, until there were cycle_limit.
        warmup_t: the length of the warm-up.
        warmup_lr_init: the rate at its beginning.
        warmup_prefix: the first cosine begins after the warm-up.
        t_in_epochs: whether times are in epochs. A step is what the caller makes it, so this only documents how step()
            has to be called (train.scheduler_interval).
        k_decay: the cosine is that of (t / t_initial) ** k_decay.

    Raises ValueError if t_initial is not positive.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        t_initial: int,
        lr_min: float = 0.0,
        cycle_mul: float = 1.0,
        cycle_decay: float = 1.0,
        cycle_limit: int = 1,
        warmup_t: int = 0,
        warmup_lr_init: float = 0.0,
        warmup_prefix: bool = False,
        t_in_epochs: bool = True,
        k_decay: float = 1.0,
    ) -> None:
        if t_initial <= 0:
            raise ValueError(f"t_initial must be positive, found {t_initial}")
        self.t_initial, self.lr_min = t_initial, lr_min
        self.cycle_mul, self.cycle_decay, self.cycle_limit = cycle_mul, cycle_decay, cycle_limit
        self.warmup_t, self.warmup_lr_init, self.warmup_prefix = warmup_t, warmup_lr_init, warmup_prefix
        self.t_in_epochs, self.k_decay = t_in_epochs, k_decay
        super().__init__(optimizer)

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step, or of step `epoch` if it is given."""
        if epoch is not None:
            self.last_epoch = epoch - 1
        super().step()

    def get_lr(self) -> list[float]:
        """The rates of the groups at step last_epoch."""
        t, start = self.last_epoch, self.warmup_lr_init
        if t < self.warmup_t:
            return [start + t * (lr - start) / self.warmup_t for lr in self.base_lrs]
        cycle, position = self._cycle(t - self.warmup_t if self.warmup_prefix else t)
        height = self.cycle_decay**cycle
        share = (1 + math.cos(math.pi * position**self.k_decay)) / 2
        return [self.lr_min + (lr * height - self.lr_min) * share for lr in self.base_lrs]

    def _cycle(self, t):
        """(number of the cosine at time t, share of it that is over)."""
        begin, length = 0, self.t_initial
        for cycle in range(self.cycle_limit):
            if t < begin + length:
                return cycle, (t - begin) / length
            begin, length = begin + length, length * self.cycle_mul
        return self.cycle_limit, 1.0  # the end of a cosine, where the rate is lr_min
