"""Backward of the norms: the library as it was (base), as it is now (clean), and with its choices swept.

    python build/variants/sweep.py                      all of it: a process for each library, then predictions beside
    python build/variants/sweep.py base|clean|sweep     one of them;  --quick: fewer settings;  --cases GLOB
    python build/variants/sweep.py clean --kernels      also the times of bwd_kernel and finish_kernel alone (profiler)

Run from the root of the worktree. Writes build/variants/<library>.csv, or $OUT/<library>.csv if OUT is set.

Each reading: 512 MB are overwritten, the stream sleeps until the host has enqueued the call, events around the op
(bwd_kernel and finish_kernel). Median of ROUNDS readings, settings take turns. `held`: 24 blocks of another stream with
200 KB of shared memory each spin meanwhile. Bytes as in benchmarks/benchmark_layer_norm.py; the copy is of 1 GiB.
Each setting is checked before it is timed: dx0, dresidual, dweight, dbias against float64, twice the same bits, and the
same bits again while SMs are held; columns `equal` (dx0 and dresidual have the bits of the first setting) and `error`
(largest relative error, in the norm, of dweight and dbias).
"""

import argparse
import csv
import ctypes
import fnmatch
import itertools
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
import torch  # noqa: E402

ROUNDS = 15
HELD_SMS, HELD_NS = 24, 1_500_000
PREDICTED = """\
Written before anything was measured, H200, copy 4250 GB/s (op = bwd_kernel + finish_kernel):
                                       base op     clean op    clean with 24 SMs held (base)
  32768x768  fp32 stream, dropout      ~146 us     104-112     115-130 (~280)
  32768x768  fp32 stream               ~113        100-106     112-122 (~215)
  16384x1024 bf16                       46         40-43       46-52   (~85)
  16384x1024 bf16 dropout               ~54 (5 matrices: 168 MB)   46-50
  16384x2048 bf16                       78         73-77
  16384x4096 bf16                      140        136-142      (two blocks an SM, same bytes in flight)
  16384x8192 bf16                      267        264-270      (unchanged but for the ring's order)
  16384x4096 fp32 stream               268        260-268;  16384x8192 fp32 stream 524: 515-530 (cluster of 2x256)
Instructions per element on GPT-2's path (static count of the loop with dead branches removed): fp32 stream with dropout
~96 (types looked up, 8 elements a thread) -> 49 (16 a thread) or 60 (8 a thread, LN_EL=8); plain fp32 stream 48 -> 36;
bf16 plain 34 -> 34. At 528 schedulers and 1.75 GHz the old path alone is ~85 us of issue at 100 %, the new one 45.
To decide: threads (LN_THREADS), rounds (kMaxRounds, kRowsPerBlock), elements (LN_EL=8 LN_REGS=80 against 16), stages.
Sweep: 16 elements, 128 threads, 2 stages, 1-2 rounds best for 768 and 1024 (8 elements with 80 registers within 3 %);
3 stages within 1 %; 24 and 32 elements (a warp a row, no barrier, weights read again) slower with dropout; at 2048,
256 threads 1 round within 1 % of 128; more than 2 rounds cost 1-2 % each without held SMs; with held SMs 2 rounds gain
5-10 % over 1, 4 rounds nothing more."""


class Case:
    def __init__(self, rows, cols, stream, dropout_p):
        self.rows, self.cols, self.stream, self.dropout_p = rows, cols, stream, dropout_p
        x, h = 2, 4 if stream == "fp32" else 2
        self.bytes = rows * cols * (x + 3 * h + (x if dropout_p or x != h else 0))

    def __str__(self):
        return f"{self.rows}x{self.cols} {self.stream} stream{' dropout' if self.dropout_p else ''}"


