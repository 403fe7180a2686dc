"""The functions that configurations may call: ${mul:2,3}, ${div_up:7,2}, ${batch_for_memory:40,16,32,64,64} and so on.

register()                                   # before Hydra composes anything
attach_datamodule(datamodule)                # from now on ${datamodule:vocab_size} is its attribute
"""

import functools
import os
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

MEMORY_BOUNDS = (24, 40, 80)  # GB, between the device batches of `batch_for_memory`
MEMORY_WITHOUT_GPU = 80  # GB: the GPU that the experiments' batch sizes were chosen for


def mul(*factors: float) -> float:
    """The product, an int if all factors are."""
    return functools.reduce(lambda x, y: x * y, factors)


def div_up(x: int, y: int) -> int:
    """x / y, rounded up."""
    if y < 1:
        raise ValueError(f"div_up({x}, {y}): the divisor must be at least 1")
    return -(-x // y)


def batch_for_memory(memory: float, *batches: int) -> int:
    """The device batch of a GPU with `memory` GB: one of four, for GPUs below 24, 40, 80 GB and the others."""
    if len(batches) != len(MEMORY_BOUNDS) + 1:
        raise ValueError(f"batch_for_memory takes the memory and {len(MEMORY_BOUNDS) + 1} batches, found {batches}")
    return batches[sum(memory >= bound for bound in MEMORY_BOUNDS)]


@functools.cache
def gpu_mem() -> int:
    """Memory of GPU 0 in units of 1000 MiB, so that an 80 GB GPU has 81 or 82; 80 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return MEMORY_WITHOUT_GPU
    return round(torch.cuda.get_device_properties(0).total_memory / 2**20 / 1000)


def parsed_devices(devices: Any) -> int | list[int] | str:
    """trainer.devices as a number, as a list of indices of GPUs, or "auto", which is all GPUs, or one process on a CPU.

    Raises ValueError for what is none of them.
    """
    if devices in (None, "auto", "-1", -1):
        return "auto"
    found = devices
    if isinstance(devices, str):  # "4", or a list as "0,1"
        numbers = [int(each) if each.strip().isdecimal() else each for each in devices.rstrip(",").split(",")]
        found = numbers if "," in devices else numbers[0]
    if type(found) is int and found > 0:
        return found
    if isinstance(found, Sequence) and found and all(type(each) is int and each >= 0 for each in found):
        if len(set(found)) == len(found):
            return list(found)
    raise ValueError(
        "trainer.devices must be an integer of at least 1, a list of different indices of GPUs, or -1 or auto for all, "
        f"found {devices!r}"
    )


def device_count(devices: int | str | Sequence[int] | None, accelerator: str | None = "auto") -> int:
    """How many devices of a node trainer.devices stands for. Raises ValueError as `parsed_devices` does."""
    found = parsed_devices(devices)
    if isinstance(found, int):
        return found
    if isinstance(found, list):
        return len(found)
    import torch  # here, because it takes seconds, and mistyped names are found sooner

    return max(torch.cuda.device_count(), 1) if accelerator in ("auto", "gpu", "cuda", None) else 1


def more_than_one(x: int) -> bool:
    """Whether x > 1."""
    return x > 1


def run_folder(root: str, name: str | None, unnamed: str) -> str:
    """root/name of a run with a name, else `unnamed`."""
    return f"{root}/{name}" if name else unnamed


def _deferred(attribute: str) -> str:
    return f"${{datamodule:{attribute}}}"


_RESOLVERS: dict[str, Any] = {
    "mul": mul,
    "div_up": div_up,
    "batch_for_memory": batch_for_memory,
    "gpu_mem": gpu_mem,
    "device_count": device_count,
    "more_than_one": more_than_one,
    "run_folder": run_folder,
}


def register() -> None:
    """Make the resolvers known to OmegaConf. ${datamodule:x} stays as it is until there is a data module.

    ${start_folder:} is the working directory at this moment, which Hydra changes later and does not tell in a sweep.
    """
    for name, function in (_RESOLVERS | {"start_folder": functools.partial(str, os.getcwd())}).items():
        OmegaConf.register_new_resolver(name, function, replace=True)
    attach_datamodule(None)


def attach_datamodule(datamodule: Any | None) -> None:
    """Let ${datamodule:x} be the attribute x of this data module, or stay as it is if there is none."""
    attribute = _deferred if datamodule is None else functools.partial(getattr, datamodule)
    OmegaConf.register_new_resolver("datamodule", attribute, replace=True)
