"""Several documents in the rows of a batch (cu_seqlens): each gives what it gives alone."""

import itertools

import pytest
import torch
from test_gpt import FUSED, LLAMA, MODERN, NO_DROPOUT, PARALLEL, SIZES, config_of, ids
from torch import nn
from transformers import GPT2Config

from flash_attn import batch_invariant
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.utils.generation import InferenceParams

FLASH = dict(use_flash_attn=True, initializer_range=0.2)
MODELS = {
    "learned positions": FLASH,
    "rotary": LLAMA | FLASH,
    "modern": MODERN | FLASH,
    "modern, fused": MODERN | FUSED | FLASH | dict(fused_mlp=True, residual_in_fp32=True),
    "alibi": dict(use_alibi=True, n_positions=0) | FLASH,
    "parallel": PARALLEL | FLASH,
    "postnorm": dict(prenorm=False) | FLASH,
    "recomputed": LLAMA | FLASH | dict(gradient_checkpointing=True),
    "projected": dict(word_embed_proj_dim=48) | FLASH,
}
WITHIN_ROWS = [0, 5, 6, 12, 14, 24]
OVER_ROWS = [0, 1, 17, 17, 24]  # and one that is empty


def packed(name, ends, device, **options):
    """A model, tokens (2, 12), and where their documents are."""
    torch.manual_seed(0)
    model = GPTLMHeadModel(config_of(**MODELS[name], **options), device=device)
    return model, ids(device=device), torch.tensor(ends, dtype=torch.int32, device=device)


def parts(ends):
    return [slice(a, b) for a, b in itertools.pairwise(ends) if b > a]


@pytest.mark.parametrize("ends", [WITHIN_ROWS, OVER_ROWS], ids=["within rows", "over rows"])
@pytest.mark.parametrize("name", MODELS)
def test_each_document_is_alone(name, ends, device):
    model, x, cu_seqlens = packed(name, ends, device)
    logits = model(x, cu_seqlens=cu_seqlens, max_seqlen=16).logits
    assert logits.shape == (2, 12, 90)
    for part in parts(ends):
        alone = model(x.view(1, -1)[:, part]).logits[0]
        torch.testing.assert_close(logits.flatten(0, 1)[part], alone, rtol=1e-4, atol=1e-4)


