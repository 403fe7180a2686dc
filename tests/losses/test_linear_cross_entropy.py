"""Cross entropy of a linear layer in chunks: against torch in float64, divided over processes, compiled."""

import functools
import weakref

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_error_ratio, rms_error, unavoidable
from processes import over_processes

from flash_attn import _library
from flash_attn.losses import _linear_head as linear_head
from flash_attn.losses import linear_cross_entropy as module
from flash_attn.losses.linear_cross_entropy import (
    LinearCrossEntropyLoss,
    cross_entropy_of_logits,
    linear_cross_entropy,
)

ROWS, FEATURES, VOCAB = 37, 16, 53


def inputs(dtype=torch.float32, device="cpu", bias=True):
    hidden = torch.randn(ROWS, FEATURES, device=device)
    weight = torch.randn(VOCAB, FEATURES, device=device)
    labels = torch.randint(VOCAB, (ROWS,), device=device)
    labels[::5] = -100
    tensors = (hidden, weight, torch.randn(VOCAB, device=device)) if bias else (hidden, weight)
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], labels


def plain(
    hidden,
    weight,
    labels,
    bias=None,
    *,
    num_classes=None,
    reduction="mean",
    logit_scale=1.0,
    lse_square_scale=0.0,
    label_smoothing=0.0,
    ignore_index=-100,
    softcap=0.0,
    token_weights=None,
):
    """The same with all logits, in the dtype of the arguments, the loss in float32 at least."""
    logits = F.linear(hidden, weight, bias)[..., :num_classes].flatten(0, -2)
    logits = logits.float() if logits.dtype != torch.float64 else logits
    logits = logit_scale * (softcap * torch.tanh(logits / softcap) if softcap > 0 else logits)
    labels = labels.flatten()
    options = dict(label_smoothing=label_smoothing, ignore_index=ignore_index, reduction="none")
    losses = F.cross_entropy(logits, labels.long(), **options)
    kept = labels != ignore_index
    losses = losses + lse_square_scale * logits.logsumexp(-1).square() * kept
    if token_weights is not None:
        kept = kept * token_weights.flatten().to(losses.dtype)
        losses = losses * kept
    if reduction == "none":
        return losses
    return losses.sum() / (kept.sum() if reduction == "mean" else 1)


def with_gradients(function, tensors, labels, dloss=1.0, **options):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    hidden, weight, *bias = tensors
    loss = function(hidden, weight, labels, *bias, **options)
    incoming = torch.full_like(loss, dloss) * torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, tensors, incoming.to(loss.dtype))]


TOKEN_WEIGHTS = torch.linspace(-0.5, 2, ROWS)
OPTIONS = [
    dict(),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(reduction="none", softcap=2.0, num_classes=50, label_smoothing=0.1, logit_scale=0.5),
    dict(token_weights=TOKEN_WEIGHTS, lse_square_scale=1e-2),
    dict(token_weights=TOKEN_WEIGHTS, reduction="sum"),
    dict(token_weights=TOKEN_WEIGHTS, reduction="none", ignore_index=3),
    dict(num_classes=50),
    dict(label_smoothing=0.1, num_classes=50),
    dict(lse_square_scale=1e-2, logit_scale=0.5),
    dict(ignore_index=3),
    dict(softcap=2.0, num_classes=50, logit_scale=1.5, label_smoothing=0.1),
]


def inputs_for(options, device):
    """`inputs` with labels that are classes of these options, or their ignore_index."""
    tensors, labels = inputs(device=device)
    labels[(labels < 0) | (labels >= options.get("num_classes", VOCAB))] = options.get("ignore_index", -100)
    return tensors, labels


def name_of(options):
    return "-".join(f"{key}={'some' if key == 'token_weights' else value}" for key, value in options.items()) or "plain"


