"""Averages of parameters against the formula, in float64."""

import copy
import gc

import pytest
import torch
from processes import over_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from src.utils.ema import ExponentialMovingAverage


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64).to(dtype)) for n in (3, 5)]


def walk(params, steps=20):
    """Yields after each change of the parameters."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        with torch.no_grad():
            for p in params:
                p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))
        yield


@pytest.mark.parametrize("use_num_updates", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_formula(decay, use_num_updates, dtype):
    params = parameters(dtype)
    ema = ExponentialMovingAverage(params, decay, use_num_updates)
    expected = [p.detach().double().clone() for p in params]
    for n, _ in enumerate(walk(params), start=1):
        ema.update()
        now = min(decay, (1 + n) / (10 + n)) if use_num_updates else decay
        expected = [now * e + (1 - now) * p.detach().double() for e, p in zip(expected, params)]
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype is torch.float64 else dict(rtol=1e-5, atol=1e-5)
    for shadow, e in zip(ema.shadow_params, expected):
        assert shadow.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        torch.testing.assert_close(shadow.double(), e, **tolerance)
    assert ema.num_updates == (20 if use_num_updates else None)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_decay_must_be_a_share(decay):
    with pytest.raises(ValueError, match="decay must be between 0 and 1"):
        ExponentialMovingAverage(parameters(), decay)


def test_only_trainable_parameters_are_averaged():
    params = parameters()
    params[0].requires_grad_(False)
    ema = ExponentialMovingAverage(params, 0.5)
    assert [len(shadow) for shadow in ema.shadow_params] == [5]
    with ema.average_parameters():
        pass


def test_averages_for_a_while():
    params = parameters(torch.float16)
    ema = ExponentialMovingAverage(params, 0.9)
    for _ in walk(params):
        ema.update()
    before = [p.detach().clone() for p in params]
    with pytest.raises(KeyError), ema.average_parameters():
        for p, shadow in zip(params, ema.shadow_params):
            torch.testing.assert_close(p.detach(), shadow.half(), rtol=0, atol=0)
        raise KeyError
    for p, value in zip(params, before):
        torch.testing.assert_close(p.detach(), value, rtol=0, atol=0)
    assert ema.collected_params is None
    with pytest.raises(RuntimeError, match="store"):
        ema.restore()


def test_other_parameters_may_be_given():
    params, others = parameters(), parameters()
    ema = ExponentialMovingAverage(params, 0.9)
    list(walk(params, 1))
    ema.store(params)
    ema.copy_to(others)
    torch.testing.assert_close(others[0].detach(), ema.shadow_params[0])
    ema.restore(others)
    torch.testing.assert_close(others[0].detach(), params[0].detach())
    with pytest.raises(ValueError, match="parameters must have 2 tensors"):
        ema.update(params[:1])


def test_state_goes_on_exactly():
    params, again = parameters(), parameters()
    ema, resumed = ExponentialMovingAverage(params, 0.9), None
    for step, _ in enumerate(zip(walk(params), walk(again))):
        if step == 7:
            ema.store()
            resumed = ExponentialMovingAverage(parameters(), 0.1, use_num_updates=False)
            resumed.load_state_dict(ema.state_dict())
            assert all(a is not b for a, b in zip(resumed.shadow_params, ema.shadow_params))
        ema.update()
        if resumed:
            resumed.update(again)
    assert (resumed.decay, resumed.num_updates) == (0.9, 20)
    for name in ("shadow_params", "collected_params"):
        for a, b in zip(getattr(resumed, name), getattr(ema, name), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert set(ema.state_dict()) == {"decay", "num_updates", "shadow_params", "collected_params"}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"decay": 2.0}, "decay must be between 0 and 1, found 2.0"),
        ({"shadow_params": []}, "shadow_params must have 2 tensors"),
        ({"collected_params": [torch.ones(1)]}, "collected_params must have 2 tensors"),
    ],
)
def test_states_that_do_not_fit_are_refused(change, message):
    ema = ExponentialMovingAverage(parameters(), 0.5)
    with pytest.raises(ValueError, match=message):
        ema.load_state_dict({**ema.state_dict(), **change})


def test_parameters_are_not_kept_alive():
    params = parameters()
    ema = ExponentialMovingAverage(params, 0.5)
    del params
    gc.collect()
    with pytest.raises(ValueError, match="no longer exist"):
        ema.update()


def test_to_changes_the_averages_but_not_what_is_stored():
    params = parameters()
    ema = ExponentialMovingAverage(params, 0.5)
    ema.store()
    ema.to(device="cpu", dtype=torch.float32)
    assert ema.shadow_params[0].dtype == torch.float32
    assert ema.collected_params[0].dtype == torch.float64


def divided(group):
    """Averages of parameters that are divided over processes (FSDP2) are those of whole ones."""
    whole = nn.Linear(5, 3)
    with torch.no_grad():
        for p in whole.parameters():
            p.fill_(1.0)
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=init_device_mesh("cpu", (group.size(),)))
    pairs = [(ExponentialMovingAverage(each.parameters(), 0.9), each) for each in (whole, model)]
    for n in range(3):
        for ema, each in pairs:
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(n + 2.0)
            ema.update()
    (ema_of_whole, _), (ema, _) = pairs
    before = [p.full_tensor() for p in model.parameters()]
    with ema.average_parameters():
        for p, expected in zip(model.parameters(), ema_of_whole.shadow_params):
            torch.testing.assert_close(p.full_tensor(), expected)
    for p, expected in zip(model.parameters(), before):
        torch.testing.assert_close(p.full_tensor(), expected, rtol=0, atol=0)
    ema.load_shadow_params([2 * x for x in ema_of_whole.shadow_params])  # whole tensors, as a checkpoint has them
    for x, expected in zip(ema.shadow_params, ema_of_whole.shadow_params):
        torch.testing.assert_close(x.full_tensor(), 2 * expected)
    ema.update()


def test_parameters_that_are_divided():
    over_processes(2, divided)
