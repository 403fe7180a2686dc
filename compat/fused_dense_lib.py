"""The functions that other packages call in place of flash-attn 2.8's separate extension of this name.

They are thin: kernels and the reference backend are those of `flash_attn.ops.fused_dense`. They record no gradient,
and know nothing of autocast.
"""

import torch

from flash_attn._ops import checks
from flash_attn._ops import fused_dense as ops


@torch.no_grad()
def linear_bias_wgrad(input, d_output, has_d_bias, /):
    """Returns [d_weight, d_bias]: d_output^T input, and the sum of the rows of d_output or None.

    input (..., in) and d_output (..., out), of as many rows and one dtype.
    """
    checks.alike(("input", "d_output"), (input, d_output), dtypes=ops.DTYPES)
    checks.flags(has_d_bias=has_d_bias)
    checks.has_shape("d_output", d_output, (*input.shape[:-1], None))
    with ops.without_autocast(input):
        d_weight, d_bias = ops.products_for(input).wgrad(d_output, input, bool(has_d_bias))
    return [d_weight, d_bias if has_d_bias else None]


@torch.no_grad()
def linear_act_forward(input, weight, bias, is_gelu, save_pre_act, heuristic, /):
    """Returns [output, pre_act] of act(input weight^T + bias), or [output].

    input (..., in), weight (out, in), bias (out,) or None; the activation is gelu, in its tanh form, or relu. pre_act,
    with save_pre_act, is what `bias_act_linear_dgrad_bgrad` needs: for relu that is the output.
    heuristic: as in `flash_attn.ops.fused_dense.fused_mlp_func`.
    """
    checks.tensor("input", input)
    checks.flags(is_gelu=is_gelu, save_pre_act=save_pre_act)
    activation = _activation(is_gelu, heuristic)
    with ops.without_autocast(input):
        ops.check_layer(input, weight, bias, ("input", "weight", "bias"))
        output, pre_act = ops.products_for(input).fwd(input, weight, bias, activation, bool(save_pre_act), heuristic)
    return [output, pre_act if is_gelu else output] if save_pre_act else [output]


@torch.no_grad()
def bias_act_linear_dgrad_bgrad(weight, d_output, pre_act, is_gelu, heuristic, /):
    """Returns [d_input, d_bias]: act'(pre_act) * (d_output weight) and the sum of its rows.

    weight (out, in) belongs to the layer after the activation, d_output (..., out) is the gradient of its output.
    pre_act (..., in) comes from `linear_act_forward` of the layer before the activation, with the same is_gelu.
    heuristic: from -1 to 4; the result does not depend on it.
    """
    checks.alike(("weight", "d_output", "pre_act"), (weight, d_output, pre_act), dtypes=ops.DTYPES)
    checks.ndim("weight", weight, "(out, in)")
    checks.has_shape("d_output", d_output, (*d_output.shape[:-1], weight.shape[0]))
    checks.has_shape("pre_act", pre_act, (*d_output.shape[:-1], weight.shape[1]))
    checks.flags(is_gelu=is_gelu)
    activation = _activation(is_gelu, heuristic)
    with ops.without_autocast(weight):
        return list(ops.products_for(weight).dgrad(d_output, weight, None, pre_act, activation, True))


def _activation(is_gelu, heuristic):
    activation = "gelu_approx" if is_gelu else "relu"
    ops.check_mlp(activation, 0, heuristic)
    return activation
