"""Fused dense layers and MLPs: values, gradients, what is kept, graphs, errors, traps of kernels."""

import dataclasses
import functools
import warnings
import zlib

import oracle
import pytest
import torch
from cases import DTYPES, laid_out, params, sample
from compare import assert_error_ratio, unavoidable
from torch import nn

import fused_dense_lib
from flash_attn._ops import activation as activation_ops
from flash_attn._ops import fused_dense as fused_dense_ops
from flash_attn.modules.mlp import Mlp
from flash_attn.ops import fused_dense
from flash_attn.ops.fused_dense import (
    FewRowsLinear,
    FusedDense,
    FusedMLP,
    Linear,
    ParallelFusedMLP,
    fused_dense_func,
    fused_mlp_func,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One MLP, or its first layer. `str(case)` is its id and seeds its tensors."""

    shape: tuple = (7, 5)  # of the rows
    widths: tuple = (64, 128, 32)  # in, hidden, out
    dtype: str = "bf16"
    bias1: bool = True
    bias2: bool = True
    activation: str = "gelu_approx"
    checkpoint_lvl: int = 0
    heuristic: int = 0
    residual: bool = False
    layout: str = "contiguous"

    def __str__(self):
        parts = [
            "x".join(map(str, self.shape)) + "rows" * (not self.shape),
            "-".join(map(str, self.widths)),
            f"{self.dtype}-{self.activation}-lvl{self.checkpoint_lvl}-h{self.heuristic}",
            "nobias1" * (not self.bias1),
            "nobias2" * (not self.bias2),
            "residual" * self.residual,
            self.layout * (self.layout != "contiguous"),
        ]
        return "-".join(part for part in parts if part)

    def draw(self, device):
        """x, weight1, bias1, weight2, bias2, and gradients for the output and the residual."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))

        def randn(*shape, scale=1.0):
            return (torch.randn(shape, device=device, generator=generator) * scale).to(DTYPES[self.dtype])

        width, hidden, out = self.widths
        x = arranged(randn(*self.shape, width), self.layout)
        weight1 = arranged(randn(hidden, width, scale=max(width, 1) ** -0.5), self.layout)
        bias1 = randn(hidden) if self.bias1 else None
        return [
            x,
            weight1,
            away_from_kink(x, weight1, bias1) if self.bias1 and self.activation == "relu" else bias1,
            arranged(randn(out, hidden, scale=max(hidden, 1) ** -0.5), self.layout),
            randn(out) if self.bias2 else None,
            arranged(randn(*self.shape, out), self.layout),
            randn(*self.shape, width) if self.residual else None,
        ]


def away_from_kink(x, weight, bias):
    """bias (out,), increased where x weight^T + bias is too near to 0 to tell in the dtype of x on which side it is.

    cuBLASLt rounds some products before it adds the bias. The sum may then be 0, where the derivative of relu is 0,
    while the exact sum is positive, where the derivative is 1.
    """
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    product = rows.double() @ weight.double().mT
    rounding = torch.finfo(x.dtype).eps * product.abs() + 1e-5  # of the product, and of sums in float32
    while (near := ((product + bias).abs() < rounding).any(0)).any():
        bias = torch.where(near, bias + 1 / 32, bias)
    return bias


def arranged(x, layout):
    """The same in other strides, among NaN."""
    if layout == "transposed":
        return x.mT.contiguous().mT if x.dim() > 1 else x
    if layout == "halved":  # rows that lie apart, as aligned as they are wide
        return torch.cat([x, torch.full_like(x, float("nan"))], dim=-1)[..., : x.shape[-1]]
    return laid_out(x, layout)


LAYOUTS = ["contiguous", "sliced", "halved", "transposed", "last_dim_strided", "unaligned"]


def gradients(function, inputs, douts):
    """The outputs of function(*inputs) and the gradients of those inputs that there are."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = list(outs) if isinstance(outs, tuple) else [outs]
    there = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(outs, there, [dout.to(out.dtype) for dout, out in zip(douts, outs, strict=True)])
    return [out.detach() for out in outs] + list(grads)


def plain_linear(x, weight, bias=None, activation="identity"):
    """`oracle.linear` as torch computes it, with one rounding of the product and the bias together.

    Where the product is rounded before the bias is added, errors are others, and the largest of few may by chance be
    less than half of ours.
    """
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    out = rows @ weight.mT if bias is None else torch.addmm(bias, rows, weight.mT)
    return oracle.ACTIVATIONS[activation](out.view(*x.shape[:-1], len(weight)))


def plain_mlp(x, weight1, bias1, weight2, bias2, activation):
    """`oracle.mlp` likewise."""
    return plain_linear(plain_linear(x, weight1, bias1, activation), weight2, bias2)


def assert_like_formula(function, formula, plain_formula, inputs, douts, terms=16):
    """Outputs and gradients of `function` against those of `formula` in float64 and of `plain_formula` as it is."""
    found = gradients(function, inputs, douts)
    wide = [None if x is None else x.double() for x in inputs]
    exact = gradients(formula, wide, [dout.double() for dout in douts])
    plain = gradients(plain_formula, inputs, douts)
    if inputs[0].device.type == "cpu" and plain_linear(*inputs[:2]).isnan().any():
        pytest.skip("torch itself reads behind rows of odd width: PyTorch 2.13 in bfloat16, on CPUs with AMX")
    for i, (ours, right, baseline) in enumerate(zip(found, exact, plain, strict=True)):
        assert ours.dtype == baseline.dtype
        largest = max(1.0, right.abs().max().item()) if right.numel() else 1.0
        assert_error_ratio(ours, right, baseline, plus=unavoidable(right, ours.dtype, terms * largest), name=f"{i}")


EDGES = [
    Case(),
    Case(heuristic=-1),
    Case(heuristic=3, dtype="fp16"),
    Case(activation="relu", checkpoint_lvl=1),
    Case(activation="relu", heuristic=-1, checkpoint_lvl=2),
    Case(activation="sqrelu", checkpoint_lvl=1),
    Case(dtype="fp32", checkpoint_lvl=1, residual=True),
    Case(shape=(), residual=True),
    Case(shape=(1,), widths=(8, 16, 8)),
    Case(shape=(3, 1, 11), widths=(77, 131, 13)),
    Case(shape=(9,), widths=(1, 3, 1), activation="relu"),
    Case(shape=(300,), widths=(256, 520, 248), dtype="fp16", residual=True),
    Case(bias1=False, bias2=False, residual=True),
    *(Case(layout=layout, residual=True) for layout in LAYOUTS[1:]),
]
FACTORS = dict(
    shape=[(37,), (3, 11)],
    widths=[(64, 128, 32), (40, 24, 72), (33, 50, 7)],
    dtype=["bf16", "fp16", "fp32"],
    bias1=[True, False],
    bias2=[True, False],
    activation=["gelu_approx", "relu", "sqrelu"],
    checkpoint_lvl=[0, 1, 2],
    heuristic=[-1, 0, 1],
    residual=[False, True],
    layout=LAYOUTS,
)
CASES = params(EDGES) + [param for param in sample(FACTORS, Case) if param.id not in map(str, EDGES)]


@pytest.mark.parametrize("case", CASES)
def test_mlp(case, device):
    *inputs, dout, dresidual = case.draw(device)

    def ours(x, weight1, bias1, weight2, bias2):
        return fused_mlp_func(
            x,
            weight1,
            weight2,
            bias1,
            bias2,
            case.activation,
            return_residual=case.residual,
            checkpoint_lvl=case.checkpoint_lvl,
            heuristic=case.heuristic,
        )

    def with_residual(mlp, *inputs):
        out = mlp(*inputs, case.activation)
        return (out, inputs[0] * 1) if case.residual else out

    formulas = (functools.partial(with_residual, mlp) for mlp in (oracle.mlp, plain_mlp))
    assert_like_formula(ours, *formulas, inputs, [dout] if dresidual is None else [dout, dresidual])


@pytest.mark.parametrize("case", CASES)
def test_dense(case, device):
    x, weight, bias, _, _, _, dresidual = case.draw(device)
    dout = torch.randn(*case.shape, len(weight), device=device).to(x.dtype)

    def with_residual(linear, *inputs):
        out = linear(*inputs)
        return (out, inputs[0] * 1) if case.residual else out

    formulas = (functools.partial(with_residual, linear) for linear in (oracle.linear, plain_linear))
    assert_like_formula(
        lambda x, weight, bias: fused_dense_func(x, weight, bias, return_residual=case.residual),
        *formulas,
        [x, weight, bias],
        [dout] if dresidual is None else [dout, dresidual],
    )


FEW_ROWS = params(
    Case((rows,), widths, dtype, bias, bias, activation, layout=layout)
    for rows, widths, dtype, bias, activation, layout in [
        (1, (8, 8, 1), "bf16", True, "gelu_approx", "contiguous"),
        (1, (4096, 24, 520), "bf16", False, "relu", "contiguous"),
        (1, (1032, 4200, 7), "fp16", True, "sqrelu", "contiguous"),
        (2, (200, 1000, 16), "bf16", True, "gelu_approx", "sliced"),
        (3, (64, 9000, 72), "bf16", True, "gelu_approx", "contiguous"),
        (7, (64, 136, 40), "fp16", False, "gelu_approx", "contiguous"),
        (8, (264, 72, 9), "bf16", True, "relu", "sliced"),
        (9, (96, 130, 264), "bf16", True, "gelu_approx", "contiguous"),
        (15, (2056, 520, 64), "fp16", True, "gelu_approx", "transposed"),
        (16, (128, 4104, 33), "bf16", True, "gelu_approx", "contiguous"),
        (17, (128, 4104, 33), "bf16", True, "gelu_approx", "contiguous"),
    ]
)


@pytest.mark.parametrize("case", FEW_ROWS)
def test_few_rows_without_gradient(case, device):
    """What decoding computes."""
    x, weight1, bias1, weight2, bias2, *_ = case.draw(device)
    inputs = x, weight1, bias1, weight2, bias2
    with torch.no_grad():
        for formula, plain_formula, ours, tensors in (
            (oracle.linear, plain_linear, fused_dense_func, inputs[:3]),
            (
                lambda *inputs: oracle.mlp(*inputs, case.activation),
                lambda *inputs: plain_mlp(*inputs, case.activation),
                lambda x, w1, b1, w2, b2: fused_mlp_func(x, w1, w2, b1, b2, case.activation),
                inputs,
            ),
        ):
            out = ours(*tensors)
            exact = formula(*(None if tensor is None else tensor.double() for tensor in tensors))
            plus = unavoidable(exact, out.dtype, 16 * max(1.0, exact.abs().max().item()))
            assert_error_ratio(out, exact, plain_formula(*tensors), plus=plus)


@pytest.mark.parametrize("activation", ["silu", "gelu_approx", "relu", "sqrelu"])
@pytest.mark.parametrize("case", FEW_ROWS)
def test_gated_layer(case, activation, device):
    """The bits of the layer and its gates as two ops, also where the memory of the result had other values."""
    x, weight, bias, *_ = case.draw(device)
    for rows in {len(weight) // 2 * 2, 2, 6}:
        part = weight[:rows], None if bias is None else bias[:rows]
        right = activation_ops.gated_fwd(fused_dense_ops.fwd(x, *part, "identity", False, 0)[0], activation)
        poison = torch.full_like(right, float("nan"))
        del poison  # its memory is likely to be that of the result
        assert torch.equal(fused_dense_ops.gated_fwd(x, *part, activation), right)


def test_gated_layer_of_nothing(device):
    for rows, width, features in [(0, 8, 4), (3, 0, 4), (3, 8, 0)]:
        x, weight = torch.ones(rows, width, device=device).half(), torch.ones(2 * features, width, device=device).half()
        out = fused_dense_ops.gated_fwd(x, weight, None, "silu")
        assert out.shape == (rows, features) and not out.any()


def test_gated_layer_is_checked(device):
    x, weight = torch.ones(3, 8, device=device).half(), torch.ones(6, 8, device=device).half()
    with pytest.raises(ValueError, match=r"weight must have shape \(2 \* features, in_features\), found \(5, 8\)"):
        fused_dense_ops.gated_linear(x, weight[:5], None, "silu")
    with pytest.raises(NotImplementedError, match="must not require grad"):
        fused_dense_ops.gated_fwd.default(x, weight.requires_grad_(), None, "silu")
    torch.library.opcheck(fused_dense_ops.gated_fwd.default, (x, weight.detach(), None, "silu"))
    torch.library.opcheck(fused_dense_ops.gated_fwd.default, (x, weight.detach(), weight.detach()[:, 0], "gelu_approx"))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
def test_empty(activation, zero, dtype, device):
    """No rows, or no features anywhere: a sum of nothing is zero."""
    sizes = [5, 64, 128, 32]
    sizes[zero] = 0
    case = Case(shape=(sizes[0], 3), widths=tuple(sizes[1:]), dtype=dtype, activation=activation)
    *inputs, dout, _ = case.draw(device)
    x, weight1, bias1, weight2, bias2 = inputs
    assert_like_formula(
        lambda *args: fused_dense_func(*args),
        oracle.linear,
        plain_linear,
        [x, weight1, bias1],
        [torch.ones(5 if zero else 0, 3, sizes[2], device=device)],
    )
    for level in (0, 1, 2):
        assert_like_formula(
            lambda x, w1, b1, w2, b2, level=level: fused_mlp_func(x, w1, w2, b1, b2, activation, checkpoint_lvl=level),
            lambda *args: oracle.mlp(*args, activation),
            lambda *args: plain_mlp(*args, activation),
            inputs,
            [dout],
        )


@pytest.mark.parametrize("frozen", range(5))
@pytest.mark.parametrize("only", [False, True])
def test_some_inputs_without_gradient(only, frozen, device):
    """One of the five tensors, or all but one."""
    *inputs, dout, _ = Case(dtype="fp32").draw(device)

    def grads(function):
        leaves = [x.clone().requires_grad_((i == frozen) == only) for i, x in enumerate(inputs)]
        function(*leaves).backward(dout)
        return [x.grad for x in leaves]

    for level in (0, 1, 2):
        found = grads(lambda x, w1, b1, w2, b2, level=level: fused_mlp_func(x, w1, w2, b1, b2, checkpoint_lvl=level))
        right = grads(lambda *args: oracle.mlp(*args, "gelu_approx"))
        for ours, want in zip(found, right, strict=True):
            assert (ours is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(ours, want)


def test_the_residual_alone_has_a_gradient(device):
    *inputs, _, dresidual = Case(residual=True).draw(device)
    x, weight1, bias1, weight2, bias2 = inputs
    x.requires_grad_()
    for _, residual in (
        fused_dense_func(x, weight1.requires_grad_(), bias1, return_residual=True),
        fused_mlp_func(x, weight1, weight2, bias1, bias2, return_residual=True),
    ):
        assert torch.equal(residual, x)
        assert torch.equal(torch.autograd.grad(residual, x, dresidual)[0], dresidual)


@pytest.mark.parametrize("parameters", ["fp32", "fp16"])
def test_autocast(parameters, device):
    """Inputs and parameters are cast; gradients have the dtypes of what was cast, wherever the backward runs."""
    module = FusedMLP(64, 128, 32, return_residual=True).to(device, DTYPES[parameters])
    x = torch.randn(5, 64, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out, residual = module(x)
        dense = fused_dense_func(x, module.fc1.weight, module.fc1.bias)
        assert out.dtype == residual.dtype == dense.dtype == torch.bfloat16
        assert torch.equal(residual, x.bfloat16())
        inside = torch.autograd.grad(out.float().sum(), [x, *module.parameters()], retain_graph=True)
    outside = torch.autograd.grad(out.float().sum(), [x, *module.parameters()])
    for one, other, leaf in zip(inside, outside, [x, *module.parameters()], strict=True):
        assert one.dtype == leaf.dtype and torch.equal(one, other)
    narrow = FusedMLP(64, 128, 32).to(device, torch.bfloat16)
    narrow.load_state_dict(module.state_dict())
    assert torch.equal(narrow(x.bfloat16()), out)


def test_backward_under_autocast_keeps_float32(device):
    module, x = FusedMLP(64).to(device), torch.randn(5, 64, device=device, requires_grad=True)
    out = module(x)
    right = torch.autograd.grad(out.sum(), [x, *module.parameters()], retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    torch.testing.assert_close(found, right, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_kept_for_the_gradient(dtype, activation, device):
    """Beside the inputs: nothing at level 2, and outside of training."""
    x = torch.randn(40, 64, device=device, dtype=DTYPES[dtype], requires_grad=True)
    module = FusedMLP(64, 256, activation=activation).to(device, x.dtype)
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *module.parameters())}

    def kept():
        """Tensors (rows, hidden) that the graph holds."""
        tensors = []

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() not in known:
                tensors.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
        return tensors

    for level, count in ((0, 1 if activation == "relu" else 2), (1, 1), (2, 0)):
        module.checkpoint_lvl = level
        assert kept() == [(40, 256)] * count
    module.checkpoint_lvl = 0
    module.eval()
    assert kept() == []


def saved_by(function):
    """The addresses of what the graph of `function()` holds."""
    addresses = []

    def pack(tensor):
        addresses.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return addresses


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_input_is_kept_for_the_gradient_of_the_weight_alone(dtype, residual, frozen, device):
    """A frozen layer keeps nothing but its weight, as do those that train only beside it."""
    x = torch.randn(40, 64, device=device, dtype=DTYPES[dtype], requires_grad=True)
    layer = FusedDense(64, 32, return_residual=residual).to(device, x.dtype)
    layer.weight.requires_grad_(not frozen)
    saved = saved_by(lambda: layer(x))
    assert layer.weight.data_ptr() in saved
    assert (x.data_ptr() in saved) == (not frozen)


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_frozen_weights_of_an_mlp_keep(dtype, activation, device):
    """What enters the activation, or of relu what leaves it. Below level 2, x is for second derivatives in float32."""
    x = torch.randn(40, 64, device=device, dtype=DTYPES[dtype], requires_grad=True)
    mlp = FusedMLP(64, 256, activation=activation).to(device, x.dtype)
    (right,) = torch.autograd.grad(mlp(x).sum(), x)
    mlp.requires_grad_(False)
    parameters = {parameter.data_ptr() for parameter in mlp.parameters()} | {0}  # the address of an empty tensor
    for level in (0, 1, 2):
        mlp.checkpoint_lvl = level
        others = [address for address in saved_by(lambda: mlp(x)) if address not in parameters]
        assert (x.data_ptr() in others) == (level == 2 or dtype == "fp32")
        assert len(others) == (2 if level < 2 and dtype == "fp32" else 1)
        assert torch.equal(torch.autograd.grad(mlp(x).sum(), x)[0], right)


def test_gradients_twice(device):
    """A graph that is retained keeps what the second backward needs; one that is not says so."""
    x = torch.randn(5, 64, device=device, requires_grad=True)
    for level in (0, 1, 2):
        out = FusedMLP(64, checkpoint_lvl=level).to(device)(x).sum()
        first = torch.autograd.grad(out, x, retain_graph=True)
        assert torch.equal(*first, *torch.autograd.grad(out, x))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, x)


# Modules.


def test_layers_are_exactly_those_of_torch_where_there_is_no_kernel_for_few_rows():
    assert Linear is (FewRowsLinear if fused_dense_ops.HAS_KERNEL else nn.Linear)


def test_dynamic_quantisation(device):
    """It looks for layers of exactly the type nn.Linear, and says nothing where there is none."""
    quantization = pytest.importorskip("torch.ao.quantization")
    mlp = nn.Sequential(FewRowsLinear(64, 128), nn.ReLU(), FewRowsLinear(128, 64))
    for layer in mlp:
        if isinstance(layer, FewRowsLinear):
            layer.__class__ = nn.Linear
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is on its way to another package
        quantised = quantization.quantize_dynamic(mlp, {nn.Linear})
        found = quantization.quantize_dynamic(Mlp(64, 128), {nn.Linear})
    assert "Quantized" in str(quantised[0]) and "Quantized" in str(quantised[2])
    assert ("Quantized" in str(found.fc1)) == (not fused_dense_ops.HAS_KERNEL)


@pytest.mark.parametrize("cls", [FewRowsLinear, FusedDense])
def test_weights_are_read_once(cls):
    """A spectral norm, say, is a step of its power iteration for each time that the weight is read."""

    class Counted(nn.Module):
        count = 0

        def forward(self, weight):
            self.count += 1
            return weight

    layer, counted = cls(8, 8), Counted()
    nn.utils.parametrize.register_parametrization(layer, "weight", counted)
    counted.count = 0
    layer(torch.randn(3, 8))
    assert counted.count == 1


@pytest.mark.parametrize("layer", [Linear, FewRowsLinear])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_linear_is_that_of_torch(rows, layer, device):
    """Whoever computes it, with gradients, under autocast, in forward mode and for other tensors, too."""
    torch.manual_seed(0)
    layer, x = layer(64, 40).to(device).bfloat16(), torch.randn(rows, 64, device=device).bfloat16()
    plain = nn.Linear(64, 40).to(device).bfloat16()
    plain.load_state_dict(layer.state_dict())
    assert str(layer) == str(plain)
    assert torch.equal(layer(x), plain(x))
    with torch.no_grad():
        exact = oracle.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert_error_ratio(layer(x), exact, plain(x))
        assert layer.float()(x.float()).dtype == torch.float32
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        layer.bfloat16()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x))
        out, tangent = torch.func.jvp(layer, (x,), (x,))
        assert torch.equal(out, plain(x)) and tangent.shape == out.shape
        assert_error_ratio(torch.vmap(layer)(x), exact, plain(x))


def test_modules_are_those_of_torch(device):
    """The same names, shapes and initial values."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 32), nn.Linear(16, 64), nn.Linear(64, 16)
    torch.manual_seed(0)
    dense, mlp = FusedDense(64, 32), FusedMLP(16)
    assert list(dense.state_dict()) == ["weight", "bias"]
    assert list(mlp.state_dict()) == ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    for ours, theirs in zip((*dense.parameters(), *mlp.parameters()), (p for m in plain for p in m.parameters())):
        assert torch.equal(ours, theirs)
    assert FusedMLP(16, 0, 0).fc2.weight.shape == (16, 64)
    assert FusedDense(64, 32, bias=False).bias is None
    x = torch.randn(3, 64)
    torch.testing.assert_close(dense(x), plain[0](x))
    assert len(FusedDense(64, 32, return_residual=True)(x)) == len(FusedMLP(64, return_residual=True)(x)) == 2


# Graphs, fakes, signatures.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.same_on_cpu("dtype")
def test_compiled(level, grad, dtype, device):
    mlp = FusedMLP(64, 128, 32, checkpoint_lvl=level, return_residual=True)
    dense = FusedDense(64, 32, return_residual=True)
    x = torch.randn(5, 64, device=device, dtype=DTYPES[dtype])
    for module in (mlp.to(device, x.dtype), dense.to(device, x.dtype)):

        def run(function, module=module):
            leaf = x.clone().requires_grad_(grad)
            out, residual = function(leaf)
            loss = out.sum() + residual.square().sum()
            return out.detach(), *(torch.autograd.grad(loss, [leaf, *module.parameters()]) if grad else ())

        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(run(compiled), run(module))


def test_exported(device):
    module, x = FusedMLP(64).to(device).half(), torch.randn(6, 3, 64, device=device).half()
    exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", max=2**20)},))
    torch.testing.assert_close(exported.module()(x[:5]), module(x[:5]))


@pytest.mark.parametrize("activation", ["identity", "gelu_approx", "relu"])
def test_opcheck(activation, device):
    x, weight, bias, next_weight, _, dout, _ = Case(shape=(3, 5), layout="sliced").draw(device)
    keep = activation != "identity"
    torch.library.opcheck(fused_dense_ops.fwd.default, (x, weight, bias, activation, keep, 0))
    out, kept = fused_dense_ops.fwd(x, weight, bias, activation, keep, 0)
    kept = {"identity": None, "relu": out}.get(activation, kept)
    for bias_grad in (False, True):
        torch.library.opcheck(fused_dense_ops.dgrad.default, (dout, next_weight, None, kept, activation, bias_grad))
    torch.library.opcheck(fused_dense_ops.wgrad.default, (dout, x, True))
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]
    if activation == "identity":
        torch.library.opcheck(fused_dense_ops.fwd.default, (*leaves, activation, False, 0))
    else:
        out, _ = fused_dense_ops.fwd(*leaves, activation, True, 0)
        with pytest.raises(NotImplementedError, match=f"no gradient for '{activation}'"):
            out.sum().backward()


