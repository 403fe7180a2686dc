"""On paper: time and memory of a model whose sequences are divided among GPUs. Plain Python, without tensors.

Symbols: S tokens of a sequence, P ranks, n = S / P, h and hk query and key heads, d head_dim, w the width of a layer
divided into T parts. Attention is causal, keys are bf16, contributions to their gradients float32. Each function is a
formula, which tests compare with numbers computed by hand.
"""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flash_attn.context_parallel._plan import LARGEST_GROUP, bytes_by_heads


class Model(NamedTuple):
    """The sizes of a decoder with a gated MLP."""

    heads: int = 32
    heads_k: int = 8
    head_dim: int = 128
    layers: int = 32
    width: int = 4096
    ffn: int = 14336
    vocab: int = 128256

    @property
    def parameters(self) -> int:
        """Of all layers, the embedding and the head."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.heads_k)
        return self.layers * (attention + 3 * self.width * self.ffn) + 2 * self.vocab * self.width


class Machine(NamedTuple):
    """Rates of a GPU and of what joins GPUs: TFLOP/s, GB/s in each direction, microseconds, GB."""

    fwd: float = 741.0
    bwd: float = 551.0
    gemm: float = 500.0
    nvlink: float = 360.0
    nic: float = 43.0
    latency: float = 20.0
    per_node: int = 8
    memory: float = 140.0


class Options(NamedTuple):
    """How a step is computed."""

    groups: int = 4  # of heads, in gather between nodes: head_groups of a Plan
    mlp_chunks: int = 16
    loss_chunk: int = 8192
    offload: bool = False
    keep_attention: bool = True


class Estimate(NamedTuple):
    """Of one method for attention of one layer: times in ms, bytes that a rank receives, what bounds it."""

    method: str
    compute: tuple[float, float]  # forward, backward
    transfer: tuple[float, float]
    exposed: tuple[float, float]
    efficiency: tuple[float, float]  # forward, forward and backward
    received: float
    bound: str


# Attention of one layer


def attention_flops(model: Model, tokens: int) -> tuple[float, float]:
    """Forward 2 h d S^2 and backward 5 h d S^2: half of the pairs of a causal mask."""
    pairs = float(model.heads * model.head_dim) * tokens**2
    return 2 * pairs, 5 * pairs


def gather_bytes(model: Model, tokens: int, ranks: int) -> tuple[float, float]:
    """Forward 4 (P - 1) n hk d; backward the same again and 8 (P - 1) n hk d of contributions."""
    keys = 4.0 * (ranks - 1) * tokens / ranks * model.heads_k * model.head_dim
    return keys, 3 * keys


def ulysses_bytes(model: Model, tokens: int, ranks: int) -> tuple[float, float]:
    """4 n d (h + hk) (P - 1) / P in each direction; where ranks share key heads, with what `bytes_by_heads` adds."""
    forward, backward = bytes_by_heads(model.heads, model.heads_k, ranks)
    size = tokens / ranks * model.head_dim * (ranks - 1) / ranks
    return size * forward, size * backward


def link_of(machine: Machine, ranks: int) -> tuple[str, float]:
    """The name and the rate of the slowest link among so many neighbouring GPUs."""
    return ("NVLink", machine.nvlink) if ranks <= machine.per_node else ("NIC", machine.nic)


def exposed_of_gather(transfer: float, compute: float, groups: int) -> float:
    """The first group's transfer, and what later ones take longer than the computation beside them.

    With one group that is all of it, as in ulysses, and in gather within a node.
    """
    return transfer / groups + (groups - 1) / groups * max(0.0, transfer - compute)


def attention(model: Model, machine: Machine, tokens: int, ranks: int, options: Options) -> Iterator[Estimate]:
    """Estimates of gather and, if the heads allow it, of ulysses."""
    flops = attention_flops(model, tokens)
    forward, backward = (1e-9 * work / ranks / rate for work, rate in zip(flops, machine[:2], strict=True))
    link, rate = link_of(machine, ranks)
    for method, volumes in (("gather", gather_bytes), ("ulysses", ulysses_bytes)):
        if method == "ulysses" and ranks > model.heads:
            continue
        sizes = volumes(model, tokens, ranks)
        groups = options.groups if (method, link) == ("gather", "NIC") else 1
        starts = {"gather": groups, "ulysses": 4}[method]
        waits = starts * machine.latency * 1e-3 * (ranks > 1)
        sending = [size / rate * 1e-6 + waits for size in sizes]
        out, back = (exposed_of_gather(*pair, groups) for pair in zip(sending, (forward, backward), strict=True))
        both = (forward + backward) / (forward + backward + out + back)
        bound = "compute" if both > 0.9 else "launches" if waits > sum(sending) / 2 else link
        yield Estimate(
            method,
            (forward, backward),
            (sending[0], sending[1]),
            (out, back),
            (forward / (forward + out), both),
            sum(sizes),
            bound,
        )


# A step


def kept(model: Model, tokens: float, tp: int, options: Options) -> float:
    """GB of what blocks keep of so many tokens of a GPU: their input, the residual and, if asked, attention's out."""
    out = model.heads * model.head_dim if options.keep_attention else 0
    return 1e-9 * model.layers * tokens * 2 * (2 * model.width + out) / tp


