"""Draws runs from their CSV logs: losses, learning rate and speed, over steps and over tokens.

    python -m src.plot my-run                                   # by name, from logs/
    python -m src.plot small large --output compared.png        # several in one figure
    python -m src.plot logs/runs/2025-01-31/12-00-00            # a folder with logs, or a metrics.csv

A run that was resumed has several logs, one for each start. They are joined: where a later start repeated steps, its
values replace those of the earlier one.
"""

import argparse
import csv
import os
import pathlib
import re

import numpy as np

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]

# Patterns of the columns that are drawn; the first match counts. The names come from Lightning and our callbacks.
TRAINING_LOSS = r"train/loss(_step)?"
VALIDATION_LOSS = r"val/loss(_epoch)?"
LEARNING_RATE = r"lr-[^/]+(/pg1)?"
TOKENS = r"train/num-tokens(_step)?"
SPEED = r"(.*/)?tokens?(_per_|/|_)s(ec(ond)?)?"

Series = dict[int, float]  # the values of a column, by step

_LOGS = "metrics*.csv"  # metrics_until_….csv are those of earlier starts in the same folder


def find_logs(run: str, logs: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The logs of a run, from its first start to its last, by the run's name.

    run: the name of a run, which is searched for in `logs`; or a folder, with all runs in it; or a file.
    """
    path = pathlib.Path(run)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = list(path.rglob(_LOGS))
    else:
        files = [file for file in logs.rglob(_LOGS) if file.parent.name == run]
    if not files:
        raise FileNotFoundError(f"run must be a folder with metrics.csv, or a name in {logs}, found no log of {run!r}")
    starts: dict[str, list[pathlib.Path]] = {}
    for file in sorted(files, key=lambda file: (file.stat().st_mtime_ns, str(file))):
        unnamed = re.fullmatch(r"version_\d+", file.parent.name)  # by Lightning; each is a run of its own
        starts.setdefault(str(file.parent) if unnamed else file.parent.name, []).append(file)
    return starts


def read_run(files: list[pathlib.Path]) -> dict[str, Series]:
    """The columns of a run's logs, joined. files: in the order in which they were written."""
    columns: dict[str, Series] = {}
    for file in files:
        with open(file, newline="") as log:
            rows = [row for row in csv.DictReader(log) if row.get("step")]
        first = min((int(row["step"]) for row in rows), default=None)
        if first is None:
            continue
        columns = {name: {s: v for s, v in series.items() if s < first} for name, series in columns.items()}
        for row in rows:
            for name, value in row.items():
                if name != "step" and value:
                    columns.setdefault(name, {})[int(row["step"])] = float(value)
    return columns


def column(columns: dict[str, Series], pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of the first column whose name matches; both empty if there is none."""
    name = next((name for name in sorted(columns) if re.fullmatch(pattern, name)), None)
    series = sorted(columns[name].items()) if name is not None else []
    steps, values = zip(*series) if series else ((), ())
    return np.array(steps), np.array(values)


def smoothed(values: np.ndarray, points: float | None = None) -> np.ndarray:
    """Exponential moving average over about `points` points; by default a twentieth of all, but at most 50."""
    points = min(len(values) / 20, 50) if points is None else points
    decay, total, weight, out = 1 - 1 / max(points, 1), 0.0, 0.0, []
    for value in values:
        if np.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight if weight else np.nan)
    return np.array(out)


def tokens_at(columns: dict[str, Series], steps: np.ndarray) -> np.ndarray | None:
    """How many tokens had been read at each step, linear between and beyond the logged ones; None if not logged."""
    known, tokens = column(columns, TOKENS)
    if len(known) < 2:
        return None
    per_step = (tokens[-1] - tokens[0]) / (known[-1] - known[0])
    inside = np.interp(steps, known, tokens)
    return inside + per_step * (np.minimum(steps - known[0], 0) + np.maximum(steps - known[-1], 0))


def draw(runs: dict[str, dict[str, Series]], points: float | None = None):
    """A matplotlib Figure of runs (as `read_run` returns them) by their names.

    Columns are the axes, steps and tokens (left out if no run has logged tokens); rows are what was logged.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    has_tokens = any(tokens_at(columns, np.array([0])) is not None for columns in runs.values())
    panels = [("loss", None), ("learning rate", LEARNING_RATE), ("tokens per second", SPEED)]
    panels = [(t, p) for t, p in panels if p is None or any(len(column(c, p)[0]) for c in runs.values())]
    figure = Figure(figsize=(12 if has_tokens else 7, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1 + has_tokens, squeeze=False, sharey="row")
    for across, axis_name in enumerate(["step", "tokens"][: 1 + has_tokens]):
        for row, (title, pattern) in zip(axes, panels):
            axis = row[across]
            for colour, (name, columns) in zip(np.resize(COLOURS, len(runs)), runs.items()):
                at = (lambda steps: steps) if across == 0 else (lambda steps, c=columns: tokens_at(c, steps))
                if pattern is None:
                    _draw_losses(axis, name, columns, colour, at, points)
                else:
                    _line(axis, at, column(columns, pattern), color=colour, label=name)
            axis.set_ylabel("" if across else title)
            axis.grid(alpha=0.3)
        for row in axes:
            row[across].xaxis.set_major_formatter(EngFormatter(sep=""))
        axes[-1][across].set_xlabel(axis_name)
        axes[0][across].legend(fontsize="small")
    return figure


def _draw_losses(axis, name, columns, colour, at, points):
    steps, losses = column(columns, TRAINING_LOSS)
    _line(axis, at, (steps, losses), color=colour, alpha=0.25, linewidth=0.8)
    _line(axis, at, (steps, smoothed(losses, points)), color=colour, label=f"{name}: training")
    validation = column(columns, VALIDATION_LOSS)
    _line(
        axis,
        at,
        validation,
        color=colour,
        linestyle="--",
        marker="o",
        markersize=4,
        markeredgecolor="black",
        label=f"{name}: validation",
    )


def _line(axis, at, series, **style):
    x = at(series[0])
    if x is not None and len(x):
        axis.plot(x, series[1], **style)


def parser():
    command = argparse.ArgumentParser(
        prog="python -m src.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("run", nargs="+", help="names of runs, folders with logs, or metrics.csv files")
    logs = os.environ.get("RESULT_DIR", "logs")
    command.add_argument("--logs", type=pathlib.Path, default=logs, help="where names are found (default %(default)s)")
    command.add_argument("--output", type=pathlib.Path, default="runs.png", help="the figure (default %(default)s)")
    command.add_argument("--smooth", type=float, help="points of the moving average (default: a twentieth, at most 50)")
    return command


def main(argv=None):
    args = parser().parse_args(argv)
    runs: dict[str, dict[str, Series]] = {}
    for run in args.run:
        try:
            found = find_logs(run, args.logs)
        except FileNotFoundError as error:
            parser().error(str(error))
        runs |= {name: read_run(files) for name, files in found.items()}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, args.smooth).savefig(args.output, dpi=150)
    print(f"{', '.join(runs)}: {args.output}")


if __name__ == "__main__":
    main()
