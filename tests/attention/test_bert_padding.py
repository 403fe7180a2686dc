import pytest
import torch

from flash_attn import bert_padding
from flash_attn.bert_padding import (
    IndexFirstAxis,
    IndexFirstAxisResidual,
    IndexPutFirstAxis,
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASKS = {
    "left aligned": [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    "right aligned": [[0, 0, 1, 1], [0, 1, 1, 1]],
    "with holes": [[0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0]],
    "an empty row": [[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]],
    "all empty": [[0, 0], [0, 0]],
    "full": [[1, 1, 1]],
    "one token": [[1]],
}
INDICES = {"distinct": [3, 0, 4], "repeated": [1, 1, 4, 0, 1], "none": []}


def _random(*shape, device, dtype=torch.float64):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=dtype.is_floating_point)


def _int64(values, device):
    return torch.tensor(values, dtype=torch.int64, device=device)


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_index_first_axis(indices, trailing, device):
    x, indices = _random(5, *trailing, device=device), _int64(indices, device)
    assert torch.equal(index_first_axis(x, indices), x[indices])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, indices), x)
    assert torch.autograd.gradgradcheck(lambda x: index_first_axis(x, indices), x)


def test_a_row_taken_twice_gets_both_gradients(device):
    x = _random(2, 1, device=device)
    index_first_axis(x, _int64([1, 1, 1], device)).sum().backward()
    assert x.grad.tolist() == [[0.0], [3.0]]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_index_put_first_axis(trailing, device):
    values, indices = _random(3, *trailing, device=device), _int64([4, 0, 2], device)
    expected = torch.zeros(6, *trailing, device=device, dtype=values.dtype)
    expected[indices] = values.detach()
    assert torch.equal(index_put_first_axis(values, indices, 6), expected)
    assert torch.autograd.gradcheck(lambda values: index_put_first_axis(values, indices, 6), values)


def test_index_first_axis_residual(device):
    x, indices = _random(5, 3, device=device), _int64([1, 1, 4], device)
    rows, residual = index_first_axis_residual(x, indices)
    assert torch.equal(rows, x[indices]) and torch.equal(residual, x)
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, indices), x)


def test_residual_leaves_the_gradient_of_other_branches_alone(device):
    x, indices = _random(4, 2, device=device), _int64([0, 3], device)
    rows, residual = index_first_axis_residual(x, indices)
    other = _random(4, 2, device=device)
    ((residual + other).sum() + rows.sum()).backward()
    assert torch.equal(other.grad, torch.ones_like(other))


def test_classes_apply_positionally(device):
    x, indices = _random(4, 2, device=device), _int64([2, 0], device)
    assert torch.equal(IndexFirstAxis.apply(x, indices), x[indices])
    assert torch.equal(IndexPutFirstAxis.apply(x[indices], indices, 4)[indices], x[indices])
    assert torch.equal(IndexFirstAxisResidual.apply(x, indices)[1], x)


