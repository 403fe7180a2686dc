"""Attention of transformers' models: masks against transformers', and models against their own eager attention."""

import contextlib
import inspect
import itertools
import math
import operator
import pickle
import sys

import oracle
import pytest
import torch
import transformers
from compare import assert_error_ratio
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flash_attn import batch_invariant, flash_attn_func, masks
from flash_attn.integrations import transformers as door
from flash_attn.ops.linear import batch_invariant_layers

NAME = door.register()
BATCH, SEQLEN = 2, 9

# ---------------------------------------------------------------------------------------------------------------------
# Masks

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
JUMPING = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9, 10], [5, 6, 7, 8, 0, 2, 4, 5, 6]])
DOCUMENTS = torch.tensor([0, 9, 13, 18], dtype=torch.int32)  # over the tokens of a batch
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1], [0, 0, -1, 0, 0, 0, -1, -1, -1]])


remap_positions = getattr(masking_utils, "remap_positions_for_packed_sequence", None)  # in transformers 5.23 and newer


def packed(function, positions=POSITIONS, ids=None):
    """A mask function within each packed sequence, in which newer versions of transformers count positions anew."""
    ids = masking_utils.find_packed_sequence_indices(POSITIONS) if ids is None else ids
    function = function if remap_positions is None else remap_positions(function, positions)
    return and_masks(function, packed_sequence_mask_function(ids))


def every_other_key(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx % 2 == 0) | (kv_idx == q_idx)


def own_and_next_keys(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx == 0) | (abs(kv_idx - q_idx) <= batch_idx + 1)


FUNCTIONS = {
    "causal": causal_mask_function,
    "full": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "window of the length": sliding_window_causal_mask_function(SEQLEN),
    "window on both sides": sliding_window_bidirectional_mask_function(2),
    "chunks": chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long)),
    "chunks after padding": chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "chunks and a window": and_masks(
        chunked_causal_mask_function(4, torch.tensor([0, 3])), masking_utils.sliding_window_overlay(3)
    ),
    "chunks of two sizes": and_masks(
        chunked_causal_mask_function(4, torch.tensor([0, 3])), chunked_causal_mask_function(6, torch.tensor([0, 0]))
    ),
    "images": or_masks(causal_mask_function, masking_utils.blockwise_overlay(IMAGES)),
    "images in a window": or_masks(sliding_window_causal_mask_function(3), masking_utils.blockwise_overlay(IMAGES)),
    "packed": packed(causal_mask_function),
    "packed, window": packed(sliding_window_causal_mask_function(2)),
    "packed, full": packed(bidirectional_mask_function),
    "packed, chunks": packed(chunked_causal_mask_function(2, torch.zeros(BATCH, dtype=torch.long))),
    "packed, jumping": packed(sliding_window_causal_mask_function(3), JUMPING),
    "documents that come again": packed_sequence_mask_function(IMAGES),
    "a first key and neighbours": own_and_next_keys,
    "many ranges": and_masks(causal_mask_function, every_other_key),
}
ONLY_SQUARE = {  # they know the tokens of a prefill
    name for name in FUNCTIONS if name.startswith(("packed", "documents", "images"))
}
PADDING = {
    "none": None,
    "nothing": torch.ones(BATCH, SEQLEN, dtype=torch.bool),
    "left": torch.arange(SEQLEN) >= torch.tensor([[0], [3]]),
    "right": torch.arange(SEQLEN) < torch.tensor([[9], [5]]),
    "a hole": torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1, 1], [1] * 9]).bool(),
    "holes": torch.tensor([[1, 0, 1, 0, 1, 1, 1, 0, 1], [1] * 9]).bool(),
    "all of an entry": torch.arange(SEQLEN) >= torch.tensor([[0], [9]]),
    "too short": torch.ones(BATCH, SEQLEN - 2, dtype=torch.bool),
}
SIZES = {  # seqlen_q, seqlen_k, q_offset, kv_offset
    "prefill": (9, 9, 0, 0),
    "decode": (1, 9, 8, 0),
    "prefill after a cache": (3, 9, 6, 0),
    "static cache, prefill": (4, 9, 0, 0),
    "static cache, decode": (1, 9, 5, 0),
    "static cache with an offset on the device": (1, 9, torch.tensor(5), 0),
    "cache of a window": (2, 5, 7, 4),
    "queries ahead of the keys": (3, 5, 4, 1),
    "queries before the keys": (3, 5, 0, 2),
    "a query between the keys": (1, 5, 4, 2),
}


def as_bool(seen, shape):
    """What arguments of attention show, bool of `shape`."""
    batch, _, seqlen_q, seqlen_k = shape
    used = torch.full((batch,), seqlen_k) if seen.seqused_k is None else seen.seqused_k
    rows = []
    assert ((used >= 0) & (used <= seqlen_k)).all()
    for length in used.tolist():
        keep = oracle.allowed_keys(seqlen_q, length, seen.causal, seen.window_size, torch.device("cpu"))
        rows.append(torch.nn.functional.pad(keep, (0, seqlen_k - length)))
    keep = torch.stack(rows)[:, None]
    if seen.key_ranges is not None:
        keep = keep & masks.to_bool(seen.key_ranges, seqlen_k)
    if seen.attn_bias is not None:
        keep = keep & seen.attn_bias
    if seen.documents is not None:
        keep = keep & masks.to_bool(seen.documents.key_ranges(batch, seqlen_q), seqlen_k)
    return keep


@pytest.mark.parametrize(
    ("function", "size"),
    [pair for pair in itertools.product(FUNCTIONS, SIZES) if pair[0] not in ONLY_SQUARE or pair[1] == "prefill"],
)
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.cover(2)
def test_masks_are_those_of_transformers(function, size, padding):
    q_length, kv_length, q_offset, kv_offset = SIZES[size]
    arguments = {
        "batch_size": BATCH,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": PADDING[padding],
    }
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = door.mask(**arguments)
    assert torch.equal(as_bool(mask.seen, expected.shape), expected)


