"""Losses of batches in which no label counts, or without rows: NaN for a mean, and gradients of 0, as in torch."""

import functools
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import over_processes
from torch import nn

from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.losses.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from flash_attn.models import bert, gpt

FEATURES, VOCAB = 8, 11
LABELS = {
    "none counts": torch.full((5,), -100),
    "no rows": torch.zeros(0, dtype=torch.int64),
    "one counts": torch.tensor([-100, -100, 4, -100, -100]),
    "all count": torch.arange(5),
}
OPTIONS = [
    dict(),
    dict(label_smoothing=0.1),
    dict(lse_square_scale=0.01, logit_scale=0.5),
    dict(label_smoothing=0.1, lse_square_scale=0.01),
]


def tensors(rows):
    """Hidden states, a weight and a bias, leaves."""
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for size in ((rows, FEATURES), (VOCAB, FEATURES), (VOCAB,))]


def in_float64(hidden, weight, bias, labels, reduction, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0):
    """torch's loss in float64, with the mean of its z-losses."""
    scores = F.linear(hidden.double(), weight.double(), bias.double()) * logit_scale
    loss = F.cross_entropy(scores, labels, reduction=reduction, label_smoothing=label_smoothing)
    if lse_square_scale == 0:
        return loss
    z_losses = lse_square_scale * scores.logsumexp(1).square()
    if reduction == "none":
        return loss + torch.where(labels != -100, z_losses, 0)
    counting = z_losses[labels != -100]
    return loss + (counting.mean() if reduction == "mean" else counting.sum())


def of_logits(hidden, weight, bias, labels, **options):
    return CrossEntropyLoss(**options)(F.linear(hidden, weight, bias), labels)


def of_hidden(hidden, weight, bias, labels, **options):
    return linear_cross_entropy(hidden, weight, labels, bias, chunk_size=2, **options)


def of_the_module(hidden, weight, bias, labels, **options):
    return LinearCrossEntropyLoss(**options)(hidden, weight, labels, bias)


LOSSES = {
    "logits": of_logits,
    "logits, in the forward": functools.partial(of_logits, gradient_in_forward=True),
    "logits, in place": functools.partial(of_logits, inplace_backward=True),
    "logits, in place in the forward": functools.partial(of_logits, inplace_backward=True, gradient_in_forward=True),
    "hidden": of_hidden,
    "hidden, module": of_the_module,
}
CASES = [
    (loss, reduction)
    for loss in LOSSES
    for reduction in ("mean", "sum", "none")
    if not (loss.startswith("hidden") and reduction == "none")
]


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(("loss", "reduction"), CASES)
@pytest.mark.cover(2)
def test_losses_and_gradients(loss, reduction, labels):
    labels = LABELS[labels]
    for options in OPTIONS:
        leaves = tensors(len(labels))
        found = LOSSES[loss](*leaves, labels, reduction=reduction, **options)
        right = in_float64(*leaves, labels, reduction, **options)
        torch.testing.assert_close(found.double(), right, equal_nan=True, rtol=1e-5, atol=1e-6)
        expected = torch.autograd.grad(right, leaves, torch.full_like(right, 0.7))
        gradients = torch.autograd.grad(found, leaves, torch.full_like(found, 0.7))
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            assert found.isfinite().all() or not ours.any()


