"""The metrics of src/metrics against formulas in float64 over all tokens at once."""

import math

import pytest
import torch
import torch.nn.functional as F
from processes import over_processes
from torch.utils._python_dispatch import TorchDispatchMode
from torchmetrics import MetricCollection

from src.metrics.accuracy import AccuracyMine
from src.metrics.num_tokens import NumTokens
from src.metrics.perplexity import Perplexity

SIZES = (1, 7, 64, 30)  # tokens of a batch: unequal, so that a mean of means differs from the mean
CLASSES = 13


def batches(ignored=0.0, seed=0):
    """Pairs (logits, labels) of SIZES tokens, of which a share has the label -100."""
    generator = torch.Generator().manual_seed(seed)
    for size in SIZES:
        labels = torch.randint(CLASSES, (size,), generator=generator)
        labels[torch.rand(size, generator=generator) < ignored] = -100
        yield 3 * torch.randn(size, CLASSES, generator=generator), labels


def exact_perplexity(pairs):
    logits, labels = map(torch.cat, zip(*pairs))
    return F.cross_entropy(logits.double(), labels).exp().item()


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("given", [True, False], ids=["loss given", "loss computed"])
def test_perplexity_is_that_of_all_tokens_that_count(ignored, given):
    metric = Perplexity()
    pairs = list(batches(ignored))
    for logits, labels in pairs:
        loss = F.cross_entropy(logits, labels) if given else None
        value = metric(logits, labels, loss=loss)
        assert value.item() == pytest.approx(exact_perplexity([(logits, labels)]), rel=1e-5, nan_ok=True)
    assert metric.compute().item() == pytest.approx(exact_perplexity(pairs), rel=1e-6, nan_ok=True)
    assert metric.count == sum((labels >= 0).sum() for _, labels in pairs)


def test_perplexity_adds_in_float64():
    metric = Perplexity()
    labels = torch.zeros(1, dtype=torch.int64)
    metric.update(None, torch.zeros(2**24, dtype=torch.int64), loss=torch.tensor(1.0))
    metric.update(None, labels, loss=torch.tensor(0.5))  # lost in a sum of fp32
    assert metric.total_log_probs.item() == 2**24 + 0.5
    assert metric.count.dtype == torch.int64


@pytest.mark.parametrize("cast", [lambda x: x.to(torch.bfloat16), lambda x: x.half(), lambda x: x.type(torch.float16)])
def test_sums_keep_their_dtype_in_a_model_of_16_bits(cast):
    model = torch.nn.Module()
    model.metric, model.weight = Perplexity(), torch.nn.Parameter(torch.ones(1))
    cast(model)
    for _ in range(1000):
        model.metric.update(torch.zeros(7, 10), torch.zeros(7, dtype=torch.int64))
    assert model.weight.dtype.itemsize == 2 and model.metric.compute().item() == pytest.approx(10, rel=1e-6)


def test_perplexity_takes_logits_of_any_shape():
    logits, labels = torch.randn(2, 3, CLASSES), torch.randint(CLASSES, (2, 3))
    assert Perplexity()(logits, labels) == Perplexity()(logits.flatten(0, 1), labels.flatten())


def test_perplexity_keeps_no_graph():
    logits = torch.randn(4, CLASSES, requires_grad=True)
    labels = torch.arange(4)
    metric = Perplexity()
    metric(logits, labels, loss=F.cross_entropy(logits, labels))
    metric(logits, labels)
    assert not metric.total_log_probs.requires_grad


@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("ignore_index", [None, -100])
def test_accuracy_is_the_share_of_labels_among_the_first(top_k, ignore_index):
    metric = AccuracyMine(top_k=top_k, ignore_index=ignore_index)
    right = total = 0
    for logits, labels in batches(0.0 if ignore_index is None else 0.3):
        metric(logits, labels)
        for scores, label in zip(logits.tolist(), labels.tolist()):
            if label != ignore_index:
                better = sum(score > scores[label] for score in scores)
                right, total = right + (better < top_k), total + 1
    assert metric.compute().item() == pytest.approx(right / total)


def test_accuracy_takes_the_largest_share_of_a_mixed_target():
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    mixed = torch.tensor([[0.4, 0.6], [0.4, 0.6], [0.9, 0.1]])
    assert AccuracyMine()(scores, mixed).item() == pytest.approx(1 / 3)


