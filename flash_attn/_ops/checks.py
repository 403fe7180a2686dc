"""Argument checks shared by all ops. Every message names the argument, what was expected and what was found.

Wrong Python types and dtypes raise ArgumentTypeError, a TypeError; wrong shapes, devices and values raise
ArgumentError, a ValueError. Both are RuntimeErrors, too.
No check reads the contents of a tensor, so none synchronises with a device or breaks a traced graph.
"""

import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsInt, cast

import torch

from flash_attn import _torch_private
from flash_attn._errors import ArgumentError, ArgumentTypeError

INTEGER_DTYPES = (torch.int32, torch.int64)
# Names of this module are found faster than attributes of torch.
_TENSOR, _STRIDED, _INT32 = torch.Tensor, torch.strided, torch.int32
_FAR = 2**31 - 1  # farther than any key; kernels count positions in 32 bits


def tensor(
    name: str,
    value: object,
    *,
    dtypes: Collection[torch.dtype] | None = None,
    shape: Sequence[int | None] | None = None,
    device: torch.device | None = None,
) -> None:
    """Check that `value` is a dense tensor of one of `dtypes`, on `device`, of `shape`; None in it fits any size."""
    if not isinstance(value, _TENSOR):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, found {type(value).__name__}")
    if value.layout is not _STRIDED or value.is_nested:
        found = "a nested one" if value.is_nested else value.layout
        raise ArgumentTypeError(f"{name} must be a dense tensor, found {found}")
    if dtypes is not None and value.dtype not in dtypes:
        raise ArgumentTypeError(f"{name} must have dtype {_either(dtypes)}, found {value.dtype}")
    if device is not None and value.device != device:
        raise ArgumentError(f"{name} must be on {device} like the first argument, found it on {value.device}")
    if shape is not None:
        has_shape(name, value, shape)


def alike(names: Sequence[str], values: Sequence[torch.Tensor], *, dtypes: Collection[torch.dtype]) -> None:
    """Check that the values are dense tensors of one dtype among `dtypes` and on one device."""
    if _are_alike(values, dtypes):
        return
    first, *others = values
    tensor(names[0], first, dtypes=dtypes)
    dtypes, device = (first.dtype,), first.device
    for name, value in zip(names[1:], others, strict=True):
        tensor(name, value, dtypes=dtypes, device=device)


def has_shape(name: str, value: torch.Tensor, expected: Sequence[int | None]) -> None:
    """Check a tensor's shape; None in `expected` fits any size."""
    if value.shape != expected and not _fits(value.shape, expected):
        raise ArgumentError(f"{name} must have shape {_shape(expected)}, found {tuple(value.shape)}")


def broadcasts(name: str, value: torch.Tensor, shape: Sequence[int], **kinds: Any) -> None:
    """Check a tensor that broadcasts to `shape`. kinds: dtypes and device, as `tensor` has them."""
    tensor(name, value, **kinds)
    sizes = zip(reversed(value.shape), reversed(shape), strict=False)
    if value.dim() > len(shape) or any(size not in (1, whole) for size, whole in sizes):
        raise ArgumentError(f"{name} must broadcast to {tuple(shape)}, found shape {tuple(value.shape)}")


def ndim(name: str, value: torch.Tensor, layout: str) -> None:
    """Check the number of dimensions against a layout such as "(batch, seqlen, heads, head_dim)"."""
    expected = layout.count(",") + 1
    if value.dim() != expected:
        dimensions = "1 dimension" if expected == 1 else f"{expected} dimensions"
        raise ArgumentError(f"{name} must have {dimensions} {layout}, found shape {tuple(value.shape)}")


def int32_vector(name: str, value: torch.Tensor, size: int, device: torch.device) -> None:
    """Check that `value` is a contiguous int32 tensor of shape (size,) on `device`, as kernels read lengths."""
    if not isinstance(value, _TENSOR) or value.layout is not _STRIDED or value.is_nested or value.dtype is not _INT32:
        tensor(name, value, dtypes=(torch.int32,))
    if value.shape != (size,) or value.device != device:
        tensor(name, value, shape=(size,), device=device)
    if not value.is_contiguous():
        contiguous(name, value)


def index_error(name: str, indices: torch.Tensor, size: int) -> ArgumentError:
    """Returns the error to raise where torch has found that `indices` are not all at least 0 and less than `size`."""
    low, high = (bound.item() for bound in indices.aminmax())
    return ArgumentError(f"{name} must be at least 0 and less than {size}, found {low if low < 0 else high}")


