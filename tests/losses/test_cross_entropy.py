"""Cross entropy: the functions, their gradients, the module, several processes, the errors, traps of kernels."""

import dataclasses
import functools
import importlib
import zlib

import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, params, sample
from compare import assert_error_ratio, assert_same_but_for_rounding, identical, narrow_in_triton, unavoidable
from processes import compiled_on_last, over_processes
from recorder import Recorder
from torch.utils.checkpoint import checkpoint

import xentropy_cuda_lib
from flash_attn._ops import collectives, xentropy
from flash_attn._reference import xentropy as reference
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
from flash_attn.ops.triton import cross_entropy as functional
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

LAYOUTS = ["contiguous", "sliced", "shifted", "transposed"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch of logits and labels. `str(case)` is its id and seeds its tensors."""

    rows: int = 9
    vocab: int = 1000
    dtype: str = "bf16"
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    lse_square_scale: float = 0.0
    labels: str = "int64"  # or "int32"
    strays: bool = True  # whether some labels are the ignore index, or no class
    layout: str = "contiguous"
    size: float = 1.0  # standard deviation of the logits

    def __str__(self):
        parts = [
            f"{self.rows}x{self.vocab}-{self.dtype}-{self.labels}",
            f"smooth{self.label_smoothing:g}" * (self.label_smoothing > 0),
            f"scale{self.logit_scale:g}" * (self.logit_scale != 1),
            f"z{self.lse_square_scale:g}" * (self.lse_square_scale > 0),
            "strays" * self.strays,
            self.layout * (self.layout != "contiguous"),
            f"size{self.size:g}" * (self.size != 1),
        ]
        return "-".join(part for part in parts if part)

    def draw(self, device):
        """Logits, labels and a gradient for the losses, one number of which is NaN where a row is ignored."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(str(self).encode()))
        random = functools.partial(torch.randn, device=device, generator=generator)
        logits = laid_out((self.size * random(self.rows, self.vocab)).to(DTYPES[self.dtype]), self.layout)
        labels = torch.randint(max(self.vocab, 1), (self.rows,), device=device, generator=generator)
        dlosses = random(self.rows)
        if self.strays:
            for row, label in ((1, -100), (4, self.vocab), (5, -1)):
                labels[row : row + 1], dlosses[row : row + 1] = label, float("nan")
        return logits, labels.to({"int64": torch.int64, "int32": torch.int32}[self.labels]), dlosses

    @property
    def options(self):
        return {name: getattr(self, name) for name in ("label_smoothing", "logit_scale", "lse_square_scale")}


def laid_out(logits, layout):
    """The same logits in other strides, among NaN."""
    if layout == "contiguous":
        return logits
    if layout == "transposed":
        return logits.t().contiguous().t()
    nan = torch.full_like(logits[:, :1], float("nan"))
    return torch.cat([logits, nan], dim=1)[:, :-1] if layout == "sliced" else torch.cat([nan, logits], dim=1)[:, 1:]


def expected(logits, labels, dlosses, options):
    """Losses, z-losses and gradients of the oracle, in the dtype of the logits given."""
    leaf = logits.detach().clone().requires_grad_()
    losses, z_losses = oracle.cross_entropy(leaf, labels, **options)
    (dlogits,) = torch.autograd.grad(losses, leaf, dlosses.to(losses.dtype).nan_to_num())
    return losses.detach(), z_losses.detach(), dlogits


def assert_matches(found, logits, labels, dlosses, options, narrow=torch.Tensor.to):
    """found: losses, z_losses and dlogits. The baseline has float32 maths, and rounds the gradient with `narrow`."""
    exact = expected(logits.double(), labels, dlosses.double(), options)
    baseline = expected(logits.float(), labels, dlosses.float(), options)
    for name, ours, right, plain in zip(("losses", "z_losses", "dlogits"), found, exact, baseline, strict=True):
        size = right.abs().max().item() if right.numel() else 0
        plus = unavoidable(right, ours.dtype, terms=4 * (1 + size))
        assert_error_ratio(ours, right, narrow(plain, ours.dtype), plus=plus, name=name)


EDGES = [
    Case(vocab=1, strays=False),
    *(
        Case(vocab=1, rows=300, dtype=dtype, strays=False, label_smoothing=smoothing, logit_scale=scale, size=10.0)
        for dtype, smoothing, scale in (("fp32", 0.1, 0.7), ("bf16", 0.9, 3.0), ("fp32", 0.3, 1.0))
    ),
    Case(rows=1, vocab=2, dtype="fp16", label_smoothing=0.1, logit_scale=3.0, size=100.0, strays=False),
    Case(rows=1, vocab=2, label_smoothing=0.1, logit_scale=0.7, size=100.0, strays=False),
    Case(vocab=7, dtype="fp16"),
    Case(rows=1, vocab=33, strays=False, layout="shifted"),
    Case(vocab=8193, dtype="fp32", label_smoothing=0.1),
    Case(vocab=50257, size=10.0),
    Case(vocab=50257, layout="sliced", label_smoothing=1.0),
    Case(rows=6, vocab=128256, dtype="fp16", lse_square_scale=1e-2, logit_scale=0.7),
    Case(rows=6, vocab=131072, dtype="fp32", label_smoothing=0.9, size=10.0),
    Case(rows=300, vocab=70),
    Case(rows=6, vocab=300_000, label_smoothing=0.1),
    Case(rows=6, vocab=500_001, dtype="fp32"),
]
FACTORS = dict(
    vocab=[5, 64, 1000, 4099, 20000],
    dtype=["fp32", "fp16", "bf16"],
    label_smoothing=[0.0, 0.1, 0.9],
    logit_scale=[1.0, 0.7, 3.0],
    lse_square_scale=[0.0, 1e-2],
    labels=["int64", "int32"],
    strays=[False, True],
    layout=LAYOUTS,
    size=[1.0, 10.0],
)
CASES = params(EDGES) + [param for param in sample(FACTORS, Case) if param.id not in map(str, EDGES)]


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradient(case, device):
    logits, labels, dlosses = case.draw(device)
    before = logits.clone()
    losses, z_losses = cross_entropy_loss(logits.requires_grad_(), labels, **case.options)
    (dlogits,) = torch.autograd.grad(losses, logits, dlosses)
    assert losses.dtype == z_losses.dtype == torch.float32 and dlogits.dtype == logits.dtype
    assert not z_losses.requires_grad
    assert identical(logits, before)
    found = losses.detach(), z_losses, dlogits
    assert_matches(found, before, labels, dlosses, case.options)


@pytest.mark.parametrize("case", CASES)
def test_in_place_gradient_is_the_same_in_the_memory_of_the_logits(case, device):
    logits, labels, dlosses = case.draw(device)
    leaf = logits.requires_grad_()
    losses, _ = cross_entropy_loss(leaf, labels, **case.options)
    (right,) = torch.autograd.grad(losses, leaf, dlosses)
    again, _ = cross_entropy_loss(leaf, labels, **case.options, inplace_backward=True)
    (dlogits,) = torch.autograd.grad(again, leaf, dlosses)
    assert identical(again, losses)
    assert identical(dlogits, right)
    if case.layout != "transposed":  # whose copy is overwritten
        assert dlogits.data_ptr() == leaf.data_ptr()


# Both directions at once.


@pytest.mark.parametrize("case", CASES)
def test_gradient_in_forward(case, device):
    """For the dlosses that are expected, 1, and for others."""
    logits, labels, dlosses = case.draw(device)
    dlosses[::2] = 1
    leaf = logits.detach().requires_grad_()
    losses, z_losses = cross_entropy_loss(leaf, labels, **case.options, gradient_in_forward=True)
    (dlogits,) = torch.autograd.grad(losses, leaf, dlosses)
    assert_matches((losses.detach(), z_losses, dlogits), logits, labels, dlosses, case.options)
    assert not z_losses.requires_grad
    apart, _ = cross_entropy_loss(leaf, labels, **case.options)
    assert torch.equal(losses == 0, apart == 0)


@pytest.mark.parametrize("case", CASES)
def test_gradient_in_forward_in_place(case, device):
    """It is that of the op which is not in place. For other dlosses than 1 it is scaled."""
    logits, labels, dlosses = case.draw(device)
    dlosses[::2] = 1
    options = *case.options.values(), -100, 0, case.vocab
    rows = logits.contiguous()
    losses, _, _, kept, unit = xentropy.fwd_bwd(torch.ones_like(dlosses), rows, labels, *options)
    leaf = logits.clone(memory_format=torch.preserve_format).requires_grad_()
    options = dict(case.options, inplace_backward=True, gradient_in_forward=True)
    again, z_losses = cross_entropy_loss(leaf, labels, **options)
    torch.testing.assert_close(again, losses)
    in_forward, is_copied = case.dtype != "fp16", case.layout == "transposed"  # then the copy is overwritten
    if in_forward and not is_copied:
        torch.testing.assert_close(leaf.detach(), unit, rtol=1e-2, atol=1e-6)
        unit = leaf.detach().clone()
    else:
        assert identical(leaf.detach(), logits)
    (dlogits,) = torch.autograd.grad(again, leaf, dlosses)
    assert is_copied or dlogits.data_ptr() == leaf.data_ptr()
    if in_forward:
        assert identical(dlogits, (unit.float() * torch.where(kept, dlosses, 1)[:, None]).to(dlogits.dtype))
    else:
        assert_matches((again.detach(), z_losses, dlogits), logits, labels, dlosses, case.options)


@pytest.mark.parametrize("case", CASES)
def test_ops_for_both_directions(case, device):
    """For any dlosses, into new memory and in place, and again for other dlosses."""
    logits, labels, dlosses = case.draw(device)
    options = *case.options.values(), -100, 0, case.vocab
    *found, lse, kept, dlogits = xentropy.fwd_bwd(dlosses, logits, labels, *options)
    assert_matches((*found, dlogits), logits, labels, dlosses, case.options)
    apart = xentropy.fwd(logits, labels, None, *options)
    torch.testing.assert_close((*found, lse, kept), apart)
    copy = logits.clone(memory_format=torch.preserve_format)
    results = xentropy.fwd_bwd_(dlosses, copy, labels, *options)
    for one, other in zip((*results, copy), (*found, lse, kept, dlogits), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2 if one is copy else None, atol=1e-6 if one is copy else None)
    others = dlosses.clone()
    others[1::2] *= -3
    marked = dlogits.clone()
    marked[:, :1] = 77  # where the dlosses are as expected, it stays
    xentropy.redo_(marked, others, dlosses, logits, labels, lse, *options)
    right = xentropy.bwd(others, logits, labels, lse, *options)
    same = others == dlosses
    assert identical(marked[~same], right[~same])
    assert not case.vocab or (marked[same, 0] == 77).all()
    assert identical(marked[same, 1:], dlogits[same, 1:])


def test_a_backward_may_run_twice(device):
    logits, labels, dlosses = Case(strays=False).draw(device)
    losses, _ = cross_entropy_loss(logits.requires_grad_(), labels, gradient_in_forward=True)
    first = torch.autograd.grad(losses, logits, torch.ones_like(dlosses), retain_graph=True)[0]
    before = first.clone()
    second = torch.autograd.grad(losses, logits, dlosses, retain_graph=True)[0]
    third = torch.autograd.grad(losses, logits, torch.ones_like(dlosses))[0]
    assert identical(first, before)
    assert_matches((losses.detach(), torch.zeros_like(dlosses), second), logits.detach(), labels, dlosses, {})
    torch.testing.assert_close(third, first)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("inplace_backward", [False, True])
def test_checkpoint(inplace_backward, use_reentrant, device):
    """Whose backward runs the forward again, when another gradient is expected than the first time."""
    logits, labels, _ = Case(dtype="fp32", strays=False).draw(device)
    module = CrossEntropyLoss(gradient_in_forward=True, inplace_backward=inplace_backward)
    for scale in (0.3, 0.3, 2.0):
        leaf = logits.detach().clone().requires_grad_()
        loss = scale * checkpoint(module, leaf, labels, use_reentrant=use_reentrant)
        right = scale * torch.nn.functional.cross_entropy(logits.requires_grad_(), labels)
        loss.backward()
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(right, logits)[0])


