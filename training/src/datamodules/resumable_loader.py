"""A loader that knows which samples training has consumed, and how Lightning goes on in the middle of an epoch.

What Lightning 2.6 does with a checkpoint, as far as data are concerned:

- It restores its counters of batches: `batch_progress.current`, of this epoch, and `batch_progress.total`. Then it asks
  for the loader, whose iterator must give only the rest of the epoch, while `len` must remain that of a whole epoch:
  the epoch ends when the counter of this epoch, which goes on from where it was, reaches `len`.
- Of the counters, `processed` says what training has consumed: `completed` lags by one while callbacks save at the end
  of a batch, and `ready` leads by one if a step fails.
- Iterators are made before the hook `set_epoch`, and may be made twice before a batch is taken. Worker processes would
  read ahead at once. So this loader begins when the first batch is taken, and counts its epochs itself.
- A checkpoint taken at the end of the last batch, or of the validation after it, is resumed right. One taken in
  `on_train_epoch_end` or `on_train_epoch_start` is not if max_steps is given: the epoch that has ended counts twice,
  and may take a batch of the next one. `align` mends that.
- One taken after max_steps or max_time has ended the run within an epoch counts that epoch as over: `align` again.
- Where the number of ranks or the batch size has changed, the counters are those of other batches: `align` again.
"""

import atexit
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler


class Position(NamedTuple):
    """Where training is in its data."""

    epoch: int = 0
    samples: int = 0  # of this epoch, over all ranks


def leave_signals_to_the_trainer(worker: int) -> None:
    """A worker_init_fn of loaders. A terminal and Slurm send signals to all processes of a job: a worker that died of
    one would end training before it has saved. Workers end when their loader does, or its process."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_IGN)


@atexit.register
def _end_workers() -> None:
    """Kill workers that a failed run has left: multiprocessing would wait for them after SIGTERM, which they ignore."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler would raise an error for each
    for each in multiprocessing.active_children():
        if each.daemon:
            each.kill()


class ResumableLoader(DataLoader):
    """A DataLoader over a FaultTolerantDistributedSampler that can begin anywhere, with batches over all ranks.

    Each iteration is an epoch: the first is where `start_at` says, or what remains of it, and each one after that has
    the next order. An iteration from which no batch was taken does not count.
    """

    _at = Position()  # where the current iteration began, or the next one will
    _taken = 0  # batches that were given out, over all iterations
    _mark: int | None = None  # what `_clock` showed when the current iteration began
    _clock: Callable[[], int] | None = None

    def start_at(self, position: Position, clock: Callable[[], int] | None = None) -> None:
        """Begin the next iteration there.

        clock: gives how many batches training has consumed since some moment; by default, those that were given out.
        """
        self._at, self._clock, self._mark = position, clock, None

    def position(self) -> Position:
        """What training has consumed; where this was the last batch of the epoch, the beginning of the next one."""
        taken = min(self.consumed() * self.batch_size, self.sampler.remaining(self._at.samples))
        samples = self._at.samples + taken * self.sampler.num_replicas
        return Position(self._at.epoch, samples) if self._batches_after(samples) else self._next_epoch()

    def consumed(self) -> int:
        """How many batches of the current iteration training has consumed."""
        return 0 if self._mark is None else self._now() - self._mark

    def batches_before(self) -> int:
        """How many batches of the epoch lie before the current iteration."""
        return len(self) - self._batches_after(self._at.samples)

    def next_start(self) -> Position:
        """Where a new iteration begins."""
        return self._next_epoch() if self.consumed() or not self._batches_after(self._at.samples) else self._at

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.sampler, FaultTolerantDistributedSampler):  # Trainer(overfit_batches=…) takes another one
            self._at, self._mark = self.next_start(), self._now()
            self.sampler.load_state_dict(self._at._asdict())
        for batch in super().__iter__():
            self._taken += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the data module keeps the position. Lightning warns about loaders without these two methods."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to load."""

    def _now(self) -> int:
        return self._clock() if self._clock else self._taken

    def _next_epoch(self) -> Position:
        return Position(self._at.epoch + 1)

    def _batches_after(self, samples: int) -> int:
        left = self.sampler.remaining(samples)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)


def align(fit_loop: Any, loader: ResumableLoader, batch_before: int, batches_before: int) -> None:
    """Correct Lightning's restored counters for a loader that goes on from a checkpoint.

    Arguments:
        fit_loop: of the trainer, after it has loaded its state.
        batch_before: samples of a batch over all ranks, when the checkpoint was taken.
        batches_before: how many of these training had consumed since it began. Validation goes by this number.
    """
    epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
    at_start = loader.next_start().samples == 0
    if at_start and epochs.current.started == epochs.current.processed:  # no epoch is under way
        for counters in (epochs.total, epochs.current):
            counters.ready = counters.started = counters.completed = counters.processed
        fit_loop.epoch_loop.restarting = False
    elif epochs.current.started == epochs.current.processed:  # the run ended within an epoch, which goes on
        for counters in (epochs.total, epochs.current):
            counters.completed = counters.processed = counters.processed - 1
        fit_loop.restarting = True
    batch = loader.batch_size * loader.sampler.num_replicas
    if batch != batch_before:
        ended = at_start and batches.current.processed > 0
        _move(batches.current, len(loader) if ended else loader.batches_before())
        _move(batches.total, round(batches_before * batch_before / batch))


def _move(counters: Any, processed: int) -> None:
    """Add the same number to all counters, so that `processed` has this value."""
    difference = processed - counters.processed
    for name in ("ready", "started", "processed", "completed"):
        setattr(counters, name, getattr(counters, name) + difference)
