"""Engines: how a model is run on one or more devices. Each is a strategy of Lightning with exact resume.

    trainer = L.Trainer(strategy=strategy("fsdp"), devices=8)
    trainer.fit(task, datamodule=data, ckpt_path=latest("checkpoints/run"))

| name | class | what each process has |
|---|---|---|
| single | SingleDeviceStrategy | the model |
| ddp | DDPStrategy | a copy |
| ddp_zero1 | DDPStrategyZero1 | a copy, and a share of the optimiser's states |
| ddp_zero2 | DDPStrategyZero2 | parts of parameters, gradients, states; whole layers from forward to backward |
| fsdp | FSDPStrategy | parts of parameters, gradients, states |
| tp | TensorParallelStrategy | a part of each layer |
"""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from src.engines.fsdp import FSDPStrategy, whole_on_first_process
from src.engines.mesh import TensorParallelStrategy
from src.engines.strategies import DDPStrategy, SingleDeviceStrategy
from src.utils.ddp_zero1 import DDPStrategyZero1
from src.utils.ddp_zero2 import DDPStrategyZero2
from src.utils.resolvers import device_count

__all__ = [
    "STRATEGIES", "DDPStrategy", "DDPStrategyZero1", "DDPStrategyZero2", "FSDPStrategy", "SingleDeviceStrategy",
    "TensorParallelStrategy", "strategy", "whole_on_first_process",
]  # fmt: skip

STRATEGIES = {
    each.strategy_name: each
    for each in (
        SingleDeviceStrategy, DDPStrategy, DDPStrategyZero1, DDPStrategyZero2, FSDPStrategy, TensorParallelStrategy,
    )
}  # fmt: skip


def strategy(
    name: str | None = "auto", accelerator: str = "auto", devices: Any = "auto", num_nodes: int = 1, **options: Any
) -> Strategy:
    """The strategy of this name, or for "auto" or None that of a trainer with these arguments.

    Arguments:
        name: one of the table above. "auto" is "single" for one device, else "ddp".
        accelerator, devices, num_nodes: as of lightning.Trainer.
        options: of the strategy's class.

    Raises ValueError for another name.
    """
    if name in (None, "auto"):
        name = "single" if num_nodes * device_count(devices, accelerator) == 1 else "ddp"
    if name == "single":
        return SingleDeviceStrategy(_first_device(accelerator, devices), **options)
    if name not in STRATEGIES:
        raise ValueError(f"trainer.strategy must be one of auto, {', '.join(STRATEGIES)}, found {name!r}")
    return STRATEGIES[name](**options)


def _first_device(accelerator, devices):
    if not (accelerator in ("gpu", "cuda") or (accelerator in (None, "auto") and torch.cuda.is_available())):
        return torch.device("cpu")
    if isinstance(devices, str) and "," in devices:
        devices = [int(each) for each in devices.split(",") if each]
    return torch.device("cuda", 0 if devices is None or isinstance(devices, int | str) else next(iter(devices)))