def test_meta():
    x = torch.empty(5, 3, 64, device="meta", dtype=torch.bfloat16)
    assert FusedMLP(64, 128, 32, device="meta", dtype=torch.bfloat16)(x).shape == (5, 3, 32)
    assert FusedDense(64, 32, device="meta", dtype=torch.bfloat16)(x).shape == (5, 3, 32)


def test_the_function_of_autograd_is_the_public_one():
    assert fused_dense.FusedDenseFunc.apply is fused_dense_func


@pytest.mark.parametrize("heuristic", [-1, 100])
def test_a_product_has_an_algorithm_whatever_the_heuristic(heuristic, device):
    x, weight = torch.randn(2, 40, 64, device=device).bfloat16()
    right = fused_dense_ops.fwd(x, weight, None, "identity", False, 0)[0]
    torch.testing.assert_close(fused_dense_ops.fwd(x, weight, None, "identity", False, heuristic)[0], right)


# The functions of fused_dense_lib.


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("heuristic", [-1, 0])
def test_shim(heuristic, is_gelu, dtype, device):
    """Its three functions make an MLP and its gradients."""
    case = Case(activation="gelu_approx" if is_gelu else "relu", dtype=dtype)
    *inputs, dout, _ = case.draw(device)

    def ours(x, weight1, bias1, weight2, bias2):
        act, kept = fused_dense_lib.linear_act_forward(x, weight1, bias1, is_gelu, True, heuristic)
        (alone,) = fused_dense_lib.linear_act_forward(x, weight1, bias1, is_gelu, False, heuristic)
        torch.testing.assert_close(act, alone)
        dweight2, dbias2 = fused_dense_lib.linear_bias_wgrad(act, dout, True)
        dpre, dbias1 = fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, kept, is_gelu, heuristic)
        dweight1, none = fused_dense_lib.linear_bias_wgrad(x, dpre, False)
        assert none is None
        return [dweight1, dbias1, dweight2, dbias2]

    found = ours(*inputs)
    exact = gradients(lambda *args: oracle.mlp(*args, case.activation), [x.double() for x in inputs], [dout.double()])
    plain = gradients(lambda *args: plain_mlp(*args, case.activation), inputs, [dout])
    for ours, right, baseline in zip(found, exact[2:], plain[2:], strict=True):
        assert_error_ratio(ours, right, baseline, plus=unavoidable(right, ours.dtype, 1000))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_shim_under_autocast(dtype, device):
    """Its functions have the dtype of their arguments, all of them the same."""
    *inputs, dout, _ = Case(dtype=dtype).draw(device)
    x, weight1, bias1, weight2, _ = inputs

    def ours():
        act, kept = fused_dense_lib.linear_act_forward(x, weight1, bias1, True, True, 0)
        dpre = fused_dense_lib.bias_act_linear_dgrad_bgrad(weight2, dout, kept, True, 0)
        return [act, kept, *dpre, *fused_dense_lib.linear_bias_wgrad(act, dout, True)]

    expected = ours()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        for found, other in zip(ours(), expected, strict=True):
            assert torch.equal(found, other)
        with pytest.raises(TypeError, match="weight must have dtype"):
            fused_dense_lib.linear_act_forward(x, weight1.bfloat16(), None, True, True, 0)


