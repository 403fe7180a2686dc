"""The demo of `make demo`: flash_attn compared with plain PyTorch, then a language model trained and sampled with it.

    python examples/demo.py

1. Which backend serves here: the CUDA kernels or the reference in plain torch.
2. The error of attention and of its gradients against float64, next to the error of plain torch.
3. Time and peak memory as the sequence grows, next to plain torch (as far as memory goes) and torch's fused attention.
4. A byte-level language model (tiny_lm.py) trained on Python's own library; the text that it then writes.

It takes under two minutes on two CPU cores, and uses a GPU if there is one. The plot is saved under demo/.
"""

import argparse
import contextlib
import ctypes
import math
import pathlib
import statistics
import time
import typing

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from tqdm import tqdm

import flash_attn
import tiny_lm
from flash_attn import __main__ as report

PLOT = pathlib.Path(__file__).resolve().parents[1] / "demo" / "demo.png"

SIZES = {
    "cpu": {
        "dtype": torch.float32,
        "heads": 2,
        "seqlens": [256, 512, 1024, 2048, 4096, 8192],
        "model": {"dim": 128, "layers": 4, "context": 128},
        "training": {"steps": 400, "batch": 16},
    },
    "cuda": {
        "dtype": torch.bfloat16,
        "heads": 16,
        "seqlens": [1024, 2048, 4096, 8192, 16384, 32768],
        "model": {"dim": 384, "layers": 6, "context": 256},
        "training": {"steps": 1500, "batch": 64},
    },
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SIZES), type=report.usable_device, default=report.default_device())
    device = parser.parse_args().device
    start = time.perf_counter()
    torch.manual_seed(0)
    sizes = SIZES[device]

    heading("1. Backend")
    print(*report.installation(), *report.devices(), *report.backends(), sep="\n")

    heading("2. Largest error against float64, causal attention over 512 tokens")
    print_errors(device)

    heading(f"3. Forward and backward as the sequence grows ({sizes['heads']} heads of 64, {sizes['dtype']}, causal)")
    costs = measure_costs(device, sizes["dtype"], sizes["heads"], sizes["seqlens"])
    print_costs(costs)

    heading("4. A language model that reads and writes Python, byte by byte")
    before, losses, after, text = language_model(device, sizes["model"], sizes["training"])
    print(f"\n{text}")

    heading("Done")
    plot(costs, losses, after, device)
    tokens = len(losses) * sizes["training"]["batch"] * sizes["model"]["context"]
    longest = max(cost.seqlen for cost in costs)
    print(f"attention compared with float64 and with torch, forward and backward, up to {longest} tokens")
    print(f"language model: {tokens / 1e6:.1f} M bytes read, validation {before:.2f} -> {after:.2f} bits per byte")
    print(f"plot: {PLOT}")
    print(f"all of it took {time.perf_counter() - start:.0f} s")


def heading(text):
    print(f"\n{text}\n{'-' * len(text)}")


# Two other implementations of attention. All take and return (batch, seqlen, heads, head_dim).


def plain_attention(q, k, v):
    """softmax(q k^T / sqrt(head_dim)) v with a causal mask, as the formula is written."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ v).transpose(1, 2)


def torch_attention(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def our_attention(q, k, v):
    return flash_attn.flash_attn_func(q, k, v, causal=True)


CONTENDERS = {"plain torch": plain_attention, "torch SDPA": torch_attention, "flash_attn": our_attention}


def out_and_gradients(attention, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), dout)]


def print_errors(device):
    print(f"{'':<16}" + "".join(f"{name:>10}" for name in ("out", "dq", "dk", "dv")))
    for dtype in (torch.float16, torch.bfloat16):
        inputs = torch.randn(4, 2, 512, 4, 64, device=device, dtype=dtype)
        exact = out_and_gradients(plain_attention, *inputs.double())
        for name in ("flash_attn", "plain torch"):
            found = out_and_gradients(CONTENDERS[name], *inputs)
            errors = [(a.double() - b).abs().max().item() for a, b in zip(found, exact)]
            print(f"{name:<16}" + "".join(f"{error:>10.1e}" for error in errors) + f"  {dtype}")


# Time and memory


class Cost(typing.NamedTuple):
    contender: str
    seqlen: int
    seconds: float
    peak_bytes: float  # more than was in use before the call; nan if the system does not report it


def measure_costs(device, dtype, heads, seqlens):
    """The cost of each contender at each length; plain torch stops where it would need half of the free memory."""
    costs = []
    cells = [(name, seqlen) for seqlen in seqlens for name in CONTENDERS]
    for name, seqlen in tqdm(cells, desc="measuring", unit="run"):
        matrix_bytes = heads * seqlen**2 * dtype.itemsize
        if name == "plain torch" and 5 * matrix_bytes > free_bytes(device) / 2:
            continue
        inputs = torch.randn(4, 1, seqlen, heads, 64, device=device, dtype=dtype)
        costs.append(Cost(name, seqlen, *measure(CONTENDERS[name], inputs, device)))
    return costs


def measure(attention, inputs, device):
    """Seconds (the best of some runs) and peak bytes of forward and backward."""

    def run():
        out_and_gradients(attention, *inputs)

    seconds = [timed(run, device)]  # the first run also warms up
    peak = peak_bytes(run, device)
    while len(seconds) < 5 and sum(seconds) < 0.5:
        seconds.append(timed(run, device))
    return min(seconds), peak


def timed(run, device):
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def peak_bytes(run, device):
    """How far the memory of this process, or of the GPU's allocator, rises during `run`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    try:
        with contextlib.suppress(AttributeError):  # malloc_trim is glibc's: give back what earlier runs have freed
            ctypes.CDLL(None).malloc_trim(0)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew at what is resident now
        before = proc_value("/proc/self/status", "VmRSS")
        run()
        return proc_value("/proc/self/status", "VmHWM") - before
    except OSError:
        run()
        return math.nan


