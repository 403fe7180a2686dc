"""The ops `layer_norm_fwd` and `layer_norm_bwd`: LayerNorm or RMSNorm of a sum of branches.

    h    = drop(rowscale * x0) * colscale + drop(x1) + residual          all but x0 optional; drop divides by 1 - p
    y    = (h - mean(h)) * rstd,  rstd = 1 / sqrt(var(h) + eps)          LayerNorm
    y    = h * rstd,              rstd = 1 / sqrt(mean(h^2) + eps)       RMSNorm
    out  = weight * y + bias,     out1 = weight1 * y + bias1             out1 optional; weight + 1 if zero-centred

The norm is over the last dimension, in fp32. Every tensor may be fp32, fp16 or bf16, independently of the others.

x0, x1, residual        (..., cols), any strides
weight, bias, ...       (cols,)
rowscale                as many elements as x0 has rows
x0_subset, out_subset   (rows,) int32, both or none: entry i is 1 + the row of x0 that is added to row i of h, and
                        1 + the row of out that gets the norm of row i of h; 0 and values out of range mean no row.
                        Then x0 is (x0_rows, cols) and out is (out_rows, cols), x0 is scaled by rowscale_const, and
                        rows of out that no entry names are 0. No entry names a row that another one names.
rng_state               (2,) int64, seed and offset of dropout, or None; `_reference/layer_norm.py` says which elements
                        are kept

The forward returns (out, out1, h, mask0, mask1, mean, rstd). h is stored in h_dtype, if that is not None. mask0 and
mask1, uint8, are stored with return_mask; mean and rstd are (rows,) fp32. Results that are not stored are empty
tensors. The backward needs the stored h, or x0 if h was not stored. It computes dx0, dx1, dresidual and out only if a
dtype is given for them.
"""

import math

import torch
from torch.nn import functional

from flash_attn import _library
from flash_attn._ops import autograd, checks, invariance, linear, rng, sharding, triton
from flash_attn._reference import fused_dense as dense_reference
from flash_attn._reference import layer_norm as reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def forward(
    x0,
    residual,
    weight,
    bias,
    eps,
    dropout_p,
    *,
    x1=None,
    weight1=None,
    bias1=None,
    rowscale=None,
    colscale=None,
    x0_subset=None,
    out_subset=None,
    rowscale_const=1.0,
    out_rows=0,
    prenorm=False,
    residual_in_fp32=False,
    is_rms_norm=False,
    zero_centered_weight=False,
    out_dtype=None,
    return_mask=False,
    names=("x0", "weight", "bias", "epsilon"),
):
    """Check the arguments and normalise. Returns (out, out1, h, mask0, mask1, mean, rstd), None for absent results.

    h is returned with prenorm. It has the dtype of residual; without a residual it is float32 with residual_in_fp32,
    else it has the dtype of x0. It is x0 itself if nothing changes x0. The masks are returned if they are asked for and
    dropout_p is not 0. names: what the caller calls x0, weight, bias and eps.
    """
    checks.flags(
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        zero_centered_weight=zero_centered_weight,
        return_dropout_mask=return_mask,
    )
    eps, dropout_p, rowscale_const = _check_numbers(eps, dropout_p, rowscale_const, names[3])
    out_rows = checks.whole("out_numrows", out_rows)
    _check_branches(names[0], x0, x1, residual, rowscale, x0_subset, out_subset, out_rows)
    parameters = {names[1]: weight, names[2]: bias} | {"weight1": weight1, "bias1": bias1, "layerscale": colscale}
    _check_parameters(x0, parameters)
    x0, x1, residual, weight, bias, weight1, bias1, colscale = _aligned(
        names[0], x0, x1, residual, weight, bias, weight1, bias1, colscale
    )
    if bias1 is not None and weight1 is None:
        raise ValueError("weight1 must be given together with bias1, found None")
    if out_dtype is not None and out_dtype not in DTYPES:
        raise TypeError(f"out_dtype must be torch.float32, torch.float16 or torch.bfloat16, found {out_dtype}")

    shape = x0.shape
    if x0_subset is not None:  # with subsets, all leading dimensions are flattened into rows
        x0 = x0.reshape(-1, shape[-1])
        residual = None if residual is None else residual.reshape(-1, shape[-1])
    h_dtype = _h_dtype(x0, residual, residual_in_fp32)
    changed = (
        h_dtype != x0.dtype
        or dropout_p > 0
        or any(x is not None for x in (residual, x1, rowscale, colscale, x0_subset))
    )
    inputs = (x0, x1, residual, weight, bias, weight1, bias1, colscale)
    rng_state = rng.draw_state(x0.device) if dropout_p > 0 else None
    # Training stores the sum that it normalises, rounded. At level 2 inference does, too: both then normalise the same.
    in_training = _needs_gradient(inputs) or invariance.level() == 2
    out, out1, h, mask0, mask1, mean, rstd = fwd(
        *inputs,
        rowscale,
        x0_subset,
        out_subset,
        rng_state,
        dropout_p,
        eps,
        rowscale_const,
        out_rows,
        bool(is_rms_norm),
        bool(zero_centered_weight),
        h_dtype if changed and (prenorm or in_training) else None,
        out_dtype or x0.dtype,
        bool(return_mask),
    )
    h = (h if changed else x0) if prenorm else None
    masked = return_mask and dropout_p > 0
    mask0, mask1 = mask0 if masked else None, mask1 if masked and x1 is not None else None
    if x0_subset is not None:
        out, h, mask0 = (None if x is None else x.reshape(-1, *shape[1:]) for x in (out, h, mask0))
    return out, None if weight1 is None else out1, h, mask0, mask1, mean, rstd