@pytest.mark.parametrize("chunk_size", [None, 1, 10, 37, 100])
@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_loss_and_gradients(options, chunk_size, device):
    options = on(device, options)
    tensors, labels = inputs_for(options, device)
    exact = with_gradients(plain, [tensor.double() for tensor in tensors], labels, 0.7, **options)
    baseline = with_gradients(plain, tensors, labels, 0.7, **options)
    found = with_gradients(linear_cross_entropy, tensors, labels, 0.7, chunk_size=chunk_size, **options)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other, plus=unavoidable(right, one.dtype, terms=16 * ROWS))  # losses up to 16


def on(device, options):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


@pytest.mark.parametrize("chunk_size", [None, 10])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(reduction="none", num_classes=50, logit_scale=0.5), dict(lse_square_scale=1e-2)],
    ids=name_of,
)
def test_softcap_as_kernels_have_it(options, chunk_size, monkeypatch, device):
    """On a GPU they apply it as they read logits."""
    monkeypatch.setattr(module.log_probs, "cap_in_kernels", lambda x: True)
    tensors, labels = inputs(device=device)
    labels[labels >= 50] = -100
    options = options | dict(softcap=2.0)
    exact = with_gradients(plain, [tensor.double() for tensor in tensors], labels, 0.7, **options)
    baseline = with_gradients(plain, tensors, labels, 0.7, **options)
    found = with_gradients(linear_cross_entropy, tensors, labels, 0.7, chunk_size=chunk_size, **options)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other, plus=unavoidable(right, one.dtype, terms=16 * ROWS))


def of_logits(hidden, weight, labels, bias, **options):
    """The same where a layer has given the logits."""
    return cross_entropy_of_logits(F.linear(hidden, weight, bias), labels, **options)


@pytest.mark.parametrize("options", OPTIONS, ids=name_of)
def test_loss_of_logits(options, device):
    options = on(device, options)
    tensors, labels = inputs_for(options, device)
    found = with_gradients(of_logits, tensors, labels, 0.7, **options)
    expected = with_gradients(linear_cross_entropy, tensors, labels, 0.7, **options)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    hidden, weight, bias = (tensor.detach() for tensor in tensors)
    of_call = {name: value for name, value in options.items() if name in ("softcap", "token_weights")}
    of_loss = {name: value for name, value in options.items() if name not in of_call}
    loss_fn = LinearCrossEntropyLoss(**of_loss, return_z_loss=True, chunk_size=10)
    both = loss_fn.of_logits(F.linear(hidden, weight, bias), labels, **of_call)
    torch.testing.assert_close(both, loss_fn(hidden, weight, labels, bias, **of_call))


@pytest.mark.parametrize("chunk_size", [16, None])
@pytest.mark.parametrize(
    "options",
    [dict(), dict(softcap=5.0), dict(reduction="none"), dict(reduction="sum", token_weights=TOKEN_WEIGHTS / 2**20)],
    ids=name_of,
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype, options, chunk_size, device):
    options = on(device, options)
    tensors, labels = inputs(dtype, device)
    # In float16, gradients that are small until a scale of the loss makes up for it must not vanish before.
    dloss = 2.0**20 if "token_weights" in options else 1.0
    exact = with_gradients(plain, [tensor.double() for tensor in tensors], labels, dloss, **options)
    baseline = with_gradients(plain, tensors, labels, dloss, **options)
    found = with_gradients(linear_cross_entropy, tensors, labels, dloss, chunk_size=chunk_size, **options)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other)


@pytest.mark.parametrize("chunk_size", [None, 512])
def test_small_gradients_in_float16(chunk_size, device):
    """Over many rows those of a mean are below what float16 has, until a scale of the loss makes up for it.

    Classes are rare, so that the gradients of their logits, divided by the rows, are below 6e-8, the least of float16.
    """
    rows = 4096
    tensors = [torch.randn(*shape, device=device) for shape in ((rows, 8), (11, 8), (11,))]
    tensors[2] -= torch.linspace(0, 16, 11, device=device)
    tensors = [x.half() for x in tensors]
    labels = torch.randint(3, (rows,), device=device)
    exact = with_gradients(plain, [x.double() for x in tensors], labels, 2.0**14)
    baseline = with_gradients(plain, tensors, labels, 2.0**14)
    found = with_gradients(linear_cross_entropy, tensors, labels, 2.0**14, chunk_size=chunk_size)
    rare = slice(8, None)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other)
    for one, right, other in zip(found[2:], exact[2:], baseline[2:], strict=True):
        assert rms_error(one[rare], right[rare]) <= 1.5 * rms_error(other[rare], right[rare])


