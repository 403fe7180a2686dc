"""The tables of numbers in README.md and docs/performance.md, made of the rows in benchmarks/results.

They stand between two comments of a page, `<!-- rows: NAME -->` and `<!-- end of rows -->`. `python -m benchmarks.plot`
writes them; a test compares. So no number in a page is typed by hand.
"""

import csv
import itertools
import pathlib
import re

from benchmarks.rows import RESULTS, read

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/performance.md"]
BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def _rows(file):
    return {(row.op, row.case, row.provider): row for row in read(RESULTS / f"{file}.csv")}


_ATTENTION = (("forward", "flash_attn_fwd"), ("backward", "flash_attn_bwd"))


def _attention():
    """Six rows: both directions at three head dimensions, causal, 8192 tokens."""
    rows = _rows("flash_attn_peers")
    yield "causal attention of 2 x 8192 tokens, bf16", "this library", "FlashAttention-3", "cuDNN"
    for direction, op in _ATTENTION:
        for heads, dim in ((32, 64), (16, 128), (8, 256)):
            yield f"{direction}, head dimension {dim}", *_of_peers(rows, op, f"2x{heads}x8192x{dim} causal")


def _peers():
    """All rows beside FlashAttention-3."""
    rows = _rows("flash_attn_peers")
    yield "batch x heads x seqlen x head dimension", "this library", "FlashAttention-3", "cuDNN"
    for direction, op in _ATTENTION:
        for case in dict.fromkeys(case for found, case, _ in rows if found == op):
            yield f"{direction}, {case}", *_of_peers(rows, op, case)


def _of_peers(rows, op, case):
    return (f"{rows[op, case, name].tflops:.0f}" for name in ("flash_attn", "FlashAttention-3", "torch cudnn"))


def _features():
    """Calls with sinks, key ranges and biases beside those without; of biases, PyTorch's, too."""
    rows = _rows("flash_attn") | _rows("flash_attn_h100")
    yield "batch x heads x tokens x head dimension", "without", "with", "of that without", "PyTorch, with"
    for (op, case, provider), row in rows.items():
        if op == "flash_attn_features" and provider != "flash_attn" and not provider.startswith("torch"):
            plain = rows[op, case, "flash_attn"]
            peer = rows.get((op, case, "torch with gradient" if provider == "bias with gradient" else "torch"))
            numbers = f"{plain.tflops:.0f}", f"{row.tflops:.0f}", f"{plain.ms / row.ms:.2f}"
            yield f"{case}: {provider}", *numbers, f"{peer.tflops:.0f}" if peer else ""


def _packed():
    """Packed sequences: forward, backward, deterministic backward, and PyTorch's function for them."""
    rows = _rows("flash_attn_h100")
    yield "lengths, heads x head dimension", "forward", "PyTorch", "backward", "PyTorch", "deterministic / ordinary"
    for case in dict.fromkeys(case for op, case, _ in rows if op == "flash_attn_packed_fwd"):
        every = itertools.product(("fwd", "bwd"), ("flash_attn", "torch"))
        found = [rows.get((f"flash_attn_packed_{op}", case, provider)) for op, provider in every]
        in_order = rows["flash_attn_packed_bwd", case, "deterministic"]
        yield case, *(f"{row.tflops:.0f}" if row else "" for row in found), f"{found[2].ms / in_order.ms:.2f}"


def _few_keys():
    """Attention to few keys."""
    rows = _rows("flash_attn_h100")
    yield "batch x heads x rows to keys x head dimension", "forward", "cuDNN", "backward", "cuDNN"
    for case in dict.fromkeys(case for op, case, _ in rows if op == "flash_attn_cross_fwd"):
        every = itertools.product(("fwd", "bwd"), ("flash_attn", "torch cudnn"))
        yield case, *(f"{rows[f'flash_attn_cross_{op}', case, provider].tflops:.0f}" for op, provider in every)


def _head_dims():
    """Attention whose keys and values differ in head dim, and of more than 256 channels."""
    rows = _rows("flash_attn")
    yield "batch x heads x tokens x head dimension", "this library", "values padded", "portable kernels", "PyTorch"
    for direction, op in _ATTENTION:
        for found, case, provider in rows:
            if found == op and provider == "flash_attn" and re.search(r"x(192/128|512)( causal)?$", case):
                every = [rows.get((op, case, name)) for name in ("flash_attn", "padded", "portable", "torch")]
                yield f"{direction}, {case}", *(f"{row.tflops:.0f}" if row else "" for row in every)


