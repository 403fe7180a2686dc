"""benchmarks/benchmark_training.py: both loops it compares train alike, and write what it reads."""

import json
import sys

import pytest

from benchmarks import benchmark_training
from src.train import train
from training.tests.standins import small


@pytest.mark.parametrize("loop", ["lightning.Trainer", "benchmarks.benchmark_training.BareLoop"])
def test_a_run_is_timed(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_training, "WARM_UP", 1)
    file = tmp_path / "found.json"
    config = small(
        f"trainer._target_={loop}", "trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_steps=3",
        "trainer.precision=bf16", "datamodule.batch_size=4", "test_after_training=false",
    )  # fmt: skip
    config.callbacks = {"stopwatch": {"_target_": "benchmarks.benchmark_training.Stopwatch", "file": str(file)}}
    train(config)
    found = json.loads(file.read_text())
    assert found["tokens_per_s"] == pytest.approx(4 * 16 / found["ms"] * 1e3)
    assert 0 <= found["loader"] < 1 and found["device"] == "cpu" and found["peak_mb"] is None


def test_providers_that_are_not_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--providers", "harness", "trainer.precision=bf16"])
    with pytest.raises(SystemExit):
        benchmark_training.main()
    assert "--providers must be of harness, bare, found 'trainer.precision=bf16'" in capsys.readouterr().err
