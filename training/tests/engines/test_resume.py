"""A run that was stopped and resumed on one process gives the same bits as one that was not."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from src.engines import SingleDeviceStrategy, rng
from src.utils import checkpoint as checkpoints

from training.tests.engines import tiny


def run(folder, max_steps, ckpt_path=None, task=None, data=None, callbacks=(), seed=1, **options):
    """Train to max_steps; returns (task, random states at the end)."""
    L.seed_everything(seed)
    task, data = task or tiny.Task(), data or tiny.Data(batch_size=4)
    trainer = tiny.trainer(folder, SingleDeviceStrategy(), max_steps, callbacks=list(callbacks), **options)
    trainer.fit(task, datamodule=data, ckpt_path=ckpt_path)
    return task, rng.collect()


def assert_same_run(resumed, states, whole, states_of_whole):
    torch.testing.assert_close(tiny.weights(resumed), tiny.weights(whole), rtol=0, atol=0)
    torch.testing.assert_close(tiny.moments(resumed), tiny.moments(whole), rtol=0, atol=0)
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert resumed.seen == whole.seen[-len(resumed.seen) :]
    assert resumed.rates == whole.rates[-len(resumed.rates) :]
    assert states == states_of_whole


@pytest.mark.parametrize(
    ("accumulate", "step"),
    [(1, 2), (1, 4), (1, 11), (1, 12), (1, 13), (2, 2), (2, 5), (2, 6), (2, 7), (5, 2), (5, 3)],
)  # an epoch has 12 batches, so 12, 6 or 3 steps; validation comes after batches 4 and 8
def test_resumed_run_is_the_same(tmp_path, accumulate, step):
    options = dict(accumulate_grad_batches=accumulate)
    whole, states = run(tmp_path, 16, callbacks=[tiny.SaveAt(step, tmp_path)], **options)
    resumed, resumed_states = run(tmp_path, 16, tmp_path / f"step_{step}.ckpt", seed=2, **options)
    assert 0 < len(resumed.losses) < len(whole.losses)
    assert_same_run(resumed, resumed_states, whole, states)