@pytest.mark.parametrize("loss", [of_logits, of_hidden], ids=["logits", "hidden"])
def test_transforms(loss):
    """Per-sample gradients, where one sample has no label that counts; and a second derivative."""
    labels = torch.stack([LABELS["none counts"], LABELS["one counts"], LABELS["all count"]])
    _, weight, bias = (x.detach() for x in tensors(0))
    samples = torch.randn(3, 5, FEATURES)

    def derivatives(of):
        def mean(weight, hidden, labels):
            return of(hidden, weight, bias, labels)

        def slope(weight, hidden, labels):
            return torch.func.grad(mean)(weight, hidden, labels).square().sum()

        return [
            torch.func.vmap(torch.func.grad(f), in_dims=(None, 0, 0))(weight, samples, labels) for f in (mean, slope)
        ]

    exact = derivatives(functools.partial(in_float64, reduction="mean"))
    for ours, right in zip(derivatives(loss), exact, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
        assert not ours[0].any()


def test_triton(device):
    """Its backward gets dlosses of infinity, the gradient of a mean of nothing."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("flash_attn._triton.xentropy")
    for labels in (LABELS["none counts"], LABELS["no rows"]):
        logits = torch.randn(len(labels), VOCAB, device=device)
        dlosses = torch.full((len(labels),), float("inf"), device=device)
        *results, dlogits = kernels.fwd_bwd(dlosses, logits, labels.to(device), 0.1, 1.0, 0.01, -100, 0, VOCAB)
        assert not any(x.any() for x in (*results, dlogits))


def check_parts(group):
    rank = dist.get_rank(group)
    own = slice(rank * 6, rank * 6 + 6)
    for labels in (LABELS["none counts"], LABELS["no rows"]):
        for options in OPTIONS:
            hidden, weight, bias = (x.detach() for x in tensors(len(labels)))
            part = [
                x.requires_grad_() for x in (hidden, torch.cat([weight, weight])[own], torch.cat([bias, bias])[own])
            ]
            losses = [
                linear_cross_entropy(
                    part[0],
                    part[1],
                    labels,
                    part[2],
                    num_classes=VOCAB,
                    process_group=group,
                    sequence_parallel=False,
                    **options,
                ),
                CrossEntropyLoss(process_group=group, **options)(F.linear(*part), labels),
            ]
            for loss in losses:
                assert loss.isnan()
                assert not any(x.any() for x in torch.autograd.grad(loss, part))


def test_classes_divided_among_processes():
    over_processes(2, check_parts)


# Models.

SIZES = dict(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
)
FUSED = dict(
    use_flash_attn=True,
    fused_bias_fc=True,
    fused_mlp=True,
    fused_dropout_add_ln=True,
    hidden_act="gelu_new",
    use_xentropy=True,
)
MASKED = dict(FUSED, dense_seq_output=True)
OF_TOKENS, OF_ROWS = torch.full((2, 6), -100), torch.full((2,), -100)
HEADS = {
    "BertForPreTraining": dict(labels=torch.zeros(2, 6, dtype=torch.int64), next_sentence_label=torch.full((2,), -1)),
    "BertForMaskedLM": dict(labels=OF_TOKENS),
    "BertForNextSentencePrediction": dict(labels=OF_ROWS),
    "BertForSequenceClassification": dict(labels=OF_ROWS),
    "BertForTokenClassification": dict(labels=OF_TOKENS),
    "BertForMultipleChoice": dict(labels=OF_ROWS[:1]),
    "BertForQuestionAnswering": dict(start_positions=torch.full((2,), 6), end_positions=torch.full((2,), 6)),
}


def assert_nothing_is_learned(loss, model):
    assert loss.isnan()
    loss.backward()
    assert any(p.grad is not None for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize(
    "options", [dict(), FUSED, MASKED, dict(MASKED, last_layer_subset=True)], ids=["plain", "fused", "masked", "subset"]
)
@pytest.mark.parametrize("head", HEADS)
def test_bert(head, options):
    transformers = pytest.importorskip("transformers")
    model = getattr(bert, head)(transformers.BertConfig(**SIZES, **options))
    input_ids = torch.randint(50, (2, 6))
    input_ids = input_ids[None] if head == "BertForMultipleChoice" else input_ids
    assert_nothing_is_learned(model(input_ids, **HEADS[head]).loss, model)


def test_half_of_bert_s_labels():
    """Where no token is masked, the sum of both losses is NaN, as in torch, and the other head learns alone."""
    transformers = pytest.importorskip("transformers")
    model = bert.BertForPreTraining(transformers.BertConfig(**SIZES, **FUSED)).eval()
    input_ids, following = torch.randint(50, (2, 6)), torch.tensor([0, 1])
    outputs = model(input_ids, labels=torch.zeros(2, 6, dtype=torch.int64), next_sentence_label=following)
    assert outputs.loss.isnan()
    right = torch.autograd.grad(
        F.cross_entropy(outputs.seq_relationship_logits, following),
        list(model.parameters()),
        retain_graph=True,
        allow_unused=True,
    )
    outputs.loss.backward()
    for (name, parameter), expected in zip(model.named_parameters(), right, strict=True):
        expected = torch.zeros_like(parameter) if expected is None else expected
        torch.testing.assert_close(parameter.grad, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", [dict(), dict(fused_mlp=True, fused_dropout_add_ln=True)], ids=["plain", "fused"])
def test_gpt(options):
    transformers = pytest.importorskip("transformers")
    sizes = dict(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=50, activation_function="gelu_new")
    model = gpt.GPTLMHeadModel(transformers.GPT2Config(**sizes, **options))
    input_ids = torch.randint(50, (2, 6))
    assert_nothing_is_learned(model(input_ids, labels=torch.full_like(input_ids, -100)).loss, model)
    model.zero_grad()
    assert_nothing_is_learned(model(input_ids[:, :1], labels=input_ids[:, :1]).loss, model)


def test_an_optimizer_keeps_its_parameters():
    hidden, weight, bias = tensors(5)
    parameters = nn.ParameterList([weight, bias])
    before = [x.detach().clone() for x in parameters]
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    linear_cross_entropy(hidden, *parameters[:1], LABELS["none counts"], parameters[1]).backward()
    optimizer.step()
    assert all(map(torch.equal, before, parameters))
