"""Logs of a run are found, joined and drawn."""

import csv
import os

import numpy as np
import pytest

from src import plot


def write_log(folder, rows, age=0, name="metrics.csv"):
    """A log as Lightning writes it: a column for each name in any row, and empty cells. age: in seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    names = sorted({name for row in rows for name in row})
    with open(file, "w", newline="") as log:
        writer = csv.DictWriter(log, names)
        writer.writeheader()
        writer.writerows(rows)
    os.utime(file, (1e9 - age, 1e9 - age))
    return file


def training_rows(steps, loss=lambda step: 5 - step / 100):
    return [
        {"step": s, "epoch": 0, "train/loss_step": loss(s), "lr-AdamW/pg1": 1e-3, "train/num-tokens_step": 64 * (s + 1)}
        for s in steps
    ]


@pytest.mark.parametrize("earlier", [("b/csv/mine", "metrics.csv"), ("a/csv/mine", "metrics_until_7.csv")])
def test_a_resumed_run_is_joined_without_a_seam(tmp_path, earlier):
    write_log(tmp_path / earlier[0], training_rows(range(0, 60)), age=100, name=earlier[1])
    write_log(tmp_path / "a/csv/mine", [*training_rows(range(40, 90)), {"step": 80, "val/loss": 4.0}])
    write_log(tmp_path / "a/csv/other", training_rows(range(5)))
    found = plot.find_logs("mine", tmp_path)
    assert list(found) == ["mine"] and len(found["mine"]) == 2
    columns = plot.read_run(found["mine"])
    whole = plot.read_run([write_log(tmp_path / "whole", training_rows(range(90)))])
    assert columns.pop("val/loss") == {80: 4.0}
    assert columns == whole


def test_the_later_log_takes_the_place_of_what_it_repeats(tmp_path):
    write_log(tmp_path / "1/csv/mine", [*training_rows(range(60), lambda s: 1.0), {"step": 55, "val/loss": 9.0}], age=9)
    write_log(tmp_path / "2/csv/mine", training_rows(range(50, 70), lambda s: 2.0))
    columns = plot.read_run(plot.find_logs("mine", tmp_path)["mine"])
    steps, losses = plot.column(columns, plot.TRAINING_LOSS)
    assert steps.tolist() == list(range(70)) and losses.tolist() == [1.0] * 50 + [2.0] * 20
    assert columns["val/loss"] == {}


def test_a_folder_has_all_its_runs_and_unnamed_runs_are_apart(tmp_path):
    for name in ("x/csv/version_0", "y/csv/version_0", "x/csv/mine"):
        write_log(tmp_path / name, training_rows(range(3)))
    assert len(plot.find_logs(str(tmp_path), tmp_path)) == 3


def test_nothing_found(tmp_path):
    with pytest.raises(FileNotFoundError, match="found no log of 'mine'"):
        plot.find_logs("mine", tmp_path)
    with pytest.raises(SystemExit):
        plot.main(["mine", "--logs", str(tmp_path)])


def test_smoothing_is_the_weighted_mean():
    values = np.array([3.0, 1.0, np.nan, 4.0])
    decay = 1 - 1 / 5
    weights = [decay**2, decay, 1]
    expected = np.dot(weights, [3, 1, 4]) / sum(weights)
    assert plot.smoothed(values, 5)[[0, -1]] == pytest.approx([3, expected])
    assert plot.smoothed(values[:2], 1) == pytest.approx(values[:2])


def test_tokens_of_steps_between_and_beyond_those_logged(tmp_path):
    columns = plot.read_run([write_log(tmp_path, training_rows(range(10, 51, 10)))])
    assert plot.tokens_at(columns, np.array([0, 15, 60])) == pytest.approx([64, 64 * 16, 64 * 61])
    assert plot.tokens_at({}, np.array([0])) is None


def test_figure(tmp_path):
    first = [*training_rows(range(30)), {"step": 29, "val/loss": 4.0}]
    speed = [{"step": s, "time/tokens_per_s": 1000 + s} for s in range(30)]
    write_log(tmp_path / "csv/first", first + speed)
    write_log(tmp_path / "csv/second", [{"step": s, "train/loss_step": 1.0} for s in range(5)])
    figure = plot.draw({name: plot.read_run(files) for name, files in plot.find_logs(str(tmp_path), tmp_path).items()})
    loss, rate, speed = figure.axes[0], figure.axes[2], figure.axes[4]
    assert [axis.get_ylabel() for axis in (loss, rate, speed)] == ["loss", "learning rate", "tokens per second"]
    assert [axis.get_xlabel() for axis in figure.axes[-2:]] == ["step", "tokens"]
    raw, smooth, validation, *second = loss.get_lines()
    assert raw.get_alpha() < 1 and raw.get_color() == smooth.get_color() != second[0].get_color()
    assert validation.get_xydata().tolist() == [[29, 4.0]]
    assert len(figure.axes[1].get_lines()) == 3  # the second run has logged no tokens


def test_command(tmp_path, capsys):
    write_log(tmp_path / "logs/csv/mine", training_rows(range(30)))
    output = tmp_path / "new/figure.png"
    plot.main(["mine", "--logs", str(tmp_path / "logs"), "--output", str(output)])
    assert output.read_bytes().startswith(b"\x89PNG") and str(output) in capsys.readouterr().out
