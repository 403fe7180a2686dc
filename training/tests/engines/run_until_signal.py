"""Started by tests in a process: a run that sends itself a signal, or is killed.

Its arguments are FOLDER MAX_STEPS [--resume] [--signal NAME --at PLACE NUMBER] [--kill-while-saving NUMBER].
"""

import argparse
import logging
import os
import pathlib
import signal

import lightning as L
import torch

from src.engines import SingleDeviceStrategy
from src.utils import checkpoint as checkpoints
from training.tests.engines import tiny


def main(arguments, log):
    """Run with these arguments, and write what is logged to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("max_steps", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--signal")
    parser.add_argument("--at", nargs=2)
    parser.add_argument("--kill-while-saving", type=int, default=0)
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO)
    L.seed_everything(1)
    callbacks = [] if args.signal is None else [tiny.SendSignal(args.signal, args.at[0], int(args.at[1]))]
    callbacks.append(L.pytorch.callbacks.ModelCheckpoint(args.folder, every_n_train_steps=2, save_last=True))
    if args.kill_while_saving:
        _kill_while_saving(args.kill_while_saving)
    task, data = tiny.Task(), tiny.Data(batch_size=4)
    trainer = tiny.trainer(
        args.folder,
        SingleDeviceStrategy(),
        args.max_steps,
        callbacks=callbacks,
        accumulate_grad_batches=3,
        enable_checkpointing=True,
    )
    trainer.fit(task, datamodule=data, ckpt_path=checkpoints.latest(args.folder) if args.resume else None)
    torch.save({"weights": tiny.weights(task), "losses": task.losses}, args.folder / "end.pt")


def _kill_while_saving(number):
    """End this process when it writes the manifest of the number-th checkpoint."""
    publish, count = checkpoints._publish, 0

    def killed(*args):
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        publish(*args)

    checkpoints._publish = killed
