"""benchmarks/recipes.py: what it runs, and what it makes of the metrics; nothing is trained."""

import csv
import sys

import pytest
import torch

from benchmarks import recipes
from training.tests.standins import composed

LOSSES = {"plain": [5.0, 4.0], "modern": [4.5, 3.5]}


def test_rows_table_and_plot(tmp_path, monkeypatch, capsys):
    runs = []

    def run(folder, name, common, *more):
        runs.append((name, more))
        if more:
            return
        file = folder / name / "csv" / "metrics.csv"
        file.parent.mkdir(parents=True)
        step = [{"step": 9, "train/num-tokens_step": 10 * 4 * 64, "time/tokens_per_s": 1000.0}]
        validations = [{"step": 10 * (i + 1) - 1, "val/loss": x} for i, x in enumerate(LOSSES[name])]
        with file.open("w") as lines:
            writer = csv.DictWriter(lines, ["step", "train/num-tokens_step", "time/tokens_per_s", "val/loss"])
            writer.writeheader()
            writer.writerows(step + validations)

    monkeypatch.setattr(recipes, "_run", run)
    monkeypatch.setattr(recipes, "write_python_files", lambda text, size: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["", "--steps", "20", f"--csv={tmp_path / 'x.csv'}"])
    recipes.main()
    assert runs == [("plain", ("run=prepare",)), ("plain", ()), ("modern", ())]
    with (tmp_path / "x.csv").open() as lines:
        found = [(row["recipe"], row["step"], row["tokens"], row["loss"]) for row in csv.DictReader(lines)]
    assert found == [
        ("plain", "10", "2560", "5"),
        ("plain", "20", "5120", "4"),
        ("modern", "10", "2560", "4.5"),
        ("modern", "20", "5120", "3.5"),
    ]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "plain", "modern"] in lines and ["20", "4.0000", "3.5000"] in lines
    assert (tmp_path / "x.png").stat().st_size > 0


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_recipes_compose(name):
    config = composed(*recipes.RECIPES[name], *recipes._COMMON)
    dry = {config.model.config.get(f"{kind}_pdrop") for kind in ("resid", "embd", "attn")}
    assert dry == ({None} if name == "plain" else {0.0})
    assert config.train.optimizer._target_.endswith(
        {"masters": "MasterAdamW", "modern": "Muon"}.get(name, "adamw.AdamW" if name != "modern-adamw" else "AdamW")
    )


WRONG = {
    "a name": (["modem"], "recipes must be of plain, fp32, masters, modern, modern-adamw, found 'modem'"),
    "a name twice": (["plain", "fp32", "plain"], "recipes must be different, found plain fp32 plain"),
    "steps": (["--steps", "9"], "--steps must be at least 10, after which speed and tokens are logged, found 9"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", *arguments, f"--csv={tmp_path / 'x.csv'}"])
    monkeypatch.setattr(recipes, "write_python_files", lambda *args: pytest.fail("it began"))
    with pytest.raises(SystemExit):
        recipes.main()
    assert message in capsys.readouterr().err


def test_a_run_that_fails_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(recipes.subprocess, "call", lambda *args, **kwargs: 3)
    with pytest.raises(SystemExit, match=r"^plain failed with exit code 3: see .*plain\.log$"):
        recipes._run(tmp_path, "plain", [])
