"""A linear layer with an activation in one Triton kernel: the ops `linear_act_fwd` and `linear_act_dgrad`.

    linear_act_fwd(x, weight, bias, activation, keep) -> (out, act_input)
    linear_act_dgrad(dout, weight, act_input, activation) -> dx

x (..., in), weight (out, in), bias (out,) or None, dout (..., out), all of one dtype: fp16, bf16 or fp32

    out = act(act_input), act_input = x weight^T + bias, stored with keep       activation: one of ACTIVATIONS
    dx = (dout weight) * act'(act_input), act_input (..., in) of the previous layer, None for "id"

Sums are fp32. In the kernel, bias and activation are applied before any rounding. No gradient is recorded.
"""

import torch

from flash_attn import _library
from flash_attn._ops import checks, triton
from flash_attn._reference import linear_act as reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("id", "gelu", "gelu_approx", "squared_relu")


def check(names, x, weight, inner, activation):
    """Check a matrix (..., n), called names[0], and a weight with size n in its dimension `inner`.

    Returns the name of the activation as a plain string, since it may be a member of an enumeration.
    """
    checks.alike(names, (x, weight), dtypes=DTYPES)
    if x.dim() == 0:
        raise ValueError(f"{names[0]} must have at least one dimension (..., features), found shape ()")
    checks.has_shape(names[1], weight, (None, x.shape[-1]) if inner == 1 else (x.shape[-1], None))
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, found {activation!r}")
    return ACTIVATIONS[ACTIVATIONS.index(activation)]


def _fwd_fake(x, weight, bias, activation, keep):
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return out, torch.empty_like(out) if keep else x.new_empty(0)


fwd = _library.define(
    "linear_act_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, bool keep)"
    " -> (Tensor out, Tensor act_input)",
    reference=reference.fwd,
    fake=_fwd_fake,
    triton=triton.launch("linear_act", "fwd"),
)
dgrad = _library.define(
    "linear_act_dgrad(Tensor dout, Tensor weight, Tensor? act_input, str activation) -> Tensor",
    reference=reference.dgrad,
    fake=lambda dout, weight, *_: dout.new_empty(*dout.shape[:-1], weight.shape[1]),
    triton=triton.launch("linear_act", "dgrad"),
)
