"""Hooks with which DistributedDataParallel sends gradients in 16 bits.

    model.register_comm_hook(None, bfloat16_compress_hook)        # or ddp_comm_hook of Lightning's DDPStrategy

Gradients are divided by the number of ranks while they are cast, and then summed. PyTorch's hooks cast first, so that
large gradients become infinite in fp16. DDP takes the name bf16_compress_hook for PyTorch's own, hence the other name.
"""

import torch
import torch.distributed as dist
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future


def fp16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """The mean of a bucket of gradients over the ranks, sent as fp16. process_group: all ranks if None."""
    return _mean_in(torch.float16, process_group, bucket)


def bfloat16_compress_hook(process_group: ProcessGroup | None, bucket: GradBucket) -> Future[torch.Tensor]:
    """The mean of a bucket of gradients over the ranks, sent as bf16. process_group: all ranks if None."""
    return _mean_in(torch.bfloat16, process_group, bucket)


def _mean_in(dtype, process_group, bucket):
    group = dist.group.WORLD if process_group is None else process_group
    buffer = bucket.buffer()
    compressed = torch.empty_like(buffer, dtype=dtype)
    torch.div(buffer, dist.get_world_size(group), out=compressed)  # divides in the buffer's dtype, then rounds
    work = dist.all_reduce(compressed, group=group, async_op=True)
    return work.get_future().then(lambda future: buffer.copy_(future.value()[0]))