FORMS = {  # what layers are given: the arguments that are not None, and the window
    ("causal", "prefill", "nothing"): ((), (-1, 0)),
    ("causal", "decode", "nothing"): ((), (-1, -1)),
    ("causal", "static cache, decode", "nothing"): (("seqused_k",), (-1, 0)),
    ("causal", "prefill", "left"): (("key_ranges",), (-1, 0)),
    ("causal", "prefill", "holes"): (("attn_bias",), (-1, -1)),
    ("full", "prefill", "right"): (("seqused_k",), (-1, -1)),
    ("full", "prefill", "left"): (("key_ranges",), (-1, -1)),
    ("window", "prefill", "none"): ((), (2, 0)),
    ("window", "prefill after a cache", "none"): ((), (2, 0)),
    ("window of the length", "prefill", "none"): ((), (-1, 0)),
    ("window on both sides", "prefill", "none"): ((), (2, 2)),
    ("chunks", "prefill", "none"): (("key_ranges",), (-1, 0)),
    ("images", "prefill", "none"): (("key_ranges",), (-1, -1)),
    ("packed", "prefill", "none"): (("documents",), (-1, 0)),
    ("packed, window", "prefill", "none"): (("documents",), (1, 0)),
    ("packed, jumping", "prefill", "none"): (
        (("key_ranges",), (-1, -1)) if remap_positions else (("documents",), (2, 0))
    ),
}


@pytest.mark.parametrize("case", FORMS, ids=" | ".join)
def test_masks_take_the_fastest_form(case):
    function, size, padding = case
    q_length, kv_length, q_offset, kv_offset = SIZES[size]
    mask = door.mask(
        BATCH,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        FUNCTIONS[function],
        PADDING[padding],
        allow_is_causal_skip=False,
    )
    given = tuple(
        name for name in ("key_ranges", "seqused_k", "attn_bias", "documents") if getattr(mask.seen, name) is not None
    )
    assert (given, mask.seen.window_size) == FORMS[case]


def test_masks_are_evaluated_in_blocks_of_rows(monkeypatch):
    seen = []

    def function(batch_idx, head_idx, q_idx, kv_idx):
        seen.append(torch.broadcast_shapes(*(x.shape for x in (batch_idx, head_idx, q_idx, kv_idx))))
        return own_and_next_keys(batch_idx, head_idx, q_idx, kv_idx)

    monkeypatch.setattr(door, "_BLOCK", 40)
    mask = door.mask(BATCH, SEQLEN, SEQLEN, mask_function=function)
    assert seen == [(BATCH, 1, 2, SEQLEN)] * 4 + [(BATCH, 1, 1, SEQLEN)]
    assert torch.equal(as_bool(mask.seen, mask.shape), mask.dense())


def test_masks_are_tensors_where_a_model_treats_them_so():
    mask = door.mask(BATCH, SEQLEN, SEQLEN, attention_mask=PADDING["left"])
    dense = masking_utils.sdpa_mask(BATCH, SEQLEN, SEQLEN, attention_mask=PADDING["left"])
    assert mask.shape == dense.shape and mask.dtype == dense.dtype and mask.ndim == mask.dim() == 4
    assert mask.device == dense.device
    for function in (
        lambda x: x[:, :, :, :3],
        lambda x: torch.cat([x, x], 3),
        lambda x: torch.where(x, 0.0, 1.0),
        lambda x: ~x,
        lambda x: x & PADDING["left"][:, None, None],
        lambda x: x.expand(-1, 3, -1, -1),
        lambda x: x | x[..., :1],
        lambda x: x.to(torch.float32),
        lambda x: x.to("cpu")[:, 0],
        lambda x: torch.zeros(1).expand(dense.shape).masked_fill(x, 2),
        lambda x: dense & x,
        lambda x: x == dense,
        lambda x: x != dense[:, :, :1],
        lambda x: dense == x,
    ):
        assert torch.equal(function(mask), function(dense))
    assert door.mask(BATCH, SEQLEN, SEQLEN, attention_mask=mask) is mask
    assert isinstance(mask.to("cpu"), door.Mask) and mask.contiguous() is mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "add",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        torch.add,
        lambda x, y: x.add(y),
        lambda x, y: x.clone().add_(y),
        lambda x, y: operator.iadd(x.clone(), y),
        lambda x, y: torch.add(x, other=y),
    ],
)
def test_masks_are_added_as_eager_attention_adds_them(add, dtype):
    arguments = {"batch_size": BATCH, "q_length": SEQLEN, "kv_length": SEQLEN, "attention_mask": PADDING["left"]}
    scores = torch.randn(BATCH, 3, SEQLEN, SEQLEN).to(dtype)
    expected = scores + masking_utils.eager_mask(**arguments, dtype=dtype)
    assert torch.equal(add(scores, door.mask(**arguments)), expected)


def test_a_causal_mask_does_not_rely_on_the_layer():
    """Eager attention does not read is_causal, which some decoders leave false."""
    layer = torch.nn.Module()
    layer.is_causal = False
    q, k, v = inputs((4, 2, 9, 9, 16, 16), "cpu")
    out = door.attention(layer, q, k, v, door.mask(BATCH, 9, 9))[0]
    assert torch.equal(out, door.attention(layer, q, k, v, None, is_causal=True)[0])


def test_masks_for_other_lengths_are_refused():
    q, k, v = inputs((4, 2, 9, 9, 16, 16), "cpu")
    with pytest.raises(ValueError, match=r"attention_mask must be made for .* \(9, 9\), .* found \(9, 8\)"):
        door.attention(torch.nn.Module(), q, k, v, door.mask(BATCH, 9, 8))


# ---------------------------------------------------------------------------------------------------------------------
# The attention function

CALLS = {  # heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim of values; arguments; the same for the oracle
    "full": ((4, 4, 9, 9, 16, 16), {"is_causal": False}, {}),
    "causal, as the module says": ((4, 2, 9, 9, 16, 16), {}, {"causal": True}),
    "scaling, softcap": (
        (4, 2, 9, 9, 16, 16),
        {"scaling": 0.7, "softcap": 2.0},
        {"causal": True, "softmax_scale": 0.7, "softcap": 2.0},
    ),
    "a window": ((4, 2, 9, 9, 16, 16), {"sliding_window": 3}, {"causal": True, "window_size": (2, 0)}),
    "a window on both sides": (
        (4, 2, 9, 9, 16, 16),
        {"sliding_window": 3, "is_causal": False},
        {"window_size": (2, 2)},
    ),
    "one query": ((4, 2, 1, 9, 16, 16), {"is_causal": True}, {}),
    "sinks": ((4, 2, 9, 9, 16, 16), {"s_aux": (4,)}, {"causal": True, "learnable_sink": "s_aux"}),
    "a position bias": (
        (4, 2, 9, 9, 16, 16),
        {"position_bias": (1, 4, 9, 9)},
        {"causal": True, "attn_bias": "position_bias"},
    ),
    "narrow values": ((4, 2, 9, 9, 192, 128), {}, {"causal": True}),
    "wide values": ((4, 4, 9, 9, 16, 32), {"is_causal": False}, {}),
    "head dim 512": ((2, 1, 9, 9, 512, 512), {}, {"causal": True}),
}


