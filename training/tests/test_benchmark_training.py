"""benchmarks/benchmark_training.py: both loops it compares train alike, and write what it reads."""

import json
import sys

import pytest
import torch

from benchmarks import benchmark_training
from src.train import train
from training.tests.standins import small


@pytest.mark.parametrize("loop", ["lightning.Trainer", "benchmarks.benchmark_training.BareLoop"])
def test_a_run_is_timed(loop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_training, "WARM_UP", 1)
    file = tmp_path / "found.json"
    config = small(
        f"trainer._target_={loop}",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
        "trainer.max_steps=3",
        "trainer.precision=bf16",
        "datamodule.batch_size=4",
        "test_after_training=false",
    )
    config.callbacks = {"stopwatch": {"_target_": "benchmarks.benchmark_training.Stopwatch", "file": str(file)}}
    train(config)
    found = json.loads(file.read_text())
    assert found["tokens_per_s"] == pytest.approx(4 * 16 / found["ms"] * 1e3)
    assert 0 <= found["loader"] < 1 and found["device"] == "cpu" and found["peak_mb"] is None


@pytest.mark.parametrize(
    ("gpus", "arguments", "says"),
    [
        (0, ["--providers", "bare", "trainer.x=1"], "--providers must be of harness, bare, found 'trainer.x=1'"),
        (0, ["--steps", "0"], "argument --steps: must be an integer of at least 1, found '0'"),
        (0, ["--steps=-3"], "argument --steps: must be an integer of at least 1, found '-3'"),
        (0, ["--steps=x"], "argument --steps: must be an integer of at least 1, found 'x'"),
        (0, ["1/gpt2-350M"], "error: 1/gpt2-350M: these cases need more GPUs than there are here, 0"),
        (1, ["4/gpt2*"], "error: 4/gpt2-124M ddp: these cases need more GPUs than there are here, 1"),
        (1, ["gpt2"], "error: no case matches 'gpt2'; there are: 1/tiny, 1/gpt2-124M, "),
    ],
)
def test_wrong_arguments(gpus, arguments, says, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    with pytest.raises(SystemExit) as error:
        benchmark_training.main()
    assert error.value.code == 2 and says in capsys.readouterr().err


def test_help_has_the_names_of_cases(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--help"])
    with pytest.raises(SystemExit):
        benchmark_training.main()
    names = [str(case) for device in ("cpu", "cuda") for case in benchmark_training.cases(device)]
    assert ", ".join(names) in " ".join(capsys.readouterr().out.split())


def test_runs_that_fail_are_named_at_the_end(tmp_path, monkeypatch, capsys):
    """One that fails gets no row; cases that need more GPUs than there are do not run, and are named too."""
    found = {"tokens_per_s": 2.0, "ms": 1.0, "loader": 0.1, "device": "cpu", "peak_mb": None}

    def run(case, overrides, text, steps, apart):
        return found if any("BareLoop" in each for each in overrides) else None

    monkeypatch.setattr(benchmark_training, "_run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["", f"--csv={tmp_path / 'x.csv'}"])
    with pytest.raises(SystemExit, match=r"^failed: 1/tiny: harness$"):
        benchmark_training.main()
    assert "1 tiny bare tokens_per_s=2" in (said := capsys.readouterr()).out
    assert "left out 1/gpt2-124M, " in said.err and (tmp_path / "x.csv").read_text().count("tiny") == 1
