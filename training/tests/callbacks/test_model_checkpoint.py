"""Checkpoints of runs that fail."""

import pathlib
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from processes import over_processes

from src.callbacks.model_checkpoint import ModelCheckpointMine
from tests.callbacks.tiny import TinyTask, loader, trainer

AUTO_SAVE = ".pl_auto_save.ckpt"


class Fails(TinyTask):
    """Raises an error at batch 5: in the step, or while the optimizer changes the weights."""

    def __init__(self, error=None, within_optimizer=False, at=5):
        super().__init__()
        self.error, self.within_optimizer, self.at = error or RuntimeError(), within_optimizer, at

    def training_step(self, batch, batch_idx):
        if batch_idx == self.at and not self.within_optimizer:
            raise self.error
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        if self.within_optimizer and self.trainer.global_step == self.at:
            raise self.error


def fail(folder, task, error=RuntimeError, **options):
    saver = ModelCheckpointMine(folder, **{"fault_tolerant": True, **options})
    with pytest.raises(error):
        trainer([saver]).fit(task, loader())


@pytest.fixture(autouse=True)
def interrupts_are_as_before():
    """Lightning ignores them once it has got one."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("error, raised", [(RuntimeError(), RuntimeError), (KeyboardInterrupt(), SystemExit)])
def test_saved_on_an_error(tmp_path, error, raised):
    task = Fails(error)
    fail(tmp_path, task, raised)
    saved = torch.load(tmp_path / AUTO_SAVE, weights_only=True)
    assert saved["global_step"] == 5
    for name, x in task.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], x, rtol=0, atol=0)


@pytest.mark.parametrize(
    "task, options, error",
    [
        (lambda: Fails(), {"fault_tolerant": False}, RuntimeError),
        (lambda: Fails(within_optimizer=True), {}, RuntimeError),
        (lambda: Fails(at=0), {}, RuntimeError),  # there is nothing to save yet
        (lambda: Fails(SystemExit(143)), {}, SystemExit),  # on purpose
    ],
    ids=["not fault tolerant", "within the optimizer", "before the first step", "stopped"],
)
def test_not_saved(tmp_path, task, options, error):
    fail(tmp_path, task(), error, **options)
    assert not (tmp_path / AUTO_SAVE).exists()


def test_no_error(tmp_path):
    trainer([ModelCheckpointMine(tmp_path, fault_tolerant=True)]).fit(TinyTask(), loader())
    assert [file.name for file in tmp_path.iterdir()] == ["epoch=0-step=8.ckpt"]


@pytest.mark.parametrize("steps, saved", [(8, [3, 6, 8]), (6, [3, 6])])
def test_the_last_checkpoint_is_of_the_last_step(tmp_path, monkeypatch, steps, saved):
    """Also if every_n_train_steps does not divide it; training that goes on from there and is over saves nothing."""
    saver, seen = ModelCheckpointMine(tmp_path, every_n_train_steps=3, save_last=True, save_top_k=0), []
    save = saver._save_checkpoint
    monkeypatch.setattr(saver, "_save_checkpoint", lambda t, path: (seen.append(t.global_step), save(t, path)))
    trainer([saver], max_steps=steps).fit(TinyTask(), loader())
    assert seen == saved
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == steps
    again, at = ModelCheckpointMine(tmp_path, every_n_train_steps=3, save_last=True, save_top_k=0), last.stat()
    trainer([again], max_steps=steps).fit(TinyTask(), loader(), ckpt_path=last, weights_only=True)
    assert last.stat().st_mtime_ns == at.st_mtime_ns and [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("accumulate, validates_at", [(1, 4), (1, 6), (2, 4), (2, 5)])  # batches; 8 are an epoch
def test_there_is_a_last_checkpoint_before_the_first_validation(tmp_path, monkeypatch, accumulate, validates_at):
    """It comes every 2 steps; the best one, after the first validation. Nothing is saved twice but at that step."""
    saver = ModelCheckpointMine(tmp_path, "{step}", monitor="val/loss", every_n_train_steps=2, save_last=True)
    seen, save = [], saver._save_checkpoint
    monkeypatch.setattr(saver, "_save_checkpoint", lambda t, path: (seen.append((t.global_step, path)), save(t, path)))
    options = {"limit_val_batches": 1, "val_check_interval": validates_at, "accumulate_grad_batches": accumulate}
    trainer([saver], max_steps=4, **options).fit(TinyTask(), loader(), loader())
    seen = [(step, pathlib.Path(path).name) for step, path in seen]
    expected = {
        (1, 4): [(2, "last"), (4, "last"), (4, "step=4"), (4, "last")],
        (1, 6): [(2, "last"), (4, "last")],
        (2, 4): [(2, "last"), (2, "step=2"), (2, "last"), (4, "last")],
        (2, 5): [(2, "last"), (4, "last")],
    }
    assert seen == [(step, f"{name}.ckpt") for step, name in expected[accumulate, validates_at]]


@pytest.mark.parametrize("save_last", [True, False, None])
@pytest.mark.parametrize(
    "when", [{"every_n_train_steps": 3}, {"train_time_interval": timedelta(0)}, {"every_n_epochs": 1}, {}]
)
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.cover(2)
def test_without_the_metric_there_is_a_checkpoint_of_the_last_step(when, save_last, validates, tmp_path):
    """With no validation at all, or none yet. The best ones take its place once there are any."""
    saver = ModelCheckpointMine(tmp_path, "{step}", monitor="val/loss", save_last=save_last, **when)
    later = {"limit_val_batches": 1, "val_check_interval": 100, "check_val_every_n_epoch": None}
    used = trainer([saver], max_steps=10, **(later if validates else {}))  # an epoch has 8
    used.fit(TinyTask(), loader(), loader())
    (saved,) = tmp_path.iterdir()
    assert saved.name == ("last.ckpt" if save_last else AUTO_SAVE)
    assert torch.load(saved, weights_only=True)["global_step"] == 10


def test_nothing_is_kept_where_nothing_is_asked_for(tmp_path):
    saver = ModelCheckpointMine(tmp_path, monitor="val/loss", save_top_k=0)
    trainer([saver]).fit(TinyTask(), loader(), loader())
    assert not list(tmp_path.iterdir())


def on_each_rank(group, begun, comes, expected):
    saver, rank = ModelCheckpointMine(fault_tolerant=True), group.rank()
    saver._begun, saver.timeout = begun[rank], timedelta(seconds=20 if all(comes) else 0.5)
    saver._group = dist.new_group(backend="gloo", timeout=saver.timeout)
    if comes[rank]:
        assert saver._all_agree(SimpleNamespace(global_step=5, global_rank=rank)) is expected


@pytest.mark.parametrize(
    "begun, comes, expected",
    [
        ((4, 4), (True, True), True),
        ((4, 5), (True, True), False),  # one was changing its weights
        ((4, 4), (True, False), False),  # one goes on
        ((4, 4), (False, True), False),
    ],
)
def test_all_ranks_must_have_an_error(begun, comes, expected):
    over_processes(2, on_each_rank, begun, comes, expected)
