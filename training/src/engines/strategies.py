"""The ways to run a model: on one device, and copied to many with the gradients averaged."""

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy as LightningSingleDeviceStrategy

from src.engines.resume import ExactResume


class SingleDeviceStrategy(ExactResume, LightningSingleDeviceStrategy):
    """One process, on a GPU if there is one and the trainer's accelerator does not say otherwise."""

    strategy_name = "single"


class DDPStrategy(ExactResume, LightningDDPStrategy):
    """Each process has the whole model and reads its own samples; gradients are averaged.

    Arguments: those of Lightning's DDPStrategy, and of DistributedDataParallel. ddp_comm_hook may be one of
    `src.distributed.ddp_comm_hooks`; it takes effect on GPUs.
    """

    strategy_name = "ddp"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        defaults = {"find_unused_parameters": False, "gradient_as_bucket_view": True}
        super().__init__(*args, **(defaults | kwargs))
