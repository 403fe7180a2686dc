"""The first run of `make train`: a small GPT is trained, stopped, resumed, evaluated and asked to write.

    python first_run.py                     # in training/; every command that it runs is printed, to be repeated

The text is that of Python's own library, as bytes; some of its modules are held out. Without a GPU, a GPT of four
layers reads it for some minutes; on a GPU it is GPT-2 small.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib

import torch

from src.evaluation.loading import validation_tokens

FOLDER = pathlib.Path(__file__).resolve().parent

# What to train, how long a window of evaluation is, and after how many steps a checkpoint is written.
SIZES = {
    "cpu": dict(
        overrides=[
            "experiment=tiny/text",
            "model.config.n_embd=128",
            "model.config.n_layer=4",
            "+trainer.limit_val_batches=4",
        ],
        steps=300,
        checkpoint_every=100,
        context=128,
    ),
    "cuda": dict(overrides=["experiment=local/gpt2s"], steps=1000, checkpoint_every=200, context=1024),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="first-run", help="of the run (default %(default)s)")
    parser.add_argument("--steps", type=int, help="of training (default: 300 without a GPU, 1000 with one)")
    args = parser.parse_args()
    start = time.perf_counter()
    os.chdir(FOLDER)
    size = SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    steps = args.steps or size["steps"]
    checkpoint_every = min(size["checkpoint_every"], max(steps // 3, 1))
    checkpoints = pathlib.Path(os.environ.get("CHECKPOINT_DIR", "checkpoints"), args.name)
    logs = pathlib.Path(os.environ.get("RESULT_DIR", "logs"))
    plot = logs / f"{args.name}.png"

    heading("1. Training, which is stopped on its way")
    shutil.rmtree(checkpoints, ignore_errors=True)
    train = [
        "run.py",
        *size["overrides"],
        "datamodule.val_ratio=0.02",
        f"name={args.name}",
        "print_config=False",
        "test_after_training=False",
        f"trainer.max_steps={steps}",
        f"callbacks.model_checkpoint.every_n_train_steps={checkpoint_every}",
    ]
    stop_after_checkpoint(train, checkpoints)

    heading("2. Training, resumed from the last checkpoint")
    run([*train, "resume=True"])

    heading("3. Evaluation on the text that was held out")
    evaluate = ["-m", "src.evaluation.perplexity", str(checkpoints), f"--stride={size['context'] // 2}", "--json"]
    score = json.loads(run(evaluate, stdout=subprocess.PIPE))
    text = bytes(token for token in validation_tokens(checkpoints).tolist() if token < 256)
    print(f"perplexity of a token: {score['perplexity']:.2f}")
    print("bits per byte:")
    print(f"  {unigram_entropy(text):.3f}  by how frequent each byte is: a model has to be better")
    print(f"  {8 * len(zlib.compress(text, 9)) / len(text):.3f}  compressed with zlib, at its best")
    print(f"  {score['bits_per_byte']:.3f}  by the model")

    heading("4. What the model writes")
    run(["-m", "src.generate", str(checkpoints), "--prompt", "def ", "--temperature", "0.8", "--seed", "0"])

    heading("5. A plot of the run")
    run(["-m", "src.plot", args.name, "--output", str(plot)])

    heading("Done")
    print(f"checkpoints: {checkpoints.resolve()}")
    print(f"logs:        {logs.resolve()}")
    print(f"plot:        {plot.resolve()}")
    print(f"to go on:    cd {FOLDER}, and any of the commands above with its Python; more are in README.md")
    print(f"time:        {time.perf_counter() - start:.0f} s in all")


def heading(text):
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def unigram_entropy(text):
    """Bits per byte of an ideal code for bytes that knows how often each occurs in the text, and nothing else."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in collections.Counter(text).values())


def command_line(arguments):
    """Print a command, as it is typed, and return it."""
    print("$", shlex.join(["python", *arguments]), flush=True)
    return [sys.executable, *arguments]


def run(arguments, **options):
    """Run Python with arguments; return what it prints if stdout is a pipe."""
    return subprocess.run(command_line(arguments), check=True, text=True, **options).stdout


def stop_after_checkpoint(arguments, folder):
    """Run Python with arguments, until a checkpoint is in folder and some more steps were done; then ask it to end.

    At SIGTERM, training saves what it has done and ends with status 143. If it was over just before, the signal itself
    ends the process.
    """
    process = subprocess.Popen(command_line(arguments))
    try:
        while process.poll() is None and not list(folder.glob("*.ckpt")):
            time.sleep(0.2)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    finally:
        status = process.wait()
    if status not in (0, 128 + signal.SIGTERM, -signal.SIGTERM) or not list(folder.glob("*.ckpt")):
        raise SystemExit(f"training ended with status {status}")
    print(f"\nstopped with status {status}; in {folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}")


if __name__ == "__main__":
    main()