def inputs(sizes, device, dtype=torch.float32, batch=BATCH):
    heads, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v = sizes
    shapes = [(heads, seqlen_q, head_dim), (heads_k, seqlen_k, head_dim), (heads_k, seqlen_k, head_dim_v)]
    return [torch.randn(batch, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def check(call, oracle_call, tensors):
    """Compare results and gradients of call(*tensors) with those of oracle_call, in float64 and in float32."""

    def run(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = function(*leaves)
        torch.manual_seed(1)
        return out.detach(), *torch.autograd.grad(out, leaves, torch.randn(out.shape).to(out))

    results = (run(call, torch.float32), run(oracle_call, torch.float64), run(oracle_call, torch.float32))
    for ours, exact, baseline in zip(*results, strict=True):
        assert_error_ratio(ours, exact, baseline)


@pytest.mark.parametrize("case", CALLS)
def test_attention(case, device):
    sizes, options, oracle_options = CALLS[case]
    shapes = {name: value for name, value in options.items() if isinstance(value, tuple)}
    extra = [torch.randn(shape, device=device) for shape in shapes.values()]

    def ours(q, k, v, *extra):
        out, weights = door.attention(
            torch.nn.Module(), q, k, v, None, **{**options, **dict(zip(shapes, extra, strict=True))}
        )
        assert weights is None
        return out

    def exact(q, k, v, *extra):
        named = dict(zip(shapes, extra, strict=True))
        arguments = {name: named.get(x, x) if isinstance(x, str) else x for name, x in oracle_options.items()}
        return oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), **arguments)[0]

    check(ours, exact, [*inputs(sizes, device), *extra])


def test_sinks_of_each_row(device):
    """They are the score of one more key, whose value is 0."""
    sinks = torch.randn(BATCH, 4, 9, 1, device=device)

    def exact(q, k, v, sinks):
        k, v = (torch.nn.functional.pad(x.repeat_interleave(2, 1), (0, 0, 0, 1)) for x in (k, v))
        future = torch.ones(9, 9, dtype=torch.bool, device=device).triu(1)
        bias = torch.zeros(9, 9, dtype=q.dtype, device=device).masked_fill(future, -torch.inf).expand(BATCH, 4, 9, 9)
        bias = torch.cat([bias, sinks.to(q.dtype)], -1)
        return oracle.attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_bias=bias)[0]

    def ours(q, k, v, sinks):
        return door.attention(torch.nn.Module(), q, k, v, None, sinks=sinks)[0]

    check(ours, exact, [*inputs((4, 2, 9, 9, 16, 16), device), sinks])


def test_room_in_a_cache_is_not_seen(device):
    """Without a mask, row i is at key i, whatever follows the keys of the text."""
    q, k, v = inputs((4, 2, 5, 9, 16, 16), device)
    bias = torch.randn(1, 4, 5, 9, device=device)
    longer = door.attention(torch.nn.Module(), q, k, v, None, position_bias=bias)[0]
    exact = door.attention(torch.nn.Module(), q, k[:, :, :5], v[:, :, :5], None, position_bias=bias[..., :5])[0]
    assert torch.equal(longer, exact)


def test_rows_that_see_nothing(device):
    tensors = inputs((4, 2, 9, 9, 16, 16), device)
    padding = PADDING["all of an entry"].to(device)
    mask = door.mask(BATCH, 9, 9, attention_mask=padding, device=device)
    bias = torch.randn(1, 4, 9, 9, device=device, requires_grad=True)
    out, _ = door.attention(torch.nn.Module(), *tensors, mask, position_bias=bias)
    gradients = torch.autograd.grad(out.sum(), [*tensors, bias])
    assert out[0].count_nonzero() and not out[1].count_nonzero()
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(not gradient[1].count_nonzero() for gradient in gradients[:3])


@pytest.mark.parametrize("kind", ["bool", "numbers"])
def test_masks_of_the_caller(kind, device):
    keep = torch.rand(BATCH, 1, 9, 9, device=device) < 0.5
    keep |= torch.eye(9, dtype=torch.bool, device=device)
    given = keep if kind == "bool" else torch.zeros_like(keep, dtype=torch.float32).masked_fill(~keep, -1e4)
    bias = torch.randn(1, 4, 9, 9, device=device)

    def ours(q, k, v, bias):
        return door.attention(torch.nn.Module(), q, k, v, given, position_bias=bias)[0]

    def exact(q, k, v, bias):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return oracle.attention(q, k, v, attn_bias=bias.masked_fill(~keep, -torch.inf))[0]

    check(ours, exact, [*inputs((4, 2, 9, 9, 16, 16), device), bias])


@pytest.mark.parametrize("given", ["bounds", "bounds and lengths", "positions", "bounds and a bias"])
def test_packed_sequences(given, device):
    lengths = [3, 2, 4] if given != "positions" else None
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([3, 2, 4])).expand(BATCH, -1).to(device)
    bias = torch.randn(1, 4, 9, 9, device=device) if "bias" in given else torch.zeros(1, 1, 1, 1, device=device)
    mask, options = None, {}
    if lengths is None:
        positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 3], device=device).expand(BATCH, -1)
        mask = door.mask(
            BATCH,
            9,
            9,
            device=device,
            mask_function=packed(causal_mask_function, positions, ids),
        )
    else:
        cu_seqlens = torch.tensor([0, *lengths * BATCH], device=device).cumsum(0)
        options = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        options |= {"max_length_q": 4, "max_length_k": 4} if "lengths" in given else {}

    def ours(q, k, v, bias):
        bias = bias if "bias" in given else None
        return door.attention(torch.nn.Module(), q, k, v, mask, position_bias=bias, **options)[0]

    def exact(q, k, v, bias):
        seen = ids[:, None, :, None] == ids[:, None, None, :]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return oracle.attention(q, k, v, attn_bias=bias, causal=True, seen=seen)[0]

    tensors = inputs((4, 2, 9, 9, 16, 16), device)
    if "bias" in given:
        check(ours, exact, [*tensors, bias])
    else:
        check(lambda *x: ours(*x, None), lambda *x: exact(*x, bias.to(x[0])), tensors)