def test_accuracy_of_sequences():
    scores, labels = torch.randn(2, CLASSES, 5), torch.randint(CLASSES, (2, 5))
    flat = AccuracyMine()(scores.transpose(1, 2).flatten(0, 1), labels.flatten())
    assert AccuracyMine()(scores, labels) == flat


def test_accuracy_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"found \(4, 13\) and \(3,\)"):
        AccuracyMine()(torch.zeros(4, CLASSES), torch.zeros(3, dtype=torch.int64))


def test_number_of_tokens_survives_epochs_and_restarts():
    metric = NumTokens()
    for epoch in (1, 2):
        for size in SIZES:
            running = metric(None, torch.zeros(2, size))
        assert running == metric.compute() == epoch * 2 * sum(SIZES)
        metric.reset()
    other = NumTokens()
    other.load_state_dict(metric.state_dict())
    assert list(metric.state_dict()) == ["count"]
    assert other(None, torch.zeros(3)) == 4 * sum(SIZES) + 3


def test_number_of_tokens_of_each_epoch():
    metric = NumTokens()
    metric.of_each_epoch()
    for _ in range(2):
        for size in SIZES:
            metric.update(None, torch.zeros(2, size))
        assert metric.compute() == 2 * sum(SIZES) and not metric.state_dict()
        metric.reset()


def test_what_is_in_checkpoints():
    metrics = MetricCollection({"ppl": Perplexity(), "num-tokens": NumTokens(), "acc": AccuracyMine()})
    assert list(metrics.clone(prefix="train/").state_dict()) == ["num-tokens.count"]


@pytest.mark.parametrize("metric", [Perplexity(), AccuracyMine(), NumTokens()], ids=lambda m: type(m).__name__)
def test_a_call_updates_once_and_reads_nothing_from_the_device(metric):
    class NoRead(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default  # item() and bool()
            return func(*args, **(kwargs or {}))

    logits, labels = next(batches())
    calls, update = [], type(metric).update
    metric.update = lambda *args, **kwargs: calls.append(args) or update(metric, *args, **kwargs)
    with NoRead():
        metric(logits, labels, loss=torch.tensor(1.0))
    assert len(calls) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_call_does_not_wait_for_the_gpu():
    metrics = MetricCollection({"ppl": Perplexity(), "num-tokens": NumTokens(), "acc": AccuracyMine()}).cuda()
    logits, labels = (x.cuda() for x in next(batches()))
    loss = torch.tensor(1.0, device="cuda")
    metrics(logits, labels, loss=loss)
    torch.cuda.set_sync_debug_mode("error")
    try:
        metrics(logits, labels, loss=loss)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_each_rank(group):
    rank = group.rank()
    ppl, tokens, accuracy = Perplexity(), NumTokens(), AccuracyMine()
    everything = [pair for r in range(group.size()) for pair in list(batches(0.3, seed=r))[: r + 2]]
    for logits, labels in list(batches(0.3, seed=rank))[: rank + 2]:  # not the same number on each rank
        for metric in (ppl, tokens, accuracy):
            metric(logits, labels, loss=F.cross_entropy(logits, labels))
    assert ppl.compute().item() == pytest.approx(exact_perplexity(everything), rel=1e-6)
    assert tokens.compute().item() == sum((labels != -100).sum() for _, labels in everything)
    logits, labels = map(torch.cat, zip(*everything))
    right = (logits.argmax(1) == labels)[labels != -100]
    assert accuracy.compute().item() == pytest.approx(right.double().mean().item())


def test_metrics_of_two_ranks_are_those_of_all_tokens():
    over_processes(2, on_each_rank)


def counts_on_each_rank(group, saved, copies, expected):
    metric = NumTokens()
    metric.copies = copies
    metric.load_state_dict({"count": torch.tensor(saved)})
    metric.update(None, torch.zeros(10))
    assert metric.compute() == expected
    assert metric.state_dict()["count"] == expected  # what any rank would save


def test_number_of_tokens_goes_on_with_more_ranks():
    over_processes(2, counts_on_each_rank, 1000, 1, 1020)


def test_tokens_of_ranks_that_share_a_model_count_once():
    over_processes(2, counts_on_each_rank, 1000, 2, 1010)


def test_ratio_without_samples_is_nan():
    metric = AccuracyMine(ignore_index=-100)
    assert math.isnan(metric(torch.zeros(2, 3), torch.full((2,), -100)))
