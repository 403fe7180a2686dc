"""batch_invariant_linear against float64, and its bits, which depend on no other row; torch's layers in a context."""

import functools
import importlib

import oracle
import pytest
import torch
import torch.nn.functional as F
from cases import DTYPES, cover
from compare import assert_error_ratio, unavoidable
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn import batch_invariant
from flash_attn._ops import fused_dense, linear, linear_act
from flash_attn._ops.layers_in_force import layers_in_force
from flash_attn.ops.fused_dense import FusedDense, FusedMLP
from flash_attn.ops.linear import batch_invariant_layers, batch_invariant_linear
from flash_attn.ops.triton.linear import triton_linear_act

SHAPES = {  # rows, in, out
    "few": ((5,), 16, 24),
    "odd": ((3, 7), 33, 65),
    "one": ((), 1, 1),
    "tiles": ((70,), 64, 130),
    "many": ((2, 150), 130, 40),
    "no rows": ((0, 3), 8, 8),
    "no features": ((4,), 0, 8),
    "no outputs": ((4,), 8, 0),
}
FACTORS = dict(shape=list(SHAPES), dtype=["bf16", "fp16", "fp32", "fp64"], bias=[False, True], transposed=[False, True])
ALL_DTYPES = DTYPES | {"fp64": torch.float64}


def kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    return importlib.import_module("flash_attn._triton.linear_act")


def draw(shape, dtype, device, bias=True, transposed=False):
    rows, width, out = SHAPES[shape] if isinstance(shape, str) else shape

    def randn(*shape):
        return torch.randn(shape, device=device).to(ALL_DTYPES[dtype])

    x = randn(*rows[:-1], width, *rows[-1:]).mT if transposed and rows else randn(*rows, width)
    weight = randn(width, out).mT if transposed else randn(out, width)
    return x, weight * max(width, 1) ** -0.5, randn(out) if bias else None


