"""A run that was stopped and resumed on one process gives the same bits as one that was not."""

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from src.callbacks.ema import EMACallback
from src.callbacks.model_checkpoint import ModelCheckpointMine
from src.engines import SingleDeviceStrategy, rng
from src.engines.resume import _NO_LONGER_STORED
from src.utils import checkpoint as checkpoints
from training.tests.engines import tiny


def run(folder, max_steps, ckpt_path=None, task=None, data=None, callbacks=(), seed=1, noisy=True, **options):
    """Train to max_steps; returns (task, random states at the end). task may be a function that makes it."""
    L.seed_everything(seed)
    task = task or tiny.Task(noisy_validation=noisy)
    task, data = task if isinstance(task, L.LightningModule) else task(), data or tiny.Data(batch_size=4)
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
    [(1, 4), (1, 11), (1, 12), (1, 13), (2, 2), (2, 6), (5, 3)],
)  # an epoch has 12 batches, so 12, 6 or 3 steps; validation comes after batches 4 and 8
def test_resumed_run_is_the_same(tmp_path, accumulate, step):
    options = dict(accumulate_grad_batches=accumulate)
    whole, states = run(tmp_path, 16, callbacks=[tiny.SaveAt(step, tmp_path)], **options)
    resumed, resumed_states = run(tmp_path, 16, tmp_path / f"step_{step}.ckpt", seed=2, **options)
    assert 0 < len(resumed.losses) < len(whole.losses)
    assert_same_run(resumed, resumed_states, whole, states)


def test_bad_input_is_named_before_anything_is_changed(tmp_path):
    run(tmp_path, 2, callbacks=[tiny.SaveAt(2, tmp_path)])
    path = tmp_path / "step_2.ckpt"
    cases = {  # message -> task
        r"norm\.weight has shape \(16,\) in the checkpoint and \(24,\) in the model": tiny.Task(tiny.Model(24)),
        r"layers\.2\..* has shape no tensor in the checkpoint": tiny.Task(tiny.Model(layers=3)),
        r"layers\.1\..* is not in the model": tiny.Task(tiny.Model(layers=1)),
        r"the optimizer must be \['AdamW'\], found \['SGD'\]": tiny.Task(optimizer=torch.optim.SGD),
    }
    for message, task in cases.items():
        before = tiny.weights(task)
        with pytest.raises(checkpoints.CheckpointError, match=message):
            run(tmp_path, 4, path, task=task)
        torch.testing.assert_close(tiny.weights(task), before, rtol=0, atol=0)


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path):
    run(tmp_path, 2, callbacks=[tiny.SaveAt(2, tmp_path)])
    resumed, _ = run(tmp_path, 4, tmp_path / "step_2.ckpt", data=tiny.Data(batch_size=2), accumulate_grad_batches=2)
    whole, _ = run(tmp_path, 4)
    flat = [index for batch in resumed.seen for index in batch]
    assert flat == [index for batch in whole.seen[2:] for index in batch]
    torch.testing.assert_close(resumed.rates, whole.rates[-2:], rtol=0, atol=0)


def test_another_batch_size_need_not_divide_what_was_seen(tmp_path):
    whole, _ = run(tmp_path, 12, callbacks=[tiny.SaveAt(2, tmp_path)])  # an epoch of 48 samples; 8 before the save
    resumed, _ = run(tmp_path, 2 + 14, tmp_path / "step_2.ckpt", data=tiny.Data(batch_size=3), max_epochs=1)
    assert [each for batch in resumed.seen for each in batch] == [each for batch in whole.seen[2:] for each in batch]
    assert [len(batch) for batch in resumed.seen] == 13 * [3] + [1]


