"""Activations: values and gradients, gated and with a bias, layouts, errors, graphs, what a kernel may trip over."""

import oracle
import pytest
import torch
from cases import DTYPES
from compare import assert_error_ratio

from flash_attn._ops import activation as activation_ops
from flash_attn.ops import activations
from flash_attn.ops.activations import (
    bias_gelu,
    bias_gelu_back,
    bias_gelu_impl,
    fast_gelu_impl,
    gelu_bwd,
    gelu_fwd,
    relu_bwd,
    sqrelu_bwd,
    sqrelu_fwd,
    swiglu,
    swiglu_bwd,
    swiglu_fwd,
    swiglu_of_halves,
)

SHAPES = [(), (1,), (33,), (5, 7), (2, 3, 64), (4, 1024), (3, 8193), (0, 4), (4, 0)]
LAYOUTS = ["halves", "transposed", "unaligned"]


def draw(shape, dtype, device, layout="halves"):
    """x, y and a gradient, x and y being the halves of a tensor, or transposed, or off an aligned address."""
    if layout == "halves" and shape:
        x, y = (3 * torch.randn(*shape[:-1], 2 * shape[-1], device=device)).to(DTYPES[dtype]).chunk(2, dim=-1)
    else:
        x, y = (3 * torch.randn(2, *shape, device=device)).to(DTYPES[dtype])
    if layout == "transposed" and len(shape) > 1:
        x, y = (tensor.mT.contiguous().mT for tensor in (x, y))
    if layout == "unaligned":
        x, y = (torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(shape) for tensor in (x, y))
    return x, y, torch.randn(shape, device=device).to(DTYPES[dtype])


def gradients(function, inputs, dout):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def assert_like_formula(function, formula, inputs, dout):
    """Against the formula in float64; the baseline has float32 maths and rounds once."""
    found = gradients(function, inputs, dout)
    exact = gradients(formula, [x.double() for x in inputs], dout)
    plain = gradients(formula, [x.float() for x in inputs], dout)
    for i, (ours, right, baseline) in enumerate(zip(found, exact, plain, strict=True)):
        assert_error_ratio(ours, right, baseline.to(ours.dtype), name=f"{i}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu", "silu"])
@pytest.mark.cover(2)
def test_against_float64(activation, dtype, shape, device):
    act = oracle.ACTIVATIONS[activation]
    for layout in LAYOUTS:
        x, y, dout = draw(shape, dtype, device, layout)
        assert_like_formula(lambda x: activation_ops.activate(x, None, activation), act, [x], dout)
        assert_like_formula(
            lambda x, y: activation_ops.activate(x, y, activation), lambda x, y: act(x) * y, [x, y], dout
        )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu_approx", "silu"])
@pytest.mark.cover(2)
def test_halves_against_float64(activation, dtype, shape, device):
    act = oracle.ACTIVATIONS[activation]

    def formula(x):
        value, gate = x.chunk(2, dim=-1)
        return act(gate) * value

    for layout in LAYOUTS:
        x, *_ = draw((*shape[:-1], 2 * shape[-1]), dtype, device, layout)
        _, _, dout = draw(shape, dtype, device, layout)
        assert_like_formula(lambda x: activation_ops.activate_gate(x, activation), formula, [x], dout)


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu", "silu"])
def test_large_values(activation, device):
    """Far from zero each is 0 or grows as it should, and so does its derivative."""
    x = torch.tensor([-1e10, -1e4, -100.0, 0.0, 100.0, 1e4], device=device)
    found = gradients(lambda x: activation_ops.activate(x, None, activation), [x], torch.ones_like(x))
    square = activation == "sqrelu"
    want = x.clamp(min=0)
    torch.testing.assert_close(found[0], want**2 if square else want)
    at_zero = found[1][3].item()
    torch.testing.assert_close(found[1], (2 * want if square else (x > 0).float() + at_zero * (x == 0)))
    assert at_zero == (0.5 if activation in ("gelu_approx", "silu") else 0)
    nan = torch.full((8,), float("nan"), device=device)
    assert activation_ops.activate(nan, None, activation).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_public_functions(dtype, device):
    x, y, g = draw((6, 40), dtype, device)
    gelu, sqrelu, silu = (oracle.ACTIVATIONS[name] for name in ("gelu_approx", "sqrelu", "silu"))
    pairs = [
        (fast_gelu_impl, gelu, [x]),
        (lambda x: gelu_fwd(x.detach()) + 0 * x, gelu, [x]),
        (swiglu, lambda x, y: silu(x) * y, [x, y]),
    ]
    assert_like_formula(*pairs[0], g)
    assert_like_formula(*pairs[2], g)
    for found, formula, inputs in (
        ([gelu_fwd(x), gelu_bwd(g, x)], gelu, [x]),
        ([sqrelu_fwd(x), sqrelu_bwd(g, x)], sqrelu, [x]),
        ([swiglu_fwd(x, y), *swiglu_bwd(x, y, g)], lambda x, y: silu(x) * y, [x, y]),
    ):
        exact = gradients(formula, [each.double() for each in inputs], g)
        plain = gradients(formula, [each.float() for each in inputs], g)
        for ours, right, baseline in zip(found, exact, plain, strict=True):
            assert ours.dtype == x.dtype and not ours.requires_grad
            assert_error_ratio(ours, right, baseline.to(ours.dtype))
    x[0] = torch.tensor([0.0, -0.0, 1.0, -1.0], device=device).repeat(10)
    assert torch.equal(relu_bwd(g, x), torch.where(x < 0, 0, g))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias_dtype", ["fp32", None])
