"""Ops on DTensors of torch.distributed.tensor: every process computes its part of the result from its parts.

A rule of an op gives names to the dimensions of its tensors, as an einsum does: `Layout(dict(x="rows cols",
weight="cols"), ("rows cols",), divides="rows")`. The dimensions in `divides` may be sharded, on each dimension of the
mesh by itself. All tensors with such a dimension must be sharded along it, and those without it be replicated. So are
the results, except those without it, such as the gradient of the weight: they are partial sums. Dimensions that differ
in size have names of their own; "heads+heads_k" in `divides` says that both are sharded together, in equal parts.

Nothing else is redistributed, except incoming gradients. What does not fit is refused.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn._errors import ArgumentError

_CLASSES: tuple[type, ...] = ()  # DTensor, once it has been imported
_ADVICE = "redistribute it, or call to_local() on every DTensor and compute with each process's own part"


class Layout(NamedTuple):
    """The dimensions of an op's tensors in one call.

    A name such as "a*b" is a dimension that holds those of both. Tensors that are not named must be replicated.
    """

    tensors: dict[str, str]  # an argument of the schema -> names of its dimensions, separated by spaces
    results: tuple[str | None, ...]  # the same for the results; None: an empty tensor
    divides: str  # names of dimensions that may be sharded, "+" between those that are sharded together
    anchor: str = ""  # the tensor whose placements the others must fit; by default the first one
    moves: str = ""  # names of tensors, incoming gradients, that are redistributed to fit
    is_linear: bool = False  # whether the results are partial sums if the anchor is
    # Changes the arguments of a process; is also given where its parts of the dimensions start.
    local: Callable[[dict[str, Any], dict[str, int]], None] | None = None


Rule = Callable[..., Layout]


def register(ops: Sequence[Any], arguments: Sequence[Any], differentiable: int, rule: Rule | None) -> None:
    """Let DTensors be arguments of these ops.

    ops: overloads of torch.ops with one schema. arguments: those of the schema. rule: how processes divide the work.
    differentiable: how many of the first arguments must be DTensors if one is. With no rule, all are refused.
    """
    from torch.distributed.tensor import DTensor

    global _CLASSES
    _CLASSES = (DTensor,)
    names = [argument.name for argument in arguments]
    for op in ops:
        call = functools.partial(_call, names, differentiable, rule)
        torch.library.register_torch_dispatch(op.name(), DTensor, call)


def is_distributed(x: Tensor) -> bool:
    """Whether `x` is a DTensor."""
    return isinstance(x, _CLASSES)


def _call(names, differentiable, rule, cls, op, types, args, kwargs):
    """The function that DTensor's dispatch calls for `op`."""
    from torch.distributed.tensor import DTensor

    if rule is None:
        raise NotImplementedError(
            f"{op.name()} is not defined for DTensors: call to_local() on each, and DTensor.from_local on the results"
        )
    layout = rule(*args)
    given = dict(zip(names, args, strict=False))
    dims = {name: layout.tensors.get(name, "").split() for name, x in given.items() if isinstance(x, Tensor)}
    anchor = given[layout.anchor or next(iter(layout.tensors))]
    for name in names[:differentiable]:
        if name in dims and not isinstance(given[name], DTensor):
            raise ArgumentError(f"{name} must be a DTensor like the others, found a {type(given[name]).__name__}")
    if not isinstance(anchor, DTensor):
        name = next(name for name in dims if isinstance(given[name], DTensor))
        raise ArgumentError(f"{name} must be a plain tensor as the others are, found a DTensor: call to_local() on it")
    mesh, divided = anchor.device_mesh, _divided(anchor, layout)
    sizes = _sizes(given, dims, divided, mesh)
    local = dict(given)
    with torch.no_grad():
        for name, letters in dims.items():
            placements = [_placement(letters, each) for each in divided]
            is_anchor = given[name] is anchor
            local[name] = _local(name, given[name], mesh, anchor.placements if is_anchor else placements, layout)
        if layout.local is not None:
            layout.local(local, {each: _start(each, divided, sizes, mesh) for each in sizes})
        results = op(*local.values())
    if results is None:
        return None
    wrapped = [
        _wrapped(x, letters, divided, sizes, mesh)
        for x, letters in zip(results if isinstance(results, tuple) else (results,), layout.results, strict=True)
    ]
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]


