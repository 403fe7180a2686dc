"""ZeRO-2: gradients and the optimiser's states divided over the processes."""

from typing import Any

from src.engines.fsdp import FSDPStrategy


class DDPStrategyZero2(FSDPStrategy):
    """FSDP2 that keeps gathered parameters from the forward to the backward. Takes any optimiser.

    Arguments: those of `src.engines.FSDPStrategy` but reshard_after_forward.
    """

    strategy_name = "ddp_zero2"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(reshard_after_forward=False, **kwargs)
