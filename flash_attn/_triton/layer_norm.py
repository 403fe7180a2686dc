"""The ops of `flash_attn._ops.layer_norm` in Triton: `fwd` and `bwd`, with their arguments and results.

A program works on one row at a time. It keeps the row in registers if it has at most MAX_BLOCK columns, else it reads
the row in blocks, again for each pass. In the backward a program has several rows, and sums the gradients of parameters
over them; at the end the sums of all programs are added in a fixed order. For rows wider than MAX_BLOCK, one kernel of
the backward computes the two sums of each row, and the next kernel works on tiles of columns.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 16384
_PARAMETERS = 5  # weight, bias, weight1, bias1, colscale


# ---------------------------------------------------------------------------------------------------------------------
# Pieces


@triton.jit
def _kept(rng_state, row, first, threshold, branch, BLOCK: tl.constexpr):
    """Returns which columns first .. first + BLOCK - 1 of a row are kept, as `_reference/layer_norm.py` defines it."""
    seed, low = tl.load(rng_state), tl.load(rng_state + 1) + row
    vector = first // 8 + tl.arange(0, BLOCK // 8)
    zeros = tl.zeros_like(vector)
    word0, word1, word2, word3 = tl.philox(
        seed,
        zeros + (low & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        zeros + ((low >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        vector,
        zeros + branch,
        7,
    )
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3)).to(tl.uint32, bitcast=True)
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, (BLOCK,)).to(tl.int32) < threshold


@triton.jit
def _row_of(subset, row, rows):
    """Returns the row that entry `row` of a subset names, or -1 if it names none; `row` itself without a subset."""
    named = row.to(tl.int64)
    if subset is not None:  # no early return: Triton would still compile the load from None
        number = tl.load(subset + row).to(tl.int64)
        named = tl.where(number <= rows, number - 1, -1)
    return named


@triton.jit
def _columns(vector, cols, inside):
    return tl.load(vector + cols, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _weight(weight, cols, inside, ZERO_CENTERED: tl.constexpr):
    values = _columns(weight, cols, inside)
    return values + 1.0 if ZERO_CENTERED else values


@triton.jit
def _scale_of_row(rowscale, row, rowscale_const, keep_scale):
    scale = rowscale_const * keep_scale
    if rowscale is not None:
        scale *= tl.load(rowscale + tl.maximum(row, 0)).to(tl.float32)
    return scale


@triton.jit
def _sum_branches(
    x0,
    x1,
    residual,
    colscale,
    rowscale,
    rng_state,
    h_out,
    mask0,
    mask1,
    stride0,
    stride1,
    stride_residual,
    row,
    row0,
    first,
    cols,
    threshold,
    keep_scale,
    rowscale_const,
    STORE_MASKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns h for the columns of a row from `first` on, rounded if h is stored; 0 past the last column."""
    col = first + tl.arange(0, BLOCK)
    inside = col < cols
    there = inside & (row0 + tl.zeros_like(col) >= 0)
    h = tl.load(x0 + row0 * stride0 + col, mask=there, other=0.0).to(tl.float32)
    h *= _scale_of_row(rowscale, row0, rowscale_const, keep_scale)
    if rng_state is not None:
        kept = _kept(rng_state, row0, first, threshold, 0, BLOCK)
        h = tl.where(kept, h, 0.0)
        if STORE_MASKS and mask0 is not None:
            tl.store(mask0 + row0 * cols + col, kept.to(tl.uint8), mask=there)
    if colscale is not None:
        h *= _columns(colscale, col, inside)
    if x1 is not None:
        branch = tl.load(x1 + row * stride1 + col, mask=inside, other=0.0).to(tl.float32) * keep_scale
        if rng_state is not None:
            kept = _kept(rng_state, row, first, threshold, 1, BLOCK)
            branch = tl.where(kept, branch, 0.0)
            if STORE_MASKS and mask1 is not None:
                tl.store(mask1 + row * cols + col, kept.to(tl.uint8), mask=inside)
        h += branch
    if residual is not None:
        h += tl.load(residual + row * stride_residual + col, mask=inside, other=0.0).to(tl.float32)
    if h_out is not None:  # the backward reads the stored h, so the statistics must belong to it
        h = h.to(h_out.dtype.element_ty).to(tl.float32)
    return h


