"""Linear layers fused with what surrounds them: the ops `fused_dense_fwd`, `fused_dense_dgrad`, `fused_dense_wgrad` and
`gated_dense_fwd`.

    fused_dense_fwd(x, weight, bias, activation, keep, heuristic) -> (out, kept)
    gated_dense_fwd(x, weight, bias, activation) -> act(gate) * value
    fused_dense_dgrad(dout, weight, dresidual, kept, activation, bias_grad) -> (dx, dbias)
    fused_dense_wgrad(dout, x, bias_grad) -> (dweight, dbias)

x        (..., in), fp16 or bf16 as all tensors, any strides         dout, out (..., out)
weight   (out, in)              bias (out,) or None                  dresidual like dx, or None

    out = act(x weight^T + bias)                        activation: identity, or one of `_ops/activation.py`
    dx = dout weight + dresidual, or act'(kept) * (dout weight), with dbias = sum of the rows of dx
    dweight = dout^T x, dbias = sum of the rows of dout

In gated_dense_fwd, value and gate are the two halves of x weight^T + bias, rounded to the dtype. It has no gradient.
One kernel computes it for few rows (at most FEW_ROWS), two for more.

The gradient of the activation needs `kept`, which the forward returns with `keep`: x weight^T + bias. For relu, out
itself serves as kept, and kept is empty. In dgrad, weight belongs to the layer after the activation and dbias to the
layer before it; without an activation there is no dbias. Results that are not asked for are empty tensors.

heuristic: -1 computes the activation in a separate kernel. From 0 on it is fused with the product if cuBLASLt has a
kernel for both, and the number chooses one of the algorithms that cuBLASLt proposes. Few rows without `keep` are always
computed in one kernel. The gradient of the activation and dbias are computed in one kernel after the product. Sums are
fp32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from flash_attn import _library, _torch_private
from flash_attn._library import without_autocast
from flash_attn._ops import activation as activations
from flash_attn._ops import autograd, checks, flops, invariance
from flash_attn._ops import linear as fixed_linear
from flash_attn._reference import activation as activation_reference
from flash_attn._reference import fused_dense as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
FUSED_DTYPES = (torch.float16, torch.bfloat16)
FEW_ROWS = 8  # the most rows of the kernel in csrc/fused_dense/few_rows.cuh
ACTIVATIONS = ("gelu_approx", "relu", "sqrelu")


class Products(NamedTuple):
    """Functions that compute a layer, with the same arguments as the ops and as `activation_fwd`."""

    fwd: Callable
    dgrad: Callable
    wgrad: Callable
    activate: Callable


def linear(x, weight, bias, return_residual, exchange):
    """Check the arguments and compute x weight^T + bias, in the dtype of autocast if that is on.

    exchange: None, or the communication of a group of processes: an object with gather(x), called before the product,
        and reduce(dx), called after its gradient. Both return (tensor, handle); the handle, to wait for, may be None.
        Its recorded() returns the same exchange in operations that autograd records.
    Returns out, or (out, x) with return_residual, where x is the tensor that entered the product.
    """
    autocast = check_layer(x, weight, bias)
    checks.flags(return_residual=return_residual)
    if autocast is not None:
        x, weight, bias = _cast(autocast, x, weight, bias)
    if exchange is None and invariance.level() == 2:
        out = fixed_linear.fwd(x, weight, bias)
    elif exchange is None and x.dtype not in FUSED_DTYPES:
        with without_autocast(x):
            out, _ = reference.fwd(x, weight, bias, "identity", False, 0)
    elif exchange is None and (not return_residual or autograd.is_transformed(x, weight, bias)):
        out, _ = fwd(x, weight, bias, "identity", False, 0)
    else:
        with without_autocast(x):
            out, *_, x = _Linear.apply(x, weight, bias, ("identity", False, 0), exchange, True)
    return (out, x) if return_residual else out


def gated_linear(x, weight, bias, activation):
    """Check the arguments and compute act(gate) * value of a layer without gradient."""
    check_layer(x, weight, bias)
    if len(weight) % 2:
        raise ValueError(f"weight must have shape (2 * features, in_features), found {tuple(weight.shape)}")
    return gated_fwd(x, weight, bias, activation)


def mlp(
    x,
    weight1,
    bias1,
    weight2,
    bias2,
    activation,
    save_pre_act,
    return_residual,
    checkpoint_lvl,
    heuristic,
    exchange,
    products=None,
):
    """Check the arguments and compute act(x weight1^T + bias1) weight2^T + bias2, as `linear` does.

    products: the functions of another backend for 16-bit types. At level 2 of batch invariance there is but one.
    """
    autocast = check_layer(x, weight1, bias1, ("x", "weight1", "bias1"))
    check_layer(x, weight2, bias2, ("x", "weight2", "bias2"), in_features=weight1.shape[0])
    check_mlp(activation, checkpoint_lvl, heuristic)
    checks.flags(save_pre_act=save_pre_act, return_residual=return_residual)
    tensors = x, weight1, bias1, weight2, bias2
    if autocast is not None:
        tensors = _cast(autocast, *tensors)
    if tensors[0].dtype not in FUSED_DTYPES:
        products = PLAIN
    if invariance.level() == 2:
        products = IN_FIXED_ORDER
    if activation == "sqrelu" or products is PLAIN:
        heuristic = -1
    if exchange is None and autograd.is_transformed(*tensors):
        out = _mlp_in_plain_torch(*tensors, activation)
        return (out, tensors[0]) if return_residual else out
    trains = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    options = activation, checkpoint_lvl if save_pre_act and trains else 2, heuristic, products or KERNELS
    with without_autocast(x):
        out, _, *residual = _MLP.apply(*tensors, options, exchange, bool(return_residual))
    return (out, *residual) if residual else out


def is_for_few_rows(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Returns whether the library's kernel for few rows, as in a step of decoding, can replace F.linear.

    It does not support gradients, function transforms and tensor subclasses.
    """
    return (
        not torch.is_grad_enabled()
        and HAS_KERNEL
        and _library.is_where_kernels_run(x)
        and x.dim() > 0
        and x.numel() <= FEW_ROWS * x.shape[-1]
        and x.dtype in FUSED_DTYPES
        and x.dtype == weight.dtype
        and type(x) is torch.Tensor
        and type(weight) is torch.nn.Parameter
        and not _torch_private.in_forward_mode()
        and invariance.level() < 2
        and _library.autocast_dtype(x) is None
    )


