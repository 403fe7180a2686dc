"""Perplexity equals the plain formula, token by token, whatever the windows and the batches."""

import math

import numpy as np
import pytest
import torch
import transformers

from flash_attn.models.gpt import GPTLMHeadModel
from src.datamodules.tokenizer import ByteTokenizer
from src.evaluation import perplexity as module
from src.evaluation.perplexity import IGNORED, Score, Windows, perplexity

VOCABULARY = 50


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=VOCABULARY)
    config.pad_vocab_size_multiple = 16  # to 64
    model = GPTLMHeadModel(config)
    for parameter in model.parameters():  # so that probabilities differ, and those of the padding are not small
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(VOCABULARY, size=70).astype(np.uint16)


def formula(model, tokens, max_length, stride):
    """-log P of each token in float64, from the first window that reaches it, one window at a time."""
    tokens = torch.from_numpy(tokens.astype(np.int64))
    nll, predicted = {}, 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + max_length, len(tokens) - 1)
        with torch.no_grad():
            logits = model(tokens[None, begin:end]).logits[0, :, :VOCABULARY].double()
        for position in range(max(predicted + 1, begin + 1), end + 1):
            row = logits[position - 1 - begin]
            nll[position] = (row.logsumexp(0) - row[tokens[position]]).item()
        predicted = end
        if end == len(tokens) - 1:
            break
    assert sorted(nll) == list(range(1, len(tokens)))
    return sum(nll.values())


# (tokens, max_length, stride)
CASES = "70,16,16  70,16,5  70,16,1  65,16,16  66,16,16  17,16,4  9,16,16  2,1,1  70,7,3".split()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_equals_the_formula(model, tokens, case, batch_size):
    count, max_length, stride = map(int, case.split(","))
    tokens = tokens[:count]
    score = perplexity(model, tokens, max_length, stride, batch_size, progress=False)
    expected = formula(model, tokens, max_length, stride)
    assert score.tokens == count - 1
    assert score.nll == pytest.approx(expected, rel=1e-6)
    assert score.perplexity == pytest.approx(math.exp(expected / (count - 1)), rel=1e-5)


def test_more_context_changes_the_result(model, tokens):
    """So that the cases above can tell windows from one another."""
    scores = [perplexity(model, tokens, 16, stride, progress=False).nll for stride in (16, 8, 1)]
    assert len({round(score, 3) for score in scores}) == 3


def test_default_stride_is_the_loss_of_validation(model, tokens):
    x, y = (torch.from_numpy(t.astype(np.int64)).view(4, 16) for t in (tokens[:64], tokens[1:65]))
    with torch.no_grad():
        logits = model(x).logits[..., :VOCABULARY]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    assert perplexity(model, tokens[:65], 16, progress=False).loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_memory_map_and_a_model_of_transformers(tmp_path, tokens):
    np.save(tmp_path / "tokens.npy", tokens)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=16, vocab_size=VOCABULARY)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    found = perplexity(theirs, np.load(tmp_path / "tokens.npy", mmap_mode="r"), 16, 4, progress=False)
    assert found.nll == pytest.approx(formula(theirs, tokens, 16, 4), rel=1e-6)


def test_mode_is_left_as_it_was(model, tokens):
    model.train()
    trained_mode = perplexity(model, tokens, 16, progress=False)  # dropout is 0.1 in training mode
    assert model.training
    model.eval()
    assert perplexity(model, tokens, 16, progress=False) == trained_mode
    assert not model.training


@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("count", [2, 8, 9, 10, 33])
def test_windows_predict_each_token_once(count, stride):
    tokens = np.arange(count)
    windows = Windows(tokens, 8, stride)
    pairs = [(x, y) for inputs, targets in windows for x, y in zip(inputs.tolist(), targets.tolist()) if y != IGNORED]
    assert pairs == [(i, i + 1) for i in range(count - 1)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(tokens=np.arange(1)), r"tokens must be one row of at least 2, found shape \(1,\)"),
        (dict(tokens=np.zeros((2, 2), int)), r"found shape \(2, 2\)"),
        (dict(max_length=17), "max_length must be at most 16, the model's positions, found 17"),
        (dict(max_length=0), "max_length must be positive, found 0"),
        (dict(stride=0), "stride must be from 1 to max_length, 16, found 0"),
    ],
)
def test_errors(model, tokens, arguments, message):
    with pytest.raises(ValueError, match=message):
        perplexity(**dict(model=model, tokens=tokens, max_length=16, progress=False) | arguments)


def test_stride_longer_than_the_window_would_leave_tokens_out():
    with pytest.raises(ValueError, match="stride must be from 1 to max_length, 8, found 9"):
        Windows(np.arange(20), 8, 9)


def test_score():
    score = Score(nll=8 * math.log(2), tokens=4, num_bytes=2)
    assert (score.loss, score.perplexity) == pytest.approx((2 * math.log(2), 4))
    assert score.bits_per_byte == pytest.approx(4)
    assert Score(1.0, 1).bits_per_byte is None


def test_tokens_and_bytes_of_files(tmp_path):
    class Pairs:
        """A tokenizer with a token for two characters."""

        eos_token_id = 9

        def __call__(self, texts, **kwargs):
            return {"input_ids": [[int(text[i]) for i in range(0, len(text), 2)] for text in texts]}

    text, ids = tmp_path / "a.txt", tmp_path / "ids.npy"
    text.write_text("1020304")
    np.save(ids, np.array([256, 65, 66, 256, 67], np.uint16))
    tokens = module.read_tokens(text, Pairs())
    assert tokens.tolist() == [9, 1, 2, 3, 4] and module.count_bytes(text, tokens, Pairs()) == 7
    tokens = module.read_tokens(ids, ByteTokenizer())
    assert module.count_bytes(ids, tokens, ByteTokenizer()) == 3  # an end of text has no byte
    assert module.count_bytes(ids, tokens, Pairs()) is None
    assert module.read_tokens(text, ByteTokenizer()).tolist() == [256, *b"1020304"]


@pytest.mark.parametrize(
    "contents, says", [(b"", "found none in"), (b"a\0b", "zero byte at offset 1"), (b"\xe9", "UTF-8")]
)
def test_a_file_that_is_no_text(contents, says, tmp_path):
    (tmp_path / "a.txt").write_bytes(contents)
    with pytest.raises(ValueError, match=says):
        module.read_tokens(tmp_path / "a.txt", ByteTokenizer())