def test_dropout_is_that_of_the_library(device):
    q, k, v = inputs((4, 2, 9, 9, 16, 16), device)
    torch.manual_seed(3)
    ours = door.attention(torch.nn.Module(), q, k, v, None, dropout=0.5)[0]
    torch.manual_seed(3)
    expected = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.5, causal=True)
    assert torch.equal(ours, expected)


def test_autocast_decides_the_dtype(device):
    q, k, v = inputs((4, 2, 9, 9, 16, 16), device)
    with torch.autocast(device.type, torch.bfloat16):
        out = door.attention(torch.nn.Module(), q, k.bfloat16(), v, None)[0]
    assert torch.equal(out, door.attention(torch.nn.Module(), *(x.bfloat16() for x in (q, k, v)), None)[0])
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"output_attentions": True}, 'output_attentions must be false, .* use "eager"'),
        ({"cache": object()}, "cache must be None"),
        ({"indices": torch.zeros(BATCH, 9, 4).int()}, 'indices must be None, .* use "eager" or "sdpa"'),
        ({"block_indices": torch.zeros(BATCH, 4, 9, 1).int()}, "block_indices must be None"),
        ({"head_mask": torch.ones(4)}, 'head_mask must be None, found a Tensor: .* use "eager"'),
        ({"position_bias": torch.zeros(1, 4, 9, 12)}, r"position_bias must broadcast to \(2, 4, 9, 9\), found .*12\)"),
        ({"attention_mask": torch.ones(3, 1, 9, 9)}, r"attention_mask must broadcast to \(2, 4, 9, 9\), found"),
        ({"attention_mask": [1]}, "attention_mask must be a torch.Tensor, found list"),
        ({"attention_mask": torch.ones(9).int()}, "attention_mask must have dtype"),
        ({"s_aux": torch.zeros(2)}, r"s_aux must have shape \(4,\), found \(2,\)"),
        ({"scaling": -1.0}, "scaling must be at least 0, found -1.0"),
        ({"scaling": "half"}, "scaling must be a real number, found str"),
        ({"sinks": torch.zeros(BATCH, 3, 9, 1)}, r"sinks must broadcast to \(2, 4, 9, 1\), found"),
    ],
)
def test_refused_arguments(options, says):
    call = dict(attention_mask=None) | options
    with pytest.raises((ValueError, TypeError), match=says):
        door.attention(torch.nn.Module(), *inputs((4, 2, 9, 9, 16, 16), "cpu"), **call)


def test_a_bias_of_another_length_than_the_keys_is_not_cropped():
    """Without a mask a row sees the keys up to its own, and room for more is left out, with its bias."""
    q, k, v = inputs((4, 2, 4, 4, 16, 16), "cpu")
    with pytest.raises(ValueError, match=r"position_bias must broadcast to \(2, 4, 4, 4\)"):
        door.attention(torch.nn.Module(), q, k, v, None, is_causal=True, position_bias=torch.zeros(1, 4, 4, 9))


@pytest.mark.parametrize("name", ["flash_attention_2", "my-Flash", "sdpa", "eager", None])
def test_refused_names(name):
    with pytest.raises(ValueError, match="name must"):
        door.register(name)


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="needs transformers 5 or newer"):
        door.register()


# ---------------------------------------------------------------------------------------------------------------------
# Models

DECODER = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW_THEN_FULL = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {  # what differs from DECODER; None drops a field
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {**WINDOW_THEN_FULL, "attn_logit_softcapping": 2.0},
    "gemma3_text": WINDOW_THEN_FULL,
    "gemma4_text": {  # head_dim 512 in full layers, as in the released models
        **WINDOW_THEN_FULL,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    },
    "gpt_oss": {**WINDOW_THEN_FULL, "num_local_experts": 2, "num_experts_per_tok": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 4,
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
    },
    "deepseek_v3": {  # 192 and 128, as in the released models
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "head_dim": 64,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "mimo_v2_flash": {  # sinks in the layers with a window, 192 and 128
        **WINDOW_THEN_FULL,
        "head_dim": 192,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "bert": {},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0},
}
AUTO = {"bert": transformers.AutoModelForMaskedLM, "t5": transformers.AutoModelForSeq2SeqLM}
GENERATING = [name for name in MODELS if name != "bert"]
PADDED = {
    "none": [[1] * 9, [1] * 9],
    "left": [[0] * 3 + [1] * 6, [1] * 9],
    "right": [[1] * 5 + [0] * 4, [1] * 9],
}


def exact_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    softcap=None,
    s_aux=None,
    position_bias=None,
    **_,
):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = oracle.attention(
        q,
        k,
        v,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        learnable_sink=s_aux,
        attn_bias=position_bias,
        seen=attention_mask,
    )
    return out, None


def exact_mask(**arguments):
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return masking_utils.sdpa_mask(**{**arguments, **skips})


transformers.AttentionInterface.register("exact", exact_attention)
transformers.AttentionMaskInterface.register("exact", exact_mask)


def model_of(name, device):
    config = transformers.CONFIG_MAPPING[name](**{**DECODER, **MODELS[name]})
    auto = AUTO.get(name, transformers.AutoModelForCausalLM)
    model = auto.from_config(config, attn_implementation="eager", experts_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:  # scores that are far from equal
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device).eval()


def run(model, implementation, dtype, batch):
    model = model.to(dtype)
    model.set_attn_implementation(implementation)
    for half in (model.encoder, model.decoder) if model.config.model_type == "t5" else ():
        half.config._attn_implementation = implementation  # transformers 5.17 leaves their own copies as they were
    model.zero_grad()
    result = model(**batch)
    result.loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return result.logits.detach(), result.loss.detach(), gradients


