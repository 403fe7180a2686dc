"""ZeRO-2: gradients and the optimiser's states divided over the processes."""

from typing import Any

from src.engines.fsdp import FSDPStrategy


class DDPStrategyZero2(FSDPStrategy):
    """FSDP2 that keeps gathered parameters from the forward to the backward. Takes any optimiser.

    Arguments: those of `src.engines.FSDPStrategy`, of which reshard_after_forward must be false.
    """

    strategy_name = "ddp_zero2"

    def __init__(self, reshard_after_forward: bool = False, **kwargs: Any) -> None:
        if reshard_after_forward is not False:
            raise ValueError(
                "trainer.strategy.reshard_after_forward must be false with strategy=zero2, found "
                f"{reshard_after_forward!r}: strategy=fsdp has the choice"
            )
        super().__init__(reshard_after_forward=False, **kwargs)