def _divided(anchor, layout):
    """For each dimension of the mesh, the name it divides (as in `Layout.divides`), None, or Partial for sums."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    name = layout.anchor or next(iter(layout.tensors))
    letters, found = layout.tensors[name].split(), []
    choices = {each: together for together in layout.divides.split() for each in _names(together)}
    for placement in anchor.placements:
        if type(placement) is Shard and letters[placement.dim % len(letters)] in choices:
            found.append(choices[letters[placement.dim % len(letters)]])
        elif type(placement) is Replicate:
            found.append(None)
        elif type(placement) is Partial and placement.reduce_op == "sum" and layout.is_linear:
            found.append(Partial)
        else:
            allowed = [f"Shard({i})" for i, each in enumerate(letters) if each in choices]
            raise ArgumentError(
                f"{name} must have placements {' or '.join([*allowed, 'Replicate()'])}, found {anchor.placements}: "
                f"{_ADVICE}"
            )
    return found


def _names(each):
    """The names of the dimensions that a dimension of the mesh divides; `each`: an item of what `_divided` returns."""
    return set(each.split("+")) if isinstance(each, str) else set()


def _placement(letters, each):
    """The placement of a tensor where a dimension of the mesh divides `each`."""
    from torch.distributed.tensor import Replicate, Shard

    places = [i for i, name in enumerate(letters) if _names(each) & set(name.split("*"))]
    return Shard(places[0]) if places else Replicate()


def _sizes(given, dims, divided, mesh):
    """The sizes of all named dimensions. Those that are divided together may differ if all parts are equally large."""
    sizes: dict[str, int] = {}
    firsts: dict[str, int] = {}
    for name, letters in dims.items():
        for each, size in zip(letters, given[name].shape):
            sizes.setdefault(each, size)
            together = next((other for other in divided if each in _names(other)), each)
            parts = math.prod(mesh.size(i) for i, other in enumerate(divided) if other == together)
            first = firsts.setdefault(together, size)
            if size != first and (size % parts or first % parts):
                raise ArgumentError(
                    f"{name} must have a multiple of {parts} {each}, as the mesh divides them, found {size} beside "
                    f"{first}: {_ADVICE}"
                )
    return sizes


def _local(name, x, mesh, placements, layout):
    """This process's part of `x`, which must have these placements, or moves to them."""
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(x, DTensor):
        if any(type(each) is not Replicate for each in placements):
            raise ArgumentError(
                f"{name} must be a DTensor with placements {tuple(placements)} like the others, found a "
                f"{type(x).__name__}: distribute it, or call to_local() on the others"
            )
        return x
    if x.device_mesh != mesh:
        raise ArgumentError(f"{name} must be on the mesh of the others, {mesh}, found {x.device_mesh}: {_ADVICE}")
    if tuple(x.placements) != tuple(placements):
        if name not in layout.moves.split():
            raise ArgumentError(
                f"{name} must have placements {tuple(placements)} to fit the others, found {x.placements}: {_ADVICE}"
            )
        x = x.redistribute(placements=placements)
    return x.to_local()


def _start(each, divided, sizes, mesh):
    """Where this process's part of a dimension starts."""
    start, size = 0, sizes[each]
    for i, other in enumerate(divided):
        if each in _names(other):
            part = -(-size // mesh.size(i))
            before = min(part * mesh.get_local_rank(i), size)
            start, size = start + before, min(part, size - before)
    return start


def _wrapped(x, letters, divided, sizes, mesh):
    """The DTensor of which `x` is this process's part; `letters`: names of its dimensions, None if it is empty."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if letters is None:
        return DTensor.from_local(x, mesh, [Replicate()] * len(divided), run_check=False)
    names, placements = letters.split(), []
    for each in divided:
        placement = _placement(names, each)
        is_sum = each is not None and type(placement) is Replicate
        placements.append(Partial() if is_sum else placement)
    shared = set().union(*map(_names, divided))
    shape = [
        math.prod(sizes[each] for each in name.split("*")) if shared & set(name.split("*")) else size
        for name, size in zip(names, x.shape, strict=True)
    ]
    stride, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=lambda i: (x.stride(i), -i)):  # in the order that the part has in memory
        stride[i], step = step, step * max(1, shape[i])
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))