@triton.jit
def _store_norm(out, y, weight, bias, row, first, cols, ZERO_CENTERED: tl.constexpr, BLOCK: tl.constexpr):
    col = first + tl.arange(0, BLOCK)
    inside = col < cols
    result = y * _weight(weight, col, inside, ZERO_CENTERED)
    if bias is not None:
        result += _columns(bias, col, inside)
    tl.store(out + row * cols + col, result.to(out.dtype.element_ty), mask=inside & (row + tl.zeros_like(col) >= 0))


# ---------------------------------------------------------------------------------------------------------------------
# Forward


@triton.jit
def _fwd_kernel(
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
    out,
    out1,
    h_out,
    mask0,
    mask1,
    mean_out,
    rstd_out,
    stride0,
    stride1,
    stride_residual,
    cols,
    x0_rows,
    out_rows,
    threshold,
    keep_scale,
    rowscale_const,
    eps,
    RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row0, out_row = _row_of(x0_subset, row, x0_rows), _row_of(out_subset, row, out_rows)
    if WHOLE:
        h = _sum_branches(
            x0,
            x1,
            residual,
            colscale,
            rowscale,
            rng_state,
            h_out,
            mask0,
            mask1,
            stride0,
            stride1,
            stride_residual,
            row,
            row0,
            0,
            cols,
            threshold,
            keep_scale,
            rowscale_const,
            True,
            BLOCK,
        )
        col = tl.arange(0, BLOCK)
        inside = col < cols
        if h_out is not None:
            tl.store(h_out + row * cols + col, h.to(h_out.dtype.element_ty), mask=inside)
        mean = tl.sum(h, 0) / cols
        centred = h if RMS else tl.where(inside, h - mean, 0.0)
        rstd = 1 / tl.sqrt(tl.sum(centred * centred, 0) / cols + eps)
        _store_norm(out, centred * rstd, weight, bias, out_row, 0, cols, ZERO_CENTERED, BLOCK)
        if weight1 is not None:
            _store_norm(out1, centred * rstd, weight1, bias1, out_row, 0, cols, ZERO_CENTERED, BLOCK)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, cols, BLOCK):
            h = _sum_branches(
                x0,
                x1,
                residual,
                colscale,
                rowscale,
                rng_state,
                h_out,
                mask0,
                mask1,
                stride0,
                stride1,
                stride_residual,
                row,
                row0,
                first,
                cols,
                threshold,
                keep_scale,
                rowscale_const,
                True,
                BLOCK,
            )
            if h_out is not None:
                col = first + tl.arange(0, BLOCK)
                tl.store(h_out + row * cols + col, h.to(h_out.dtype.element_ty), mask=col < cols)
            total += h
        mean = tl.sum(total, 0) / cols
        centre = 0.0 if RMS else mean
        squares = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, cols, BLOCK):
            h = _sum_branches(
                x0,
                x1,
                residual,
                colscale,
                rowscale,
                rng_state,
                h_out,
                mask0,
                mask1,
                stride0,
                stride1,
                stride_residual,
                row,
                row0,
                first,
                cols,
                threshold,
                keep_scale,
                rowscale_const,
                False,
                BLOCK,
            )
            centred = tl.where(first + tl.arange(0, BLOCK) < cols, h - centre, 0.0)
            squares += centred * centred
        rstd = 1 / tl.sqrt(tl.sum(squares, 0) / cols + eps)
        for first in range(0, cols, BLOCK):
            h = _sum_branches(
                x0,
                x1,
                residual,
                colscale,
                rowscale,
                rng_state,
                h_out,
                mask0,
                mask1,
                stride0,
                stride1,
                stride_residual,
                row,
                row0,
                first,
                cols,
                threshold,
                keep_scale,
                rowscale_const,
                False,
                BLOCK,
            )
            y = (h - centre) * rstd
            _store_norm(out, y, weight, bias, out_row, first, cols, ZERO_CENTERED, BLOCK)
            if weight1 is not None:
                _store_norm(out1, y, weight1, bias1, out_row, first, cols, ZERO_CENTERED, BLOCK)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)


