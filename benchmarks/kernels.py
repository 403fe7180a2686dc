"""Which kernels and copies a call runs on the GPU, and how long each takes, as CUDA's profiler (CUPTI) reports them.

`--kernels` of any benchmark writes them beside its rows, in a file <family>_kernels.csv:

kernel  without its arguments and those of templates
count   how often a call runs it
us      for all of them, in the median call. The L2 cache is as cold as for the benchmark's times. A kernel that starts
        before the one ahead of it has ended also waits for that one: the sum may exceed the time of the call.
"""

import collections
import dataclasses
import re
import statistics
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

_CALLS = 7


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One line of the CSV file, without the columns that say which call it belongs to."""

    kernel: str
    count: int
    us: float


def kernels_of(function: Callable[[], object], flush: Callable[[], object]) -> list[Kernel]:
    """The kernels of a call of `function`, those that take longest first; `flush` empties the cache before it."""
    found = collections.defaultdict(list)
    for _ in range(_CALLS):
        flush()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            function()
            torch.cuda.synchronize()
        durations = collections.defaultdict(list)
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                durations[short_name(event.name)].append(event.time_range.elapsed_us())
        for name, times in durations.items():
            found[name].append((sum(times), len(times)))
    kernels = [
        Kernel(name, max(count for _, count in calls), statistics.median(us for us, _ in calls))
        for name, calls in found.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.us)


def short_name(name: str) -> str:
    """The name of a kernel without what it returns, its arguments and those of templates.

    >>> short_name("void flash::fwd_kernel<flash::Config<(int)8, true> >(flash::Params)")
    'flash::fwd_kernel'
    """
    name = name.replace("(anonymous namespace)::", "")
    while (shorter := re.sub(r"<[^<>]*>|\([^()]*\)", "", name)) != name:
        name = shorter
    return name.split()[-1] if "::" in name else name.strip()
