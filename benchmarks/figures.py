"""The figures of docs/plots, made of the rows in benchmarks/results. `python -m benchmarks.plot` writes them.

Where the cases of a panel differ in one size, it has lines over that size, otherwise bars. A panel has every peer that
was measured in the same run. A peer has the same colour and mark in all figures, and these can be told apart in print
and by the colour-blind.
"""

import importlib
import pathlib
import re

from benchmarks import tables
from benchmarks.rows import RESULTS, read

STYLES = {  # provider: (what it is called, colour of Okabe and Ito, mark, hatch of bars)
    "flash_attn": ("this library", "#000000", "o", ""),
    "deterministic": ("this library, deterministic", "#666666", "s", "xx"),
    "portable": ("this library, portable kernels", "#999999", "p", ".."),
    "flash_attn page 16": ("this library, pages of 16", "#666666", "s", "xx"),
    "flash_attn page 256": ("this library, pages of 256", "#999999", "p", ".."),
    "flash_attn compiled": ("this library, compiled", "#666666", "s", "xx"),
    "flash_attn level 1": ("this library, checkpoint_lvl=1", "#666666", "s", "xx"),
    "flash_attn level 2": ("this library, checkpoint_lvl=2", "#999999", "p", ".."),
    "level 0": ("this library, batch invariance at level 0", "#000000", "o", ""),
    "level 1": ("this library, batch invariance at level 1", "#666666", "s", "xx"),
    "level 2": ("this library, batch invariance at level 2", "#999999", "p", ".."),
    "flash_attn apart": ("this library, layers apart", "#bbbbbb", "h", "oo"),
    "dense": ("this library, keys in one tensor", "#bbbbbb", "h", "oo"),
    "16 bits": ("this library, a cache in 16 bits", "#666666", "s", "xx"),
    "varlen": ("this library, packed queries", "#666666", "s", "xx"),
    "padded": ("this library, values padded to the width of keys", "#bbbbbb", "h", "oo"),
    "two_passes": ("this library, in two passes", "#bbbbbb", "h", "oo"),
    "exact": ("this library, exact gradients", "#666666", "s", "xx"),
    "sink": ("with a sink", "#56b4e9", "D", "--"),
    "ranges": ("key ranges", "#009e73", "<", "||"),
    "chunks": ("attention in chunks", "#e69f00", "P", "**"),
    "ranges and sink": ("key ranges and a sink", "#cc79a7", ">", "++"),
    "bias": ("with a bias", "#e69f00", "P", "**"),
    "bias fp32": ("with a bias in float32", "#bbbbbb", "h", "oo"),
    "bias with gradient": ("with a bias that has a gradient", "#666666", "s", "xx"),
    "mask": ("with a mask of bool", "#999999", "p", ".."),
    "mask of keys": ("with a mask of keys", "#a6761d", "<", "||"),
    "one": ("this library, on one GPU", "#bbbbbb", "h", "oo"),
    "gather": ("this library, gathered keys", "#000000", "o", ""),
    "ulysses": ("this library, exchanged heads", "#666666", "s", "xx"),
    "gather silent": ("this library, gathered keys without transfers", "#999999", "p", ".."),
    "FSDP2 over cp": ("this library, with FSDP", "#000000", "o", ""),
    "torch allgather": ("context_parallel of PyTorch", "#0072b2", "^", "//"),
    "ring": ("zigzag ring, on these kernels", "#cc79a7", ">", "++"),
    "torch": ("PyTorch", "#0072b2", "^", "//"),
    "torch with gradient": ("PyTorch, with a gradient of the bias", "#003d66", "D", "--"),
    "torch efficient": ("memory-efficient attention of PyTorch", "#56b4e9", "D", "--"),
    "torch math": ("PyTorch, of single operations", "#009e73", "<", "||"),
    "torch cudnn": ("cuDNN, by PyTorch", "#d55e00", "v", "\\\\"),
    "torch flash": ("FlashAttention-2, by PyTorch", "#56b4e9", "D", "--"),
    "FlashAttention-3": ("FlashAttention-3", "#009e73", "<", "||"),
    "FlashAttention-4": ("FlashAttention-4", "#cc79a7", ">", "++"),
    "torch.compile": ("torch.compile", "#009e73", "<", "||"),
    "triton": ("Triton, of this library", "#cc79a7", ">", "++"),
    "liger": ("Liger", "#e69f00", "P", "**"),
    "transformers": ("transformers", "#0072b2", "^", "//"),
    "transformers compiled": ("transformers, compiled", "#009e73", "<", "||"),
}
UNITS = {"tflops": "TFLOP/s", "gbps": "GB/s", "ms": "ms", "peak_mb": "MB"}
ATTENTION = re.compile(r"(?P<batch>\d+)x(?P<heads>\d+)x(?P<x>\d+)x(?P<dim>\d+)(?P<causal> causal)?")
NORM = re.compile(r"\d+x(?P<x>\d*0|1024|2048|4096|8192|16384|32768) (?P<kind>layer|rms)")
COLUMNS = re.compile(r"(?:\d+x)+(?P<x>\d+)")


