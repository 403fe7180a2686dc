"""Linear layers with activations, and gradients, in plain torch. Arguments as in `flash_attn._ops.fused_dense`."""

import torch
from torch.nn import functional

from flash_attn._reference import activation as activations


def fwd(x, weight, bias, activation, keep, heuristic):
    """Returns (out, kept)."""
    # With a matrix, torch adds the bias before it rounds; with more dimensions, the order depends on the strides.
    out = functional.linear(matrix(x), weight, bias).view(*x.shape[:-1], len(weight))
    if activation == "identity":
        return out, x.new_empty(0)
    act = activations.fwd(out, None, activation)
    return act, out if keep and activation != "relu" else x.new_empty(0)


def gated_fwd(x, weight, bias, activation):
    """Returns act(gate) * value of the halves (value, gate) of the layer's output."""
    return activations.gated_fwd(fwd(x, weight, bias, "identity", False, 0)[0], activation)


def dgrad(dout, weight, dresidual, kept, activation, bias_grad):
    """Returns (dx, dbias)."""
    dx = matrix(dout) @ weight if dresidual is None else torch.addmm(matrix(dresidual), matrix(dout), weight)
    if activation != "identity":
        dx, _ = activations.bwd(dx, matrix(kept), None, activation)
    dx = dx.reshape(*dout.shape[:-1], weight.shape[1])
    return dx, sum_of_rows(dx, bias_grad and activation != "identity")


def wgrad(dout, x, bias_grad):
    """Returns (dweight, dbias)."""
    return matrix(dout).T @ matrix(x), sum_of_rows(dout, bias_grad)


def sum_of_rows(x, wanted=True):
    """Returns the sum (cols,) of the rows of x (..., cols), or an empty tensor if it is not wanted."""
    return matrix(x).sum(0) if wanted else x.new_empty(0)


def matrix(x):
    """Returns x (..., cols) as (rows, cols)."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]
