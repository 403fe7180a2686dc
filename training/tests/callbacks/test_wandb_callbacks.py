"""What wandb gets, which is replaced by something that remembers."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import WandbLogger

from src.callbacks import wandb_callbacks as callbacks
from tests.callbacks.tiny import trainer

LABELS, NAMED = [0, 0, 1, 2, 2, 2, -100], [0, 1, 1, 2, 2, 0, 1]


class Remembers(WandbLogger):
    """A WandbLogger without wandb."""

    def __init__(self):
        self.calls, self.artifacts = [], []

    experiment = property(lambda self: SimpleNamespace(log_artifact=self.artifacts.append))

    def watch(self, *args, **kwargs):
        self.calls.append(("watch", args, kwargs))

    def log_image(self, key, images, step=None, **kwargs):
        self.calls.append((key, images, kwargs))

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params):
        pass

    def finalize(self, status):
        pass


class Artifact:
    def __init__(self, name, type):
        self.name, self.type, self.contents = name, type, []

    def add_file(self, path, name):
        self.contents.append(name)

    def add_dir(self, path, name):
        self.contents.append(name + "/")


@pytest.fixture
def run(monkeypatch):
    """(a stand-in for a trainer, its logger)."""
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Artifact=Artifact))
    logger = Remembers()
    reduce = lambda x, reduce_op: x  # noqa: E731
    stand_in = SimpleNamespace(
        fast_dev_run=False,
        loggers=[logger],
        sanity_checking=False,
        model="the model",
        checkpoint_callback=SimpleNamespace(best_model_path=""),
        strategy=SimpleNamespace(reduce=reduce),
    )
    return stand_in, logger


def outputs():
    return {"output": torch.eye(3)[NAMED], "targets": torch.tensor(LABELS)}


def test_logger_must_be_there():
    with pytest.raises(RuntimeError, match="need the logger wandb"):
        callbacks.get_wandb_logger(trainer())
    with pytest.raises(RuntimeError, match="fast_dev_run"):
        callbacks.get_wandb_logger(trainer(fast_dev_run=True))


def test_watch(run):
    used, logger = run
    callbacks.WatchModel("all", 7).on_train_start(used, None)
    assert logger.calls == [("watch", ("the model",), {"log": "all", "log_freq": 7, "log_graph": True})]


@pytest.mark.parametrize("use_git", [True, False])
def test_code(run, tmp_path, use_git):
    used, logger = run
    (tmp_path / "part").mkdir()
    for name in ("a.py", "part/b.py", "new.py", "notes.md"):
        (tmp_path / name).touch()
    for command in (["init", "-q"], ["add", "a.py", "part", "notes.md"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True)
    callbacks.UploadCodeAsArtifact(str(tmp_path), use_git).on_train_start(used, None)
    (artifact,) = logger.artifacts
    assert artifact.type == "code"
    expected = ["a.py", "notes.md", "part/b.py"] if use_git else ["a.py", "new.py", "part/b.py"]
    assert sorted(artifact.contents) == expected


@pytest.mark.parametrize("best_only", [True, False])
def test_checkpoints(run, tmp_path, best_only):
    used, logger = run
    (tmp_path / "step_1.ckpt").mkdir()
    (tmp_path / "old.ckpt").touch()
    used.checkpoint_callback.best_model_path = str(tmp_path / "step_1.ckpt")
    callbacks.UploadCheckpointsAsArtifact(str(tmp_path), best_only).on_train_end(used, None)
    assert logger.artifacts[0].contents == (["step_1.ckpt/"] if best_only else ["old.ckpt", "step_1.ckpt/"])


def test_classes_are_counted(run, monkeypatch):
    used, logger = run
    shown = []
    monkeypatch.setattr(callbacks, "_heatmap", lambda values, *args, **kwargs: shown.append(values))
    for callback in (callbacks.LogConfusionMatrix(), callbacks.LogF1PrecRecHeatmap(["a", "b", "c"])):
        for _ in range(2):
            callback.on_validation_epoch_start(used, None)
            for batch_idx in range(2):
                callback.on_validation_batch_end(used, None, outputs(), None, batch_idx)
            callback.on_validation_epoch_end(used, None)
    assert shown[0].tolist() == [[2, 2, 0], [0, 2, 0], [2, 0, 4]]
    assert torch.equal(shown[0], shown[1])
    precision, recall = [0.5, 0.5, 1.0], [0.5, 1.0, 2 / 3]
    f1 = [2 * p * r / (p + r) for p, r in zip(precision, recall)]
    torch.testing.assert_close(shown[2], torch.tensor([f1, precision, recall], dtype=torch.float64))
    assert [call[0] for call in logger.calls] == ["confusion_matrix"] * 2 + ["f1_p_r_heatmap"] * 2


def test_classes_without_samples():
    assert callbacks.f1_precision_recall(torch.tensor([[3, 0], [0, 0]])).tolist() == [[1.0, 0.0]] * 3


def test_figures(run):
    figure = pytest.importorskip("matplotlib.figure")
    used, logger = run
    for callback in (callbacks.LogConfusionMatrix(), callbacks.LogF1PrecRecHeatmap()):
        callback.on_validation_batch_end(used, None, outputs(), None, 0)
        callback.on_validation_epoch_end(used, None)
    for _, (shown,), _ in logger.calls:
        assert isinstance(shown, figure.Figure)
        shown.canvas.draw()
    assert [text.get_text() for text in logger.calls[0][1][0].axes[0].texts] == [*"110010102"]


def test_nothing_is_shown_of_a_sanity_check(run):
    used, logger = run
    used.sanity_checking = True
    for callback in (callbacks.LogConfusionMatrix(), callbacks.LogImagePredictions()):
        callback.on_validation_batch_end(used, None, outputs(), [torch.zeros(7, 3, 2, 2)], 0)
        callback.on_validation_epoch_end(used, None)
    assert logger.calls == []


def test_images(run):
    used, logger = run
    images = torch.rand(7, 3, 2, 2)
    callback = callbacks.LogImagePredictions(3)
    for batch_idx in range(2):
        callback.on_validation_batch_end(used, None, outputs(), [images], batch_idx)
    ((key, shown, options),) = logger.calls
    assert key == "images"
    assert torch.equal(torch.stack(shown), images[:3])
    assert options["caption"] == ["Pred: 0, Label: 0", "Pred: 1, Label: 0", "Pred: 1, Label: 1"]


def test_matplotlib_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        callbacks._heatmap(torch.zeros(2, 2), ["a", "b"], ["a", "b"])
