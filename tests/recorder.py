"""Which operations of torch run."""

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Notes the names of the ops that run, such as aten::mm."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function.name())
        return function(*args, **(kwargs or {}))
