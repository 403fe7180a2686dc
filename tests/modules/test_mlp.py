"""MLPs: formulas, gradients, sizes, parameters, errors. Divided over processes: test_parallel.py."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flash_attn._ops import fused_dense
from flash_attn.modules import mlp
from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp
from flash_attn.ops.fused_dense import Linear
from flash_attn.ops.triton.mlp import FusedDenseSqreluDense


def with_gradients(module, x):
    """The output, and the gradients of the input and the parameters, for a fixed gradient of the output."""
    leaf = x.clone().requires_grad_()
    out = module(leaf)
    dout = torch.linspace(-1, 1, out.numel(), device=x.device, dtype=out.dtype).view_as(out)
    return out.detach(), *torch.autograd.grad(out, [leaf, *module.parameters()], dout)


class Plain(torch.nn.Module):
    """The formula on another module's parameters."""

    def __init__(self, module, formula):
        super().__init__()
        self.fc1, self.fc2, self.formula = module.fc1, module.fc2, formula

    def forward(self, x):
        return self.fc2(self.formula(self.fc1(x)))


@pytest.mark.parametrize("activation", [F.gelu, F.relu, torch.tanh])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(bias, activation, device):
    module = Mlp(16, 24, 8, activation, bias1=bias, bias2=bias, device=device)
    x = torch.randn(2, 5, 16, device=device)
    torch.testing.assert_close(with_gradients(module, x), with_gradients(Plain(module, activation), x))


@pytest.mark.parametrize("activation", [F.sigmoid, F.silu, F.gelu])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias, activation, device):
    """The first half is the value, the second the gate."""
    module = GatedMlp(16, 24, 8, activation, bias1=bias, bias2=bias, multiple_of=8, device=device)
    x = torch.randn(2, 5, 16, device=device)
    plain = Plain(module, lambda y: y[..., :24] * activation(y[..., 24:]))
    torch.testing.assert_close(with_gradients(module, x), with_gradients(plain, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_without_gradient(bias, rows, dtype, device):
    """A step of decoding gives the same bits whether or not fc1 and the gate are one kernel, and calls hooks of fc1."""
    module = GatedMlp(256, 136, 64, F.silu, bias, bias, multiple_of=4, device=device, dtype=dtype)
    x = torch.randn(rows, 1, 256, device=device, dtype=dtype)
    seen = []
    with torch.no_grad():
        out = module(x)
        handle = module.fc1.register_forward_hook(lambda layer, inputs, y: seen.append(y))
        apart = module(x)
        handle.remove()
    assert len(seen) == 1 and seen[0].shape == (rows, 1, 272)
    assert torch.equal(out, apart)
    torch.testing.assert_close(module(x), out)


def test_one_call_computes_the_first_layer_and_the_gate(monkeypatch):
    module, x = GatedMlp(16, 24, 8, F.silu, multiple_of=8), torch.randn(2, 16)
    right, gated_linear, calls = module(x), fused_dense.gated_linear, []
    monkeypatch.setattr(mlp.fused_dense, "is_for_few_rows", lambda x, weight: not torch.is_grad_enabled())
    monkeypatch.setattr(mlp.fused_dense, "gated_linear", lambda *args: calls.append(args) or gated_linear(*args))
    with torch.no_grad():
        torch.testing.assert_close(module(x), right)
        assert len(calls) == (type(module.fc1) is Linear)
        module.fc1 = torch.nn.Sequential(module.fc1)
        torch.testing.assert_close(module(x), right)
    module.fc1 = module.fc1[0]
    assert module(x).requires_grad and len(calls) == 1


def test_float64(device):
    module = GatedMlp(6, 4, activation=F.silu, multiple_of=4, device=device, dtype=torch.float64)
    x = torch.randn(3, 6, device=device, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(module, x)


def test_sizes():
    def shapes(module):
        return {name: tuple(value.shape) for name, value in module.state_dict().items()}

    assert shapes(Mlp(6)) == {
        "fc1.weight": (24, 6),
        "fc1.bias": (24,),
        "fc2.weight": (6, 24),
        "fc2.bias": (6,),
    }
    assert shapes(Mlp(6, 5, 4, bias1=False, bias2=False)) == {"fc1.weight": (5, 6), "fc2.weight": (4, 5)}
    assert shapes(GatedMlp(96)) == {
        "fc1.weight": (512, 96),
        "fc1.bias": (512,),
        "fc2.weight": (96, 256),
        "fc2.bias": (96,),
    }
    assert shapes(GatedMlp(96, 129, 8, multiple_of=64, bias1=False, bias2=False)) == {
        "fc1.weight": (384, 96),
        "fc2.weight": (8, 192),
    }


@pytest.mark.parametrize("mlp_cls", [Mlp, GatedMlp])
def test_residual(mlp_cls):
    x = torch.randn(2, 16)
    module = mlp_cls(16, return_residual=True)
    y, residual = module(x)
    module.return_residual = False
    assert residual is x
    assert torch.equal(module(x), y)


@pytest.mark.parametrize("mlp_cls", [Mlp, GatedMlp])
def test_dtype_and_compile(mlp_cls, device):
    module = mlp_cls(16, dtype=torch.bfloat16, device=device, activation=F.silu)
    x = torch.randn(2, 16, dtype=torch.bfloat16, device=device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradients(compiled, x), with_gradients(module, x))


def test_names_and_errors():
    assert {"FusedMLP", "ParallelFusedMLP"} <= vars(mlp).keys()
    with pytest.raises(ValueError, match="multiple_of must be positive, found 0"):
        GatedMlp(16, multiple_of=0)
    with pytest.raises(TypeError, match="process_group must be"):
        mlp.ParallelMLP(16)


@pytest.mark.parametrize("mlp_cls", [Mlp, GatedMlp])
@pytest.mark.parametrize("activation", ["gelu_approx", None])
def test_an_activation_that_is_no_function(mlp_cls, activation):
    """FusedMLP takes the names of its activations, these take functions."""
    with pytest.raises(TypeError, match=f"activation must be a function of a tensor, found {activation!r}"):
        mlp_cls(16, activation=activation)


@pytest.mark.parametrize("module", [Mlp, GatedMlp, FusedMLP, FusedDenseSqreluDense])
def test_widths_are_whole_numbers(module):
    """Such as 8 / 3 * 66, a float; one like 8 / 3 * 64 is an error that names the argument."""
    expected = [tuple(x.shape) for x in module(66, 176, 22).parameters()]
    for widths in ((66.0, 8 / 3 * 66, 22.0), (np.int64(66), torch.tensor(176), np.float32(22))):
        assert [tuple(x.shape) for x in module(*widths).parameters()] == expected
    for name, widths in (("in", (64.5,)), ("hidden", (64, 8 / 3 * 64)), ("out", (64, 8, 0.5))):
        with pytest.raises(ValueError, match=f"{name}_features must be a whole number, found"):
            module(*widths)
    with pytest.raises(TypeError, match="hidden_features must be an integer, found str"):
        module(64, "128")
