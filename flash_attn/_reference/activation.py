"""Activations and their gradients in plain torch, with fp32 maths. Arguments as in `flash_attn._ops.activation`.

invariant: whether bits must not depend on the place of an element. On a CPU, torch's own gelu and silu compute the last
few elements of a tensor by other instructions than those before, and so the last few of each thread. Formulas of exp,
erf, tanh and arithmetic, which take their place, are several times slower.
"""

import math

import torch
from torch.nn import functional

_FWD = {
    "gelu_approx": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "sqrelu": lambda x: functional.relu(x).square(),
    "silu": functional.silu,
}


def _sigmoid(x):
    return 1 / (1 + x.neg().clamp(max=80).exp())  # whose square, in the derivative, is finite


_FORMULAS = _FWD | {
    "gelu": lambda x: 0.5 * x * (1 + (x * math.sqrt(0.5)).erf()),
    "gelu_approx": lambda x: 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))).tanh()),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
}
_BWD = {
    "gelu_approx": lambda dout, x: torch.ops.aten.gelu_backward(dout, x, approximate="tanh"),
    "relu": lambda dout, x: torch.where(x > 0, dout, 0),
    "sqrelu": lambda dout, x: 2 * dout * functional.relu(x),
    "silu": torch.ops.aten.silu_backward,
}


def fwd(x, y, activation, *, invariant=False):
    """act(x), or act(x) * y."""
    out = (_FORMULAS if invariant else _FWD)[activation](_wide(x))
    return _stored(out if y is None else out * _wide(y), x)


def bwd(dout, x, y, activation):
    """Returns (dx, dy); dy is empty without y."""
    wide = _wide(dout), _wide(x)
    if y is None:
        return _stored(_BWD[activation](*wide), x), x.new_empty(0)
    dx = _BWD[activation](wide[0] * _wide(y), wide[1])
    return _stored(dx, x), _stored(wide[0] * _FWD[activation](wide[1]), y)


def formula(activation, x):
    """act(x) by its formula, which autograd can differentiate, in the dtype of x."""
    return _FORMULAS[activation](_wide(x)).to(x.dtype)


def gated_fwd(x, activation, *, invariant=False):
    """act(gate) * value of the halves (value, gate) of x."""
    value, gate = x.chunk(2, dim=-1)
    return fwd(gate, value, activation, invariant=invariant)


def gated_bwd(dout, x, activation):
    """The gradient of x."""
    value, gate = x.chunk(2, dim=-1)
    dgate, dvalue = bwd(dout, gate, value, activation)
    return torch.cat([dvalue, dgate], dim=-1)


def _wide(x):
    return x if x.dtype == torch.float64 else x.float()


def _stored(result, x):
    """Returns result in the dtype of x and contiguous, whatever the strides of x are."""
    return result.to(x.dtype).contiguous()