def contiguous(name: str, value: torch.Tensor) -> None:
    """Check that a tensor is contiguous."""
    if not value.is_contiguous():
        raise ArgumentError(f"{name} must be contiguous, found strides {value.stride()} for shape {tuple(value.shape)}")


def number(name: str, value: object, condition: bool, expected: str, *parts: object) -> None:
    """Raise unless `condition` holds. The message names `expected`, with each {} in it replaced by one of `parts`."""
    if not condition:
        raise ArgumentError(f"{name} must be {expected.format(*parts)}, found {value}")


def real(name: str, value: float) -> None:
    """Check that `value` is a finite Python real number."""
    if type(value) is not float and not _is_number(value, numbers.Real):
        raise ArgumentTypeError(f"{name} must be a real number, found {_kind(value)}")
    if not -math.inf < value < math.inf:  # math.isfinite would break a graph traced with symbolic floats
        raise ArgumentError(f"{name} must be finite, found {value}")


def integer(name: str, value: object, expected: str = "an integer") -> None:
    """Check that `value` is a Python integer; `expected` describes everything that the caller accepts."""
    if type(value) is not int and not _is_number(value, numbers.Integral):
        raise ArgumentTypeError(f"{name} must be {expected}, found {_kind(value)}")


def as_float(name: str, value: SupportsFloat) -> float:
    """Returns `value` as a float; it may be a real number, or a tensor or array without dimensions.

    Raises ArgumentError for a tensor that requires grad, since no gradient is computed for it.
    """
    if isinstance(value, _TENSOR) and value.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} must not require grad, since no gradient is computed for it: multiply a tensor by it, or "
            "detach() it"
        )
    scalar = value if type(value) is float else _scalar(value)
    real(name, scalar)
    return float(scalar)