def backward(
    dout,
    dout1,
    dh,
    h,
    x0,
    mean,
    rstd,
    weight,
    weight1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    mask0,
    mask1,
    dropout_p,
    rowscale_const,
    x0_rows,
    has_x1,
    has_residual,
    is_rms_norm,
    names,
):
    """Gradients of `forward` for two-dimensional arguments. h is the sum that was normalised, as the forward stored it.

    names: the caller's names for its tensors and for x0_rows.

    Returns (dx0, dx1, dresidual, dweight, dbias, dweight1, dbias1, dcolscale), None for absent gradients. dx0 and dx1
    have the dtype of dout, dresidual of h, dcolscale of colscale, dweight and dbias of weight, the others of weight1.
    """
    checks.flags(has_x1=has_x1, has_residual=has_residual, is_rms_norm=is_rms_norm)
    _, dropout_p, rowscale_const = _check_numbers(0.0, dropout_p, rowscale_const, "epsilon")
    checks.tensor(names["dout"], dout, dtypes=DTYPES, shape=(None, None))
    checks.tensor(names["h"], h, dtypes=DTYPES, shape=(None, dout.shape[1]), device=dout.device)
    if x0_subset is not None:
        x0_rows = checks.whole(names["x0_rows"], x0_rows)
        checks.number(names["x0_rows"], x0_rows, x0_rows >= 0, "at least 0")
    (rows, cols), (x0_rows, out_rows) = h.shape, (len(h), len(h)) if x0_subset is None else (x0_rows, len(dout))
    for name, value, dtypes, shape in (
        ("dout", dout, DTYPES, (out_rows, cols)),
        ("dout1", dout1, DTYPES, (out_rows, cols)),
        ("dh", dh, DTYPES, (rows, cols)),
        ("x0", x0, DTYPES, (x0_rows, cols)),
        ("mean", mean, (torch.float32,), (rows,)),
        ("rstd", rstd, (torch.float32,), (rows,)),
        ("weight", weight, DTYPES, (cols,)),
        ("weight1", weight1, DTYPES, (cols,)),
        ("colscale", colscale, DTYPES, (cols,)),
        ("rowscale", rowscale, DTYPES, (x0_rows,)),
        ("x0_subset", x0_subset, (torch.int32,), (rows,)),
        ("out_subset", out_subset, (torch.int32,), (rows,)),
        ("mask0", mask0, (torch.uint8,), (x0_rows, cols)),
        ("mask1", mask1, (torch.uint8,), (rows, cols)),
    ):
        if value is not None or name in ("mean", "rstd", "weight"):
            checks.tensor(names[name], value, dtypes=dtypes, shape=shape, device=dout.device)
    _check_together(names, "x0", x0, "colscale", colscale is not None)
    _check_together(names, "dout1", dout1, "weight1", weight1 is not None)
    _check_together(names, "mask0", mask0, "dropout_p > 0", dropout_p > 0)
    _check_together(names, "out_subset", out_subset, "x0_subset", x0_subset is not None)
    results = bwd(
        dout,
        dout1,
        dh,
        h,
        x0,
        mean,
        rstd,
        weight,
        weight,
        weight1,
        weight1,
        colscale,
        rowscale,
        x0_subset,
        out_subset,
        None,
        mask0,
        mask1,
        dropout_p,
        rowscale_const,
        x0_rows,
        bool(is_rms_norm),
        False,
        dout.dtype,
        dout.dtype if has_x1 else None,
        h.dtype if has_residual else None,
        None,
    )
    there = (True, has_x1, has_residual, True, True, weight1 is not None, weight1 is not None, colscale is not None)
    return tuple(x if wanted else None for x, wanted in zip(results, there))


