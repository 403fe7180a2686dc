"""Attention of one row over several GPUs: forward and backward, beside one GPU and beside others who divide sequences.

gather, ulysses     `flash_attn.context_parallel.cp_attn_func`
gather whole        gather without groups of heads: nothing is computed while keys arrive
gather silent       gather with its schedule, but without transfers: what they cost is the difference (its results are
                    wrong)
torch allgather, torch alltoall, torch cudnn    torch's context_parallel, its two protocols with its flash kernel, and
                    the first with cuDNN
ring                ring-flash-attention's zigzag on the kernels of this package, if it is installed

ms: the median of rounds, each the time of the slowest rank from a barrier on; of one, if that takes ten seconds.
efficiency: the time of one GPU over ms and the number of GPUs. tflops: of one GPU. ratio: ms of "torch allgather" over
ms.

links: rows of transfers, each alone and beside a matmul: shift (to the next rank and from the one before), all-gather,
all-to-all, reduce-scatter. gbps: what a rank receives.

steps: a whole training step of a decoder with random weights, forward, backward and AdamW, with parameters divided over
all ranks (FSDP2), blocks computed again but for attention, which is kept in the memory of the host, MLPs in chunks, and
a loss that never has all logits. Beside it stands what `python -m flash_attn.context_parallel` estimates.

errors: the rms error of out, dq, dk and dv against float64 on a short row, over that of one process. Of a long row
(from 512k on): that of some rows of out and dq, over what rounding the exact ones to bf16 would leave, and of lse.

All numbers of GPUs that are asked for run one after the other, so that efficiency has its baseline:

    python -m benchmarks.benchmark_context_parallel --ranks 1 2 4
    python -m benchmarks.benchmark_context_parallel 'attention/causal 32k*' --ranks 1 4 --providers gather ulysses
"""

import argparse
import contextlib
import csv
import dataclasses
import fnmatch
import functools
import pathlib
import random
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from benchmarks.harness import DTYPES, environment
from benchmarks.rows import ROWS, append_csv
from flash_attn import __main__ as report
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn._ops import collectives
from flash_attn.context_parallel import Plan, cp_attn_func
from flash_attn.context_parallel._estimate import Machine, Model, Options, memory, step_seconds
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy

K = 1024
EIGHT_B = Model()


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: its kind ("attention", "links", "errors" or "step"), a name, lengths of documents, and attention."""

    op: str
    name: str
    seqlens: tuple[int, ...] = ()
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    window: int = -1
    bytes: int = 0  # that a rank sends
    model: Model = EIGHT_B  # of a step
    least_ranks: int = 1  # that measure it

    def __str__(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def flops(self) -> float:
        """Floating-point operations of forward and backward: 3.5 times the two products of the forward."""
        pairs = sum(
            n * (n + 1) / 2
            if self.window < 0
            else sum(min(i + 1, self.window + 1) for i in range(min(n, self.window)))
            + max(0, n - self.window) * (self.window + 1)
            for n in self.seqlens
        )
        return 3.5 * 4 * self.heads[0] * self.head_dim * pairs


def documents(total: int, mean: int, most: int) -> tuple[int, ...]:
    """Lengths that are spread exponentially, of this mean and at most `most`."""
    rng, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(min(int(rng.expovariate(1 / mean)) + 1, most, total - sum(lengths)))
    return tuple(lengths)


def cases(device: str):
    """All cases; on the CPU, small ones that show that they run."""
    if device == "cpu":
        yield Case("attention", "causal 256 4/2 d16", (256,), (4, 2), 16)
        yield Case("attention", "documents 256 4/2 d16", documents(256, 20, 100), (4, 2), 16)
        yield Case("attention", "window 16 256 4/2 d16", (256,), (4, 2), 16, window=16)
        yield Case("links", "64 kB", bytes=2**16)
        yield Case("errors", "causal 128 4/2 d16", (128,), (4, 2), 16)
        yield Case("step", "tiny 256", (256,), model=Model(4, 2, 16, 2, 64, 128, 100))
        return
    for size in (32, 64, 128, 256):
        yield Case("attention", f"causal {size}k 32/8 d128", (size * K,))
    yield Case("attention", "causal 1024k 32/8 d128", (1024 * K,), least_ranks=4)
    yield Case("attention", "causal 128k 32/32 d128", (128 * K,), (32, 32))
    yield Case("attention", "causal 128k 64/8 d128", (128 * K,), (64, 8))
    yield Case("attention", "causal 128k 32/8 d64", (128 * K,), (32, 8), 64)
    yield Case("attention", "documents 256k 32/8 d128", documents(256 * K, 8 * K, 64 * K))
    yield Case("attention", "window 4096 256k 32/8 d128", (256 * K,), window=4096)
    for size in (1, 16, 256, 1024):
        yield Case("links", f"{size} MB", bytes=size * 2**20)
    yield Case("errors", "causal 4k 8/2 d128", (4 * K,), (8, 2))
    yield Case("errors", "documents 4k 8/2 d128", documents(4 * K, 700, 2 * K), (8, 2))
    yield Case("errors", "causal 1024k 32/8 d128", (1024 * K,), least_ranks=4)
    for size in (64, 128, 512, 1024):
        yield Case("step", f"8B {size}k", (size * K,))
    yield Case("step", "8B of 16 layers 1024k", (1024 * K,), model=Model(layers=16))  # 412 GB of the host, as 8B 512k


@dataclasses.dataclass
class Row:
    """One line of the table and of the CSV file; the module's docstring explains the columns."""

    op: str
    case: str
    dtype: str
    ranks: int
    provider: str
    ms: float | None
    ms_20: float | None
    ms_80: float | None
    tflops: float | None
    gbps: float | None
    efficiency: float | None
    ratio: float | None
    error: str | None
    peak_mb: float | None
    device: str
    cuda: str
    torch: str
    version: str


