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
    return _product(input, weight, bias) if _is_layer(input, weight, bias) else func(input, weight, bias)


def _matmul(func, input, other, **kwargs):
    if kwargs or not _is_product(input, other):
        return func(input, other, **kwargs)
    return _product(input, other.mT, None)


def _rmatmul(func, input, other):
    return _product(other, input.mT, None) if _is_product(other, input) else func(input, other)


def _mm(func, input, mat2, **kwargs):
    if kwargs or input.dim() != 2 or not _is_product(input, mat2):
        return func(input, mat2, **kwargs)
    return _product(input, mat2.mT, None)


def _addmm(func, input, mat1, mat2, *, beta=1, alpha=1, **kwargs):
    is_plain = not kwargs and beta == alpha == 1 and mat1.dim() == 2 and mat2.dim() == 2
    if not (is_plain and _is_layer(mat1, mat2.mT, input)):
        return func(input, mat1, mat2, beta=beta, alpha=alpha, **kwargs)
    return _product(mat1, mat2.mT, input)


def _is_product(x, matrix):
    return isinstance(matrix, Tensor) and matrix.dim() == 2 and _is_layer(x, matrix.mT, None)


def _is_layer(x, weight, bias):
    """Whether these are a linear layer of numbers that `linear.fwd` takes. What else torch takes, and all that it
    refuses, is left to torch."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    if not all(isinstance(each, Tensor) and each.device == x.device for each in tensors):
        return False
    dtypes = {each.dtype for each in tensors}
    is_cast = _library.autocast_dtype(x) is not None and torch.float64 not in dtypes  # which autocast leaves alone
    return (
        dtypes.issubset(linear.DTYPES)
        and (len(dtypes) == 1 or is_cast)
        and x.layout == torch.strided
        and x.dim() > 0
        and weight.dim() == 2
        and x.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape in ((), (1,), weight.shape[:1]))
    )


def _product(x, weight, bias):
    for name, tensor in (("x", x), ("weight", weight)):
        if not fusing.is_plain(tensor):
            raise NotImplementedError(
                f"{name} of a linear layer must be a plain tensor within batch_invariant_layers, which GPTLMHeadModel "
                f"enters at level 2 of batch invariance, found {type(tensor).__name__}"
            )
    dtype = _library.autocast_dtype(x)
    if dtype is not None and x.dtype != torch.float64:
        x, weight, bias = (None if each is None else each.to(dtype) for each in (x, weight, bias))
    return linear.fwd(x, weight, None if bias is None else bias.expand(weight.shape[0]))


def _has_formula(x):
    """Whether x is on the CPU and of numbers for which an activation has a formula here."""
    return x.dtype in linear.DTYPES and not _library.is_where_kernels_run(x)


def _gelu(func, input, approximate="none"):
    names = {"none": "gelu", "tanh": "gelu_approx"}
    if approximate not in names or not _has_formula(input):
        return func(input, approximate=approximate)
    return activation.formula(names[approximate], input)


def _silu(func, input, inplace=False):
    if not _has_formula(input):
        return func(input, inplace=inplace)
    return _in_place("silu", input) if inplace else activation.formula("silu", input)


def _sigmoid(func, input, **kwargs):
    if kwargs or not _has_formula(input):
        return func(input, **kwargs)
    return activation.formula("sigmoid", input)


def _sigmoid_(func, input):
    return _in_place("sigmoid", input) if _has_formula(input) else func(input)


def _in_place(name, x):
    return x.copy_(activation.formula(name, x.clone()))  # the derivative needs what is overwritten


def _glu(func, input, dim=-1):
    if not _has_formula(input) or input.shape[dim] % 2:
        return func(input, dim)
    value, gate = input.chunk(2, dim)
    return value * activation.formula("sigmoid", gate)


_STAND_INS: dict[Any, Callable] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), _matmul),
    Tensor.__rmatmul__: _rmatmul,
    **dict.fromkeys((torch.mm, Tensor.mm), _mm),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    F.glu: _glu,
    F.gelu: _gelu,
    F.silu: _silu,
    **dict.fromkeys((F.sigmoid, torch.sigmoid, torch.special.expit, Tensor.sigmoid), _sigmoid),
    **dict.fromkeys((torch.sigmoid_, Tensor.sigmoid_), _sigmoid_),
}
