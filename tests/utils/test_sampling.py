"""Sampling: which tokens may be drawn, how often each is, and penalties of repetition."""

import pytest
import torch

from flash_attn.utils import generation
from flash_attn.utils.generation import (
    modify_logits_for_repetition_penalty,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
    sample_speculative,
)


def frequencies(draw, count=20_000):
    """How often each token is drawn from the same row of logits, repeated."""
    return torch.bincount(draw(count), minlength=5) / count


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -3.0])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (dict(top_k=0), 5),
        (dict(top_k=3), 3),
        (dict(top_k=99), 5),
        (dict(top_k=0, top_p=0.7), 2),
        (dict(top_k=0, top_p=1.0), 5),
        (dict(top_k=4, top_p=0.9, temperature=0.5), 2),
        (dict(top_k=0, temperature=2.0), 5),
        (dict(top_k=0, top_p=1e-6), 1),
    ],
    ids=str,
)
def test_sample(options, kept, device):
    logits = LOGITS.to(device)
    expected = (logits / options.get("temperature", 1.0)).masked_fill(
        torch.arange(5, device=device) >= kept, -torch.inf
    )
    found = frequencies(lambda count: sample(logits.expand(count, 5), **options))
    torch.testing.assert_close(found, expected.softmax(0), rtol=0, atol=0.02)
    assert torch.equal(logits.cpu(), LOGITS)


def test_likeliest(device):
    logits = torch.randn(7, 50, device=device)
    assert torch.equal(sample(logits, top_p=0.5, temperature=3.0), logits.argmax(-1))
    for options in (dict(top_k=2, temperature=1e-4), dict(top_k=0, top_p=1e-4)):
        assert torch.equal(sample(logits, **options), logits.argmax(-1))
    assert sample(logits.half(), top_k=0).shape == (7,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [dict(top_k=0), dict(top_k=3), dict(top_k=0, top_p=0.9)], ids=str)
def test_a_low_temperature_leaves_the_likeliest(options, dtype, device):
    """Logits divided by the temperature may exceed what float16, and even float32, can hold."""
    logits = torch.tensor([[0.0, 900.0, 800.0, -900.0, 1.0]], device=device, dtype=dtype).expand(64, 5)
    for temperature in (0.01, 1e-37):
        assert (sample(logits, temperature=temperature, **options) == 1).all()
        draft = torch.ones(64, 1, dtype=torch.int64, device=device)
        tokens, count = sample_speculative(
            logits[:, None].expand(64, 2, 5), logits[:, None], draft, temperature=temperature, **options
        )
        assert (tokens == 1).all() and (count == 2).all()


@pytest.mark.parametrize("shape", [(50,), (4, 50), (2, 3, 50)])
def test_filters(shape, device):
    logits = torch.randn(shape, device=device)
    found = logits.clone()
    modify_logits_for_top_k_filtering(found, 7)
    assert (found.isfinite().sum(-1) == 7).all()
    torch.testing.assert_close(found.isfinite(), logits >= logits.topk(7).values[..., -1:])
    found = logits.clone()
    modify_logits_for_top_p_filtering(found, 0.6)
    p = logits.softmax(-1)
    more_likely = (p[..., None, :] > p[..., :, None]).float() @ p[..., None]
    assert torch.equal(found.isfinite(), more_likely[..., 0] < 0.6)
    for top_p in (0.0, 1.0):
        found = logits.clone()
        modify_logits_for_top_p_filtering(found, top_p)
        assert torch.equal(found, logits)


def test_the_likeliest_stays_however_small_top_p_is(device):
    logits = torch.randn(4, 50, device=device)
    expected = logits.argmax(dim=-1)
    generation.modify_logits_for_top_p_filtering(logits, 1e-9)
    assert torch.equal(logits.isfinite().nonzero()[:, 1], expected)


def test_the_likeliest_token_whatever_the_other_options(device):
    logits = torch.randn(4, 50, device=device)
    assert torch.equal(sample(logits, top_k=1, top_p=1.5, temperature=0.0), logits.argmax(dim=-1))


