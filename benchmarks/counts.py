"""Count what a call does on a GPU, with Nsight Compute (ncu): cycles, instructions and bytes of each of its kernels.

    python -m benchmarks.counts . ../old flash_attn "flash_attn_bwd/1x16x16384x128/bf16"
    python -m benchmarks.counts . flash_attn "flash_attn_bwd/1x16x16384x128/bf16" --stalls bwd_sm90_kernel

Unlike times, counts hardly depend on the card and the power that it may draw, so that they tell builds apart which
differ by one per cent. Trees are as in `benchmarks.trees`; the clock is left as it is. With --stalls, also where the
warps of a kernel wait: each run of its machine instructions up to one that orders or synchronizes, with its share of
the samples and the four reasons that most of them gave. Long code that runs rarely is left out.
"""

import argparse
import collections
import csv
import fnmatch
import importlib
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
ORDERS = re.compile(r"\b(HGMMA|HMMA|WARPGROUP|BAR|SYNCS|DEPBAR|FENCE|MEMBAR|LDGDEPBAR|LDGSTS|STSM|LDSM)\b")
LEAST_SHARE = 0.005  # of all samples, for a run of instructions to be printed


def work(family: str, name: str | None) -> None:
    """Print the names of all cases; or make calls that warm up, and one of this library under the profiler."""
    here = str(pathlib.Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # whose modules have names of packages, such as kernels
    cases = {str(case): case for case in importlib.import_module(f"benchmarks.benchmark_{family}").cases("cuda")}
    if name is None:
        print(*cases, sep="\n")
        return
    import torch

    call = cases[name].providers()["flash_attn"]
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def ask(tree: pathlib.Path, profiler: list[str], *args: str) -> str:
    """What `work` prints in a process that imports the tree's package, under a profiler unless that is empty."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree.absolute()), os.environ.get("PYTHONPATH", "")])}
    command = [*profiler, sys.executable, __file__, "--worker", *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def rows_of(text: str, needed: str) -> list[dict[str, str]]:
    """The rows of a table in what ncu prints, whose header has the column `needed`; lines around it are left out."""
    lines = list(csv.reader(text.splitlines()))
    header = next((line for line in lines if needed in line), None)
    if header is None:
        raise SystemExit(f"ncu has printed no table with a column {needed!r}:\n{text[-2000:]}")
    start = lines.index(header) + 1
    return [dict(zip(header, line, strict=True)) for line in lines[start:] if len(line) == len(header)]


def counts(tree: pathlib.Path, ncu: str, family: str, case: str) -> list[tuple[str, dict[str, float]]]:
    """For each kernel of a call, in order: its name, and the value of each of COUNTS."""
    metrics = ",".join(metric for metric, _, _ in COUNTS.values())
    profiler = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base"]
    launches: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows_of(ask(tree, [*profiler, "--metrics", metrics], family, case), "Metric Value"):
        _, values = launches.setdefault(row["ID"], (row["Kernel Name"], {}))
        values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    return [
        (short(kernel), {what: values[metric] / unit for what, (metric, unit, _) in COUNTS.items()})
        for kernel, values in launches.values()
    ]


def short(kernel: str) -> str:
    """The name of a kernel without its namespaces, template arguments and parameters."""
    return re.split(r"[<(]", kernel.removeprefix("void "))[0].split("::")[-1]


def stalls(tree: pathlib.Path, ncu: str, family: str, case: str, kernel: str, report: pathlib.Path) -> list[str]:
    """A line for each run of instructions of the kernel that has LEAST_SHARE of the samples."""
    profiler = [ncu, "--clock-control", "none", "--profile-from-start", "off", "-k", f"regex:{kernel}", "-f", "-c", "1"]
    ask(tree, [*profiler, "--section", "SourceCounters", "-o", str(report)], family, case)
    page = [ncu, "-i", str(report), "--page", "source", "--csv"]
    rows = rows_of(subprocess.run(page, capture_output=True, text=True, check=True).stdout, "# Samples")
    reasons = [name for name in rows[0] if name.startswith("stall_") and "(" not in name]
    total = sum(int(row["# Samples"]) for row in rows)
    lines = []
    for run in runs_of(rows):
        share = sum(int(row["# Samples"]) for row in run) / total
        waits = collections.Counter({name: sum(int(row[name] or 0) for row in run) for name in reasons})
        most = ", ".join(f"{name.removeprefix('stall_')} {n / total:.1%}" for name, n in waits.most_common(4) if n > 0)
        start, times = run[0]["Source"].strip()[:56], run[0]["Instructions Executed"]
        if share >= LEAST_SHARE:
            lines.append(f"{share:6.1%}  {len(run):4d} from {start:56}  x {times}: {most}")
    return lines


def runs_of(rows: list[dict[str, str]]) -> list[list[dict[str, str]]]:
    """The rows of instructions, cut before each that orders or synchronizes, if the one before it does not."""
    runs: list[list[dict[str, str]]] = []
    before = None
    for row in rows:
        orders = ORDERS.search(row["Source"])
        if not runs or (orders and not before):
            runs.append([])
        runs[-1].append(row)
        before = orders
    return runs


def main() -> None:
    """Run what the command line asks for; print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=pathlib.Path, metavar="TREE", help="one or more folders")
    parser.add_argument("family", help="a benchmark, such as flash_attn")
    parser.add_argument("cases", help="glob over op/case/dtype")
    parser.add_argument("--stalls", metavar="KERNEL", help="show where the first kernel of this name, a regex, waits")
    args = parser.parse_args()
    ncu = shutil.which("ncu")
    if ncu is None:
        parser.error("ncu, of CUDA's Nsight Compute, is not on the PATH")
    of_all = [ask(tree, [], args.family).splitlines() for tree in args.trees]
    chosen = [name for name in fnmatch.filter(of_all[0], args.cases) if all(name in names for names in of_all)]
    if not chosen:
        raise SystemExit(f"no case that all trees have matches {args.cases!r}")
    for case in chosen:
        for tree in args.trees:
            for kernel, values in counts(tree, ncu, args.family, case):
                texts = [f"{what} {values[what]:.4g} {unit}" for what, (_, _, unit) in COUNTS.items()]
                print(f"{case} {tree} {kernel}: {', '.join(texts)}", flush=True)
            if args.stalls:
                report = pathlib.Path(f"stalls_{tree.absolute().name}.ncu-rep").absolute()
                print(*stalls(tree, ncu, args.family, case, args.stalls, report), f"report: {report}", sep="\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        main()