def memory(model: Model, tokens: int, cp: int, tp: int, shards: int, options: Options) -> dict[str, float]:
    """GB of each item on a GPU; tokens: of one sequence. shards: over how many GPUs parameters are divided."""
    n, gb = tokens / cp, 1e-9
    q, kv = model.heads * model.head_dim / tp, 2 * max(model.heads_k / tp, 1) * model.head_dim
    gathered = tokens * kv * 2  # keys and values; sums of their gradients, in float32, take twice as much
    held = gathered / max(1, min(math.ceil(gathered / LARGEST_GROUP), model.heads_k // tp))  # of a group, in a node
    own = n * (4 * q + 2 * kv) * 2 + n * q * 2  # q, out, dout, dq; keys and values and their gradients; a copy of out
    return {
        "parameters, gradients, optimizer": 16 * model.parameters / (shards * tp) * gb,
        "inputs of blocks, kept": 0 if options.offload else kept(model, n, tp, options),
        "attention": (own + (3 * held if cp > 1 else 0)) * gb,
        "MLP": 6 * n * model.ffn / tp * 2 / options.mlp_chunks * gb,
        "loss": (min(n, options.loss_chunk) * model.vocab / tp * 2 + model.vocab / tp * model.width * 4) * gb,
        "gathered layers, NCCL, workspace": 3.0 + 2 * 2 * model.parameters / model.layers / tp * gb,
    }


def tensor_parallel_bytes(model: Model, tokens: float, tp: int) -> float:
    """24 n w (T - 1) / T of a layer: attention and MLP gather n x w activations and scatter their sums, in bf16.

    That is 4 transfers in the forward, 4 in the backward, and 4 where blocks are computed again.
    """
    return 12 * 2.0 * tokens * model.width * (tp - 1) / tp


def step_seconds(
    model: Model, machine: Machine, tokens: int, cp: int, tp: int, options: Options, best: Estimate | None = None
) -> float:
    """Seconds of forward and backward of one sequence on cp * tp GPUs, blocks computed again in the backward.

    Transfers of tensor parallelism count in full: products wait for them.
    """
    best = best or max(attention(model, machine, tokens, cp, options), key=lambda each: each.efficiency[1])
    forward, backward = (sum(pair) for pair in zip(best.compute, best.exposed, strict=True))
    again = 0 if options.keep_attention else forward
    linear = 8 * model.parameters * tokens / (cp * tp) / machine.gemm / 1e12
    sums = model.layers * tensor_parallel_bytes(model, tokens / cp, tp) / link_of(machine, tp)[1] * 1e-9
    return model.layers * (forward + again + backward) / tp * 1e-3 + linear + sums


def longest(model: Model, machine: Machine, cp: int, tp: int, shards: int, options: Options) -> int:
    """The most tokens of a sequence that fit, in multiples of 1024."""
    low, high = 0, 2**20
    while sum(memory(model, high * 1024, cp, tp, shards, options).values()) <= machine.memory and high < 2**30:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = sum(memory(model, middle * 1024, cp, tp, shards, options).values()) <= machine.memory
        low, high = (middle, high) if fits else (low, middle)
    return low * 1024


def layouts(
    model: Model, machine: Machine, tokens: int, gpus: int, batch: int, options: Options
) -> list[tuple[float, int, int, int]]:
    """(tokens per second, dp, cp, tp) of the divisions of the GPUs that fit, fastest first. batch: tokens of a step."""
    found = []
    for tp in (2**i for i in range(int(math.log2(machine.per_node)) + 1)):
        for cp in (2**i for i in range(int(math.log2(max(1, gpus // tp))) + 1)):
            dp = gpus // (cp * tp)
            if gpus % (cp * tp) or tp > model.heads_k or batch < dp * tokens:
                continue
            if sum(memory(model, tokens, cp, tp, dp * cp, options).values()) > machine.memory:
                continue
            seconds = step_seconds(model, machine, tokens, cp, tp, options)
            found.append((dp * tokens / seconds, dp, cp, tp))
    return sorted(found, reverse=True)


def measured(machine: Machine, path: Path) -> Machine:
    """The machine with the rates of rows of `benchmarks.benchmark_context_parallel`."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    links = [float(row["gbps"]) for row in rows if row["provider"] == "all-gather" and row["gbps"]]
    rates = [
        float(row["tflops"]) for row in rows if (row["op"], row["provider"]) == ("attention", "one") and row["tflops"]
    ]
    if links:
        machine = machine._replace(nvlink=max(links))
    if rates:
        scale = max(rates) * (2 / machine.fwd + 5 / machine.bwd) / 7
        machine = machine._replace(fwd=machine.fwd * scale, bwd=machine.bwd * scale)
    return machine
