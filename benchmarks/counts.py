"""Count what a call does on a GPU, with Nsight Compute (ncu): cycles, instructions and bytes of each of its kernels.

    python -m benchmarks.counts . ../old flash_attn "flash_attn_bwd/1x16x16384x128/bf16"
    python -m benchmarks.counts . flash_attn "flash_attn_bwd/1x16x16384x128/bf16" --stalls bwd_sm90_kernel

Trees are as in `benchmarks.trees`. Where arithmetic limits a kernel, its cycles depend on the card and its power by one
per cent, not by five as times do; the clock is left as it is. Caches are empty before each kernel. With --stalls, also
where the warps of a kernel wait, by samples: its machine instructions are cut before those that wait for others, or
multiply or move tiles, and each part that has half a per cent of the samples is printed, with the four reasons that
most of its samples gave.
"""

import argparse
import collections
import csv
import fnmatch
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

COUNTS = {  # what is printed: metric, unit
    "cycles": ("sm__cycles_elapsed.max", 1e6, "M"),
    "instructions": ("smsp__inst_executed.sum", 1e6, "M"),
    "L2": ("lts__t_bytes.sum", 1e9, "GB"),
    "DRAM": ("dram__bytes.sum", 1e9, "GB"),
    "shared memory": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum", 1e6, "M wavefronts"),
    "bank conflicts": ("l1tex__data_bank_conflicts_pipe_lsu.sum", 1e6, "M"),
}
CUTS = re.compile(  # before these instructions
    r"\b(BAR|DEPBAR|ERRBAR|FENCE|HGMMA|HMMA|LDGDEPBAR|LDGSTS|LDSM|MEMBAR|STSM|SYNCS|UCGABAR_ARV|UCGABAR_WAIT|WARPGROUP)\b"
)
LEAST_SHARE = 0.005  # of all samples, for a part to be printed


def work(family: str, name: str | None) -> None:
    """Answer by the names of all cases; or call one case of this library, and once more under the profiler."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a benchmark prints is no answer
    here = str(pathlib.Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # whose modules have names of packages, such as kernels
    cases = {str(case): case for case in importlib.import_module(f"benchmarks.benchmark_{family}").cases("cuda")}
    if name is None:
        print(json.dumps(list(cases)), file=answers)
        return
    import torch

    call = cases[name].providers()["flash_attn"]
    for _ in range(2):  # the first compiles and chooses
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def output_of(command: list[str], **options) -> str:
    """Return what a command prints. If the command fails, end the program and show what it said."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def ask(tree: pathlib.Path, profiler: list[str], *args: str) -> str:
    """Run `work` in a process that imports the tree's package, and return what it prints.

    profiler: the command and options that come before Python's; none if empty.
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree.absolute()), os.environ.get("PYTHONPATH", "")])}
    return output_of([*profiler, sys.executable, __file__, "--worker", *args], env=env)


def rows_of(text: str, needed: str) -> list[dict[str, str]]:
    """The rows of a table in what ncu prints, whose header has the column `needed`; lines around it are left out."""
    lines = list(csv.reader(text.splitlines()))
    header = next((line for line in lines if needed in line), None)
    if header is None:
        raise SystemExit(f"ncu printed no table with a column {needed!r}:\n{text[-2000:]}")
    start = lines.index(header) + 1
    return [dict(zip(header, line, strict=True)) for line in lines[start:] if len(line) == len(header)]


def number(text: str) -> float:
    """A number as ncu prints it; NaN for n/a."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")


def counts(tree: pathlib.Path, ncu: str, family: str, case: str) -> list[tuple[str, dict[str, float]]]:
    """For each kernel of a call, in order: its name, and the value of each of COUNTS."""
    from benchmarks.kernels import short_name  # not in a worker, which has another tree's package

    metrics = ",".join(metric for metric, _, _ in COUNTS.values())
    profiler = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"]
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows_of(ask(tree, [*profiler, "--metrics", metrics], family, case), "Metric Value"):
        _, values = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        values[row["Metric Name"]] = number(row["Metric Value"])
    return [
        (short_name(kernel), {what: values[metric] / unit for what, (metric, unit, _) in COUNTS.items()})
        for kernel, values in launches.values()
    ]