def test_a_bound_may_be_large_and_rows_longer_than_positions(device):
    """Rotary tables have no more rows than there are tokens; without a bound, documents have as many as positions."""
    model, x, cu_seqlens = packed("rotary", WITHIN_ROWS, device)
    logits = model(x, cu_seqlens=cu_seqlens, max_seqlen=12).logits
    assert torch.equal(model(x, cu_seqlens=cu_seqlens, max_seqlen=2**31 - 1).logits, logits)
    model = GPTLMHeadModel(config_of(**FLASH | dict(n_positions=8)), device=device)
    ends = torch.tensor([0, 5, 6, 12, 14, 21, 24], dtype=torch.int32, device=device)
    torch.testing.assert_close(
        model(x, cu_seqlens=ends).logits[0, 6:12], model(x[:1, 6:12]).logits[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("name", ["learned positions", "modern, fused", "recomputed"])
def test_loss_and_gradients(name, device):
    """The first token of a document is no label."""
    model, x, cu_seqlens = packed(name, OVER_ROWS, device)
    labels = x.masked_fill(x % 5 == 0, -100)
    flat, targets = x.view(1, -1), labels.view(1, -1)
    losses = [
        nn.functional.cross_entropy(model(flat[:, p]).logits[0, :-1], targets[0, p][1:], reduction="sum")
        for p in parts(OVER_ROWS)
        if p.stop - p.start > 1
    ]
    kept = [p for p in parts(OVER_ROWS) if p.start < 12 <= p.stop]  # over the end of a row, whose label is not there
    lost = sum(
        nn.functional.cross_entropy(model(flat[:, p]).logits[0, 11 - p.start], targets[0, 12], ignore_index=-100)
        for p in kept
        if p.stop > 12 and targets[0, 12] != -100
    )
    count = sum(int((targets[0, p][1:] != -100).sum()) for p in parts(OVER_ROWS)) - int(targets[0, 12] != -100)
    expected = (sum(losses) - lost) / count
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found = model(x, labels=labels, cu_seqlens=cu_seqlens, max_seqlen=16).loss
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for p, gradient in zip(model.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4)
    counted = int((labels[:, 1:] != -100).sum())  # as transformers.Trainer counts, which knows no documents
    sums = model(x, labels=labels, cu_seqlens=cu_seqlens, max_seqlen=16, num_items_in_batch=counted).loss
    torch.testing.assert_close(sums, found)


def test_one_document_is_a_row(device):
    model, x, _ = packed("modern", OVER_ROWS, device)
    rows = torch.tensor([0, 12, 24], dtype=torch.int32, device=device)
    torch.testing.assert_close(model(x, cu_seqlens=rows).logits, model(x).logits, rtol=1e-4, atol=1e-4)


def test_shift_labels_are_taken_as_they_are(device):
    model, x, cu_seqlens = packed("rotary", WITHIN_ROWS, device)
    logits = model(x, cu_seqlens=cu_seqlens).logits
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
    torch.testing.assert_close(model(x, shift_labels=x, cu_seqlens=cu_seqlens).loss, expected)


def test_same_bits_in_any_batch(device):
    """With level 2 of batch invariance."""
    model, x, cu_seqlens = packed("modern, fused", OVER_ROWS, device)
    if device.type == "cuda":
        model.bfloat16()  # on the CPU that would round many differences away
    with batch_invariant(2):
        logits = model(x, cu_seqlens=cu_seqlens, max_seqlen=16).logits.flatten(0, 1)
        for part in parts(OVER_ROWS):
            assert torch.equal(logits[part], model(x.view(1, -1)[:, part]).logits[0])


def test_decoding_with_a_cache(device):
    """A model with QK norm, windows in some layers and soft caps decodes token by token what it computes at once."""
    model, x, _ = packed("modern, fused", OVER_ROWS, device)
    model.eval()
    expected, params = model(x).logits, InferenceParams(12, 2)
    with torch.no_grad():
        for at, chunk in ((0, x[:, :5]), *((i, x[:, i : i + 1]) for i in range(5, 12))):
            params.seqlen_offset = at
            logits = model(chunk, inference_params=params).logits
            torch.testing.assert_close(logits, expected[:, at : at + chunk.shape[1]], rtol=1e-4, atol=1e-4)


ENDS = torch.tensor(WITHIN_ROWS, dtype=torch.int32)
ROWS = torch.ones(2, 12, dtype=torch.int64)
WRONG = {
    "mask": (dict(attention_mask=ROWS), ValueError, "attention_mask must be None with cu_seqlens, found a Tensor"),
    "positions": (dict(position_ids=ROWS), ValueError, "position_ids must be None with cu_seqlens, found a Tensor"),
    "cache": (
        dict(inference_params=InferenceParams(12, 2)),
        ValueError,
        "inference_params must be None with cu_seqlens, found a InferenceParams",
    ),
    "dtype": (dict(cu_seqlens=ENDS.long()), TypeError, r"cu_seqlens must have dtype torch\.int32, found torch\.int64"),
    "a row each": (dict(cu_seqlens=ENDS.view(2, 3)), ValueError, r"cu_seqlens must have 1 dimensions? \(documents"),
    "no document": (dict(cu_seqlens=ENDS[:1]), ValueError, "cu_seqlens' length must be at least 2, found 1"),
    "too long": (dict(max_seqlen=9), ValueError, r"to the number of tokens, 24, by at most max_seqlen, 9, at a time"),
    "an end too few": (dict(cu_seqlens=ENDS[:-1]), ValueError, r"must rise from 0 .* 24.*found \[0, 5, 6, 12, 14\]"),
    "a start too few": (dict(cu_seqlens=ENDS[1:]), ValueError, r"must rise from 0 .* 24.*found \[5, 6, 12, 14, 24\]"),
    "falling": (dict(cu_seqlens=ENDS[[0, 2, 1, 3, 5]]), ValueError, r"found \[0, 6, 5, 12, 24\]"),
    "length": (dict(cu_seqlens=None, max_seqlen=5), ValueError, "max_seqlen must be None without cu_seqlens, found 5"),
    "positions there are": (dict(max_seqlen=33), ValueError, "max_seqlen must be at most 32, the number of positions"),
}


@pytest.mark.parametrize(("options", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(options, error, message):
    model, x, _ = packed("learned positions", WITHIN_ROWS, "cpu")
    with pytest.raises(error, match=message):
        model(x, **dict(cu_seqlens=ENDS) | options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(), "config.use_flash_attn must be True with cu_seqlens, found False"),
        (dict(attn_dwconv=True, use_flash_attn=True), "cu_seqlens can be given only without dwconv"),
    ],
)
def test_models_that_cannot(fields, message):
    model = GPTLMHeadModel(GPT2Config(**SIZES | NO_DROPOUT | fields))
    with pytest.raises(ValueError, match=message):
        model(ids(), cu_seqlens=ENDS)


@pytest.mark.parametrize("name", ["learned positions", "rotary"])
def test_what_cannot_be_read_becomes_nan(name):
    """In a compiled graph, as on a GPU."""
    model, x, cu_seqlens = packed(name, WITHIN_ROWS, "cpu", n_layer=1)
    expected = model(x, cu_seqlens=cu_seqlens).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, cu_seqlens=cu_seqlens).logits, expected)
    assert compiled(x, cu_seqlens=cu_seqlens, max_seqlen=9).logits.isnan().all()
    assert compiled(x, cu_seqlens=cu_seqlens.clamp(max=20)).logits.isnan().all()  # some tokens are in none
