"""Stops a run when a scheduler asks for it, at a point from which it can go on exactly.

SIGINT (Ctrl-C), SIGTERM (Slurm at the time limit, Kubernetes, `kill`) and SIGUSR1 (`sbatch --signal=USR1@90`) only set
a flag. At the end of the optimiser's step all processes agree that one of them has got a signal, save
`.pl_auto_save.ckpt`, and exit with status 128 + the signal's number (130, 143, 138), as a process does that a signal
ends. After SIGUSR1 a job of Slurm is queued again. A second Ctrl-C does not wait for the end of the step, and saves
nothing.

Lightning's handlers communicate inside the signal handler, wherever each process happens to be, and raise while
gradients are accumulated; `Signals` replaces them.
"""

import logging
import math
import os
import pathlib
import signal
import subprocess
import threading
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from src.utils.checkpoint import AUTO_SAVE

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_NOTICE = b"\nInterrupted: saving after this step. Press Ctrl-C again to end at once, without a checkpoint.\n"
_log = logging.getLogger(__name__)


class Stopped(SystemExit):
    """Ends the run after a signal; it is then saved. The exit status is 128 + the signal's number."""

    def __init__(self, number: int, within_validation: bool) -> None:
        super().__init__(128 + number)
        self.signal, self.within_validation = signal.Signals(number), within_validation


class Signals(_SignalConnector):
    """Remembers the signal that this process has got while it trains; `received` is its number, or 0."""

    received = 0

    def register_signal_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread() or self.trainer.state.fn != "fit":
            return  # an evaluation has nothing to save, and ends as every other program does
        self.received, self._process, self._interrupted = 0, os.getpid(), math.inf
        self._original_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number, frame):
        self.received = int(number)
        if number != signal.SIGINT or os.getpid() != self._process:  # workers of loaders are forks with this handler
            return
        now = time.monotonic()
        if now > self._interrupted + 1:  # sooner, it is the same Ctrl-C, repeated by a launcher
            signal.default_int_handler(number, frame)
        if self._interrupted == math.inf and self.trainer.is_global_zero:
            os.write(2, _NOTICE)  # not logging, which may itself be interrupted just now
        self._interrupted = min(self._interrupted, now)


def add_callbacks(trainer: L.Trainer) -> None:
    """Have a trainer save and stop when a process has got a signal."""
    if not isinstance(trainer._signal_connector, Signals):
        trainer._signal_connector = Signals(trainer)
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # it would wait for the GPU at every batch
        callbacks = trainer.callbacks  # Lightning has put those that save last
        first = next((i for i, each in enumerate(callbacks) if isinstance(each, Checkpoint)), len(callbacks))
        callbacks[:] = [*callbacks[:first], StopBetweenSteps(), StopOnSignal(), *callbacks[first:], SaveWhenStopped()]


class StopBetweenSteps(L.Callback):
    """Delays the end of a run, such as that of Trainer(max_time=…), until after the next optimiser step.

    So the state that is saved at the end can be resumed, and no batch is lost.
    """

    def __init__(self) -> None:
        self._waits = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._waits = self._waits or trainer.should_stop
        trainer.should_stop = self._waits and not trainer.fit_loop._should_accumulate()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self.on_train_batch_end(trainer)


class StopOnSignal(L.Callback):
    """Raises `Stopped` at a point from which the run can go on.

    It comes after callbacks that change at that point what is saved, such as averages of weights, and before those that
    save.
    """

    def __init__(self) -> None:
        self._group = None  # of gloo, so that asking does not wait for the GPU
        self._every_batch = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size > 1:
            self._group = dist.new_group(backend="gloo")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.strategy.save_postponed()
        loop = trainer.fit_loop.epoch_loop
        if not loop._should_accumulate() and not loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
            self._stop(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if _may_stop(trainer):
            counts = [None] * trainer.world_size
            if trainer.world_size > 1:
                dist.all_gather_object(counts, trainer.num_val_batches, group=self._group)
            self._every_batch = all(count == counts[0] for count in counts)
            self._stop(trainer, within_validation=True)

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if self._every_batch and _may_stop(trainer):
            self._stop(trainer, within_validation=True)

    def _stop(self, trainer, within_validation=False):
        number = self._agreed(trainer._signal_connector.received)
        if number:
            raise Stopped(number, within_validation)

    def _agreed(self, received):
        """The largest number of a signal that any process has got."""
        if self._group is None:
            return received
        number = torch.tensor(received)
        dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
        return int(number)


class SaveWhenStopped(L.Callback):
    """Saves, after the other callbacks have undone what a validation changes, such as averaged weights."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, Stopped):
            return
        folder = pathlib.Path(getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir)
        trainer.strategy.within_validation = exception.within_validation
        trainer.save_checkpoint(folder / AUTO_SAVE)
        if trainer.is_global_zero:
            step = trainer.global_step
            _log.warning("%s: saved %s at step %d, and stop", exception.signal.name, folder / AUTO_SAVE, step)
            if exception.signal == signal.SIGUSR1:
                _queue_again()


def _may_stop(trainer):
    """Whether this validation comes between two steps of training."""
    return trainer.state.fn == "fit" and not trainer.sanity_checking and not trainer.fit_loop._should_accumulate()


def _queue_again():
    """Have Slurm run this job again, if it is one and not an interactive one."""
    if not (SLURMEnvironment.detect() and SLURMEnvironment().auto_requeue):
        return
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _log.error("Slurm's job %s is not queued again: %s", job, error)
