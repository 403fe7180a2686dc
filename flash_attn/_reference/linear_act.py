"""Linear layers with an activation in plain torch, with fp32 maths between. Arguments as in `_ops.linear_act`."""

import torch
from torch.nn import functional

from flash_attn._reference import activation as activations
from flash_attn._reference.fused_dense import matrix

_FWD = {
    "id": torch.clone,  # the results are two tensors
    "gelu": functional.gelu,
    "gelu_approx": lambda x: functional.gelu(x, approximate="tanh"),
    "squared_relu": lambda x: functional.relu(x).square(),
}
_FORMULAS = {"gelu": "gelu", "gelu_approx": "gelu_approx", "squared_relu": "sqrelu"}  # their names in activation.py
_BWD = {
    "gelu": torch.ops.aten.gelu_backward,
    "gelu_approx": lambda dout, x: torch.ops.aten.gelu_backward(dout, x, approximate="tanh"),
    "squared_relu": lambda dout, x: 2 * dout * functional.relu(x),
}


def fwd(x, weight, bias, activation, keep):
    """Returns (out, act_input)."""
    act_input = functional.linear(x, weight, bias)
    out = _FWD[activation](act_input.float()).to(x.dtype)
    return out, act_input if keep else x.new_empty(0)


def activate(act_input, activation):
    """act(act_input) with bits that do not depend on the place of an element; a tensor of its own."""
    return act_input.clone() if activation == "id" else activations.formula(_FORMULAS[activation], act_input)


def dgrad(dout, weight, act_input, activation):
    """Returns dx."""
    dx = matrix(dout) @ weight
    if activation != "id":
        dx = _BWD[activation](dx.float(), matrix(act_input).float()).to(dout.dtype)
    return dx.reshape(*dout.shape[:-1], weight.shape[1])
