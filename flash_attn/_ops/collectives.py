"""Collectives: sums of a tensor over processes, and collectives that divide tensors along their first dimension.

`gather_rows`, `scatter_rows` and `reduce` return (tensor, handle). With async_op the tensor must not be used before
handle.wait(). Without async_op, and in a graph of torch's compiler, the handle is None. They check no arguments,
because the compiler does not allow a backward of an autograd Function to read the layout of a tensor.

In a graph they are torch's functional collectives, which return new tensors. With collectives that write into an
argument, the compilers of torch 2.10 and 2.11 compute gradients of zero, without an error.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flash_attn._torch_private import functional_collectives

# The names of torch up to 2.12 are deprecated in 2.13.
all_gather_single: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))


def size(process_group: "dist.ProcessGroup") -> int:
    """Returns how many processes a group has. Layers ask in every call, and dist.get_world_size takes 2 us."""
    return process_group.size()


def gather_rows(x: Tensor, process_group: "dist.ProcessGroup", async_op: bool = False) -> tuple[Tensor, Any]:
    """Returns the x (rows, ...) of all processes, (world_size * rows, ...)."""
    if functional_collectives is not None and torch.compiler.is_compiling():
        return functional_collectives.all_gather_tensor(x.contiguous(), 0, process_group), None
    output = x.new_empty(size(process_group) * x.shape[0], *x.shape[1:])
    return output, all_gather_single(*_alone(output, x.contiguous()), group=process_group, async_op=async_op)


def gather_into(output: Tensor, x: Tensor, process_group: "dist.ProcessGroup") -> Any:
    """Start to write the x (rows, ...) of all processes to output (world_size * rows, ...). Returns the handle."""
    return all_gather_single(*_alone(output, x), group=process_group, async_op=True)


def scatter_into(output: Tensor, x: Tensor, process_group: "dist.ProcessGroup") -> Any:
    """Start to write this process's part of the sum of all x to output (rows, ...). Returns the handle."""
    return reduce_scatter_single(*_alone(output, x), group=process_group, async_op=True)


def scatter_rows(x: Tensor, process_group: "dist.ProcessGroup", async_op: bool = False) -> tuple[Tensor, Any]:
    """Returns this process's part (rows / world_size, ...) of the sum of all x (rows, ...)."""
    if functional_collectives is not None and torch.compiler.is_compiling():
        return functional_collectives.reduce_scatter_tensor(x.contiguous(), "sum", 0, process_group), None
    output = x.new_empty(x.shape[0] // size(process_group), *x.shape[1:])
    return output, reduce_scatter_single(*_alone(output, x.contiguous()), group=process_group, async_op=async_op)


def reduce(x: Tensor, process_group: "dist.ProcessGroup", async_op: bool = False) -> tuple[Tensor, Any]:
    """Returns the sum of all x. Outside of graphs it takes the place of x if that is contiguous."""
    if functional_collectives is not None and torch.compiler.is_compiling():
        return functional_collectives.all_reduce(x.contiguous(), "sum", process_group), None
    output = x.contiguous()
    return output, dist.all_reduce(_alone(output)[0], group=process_group, async_op=async_op)


def _alone(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors detached from their autograd graph.

    A thread of gloo may keep them for a moment after the collective. Their graph refers to the process group: if that
    thread held the last reference to the group while Python exits, the process would abort.
    """
    return [x.detach() for x in tensors]