def fwd(
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
    """Returns (out, out1, h, mask0, mask1, mean, rstd), as the op `layer_norm_fwd` does."""
    cols = x0.shape[-1]
    if x0_subset is None:
        shape = out_shape = x0.shape
    else:
        shape, out_shape = (x0_subset.numel(), cols), (out_rows, cols)
    new_out = torch.empty if x0_subset is None else torch.zeros  # rows that no entry names are not written
    out = new_out(out_shape, dtype=out_dtype, device=x0.device)
    out1 = None if weight1 is None else torch.empty_like(out) if x0_subset is None else torch.zeros_like(out)
    h = None if h_dtype is None else x0.new_empty(shape, dtype=h_dtype)
    masked = return_mask and rng_state is not None
    mask0 = x0.new_empty(x0.shape, dtype=torch.uint8) if masked else None
    mask1 = x1.new_empty(x1.shape, dtype=torch.uint8) if masked and x1 is not None else None
    x0_rows, rows = _rows(x0), _rows(x0) if x0_subset is None else shape[0]
    mean, rstd = (x0.new_empty(rows, dtype=torch.float32) for _ in range(2))
    (x0, stride0), (x1, stride1), (residual, stride_residual) = map(_as_rows, (x0, x1, residual))
    if rows and cols:
        _fwd_kernel[(rows,)](
            x0,
            x1,
            residual,
            *_contiguous(weight, bias, weight1, bias1, colscale, rowscale, x0_subset, out_subset, rng_state),
            out,
            out1,
            h,
            mask0,
            mask1,
            mean,
            rstd,
            stride0,
            stride1,
            stride_residual,
            cols,
            x0_rows,
            out_rows,
            *_scales(dropout_p, rng_state, x0_subset, rowscale_const),
            eps,
            is_rms_norm,
            zero_centered_weight,
            cols <= MAX_BLOCK,
            **_block(cols),
        )
    return (*(x0.new_empty(0) if x is None else x for x in (out, out1, h, mask0, mask1)), mean, rstd)


# ---------------------------------------------------------------------------------------------------------------------
# Backward


@triton.jit
def _normal_and_weighted(
    h,
    dout,
    dout1,
    weight,
    weight1,
    stride_h,
    stride_dout,
    stride_dout1,
    row,
    out_row,
    col,
    cols,
    mean,
    rstd,
    ZERO_CENTERED: tl.constexpr,
):
    """Returns y, g = weight dout + weight1 dout1, dout and dout1 for columns of a row; 0 past the last column."""
    inside = col < cols
    there = inside & (out_row + tl.zeros_like(col) >= 0)
    y = (tl.load(h + row * stride_h + col, mask=inside, other=0.0).to(tl.float32) - mean) * rstd
    y = tl.where(inside, y, 0.0)
    grad = tl.load(dout + out_row * stride_dout + col, mask=there, other=0.0).to(tl.float32)
    g = grad * _weight(weight, col, inside, ZERO_CENTERED)
    grad1 = grad
    if dout1 is not None:
        grad1 = tl.load(dout1 + out_row * stride_dout1 + col, mask=there, other=0.0).to(tl.float32)
        g += grad1 * _weight(weight1, col, inside, ZERO_CENTERED)
    return y, g, grad, grad1


@triton.jit
def _sums_kernel(
    h,
    dout,
    dout1,
    weight,
    weight1,
    out_subset,
    mean_in,
    rstd_in,
    sums,
    stride_h,
    stride_dout,
    stride_dout1,
    cols,
    out_rows,
    RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_row = _row_of(out_subset, row, out_rows)
    mean, rstd = 0.0 if RMS else tl.load(mean_in + row), tl.load(rstd_in + row)
    sum_g, sum_gy = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, cols, BLOCK):
        y, g, _, _ = _normal_and_weighted(
            h,
            dout,
            dout1,
            weight,
            weight1,
            stride_h,
            stride_dout,
            stride_dout1,
            row,
            out_row,
            first + tl.arange(0, BLOCK),
            cols,
            mean,
            rstd,
            ZERO_CENTERED,
        )
        sum_g += g
        sum_gy += g * y
    tl.store(sums + 2 * row, tl.sum(sum_g, 0))
    tl.store(sums + 2 * row + 1, tl.sum(sum_gy, 0))


@triton.jit
def _through_norm(y, g, sums, row, cols, rstd, RMS: tl.constexpr):
    """Returns the gradient of h. If a block is less than a row, `sums` has the sums of g and g y over the row."""
    if sums is None:
        sum_g, sum_gy = tl.sum(g, 0), tl.sum(g * y, 0)
    else:
        sum_g, sum_gy = tl.load(sums + 2 * row), tl.load(sums + 2 * row + 1)
    return (g - y * (sum_gy / cols)) * rstd if RMS else (g - sum_g / cols - y * (sum_gy / cols)) * rstd


@triton.jit
def _dropped(x, mask, rng_state, row, first, cols, there, threshold, branch, BLOCK: tl.constexpr):
    """Returns x where dropout kept the branch, else 0, by the stored mask or else by a mask that is drawn again."""
    if mask is not None:
        col = first + tl.arange(0, BLOCK)
        x = tl.where(tl.load(mask + row * cols + col, mask=there, other=0) != 0, x, 0.0)
    elif rng_state is not None:
        x = tl.where(_kept(rng_state, row, first, threshold, branch, BLOCK), x, 0.0)
    return x


@triton.jit
def _bwd_kernel(
    dout,
    dout1,
    dh,
    h,
    x0,
    mean_in,
    rstd_in,
    weight,
    bias,
    weight1,
    colscale,
    rowscale,
    x0_subset,
    out_subset,
    rng_state,
    mask0,
    mask1,
    dx0,
    dx1,
    dresidual,
    out,
    sums,
    parts,
    stride_dout,
    stride_dout1,
    stride_dh,
    stride_h,
    stride0,
    rows,
    cols,
    x0_rows,
    out_rows,
    threshold,
    keep_scale,
    rowscale_const,
    RMS: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(1) * BLOCK
    col = first + tl.arange(0, BLOCK)
    inside = col < cols
    dweight, dbias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    dweight1, dbias1 = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    dcolscale = tl.zeros((BLOCK,), tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for turn in range(0, tl.cdiv(rows - program, programs)):
        row = program.to(tl.int64) + turn * programs
        row0, out_row = _row_of(x0_subset, row, x0_rows), _row_of(out_subset, row, out_rows)
        mean, rstd = 0.0 if RMS else tl.load(mean_in + row), tl.load(rstd_in + row)
        y, g, grad, grad1 = _normal_and_weighted(
            h,
            dout,
            dout1,
            weight,
            weight1,
            stride_h,
            stride_dout,
            stride_dout1,
            row,
            out_row,
            col,
            cols,
            mean,
            rstd,
            ZERO_CENTERED,
        )
        dweight += grad * y
        dbias += grad
        if dout1 is not None:
            dweight1 += grad1 * y
            dbias1 += grad1
        total = _through_norm(y, g, sums, row, cols, rstd, RMS)
        if dh is not None:
            total += tl.load(dh + row * stride_dh + col, mask=inside, other=0.0).to(tl.float32)
        if dresidual is not None:
            tl.store(dresidual + row * cols + col, total.to(dresidual.dtype.element_ty), mask=inside)
        if dx1 is not None:
            branch = _dropped(total * keep_scale, mask1, rng_state, row, first, cols, inside, threshold, 1, BLOCK)
            tl.store(dx1 + row * cols + col, branch.to(dx1.dtype.element_ty), mask=inside)
        if dx0 is not None:
            there = inside & (row0 + tl.zeros_like(col) >= 0)
            branch = total * _scale_of_row(rowscale, row0, rowscale_const, keep_scale)
            branch = _dropped(branch, mask0, rng_state, row0, first, cols, there, threshold, 0, BLOCK)
            if colscale is not None:
                x = tl.load(x0 + row0 * stride0 + col, mask=there, other=0.0).to(tl.float32)
                dcolscale += tl.where(there, branch * x, 0.0)
                branch *= _columns(colscale, col, inside)
            tl.store(dx0 + row0 * cols + col, branch.to(dx0.dtype.element_ty), mask=there)
        if out is not None:
            _store_norm(out, y, weight, bias, row, first, cols, ZERO_CENTERED, BLOCK)
    part = parts + program.to(tl.int64) * 5 * cols + col
    tl.store(part, dweight, mask=inside)
    tl.store(part + cols, dbias, mask=inside)
    if dout1 is not None:
        tl.store(part + 2 * cols, dweight1, mask=inside)
        tl.store(part + 3 * cols, dbias1, mask=inside)
    if colscale is not None:
        tl.store(part + 4 * cols, dcolscale, mask=inside)


def bwd(
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
    """Returns (dx0, dx1, dresidual, dweight, dbias, dweight1, dbias1, dcolscale, out), as `layer_norm_bwd` does."""
    cols, rows, out_rows = h.shape[-1], _rows(h), _rows(dout)
    x0_rows = rows if x0_subset is None else x0_rows
    new_dx0 = torch.empty if x0_subset is None else torch.zeros
    x0_shape = h.shape if x0_subset is None else (x0_rows, cols)
    dx0 = None if dx0_dtype is None else new_dx0(x0_shape, dtype=dx0_dtype, device=h.device)
    dx1, dresidual, out = (
        None if dtype is None else h.new_empty(h.shape, dtype=dtype)
        for dtype in (dx1_dtype, dresidual_dtype, out_dtype)
    )
    tensors = (dout, dout1, dh, h, x0)
    (dout, stride_dout), (dout1, stride_dout1), (dh, stride_dh), (h, stride_h), (x0, stride0) = map(_as_rows, tensors)
    weight, bias, weight1, colscale, rowscale, x0_subset, out_subset, rng_state, mean, rstd, mask0, mask1 = _contiguous(
        weight, bias, weight1, colscale, rowscale, x0_subset, out_subset, rng_state, mean, rstd, mask0, mask1
    )
    programs = min(rows, _most_programs(h.device))
    parts = h.new_empty((programs, _PARAMETERS, cols), dtype=torch.float32)
    sums, block = None, _block(cols)
    flags = is_rms_norm, zero_centered_weight
    if rows and cols > MAX_BLOCK:
        sums = h.new_empty((rows, 2), dtype=torch.float32)
        _sums_kernel[(rows,)](
            h,
            dout,
            dout1,
            weight,
            weight1,
            out_subset,
            mean,
            rstd,
            sums,
            stride_h,
            stride_dout,
            stride_dout1,
            cols,
            out_rows,
            *flags,
            **block,
        )
    if rows and cols:
        _bwd_kernel[(programs, triton.cdiv(cols, block["BLOCK"]))](
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
            colscale,
            rowscale,
            x0_subset,
            out_subset,
            rng_state,
            mask0,
            mask1,
            dx0,
            dx1,
            dresidual,
            out,
            sums,
            parts,
            stride_dout,
            stride_dout1,
            stride_dh,
            stride_h,
            stride0,
            rows,
            cols,
            x0_rows,
            out_rows,
            *_scales(dropout_p, (rng_state, mask0, mask1), x0_subset, rowscale_const),
            *flags,
            **block,
        )
    parameters = [
        None if parameter is None else parts[:, i].sum(0).to(parameter.dtype)
        for i, parameter in enumerate((weight, bias, weight1, bias1, colscale))
    ]
    return tuple(dout.new_empty(0) if x is None else x for x in (dx0, dx1, dresidual, *parameters, out))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of kernels


def _rows(x):
    return x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()


def _as_rows(x):
    """Returns x (..., cols) with adjacent elements and one stride between its rows, and that stride."""
    if x is None:
        return None, 0
    rows = x.reshape(-1, x.shape[-1]) if x.shape[-1] else x
    rows = rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()
    return rows, rows.stride(0)


def _contiguous(*tensors):
    return [None if x is None else x.contiguous() for x in tensors]


def _scales(dropout_p, random, x0_subset, rowscale_const):
    """Returns the threshold for 16 random bits, the factor of kept elements, and the factor of all of x0."""
    drops = any(x is not None for x in random) if isinstance(random, tuple) else random is not None
    return (
        round(65536 * (1 - dropout_p)),
        1 / (1 - dropout_p) if drops else 1.0,
        1.0 if x0_subset is None else rowscale_const,
    )


def _block(cols):
    """Returns how many columns a program reads at a time, and how many warps it has."""
    block = min(max(triton.next_power_of_2(cols), 16), MAX_BLOCK)
    return dict(BLOCK=block, num_warps=min(max(block // 512, 1), 16))


def _most_programs(device):
    """Returns two programs for each multiprocessor of a GPU."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return 2 * properties(device).multi_processor_count if properties else 4
