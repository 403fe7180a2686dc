"""Decoding: the loop, its options, speculative decoding, CUDA graphs, errors."""

import collections
import copy
import dataclasses
import functools
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from compare import assert_error_ratio
from torch import nn

from flash_attn.modules.block import Block
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA
from flash_attn.utils import generation
from flash_attn.utils.generation import (
    GenerationMixin,
    GreedySearchDecoderOnlyOutput,
    InferenceParams,
    OutOfPages,
    SampleDecoderOnlyOutput,
    decode,
    decode_speculative,
    sample_speculative,
)

VOCAB, PADDED = 53, 56
Output = collections.namedtuple("Output", "logits")


class Model(nn.Module, GenerationMixin):
    """A small language model of the package's blocks."""

    def __init__(self, layers=2, positions=0, dim=64, device=None, dtype=None, **options):
        super().__init__()
        factory = dict(device=device, dtype=dtype)
        mixer_cls = functools.partial(MHA, num_heads=4, causal=True, use_flash_attn=True, **factory)
        self.embeddings = GPT2Embeddings(dim, PADDED, positions, **factory)
        self.layers = nn.ModuleList(
            Block(dim, functools.partial(mixer_cls, layer_idx=i, **options)).to(**factory) for i in range(layers)
        )
        self.norm = nn.LayerNorm(dim, **factory)
        self.head = nn.Linear(dim, PADDED, bias=False, **factory)
        nn.init.normal_(self.head.weight)
        self.calls = []

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None, **kwargs):
        return {
            i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype, **kwargs)
            for i, layer in enumerate(self.layers)
        }

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
        self.calls.append((tuple(input_ids.shape), position_ids, num_last_tokens))
        hidden, residual = self.embeddings(input_ids, position_ids), None
        mixer_kwargs = {} if inference_params is None else {"inference_params": inference_params}
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, mixer_kwargs=mixer_kwargs)
        return Output(self.head(self.norm(hidden + residual)[:, -num_last_tokens:]))


def prompt(batch, seqlen, device):
    return torch.randint(VOCAB, (batch, seqlen), device=device)


def greedy(model, input_ids, max_length):
    """The whole sequence is computed anew for each token."""
    scores = []
    with torch.no_grad():
        while input_ids.shape[1] < max_length:
            scores.append(model(input_ids).logits[:, -1, :VOCAB])
            input_ids = torch.cat([input_ids, scores[-1].argmax(dim=-1, keepdim=True)], dim=1)
    return input_ids, scores


@pytest.mark.parametrize("name", ["input_ids", "teacher_outputs"])
def test_error_of_penalised_tokens_that_are_not_in_the_vocabulary(name, device):
    ids = torch.tensor([[1, 7]], device=device)
    options = dict(input_ids=ids) if name == "input_ids" else dict(input_ids=ids[:, :1], teacher_outputs=ids)
    model = Scripted([[1] * 9], device)
    with pytest.raises(ValueError, match=f"{name} must be from 0 to 6, found 7"):
        decode(model=model, max_length=5, vocab_size=7, repetition_penalty=1.5, **options)
    assert decode(model=model, max_length=5, vocab_size=7, **options).sequences.shape == (1, 5)


# Decoding.

MODELS = [
    dict(),
    dict(num_heads_kv=1, rotary_emb_dim=16),
    dict(rotary_emb_dim=8, use_flash_attn=False),
    dict(use_alibi=True, window_size=(6, 0)),
    dict(positions=32),
]


@pytest.mark.parametrize("options", MODELS, ids=str)
@pytest.mark.parametrize("batch", [1, 3])
def test_decode(batch, options, device):
    model = Model(device=device, **options).eval()
    input_ids = prompt(batch, 6, device)
    expected, scores = greedy(model, input_ids, 20)
    model.calls.clear()
    output = decode(input_ids, model, 20, vocab_size=VOCAB)
    assert type(output) is GreedySearchDecoderOnlyOutput
    assert torch.equal(output.sequences, expected)
    torch.testing.assert_close(torch.stack(output.scores), torch.stack(scores), rtol=1e-4, atol=1e-4)
    (shape, position_ids, last), *steps = model.calls
    assert (shape, position_ids, last) == ((batch, 6), None, 1)
    assert [(shape, ids.unique().tolist(), last) for shape, ids, last in steps] == [
        ((batch, 1), [position], 1) for position in range(6, 19)
    ]
    assert not output.sequences.is_inference()


@pytest.mark.parametrize("max_length", [0, 6, 7])
def test_at_least_one_token(max_length, device):
    model = Model(device=device).eval()
    assert decode(prompt(2, 6, device), model, max_length).sequences.shape == (2, 7)
    assert decode_speculative(prompt(1, 6, device), model, model, max_length).sequences.shape == (1, 7)


def test_sampled(device):
    model = Model(device=device).eval()
    input_ids = prompt(2, 6, device)
    output = decode(input_ids, model, 30, top_k=5, top_p=0.9, temperature=1.5)
    assert type(output) is SampleDecoderOnlyOutput
    assert output.sequences.shape == (2, 30)
    for step, logits in enumerate(output.scores):
        assert (logits.topk(5).indices == output.sequences[:, 6 + step, None]).any(-1).all()
    torch.manual_seed(0)
    one = decode(input_ids, model, 30, top_k=0).sequences
    torch.manual_seed(0)
    assert torch.equal(decode(input_ids, model, 30, top_k=0).sequences, one)


def test_teacher(device):
    model = Model(device=device).eval()
    teacher = prompt(2, 15, device)
    output = decode(teacher[:, :6], model, 20, teacher_outputs=teacher)
    assert torch.equal(output.sequences[:, :15], teacher)
    with torch.no_grad():
        logits = model(output.sequences).logits
    torch.testing.assert_close(torch.stack(output.scores, dim=1), logits[:, 5:-1], rtol=1e-4, atol=1e-4)
    assert torch.equal(output.sequences[:, 15:], logits[:, 14:-1].argmax(-1))


LENGTHS = (6, 1, 4)
PADDED_MODELS = [*MODELS, dict(rotary_emb_dim=16, rotary_emb_scale_base=64.0), dict(num_heads_kv=2, rotary_emb_dim=12)]