# Errors: what is wrong, the class, what the message names.

X, W1, W2 = torch.zeros(5, 8), torch.zeros(16, 8), torch.zeros(4, 16)
ERRORS = {
    "x is no tensor": (dict(x=[1.0]), TypeError, "x must be a torch.Tensor"),
    "x has no dimensions": (dict(x=torch.zeros(())), ValueError, "x must have at least one dimension"),
    "x is integer": (dict(x=X.long()), TypeError, "x must have dtype"),
    "weight1 of another width": (dict(weight1=W1[:, :7]), ValueError, r"weight1 must have shape \(\*, 8\), found"),
    "weight2 of another width": (dict(weight2=W2[:, :7]), ValueError, r"weight2 must have shape \(\*, 16\), found"),
    "weight1 of another type": (dict(weight1=W1.half()), TypeError, "weight1 must have dtype torch.float32, found"),
    "weight2 on another device": (dict(weight2=W2.to("meta")), ValueError, "weight2 must be on cpu"),
    "bias1 of another width": (dict(bias1=torch.zeros(4)), ValueError, r"bias1 must have shape \(16,\), found"),
    "bias2 of another type": (dict(bias2=torch.zeros(4).half()), TypeError, "bias2 must have dtype torch.float32"),
    "no such activation": (dict(activation="gelu"), ValueError, "activation must be 'gelu_approx', 'relu' or"),
    "level 3": (dict(checkpoint_lvl=3), ValueError, "checkpoint_lvl must be 0, 1 or 2, found 3"),
    "level is text": (dict(checkpoint_lvl="1"), TypeError, "checkpoint_lvl must be an integer"),
    "heuristic 5": (dict(heuristic=5), ValueError, "heuristic must be between -1 and 4, found 5"),
    "residual is text": (dict(return_residual="no"), TypeError, "return_residual must be a bool"),
    "save_pre_act is 2": (dict(save_pre_act=2), TypeError, "save_pre_act must be a bool"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    changes, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        fused_mlp_func(**dict(dict(x=X, weight1=W1, weight2=W2), **changes))


OTHER_ERRORS = {
    "dense: weight": (lambda: fused_dense_func(X, W2), ValueError, r"weight must have shape \(\*, 8\)"),
    "dense: bias": (lambda: fused_dense_func(X, W1, X), ValueError, r"bias must have shape \(16,\)"),
    "dense: flag": (lambda: fused_dense_func(X, W1, sequence_parallel=3), TypeError, "sequence_parallel must be"),
    "MLP: activation": (lambda: FusedMLP(8, activation="silu"), ValueError, "activation must be"),
    "MLP: heuristic": (lambda: FusedMLP(8, heuristic="fast"), TypeError, "heuristic must be an integer"),
    "MLP: no group": (lambda: ParallelFusedMLP(8), TypeError, "process_group must be a torch.distributed group"),
    "shim: rows": (lambda: fused_dense_lib.linear_bias_wgrad(X, X[:2], True), ValueError, "d_output must have shape"),
    "shim: pre_act": (
        lambda: fused_dense_lib.bias_act_linear_dgrad_bgrad(W2, X[:, :4], X, True, 0),
        ValueError,
        "pre_act must have shape",
    ),
}


@pytest.mark.parametrize("what", OTHER_ERRORS)
def test_other_errors(what):
    call, error, message = OTHER_ERRORS[what]
    with pytest.raises(error, match=message):
        call()


# What only kernels can trip over.


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=(16, 9)), "x must have shape"),
        (dict(weight=(16,)), "weight must have shape"),
        (dict(bias=(15,)), "bias must have shape"),
        (dict(x=()), "x must have shape"),
    ],
)
def test_a_direct_call_of_the_op_is_checked(change, message, device):
    shapes = dict(x=(5, 8), weight=(16, 8), bias=(16,)) | change
    with pytest.raises(RuntimeError, match=message):
        fused_dense_ops.fwd(
            *(torch.zeros(shape, device=device).half() for shape in shapes.values()), "identity", False, 0
        )
    x, weight = torch.zeros(5, 8, device=device), torch.zeros(16, 8, device=device)
    with pytest.raises(RuntimeError, match="x must have dtype float16 or bfloat16, found float32"):
        fused_dense_ops.fwd(x, weight, None, "identity", False, 0)
    with pytest.raises(RuntimeError, match="activation must be 'identity'"):
        fused_dense_ops.fwd(x.half(), weight.half(), None, "tanh", False, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape",
    [(1, 8), (37, 33), (65, 264), (129, 8200), (2000, 1000), (2048, 768), (4001, 2304), (20_000, 7), (9, 300, 40)],
    ids=str,
)
@pytest.mark.cover(1)
def test_bias_gradient(shape, dtype, device):
    """Sums of few rows and many, of rows that lie apart or are the same one, of any width."""
    wide = torch.randn(*shape[:-1], 2 * shape[-1], device=device).to(DTYPES[dtype])
    for dout in (wide[..., : shape[-1]], wide[..., shape[-1] :], wide[:1, ..., : shape[-1]].expand(shape)):
        _, dbias = fused_dense_ops.wgrad(dout, wide[..., :8], True)  # of few columns: the product is not tested here
        exact = dout.double().flatten(0, -2).sum(0)
        largest = dout.abs().float().flatten(0, -2).sum(0).max().item()
        assert_error_ratio(dbias, exact, dout.flatten(0, -2).sum(0), plus=unavoidable(exact, dbias.dtype, 4 * largest))