def _check_together(names, name, value, other, is_there):
    if (value is not None) != is_there:
        name, other = names[name], names.get(other, other)
        raise ValueError(f"{name} must be given with {other} and must be None without it, found {type(value).__name__}")


def normalize_linear(
    x, residual, norm_weight, norm_bias, linear_weight, linear_bias, eps, prenorm, residual_in_fp32, is_rms_norm
):
    """A linear layer of the norm of x + residual, in the dtype of autocast or else of x. Returns (out, h)."""
    checks.flags(prenorm=prenorm, residual_in_fp32=residual_in_fp32, is_rms_norm=is_rms_norm)
    eps, _, _ = _check_numbers(eps, 0.0, 1.0, "eps")
    _check_branches("x", x, None, residual, None, None, None, 0)
    _check_parameters(x, {"norm_weight": norm_weight, "norm_bias": norm_bias})
    checks.tensor("linear_weight", linear_weight, dtypes=DTYPES, shape=(None, x.shape[-1]), device=x.device)
    if linear_bias is not None:
        checks.tensor("linear_bias", linear_bias, dtypes=DTYPES, shape=linear_weight.shape[:1], device=x.device)
    x, residual, norm_weight, norm_bias = _aligned("x", x, residual, norm_weight, norm_bias)
    dtype = _library.autocast_dtype(x) or x.dtype
    h_dtype = _h_dtype(x, residual, residual_in_fp32)
    changed = residual is not None or h_dtype != x.dtype
    with _library.without_autocast(x):
        tensors = (
            x,
            residual,
            norm_weight,
            norm_bias,
            linear_weight.to(dtype),
            None if linear_bias is None else linear_bias.to(dtype),
        )
        function = _linear_in_plain_torch if autograd.is_transformed(*tensors) else _LayerNormLinear.apply
        out, *h = function(*tensors, (eps, bool(is_rms_norm), h_dtype if changed else None, dtype))
    return out, h[0] if changed else x


def _h_dtype(x0, residual, residual_in_fp32):
    return residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x0.dtype


def _aligned(name, x, *others):
    """Returns the tensors; from level 1 of batch invariance on such that kernels read the rows of all in the same way.

    x, which the caller calls `name`, is one of those that may not be None.
    """
    if not (invariance.level() and _library.is_where_kernels_run(x)):
        return x, *others
    invariance.refuse_ragged(name, x.shape[-1])
    return tuple(None if each is None else invariance.with_aligned_rows(each) for each in (x, *others))


def _needs_gradient(inputs):
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


# ---------------------------------------------------------------------------------------------------------------------
# Argument checks


def _check_numbers(eps, dropout_p, rowscale_const, name):
    """Check three numbers and return them as floats. name: what the caller calls eps."""
    eps, dropout_p = checks.as_float(name, eps), checks.as_float("dropout_p", dropout_p)
    checks.number(name, eps, eps >= 0, "at least 0")
    checks.number("dropout_p", dropout_p, 0 <= dropout_p < 1, "at least 0 and less than 1")
    return eps, dropout_p, checks.as_float("rowscale_const", rowscale_const)


def _check_parameters(x0, parameters):
    """Check parameters (cols,), given by name; all but the first may be None."""
    for i, (name, value) in enumerate(parameters.items()):
        if value is not None or i == 0:
            checks.tensor(name, value, dtypes=DTYPES, shape=(x0.shape[-1],), device=x0.device)


