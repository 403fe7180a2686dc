"""Validation loss by step of the shape of GPT-2 small, as recipes of training/ train it on the same bytes.

plain         experiment=local/gpt2s: GPT-2 as it was, by AdamW
fp32          plain without dropout
masters       fp32 with weights in bf16 and masters in float32: optimizer=adamw-master trainer.precision=bf16-true
modern        experiment=local/gpt2s-modern
modern-adamw  modern with AdamW in the place of Muon

The text is Python code that is installed here, with a vocabulary of 50257 that is learned from it; without a GPU, a
small part of it as bytes, and models of two narrow layers. Runs come one after the other, on one GPU. Equal steps are
equal tokens.

    python -m benchmarks.recipes                           # plain and modern; rows and plot go to build/benchmarks
    python -m benchmarks.recipes fp32 masters --steps 300
"""

import argparse
import collections
import csv
import os
import pathlib
import statistics
import subprocess
import sys
import time

import torch

from benchmarks.benchmark_training import ROOT, paths, write_python_files
from benchmarks.harness import environment
from benchmarks.loss_curves import vocabulary
from benchmarks.rows import ROWS, append_csv

_DRY = tuple(f"++model.config.{kind}_pdrop=0.0" for kind in ("resid", "embd", "attn"))
_PLAIN, _MODERN = ("experiment=local/gpt2s",), ("experiment=local/gpt2s-modern",)
RECIPES = {
    "plain": _PLAIN,
    "fp32": (*_PLAIN, *_DRY),
    "masters": (*_PLAIN, *_DRY, "trainer.precision=bf16-true", "optimizer=adamw-master"),
    "modern": _MODERN,
    "modern-adamw": (*_MODERN, "optimizer=adamw"),
}
TEXT_BYTES = 25 * 10**7
VALIDATIONS = 16  # of a run
LOGGING = 10  # steps from one line of the log to the next
_COMMON = (
    "seed=1111",  # the same weights and the same order of the text
    "trainer.devices=1",
    f"trainer.log_every_n_steps={LOGGING}",
    "+trainer.limit_val_batches=24",
    "+trainer.enable_checkpointing=false",
    "callbacks.model_checkpoint=null",
    "callbacks.norm_monitor=null",
    "callbacks.progress_bar=null",
    "callbacks.rich_model_summary=null",
    "test_after_training=false",
    "print_config=false",
    "logger=csv",
)
_SMALL = (
    "trainer.accelerator=cpu",
    "callbacks.gpu_affinity=null",
    "datamodule.max_length=64",
    "datamodule.batch_size=4",
    "train.global_batch_size=4",
    "model.config.n_embd=64",
    "model.config.n_head=2",
    "model.config.n_layer=2",
)


def main() -> None:
    """Train each recipe, write a row for each validation, print them side by side, and draw them."""
    args = _parse()
    folder = args.csv.parent / "recipes"
    folder.mkdir(parents=True, exist_ok=True)
    on_gpu, text = torch.cuda.is_available(), folder / "sources.jsonl"
    write_python_files(text, TEXT_BYTES if on_gpu else 10**6)
    common = [
        f"datamodule.dataset_name={text}",
        f"datamodule.tokenizer_name={vocabulary(text, folder) if on_gpu else 'byte'}",
        f"datamodule.num_workers={16 if on_gpu else 0}",
        f"trainer.max_steps={args.steps}",
        f"__steps_per_validation={max(args.steps // VALIDATIONS, 2)}",  # the speed leaves out the first step after one
        *_COMMON,
        *([] if on_gpu else _SMALL),
        *(["datamodule.batch_size=32"] if on_gpu else []),
    ]
    _run(folder, args.recipes[0], common, "run=prepare")  # tokens, before the clock of the first runs
    rows = []
    for name in args.recipes:
        start = time.perf_counter()
        _run(folder, name, common)
        found = _rows(name, folder / name) | environment("cuda" if on_gpu else "cpu")
        rows += [
            {key: x[i] if isinstance(x, list) else x for key, x in found.items()} for i in range(len(found["step"]))
        ]
        print(f"{name}: {time.perf_counter() - start:.0f} s, {found['tokens_per_s']:.0f} tokens a second", flush=True)
    append_csv(args.csv, rows)
    print(table(rows))
    print("rows:", args.csv)
    print("plot:", draw(args.csv.with_suffix(".png"), rows))