def batch_of(name, padding, device):
    """Rows that see nothing differ, and nobody reads what they give: no label asks for it."""
    attention_mask = torch.tensor(PADDED[padding])
    input_ids = torch.randint(3, 32, attention_mask.shape)
    read = attention_mask.bool() if name in AUTO else attention_mask.bool() & attention_mask.bool().roll(1, 1)
    labels = torch.where(read, input_ids, -100)
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {key: x.to(device) for key, x in batch.items()}, attention_mask.bool().to(device)


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, padding, device, monkeypatch):
    """Logits, loss and all gradients, beside the same model in float64 and eager in float32."""
    calls = []
    for function in ("flash_attn_func", "flash_attn_varlen_func"):
        original = getattr(door, function)
        monkeypatch.setattr(door, function, lambda *x, original=original, **y: calls.append(1) or original(*x, **y))
    model = model_of(name, device)
    batch, read = batch_of(name, padding, device)
    ours = run(model, NAME, torch.float32, batch)
    assert calls
    eager = run(model, "eager", torch.float32, batch)
    exact = run(model, "exact", torch.float64, batch)
    results = [(x[0] if name == "t5" else x[0][read], x[1]) for x in (ours, exact, eager)]
    for what, *result in zip(("logits", "loss"), *results, strict=True):
        check_close(what, *result, scale=result[1].abs().max())
    assert ours[2].keys() == exact[2].keys()
    scale = max(x.abs().max() for x in exact[2].values())
    for key, gradient in exact[2].items():
        check_close(key, ours[2][key], gradient, eager[2][key], scale)


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bert"])  # experts would be chosen by rounding
def test_models_in_bfloat16(name, padding, device):
    model = model_of(name, device).to(torch.bfloat16)
    batch, read = batch_of(name, padding, device)
    results = []
    for implementation, dtype in ((NAME, torch.bfloat16), ("eager", torch.bfloat16), ("exact", torch.float64)):
        model.to(dtype).set_attn_implementation(implementation)
        results.append(model(**batch).logits[read].detach())
    ours, eager, exact = results
    assert_error_ratio(ours, exact, eager)


def check_close(name, ours, exact, eager, scale):
    """Also that eager is close, so that the bound of ours, twice its error, means something."""
    ours, exact, eager = (x / scale for x in (ours, exact, eager))
    assert (eager - exact).abs().max() < 1e-4
    assert_error_ratio(ours, exact, eager, name=name)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation(name, cache, device, monkeypatch):
    """Greedy, with a cache, of a batch with padding on the left: eager's tokens, and no mask as a tensor."""
    given = inspect.signature(masking_utils.create_chunked_causal_mask).parameters
    if (name, cache) == ("llama4_text", "static") and "block_sequence_ids" not in given:
        pytest.skip("this transformers calls a function with an argument that it does not take")
    monkeypatch.setattr(door.Mask, "dense", lambda self: pytest.fail("a mask became a tensor"))
    model = model_of(name, device)
    attention_mask = torch.tensor(PADDED["left"], device=device)
    input_ids = torch.randint(3, 32, attention_mask.shape, device=device)
    tokens = {}
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        tokens[implementation] = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
    assert torch.equal(tokens["eager"], tokens[NAME])


@pytest.mark.parametrize("mask", ["", "window", "documents", "bias"])
def test_attention_over_a_cache_in_float8(mask, device):
    """What a layer of the cache returns goes to attention with its scales, and stands for nearly what it was given."""
    new = [torch.randn(2, 2, 9, 16, device=device).bfloat16() * scale for scale in (0.01, 30.0)]
    cache = door.float8_cache()
    for part in (slice(0, 6), slice(6, 9)):
        key, value = cache.update(*(x[:, :, part] for x in new), 0)
    assert key.dtype == value.dtype == torch.float8_e4m3fn and key.shape == new[0].shape
    layer = pickle.loads(pickle.dumps(cache)).layers[0]
    stand_for = [x.double() * scale[..., None, None] for x, scale in zip((layer.keys, layer.values), layer.descales)]
    for x, given in zip(stand_for, new):
        torch.testing.assert_close(x, given.double(), rtol=2**-4, atol=2**-9 * given.abs().max().item())
    query = torch.randn(2, 4, 9, 16, device=device).bfloat16()
    sinks, given, options = torch.randn(4, device=device), None, dict(causal=True)
    if mask == "window":
        options["window_size"] = (2, 0)
    elif mask == "documents":
        given = door.Mask(
            door.Seen(True, documents=door.Documents(*[DOCUMENTS.to(device)] * 2, None, None)),
            None,
            (2, 1, 9, 9),
            device,
        )
        options["seen"] = torch.block_diag(*[torch.ones(n, n) for n in (9, 4, 5)]).bool().to(device)
        options["seen"] = torch.stack([options["seen"][:9, :9], options["seen"][9:, 9:]])[:, None]
    elif mask == "bias":
        given = torch.randn(2, 4, 9, 9, device=device)
        options = dict(attn_bias=given)
    window = 3 if mask == "window" else None
    out, _ = door.attention(
        torch.nn.Module(), query, key, value, given, scaling=2.0, sliding_window=window, s_aux=sinks
    )
    call = dict(options, softmax_scale=2.0, learnable_sink=sinks)
    q, k, v = (x.transpose(1, 2) for x in (query, *stand_for))
    exact, _ = oracle.attention(q.double(), k, v, **call)
    baseline, _ = oracle.attention(q, k.bfloat16(), v.bfloat16(), **call)
    assert_error_ratio(out, exact, baseline)
    with pytest.raises(ValueError, match=r"key of dtype torch\.float8_e4m3fn must be what a layer of `float8_cache`"):
        door.attention(torch.nn.Module(), query, layer.keys.clone(), layer.values, None)
    with pytest.raises(ValueError, match=r"dropout must be 0 with a float8_cache, found 0\.5"):
        door.attention(torch.nn.Module(), query, key, value, None, dropout=0.5)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generation_from_a_cache_in_float8(name, device):
    """Greedy, the tokens of each sequence alone; logits near those of a cache in 16 bits; and beams, which move."""
    model = model_of(name, device).to(torch.bfloat16)
    model.set_attn_implementation(NAME)
    prompts = torch.randint(3, 32, (2, 9), device=device)
    with torch.no_grad():
        near = [model(prompts, past_key_values=cache).logits for cache in (None, door.float8_cache())]
    assert torch.cosine_similarity(*(x.float().flatten(0, 1) for x in near)).mean() > 0.99
    more = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, disable_compile=True)
    tokens = model.generate(prompts, **more, past_key_values=door.float8_cache())
    alone = [model.generate(prompt[None], **more, past_key_values=door.float8_cache()) for prompt in prompts]
    assert torch.equal(tokens, torch.cat(alone))
    cache = door.float8_cache()
    model.generate(prompts, **more, num_beams=2, past_key_values=cache)
    layer = cache.layers[0]
    assert layer.keys.dtype == torch.float8_e4m3fn and layer.keys.shape[0] == len(layer.descales[0]) == 4
    keys, scales = layer.keys.float(), layer.descales[1]
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([7, 0]))
    assert torch.equal(layer.keys.float(), keys[[3, 0]]) and torch.equal(layer.descales[1], scales[[3, 0]])
    door.attention(
        torch.nn.Module(), layer.keys.bfloat16(), layer.keys, layer.values, None
    )  # as encoders' keys are taken
    cache.crop(-2)
    assert cache.get_seq_length() == keys.shape[2] - 2