def test_equal_logits_all_stay():
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    modify_logits_for_top_k_filtering(logits, 2)
    assert logits.isfinite().tolist() == [[True, True, True, False]]


def test_repetition_penalty():
    logits = torch.tensor([[1.0, -1.0, 3.0], [1.0, 2.0, 3.0]])
    modify_logits_for_repetition_penalty(logits, torch.tensor([[0, 1, 0], [2, 2, 2]]), 2.0)
    assert logits.tolist() == [[0.5, -2.0, 3.0], [1.0, 2.0, 1.5]]
    modify_logits_for_repetition_penalty(logits, torch.zeros(2, 0, dtype=torch.int64), 2.0)
    assert logits.tolist() == [[0.5, -2.0, 3.0], [1.0, 2.0, 1.5]]


@pytest.mark.parametrize("token", [-1, 3, 2**40])
def test_error_of_a_repetition_penalty_for_a_token_that_is_not_in_the_vocabulary(token, device):
    logits, tokens = torch.randn(2, 3, device=device), torch.tensor([[0, 1], [token, 0]], device=device)
    before = logits.clone()
    with pytest.raises(ValueError, match=f"tokens must be from 0 to 2, found {token}"):
        modify_logits_for_repetition_penalty(logits, tokens, 2.0)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "options", [dict(top_k=0), dict(top_k=3), dict(top_k=0, top_p=0.8), dict(top_k=0, temperature=2.0)], ids=str
)
def test_speculative_samples_are_the_model_s(options, device):
    """Whatever the draft model: its first token, and what follows it, are distributed as the model's."""
    batch = 40_000
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS.roll(1)]).to(device).expand(batch, 3, 5)
    logits_draft = torch.stack([LOGITS.roll(2), LOGITS.flip(0)]).to(device).expand(batch, 2, 5)
    tokens_draft = torch.stack([sample(each, **options) for each in logits_draft.unbind(1)], dim=1)
    tokens, count = sample_speculative(logits, logits_draft, tokens_draft, **options)
    assert tokens.shape == (batch, 3)
    assert set(count.tolist()) == {1, 3}  # at the second place, both models are the same
    for i in range(3):
        rows = count > i
        expected = frequencies(lambda n, i=i: sample(logits[:n, i], **options))
        found = torch.bincount(tokens[rows, i], minlength=5) / rows.sum()
        torch.testing.assert_close(found, expected, rtol=0, atol=0.03)
    accepted = torch.arange(2, device=device) < count[:, None] - 1
    assert torch.equal(tokens[:, :2][accepted], tokens_draft[accepted])


def test_speculative_samples_among_equal_logits(device):
    """Of several that are the last of top_k, the same are left out as in `sample`."""
    batch = 40_000
    logits = torch.tensor([3.0, 2.5, 2.0, 2.0, 2.0], device=device)
    logits_draft = torch.tensor([3.0, 2.0, 2.0, 2.0, 2.0], device=device).expand(batch, 1, 5)
    tokens_draft = sample(logits_draft[:, 0], top_k=3)[:, None]
    tokens, _ = sample_speculative(logits.expand(batch, 2, 5), logits_draft, tokens_draft, top_k=3)
    expected = frequencies(lambda n: sample(logits.expand(n, 5), top_k=3))
    torch.testing.assert_close(torch.bincount(tokens[:, 0], minlength=5) / batch, expected, rtol=0, atol=0.02)


def test_speculative_of_the_likeliest(device):
    logits = torch.randn(6, 4, 11, device=device)
    likeliest = logits.argmax(-1)
    proposed = likeliest[:, :3].clone()
    proposed[torch.arange(3), torch.arange(3)] += 1
    proposed %= 11
    tokens, count = sample_speculative(logits, torch.randn(6, 3, 11, device=device), proposed.int())
    assert count.tolist() == [1, 2, 3, 4, 4, 4]
    for row, n in enumerate(count.tolist()):
        assert torch.equal(tokens[row, :n], likeliest[row, :n])
