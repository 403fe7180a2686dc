"""Measuring, shared by all benchmarks: a benchmark file holds cases and providers, and ends in a call of `main`.

    def cases(device):
        yield Case("gelu", "4096x4096", "bf16", providers=..., bytes=2 * 2 * 4096**2)

    if __name__ == "__main__":
        main(__doc__, "gelu", cases, baseline="torch")

What is measured, for each provider of a case:

ms, ms_20, ms_80  median, 20 % and 80 % quantile of the device time of one call, from CUDA events. The providers of a
                  case take turns, so that clocks and temperature treat them alike. Before each call a buffer larger
                  than the L2 cache is overwritten: the inputs come from memory, and the write-back of the buffer makes
                  up for the part of the outputs that is still in the cache when the clock stops. The device is held
                  back until the host has enqueued the call, so that no time of the host's is counted, unless the call
                  itself waits for the device.
tflops, gbps      the case's flops and bytes over the median
share, of         the larger of gbps over the rate of a plain copy and tflops over that of a plain matmul, both
                  measured in the same run and in the same way
ratio             the baseline's median over this one: above 1 is faster than the baseline
host_us           time until a call returns to the host, with the device idle at the start
peak_mb           memory that a call allocates at its peak, beyond its inputs, or that its CUDA graph holds for it

Without a GPU the times are wall-clock times, and the host and memory columns stay empty.
"""

import argparse
import collections
import dataclasses
import fnmatch
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch

from benchmarks.bars import draw
from benchmarks.kernels import kernels_of
from benchmarks.power import power_of
from benchmarks.rows import ROWS, append_csv
from flash_attn import __main__ as report

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_FLUSH_BYTES = 512 * 2**20
# How long the device is held back while the host enqueues a call: in steps of about 50 us, up to 5 ms.
_HOLD_CYCLES, _MAX_HOLDS = 100_000, 100
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
_WARM_UP = 3
_MIN_CALLS, _MAX_CALLS = 10, 200


@dataclasses.dataclass(frozen=True)
class Case:
    """One computation on one input.

    op, name, dtype: as the table shows them; dtype is a key of DTYPES.
    providers: makes the inputs and returns {provider: function of no arguments}. A function that raises (a package
        that is not installed, a shape that is not supported) is reported and left out.
    bytes, flops: the least memory traffic and the arithmetic of one call; 0 where that is of no interest.
    """

    op: str
    name: str
    dtype: str
    providers: Callable[[], dict[str, Callable[[], object]]]
    bytes: float = 0
    flops: float = 0

    def __str__(self):
        return f"{self.op}/{self.name}/{self.dtype}"


@dataclasses.dataclass
class Row:
    """One line of the table and of the CSV file; the module's docstring explains the columns."""

    op: str
    case: str
    dtype: str
    provider: str
    ms: float
    ms_20: float
    ms_80: float
    tflops: float | None
    gbps: float | None
    share: float | None
    of: str | None
    ratio: float | None
    host_us: float | None
    peak_mb: float | None
    device: str
    cuda: str
    torch: str
    version: str


def backward_of(forward: Callable[[], torch.Tensor | tuple], *inputs: torch.Tensor) -> Callable[[], object]:
    """The function that computes the gradients of `forward()` for `inputs`, for fixed random incoming gradients.

    The forward runs when the function is first called: where it fails, it is this provider that fails.
    """

    @functools.cache
    def graph():
        outs = forward()
        outs = [outs] if isinstance(outs, torch.Tensor) else outs
        return outs, [torch.randn_like(out) for out in outs]

    def backward():
        outs, grads = graph()
        return torch.autograd.grad(outs, inputs, grads, retain_graph=True)

    return backward


def time_ms(functions: dict[str, Callable], device: str, seconds: float = 1.0) -> dict[str, list[float]]:
    """Times in milliseconds of each function, taking turns, for about `seconds` in all."""
    rounds = _rounds(functions, device, seconds)
    clock = _cuda_clock() if device == "cuda" else _wall_clock
    readings = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            readings[name].append(clock(function))
    if device == "cuda":
        torch.cuda.synchronize()
    return {name: [reading() for reading in column] for name, column in readings.items()}


def host_us(function: Callable, calls: int = 20, repeats: int = 5) -> float:
    """Microseconds of host time per call, the device being idle at the start: the median over `repeats` bursts."""
    bursts = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        bursts.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(bursts)