@pytest.mark.parametrize("row", cover(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_against_float64(row, device):
    x, weight, bias = draw(row["shape"], row["dtype"], device, row["bias"], row["transposed"])
    leaves = [tensor for tensor in (x, weight, bias) if tensor is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    out = batch_invariant_linear(x, weight, bias)
    dout = torch.randn_like(out)
    found = out, *torch.autograd.grad(out, leaves, dout)

    def formula(dtype):
        inputs = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = oracle.linear(*inputs[:2], inputs[2] if bias is not None else None, "identity")
        return out, *torch.autograd.grad(out, inputs, dout.to(dtype))

    for each, exact, plain in zip(found, formula(torch.float64), formula(x.dtype), strict=True):
        assert each.dtype == x.dtype and each.shape == exact.shape
        assert_error_ratio(each, exact, plain, plus=unavoidable(exact, each.dtype, terms=200))


def same_rows(function, x, counts=(1, 3, 31, 64, 65)):
    """Whether each row of function(x) has the bits that it has alone, among others, and at another place."""
    expected = function(x)
    rows = len(x)
    for count in (*counts, rows):
        places = torch.randperm(rows, device=x.device)[:count]
        if not torch.equal(function(x[places]), expected[places]):
            return False
    return torch.equal(function(x[-1]), expected[-1])


WIDTHS = [(16, 24), (64, 130), (100, 1000), (512, 96), (1000, 33), (1100, 64), (768, 5), (257, 2), (33, 1000), (8, 7)]


@pytest.mark.parametrize("width", WIDTHS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_bits_depend_on_no_other_row(dtype, width, device):
    x, weight, bias = draw(((1030 if width == WIDTHS[1] else 200,), *width), dtype, device)
    assert same_rows(functools.partial(batch_invariant_linear, weight=weight, bias=bias), x)
    dout = torch.randn(150, width[1], device=device).to(x.dtype)

    def dx(dout):
        leaf = torch.zeros(*dout.shape[:-1], width[0], dtype=x.dtype, device=device, requires_grad=True)
        return torch.autograd.grad(batch_invariant_linear(leaf, weight, bias), leaf, dout)[0]

    assert same_rows(dx, dout)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("shape", [((31,), 16, 3), ((32,), 512, 500), ((32,), 1100, 1), ((5,), 33, 8)], ids=str)
def test_layouts_change_no_bit(dtype, shape, device):
    """A weight is stored as (in, out) by some packages, or begins anywhere in a buffer."""
    x, weight, _ = draw(shape, dtype, device)
    expected = batch_invariant_linear(x, weight)
    offset = F.pad(weight.flatten(), (3, 0))[3:].view(weight.shape)
    for each in (weight.mT.contiguous().mT, offset, F.pad(weight, (1, 2))[:, 1:-2]):
        assert torch.equal(batch_invariant_linear(x, each), expected)
    for each in (x.mT.contiguous().mT, F.pad(x, (1, 2))[:, 1:-2]):
        assert torch.equal(batch_invariant_linear(each, weight), expected)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("width", [(70, 40), (64, 33)], ids=str)
def test_kernel(dtype, width, device):
    """In Triton's interpreter on a CPU."""
    x, weight, bias = draw(((131,), *width), dtype, device)
    fwd = functools.partial(kernels().fwd_in_fixed_tiles, weight=weight, bias=bias)
    exact = oracle.linear(x.double(), weight.double(), bias.double(), "identity")
    assert_error_ratio(fwd(x), exact, F.linear(x, weight, bias), plus=unavoidable(exact, x.dtype, terms=100))
    assert same_rows(fwd, x, (1, 64, 65))
    without = kernels().fwd_in_fixed_tiles(x, weight, None)
    assert torch.equal(kernels().fwd_in_fixed_tiles(x[:3], weight.mT.contiguous().mT, None), without[:3])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width", [(4096, 4096), (1024, 151), (11008, 512), (72, 50304)], ids=str)
def test_kernel_for_all_numbers_of_rows(dtype, width, device):
    """The tiles for few rows and for many have the same bits."""
    x, weight, bias = draw(((4100,), *width), dtype, device)
    fwd = functools.partial(batch_invariant_linear, weight=weight, bias=bias)
    assert same_rows(fwd, x, (1, 2, 8, 16, 17, 63, 64, 65, 127, 128, 129, 256, 1000, 2048))


def test_threads_change_no_bit(device):
    if device.type != "cpu":
        pytest.skip("threads are of the CPU")
    before = torch.get_num_threads()
    x, weight, bias = draw(((200,), 768, 384), "fp32", device)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(batch_invariant_linear(x, weight, bias))
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_second_derivatives(device):
    x, weight, bias = (tensor.requires_grad_() for tensor in draw(((2,), 3, 4), "fp64", device))
    assert torch.autograd.gradgradcheck(batch_invariant_linear, (x, weight, bias))


def test_autocast(device):
    x, weight, bias = draw("odd", "fp32", device)
    with torch.autocast(device.type, torch.bfloat16):
        found = batch_invariant_linear(x, weight, bias)
    assert torch.equal(found, batch_invariant_linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(x=torch.ones(3, 5)), ValueError, r"weight must have shape \(\*, 5\), found \(24, 16\)"),
        (dict(x=torch.ones(3, 16).half()), TypeError, "weight must have dtype torch.float16, found torch.float32"),
        (dict(bias=torch.ones(3)), ValueError, r"bias must have shape \(24,\), found \(3,\)"),
        (dict(x=torch.ones(3, 16).long()), TypeError, "x must have dtype torch.float32 or .* found torch.int64"),
        (dict(x=torch.ones(())), ValueError, "x must have at least one dimension"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(x=torch.ones(3, 16), weight=torch.ones(24, 16), bias=torch.ones(24)) | change
    with pytest.raises(error, match=message):
        batch_invariant_linear(**arguments)


# ---------------------------------------------------------------------------------------------------------------------
# Torch's layers within a context, and the package's at level 2

WRITTEN = {
    "linear": lambda x, weight, bias: F.linear(x, weight, bias),
    "without bias": lambda x, weight, bias: F.linear(x, weight),
    "by name": lambda x, weight, bias: F.linear(input=x, weight=weight, bias=bias),
    "matmul": lambda x, weight, bias: torch.matmul(x, weight.T),
    "operator": lambda x, weight, bias: x @ weight.T,
    "mm": lambda x, weight, bias: x.mm(weight.T),
    "addmm": lambda x, weight, bias: torch.addmm(bias, x, weight.T),
    "addmm with factors of 1": lambda x, weight, bias: bias.addmm(x, weight.T, beta=1, alpha=1.0),
    "reversed operator": lambda x, weight, bias: weight.T.__rmatmul__(x),
    "mm by name": lambda x, weight, bias: torch.mm(input=x, mat2=weight.T),
    "method mm by name": lambda x, weight, bias: x.mm(mat2=weight.T),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_torch_layers_within_the_context(name, device):
    x, weight, bias = draw("tiles", "fp32", device)
    has_bias = name.startswith(("linear", "by name", "addmm"))
    expected = batch_invariant_linear(x, weight, bias if has_bias else None)
    with batch_invariant_layers():
        found = WRITTEN[name](x, weight, bias)
    assert torch.equal(found, expected)


ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu by tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x * 1, inplace=True),
    "silu of a module": lambda x: torch.nn.SiLU(inplace=True)(x * 1),
    "gelu by position": lambda x: torch.nn.GELU("tanh")(x),
    "sigmoid": torch.sigmoid,
    "method": lambda x: x.sigmoid(),
    "sigmoid in place": lambda x: (x * 1).sigmoid_(),
    "function in place": lambda x: torch.sigmoid_(x * 1),
    "expit": torch.special.expit,
    "glu": F.glu,
    "glu along rows": lambda x: F.glu(x, dim=0),
    "relu": F.relu,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_within_the_context(name, dtype, device):
    function, x = ACTIVATIONS[name], (3 * torch.randn(64, 38, device=device)).to(ALL_DTYPES[dtype])
    exact = function(x.double())
    with batch_invariant_layers():
        found = function(x)
        alone = [function(x[i : i + 1]) for i in range(5 if "along" not in name else 0)]
    assert found.dtype == x.dtype
    assert_error_ratio(found, exact, function(x), plus=unavoidable(exact, x.dtype, terms=4))
    if alone:
        assert torch.equal(torch.cat(alone), found[:5])


def test_gradients_within_the_context(device):
    """Also of an activation that overwrites what its derivative needs."""
    x = (3 * torch.randn(5, 8, device=device)).requires_grad_()
    for name in (name for name in ACTIVATIONS if "along" not in name):
        (plain,) = torch.autograd.grad(ACTIVATIONS[name](x).square().sum(), x)
        with batch_invariant_layers():
            (found,) = torch.autograd.grad(ACTIVATIONS[name](x).square().sum(), x)
        assert torch.allclose(found, plain, rtol=1e-4, atol=1e-5), name


def test_autocast_within_the_context(device):
    """As torch's own, which leaves float64 alone."""
    layer = torch.nn.Linear(8, 5, device=device)
    with torch.autocast(device.type, torch.bfloat16), batch_invariant_layers():
        assert layer(torch.randn(3, 8, device=device)).dtype == torch.bfloat16
        assert layer.double()(torch.randn(3, 8, device=device).double()).dtype == torch.float64


def test_products_that_are_no_layers_are_left_alone(device):
    x, other = torch.randn(2, 3, 8, device=device), torch.randn(2, 8, 5, device=device)
    bias = torch.randn(4, 4, device=device)
    integers = torch.ones(2, 2, dtype=torch.int64)
    with batch_invariant_layers():
        assert torch.equal(x @ other, torch.bmm(x, other))
        assert torch.addmm(bias, bias, bias, beta=0.5).shape == (4, 4)
        assert torch.equal(integers @ integers, 2 * integers)


ONES = torch.ones(3, 4)
LIKE_TORCH = {  # calls with one result, or one error, within the context and without
    "shapes": lambda: F.linear(ONES, torch.ones(5, 3)),
    "shapes of matmul": lambda: ONES @ torch.ones(3, 5),
    "no dimension": lambda: F.linear(torch.tensor(1.0), torch.ones(1, 1)),
    "a row as weight": lambda: F.linear(ONES, torch.ones(4)),
    "a vector": lambda: ONES @ torch.ones(4),
    "a vector from the left": lambda: torch.ones(3) @ ONES,
    "dtypes": lambda: F.linear(ONES, torch.ones(5, 4, dtype=torch.bfloat16)),
    "dtype of a bias": lambda: F.linear(ONES, torch.ones(5, 4), torch.ones(5, dtype=torch.float64)),
    "a number as bias": lambda: F.linear(ONES, torch.ones(5, 4), torch.tensor(2.0)),
    "one bias": lambda: F.linear(ONES, torch.ones(5, 4), torch.ones(1)),
    "a matrix as bias": lambda: F.linear(ONES, torch.ones(5, 4), torch.ones(3, 5)),
    "a bias of another size": lambda: F.linear(ONES, torch.ones(5, 4), torch.ones(4)),
    "mm of three dimensions": lambda: torch.mm(torch.ones(2, 3, 4), torch.ones(4, 5)),
    "addmm of three dimensions": lambda: torch.addmm(torch.ones(5), torch.ones(2, 3, 4), torch.ones(4, 5)),
    "no tensor": lambda: ONES @ 3,
    "sparse": lambda: ONES.to_sparse() @ torch.ones(4, 5),
    "complex": lambda: torch.sigmoid(torch.full((3,), 1j)),
    "integers, sigmoid": lambda: torch.sigmoid(torch.tensor([-1, 2])),
    "integers, gelu": lambda: F.gelu(torch.tensor([-1, 2])),
    "integers, silu": lambda: F.silu(torch.tensor([-1, 2])),
    "integers, glu": lambda: F.glu(torch.tensor([-1, 2])),
    "approximate": lambda: F.gelu(ONES, approximate="erf"),
}


@pytest.mark.parametrize("name", LIKE_TORCH)
def test_what_is_no_layer_is_as_without_the_context(name):
    def outcome():
        try:
            return LIKE_TORCH[name]()
        except Exception as error:
            return type(error), str(error)

    expected = outcome()
    with batch_invariant_layers():
        found = outcome()
    if isinstance(expected, tuple):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


def test_weights_that_are_no_plain_tensors_are_refused(device):
    class Quantized(torch.Tensor):
        pass

    x, weight, _ = draw("few", "fp32", device)
    with (
        batch_invariant_layers(),
        pytest.raises(NotImplementedError, match=r"weight of a linear layer must be a plain tensor .* found Quantized"),
    ):
        F.linear(x, weight.as_subclass(Quantized))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_layers_of_the_package_at_level_2(dtype, device):
    torch.manual_seed(0)
    modules = [
        FusedMLP(48, 80, activation=name, checkpoint_lvl=level) for name in ("relu", "sqrelu") for level in (0, 2)
    ]
    modules += [FusedMLP(48, 80, return_residual=True), FusedDense(48, 33), FusedDense(48, 33, return_residual=True)]
    x = torch.randn(140, 48, device=device).to(DTYPES[dtype])
    for module in (each.to(device, DTYPES[dtype]) for each in modules):

        def out(x, module=module):
            result = module(x)
            return result[0] if isinstance(result, tuple) else result

        def gradients(x, out=out, module=module):
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(out(leaf).double().square().sum(), [leaf, *module.parameters()])

        plain = gradients(x)
        with batch_invariant(2):
            assert same_rows(lambda x, out=out: out(x).detach(), x)
            found = gradients(x)
            with torch.no_grad():
                assert torch.equal(out(x), out(x.detach().requires_grad_()))
        for each, expected in zip(found, plain, strict=True):
            assert (each - expected).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("activation", linear_act.ACTIVATIONS)
def test_linear_act_at_level_2(activation, device):
    x, weight, bias = draw("tiles", "fp32", device)
    exact = triton_linear_act(x.double().float(), weight, bias, activation)
    with batch_invariant(2):
        found, act_input = triton_linear_act(x, weight, bias, activation, save_act_input=True)
        assert same_rows(lambda x: triton_linear_act(x, weight, bias, activation), x)
    assert torch.equal(act_input, batch_invariant_linear(x, weight, bias))
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-5)


def test_compiled_layers_follow_the_level(device):
    layer, backend = torch.nn.Linear(48, 33).to(device), CompileCounterWithBackend("eager")
    x = torch.randn(70, 48, device=device)

    @torch.compile(backend=backend, fullgraph=True)
    def run(x):
        with layers_in_force():
            return F.silu(layer(x))

    for level in (0, 2, 0, 2):
        with batch_invariant(level), torch.no_grad():
            expected = layer(x) if level == 0 else batch_invariant_linear(x, layer.weight, layer.bias)
            assert torch.allclose(run(x), F.silu(expected), rtol=1e-6)
            if level == 2:
                assert torch.equal(run(x)[:1], run(x[:1].contiguous()))
    assert backend.frame_count <= 4


def test_transforms_are_refused_at_level_2(device):
    x, weight, bias = draw("few", "fp32", device)
    calls = (
        lambda x: batch_invariant_linear(x, weight, bias),
        lambda x: fused_dense.mlp(x, weight, bias, weight.mT, None, "relu", True, False, 0, 0, None),
    )
    for call in calls:
        with batch_invariant(2), pytest.raises(NotImplementedError):
            torch.func.jvp(call, (x,), (x,))


def test_the_count_of_operations(device):
    x, weight, bias = draw("tiles", "fp32", device)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        linear.fwd(x, weight, bias)
    assert counter.get_total_flops() == 2 * 70 * 64 * 130