def padded_prompts(device, lengths=LENGTHS):
    """Prompts of different lengths with tokens of no meaning in front, and the mask (batch, seqlen) of the others."""
    input_ids = prompt(len(lengths), max(lengths), device)
    columns = torch.arange(max(lengths), device=device)
    return input_ids, (columns >= max(lengths) - torch.tensor(lengths, device=device)[:, None]).long()


def each_alone(model, input_ids, attention_mask, max_length):
    """For each prompt without its padding: the whole sequence is computed anew for each token."""
    sequences, scores = [], []
    for ids, mask in zip(input_ids, attention_mask.bool()):
        length = max_length - len(ids) + mask.sum()
        one, logits = greedy(model, ids[None, mask], length)
        sequences.append(torch.cat([ids[~mask], one[0]]))
        scores.append(torch.cat(logits))
    return torch.stack(sequences), torch.stack(scores)


@torch.no_grad()
def scores_alone(model, sequences, attention_mask):
    """The logits (batch, new tokens, vocab) after each token of the sequences without their padding."""
    seqlen = attention_mask.shape[1]
    return torch.stack(
        [
            model(row[None, seqlen - mask.sum() :]).logits[0, mask.sum() - 1 : -1]
            for row, mask in zip(sequences, attention_mask)
        ]
    )


def check_padded(model, input_ids, attention_mask, **options):
    expected, scores = each_alone(model, input_ids, attention_mask, 20)
    output = decode(input_ids, model, 20, vocab_size=VOCAB, attention_mask=attention_mask, **options)
    assert torch.equal(output.sequences, expected)
    torch.testing.assert_close(torch.stack(output.scores, dim=1), scores, rtol=1e-4, atol=1e-4)
    return output


@pytest.mark.parametrize("options", PADDED_MODELS, ids=str)
def test_prompts_of_different_lengths(options, device):
    """Each gives what it gives alone, whatever the tokens of the padding."""
    model = Model(device=device, **options).eval()
    input_ids, attention_mask = padded_prompts(device)
    check_padded(model, input_ids, attention_mask)
    model.calls.clear()
    check_padded(model, input_ids.masked_fill(attention_mask == 0, 0), attention_mask.bool())
    positions = [ids.tolist() for shape, ids, last in model.calls if last == 1]
    assert positions[0] == [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 2, 3]]
    assert positions[1:] == [[[6 + i], [1 + i], [4 + i]] for i in range(13)]


@pytest.mark.parametrize("options", PADDED_MODELS, ids=str)
def test_which_graph_is_replayed_for_prompts_of_different_lengths(options, graphs, device):
    """The scores are those without graphs; also in larger caches, and behind prompts of other lengths."""
    model = Model(layers=1, device=device, **options).eval()
    decode(prompt(4, 9, device), model, 30, cg=True)
    for lengths in (LENGTHS, (2, 6, 6), (6, 6, 6)):
        input_ids, attention_mask = padded_prompts(device, lengths)
        expected = check_padded(model, input_ids, attention_mask)
        found = decode(input_ids, model, 20, vocab_size=VOCAB, attention_mask=attention_mask, cg=True)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(torch.stack(found.scores), torch.stack(expected.scores), rtol=1e-4, atol=1e-4)
    input_ids = prompt(3, 6, device)
    expected = decode(input_ids, model, 20).sequences
    assert torch.equal(decode(input_ids, model, 20, cg=True).sequences, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("options", [options for options in MODELS if options.get("use_flash_attn", True)], ids=str)
def test_graphs_of_prompts_of_different_lengths(options, device):
    model = Model(device=device, dtype=torch.float16, dim=256, **options).eval()
    for lengths in (LENGTHS, (2, 6, 6), (6, 6, 6)):
        input_ids, attention_mask = padded_prompts(device, lengths)
        expected = decode(input_ids, model, 20, attention_mask=attention_mask)
        whole = copy.deepcopy(model).float()
        exact, baseline = (scores_alone(each, expected.sequences, attention_mask) for each in (whole, model))
        assert_error_ratio(torch.stack(expected.scores, dim=1), exact, baseline)
        for _ in range(2):
            found = decode(input_ids, model, 20, attention_mask=attention_mask, cg=True)
            assert torch.equal(found.sequences, expected.sequences)
            assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))


# Caches with pages.


def poisoned(model):
    """The model, whose caches begin with NaN in all slots."""
    allocate = model.allocate_inference_cache
    model.allocate_inference_cache = lambda *args, **kwargs: {
        key: cache.fill_(torch.nan) for key, cache in allocate(*args, **kwargs).items()
    }
    return model


@pytest.mark.parametrize(
    ("options", "page_size"), [*((options, 4) for options in PADDED_MODELS), (MODELS[1], 1), (MODELS[1], 64)], ids=str
)
def test_pages(options, page_size, device):
    """The tokens and scores of caches in one piece: by a teacher and then greedy; sampled behind padding."""
    model, paged = poisoned(Model(device=device, **options).eval()), dict(page_size=page_size)
    input_ids, attention_mask = padded_prompts(device)
    for changes in (dict(teacher_outputs=prompt(3, 8, device)), dict(top_k=5, attention_mask=attention_mask)):
        results = []
        for extra in (dict(), paged):
            torch.manual_seed(0)
            results.append(decode(input_ids, model, 14, vocab_size=VOCAB, **changes, **extra))
        assert torch.equal(results[0].sequences, results[1].sequences)
        scores = [torch.stack(result.scores) for result in results]
        torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_pages_of_graphs(options, graphs, device):
    """Behind other batches; a captured step finds the pages of its replay in the one table that it has seen."""
    model = poisoned(Model(device=device, **options).eval())
    tables = {}  # by address; kept, or another could get the same
    for batch, seqlen, max_length in ((2, 6, 10), (3, 6, 18), (1, 6, 14), (3, 6, 14)):
        input_ids = prompt(batch, seqlen, device)
        expected = decode(input_ids, model, max_length).sequences
        assert torch.equal(decode(input_ids, model, max_length, cg=True, page_size=4).sequences, expected)
        table = model._decoding_cache.inference_params.block_table
        tables[table.data_ptr()] = table
    assert model._decoding_cache.callables.keys() == {(3, 1), (1, 1)} and len(tables) == 2
    input_ids, attention_mask = padded_prompts(device)
    expected = decode(input_ids, model, 14, attention_mask=attention_mask).sequences
    found = decode(input_ids, model, 14, attention_mask=attention_mask, cg=True, page_size=4)
    assert torch.equal(found.sequences, expected)


