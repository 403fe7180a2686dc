"""Learning rates against their formulas, over whole runs and after a restart."""

import itertools
import math

import pytest
import torch

from src.optim.lr_scheduler import InvSqrt
from src.optim.timm_lr_scheduler import TimmCosineLRScheduler

LRS = (6e-4, 1e-2)


def rates(make, steps, resume_at=None):
    """The rates of two groups at steps 0, 1, ..., of a scheduler that is made anew at step resume_at."""
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in LRS])
    scheduler = make(optimizer)
    seen = []
    for step in range(steps):
        if step == resume_at:
            states = optimizer.state_dict(), scheduler.state_dict()
            optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in LRS])
            scheduler = make(optimizer)
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def cosine(t, lr, t_initial, lr_min=0.0, warmup_t=0, warmup_lr_init=0.0, t_in_epochs=True):
    if t < warmup_t:
        return warmup_lr_init + t * (lr - warmup_lr_init) / warmup_t
    if t < t_initial:
        return lr_min + 0.5 * (lr - lr_min) * (1 + math.cos(math.pi * t / t_initial))
    return lr_min


COSINES = [
    dict(t_initial=60),
    dict(t_initial=60, lr_min=6e-5, warmup_t=8, warmup_lr_init=1e-6, t_in_epochs=False),
    dict(t_initial=60, lr_min=1e-4, warmup_t=70, warmup_lr_init=1e-3),
    dict(t_initial=1),
]


@pytest.mark.parametrize("resume_at", [None, 0, 5, 37, 79])
@pytest.mark.parametrize("options", COSINES)
def test_cosine(options, resume_at):
    seen = rates(lambda optimizer: TimmCosineLRScheduler(optimizer, **options), 80, resume_at)
    expected = [[cosine(t, lr, **options) for lr in LRS] for t in range(80)]
    assert seen == [pytest.approx(row, rel=1e-12, abs=1e-12) for row in expected]


OPTIONS_OF_TIMM = [
    *COSINES,
    dict(t_initial=10, warmup_t=4, warmup_prefix=True, cycle_limit=3),
    dict(t_initial=8, cycle_mul=2.0, cycle_decay=0.5, cycle_limit=3, lr_min=1e-5),
    dict(t_initial=30, k_decay=1.5),
]


@pytest.mark.parametrize("options", OPTIONS_OF_TIMM)
def test_cosine_is_that_of_timm(options):
    timm_scheduler = pytest.importorskip("timm.scheduler")
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": lr} for lr in LRS])
    reference = timm_scheduler.CosineLRScheduler(optimizer, **options)
    seen = rates(lambda each: TimmCosineLRScheduler(each, **options), 80)
    for t in range(80):
        (reference.step if reference.t_in_epochs else reference.step_update)(t)
        assert seen[t] == pytest.approx([group["lr"] for group in optimizer.param_groups], rel=1e-12, abs=1e-12)


def test_cosines_that_follow_each_other():
    options = dict(t_initial=8, cycle_mul=2.0, cycle_decay=0.5, cycle_limit=3)
    seen = [row[0] for row in rates(lambda optimizer: TimmCosineLRScheduler(optimizer, **options), 70)]
    starts, lr = (0, 8, 24, 56), LRS[0]
    assert [seen[t] for t in starts[:3]] == pytest.approx([lr, lr / 2, lr / 4])
    assert [seen[(a + b) // 2] for a, b in itertools.pairwise(starts)] == pytest.approx([lr / 2, lr / 4, lr / 8])
    assert seen[56:] == [0.0] * 14


def test_cosine_after_its_warmup():
    seen = rates(lambda optimizer: TimmCosineLRScheduler(optimizer, 10, warmup_t=4, warmup_prefix=True), 20)
    for t in range(20):
        expected = [lr * t / 4 if t < 4 else cosine(t - 4, lr, 10) for lr in LRS]
        assert seen[t] == pytest.approx(expected, rel=1e-12)


def test_cosine_at_a_given_step():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    scheduler = TimmCosineLRScheduler(optimizer, 10)
    optimizer.step()
    scheduler.step(5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(cosine(6, 1.0, 10))


@pytest.mark.parametrize("t_initial", [0, -3])
def test_cosine_needs_a_length(t_initial):
    with pytest.raises(ValueError, match=f"t_initial must be positive, found {t_initial}"):
        TimmCosineLRScheduler(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), t_initial)


@pytest.mark.parametrize("resume_at", [None, 3, 30])
@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_inverse_square_root(warmup, resume_at):
    seen = rates(lambda optimizer: InvSqrt(optimizer, warmup), 50, resume_at)
    for t, row in enumerate(seen):
        factor = t / warmup if t < warmup else math.sqrt((warmup or 1) / (t or 1))
        assert row == pytest.approx([lr * factor for lr in LRS], rel=1e-12)
    assert max(row[0] for row in seen) == LRS[0]


def test_inverse_square_root_needs_a_warmup_that_is_not_negative():
    with pytest.raises(ValueError, match="num_warmup_steps must be at least 0, found -1"):
        InvSqrt(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), -1)
