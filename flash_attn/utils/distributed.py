"""Collectives with autograd for tensor and sequence parallelism, and helpers for models that use them.

Tensors are divided along their first dimension, in the order of the ranks within the group.

    x = all_gather(x, group)           # (tokens / world_size, features) -> (tokens, features)
    y = reduce_scatter(y, group)       # sum over the processes, (tokens, features) -> (tokens / world_size, features)
    y = all_reduce(y, group)           # sum over the processes

A linear layer with divided output features gathers its input; a linear layer with divided input features reduces its
output (Megatron-LM, arXiv:1909.08053; with the tokens divided between such layers, arXiv:2205.05198). All functions
take every backend of torch.distributed that has the collective: NCCL on GPUs, gloo on the CPU. They must be called by
all processes of the group in the same order and with the same shapes.
"""

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from flash_attn import _torch_private
from flash_attn._ops import checks, collectives


def all_gather_raw(
    input_: Tensor, process_group: ProcessGroup, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Concatenate the input_ (rows, ...) of all processes to (world_size * rows, ...), without gradient.

    process_group: the processes. Returns (tensor, handle). With async_op the tensor must not be used before
    handle.wait(). Without it, and in a graph of torch's compiler, the handle is None.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import all_gather_raw
        >>> x, handle = all_gather_raw(torch.ones(2, 3), dist.group.WORLD, async_op=True)
        >>> _ = handle.wait()
        >>> x.shape
        torch.Size([2, 3])
        >>> dist.destroy_process_group()
    """
    _check_rows(input_)
    return collectives.gather_rows(input_, process_group, async_op)


def reduce_scatter_raw(
    input_: Tensor, process_group: ProcessGroup, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Sum the input_ (rows, ...) of all processes and keep this one's part (rows / world_size, ...), without gradient.

    Returns (tensor, handle) as `all_gather_raw` does. Raises ValueError if the processes cannot share the rows evenly.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import reduce_scatter_raw
        >>> x, handle = reduce_scatter_raw(torch.ones(8, 3), dist.group.WORLD)
        >>> x.shape
        torch.Size([8, 3])
        >>> dist.destroy_process_group()
    """
    _check_rows_of(process_group, input_)
    return collectives.scatter_rows(input_, process_group, async_op)


def all_reduce_raw(
    input_: Tensor, process_group: ProcessGroup, async_op: bool = False
) -> tuple[Tensor, dist.Work | None]:
    """Sum the input_ of all processes, without gradient: in place if input_ is contiguous, else in a copy.

    In a graph of torch's compiler the sum is always a new tensor. Returns (tensor, handle) as `all_gather_raw` does.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import all_reduce_raw
        >>> x, handle = all_reduce_raw(torch.ones(3), dist.group.WORLD, async_op=True)
        >>> _ = handle.wait()
        >>> x
        tensor([1., 1., 1.])
        >>> dist.destroy_process_group()
    """
    checks.tensor("input_", input_)
    return collectives.reduce(input_, process_group, async_op)


class AllGatherFunc(torch.autograd.Function):
    """The autograd function of `all_gather`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import AllGatherFunc
        >>> AllGatherFunc.apply(torch.ones(2, 3), dist.group.WORLD).shape  # on 4 processes (8, 3)
        torch.Size([2, 3])
        >>> dist.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        """As `all_gather`."""
        ctx.process_group = process_group
        return collectives.gather_rows(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The sum of all processes' gradients for the rows of this one."""
        return ReduceScatterFunc.apply(grad_output, ctx.process_group), None


class ReduceScatterFunc(torch.autograd.Function):
    """The autograd function of `reduce_scatter`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import ReduceScatterFunc
        >>> ReduceScatterFunc.apply(torch.ones(4, 3), dist.group.WORLD).shape  # on 4 processes (1, 3)
        torch.Size([4, 3])
        >>> dist.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        """As `reduce_scatter`."""
        ctx.process_group = process_group
        return collectives.scatter_rows(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The gradients of the parts of all processes, one after the other."""
        return AllGatherFunc.apply(grad_output, ctx.process_group), None


class AllReduceFunc(torch.autograd.Function):
    """The autograd function of `all_reduce`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import AllReduceFunc
        >>> AllReduceFunc.apply(torch.ones(2), dist.group.WORLD)  # on 4 processes fours
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        """As `all_reduce`."""
        if _may_be_overwritten(input_):
            ctx.mark_dirty(input_)
        elif not torch.compiler.is_compiling():  # in a graph the sum is a new tensor anyway
            input_ = input_.clone(memory_format=torch.contiguous_format)
        ctx.process_group = process_group
        return collectives.reduce(input_, process_group)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The gradient, unchanged; each process uses it for its own part of the sum."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grad_output = ReplicatedFunc.apply(grad_output, ctx.process_group)
        return grad_output, None


class ReplicatedFunc(torch.autograd.Function):
    """The autograd function of `replicated`, and the gradient of `all_reduce`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import ReplicatedFunc
        >>> x = torch.ones(2, requires_grad=True)
        >>> ReplicatedFunc.apply(x, dist.group.WORLD).sum().backward()
        >>> x.grad  # on 4 processes fours
        tensor([1., 1.])
        >>> dist.destroy_process_group()
    """

    @staticmethod
    def forward(ctx: Any, input_: Tensor, process_group: ProcessGroup) -> Tensor:
        """As `replicated`."""
        ctx.process_group = process_group
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The sum of all processes' gradients."""
        own = grad_output.clone(
            memory_format=torch.contiguous_format
        )  # the sum is in place, and others may use the incoming gradient
        return AllReduceFunc.apply(own, ctx.process_group), None


def all_gather(input_: Tensor, process_group: ProcessGroup) -> Tensor:
    """Concatenate the input_ (rows, ...) of all processes to (world_size * rows, ...).

    process_group: the processes. The gradient is the sum of all processes' gradients for the rows of this one.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import all_gather
        >>> all_gather(torch.ones(2, 3), dist.group.WORLD).shape  # on 4 processes (8, 3)
        torch.Size([2, 3])
        >>> dist.destroy_process_group()
    """
    _check_rows(input_)
    return AllGatherFunc.apply(input_, process_group)


def reduce_scatter(input_: Tensor, process_group: ProcessGroup) -> Tensor:
    """Sum the input_ (rows, ...) of all processes and keep this one's part, (rows / world_size, ...).

    process_group: the processes. The gradient concatenates the gradients of all parts. Raises ValueError if the rows
    cannot be divided evenly.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import reduce_scatter
        >>> reduce_scatter(torch.ones(8, 3), dist.group.WORLD).shape  # on 4 processes (2, 3)
        torch.Size([8, 3])
        >>> dist.destroy_process_group()
    """
    _check_rows_of(process_group, input_)
    return ReduceScatterFunc.apply(input_, process_group)


def all_reduce(input_: Tensor, process_group: ProcessGroup) -> Tensor:
    """Sum the input_ of all processes of process_group.

    Use the returned tensor afterwards: it may share the memory of input_.

    The gradient passes unchanged: all processes compute the same from the sum, so each already has the whole gradient.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import all_reduce
        >>> all_reduce(torch.ones(3), dist.group.WORLD)  # on 4 processes 4
        tensor([1., 1., 1.])
        >>> dist.destroy_process_group()
    """
    checks.tensor("input_", input_)
    return AllReduceFunc.apply(input_, process_group)


def replicated(input_: Tensor, process_group: ProcessGroup) -> Tensor:
    """Returns input_, which is the same in all processes of process_group, each of which computes with it a part.

    Its gradient is the sum of all processes' gradients.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import replicated
        >>> replicated(torch.ones(3), dist.group.WORLD)
        tensor([1., 1., 1.])
        >>> dist.destroy_process_group()
    """
    checks.tensor("input_", input_)
    return ReplicatedFunc.apply(input_, process_group)


def sync_shared_params(model: torch.nn.Module, process_group: ProcessGroup) -> None:
    """Copy parameters with a true attribute `_shared_params` from the first process to all others.

    process_group: all processes that have the model. The parameters are sent in the order of their names, since the
    other parameters may differ between processes. The attribute of a module applies to its own parameters, not to its
    submodules. With a group that only sends between GPUs (NCCL), the parameters of a model that is still on the CPU are
    copied through the GPU, one at a time.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import sync_shared_params
        >>> model = torch.nn.Linear(4, 4)
        >>> model.bias._shared_params = True
        >>> sync_shared_params(model, dist.group.WORLD)  # all processes have the first one's bias
        >>> dist.destroy_process_group()
    """
    only_gpus = "cpu" not in backends_of(process_group)
    for _, parameter in _tagged(model, "_shared_params"):
        with torch.no_grad():
            sent = parameter.cuda() if only_gpus else parameter
            dist.broadcast(sent, group=process_group, group_src=0)
            parameter.copy_(sent)


def allreduce_sequence_parallel_grad(model: torch.nn.Module, process_group: ProcessGroup) -> None:
    """Sum the gradients of a model's parameters that have a true attribute `_sequence_parallel` over process_group.

    Norms between sequence-parallel layers see only this process's tokens, so each process has a part of their gradient.
    Call it after backward and before the optimizer's step; it writes to the gradients. The attribute of a module
    applies to its own parameters, not to its submodules. There is one all-reduce for each dtype. Raises ValueError,
    before anything is sent, if one of the parameters has no gradient.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import allreduce_sequence_parallel_grad
        >>> norm = torch.nn.LayerNorm(4)
        >>> norm._sequence_parallel = True
        >>> norm(torch.randn(10, 4)).sum().backward()
        >>> allreduce_sequence_parallel_grad(norm, dist.group.WORLD)
        >>> dist.destroy_process_group()
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for name, parameter in _tagged(model, "_sequence_parallel"):
        if parameter.grad is None:
            raise ValueError(f"{name} must have a gradient before it can be summed, found None")
        by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=process_group)
        parts = flat.split([grad.numel() for grad in grads])
        _torch_private.copy_each(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])


def get_dim_for_local_rank(dim: int, world_size: int, local_rank: int, multiple_of: int = 1) -> int:
    """Returns the share of dim that process local_rank of world_size has, in multiples of multiple_of.

    The first processes may have one more.

    >>> from flash_attn.utils.distributed import get_dim_for_local_rank
    >>> [get_dim_for_local_rank(96, world_size=4, local_rank=rank, multiple_of=16) for rank in range(4)]
    [32, 32, 16, 16]
    """
    for name, value in (("dim", dim), ("world_size", world_size), ("multiple_of", multiple_of)):
        checks.integer(name, value)
    checks.number("multiple_of", multiple_of, multiple_of > 0, "positive")
    checks.number("dim", dim, dim >= 0 and dim % multiple_of == 0, "a multiple of {}", multiple_of)
    checks.integer("local_rank", local_rank)
    checks.number("local_rank", local_rank, 0 <= local_rank < world_size, "from 0 to {}", world_size - 1)
    units, rest = divmod(dim // multiple_of, world_size)
    return (units + (local_rank < rest)) * multiple_of


def _tagged(model, tag):
    """Returns (name, parameter) of parameters with a true attribute `tag`, or in a module with it, sorted by name."""

    def is_tagged(name, parameter):
        owner = model.get_submodule(name.rpartition(".")[0])
        return getattr(parameter, tag, False) or getattr(owner, tag, False)

    return sorted(item for item in model.named_parameters() if is_tagged(*item))


def _may_be_overwritten(x):
    """Returns whether a sum may overwrite `x`: not in a graph, and not if x is a leaf or a view that requires grad."""
    if torch.compiler.is_compiling() or not x.is_contiguous():
        return False
    return not (x.requires_grad and (x.is_leaf or _torch_private.is_view(x)))


def _check_rows(x):
    checks.tensor("input_", x)
    checks.number("the number of dimensions of input_", x.dim(), x.dim() > 0, "at least 1")


def _check_rows_of(process_group, x):
    """Check that the processes of the group can share the rows of x evenly."""
    _check_rows(x)
    world_size = collectives.size(process_group)
    fits = x.shape[0] % world_size == 0
    checks.number("input_.shape[0]", x.shape[0], fits, "divisible by the {} processes", world_size)


_HOST_GROUPS: "weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup]" = weakref.WeakKeyDictionary()


def host_group(process_group: ProcessGroup) -> ProcessGroup:
    """Returns a group of the same processes that exchanges tensors on the CPU: process_group itself if it can.

    The first call for another group must be made by all its processes: it makes one with gloo, which is kept.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import host_group
        >>> host_group(dist.group.WORLD) is dist.group.WORLD  # as gloo exchanges tensors on the CPU
        True
        >>> dist.destroy_process_group()
    """
    if "cpu" in backends_of(process_group):
        return process_group
    if process_group not in _HOST_GROUPS:
        ranks = dist.get_process_group_ranks(process_group)
        _HOST_GROUPS[process_group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _HOST_GROUPS[process_group]


def device_of(process_group: ProcessGroup) -> torch.device:
    """Returns where process_group exchanges tensors: on the CPU with gloo alone, else on the current GPU.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import device_of
        >>> device_of(dist.group.WORLD)
        device(type='cpu')
        >>> dist.destroy_process_group()
    """
    if backends_of(process_group).get("cuda", "gloo") != "gloo" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def backends_of(process_group: ProcessGroup | None = None) -> dict[str, str]:
    """Returns the backend of each type of device: {"cpu": "gloo", "cuda": "nccl"}. None: of the default group.

    The name of a group's backend does not tell: it is "undefined" for one that was made without a name.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.utils.distributed import backends_of
        >>> backends_of()["cpu"]
        'gloo'
        >>> dist.destroy_process_group()
    """
    return dict(each.split(":") for each in dist.get_backend_config(process_group).split(","))