def _lines(file, panels, pattern, x, y):
    """[(title, {provider: [(x, y), ...]})] of rows with an op whose case matches, for panels (title, op, groups)."""
    rows, found = read(RESULTS / f"{file}.csv"), []
    for title, op, wanted in panels:
        lines = {}
        for row in rows:
            match = pattern.fullmatch(row.case)
            groups = match.groupdict() if match else {}
            if row.op == op and match and all(groups.get(name) == value for name, value in wanted.items()):
                lines.setdefault(row.provider, []).append((int(groups["x"]), getattr(row, y)))
        found.append((title, {provider: sorted(points) for provider, points in lines.items()}))
    return "lines", found, x, UNITS[y], rows[0]


def _bars(file, panels, y):
    """[(title, {provider: {case: y}})] of the ops of the panels (title, op); or of some cases, (title, op, glob)."""
    found = []
    for title, op, *glob in panels:
        bars, rows = {}, read(RESULTS / f"{file}.csv", f"{op}/{glob[0] if glob else '*'}/*")
        for row in rows:
            bars.setdefault(row.provider, {})[row.case] = getattr(row, y)
        found.append((title, bars))
    return "bars", found, "", UNITS[y], rows[0]


def _decode():
    """Caches in pages are bars beside those of the same cache in one piece."""
    bars = {}
    for row in read(RESULTS / "flash_attn.csv", "flash_attn_decode/*"):
        case, page, size = row.case.partition(" page ")
        bars.setdefault(row.provider + page + size, {})[case] = row.gbps
    return "bars", [("keys and values read per second", bars)], "", "GB/s", row


def _serving():
    """The share of each call's time that a copy of its keys, or a matmul of as many operations, takes."""
    bars = {"flash_attn": {}, "FlashAttention-3": {}}
    for name, ours, theirs in tables.serving():
        bars["flash_attn"][name] = ours.share
        bars["FlashAttention-3"][name] = ours.share * ours.ms / theirs.ms
    panels = [("new tokens on keys, query / key heads of 128", bars)]
    return "bars", panels, "", "time of a copy or a matmul / time of the call", ours


def _scaling():
    """What each GPU computes, where one sequence is divided among more and more of them."""
    rows, panels = read(RESULTS / "context_parallel.csv"), []
    for case in tables.DIVIDED:
        if case in ("causal 64k 32/8 d128", "causal 256k 32/8 d128"):  # much like their neighbours
            continue
        lines = {}
        for row in rows:
            if row.case == case:
                lines.setdefault(row.provider, {})[int(row.ranks)] = row.tflops  # the last row counts
        alone = lines.pop("one")  # on one GPU all are a plain call
        panels.append((tables.DIVIDED[case], {name: [*(alone | points).items()] for name, points in lines.items()}))
    return "lines", panels, "GPUs", "TFLOP/s of each", rows[0]


def _attention(dim, file="flash_attn"):
    masks = {"all keys": None, "causal": " causal"}
    panels = [
        (f"{direction}, {mask}", f"flash_attn_{op}", {"dim": str(dim), "causal": causal})
        for direction, op in (("forward", "fwd"), ("backward", "bwd"))
        for mask, causal in masks.items()
    ]
    return _lines(file, panels, ATTENTION, "tokens of a sequence (16384 in all)", "tflops")