def test_autocast(device):
    tensors, labels = inputs(device=device)
    exact = with_gradients(plain, [tensor.bfloat16().double() for tensor in tensors], labels)
    baseline = with_gradients(plain, [tensor.bfloat16() for tensor in tensors], labels)
    with torch.autocast(device.type, torch.bfloat16):
        found = with_gradients(linear_cross_entropy, tensors, labels, chunk_size=16)
    assert all(each.dtype == torch.float32 for each in found)
    for one, right, other in zip(found, exact, baseline, strict=True):
        assert_error_ratio(one, right, other)


def test_z_loss_and_shapes(device):
    (hidden, weight), labels = inputs(device=device, bias=False)
    loss_fn = LinearCrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True)
    loss, z_loss = loss_fn(hidden[:36].view(4, 9, -1), weight, labels[:36].view(4, 9))
    kept = labels[:36] != -100
    expected = 0.1 * F.linear(hidden, weight)[:36].logsumexp(-1).square()[kept].mean()
    torch.testing.assert_close(z_loss, expected.detach())
    assert not z_loss.requires_grad and loss.requires_grad
    assert loss.item() > z_loss.item()


def test_one_gradient_at_a_time(device):
    """What needs no gradient gets none, and the others are the same."""
    tensors, labels = inputs(device=device)
    _, *expected = with_gradients(linear_cross_entropy, tensors, labels)
    for i in range(3):
        each = [tensor.detach().requires_grad_(i == j) for j, tensor in enumerate(tensors)]
        linear_cross_entropy(each[0], each[1], labels, each[2]).backward()
        assert [x.grad is not None for x in each] == [i == j for j in range(3)]
        torch.testing.assert_close(each[i].grad, expected[i], rtol=1e-6, atol=1e-7)