def test_scales_of_a_cache_in_float8_grow(device):
    """Where the first token is much smaller than later ones; a sequence and head that needs no more keeps its bits."""
    few, more = (torch.randn(2, 2, n, 16, device=device).bfloat16() for n in (1, 7))
    few = few * torch.tensor([[0.02, 1.0], [1.0, 0.02]], device=device)[..., None, None].bfloat16()
    more[1, 0] = more[1, 0].clamp(-few[1, 0].abs().max(), few[1, 0].abs().max())
    cache = door.float8_cache()
    cache.update(few, few, 0)
    layer = cache.layers[0]
    first, scale = layer.keys.clone(), layer.descales[0].clone()
    cache.update(more, more.clone(), 0)
    key, value = layer.keys, layer.values
    for x, descale in zip((key, value), layer.descales):
        torch.testing.assert_close(
            x.float() * descale[..., None, None], torch.cat([few, more], 2).float(), rtol=2**-3, atol=2e-3
        )
    assert layer.descales[0][1, 0] == scale[1, 0] and torch.equal(key[1, 0, :1].float(), first[1, 0].float())
    for x, code in ((math.inf, 448.0), (0.0, 0.0)):
        cache.update(*[torch.full((2, 2, 1, 16), x, device=device).bfloat16()] * 2, 0)
        last = layer.keys.float()
        assert torch.equal(last[:, :, :8], key.float()) and (last[:, :, -1] == code).all()


def test_what_a_cache_in_float8_is_not_for(device):
    model = model_of("llama", device)
    model.set_attn_implementation(NAME)
    prompts = torch.randint(3, 32, (2, 9), device=device)
    with pytest.raises(ValueError, match=r"float8_cache must have keys of 16 bits.*found torch\.float32"):
        model(prompts, past_key_values=door.float8_cache())
    model = model.to(torch.bfloat16)
    for other, call in (("eager", "Tensor"), ("sdpa", "nn.functional.scaled_dot_product_attention")):
        model.set_attn_implementation(other)
        found = rf"past_key_values must not be a float8_cache unless .* found a call of torch\.{call}.*: load"
        with torch.no_grad(), pytest.raises(ValueError, match=found):
            model(prompts, past_key_values=door.float8_cache())
    model.set_attn_implementation(NAME)
    for trained in ("q_proj", "k_proj", "v_proj"):  # of one layer, so that nothing else needs a gradient
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(f"layers.0.self_attn.{trained}" in name)
        with pytest.raises(NotImplementedError, match=r"must not be a float8_cache where gradients are computed"):
            model(prompts, past_key_values=door.float8_cache())
    padding = torch.ones_like(prompts)
    padding[0, :4] = 0
    with torch.no_grad(), batch_invariant(2), pytest.raises(NotImplementedError, match="float8_cache beside padding"):
        model(prompts, attention_mask=padding, past_key_values=door.float8_cache())


def test_margins_of_a_cache_in_float8():
    with pytest.raises(ValueError, match=r"margin must be at least 1, found 0\.5"):
        door.float8_cache(0.5)


def test_images(device):
    """Tokens of an image see each other in both directions, within a window and without."""
    text = {**DECODER, **WINDOW_THEN_FULL}
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=30,
        boi_token_index=29,
        eoi_token_index=28,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config).to(device).eval()
    input_ids = torch.randint(3, 28, (2, 12))
    input_ids[0, 4:8] = input_ids[1, 1:5] = 30
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :2] = 0
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "token_type_ids": (input_ids == 30).long(),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    batch = {key: x.to(device) for key, x in batch.items()}
    results = []
    for implementation, dtype in ((NAME, torch.float32), ("exact", torch.float64), ("eager", torch.float32)):
        model.to(dtype).set_attn_implementation(implementation)
        results.append(model(**{**batch, "pixel_values": batch["pixel_values"].to(dtype)}).logits[attention_mask > 0])
    check_close("logits", *results, scale=results[1].abs().max())


@pytest.mark.parametrize(
    "name, padding",
    [("mistral", "none"), ("mistral", "left"), ("bert", "left"), pytest.param("bert", "none", marks=pytest.mark.slow)],
)
def test_compiled_models(name, padding, device):
    """In one graph, masks included."""
    model = model_of(name, device)
    batch, read = batch_of(name, padding, device)
    results = []
    for implementation, dtype in ((NAME, torch.float32), ("exact", torch.float64), ("eager", torch.float32)):
        model.to(dtype).set_attn_implementation(implementation)
        called = torch.compile(model, backend="eager", fullgraph=True) if implementation == NAME else model
        results.append(called(**batch).logits[read])
    check_close("logits", *results, scale=results[1].abs().max())