def whole(name: str, value: SupportsInt, expected: str = "an integer") -> int:
    """Returns `value` as an int; it may be an integer, a whole float, or a tensor or array without dimensions."""
    if type(value) is int:
        return value
    value = _scalar(value)
    if isinstance(value, torch.SymInt):  # an integer of a traced graph stays symbolic
        return cast(int, value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        number(name, value, float(value).is_integer(), "a whole number")
    else:
        integer(name, value, expected)
    return int(value)


def count(name: str, value: SupportsInt, least: int = 0) -> int:
    """Returns `value` as an int, as `whole` does, which must be at least `least`."""
    value = whole(name, value)
    number(name, value, value >= least, "at least {}", least)
    return value


def flag(name: str, value: Any, expected: str = "a bool") -> None:
    """Check that `value` is a bool; 0 and 1 count, a tensor does not. `expected`: all that the caller accepts."""
    if value is True or value is False:
        return
    is_many = isinstance(value, torch.Tensor) or getattr(value, "ndim", 0) > 0  # `in` would compare their elements
    if is_many or value not in (0, 1):
        kind = "a tensor" if isinstance(value, torch.Tensor) else "an array"
        found = f"{kind} of shape {tuple(value.shape)}" if is_many else repr(value)
        raise ArgumentTypeError(f"{name} must be {expected}, found {found}")


def flags(**values: object) -> None:
    """Check that each value is a bool, as `flag` does."""
    for name, value in values.items():
        flag(name, value)


def window(window_size: Sequence[int]) -> tuple[int, int]:
    """Check that two integers are given; return (left, right) as ints, with -1 for every negative one."""
    if type(window_size) is tuple and window_size == (-1, -1):  # an array would compare its elements
        return -1, -1
    try:
        left, right = window_size
        exact = int(left) == left and int(right) == right
    except (TypeError, ValueError, OverflowError):
        exact = False
    if not exact:
        raise ArgumentError(f"window_size must be two integers (left, right), found {window_size!r}")
    left, right = (min(max(int(side), -1), _FAR) for side in (left, right))
    return left, right


def packed(name: str, value: torch.Tensor, parts: int, layout: str) -> None:
    """Check a tensor that holds `parts` tensors along its dimension -3, against a layout as in `ndim`."""
    tensor(name, value)
    ndim(name, value, layout)
    number(f"{name}.shape[-3]", value.shape[-3], value.shape[-3] == parts, f"{parts} as in {layout}")


def process_group(value: object) -> None:
    """Check that a group of processes is given."""
    if value is None:
        raise ArgumentTypeError("process_group must be a torch.distributed group, found None")


def own_memory(**tensors: torch.Tensor) -> None:
    """Check that tensors to be written start at different addresses and have no expanded dimension."""
    seen: dict[tuple[int, int | torch.SymInt], str] = {}
    for name, value in tensors.items():
        strides = value.stride()
        if 0 in strides and any(size > 1 for size, stride in zip(value.shape, strides, strict=True) if stride == 0):
            raise ArgumentError(f"{name} must not be expanded, since it is written; found strides {strides}")
        if torch.compiler.is_compiling() or value.numel() == 0:
            continue
        # Meta and fake tensors have no data_ptr.
        other = seen.setdefault((_torch_private.storage_id(value), value.storage_offset()), name)
        if other is not name:
            raise ArgumentError(f"{name} must have memory of its own, since it is written; found the memory of {other}")


def apart(
    name: str, written: torch.Tensor, others: Mapping[str, torch.Tensor | None], *, or_same: bool = False
) -> None:
    """Check that a tensor to be written shares no element with any of the others, as far as strides tell.

    or_same: another may be the same elements at the same places.
    """
    if torch.compiler.is_compiling():
        return
    for other, value in others.items():
        if value is not None and _overlap(written, value) and not (or_same and _are_same(written, value)):
            raise ArgumentError(f"{name} must have memory of its own, since it is written; found the memory of {other}")


def _are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors that share memory have the same elements at the same places."""
    return x.dtype is y.dtype and x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether tensors of one dtype surely share an element."""
    if x.numel() == 0 or y.numel() == 0 or _torch_private.storage_id(x) != _torch_private.storage_id(y):
        return False
    distance = y.storage_offset() - x.storage_offset()
    extent_x, extent_y = _extent(x.shape, x.stride()), _extent(y.shape, y.stride())
    if distance == 0 or not -extent_y < distance < extent_x:
        return distance == 0
    if x.numel() == extent_x and y.numel() == extent_y:
        return True
    # Both may be columns of one matrix, as q of a packed qkv is: then their rows are compared.
    dims_x, dims_y = _merged(x), _merged(y)
    if not len(dims_x) == len(dims_y) == 2:
        return False
    (_, pitch), (row_x, step_x) = dims_x
    (_, pitch_y), (row_y, step_y) = dims_y
    if pitch != pitch_y or not step_x == step_y == 1 or max(row_x, row_y) > pitch:
        return False
    shift = distance % pitch
    return shift < row_x or shift + row_y > pitch


def _merged(x):
    """The dimensions of a tensor as [(size, stride), ...], those merged that are like one."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if dims and stride == dims[0][0] * dims[0][1]:
            dims[0] = dims[0][0] * size, dims[0][1]
        elif size > 1:
            dims.insert(0, (size, stride))
    return dims


def _extent(shape, stride):
    """How many elements lie from the first to the last of a tensor that is not empty."""
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _are_alike(values: Iterable[torch.Tensor], dtypes: Collection[torch.dtype]) -> bool:
    """Returns whether the values pass `alike`: a faster test for the usual case without errors."""
    dtype = device = None
    for value in values:
        if not isinstance(value, _TENSOR) or value.layout is not _STRIDED or value.is_nested:
            return False
        if dtype is None:
            dtype, device = value.dtype, value.device
        elif value.dtype is not dtype or value.device != device:
            return False
    return dtype in dtypes


def _scalar(value: Any) -> Any:
    """Returns the number in a tensor or an array without dimensions; any other value unchanged."""
    if not _is_number(value, numbers.Number) and getattr(value, "ndim", None) == 0:
        return value.item()
    return value


def _kind(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _is_number(value: object, kind: type) -> bool:
    return isinstance(value, (kind, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _fits(found: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(found) != len(shape):
        return False
    for have, want in zip(found, shape, strict=True):  # faster than `all` of a generator
        if want is not None and have != want:
            return False
    return True


def _either(options: Iterable[object]) -> str:
    return " or ".join(str(option) for option in options)


def _shape(shape: Sequence[int | None]) -> str:
    return (
        "(" + ", ".join("*" if size is None else str(size) for size in shape) + ("," if len(shape) == 1 else "") + ")"
    )
