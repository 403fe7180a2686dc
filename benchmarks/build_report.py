"""What building the kernels takes: a CSV row for each source file, and one for the whole library.

    FLASH_ATTN_CUDA_ARCHS="80;90" MAX_JOBS=1 python -m benchmarks.build_report [--csv FILE]

builds the library from nothing in a temporary folder, with the variables that setup.py knows, and writes
benchmarks/results/build.csv anew. It needs nvcc, but no GPU.

file         a source under csrc/ or an instance that csrc/instances.py writes
seconds      of wall-clock time, for all architectures
memory_mb    of the largest of the compiler's processes
object_mb    the object file, with the code for all architectures; for the library, the stripped shared object
registers_*, spilled_bytes_*  by architecture: the most registers of a kernel's thread in this file, and the bytes that
             all its kernels store and load because there are no more
"""

import argparse
import csv
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]
KERNEL = re.compile(
    r"for 'sm_(\d+)\w*'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


def compile_file(arguments):
    """Stands in for nvcc: calls it, and appends what it took to the file that BUILD_REPORT names."""
    start = time.monotonic()
    done = subprocess.run(["nvcc", "-Xptxas=-v", *arguments], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return done.returncode
    target = pathlib.Path(arguments[arguments.index("-o") + 1])
    row = dict(
        file=target.stem,
        seconds=round(time.monotonic() - start, 1),
        memory_mb=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1000),
        object_mb=round(target.stat().st_size / 1e6, 2),
        **kernels(done.stderr),
    )
    with open(os.environ["BUILD_REPORT"], "a") as report:
        report.write(json.dumps(row) + "\n")
    return 0


def kernels(ptxas):
    """Registers and spilled bytes by architecture, from what `ptxas -v` says."""
    columns = {}
    for entry in ptxas.split("Compiling entry function")[1:]:
        arch, stores, loads, registers = map(int, KERNEL.search(entry).groups())
        columns[f"registers_{arch}"] = max(columns.get(f"registers_{arch}", 0), registers)
        columns[f"spilled_bytes_{arch}"] = columns.get(f"spilled_bytes_{arch}", 0) + stores + loads
    return columns


def build(folder):
    """The rows of all files, and that of the library."""
    report = folder / "report"
    variables = dict(PYTORCH_NVCC=f"{sys.executable} {__file__} --compile", BUILD_REPORT=str(report))
    command = [sys.executable, "setup.py", "build_ext", f"--build-temp={folder}/temp", f"--build-lib={folder}/lib"]
    start = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=dict(os.environ, FLASH_ATTENTION_FORCE_BUILD="TRUE", **variables), check=True)
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in report.read_text().splitlines()]
    library = next((folder / "lib").rglob("_kernels*.so"))
    whole = dict(file="whole library", seconds=round(seconds, 1), object_mb=round(library.stat().st_size / 1e6, 2))
    return [*sorted(rows, key=lambda row: row["file"]), whole]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=pathlib.Path, default=ROOT / "benchmarks/results/build.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = build(pathlib.Path(folder))
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with args.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(
        f"{args.csv}: {len(rows) - 1} files, the library takes {rows[-1]['seconds']} s and {rows[-1]['object_mb']} MB"
    )


if __name__ == "__main__":
    sys.exit(compile_file(sys.argv[2:]) if sys.argv[1:2] == ["--compile"] else main())
