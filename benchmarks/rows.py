"""Rows of measurements in CSV files: written by benchmarks, read by what draws and compares them."""

import collections
import csv
import fnmatch
import pathlib
import types

ROWS = pathlib.Path("build/benchmarks")  # where runs write; results/ beside this file holds the committed rows
RESULTS = pathlib.Path(__file__).parent / "results"


def read(path: pathlib.Path, pattern: str = "*", providers: list[str] | None = None) -> list[types.SimpleNamespace]:
    """The rows of a CSV file that match, of one device, the last of each case, provider and ranks, in its order."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if "op" not in reader.fieldnames:
            raise SystemExit(f"{path} does not hold the rows of a benchmark")
        rows = [types.SimpleNamespace(**{k: _value(v) for k, v in fields.items()}) for fields in reader]
    rows = [row for row in rows if fnmatch.fnmatch(f"{row.op}/{row.case}/{row.dtype}", pattern)]
    rows = [row for row in rows if providers is None or row.provider in providers]
    devices = collections.Counter(row.device for row in rows).most_common(1)
    rows = [row for row in rows if row.device == devices[0][0]]
    return list({(row.op, row.case, row.dtype, row.provider, getattr(row, "ranks", 1)): row for row in rows}.values())


def _value(text):
    try:
        return float(text) if text else None
    except ValueError:
        return text


def append_csv(path: pathlib.Path, rows: list[dict]) -> None:
    """Add rows to a CSV file, with a header if it is new."""
    if not rows:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows({name: _round(value) for name, value in row.items()} for row in rows)


def _round(value):
    return f"{value:.5g}" if isinstance(value, float) else value
