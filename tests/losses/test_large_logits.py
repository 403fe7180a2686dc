"""Cross entropy of large logits close to each other: as exact as torch's float32, whose loss sees differences alone.

An lse of 30000 in float32 is off by up to 1e-3, and so would be losses and softmax that are differences from it.
"""

import functools
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import DTYPES
from compare import assert_error_ratio, narrow_in_triton, unavoidable
from processes import over_processes

import xentropy_cuda_lib
from flash_attn._ops import xentropy
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

ROWS, VOCAB = 7, 300
OFFSETS = [("fp32", x) for x in (0.0, 1e4, -1e4, 3e4, -3e4, 1e6, -1e6)]
OFFSETS += [(dtype, x) for dtype in ("fp16", "bf16") for x in (3e4, -3e4)] + [("bf16", 1e6)]
OPTIONS = [
    dict(),
    dict(label_smoothing=0.1),
    dict(label_smoothing=1.0, logit_scale=0.5),
    dict(lse_square_scale=1e-4, label_smoothing=0.1),
    dict(lse_square_scale=1e-4, logit_scale=0.7),
]


def draw(dtype, offset, device="cpu", rows=ROWS, vocab=VOCAB):
    """Logits near the offset, labels, and a gradient of the losses.

    In row 1 the first logits are far below, as if masked; in row 2 another is far above; row 3 does not count.
    """
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(rows, vocab, device=device, generator=generator) + offset
    logits[1, :40] -= 1e4
    logits[2, 7] += 50
    labels = torch.randint(40, vocab, (rows,), device=device, generator=generator)
    labels[3] = -100
    return logits.to(DTYPES[dtype]), labels, torch.randn(rows, device=device, generator=generator)


def in_torch(logits, labels, dlosses, label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0):
    """Losses and dlogits by torch's cross entropy in the dtype of the logits, and a z-loss in float64."""
    kept = labels != -100
    leaf = logits.detach().clone().requires_grad_()
    losses = F.cross_entropy(leaf * logit_scale, labels, label_smoothing=label_smoothing, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, leaf, dlosses.to(losses.dtype))
    scores = logits.double() * logit_scale
    lse = scores.logsumexp(1)
    slope = 2 * lse_square_scale * lse * kept * dlosses * logit_scale
    return losses.detach() + lse_square_scale * lse.square() * kept, dlogits + slope[:, None] * scores.softmax(1)


def assert_as_exact_as_torch(found, logits, labels, dlosses, options, narrow=torch.Tensor.to):
    exact = in_torch(logits.double(), labels, dlosses.double(), **options)
    baseline = in_torch(logits.float(), labels, dlosses, **options)
    for name, ours, right, plain in zip(("losses", "dlogits"), found, exact, baseline, strict=True):
        plus = unavoidable(right, ours.dtype, terms=4 * (1 + right.abs().max().item()))
        assert_error_ratio(ours, right, narrow(plain, ours.dtype), plus=plus, name=name)


def by_function(logits, labels, dlosses, gradient_in_forward=False, **options):
    leaf = logits.detach().clone().requires_grad_()
    losses, _ = cross_entropy_loss(leaf, labels, **options, gradient_in_forward=gradient_in_forward)
    return losses.detach(), torch.autograd.grad(losses, leaf, dlosses)[0]


def by_op_for_both_directions(logits, labels, dlosses, **options):
    options = dict(label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0) | options
    losses, _, _, _, dlogits = xentropy.fwd_bwd(dlosses, logits, labels, *options.values(), -100, 0, logits.shape[1])
    return losses, dlogits


def in_triton(logits, labels, dlosses, **options):
    kernels = importlib.import_module("flash_attn._triton.xentropy")
    options = dict(label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0) | options
    losses, _, _, _, dlogits = kernels.fwd_bwd(dlosses, logits, labels, *options.values(), -100, 0, logits.shape[1])
    return losses, dlogits