def _check_branches(name, x0, x1, residual, rowscale, x0_subset, out_subset, out_rows):
    """Check the tensors that are summed; the caller calls x0 `name`."""
    checks.tensor(name, x0, dtypes=DTYPES)
    if x0.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension (..., features), found shape ()")
    if x1 is not None:
        checks.tensor("x1", x1, dtypes=DTYPES, shape=x0.shape, device=x0.device)
    if rowscale is not None:
        checks.tensor("rowscale", rowscale, dtypes=DTYPES, device=x0.device)
        rows = math.prod(x0.shape[:-1])
        if rowscale.numel() != rows:
            raise ValueError(
                f"rowscale must have one element for each of {name}'s {rows} rows, found shape {tuple(rowscale.shape)}"
            )
    if x0_subset is None and out_subset is None:
        if residual is not None:
            checks.tensor("residual", residual, dtypes=DTYPES, shape=x0.shape, device=x0.device)
        return
    if x0_subset is None or out_subset is None:
        missing, given = ("x0_subset", "out_subset") if x0_subset is None else ("out_subset", "x0_subset")
        raise ValueError(f"{missing} must be given together with {given}, found None")
    _check_subsets(name, x0, residual, x0_subset, out_subset, out_rows)


def _check_subsets(name, x0, residual, x0_subset, out_subset, out_rows):
    if x0.dim() < 2:
        raise ValueError(f"{name} must have at least two dimensions with x0_subset, found shape {tuple(x0.shape)}")
    checks.tensor("x0_subset", x0_subset, dtypes=(torch.int32,), device=x0.device)
    checks.tensor("out_subset", out_subset, dtypes=(torch.int32,), device=x0.device)
    rows = x0_subset.numel()
    checks.number(
        "out_subset's number of entries", out_subset.numel(), out_subset.numel() == rows, "x0_subset's, {}", rows
    )
    group = math.prod(x0.shape[1:-1])  # rows in one entry of x0; h and out consist of whole entries
    fits = out_rows >= 0 and out_rows % max(group, 1) == 0
    expected = "a multiple of {}, the number of rows in each entry of {}"
    checks.number("out_numrows", out_rows, fits, expected, group, name)
    fits = rows % max(group, 1) == 0
    checks.number("x0_subset's number of entries", rows, fits, expected, group, name)
    if residual is not None:
        checks.tensor("residual", residual, dtypes=DTYPES, device=x0.device)
        if residual.dim() == 0 or residual.shape[-1] != x0.shape[-1] or math.prod(residual.shape[:-1]) != rows:
            raise ValueError(
                f"residual must have {rows} rows of {x0.shape[-1]} features, found shape {tuple(residual.shape)}"
            )


# ---------------------------------------------------------------------------------------------------------------------
# The ops


def _fwd_fake(
    x0,
    x1,
    residual,
    weight,
    bias,
    weight1,
    bias1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    rng_state,
    dropout_p,
    eps,
    rowscale_const,
    out_rows,
    is_rms_norm,
    zero_centered_weight,
    h_dtype,
    out_dtype,
    return_mask,
):
    cols = x0.shape[-1]
    rows = math.prod(x0.shape[:-1]) if x0_subset is None else x0_subset.numel()
    out_shape = x0.shape if x0_subset is None else (out_rows, cols)
    h_shape = x0.shape if x0_subset is None else (rows, cols)
    masked = return_mask and rng_state is not None

    def stored(wanted, shape, dtype):
        return x0.new_empty(shape, dtype=dtype) if wanted else x0.new_empty(0)

    return (
        stored(True, out_shape, out_dtype),
        stored(weight1 is not None, out_shape, out_dtype),
        stored(h_dtype is not None, h_shape, h_dtype),
        stored(masked, x0.shape, torch.uint8),
        stored(masked and x1 is not None, (x0 if x1 is None else x1).shape, torch.uint8),
        stored(True, (rows,), torch.float32),
        stored(True, (rows,), torch.float32),
    )


def _bwd_fake(
    dout,
    dout1,
    dh,
    h,
    x0,
    mean,
    rstd,
    weight,
    bias,
    weight1,
    bias1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    rng_state,
    mask0,
    mask1,
    dropout_p,
    rowscale_const,
    x0_rows,
    is_rms_norm,
    zero_centered_weight,
    dx0_dtype,
    dx1_dtype,
    dresidual_dtype,
    out_dtype,
):
    x0_shape = h.shape if x0_subset is None else (x0_rows, h.shape[-1])
    return (
        *(
            dout.new_empty(0) if dtype is None else dout.new_empty(shape, dtype=dtype)
            for shape, dtype in ((x0_shape, dx0_dtype), (h.shape, dx1_dtype), (h.shape, dresidual_dtype))
        ),
        *(dout.new_empty(0) if x is None else x.new_empty(x.shape) for x in (weight, bias, weight1, bias1, colscale)),
        dout.new_empty(0) if out_dtype is None else dout.new_empty(h.shape, dtype=out_dtype),
    )