FIGURES = {  # name: (title, what is drawn)
    **{f"attention_{d}": (f"Attention, head dimension {d}, bf16", lambda d=d: _attention(d)) for d in (64, 128, 256)},
    **{
        f"peers_{d}": (
            f"Attention beside FlashAttention-3 and -4, head dimension {d}, bf16",
            lambda d=d: _attention(d, "flash_attn_peers"),
        )
        for d in (64, 128, 256)
    },
    "decode": ("Decoding a token, bf16: batch x heads x key heads x keys x head dimension", lambda: _decode()),
    "serving": ("Calls of a server over pages of 16 tokens, bf16", lambda: _serving()),
    "masks": (
        "Masks, sinks and biases, bf16: batch x heads x tokens x head dimension",
        lambda: _bars(
            "flash_attn",
            [
                ("causal, with a sink and with the same mask as key ranges", "flash_attn_features", "1x* causal *"),
                ("documents, packed and as key ranges of one row", "flash_attn_features", "1x* documents *"),
                ("a bias, or a mask of bool, for each score", "flash_attn_features", "2x* bias *"),
            ],
            "tflops",
        ),
    ),
    "scaling": ("Attention of one sequence on several GPUs, forward and backward, bf16", lambda: _scaling()),
    "memory": (
        "Memory of attention beyond its inputs",
        lambda: _lines(
            "flash_attn",
            [(title, "flash_attn_memory", {"what": what}) for title, what in (("forward", "fwd"), ("both", "fwd+bwd"))],
            re.compile(r"(?P<x>\d+) (?P<what>fwd|fwd\+bwd)"),
            "tokens",
            "peak_mb",
        ),
    ),
    "norms": (
        "Norm of a residual stream, bf16",
        lambda: _lines(
            "layer_norm",
            [
                (f"{name}, {direction}", f"layer_norm_{op}", {"kind": kind})
                for direction, op in (("forward", "fwd"), ("backward", "bwd"))
                for name, kind in (("LayerNorm", "layer"), ("RMSNorm", "rms"))
            ],
            NORM,
            "columns",
            "gbps",
        ),
    ),
    "losses": (
        "Cross entropy, bf16",
        lambda: _lines(
            "xentropy",
            [(title, f"xentropy_{op}", {}) for title, op in (("forward", "fwd"), ("backward", "bwd"), ("both",) * 2)],
            COLUMNS,
            "classes",
            "gbps",
        ),
    ),
    "softmax": (
        "Scaled masked softmax, bf16",
        lambda: _lines(
            "fused_softmax",
            [
                (f"{title}, {direction}", f"softmax_{kind}_{op}", {})
                for direction, op in (("forward", "fwd"), ("backward", "bwd"))
                for title, kind in (("mask", "mask"), ("causal", "causal"), ("no mask", "none"))
            ],
            re.compile(r"\d+x\d+x\d*[02468]x(?P<x>\d+)"),
            "columns",
            "gbps",
        ),
    ),
    "rotary": (
        "Rotary embedding: batch x tokens x heads x head dimension x rotated, bf16",
        lambda: _bars("rotary", [("forward", "rotary_fwd"), ("in place", "rotary_inplace")], "gbps"),
    ),
    "dense": (
        "Linear layers and MLPs: rows x features x hidden features, bf16",
        lambda: _bars(
            "fused_dense",
            [("MLP, both directions", "fused_mlp_both"), ("linear layer, both directions", "fused_dense_both")],
            "tflops",
        ),
    ),
    "blocks": (
        "A transformer block, bf16: batch x tokens",
        lambda: _bars("block", [("a step of training", "block_step"), ("decoding a token", "block_decode")], "ms"),
    ),
    "models": (
        "Whole models, bf16: batch x tokens",
        lambda: _bars("models", [("a step of training", "train"), ("decoding a token", "decode")], "ms"),
    ),
}


def _of_its_own(module, path):
    """A figure that the module of its rows draws, which may need more packages."""
    module = importlib.import_module(f"benchmarks.{module}")
    return module.draw(path, module.read(RESULTS / f"{module.__name__.rpartition('.')[2]}.csv"))


OTHERS = {  # name: how it is drawn
    "training_loss": lambda path: _of_its_own("loss_curves", path),
    "equal_bits": lambda path: _of_its_own("equal_bits", path),
    "mask_shapes": lambda path: _mask_shapes(path),
}


