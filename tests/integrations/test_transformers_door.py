"""transformers' door: masks against transformers' own, and models against themselves with eager attention."""

import itertools

import oracle
import pytest
import torch
from compare import assert_error_ratio
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_compatibility_function,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from flash_attn import masks
from flash_attn.integrations import transformers as door

NAME = door.register()
BATCH, SEQLEN = 2, 9

# ---------------------------------------------------------------------------------------------------------------------
# Masks

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
JUMPING = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9, 10], [5, 6, 7, 8, 0, 2, 4, 5, 6]])
IMAGES = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1], [0, 0, -1, 0, 0, 0, -1, -1, -1]])


def packed(function, positions=POSITIONS):
    return packed_sequence_compatibility_function(function, positions, masking_utils.find_packed_sequence_indices(POSITIONS))


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
    "chunks and a window": and_masks(chunked_causal_mask_function(4, torch.tensor([0, 3])), every_other_key),
    "images": or_masks(causal_mask_function, masking_utils.blockwise_overlay(IMAGES)),
    "images in a window": or_masks(
        sliding_window_causal_mask_function(3), masking_utils.blockwise_overlay(IMAGES)
    ),
    "packed": packed(causal_mask_function),
    "packed, window": packed(sliding_window_causal_mask_function(2)),
    "packed, full": packed(bidirectional_mask_function),
    "packed, chunks": packed(chunked_causal_mask_function(2, torch.zeros(BATCH, dtype=torch.long))),
    "packed, jumping": packed(sliding_window_causal_mask_function(3), JUMPING),
    "documents that come again": masking_utils.packed_sequence_mask_function(IMAGES),
    "a first key and neighbours": own_and_next_keys,
    "many ranges": and_masks(causal_mask_function, every_other_key),
}  # fmt: skip
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
def test_masks_are_those_of_transformers(function, size, padding):
    q_length, kv_length, q_offset, kv_offset = SIZES[size]
    arguments = {
        "batch_size": BATCH, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function], "attention_mask": PADDING[padding],
    }  # fmt: skip
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    for skip in (False, True):
        mask = door.mask(**arguments, allow_is_causal_skip=skip)
        assert skip or mask is not None
        if mask is None:
            mask = door.Mask(door._without_mask(q_length > 1, None), None, expected.shape, "cpu")
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
    ("packed, jumping", "prefill", "none"): (("key_ranges",), (-1, -1)),
}


@pytest.mark.parametrize("case", FORMS, ids=" | ".join)
def test_masks_take_the_fastest_form(case):
    function, size, padding = case
    q_length, kv_length, q_offset, kv_offset = SIZES[size]
    mask = door.mask(
        BATCH, q_length, kv_length, q_offset, kv_offset, FUNCTIONS[function], PADDING[padding],
        allow_is_causal_skip=False,
    )  # fmt: skip
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
