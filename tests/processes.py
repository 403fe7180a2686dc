"""Several processes that form a group of torch.distributed, for tests of what runs in parallel."""

import pathlib
import tempfile
import warnings

import torch
import torch.distributed as dist


def over_processes(world, target, *args, backend="gloo"):
    """Call target(group, *args) in each of `world` processes; what one of them raises is raised here.

    target is a function at the top level of its module. With backend "nccl", process i has GPU i.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "group")
        torch.multiprocessing.spawn(_run, (file, world, backend, target, args), nprocs=world)


def _run(rank, file, world, backend, target, args):
    torch.set_num_threads(1)
    warnings.filterwarnings("error", "`torch.distributed", FutureWarning)  # old names of collectives
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    try:
        target(dist.group.WORLD, *args)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def half_of(group):
    """The group of the first half of the processes, or of the second, whichever has this one."""
    ranks = torch.arange(dist.get_world_size(group)).chunk(2)
    halves = [dist.new_group(half.tolist()) for half in ranks]
    return halves[dist.get_rank(group) // len(ranks[0])]