def in_operations_that_autograd_knows(logits, labels, dlosses, **options):
    """As for transforms of torch.func."""

    def losses_of(x):
        return cross_entropy_loss(x, labels, **options)[0]

    losses, pull_back = torch.func.vjp(losses_of, logits)
    return losses, pull_back(dlosses)[0]


WAYS = [
    by_function,
    functools.partial(by_function, gradient_in_forward=True),
    by_op_for_both_directions,
    in_operations_that_autograd_knows,
    in_triton,
]


@pytest.mark.parametrize("way", WAYS, ids=["function", "in-forward", "both", "transform", "triton"])
@pytest.mark.parametrize(("dtype", "offset"), OFFSETS)
@pytest.mark.cover(2)
def test_losses_and_gradient(dtype, offset, way, device):
    if way is in_triton:
        pytest.importorskip("triton")
    logits, labels, dlosses = draw(dtype, offset, device)
    for options in OPTIONS:
        found = way(logits, labels, dlosses, **options)
        narrow = narrow_in_triton if way is in_triton else torch.Tensor.to
        assert_as_exact_as_torch(found, logits, labels, dlosses, options, narrow)


@pytest.mark.parametrize("vocab", [3, 70, 5003, 70_000])
def test_rows_of_any_length(vocab, device):
    """Which lanes of a warp, a block or a cluster share, each with a largest logit of its own."""
    logits, labels, dlosses = draw("fp32", 3e4, device, rows=4, vocab=vocab + 60)
    logits, labels = logits[:, 57:-3], (labels - 57).clamp(0, vocab - 1)
    labels[3] = -100
    for way in (by_function, by_op_for_both_directions):
        for options in OPTIONS[1:4]:
            assert_as_exact_as_torch(way(logits, labels, dlosses, **options), logits, labels, dlosses, options)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1], OPTIONS[4]], ids=str)
