"""Small collectives that may also be called where there is only one process, and then do nothing.

if init_distributed(cuda=torch.cuda.is_available()):
    loss = all_reduce_item(loss, "mean")
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from flash_attn.utils.distributed import device_of

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no mean: the sum is divided afterwards
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def init_distributed(cuda: bool) -> bool:
    """Join the process group that the environment describes (as torchrun does), with NCCL if cuda, else gloo.

    Returns whether there is more than one process; with one, no group is made.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return False
    if not _in_group():
        dist.init_process_group("nccl" if cuda else "gloo")
    return True


def barrier() -> None:
    """Wait for all processes."""
    if _in_group():
        dist.barrier()


def get_rank() -> int:
    """The number of this process, 0 without a group."""
    return dist.get_rank() if _in_group() else 0


def get_world_size() -> int:
    """How many processes there are, 1 without a group."""
    return dist.get_world_size() if _in_group() else 1


def tensor_parallel_size(trainer: Any) -> int:
    """How many processes share a model and read the same samples; 1 except with strategies that divide layers."""
    return getattr(trainer.strategy, "tensor_parallel_size", 1)


def ranks_of_samples(trainer: Any) -> int:
    """How many processes read the same samples: those that share a model, or parts of each sample."""
    return tensor_parallel_size(trainer) * getattr(trainer.strategy, "context_parallel_size", 1)


def all_reduce_item(value: float, op: str = "sum") -> float:
    """The sum, mean, min, max or product of one number of each process. An int stays one, except for the mean.

    Raises ValueError for another op.
    """
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, found {op!r}")
    if not _in_group():
        return value
    dtype = torch.int64 if isinstance(value, int) else torch.float64
    tensor = torch.tensor(value, dtype=dtype, device=device_of(dist.group.WORLD))
    dist.all_reduce(tensor, _OPS[op])
    return tensor.item() / get_world_size() if op == "mean" else tensor.item()


@contextmanager
def sync_workers() -> Iterator[int]:
    """A block that gets the rank, and after which all processes wait for each other."""
    yield get_rank()
    barrier()


def _in_group():
    return dist.is_available() and dist.is_initialized()
