"""When a kernel may stand for the call of a layer.

A fused function computes with the parameters of a layer and does not call it. What others have added to the call would
be lost silently: hooks, adapters, parametrizations, parameters that are gathered or fetched for the call. So
every place that computes with another module's parameters asks `may_fuse` first, and calls the module if the answer is
no. This is no slower path that the caller should hear of: the call is what was asked for. Nothing is logged.
"""

from torch import Tensor, nn

from flash_attn._torch_private import PLAIN_TENSORS, has_hooks, own_parameters


def may_fuse(layer: nn.Module, classes: tuple[type[nn.Module], ...], x: Tensor, *, hooks_of_all: bool = True) -> bool:
    """Whether computing with the parameters of `layer` does all that calling it with `x` would do.

    classes: those whose forward the caller computes. The class must be one of them: a class that derives from one may
        compute something else, and wrappers, parametrizations and FSDP2 put such a class in the place of another.
    hooks_of_all: whether hooks for all modules, as a counter of FLOPs registers, are a reason to call the layer. They
        are none where the user gives the function that computes with the parameters.

    The layer must also have no hooks, no `forward` of its own and no compiled call; and its parameters must be plain
    tensors on the device of x.

    It takes 1 us. In a compiled graph it takes nothing: the graph is made for the answer, and guarded like a call of
    the layer. So torch.compile does not see hooks that are registered after it, whether or not layers are fused.
    """
    if type(layer) not in classes or has_hooks(layer, hooks_of_all) or "forward" in vars(layer):
        return False
    for parameter in own_parameters(layer):
        if parameter is not None and (type(parameter) not in PLAIN_TENSORS or parameter.device != x.device):
            return False
    return True


def is_plain(x: Tensor) -> bool:
    """Whether `x` is no subclass of a tensor, such as a DTensor or a quantized weight, that ops would have to know."""
    return type(x) in PLAIN_TENSORS