def activate(y, activation):
    """act(y) of the output of a layer, differentiable."""
    if y.dtype in activations.DTYPES:
        return activations.fwd(y, None, activation)
    return activation_reference.fwd(y, None, activation, invariant=invariance.level() > 0)


def check_layer(x, weight, bias, names=("x", "weight", "bias"), in_features=None):
    """Check one linear layer with in_features, by default the last size of x. `names`: the caller's tensor names.

    Returns the dtype of autocast, or None where it is off.
    """
    checks.tensor(names[0], x, dtypes=DTYPES)
    if x.dim() == 0:
        raise ValueError(f"{names[0]} must have at least one dimension (..., in_features), found shape ()")
    autocast = _library.autocast_dtype(x)
    dtypes, device = (x.dtype,) if autocast is None else DTYPES, x.device
    shape = None, x.shape[-1] if in_features is None else in_features
    checks.tensor(names[1], weight, dtypes=dtypes, shape=shape, device=device)
    if bias is not None:
        checks.tensor(names[2], bias, dtypes=dtypes, shape=weight.shape[:1], device=device)
    return autocast


def check_mlp(activation, checkpoint_lvl, heuristic):
    """Check the options of an MLP."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'gelu_approx', 'relu' or 'sqrelu', found {activation!r}")
    checks.integer("checkpoint_lvl", checkpoint_lvl)
    checks.number("checkpoint_lvl", checkpoint_lvl, checkpoint_lvl in (0, 1, 2), "0, 1 or 2")
    checks.integer("heuristic", heuristic)
    checks.number("heuristic", heuristic, -1 <= heuristic <= 4, "between -1 and 4")


def mlp_widths(in_features: int, hidden_features: int, out_features: int) -> tuple[int, int, int]:
    """Returns the widths of an MLP as ints; they may be whole floats, as a product with 8 / 3 is."""
    widths = {"in_features": in_features, "hidden_features": hidden_features, "out_features": out_features}
    in_features, hidden_features, out_features = (checks.whole(name, width) for name, width in widths.items())
    return in_features, hidden_features, out_features


def _cast(dtype, *tensors):
    return [None if tensor is None else tensor.to(dtype) for tensor in tensors]


# ---------------------------------------------------------------------------------------------------------------------
# Autograd


class _Linear(torch.autograd.Function):
    """Gradients of `fwd` without activation. With return_residual the last result is x, with its own gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, rest, exchange=None, return_residual=False):
        ctx.activation = rest[0]
        total = _gathered(x, exchange)
        out, kept = products_for(x).fwd(total, weight, bias, *rest)
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept)
        return (out, kept, x.view_as(x)) if return_residual else (out, kept)

    @staticmethod
    def backward(ctx, dout, _, dresidual=None):
        if ctx.activation != "identity":
            raise NotImplementedError(f"fused_dense_fwd has no gradient for {ctx.activation!r}, only for 'identity'")
        if dout is None:
            return dresidual, None, None, None, None, None
        x, weight = ctx.saved_tensors
        exchange, needs = ctx.exchange, ctx.needs_input_grad

        def first(dout, x, weight, dresidual):
            with without_autocast(dout):
                return _layer_gradients(dout, x, weight, dresidual, exchange, needs, products_for(dout))

        @autograd.in_plain_torch
        def again(dout, x, weight, dresidual):
            return _layer_gradients(dout, x, weight, dresidual, _recorded(exchange), needs, PLAIN)

        return *autograd.first_or_second(first, again, dout, x, weight, dresidual), None, None, None