@pytest.mark.parametrize(
    ("cls", "function", "sizes"),
    [
        (IndexFirstAxis, index_first_axis, ()),
        (IndexPutFirstAxis, index_put_first_axis, (7,)),
        (IndexFirstAxisResidual, index_first_axis_residual, ()),
    ],
)
def test_classes_within_another_function(cls, function, sizes, device):
    """As Functions of autograd: forward and backward with a ctx."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *args):
            return cls.forward(ctx, 2 * x, *args)

        @staticmethod
        def backward(ctx, *grads):
            grad, *others = cls.backward(ctx, *grads)
            return 2 * grad, *others

    repeats = cls is not IndexPutFirstAxis
    x, indices = _random(4, 2, device=device), _int64([2, 0, 2 if repeats else 3, 1], device)
    for found, expected in zip(Scaled.apply(x, indices, *sizes), function(2 * x, indices, *sizes), strict=True):
        assert torch.equal(found, expected)
    assert torch.autograd.gradcheck(lambda x: Scaled.apply(x, indices, *sizes), x)
    assert issubclass(cls, torch.autograd.Function)


def test_names_others_import():
    assert bert_padding.rearrange(torch.zeros(2, 3), "a b -> b a").shape == (3, 2)
    assert bert_padding.repeat(torch.zeros(2), "a -> a b", b=3).shape == (2, 3)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
@pytest.mark.cover(2)
def test_unpad_and_pad(mask, dtype, trailing, device):
    kept = torch.tensor(mask, dtype=torch.bool, device=device)
    x = _random(*kept.shape, *trailing, device=device)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, kept.to(dtype))
    lengths = [sum(row) for row in mask]
    assert torch.equal(tokens, x[kept])
    assert torch.equal(indices, kept.flatten().nonzero().flatten()) and indices.dtype == torch.int64
    assert cu_seqlens.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert type(max_seqlen) is int and max_seqlen == max(lengths)
    assert seqused.tolist() == lengths
    masked = x * kept.view(*kept.shape, *[1] * len(trailing))
    assert torch.equal(pad_input(tokens, indices, *kept.shape), masked)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_round_trip_gradient(mask, device):
    kept = torch.tensor(mask, dtype=torch.bool, device=device)

    def round_trip(x):
        tokens, indices, *_ = unpad_input(x, kept)
        return pad_input(tokens.square(), indices, *kept.shape)

    assert torch.autograd.gradcheck(round_trip, _random(*kept.shape, 2, device=device))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (0, 0)])
def test_empty_batch(shape, device):
    x = _random(*shape, 3, device=device)
    mask = torch.zeros(shape, dtype=torch.int64, device=device)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask)
    assert tokens.shape == (0, 3) and indices.shape == (0,) and max_seqlen == 0
    assert cu_seqlens.tolist() == [0] * (shape[0] + 1) and seqused.tolist() == [0] * shape[0]
    assert pad_input(tokens, indices, *shape).shape == x.shape
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, mask)
    assert tokens.shape == (0, 3) and cu_seqlens.tolist() == [0] and max_seqlen == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64], ids=str)
def test_unused_tokens_are_packed_but_not_counted(dtype, device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device).to(dtype)
    unused = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]], device=device).to(dtype)  # one place is in both masks
    x = torch.arange(8, device=device).view(2, 4)
    tokens, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert tokens.tolist() == indices.tolist() == [0, 1, 2, 4, 7]
    assert cu_seqlens.tolist() == [0, 3, 5] and max_seqlen == 3
    assert seqused.tolist() == [2, 1]


def test_concatenated_sequences(device):
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    x = _random(3, 6, 2, device=device)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert type(max_seqlen) is int and max_seqlen == 6
    assert torch.equal(tokens, x.flatten(0, 1)[indices])
    assert torch.autograd.gradcheck(lambda x: unpad_input_for_concatenated_sequences(x, lengths)[0], x)


def test_lengths_stand_anywhere_in_their_row(device):
    lengths = torch.tensor([[0, 2, 0, 1], [0, 0, 0, 0], [0, 0, 0, 4]], device=device)
    x = torch.arange(12, device=device).view(3, 4)
    tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    assert tokens.tolist() == indices.tolist() == [0, 1, 2, 8, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 2, 3, 7] and max_seqlen == 4


def test_not_contiguous(device):
    mask = torch.tensor(MASKS["with holes"], device=device).t().contiguous().t()
    x = _random(4, 3, 2, device=device).transpose(0, 1)
    assert torch.equal(unpad_input(x, mask)[0], x[mask.bool()])


def test_compiles_without_graph_breaks(device):
    x, indices = _random(8, 3, device=device), _int64([5, 0, 1], device)

    def double(x):
        return pad_input(2 * index_first_axis(x, indices), indices, 2, 4)

    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    assert torch.equal(compiled(x), double(x))
    assert gradient.sum(1).tolist() == [6.0, 6.0, 0.0, 0.0, 0.0, 6.0, 0.0, 0.0]


@pytest.mark.parametrize("captures", [False, True])
def test_unpad_compiles(captures, device):
    """With fullgraph=True, torch captures sizes that depend on data whether or not its configuration says so."""
    mask = torch.tensor(MASKS["with holes"], device=device)
    x = _random(3, 4, 2, device=device)
    capture = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=captures, capture_scalar_outputs=captures)
    with capture:
        compiled = torch.compile(unpad_input, fullgraph=True, backend="aot_eager")(x, mask)
    for found, expected in zip(compiled, unpad_input(x, mask), strict=True):
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def test_sizes_that_are_odd_but_legal():
    rows = torch.randn(3, 4)
    indices = torch.tensor([0, 2, 3])
    torch.testing.assert_close(pad_input(rows, indices, 2.0, torch.tensor(3)), pad_input(rows, indices, 2, 3))
    torch.testing.assert_close(
        index_put_first_axis(rows, indices, torch.tensor(5)), index_put_first_axis(rows, indices, 5)
    )


X, ROWS = torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64)
ERRORS = [
    (lambda: index_first_axis([1, 2], ROWS), TypeError, "input must be a torch.Tensor, found list"),
    (lambda: index_first_axis(torch.tensor(1.0), ROWS), ValueError, "dimensions of input must be at least 1, found 0"),
    (lambda: index_first_axis(X, [0, 1]), TypeError, "indices must be a torch.Tensor, found list"),
    (lambda: index_first_axis(X, ROWS.short()), TypeError, "indices must have dtype torch.int32 .*found torch.int16"),
    (lambda: index_first_axis(X, ROWS[:, None]), ValueError, r"indices must have shape \(\*,\), found \(2, 1\)"),
    (
        lambda: index_first_axis_residual(X, ROWS.float()),
        TypeError,
        "indices must have dtype torch.int32 or torch.int64",
    ),
    (lambda: index_put_first_axis(X[0], ROWS, 5), ValueError, r"indices must have shape \(3,\), found \(2,\)"),
    (
        lambda: index_put_first_axis(X, ROWS.bool(), 5),
        TypeError,
        "indices must have dtype torch.int32 or torch.int64, found torch.bool",
    ),
    (lambda: index_put_first_axis(X, ROWS.to("meta"), 5), ValueError, "indices must be on cpu .* found it on meta"),
    (lambda: pad_input(X[0], ROWS, 2, 3), ValueError, r"indices must have shape \(3,\), found \(2,\)"),
    (lambda: pad_input(None, ROWS, 2, 3), TypeError, "hidden_states must be a torch.Tensor, found NoneType"),
    (
        lambda: pad_input(X, torch.tensor([0, 6]), 2, 3),
        ValueError,
        "indices must be at least 0 and less than 6, found 6",
    ),
    (lambda: index_first_axis(X, torch.tensor([-1, 2])), ValueError, "indices must be .* less than 2, found -1"),
    (lambda: pad_input(X, ROWS, "2", 3), TypeError, "batch must be an integer, found str"),
    (lambda: pad_input(X, ROWS, 2, -3), ValueError, "seqlen must be at least 0, found -3"),
    (lambda: index_put_first_axis(X, ROWS, 5.5), ValueError, "first_axis_dim must be a whole number, found 5.5"),
    (lambda: unpad_input(X.to_sparse(), ROWS), TypeError, "hidden_states must be a dense tensor, found torch.sparse"),
    (lambda: unpad_input(X[0, 0], ROWS), ValueError, "dimensions of hidden_states must be at least 2, found 1"),
    (lambda: unpad_input(X, torch.ones(2, 4).bool()), ValueError, r"attention_mask must have shape \(2, 3\)"),
    (lambda: unpad_input(X, torch.zeros(2, 3) - 1e4), ValueError, "attention_mask must hold 0 and 1 .* found -10000"),
    (lambda: unpad_input(X, torch.ones(2, 3).cfloat()), TypeError, "attention_mask must have .* found torch.complex64"),
    (lambda: unpad_input(X, X.bool()), ValueError, r"attention_mask must have shape \(2, 3\), found \(2, 3, 4\)"),
    (lambda: unpad_input(X, X[..., 0].bool(), ROWS), ValueError, r"unused_mask must have shape \(2, 3\), found \(2,\)"),
    (
        lambda: unpad_input_for_concatenated_sequences(X, torch.tensor([[2, 1, 0], [2, 2, 0]])),
        ValueError,
        r"attention_mask_in_length must hold .* at most seqlen 3, found rows with sums \[3, 4\]",
    ),
    (
        lambda: unpad_input_for_concatenated_sequences(X, torch.tensor([[2, -1, 0], [0, 0, 0]])),
        ValueError,
        "attention_mask_in_length must hold lengths >= 0",
    ),
]


@pytest.mark.parametrize("call, error, message", ERRORS, ids=[message[:40] for _, _, message in ERRORS])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_indices_may_be_int32(device):
    """As transformers passes them when it decodes a padded batch."""
    x, indices = torch.randn(3, 4, device=device), torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    padded = pad_input(x, indices, 2, 3)
    assert torch.equal(index_first_axis(padded.flatten(0, 1), indices), x)