def peak_mb(function: Callable) -> float:
    """Megabytes (10^6) allocated at the peak of a call, beyond what was allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def graphs_mb() -> float:
    """Megabytes (10^6) that the CUDA graphs of this process hold for what they compute."""
    if not torch.cuda.is_initialized():
        return 0.0
    held = (each["total_size"] for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) != (0, 0))
    return sum(held) / 1e6


def main(description: str, family: str, cases: Callable[[str], Iterable[Case]], baseline: str) -> None:
    """Run the cases that the command line asks for, appending rows as they are made; print the table, draw the plot."""
    args = _parse(description, family)
    chosen = [case for case in cases(args.device) if fnmatch.fnmatch(str(case), args.cases)]
    if not chosen:
        raise SystemExit(f"no case matches {args.cases!r}; there are: " + ", ".join(map(str, cases(args.device))))
    peaks, progress, rows = _Peaks(args.device, args.seconds), _Progress(len(chosen)), []
    try:
        for number, case in enumerate(chosen):
            progress.show(number, str(case))
            measured = _measure(case, args, peaks, baseline)
            append_csv(args.csv, [dataclasses.asdict(row) for row in measured])
            rows += measured
        progress.show(len(chosen), "done")
    except KeyboardInterrupt:
        print("\nstopped: what follows is what was measured until then", file=sys.stderr)
    if not rows:
        raise SystemExit("nothing was measured")
    print(_table(rows))
    print("rows:", args.csv)
    if args.plot:
        print("plot:", draw(args.csv.with_suffix(".png"), rows))


def _parse(description, family):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="?", default="*", help="glob over op/case/dtype (default: all)")
    parser.add_argument("--providers", nargs="+", help="measure these only, and the baseline (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), type=report.usable_device, default=report.default_device())
    parser.add_argument("--seconds", type=float, default=1.0, help="time to spend measuring one case (default: 1)")
    parser.add_argument(
        "--csv", type=pathlib.Path, default=ROWS / f"{family}.csv", help="rows are appended here (default: %(default)s)"
    )
    parser.add_argument("--plot", action="store_true", help="also draw a PNG beside the CSV file")
    parser.add_argument("--kernels", action="store_true", help="also list what a GPU does, in a file beside it")
    parser.add_argument(
        "--power",
        nargs="?",
        const=2.0,
        type=float,
        metavar="SECONDS",
        help="also measure clock and energy of each function for so long, in a file beside it (2 if not given)",
    )
    args = parser.parse_args()
    for flag in ("kernels", "power"):
        if getattr(args, flag) and args.device != "cuda":
            parser.error(f"--{flag} needs a GPU")
    return args


def _measure(case, args, peaks, baseline):
    torch.compiler.reset()  # each case is compiled for its own shapes, however many there were before it
    functions = case.providers()
    if args.providers is not None:
        for name in args.providers:
            if name not in functions:
                print(f"\n{case}: no {name}; there are: {', '.join(functions)}", file=sys.stderr)
        functions = {name: function for name, function in functions.items() if name in (*args.providers, baseline)}
    functions, held_mb = _warmed(case, functions)
    times = time_ms(functions, args.device, args.seconds)
    medians = {name: statistics.median(column) for name, column in times.items()}
    if args.kernels:
        buffer = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        _append_beside(case, functions, args.csv, "kernels", lambda function: kernels_of(function, buffer.zero_))
    if args.power:
        _append_beside(case, functions, args.csv, "power", lambda function: [power_of(function, args.power)])
    return [
        _row(case, name, times[name], peaks, medians.get(baseline), functions[name], held_mb[name], args.device)
        for name in times
    ]


def _append_beside(case, functions, path, kind, measure):
    """Append what `measure` finds of each provider to a file beside that of the rows."""
    for provider, function in functions.items():
        of = {"op": case.op, "case": case.name, "dtype": case.dtype, "provider": provider} | environment("cuda")
        rows = [of | dataclasses.asdict(each) for each in measure(function)]
        append_csv(path.with_name(f"{path.stem}_{kind}.csv"), rows)


def _warmed(case, functions):
    """Warm the functions up. Return those that run here, and the megabytes of the graphs that each has captured."""
    running, held_mb = {}, {}
    for name, function in functions.items():
        before = graphs_mb()
        if _runs(case, name, function):
            running[name], held_mb[name] = function, graphs_mb() - before
    return running, held_mb


def _runs(case, name, function):
    """Warm the function up; say so if it cannot run here."""
    try:
        for _ in range(_WARM_UP):
            function()
    except Exception as error:  # a provider that fails must not end the run; the reader is told which and why
        message, *_ = str(error).split("\n")
        print(f"\n{case}: no {name}: {type(error).__name__}: {message}", file=sys.stderr)
        return False
    return True


def _row(case, provider, times, peaks, baseline_ms, function, held_mb, device):
    ms = statistics.median(times)
    quantiles = statistics.quantiles(times, n=5)
    tflops, gbps = case.flops / ms * 1e-9 or None, case.bytes / ms * 1e-6 or None
    shares = [
        (rate / peak(case.dtype), name)
        for rate, peak, name in ((gbps, peaks.copy_gbps, "copy"), (tflops, peaks.matmul_tflops, "matmul"))
        if rate
    ]
    share, of = max(shares, default=(None, None))
    on_gpu = device == "cuda"
    return Row(
        case.op,
        case.name,
        case.dtype,
        provider,
        ms,
        quantiles[0],
        quantiles[-1],
        tflops,
        gbps,
        share,
        of,
        ratio=baseline_ms / ms if baseline_ms else None,
        host_us=host_us(function, calls=max(1, min(20, int(200 / ms)))) if on_gpu else None,
        peak_mb=held_mb + peak_mb(function) if on_gpu else None,
        **environment(device),
    )


def environment(device: str) -> dict[str, str]:
    """The columns that say where a row was measured."""
    import flash_attn

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "cuda": torch.version.cuda or "",
        "torch": torch.__version__,
        "version": flash_attn.__version__,
    }


class _Peaks:
    """What the device reaches on a plain copy and a plain matmul, measured when first asked for."""

    def __init__(self, device, seconds):
        self.device, self.seconds, self.known = device, seconds, {}

    def copy_gbps(self, dtype):
        return self._known("copy", self._measure_copy)

    def matmul_tflops(self, dtype):
        return self._known(dtype, lambda: self._measure_matmul(DTYPES[dtype]))

    def _known(self, key, measure):
        if key not in self.known:
            self.known[key] = measure()
        return self.known[key]

    def _measure_copy(self):
        source = torch.ones(_COPY_BYTES[self.device] // 4, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self._median_ms(lambda: target.copy_(source)) * 1e-6

    def _measure_matmul(self, dtype):
        n = _MATMUL_SIZE[self.device]
        a, b = torch.randn(2, n, n, device=self.device, dtype=dtype)
        return 2 * n**3 / self._median_ms(lambda: a @ b) * 1e-9

    def _median_ms(self, function):
        return statistics.median(time_ms({"peak": function}, self.device, self.seconds)["peak"])


def _rounds(functions, device, seconds):
    """How often each function can run in the given time, from one warm round."""
    start = time.perf_counter()
    for function in functions.values():
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return min(max(int(seconds / (time.perf_counter() - start + 1e-9)), _MIN_CALLS), _MAX_CALLS)


def _wall_clock(function):
    start = time.perf_counter()
    function()
    elapsed = 1e3 * (time.perf_counter() - start)
    return lambda: elapsed


def _cuda_clock():
    buffer = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    holds = collections.Counter()  # how many steps of holding back each function has turned out to need

    def clock(function):
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(holds[function] * _HOLD_CYCLES)
            buffer.zero_()
            start.record()
            function()
            end.record()
            if holds[function] == _MAX_HOLDS or not start.query():
                return lambda: start.elapsed_time(end)
            # The device reached `start` before the host had enqueued everything: discard the reading, and hold longer.
            holds[function] = min(max(1, 2 * holds[function]), _MAX_HOLDS)

    return clock


class _Progress:
    """A bar on stderr: redrawn in place on a terminal, a line per case elsewhere."""

    WIDTH = 30

    def __init__(self, total):
        self.total, self.start, self.terminal = total, time.perf_counter(), sys.stderr.isatty()

    def show(self, done, what):
        elapsed = time.perf_counter() - self.start
        left = f", {elapsed / done * (self.total - done):.0f} s left" if done else ""
        bar = "#" * (self.WIDTH * done // self.total)
        line = f"|{bar:{self.WIDTH}}| {done}/{self.total} [{elapsed:.0f} s{left}] {what}"
        sys.stderr.write(f"\r\x1b[K{line}" if self.terminal and done < self.total else f"\r{line}\n")
        sys.stderr.flush()


# Columns of the printed table and their formats; the others are the same in every row and stand below it.
_TABLE = {
    **dict.fromkeys(("op", "case", "dtype", "provider"), ""),
    **dict.fromkeys(("ms", "ms_20", "ms_80"), ".4f"),
    "tflops": ".1f",
    "gbps": ".0f",
    "share": ".1%",
    "of": "",
    "ratio": ".2f",
    **dict.fromkeys(("host_us", "peak_mb"), ".1f"),
}


def _table(rows):
    """The rows as aligned text, without empty columns."""
    columns = [name for name in _TABLE if any(getattr(row, name) is not None for row in rows)]
    cells = [columns] + [[_cell(getattr(row, name), _TABLE[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    first = rows[0]
    return "\n".join([*lines, f"{first.device}, torch {first.torch}, flash_attn {first.version}"])


def _cell(value, spec):
    return "" if value is None else format(value, spec)
