"""Compare the builds of several source trees: each measures the same cases in a process of its own, in turns.

    python -m benchmarks.trees ../old . flash_attn "flash_attn_bwd/*x128*" --rounds 5

A tree is a checkout with its CUDA library built, or a copy with another one. Its benchmarks make the cases and its
package runs them, this library's provider alone. The processes take turns case by case and round by round, so that
the clock and the temperature treat them alike. For each case: the median milliseconds of the first tree, and by what
factor each of the others is faster, with the least and the most of its rounds. Differences within that range, and
those below 3 % that a second run does not show, say nothing.
"""

import argparse
import csv
import fnmatch
import functools
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys

PROVIDER = "flash_attn"


class Worker:
    """A process that measures a tree's benchmarks on request: see `work`."""

    def __init__(self, tree: pathlib.Path, family: str, device: str, seconds: float) -> None:
        command = [sys.executable, __file__, "--worker", family, device, str(seconds)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def ask(self, request: str) -> list:
        """Send a request to the process, and return its answer, a list."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(request, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended when asked for {request!r}: see above")
        return json.loads(answer)


def work(family: str, device: str, seconds: float) -> None:
    """Answer requests: "" by the names of all cases, a name by the median milliseconds of that case."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what a benchmark prints is no answer
    here = str(pathlib.Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != here]  # whose modules have names of packages, such as kernels
    from benchmarks.harness import time_ms

    cases = {str(case): case for case in importlib.import_module(f"benchmarks.benchmark_{family}").cases(device)}

    @functools.lru_cache(maxsize=1)
    def function(name):
        return cases[name].providers()[PROVIDER]

    for line in sys.stdin:
        name = line.rstrip("\n")
        times = statistics.median(time_ms({PROVIDER: function(name)}, device, seconds)[PROVIDER]) if name else None
        print(json.dumps([times] if name else list(cases)), file=answers, flush=True)


def check_trees(parser: argparse.ArgumentParser, trees: list[pathlib.Path], family: str) -> None:
    """End the program with a message unless all folders have that benchmark."""
    for tree in trees:
        if not (tree / "benchmarks" / f"benchmark_{family}.py").is_file():
            parser.error(f"TREE: must have benchmarks/benchmark_{family}.py, found {tree}")


def main() -> None:
    """Run what the command line asks for; print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=pathlib.Path, metavar="TREE", help="two or more folders")
    parser.add_argument("family", help="a benchmark, such as flash_attn")
    parser.add_argument("cases", help="glob over op/case/dtype")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each tree (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of measuring in a turn (default: %(default)s)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--csv", type=pathlib.Path, help="write all medians to this file, too")
    args = parser.parse_args()
    check_trees(parser, args.trees, args.family)
    workers = [Worker(tree.absolute(), args.family, args.device, args.seconds) for tree in args.trees]
    first, *others = (worker.ask("") for worker in workers)
    chosen = [name for name in first if fnmatch.fnmatch(name, args.cases) and all(name in other for other in others)]
    if not chosen:
        raise SystemExit(f"no case that all trees have matches {args.cases!r}")
    rows = []
    for name in chosen:
        rounds = [[worker.ask(name)[0] for worker in workers] for _ in range(args.rounds)]
        gains = [[times[0] / time for time in times] for times in rounds]
        _, *of_others = zip(*gains, strict=True)
        texts = [f"{statistics.median(gain):.3f} ({min(gain):.3f} to {max(gain):.3f})" for gain in of_others]
        print(f"{name}: {statistics.median(times[0] for times in rounds):.4g} ms", *texts, sep=", ", flush=True)
        rows += [[name, i, *times] for i, times in enumerate(rounds)]
    if args.csv:
        with args.csv.open("w", newline="") as file:
            csv.writer(file).writerows([["case", "round", *map(str, args.trees)], *rows])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
