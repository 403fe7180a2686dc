"""A linear layer with tiles and an order of sums that do not depend on the number of rows: the op `linear_fwd`.

    linear_fwd(x, weight, bias) -> x weight^T + bias

x (..., in), weight (out, in), bias (out,) or None, all of one dtype: fp16, bf16, fp32 or fp64

Sums are fp32, or fp64 for fp64, over the products of each block of `in` after another; the bias is added before the
result is rounded. There is no TF32. The gradient of x is the same product with the transposed weight. Those of the
weight and the bias are sums over rows, in the order of torch.

`product` is what code of the package calls for a linear layer of its own: it obeys the level in force. `add_product`
adds a product to a sum in float32, as for gradients of a weight from several chunks of rows.
"""

import torch
from torch.nn import functional

from flash_attn import _library
from flash_attn._ops import flops, invariance, triton
from flash_attn._reference import linear as reference
from flash_attn._reference.fused_dense import matrix

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def product(x, weight, bias):
    """x weight^T + bias: at level 2 by `fwd`, else as torch computes it."""
    return fwd(x, weight, bias) if invariance.level() == 2 else functional.linear(x, weight, bias)


def add_product(total, a, b):
    """total + a b in float32, where total is None for 0 or is overwritten, and a (m, k) and b (k, n) may have 16 bits.

    On a GPU the product itself adds to the total. In a graph, which has no such product, it is rounded before.
    """
    if torch.compiler.is_compiling():
        return (a @ b).float() if total is None else total.add_(a @ b)
    if _library.is_where_kernels_run(a) and a.dtype != torch.float32:
        if total is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    with _library.without_autocast(a):
        return a.float() @ b.float() if total is None else total.addmm_(a.float(), b.float())


class _Linear(torch.autograd.Function):
    """Gradients of `fwd` in operations that are differentiable in their turn."""

    @staticmethod
    def forward(ctx, x, weight, bias, _):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return fwd.below_autograd(x, weight, bias)

    @staticmethod
    def backward(ctx, dout):
        x, weight = ctx.saved_tensors
        wants_dx, wants_dweight, wants_dbias = ctx.needs_input_grad[:3]
        with _library.without_autocast(dout):
            return (
                fwd(dout, weight.mT, None) if wants_dx else None,
                matrix(dout).mT @ matrix(x) if wants_dweight else None,
                matrix(dout).sum(0) if wants_dbias else None,
                None,
            )


fwd = _library.define(
    "linear_fwd(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=reference.fwd,
    fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    kernel_dtypes=KERNEL_DTYPES,
    autograd=_Linear,
    differentiable=3,
    triton=triton.launch("linear_act", "fwd_in_fixed_tiles"),
    flops=flops.linear_fwd,
)
