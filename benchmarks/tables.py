"""The tables of numbers in README.md and the pages of docs/, made of the rows in benchmarks/results.

They stand between two comments of a page, `<!-- rows: NAME -->` and `<!-- end of rows -->`. `python -m benchmarks.plot`
writes them; a test compares. So no number in a page is typed by hand.
"""

import csv
import itertools
import pathlib
import re
import statistics

from benchmarks.rows import RESULTS, read

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/performance.md", ROOT / "docs/guides/context_parallel.md"]
BLOCK = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end of rows -->)", re.DOTALL)


def _rows(file):
    """{(op, case, provider): row} of a file."""
    return {(row.op, row.case, row.provider): row for row in read(RESULTS / f"{file}.csv")}


_SERVING = {  # cases of serving.csv that pages show, and what they are called there
    "P1 1x512on32768x64/8x128 pages 16": "one prompt: 512 on 32k, 64/8",
    "P2 1x2048on32768x64/8x128 pages 16": "2048 on 32k, 64/8",
    "P3 1x8192on32768x64/8x128 pages 16": "8192 on 32k, 64/8",
    "P4 8x512on4096x32/8x128 pages 16": "8 prompts: 512 on 4k, 32/8",
    "P5 16x128on16384x32/8x128 pages 16": "16 prompts: 128 on 16k, 32/8",
    "S1 1x16on16384x32/8x128 pages 16": "draft tokens: 16 on 16k, 32/8",
    "S2 1x16on65536x32/8x128 pages 16": "16 on 64k, 32/8",
    "S3 8x16on65536x32/8x128 pages 16": "8 entries of 16 on 64k, 32/8",
    "S4 8x32on65536x32/8x128 pages 16": "8 entries of 32 on 64k, 32/8",
    "S5 64x4on4096x64/8x128 pages 16": "64 entries of 4 on 4k, 64/8",
    "D9 32x1on16384x128/1x128 pages 16": "decoding with 128 heads on one key head, 32 entries on 16k",
    "X1 4x512on4096+124x1on4096x32/8x128 pages 16": "4 prompts of 512 beside 124 single tokens, on 4k, 32/8",
}
DIVIDED = {  # cases of context_parallel.csv, and what they are called
    "causal 32k 32/8 d128": "causal, 32,768 tokens",
    "causal 64k 32/8 d128": "causal, 65,536 tokens",
    "causal 128k 32/8 d128": "causal, 131,072 tokens",
    "causal 256k 32/8 d128": "causal, 262,144 tokens",
    "documents 256k 32/8 d128": "documents of 8,192 as a mean, 262,144 tokens",
    "window 4096 256k 32/8 d128": "a window of 4,096, 262,144 tokens",
}
_ATTENTION = (("forward", "flash_attn_fwd"), ("backward", "flash_attn_bwd"))


_PEERS = {"FlashAttention-3": "FlashAttention-3", "FlashAttention-4": "FlashAttention-4", "cuDNN": "torch cudnn"}


def _attention():
    """Six rows: both directions at three head dimensions, causal, 8192 tokens."""
    rows = _rows("flash_attn_peers")
    yield "causal attention of 2 x 8192 tokens, bf16", "this library", *_PEERS
    for direction, op in _ATTENTION:
        for heads, dim in ((32, 64), (16, 128), (8, 256)):
            yield f"{direction}, head dimension {dim}", *_of_peers(rows, op, f"2x{heads}x8192x{dim} causal")


def _peers():
    """All rows beside FlashAttention-3 and -4."""
    rows = _rows("flash_attn_peers")
    yield "batch x heads x seqlen x head dimension", "this library", *_PEERS
    for direction, op in _ATTENTION:
        for case in _by_case(rows, op, "flash_attn"):
            yield f"{direction}, {case}", *_of_peers(rows, op, case)


def _of_peers(rows, op, case):
    found = (rows.get((op, case, name)) for name in ("flash_attn", *_PEERS.values()))
    return (f"{row.tflops:.0f}" if row else "" for row in found)


def _by_case(rows, op, *providers):
    """The rows of an op, one for each case: that of the first of these providers that was measured."""
    found = {}
    for provider in reversed(providers):
        found |= {case: row for (each, case, name), row in rows.items() if (each, name) == (op, provider)}
    return found


