"""Linear layers with an activation in Triton, with fp32 sums. Arguments as in `flash_attn._ops.linear_act`.

A program computes a tile of the result. Neighbouring programs share a band of GROUP_M tiles of rows, so that their
operands stay in the cache. An operand is copied only if neither of its dimensions has adjacent elements.
"""

import math

import torch
import triton
import triton.language as tl

from flash_attn._triton import activations


def fwd(x, weight, bias, activation, keep):
    """Returns (out, act_input)."""
    a, b = _readable(x), _readable(weight)
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], len(weight))
    act_input = torch.empty_like(out) if keep else x.new_empty(0)
    if out.numel() > 0:
        kernel_fwd[_grid(len(a), len(b))](
            out,
            act_input,
            a,
            b,
            bias,
            *_sizes(a, len(b)),
            *a.stride(),
            *b.stride(),
            ACTIVATION=activation,
            HAS_BIAS=bias is not None,
            SAVE_ACT_INPUT=keep,
            PRECISION=_precision(x),
        )
    return out, act_input


def fwd_in_fixed_tiles(x, weight, bias):
    """Returns x weight^T + bias, with bits that do not depend on the number of rows; see `_ops/linear.py`.

    A tile adds one block of the inner dimension after another, always of the same size. For few rows tiles are smaller,
    so that there are more of them: which instruction multiplies does not depend on that.
    """
    a, b = _readable(x), _readable(weight)
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(*x.shape[:-1], len(weight))
    if out.numel() > 0:
        rows, cols, inner, _ = _sizes(a, len(b))
        kernel_in_fixed_tiles[_grid(rows, cols)](
            out,
            None,
            a,
            b,
            bias,
            rows,
            cols,
            inner,
            None,
            *a.stride(),
            *b.stride(),
            ACTIVATION="id",
            HAS_BIAS=bias is not None,
            SAVE_ACT_INPUT=False,
            PRECISION=_precision(x),
            **fixed_tiles(rows, x.dtype),
        )
    return out


def fixed_tiles(rows, dtype):
    """The tile of `kernel_in_fixed_tiles`; for each dtype, BLOCK_K and what multiplies are the same for all rows."""
    if dtype == torch.float32:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=3)
    if rows <= 64:
        return dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=4)
    return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3)


def dgrad(dout, weight, act_input, activation):
    """Returns dx."""
    a, b = _readable(dout), _readable(weight)
    act_input = None if act_input is None else act_input.contiguous()
    dx = dout.new_empty(*dout.shape[:-1], weight.shape[1])
    if dx.numel() > 0:
        kernel_bwd[_grid(len(a), weight.shape[1])](
            dx,
            act_input,
            a,
            b,
            *_sizes(a, weight.shape[1]),
            *a.stride(),
            *b.stride(),
            ACTIVATION=activation,
            PRECISION=_precision(dout),
        )
    return dx


def get_configs_compute_bound():
    """Returns tiles for products of many rows. GPUs with little shared memory have room only for the later ones.

    The first configuration is the fastest on Hopper, where two of its programs fit into a multiprocessor.
    """
    return [
        _config(128, 128, 64, stages=3, warps=8),
        _config(128, 256, 64, stages=3, warps=8),
        _config(128, 128, 64, stages=4, warps=8),
        _config(128, 128, 32, stages=3, warps=4),
        _config(64, 64, 32, stages=3, warps=4),
    ]


def get_configs_io_bound():
    """Returns tiles for products of few rows, which are bound by reading the weight."""
    return [
        _config(block_m, block_n, 128, stages=3, warps=2 if block_n == 32 else 4)
        for block_m in (16, 32)
        for block_n in (32, 64)
    ]


def _config(block_m, block_n, block_k, stages, warps):
    tile = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8}
    return triton.Config(tile, num_stages=stages, num_warps=warps)


def all_configs():
    """Returns the configurations to choose from: a single one under Triton's interpreter, which cannot time them."""
    if triton.knobs.runtime.interpret:
        return [_config(32, 64, 32, stages=1, warps=4)]
    return get_configs_compute_bound() + get_configs_io_bound()


def _fitting(configs, nargs, **_):
    """Keeps tiles of few rows for products of few rows, and the others for larger products; the rest is slower."""
    rows = nargs["M"]
    return [config for config in configs if (config.kwargs["BLOCK_M"] <= 32) == (rows <= 64)] or configs