def _exact():
    """A training step's attention with exact gradients beside one with rounded ones."""
    rows = _rows("flash_attn")
    yield "batch x heads x tokens x head dimension", "rounded", "exact", "exact / rounded"
    for op, case, provider in rows:
        if op == "flash_attn_exact" and provider == "exact":
            plain, exact = rows[op, case, "flash_attn"], rows[op, case, "exact"]
            yield case, f"{plain.tflops:.0f}", f"{exact.tflops:.0f}", f"{plain.ms / exact.ms:.3f}"


def _of_models(op, file="models"):
    """(case, rows of this library, of transformers, and of transformers compiled); None where one has not run."""
    rows = _rows(file)
    for found, case, provider in rows:
        if (found, provider) == (op, "flash_attn"):
            yield case, [rows.get((op, case, name)) for name in ("flash_attn", "transformers", "transformers compiled")]


def _models():
    """Steps of training: milliseconds and the GB of gradients and of what the step needs for a while."""
    peers = "transformers", "compiled"
    yield "a step of training", "this library, ms", *peers, "this library, GB", *peers
    for case, found in _of_models("train"):
        yield case, *(f"{row.ms:.4g}" for row in found), *(f"{row.peak_mb / 1000:.1f}" for row in found)


def _decoding():
    """Milliseconds of a token, and this library's share of the rate at which the GPU copies."""
    yield "a token: model, sequences x tokens", "this library", "transformers", "compiled", "share of the copy rate"
    for case, found in _of_models("decode"):
        yield case, *(f"{row.ms:.4g}" for row in found), f"{found[0].share:.2f}"


def _decoding_on_h100():
    """The same on another GPU, in one run, with the megabytes that a step takes beyond weights and cache."""
    peers = "transformers", "compiled"
    yield "a token", "this library, ms", *peers, "share of the copy rate", "this library, MB", *peers
    for case, found in _of_models("decode", "models_h100"):
        ms = [f"{row.ms:.4g}" if row else "" for row in found]
        yield case, *ms, f"{found[0].share:.2f}", *(f"{row.peak_mb:.0f}" if row else "" for row in found)


def _training():
    yield "GPUs, model", "run by", "tokens a second", "ms a step"
    with (RESULTS / "training.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name = {
                "harness": "`training/`",
                "bare": "a bare loop",
                "benchmark": "a step of `benchmark_models`, in turns",
                "transformers": "`training/` with transformers' model",
                "apart": "as many runs apart",
                "bf16 gradients": "`training/`, gradients sent in bf16",
                "gathered twice": "`training/`, layers gathered twice",
            }
            case = f"{row['devices']} x {row['device'].split()[1]}, {row['case']}"  # of "NVIDIA H200", say
            yield case, name[row["provider"]], f"{float(row['tokens_per_s']):.0f}", row["ms"]


def _slower():
    """The cases in which the baseline is faster by more than 2 %."""
    yield "operation", "case", "time of the baseline / ours"
    files = "flash_attn flash_attn_h100 layer_norm xentropy fused_softmax fused_dense rotary block models".split()
    for file in files:
        rows = _rows(file)
        for (op, case, provider), row in rows.items():
            is_option = op == "flash_attn_features" and not provider.startswith("torch")
            with_gradient = rows.get((op, case, "torch with gradient")) if provider == "bias with gradient" else None
            ratio = with_gradient.ms / row.ms if with_gradient else row.ratio
            if op == "flash_attn_host":
                baseline = rows.get((op, case, "torch"))
                ratio = baseline and baseline.host_us / row.host_us
            if (is_option or provider == "flash_attn") and ratio and ratio < 0.98:
                yield f"`{op}`", f"{case}: {provider}" if is_option else case, f"{ratio:.2f}"


TABLES = {
    "attention": _attention,
    "peers": _peers,
    "packed": _packed,
    "few_keys": _few_keys,
    "features": _features,
    "head_dims": _head_dims,
    "exact": _exact,
    "models": _models,
    "decoding": _decoding,
    "decoding_on_h100": _decoding_on_h100,
    "training": _training,
    "slower": _slower,
}


def table(name: str) -> str:
    """The table of this name in Markdown."""
    header, *rows = TABLES[name]()
    marks = ["---", *["--:"] * (len(header) - 1)]
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, marks, *rows))


def filled(text: str) -> str:
    """A page with its tables made anew."""
    return BLOCK.sub(lambda match: match[1] + table(match[2]) + match[3], text)


def write() -> None:
    """Make the tables of all pages anew."""
    for page in PAGES:
        page.write_text(filled(page.read_text()))