def test_models_that_add_the_mask_themselves(device):
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
    config = transformers.GitConfig(
        vision_config={**vision, "image_size": 16, "patch_size": 8},
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    model = transformers.GitForCausalLM(config).to(device).eval()
    input_ids, pixel_values = torch.randint(3, 30, (2, 10)), torch.randn(2, 3, 16, 16)
    logits = {}
    for implementation in ("eager", NAME):
        model.set_attn_implementation(implementation)
        logits[implementation] = model(input_ids=input_ids.to(device), pixel_values=pixel_values.to(device)).logits
    torch.testing.assert_close(logits[NAME], logits["eager"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [  # of docs/guides/migrating.md
        ("Bloom", dict(hidden_size=16, n_layer=1, n_head=2)),
        ("Mpt", dict(d_model=16, n_layers=1, n_heads=2)),
        ("XGLM", dict(d_model=16, num_layers=1, attention_heads=2, ffn_dim=16)),
    ],
)
def test_models_with_attention_of_their_own(family, sizes, device):
    config = getattr(transformers, f"{family}Config")(vocab_size=8, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME).to(device)
    message = rf"{family}Config computes itself, .* {family}Attention does not .* use \"eager\""
    with pytest.raises(ValueError, match=message):
        model(torch.ones(1, 3, dtype=torch.long, device=device))


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("Falcon", dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)),
        ("GPTNeo", dict(hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]])),
    ],
)
def test_models_with_a_table_of_their_own(family, sizes):
    """They look up a class by the name of the implementation, before anything here is called."""
    config = getattr(transformers, f"{family}Config")(vocab_size=8, **sizes)
    with pytest.raises(KeyError, match=NAME):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation=NAME)


# ---------------------------------------------------------------------------------------------------------------------
# Batch invariance

_SIZES = dict(vocab_size=101, initializer_range=0.3)
INVARIANT = {
    "llama": lambda: transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_SIZES,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=3, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **_SIZES
    ),
}
INVARIANT["mixtral"] = lambda: transformers.MixtralConfig(
    **INVARIANT["llama"]().to_dict(), num_local_experts=4, experts_implementation="eager"
)
INVARIANT["mistral"] = lambda: transformers.MistralConfig(**INVARIANT["llama"]().to_dict(), sliding_window=9)


def invariant_model(name, device):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(INVARIANT[name](), attn_implementation=NAME)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_a_model_whose_bits_depend_on_no_neighbour(name, level, device):
    """Attention obeys the level, and the context has the linear layers."""
    model = invariant_model(name, device)
    tokens = torch.randint(101, (3, 70), device=device)
    with batch_invariant(level), batch_invariant_layers(), torch.no_grad():
        expected = model(tokens).logits
        for i in range(3):
            assert torch.equal(model(tokens[i : i + 1]).logits[0], expected[i])
        mask = torch.ones_like(tokens)
        mask[0, 50:] = 0
        found = model(tokens, attention_mask=mask).logits
        assert torch.equal(found[0, :50], expected[0, :50]) and torch.equal(found[1:], expected[1:])
        if level == 2:
            prefilled = model(tokens[:, :60], use_cache=True)
            found, cache = [prefilled.logits], prefilled.past_key_values
            for t in range(60, 70):
                found.append(model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits)
            assert torch.equal(torch.cat(found, 1), expected)
    if level == 2:
        with batch_invariant(level), batch_invariant_layers():
            assert torch.equal(model.train()(tokens).logits.detach(), expected)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_padding_on_the_left_changes_no_bit(name, cache, level, device):
    """Prompts of several lengths are sampled together, each as alone, and a training forward gives the same logits."""
    model = invariant_model(name, device)
    lengths = (21, 5, 30)
    prompts = [torch.randint(101, (length,), device=device) for length in lengths]
    padded = torch.stack([torch.nn.functional.pad(x, (30 - len(x), 0)) for x in prompts])
    mask = torch.arange(30, device=device) >= 30 - torch.tensor(lengths, device=device).view(-1, 1)
    rolls = name == "mistral" and level == 2
    if rolls and cache == "static":
        pytest.skip("static caches of windows drop keys, which is refused")
    options = dict(
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **(dict(cache_implementation="static", disable_compile=True) if cache == "static" else {}),
    )

    def generate(tokens, mask):
        own = dict(past_key_values=transformers.DynamicCache()) if rolls else {}
        return model.generate(tokens, attention_mask=mask.long(), **options, **own)

    with batch_invariant(level), batch_invariant_layers(), torch.no_grad():
        found = generate(padded, mask)
        for i, prompt in enumerate(prompts):
            alone = generate(prompt[None], torch.ones_like(prompt[None]))
            assert torch.equal(torch.stack(alone.logits)[:, 0], torch.stack(found.logits)[:, i])
    if level == 1:
        return
    with batch_invariant(level), batch_invariant_layers():
        keep = torch.nn.functional.pad(mask, (0, 8), value=True)
        positions = (keep.cumsum(1) - 1).clamp(min=0)
        trained = model.train()(found.sequences, attention_mask=keep.long(), position_ids=positions).logits
        assert torch.equal(trained[:, 29:-1].transpose(0, 1).float(), torch.stack(found.logits).float())
        trained.float().square().sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in model.parameters())


def test_caches_that_drop_keys_are_refused_at_level_2(device):
    prompt = torch.randint(101, (1, 20), device=device)
    with batch_invariant(2), pytest.raises(NotImplementedError, match=r"past_key_values must hold all keys.* found 12"):
        invariant_model("mistral", device).generate(prompt, max_new_tokens=3)


SPANS = [(0, 12), (3, 12), (0, 7), (2, 9)]