class _MLP(torch.autograd.Function):
    """Both layers and the activation: (out, origin), or (out, origin, x), differentiable in all five tensors.

    origin: an empty tensor with the history of out. It is saved where x is not, so that a second derivative still
    reaches the backward, which refuses it.
    """

    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, options, exchange, return_residual):
        activation, level, heuristic, products = ctx.options = options
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        act, kept = products.fwd(_gathered(x, exchange), weight1, bias1, activation, level < 2, heuristic)
        out, _ = products.fwd(act, weight2, bias2, "identity", False, 0)
        # If the weights are frozen, as under LoRA, the gradient needs neither x nor the output of the activation. A
        # second derivative would need x; in 16 bits it is refused, to save that memory.
        saves_x = level == 2 or ctx.needs_input_grad[1] or x.dtype not in FUSED_DTYPES
        saves_act = level < 2 if activation == "relu" else level == 0 and ctx.needs_input_grad[3]
        saves_kept = level < 2 and activation != "relu"
        origin = x.new_empty(0)  # also if x is saved: compiled functions of torch 2.10 cannot return None
        ctx.save_for_backward(
            x if saves_x else None,
            weight1,
            weight2,
            bias1,
            None if saves_x else origin,
            act if saves_act else None,
            kept if saves_kept else None,
        )
        return (out, origin, x.view_as(x)) if return_residual else (out, origin)

    @staticmethod
    def backward(ctx, dout, _, dresidual=None):
        if dout is None:
            return dresidual, *(None,) * 7
        *inputs, origin, act, kept = ctx.saved_tensors
        activation, level, heuristic, products = ctx.options
        exchange, needs = ctx.exchange, ctx.needs_input_grad
        hidden = [act, kept]
        act = kept = None
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()  # frees each tensor as soon as the code below no longer needs it

        def first(dout, dresidual, x, weight1, weight2, bias1, _):
            total = None
            with without_autocast(dout):
                if level == 2:
                    total = _gathered(x, exchange)
                    hidden[:] = products.fwd(total, weight1, bias1, activation, True, heuristic)
                elif hidden[0] is None and needs[3]:
                    hidden[0] = products.activate(hidden[1], None, activation)
                return _mlp_gradients(
                    dout, dresidual, x, weight1, weight2, hidden, activation, exchange, needs, products, total
                )

        @autograd.in_plain_torch
        def again(dout, dresidual, x, weight1, weight2, bias1, origin):
            if x is None:
                raise RuntimeError(
                    "trying to differentiate twice an MLP in 16 bits whose first weight requires no gradient: it "
                    "keeps no input. Use float32, or let the weight require a gradient"
                )
            recorded = _recorded(exchange)
            total = _gathered(x, recorded)
            kept, _ = PLAIN.fwd(total, weight1, bias1, "identity", False, 0)
            hidden = [PLAIN.activate(kept, None, activation), kept]
            return _mlp_gradients(
                dout, dresidual, x, weight1, weight2, hidden, activation, recorded, needs, PLAIN, total
            )

        return *autograd.first_or_second(first, again, dout, dresidual, *inputs, origin), None, None, None


def _mlp_gradients(dout, dresidual, x, weight1, weight2, hidden, activation, exchange, needs, products, total=None):
    """Returns the gradients of x, weight1, bias1, weight2 and bias2, None where `needs` is false.

    hidden: a list of the output of the activation and of `kept`, which is emptied, so that both can be freed early.
    """
    act, kept = hidden
    hidden.clear()
    kept = act if activation == "relu" else kept
    _, dweight2, dbias2 = _layer_gradients(dout, act, weight2, None, None, (False, *needs[3:5]), products)
    act = None
    if not any(needs[:3]):
        return None, None, None, dweight2, dbias2
    dpre, dbias1 = products.dgrad(dout, weight2, None, kept, activation, needs[2])
    kept = None
    layer_needs = *needs[:2], False  # dbias1 is already computed
    dx, dweight1, _ = _layer_gradients(dpre, x, weight1, dresidual, exchange, layer_needs, products, total)
    return dx, dweight1, dbias1 if needs[2] else None, dweight2, dbias2


@functools.partial(invariance.refusing, least=2)
@autograd.in_plain_torch
def _mlp_in_plain_torch(x, weight1, bias1, weight2, bias2, activation):
    act, _ = reference.fwd(x, weight1, bias1, activation, False, 0)
    return reference.fwd(act, weight2, bias2, "identity", False, 0)[0]


