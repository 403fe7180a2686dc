"""Linear layers with activations, and their gradients, in plain torch. Arguments as in `flash_attn._ops.fused_dense`."""

import torch
from torch.nn import functional

from flash_attn._reference import activation as activations


def fwd(x, weight, bias, activation, keep, heuristic):
    """Returns (out, kept)."""
    out = functional.linear(x, weight, bias)
    if activation == "identity":
        return out, x.new_empty(0)
    act = activations.fwd(out, None, activation)
    if not keep:
        return act, x.new_empty(0)
    return act, _pack(out > 0) if keeps_bits(activation, heuristic, *weight.shape) else out


def dgrad(dout, weight, dresidual, kept, activation, bias_grad, heuristic):
    """Returns (dx, dbias)."""
    rows = dout.reshape(-1, weight.shape[0])
    residual = None if dresidual is None else dresidual.reshape(-1, weight.shape[1])
    dx = rows @ weight if residual is None else torch.addmm(residual, rows, weight)
    if kept is not None and kept.dtype == torch.uint8:
        dx = dx * _unpack(kept.reshape(len(dx), -1))
    elif kept is not None:
        dx, _ = activations.bwd(dx, kept.reshape(dx.shape), None, activation)
    dbias = dx.sum(0) if bias_grad else dx.new_empty(0)
    return dx.reshape(*dout.shape[:-1], weight.shape[1]), dbias


def wgrad(dout, x, bias_grad):
    """Returns (dweight, dbias)."""
    rows = dout.reshape(-1, dout.shape[-1])
    dbias = rows.sum(0) if bias_grad else rows.new_empty(0)
    return rows.T @ x.reshape(-1, x.shape[-1]), dbias


def keeps_bits(activation, heuristic, out_features, in_features):
    """Whether what relu keeps for its gradient are bits: what a kernel of cuBLASLt can store and read."""
    return activation == "relu" and heuristic >= 0 and in_features % 8 == 0 and out_features % 128 == 0


def _pack(positive):
    """Booleans (..., n) as bits (..., n / 8), the first of each eight lowest."""
    bits = positive.unflatten(-1, (-1, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8, device=positive.device)
    return bits.sum(-1, dtype=torch.uint8)


def _unpack(bits):
    return (bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(-2)
