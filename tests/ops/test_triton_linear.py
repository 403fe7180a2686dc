"""Linear layers with activations: in Triton's interpreter on a CPU, in Triton and cuBLASLt on a GPU, and as the public
functions.
"""

import importlib
import sys

import oracle
import pytest
import torch
from cases import DTYPES, cover
from compare import assert_error_ratio, unavoidable

from flash_attn._ops import linear_act
from flash_attn.ops.triton import cross_entropy, k_activations, linear, rotary
from flash_attn.ops.triton.k_activations import Activation
from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense, fused_dense_sqrelu_dense_function

FORMULAS = {"id": "identity", "gelu": "gelu", "gelu_approx": "gelu_approx", "squared_relu": "sqrelu"}
SHAPES = {  # rows, in, out
    "small": ((5,), 16, 24),
    "odd": ((3, 7), 33, 65),
    "one": ((), 1, 1),
    "tiles": ((70,), 64, 130),
    "no rows": ((0, 3), 8, 8),
    "no features": ((4,), 0, 8),
    "no outputs": ((4,), 8, 0),
}


def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("flash_attn._triton.linear_act")


@pytest.fixture(autouse=True)
def one_tile(device, monkeypatch):
    """On a GPU kernels have one tile, since compiling all of them for the autotuner takes many seconds."""
    if device.type == "cuda":
        for kernel in (kernels().kernel_fwd, kernels().kernel_bwd):
            monkeypatch.setattr(kernel, "configs", kernel.configs[-1:])


@pytest.fixture(params=["public", "cublaslt", "triton"])
def backend(request, device, monkeypatch):
    """Which code the test runs: what the public functions choose, the ops of fused_dense, or the Triton kernel.

    On a GPU the ops of fused_dense are cuBLASLt, and the public functions choose one of the other two. On a CPU, these
    ops are their reference.
    """
    if request.param == "public" and device.type == "cuda":
        pytest.skip("the public functions call what runs in the other parts of these tests")
    if request.param == "triton" or (request.param == "cublaslt" and device.type == "cpu"):
        monkeypatch.setattr(linear_act, "is_for_cublaslt", lambda x, weight: request.param == "cublaslt")
    return request.param


def draw(name, dtype, device, transposed):
    shape, width, out = SHAPES[name]

    def randn(*shape):
        return torch.randn(shape, device=device).to(DTYPES[dtype])

    def matrix(*shape):
        return randn(*shape[:-2], shape[-1], shape[-2]).mT if transposed and len(shape) > 1 else randn(*shape)

    weight = matrix(out, width) * max(width, 1) ** -0.5
    bias = randn(out, 2)[:, 0] if transposed else randn(out)
    return matrix(*shape, width), weight, bias, matrix(*shape, out), matrix(*shape, width)


FACTORS = dict(
    shape=list(SHAPES),
    dtype=["fp16", "fp32"],  # Triton's interpreter rounds bf16 towards zero
    activation=list(linear_act.ACTIVATIONS),
    transposed=[False, True],
)


