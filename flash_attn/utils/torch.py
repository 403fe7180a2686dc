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
    """Returns `dec`, with device_type="cuda" if cuda_amp_deprecated is true, since torch.amp's decorators need it."""

    def decorator(*args: Any, **kwargs: Any) -> Any:
        if cuda_amp_deprecated:
            kwargs["device_type"] = "cuda"
        return dec(*args, **kwargs)

    return decorator


custom_fwd = custom_amp_decorator(torch.amp.custom_fwd, True)
custom_bwd = custom_amp_decorator(torch.amp.custom_bwd, True)