def _recorded(exchange):
    return None if exchange is None else exchange.recorded()


def _layer_gradients(dout, x, weight, dresidual, exchange, needs, products, total=None):
    """Returns (dx, dweight, dbias) of a linear layer, None where `needs` is false; communication overlaps the products.

    total: the x that `exchange` has already gathered, or None.
    """
    gathered = reduced = None
    dx, dweight, dbias = dresidual, None, None
    if total is None:
        total, gathered = (x, None) if exchange is None or not needs[1] else exchange.gather(x)
    if needs[0]:
        dx, _ = products.dgrad(dout, weight, dresidual if exchange is None else None, None, "identity", False)
        if exchange is not None:
            dx, reduced = exchange.reduce(dx)
    _wait(gathered)
    if needs[1]:
        dweight, dbias = products.wgrad(dout, total, needs[2])
    elif needs[2]:
        dbias = reference.sum_of_rows(dout)
    _wait(reduced)
    if exchange is not None and dresidual is not None and needs[0]:
        dx = dx + dresidual
    return dx if needs[0] else None, dweight, dbias if needs[2] else None


def _gathered(x, exchange):
    if exchange is None:
        return x
    total, handle = exchange.gather(x)
    _wait(handle)
    return total


def _wait(handle):
    if handle is not None:
        handle.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The ops


def _fwd_fake(x, weight, bias, activation, keep, heuristic):
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    return out, torch.empty_like(out) if keep and activation not in ("identity", "relu") else x.new_empty(0)


def _gated_fake(x, weight, bias, activation):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


def _dgrad_fake(dout, weight, dresidual, kept, activation, bias_grad):
    width = weight.shape[1]
    return dout.new_empty(*dout.shape[:-1], width), dout.new_empty(width if bias_grad and kept is not None else 0)


def _wgrad_fake(dout, x, bias_grad):
    return dout.new_empty(dout.shape[-1], x.shape[-1]), dout.new_empty(dout.shape[-1] if bias_grad else 0)


fwd = _library.define(
    "fused_dense_fwd(Tensor x, Tensor weight, Tensor? bias, str activation, bool keep, int heuristic)"
    " -> (Tensor out, Tensor kept)",
    reference=reference.fwd,
    fake=_fwd_fake,
    autograd=_Linear,
    differentiable=3,
    composite=autograd.in_plain_torch(reference.fwd),
    flops=flops.linear_fwd,
)
gated_fwd = _library.define(
    "gated_dense_fwd(Tensor x, Tensor weight, Tensor? bias, str activation) -> Tensor",
    reference=reference.gated_fwd,
    fake=_gated_fake,
    flops=flops.linear_fwd,
)
dgrad = _library.define(
    "fused_dense_dgrad(Tensor dout, Tensor weight, Tensor? dresidual, Tensor? kept, str activation, bool bias_grad)"
    " -> (Tensor dx, Tensor dbias)",
    reference=reference.dgrad,
    fake=_dgrad_fake,
    flops=flops.linear_dgrad,
)
wgrad = _library.define(
    "fused_dense_wgrad(Tensor dout, Tensor x, bool bias_grad) -> (Tensor dweight, Tensor dbias)",
    reference=reference.wgrad,
    fake=_wgrad_fake,
    flops=flops.linear_wgrad,
)

HAS_KERNEL = _library.has_kernel("fused_dense_fwd")
KERNELS = Products(fwd, dgrad, wgrad, activations.fwd)
PLAIN = Products(reference.fwd, reference.dgrad, reference.wgrad, activation_reference.fwd)


def _fixed_fwd(x, weight, bias, activation, keep, heuristic):
    """`fwd` by `linear.fwd`, whose bits do not depend on the number of rows."""
    out = fixed_linear.fwd(x, weight, bias)
    if activation == "identity":
        return out, x.new_empty(0)
    return activate(out, activation), out if keep and activation != "relu" else x.new_empty(0)


def _fixed_dgrad(dout, weight, dresidual, kept, activation, bias_grad):
    """`dgrad` by `linear.fwd`."""
    dx = fixed_linear.fwd(dout, weight.mT, None)
    if dresidual is not None:
        dx = dx + dresidual
    if activation != "identity":
        dx, _ = activation_reference.bwd(dx, kept.view(dx.shape), None, activation)
    return dx, reference.sum_of_rows(dx, bias_grad and activation != "identity")


def _fixed_activate(x, _, activation):
    return activate(x, activation)


IN_FIXED_ORDER = Products(_fixed_fwd, _fixed_dgrad, reference.wgrad, _fixed_activate)  # at level 2 of batch invariance


def products_for(x):
    if invariance.level() == 2:
        return IN_FIXED_ORDER
    return KERNELS if x.dtype in FUSED_DTYPES else PLAIN
