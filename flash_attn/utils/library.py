"""`triton_op` of torch.library with two more options."""

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch.library import CustomOpDef

from flash_attn import _torch_private


@overload
def triton_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    allow_decomposition: bool = True,
) -> Callable[[Callable], CustomOpDef]: ...
@overload
def triton_op(
    name: str,
    fn: Callable,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    allow_decomposition: bool = True,
) -> CustomOpDef: ...
def triton_op(
    name: str,
    fn: Callable | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    schema: str | None = None,
    allow_decomposition: bool = True,
) -> CustomOpDef | Callable[[Callable], CustomOpDef]:
    """Make an operator from a function that calls torch operators and Triton kernels (by torch.library.wrap_triton).

    Arguments:
        name: "namespace::name".
        fn: the function; None makes this a decorator.
        mutates_args: names of arguments that it writes to.
        schema: its schema, "(Tensor x, int n) -> Tensor"; inferred from its annotations if None.
        allow_decomposition: let torch.compile look into the function. Otherwise the operator stays in the graph.

    Returns a torch.library.CustomOpDef.

    >>> from flash_attn.utils.library import triton_op
    >>> @triton_op("mine::twice", mutates_args=(), schema="(Tensor x) -> Tensor", allow_decomposition=False)
    ... def twice(x):
    ...     return x * 2
    """
    if fn is None:
        return lambda fn: triton_op(
            name, fn, mutates_args=mutates_args, schema=schema, allow_decomposition=allow_decomposition
        )
    if schema is None and allow_decomposition:
        return torch.library.triton_op(name, fn, mutates_args=mutates_args)
    op = torch.library.custom_op(name, fn, mutates_args=mutates_args, schema=schema)
    op.register_fake(fn)
    mode = _torch_private.FunctionalTensorMode
    if allow_decomposition and mode is not None:

        def decompose(mode: Any, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
            with mode:
                return fn(*args, **(kwargs or {}))

        op.register_torch_dispatch(mode, decompose)
    return op
