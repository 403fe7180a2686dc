"""Parts of layers as DTensors, so that checkpoints know that they are parts."""

from typing import Any

import torch.distributed as dist
from torch import nn

from flash_attn.utils.distributed import host_group


def to_dtensor(model: nn.Module, tp_mesh: Any) -> nn.Module:
    """Make the parameters of tensor-parallel layers DTensors over `tp_mesh`, in place. Returns the model.

    Call it before `torch.distributed.fsdp.fully_shard` over another dimension of the mesh. Plain parameters train as
    well, but torch.distributed.checkpoint takes parts of the same name and shape on all ranks for copies: it stores
    those of the first rank, and gives them to all, without an error.

    The whole DTensor is the parts one after the other in the order of the ranks. For a Wqkv that is another order of
    rows than in a model that is not divided: see `flash_attn.models.gpt.combine_state_dicts_tp`. Parameters that all
    ranks have, such as norms, stay as they are, and so does the bias of a `RowParallelLinear`, which is the first
    rank's. Layers compute with each rank's own part, by calls of the layers where fused kernels took their weights.

    Arguments:
        model: with layers of `flash_attn.ops.fused_dense` and `flash_attn.modules.embedding` that are divided over
            the ranks of tp_mesh.
        tp_mesh: a DeviceMesh of one dimension.

    Raises:
        ValueError: on all ranks, if a layer is not divided evenly, which DTensors do not know in the same way.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from flash_attn.modules.mlp import ParallelMLP
        >>> from flash_attn.parallel import to_dtensor
        >>> mlp = ParallelMLP(64, process_group=dist.group.WORLD)
        >>> to_dtensor(mlp, init_device_mesh("cpu", (1,))).fc1.weight.placements
        (Shard(dim=0),)
        >>> dist.destroy_process_group()
    """
    from torch.distributed.tensor import DTensor, Shard

    divided = [
        (f"{path}.{name}" if path else name, module, name, dim)
        for path, module in model.named_modules()
        for name, dim in getattr(module, "divided_dims", {}).items()
        if getattr(module, name) is not None
    ]
    sizes: list[Any] = [None] * tp_mesh.size()
    own = {full: getattr(module, name).shape[dim] for full, module, name, dim in divided}
    dist.all_gather_object(sizes, own, group=host_group(tp_mesh.get_group()))
    for full, *_ in divided:
        found = [each.get(full) for each in sizes]
        if len(set(found)) > 1:
            raise ValueError(f"{full} must have parts of one size to be a DTensor, found {found}")
    made: dict[int, nn.Parameter] = {}  # a tied parameter stays one
    for _, module, name, dim in divided:
        part = getattr(module, name)
        if isinstance(part, DTensor):
            continue
        if id(part) not in made:
            whole = DTensor.from_local(part.detach(), tp_mesh, [Shard(dim)], run_check=False)
            made[id(part)] = nn.Parameter(whole, requires_grad=part.requires_grad)
            vars(made[id(part)]).update(vars(part))
        setattr(module, name, made[id(part)])
    return model
