"""Meshes of processes, with one meaning for each dimension."""

from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flash_attn import _torch_private
from flash_attn._ops import checks
from flash_attn.utils.distributed import backends_of, device_of

_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp")
_TOGETHER = {
    "batch": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
}


class Meshes(NamedTuple):
    """A mesh of all processes, and meshes within it, of one dimension but for the last.

    whole: dimensions dp_replicate, dp_shard, cp, tp, from the outside to the inside; the next four are these.
    batch: dp_replicate x dp_shard, processes that read different rows of data; others read the same.
    fsdp: dp_shard x cp, over which parameters are divided: context parallelism needs no memory for them.
    loss: dp_replicate x dp_shard x cp, over which gradients are averaged: the loss_group of a `Plan`.
    hsdp: what `torch.distributed.fsdp.fully_shard` takes: fsdp, or with copies two dimensions, (dp_replicate, fsdp).
        Gradients are then reduced within a copy, where links are fast, and only their parts between copies (HSDP).

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.parallel import build_mesh
        >>> meshes = build_mesh()
        >>> meshes.whole.mesh_dim_names, meshes.fsdp.size()
        (('dp_replicate', 'dp_shard', 'cp', 'tp'), 1)
        >>> dist.destroy_process_group()
    """

    whole: DeviceMesh
    dp_replicate: DeviceMesh
    dp_shard: DeviceMesh
    cp: DeviceMesh
    tp: DeviceMesh
    batch: DeviceMesh
    fsdp: DeviceMesh
    loss: DeviceMesh
    hsdp: DeviceMesh


def build_mesh(
    dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, *, device_type: str | None = None
) -> Meshes:
    """Returns the meshes of a run. All processes must call it.

    Neighbouring ranks are in one tp group, then in one cp group: these send most. Transfers of NCCL over cp get streams
    of high priority, so that they are not late behind kernels that fill the GPU.

    Arguments:
        dp_replicate: copies of the parameters, each of which is divided over dp_shard x cp processes.
        dp_shard: parts of them, besides cp. -1: what is left.
        cp: ranks of a sequence.
        tp: parts of each layer.
        device_type: "cuda" or "cpu"; None: where the default group exchanges tensors.

    Raises:
        ValueError: the sizes are not those of the number of processes.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
        >>> build_mesh().fsdp.size()
        1
        >>> dist.destroy_process_group()
    """
    world_size = dist.get_world_size()
    others = 1
    for name, size in (("dp_replicate", dp_replicate), ("cp", cp), ("tp", tp)):
        others *= checks.count(name, size, 1)
    checks.integer("dp_shard", dp_shard)
    if dp_shard == -1:
        fits = world_size % others == 0
        checks.number("dp_replicate * cp * tp", others, fits, "a divisor of the number of processes, {}", world_size)
        dp_shard = world_size // others
    found = f"dp_replicate * dp_shard * cp * tp = {others * dp_shard}"
    if dp_shard < 1 or others * dp_shard != world_size:
        raise ValueError(f"the sizes must make the number of processes, {world_size}, found {found}")
    if device_type is None:
        device_type = device_of(cast(dist.ProcessGroup, dist.group.WORLD)).type
    override: Any = None
    if cp > 1 and device_type == "cuda" and backends_of().get("cuda") == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        override = {"cp": ("nccl", options)}
    shape = dp_replicate, dp_shard, cp, tp
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=_DIMENSIONS, backend_override=override)
    together = {name: _torch_private.flattened(mesh[dimensions], name) for name, dimensions in _TOGETHER.items()}
    copies, parts = mesh["dp_replicate"], together["fsdp"]
    together["hsdp"] = parts if dp_replicate == 1 else _torch_private.side_by_side(copies, parts)
    return Meshes(mesh, *(mesh[name] for name in _DIMENSIONS), **together)