class _LayerNorm(torch.autograd.Function):
    """Gradients of `fwd` through out, out1 and h. `rest` holds the op's other arguments."""

    @staticmethod
    def forward(ctx, x0, x1, residual, weight, bias, weight1, bias1, colscale, rest):
        rowscale, x0_subset, out_subset, rng_state, *options = rest
        dropout_p, eps, rowscale_const, _, is_rms_norm, zero_centered_weight, h_dtype, _, _ = options
        results = fwd.below_autograd(x0, x1, residual, weight, bias, weight1, bias1, colscale, *rest)
        out, out1, h, mask0, mask1, mean, rstd = results
        kept_h, kept_x0 = x0 if h_dtype is None else h, None if colscale is None else x0
        ctx.save_for_backward(
            kept_h,
            kept_x0,
            mean,
            rstd,
            weight,
            bias,
            weight1,
            bias1,
            colscale,
            rowscale,
            x0_subset,
            out_subset,
            rng_state,
        )
        ctx.options = dropout_p, rowscale_const, x0.shape[0] if x0_subset is not None else 0, is_rms_norm
        ctx.eps, ctx.zero_centered_weight = eps, zero_centered_weight
        ctx.dtypes = x0.dtype, None if x1 is None else x1.dtype, residual is not None
        ctx.out = out.shape, out.dtype
        ctx.mark_non_differentiable(
            mask0, mask1, mean, rstd, *([] if weight1 is not None else [out1]), *([] if h_dtype is not None else [h])
        )
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx, dout, dout1, dh, *_):
        h, x0, mean, rstd, weight, bias, weight1, bias1, colscale, rowscale, *others = ctx.saved_tensors
        x0_dtype, x1_dtype, has_residual = ctx.dtypes
        if dout is None:
            dout = h.new_zeros(ctx.out[0], dtype=ctx.out[1])
        if dout1 is None and weight1 is not None:
            dout1 = torch.zeros_like(dout)
        # A branch that is added to h unchanged has the same gradient as h.
        same1 = x1_dtype == h.dtype and others[-1] is None
        same0 = (
            x0_dtype == h.dtype and others[-1] is None and rowscale is None and colscale is None and others[0] is None
        )
        options = (
            rowscale,
            *others,
            None,
            None,
            *ctx.options,
            ctx.zero_centered_weight,
            None if same0 else x0_dtype,
            None if same1 else x1_dtype,
            h.dtype if has_residual or same0 or same1 else None,
            None,
        )
        dx0, dx1, dresidual, *parameters, _ = _gradients(
            (mean, rstd), options, ctx.eps, dout, dout1, dh, h, x0, weight, bias, weight1, bias1, colscale
        )
        given = (weight, bias, weight1, bias1, colscale)
        return (
            dresidual if same0 else dx0,
            None if x1_dtype is None else dresidual if same1 else dx1,
            dresidual if has_residual else None,
            *(None if x is None else dx for x, dx in zip(given, parameters, strict=True)),
            None,
        )


def _gradients(statistics, options, eps, *tensors):
    """The results of `bwd`, which may be differentiated again.

    tensors: those with gradients of their own, dout, dout1, dh, h, x0 and the parameters. `statistics`, mean and rstd,
    depend on h; `options` are the arguments of `bwd` after the parameters.
    """
    is_rms_norm = options[9]

    def first(dout, dout1, dh, h, x0, *parameters):
        return bwd(dout, dout1, dh, h, x0, *statistics, *parameters, *options)

    @autograd.in_plain_torch
    def again(dout, dout1, dh, h, x0, *parameters):
        statistics = reference.statistics(h.float(), eps, is_rms_norm)
        return reference.bwd(dout, dout1, dh, h, x0, *statistics, *parameters, *options)

    return autograd.first_or_second(first, again, *tensors)