def test_second_derivative_and_tangent(options, device):
    logits, labels, dlosses = draw("fp32", 3e4, device, vocab=60)

    def derivatives(x, function):
        x = x.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(function(x), x, dlosses.to(x.dtype), create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return second, torch.func.jvp(function, (x.detach(),), (torch.ones_like(x).cumsum(1).sin(),))[1]

    def exact(x):
        lse = (x * options.get("logit_scale", 1.0)).logsumexp(1)
        z_losses = options.get("lse_square_scale", 0.0) * lse.square() * (labels != -100)
        others = dict(ignore_index=-100, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
        return F.cross_entropy(x * options.get("logit_scale", 1.0), labels, **others) + z_losses

    found = derivatives(logits, lambda x: cross_entropy_loss(x, labels, **options)[0])
    for ours, right in zip(found, derivatives(logits.double(), exact), strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("offset", [0.0, 3e4, -1e6])
def test_linear(offset, reduction, device):
    """With a weight that copies its input, the gradient of hidden is that of the logits."""
    logits, labels, _ = draw("fp32", offset, device)
    for options in OPTIONS:
        hidden, weight = logits.clone().requires_grad_(), torch.eye(VOCAB, device=device)
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_size=4, **options)
        (dhidden,) = torch.autograd.grad(loss, hidden)
        each = torch.ones(ROWS, device=device) / (ROWS - 1 if reduction == "mean" else 1)
        exact = in_torch(logits.double(), labels, each.double(), **options)
        baseline = in_torch(logits, labels, each, **options)
        for name, ours, right, plain in zip(
            ("loss", "dhidden"),
            (loss.detach(), dhidden),
            (exact[0] @ each.double(), exact[1]),
            (baseline[0] @ each.double(), baseline[1]),
            strict=True,
        ):
            plus = unavoidable(right, ours.dtype, terms=4 * (1 + right.abs().max().item()))
            assert_error_ratio(ours, right, plain, plus=plus, name=name)


def test_module_and_precomputed_lse(device):
    """An lse in float64 keeps what one in float32 would lose."""
    logits, labels, _ = draw("fp32", 3e4, device)
    right = F.cross_entropy(logits.double(), labels)
    lse = logits.double().logsumexp(1)
    for known in (None, lse):
        leaf = logits.clone().requires_grad_()
        loss = CrossEntropyLoss()(leaf, labels, known)
        loss.backward()
        torch.testing.assert_close(loss.detach().double(), right, rtol=1e-6, atol=0)
        torch.testing.assert_close(leaf.grad[0], exact_gradient(logits, labels)[0], rtol=1e-5, atol=1e-8)


def exact_gradient(logits, labels):
    leaf = logits.double().requires_grad_()
    return torch.autograd.grad(F.cross_entropy(leaf, labels), leaf)[0].float()


def check_parts(group):
    """Vocabularies that are divided, one of whose parts is padding alone in `linear_cross_entropy`."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    columns = slice(rank * VOCAB // world, (rank + 1) * VOCAB // world)
    for dtype, offset in OFFSETS:
        logits, labels, dlosses = draw(dtype, offset)
        for options in OPTIONS:
            part = logits[:, columns].clone().requires_grad_()
            losses, _ = cross_entropy_loss(part, labels, **options, process_group=group)
            (dpart,) = torch.autograd.grad(losses, part, dlosses)
            parts = [torch.empty_like(dpart) for _ in range(world)]
            dist.all_gather(parts, dpart)
            found = losses.detach(), torch.cat(parts, dim=1)
            assert_as_exact_as_torch(found, logits, labels, dlosses, options)
    logits, labels, _ = draw("fp32", 3e4)
    weight = torch.eye(VOCAB).repeat(2, 1)[rank * VOCAB : (rank + 1) * VOCAB]
    for options in OPTIONS:
        loss = linear_cross_entropy(
            logits, weight, labels, num_classes=VOCAB, process_group=group, sequence_parallel=False, **options
        )
        alone = linear_cross_entropy(logits, torch.eye(VOCAB), labels, **options)
        torch.testing.assert_close(loss, alone, rtol=1e-6, atol=1e-6)


def test_classes_divided_among_processes():
    over_processes(2, check_parts)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shim(smoothing, device):
    """Its backward gets an lse in float32; its losses need none."""
    logits, labels, _ = draw("fp32", 3e4, device)
    labels = labels.clamp(min=0)
    losses, lse = xentropy_cuda_lib.forward(logits, labels, smoothing)
    right = F.cross_entropy(logits.double(), labels, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(losses.double(), right, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, logits.double().logsumexp(1).float())


def check_masked_parts(group):
    """All columns of one process are -inf: a label among them has a loss of +inf, as without a group."""
    rank = dist.get_rank(group)
    logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(0))
    logits[:, 6:] = -torch.inf
    labels = torch.tensor([7, 0, -100])
    for options in (dict(), dict(label_smoothing=0.1), dict(lse_square_scale=0.01)):
        loss = CrossEntropyLoss(reduction="none", process_group=group, **options)
        whole = CrossEntropyLoss(reduction="none", **options)(logits, labels)
        torch.testing.assert_close(loss(logits[:, 6 * rank : 6 * rank + 6].contiguous(), labels), whole)


def test_masked_parts():
    over_processes(2, check_masked_parts)


@pytest.mark.parametrize("in_triton", [False, True])
def test_known_lse_of_a_masked_label(in_triton, device):
    if in_triton:
        pytest.importorskip("triton")
    fwd = importlib.import_module("flash_attn._triton.xentropy").fwd if in_triton else xentropy.fwd
    logits = torch.tensor([[-torch.inf, 1.0, 2.0], [1.0, 2.0, -torch.inf]], device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    lse = logits.double().logsumexp(-1)
    losses = fwd(logits, labels, lse, 0.0, 1.0, 0.0, -100, 0, 3)[0]
    torch.testing.assert_close(losses, F.cross_entropy(logits, labels, reduction="none"))