def main() -> None:
    """Run what the command line asks for, in new processes for each number of ranks. Rows are appended at once."""
    args = _parse()
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(_run, (ranks, f"{folder}/meet", args), nprocs=ranks)
    print("rows:", args.csv)


def _parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["*"], help="globs over op/case (default: all)")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 2, 4], help="default: 1 2 4, as far as there are GPUs"
    )
    parser.add_argument("--providers", nargs="+", help="measure these only (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), type=report.usable_device, default=report.default_device())
    parser.add_argument("--seconds", type=float, default=5.0, help="time to spend on each provider (default: 5)")
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "context_parallel.csv", help="default: %(default)s")
    args = parser.parse_args()
    if args.device == "cuda":
        args.ranks = [ranks for ranks in args.ranks if ranks <= torch.cuda.device_count()]
    args.chosen = [case for case in cases(args.device) if any(fnmatch.fnmatch(str(case), each) for each in args.cases)]
    if not args.chosen:
        parser.error(f"no case matches {' '.join(args.cases)}; there are: {', '.join(map(str, cases(args.device)))}")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# In each process


def _run(rank, ranks, file, args):
    on_gpu = args.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    options = None
    if on_gpu:  # as flash_attn.parallel.build_mesh makes groups
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, f"file://{file}", rank=rank, world_size=ranks, pg_options=options)
    for case in args.chosen:
        if ranks < case.least_ranks:
            continue
        measure = {"attention": _attention, "links": _links, "errors": _errors, "step": _step_of_model}[case.op]
        rows = list(measure(case, ranks, args))
        if rank == 0:
            append_csv(args.csv, [dataclasses.asdict(row) for row in rows])
            for row in rows:
                print(*_shown(row), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _shown(row):
    for name, value in dataclasses.asdict(row).items():
        if name == "device":
            return
        if value is not None:
            yield value if isinstance(value, str) else f"{name}={value:.4g}"


def _attention(case, ranks, args):
    found, peaks = {}, {}
    for name, make in _providers(ranks).items():
        if args.providers is None or name in args.providers:
            times, peak = _timed(functools.partial(make, case, args.device), args, f"{case}: {name}")
            if times:
                found[name], peaks[name] = times, peak
    medians = {name: statistics.median(times) for name, times in found.items()}
    alone = medians.get("one") if ranks == 1 else _alone(case, args)
    for name, times in found.items():
        ms = medians[name]
        yield _row(
            case,
            ranks,
            name,
            args,
            times,
            tflops=case.flops / ranks / ms * 1e-9,
            efficiency=alone / ms / ranks if alone else None,
            ratio=medians["torch allgather"] / ms if "torch allgather" in medians else None,
            peak_mb=peaks[name],
        )


def _alone(case, args):
    """The time of one GPU that this run or an earlier one with the same file has measured last."""
    if not args.csv.exists():
        return None
    with args.csv.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["case"], row["provider"]) == (case.name, "one")]
    return float(rows[-1]["ms"]) if rows else None