def _times_as_fast(ours, theirs):
    """For each case that both have: by rates where rows have them, else by times."""
    for case in ours.keys() & theirs.keys():
        mine, other = ours[case], theirs[case]
        rate = next((name for name in ("tflops", "gbps") if getattr(mine, name) and getattr(other, name)), None)
        yield getattr(mine, rate) / getattr(other, rate) if rate else other.ms / mine.ms


def _today():
    """How many times as fast as a peer: the geometric mean, the lowest and the highest of the rows that both have."""
    yield "H100, bf16", "beside", "times as fast, as a mean", "lowest", "highest", "rows"
    for what, page, peer, ours, theirs in _beside_peers():
        found = list(_times_as_fast(ours, theirs))
        numbers = statistics.geometric_mean(found), min(found), max(found)
        yield f"[{what}](docs/{page})", peer, *(f"{number:.2f}" for number in numbers), str(len(found))


def _beside_peers():
    """(what, the page that has its rows, the peer, our rows by case, theirs)"""
    peers, h100, serving, models = map(_rows, ("flash_attn_peers", "flash_attn_h100", "serving", "models_h100"))
    for direction, op in _ATTENTION:
        ours = _by_case(peers, op, "flash_attn")
        for peer, provider in _PEERS.items():
            yield f"attention, {direction}", "performance.md#attention", peer, ours, _by_case(peers, op, provider)
    for direction, op in (("forward", "flash_attn_packed_fwd"), ("backward", "flash_attn_packed_bwd")):
        ours, theirs = _by_case(h100, op, "flash_attn"), _by_case(h100, op, "torch")
        what = f"packed sequences, {direction}"
        yield what, "performance.md#packed-sequences", "PyTorch's `varlen_attn`", ours, theirs
    theirs = _by_case(peers, "serving", "FlashAttention-3")
    for what, letters in (("decoding over pages", "D"), ("draft tokens", "S"), ("prompts and mixed batches", "PX")):
        ours = {case: row for case, row in _served(serving).items() if case[0] in letters}
        yield what, "performance.md#serving", "FlashAttention-3", ours, theirs
    ours, theirs = (_by_case(models, "decode", name) for name in ("flash_attn", "transformers compiled"))
    yield "a token of a model", "performance.md#linear-layers-blocks-models", "transformers, compiled", ours, theirs
    ours, theirs = (
        {case: rows[name] for case, rows in _divided(4).items() if name in rows}
        for name in ("ulysses", "torch allgather")
    )
    yield (
        "a sequence on 4 GPUs",
        "guides/context_parallel.md#what-it-costs",
        "PyTorch's `context_parallel`",
        ours,
        theirs,
    )


def _served(rows):
    """Rows of servers' calls, {case: that of `flash_attn_varlen_func`, or of a cache where it has none}."""
    return _by_case(rows, "serving", "varlen", "flash_attn")


def serving():
    """(what, our row, FlashAttention-3's) of calls of servers."""
    ours, theirs = _served(_rows("serving")), _by_case(_rows("flash_attn_peers"), "serving", "FlashAttention-3")
    return [(name, ours[case], theirs[case]) for case, name in _SERVING.items()]


def _serving():
    """Calls of servers beside what bounds them, a copy or a matmul, and FlashAttention-3."""
    yield "new tokens on keys, query / key heads of 128", "us", "copy or matmul", "FlashAttention-3"
    for name, ours, theirs in serving():
        yield name, *(f"{ms * 1000:.0f}" for ms in (ours.ms, ours.ms * ours.share, theirs.ms))


def _divided(ranks):
    """{case: {provider: row}} of one sequence on this many GPUs."""
    found = {}
    for row in read(RESULTS / "context_parallel.csv"):
        if row.ranks == ranks:
            found.setdefault(row.case, {})[row.provider] = row
    return found


def _scaling():
    """Attention of one sequence on several GPUs: the share of their time that one GPU would need."""
    yield "row", "gather, 2 GPUs", "ulysses, 2", "gather, 4", "ulysses, 4"
    two, four = _divided(2), _divided(4)
    for case, name in DIVIDED.items():
        yield name, *(f"{rows[case][way].efficiency:.2f}" for rows in (two, four) for way in ("gather", "ulysses"))


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
    "today": _today,
    "attention": _attention,
    "peers": _peers,
    "packed": _packed,
    "few_keys": _few_keys,
    "features": _features,
    "head_dims": _head_dims,
    "exact": _exact,
    "serving": _serving,
    "scaling": _scaling,
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
