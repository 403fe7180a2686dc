"""Which clock and which power a GPU settles at while a function is called again and again, as nvidia-smi reads them.

`--power` of any benchmark writes them beside its rows, in a file <family>_power.csv:

ms     of a call in an unbroken sequence of them. Nothing is flushed between calls, unlike in the benchmark's rows.
mhz    the clock of the multiprocessors
watts  the power of the whole board
mj     the energy of a call in millijoules, watts * ms

A GPU whose power is at its limit lowers its clock: then the kernel that needs less energy is the faster one.
"""

import dataclasses
import statistics
import subprocess
import threading
import time
from collections.abc import Callable

import torch

READ_EVERY_MS = 10
_QUERY = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]


@dataclasses.dataclass(frozen=True)
class Power:
    """The columns of the CSV file that are measured."""

    ms: float
    mhz: float
    watts: float
    mj: float


def power_of(function: Callable[[], object], seconds: float = 2.0) -> Power:
    """Medians over the second half of `seconds` of calls; in the first half, clock and power settle."""
    with _Readings() as readings:
        _call_for(function, seconds / 2)
        start = time.perf_counter()
        calls = _call_for(function, seconds / 2)
        end = time.perf_counter()
    seen = [reading for when, *reading in readings.all if start <= when <= end]
    if not seen:
        raise RuntimeError(f"nvidia-smi gave no reading in {end - start:.1f} s: {readings.said()}")
    mhz, watts = (statistics.median(column) for column in zip(*seen, strict=True))
    ms = 1e3 * (end - start) / calls
    return Power(ms, mhz, watts, watts * ms)


def _call_for(function, seconds):
    """Keep the device busy for so long; return how often the function was called."""
    calls, burst, start = 0, 1, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(burst):
            function()
        torch.cuda.synchronize()
        calls += burst
        burst = min(2 * burst, max(1, int(0.1 * calls / (elapsed + 1e-9))))  # a wait every 0.1 s costs nothing
    return calls


class _Readings:
    """While the context is open, `all` grows by (time, MHz, watts)."""

    def __init__(self):
        self.all, self._lines = [], []

    def __enter__(self):
        device = f"--id=GPU-{torch.cuda.get_device_properties().uuid}"
        command = [*_QUERY, device, f"--loop-ms={READ_EVERY_MS}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(self, *_):
        self._process.terminate()
        self._reader.join()
        self._process.wait()

    def _read(self):
        for line in self._process.stdout:
            self._lines = [*self._lines[-2:], line.strip()]
            try:
                mhz, watts = map(float, line.split(","))
            except ValueError:  # a message, or [N/A]
                continue
            self.all.append((time.perf_counter(), mhz, watts))

    def said(self):
        return "; ".join(self._lines) or "it printed nothing"