def test_nothing_is_computed_for_gradients_that_nobody_wants(monkeypatch, device):
    (hidden, weight), labels = inputs(device=device, bias=False)
    expected = linear_cross_entropy(hidden, weight, labels).detach()
    for op in ("bwd_", "fwd_bwd_"):
        monkeypatch.setattr(module.xentropy, op, None)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = linear_cross_entropy(hidden, weight, labels)
        assert torch.equal(loss, expected) and not loss.requires_grad
    assert torch.equal(linear_cross_entropy(hidden.detach(), weight.detach(), labels), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_do_not_count_are_not_looked_at(value, device, monkeypatch):
    monkeypatch.setattr(_library, "can_be_read_at_once", lambda x: False)  # as for labels on a GPU
    tensors, labels = inputs(device=device)
    labels[3], labels[4] = VOCAB, -1
    expected = with_gradients(linear_cross_entropy, tensors, labels)
    with torch.no_grad():
        tensors[0][0] = tensors[0][3] = tensors[0][4] = value
    found = with_gradients(linear_cross_entropy, tensors, labels)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    weights = torch.where((labels < 0) | (labels == VOCAB), value, 1.0)
    for dtype in (torch.float32, torch.float16):
        narrow = [tensor.to(dtype) for tensor in tensors]
        weighed = with_gradients(linear_cross_entropy, narrow, labels, token_weights=weights)
        for one, other in zip(weighed, with_gradients(linear_cross_entropy, narrow, labels), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", [dict(), dict(num_classes=50, reduction="sum", label_smoothing=0.1)], ids=str)
def test_transforms_of_torch_func(options, device):
    """Gradients of each sample, a second derivative and a tangent, none of which the fast way has."""
    tensors, labels = inputs(device=device)
    hidden, weight, bias = (tensor.detach() for tensor in tensors)
    labels[labels >= 50] = -100
    samples, of_samples = hidden[:36].view(4, 9, -1), labels[:36].view(4, 9)

    def by(function):
        def loss(weight, hidden, labels):
            return function(hidden, weight, labels, bias, **options)

        return (
            torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weight, samples, of_samples),
            torch.func.grad(lambda x: torch.func.grad(loss)(x, hidden, labels).square().sum())(weight),
            torch.func.jvp(lambda x: loss(weight, x, labels), (hidden,), (torch.ones_like(hidden),))[1],
        )

    for one, other in zip(by(functools.partial(linear_cross_entropy, chunk_size=4)), by(plain), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("index", range(3))
def test_no_second_derivative(index, device):
    """It is refused for each argument, whichever the gradient is of."""
    tensors, labels = inputs(device=device)
    hidden, weight, bias = (tensor.detach().requires_grad_(i == index) for i, tensor in enumerate(tensors))
    loss = linear_cross_entropy(hidden, weight, labels, bias)
    (gradient,) = torch.autograd.grad(loss, [(hidden, weight, bias)[index]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_twice(dtype, reduction, device):
    """What the first returns is not what the second multiplies, even if its owner writes to it."""
    (hidden, weight), labels = inputs(dtype, device=device, bias=False)
    loss = 0.5 * linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    copies = [x.clone() for x in first]
    for x in first:
        x.zero_()
    second = torch.autograd.grad(loss, [hidden, weight])
    assert all(torch.equal(one, other) for one, other in zip(copies, second))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_loss_may_be_overwritten(reduction, device):
    """As trainers do that scale it."""
    (hidden, weight), labels = inputs(device=device, bias=False)
    expected = with_gradients(linear_cross_entropy, [hidden, weight], labels, 0.5, reduction=reduction)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction)
    loss *= 0.5 * torch.linspace(1, 2, loss.numel(), device=device).view(loss.shape)
    found = torch.autograd.grad(loss.sum(), [hidden, weight])
    torch.testing.assert_close(found, tuple(expected[1:]))


def test_gradients_of_the_forward_are_returned_as_they_are(monkeypatch, device):
    """One backward has them to itself: it scales them where they are, by a kernel that reads nothing for 1."""
    scaled = []
    real = module.xentropy.scale_
    monkeypatch.setattr(module.xentropy, "scale_", lambda x, *args: scaled.append(x.data_ptr()) or real(x, *args))
    (hidden, weight), labels = inputs(torch.bfloat16, device=device, bias=False)
    linear_cross_entropy(hidden, weight, labels).backward()
    assert {hidden.grad.data_ptr(), weight.grad.data_ptr()} <= set(scaled)


@pytest.mark.parametrize("dloss", [1.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_behind_hooks_and_batches_of_them(dtype, dloss, device):
    """Saved tensors that something else keeps, and incoming gradients that are several at once, are not overwritten."""
    (hidden, weight), labels = inputs(dtype, device=device, bias=False)
    expected = with_gradients(linear_cross_entropy, [hidden, weight], labels, dloss)[1:]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append((x, x.clone())) or x, lambda x: x):
        loss = linear_cross_entropy(hidden, weight, labels)
    found = torch.autograd.grad(loss, [hidden, weight], torch.full_like(loss, dloss))
    assert all(torch.equal(x, copy) for x, copy in kept)
    torch.testing.assert_close(found, tuple(expected))
    checkpointed = torch.utils.checkpoint.checkpoint(linear_cross_entropy, hidden, weight, labels, use_reentrant=False)
    found = torch.autograd.grad(checkpointed, [hidden, weight], torch.full_like(loss, dloss))
    torch.testing.assert_close(found, tuple(expected))
    loss = linear_cross_entropy(hidden, weight, labels)
    several = torch.autograd.grad(loss, [hidden, weight], torch.stack([loss, loss]) * 0 + dloss, is_grads_batched=True)
    for one, other in zip(several, expected, strict=True):
        torch.testing.assert_close(one, torch.stack([other, other]))


def test_nothing_to_do(device):
    (hidden, weight), labels = inputs(device=device, bias=False)
    assert linear_cross_entropy(hidden[:0], weight, labels[:0]).isnan()
    assert linear_cross_entropy(hidden[:0], weight, labels[:0], reduction="sum") == 0
    assert linear_cross_entropy(hidden, weight, torch.full_like(labels, -100)).isnan()


@pytest.mark.parametrize("kind", [float, numpy.int64, torch.tensor])
def test_sizes_may_be_any_whole_number(kind, device):
    (hidden, weight), labels = inputs(device=device, bias=False)
    labels = labels.clamp(max=49)
    expected = linear_cross_entropy(hidden, weight, labels, num_classes=50, chunk_size=10)
    found = linear_cross_entropy(hidden, weight, labels, num_classes=kind(50), chunk_size=kind(10))
    assert torch.equal(found, expected)


def test_odd_but_legal():
    """Tensors without dimensions and whole floats are numbers; but a number that is learned would not be."""
    (hidden, weight), labels = inputs(bias=False)
    usual = dict(label_smoothing=0.5, logit_scale=2.0, lse_square_scale=0.25, softcap=30.0)
    odd = {name: torch.tensor(value) for name, value in usual.items()} | dict(ignore_index=-100.0)
    assert torch.equal(
        linear_cross_entropy(hidden, weight, labels, **odd), linear_cross_entropy(hidden, weight, labels, **usual)
    )
    for name, value in usual.items():
        learned = torch.tensor(value, requires_grad=True)
        with pytest.raises(ValueError, match=f"{name} must not require grad, since no gradient is computed for it"):
            linear_cross_entropy(hidden, weight, labels, **{name: learned})


@pytest.mark.parametrize(
    ("options", "tokens", "sizes"),
    [
        (dict(), 300, [300]),  # the logits take fewer bytes than sums of the gradient in float32
        (dict(), 3000, [1024, 1024, 952]),  # more tokens than features
        (dict(chunk_bytes=200 * VOCAB * 4), 300, [128, 128, 44]),
        (dict(chunk_bytes=508 * VOCAB, softcap=1.0), 300, [100, 100, 100]),  # what it needs counts, too
        (dict(chunk_bytes=1000 * VOCAB * 4), 300, [300]),
        (dict(chunk_bytes=VOCAB * 4), 3, [1, 1, 1]),
        (dict(chunk_size=299), 300, [299, 1]),
    ],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_rows_at_a_time(reduction, options, tokens, sizes, monkeypatch, device):
    """Logits are never those of more rows, forward and backward, and results are the same."""
    found, before = [], lambda: None
    real = linear_head.linear.product

    def product(*args):
        nonlocal before
        assert before() is None, "the logits of the chunk before are still there"
        found.append(len(args[0]))
        logits = real(*args)
        before = weakref.ref(logits)
        return logits

    monkeypatch.setattr(linear_head.linear, "product", product)
    monkeypatch.setattr(linear_head.xentropy, "bytes_of_logits", lambda *_: 0)
    tensors = torch.randn(tokens, 1024, device=device), torch.randn(VOCAB, 1024, device=device) / 32
    labels = torch.randint(VOCAB, (tokens,), device=device)
    results = with_gradients(linear_cross_entropy, tensors, labels, reduction=reduction, **options)
    assert found == sizes * (2 if reduction == "none" else 1)
    of_plain = {name: value for name, value in options.items() if name == "softcap"}
    expected = with_gradients(plain, tensors, labels, reduction=reduction, **of_plain)
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_few_logits_where_nothing_needs_more(monkeypatch, device):
    """Without sums of a gradient of the weight, more logits at a time would only take memory."""
    monkeypatch.setattr(linear_head, "BYTES", 128 * VOCAB * 4)
    found = []
    real = linear_head.linear.product
    monkeypatch.setattr(linear_head.linear, "product", lambda *args: found.append(len(args[0])) or real(*args))
    hidden, weight = torch.randn(300, 1024, device=device), torch.randn(VOCAB, 1024, device=device)
    labels = torch.zeros(300, dtype=int, device=device)
    linear_cross_entropy(hidden.requires_grad_(), weight, labels).backward()
    with torch.no_grad():
        linear_cross_entropy(hidden, weight.requires_grad_(), labels)
    assert found == [128, 128, 44] * 2


def test_compiled(device):
    tensors, labels = inputs(device=device)
    expected = with_gradients(linear_cross_entropy, tensors, labels, chunk_size=16)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = with_gradients(compiled, tensors, labels, chunk_size=16)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(labels=torch.zeros(5, dtype=torch.int64)), ValueError, r"labels must have shape \(37,\), found \(5,\)"),
        (dict(labels=torch.zeros(37)), TypeError, "labels must have dtype torch.int32 or torch.int64"),
        (dict(labels=torch.arange(37) + 20), ValueError, "labels must be -100 or from 0 to 52, found 53"),
        (dict(weight=torch.randn(53, 8)), ValueError, r"weight must have shape \(\*, 16\), found \(53, 8\)"),
        (dict(weight=torch.randn(53, 16).half()), TypeError, "weight must have dtype torch.float32"),
        (dict(bias=torch.randn(5)), ValueError, r"bias must have shape \(53,\)"),
        (dict(num_classes=54), ValueError, "num_classes must be from 1 to 53, the rows of the weight, found 54"),
        (dict(chunk_size=0), ValueError, "chunk_size must be positive, found 0"),
        (dict(chunk_bytes=211), ValueError, "chunk_bytes must be at least 212, the logits of a token, found 211"),
        (dict(chunk_bytes="1 GB"), TypeError, "chunk_bytes must be an integer, found str"),
        (dict(chunk_bytes=2**20, chunk_size=5), ValueError, "chunk_size must be None with chunk_bytes, found 5 and 10"),
        (dict(token_weights=torch.ones(5)), ValueError, r"token_weights must have shape \(37,\), found \(5,\)"),
        (dict(token_weights=torch.ones(37).long()), TypeError, "token_weights must have dtype torch.float32"),
        (dict(token_weights=torch.ones(37).requires_grad_()), ValueError, "token_weights must not require grad"),
        (dict(reduction="max"), ValueError, "reduction must be 'mean', 'sum' or 'none', found 'max'"),
        (dict(label_smoothing=2.0), ValueError, "label_smoothing must be between 0 and 1, found 2.0"),
        (dict(softcap=-1.0), ValueError, "softcap must be at least 0, found -1.0"),
        (dict(softcap="30"), TypeError, "softcap must be a real number, found str"),
    ],
)
def test_errors(change, error, says):
    (hidden, weight, bias), labels = inputs()
    arguments = dict(hidden=hidden, weight=weight, labels=labels, bias=bias) | change
    with pytest.raises(error, match=says):
        linear_cross_entropy(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(logits=[1.0]), TypeError, "logits must be a torch.Tensor, found list"),
        (dict(logits=torch.randn(37, 53).double()), TypeError, "logits must have dtype torch.float32"),
        (dict(logits=torch.randn(53)), ValueError, "the number of dimensions of logits must be at least 2, found 1"),
        (dict(labels=torch.zeros(5, dtype=torch.int64)), ValueError, r"labels must have shape \(37,\), found \(5,\)"),
        (dict(labels=torch.arange(37) - 1), ValueError, "labels must be -100 or from 0 to 52, found -1"),
        (dict(num_classes=54), ValueError, "num_classes must be from 1 to 53, the logits, found 54"),
        (dict(reduction="max"), ValueError, "reduction must be 'mean', 'sum' or 'none', found 'max'"),
        (dict(softcap=-1.0), ValueError, "softcap must be at least 0, found -1.0"),
    ],
)
def test_errors_of_logits(change, error, says):
    arguments = dict(logits=torch.randn(37, 53), labels=torch.zeros(37, dtype=torch.int64)) | change
    with pytest.raises(error, match=says):
        cross_entropy_of_logits(**arguments)


