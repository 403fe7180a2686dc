"""benchmarks/benchmark_training.py: both loops it compares train alike, and write what it reads."""

import csv
import json
import sys

import pytest
import torch

from benchmarks import benchmark_models, benchmark_training
from src.train import train
from training.tests.standins import composed, small


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
@pytest.mark.parametrize("loop", ["lightning.Trainer", "benchmarks.benchmark_training.BareLoop"])
def test_a_run_is_timed(loop, precision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_training, "WARM_UP", 1)
    file = tmp_path / "found.json"
    config = small(
        f"trainer._target_={loop}",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
        "trainer.max_steps=3",
        f"trainer.precision={precision}",
        "datamodule.batch_size=4",
        "test_after_training=false",
    )
    config.callbacks = {"stopwatch": {"_target_": "benchmarks.benchmark_training.Stopwatch", "file": str(file)}}
    train(config)
    found = json.loads(file.read_text())
    assert found["tokens_per_s"] == pytest.approx(4 * 16 / found["ms"] * 1e3)
    assert 0 <= found["loader"] < 1 and found["device"] == "cpu" and found["peak_mb"] is None


@pytest.mark.parametrize("setting", benchmark_models.TRAINING)
def test_the_benchmark_takes_turns_with_the_harness(setting, tmp_path, monkeypatch, capsys):
    """It has the sizes of the harness's model and its batch, and gets a row of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark_training, "WARM_UP", 1)
    monkeypatch.setattr(benchmark_training, "TURN", 2)
    steps = []
    trainer = benchmark_models.trainer

    def counted(make, shape, input_ids, compiled, how):
        assert (shape.width, shape.layers, shape.heads, shape.hidden, shape.vocab) == (16, 1, 2, 64, 50)
        assert input_ids.shape == (4, 16) and how is benchmark_models.TRAINING[setting]
        step = trainer(make, shape, input_ids, compiled, how)
        return lambda: steps.append(step())

    monkeypatch.setattr(benchmark_models, "trainer", counted)

    def run(case, overrides, text, steps, apart):
        file = tmp_path / "found.json"
        options = {"_target_": "benchmarks.benchmark_training.Stopwatch", "file": str(file), "beside": setting}
        config = small(
            "trainer.accelerator=cpu", "trainer.max_steps=6", "datamodule.batch_size=4", "test_after_training=false"
        )
        config.callbacks = {"stopwatch": options}
        train(config)
        return json.loads(file.read_text())

    monkeypatch.setattr(benchmark_training, "_run", run)
    monkeypatch.setattr(sys, "argv", ["", "--providers", "harness", f"--csv={tmp_path / 'x.csv'}"])
    benchmark_training.main()
    assert len(steps) == 1 + 3 * 2  # a warm-up, and turns after the steps 3, 5 and 6
    with (tmp_path / "x.csv").open() as file:
        harness, benchmark = csv.DictReader(file)
    assert (harness["provider"], benchmark["provider"]) == ("harness", "benchmark")
    assert float(harness["of_benchmark"]) == pytest.approx(float(benchmark["ms"]) / float(harness["ms"]), rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2-124M", "gpt2-350M"])
def test_the_harness_has_the_settings_of_the_benchmark(name):
    """Each case with turns is like the step that it takes turns with."""
    cases = {case.name: case for case in benchmark_training.cases("cuda") if case.devices == 1}
    for case, setting in ((cases[name], "train_recipe"), (cases[f"{name} lean"], "train_masters")):
        assert case.like == setting
        config, how = composed(*case.overrides), benchmark_models.TRAINING[setting]
        model = config.model.config
        assert config.trainer.gradient_clip_val == how.clip
        assert model.residual_in_fp32 == how.residual_in_fp32
        assert (config.train.loss_fn == "linear") != how.of_logits
        assert config.trainer.precision == ("bf16" if how.weights == "fp32" else "bf16-true")
        assert config.train.optimizer._target_.endswith("MasterAdamW" if how.weights == "masters" else ".AdamW")
        assert {model.get(f"{kind}_pdrop", 0.1) for kind in ("resid", "embd", "attn")} == {how.dropout}
        shape = benchmark_models.MODELS["cuda"][name]
        batch, seqlen = benchmark_models.STEPS["cuda"][name]
        assert (model.n_embd, model.n_layer, model.n_head) == (shape.width, shape.layers, shape.heads)
        assert (case.batch, config.datamodule.max_length) == (batch, seqlen)


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
