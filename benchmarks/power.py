"""Which clock a GPU settles at, and which energy a call takes, while a function is called again and again.

`--power` of any benchmark writes them beside its rows, in a file <family>_power.csv:

ms     of a call in an unbroken sequence of them. Nothing is flushed between calls, unlike in the benchmark's rows.
mhz    the clock of the multiprocessors
watts  the power of the whole board
mj     the energy of a call in millijoules: what the driver's counter of the board's energy rose by, over the calls

A GPU whose power is at its limit lowers its clock: then the kernel that needs less energy is the faster one.
"""

import ctypes
import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

_BURST = 0.1  # seconds of calls between two waits for the device, which then cost nothing
_SM_CLOCK = 1  # NVML's name of the clock of the multiprocessors


@dataclasses.dataclass(frozen=True)
class Power:
    """The columns of the CSV file that are measured."""

    ms: float
    mhz: float
    watts: float
    mj: float


def power_of(function: Callable[[], object], seconds: float = 2.0) -> Power:
    """Clock and energy over the second half of `seconds` of calls; in the first half, clock and power settle.

    The counter of energy moves every 0.02 to 0.1 s: half of `seconds` should be longer by far.

    Raises:
        RuntimeError: if the driver does not tell them.
    """
    gpu, clocks = _Gpu(), []
    _call_for(function, seconds / 2)
    joules, start = gpu.joules(), time.perf_counter()
    calls = _call_for(function, seconds / 2, lambda: clocks.append(gpu.mhz()))
    joules, elapsed = gpu.joules() - joules, time.perf_counter() - start
    return Power(1e3 * elapsed / calls, statistics.median(clocks), joules / elapsed, 1e3 * joules / calls)


def _call_for(function, seconds, while_busy=lambda: None):
    """Keep the device busy for so long; return how often the function was called.

    while_busy: called once in each burst of calls, before they have ended.
    """
    calls, burst, start = 0, 1, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        for _ in range(burst):
            function()
        while_busy()
        torch.cuda.synchronize()
        calls += burst
        burst = min(2 * burst, max(1, int(_BURST * calls / (elapsed + 1e-9))))
    return calls


class _Gpu:
    """The current device, as NVML, a library of the driver, reads it."""

    def __init__(self):
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise RuntimeError(f"clock and energy are NVML's to read, a library of NVIDIA's driver: {error}") from error
        self._device = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties().uuid}"
        self._ask("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))

    def joules(self) -> float:
        """The energy that the board has taken since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return 1e-3 * millijoules.value

    def mhz(self) -> int:
        clock = ctypes.c_uint()
        self._ask("nvmlDeviceGetClockInfo", self._device, _SM_CLOCK, ctypes.byref(clock))
        return clock.value

    def _ask(self, name, *args):
        if status := getattr(self._nvml, name)(*args):
            raise RuntimeError(f"NVML refuses {name}, with status {status}")