@pytest.mark.parametrize("use_bias", [False, True])
def test_masks_at_levels_of_batch_invariance(use_bias, device):
    """Masks that are made at a level say what they do without, but that rows of padding see nothing."""
    if use_bias and device.type == "cuda":
        pytest.skip("refused, in test_batch_invariance_switch.py")
    keep = torch.zeros(4, 12, dtype=torch.bool, device=device)
    for entry, (first, end) in enumerate([(0, 12), (0, 10), (0, 7), (0, 9)] if use_bias else SPANS):
        keep[entry, first:end] = True
    bias = torch.randn(1, 2, 1, 12, device=device) if use_bias else None
    kinds = (
        causal_mask_function,
        sliding_window_causal_mask_function(4),
        sliding_window_bidirectional_mask_function(2),
        bidirectional_mask_function,
    )
    dtype, tolerance = (torch.bfloat16, 2e-2) if device.type == "cuda" else (torch.float32, 1e-5)
    for kind, q_length, q_offset in itertools.product(kinds, (12, 3, 1), (0, 9, 11)):
        if kind is kinds[2] and q_length < 12:
            continue  # refused: rows see keys after those of the last row
        if q_offset + q_length > 12 and kind is not bidirectional_mask_function:
            continue
        q = torch.randn(4, 2, q_length, 16, device=device, dtype=dtype)
        k, v = torch.randn(2, 4, 2, 12, 16, device=device, dtype=dtype)
        found = []
        for level in (0, 1):
            with batch_invariant(level):
                seen = door.mask(4, q_length, 12, q_offset, 0, kind, keep, device=device)
                found.append(door.attention(torch.nn.Module(), q, k, v, seen, position_bias=bias)[0])
        rows = keep[:, q_offset : q_offset + q_length]
        if kind is bidirectional_mask_function:
            rows = torch.ones_like(keep[:, :q_length])
        torch.testing.assert_close(found[1][rows], found[0][rows], rtol=tolerance, atol=tolerance)


HOLE = [[1] * 12, [1] * 5 + [0] + [1] * 6]
LEFT = [[1] * 12, [0] * 5 + [1] * 7]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(
    ("kind", "keep", "options"),
    [
        (causal_mask_function, HOLE, {}),
        (causal_mask_function, LEFT, dict(position_bias=torch.ones(1, 2, 12, 12))),
        (causal_mask_function, LEFT, dict(sinks=torch.ones(2, 2, 12, 1))),
        (None, LEFT, {}),  # chunks of 4 tokens
        (lambda b, h, q, k: k <= q // 2 * 2, LEFT, {}),
    ],
    ids=["hole", "bias", "sinks", "chunks", "other"],
)
def test_padding_that_moves_tokens_is_refused(kind, keep, options, level, device):
    """Where it cannot be left out. Without padding, the same is computed."""
    q, k, v = (torch.randn(2, 2, 12, 16, device=device) for _ in range(3))
    options = {name: x.to(device) for name, x in options.items()}
    kind = chunked_causal_mask_function(4, torch.tensor([0, 5], device=device)) if kind is None else kind

    def attend(keep):
        seen = door.mask(2, 12, 12, 0, 0, kind, keep, use_vmap=True, device=device)
        return door.attention(torch.nn.Module(), q, k, v, seen.to(device), **options)

    keep = torch.tensor(keep, dtype=torch.bool, device=device)
    attend(keep)
    with batch_invariant(level):
        with pytest.raises(NotImplementedError, match="attention_mask must hide nothing but padding before or after"):
            attend(keep)
        if device.type == "cpu":
            attend(torch.ones_like(keep))


@pytest.mark.parametrize("kind", ["bias", "sinks", "chunks"])
def test_packing_that_moves_tokens_is_refused(kind, device):
    """Where it does not become a call with packed sequences."""
    q, k, v = (torch.randn(1, 2, 12, 16, device=device) for _ in range(3))
    ids = torch.tensor([[0] * 5 + [1] * 7], device=device)
    packed = masking_utils.and_masks(causal_mask_function, masking_utils.packed_sequence_mask_function(ids))
    options = {}
    if kind == "bias":
        options = dict(position_bias=torch.ones(1, 2, 12, 12, device=device))
    elif kind == "sinks":
        options = dict(sinks=torch.ones(1, 2, 12, 1, device=device))
    else:
        chunks = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64, device=device))
        packed = masking_utils.and_masks(chunks, packed)

    def attend():
        seen = door.mask(1, 12, 12, 0, 0, packed, device=device)
        return door.attention(torch.nn.Module(), q, k, v, seen, **options)

    attend()
    with batch_invariant(), pytest.raises(NotImplementedError, match="found tokens that padding or packing moves"):
        attend()


@pytest.mark.parametrize("use_padding", [False, True])
def test_a_mask_that_ends_before_the_rows(use_padding, device):
    """They are tokens, though nobody sees their keys: as without a level, or refused."""
    keep = torch.ones(2, 9, dtype=torch.bool, device=device)
    keep[1, :4] = not use_padding
    q = torch.randn(2, 2, 3, 16, device=device)
    k, v = torch.randn(2, 2, 2, 12, 16, device=device)

    def attend():
        seen = door.mask(2, 3, 12, 9, 0, causal_mask_function, keep, device=device)
        return door.attention(torch.nn.Module(), q, k, v, seen)[0]

    expected = attend()
    with batch_invariant():
        if use_padding or device.type == "cuda":
            with pytest.raises(NotImplementedError, match="attention_mask must hide nothing but padding"):
                attend()
        else:
            torch.testing.assert_close(attend(), expected)


@pytest.mark.parametrize("is_within", [True, False])
def test_checkpoints_that_enter_the_context(is_within, device):
    """Layers that are computed again have the bits of those that are not, wherever the backward runs."""
    model, tokens = invariant_model("llama", device).train(), torch.randint(101, (2, 9), device=device)

    @contextlib.contextmanager
    def invariant():
        with batch_invariant(2), batch_invariant_layers():
            yield

    def gradients():
        model.zero_grad()
        with invariant():
            loss = model(tokens).logits.float().square().sum()
            if is_within:
                loss.backward()
        if not is_within:
            loss.backward()
        return [x.grad for x in model.parameters()]

    expected = gradients()
    model.gradient_checkpointing_enable(
        dict(use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), invariant()))
    )
    assert all(torch.equal(x, y) for x, y in zip(gradients(), expected, strict=True))


def test_attention_compiles_within_the_context(device):
    """In one graph, with a mask that was made before it, as `generate` makes the masks of compiled models."""
    q, k, v = (torch.randn(2, 2, 12, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    keep = torch.tensor(LEFT, dtype=torch.bool, device=device)
    compiled = torch.compile(door.attention, backend="eager", fullgraph=True)
    with batch_invariant(2), batch_invariant_layers():
        seen = door.mask(2, 12, 12, 0, 0, causal_mask_function, keep, device=device)
        arguments = torch.nn.Module(), q, k, v, seen
        assert torch.equal(compiled(*arguments)[0], door.attention(*arguments)[0])
