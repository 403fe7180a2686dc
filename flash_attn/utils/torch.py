"""Decorators of autograd Functions that follow autocast on GPUs.

class Dense(torch.autograd.Function):
    @staticmethod
    @custom_fwd
    def forward(ctx, x, weight): ...

    @staticmethod
    @custom_bwd
    def backward(ctx, grad): ...
"""

import torch


def custom_amp_decorator(dec, cuda_amp_deprecated):
    """`dec`, which takes device_type="cuda" if cuda_amp_deprecated: that is, if it is one of torch.amp."""

    def decorator(*args, **kwargs):
        if cuda_amp_deprecated:
            kwargs["device_type"] = "cuda"
        return dec(*args, **kwargs)

    return decorator


custom_fwd = custom_amp_decorator(torch.amp.custom_fwd, True)
custom_bwd = custom_amp_decorator(torch.amp.custom_bwd, True)
