"""Tools for autograd Functions that have no second derivative."""

import functools
from collections.abc import Callable

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
