"""Activations, gated or not: the ops `activation_fwd`, `activation_bwd`, `gated_fwd` and `gated_bwd`.

    activation_fwd(x, y, activation) -> act(x), or act(x) * y
    activation_bwd(dout, x, y, activation) -> (dout * act'(x), empty), or (dout * act'(x) * y, dout * act(x))

    gated_fwd(x, activation) -> act(gate) * value
    gated_bwd(dout, x, activation) -> dx

Here (value, gate) are the two halves of x along its last dimension. So the gradient of x is one tensor.

x, y, dout   of one shape and dtype (except the halves): fp32, fp16 or bf16, any strides; y may be None
activation   gelu_approx: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2      silu: x / (1 + exp(-x))
             relu: max(x, 0), with derivative 0 at 0                             sqrelu: max(x, 0)^2

The maths is in fp32. The ops are differentiable in x and y, twice.
"""

import torch

from flash_attn import _library
from flash_attn._ops import autograd, checks, invariance, sharding
from flash_attn._reference import activation as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def activate(x, y, activation, names=("x", "y")):
    """Check the tensors, called `names`, and apply the activation."""
    if y is None:
        checks.tensor(names[0], x, dtypes=DTYPES)
    else:
        checks.alike(names, (x, y), dtypes=DTYPES)
        checks.has_shape(names[1], y, tuple(x.shape))
    return fwd(x, y, activation)


def activate_gate(x, activation, name="x"):
    """Check x (..., 2 * features), called `name`, and return its first half times the activation of its second half."""
    checks.tensor(name, x, dtypes=DTYPES)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{name} must have shape (..., 2 * features), found {tuple(x.shape)}")
    return gated_fwd(x, activation)


def differentiate(dout, x, y, activation, names=("g", "x", "y")):
    """Check the tensors and return (dx, dy); dy is None without y. dout may have another dtype than x."""
    checks.tensor(names[1], x, dtypes=DTYPES)
    checks.tensor(names[0], dout, dtypes=DTYPES, shape=tuple(x.shape), device=x.device)
    if y is not None:
        checks.tensor(names[2], y, dtypes=(x.dtype,), shape=tuple(x.shape), device=x.device)
    with torch.no_grad():
        dx, dy = bwd(dout.to(x.dtype), x, y, activation)
    return dx, None if y is None else dy


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, rest):
        (ctx.activation,) = rest
        ctx.save_for_backward(x, y)
        return fwd(x, y, ctx.activation)

    @staticmethod
    def backward(ctx, dout):
        x, y = ctx.saved_tensors
        activation = ctx.activation

        def first(dout, x, y):
            return bwd(dout, x, y, activation)

        def again(x, y):
            return (_plain_fwd(x, y, activation),)

        dx, dy = autograd.first_or_second(first, autograd.gradients_of(again, 1), dout, x, y)
        return dx, None if y is None else dy, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rest):
        (ctx.activation,) = rest
        ctx.save_for_backward(x)
        return gated_fwd.below_autograd(x, *rest)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        activation = ctx.activation

        def first(dout, x):
            return (gated_bwd(dout, x, activation),)

        def again(x):
            return (_plain_gated_fwd(x, activation),)

        return *autograd.first_or_second(first, autograd.gradients_of(again, 1), dout, x), None


def _fwd_reference(x, y, activation):
    return reference.fwd(x, y, activation, invariant=invariance.level() > 0)


def _gated_fwd_reference(x, activation):
    return reference.gated_fwd(x, activation, invariant=invariance.level() > 0)


_plain_fwd = autograd.in_plain_torch(_fwd_reference)
_plain_gated_fwd = autograd.in_plain_torch(_gated_fwd_reference)


def _new_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _bwd_fake(dout, x, y, activation):
    return _new_like(x), x.new_empty(0) if y is None else _new_like(y)


fwd = _library.define(
    "activation_fwd(Tensor x, Tensor? y, str activation) -> Tensor",
    reference=_fwd_reference,
    fake=lambda x, *_: _new_like(x),
    autograd=_Activation,
    differentiable=2,
    composite=_plain_fwd,
    sharding=sharding.activation_fwd,
)
bwd = _library.define(
    "activation_bwd(Tensor dout, Tensor x, Tensor? y, str activation) -> (Tensor dx, Tensor dy)",
    reference=reference.bwd,
    fake=_bwd_fake,
    sharding=sharding.activation_bwd,
)
gated_fwd = _library.define(
    "gated_fwd(Tensor x, str activation) -> Tensor",
    reference=_gated_fwd_reference,
    fake=lambda x, _: x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
    autograd=_Gated,
    differentiable=1,
    composite=_plain_gated_fwd,
    sharding=sharding.gated_fwd,
)
gated_bwd = _library.define(
    "gated_bwd(Tensor dout, Tensor x, str activation) -> Tensor",
    reference=reference.gated_bwd,
    fake=lambda dout, x, _: _new_like(x),
    sharding=sharding.gated_bwd,
)