class _LayerNormLinear(torch.autograd.Function):
    """Gradients of a linear layer of `fwd` of x + residual, through its output and h."""

    @staticmethod
    def forward(ctx, x, residual, norm_weight, norm_bias, linear_weight, linear_bias, options):
        eps, is_rms_norm, h_dtype, dtype = options
        normal, _, h, _, _, mean, rstd = fwd(
            x,
            None,
            residual,
            norm_weight,
            norm_bias,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            0.0,
            eps,
            1.0,
            0,
            is_rms_norm,
            False,
            h_dtype,
            dtype,
            False,
        )
        ctx.save_for_backward(x if h_dtype is None else h, mean, rstd, norm_weight, norm_bias, linear_weight)
        ctx.options = eps, is_rms_norm, x.dtype, residual is not None
        ctx.set_materialize_grads(False)
        out = linear.product(normal, linear_weight, linear_bias)
        return (out,) if h_dtype is None else (out, h)

    @staticmethod
    def backward(ctx, dout, dh=None):
        h, mean, rstd, norm_weight, norm_bias, linear_weight = ctx.saved_tensors
        eps, is_rms_norm, x_dtype, has_residual = ctx.options
        if dout is None:
            dout = linear_weight.new_zeros(*h.shape[:-1], len(linear_weight))
        same = x_dtype == h.dtype
        *_, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx, _, dresidual, dweight, dbias, _, _, _, normal = _gradients(
            (mean, rstd),
            (
                None,
                None,
                None,
                None,
                None,
                None,
                0.0,
                1.0,
                0,
                is_rms_norm,
                False,
                None if same else x_dtype,
                None,
                h.dtype if same or has_residual else None,
                linear_weight.dtype if needs_weight else None,
            ),
            eps,
            dout @ linear_weight,
            None,
            dh,
            h,
            None,
            norm_weight,
            norm_bias,
            None,
            None,
            None,
        )
        return (
            dresidual if same else dx,
            dresidual if has_residual else None,
            dweight,
            None if norm_bias is None else dbias,
            dense_reference.matrix(dout).T @ dense_reference.matrix(normal) if needs_weight else None,
            dense_reference.sum_of_rows(dout) if needs_bias else None,
            None,
        )


@invariance.refusing
@autograd.in_plain_torch
def _linear_in_plain_torch(x, residual, norm_weight, norm_bias, linear_weight, linear_bias, options):
    """The same as `_LayerNormLinear` in operations of torch."""
    eps, is_rms_norm, h_dtype, dtype = options
    normal, _, h, *_ = reference.fwd(
        x,
        None,
        residual,
        norm_weight,
        norm_bias,
        None,
        None,
        None,
        None,
        None,
        None,
        None,
        0.0,
        eps,
        1.0,
        0,
        is_rms_norm,
        False,
        h_dtype,
        dtype,
        False,
    )
    out = functional.linear(normal, linear_weight, linear_bias)
    return (out,) if h_dtype is None else (out, h)


fwd = _library.define(
    "layer_norm_fwd(Tensor x0, Tensor? x1, Tensor? residual, Tensor weight, Tensor? bias, Tensor? weight1, "
    "Tensor? bias1, Tensor? colscale, Tensor? rowscale, Tensor? x0_subset, Tensor? out_subset, Tensor? rng_state, "
    "float dropout_p, float eps, float rowscale_const, SymInt out_rows, bool is_rms_norm, bool zero_centered_weight, "
    "ScalarType? h_dtype, ScalarType out_dtype, bool return_mask) "
    "-> (Tensor out, Tensor out1, Tensor h, Tensor mask0, Tensor mask1, Tensor mean, Tensor rstd)",
    reference=reference.fwd,
    fake=_fwd_fake,
    triton=triton.launch("layer_norm", "fwd"),
    autograd=_LayerNorm,
    differentiable=8,
    composite=invariance.refusing(autograd.in_plain_torch(reference.fwd)),
    sharding=sharding.layer_norm_fwd,
)

bwd = _library.define(
    "layer_norm_bwd(Tensor dout, Tensor? dout1, Tensor? dh, Tensor h, Tensor? x0, Tensor mean, Tensor rstd, "
    "Tensor weight, Tensor? bias, Tensor? weight1, Tensor? bias1, Tensor? colscale, Tensor? rowscale, "
    "Tensor? x0_subset, Tensor? out_subset, Tensor? rng_state, Tensor? mask0, Tensor? mask1, float dropout_p, "
    "float rowscale_const, SymInt x0_rows, bool is_rms_norm, bool zero_centered_weight, ScalarType? dx0_dtype, "
    "ScalarType? dx1_dtype, ScalarType? dresidual_dtype, ScalarType? out_dtype) "
    "-> (Tensor dx0, Tensor dx1, Tensor dresidual, Tensor dweight, Tensor dbias, Tensor dweight1, Tensor dbias1, "
    "Tensor dcolscale, Tensor out)",
    reference=reference.bwd,
    fake=_bwd_fake,
    triton=triton.launch("layer_norm", "bwd"),
    sharding=sharding.layer_norm_bwd,
)
