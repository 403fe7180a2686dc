"""ZeRO-1: copies of the model, and the optimiser's states divided over the processes."""

from typing import Any

import lightning as L
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from src.engines.resume import unwrapped
from src.engines.strategies import DDPStrategy


def get_zero_optimizer_state_dict_local(optimizer: Optimizer, global_rank: int) -> dict[str, Any]:
    """The state dict of the parameters that this process updates; nothing is sent.

    Raises ValueError if optimizer is not a ZeroRedundancyOptimizer.
    """
    optimizer = unwrapped(optimizer)
    _check(optimizer)
    return optimizer.optim.state_dict()


class DDPStrategyZero1(DDPStrategy):
    """DDP whose optimiser is a ZeroRedundancyOptimizer (`optimizer=adamw-zero`).

    Each process keeps and saves the states of its share of the parameters; another number of processes can load them.
    Arguments: those of `src.engines.DDPStrategy`.
    """

    strategy_name = "ddp_zero1"

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            _check(unwrapped(optimizer))


def _check(optimizer):
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ValueError(
            "strategy ddp_zero1 needs a torch.distributed.optim.ZeroRedundancyOptimizer, as optimizer=adamw-zero "
            f"gives, found {type(optimizer).__name__}"
        )