def test_graphs_are_made_anew_for_another_pool(graphs, device):
    model, input_ids = Model(device=device).eval(), prompt(2, 6, device)
    made, shapes = [], []
    for paged in ((None, None), (4, None), (4, 6), (4, 7), (4, 9), (8, None), (None, None)):
        decode(input_ids, model, 10, cg=True, page_size=paged[0], num_pages=paged[1])
        made.append(model._decoding_cache.callables[2, 1])
        shapes.append(model._decoding_cache.inference_params.key_value_memory_dict[0].shape[:2])
    assert shapes == [(2, 10), (6, 4), (6, 4), (7, 4), (9, 4), (4, 8), (2, 10)]
    assert made[1] is made[2] and len(set(made)) == 6


@pytest.mark.parametrize("cg", [False, True])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_pages_of_speculative_decoding(options, cg, graphs, device):
    """Tokens that are not accepted give back their pages."""
    model = poisoned(Model(device=device, **options).eval())
    unlike = poisoned(Model(layers=1, device=device, **options).eval())
    input_ids = prompt(1, 6, device)
    expected = decode(input_ids, model, 15, vocab_size=VOCAB).sequences
    for draft in (model, unlike):
        found = decode_speculative(
            input_ids, model, draft, 15, speculative_lookahead=4, vocab_size=VOCAB, cg=cg, page_size=3, num_pages=5
        )
        assert torch.equal(found.sequences, expected)