CASES = [
    Case(32768, 768, "fp32", 0.1),
    Case(32768, 768, "fp32", 0.0),
    Case(32768, 768, "bf16", 0.1),
    Case(16384, 1024, "bf16", 0.0),
    Case(16384, 1024, "bf16", 0.1),
    Case(16384, 1024, "fp32", 0.0),
    Case(16384, 1280, "bf16", 0.0),  # 96 lanes: 4 blocks of 96 threads
    Case(16384, 2048, "bf16", 0.0),
    Case(16384, 2048, "fp32", 0.0),
    Case(16384, 4096, "bf16", 0.0),
    Case(16384, 4096, "fp32", 0.0),
    Case(16384, 8192, "bf16", 0.0),
    Case(16384, 8192, "fp32", 0.0),
]
KNOBS = "LN_EL", "LN_STAGES", "LN_HOLDS", "LN_REGS", "LN_THREADS", "LN_BLOCKS", "LN_ROUNDS", "LN_PARTS"
COMBOS = [  # elements a thread, stages, weights held, registers, threads of an SM that these allow, most threads
    (8, 2, 1, 80, 768, 256), (8, 3, 1, 80, 768, 256), (8, 2, 1, 128, 512, 512),
    (16, 2, 1, 128, 512, 512), (16, 3, 1, 128, 512, 512), (16, 2, 0, 128, 512, 512),
    (24, 2, 0, 128, 512, 128), (24, 2, 0, 168, 384, 128),
    (32, 2, 0, 128, 512, 128), (32, 3, 0, 128, 512, 128), (32, 2, 0, 168, 384, 128),
]  # fmt: skip


