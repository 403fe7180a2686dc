"""Decorators of autograd Functions that follow autocast on GPUs.

class Dense(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, weight): ...

    @staticmethod
    @custom_bwd
    def backward(ctx, grad): ...
"""

from collections.abc import Callable
from typing import Any

import torch


def custom_amp_decorator(dec: Callable, cuda_amp_deprecated: bool) -> Callable:
    """Returns `dec`, with device_type="cuda" if cuda_amp_deprecated is true, since torch.amp's decorators need it.

    Example:
        >>> from flash_attn.utils.torch import custom_amp_decorator
        >>> custom_fwd = custom_amp_decorator(torch.amp.custom_fwd, cuda_amp_deprecated=True)
    """

    def decorator(*args: Any, **kwargs: Any) -> Any:
        if cuda_amp_deprecated:
            kwargs["device_type"] = "cuda"
        return dec(*args, **kwargs)

    return decorator


custom_fwd = custom_amp_decorator(torch.amp.custom_fwd, True)
custom_bwd = custom_amp_decorator(torch.amp.custom_bwd, True)

_DOC = """`torch.amp.{}` for GPUs: decorates the {} of an autograd Function.

Example:
    >>> from flash_attn.utils.torch import custom_bwd, custom_fwd
    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     @custom_fwd
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...
    ...     @staticmethod
    ...     @custom_bwd
    ...     def backward(ctx, grad):
    ...         return 2 * grad
    >>> Double.apply(torch.ones(2))
    tensor([2., 2.])
"""
custom_fwd.__doc__, custom_bwd.__doc__ = _DOC.format("custom_fwd", "forward"), _DOC.format("custom_bwd", "backward")
