"""Batches of sequences give what each sequence gives alone."""

import pytest
import torch
import transformers

from flash_attn.models.gpt import GPTLMHeadModel
from src.evaluation.batched import continue_prompts, score_continuations

VOCABULARY, LENGTH = 40, 12


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, vocab_size=VOCABULARY)
    config.pad_vocab_size_multiple = 16
    model = GPTLMHeadModel(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def formula(model, context, continuation):
    """(log P, greedy) in float64, one token at a time, each with the last tokens of what comes before it."""
    ids = [*context, *continuation][-(LENGTH + 1) :]
    start = len(ids) - len(continuation)
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0, :, :VOCABULARY].double() if len(ids) > 1 else None
    log_p, greedy = 0.0, True
    for position in range(start, len(ids)):
        row = logits[position - 1]
        log_p += (row[ids[position]] - row.logsumexp(0)).item()
        greedy &= row.argmax().item() == ids[position]
    return log_p, greedy


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_score_continuations(model, batch_size):
    draw = torch.Generator().manual_seed(1)
    lengths = [(1, 1), (5, 3), (1, 12), (12, 1), (20, 4), (3, 0), (1, 0), (7, 5), (2, 2)]  # (20, 4) is cut on the left
    requests = [tuple(torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in pair) for pair in lengths]
    context = [3, 5]
    likeliest = model.generate(torch.tensor([context]), max_length=6)[0, 2:].tolist()
    requests.append((context, likeliest))
    found = score_continuations(model, requests, LENGTH, batch_size, progress=False)
    for score, request in zip(found, requests):
        log_p, greedy = formula(model, *request)
        assert score == (pytest.approx(log_p, rel=1e-5, abs=1e-6), greedy)
    assert found[-1][1] and not found[1][1]


@pytest.mark.parametrize(
    "request_, message",
    [
        (([], [1]), "a context must have at least one token, found none"),
        (([1], [2] * 13), "a continuation must have at most 12 tokens, which the model reads, found 13"),
    ],
)
def test_scoring_errors(model, request_, message):
    with pytest.raises(ValueError, match=message):
        score_continuations(model, [request_], LENGTH, progress=False)


PROMPTS = [[1], [2, 3, 4, 5], [6, 7], [8, 9, 10]]


def alone(model, prompt, count):
    return model.generate(torch.tensor([prompt]), max_length=len(prompt) + count)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_continue_prompts(model, batch_size):
    found = continue_prompts(model, PROMPTS, 5, batch_size, progress=False)
    assert found == [alone(model, prompt, 5) for prompt in PROMPTS]


def test_the_end_token_ends_a_row_and_is_left_out(model):
    expected = [alone(model, prompt, 6) for prompt in PROMPTS]
    eos = expected[1][3]
    cut = [ids[: ids.index(eos)] if eos in ids else ids for ids in expected]
    assert continue_prompts(model, PROMPTS, 6, eos_token_id=eos, progress=False) == cut


def test_a_stopped_row_ends_and_a_stopped_batch_does_no_more_work(model, monkeypatch):
    calls, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs))
    found = continue_prompts(model, PROMPTS, 6, stopped=lambda ids: len(ids) == 2, progress=False)
    assert found == [alone(model, prompt, 2) for prompt in PROMPTS]
    assert len(calls) == 2 + 4 * 2  # two steps of one batch, then those of `alone`
