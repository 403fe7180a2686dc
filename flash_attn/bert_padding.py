"""Convert padded batches (batch, seqlen, ...) to packed ones (tokens, ...), which the varlen functions take, and back.

    packed, indices, cu_seqlens, max_seqlen, _ = unpad_input(hidden_states, attention_mask)
    ...                                                    # attention or any per-token layer on (tokens, ...)
    hidden_states = pad_input(packed, indices, batch, seqlen)

All functions are plain torch. They run on every device, have gradients of any order, and compile without graph breaks,
except for the two `unpad` functions: their shapes depend on the data. (`unpad_input` compiles without a break if
`capture_dynamic_output_shape_ops` and `capture_scalar_outputs` are set in torch._dynamo.config.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat  # noqa: F401  (other projects import these two names from here)
from torch import Tensor

from flash_attn._ops import checks

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MASKS = (*_INTEGERS, torch.float16, torch.bfloat16, torch.float32)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Gather rows: `input[indices]`.

    Arguments:
        input: (rows, ...), any dtype.
        indices: (m,) int64 or int32, within [0, rows); may repeat.
    Returns (m, ...). The gradient of a row that is taken several times is the sum over its copies.

    >>> from flash_attn.bert_padding import index_first_axis
    >>> index_first_axis(torch.arange(4), torch.tensor([2, 0])).tolist()
    [2, 0]
    """
    _check_rows("input", input)
    _check_indices(indices, input)
    try:
        return input.index_select(0, indices)
    except IndexError as error:  # as the CPU raises it
        raise checks.index_error("indices", indices, input.shape[0]) from error


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Scatter rows into zeros: `out[indices] = values`.

    Arguments:
        values: (m, ...), any dtype.
        indices: (m,) int64 or int32, within [0, first_axis_dim), distinct; else an arbitrary one of the rows is kept.
        first_axis_dim: number of rows of the result.
    Returns (first_axis_dim, ...).

    >>> from flash_attn.bert_padding import index_put_first_axis
    >>> index_put_first_axis(torch.tensor([5, 7]), torch.tensor([2, 0]), 4).tolist()
    [7, 0, 5, 0]
    """
    _check_rows("values", values)
    _check_indices(indices, values)
    checks.tensor("indices", indices, shape=values.shape[:1])
    first_axis_dim = _check_size("first_axis_dim", first_axis_dim)
    try:
        return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)
    except IndexError as error:
        raise checks.index_error("indices", indices, first_axis_dim) from error


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `(input[indices], input)`: the gathered rows, and all rows for the residual branch.

    The gradients of the two add up in `input`. Arguments as in `index_first_axis`.

    Example:
        >>> from flash_attn.bert_padding import index_first_axis_residual
        >>> rows, everything = index_first_axis_residual(torch.arange(8).view(4, 2), torch.tensor([0, 3]))
        >>> rows
        tensor([[0, 1],
                [6, 7]])
    """
    return index_first_axis(input, indices), input