def free_bytes(device):
    if device == "cpu":
        return proc_value("/proc/meminfo", "MemAvailable")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def proc_value(path, key):
    """A value in bytes from lines such as 'VmRSS:   1234 kB'."""
    lines = pathlib.Path(path).read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def print_costs(costs):
    print(f"{'tokens':>8}" + "".join(f"{name:>24}" for name in CONTENDERS))
    for seqlen in sorted({cost.seqlen for cost in costs}):
        row = {cost.contender: cost for cost in costs if cost.seqlen == seqlen}
        cells = [
            f"{1e3 * row[name].seconds:9.1f} ms {row[name].peak_bytes / 2**20:7.0f} MiB" if name in row else "-"
            for name in CONTENDERS
        ]
        print(f"{seqlen:>8}" + "".join(f"{cell:>24}" for cell in cells))


# The language model


def language_model(device, model_sizes, training):
    """Train, measure and sample. Returns bits per byte before, during (a list) and after training, and the text."""
    training_text, validation_text = tiny_lm.python_sources()
    model = tiny_lm.TinyLM(**model_sizes).to(device)
    before = tiny_lm.validate(model, validation_text)
    losses = tiny_lm.train(model, training_text, **training)
    after = tiny_lm.validate(model, validation_text)
    text = tiny_lm.generate(model, b"class ", 500)
    return before, losses, after, text.decode(errors="replace")


# The plot

COLORS = {"plain torch": "#9aa0a6", "torch SDPA": "#e8a33d", "flash_attn": "#1a5fb4"}


def plot(costs, losses, validation, device):
    sizes, processor = SIZES[device], torch.cuda.get_device_name() if device == "cuda" else "CPU"
    setting = f"causal attention, {sizes['heads']} heads of 64, {str(sizes['dtype']).removeprefix('torch.')}"
    figure = Figure(figsize=(14, 4.6), layout="constrained")
    figure.suptitle(f"flash_attn {flash_attn.__version__} on {processor}: {setting}", x=0.005, ha="left", weight="bold")
    time_axes, memory_axes, loss_axes = figure.subplots(1, 3)
    plot_costs(time_axes, costs, [1e3 * cost.seconds for cost in costs], "{:g} ms")
    plot_costs(memory_axes, costs, [cost.peak_bytes / 2**20 for cost in costs], "{:g} MiB")
    plot_losses(loss_axes, losses, validation)
    for axes, title in (
        (time_axes, "Time of forward and backward"),
        (memory_axes, "Peak memory of forward and backward"),
        (loss_axes, "A language model learns Python: bits per byte"),
    ):
        axes.set_title(title, loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper right" if axes is loss_axes else "upper left")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=150)


def plot_costs(axes, costs, values, unit):
    """Plot values against the sequence length n, both logarithmic; the legend shows the best-fitting power of n."""
    for name, color in COLORS.items():
        points = [(cost.seqlen, value) for cost, value in zip(costs, values) if cost.contender == name]
        width = 2.5 if name == "flash_attn" else 1.5
        label = f"{name}: grows like $n^{{{exponent(points):.1f}}}$"
        axes.plot(*zip(*points), "o-", color=color, label=label, linewidth=width, markersize=2 * width)
    seqlens = sorted({cost.seqlen for cost in costs})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ymargin(0.25)  # room for the legend
    axes.set_xticks(seqlens, [f"{n // 1024}k" if n >= 1024 else str(n) for n in seqlens])
    axes.yaxis.set_major_formatter(lambda value, _: unit.format(value))
    axes.grid(axis="y", color="#eeeeee")
    axes.set_xlabel("sequence length n")


def exponent(points):
    """Returns p of the best fit c * n**p to points (n, value) on logarithmic axes; nan without two positive values."""
    logs = [(math.log(n), math.log(value)) for n, value in points if value > 0]
    return statistics.linear_regression(*zip(*logs)).slope if len(logs) > 1 else math.nan


def plot_losses(axes, losses, validation):
    width = max(1, len(losses) // 50)
    smooth = [sum(losses[i : i + width]) / width for i in range(len(losses) - width + 1)]
    axes.plot(losses, color=COLORS["flash_attn"], alpha=0.2, linewidth=1)
    axes.plot(range(width - 1, len(losses)), smooth, color=COLORS["flash_attn"], linewidth=2.5, label="training")
    axes.axhline(validation, color=COLORS["torch SDPA"], linestyle="--", label=f"validation: {validation:.2f}")
    axes.set_ylim(0, None)
    axes.set_xlabel("step")


if __name__ == "__main__":
    main()
