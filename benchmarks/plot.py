"""Draw rows that benchmarks have measured.

    python -m benchmarks.plot                # all figures of docs/plots and the tables of the pages, from results/
    python -m benchmarks.plot FILE.csv [GLOB] [--providers NAME ...] [--out FILE]

The second draws those rows of a file whose op/case/dtype matches GLOB (all of them if there is none), with a panel for
each op, in which each case has a bar for each provider. If a file has rows of several devices, only those of the device
with most rows are drawn. Where a case was measured more than once, the last row counts.
"""

import argparse
import pathlib

from benchmarks import bars, figures, tables
from benchmarks.rows import read


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
        tables.write()
        print("plots:", *figures.draw_all(pathlib.Path(__file__).parents[1] / "docs/plots"))
        return
    if not args.csv.is_file():
        parser.error(f"csv: must be a file, found {str(args.csv)!r}")
    rows = read(args.csv, args.cases, args.providers)
    if not rows:
        raise SystemExit(f"{args.csv} has no row of {args.providers or 'any provider'} that matches {args.cases!r}")
    print("plot:", bars.draw(args.out or args.csv.with_suffix(".png"), rows))


if __name__ == "__main__":
    main()
