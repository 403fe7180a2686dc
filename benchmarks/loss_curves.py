"""Loss by step of GPT-2 124M, trained with this library's kernels and with plain PyTorch: the speed costs no accuracy.

fused  experiment=local/gpt2s: attention, MLP, norms and the loss are this library's, in bf16 autocast
plain  the same run without any of them: softmax(q k^T) v, torch's layers and loss, all compiled by torch

Both are trained with each of two seeds, which also shuffle the data, on Python code with a vocabulary of 50257 that is
learned from it. The runs share the GPUs that are there: their times mean nothing.

    python -m benchmarks.loss_curves                            # needs a GPU; rows and plot go to build/benchmarks
    python -m benchmarks.loss_curves --steps 40 -- experiment=tiny/text    # also without one
"""

import argparse
import collections
import csv
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys

from benchmarks.benchmark_training import ROOT, paths, write_python_files
from benchmarks.harness import environment
from benchmarks.rows import ROWS, append_csv

FUSED = ("use_flash_attn", "fused_bias_fc", "fused_mlp", "fused_dropout_add_ln", "residual_in_fp32")
PLAIN = [*(f"++model.config.{flag}=false" for flag in FUSED), "++train.loss_fn=torch", "train.compile=true"]
PROVIDERS = {"fused": [], "plain": PLAIN}
SEEDS = (1111, 2222)
EVERY = 10  # steps between two rows
VOCABULARY = 50257
TEXT_BYTES = 2 * 10**8
SMOOTHED = 10  # rows that a point of the plot is the mean of


def main() -> None:
    """Train all runs, write a row for every tenth step of each, print how far they are apart, and draw them."""
    args = _parse()
    folder = args.csv.parent / "loss_curves"
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [*args.overrides, f"trainer.max_steps={args.steps}"]
    if not args.overrides:
        text = folder / "sources.jsonl"
        write_python_files(text, TEXT_BYTES)
        overrides += [
            "experiment=local/gpt2s",
            "datamodule.batch_size=32",
            "train.global_batch_size=32",
            f"datamodule.dataset_name={text}",
            f"datamodule.tokenizer_name={vocabulary(text, folder)}",
            "datamodule.num_workers=8",
        ]
    runs = list(itertools.product(PROVIDERS, SEEDS))
    _start(overrides, runs[0], folder, "run=prepare").wait()  # prepares the data once, before all runs start
    started = {run: _start(overrides, run, folder, "run=train", gpu=i) for i, run in enumerate(runs)}
    rows = []
    for (provider, seed), process in started.items():
        if process.wait() != 0:
            raise SystemExit(f"{provider} {seed} failed with exit code {process.returncode}: see {folder}")
        losses = _losses(folder / f"{provider}-{seed}")
        on = environment("cuda" if _gpus() else "cpu")
        rows += [{"provider": provider, "seed": seed, "step": k, "loss": v} | on for k, v in losses.items()]
    append_csv(args.csv, rows)
    print(summary(rows))
    print("rows:", args.csv)
    print("plot:", draw(args.csv.with_suffix(".png"), rows))


def _parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="arguments of run.py that take the place of the experiment")
    parser.add_argument("--steps", type=int, default=1500, help="of the optimizer (default: %(default)s)")
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "loss_curves.csv", help="default: %(default)s")
    args = parser.parse_args()
    args.csv = args.csv.absolute()
    return args


