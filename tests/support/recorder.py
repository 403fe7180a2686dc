"""Which operations of torch run, and which kernels."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Notes the names of the ops that run, such as aten::mm."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function.name())
        return function(*args, **(kwargs or {}))


def kernels_of(fn):
    """Names of what fn() has the GPU do."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]
