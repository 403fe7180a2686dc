"""Each file of configs/callbacks and configs/metrics makes what it names."""

import pathlib

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from torchmetrics import Metric

from src.callbacks.progress_bar import ProgressBar
from tests.callbacks.tiny import TinyTask, loader, trainer

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
CALLBACKS = {
    "default": [
        "ModelSummary",
        "ModelCheckpointMine",
        "EarlyStopping",
        "LearningRateMonitor",
        "SpeedMonitor",
        "LossScaleMonitor",
        "ParamsLog",
        "GpuAffinity",
        "ProgressBar",
    ],
    "ema": ["EMACallback"],
    "flop-count": ["FlopCount"],
    "norm-monitor": ["NormMonitor"],
    "causality-monitor": ["CausalityMonitor"],
    "params-log": ["ParamsLog"],
    "model-summary": ["ModelSummary"],
    "none": [],
}
CALLBACKS["gpu-monitor"] = [*CALLBACKS["default"], "DeviceStatsMonitor"]
CALLBACKS["wandb"] = [
    *CALLBACKS["default"],
    "WatchModel",
    "UploadCodeAsArtifact",
    "UploadCheckpointsAsArtifact",
    "LogF1PrecRecHeatmap",
    "LogConfusionMatrix",
    "LogImagePredictions",
]
METRICS = {
    "acc": {"acc": "AccuracyMine"},
    "acctop5": {"acctop5": "AccuracyMine"},
    "acc_ignore_index": {"acc": "AccuracyMine"},
    "mse": {"mse": "MeanSquaredError"},
    "num-tokens": {"num-tokens": "NumTokens"},
    "perplexity": {"ppl": "Perplexity"},
}


def config(name, *overrides):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(name, overrides)


def callbacks(name, folder):
    overrides = [f"+checkpoint_dir={folder}/checkpoints", f"+work_dir={folder}"]
    if name == "ema":
        overrides.append("callbacks.ema.decay=0.9")
    found = config(f"callbacks/{name}", *overrides)
    return [instantiate(each) for each in found.get("callbacks", {}).values()]


def test_there_is_a_row_for_each_file():
    for group, table in (("callbacks", CALLBACKS), ("metrics", METRICS)):
        assert sorted(table) == sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name, tmp_path):
    made = callbacks(name, tmp_path)
    assert [type(each).__name__ for each in made] == CALLBACKS[name]
    assert all(isinstance(each, L.Callback) for each in made)


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name):
    made = {key: instantiate(value) for key, value in config(f"metrics/{name}").eval.metrics.items()}
    assert {key: type(value).__name__ for key, value in made.items()} == METRICS[name]
    assert all(isinstance(value, Metric) for value in made.values())


def test_metrics_that_are_set():
    assert instantiate(config("metrics/acctop5").eval.metrics.acctop5).top_k == 5
    assert instantiate(config("metrics/acc_ignore_index").eval.metrics.acc).ignore_index == -100


def test_a_run_with_the_default_callbacks(tmp_path):
    made = [c for name in ("default", "norm-monitor", "ema", "causality-monitor") for c in callbacks(name, tmp_path)]
    made = [each for each in made if not isinstance(each, ProgressBar)]  # the trainer of tests draws none
    logger = L.pytorch.loggers.CSVLogger(tmp_path / "logs")
    used = trainer(made, logger, max_epochs=2, max_steps=-1, limit_val_batches=1, enable_model_summary=True)
    used.fit(TinyTask(), loader(), loader())
    best, last = sorted(file.name for file in (tmp_path / "checkpoints").iterdir())
    assert best in ("epoch_000.ckpt", "epoch_001.ckpt")
    assert last == "last.ckpt"
    logged = (pathlib.Path(logger.log_dir) / "metrics.csv").read_text().splitlines()[0].split(",")
    for key in ("time/tokens_per_s", "total_grad_l1_norm", "stats/causality_0", "lr-AdamW", "val/loss"):
        assert key in logged