def test_a_save_within_an_accumulation_waits_for_its_end(tmp_path):
    class SaveAfterBatch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:  # of 3 that are accumulated, the first
                trainer.save_checkpoint(tmp_path / "asked.ckpt")
                assert not (tmp_path / "asked.ckpt").exists()

    whole, states = run(tmp_path, 5, callbacks=[SaveAfterBatch()], accumulate_grad_batches=3)
    assert checkpoints.Checkpoint(tmp_path / "asked.ckpt").state["global_step"] == 2
    resumed, resumed_states = run(tmp_path, 5, tmp_path / "asked.ckpt", seed=2, accumulate_grad_batches=3)
    assert_same_run(resumed, resumed_states, whole, states)


class AtBatch(L.Callback):
    """Calls a function with the trainer at the end of the number-th batch."""

    def __init__(self, number, function):
        self.number, self.function = number, function

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.number:
            self.function(trainer)


def stop(trainer):
    trainer.should_stop = True  # as Trainer(max_time=…) does


def fail(trainer):
    raise RuntimeError("failed")


def test_a_run_ends_between_two_steps(tmp_path):
    """One that is told to stop in the middle of an accumulation ends it, and saves."""
    whole, states = run(tmp_path, 9, accumulate_grad_batches=3)
    callbacks = [AtBatch(7, stop), ModelCheckpointMine(tmp_path, save_last=True, every_n_train_steps=100)]
    run(tmp_path, 9, callbacks=callbacks, accumulate_grad_batches=3, enable_checkpointing=True)
    last = tmp_path / "last.ckpt"
    assert checkpoints.Checkpoint(last).state["global_step"] == 3
    resumed, resumed_states = run(tmp_path, 9, last, seed=2, accumulate_grad_batches=3)
    assert_same_run(resumed, resumed_states, whole, states)


@pytest.mark.parametrize("batch", [7, 9, 13])  # of 3 that are accumulated the first, and the last; of the next epoch
def test_a_run_that_fails_goes_on_from_the_last_step(batch, tmp_path):
    options = dict(accumulate_grad_batches=3, enable_checkpointing=True)

    def plain():  # without dropout: random states are not those of the last step
        return tiny.Task(tiny.Model(dropout=0.0), noisy_validation=False)

    whole, _ = run(tmp_path, 9, task=plain, accumulate_grad_batches=3)
    with pytest.raises(RuntimeError, match="failed"):
        callbacks = [AtBatch(batch, fail), ModelCheckpointMine(tmp_path, fault_tolerant=True)]
        run(tmp_path, 9, task=plain, callbacks=callbacks, **options)
    saved = checkpoints.latest(tmp_path)
    assert checkpoints.Checkpoint(saved).state["global_step"] == batch // 3
    resumed, _ = run(tmp_path, 9, saved, task=plain, accumulate_grad_batches=3)
    assert resumed.seen == whole.seen[batch // 3 * 3 :]
    torch.testing.assert_close(tiny.weights(resumed), tiny.weights(whole), rtol=0, atol=0)


def test_a_run_that_is_killed_before_its_first_validation_goes_on(tmp_path):
    """Its checkpoint is taken where the validation comes next: a run that goes on validates, and saves the best."""

    def options():
        saver = ModelCheckpointMine(tmp_path, "{step}", monitor="val/loss", every_n_train_steps=2, save_last=True)
        return dict(callbacks=[saver], enable_checkpointing=True)

    class Killed(RuntimeError):
        pass

    class KilledInValidation(tiny.Task):
        def validation_step(self, batch, batch_idx):
            if not self.trainer.sanity_checking:
                raise Killed
            super().validation_step(batch, batch_idx)

    whole, states = run(tmp_path / "whole", 6)
    with pytest.raises(Killed):
        run(tmp_path, 6, task=KilledInValidation, **options())
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["last.ckpt"]
    last = checkpoints.Checkpoint(tmp_path / "last.ckpt")
    assert last.state["global_step"] == 4
    resumed, resumed_states = run(tmp_path, 6, last.path, seed=2, **options())
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", "step=4.ckpt"]
    assert_same_run(resumed, resumed_states, whole, states)


PLACES = [("before_backward", 8, 3), ("validation_batch_start", 3, 2), ("validation_batch_start", 11, 4)]


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(("place", "number", "step"), PLACES)  # 3 batches are a step; validation is after 4, 8 and 12
def test_a_signal_saves_and_stops(place, number, step, averaged, tmp_path):
    def options():
        return dict(accumulate_grad_batches=3, callbacks=[EMACallback(0.9)] if averaged else [])

    never_stopped = options()
    whole, states = run(tmp_path, 9, **never_stopped)
    first = options()
    first["callbacks"].append(tiny.SendSignal("SIGTERM", place, number))
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path, 9, **first)
    assert stopped.value.code == 128 + 15
    saved = checkpoints.latest(tmp_path)
    assert saved.name == ".pl_auto_save.ckpt"
    assert checkpoints.Checkpoint(saved).state["global_step"] == step
    second = options()
    resumed, resumed_states = run(tmp_path, 9, saved, seed=2, **second)
    assert_same_run(resumed, resumed_states, whole, states)
    if averaged:
        emas = [each["callbacks"][0].ema for each in (second, never_stopped)]
        assert emas[0].num_updates == emas[1].num_updates
        torch.testing.assert_close(emas[0].shadow_params, emas[1].shadow_params, rtol=0, atol=0)


