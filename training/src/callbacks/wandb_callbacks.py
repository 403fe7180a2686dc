"""What Weights & Biases can show of a run. Needs wandb, and the logger `wandb`.

The callbacks that look at validation are for classifiers. They need what the tasks return from a validation step, a
dict with `output`, scores (batch, classes, ...), and `targets`, labels (batch, ...); negative labels are left out.
"""

import pathlib
import subprocess
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor


def get_wandb_logger(trainer: L.Trainer) -> WandbLogger:
    """The wandb logger of a trainer. Raises RuntimeError if it has none, or with fast_dev_run."""
    if trainer.fast_dev_run:
        raise RuntimeError("wandb callbacks cannot work with trainer.fast_dev_run, which turns all loggers off")
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            return logger
    raise RuntimeError("wandb callbacks need the logger wandb (`logger=wandb`), but it is not among the loggers")


class WatchModel(L.Callback):
    """Has wandb watch the model from the start of training. log, log_freq: see wandb.watch."""

    def __init__(self, log: str = "gradients", log_freq: int = 100) -> None:
        self.log_what, self.log_freq = log, log_freq

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        get_wandb_logger(trainer).watch(trainer.model, log=self.log_what, log_freq=self.log_freq, log_graph=True)


class UploadCodeAsArtifact(L.Callback):
    """Uploads code when training begins.

    Arguments:
        code_dir: the folder of the code.
        use_git: upload the files that git tracks; otherwise all Python files.
    """

    def __init__(self, code_dir: str, use_git: bool = True) -> None:
        self.code_dir, self.use_git = pathlib.Path(code_dir), use_git

    @rank_zero_only
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        import wandb

        logger = get_wandb_logger(trainer)
        artifact = wandb.Artifact("project-source", type="code")
        for name in self._files():
            artifact.add_file(str(self.code_dir / name), name=name)
        logger.experiment.log_artifact(artifact)

    def _files(self) -> list[str]:
        """The files to upload, relative to code_dir."""
        if not self.use_git:
            return sorted(file.relative_to(self.code_dir).as_posix() for file in self.code_dir.rglob("*.py"))
        listing = subprocess.run(
            ["git", "-C", str(self.code_dir), "ls-files", "-z"], check=True, capture_output=True, text=True
        ).stdout
        return [name for name in listing.split("\0") if name and (self.code_dir / name).is_file()]


class UploadCheckpointsAsArtifact(L.Callback):
    """Uploads checkpoints, files or folders, when training ends.

    Arguments:
        ckpt_dir: the folder whose `*.ckpt` are uploaded.
        upload_best_only: upload the best one only.
    """

    def __init__(self, ckpt_dir: str = "checkpoints/", upload_best_only: bool = False) -> None:
        self.ckpt_dir, self.upload_best_only = pathlib.Path(ckpt_dir), upload_best_only

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        import wandb

        logger = get_wandb_logger(trainer)
        best = trainer.checkpoint_callback.best_model_path if trainer.checkpoint_callback else ""
        paths = [pathlib.Path(best)] if self.upload_best_only else sorted(self.ckpt_dir.rglob("*.ckpt"))
        artifact = wandb.Artifact("experiment-ckpts", type="checkpoints")
        for path in paths:
            if path.is_dir():
                artifact.add_dir(str(path), name=path.name)
            elif path.is_file():
                artifact.add_file(str(path), name=path.name)
        logger.experiment.log_artifact(artifact)


class _CountsClasses(L.Callback):
    """Counts pairs of labels and predicted classes over a validation epoch."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # int64 (labels, predicted classes)

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.counts = None

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        scores, targets = outputs["output"], outputs["targets"]
        classes = scores.shape[1]
        named, targets = scores.argmax(dim=1).flatten(), targets.flatten()
        pairs = torch.where(targets < 0, classes**2, targets * classes + named)
        counts = torch.bincount(pairs, minlength=classes**2 + 1)[:-1].view(classes, classes)
        self.counts = counts if self.counts is None else self.counts + counts

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking or self.counts is None:
            return
        self._report(trainer, trainer.strategy.reduce(self.counts, reduce_op="sum").cpu())

    def _report(self, trainer: L.Trainer, counts: Tensor) -> None:
        raise NotImplementedError


class LogConfusionMatrix(_CountsClasses):
    """Shows how often each class was predicted for each label, after each validation."""

    @rank_zero_only
    def _report(self, trainer: L.Trainer, counts: Tensor) -> None:
        names = [str(i) for i in range(len(counts))]
        figure = _heatmap(counts, names, names, x_label="named by the model", y_label="label")
        get_wandb_logger(trainer).log_image("confusion_matrix", [figure])


class LogF1PrecRecHeatmap(_CountsClasses):
    """Shows F1, precision and recall of each class, after each validation.

    Arguments:
        class_names: names of the classes; their numbers if None.
    """

    def __init__(self, class_names: Sequence[str] | None = None) -> None:
        super().__init__()
        self.class_names = class_names

    @rank_zero_only
    def _report(self, trainer: L.Trainer, counts: Tensor) -> None:
        names = list(self.class_names or map(str, range(len(counts))))
        figure = _heatmap(f1_precision_recall(counts), ["F1", "precision", "recall"], names, x_label="class")
        get_wandb_logger(trainer).log_image("f1_p_r_heatmap", [figure])


class LogImagePredictions(L.Callback):
    """Shows the first images of each validation, with their labels and the predicted classes.

    Arguments:
        num_samples: how many.
    """

    def __init__(self, num_samples: int = 8) -> None:
        self.num_samples = num_samples

    @rank_zero_only
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.sanity_checking or batch_idx > 0:
            return
        images = list(batch[0][: self.num_samples].float().cpu())
        named = outputs["output"][: self.num_samples].argmax(dim=1).tolist()
        labels = outputs["targets"][: self.num_samples].tolist()
        captions = [f"Pred: {name}, Label: {label}" for name, label in zip(named, labels, strict=True)]
        get_wandb_logger(trainer).log_image("images", images, caption=captions)


def f1_precision_recall(counts: Tensor) -> Tensor:
    """F1, precision and recall, float64 (3, classes), of counts (labels, predicted classes); 0 without samples."""
    counts = counts.double()
    right, named, actual = counts.diagonal(), counts.sum(dim=0), counts.sum(dim=1)
    ratios = torch.stack([2 * right / (named + actual), right / named, right / actual])
    return ratios.nan_to_num(0.0)


def _heatmap(values, rows, columns, x_label="", y_label=""):
    """A figure of a matrix, with its numbers if they are few."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures for wandb need matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(3 + len(columns) * 0.4, 3 + len(rows) * 0.3), layout="constrained")
    axes = figure.subplots()
    figure.colorbar(axes.imshow(values.numpy(), aspect="auto"))
    axes.set(xlabel=x_label, ylabel=y_label)
    if len(columns) <= 40:
        axes.set_xticks(range(len(columns)), columns, rotation=90)
        axes.set_yticks(range(len(rows)), rows)
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.3g}", ha="center", va="center", fontsize=7, color="white")
    return figure
