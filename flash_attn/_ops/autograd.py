"""Tools for the second derivatives of autograd Functions, or for refusing them."""

import functools
from collections.abc import Callable, Sequence

import torch

from flash_attn import _library, _torch_private


def once_differentiable(backward: Callable) -> Callable:
    """Decorate the backward of an autograd Function so that a second derivative raises RuntimeError.

    torch's decorator of this name raises only if an incoming gradient has a history; the gradient of a plain sum has
    none. Without a history torch treats the saved tensors as constants, and second derivatives are silently wrong.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():  # no second derivative can be asked for
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():  # compiled graphs have no second derivatives
            with torch.no_grad():
                return backward(ctx, *grads)
        reading = _Reading(ctx)
        with torch.no_grad():
            results = backward(reading, *grads)
        results = results if isinstance(results, tuple) else (results,)
        origins = [x for x in (*grads, *reading.read) if isinstance(x, torch.Tensor) and x.requires_grad]
        return _Refusing.apply(len(results), *results, *origins) if origins else results

    return wrapper


def first_or_second(first: Callable, again: Callable, *tensors: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """Returns the gradients first(*tensors), with a history, so that they can be differentiated in their turn.

    tensors: all that the gradients depend on, with their history: incoming gradients and saved tensors.
    again: the same function in operations that autograd knows; it is called only if a second derivative is asked for.
    """
    if not torch.is_grad_enabled():
        return first(*tensors)
    if torch.compiler.is_compiling():  # compiled graphs have no second derivatives
        with torch.no_grad():
            return first(*tensors)
    return _Gradients.apply(first, again, *tensors)


def gradients_of(composite: Callable, count: int) -> Callable:
    """Returns a differentiable function (*incoming, *inputs) -> the gradients of composite(*inputs) for its inputs.

    incoming: the `count` gradients of the results of composite, None for a result that has none. An input that requires
    no gradient gets None.
    """

    def gradients(*tensors):
        incoming, inputs = tensors[:count], tensors[count:]
        results = [(y, dy) for y, dy in zip(composite(*inputs), incoming, strict=True) if dy is not None]
        wanted = [x for x in inputs if x is not None and x.requires_grad]
        found = iter(
            torch.autograd.grad(
                [y for y, _ in results], wanted, [dy for _, dy in results], create_graph=True, materialize_grads=True
            )
        )
        return [next(found) if x is not None and x.requires_grad else None for x in inputs]

    return gradients


def in_plain_torch(function: Callable) -> Callable:
    """Returns `function`, made of torch's operations, without autocast. On a GPU it warns once that it is slow."""

    def wrapper(*args):  # without functools.wraps, since each backward makes one
        x = next(x for x in args if isinstance(x, torch.Tensor))
        if _library.is_where_kernels_run(x):
            _library.warn_once(
                "flash_attn: layers run as operations of plain torch, slower than the kernels, for a second "
                "derivative, a tangent or a transform of torch.func"
            )
        with _library.without_autocast(x):
            return function(*args)

    return wrapper


def is_transformed(*tensors: torch.Tensor | None) -> bool:
    """Whether forward mode or a transform of torch.func works on the tensors, so that it needs torch's own operations.

    `Op` asks by itself; a function that calls `apply` of an autograd Function must ask first.
    """
    return not torch.compiler.is_compiling() and _library.is_transformed(tensors)


def is_saved_alone() -> bool:
    """In a forward: whether what it saves is kept as it is, for its own backward only: see `may_overwrite_saved`."""
    return not torch.compiler.is_compiling() and not _torch_private.saved_tensors_have_hooks()


def may_overwrite_saved(*incoming: torch.Tensor) -> bool:
    """In a backward: whether tensors that were saved alone have no other use after it, and gradients are plain."""
    return (
        not torch.compiler.is_compiling()
        and not _torch_private.keeps_graph()
        and not is_transformed(*incoming)
        and not any(map(_torch_private.is_legacy_batch, incoming))
    )


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, first, again, *tensors):
        ctx.again = again
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(first(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents):
        needed = ctx.needs_input_grad[2:]
        leaves = [
            None if x is None else x.detach().requires_grad_(needs)
            for x, needs in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            grads = ctx.again(*leaves)
        wanted = [
            (x, c)
            for x, c in zip(grads, cotangents, strict=True)
            if c is not None and x is not None and x.requires_grad
        ]
        sources = [x for x, needs in zip(leaves, needed, strict=True) if needs]
        if not wanted:
            return (None,) * (2 + len(leaves))
        found = iter(torch.autograd.grad([x for x, _ in wanted], sources, [c for _, c in wanted], allow_unused=True))
        return None, None, *(next(found) if needs else None for needs in needed)


class _Reading:
    """The ctx of a backward. It keeps saved tensors once read, since activation checkpoints give them only once."""

    def __init__(self, ctx):
        self._ctx, self.read = ctx, ()

    @property
    def saved_tensors(self):
        self.read = self.read or self._ctx.saved_tensors
        return self.read

    def __getattr__(self, name):
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """The first `count` tensors (or None), with a history that leads to all tensors and whose backward raises."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: its gradient has no "
            "derivative of its own"
        )