ROWS = cover(FACTORS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_against_float64(row, device, backend):
    if device.type == "cuda" and backend == "triton" and row not in ROWS[:5]:
        pytest.skip("each takes seconds to compile")
    shape, dtype, activation, transposed = row.values()
    x, weight, bias, dout, act_input = draw(shape, dtype, device, transposed)
    if backend == "cublaslt" and not (
        linear_act.is_for_cublaslt(x, weight) and linear_act.is_for_cublaslt(dout, weight)
    ):
        pytest.skip("the Triton kernel computes this")
    fwd, dgrad = (kernels().fwd, kernels().dgrad) if backend == "triton" else (linear_act.forward, linear_act.backward)

    def formula(*tensors):
        x, weight, bias = tensors
        return oracle.linear(x, weight, bias, FORMULAS[activation])

    def gradient(dout, weight, act_input):
        leaf = act_input.detach().requires_grad_()
        dx = torch.einsum("...o,oi->...i", dout, weight)
        return torch.autograd.grad(oracle.ACTIVATIONS[FORMULAS[activation]](leaf), leaf, dx)[0]

    def check(found, function, *inputs):
        exact = function(*(x.double() for x in inputs))
        plus = unavoidable(exact, found.dtype, terms=100)
        assert found.dtype == x.dtype and found.is_contiguous()
        assert_error_ratio(found, exact, function(*inputs), plus=plus)

    for some_bias in (bias, None):
        out, stored = fwd(x, weight, some_bias, activation, True)
        wide_bias = torch.zeros_like(bias) if some_bias is None else bias
        check(out, formula, x, weight, wide_bias)
        check(stored, oracle.linear, x, weight, wide_bias)
        assert out.data_ptr() != stored.data_ptr() or out.numel() == 0
        alone, nothing = fwd(x, weight, some_bias, activation, False)
        check(alone, formula, x, weight, wide_bias)
        assert nothing.numel() == 0
    check(dgrad(dout, weight, None if activation == "id" else act_input, activation), gradient, dout, weight, act_input)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", [16, 300])
def test_every_tile_on_a_gpu(rows, device, monkeypatch):
    """Few rows and many have different tiles; the autotuner runs all of them and keeps one."""
    monkeypatch.setattr(kernels().kernel_fwd, "configs", kernels().all_configs())
    x = torch.randn(rows, 1000, device=device).bfloat16()
    weight = (torch.randn(2056, 1000, device=device) / 32).bfloat16()
    out, act_input = kernels().fwd(x, weight, None, "gelu", True)
    for found, name in ((out, "gelu"), (act_input, "identity")):
        exact = oracle.linear(x.double(), weight.double(), None, name)
        assert_error_ratio(found, exact, oracle.linear(x, weight, None, name))


def test_public_functions(device):
    x, weight, bias, dout, act_input = draw("odd", "fp32", device, False)
    weight.requires_grad_()
    out, stored = triton_linear_act(x, weight, bias, "gelu", save_act_input=True)
    assert not out.requires_grad
    torch.testing.assert_close(stored, triton_linear_act(x, weight, bias))
    torch.testing.assert_close(out, oracle.linear(x, weight.detach(), bias, "gelu"))
    torch.testing.assert_close(triton_dgrad_act(dout, weight), (dout @ weight).detach())
    flat = triton_dgrad_act(dout, weight, Activation.GeLU, act_input.flatten(0, 1))
    assert torch.equal(flat, triton_dgrad_act(dout, weight, "gelu", act_input))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("activation", linear_act.ACTIVATIONS)
@pytest.mark.same_on_cpu("dtype")
def test_compiled(activation, dtype, device, backend):
    if backend == "triton" or (device.type == "cuda" and dtype == "fp32" and activation != "gelu"):
        pytest.skip("other tests compare the kernel, whose compilation takes seconds")
    x, weight, bias, dout, act_input = draw("odd", dtype, device, False)
    calls = (
        lambda: triton_linear_act(x, weight, bias, activation),
        lambda: triton_linear_act(x, weight, bias, activation, save_act_input=True),
        lambda: triton_dgrad_act(dout, weight, activation, act_input),
    )
    for call in calls:
        torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="aot_eager")(), call())


@pytest.mark.cuda
def test_what_is_for_cublaslt(device):
    """16-bit operands whose rows have adjacent elements, and no others."""
    x, weight, *_ = draw("odd", "bf16", device, False)
    wide = torch.randn(3, 7, 48, device=device).half()[..., :33]
    assert linear_act.is_for_cublaslt(x, weight) and linear_act.is_for_cublaslt(wide, weight.half())
    assert not linear_act.is_for_cublaslt(x.float(), weight.float())
    assert not linear_act.is_for_cublaslt(x, weight.T.contiguous().T)
    assert not linear_act.is_for_cublaslt(x.mT.contiguous().mT, weight)


def test_opcheck(device):
    x, weight, bias, dout, act_input = draw("odd", "fp32", device, True)
    torch.library.opcheck(linear_act.fwd.default, (x, weight, bias, "gelu", True))
    torch.library.opcheck(linear_act.fwd.default, (x, weight, None, "id", True))
    torch.library.opcheck(linear_act.dgrad.default, (dout, weight, act_input, "squared_relu"))


# Device functions.

DEVICE_FUNCTIONS = {
    "tanh": torch.tanh,
    "cosh": torch.cosh,
    **{each.value: oracle.ACTIVATIONS[FORMULAS.get(each.value, each.value)] for each in Activation},
}


@pytest.mark.parametrize("name", DEVICE_FUNCTIONS)
def test_device_functions(name, device):
    pytest.importorskip("triton", reason="triton is not installed")
    import triton_probe

    x = torch.tensor([-50.0, -3.0, -1.0, -0.1, 0.1, 1.0, 3.0, 20.0], device=device)
    leaf = x.double().requires_grad_()
    right = DEVICE_FUNCTIONS[name](leaf)
    torch.testing.assert_close(triton_probe.apply(getattr(k_activations, name), x), right.float())
    if name in {each.value for each in Activation}:
        (slope,) = torch.autograd.grad(right.sum(), leaf)
        assert k_activations.get_triton_activation_kernel(name) is getattr(k_activations, name)
        grad = k_activations.get_triton_activation_bwd_kernel(Activation(name))
        torch.testing.assert_close(triton_probe.apply(grad, x), slope.float())


