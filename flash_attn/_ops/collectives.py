"""Collectives of one tensor, and those that divide tensors along their first dimension.

`all_gather` and `reduce_scatter` are what this torch calls them: 2.13 has new names, and its compiler knows both. They
are None where torch was built without torch.distributed.

The others return (tensor, handle), whose handle is None without async_op, and check nothing: in the backward of an
autograd Function torch's compiler allows no look at a tensor's layout.
"""

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
reduce_scatter = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))


def gather_rows(x, process_group, async_op=False):
    """The x (rows, ...) of all processes, (world_size * rows, ...)."""
    output = x.new_empty(dist.get_world_size(process_group) * x.shape[0], *x.shape[1:])
    return output, all_gather(output, x.contiguous(), group=process_group, async_op=async_op)


def scatter_rows(x, process_group, async_op=False):
    """This process's part (rows / world_size, ...) of the sum of all x (rows, ...)."""
    output = x.new_empty(x.shape[0] // dist.get_world_size(process_group), *x.shape[1:])
    return output, reduce_scatter(output, x.contiguous(), group=process_group, async_op=async_op)


def reduce(x, process_group, async_op=False):
    """The sum of all x, in place if x is contiguous."""
    output = x.contiguous()
    return output, dist.all_reduce(output, group=process_group, async_op=async_op)
