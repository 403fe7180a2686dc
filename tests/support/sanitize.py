"""Run compute-sanitizer over a few calls of each attention kernel.

    python tests/support/sanitize.py [--csv FILE] [--tools memcheck racecheck initcheck]

needs a GPU, the compiled kernels and compute-sanitizer (of the CUDA toolkit) on the PATH. It prints what each tool
reports, appends a row for each run to the CSV file, by default benchmarks/results/sanitizer.csv, and fails if any tool
has found something. A run makes all calls in one process, with every tensor in an allocation of its own.

memcheck looks at the GPU's native kernels, which for Hopper are those for sm_90, and at the portable ones; racecheck
and initcheck at the portable ones alone. racecheck does not follow mbarriers and bar.arrive, through which warps of the
kernels for sm_90 hand to one another what the work is, lse and delta, and the fate of dQ: on an H200 each of its 94
reports in 32 calls was of one of these. And initcheck does not know what the copy engine (TMA) has stored; for those
kernels the tests fill memory with NaN. synccheck is left out: it takes warps that come to a barrier of their own from
different places for divergent ones.
"""

import argparse
import csv
import os
import pathlib
import re
import subprocess
import sys
import time

import torch

ROOT = pathlib.Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "initcheck")
RUNS = (("memcheck", "native"), ("memcheck", "portable"), ("racecheck", "portable"), ("initcheck", "portable"))
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (\d+)")


def random_tensor(*shape, dtype=torch.bfloat16):
    """Made on the host, so that no other kernel runs."""
    return torch.randn(*shape).to(dtype).cuda()


def given_leaves(options):
    """A bias and a sink."""
    return [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]


def attend(
    seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v=None, *, backward=True, dtype=torch.bfloat16, **options
):
    from flash_attn import flash_attn_func

    q = random_tensor(2, seqlen_q, heads, head_dim, dtype=dtype)
    k = random_tensor(2, seqlen_k, heads_k, head_dim, dtype=dtype)
    v = random_tensor(2, seqlen_k, heads_k, head_dim_v or head_dim, dtype=dtype)
    leaves = [*(x.requires_grad_(backward) for x in (q, k, v)), *given_leaves(options)]
    out = flash_attn_func(q, k, v, **options)
    out, *others = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(out, leaves, random_tensor(*out.shape, dtype=dtype)) if backward else []
    return [out, *others, *grads]


