"""Draw rows that benchmarks have measured.

    python -m benchmarks.plot                # all figures of docs/plots and the tables of the pages, from results/
    python -m benchmarks.plot FILE.csv [GLOB] [--providers NAME ...] [--out FILE]

The second draws those rows of a file whose op/case/dtype matches GLOB (all of them if there is none), with a panel for
each op, in which each case has a bar for each provider. Of a file with rows of several devices, those of the one with
most rows are drawn, and where a case was measured more than once, the last row counts.
"""

import argparse
import collections
import csv
import fnmatch
import pathlib
import types


def read(path: pathlib.Path, pattern: str = "*", providers: list[str] | None = None) -> list[types.SimpleNamespace]:
    """The rows of a CSV file that match, of one device, the last of each case and provider, in the file's order."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if "op" not in reader.fieldnames:
            raise SystemExit(f"{path} does not hold the rows of a benchmark")
        rows = [types.SimpleNamespace(**{k: _value(v) for k, v in fields.items()}) for fields in reader]
    rows = [row for row in rows if fnmatch.fnmatch(f"{row.op}/{row.case}/{row.dtype}", pattern)]
    rows = [row for row in rows if providers is None or row.provider in providers]
    devices = collections.Counter(row.device for row in rows).most_common(1)
    return list(
        {(row.op, row.case, row.dtype, row.provider): row for row in rows if row.device == devices[0][0]}.values()
    )


def _value(text):
    try:
        return float(text) if text else None
    except ValueError:
        return text


def draw(path: pathlib.Path, rows: list) -> pathlib.Path:
    """Write the plot of rows, which have the attributes of harness.Row, to a file whose suffix says of which kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(row.op for row in rows))
    colors = {provider: f"C{i}" for i, provider in enumerate(dict.fromkeys(row.provider for row in rows))}
    figure, axes = pyplot.subplots(len(ops), figsize=(12, 4 * len(ops)), squeeze=False, layout="constrained")
    for op, axis in zip(ops, axes[:, 0], strict=True):
        _draw_op(axis, op, [row for row in rows if row.op == op], colors)
    figure.suptitle(f"{rows[0].device}, torch {rows[0].torch}")
    figure.savefig(path, dpi=120)
    return path


def _draw_op(axis, op, rows, colors):
    cases = list(dict.fromkeys(f"{row.case} {row.dtype}" for row in rows))
    providers = list(dict.fromkeys(row.provider for row in rows))
    rate, unit = "ms", "ms"
    for column, its_unit, peak in (("tflops", "TFLOP/s", "matmul"), ("gbps", "GB/s", "copy")):
        if any(row.of == peak for row in rows):
            rate, unit = column, its_unit
    for number, provider in enumerate(providers):
        heights = {f"{row.case} {row.dtype}": getattr(row, rate) or 0 for row in rows if row.provider == provider}
        places = [cases.index(case) + (number - (len(providers) - 1) / 2) * 0.8 / len(providers) for case in heights]
        bars = axis.bar(places, heights.values(), 0.8 / len(providers), label=provider, color=colors[provider])
        axis.bar_label(bars, fmt="%.3g", fontsize=7)
    axis.set(title=op, ylabel=unit, xticks=range(len(cases)))
    axis.set_xticklabels(cases, fontsize=8, rotation=30, ha="right", rotation_mode="anchor")
    axis.legend(fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "csv", type=pathlib.Path, nargs="?", help="of benchmarks/results, or one that a benchmark has written"
    )
    parser.add_argument("cases", nargs="?", default="*", help="glob over op/case/dtype (default: all)")
    parser.add_argument("--providers", nargs="+", help="draw these only (default: all)")
    parser.add_argument("--out", type=pathlib.Path, help="default: a PNG beside the CSV file")
    args = parser.parse_args()
    if args.csv is None:
        from benchmarks import figures, tables  # which read rows by this module

        tables.write()
        print("plots:", *figures.draw_all(pathlib.Path(__file__).parents[1] / "docs/plots"))
        return
    if not args.csv.is_file():
        parser.error(f"csv: must be a file, found {str(args.csv)!r}")
    rows = read(args.csv, args.cases, args.providers)
    if not rows:
        raise SystemExit(f"{args.csv} has no row of {args.providers or 'any provider'} that matches {args.cases!r}")
    print("plot:", draw(args.out or args.csv.with_suffix(".png"), rows))


if __name__ == "__main__":
    main()