def _row(case, ranks, provider, args, times, **columns):
    quantiles = statistics.quantiles(times, n=5) if len(times) > 1 else times * 2
    known = dict.fromkeys(("tflops", "gbps", "efficiency", "ratio", "error", "peak_mb"))
    dtype = "bf16" if args.device == "cuda" else "fp32"
    timing = (statistics.median(times), quantiles[0], quantiles[-1]) if times else (None,) * 3
    return Row(case.op, case.name, dtype, ranks, provider, *timing, **known | columns, **environment(args.device))


def _timed(make, args, what):
    """Milliseconds of rounds, each that of the slowest rank, and megabytes at the peak; none if it cannot run."""
    on_gpu = args.device == "cuda"
    function, error = None, None
    try:
        function = make()
        function()
        _wait(on_gpu)
    except Exception as failure:  # a provider that fails must not end the run
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    if _largest(error is not None, args.device):
        if dist.get_rank() == 0:
            print(f"{what}: {error or 'it fails on another rank'}", file=sys.stderr, flush=True)
        return [], None
    start = time.perf_counter()
    function()
    _wait(on_gpu)
    seconds = _largest(time.perf_counter() - start, args.device)
    times = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for _ in range(min(max(int(args.seconds / seconds), 3), 30) if seconds < 10 else 1):
        dist.barrier()
        _wait(on_gpu)
        start = time.perf_counter()
        function()
        _wait(on_gpu)
        times.append(_largest(1e3 * (time.perf_counter() - start), args.device))
    return times, (torch.cuda.max_memory_allocated() - before) / 1e6 if on_gpu else None


def _wait(on_gpu):
    if on_gpu:
        torch.cuda.synchronize()


