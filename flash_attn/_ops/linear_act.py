"""A linear layer with an activation, in one Triton kernel or by cuBLASLt: the ops `linear_act_fwd`, `linear_act_dgrad`.

    linear_act_fwd(x, weight, bias, activation, keep) -> (out, act_input)
    linear_act_dgrad(dout, weight, act_input, activation) -> dx

`forward` and `backward` have the same arguments and results. They call these ops only where those of fused_dense cannot
replace them (see is_for_cublaslt), since cuBLASLt's products are faster than the Triton kernel.

x (..., in), weight (out, in), bias (out,) or None, dout (..., out), all of one dtype: fp16, bf16 or fp32

    out = act(act_input), act_input = x weight^T + bias, stored with keep       activation: one of ACTIVATIONS
    dx = (dout weight) * act'(act_input), act_input (..., in) of the previous layer, None for "id"

Sums are fp32. In the Triton kernel, bias and activation are applied before any rounding. cuBLASLt may round before it
adds the bias, and act_input is rounded before a kernel of its own computes the activation, as it does for all but
gelu_approx forward. No gradient is recorded.
"""

import torch
from torch.nn import functional

from flash_attn import _library
from flash_attn._ops import checks, flops, fused_dense, invariance, linear, triton
from flash_attn._reference import linear_act as reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ACTIVATIONS = ("id", "gelu", "gelu_approx", "squared_relu")
_IN_FUSED_DENSE = {"gelu_approx": "gelu_approx", "squared_relu": "sqrelu"}  # names of activations there
_HAS_CUBLASLT = all(_library.has_kernel(name) for name in ("fused_dense_fwd", "fused_dense_dgrad"))


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


def is_for_cublaslt(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether the ops of fused_dense compute a product with `weight` here, and need no copy to transpose it."""
    return (
        _HAS_CUBLASLT
        and _library.is_where_kernels_run(x)
        and x.dtype in fused_dense.FUSED_DTYPES
        and x.stride(-1) == weight.stride(-1) == 1
    )


def forward(x, weight, bias, activation, keep):
    """Returns (out, act_input)."""
    if invariance.level() == 2:
        act_input = linear.fwd(x, weight, bias)
        return reference.activate(act_input, activation), act_input if keep else x.new_empty(0)
    if not is_for_cublaslt(x, weight):
        return fwd(x, weight, bias, activation, keep)
    if activation in _IN_FUSED_DENSE:
        return fused_dense.fwd(x, weight, bias, _IN_FUSED_DENSE[activation], keep, 0)
    act_input, nothing = fused_dense.fwd(x, weight, bias, "identity", False, 0)
    if activation == "gelu":
        out = functional.gelu(act_input) if keep else torch.ops.aten.gelu_(act_input)
    else:
        out = act_input.clone() if keep else act_input
    return out, act_input if keep else nothing


def backward(dout, weight, act_input, activation):
    """Returns dx."""
    if not is_for_cublaslt(dout, weight):
        return dgrad(dout, weight, act_input, activation)
    if activation != "id":
        act_input = act_input.reshape(*dout.shape[:-1], weight.shape[1])
    if activation in _IN_FUSED_DENSE:
        return fused_dense.dgrad(dout, weight, None, act_input, _IN_FUSED_DENSE[activation], False)[0]
    dx, _ = fused_dense.dgrad(dout, weight, None, None, "identity", False)
    return torch.ops.aten.gelu_backward(dx, act_input) if activation == "gelu" else dx


def _fwd_fake(x, weight, bias, activation, keep):
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return out, torch.empty_like(out) if keep else x.new_empty(0)


fwd = _library.define(
    "linear_act_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, bool keep)"
    " -> (Tensor out, Tensor act_input)",
    reference=reference.fwd,
    fake=_fwd_fake,
    triton=triton.launch("linear_act", "fwd"),
    flops=flops.linear_fwd,
)
dgrad = _library.define(
    "linear_act_dgrad(Tensor dout, Tensor weight, Tensor? act_input, str activation) -> Tensor",
    reference=reference.dgrad,
    fake=lambda dout, weight, *_: dout.new_empty(*dout.shape[:-1], weight.shape[1]),
    triton=triton.launch("linear_act", "dgrad"),
    flops=flops.linear_dgrad,
)
