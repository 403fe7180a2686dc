"""Engines: how a model is run on one or more devices. Each is a strategy of Lightning with exact resume.

    trainer = L.Trainer(strategy=strategy("fsdp"), devices=8)
    trainer.fit(task, datamodule=data, ckpt_path=latest("checkpoints/run"))

| name | class | what each process has |
|---|---|---|
| single | SingleDeviceStrategy | the model |
| ddp | DDPStrategy | a copy |
| ddp_zero1 | DDPStrategyZero1 | a copy, and a share of the optimiser's states |
| ddp_zero2 | DDPStrategyZero2 | parts of parameters, gradients, states; whole layers from forward to backward |
| fsdp | FSDPStrategy | as ddp_zero2 or, above an eighth of a GPU's memory, whole layers only while they compute |
| tp | TensorParallelStrategy | a part of each layer |
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from hydra.utils import get_class
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only

from src.engines.fsdp import FSDPStrategy
from src.engines.mesh import MeshStrategy, TensorParallelStrategy
from src.engines.strategies import DDPStrategy, SingleDeviceStrategy
from src.utils.ddp_zero1 import DDPStrategyZero1
from src.utils.ddp_zero2 import DDPStrategyZero2
from src.utils.resolvers import device_count, parsed_devices

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "DDPStrategyZero1",
    "DDPStrategyZero2",
    "FSDPStrategy",
    "MeshStrategy",
    "SingleDeviceStrategy",
    "TensorParallelStrategy",
    "strategy",
    "whole_on_first_process",
]

STRATEGIES = {
    each.strategy_name: each
    for each in (
        SingleDeviceStrategy,
        DDPStrategy,
        DDPStrategyZero1,
        DDPStrategyZero2,
        FSDPStrategy,
        TensorParallelStrategy,
    )
}


def strategy(
    name: str | None = "auto", accelerator: str = "auto", devices: Any = "auto", num_nodes: int = 1, **options: Any
) -> Strategy:
    """The strategy of this name, or for "auto" or None that of a trainer with these arguments.

    Arguments:
        name: one of the table above. "auto" is "single" for one device, else "ddp".
        accelerator, devices, num_nodes: as in lightning.Trainer.
        options: arguments of the strategy's class.

    Raises ValueError for any other name.
    """
    if name in (None, "auto"):
        name = "single" if num_nodes * device_count(devices, accelerator) == 1 else "ddp"
    if name == "single":
        return SingleDeviceStrategy(_first_device(accelerator, devices), **options)
    if name not in STRATEGIES:
        raise ValueError(f"trainer.strategy must be one of auto, {', '.join(STRATEGIES)}, found {name!r}")
    return STRATEGIES[name](**options)


def whole_on_first_process(trainer: Mapping[str, Any]) -> contextlib.AbstractContextManager:
    """A block in which to create a model. If the strategy of a trainer's options divides models, the first process
    creates it with the weights of a run on one device with the same seed, and all others on the meta device.

    With any other strategy the block changes nothing.
    """
    options = trainer.get("strategy")
    kind = get_class(options["_target_"]) if isinstance(options, Mapping) else STRATEGIES.get(options)
    divides = kind is not None and issubclass(kind, MeshStrategy)
    return torch.device("meta") if divides and rank_zero_only.rank != 0 else contextlib.nullcontext()


def _first_device(accelerator, devices):
    if not (accelerator in ("gpu", "cuda") or (accelerator in (None, "auto") and torch.cuda.is_available())):
        return torch.device("cpu")
    indices = parsed_devices(devices)
    return torch.device("cuda", indices[0] if isinstance(indices, list) else 0)