def _tuned(kernel):
    """Decorates a kernel to time its configurations once for each weight shape and each power of two of rows."""
    return triton.autotune(all_configs(), key=["M_CLASS", "N", "K"], prune_configs_by={"early_config_prune": _fitting})(
        _even_k(kernel)
    )


_even_k = triton.heuristics({"EVEN_K": lambda args: args["K"] % args["BLOCK_K"] == 0})


def _readable(x):
    """Returns x (..., cols) as (rows, cols), without a copy if possible."""
    matrix = x.flatten(0, -2) if x.dim() > 1 else x[None]
    return matrix if 1 in matrix.stride() else matrix.contiguous()


def _sizes(a, cols):
    """Returns M, N, K and the class of M."""
    return len(a), cols, a.shape[1], math.ceil(math.log2(len(a)))


def _grid(rows, cols):
    return lambda meta: (triton.cdiv(rows, meta["BLOCK_M"]) * triton.cdiv(cols, meta["BLOCK_N"]),)


def _precision(x):
    return "ieee" if x.dtype == torch.float32 else "tf32"  # of no effect on 16-bit types


def _fwd(
    out,
    act_input,
    x,
    weight,
    bias,
    M,
    N,
    K,
    M_CLASS,
    x_row,
    x_col,
    weight_row,
    weight_col,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SAVE_ACT_INPUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """out = act(act_input), act_input = x weight^T + bias; x (M, K), weight (N, K), out and act_input (M, N)."""
    rows, cols = _tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = _product(
        x,
        weight,
        rows % M,
        cols % N,
        K,
        x_row,
        x_col,
        weight_col,
        weight_row,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
    )
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    if HAS_BIAS:
        acc += tl.load(bias + cols, mask=cols < N, other=0).to(tl.float32)[None, :]
    at = rows[:, None] * N + cols[None, :]
    if SAVE_ACT_INPUT:
        tl.store(act_input + at, acc.to(act_input.dtype.element_ty), mask=inside)
    tl.store(out + at, _activate(acc, ACTIVATION).to(out.dtype.element_ty), mask=inside)


kernel_fwd = _tuned(triton.jit(_fwd))
kernel_in_fixed_tiles = _even_k(triton.jit(_fwd, do_not_specialize=["M"]))  # one binary for all numbers of rows


@_tuned
@triton.jit
def kernel_bwd(
    dx,
    act_input,
    dout,
    weight,
    M,
    N,
    K,
    M_CLASS,
    dout_row,
    dout_col,
    weight_row,
    weight_col,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """dx = (dout weight) * act'(act_input); dout (M, K), weight (K, N), dx and act_input (M, N)."""
    rows, cols = _tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = _product(
        dout,
        weight,
        rows % M,
        cols % N,
        K,
        dout_row,
        dout_col,
        weight_row,
        weight_col,
        PRECISION,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
    )
    inside = (rows[:, None] < M) & (cols[None, :] < N)
    at = rows[:, None] * N + cols[None, :]
    if ACTIVATION != "id":
        acc *= _slope(tl.load(act_input + at, mask=inside, other=0).to(tl.float32), ACTIVATION)
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        x = activations.gelu(x)
    elif ACTIVATION == "gelu_approx":
        x = activations.gelu_approx(x)
    elif ACTIVATION == "squared_relu":
        x = activations.squared_relu(x)
    return x


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Returns the derivative of the activation."""
    if ACTIVATION == "gelu":
        slope = activations.gelu_grad(x)
    elif ACTIVATION == "gelu_approx":
        slope = activations.gelu_approx_grad(x)
    else:
        slope = activations.squared_relu_grad(x)
    return slope


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Returns the rows and columns of this program's tile. Some may lie past the end."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    band = program // (GROUP_M * tiles_n)
    height = min(tiles_m - band * GROUP_M, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    tile_m = band * GROUP_M + within % height
    tile_n = within // height
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _product(
    a,
    b,
    rows,
    cols,
    K,
    a_row,
    a_inner,
    b_inner,
    b_col,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Returns the product of some rows of a and columns of b; element (k, n) of b is at b + k * b_inner + n * b_col."""
    inner = tl.arange(0, BLOCK_K).to(tl.int64)
    a += rows[:, None] * a_row + inner[None, :] * a_inner
    b += inner[:, None] * b_inner + cols[None, :] * b_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            left, right = tl.load(a), tl.load(b)
        else:
            left = tl.load(a, mask=inner[None, :] < K - start, other=0)
            right = tl.load(b, mask=inner[:, None] < K - start, other=0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION)
        a += BLOCK_K * a_inner
        b += BLOCK_K * b_inner
    return acc