def attend_with_features(seqlen_q, seqlen_k, *sizes, exact=False):
    """A bias and a sink with gradients, and key ranges, some of them empty."""
    from flash_attn.precision import use_exact_gradients

    heads = sizes[0]
    first = torch.arange(seqlen_q, dtype=torch.int32)
    ranges = torch.stack([first // 3, (first * 2 + 1).clamp(max=seqlen_k)], dim=-1)
    ranges[5:9] = 0
    bias = random_tensor(1, heads, seqlen_q, seqlen_k).requires_grad_()
    sink = random_tensor(heads, dtype=torch.float32).requires_grad_()
    use_exact_gradients(exact)
    try:
        return attend(
            seqlen_q,
            seqlen_k,
            *sizes,
            attn_bias=bias,
            learnable_sink=sink,
            key_ranges=ranges.expand(1, 1, -1, 2).cuda(),
        )
    finally:
        use_exact_gradients(False)


def attend_packed(lengths_q, lengths_k, heads, heads_k, head_dim, **options):
    from flash_attn import flash_attn_varlen_func

    q = random_tensor(sum(lengths_q), heads, head_dim).requires_grad_()
    k, v = (random_tensor(sum(lengths_k), heads_k, head_dim).requires_grad_() for _ in "kv")
    starts = [torch.tensor([0, *lengths]).cumsum(0).int().cuda() for lengths in (lengths_q, lengths_k)]
    out = flash_attn_varlen_func(q, k, v, *starts, max(lengths_q), max(lengths_k), **options)
    leaves = q, k, v, *given_leaves(options)
    return [out, *torch.autograd.grad(out, leaves, random_tensor(*out.shape))]


def decode(seqlen_q, capacity, heads, heads_k, head_dim, *, page=0, new=0, rotary=False, **options):
    """Two entries, one of them with a cache that is only partly in use."""
    from flash_attn import flash_attn_with_kvcache

    q = random_tensor(2, seqlen_q, heads, head_dim)
    shape = (2 * capacity // page, page) if page else (2, capacity)
    k_cache, v_cache = (random_tensor(*shape, heads_k, head_dim) for _ in "kv")
    arguments = dict(options, cache_seqlens=torch.tensor([capacity - new, capacity // 3], dtype=torch.int32).cuda())
    if page:
        arguments["block_table"] = torch.randperm(len(k_cache)).int().reshape(2, -1).cuda()
    if new:
        arguments |= {name: random_tensor(2, new, heads_k, head_dim) for name in "kv"}
    if rotary:
        angle = torch.rand(capacity + seqlen_q, head_dim // 2)
        arguments |= dict(rotary_cos=angle.cos().bfloat16().cuda(), rotary_sin=angle.sin().bfloat16().cuda())
    return flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **arguments)


def calls():
    """(name, function) of each call."""
    for head_dim in (64, 96, 128, 192, 256, 512):
        yield f"d{head_dim}", lambda d=head_dim: attend(200, 200, 2, 2, d)
        yield f"d{head_dim} causal", lambda d=head_dim: attend(130, 260, 4, 2, d, causal=True, deterministic=True)
    # More tiles than multiprocessors, so that blocks go from one to the next, and the tiles for long sequences.
    for head_dim, seqlen_q, seqlen_k in (
        (64, 200, 200),
        (64, 600, 600),
        (128, 200, 200),
        (256, 200, 200),
        (256, 130, 1100),
        (512, 200, 200),
    ):
        sizes = seqlen_q, seqlen_k, 70, 70, head_dim
        yield f"{sizes}", lambda sizes=sizes: attend(*sizes, backward=False)
    for head_dim in (64, 128, 192, 512):  # several thread blocks share the keys of the backward
        yield f"few keys d{head_dim}", lambda d=head_dim: attend(1000, 77, 6, 2, d)
    yield "fp16 window", lambda: attend(150, 300, 2, 1, 128, dtype=torch.float16, window_size=(70, 10))
    slopes = torch.tensor([0.5, 0.25])
    options = dict(dropout_p=0.2, softcap=10.0, causal=True, return_attn_probs=True)
    yield "all", lambda: attend(150, 170, 2, 2, 64, alibi_slopes=slopes.cuda(), **options)
    for head_dim in (64, 96, 128, 192, 256, 512):
        yield f"features d{head_dim}", lambda d=head_dim: attend_with_features(150, 200, 4, 2, d, exact=d < 200)
    for head_dim in (64, 96, 128, 192, 256):  # whose tiles come with the keys on Hopper
        yield f"bias d{head_dim}", lambda d=head_dim: attend(200, 264, 4, 2, d, attn_bias=random_tensor(1, 4, 200, 264))
        mask = random_tensor(2, 1, 1, 261) < 1
        yield f"mask d{head_dim}", lambda d=head_dim, mask=mask: attend(200, 261, 4, 2, d, attn_bias=mask)
    for rows, dtype in ((1, torch.bfloat16), (150, torch.float32)):
        bias = random_tensor(1, 1, rows, 301, dtype=dtype).requires_grad_()
        yield f"gradient of {rows} rows", lambda bias=bias: attend(150, 301, 4, 2, 64, attn_bias=bias, softcap=9.0)
    yield "192/128", lambda: attend(150, 300, 4, 2, 192, 128, causal=True)
    yield "192/128 with features", lambda: attend_with_features(200, 150, 2, 2, 192, 128)
    yield "chunks", lambda: attend(200, 200, 2, 2, 128, attention_chunk=70)
    yield "odd head_dim", lambda: attend(70, 90, 2, 1, 59, causal=True)
    yield "few rows, many keys", lambda: attend(40, 3000, 2, 2, 128, backward=False)
    lengths = (70, 0, 129, 1), (90, 30, 64, 0)
    yield "packed", lambda: attend_packed(*lengths, 4, 2, 128, causal=True)
    yield "packed, deterministic", lambda: attend_packed(*lengths, 2, 2, 64, deterministic=True, window_size=(30, 0))
    bias = random_tensor(4, sum(lengths[0]), 96).requires_grad_()
    yield "packed, gradient of a bias", lambda: attend_packed(*lengths, 4, 2, 64, attn_bias=bias)
    yield "packed, no queries", lambda: attend_packed((0, 0), (30, 5), 2, 2, 64)
    for head_dim in (64, 128, 256, 512):
        yield f"decode d{head_dim}", lambda d=head_dim: decode(1, 900, 8, 2, d)
        yield f"decode d{head_dim} pages", lambda d=head_dim: decode(1, 768, 8, 2, d, page=16)
    yield "decode tiny pages", lambda: decode(3, 120, 4, 4, 96, page=3, causal=True)
    yield "append", lambda: decode(2, 320, 4, 2, 128, new=2, rotary=True, causal=True)
    yield "append to pages", lambda: decode(1, 512, 8, 1, 128, page=256, new=1, rotary=True)
    yield "many rows of a cache", lambda: decode(100, 400, 4, 2, 64, page=16, causal=True)


def run_calls():
    torch.manual_seed(0)
    count = 0
    for name, call in calls():
        print("call:", name, flush=True)
        results = [x.cpu() for x in call() if x is not None]  # an element that was not written is an error of initcheck
        assert all(torch.isfinite(x).all() for x in results), name
        count += 1
    print("calls:", count)


def run_tool(tool, kernels):
    """A row of the CSV file, and the tool's output."""
    command = ["compute-sanitizer", f"--tool={tool}", "--error-exitcode=1", sys.executable, __file__, "--calls"]
    environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1", PYTHONPATH=str(ROOT))
    if kernels == "portable":
        environment["FLASH_ATTN_PORTABLE"] = "1"
    start = time.monotonic()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = round(time.monotonic() - start)
    found, ran = SUMMARY.findall(done.stdout), re.search(r"calls: (\d+)", done.stdout)
    row = dict(
        tool=tool,
        kernels=kernels,
        calls=int(ran[1]) if ran else 0,
        errors=sum(int(number) for _, number in found) if found else "",
        seconds=seconds,
        device=torch.cuda.get_device_name(),
        cuda=torch.version.cuda,
        torch=torch.__version__,
    )
    return row, done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=pathlib.Path, default=ROOT / "benchmarks/results/sanitizer.csv")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--calls", action="store_true", help="only make the calls, without any tool")
    args = parser.parse_args()
    if args.calls:
        return run_calls()
    rows = []
    for tool, kernels in RUNS:
        if tool not in args.tools:
            continue
        row, output = run_tool(tool, kernels)
        print(output)
        rows.append(row)
        is_new = not args.csv.exists()
        with args.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
    if any(row["errors"] != 0 or row["calls"] == 0 for row in rows):
        raise SystemExit("compute-sanitizer found something")


if __name__ == "__main__":
    main()
