"""Measure this library's rows of results/ again, print each, and say which have moved by more than 5 %.

    python -m benchmarks.rerun [FAMILY ...] [--seconds 0.2] [--power 0.5]

Only this library and the baseline of each benchmark run. What counts is the ratio to the baseline, which was measured
in the same run, so another clock is no change. On another GPU than that of the rows, differences are normal; a line
names both GPUs. Rows go to build/rerun/. Whole models take minutes each: name `models` to have them, too.

On a GPU, clock and energy of a call stand beside its speed (benchmarks/power.py): if a row has moved and its clock has
moved alike, the kernel needs another energy, or the card is in another state. --power 0 leaves them out.
"""

import argparse
import pathlib
import subprocess
import sys

from benchmarks.rows import RESULTS, read
from flash_attn import __main__ as report

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


def line_of(row, power=None) -> str:
    """What was measured of a row, in one line; power: its row of the file <family>_power.csv, if there is one."""
    values = [(row.ms, "ms", ".4g"), (row.tflops, "TFLOP/s", ".0f"), (row.gbps, "GB/s", ".0f")]
    if power is not None:
        values += [(power.mj / 1e3, "J", ".4g"), (power.mhz, "MHz", ".0f")]
    if row.ratio:
        values.append((row.ratio, "of the baseline's speed", ".2f"))
    texts = [f"{value:{form}} {unit}" for value, unit, form in values if value]
    return f"{row.op}/{row.case}/{row.dtype}: {', '.join(texts)}"


def lines_of(rows: list, powers: list) -> list[str]:
    """line_of each row of this library."""
    by_case = {(power.op, power.case, power.dtype): power for power in powers if power.provider == "flash_attn"}
    return [line_of(row, by_case.get((row.op, row.case, row.dtype))) for row in rows if row.provider == "flash_attn"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}, models")
    parser.add_argument("--seconds", default="0.2", help="time to measure one case (default: %(default)s)")
    parser.add_argument("--power", type=float, default=0.5, help="time to measure its energy (default: %(default)s)")
    args = parser.parse_args()
    unknown = set(args.families) - {*FAMILIES, "models"}
    if unknown:
        parser.error(f"FAMILY: must be of {', '.join(FAMILIES)}, models, found {', '.join(unknown)}")
    lines = []
    for family in args.families or FAMILIES:
        path = FOLDER / f"{family}.csv"
        beside = path.with_name(f"{family}_power.csv")
        for old in (path, beside):
            old.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"benchmarks.benchmark_{family}", "--providers", "flash_attn"]
        command += ["--seconds", args.seconds, "--csv", path]
        if args.power and report.default_device() == "cuda":
            command += ["--power", str(args.power)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        before, after = read(RESULTS / f"{family}.csv"), read(path)
        if before[0].device != after[0].device:
            print(f"{family}: the rows are of {before[0].device}, this is {after[0].device}")
        print(*lines_of(after, read(beside) if beside.exists() else []), sep="\n", flush=True)
        lines += moved(before, after)
    print("\n".join([f"{len(lines)} rows have moved by more than {LIMIT:.0%}, + is faster:", *lines]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