def test_bias_gelu(bias_dtype, dtype, device):
    y, _, g = draw((6, 40), dtype, device)
    bias = torch.randn(40, device=device, dtype=DTYPES[bias_dtype or dtype])

    def formula(y, bias):
        return oracle.ACTIVATIONS["gelu_approx"](y + bias)

    def summed(y, bias):  # with the sum rounded to the wider of the two dtypes, as documented
        return formula(y, bias).to(dtype=DTYPES[dtype])

    found = gradients(bias_gelu_impl, [y, bias], g)
    exact = gradients(formula, [y.double(), bias.double()], g)
    plain = gradients(summed, [y, bias], g)
    for ours, right, baseline in zip(found, exact, plain, strict=True):
        assert ours.dtype == baseline.dtype
        assert_error_ratio(ours, right, baseline)
    assert torch.equal(bias_gelu(y, bias), found[0])
    torch.testing.assert_close(bias_gelu_back(g, y, bias), tuple(found[1:]))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(backend, device):
    x, y, g = draw((6, 40), "bf16", device)
    wide = torch.cat([x, y], dim=-1)
    for function, inputs in (
        (swiglu, [x, y]),
        (swiglu_of_halves, [wide]),
        (fast_gelu_impl, [x]),
        (bias_gelu_impl, [x, y[0]]),
    ):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        torch.testing.assert_close(gradients(compiled, inputs, g), gradients(function, inputs, g))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_opcheck(gated, transposed, device):
    x, y, g = draw((40, 40), "fp32", device)
    x, y, g = (each.T if transposed else each for each in (x, y, g))
    y = y if gated else None
    leaves = [None if each is None else each.detach().clone().requires_grad_() for each in (x, y)]
    torch.library.opcheck(activation_ops.fwd.default, (*leaves, "silu"))
    torch.library.opcheck(activation_ops.fwd.default, (x, y, "gelu_approx"))
    torch.library.opcheck(activation_ops.bwd.default, (g, x, y, "silu"))
    if gated:
        torch.library.opcheck(activation_ops.gated_fwd.default, (x.clone().requires_grad_(), "silu"))
        torch.library.opcheck(activation_ops.gated_bwd.default, (g[:, :20], x, "silu"))


def test_autograd_functions():
    assert activations.GeLUFunction.apply is bias_gelu_impl
    assert activations.FastGeLUFunction.apply is fast_gelu_impl
    assert activations.SwiGLUFunction.apply is swiglu


X = torch.zeros(3, 8)
ERRORS = {
    "no tensor": (lambda: gelu_fwd([1.0]), TypeError, "x must be a torch.Tensor"),
    "integers": (lambda: sqrelu_fwd(X.long()), TypeError, "x must have dtype"),
    "halves differ": (lambda: swiglu(X, X[:2]), ValueError, r"y must have shape \(3, 8\), found \(2, 8\)"),
    "odd features": (lambda: swiglu_of_halves(X[:, :7]), ValueError, r"x must have shape \(..., 2 \* features\)"),
    "types differ": (lambda: swiglu(X, X.half()), TypeError, "y must have dtype torch.float32, found"),
    "gradient differs": (lambda: gelu_bwd(X[0], X), ValueError, r"g must have shape \(3, 8\)"),
    "gradient of relu": (lambda: relu_bwd(X[0], X), ValueError, r"g must have shape \(3, 8\)"),
    "bias": (lambda: bias_gelu(X, X[0, :7]), ValueError, r"bias must have shape \(8,\), found \(7,\)"),
    "bias of a number": (lambda: bias_gelu_impl(X[0, 0], X[0]), ValueError, "input must have at least one dimension"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    call, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(2**31 + 64,), (2**21 + 3, 1023)], ids=str)
def test_more_elements_than_32_bits_count(shape, device, memory_guard):
    memory_guard(3 * 2 * torch.Size(shape).numel())
    x = torch.randn(shape[-1] if len(shape) > 1 else 2**16, device=device).bfloat16()
    x = x.expand(shape) if len(shape) > 1 else torch.cat([x.repeat(2**15), x[:64]])
    out = activation_ops.fwd(x, None, "silu")
    right = oracle.ACTIVATIONS["silu"](x[-1:].double()).bfloat16()
    torch.testing.assert_close(out[-1:], right)
    torch.testing.assert_close(out[:1], oracle.ACTIVATIONS["silu"](x[:1].double()).bfloat16())


@pytest.mark.multi_gpu
def test_device_that_is_not_current():
    x, y, g = draw((6, 40), "bf16", "cuda:1")
    found = gradients(swiglu, [x, y], g)
    for ours, right in zip(found, gradients(swiglu, [x.cpu(), y.cpu()], g.cpu()), strict=True):
        assert ours.device == x.device
        torch.testing.assert_close(ours.cpu(), right)
