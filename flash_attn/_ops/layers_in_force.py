"""The context in which torch's own layers are replaced by batch-invariant ones, whichever package's code calls them.

Linear layers, written as products with a matrix, become `linear.fwd`. On the CPU, activations become their formulas:
torch's own compute the last elements of a tensor by other instructions than those before, so bits depend on where a row
ends.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flash_attn import _library
from flash_attn._ops import fusing, invariance, linear
from flash_attn._reference import activation


def layers_in_force() -> contextlib.AbstractContextManager:
    """`FixedLayers` where the level in force is 2, else a context in which nothing changes."""
    return FixedLayers() if invariance.level() == 2 else contextlib.nullcontext()


class FixedLayers(TorchFunctionMode):
    """A context in which torch's linear layers are `linear.fwd`, and on the CPU activations have bits of their own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for each function of torch within the context."""
        kwargs = kwargs or {}
        stand_in = _STAND_INS.get(func)
        return func(*args, **kwargs) if stand_in is None else stand_in(func, *args, **kwargs)


def _linear(func, input, weight, bias=None):
    return _product(input, weight, bias)


def _matmul(func, input, other, **kwargs):
    if kwargs or other.dim() != 2 or input.dim() < 1:
        return func(input, other, **kwargs)
    return _product(input, other.mT, None)


def _rmatmul(func, input, other):
    return _matmul(torch.matmul, other, input)


def _addmm(func, input, mat1, mat2, *, beta=1, alpha=1, **kwargs):
    if kwargs or input.dim() != 1 or beta != 1 or alpha != 1:
        return func(input, mat1, mat2, beta=beta, alpha=alpha, **kwargs)
    return _product(mat1, mat2.mT, input)


def _product(x, weight, bias):
    if x.dtype not in linear.DTYPES:
        return F.linear(x, weight, bias)
    for name, tensor in (("x", x), ("weight", weight)):
        if not fusing.is_plain(tensor):
            raise NotImplementedError(
                f"{name} of a linear layer must be a plain tensor where the level of batch invariance is 2, found "
                f"{type(tensor).__name__}"
            )
    dtype = _library.autocast_dtype(x)
    if dtype is not None and x.dtype != torch.float64:  # which autocast leaves alone
        x, weight, bias = (None if each is None else each.to(dtype) for each in (x, weight, bias))
    return linear.fwd(x, weight, bias)


def _gelu(func, input, approximate="none"):
    if _library.is_where_kernels_run(input):
        return func(input, approximate=approximate)
    return activation.formula("gelu_approx" if approximate == "tanh" else "gelu", input)


def _silu(func, input, inplace=False):
    if _library.is_where_kernels_run(input):
        return func(input, inplace=inplace)
    if inplace:  # the derivative needs what is overwritten
        return input.copy_(activation.formula("silu", input.clone()))
    return activation.formula("silu", input)


def _sigmoid(func, input, **kwargs):
    if kwargs or _library.is_where_kernels_run(input):
        return func(input, **kwargs)
    return activation.formula("sigmoid", input)


def _glu(func, input, dim=-1):
    if _library.is_where_kernels_run(input) or input.shape[dim] % 2:
        return func(input, dim)
    value, gate = input.chunk(2, dim)
    return value * activation.formula("sigmoid", gate)


_STAND_INS: dict[Any, Callable] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    F.glu: _glu,
    F.gelu: _gelu,
    F.silu: _silu,
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _sigmoid),
}
