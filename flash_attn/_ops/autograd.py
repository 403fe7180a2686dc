"""Tools for autograd Functions that have no second derivative."""

import functools
from collections.abc import Callable, Sequence

import torch


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


def first_or_second(
    composite: Callable, first: Callable, incoming: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradients first(*incoming, *inputs) of a function, in such a way that they have derivatives, too.

    composite: the same function of `inputs` in operations that autograd knows; it is called only if a second derivative
        is asked for. Its results that `incoming` has None for have no gradient.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return first(*incoming, *inputs)
    return _Gradients.apply(composite, first, len(incoming), *incoming, *inputs)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, composite, first, count, *tensors):
        ctx.composite, ctx.count = composite, count
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(first(*tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *cotangents):
        with torch.enable_grad():
            leaves = [
                None if x is None else x.detach().requires_grad_(x.is_floating_point()) for x in ctx.saved_tensors
            ]
            incoming, inputs = leaves[: ctx.count], leaves[ctx.count :]
            results = [(y, dy) for y, dy in zip(ctx.composite(*inputs), incoming, strict=True) if dy is not None]
            wanted = [(x, c) for x, c in zip(inputs, cotangents, strict=True) if c is not None]
            grads = torch.autograd.grad(
                [y for y, _ in results], [x for x, _ in wanted], [dy for _, dy in results], create_graph=True,
                materialize_grads=True,
            )  # fmt: skip
        sources = [x for x in leaves if x is not None and x.requires_grad]
        found = iter(torch.autograd.grad(grads, sources, [c for _, c in wanted], allow_unused=True))
        return None, None, None, *(next(found) if x is not None and x.requires_grad else None for x in leaves)


class _Reading:
    """The context of a backward. It keeps the saved tensors that were read, since checkpoints return them only once."""

    def __init__(self, ctx):
        self._ctx, self.read = ctx, ()

    @property
    def saved_tensors(self):
        self.read = self.read or self._ctx.saved_tensors
        return self.read

    def __getattr__(self, name):
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """Returns the first `count` tensors (or None) with a history that leads to all tensors and raises when used."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: its gradient has no "
            "derivative of its own"
        )
