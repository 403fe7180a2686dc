"""Time and memory of functions of tensors, forward and backward.

    benchmark_fwd_bwd(flash_attn_func, q, k, v, causal=True, repeats=30, desc="FlashAttention")

All functions take fn and its inputs; keyword arguments that are not their own are passed on to fn. If fn returns a
tuple, its first element counts. amp runs fn, but not its backward, under autocast to amp_dtype. Times are
`torch.utils.benchmark.Measurement`s: mean, median and spread in seconds, including the wait for the device.
"""

import os
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.utils.benchmark import Measurement, Timer

from flash_attn import _torch_private

_Timed: TypeAlias = tuple[Timer, Measurement]


def benchmark_forward(
    fn: Callable,
    *inputs: Any,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> _Timed:
    """Time fn(*inputs, **kwinputs). Returns (Timer, Measurement).

    Arguments:
        repeats: how many calls are timed.
        desc: a text that is printed first.
        verbose: print it and the measurement.
        amp, amp_dtype: whether to call it under autocast, and to which dtype.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_forward
        >>> _, measurement = benchmark_forward(torch.matmul, *torch.randn(2, 64, 64), repeats=2, verbose=False)
        >>> measurement.mean < 1  # seconds
        True
    """
    forward = _forward(fn, inputs, kwinputs, amp, amp_dtype)
    return _timed(forward, repeats, f"{desc} - Forward pass", verbose)


def benchmark_backward(
    fn: Callable,
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> _Timed:
    """Time the backward of fn(*inputs, **kwinputs), which runs once.

    grad: the gradient of its output; random if None. Gradients of positional inputs are discarded before each backward.
    The other arguments are those of `benchmark_forward`. Returns (Timer, Measurement). Raises RuntimeError for a grad
    of another shape.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_backward
        >>> x, y = torch.randn(2, 64, 64).requires_grad_()
        >>> _, measurement = benchmark_backward(torch.matmul, x, y, repeats=2, verbose=False)
        >>> measurement.mean < 1  # seconds
        True
    """
    out = _forward(fn, inputs, kwinputs, amp, amp_dtype)()
    backward = _backward(out, _grad_of(out, grad), inputs)
    return _timed(backward, repeats, f"{desc} - Backward pass", verbose)


def benchmark_combined(
    fn: Callable,
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> _Timed:
    """Time fn(*inputs, **kwinputs) and its backward together; otherwise like `benchmark_backward`.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_combined
        >>> x, y = torch.randn(2, 64, 64).requires_grad_()
        >>> _, measurement = benchmark_combined(torch.matmul, x, y, repeats=2, verbose=False)
        >>> measurement.mean < 1  # seconds
        True
    """
    forward = _forward(fn, inputs, kwinputs, amp, amp_dtype)
    grad = _grad_of(forward(), grad)
    return _timed(lambda: _backward(forward(), grad, inputs)(), repeats, f"{desc} - Forward + Backward pass", verbose)


def benchmark_fwd_bwd(
    fn: Callable,
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[_Timed, _Timed]:
    """`benchmark_forward` and `benchmark_backward`: a pair of what they return.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_fwd_bwd
        >>> x, y = torch.randn(2, 64, 64).requires_grad_()
        >>> (_, forward), (_, backward) = benchmark_fwd_bwd(torch.matmul, x, y, repeats=2, verbose=False)
        >>> forward.mean < 1  # seconds
        True
    """
    options = dict(repeats=repeats, desc=desc, verbose=verbose, amp=amp, amp_dtype=amp_dtype, **kwinputs)
    return benchmark_forward(fn, *inputs, **options), benchmark_backward(fn, *inputs, grad=grad, **options)


def benchmark_all(
    fn: Callable,
    *inputs: Any,
    grad: Tensor | None = None,
    repeats: int = 10,
    desc: str = "",
    verbose: bool = True,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    **kwinputs: Any,
) -> tuple[_Timed, _Timed, _Timed]:
    """`benchmark_forward`, `benchmark_backward` and `benchmark_combined`: a triple of what they return.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_all
        >>> x, y = torch.randn(2, 64, 64).requires_grad_()
        >>> forward, backward, both = benchmark_all(torch.matmul, x, y, repeats=2, verbose=False)
        >>> both[1].mean < 1  # seconds
        True
    """
    options = dict(repeats=repeats, desc=desc, verbose=verbose, amp=amp, amp_dtype=amp_dtype, **kwinputs)
    return (
        benchmark_forward(fn, *inputs, **options),
        benchmark_backward(fn, *inputs, grad=grad, **options),
        benchmark_combined(fn, *inputs, grad=grad, **options),
    )


def pytorch_profiler(
    fn: Callable,
    *inputs: Any,
    trace_filename: str | os.PathLike[str] | None = None,
    backward: bool = False,
    amp: bool = False,
    amp_dtype: torch.dtype = torch.float16,
    cpu: bool = False,
    verbose: bool = True,
    **kwinputs: Any,
) -> None:
    """Profile one call of fn(*inputs, **kwinputs), after 30 to warm up.

    Arguments:
        trace_filename: where to write a trace for chrome://tracing, or None.
        backward: with a backward for a random gradient.
        amp, amp_dtype: whether to call it under autocast, and to which dtype.
        cpu: profile the CPU beside the GPU; it is profiled in any case if there is no GPU.
        verbose: print a table of the 50 longest operations.

    Example:
        >>> import os, tempfile
        >>> from flash_attn.utils.benchmark import pytorch_profiler
        >>> trace = os.path.join(tempfile.mkdtemp(), "trace.json")
        >>> pytorch_profiler(torch.matmul, *torch.randn(2, 8, 8), trace_filename=trace, verbose=False)
        >>> os.path.exists(trace)
        True
    """
    forward = _forward(fn, inputs, kwinputs, amp, amp_dtype)
    grad = _grad_of(forward(), None) if backward else None

    def step():
        out = forward()
        if backward:
            _backward(out, grad, inputs)()
        _wait(inputs)

    for _ in range(30):
        step()
    on_gpu = _device(inputs).type == "cuda"
    activities = [ProfilerActivity.CUDA] * on_gpu + [ProfilerActivity.CPU] * (cpu or not on_gpu)
    traced = trace_filename is not None  # records Python functions too, which would fill the table
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=traced) as profile:
        step()
    if verbose:
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=order, row_limit=50))
    if traced:
        profile.export_chrome_trace(str(trace_filename))


def benchmark_memory(fn: Callable, *inputs: Any, desc: str = "", verbose: bool = True, **kwinputs: Any) -> float:
    """The most memory in use at a time during fn(*inputs, **kwinputs), in units of 1000 * 2 ** 20 bytes.

    On a GPU, all that torch has allocated there. On a CPU, what is allocated during the call. Printed after desc if
    verbose.

    Example:
        >>> from flash_attn.utils.benchmark import benchmark_memory
        >>> used = benchmark_memory(torch.matmul, *torch.randn(2, 1024, 1024), verbose=False)
        >>> used >= 0.004  # of 1000 * 2 ** 20 bytes: the product has 4 * 2 ** 20
        True
    """
    device = _device(inputs)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        _wait(inputs)
        fn(*inputs, **kwinputs)
        _wait(inputs)
        used = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
    else:
        used = _peak_on_cpu(lambda: fn(*inputs, **kwinputs))
    gigabytes = used / (2**20 * 1000)
    if verbose:
        print(f"{desc} max memory: {gigabytes}GB")
    return gigabytes


def _forward(fn, inputs, kwinputs, amp, amp_dtype):
    """A function that calls fn and returns its only or first output."""
    device = _device(inputs).type

    def forward():
        with torch.autocast(device, dtype=amp_dtype, enabled=amp):
            out = fn(*inputs, **kwinputs)
        return out[0] if type(out) is tuple else out

    return forward


def _grad_of(out, grad):
    if grad is None:
        return torch.randn_like(out)
    if grad.shape != out.shape:
        raise RuntimeError(f"grad must have the shape of the output, {tuple(out.shape)}, found {tuple(grad.shape)}")
    return grad


def _backward(out, grad, inputs):
    def backward():
        for x in inputs:
            if isinstance(x, Tensor):
                x.grad = None
        out.backward(grad, retain_graph=True)

    return backward


def _timed(step, repeats, title, verbose):
    timer = Timer(stmt="step()", globals={"step": step}, num_threads=torch.get_num_threads(), description=title)
    measurement = timer.timeit(repeats)
    if verbose:
        print(title)
        print(measurement)
    return timer, measurement


def _device(inputs):
    """The device of the first tensor, or, without tensors, a GPU if there is one."""
    for x in inputs:
        if isinstance(x, Tensor):
            return x.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _wait(inputs):
    if _device(inputs).type == "cuda":
        torch.cuda.synchronize(_device(inputs))


def _peak_on_cpu(call):
    """Returns the peak of allocated bytes during call(): the largest running sum of allocations less frees."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    used = peak = 0
    for event in sorted(_torch_private.memory_events(profile), key=lambda event: event.start_ns()):
        used += event.nbytes()
        peak = max(peak, used)
    return peak