def settings_of(case, quick):
    """Dicts of environment variables; {} is what the clean library does."""
    yield {}
    vec = 4 if case.stream == "fp32" else 8
    yield dict(LN_EL=8 if vec == 4 else 16, LN_THREADS=512, LN_BLOCKS=1, LN_ROUNDS=1)  # the distribution of base
    combos = [c for c in COMBOS if not quick or c[:4] in ((8, 2, 1, 80), (16, 2, 1, 128), (16, 3, 1, 128))]
    for (elements, stages, holds, regs, room, most), target, rounds in itertools.product(
        combos, (64, 128, 192, 256, 512), (1, 2) if quick else (1, 2, 3, 4, 6)
    ):
        if vec == 4 and elements == 16:
            most = 256
        needed = -(-case.cols // elements)
        lanes = 32 * -(-needed // 32)
        if lanes > most:
            continue
        threads = lanes * max(1, target // lanes)
        if threads > min(most, max(target, lanes)) or (target < 512 and target > 64 and threads == lanes * max(1, (target - 64) // lanes) and target != 128):
            continue  # the same block as a smaller target
        slot_bytes = stages * 3 * 16 * (elements // vec) * threads + 4096
        blocks = min(4, room // threads, 227 * 1024 // slot_bytes)
        if blocks == 0 or case.rows < 8 * rounds * blocks * 132:
            continue
        yield dict(LN_EL=elements, LN_STAGES=stages, LN_HOLDS=holds, LN_REGS=regs, LN_THREADS=target,
                   LN_BLOCKS=blocks, LN_ROUNDS=rounds)  # fmt: skip


def apply(setting):
    for name in KNOBS:
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in setting.items()})


def load(library):
    from flash_attn import _library

    path = HERE / library / "_kernels.so"
    assert path.exists(), path
    _library._find = lambda: (path, None)
    assert _library.load_error() is None, _library.load_error()
    import flash_attn.ops.layer_norm  # noqa: F401

    assert _library.library_path() == path


def problem(case):
    """A function of no arguments that runs the backward, and what it should return in float64."""
    torch.manual_seed(0)
    h_dtype = torch.float32 if case.stream == "fp32" else torch.bfloat16
    shape = case.rows, case.cols
    x, dout = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    residual, dh = (torch.randn(shape, device="cuda").to(h_dtype) for _ in range(2))
    weight = torch.rand(case.cols, device="cuda") + 0.5  # fp32, as under autocast
    bias = torch.rand(case.cols, device="cuda")
    rng_state = torch.tensor([1, 2], device="cuda") if case.dropout_p else None
    ops = torch.ops.flash_attn
    _, _, h, mask, _, mean, rstd = ops.layer_norm_fwd(
        x, None, residual, weight, bias, None, None, None, None, None, None, rng_state, case.dropout_p, 1e-5, 1.0, 0,
        False, False, h_dtype, torch.bfloat16, case.dropout_p > 0,
    )  # fmt: skip
    del x, residual
    dx0_dtype = torch.bfloat16 if case.dropout_p or case.stream == "fp32" else None

    def run():
        dx0, _, dresidual, dweight, dbias, *_ = ops.layer_norm_bwd(
            dout, None, dh, h, None, mean, rstd, weight, bias, None, None, None, None, None, None, rng_state, None,
            None, case.dropout_p, 1.0, 0, False, False, dx0_dtype, None, h_dtype, None,
        )  # fmt: skip
        return dx0, dresidual, dweight, dbias

    y = (h.double() - mean.double()[:, None]) * rstd.double()[:, None]
    g = weight.double() * dout.double()
    dtotal = rstd.double()[:, None] * (g - g.mean(1, keepdim=True) - y * (g * y).mean(1, keepdim=True)) + dh.double()
    dweight, dbias = (dout.double() * y).sum(0), dout.double().sum(0)
    dx0 = dtotal * mask / (1 - case.dropout_p) if case.dropout_p else dtotal if dx0_dtype else dtotal[:0, 0]
    return run, (dx0.float(), dtotal.float(), dweight, dbias)


class Hog:
    def __init__(self):
        self.library = ctypes.CDLL(str(HERE / "hog.so"))
        self.stream = torch.cuda.Stream()

    def __call__(self):
        error = self.library.hog(HELD_SMS, 200 * 1024, ctypes.c_longlong(HELD_NS), ctypes.c_void_p(self.stream.cuda_stream))
        assert error == 0, error


class Clock:
    def __init__(self):
        self.flush, self.hog = torch.empty(512 * 2**20, dtype=torch.int8, device="cuda"), Hog()

    def __call__(self, run, held=False):
        """A function that returns microseconds, to be called when the device is done."""
        start, end, flushed = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        self.flush.zero_()
        torch.cuda._sleep(600_000)
        if held:
            flushed.record()
            self.hog.stream.wait_event(flushed)
            self.hog()
            torch.cuda._sleep(100_000)
        start.record()
        run()
        end.record()
        if held:
            torch.cuda.current_stream().wait_stream(self.hog.stream)
        return lambda: 1000 * start.elapsed_time(end)


def check(run, expected, first, clock):
    """(equal to first, largest relative error of the gradients of parameters, outputs); raises if something is wrong."""
    found, again, held = run(), run(), []
    clock(lambda: held.extend(run()), held=True)
    torch.cuda.synchronize()
    for a, b, c in zip(found, again, held, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c), "two calls gave different bits"
    errors = [((a.double() - e.double()).norm() / e.double().norm()).item() if e.numel() else 0.0
              for a, e in zip(found, expected, strict=True)]  # fmt: skip
    assert errors[0] < 4e-3 and errors[1] < 4e-3 and max(errors[2:]) < 1e-5, errors
    if first is not None and found[0].numel():  # the same elements are dropped
        assert torch.equal(found[0] == 0, first[0] == 0) or (found[0] == 0).ne(first[0] == 0).sum() < 100, "dropout"
    equal = first is None or all(torch.equal(a, b) for a, b in zip(found[:2], first[:2], strict=True))
    return equal, max(errors[2:]), found


def copy_gbps(clock):
    source, target = (torch.empty(2**30, dtype=torch.int8, device="cuda") for _ in range(2))
    readings = [clock(lambda: target.copy_(source)) for _ in range(10)]
    torch.cuda.synchronize()
    return 2 * 2**30 / statistics.median(reading() for reading in readings) * 1e-3


def kernels(run, clock):
    """Microseconds of bwd_kernel and finish_kernel, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            clock.flush.zero_()
            run()
        torch.cuda.synchronize()
    times = {}
    for event in profile.events():
        for name in ("bwd_kernel", "finish_kernel"):
            if name in event.name:
                times.setdefault(name, []).append(event.device_time)
    return {name: round(statistics.median(column), 1) for name, column in times.items()}


def measure(library, args):
    load(library)
    clock = Clock()
    copy = copy_gbps(clock)
    print(f"{library}: {torch.cuda.get_device_name()}, copy {copy:.0f} GB/s", flush=True)
    out = pathlib.Path(os.environ.get("OUT", HERE)) / f"{library}.csv"
    rows = []
    for case in CASES:
        if not fnmatch.fnmatch(str(case), args.cases):
            continue
        apply({})
        run, expected = problem(case)
        swept = list(settings_of(case, args.quick)) if library == "sweep" else [{}]
        checked, first, failed = [], None, 0
        for setting in swept:
            apply(setting)
            try:
                equal, error, found = check(run, expected, first, clock)
            except (RuntimeError, AssertionError) as problem_found:
                failed += 1
                print(f"  FAILED {setting}: {str(problem_found)[:300]}", flush=True)
                if "illegal" in str(problem_found) or "misaligned" in str(problem_found):
                    raise
                continue
            first = first or found
            checked.append((setting, equal, error))
        readings = [([], []) for _ in checked]
        for _ in range(ROUNDS if library == "sweep" else 3 * ROUNDS):
            for (setting, *_), columns in zip(checked, readings, strict=True):
                apply(setting)
                for column, held in zip(columns, (False, True), strict=True):
                    column.append(clock(run, held))
            torch.cuda.synchronize()
        found = []
        for (setting, equal, error), columns in zip(checked, readings, strict=True):
            us, held_us = (statistics.median(reading() for reading in column) for column in columns)
            gbps = case.bytes / us * 1e-3
            row = dict(library=library, case=str(case), **{name: setting.get(name, "") for name in KNOBS}, us=round(us, 1),
                       gbps=round(gbps), share=round(gbps / copy, 3), held_us=round(held_us, 1), equal=equal,
                       error=f"{error:.1e}")  # fmt: skip
            if args.kernels:
                apply(setting)
                row |= kernels(run, clock)
            found.append(row)
        rows += found
        print(f"{case}: {len(found)} settings, {failed} failed; a copy would take {case.bytes / copy * 1e-3:.1f} us")
        shown = found[:2] + sorted(found[2:], key=lambda row: row["us"])[:8]
        shown += [row for row in sorted(found[2:], key=lambda row: row["held_us"])[:4] if row not in shown]
        for row in shown:
            knobs = " ".join(f"{name[3:]}={row[name]}" for name in KNOBS if row[name] != "") or "as it is"
            more = {name: row[name] for name in ("bwd_kernel", "finish_kernel") if name in row} or ""
            print(f"  {row['us']:7.1f} us {row['gbps']:5d} GB/s {row['share']:.3f}  held {row['held_us']:7.1f} us"
                  f"  equal {row['equal']!s:5} error {row['error']}  {knobs} {more}", flush=True)  # fmt: skip
        with open(out, "w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
        del run, expected, first
    print("rows:", out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", choices=("base", "clean", "sweep"))
    parser.add_argument("--cases", default="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    if args.library:
        return measure(args.library, args)
    print(PREDICTED, flush=True)
    for library in ("base", "clean", "sweep"):
        more = ["--kernels"] * (library != "sweep") + ["--quick"] * args.quick
        subprocess.run([sys.executable, __file__, library, "--cases", args.cases, *more], check=False)


if __name__ == "__main__":
    main()