def vocabulary(text: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """A folder with a byte-level BPE that is learned from some of the text, a JSON Lines file."""
    from tokenizers import ByteLevelBPETokenizer

    with text.open() as lines:
        some = [json.loads(line)["text"] for line in itertools.islice(lines, 4000)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(some, VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _start(overrides, run, folder, *more, gpu=0):
    provider, seed = run
    name = f"{provider}-{seed}"
    command = [
        sys.executable,
        "run.py",
        *overrides,
        *PROVIDERS[provider],
        f"seed={seed}",
        f"hydra.run.dir={folder / name}",
        f"++trainer.log_every_n_steps={EVERY}",
        "++trainer.limit_val_batches=0",
        "callbacks=none",
        "logger=csv",
        "test_after_training=false",
        "print_config=false",
        *more,
    ]
    environ = os.environ | {"PYTHONPATH": paths()}
    if _gpus():
        environ["CUDA_VISIBLE_DEVICES"] = str(gpu % _gpus())
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(command, cwd=ROOT / "training", env=environ, stdout=log, stderr=log)


def _gpus():
    import torch

    return torch.cuda.device_count()


def _losses(folder):
    """{step: loss of its batch}"""
    (file,) = folder.rglob("metrics.csv")
    with file.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row.get("train/loss_step")]
    return {int(row["step"]): float(row["train/loss_step"]) for row in rows}


def read(path: pathlib.Path) -> list[dict]:
    """The rows of a file that this has written."""
    with path.open(newline="") as lines:
        return [
            row | dict(seed=int(row["seed"]), step=int(row["step"]), loss=float(row["loss"]))
            for row in csv.DictReader(lines)
        ]


def curves(rows: list[dict]) -> dict[tuple[str, int], dict[int, float]]:
    """{(provider, seed): {step: loss}}"""
    found = collections.defaultdict(dict)
    for row in rows:
        found[row["provider"], row["seed"]][row["step"]] = row["loss"]
    return dict(found)


def distance(one: dict[int, float], other: dict[int, float]) -> tuple[float, float]:
    """Mean of one - other over the second half of the steps, and mean of its absolute value."""
    steps = sorted(one.keys() & other.keys())
    differences = [one[step] - other[step] for step in steps[len(steps) // 2 :]]
    return statistics.fmean(differences), statistics.fmean(map(abs, differences))


def summary(rows: list[dict]) -> str:
    """How far the runs are apart in the second half of the steps."""
    found = curves(rows)
    pairs = [(("fused", seed), ("plain", seed)) for seed in SEEDS]
    pairs += [((provider, SEEDS[0]), (provider, SEEDS[1])) for provider in PROVIDERS]
    lines = []
    for one, other in pairs:
        mean, absolute = distance(found[one], found[other])
        names = (" ".join(map(str, run)) for run in (one, other))
        lines.append("{} - {}: mean {:+.4f}, mean of absolute values {:.4f}".format(*names, mean, absolute))
    return "\n".join(lines)


def draw(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """A plot of the losses, and of fused - plain beside the difference between two seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = curves(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for (provider, seed), losses in found.items():
        style = dict(color={"fused": "#0072B2", "plain": "#D55E00"}[provider], linestyle=("-", "--")[SEEDS.index(seed)])
        left.plot(*_smooth(losses), label=f"{provider}, seed {seed}", **style)
    left.set(title="Training loss, mean of 100 steps", xlabel="step", ylabel="nats per token")
    for seed, color in zip(SEEDS, ("#0072B2", "#56B4E9")):
        right.plot(
            *_smooth(_minus(found["fused", seed], found["plain", seed])),
            color=color,
            label=f"fused - plain, seed {seed}",
        )
    for provider, color in (("fused", "#999999"), ("plain", "#000000")):
        apart = _minus(*(found[provider, seed] for seed in SEEDS))
        right.plot(*_smooth(apart), color=color, linestyle=":", label=f"between the seeds, {provider}")
    right.set(title="Differences, mean of 100 steps", xlabel="step", ylabel="nats per token")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _minus(one, other):
    return {step: one[step] - other[step] for step in one.keys() & other.keys()}


def _smooth(losses):
    """(steps, means of SMOOTHED values that end there)"""
    steps = sorted(losses)
    means = [statistics.fmean(losses[s] for s in steps[max(0, i + 1 - SMOOTHED) : i + 1]) for i in range(len(steps))]
    return steps, means


if __name__ == "__main__":
    main()