def _parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help=f"of {', '.join(RECIPES)} (default: plain modern)")
    parser.add_argument("--steps", type=int, default=800, help=f"at least {LOGGING} (default: %(default)s)")
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "recipes.csv", help="default: %(default)s")
    args = parser.parse_args()
    args.recipes, args.csv = args.recipes or ["plain", "modern"], args.csv.absolute()
    for name in args.recipes:
        if name not in RECIPES:
            parser.error(f"recipes must be of {', '.join(RECIPES)}, found {name!r}")
    if len(set(args.recipes)) < len(args.recipes):
        parser.error(f"recipes must be different, found {' '.join(args.recipes)}")
    if args.steps < LOGGING:
        parser.error(f"--steps must be at least {LOGGING}, after which speed and tokens are logged, found {args.steps}")
    return args


def _run(folder, name, common, *more):
    window = [] if torch.cuda.is_available() or "modern" not in name else ["model.config.sliding_window=[16,null]"]
    command = [sys.executable, "run.py", *RECIPES[name], *common, *window, f"name={name}", *more]
    command.append(f"hydra.run.dir={folder / name}")
    environ = os.environ | {"PYTHONPATH": paths(), "DATA_DIR": str(folder)}
    log = folder / f"{name}.log"
    with log.open("w") as file:
        code = subprocess.call(command, cwd=ROOT / "training", env=environ, stdout=file, stderr=file)
    if code:
        raise SystemExit(f"{name} failed with exit code {code}: see {log}")


def _rows(name, folder):
    """Columns of the last run in a folder."""
    file = max(folder.rglob("metrics.csv"), key=lambda each: each.stat().st_mtime)
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    validations = [row for row in rows if row.get("val/loss")]
    speeds = [float(row["time/tokens_per_s"]) for row in rows if row.get("time/tokens_per_s")]
    seen = {int(row["step"]): float(row["train/num-tokens_step"]) for row in rows if row.get("train/num-tokens_step")}
    first = min(seen)
    return {
        "recipe": name,
        "step": [int(row["step"]) + 1 for row in validations],
        "tokens": [round(seen[first] / (first + 1) * (int(row["step"]) + 1)) for row in validations],
        "loss": [float(row["val/loss"]) for row in validations],
        "tokens_per_s": statistics.median(speeds) if speeds else float("nan"),
    }


def table(rows: list[dict]) -> str:
    """The losses of all recipes, a line for each step."""
    names, losses = list(dict.fromkeys(row["recipe"] for row in rows)), collections.defaultdict(dict)
    for row in rows:
        losses[row["step"]][row["recipe"]] = row["loss"]
    lines = [" ".join(f"{each:>12}" for each in ("step", *names))]
    for step, found in sorted(losses.items()):
        cells = (f"{found[name]:.4f}" if name in found else "-" for name in names)
        lines.append(" ".join(f"{each:>12}" for each in (step, *cells)))
    return "\n".join(lines)


def draw(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """A plot of the losses by tokens, and by the time that they take at the median speed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for name in dict.fromkeys(row["recipe"] for row in rows):
        own = [row for row in rows if row["recipe"] == name]
        for axes, scale in zip(panels, (1e6, own[0]["tokens_per_s"])):
            axes.plot([row["tokens"] / scale for row in own], [row["loss"] for row in own], label=name)
    for axes, label in zip(panels, ("million tokens", "seconds of training")):
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    panels[0].set(title="Validation loss", ylabel="nats per token")
    panels[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    main()