@pytest.mark.parametrize("gradient_in_forward", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_many_gradients_in_one_backward(reduction, gradient_in_forward, device):
    """The dlosses then are a batch of a transform. The gradient that the forward has made serves another backward."""
    logits, labels, _ = Case(dtype="fp32").draw(device)
    loss = CrossEntropyLoss(reduction=reduction, gradient_in_forward=gradient_in_forward)(
        logits.requires_grad_(), labels
    )
    dlosses = torch.randn(3, *loss.shape, device=device)
    many = torch.autograd.grad(loss, logits, dlosses, is_grads_batched=True, retain_graph=True)[0]
    for dloss, found in zip(dlosses, many, strict=True):
        torch.testing.assert_close(found, torch.autograd.grad(loss, logits, dloss, retain_graph=True)[0])


def test_logits_are_only_overwritten_for_a_gradient(device):
    """And then autograd can tell."""
    logits, labels, _ = Case(dtype="fp32").draw(device)
    options = dict(inplace_backward=True, gradient_in_forward=True)
    before = logits.clone()
    cross_entropy_loss(logits, labels, **options)
    with torch.no_grad():
        cross_entropy_loss(logits.requires_grad_(), labels, **options)
    assert identical(logits.detach(), before) and logits._version == 0
    cross_entropy_loss(logits, labels, **options)
    assert not identical(logits.detach(), before) and logits._version > 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_expected_gradient_comes(reduction, monkeypatch, device):
    """The module expects what autograd then computes, to the last bit: any difference would cost time.

    It expects a scale that it has seen, and its gradient is right for any.
    """
    came = []
    real = xentropy.redo_
    monkeypatch.setattr(
        xentropy, "redo_", lambda dlogits, *args: came.append(torch.equal(*args[:2])) or real(dlogits, *args)
    )
    module = CrossEntropyLoss(reduction=reduction, gradient_in_forward=True)
    for rows, scale in ((1, 1), (7, 1), (49, 0.3), (1000, 0.3), (41, 0.3), (41, 1), (41, 1)):
        logits, labels = torch.randn(rows, 5, device=device), torch.arange(rows, device=device) % 5
        labels[1::3] = -100
        (module(logits.requires_grad_(), labels) * scale).backward()
        right = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction) * scale
        torch.testing.assert_close(logits.grad, torch.autograd.grad(right, logits)[0])
    assert came == [True, True, False, True, True, False, True]