def check_parallel(group):
    torch.manual_seed(0)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    hidden, weight, bias = torch.randn(40, FEATURES), torch.randn(56, FEATURES), torch.randn(56)
    labels = torch.randint(50, (40,))
    labels[::7] = -100
    some = dict(token_weights=torch.linspace(-0.5, 2, 40))
    for options in (
        dict(),
        dict(label_smoothing=0.1, lse_square_scale=1e-2),
        dict(reduction="sum"),
        dict(softcap=2.0),
        dict(reduction="none", **some),
        some,
    ):
        options |= dict(num_classes=50, chunk_size=12)
        expected = with_gradients(linear_cross_entropy, [hidden, weight, bias], labels, **options)
        rows = slice(rank * 56 // world, (rank + 1) * 56 // world)
        for sequence_parallel in (False, True):
            own = hidden.chunk(world)[rank] if sequence_parallel else hidden
            options |= dict(process_group=group, sequence_parallel=sequence_parallel)
            found = with_gradients(linear_cross_entropy, [own, weight[rows], bias[rows]], labels, **options)
            dhidden = expected[1].chunk(world)[rank] if sequence_parallel else expected[1]
            for one, other in zip(found, [expected[0], dhidden, expected[2][rows], expected[3][rows]], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        del options["sequence_parallel"], options["chunk_size"]
        loss, _, *grads = with_gradients(of_logits, [hidden, weight[rows], bias[rows]], labels, **options)
        for one, other in zip((loss, *grads), (expected[0], expected[2][rows], expected[3][rows]), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_divided_vocabulary(processes):
    over_processes(processes, check_parallel)


def test_a_softcap_is_applied_alike_with_and_without_gradients(device):
    """In float32, also where its reciprocal is no number of 16 bits."""
    hidden, weight = (torch.randn(n, 64, device=device).bfloat16() * 3 for n in (20, VOCAB))
    labels = torch.randint(VOCAB, (20,), device=device)
    for smoothing in (0.0, 0.1):
        options = dict(softcap=30.0, label_smoothing=smoothing)
        expected = linear_cross_entropy(hidden, weight, labels, **options)
        found = linear_cross_entropy(hidden.requires_grad_(), weight, labels, **options).detach()
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        hidden = hidden.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [[0.0] * 6, [1.0, -1.0, 0.0, 0.0, 2.0, -2.0]], ids=["zeros", "sum of zero"])
def test_a_mean_by_weights_whose_sum_is_zero_has_a_gradient_of_zero(weights, dtype, device):
    labels, token_weights = torch.arange(6, device=device), torch.tensor(weights, device=device)
    hidden, weight = (torch.randn(n, 16, device=device).to(dtype).requires_grad_() for n in (6, VOCAB))
    losses = [linear_cross_entropy(hidden, weight, labels, token_weights=token_weights)]
    losses.append(cross_entropy_of_logits(F.linear(hidden, weight), labels, token_weights=token_weights))
    for loss in losses:
        assert loss.isnan()
        assert all((x == 0).all() for x in torch.autograd.grad(loss, (hidden, weight)))


def test_a_large_logit_scale_in_float16(device):
    hidden, weight = (torch.randn(n, 32, device=device).half() * 0.01 for n in (40, VOCAB))
    labels = torch.randint(VOCAB, (40,), device=device)
    options = dict(logit_scale=400.0, lse_square_scale=1e-2)
    found = with_gradients(linear_cross_entropy, (hidden, weight), labels, **options)
    exact = with_gradients(plain, (hidden.double(), weight.double()), labels, **options)
    for one, right in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), right, rtol=2e-2, atol=1e-4)