def stalls(tree: pathlib.Path, ncu: str, family: str, case: str, kernel: str, report: pathlib.Path) -> list[str]:
    """A line for each part of the kernel's instructions that has LEAST_SHARE of the samples."""
    report.unlink(missing_ok=True)
    profiler = [ncu, "--clock-control", "none", "--profile-from-start", "off", "-k", f"regex:{kernel}", "-c", "1"]
    said = ask(tree, [*profiler, "--section", "SourceCounters", "-o", str(report)], family, case)
    if not report.is_file():
        raise SystemExit(f"no kernel of {case} matches {kernel!r}; ncu printed:\n{said}")
    rows = rows_of(output_of([ncu, "-i", str(report), "--page", "source", "--csv"]), "# Samples")
    reasons = [name for name in rows[0] if name.startswith("stall_") and "(" not in name] if rows else []
    samples = [int(number(row["# Samples"] or "0")) for row in rows]
    if not reasons or not sum(samples):
        raise SystemExit(f"ncu has no samples with reasons of {kernel!r}: see {report}")
    lines = []
    for part in parts_of([row["Source"] for row in rows]):
        share = sum(samples[i] for i in part) / sum(samples)
        waits = collections.Counter({name: sum(number(rows[i][name] or "0") for i in part) for name in reasons})
        most = [f"{name.removeprefix('stall_')} {n / sum(samples):.1%}" for name, n in waits.most_common(4) if n > 0]
        first = rows[part[0]]
        if share >= LEAST_SHARE:
            start, times = first["Source"].strip()[:56], first["Instructions Executed"]
            lines.append(f"{share:6.1%}  {len(part):4d} from {start:56}  x {times}: {', '.join(most)}")
    return lines


def parts_of(instructions: list[str]) -> list[range]:
    """Cuts instructions before each of CUTS, unless the one before it is one of them as well."""
    cut = [bool(CUTS.search(text)) for text in instructions]
    starts = [i for i in range(len(cut)) if i == 0 or (cut[i] and not cut[i - 1])]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(cut)], strict=True)]


def main() -> None:
    """Run what the command line asks for; print a line for each kernel."""
    from benchmarks.trees import check_trees

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=pathlib.Path, metavar="TREE", help="one or more folders")
    parser.add_argument("family", help="a benchmark, such as flash_attn")
    parser.add_argument("cases", help="glob over op/case/dtype")
    parser.add_argument("--stalls", metavar="KERNEL", help="show where the first kernel of this name, a regex, waits")
    args = parser.parse_args()
    check_trees(parser, args.trees, args.family)
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu, of CUDA's Nsight Compute, is not on the PATH")
    of_all = [json.loads(ask(tree, [], args.family)) for tree in args.trees]
    chosen = [name for name in fnmatch.filter(of_all[0], args.cases) if all(name in names for names in of_all)]
    if not chosen:
        raise SystemExit(f"no case that all trees have matches {args.cases!r}")
    for case in chosen:
        for i, tree in enumerate(args.trees):
            for kernel, values in counts(tree, ncu, args.family, case):
                texts = [f"{what} {values[what]:.4g} {unit}" for what, (_, _, unit) in COUNTS.items()]
                print(f"{case} {tree} {kernel}: {', '.join(texts)}", flush=True)
            if args.stalls:
                in_name = re.sub(r"[^\w.-]+", "_", case)
                report = pathlib.Path(f"stalls_{i}_{in_name}.ncu-rep").absolute()
                print(*stalls(tree, ncu, args.family, case, args.stalls, report), f"report: {report}", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        main()
