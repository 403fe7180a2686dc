"""Learning rates that transformers and PyTorch do not have in this form."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class InvSqrt(LRScheduler):
    """Rises to lr over num_warmup_steps, then falls as 1 / sqrt(step) (Vaswani et al., arXiv:1706.03762).

    At step t the rate is lr * t / num_warmup_steps during the warm-up, and lr * sqrt(num_warmup_steps / t) after it.
    Without a warm-up it is lr / sqrt(t), and lr at step 0.

    Arguments:
        optimizer: the lr of each of its groups is the one that is scheduled.
        num_warmup_steps: at least 0; otherwise ValueError.
        last_epoch: the step to go on from, -1 to begin.
    """

    def __init__(self, optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> None:
        if num_warmup_steps < 0:
            raise ValueError(f"num_warmup_steps must be at least 0, found {num_warmup_steps}")
        self.num_warmup_steps = num_warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:
        """The rates of the groups at step last_epoch."""
        t, warmup = self.last_epoch, self.num_warmup_steps
        factor = t / warmup if t < warmup else (max(warmup, 1) / max(t, 1)) ** 0.5
        return [lr * factor for lr in self.base_lrs]