def test_registry():
    assert k_activations.get_triton_activation_kernel(None) is None
    assert k_activations.get_triton_activation_bwd_kernel(None) is None
    with pytest.raises(KeyError, match="activation must be one of"):
        k_activations.get_triton_activation_kernel("swish")
    with pytest.raises(AttributeError, match="has no attribute 'swish'"):
        k_activations.swish  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'kernel_fwd2'"):
        linear.kernel_fwd2  # noqa: B018


@pytest.mark.parametrize("module", [k_activations, linear, rotary, cross_entropy], ids=lambda module: module.__name__)
def test_names_of_triton_without_triton(module, monkeypatch):
    """They are attributes that are not there, so that hasattr and getattr with a default answer."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" or "flash_attn._triton" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # whose import then fails
    names = {k_activations: "relu", linear: "kernel_fwd", rotary: "rotary_kernel"}
    name = names.get(module, "cross_entropy_fwd_kernel")
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*triton"):
        getattr(module, name)


def test_names_of_triton():
    pytest.importorskip("triton", reason="triton is not installed")
    assert linear.kernel_fwd is not linear.kernel_bwd
    assert {config.kwargs["BLOCK_M"] for config in linear.get_configs_io_bound()} == {16, 32}
    x = torch.ones(3)
    linear.init_to_zero("x")({"x": x})
    assert not x.any()


# The MLP.


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_mlp(dtype, level, device, backend):
    if backend == "triton" and device.type == "cpu":
        pytest.skip("the dispatcher calls the reference, as for the public functions")
    module = FusedDenseSqreluDense(64, 128, 32, checkpoint_lvl=level).to(device, DTYPES[dtype])
    x = torch.randn(3, 5, 64, device=device).to(DTYPES[dtype])
    dout = torch.randn(3, 5, 32, device=device).to(DTYPES[dtype])
    inputs = [x, module.fc1.weight, module.fc1.bias, module.fc2.weight, module.fc2.bias]

    def gradients(function, inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    def formula(*inputs):
        return oracle.mlp(*inputs, "sqrelu")

    found = gradients(lambda *inputs: fused_dense_sqrelu_dense_function(*inputs, level), inputs)
    exact, plain = gradients(formula, [x.double() for x in inputs]), gradients(formula, inputs)
    for ours, right, baseline in zip(found, exact, plain, strict=True):
        assert_error_ratio(ours, right, baseline, plus=unavoidable(right, ours.dtype, terms=1000))
    assert torch.equal(module(x), found[0])
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert module(x).dtype == torch.bfloat16


def test_module():
    module = FusedDenseSqreluDense(16)
    assert list(module.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert module.fc1.weight.shape == (64, 16) and module.fc2.weight.shape == (16, 64)
    assert FusedDenseSqreluDense(16, bias1=False, bias2=False).fc1.bias is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported(dtype, device):
    module = FusedDenseSqreluDense(16, device=device, dtype=DTYPES[dtype])
    x = torch.randn(5, 16, device=device).to(DTYPES[dtype])
    tensors = x, module.fc1.weight, module.fc1.bias, module.fc2.weight, module.fc2.bias
    exact = oracle.mlp(*(tensor.double() for tensor in tensors), "sqrelu")
    assert_error_ratio(torch.export.export(module, (x,)).module()(x), exact, oracle.mlp(*tensors, "sqrelu"))


X, W = torch.zeros(5, 8), torch.zeros(16, 8)
ERRORS = {
    "x is no tensor": (lambda: triton_linear_act([1.0], W), TypeError, "x must be a torch.Tensor"),
    "types": (lambda: triton_linear_act(X, W.half()), TypeError, "weight must have dtype torch.float32"),
    "widths": (lambda: triton_linear_act(X, W.T), ValueError, r"weight must have shape \(\*, 8\)"),
    "bias": (lambda: triton_linear_act(X, W, X), ValueError, r"bias must have shape \(16,\)"),
    "activation": (lambda: triton_linear_act(X, W, activation="relu"), ValueError, "activation must be one of"),
    "flag": (lambda: triton_linear_act(X, W, save_act_input=2), TypeError, "save_act_input must be a bool"),
    "no input": (lambda: triton_dgrad_act(X, W.T, "gelu"), TypeError, "act_input must be a torch.Tensor, found None"),
    "input": (lambda: triton_dgrad_act(X, W.T, "gelu", X), ValueError, r"act_input must be of shape \(5, 16\)"),
    "level": (lambda: FusedDenseSqreluDense(8, checkpoint_lvl=3), ValueError, "checkpoint_lvl must be 0, 1 or 2"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    call, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        call()