CHOICES = [  # options of the module, dtype, classes, the op of its forward
    (dict(), "bf16", 8192, "fwd_bwd"),
    (dict(), "bf16", 8191, "fwd"),
    (dict(), "fp32", 8000, "fwd"),
    (dict(reduction="sum"), "fp32", 8192, "fwd_bwd"),
    (dict(reduction="none"), "bf16", 8192, "fwd"),
    (dict(reduction="none", gradient_in_forward=True), "bf16", 16, "fwd_bwd"),
    (dict(), "fp16", 8192, "fwd_bwd"),
    (dict(gradient_in_forward=False), "bf16", 8192, "fwd"),
    (dict(inplace_backward=True), "bf16", 8192, "fwd"),
    (dict(gradient_in_forward=True), "bf16", 16, "fwd_bwd"),
    (dict(inplace_backward=True, gradient_in_forward=True), "bf16", 16, "fwd_bwd_"),
    (dict(inplace_backward=True, gradient_in_forward=True), "fp16", 16, "fwd"),
]


@pytest.mark.parametrize(("options", "dtype", "classes", "op"), CHOICES, ids=str)
def test_which_op_the_module_runs(options, dtype, classes, op, monkeypatch):
    monkeypatch.setattr(xentropy, "LEAST_BYTES_AT_ONCE", 4 * 8192 * 2)
    logits, labels = torch.randn(4, classes).to(DTYPES[dtype]), torch.tensor([3, -100, 15, 0])
    module = CrossEntropyLoss(**options)
    for wants_gradient in (False, True):
        with Recorder() as recorder:
            module(logits.requires_grad_(wants_gradient) * 1, labels)
        ran = [name for name in recorder.ops if name.startswith("flash_attn::")]
        assert ran == [f"flash_attn::xentropy_{op if wants_gradient else 'fwd'}"]


def test_small_logits_take_two_passes():
    assert xentropy.LEAST_BYTES_AT_ONCE > 1 << 20
    with Recorder() as recorder:
        CrossEntropyLoss()(torch.randn(4, 16384).requires_grad_() * 1, torch.arange(4))
    assert [name for name in recorder.ops if name.startswith("flash_attn::")] == ["flash_attn::xentropy_fwd"]


def test_rows_that_are_aligned_in_another_way_take_two_passes():
    labels, lse = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    for logits, known, op in (
        (torch.randn(4, 16).bfloat16()[:, :9], None, "fwd"),
        (torch.randn(65).bfloat16()[1:].view(4, 16), None, "fwd"),
        (torch.randn(4, 16).bfloat16()[:, :8], None, "fwd_bwd"),
        (torch.randn(4, 9).bfloat16(), None, "fwd_bwd"),
        (torch.randn(4, 9), lse, "fwd"),
    ):
        with Recorder() as recorder:
            cross_entropy_loss(logits.requires_grad_(), labels, known, gradient_in_forward=True)
        assert f"flash_attn::xentropy_{op}" in recorder.ops


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_torch(dtype, device):
    """torch.nn.functional.cross_entropy is not our formula."""
    logits, labels, _ = Case(rows=40, vocab=5003, dtype=dtype).draw(device)
    labels[(labels < 0) | (labels >= 5003)] = -100
    for smoothing in (0.0, 0.3):
        right = torch.nn.functional.cross_entropy(logits.float(), labels, label_smoothing=smoothing, reduction="none")
        torch.testing.assert_close(cross_entropy_loss(logits, labels, label_smoothing=smoothing)[0], right)


@pytest.mark.parametrize("lse_square_scale", [0.0, 1e-2])
def test_precomputed_lse(lse_square_scale, device):
    case = Case(vocab=5003, lse_square_scale=lse_square_scale)
    logits, labels, dlosses = case.draw(device)
    lse = logits.float().logsumexp(dim=-1)
    losses, z_losses = cross_entropy_loss(logits.requires_grad_(), labels, lse, **case.options)
    (dlogits,) = torch.autograd.grad(losses, logits, dlosses)
    assert_matches((losses.detach(), z_losses, dlogits), logits.detach(), labels, dlosses, case.options)
    wrong = lse + 1  # not used where it cannot serve, and seen to be used where it can
    for options in (dict(label_smoothing=0.1), dict(logit_scale=0.5)):
        assert identical(*(cross_entropy_loss(logits, labels, x, **options)[0] for x in (wrong, None)))
    kept = losses != 0
    shifted = cross_entropy_loss(logits, labels, wrong)[0][kept] - cross_entropy_loss(logits, labels)[0][kept]
    torch.testing.assert_close(shifted, torch.ones_like(shifted))


@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_rows_that_do_not_count_are_not_looked_at(gradient_in_forward, device):
    logits, labels, dlosses = Case(dtype="fp32").draw(device)
    losses, _ = cross_entropy_loss(logits, labels, ignore_index=7)
    labels[0] = 7
    logits[0], dlosses[0] = float("nan"), float("inf")
    options = dict(lse_square_scale=1.0, ignore_index=7, gradient_in_forward=gradient_in_forward)
    again, z_losses = cross_entropy_loss(logits.requires_grad_(), labels, **options)
    (dlogits,) = torch.autograd.grad(again, logits, dlosses)
    assert again[0] == z_losses[0] == 0 and losses[0] != 0
    assert not dlogits[0].any()
    assert not dlogits[labels == -100].any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_what_is_not_finite_is_not_hidden(gradient_in_forward, value, device):
    for column in (0, 1, 500, 999):
        logits, labels, _ = Case(dtype="fp32").draw(device)
        logits[0, column] = value
        losses, _ = cross_entropy_loss(logits.requires_grad_(), labels, gradient_in_forward=gradient_in_forward)
        losses[0].backward()
        assert not losses[0].isfinite() and not logits.grad[0].isfinite().all()
        assert losses[2].isfinite()