def test_fewer_pages_than_the_longest_sequences_need(device):
    """They are enough where sequences end before; else the error says what was missing."""
    model = Model(device=device).eval()
    input_ids = prompt(2, 6, device)
    expected = decode(input_ids, model, 40, vocab_size=VOCAB).sequences
    end = expected[:, 15].tolist()
    short = decode(input_ids, model, 40, vocab_size=VOCAB, eos_token_id=end)
    length = short.sequences.shape[1]
    assert length < 40
    pages = 2 * -(-(length - 1) // 4)
    found = decode(input_ids, model, 40, vocab_size=VOCAB, eos_token_id=end, page_size=4, num_pages=pages)
    assert torch.equal(found.sequences, short.sequences)
    says = rf"num_pages must be at least {pages + 2} for 2 sequences of {2 * pages + 1} tokens .* of 4, found {pages}:"
    with pytest.raises(OutOfPages, match=says):
        decode(input_ids, model, 40, vocab_size=VOCAB, page_size=4, num_pages=pages)
    with pytest.raises(OutOfPages, match=r"num_pages must be at least 2 for 1 sequences of 6 tokens .* found 1:"):
        decode_speculative(input_ids[:1], model, model, 40, page_size=4, num_pages=1)


def test_pages_of_no_sequences(device):
    model, none = Model(device=device).eval(), prompt(2, 6, device)[:0]
    for paged in (dict(), dict(page_size=4), dict(page_size=4, num_pages=3)):
        assert decode(none, model, 10, **paged).sequences.shape == (0, 10)


@pytest.mark.cuda
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("options", [options for options in MODELS if options.get("use_flash_attn", True)], ids=str)
def test_captured_graphs_with_pages(options, page_size, device):
    """Bit by bit what the same pages give without graphs; near what caches in one piece give."""
    options = options | (dict(positions=600) if "positions" in options else {})
    model = poisoned(Model(device=device, dtype=torch.float16, dim=256, **options).eval())
    for batch, seqlen, max_length in ((2, 6, 20), (2, 100, 400), (4, 6, 400), (1, 6, 400)):
        input_ids = prompt(batch, seqlen, device)
        expected = decode(input_ids, model, max_length, page_size=page_size)
        for _ in range(2):
            found = decode(input_ids, model, max_length, cg=True, page_size=page_size)
            assert torch.equal(found.sequences, expected.sequences)
            assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
        dense = decode(input_ids, model, max_length, teacher_outputs=expected.sequences)
        torch.testing.assert_close(torch.stack(dense.scores), torch.stack(expected.scores), rtol=5e-2, atol=5e-2)
    assert model._decoding_cache.callables.keys() == {(4, 1), (1, 1)}


def test_a_mask_without_padding_changes_nothing(device):
    model, input_ids = Model(rotary_emb_dim=16, device=device).eval(), prompt(2, 6, device)
    expected = decode(input_ids, model, 12)
    model.calls.clear()
    for mask in (torch.ones_like(input_ids), torch.ones(2, 6, dtype=torch.bool, device=device)):
        found = decode(input_ids, model, 12, attention_mask=mask)
        assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
        assert model.calls[0] == ((2, 6), None, 1)


def test_prompts_of_different_lengths_stream_and_end_at_different_steps(device):
    """Rows that have ended are filled up; the others give what they give alone."""
    model = Model(rotary_emb_dim=16, device=device).eval()
    input_ids, attention_mask = padded_prompts(device)
    expected, _ = each_alone(model, input_ids, attention_mask, 20)
    end = int(expected[1, 9])
    for row in expected:
        after = (row[6:] == end).nonzero().flatten().tolist()
        if after:
            row[7 + after[0] :] = VOCAB
    streamer = Streamer()
    sequences = model.generate(
        input_ids,
        20,
        vocab_size=VOCAB,
        attention_mask=attention_mask,
        eos_token_id=end,
        pad_token_id=VOCAB,
        streamer=streamer,
    )
    assert torch.equal(sequences, expected[:, : sequences.shape[1]])
    first, *others = streamer.pieces
    assert torch.equal(torch.cat([first, torch.stack(others, dim=1)], dim=1), sequences.cpu())


class Scripted(nn.Module):
    """Says what a table holds for each row and position, whatever it is told."""

    def __init__(self, table, device):
        super().__init__()
        self.table = torch.tensor(table, device=device)
        self.weight = nn.Parameter(torch.zeros((), device=device))

    def forward(self, input_ids, position_ids=None, inference_params=None, num_last_tokens=0):
        end = inference_params.seqlen_offset + input_ids.shape[1]
        tokens = self.table[: len(input_ids), end - num_last_tokens : end]
        return Output(1.0 + 9.0 * nn.functional.one_hot(tokens, 10))


def test_sequences_end_at_different_steps(device):
    """A sequence that has ended is filled up with the last token until all have."""
    model = Scripted([[1, 2, 9, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7], [9, 9, 9, 9, 9, 9, 9]], device)
    input_ids = torch.zeros(3, 1, dtype=torch.int64, device=device)
    expected = [[0, 1, 2, 9, 9, 9], [0, 1, 2, 3, 4, 9], [0, 9, 9, 9, 9, 9]]
    output = decode(input_ids, model, 7, eos_token_id=9)
    assert output.sequences.tolist() == expected
    assert len(output.scores) == 5
    assert decode(input_ids[:1], model, 7, eos_token_id=9).sequences.tolist() == [[0, 1, 2, 9]]
    assert decode(input_ids[:1], model, 7).sequences.tolist() == [[0, 1, 2, 9, 4, 5, 6]]


def test_any_of_several_tokens_ends_a_sequence(device):
    """Some chat models have several. What has ended is filled with the first of them."""
    model = Scripted([[1, 2, 9, 4, 5, 6, 7], [1, 2, 3, 4, 8, 6, 7], [8, 9, 9, 9, 9, 9, 9]], device)
    input_ids = torch.zeros(3, 1, dtype=torch.int64, device=device)
    for ends in ([9, 8], (9, 8), torch.tensor([9, 8])):
        found = decode(input_ids, model, 7, eos_token_id=ends).sequences
        assert found.tolist() == [[0, 1, 2, 9, 9, 9], [0, 1, 2, 3, 4, 8], [0, 8, 9, 9, 9, 9]]
    assert decode(input_ids[:1], model, 7, eos_token_id=[]).sequences.shape == (1, 7)


def test_odd_but_legal(device):
    """Whole floats, and tensors without dimensions, are numbers; token ids may be int32."""
    model = Scripted([[1, 2, 9, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7]], device)
    input_ids = torch.zeros(2, 1, dtype=torch.int32, device=device)
    odd = dict(
        top_k=torch.tensor(2),
        top_p=torch.tensor(1e-9),
        temperature=torch.tensor(0.5),
        vocab_size=10.0,
        eos_token_id=torch.tensor(9),
        pad_token_id=np.int64(8),
        repetition_penalty=torch.tensor(1.0),
    )
    found = decode(input_ids, model, torch.tensor(7.0), **odd).sequences
    assert (found.dtype, found.tolist()) == (torch.int64, [[0, 1, 2, 9, 8, 8], [0, 1, 2, 3, 4, 9]])


def test_sequences_that_have_ended_are_filled_with_the_token_of_padding(device):
    model = Scripted([[1, 2, 9, 4, 5, 6, 7], [1, 2, 3, 4, 9, 6, 7], [9, 9, 9, 9, 9, 9, 9]], device)
    input_ids = torch.zeros(3, 1, dtype=torch.int64, device=device)
    found = decode(input_ids, model, 7, eos_token_id=9, pad_token_id=8).sequences
    assert found.tolist() == [[0, 1, 2, 9, 8, 8], [0, 1, 2, 3, 4, 9], [0, 9, 8, 8, 8, 8]]
    teacher = torch.tensor([[0, 9, 5], [0, 5, 9], [0, 5, 5]], device=device)
    found = decode(input_ids, model, 7, eos_token_id=9, pad_token_id=8, teacher_outputs=teacher).sequences
    assert found.tolist() == [[0, 9, 5, 9], [0, 5, 9, 8], [0, 5, 5, 9]]
    penalised = decode(input_ids, model, 7, eos_token_id=9, pad_token_id=99, repetition_penalty=1.1)
    assert penalised.sequences[2].tolist() == [0, 9, 99, 99, 99, 99]  # which the logits do not have


def test_repetition_penalty_while_decoding(device):
    model = Scripted([[1, 1, 1, 1, 1]], device)
    input_ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    assert decode(input_ids, model, 3).sequences.tolist() == [[0, 1, 1]]
    output = decode(input_ids, model, 3, repetition_penalty=1e9)
    assert output.sequences[0, 2] != 1
    assert output.scores[1].argmax() == 1  # as the model gave them


def test_padding_is_no_repetition(device):
    model = Scripted([[1, 1, 1, 1, 1]] * 2, device)
    input_ids = torch.tensor([[1, 1, 2], [2, 2, 2]], device=device)
    attention_mask = torch.tensor([[0, 0, 1], [1, 1, 1]], device=device)
    for pad in (1, 99):
        input_ids[0, :2] = pad
        output = decode(input_ids, model, 4, repetition_penalty=1e9, attention_mask=attention_mask)
        assert output.sequences[:, 3].tolist() == [1, 1]
    assert decode(input_ids[:, 1:] * 0 + 1, model, 4, repetition_penalty=1e9).sequences[0, 2] != 1


class Streamer:
    def __init__(self):
        self.pieces, self.ended = [], False

    def put(self, tokens):
        assert tokens.device.type == "cpu" and not self.ended
        self.pieces.append(tokens)

    def end(self):
        self.ended = True


def test_streaming(device):
    model, streamer = Model(device=device).eval(), Streamer()
    sequences = decode(prompt(2, 6, device), model, 12, streamer=streamer).sequences
    first, *others = streamer.pieces
    assert torch.equal(torch.cat([first, torch.stack(others, dim=1)], dim=1), sequences.cpu())
    assert streamer.ended


def test_a_streamer_is_ended_after_an_error(device):
    """Or who reads from it would wait forever."""

    class Failing(Scripted):
        def forward(self, input_ids, **kwargs):
            if kwargs["inference_params"].seqlen_offset > 3:
                raise RuntimeError("out of memory")
            return super().forward(input_ids, **kwargs)

    model, streamer = Failing([[1] * 9] * 2, device), Streamer()
    with pytest.raises(RuntimeError, match="out of memory"):
        decode(prompt(2, 3, device), model, 9, streamer=streamer)
    assert streamer.ended and [piece.shape for piece in streamer.pieces] == [(2, 3), (2,), (2,)]


def test_mixin(device):
    model = Model(device=device).eval()
    input_ids = prompt(2, 6, device)
    sequences = model.generate(input_ids, 12, vocab_size=VOCAB)
    assert torch.equal(sequences, greedy(model, input_ids, 12)[0])
    assert model.generate(input_ids, 12, return_dict_in_generate=True).scores is None
    output = model.generate(input_ids, 12, vocab_size=VOCAB, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(output.sequences, sequences)
    assert len(output.scores) == 6
    with pytest.raises(NotImplementedError):
        GenerationMixin().allocate_inference_cache(1, 1)


def test_names_of_transformers():
    """What there is here instead is said."""
    for name, says in (
        ("assistant_model", r"decode_speculative\(input_ids, model, assistant_model, max_length\) takes one"),
        ("do_sample", "top_k=1 takes the likeliest token"),
        ("num_beams", "there is no beam search"),
        ("use_cache", "keys and values are always kept"),
        ("generation_config", "give its fields by name"),
        ("eos_token", "names like it: eos_token_id"),
        ("zzz", "names like it: none"),
    ):
        with pytest.raises(TypeError, match=f"keyword arguments must be those of decode, found '{name}'; {says}"):
            GenerationMixin().generate(IDS, 12, **{name: None})


def test_timing(device, capsys):
    model = Model(device=device).eval()
    decode(prompt(1, 6, device), model, 8, enable_timing=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Prompt processing + decoding time: ") and printed.endswith("ms\n")
    decode_speculative(prompt(1, 6, device), model, model, 16, enable_timing=True, debug=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("proposed [")
    assert lines[-2] == "Number of calls to main model: 3"
    assert lines[-1] == "Acceptance rate: 100.00%"


def test_transformers_streamer(device):
    transformers = pytest.importorskip("transformers")

    class Tokenizer:
        def decode(self, tokens, **kwargs):
            return "".join(f"{token} " for token in tokens)

    streamer = transformers.TextIteratorStreamer(Tokenizer())
    sequences = decode(prompt(1, 6, device), Model(device=device).eval(), 12, streamer=streamer).sequences
    assert "".join(streamer).split() == [str(token) for token in sequences[0].tolist()]


# Speculative decoding.


@pytest.mark.parametrize("lookahead", [1, 3, 5])
@pytest.mark.parametrize("options", MODELS, ids=str)
def test_speculative(options, lookahead, device):
    """With the likeliest tokens it gives what the model alone gives, whatever the draft model."""
    model = Model(layers=1, device=device, **options).eval()
    input_ids = prompt(1, 6, device)
    expected, scores = greedy(model, input_ids, 20)
    unlike = Model(layers=1, device=device, **options).eval()
    for draft in (model, unlike, Sometimes(model)):
        output = decode_speculative(input_ids, model, draft, 20, speculative_lookahead=lookahead, vocab_size=VOCAB)
        assert torch.equal(output.sequences, expected)
        torch.testing.assert_close(torch.stack(output.scores), torch.stack(scores), rtol=1e-4, atol=1e-4)


def test_speculative_odd_but_legal():
    model = Scripted([[1, 2, 3, 9, 4, 5, 6, 7, 8]], "cpu")
    input_ids = torch.zeros(1, 1, dtype=torch.int32)
    odd = dict(
        top_k=2.0, top_p=torch.tensor(1e-9), temperature=torch.tensor(0.5), speculative_lookahead=torch.tensor(3.0)
    )
    found = decode_speculative(input_ids, model, model, 6.0, **odd).sequences
    assert (found.dtype, found.tolist()) == (torch.int64, [[0, 1, 2, 3, 9, 4]])
    logits = torch.eye(5)[None, :4]
    arguments = logits, logits[:, :3], torch.tensor([[0, 1, 4]])
    found, expected = (sample_speculative(*arguments, top_k=top_k) for top_k in (torch.tensor(1), 1))
    assert all(map(torch.equal, found, expected))


class Sometimes(nn.Module):
    """A model that is right unless the token before is a multiple of 3: tokens are accepted in runs of every length."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, **kwargs):
        return Output(self.model(input_ids, **kwargs).logits.roll(int(input_ids[0, -1] % 3 == 0), dims=-1))


def test_speculative_stops_at_the_last_token(device):
    model = Scripted([[1, 2, 3, 9, 4, 5, 6, 7, 8]], device)
    input_ids = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for draft in (model, Scripted([[1, 2, 2, 2, 2, 2, 2, 2, 2]], device)):
        output = decode_speculative(input_ids, model, draft, 9, eos_token_id=9, speculative_lookahead=5)
        assert output.sequences.tolist() == [[0, 1, 2, 3, 9]]
        assert len(output.scores) == 4
        several = decode_speculative(input_ids, model, draft, 9, eos_token_id=[7, 9, 3], speculative_lookahead=5)
        assert several.sequences.tolist() == [[0, 1, 2, 3]]


def test_speculative_streaming(device):
    """Tokens are given as they are accepted, up to the one that ends the sequence."""
    model = Scripted([[1, 2, 3, 9, 4, 5, 6, 7, 8]], device)
    input_ids, streamer = torch.zeros(1, 1, dtype=torch.int64, device=device), Streamer()
    draft = Scripted([[1, 2, 2, 9, 2, 2, 2, 2, 2]], device)
    decode_speculative(input_ids, model, draft, 9, eos_token_id=9, speculative_lookahead=3, streamer=streamer)
    assert [piece.tolist() for piece in streamer.pieces] == [[[0]], [1, 2, 3], [9]] and streamer.ended
    streamer = Streamer()
    with pytest.raises(ValueError, match="the batch size of input_ids must be 1"):
        decode_speculative(input_ids.repeat(2, 1), model, draft, 9, streamer=streamer)
    assert streamer.ended and not streamer.pieces


def test_speculative_sampling(device):
    model = Model(device=device).eval()
    output = decode_speculative(prompt(1, 6, device), model, model, 30, top_k=5, top_p=0.9)
    assert output.sequences.shape == (1, 30) and len(output.scores) == 24
    assert type(output) is SampleDecoderOnlyOutput


# CUDA graphs.


@pytest.fixture
def graphs(monkeypatch, device):
    """Graphs that are not captured, for what is decided around them: the model is called for each replay.

    Like a captured one it sees the seqlen_offset of its capture, and finds the true one in lengths_per_sample alone.
    """

    def capture_graph(model, params, batch_size, max_seqlen, decoding_seqlen, mempool, n_warmups):
        assert 0 < decoding_seqlen < max_seqlen  # or it captures what a prompt does
        model = weakref.proxy(model)  # like a captured one it does not keep the model alive

        def run(input_ids, position_ids, seqlen):
            assert input_ids.shape == position_ids.shape == (batch_size, decoding_seqlen)
            params.set_lengths(batch_size, seqlen)
            captured = dataclasses.replace(params, seqlen_offset=max_seqlen - decoding_seqlen, max_seqlen=max_seqlen)
            return model(
                input_ids, position_ids=position_ids, inference_params=captured, num_last_tokens=decoding_seqlen
            ).logits

        return run

    monkeypatch.setattr(generation.graphs, "capture_graph", capture_graph)
    monkeypatch.setattr(generation.graphs, "_mempool", lambda device: None)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_which_graph_is_replayed(options, graphs, device):
    """Also behind a larger and a smaller batch, and in caches that have room for more."""
    model = Model(layers=1, device=device, **options).eval()
    for batch, seqlen, max_length in ((2, 6, 12), (3, 6, 30), (1, 6, 20), (1, 1, 1), (3, 6, 20)):
        input_ids = prompt(batch, seqlen, device)
        expected = decode(input_ids, model, max_length).sequences
        model.calls.clear()
        assert torch.equal(decode(input_ids, model, max_length, cg=True).sequences, expected)
        assert len(model.calls) == expected.shape[1] - seqlen
    assert model._decoding_cache.callables.keys() == {(3, 1), (1, 1)}


def test_graphs_of_a_model_that_depends_on_the_room_in_its_caches(graphs, device):
    model, input_ids = Model(device=device).eval(), prompt(1, 6, device)
    for depends, expected in ((False, [12, 30, 30]), (True, [12, 30, 20])):
        model.depends_on_capacity, found = depends, []
        for max_length in (12, 30, 20):
            decode(input_ids, model, max_length, cg=True)
            found.append(model._decoding_cache.max_seqlen)
        assert found == expected
        del model._decoding_cache


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_which_graphs_are_replayed_in_speculative_decoding(options, graphs, device):
    """Whatever the draft model, the model itself among them, which then is at two places of the sequence at once."""
    model = Model(layers=1, device=device, **options).eval()
    unlike = Model(layers=1, device=device, **options).eval()
    sometimes = Sometimes(model)
    sometimes.allocate_inference_cache = model.allocate_inference_cache
    for max_length in (7, 20):  # caches for less than is proposed at a time, and for more
        input_ids = prompt(1, 6, device)
        expected = decode(input_ids, model, max_length, vocab_size=VOCAB).sequences
        for draft in (model, unlike, sometimes):
            for lookahead in (3, 8):
                found = decode_speculative(
                    input_ids, model, draft, max_length, speculative_lookahead=lookahead, vocab_size=VOCAB, cg=True
                )
                assert torch.equal(found.sequences, expected)
    assert model._decoding_cache.callables.keys() == {(1, n) for n in range(1, 10)}
    assert model._draft_decoding_cache.callables.keys() == {(1, 1), (1, 2)}


def test_graphs_are_made_anew_if_a_parameter_moves(graphs, device):
    model, input_ids = Model(device=device).eval(), prompt(2, 6, device)

    def graph():
        decode(input_ids, model, 12, cg=True)
        return model._decoding_cache.callables[2, 1]

    first = graph()
    nn.init.normal_(model.head.weight)
    assert graph() is first
    model.head.weight.data = torch.randn_like(model.head.weight)
    assert graph() is not first


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_model_has_graphs_of_its_own(duplicate, graphs, device):
    model, input_ids = Model(device=device).eval(), prompt(2, 6, device)
    decode(input_ids, model, 12, cg=True)
    copied = duplicate(model)
    nn.init.normal_(copied.head.weight)
    expected = decode(input_ids, copied, 12).sequences
    assert torch.equal(decode(input_ids, copied, 12, cg=True).sequences, expected)


def check_graphs_of_inference_mode(model, input_ids):
    expected = decode(input_ids, model, 12).sequences
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(decode(input_ids, model, 12, cg=True).sequences, expected)


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_graphs_made_in_inference_mode_serve_outside_of_it(options, graphs, device):
    check_graphs_of_inference_mode(Model(device=device, **options).eval(), prompt(2, 6, device))


def check_graphs_under_autocast(model, input_ids, dtypes):
    """The caches have the dtype of autocast, and graphs made with another one, or without, are made anew."""
    for dtype in dtypes:
        with torch.autocast(input_ids.device.type, dtype, enabled=dtype is not None):
            expected = decode(input_ids, model, 12)
            for _ in range(2):
                found = decode(input_ids, model, 12, cg=True)
                assert torch.equal(found.sequences, expected.sequences)
                assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
        caches = model._decoding_cache.inference_params.key_value_memory_dict.values()
        assert {cache.dtype for cache in caches} == {dtype or model.head.weight.dtype}


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_graphs_under_autocast(options, graphs, device):
    model = Model(device=device, **options).eval()
    check_graphs_under_autocast(model, prompt(2, 6, device), (None, torch.bfloat16, torch.float16, None))


def test_graphs_of_a_model_of_16_bits_are_made_anew_under_autocast(graphs, device):
    """Autocast computes norms and losses in float32, which a graph made without it does not."""
    model, input_ids = Model(device=device, dtype=torch.bfloat16).eval(), prompt(2, 6, device)
    made = []
    for enabled in (False, True, True, False):
        with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
            decode(input_ids, model, 12, cg=True)
        made.append(model._decoding_cache.callables[2, 1])
    assert made[0] is not made[1] and made[1] is made[2] and made[2] is not made[3]


def check_that_caches_go_with_the_model(make_model, input_ids):
    model = make_model().eval()
    decode(input_ids, model, 12, cg=True)
    cache = weakref.ref(model._decoding_cache.inference_params.key_value_memory_dict[0])
    gc.disable()
    try:
        del model
        assert cache() is None
    finally:
        gc.enable()


def test_caches_of_graphs_go_with_the_model(graphs, device):
    """At once, without the collector of reference cycles."""
    check_that_caches_go_with_the_model(functools.partial(Model, device=device), prompt(2, 6, device))


@pytest.mark.cuda
def test_captured_graphs_of_inference_mode_of_autocast_and_of_a_deleted_model(device):
    options = dict(device=device, dim=256, num_heads_kv=1, rotary_emb_dim=16)
    input_ids = prompt(2, 6, device)
    check_graphs_of_inference_mode(Model(dtype=torch.float16, **options).eval(), input_ids)
    check_graphs_under_autocast(Model(**options).eval(), input_ids, (torch.bfloat16, torch.float16))
    check_that_caches_go_with_the_model(functools.partial(Model, dtype=torch.float16, **options), input_ids)


@pytest.mark.cuda
def test_graphs_follow_parameters_that_autocast_casts(device):
    """A cast that autocast keeps would be freed behind its context, and would not follow the parameter."""
    model, input_ids = Model(device=device, dim=256).eval(), prompt(2, 6, device)
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            found = decode(input_ids, model, 12, cg=True)
            expected = decode(input_ids, model, 12)
        assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        junk = [torch.full((256, 768), torch.nan, device=device, dtype=torch.bfloat16) for _ in range(64)]
        del junk


@pytest.mark.cuda
def test_graphs_of_a_model_with_alibi_that_was_on_the_meta_device(device):
    whole = Model(device=device, dtype=torch.float16, dim=256, use_alibi=True).eval()
    model = Model(device="meta", dtype=torch.float16, dim=256, use_alibi=True).eval()
    model.load_state_dict(whole.state_dict(), assign=True)
    input_ids = prompt(2, 6, device)
    expected = decode(input_ids, whole, 12).sequences
    graphs = []
    for _ in range(2):
        assert torch.equal(decode(input_ids, model, 12, cg=True).sequences, expected)
        graphs.append(model._decoding_cache.callables[2, 1])
    assert graphs[0] is graphs[1]  # though the slopes moved as the first was made
    assert model.layers[0].mixer.inner_cross_attn.alibi_slopes.device == input_ids.device


@pytest.mark.cuda
@pytest.mark.parametrize("options", [options for options in MODELS if options.get("use_flash_attn", True)], ids=str)
def test_graphs(options, device):
    """Bit by bit what decoding without them gives; also behind a larger and a smaller batch, and longer tables."""
    options = options | (dict(positions=600) if "positions" in options else {})
    model = Model(device=device, dtype=torch.float16, dim=256, **options).eval()
    for batch, seqlen, max_length in ((2, 6, 20), (2, 100, 500), (4, 6, 500), (1, 6, 500)):
        input_ids = prompt(batch, seqlen, device)
        expected = decode(input_ids, model, max_length)
        for _ in range(2):
            found = decode(input_ids, model, max_length, cg=True)
            assert torch.equal(found.sequences, expected.sequences)
            assert torch.equal(torch.stack(found.scores), torch.stack(expected.scores))
            with torch.no_grad():
                model(prompt(1, 550, device))  # which makes the tables of the rotary embedding anew
    assert model._decoding_cache.callables.keys() == {(4, 1), (1, 1)}


@pytest.mark.cuda
def test_graphs_of_speculative_decoding(device):
    options = dict(device=device, dtype=torch.float16, dim=256, num_heads_kv=1, rotary_emb_dim=16)
    model, draft = Model(**options).eval(), Model(layers=1, **options).eval()
    input_ids = prompt(1, 6, device)
    for each in (model, draft):
        expected = decode_speculative(input_ids, model, each, 60)
        found = decode_speculative(input_ids, model, each, 60, cg=True)
        assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.cuda
def test_cache_of_a_model_without_its_own_allocation(device):
    class Bare(nn.Module):
        config = collections.namedtuple("Config", "hidden_size num_attention_heads num_hidden_layers")(256, 4, 2)

        def __init__(self):
            super().__init__()
            self.model = Model(device=device, dtype=torch.float16, dim=256).eval()

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    model, input_ids = Bare(), prompt(2, 6, device)
    expected = decode(input_ids, model, 20).sequences
    assert torch.equal(decode(input_ids, model, 20, cg=True).sequences, expected)
    caches = model._decoding_cache.inference_params.key_value_memory_dict
    assert {key: tuple(cache.shape) for key, cache in caches.items()} == dict.fromkeys((0, 1), (2, 20, 2, 4, 64))


@pytest.mark.multi_gpu
def test_graphs_of_a_device_that_is_not_current():
    model = Model(device="cuda:1", dtype=torch.float16, dim=256).eval()
    input_ids = prompt(2, 6, "cuda:1")
    with torch.cuda.device(0):
        expected = decode(input_ids, model, 20).sequences
        assert torch.equal(decode(input_ids, model, 20, cg=True).sequences, expected)


# State, errors, signatures.


def test_reset():
    cache = {0: torch.zeros(1)}
    params = InferenceParams(8, 2, 3, 1, cache, torch.tensor([3, 3], dtype=torch.int32))
    params.leftpad_per_sample = torch.tensor([0, 1], dtype=torch.int32)
    params.reset(10, 4)
    assert params.leftpad_per_sample is None
    assert params.lengths_per_sample.tolist() == [0, 0]
    assert params == InferenceParams(10, 4, 0, 1, cache, params.lengths_per_sample)
    assert InferenceParams(8, 2).key_value_memory_dict is not InferenceParams(8, 2).key_value_memory_dict


def test_allocation(device):
    for layers, keys in ((2, [0, 1]), (["a", "b"], ["a", "b"])):
        caches = generation.allocate_inference_cache(3, 5, 2, 16, layers, device)
        assert list(caches) == keys
        assert {(cache.shape, cache.dtype) for cache in caches.values()} == {((3, 5, 2, 2, 16), torch.float16)}
    with pytest.raises(TypeError, match="dtype must be one of"):
        generation.allocate_inference_cache(3, 5, 2, 16, 2, device, torch.int32)
    model = Model(device=device)
    for allocate, name in (
        (lambda rows: generation.allocate_inference_cache(rows, 5, 2, 16, 2, device), "max_batch_size"),
        (lambda rows: model.allocate_inference_cache(rows, 5), "batch_size"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a whole number, found 8.5"):
            allocate(8.5)
        with pytest.raises(ValueError, match=f"{name} must be at least 0, found -1"):
            allocate(-1)


IDS = torch.zeros(2, 3, dtype=torch.int64)
MASK = torch.tensor([[1, 1, 1], [0, 0, 1]])
ERRORS = {
    "ids are no tensor": (dict(input_ids=[[1]]), TypeError, "input_ids must be a torch.Tensor, found list"),
    "ids are floats": (dict(input_ids=IDS.float()), TypeError, "input_ids must have dtype .*, found torch.float32"),
    "ids of one dimension": (dict(input_ids=IDS[0]), ValueError, "input_ids must have 2 dimensions"),
    "no prompt": (dict(input_ids=IDS[:, :0]), ValueError, r"input_ids.shape\[1\] must be at least 1, found 0"),
    "length": (dict(max_length=9.5), ValueError, "max_length must be a whole number, found 9.5"),
    "top_p": (dict(top_k=0, top_p=1.1), ValueError, "top_p must be from 0 to 1, found 1.1"),
    "top_k": (dict(top_k=-1), ValueError, "top_k must be at least 0, found -1"),
    "temperature": (
        dict(top_k=0, temperature=0.0),
        ValueError,
        r"positive \(top_k=1 takes the likeliest token\), found 0.0",
    ),
    "penalty": (dict(repetition_penalty=0.0), ValueError, "repetition_penalty must be positive, found 0.0"),
    "an end in words": (dict(eos_token_id="2"), TypeError, "eos_token_id must be an integer, several .* found str"),
    "ends in halves": (
        dict(eos_token_id=[1, 2.5]),
        ValueError,
        "eos_token_id must be a whole number, found 2.5",
    ),
    "vocabulary": (dict(vocab_size=-3), ValueError, "vocab_size must be positive, found -3"),
    "teacher of one row": (dict(teacher_outputs=IDS[:1]), ValueError, r"teacher_outputs must have shape \(2, \*\)"),
    "teacher of floats": (dict(teacher_outputs=IDS.float()), TypeError, "teacher_outputs must have dtype torch.int32"),
    "several pads": (dict(pad_token_id=[1]), TypeError, "pad_token_id must be an integer or None, found list"),
    "negative pad": (dict(pad_token_id=-1), ValueError, "pad_token_id must be at least 0, found -1"),
    "mask is no tensor": (dict(attention_mask=[[1, 1, 1]] * 2), TypeError, "attention_mask must be a torch.Tensor"),
    "mask of one row": (dict(attention_mask=MASK[:1]), ValueError, r"attention_mask must have shape \(2, 3\), found"),
    "mask of the whole": (dict(attention_mask=torch.ones(2, 5)), ValueError, r"mask must have shape \(2, 3\), found"),
    "padding on the right": (
        dict(attention_mask=MASK.flip(1)),
        ValueError,
        r"attention_mask must be 0 before the tokens of each prompt only .* \[1, 0, 0\] in row 1",
    ),
    "padding between": (
        dict(attention_mask=torch.tensor([[1, 1, 1], [1, 0, 1]])),
        ValueError,
        r"attention_mask .* \[1, 0, 1\] in row 1",
    ),
    "nothing but padding": (dict(attention_mask=MASK * 0), ValueError, r"attention_mask .* \[0, 0, 0\] in row 0"),
    "mask of scores": (
        dict(attention_mask=-1e4 * (1 - MASK)),
        ValueError,
        "attention_mask must be 0 or 1, found -10000",
    ),
    "pages of nothing": (dict(page_size=0), ValueError, "page_size must be positive, found 0"),
    "pages in words": (dict(page_size="16"), TypeError, "page_size must be an integer or None, found str"),
    "no pages": (dict(page_size=16, num_pages=0), ValueError, "num_pages must be positive, found 0"),
    "pages without a size": (dict(num_pages=9), ValueError, "num_pages must be None without page_size, found 9"),
    "graphs on the CPU": (dict(cg=True), ValueError, "the model's device must be a GPU for CUDA graphs, found cpu"),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    changes, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        decode(**dict(input_ids=IDS, model=Scripted([[1] * 9] * 2, "cpu"), max_length=5) | changes)


class Narrow(nn.Module):
    """A model with another vocabulary."""

    def __init__(self, model, vocab):
        super().__init__()
        self.model, self.vocab = model, vocab

    def forward(self, *args, **kwargs):
        logits = self.model(*args, **kwargs).logits
        return Output(nn.functional.pad(logits, (0, self.vocab - logits.shape[-1])))


def test_error_of_a_model_that_gives_all_logits():
    class All(Scripted):
        def forward(self, input_ids, **kwargs):
            return super().forward(input_ids, **kwargs | dict(num_last_tokens=input_ids.shape[1]))

    with pytest.raises(ValueError, match=r"the model's logits must have shape \(2, 1, \*\), found \(2, 3, 10\)"):
        decode(IDS, All([[1] * 9] * 2, "cpu"), 5)


@pytest.mark.parametrize("decoding_seqlen", [0, 4, 5])
def test_error_of_a_graph_without_room_for_a_prompt(decoding_seqlen):
    lengths = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=f"decoding_seqlen must be at least 1 .* max_seqlen, 4, found {decoding_seqlen}"
    ):
        generation.capture_graph(
            Scripted([[1] * 9], "cpu"), InferenceParams(4, 1, lengths_per_sample=lengths), 1, 4, decoding_seqlen
        )


def test_errors_of_speculative_decoding():
    model = Scripted([[1] * 9] * 2, "cpu")
    with pytest.raises(ValueError, match="the batch size of input_ids must be 1, found 2"):
        decode_speculative(IDS, model, model, 5)
    with pytest.raises(ValueError, match="speculative_lookahead must be positive, found 0"):
        decode_speculative(IDS[:1], model, model, 5, speculative_lookahead=0)
    for draft in (Narrow(model, 7), Narrow(model, 12)):
        message = f"the size of model_draft's vocabulary must be 10, as model's, found {draft.vocab}"
        with pytest.raises(ValueError, match=message):
            decode_speculative(IDS[:1], model, draft, 6)
    logits = torch.zeros(2, 4, 5)
    for arguments, error, message in (
        ((logits, logits[:, :3], IDS.float()), TypeError, "tokens_draft must have dtype"),
        ((logits[:, :3], logits[:, :3], IDS), ValueError, r"logits must have shape \(2, 4, \*\)"),
        ((logits, logits[:, :2], IDS), ValueError, r"logits_draft must have shape \(2, 3, 5\)"),
    ):
        with pytest.raises(error, match=message):
            sample_speculative(*arguments)
