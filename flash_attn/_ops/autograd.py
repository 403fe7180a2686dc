"""What autograd Functions without a second derivative share."""

import functools
from collections.abc import Callable

import torch


def once_differentiable(backward: Callable) -> Callable:
    """Make the results of the backward of an autograd Function have no derivative; asking for one is a RuntimeError.

    torch's decorator of this name refuses only where an incoming gradient has a history, as that of a plain sum has
    not. Otherwise it takes what the results owe to the saved tensors for constant, and says nothing.
    """

    @functools.wraps(backward)
    def wrapper(ctx, *grads):
        if not torch.is_grad_enabled():  # nobody will ask
            return backward(ctx, *grads)
        if torch.compiler.is_compiling():  # and compiled graphs have no second derivatives
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
    """The context of a backward, which remembers the saved tensors that were read: checkpoints hand them out once."""

    def __init__(self, ctx):
        self._ctx, self.read = ctx, ()

    @property
    def saved_tensors(self):
        self.read = self.read or self._ctx.saved_tensors
        return self.read

    def __getattr__(self, name):
        return getattr(self._ctx, name)


class _Refusing(torch.autograd.Function):
    """The first `count` tensors, or None, with a history that reaches all of the tensors and raises."""

    @staticmethod
    def forward(ctx, count, *tensors):
        return tuple(None if x is None else x.detach() for x in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: its gradient has no "
            "derivative of its own"
        )