def draw_all(folder: pathlib.Path) -> list[pathlib.Path]:
    """Write every figure to the folder; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [_draw(folder / f"{name}.png", title, *make()) for name, (title, make) in FIGURES.items()]
    return [*files, *(draw(folder / f"{name}.png") for name, draw in OTHERS.items())]


def _mask_shapes(path, size=24):
    """Which keys each query sees, by the masks of `flash_attn.masks` and by flags."""
    import torch
    from matplotlib import pyplot

    from flash_attn import masks

    causal = torch.ones(size, size).tril().bool()
    documents = masks.to_bool(masks.documents(torch.tensor([0, 5, 14, size]), size), size)[0, 0]
    images = torch.full((1, size), -1)
    images[0, 4:9], images[0, 14:20] = 0, 1
    shapes = {
        "causal=True": causal,
        "window_size=(6, 0)": causal & torch.ones(size, size).triu(-6).bool(),
        "attention_chunk=8": causal & masks.to_bool(masks.chunks(8, size), size)[0, 0],
        "masks.documents": causal & documents,
        "masks.prefix_lm": masks.to_bool(masks.prefix_lm(8, size), size)[0, 0],
        "masks.image_groups": masks.to_bool(masks.image_groups(images), size)[0, 0],
        "masks.sink_and_window": causal & masks.to_bool(masks.sink_and_window(2, (5, 0), size), size)[0, 0],
    }
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(13, 2.5), layout="constrained")
    for axis, (name, keep) in zip(axes, shapes.items(), strict=True):
        axis.imshow(keep, cmap="Blues", vmin=0, vmax=1.4)
        axis.set(xticks=[], yticks=[], xlabel="keys")
        axis.set_title(name, fontsize=9)
    axes[0].set_ylabel("queries")
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path


def _draw(path, title, kind, panels, x, y, row):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if kind == "lines":
        rows, columns = (1, len(panels)) if len(panels) < 4 else (2, len(panels) // 2)
        size = (4.2 * columns, 3.4 * rows + 0.6)
    else:
        rows, columns = len(panels), 1
        heights = [len(_cases(bars)) * (len(bars) + 1) + 4 for _, bars in panels]
        size = (9, 1 + 0.15 * sum(heights))
    ratios = None if kind == "lines" else heights
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", height_ratios=ratios
    )
    for axis, (name, series) in zip(axes.flat, panels, strict=True):
        assert series, f"{path.name}: no rows for {name}"
        (_draw_lines if kind == "lines" else _draw_bars)(axis, series)
        axis.set(title=name, **(dict(xlabel=x, ylabel=y) if kind == "lines" else dict(xlabel=y)))
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    columns = 4 if max(map(len, handles)) <= 26 else 3
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(f"{title}\n{row.device}, PyTorch {row.torch}", fontsize=11)
    figure.savefig(path, dpi=100, metadata={"Software": None})  # the same bytes for the same rows
    pyplot.close(figure)
    return path


def _draw_lines(axis, series):
    """Sizes are at equal distances, whatever they are."""
    sizes = sorted({x for points in series.values() for x, _ in points})
    for provider, points in series.items():
        label, colour, mark, _ = STYLES[provider]
        width = 2.2 if provider == "flash_attn" else 1.2
        places = [sizes.index(x) for x, _ in points]
        axis.plot(places, [y for _, y in points], label=label, color=colour, marker=mark, markersize=5, linewidth=width)
    axis.set_xticks(range(len(sizes)), map(_size, sizes), rotation=30, fontsize=8)
    values = [y for points in series.values() for _, y in points]
    if max(values) > 50 * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _size(n):
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def _cases(bars):
    return list(dict.fromkeys(case for values in bars.values() for case in values))


def _draw_bars(axis, bars):
    cases, height = _cases(bars), 0.8 / len(bars)
    for number, (provider, values) in enumerate(bars.items()):
        label, colour, _, hatch = STYLES[provider]
        places = [cases.index(case) + (number - (len(bars) - 1) / 2) * height for case in values]
        drawn = axis.barh(places, values.values(), height, label=label, color=colour, hatch=hatch, edgecolor="white")
        axis.bar_label(drawn, fmt="%.4g", fontsize=6, padding=2)
    axis.set_yticks(range(len(cases)), cases, fontsize=8)
    axis.set_ylim(len(cases) - 0.5, -0.5)
    axis.margins(x=0.08)
