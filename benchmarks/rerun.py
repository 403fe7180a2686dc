"""Measure this library's rows of results/ again, and say which have moved by more than 5 %.

    python -m benchmarks.rerun [FAMILY ...] [--seconds 0.2]

Only this library and the baseline of each benchmark run. What counts is the ratio to the baseline, which was measured
in the same run, so another clock is no change. On another GPU than that of the rows, differences are normal; a line
names both GPUs. Rows go to build/rerun/. Whole models take minutes each: name `models` to have them, too.
"""

import argparse
import pathlib
import subprocess
import sys

from benchmarks.rows import RESULTS, read

FOLDER = pathlib.Path("build/rerun")
FAMILIES = ("flash_attn", "layer_norm", "xentropy", "fused_softmax", "fused_dense", "rotary", "block")
LIMIT = 0.05


def moved(before: list, after: list, limit: float = LIMIT) -> list[str]:
    """A line for each row of this library whose ratio to the baseline, or without one whose time, has changed."""
    old = {(row.op, row.case, row.dtype): row for row in before if row.provider == "flash_attn"}
    lines = []
    for row in after:
        was = old.get((row.op, row.case, row.dtype))
        if row.provider != "flash_attn" or was is None:
            continue
        gain = row.ratio / was.ratio if row.ratio and was.ratio else was.ms / row.ms
        if abs(gain - 1) > limit:
            lines.append(f"{row.op}/{row.case}/{row.dtype}: {gain - 1:+.0%} ({was.ms:.4g} ms, now {row.ms:.4g} ms)")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}, models")
    parser.add_argument("--seconds", default="0.2", help="time to measure one case (default: %(default)s)")
    args = parser.parse_args()
    unknown = set(args.families) - {*FAMILIES, "models"}
    if unknown:
        parser.error(f"FAMILY: must be of {', '.join(FAMILIES)}, models, found {', '.join(unknown)}")
    lines = []
    for family in args.families or FAMILIES:
        path = FOLDER / f"{family}.csv"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.benchmark_{family}", "--providers", "flash_attn"]
        subprocess.run([*command, "--seconds", args.seconds, "--csv", path], check=True, stdout=subprocess.DEVNULL)
        before, after = read(RESULTS / f"{family}.csv"), read(path)
        if before[0].device != after[0].device:
            print(f"{family}: the rows are of {before[0].device}, this is {after[0].device}")
        lines += moved(before, after)
    print("\n".join([f"{len(lines)} rows have moved by more than {LIMIT:.0%}, + is faster:", *lines]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
