"""Linear layers, MLPs and SwiGLU against eager torch and torch.compile: time and peak memory.

dense       F.linear with bias, forward, and forward with backward
mlp         two layers with GELU (tanh) between them, forward without gradient, and forward with backward; flash_attn at
            its checkpoint levels 0, 1 and 2, and with the activation as a kernel of its own ("apart")
linear_act  a layer with GELU, forward, and the gradient of the GELU before a layer; with the Triton kernel, too
bias_grad   the sum of the rows of a gradient, by the bytes that must move
swiglu      silu(gate) * value of the halves of a tensor, by the bytes that must move; against Liger, too, which copies
            halves, so that it gets tensors of their own
"""

import functools
import importlib

import torch
from torch.nn import functional

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn._ops import fused_dense
from flash_attn.ops.activations import swiglu
from flash_attn.ops.fused_dense import fused_dense_func, fused_mlp_func
from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act

SHAPES = {  # rows, width, hidden
    "cuda": [(16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (8192, 4096, 16384), (512, 4096, 16384)],
    "cpu": [(64, 128, 512)],
}
SUM_SHAPES = {"cuda": [(32768, 768), (32768, 2304), (16384, 1024), (16384, 3072), (32768, 4096)], "cpu": [(64, 512)]}
SWIGLU_SHAPES = {"cuda": [(16384, 4096), (16384, 11008), (1024, 4096)], "cpu": [(64, 512)]}


def cases(device):
    dtype = DTYPES["bf16"]
    for shape in SHAPES[device]:
        product = 2 * shape[0] * shape[1] * shape[2]
        for op, providers, flops in (
            ("dense_fwd", dense_forward, product),
            ("dense_both", dense_both, 3 * product),
            ("mlp_fwd", mlp_forward, 2 * product),
            ("mlp_both", mlp_both, 6 * product),
            ("linear_act_fwd", linear_act_forward, product),
            ("linear_act_bwd", linear_act_backward, product),
        ):
            run = functools.partial(providers, shape, dtype, device)
            yield Case(f"fused_{op}", "x".join(map(str, shape)), "bf16", run, flops=flops)
    for shape in SUM_SHAPES[device]:
        run = functools.partial(bias_gradient, shape, dtype, device)
        yield Case("bias_grad", "x".join(map(str, shape)), "bf16", run, bytes=shape[0] * shape[1] * dtype.itemsize)
    for shape in SWIGLU_SHAPES[device]:
        size = shape[0] * shape[1] * dtype.itemsize
        for op, providers, passes in (("fwd", swiglu_forward, 3), ("bwd", swiglu_backward, 5)):
            run = functools.partial(providers, shape, dtype, device)
            yield Case(f"swiglu_{op}", "x".join(map(str, shape)), "bf16", run, bytes=passes * size)


def gelu(x):
    return functional.gelu(x, approximate="tanh")


def eager_mlp(x, weight1, bias1, weight2, bias2):
    return functional.linear(gelu(functional.linear(x, weight1, bias1)), weight2, bias2)


def our_mlp(level, heuristic=0):
    def mlp(x, weight1, bias1, weight2, bias2):
        return fused_mlp_func(x, weight1, weight2, bias1, bias2, checkpoint_lvl=level, heuristic=heuristic)

    return mlp


def draw(shape, dtype, device, requires_grad=False):
    """x, weight1, bias1, weight2, bias2."""
    rows, width, hidden = shape
    tensors = [
        torch.randn(size, device=device).mul(scale).to(dtype)
        for size, scale in (
            ((rows, width), 1),
            ((hidden, width), width**-0.5),
            ((hidden,), 1),
            ((width, hidden), hidden**-0.5),
            ((width,), 1),
        )
    ]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


def both(function, inputs):
    """Forward and backward, for a fixed incoming gradient."""
    dout = functools.cache(lambda: torch.randn_like(function(*inputs)))
    return lambda: torch.autograd.grad(function(*inputs), inputs, dout())


def dense_functions():
    return {
        "flash_attn": fused_dense_func,
        "torch": functional.linear,
        "torch.compile": torch.compile(functional.linear, dynamic=False),
    }


def dense_forward(shape, dtype, device):
    inputs = draw(shape, dtype, device)[:3]
    return {name: functools.partial(function, *inputs) for name, function in dense_functions().items()}


def dense_both(shape, dtype, device):
    inputs = draw(shape, dtype, device, requires_grad=True)[:3]
    return {name: both(function, inputs) for name, function in dense_functions().items()}


def mlp_functions():
    return {
        "flash_attn": our_mlp(0),
        "flash_attn level 1": our_mlp(1),
        "flash_attn level 2": our_mlp(2),
        "flash_attn apart": our_mlp(0, -1),
        "torch": eager_mlp,
        "torch.compile": torch.compile(eager_mlp, dynamic=False),
    }


def mlp_forward(shape, dtype, device):
    inputs = draw(shape, dtype, device)
    functions = {name: function for name, function in mlp_functions().items() if "level" not in name}
    return {name: functools.partial(function, *inputs) for name, function in functions.items()}


def mlp_both(shape, dtype, device):
    inputs = draw(shape, dtype, device, requires_grad=True)
    return {name: both(function, inputs) for name, function in mlp_functions().items()}


def triton_kernels():
    return importlib.import_module("flash_attn._triton.linear_act")


def linear_act_forward(shape, dtype, device):
    x, weight, bias, *_ = draw(shape, dtype, device)

    def plain():
        return gelu(functional.linear(x, weight, bias))

    return {
        "flash_attn": lambda: triton_linear_act(x, weight, bias, "gelu_approx"),
        "torch": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
        "triton": lambda: triton_kernels().fwd(x, weight, bias, "gelu_approx", False),
    }


def linear_act_backward(shape, dtype, device):
    """The gradient of the second layer of an MLP, and of the GELU before it, for the incoming gradient of the MLP."""
    dout, _, _, weight, _ = draw(shape, dtype, device)
    act_input = torch.randn(shape[0], shape[2], device=device, dtype=dtype)

    def plain():
        return torch.ops.aten.gelu_backward(dout @ weight, act_input, approximate="tanh")

    return {
        "flash_attn": lambda: triton_dgrad_act(dout, weight, "gelu_approx", act_input),
        "torch": plain,
        "torch.compile": torch.compile(plain, dynamic=False),
        "triton": lambda: triton_kernels().dgrad(dout, weight, act_input, "gelu_approx"),
    }


def bias_gradient(shape, dtype, device):
    """The bias gradient alone: the layer has no input features, so that there is no product."""
    dout = torch.randn(shape, device=device, dtype=dtype)
    x = dout.new_empty(shape[0], 0)
    total = functools.partial(torch.sum, dout, 0)
    return {
        "flash_attn": lambda: fused_dense.wgrad(dout, x, True)[1],
        "torch": total,
        "torch.compile": torch.compile(total, dynamic=False),
    }


def eager_swiglu(x, y):
    return functional.silu(x) * y


def liger_swiglu(x, y):
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(x, y)


def swiglu_functions():
    return {
        "flash_attn": swiglu,
        "torch": eager_swiglu,
        "torch.compile": torch.compile(eager_swiglu, dynamic=False),
        "liger": liger_swiglu,
    }


def swiglu_forward(shape, dtype, device):
    halves = torch.randn(shape[0], 2 * shape[1], device=device, dtype=dtype).chunk(2, dim=-1)
    own = [half.contiguous() for half in halves]
    return {
        name: functools.partial(function, *(own if name == "liger" else halves))
        for name, function in swiglu_functions().items()
    }


def swiglu_backward(shape, dtype, device):
    """The inputs are leaves and not halves of a tensor, so that no copy is timed. Liger overwrites its inputs."""
    functions = swiglu_functions()
    inputs = {
        name: [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(2)] for name in functions
    }
    return {
        name: backward_of(functools.partial(function, *inputs[name]), *inputs[name])
        for name, function in functions.items()
    }


if __name__ == "__main__":
    main(__doc__, "fused_dense", cases, baseline="torch")
