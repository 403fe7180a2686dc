"""Evaluation: of which weights, from what files, and what is reported."""

import json

import lightning as L
import pytest
import torch

from src.callbacks.ema import EMACallback
from src.engines import SingleDeviceStrategy
from src.eval import evaluate, remove_prefix
from src.tasks.seq import SequenceLMModel
from training.tests.standins import small


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder with last.ckpt of a run that averages its weights, the task)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    task = SequenceLMModel(small("train.optimizer.lr=0.05"))
    trainer = L.Trainer(
        strategy=SingleDeviceStrategy(torch.device("cpu")),
        max_steps=6,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[EMACallback(decay=0.9)],
    )
    trainer.fit(task, datamodule=task._datamodule)
    trainer.save_checkpoint(folder / "last.ckpt")
    return folder, task, trainer.callbacks


def expected(model, config):
    """Mean loss of the first batches of validation."""
    task = SequenceLMModel(config)
    task.model.load_state_dict(model)
    task.eval()
    batches = [batch for batch, _ in zip(task._datamodule.val_dataloader(), range(2))]
    with torch.no_grad():
        return torch.stack([task.step(batch)[0] for batch in batches]).mean().item()


def results_of(tmp_path, monkeypatch, *overrides):
    monkeypatch.chdir(tmp_path)
    return evaluate(small("run=eval", "trainer.accelerator=cpu", *overrides))


@pytest.mark.parametrize("place", ["last.ckpt", ""])
@pytest.mark.parametrize("averaged", ["null", "true", "false"])
def test_checkpoint_of_ours(place, averaged, trained, tmp_path, monkeypatch, capsys):
    """A checkpoint, or the folder that it is in; its averaged weights unless others are asked for."""
    folder, task, callbacks = trained
    found = results_of(tmp_path, monkeypatch, f"eval.ckpt={folder / place}", f"eval.averaged={averaged}")
    weights = task.model.state_dict()
    if averaged != "false":
        (ema,) = [each.ema for each in callbacks if isinstance(each, EMACallback)]
        averages = dict(zip([name for name, _ in task.model.named_parameters()], ema.shadow_params, strict=True))
        weights = weights | averages | {"lm_head.weight": averages["transformer.embeddings.word_embeddings.weight"]}
    assert found["val/loss"] == pytest.approx(expected(weights, small()), rel=1e-5)
    assert found["test/loss"] == pytest.approx(found["val/loss"])  # the same data in this stand-in
    said = capsys.readouterr().out
    assert f"val/loss         {found['val/loss']:.6g}" in said
    written = json.loads((tmp_path / "eval.json").read_text())
    assert written == {"checkpoint": str(folder / "last.ckpt"), **found}


@pytest.mark.parametrize("kind", ["weights", "with a prefix", "of Lightning", "averaged alone"])
def test_files(kind, trained, tmp_path, monkeypatch):
    weights = {name: x.clone() for name, x in trained[1].model.state_dict().items()}
    prefixed = {f"model.{name}": x for name, x in weights.items()}
    contents = {
        "weights": weights,
        "with a prefix": prefixed,
        "of Lightning": {"state_dict": prefixed, "epoch": 1},
        "averaged alone": {"state_dict_ema": weights},
    }[kind]
    torch.save(contents, tmp_path / "some.ckpt")
    found = results_of(tmp_path, monkeypatch, f"eval.ckpt={tmp_path / 'some.ckpt'}", "eval.run_test=false")
    assert found["val/loss"] == pytest.approx(expected(weights, small()), rel=1e-5)
    assert not any(name.startswith("test/") for name in found)


def test_model_of_the_checkpoint(trained, tmp_path, monkeypatch):
    """checkpoint_type=lightning takes the model from the checkpoint, whatever this configuration has."""
    folder, task, _ = trained
    overrides = ("eval.checkpoint_type=lightning", "model.config.n_layer=3", "eval.averaged=false")
    found = results_of(tmp_path, monkeypatch, f"eval.ckpt={folder}", *overrides, "eval.run_test=false")
    assert found["val/loss"] == pytest.approx(expected(task.model.state_dict(), small()), rel=1e-5)


def test_without_a_checkpoint(tmp_path, monkeypatch):
    """The model as it is made: that of model_pretrained, if there is one."""
    config = small("run=eval", "trainer.accelerator=cpu", "eval.run_val=false")
    config.model_pretrained = config.model.copy()
    config.model_pretrained.config.initializer_range = 0.0  # all logits are equal
    monkeypatch.chdir(tmp_path)
    assert evaluate(config)["test/ppl"] == pytest.approx(56, rel=1e-5)  # 50 ids, rounded up to a multiple of 8


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("eval.ckpt=nowhere",), "eval.ckpt must be a checkpoint or a folder of checkpoints, found nothing at nowhere"),
        (("eval.checkpoint_type=lighting",), "eval.checkpoint_type must be pytorch or lightning, found 'lighting'"),
        (
            ("eval.checkpoint_type=lightning",),
            "eval.checkpoint_type=lightning needs a checkpoint with its config",
        ),
        (("eval.ckpt=weights.pt",), "eval.ckpt=weights.pt must have weights of the model, found none: weight"),
        (
            ("eval.ckpt=other.pt",),
            r"eval.ckpt=other.pt must have weights that fit the model, found: size mismatch for lm_",
        ),
        (("eval.ckpt=weights.pt", "eval.averaged=true"), "eval.averaged=True needs a checkpoint of a run with EMACal"),
    ],
)
def test_errors(overrides, says, tmp_path, monkeypatch):
    torch.save({"weight": torch.zeros(1)}, tmp_path / "weights.pt")
    torch.save({"lm_head.weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=says):
        results_of(tmp_path, monkeypatch, *overrides)


def test_remove_prefix():
    assert remove_prefix("model.weight", "model.") == "weight" and remove_prefix("weight", "model.") == "weight"
