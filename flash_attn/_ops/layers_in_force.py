"""What stands for torch's own layers at level 2, for all code that runs within a context, also that of others.

Linear layers, however they are written, become `linear.fwd`. On the CPU, activations become their formulas: torch's own
compute the last elements of a tensor by other instructions than those before, so bits depend on where a row ends.
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


def _addmm(func, input, mat1, mat2, **kwargs):
    if kwargs or input.dim() != 1:
        return func(input, mat1, mat2, **kwargs)
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
    if dtype is not None:
        x, weight, bias = (None if each is None else each.to(dtype) for each in (x, weight, bias))
    return linear.fwd(x, weight, bias)


def _formula(name: str) -> Callable:
    """A function of torch, with one tensor, by a formula of `_reference/activation.py`."""

    def stand_in(func, input, *args, **kwargs):
        if args or kwargs.get("inplace") or _library.is_where_kernels_run(input):
            return func(input, *args, **kwargs)
        exact = name == "gelu" and kwargs.get("approximate", "none") == "tanh"
        return activation.formula("gelu_approx" if exact else name, input)

    return stand_in


def _glu(func, input, dim=-1):
    if _library.is_where_kernels_run(input) or input.shape[dim] % 2:
        return func(input, dim)
    value, gate = input.chunk(2, dim)
    return value * activation.formula("sigmoid", gate)


_STAND_INS: dict[Any, Callable] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.mm: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    F.glu: _glu,
    F.gelu: _formula("gelu"),
    F.silu: _formula("silu"),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, Tensor.sigmoid), _formula("sigmoid")),
}