def _largest(value, device):
    value = torch.tensor(float(value), device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


# ---------------------------------------------------------------------------------------------------------------------
# Providers: functions of a case and a device that return one of no arguments


def _providers(ranks):
    if ranks == 1:
        return {"one": _one, "gather": functools.partial(_ours, method="gather")}
    return {
        "gather": functools.partial(_ours, method="gather"),
        "gather whole": functools.partial(_ours, method="gather", head_groups=1),
        "gather silent": _silent,
        "ulysses": functools.partial(_ours, method="ulysses"),
        "torch allgather": functools.partial(_torch, protocol="allgather", backend="FLASH_ATTENTION"),
        "torch alltoall": functools.partial(_torch, protocol="alltoall", backend="FLASH_ATTENTION"),
        "torch cudnn": functools.partial(_torch, protocol="allgather", backend="CUDNN_ATTENTION"),
        "ring": _ring,
    }


def _inputs(case, tokens, device):
    dtype = DTYPES["bf16" if device == "cuda" else "fp32"]
    q, k, v = (
        torch.randn(1, tokens, heads, case.head_dim, device=device, dtype=dtype, requires_grad=True)
        for heads in (case.heads[0], case.heads[1], case.heads[1])
    )
    return q, k, v, torch.randn_like(q)


def _step(attend, q, k, v, dout):
    def step():
        return torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    return step


def _one(case, device):
    """One GPU, without a plan."""
    if len(case.seqlens) == 1:
        attend = functools.partial(flash_attn_func, causal=True, window_size=(case.window, -1))
        return _step(attend, *_inputs(case, sum(case.seqlens), device))
    starts = torch.tensor([0, *case.seqlens], device=device).cumsum(0, dtype=torch.int32)

    def attend_packed(q, k, v):
        longest = max(case.seqlens)
        return flash_attn_varlen_func(
            q[0], k[0], v[0], starts, starts, longest, longest, causal=True, window_size=(case.window, -1)
        )[None]

    return _step(attend_packed, *_inputs(case, sum(case.seqlens), device))


def _ours(case, device, **options):
    layout = "contiguous" if case.window >= 0 else "auto"
    plan = Plan(list(case.seqlens), dist.group.WORLD, layout=layout, **options)
    attend = functools.partial(cp_attn_func, causal=True, window_size=(case.window, -1), plan=plan)
    return _step(attend, *_inputs(case, plan.tokens, device))


def _silent(case, device):
    """ "gather" whose exchanges move nothing."""
    layout = "contiguous" if case.window >= 0 else "auto"
    plan = Plan(list(case.seqlens), dist.group.WORLD, layout=layout)
    schedule = plan.schedule((case.window, 0), 0, 1, torch.empty(0, device=device).device)
    exchange: Any = schedule.exchange

    @functools.cache  # numbers of the same distribution: a GPU computes with zeros faster, because it stays cooler
    def arrived(width, dtype):
        return torch.randn(len(exchange.fetched), width, device=device, dtype=dtype)

    exchange.fetch = lambda x: lambda: arrived(x.shape[1], x.dtype)
    exchange.give_back = lambda sums: lambda: sums.new_zeros(plan.tokens, sums.shape[1])
    attend = functools.partial(cp_attn_func, causal=True, window_size=(case.window, -1), plan=plan)
    return _step(attend, *_inputs(case, plan.tokens, device))


def _torch(case, device, protocol, backend):
    if len(case.seqlens) > 1 or case.window >= 0:
        raise NotImplementedError("torch's context_parallel has neither documents nor windows")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    q, k, v, dout = (
        x.detach().transpose(1, 2).contiguous() for x in _inputs(case, sum(case.seqlens) // mesh.size(), device)
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def step():
        set_rotate_method(protocol)
        marker = torch.zeros(1, 1, sum(case.seqlens), 1, device=device)
        with sdpa_kernel(getattr(SDPBackend, backend)), context_parallel(mesh, buffers=[marker], buffer_seq_dims=[2]):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return torch.autograd.grad(out, (q, k, v), dout)

    return step


def _ring(case, device):
    if len(case.seqlens) > 1 or case.window >= 0:
        raise NotImplementedError(
            "ring-flash-attention's zigzag has no documents, and applies windows to local positions"
        )
    with _without_transformers():
        from ring_flash_attn import zigzag_ring_flash_attn_func
    tokens = sum(case.seqlens) // dist.get_world_size()
    return _step(functools.partial(zigzag_ring_flash_attn_func, causal=True), *_inputs(case, tokens, device))


@contextlib.contextmanager
def _without_transformers():
    """A module in the place of what ring-flash-attention imports of transformers, of which newer ones lack names."""
    name = "transformers.modeling_flash_attention_utils"
    before = sys.modules.get(name)
    stub: Any = types.ModuleType(name)
    stub.__getattr__ = lambda name: None
    sys.modules[name] = stub
    try:
        yield
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before


# ---------------------------------------------------------------------------------------------------------------------
# Links, and errors


def _links(case, ranks, args):
    if ranks == 1:
        return
    device = args.device
    count = case.bytes // 4 // ranks * ranks
    own, whole = torch.randn(count, device=device), torch.empty(ranks * count, device=device)
    other = torch.empty_like(own)
    rank, group = dist.get_rank(), dist.group.WORLD
    a = torch.randn(2048 if device == "cuda" else 64, 2048 if device == "cuda" else 64, device=device)

    def shift():
        ops = [
            dist.P2POp(dist.isend, own, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % ranks),
        ]
        return dist.batch_isend_irecv(ops)

    transfers: dict[str, tuple[Callable, float]] = {
        "shift": (shift, 1),
        "all-gather": (lambda: [collectives.all_gather_single(whole, own, async_op=True)], ranks - 1),
        "all-to-all": (lambda: [dist.all_to_all_single(other, own, async_op=True)], (ranks - 1) / ranks),
        "reduce-scatter": (lambda: [collectives.reduce_scatter_single(other, whole, async_op=True)], ranks - 1),
    }
    for name, (start, share) in transfers.items():
        for beside in (False, True):

            def transfer(start=start, beside=beside):
                works = start()
                if beside:
                    torch.mm(a, a)
                for work in works:
                    work.wait()

            provider = f"{name} beside a matmul" if beside else name
            if args.providers is None or provider in args.providers:
                times, _ = _timed(lambda transfer=transfer: transfer, args, f"{case}: {provider}")
                if times:
                    gbps = share * 4 * count / statistics.median(times) * 1e-6
                    yield _row(case, ranks, provider, args, times, gbps=gbps)


def _errors(case, ranks, args):
    """Errors over those of one process, each an rms of the difference to float64."""
    total = sum(case.seqlens)
    if total >= 512 * K:
        yield from _errors_of_some_rows(case, ranks, args)
        return
    torch.manual_seed(0)
    q, k, v, dout = _inputs(case, total, args.device)
    for x in (q, k, v, dout):
        dist.broadcast(x.data, 0)
    exact = _exact(case, q, k, v, dout)
    alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]

    def rms(group, method):
        plan = Plan(list(case.seqlens), group, method=method)
        leaves = [plan.shard(x.detach()).requires_grad_() for x in (q, k, v)]
        out = cp_attn_func(*leaves, causal=True, plan=plan)
        grads = torch.autograd.grad(out, leaves, plan.shard(dout))
        found = [plan.unshard(x) for x in (out.detach(), *grads)]
        return [(x.double() - y).square().mean().sqrt().item() for x, y in zip(found, exact, strict=True)]

    one = rms(alone, "gather")
    for method in ("gather", "ulysses") if ranks > 1 else ():
        shares = [x / y for x, y in zip(rms(dist.group.WORLD, method), one, strict=True)]
        text = " ".join(f"{name} {share:.3f}" for name, share in zip(("out", "dq", "dk", "dv"), shares, strict=True))
        yield _row(case, ranks, method, args, [], error=text)


def _errors_of_some_rows(case, ranks, args, count=16):
    """Errors of `count` rows of each rank, of a causal row of which one GPU could not compute all in float64."""
    for method in ("gather", "ulysses"):
        plan = Plan(list(case.seqlens), dist.group.WORLD, method=method)
        torch.manual_seed(dist.get_rank())
        *leaves, dout = _inputs(case, plan.tokens, args.device)
        start = time.perf_counter()
        out, lse = cp_attn_func(*leaves, causal=True, plan=plan, return_lse=True)
        dq, *_ = torch.autograd.grad(out, leaves, dout)
        _wait(args.device == "cuda")
        seconds = _largest(time.perf_counter() - start, args.device)
        k, v = (plan.unshard(x.detach()) for x in leaves[1:])
        rows = torch.randint(plan.own_tokens, (count,), device=args.device)
        positions = plan.positions[rows]
        squares = torch.zeros(5, dtype=torch.float64, device=args.device)
        for head in range(case.heads[0]):
            head_k = head // (case.heads[0] // case.heads[1])
            keys, values = k[0, :, head_k].double(), v[0, :, head_k].double()
            queries, douts = leaves[0].detach()[0, rows, head].double(), dout[0, rows, head].double()
            scores = queries @ keys.T * case.head_dim**-0.5
            scores.masked_fill_(torch.arange(len(keys), device=args.device) > positions[:, None], -torch.inf)
            exact_lse = scores.logsumexp(-1)
            weights = (scores - exact_lse[:, None]).exp()
            exact_out, dweights = weights @ values, douts @ values.T
            delta = (douts * exact_out).sum(-1, keepdim=True)
            exact_dq = weights.mul_(dweights.sub_(delta)) @ keys * case.head_dim**-0.5
            for i, (found, exact) in enumerate(((out, exact_out), (dq, exact_dq))):
                rounded = exact.to(found.dtype).double()
                squares[2 * i] += (found.detach()[0, rows, head].double() - exact).square().sum()
                squares[2 * i + 1] += (rounded - exact).square().sum()
            squares[4] += (lse.detach()[0, head, rows].double() - exact_lse).square().mean() / case.heads[0] / ranks
        dist.all_reduce(squares)
        out_error, out_unit, dq_error, dq_unit, lse_error = squares.sqrt().tolist()
        text = f"out {out_error / out_unit:.3f} dq {dq_error / dq_unit:.3f} lse {lse_error:.2e}; {seconds:.1f} s"
        yield _row(case, ranks, method, args, [], error=text)
        del leaves, dout, out, lse, dq, k, v


def _exact(case, *tensors):
    """out, dq, dk and dv in float64."""
    q, k, v, dout = (x.detach().double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs, at = [], 0
    for length in case.seqlens:
        part = slice(at, at + length)
        out = F.scaled_dot_product_attention(
            *(x[:, part].transpose(1, 2) for x in leaves), is_causal=True, enable_gqa=True
        )
        outs.append(out.transpose(1, 2))
        at += length
    out = torch.cat(outs, 1)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


# ---------------------------------------------------------------------------------------------------------------------
# A training step


def _step_of_model(case, ranks, args):
    device, sizes, total = args.device, case.model, sum(case.seqlens)
    on_gpu = device == "cuda"
    model = _decoder(sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    loss_of = functools.partial(linear_cross_entropy, chunk_size=Options().loss_chunk)
    plan = Plan(list(case.seqlens), dist.group.WORLD)
    ids = torch.randint(sizes.vocab, (1, total), generator=torch.Generator().manual_seed(0)).to(device)
    if on_gpu:
        _pin(sizes, plan.tokens)
    short = min(total, 128 * K)  # a short step first, which compiles, connects ranks and allocates what has any length
    steps = [(Plan([short], dist.group.WORLD), ids[:, :short]), (plan, ids)]
    for plan, row in steps:
        batch = plan.shard_batch(dict(input_ids=row, labels=row))
        dist.barrier()
        _wait(on_gpu)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(**batch, cp_plan=plan, loss_fn=loss_of).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(on_gpu)
        ms = _largest(1e3 * (time.perf_counter() - start), device)
    peak = _largest(torch.cuda.max_memory_allocated() / 1e6, device) if on_gpu else None
    options = Options(offload=True)
    estimated = step_seconds(sizes, Machine(), total, ranks, 1, options)
    items = memory(sizes, total, ranks, 1, ranks, options)
    text = f"loss {loss.item():.3f}; estimate {1e3 * estimated:.4g} ms, {sum(items.values()):.1f} GB: " + ", ".join(
        f"{name} {size:.1f}" for name, size in items.items()
    )
    yield _row(case, ranks, "FSDP2 over cp", args, [ms], error=text, peak_mb=peak)


def _pin(sizes, tokens):
    """Have torch hold as much pinned memory of the host as a step will keep there: pinning takes a minute for 400 GB.

    Of each layer, the input, the residual, and what attention returns.
    """
    own = dict(pin_memory=True, dtype=torch.bfloat16)
    kept = []  # until all are there; then torch has them for others
    for _ in range(sizes.layers):
        kept += [torch.empty(tokens, sizes.width, **own) for _ in range(2)]
        kept.append(torch.empty(tokens, sizes.heads, sizes.head_dim, **own))
        kept.append(torch.empty(sizes.heads, tokens, pin_memory=True))


def _decoder(sizes, device):
    """A decoder with random weights, divided over all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import GPT2Config

    from flash_attn.models.gpt import GPTLMHeadModel
    from flash_attn.parallel import set_mlp_chunks

    config = GPT2Config(
        vocab_size=sizes.vocab,
        bos_token_id=None,
        eos_token_id=None,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_head_kv=sizes.heads_k,
        n_positions=0,
        rotary_emb_fraction=1.0,
        rotary_emb_base=5e5,
        activation_function="swiglu",
        n_inner=sizes.ffn,
        mlp_multiple_of=1,
        rms_norm=True,
        qkv_proj_bias=False,
        out_proj_bias=False,
        mlp_fc1_bias=False,
        mlp_fc2_bias=False,
        tie_word_embeddings=False,
        use_flash_attn=True,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    with torch.device("meta"):
        model = GPTLMHeadModel(config)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device == "cuda" else MixedPrecisionPolicy()
    for layer in model.transformer.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    model.gradient_checkpointing_enable(offload=True, keep_attention=True)
    set_mlp_chunks(model, Options().mlp_chunks)
    return model


if __name__ == "__main__":
    main()