def test_logits_of_minus_infinity(device):
    """Columns that are switched off have no part in the loss, unless they are the label or it is smoothed."""
    logits, labels, dlosses = Case(dtype="fp32", strays=False).draw(device)
    labels += labels % 2
    labels[labels == 1000] = 0
    logits[:, 1::2] = float("-inf")
    losses, _ = cross_entropy_loss(logits.requires_grad_(), labels)
    (dlogits,) = torch.autograd.grad(losses, logits, dlosses)
    right, _ = cross_entropy_loss(logits[:, ::2], labels // 2)
    torch.testing.assert_close(losses, right)
    assert not dlogits[:, 1::2].any() and dlogits.isfinite().all()


@pytest.mark.parametrize("kernels", ["op", "triton"])
def test_a_long_run_of_minus_infinity(kernels, device, request):
    """Longer than a kernel reads at a time, in front and behind."""
    fwd = xentropy.fwd if kernels == "op" else request.getfixturevalue("triton_kernels").fwd
    logits, labels = torch.randn(2, 20_000, device=device), torch.tensor([9500, 9999], device=device)
    off = torch.full_like(logits, float("-inf"))
    off[:, 9000:10_000] = logits[:, 9000:10_000]
    losses, _, lse, _ = fwd(off, labels, None, 0.0, 1.0, 0.0, -100, 0, 20_000)
    right = torch.nn.functional.cross_entropy(logits[:, 9000:10_000], labels - 9000, reduction="none")
    torch.testing.assert_close(losses, right)
    torch.testing.assert_close(lse.float(), logits[:, 9000:10_000].logsumexp(dim=-1))


@pytest.mark.parametrize("shape", [(0, 50), (0, 0), (3, 0)])
@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_empty(shape, gradient_in_forward, inplace_backward, device):
    logits = torch.empty(shape, device=device, requires_grad=True)
    labels = torch.zeros(shape[0], dtype=torch.int64, device=device)
    options = dict(gradient_in_forward=gradient_in_forward, inplace_backward=inplace_backward)
    losses, z_losses = cross_entropy_loss(logits, labels, **options)
    losses.sum().backward()
    assert losses.shape == z_losses.shape == labels.shape and not losses.any()
    assert logits.grad.shape == shape


# The module.


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_z_loss", [False, True])
@pytest.mark.parametrize("gradient_in_forward", [None, False, True])
def test_module(gradient_in_forward, reduction, return_z_loss, device):
    case = Case(dtype="fp32", lse_square_scale=1e-2, label_smoothing=0.1, logit_scale=0.7)
    logits, labels, _ = case.draw(device)
    module = CrossEntropyLoss(
        reduction=reduction, return_z_loss=return_z_loss, gradient_in_forward=gradient_in_forward, **case.options
    )
    found = module(logits.requires_grad_(), labels)
    kept = (labels >= 0) & (labels < case.vocab)
    reduce = {"mean": lambda x: x.sum() / kept.sum(), "sum": torch.sum, "none": torch.clone}[reduction]
    right = tuple(reduce(x) for x in oracle.cross_entropy(logits, labels, **case.options))
    torch.testing.assert_close(found if return_z_loss else (found,), right[: 1 + return_z_loss])
    found = found[0] if return_z_loss else found
    for factor in (1, 0.3):
        gradients = (torch.autograd.grad(factor * x.sum(), logits, retain_graph=True)[0] for x in (found, right[0]))
        torch.testing.assert_close(*gradients)


def test_module_like_that_of_torch(device):
    logits, labels = torch.randn(8, 50, device=device), torch.tensor([3, -100, 4, 9, 0, 49, -100, 1], device=device)
    torch.testing.assert_close(CrossEntropyLoss()(logits, labels), torch.nn.CrossEntropyLoss()(logits, labels))
    assert CrossEntropyLoss()(logits, torch.full_like(labels, -100)).isnan()
    lse = logits.logsumexp(dim=-1)
    torch.testing.assert_close(CrossEntropyLoss()(logits, labels, lse), torch.nn.CrossEntropyLoss()(logits, labels))


@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_a_graph_cannot_use_logits_that_were_overwritten(gradient_in_forward, device):
    x = torch.randn(4, 10, device=device, requires_grad=True)
    logits = x.exp()  # keeps its result for the backward
    module = CrossEntropyLoss(inplace_backward=True, gradient_in_forward=gradient_in_forward)
    loss = module(logits, torch.zeros(4, dtype=torch.int64, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_second_backward_of_an_in_place_loss_is_an_error(gradient_in_forward, device):
    logits = torch.randn(4, 10, device=device, requires_grad=True)
    module = CrossEntropyLoss(inplace_backward=True, gradient_in_forward=gradient_in_forward)
    loss = module(logits * 1, torch.zeros(4, dtype=torch.int64, device=device))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "op"),
    [
        (dict(), "bwd"),
        (dict(gradient_in_forward=True), "redo_"),
        (dict(gradient_in_forward=True, inplace_backward=True), "scale_"),
    ],
)
def test_a_backward_runs_one_op(options, op):
    """And makes no zeros for the results that have no gradient."""
    logits, labels = torch.randn(4, 12, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    losses, _ = cross_entropy_loss(logits, labels, **options)
    with Recorder() as recorder:
        torch.autograd.grad(losses, logits, torch.ones(4))
    assert [op for op in recorder.ops if op not in ("aten::ones", "aten::detach")] == [f"flash_attn::xentropy_{op}"]


@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_no_gradient_of_losses_that_have_none(gradient_in_forward):
    logits, labels = torch.randn(4, 12, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    losses, _ = cross_entropy_loss(logits, labels, gradient_in_forward=gradient_in_forward)
    assert torch.autograd.grad(Severed.apply(losses).sum(), logits, allow_unused=True) == (None,)


def test_autocast_changes_nothing(device):
    logits, labels, _ = Case(dtype="fp32").draw(device)
    right = cross_entropy_loss(logits, labels)[0]
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert identical(cross_entropy_loss(logits, labels)[0], right)


class Severed(torch.autograd.Function):
    """A copy whose backward gives no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, _):
        return None


# Several processes.


def check_parts(group, cases, precomputed, compiled):
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    function = cross_entropy_loss
    if compiled:
        function = compiled_on_last(group, function, fullgraph=True, backend="aot_eager")
    for case in cases:
        logits, labels, dlosses = case.draw("cpu")
        columns = slice(rank * case.vocab // world, (rank + 1) * case.vocab // world)
        for inplace_backward in (False, True):
            part = logits[:, columns].clone()
            if not inplace_backward:
                without_gradient, _ = function(part, labels, **case.options, process_group=group)
            part.requires_grad_()
            lse = part.detach().float().logsumexp(dim=-1) if precomputed else None
            losses, z_losses = function(
                part, labels, lse, **case.options, inplace_backward=inplace_backward, process_group=group
            )
            (dpart,) = torch.autograd.grad(losses, part, dlosses)
            gathered = [torch.empty_like(dpart) for _ in range(world)]
            dist.all_gather(gathered, dpart)
            found = losses.detach(), z_losses, torch.cat(gathered, dim=1)
            assert_matches(found, logits, labels, dlosses, case.options)
            torch.testing.assert_close(without_gradient, losses.detach())
            assert (dpart.data_ptr() == part.data_ptr()) == (inplace_backward and function is cross_entropy_loss)


PARALLEL_CASES = [
    Case(vocab=1000, dtype="fp32", label_smoothing=0.9, lse_square_scale=1e-2, logit_scale=0.7, size=10.0),
    Case(vocab=50264, dtype="bf16", label_smoothing=0.1),
    Case(vocab=62, dtype="fp16", labels="int32"),
]


@pytest.mark.parametrize("precomputed", [False, True])
def test_classes_divided_among_processes(precomputed):
    over_processes(2, check_parts, PARALLEL_CASES, precomputed, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch's compiler looks for the GPU, which a fork cannot use")
def test_classes_divided_among_processes_compiled():
    over_processes(2, check_parts, PARALLEL_CASES[:1], False, True)


def check_refused(group):
    """A transform cannot follow the sums over the processes; without an error the gradient would be wrong."""
    logits, labels = torch.randn(4, 6), torch.tensor([0, -100, 7, 11])
    hidden, weight = torch.randn(2, 3), torch.randn(6, 3)

    def check(function, x):
        for transformed in (torch.func.grad(function), lambda x: torch.func.jvp(function, (x,), (x,))):
            with pytest.raises(NotImplementedError, match="process_group must be None, or of one process"):
                transformed(x)

    check(lambda x: cross_entropy_loss(x, labels, process_group=group)[0].sum(), logits)
    check(lambda x: linear_cross_entropy(hidden, x, labels, process_group=group), weight)


def test_transforms_of_divided_classes_are_refused():
    over_processes(2, check_refused)


def check_one_part(group):
    logits, labels, _ = Case(dtype="fp32").draw("cpu")
    with pytest.MonkeyPatch.context() as patch:  # a group of one has nothing to exchange
        patch.setattr(dist, "all_reduce", None)
        patch.setattr(collectives, "gather_rows", None)
        losses, _ = cross_entropy_loss(logits, labels, process_group=group)
    assert identical(losses, cross_entropy_loss(logits, labels)[0])


def test_group_of_one_process():
    over_processes(1, check_one_part)


# The kernels in Triton: on a GPU, and on the CPU in Triton's interpreter.


@pytest.fixture
def triton_kernels():
    pytest.importorskip("triton")
    return importlib.import_module("flash_attn._triton.xentropy")


def for_the_interpreter(case):
    """Few rows of a few blocks, since the interpreter takes its time."""
    return dataclasses.replace(case, rows=min(case.rows, 5), vocab=min(case.vocab, 9000))


TRITON_CASES = params([(for_the_interpreter(*param.values), param.marks) for param in CASES])


@pytest.mark.parametrize("case", TRITON_CASES)
@pytest.mark.same_on_cpu("dtype", "labels", "layout")
def test_triton(case, device, triton_kernels):
    logits, labels, dlosses = case.draw(device)
    options = *case.options.values(), -100, 0, case.vocab
    losses, z_losses, lse, kept = triton_kernels.fwd(logits, labels, None, *options)
    args = labels, lse, *options
    dlogits = triton_kernels.bwd(dlosses, logits, *args)
    assert_matches((losses, z_losses, dlogits), logits, labels, dlosses, case.options, narrow_in_triton)
    for ours, theirs in zip((lse, kept), xentropy.fwd(logits, labels, None, *options)[2:], strict=True):
        torch.testing.assert_close(ours, theirs)
    expected, stale = dlosses.clone(), dlogits.clone()
    expected[::2] += 1
    stale[::2] = 7
    triton_kernels.redo_(stale, dlosses, expected, logits, *args)
    assert identical(stale, dlogits)
    copy = logits.clone(memory_format=torch.preserve_format)
    *results, kept_again = triton_kernels.fwd_bwd_(dlosses, copy, labels, *options)
    assert torch.equal(kept_again, kept)
    # Another kernel, whose sums and products the compiler may contract in another way.
    assert_same_but_for_rounding((*results, copy), (losses, z_losses, lse, dlogits))
    triton_kernels.bwd_(dlosses, logits, *args)
    assert identical(logits, dlogits)


@pytest.mark.cuda
@pytest.mark.parametrize("case", params(EDGES))
def test_triton_on_a_gpu(case, device, triton_kernels):
    test_triton(case, device, triton_kernels)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("first", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_a_gradient_that_no_other_can_be_made_of_is_not_expected(first, inplace, device):
    """As that of an auxiliary loss whose weight begins with 0."""
    loss = CrossEntropyLoss(inplace_backward=inplace, gradient_in_forward=True)
    logits, labels = torch.randn(3, 10, device=device).bfloat16(), torch.tensor([1, 9, 0], device=device)
    for scale in (first, 0.5):
        leaf = logits.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(leaf * 1, labels), leaf, torch.tensor(scale, device=device))
    exact = logits.double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact, labels), exact)
    torch.testing.assert_close(found.double(), 0.5 * expected, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 50), (3, 0)])
def test_triton_empty(shape, device, triton_kernels):
    logits, labels = torch.empty(shape, device=device), torch.zeros(shape[0], dtype=torch.int64, device=device)
    losses, z_losses, lse, kept = triton_kernels.fwd(logits, labels, None, 0.1, 1.0, 0.1, -100, 0, shape[1])
    assert not torch.cat([losses, z_losses, lse, kept]).any()
    assert triton_kernels.bwd(losses, logits, labels, lse, 0.1, 1.0, 0.1, -100, 0, shape[1]).shape == shape


@pytest.mark.parametrize("known", [False, True])
def test_triton_part(known, device, triton_kernels):
    """A part of the classes, every row of which counts, with the log-sum-exp known or not."""
    logits, labels, dlosses = Case(dtype="fp32").draw(device)
    part, dlosses = logits[:, 300:700], dlosses.nan_to_num()
    smoothing, known_lse = (0.0, part.double().logsumexp(dim=-1)) if known else (0.2, None)
    options = smoothing, 1.0, 0.0, None, 300, 1000
    found = triton_kernels.fwd(part, labels, known_lse, *options)
    for ours, right in zip(found, reference.fwd(part, labels, known_lse, *options), strict=True):
        torch.testing.assert_close(ours, right)
    lse = logits.double().logsumexp(dim=-1)
    torch.testing.assert_close(
        triton_kernels.bwd(dlosses, part, labels, lse, *options),
        reference.bwd(dlosses, part, labels, lse, *options),
    )


# Graphs, fakes, signatures.


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inplace_backward", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled(grad, inplace_backward, backend, device):
    case = Case(dtype="fp32", label_smoothing=0.1, lse_square_scale=1e-2)
    logits, labels, _ = case.draw(device)
    module = CrossEntropyLoss(**case.options, inplace_backward=inplace_backward, return_z_loss=True)

    def run(function):
        leaf = logits.clone().requires_grad_(grad)
        loss, z_loss = function(leaf * 1, labels)
        return loss.detach(), z_loss, *(torch.autograd.grad(loss, leaf) if grad else ())

    torch.testing.assert_close(run(torch.compile(module, fullgraph=True, backend=backend)), run(module))


def test_exported(device):
    logits, labels, _ = Case(dtype="fp32").draw(device)
    module = CrossEntropyLoss()
    rows, vocab = (torch.export.Dim(name, max=2**20) for name in ("rows", "vocab"))
    exported = torch.export.export(module, (logits, labels), dynamic_shapes=({0: rows, 1: vocab}, {0: rows}))
    assert identical(exported.module()(logits[:5, :900], labels[:5]), module(logits[:5, :900], labels[:5]))


@pytest.mark.parametrize(
    "case", params([Case(dtype="fp32"), Case(label_smoothing=0.1, layout="sliced"), Case(layout="transposed")])
)
def test_opcheck(case, device):
    logits, labels, dlosses = case.draw(device)
    options = *case.options.values(), -100, 0, case.vocab
    arguments = labels, None, *options
    torch.library.opcheck(xentropy.fwd.default, (logits.clone().requires_grad_(), *arguments))
    torch.library.opcheck(xentropy.fwd.default, (logits, *arguments))
    lse = logits.double().logsumexp(dim=-1)
    torch.library.opcheck(xentropy.bwd.default, (dlosses, logits, labels, lse, *options))
    torch.library.opcheck(xentropy.bwd_.default, (dlosses, logits, labels, lse, *options))
    torch.library.opcheck(xentropy.fwd_bwd.default, (dlosses, logits, labels, *options))
    torch.library.opcheck(xentropy.fwd_bwd_.default, (dlosses, logits.clone(), labels, *options))
    dlogits, expected = torch.zeros_like(logits, memory_format=torch.contiguous_format), dlosses.clone()
    expected[::2] = 1
    torch.library.opcheck(xentropy.redo_.default, (dlogits, dlosses, expected, logits, labels, lse, *options))
    torch.library.opcheck(xentropy.scale_.default, (logits, dlosses, expected, labels >= 0))


def test_meta():
    logits, labels = torch.empty(5, 70, device="meta"), torch.empty(5, dtype=torch.int64, device="meta")
    assert cross_entropy_loss(logits, labels)[0].shape == (5,)
    assert CrossEntropyLoss()(logits, labels).shape == ()
    CrossEntropyLoss()(logits.requires_grad_(), labels).backward()
    assert logits.grad.shape == (5, 70)


def test_the_function_of_autograd_is_the_public_one():
    assert functional.CrossEntropyLoss.apply is cross_entropy_loss


# The functions of xentropy_cuda_lib.


@pytest.mark.parametrize("total_classes", [-1, 3000])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_shim(layout, inplace, smoothing, total_classes, device):
    logits, labels, dlosses = Case(vocab=1003, layout=layout).draw(device)
    classes = total_classes if total_classes > 0 else 1003
    dlosses = dlosses.nan_to_num()
    leaf = logits.double().requires_grad_()
    own = (labels >= 0) & (labels < 1003)
    lse = leaf.logsumexp(dim=-1)
    log_p = torch.where(own, leaf.gather(1, torch.where(own, labels, 0)[:, None])[:, 0] - lse, 0)
    losses = smoothing * (lse - leaf.sum(dim=-1) / classes) - (1 - smoothing) * log_p
    found, found_lse = xentropy_cuda_lib.forward(logits, labels, smoothing, total_classes)
    torch.testing.assert_close(found, losses.float())
    torch.testing.assert_close(found_lse, lse.float())
    gradient = lse.detach().neg()[:, None].add(leaf.detach()).exp() - smoothing / classes
    gradient[own, labels[own]] -= 1 - smoothing
    dlogits = xentropy_cuda_lib.backward(dlosses, logits, found_lse, labels, smoothing, inplace, total_classes)
    torch.testing.assert_close(dlogits, (gradient * dlosses[:, None]).to(logits.dtype), rtol=1e-2, atol=1e-4)
    assert (dlogits is logits) == inplace


# Errors: what is wrong, the class, what the message names.

LOGITS, LABELS = torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64)
ERRORS = {
    "logits are no tensor": (dict(logits=[1.0]), TypeError, "logits must be a torch.Tensor"),
    "logits are float64": (dict(logits=LOGITS.double()), TypeError, "logits must have dtype"),
    "logits have three dimensions": (dict(logits=LOGITS[None]), ValueError, "logits must have 2 dimensions"),
    "labels are floats": (dict(labels=LABELS.float()), TypeError, "labels must have dtype"),
    "labels of another shape": (dict(labels=LABELS[:2]), ValueError, r"labels must have shape \(3,\), found \(2,\)"),
    "labels on another device": (dict(labels=LABELS.to("meta")), ValueError, "labels must be on cpu"),
    "lse of another shape": (dict(precomputed_lse=LOGITS[:2, 0]), ValueError, "precomputed_lse must have shape"),
    "lse of another type": (dict(precomputed_lse=LOGITS[:, 0].half()), TypeError, "precomputed_lse must have dtype"),
    "smoothing above 1": (dict(label_smoothing=1.1), ValueError, "label_smoothing must be between 0 and 1, found 1.1"),
    "smoothing is text": (dict(label_smoothing="0"), TypeError, "label_smoothing must be a real number"),
    "scale is zero": (dict(logit_scale=0), ValueError, "logit_scale must be positive, found 0"),
    "scale is infinite": (dict(logit_scale=float("inf")), ValueError, "logit_scale must be finite"),
    "z-loss is NaN": (dict(lse_square_scale=float("nan")), ValueError, "lse_square_scale must be finite"),
    "ignore index is None": (dict(ignore_index=None), TypeError, "ignore_index must be an integer"),
    "in place is text": (dict(inplace_backward="no"), TypeError, "inplace_backward must be a bool"),
    "gradient in forward is text": (dict(gradient_in_forward="no"), TypeError, "gradient_in_forward must be a bool"),
    "expanded logits": (
        dict(logits=LOGITS[:1].clone().requires_grad_().expand(3, 10), inplace_backward=True),
        ValueError,
        "logits must not be expanded",
    ),
}


@pytest.mark.parametrize("what", ERRORS)
def test_error(what):
    changes, error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        cross_entropy_loss(**dict(dict(logits=LOGITS, labels=LABELS), **changes))


def test_odd_but_legal():
    """Tensors without dimensions and whole floats are numbers; but a number that is learned would not be."""
    odd = dict(label_smoothing=torch.tensor(0.1), logit_scale=np.float32(2), ignore_index=-1.0, lse_square_scale=1)
    usual = dict(label_smoothing=0.1, logit_scale=2.0, ignore_index=-1, lse_square_scale=1.0)
    logits = torch.randn(3, 10)
    torch.testing.assert_close(CrossEntropyLoss(**odd)(logits, LABELS), CrossEntropyLoss(**usual)(logits, LABELS))
    learned = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match="logit_scale must not require grad, since no gradient is computed for it"):
        cross_entropy_loss(logits, LABELS, logit_scale=learned)
    with torch.no_grad():
        cross_entropy_loss(logits, LABELS, logit_scale=learned)
    found, expected = (xentropy_cuda_lib.forward(logits, LABELS, 0.1, classes) for classes in (12.0, 12))
    assert all(map(torch.equal, found, expected))


def test_errors_of_the_module_and_the_shim():
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'none', found 'max'"):
        CrossEntropyLoss(reduction="max")
    with pytest.raises(TypeError, match="return_z_loss must be a bool"):
        CrossEntropyLoss(return_z_loss="yes")
    with pytest.raises(TypeError, match="gradient_in_forward must be a bool"):
        CrossEntropyLoss(gradient_in_forward="yes")
    with pytest.raises(ValueError, match="label_smoothing must be between"):
        xentropy_cuda_lib.forward(LOGITS, LABELS, 2.0)
    with pytest.raises(ValueError, match="grad_loss must have shape"):
        xentropy_cuda_lib.backward(LOGITS, LOGITS, LOGITS[:, 0], LABELS, 0.0, False)
    with pytest.raises(TypeError, match="max_log_sum_exp must have dtype"):
        xentropy_cuda_lib.backward(LOGITS[:, 0], LOGITS, LOGITS[:, 0].half(), LABELS, 0.0, False)
    with pytest.raises(ValueError, match="logits must not be expanded"):
        xentropy_cuda_lib.backward(LOGITS[:, 0], LOGITS[:1].expand(3, 10), LOGITS[:, 0], LABELS, 0.0, True)
    with pytest.raises(TypeError, match="inplace must be a bool"):
        xentropy_cuda_lib.backward(LOGITS[:, 0], LOGITS, LOGITS[:, 0], LABELS, 0.0, "no")
    with pytest.raises(TypeError, match="total_classes must be an integer"):
        xentropy_cuda_lib.forward(LOGITS, LABELS, 0.0, "10")


# What only a kernel can trip over.


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(2**31 // 50_000 + 10, 50_000), (3, 2**30 - 7)])
@pytest.mark.parametrize("gradient_in_forward", [False, True])
def test_more_elements_than_32_bits_count(gradient_in_forward, shape, device, memory_guard):
    rows, vocab = shape
    memory_guard(4 * rows * vocab)
    logits = torch.randn(1, vocab, device=device).bfloat16().expand(shape).contiguous()
    labels = torch.randint(vocab, (1,), device=device).expand(rows)
    right = expected(logits[:1].double(), labels[:1], torch.ones(1, device=device), dict(label_smoothing=0.1))
    options = dict(label_smoothing=0.1, inplace_backward=True, gradient_in_forward=gradient_in_forward)
    losses, _ = cross_entropy_loss(logits.requires_grad_(), labels, **options)
    torch.testing.assert_close(losses, right[0].float().expand(rows))
    (dlogits,) = torch.autograd.grad(losses.sum(), logits)
    for row in (0, rows - 1):
        torch.testing.assert_close(dlogits[row], right[2][0].bfloat16(), rtol=2e-2, atol=1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vocab", [3, 37, 4096, 4099])
def test_alignment(dtype, shift, vocab, device):
    logits, labels, dlosses = Case(dtype=dtype, vocab=vocab).draw(device)
    shifted = torch.zeros(logits.numel() + shift, device=device, dtype=logits.dtype)[shift:].view_as(logits)
    for inplace_backward in (False, True):
        shifted.copy_(logits)
        leaf = shifted.detach().requires_grad_()
        losses, z_losses = cross_entropy_loss(leaf, labels, inplace_backward=inplace_backward)
        (dlogits,) = torch.autograd.grad(losses, leaf, dlosses)
        assert_matches((losses.detach(), z_losses, dlogits), logits, labels, dlosses, {})
    shifted.copy_(logits)
    options = 0.0, 1.0, 0.0, -100, 0, vocab
    *found, _, _, dlogits = xentropy.fwd_bwd(dlosses, shifted, labels, *options)
    assert_matches((*found, dlogits), logits, labels, dlosses, {})
    *found, _, _ = xentropy.fwd_bwd_(dlosses, shifted, labels, *options)
    assert_matches((*found, shifted), logits, labels, dlosses, {})


@pytest.mark.cuda
@pytest.mark.parametrize("shared_bytes", [4096, 20_000, 100_000, None])
@pytest.mark.parametrize("vocab", [1000, 30_000, 50_257, 128_256])
def test_rows_that_do_not_fit_shared_memory(vocab, shared_bytes, monkeypatch, device):
    """They take two kernels. Others are divided among as many blocks as it takes."""
    if shared_bytes is not None:
        monkeypatch.setenv("FLASH_ATTN_SHARED_BYTES", str(shared_bytes))
    case = Case(vocab=vocab, label_smoothing=0.1, lse_square_scale=1e-2)
    logits, labels, dlosses = case.draw(device)
    *found, _, _, dlogits = xentropy.fwd_bwd(dlosses, logits, labels, *case.options.values(), -100, 0, vocab)
    assert_matches((*found, dlogits), logits, labels, dlosses, case.options)


@pytest.mark.parametrize("stride", [0, 2])
def test_labels_and_gradients_of_any_stride(stride, device):
    logits, labels, dlosses = Case(strays=False).draw(device)
    if stride == 0:
        labels, dlosses = (x[:1].expand_as(x) for x in (labels, dlosses))
    else:
        labels, dlosses = (torch.stack([x, x - 7], dim=1)[:, 0] for x in (labels, dlosses))
    losses, z_losses = cross_entropy_loss(logits.requires_grad_(), labels)
    (dlogits,) = torch.autograd.grad(losses, logits, dlosses)
    assert_matches((losses.detach(), z_losses, dlogits), logits.detach(), labels, dlosses, {})


@pytest.mark.cuda
def test_other_stream(device):
    logits, labels, _ = Case(rows=4096, vocab=8192).draw(device)
    right = cross_entropy_loss(logits, labels)[0]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on any other stream would be done before the copy below begins
        late = torch.zeros_like(logits).copy_(logits)
        losses = cross_entropy_loss(late, labels)[0]
    stream.synchronize()
    assert identical(losses, right)


@pytest.mark.cuda
def test_graph_capture(device):
    logits, labels, _ = Case().draw(device)
    static, graph, module = torch.zeros_like(logits), torch.cuda.CUDAGraph(), CrossEntropyLoss()
    module(static, labels)
    with torch.cuda.graph(graph):
        loss = module(static, labels)
    static.copy_(logits)
    graph.replay()
    assert identical(loss, module(logits, labels))


@pytest.mark.cuda
def test_graph_capture_of_both_directions(device):
    """No part of a step waits for the device."""
    logits, labels, _ = Case().draw(device)
    leaf, graph = torch.zeros_like(logits).requires_grad_(), torch.cuda.CUDAGraph()
    module = CrossEntropyLoss(gradient_in_forward=True)

    def step():
        return torch.autograd.grad(module(leaf, labels), leaf)[0]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        dlogits = step()
    leaf.detach().copy_(logits)
    graph.replay()
    assert identical(dlogits, step())


@pytest.mark.multi_gpu
def test_device_that_is_not_current():
    logits, labels, dlosses = Case().draw("cuda:1")
    with torch.cuda.device(0):
        losses, z_losses = cross_entropy_loss(logits.requires_grad_(), labels)
        (dlogits,) = torch.autograd.grad(losses, logits, dlosses)
    assert_matches((losses.detach(), z_losses, dlogits), logits.detach(), labels, dlosses, {})


@pytest.mark.cuda
def test_kernel_refuses_what_does_not_fit(device):
    """The ops themselves, called around the checks in Python, must not reach memory that is not their own."""
    logits, labels = LOGITS.to(device), LABELS.to(device)
    dlosses, lse = logits[:, 0].contiguous(), logits[:, 0].double()
    good = dict(logits=logits, labels=labels, lse=None, smoothing=0.0, scale=1.0, z=0.0, ignore=None, start=0, all=10)
    xentropy.fwd.default(*good.values())
    for changes, message in (
        (dict(logits=logits[0]), "logits must have shape"),
        (dict(logits=logits.double()), "logits must have dtype"),
        (dict(labels=labels[:2]), "labels must have shape"),
        (dict(labels=labels.half()), "labels must have dtype"),
        (dict(labels=LABELS), "labels must be on cuda:.*, found it on cpu"),
        (dict(lse=lse[:2]), "lse must have shape"),
        (dict(lse=lse.float()), "lse must have dtype Double, found Float"),
    ):
        with pytest.raises(RuntimeError, match=message):
            xentropy.fwd.default(*(good | changes).values())
    good["lse"] = lse
    xentropy.bwd.default(dlosses, *good.values())
    for changes, message in (
        (dict(dlosses=dlosses[:2]), "dlosses must have shape"),
        (dict(dlosses=dlosses.half()), "dlosses must have dtype"),
        (dict(lse=lse[:2]), "lse must have shape"),
        (dict(lse=lse.float()), "lse must have dtype"),
        (dict(labels=labels[:2]), "labels must have shape"),
    ):
        arguments = dict(dlosses=dlosses) | good | changes
        ops = [(op, list(arguments.values())) for op in (xentropy.bwd, xentropy.bwd_)]
        ops.append((xentropy.redo_, [logits, arguments.pop("dlosses"), dlosses, *arguments.values()]))
        if "lse" not in changes:
            both = [value for name, value in (dict(dlosses=dlosses) | good | changes).items() if name != "lse"]
            ops += [(op, both) for op in (xentropy.fwd_bwd, xentropy.fwd_bwd_)]
        for op, values in ops:
            with pytest.raises(RuntimeError, match=message):
                op.default(*values)
    for dlogits, message in (
        (logits[:, :9], "dlogits must have shape"),
        (logits.half(), "dlogits must have dtype"),
        (logits.t().contiguous().t(), "dlogits must be contiguous"),
    ):
        with pytest.raises(RuntimeError, match=message):
            xentropy.redo_.default(dlogits, dlosses, dlosses, *good.values())
    for values, message in (
        ((logits[0], dlosses, dlosses, dlosses > 0), "logits must have shape"),
        ((logits, dlosses[:2], dlosses, dlosses > 0), "dlosses must have shape"),
        ((logits, dlosses, dlosses.half(), dlosses > 0), "expected must have dtype"),
        ((logits, dlosses, dlosses, dlosses), "kept must have dtype"),
        ((logits, dlosses, dlosses, (dlosses > 0)[:2]), "kept must have shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            xentropy.scale_.default(*values)


def test_names_of_the_triton_kernels():
    pytest.importorskip("triton", reason="triton is not installed")
    from flash_attn.ops.triton.cross_entropy import cross_entropy_bwd_kernel, cross_entropy_fwd_kernel

    assert cross_entropy_fwd_kernel is not cross_entropy_bwd_kernel
    with pytest.raises(ImportError, match="cannot import name 'cross_entropy_kernel'"):
        from flash_attn.ops.triton.cross_entropy import cross_entropy_kernel  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_in_triton(dtype, device):
    """Rows that count and got another gradient than was expected are multiplied; the others are left as they are."""
    pytest.importorskip("triton")
    kernels = importlib.import_module("flash_attn._triton.xentropy")
    dlogits = torch.randn(4, 5001, device=device).to(dtype)[:, 1:]
    dlosses, expected = torch.tensor([0.7, 1.0, 0.7, 0.25], device=device), torch.ones(1, device=device).expand(4)
    kept = torch.tensor([True, True, False, True], device=device)
    dlogits[1, 0] = float("nan")
    right = dlogits.clone()
    xentropy.reference.scale_(right, dlosses, expected, kept)
    kernels.scale_(dlogits, dlosses, expected, kept)
    torch.testing.assert_close(dlogits, right, rtol=8e-3 if dtype == torch.bfloat16 else 1e-6, atol=0, equal_nan=True)
    assert dlogits[1, 0].isnan() and not torch.equal(dlogits[0], dlogits[2])


def test_a_loss_that_goes_on_with_what_it_expected(device):
    """In place, and with a gradient that is no power of two, it has the bits of one that never stopped."""

    def step(loss_fn, seed):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(8, 100, generator=generator).bfloat16().to(device).requires_grad_()
        (loss_fn(logits * 1, torch.arange(8, device=device)) / 3).backward()
        return logits.grad

    options = dict(inplace_backward=True, gradient_in_forward=True)
    loss_fn, resumed, fresh = (CrossEntropyLoss(**options) for _ in range(3))
    assert loss_fn.expected_gradient is None
    for wrong in (0.0, 1e30, float("nan")):
        with pytest.raises(ValueError, match=r"expected_gradient must be (of a size from|finite)"):
            fresh.expected_gradient = wrong
    step(loss_fn, 0)
    resumed.expected_gradient = loss_fn.expected_gradient
    assert loss_fn.expected_gradient == pytest.approx(1 / 3)
    expected = step(loss_fn, 1)
    assert torch.equal(step(resumed, 1), expected)
    assert not torch.equal(step(fresh, 1), expected)