def test_the_scale_of_the_loss_goes_on(tmp_path):
    def options():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)  # too large: it shrinks, then grows
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}

    whole, states = run(tmp_path, 14, callbacks=[tiny.SaveAt(8, tmp_path)], **options())
    resumed, resumed_states = run(tmp_path, 14, tmp_path / "step_8.ckpt", seed=2, **options())
    assert_same_run(resumed, resumed_states, whole, states)
    scalers = [task.trainer.precision_plugin.scaler.state_dict() for task in (resumed, whole)]
    assert scalers[0] == scalers[1]
    assert scalers[0]["scale"] != 2.0**22


def test_checkpoints_of_the_best_and_the_last(tmp_path):
    callback = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss", save_top_k=2, save_last=True)
    run(tmp_path, 12, callbacks=[callback], enable_checkpointing=True)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 3 and names[0] == "last.ckpt" and all(checkpoints.is_complete(tmp_path / n) for n in names)
    assert callback.best_model_path in {str(tmp_path / name) for name in names}


@pytest.mark.parametrize("noisy", [False, True])
def test_validation_does_not_disturb_training(noisy, tmp_path):
    with_validation, _ = run(tmp_path, 9, noisy=noisy)
    without, _ = run(tmp_path, 9, limit_val_batches=0)
    assert with_validation.losses == without.losses


def test_weights_of_a_checkpoint(tmp_path):
    whole, _ = run(tmp_path, 2, callbacks=[tiny.SaveAt(2, tmp_path)])
    torch.testing.assert_close(
        checkpoints.load_checkpoint(tmp_path / "step_2.ckpt"), dict(whole.model.state_dict()), rtol=0, atol=0
    )


def test_a_resumed_run_saves_what_the_whole_one_does(tmp_path):
    def options():
        callback = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        return dict(callbacks=[callback], enable_checkpointing=True, accumulate_grad_batches=3)

    run(tmp_path, 4, **options())
    run(tmp_path, 6, tmp_path / "step=2.ckpt", **options())
    steps = {path.name: checkpoints.Checkpoint(path).state["global_step"] for path in tmp_path.glob("[!.]*")}
    assert steps == {"step=2.ckpt": 2, "step=4.ckpt": 4, "step=4-v1.ckpt": 4, "step=6.ckpt": 6}


@pytest.mark.parametrize("part", ["", "@tp0", "@tp12"])  # of a tensor parallel model
def test_older_checkpoints_have_more_counts(part):
    names = [f"{phase}_metrics.num-tokens.count{part}" for phase in ("train", "val", "test")]
    assert [bool(_NO_LONGER_STORED.fullmatch(name)) for name in names] == [False, True, True]
