"""Averages in training: when they are updated, used, saved and resumed."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from src.callbacks.ema import EMACallback
from src.callbacks.model_checkpoint import ModelCheckpointMine
from tests.callbacks.tiny import TinyModel, TinyTask, loader, trainer


class Watches(TinyTask):
    """Remembers its weights after each step of the optimizer, and in each validation and test."""

    def __init__(self, *args):
        super().__init__(*args)
        self.after_step, self.evaluated = [], []

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters() if p.requires_grad]

    def on_train_start(self):
        self.first = self.weights()

    def on_train_batch_end(self, *args):
        if len(self.after_step) < self.trainer.global_step:
            self.after_step.append(self.weights())

    def on_validation_epoch_start(self):
        self.evaluated.append(self.weights())

    on_test_epoch_start = on_validation_epoch_start


def averages(task, decay, use_num_updates=False):
    """The averages after each step, by the formula."""
    average, all_of_them = [x.double() for x in task.first], []
    for n, weights in enumerate(task.after_step, start=1):
        now = min(decay, (1 + n) / (10 + n)) if use_num_updates else decay
        average = [now * a + (1 - now) * w.double() for a, w in zip(average, weights)]
        all_of_them.append(average)
    return all_of_them


def assert_close(weights, expected):
    for a, b in zip(weights, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_num_updates", [True, False])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_averages_of_optimizer_steps_are_evaluated(accumulate, use_num_updates):
    task, callback = Watches(), EMACallback(0.8, use_num_updates)
    used = trainer(
        [callback],
        max_steps=6,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1,
        val_check_interval=accumulate,
        num_sanity_val_steps=1,
    )
    used.fit(task, loader(64), loader())
    expected = averages(task, 0.8, use_num_updates)
    sanity, *validated = task.evaluated
    assert_close(sanity, [x.double() for x in task.first])
    assert len(validated) == len(expected) == 6
    for weights, average in zip(validated, expected):
        assert_close(weights, average)
    assert_close(task.weights(), [x.double() for x in task.after_step[-1]])  # swapped back
    used.test(task, loader(), verbose=False)
    assert_close(task.evaluated[-1], expected[-1])
    assert_close(task.weights(), [x.double() for x in task.after_step[-1]])


def test_training_itself_does_not_change():
    with_ema, without = Watches(), Watches()
    trainer([EMACallback(0.8)], max_steps=6, limit_val_batches=1, val_check_interval=2).fit(
        with_ema, loader(), loader()
    )
    trainer(max_steps=6).fit(without, loader())
    for a, b in zip(with_ema.parameters(), without.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Tied(TinyModel):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(3.0))


@pytest.mark.parametrize("use_num_updates", [True, False])
def test_checkpoints_have_both_weights_and_resume_exactly(tmp_path, use_num_updates):
    def run(max_steps, ckpt_path=None):
        task, callback = Watches(Tied), EMACallback(0.8, use_num_updates)
        used = trainer([callback], max_steps=max_steps, accumulate_grad_batches=2)
        same = [loader().dataset[0]] * 64  # what is resumed here is not the position in the data
        used.fit(task, torch.utils.data.DataLoader(same, 2), ckpt_path=ckpt_path)
        return task, callback, used

    task, callback, used = run(4)
    used.save_checkpoint(tmp_path / "four.ckpt")
    checkpoint = torch.load(tmp_path / "four.ckpt", weights_only=True)
    names = list(checkpoint["state_dict_ema"])
    assert names == list(checkpoint["state_dict"])
    trainable = [p for p in task.parameters() if p.requires_grad]
    average = {id(p): a for p, a in zip(trainable, averages(task, 0.8, use_num_updates)[-1])}
    for name, x in task.state_dict(keep_vars=True).items():
        torch.testing.assert_close(checkpoint["state_dict"][name], x.detach(), rtol=0, atol=0)
        expected = average.get(id(x), x.detach())
        torch.testing.assert_close(
            checkpoint["state_dict_ema"][name], expected, check_dtype=False, rtol=1e-5, atol=1e-6
        )

    _, resumed, _ = run(8, tmp_path / "four.ckpt")
    _, uninterrupted, _ = run(8)
    assert resumed.ema.num_updates == uninterrupted.ema.num_updates == (8 if use_num_updates else None)
    for a, b in zip(resumed.ema.shadow_params, uninterrupted.ema.shadow_params, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_checkpoint_without_averages_begins_them(tmp_path):
    used = trainer(max_steps=2)
    used.fit(TinyTask(), loader())
    used.save_checkpoint(tmp_path / "two.ckpt")
    callback, task = EMACallback(0.5), Watches()
    trainer([callback], max_steps=4).fit(task, loader(), ckpt_path=tmp_path / "two.ckpt")
    assert callback.ema.num_updates == 2
    weights = torch.load(tmp_path / "two.ckpt", weights_only=True)["state_dict"]
    assert_close(
        task.first, [weights[f"model.{n}"].double() for n, p in task.model.named_parameters() if p.requires_grad]
    )


class SavesWithin(ModelCheckpoint):
    """Also saves in the middle of a validation."""

    def on_validation_batch_end(self, trainer, *args):
        trainer.save_checkpoint(f"{self.dirpath}/within.ckpt")


@pytest.mark.parametrize("name", ["within", "after"])
def test_checkpoints_of_a_validation_have_the_weights(tmp_path, name):
    task, saver = Watches(), SavesWithin(tmp_path, "after", monitor="val/loss")
    used = trainer([EMACallback(0.8, False), saver], max_steps=4, limit_val_batches=1, val_check_interval=4)
    used.fit(task, loader(), loader())
    checkpoint = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
    trainable = [name for name, p in task.named_parameters() if p.requires_grad]
    assert_close([checkpoint["state_dict"][name] for name in trainable], [x.double() for x in task.after_step[-1]])
    assert_close([checkpoint["state_dict_ema"][name] for name in trainable], averages(task, 0.8)[-1])


def test_weights_are_back_when_a_validation_fails(tmp_path):
    class Fails(Watches):
        def validation_step(self, batch, batch_idx):
            raise RuntimeError("a bad sample")

    task = Fails()
    saver = ModelCheckpointMine(tmp_path, fault_tolerant=True)
    with pytest.raises(RuntimeError, match="a bad sample"):
        used = trainer([EMACallback(0.8), saver], max_steps=8, limit_val_batches=1, val_check_interval=4)
        used.fit(task, loader(), loader())
    assert_close(task.weights(), [x.double() for x in task.after_step[-1]])
    saved = torch.load(tmp_path / ".pl_auto_save.ckpt", weights_only=True)["state_dict"]
    for name, p in task.named_parameters():
        torch.testing.assert_close(saved[name], p.detach(), rtol=0, atol=0)


def test_half_precision_weights_have_averages_in_fp32():
    callback = EMACallback(0.99)
    trainer([callback], max_steps=2, precision="bf16-true").fit(TinyTask(), loader())
    assert {x.dtype for x in callback.ema.shadow_params} == {torch.float32}


def test_tensor_parallel_models_are_refused():
    used = trainer()
    used.strategy.tensor_parallel_size = 2
    with pytest.raises(ValueError, match=r"strategy\.tensor_parallel_size=1, found 2"):
        EMACallback(0.5).setup(used, None, "fit")


def test_state_is_plain():
    callback = EMACallback(0.5)
    assert copy.deepcopy(callback.state_dict()) == {"num_updates": None}