class IndexFirstAxis(torch.autograd.Function):
    """`IndexFirstAxis.apply` is `index_first_axis`. Forward and backward are for autograd Functions that call them.

    Example:
        >>> from flash_attn.bert_padding import IndexFirstAxis
        >>> IndexFirstAxis.apply(torch.arange(4), torch.tensor([2, 0])).tolist()
        [2, 0]
    """

    apply = staticmethod(index_first_axis)

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> Tensor:
        """`index_first_axis(input, indices)`, keeping in `ctx` what `backward` needs."""
        ctx.save_for_backward(indices)
        ctx.first_axis_dim = len(input)
        return index_first_axis(input, indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """The gradients of input and indices, of which the latter is None."""
        (indices,) = ctx.saved_tensors
        rows = grad_output.new_zeros(ctx.first_axis_dim, *grad_output.shape[1:])
        return rows.index_add(0, indices, grad_output), None


class IndexPutFirstAxis(torch.autograd.Function):
    """`IndexPutFirstAxis.apply` is `index_put_first_axis`. Forward and backward: as in `IndexFirstAxis`.

    Example:
        >>> from flash_attn.bert_padding import IndexPutFirstAxis
        >>> IndexPutFirstAxis.apply(torch.tensor([5, 7]), torch.tensor([2, 0]), 4).tolist()
        [7, 0, 5, 0]
    """

    apply = staticmethod(index_put_first_axis)

    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
        """`index_put_first_axis(values, indices, first_axis_dim)`, keeping in `ctx` what `backward` needs."""
        ctx.save_for_backward(indices)
        return index_put_first_axis(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """The gradients of values, indices and first_axis_dim, of which the last two are None."""
        (indices,) = ctx.saved_tensors
        return index_first_axis(grad_output, indices), None, None


class IndexFirstAxisResidual(torch.autograd.Function):
    """`IndexFirstAxisResidual.apply` is `index_first_axis_residual`. Forward and backward: as in `IndexFirstAxis`.

    Example:
        >>> from flash_attn.bert_padding import IndexFirstAxisResidual
        >>> rows, everything = IndexFirstAxisResidual.apply(torch.arange(4), torch.tensor([2, 0]))
        >>> rows.tolist(), everything.tolist()
        ([2, 0], [0, 1, 2, 3])
    """

    apply = staticmethod(index_first_axis_residual)

    @staticmethod
    def forward(ctx: Any, input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        """`index_first_axis_residual(input, indices)`, keeping in `ctx` what `backward` needs."""
        return IndexFirstAxis.forward(ctx, input, indices), input.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_residual: Tensor) -> tuple[Tensor, None]:
        """The gradients of input and indices, of which the latter is None."""
        (indices,) = ctx.saved_tensors
        return grad_residual.index_add(0, indices, grad_output), None


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch.

    Arguments:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask: (batch, seqlen), bool, integers, or floats 0 and 1; non-zero marks a token, anywhere in a row.
        unused_mask: (batch, seqlen), of the same dtypes; non-zero marks a token that is packed, too, but that seqused
            does not count.
    Returns:
        hidden_states: (total, ...), the tokens marked by either mask, in order.
        indices: (total,) int64, their positions in the flattened (batch * seqlen).
        cu_seqlens: (batch + 1,) int32, where each sequence starts in the packed tensor, and its end.
        max_seqlen: int, the longest sequence. Reading it is the one synchronisation with the device.
        seqused: (batch,) int32, the number of tokens marked by attention_mask in each row.
    Example:
        >>> from flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
        >>> packed, indices, cu_seqlens, max_seqlen, seqused = unpad_input(torch.randn(2, 4, 64), mask)
        >>> indices.tolist(), cu_seqlens.tolist(), max_seqlen
        ([0, 1, 4, 5, 6], [0, 2, 5], 3)
    """
    _check_mask("attention_mask", attention_mask, hidden_states, _MASKS)
    used = packed = attention_mask != 0
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states, _MASKS)
        packed = used | (unused_mask != 0)
    return *_pack(hidden_states, packed, _row_sums(packed)), _row_sums(used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack a padded batch where each row holds several short sequences, one after the other from position 0.

    Arguments:
        hidden_states: (batch, seqlen, ...), any dtype.
        attention_mask_in_length: (batch, seqlen) integers: the non-zero entries of a row are the lengths of its
            sequences, in order.
    Returns (hidden_states, indices, cu_seqlens, max_seqlen) as `unpad_input`, with cu_seqlens over all sequences of all
    rows: varlen attention on the result keeps them apart.

    >>> from flash_attn.bert_padding import unpad_input_for_concatenated_sequences
    >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    >>> _, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(torch.randn(2, 6, 64), lengths)
    >>> indices.tolist(), cu_seqlens.tolist(), max_seqlen
    ([0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11], [0, 2, 5, 11], 6)
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states, _INTEGERS)
    lengths = attention_mask_in_length
    row_lengths, seqlen = _row_sums(lengths), lengths.shape[1]
    if bool((lengths < 0).any() | (row_lengths > seqlen).any()):
        raise ValueError(
            "attention_mask_in_length must hold lengths >= 0 whose sum in a row is at most seqlen "
            f"{seqlen}, found rows with sums {row_lengths.tolist()}"
        )
    packed = torch.arange(seqlen, device=lengths.device) < row_lengths[:, None]
    return _pack(hidden_states, packed, lengths[lengths != 0].int())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`: put tokens back into a padded batch, zeros elsewhere.

    Arguments:
        hidden_states: (total, ...), any dtype.
        indices: (total,) int64 or int32, positions in the flattened (batch * seqlen), as `unpad_input` returns them.
        batch, seqlen: sizes of the padded batch.
    Returns (batch, seqlen, ...).

    >>> from flash_attn.bert_padding import pad_input
    >>> pad_input(torch.tensor([5, 7, 9]), torch.tensor([0, 1, 3]), batch=2, seqlen=3).tolist()
    [[5, 7, 0], [9, 0, 0]]
    """
    _check_rows("hidden_states", hidden_states)
    batch, seqlen = _check_size("batch", batch), _check_size("seqlen", seqlen)
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *hidden_states.shape[1:])


def _pack(hidden_states, packed, seqlens):
    """Returns the tokens where `packed` is true, their flat positions, and the cumulative and the largest seqlens."""
    seqlens = F.pad(seqlens, (1, 0))  # 0 is the start of the first sequence, and the maximum of an empty batch
    cu_seqlens = seqlens.cumsum(0, dtype=torch.int32)
    total, max_seqlen = torch.stack([cu_seqlens[-1], seqlens.max()]).tolist()
    indices = packed.flatten().nonzero_static(size=total).squeeze(1)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen


def _row_sums(x):
    return x.sum(dim=-1, dtype=torch.int32)


def _check_indices(indices, rows):
    checks.tensor("indices", indices, dtypes=checks.INTEGER_DTYPES, shape=(None,), device=rows.device)


def _check_size(name, size):
    """Check a size and return it as an int."""
    size = checks.whole(name, size)
    checks.number(name, size, size >= 0, "at least 0")
    return size


def _check_mask(name, mask, hidden_states, dtypes):
    _check_rows("hidden_states", hidden_states, min_ndim=2)
    checks.tensor(name, mask, dtypes=dtypes, shape=hidden_states.shape[:2], device=hidden_states.device)
    if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():  # additive masks have 0 at tokens
        raise ValueError(f"{name} must hold 0 and 1 if it is floating-point, found {mask.amin()} to {mask.amax()}")


def _check_rows(name, value, min_ndim=1):
    checks.tensor(name, value)
    checks.number(f"the number of dimensions of {name}", value.ndim, value.ndim >= min_ndim, f"at least {min_ndim}")