@pytest.mark.cuda
@pytest.mark.parametrize("captured", [False, True])
def test_bias_gradient_is_equal_bit_by_bit(captured, device):
    """In every call, and in a CUDA graph."""
    douts = [torch.randn(shape, device=device).bfloat16() for shape in [(8192, 768), (4096, 2304), (300, 33), (5, 8)]]
    none = [dout.new_empty(len(dout), 0) for dout in douts]
    found = [torch.empty(dout.shape[1], device=device, dtype=dout.dtype) for dout in douts]

    def step():
        for out, dout, x in zip(found, douts, none, strict=True):
            out.copy_(fused_dense_ops.wgrad(dout, x, True)[1])

    step()
    first = [out.clone() for out in found]
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    for _ in range(20):
        for out in found:
            out.fill_(float("nan"))
        graph.replay() if captured else step()
        for out, right in zip(found, first, strict=True):
            assert torch.equal(out, right)


DGRAD_SHAPES = [(0, 40), (5, 0), (33,), (1, 40), (37, 33), (3, 21, 264), (2000, 1000), (20_000, 7), (9000, 16)]


@pytest.mark.parametrize("activation", ["gelu_approx", "relu", "sqrelu", "silu"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("shape", DGRAD_SHAPES, ids=str)
@pytest.mark.same_on_cpu("dtype", "activation")
def test_gradients_of_activation_and_bias(shape, dtype, activation, device):
    """Of few rows and many, of any width and layout; dbias is the sum of dx as it is stored, by whatever kernel."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{shape}{activation}".encode()))

    def randn(*shape):
        return torch.randn(shape, device=device, generator=generator).to(DTYPES[dtype])

    def formula(dout, weight, kept):
        leaf = kept.detach().requires_grad_()
        return torch.autograd.grad(oracle.ACTIVATIONS[activation](leaf), leaf, dout @ weight)[0]

    tensors = randn(*shape[:-1], 24), randn(24, shape[-1]) / 5, randn(*shape)
    exact, baseline = formula(*(tensor.double() for tensor in tensors)), formula(*tensors)
    for layout in LAYOUTS:
        dout, weight, kept = (arranged(tensor, layout) for tensor in tensors)
        dx, dbias = fused_dense_ops.dgrad(dout, weight, None, kept, activation, True)
        assert_error_ratio(dx, exact, baseline, name=f"dx, {layout}")
        rows = dx.reshape(-1, shape[-1]) if dx.numel() else dx
        largest = rows.abs().float().sum(0).max().item() if dx.numel() else 0.0
        total = rows.double().sum(0)
        assert_error_ratio(
            dbias, total, rows.sum(0), plus=unavoidable(total, dx.dtype, 4 * largest), name=f"dbias, {layout}"
        )
        assert torch.equal(dbias, fused_dense_ops.wgrad(dx, dx, True)[1])
        alone, nothing = fused_dense_ops.dgrad(dout, weight, None, kept, activation, False)
        torch.testing.assert_close(alone, dx)
        assert nothing.shape == (0,)


def test_without_activation_there_is_no_bias(device):
    dout, weight = torch.randn(5, 24, device=device).half(), torch.randn(24, 8, device=device).half()
    dx, dbias = fused_dense_ops.dgrad(dout, weight, None, None, "identity", True)
    assert dx.shape == (5, 8) and dbias.shape == (0,)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [37, 1000, 30_000])
def test_copies_outlive_what_reads_them(rows, dtype, device):
    """Rows that do not lie as cuBLASLt wants them are copied; its workspace, which is NaN here, takes other memory."""
    torch.cuda.empty_cache()  # with few gaps between tensors, the next one takes what the last has left
    shapes = (rows, 33), (rows, 50), (rows, 33), (50, 33)
    dense = [torch.randn(shape, device=device).to(DTYPES[dtype]) for shape in shapes]
    apart = [laid_out(tensor, "last_dim_strided") for tensor in dense]
    for function in (
        lambda x, dout, residual, weight: fused_dense_ops.wgrad(dout, x, False)[0],
        lambda x, dout, residual, weight: fused_dense_ops.dgrad(dout, weight, residual, None, "identity", False)[0],
        lambda x, dout, residual, weight: fused_dense_ops.fwd(x, weight, None, "identity", False, 0)[0],
    ):
        assert torch.equal(function(*apart), function(*dense))


@pytest.mark.cuda
def test_more_elements_than_32_bits_count(device, memory_guard):
    rows, width = 2**31 // 4096 + 8, 4096
    memory_guard(2 * rows * (width + 64) * 2)
    x = torch.randn(rows, 64, device=device, dtype=torch.bfloat16)
    weight = torch.randn(width, 64, device=device, dtype=torch.bfloat16) / 8
    for activation in ("gelu_approx", "sqrelu"):
        act, _ = fused_dense_ops.fwd(x, weight, None, activation, False, 0)
        for part in (slice(0, 3), slice(rows - 3, rows)):
            right = oracle.linear(x[part].double(), weight.double(), None, activation)
            torch.testing.assert_close(act[part].double(), right, rtol=2e-2, atol=1e-2)
        dx, _ = fused_dense_ops.dgrad(act, weight, None, None, "identity", False)
        right = act[-3:].double() @ weight.double()
        torch.testing.assert_close(dx[-3:].double(), right, rtol=2e-2, atol=2e-1)
        del act, dx


@pytest.mark.cuda
def test_other_stream(device):
    module = FusedMLP(1024).to(device, torch.bfloat16)
    x = torch.randn(4096, 1024, device=device, dtype=torch.bfloat16)
    right = module(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would be done before the copy below begins
        late = torch.zeros_like(x).copy_(x)
        out = module(late)
    stream.synchronize()
    assert torch.equal(out, right)


@pytest.mark.cuda
@pytest.mark.parametrize("seen", [True, False])
def test_graph_capture(seen, device):
    """Also of a product that has not been computed before."""
    rows = 24 if seen else 88
    module = FusedMLP(64, 256).to(device, torch.bfloat16)
    inputs = [torch.randn(rows, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    static = torch.zeros_like(inputs[0]).requires_grad_()

    def run(x):
        out = module(x)
        return out, *torch.autograd.grad(out.sum(), [x, *module.parameters()])

    if seen:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run(static)
        side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(static)
    for x in inputs:
        with torch.no_grad():
            static.copy_(x)
        graph.replay()
        torch.testing.assert_close([result.detach() for result in results], [result.detach() for result in run(x)])


@pytest.mark.multi_gpu
def test_device_that_is_not_current():
    module, x = FusedMLP(64).half(), torch.randn(5, 64).half().requires_grad_()
    results = []
    for device in ("cuda:0", "cuda:1"):
        moved = module.to(device)
        out = moved(x.to(device))
        results.append(
            [out.detach().cpu(), *(grad.cpu() for grad in torch.autograd.grad(out.sum(), [x, *moved.parameters()]))]
        )
    torch.testing.assert_close(*results)


@pytest.mark.cuda
@pytest.mark.parametrize("level", [0, 1, 2])
def test_memory(level, device):
    """Forward and backward hold two tensors (rows, hidden) at once, beside a workspace and what is smaller."""
    rows, width, hidden = 32768, 256, 4096
    module = FusedMLP(width, hidden, checkpoint_lvl=level).to(device, torch.bfloat16)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, requires_grad=True)

    def run():
        torch.autograd.grad(module(x).sum(), [x, *module.parameters()])

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    peak = torch.cuda.max_memory_allocated() - before
    unit = 2 * rows * hidden
    assert peak < 2.5 * unit
