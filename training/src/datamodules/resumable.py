"""Data modules that keep in a checkpoint where training is in its data."""

import os
from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import Dataset

from src.datamodules.datasets.padded import PaddedDataset
from src.datamodules.fault_tolerant_sampler import FaultTolerantDistributedSampler
from src.datamodules.resumable_loader import Position, ResumableLoader, align
from src.utils.distributed import get_rank, get_world_size


class ResumableDataModule(L.LightningDataModule):
    """A data module that goes on where a checkpoint was taken, even with another number of ranks or another batch_size.

    A subclass has the attributes `batch_size` and, after `setup`, `dataset_train`. Its `train_dataloader` gives a
    ResumableLoader with a sampler for `ranks()` to `begin`, and returns it.

    Arguments:
        seed: of the order of the training data; by default that of Lightning's seed_everything, else 0.
    """

    same_data = "data"  # for messages: the arguments that decide what the training data are

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0)) if seed is None else seed
        self._restored: dict[str, Any] | None = None  # what load_state_dict was given
        self._aligned = True  # whether Lightning's counters have been made to fit it
        self._loader: ResumableLoader | None = None  # the last one for training

    def ranks(self) -> dict[str, int]:
        """Which part of the data this process has, for a DistributedSampler. Processes that share a model share it."""
        if self.trainer is not None:
            return self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        return {"num_replicas": get_world_size(), "rank": get_rank()}

    def for_all_ranks(self, dataset: Dataset) -> Dataset:
        """A dataset padded so that ranks share it evenly and no sample counts twice, for validation and tests."""
        ranks = self.ranks()["num_replicas"]
        return dataset if len(dataset) % ranks == 0 else PaddedDataset(dataset, ranks)

    def begin(self, loader: ResumableLoader) -> ResumableLoader:
        """Set the loader to where training is. Raises ValueError if it has no batch, or the data have changed."""
        start = self._start(loader)
        fit_loop = self.trainer.fit_loop if self.trainer is not None else None
        loader.start_at(start, None if fit_loop is None else self._batches)
        if not len(loader):
            raise ValueError(
                f"the training data must have a batch for each rank, found {len(self.dataset_train)} samples for "
                f"batch_size {self.batch_size} on {loader.sampler.num_replicas} ranks"
            )
        if fit_loop is not None and not self._aligned:
            align(fit_loop, loader, self._restored["batch"], self._restored["batches"])
            self._aligned = True
        self._loader = loader
        return loader

    def state_dict(self) -> dict[str, Any]:
        """Where training is: {"epoch", "samples", …}.

        samples: how many of this epoch training has consumed, over all ranks; at the end of an epoch, the next one's 0.
        The other entries are what `load_state_dict` needs to go on there: "seed", of the order; "size", of the training
        data; "data", of `description`; "batch", samples of a batch over all ranks; "batches", how many of them the
        trainer has counted.
        """
        loader = self._training_loader() or self._loader
        if loader is None:
            return dict(self._restored or {})
        position = loader.position()
        if self._epoch_is_over():
            position = Position(loader.next_start().epoch)
        batch = self.batch_size * loader.sampler.num_replicas
        others = {"seed": self.seed, "size": len(self.dataset_train), "batch": batch, "batches": self._batches()}
        return position._asdict() | others | {"data": self.description()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let training go on at a state of `state_dict`. The order remains that of the run that it comes from."""
        self._restored, self._aligned = dict(state_dict), False
        if state_dict["seed"] != self.seed:
            rank_zero_warn(f"datamodule.seed is {self.seed}, and was {state_dict['seed']} in the run that is resumed")
            self.seed = state_dict["seed"]

    def description(self) -> dict[str, Any]:
        """What tells the training data from others: the arguments of `same_data`, and "contents", all plain data."""
        return {}

    def first_position(self, loader: ResumableLoader) -> Position:
        """Where training begins without a checkpoint."""
        return Position()

    def _start(self, loader):
        """Where a new loader for training begins."""
        running = self._training_loader()
        if running is not None:  # Trainer(reload_dataloaders_every_n_epochs=…)
            return running.next_start()
        if self._restored is None:
            return self.first_position(loader)
        self._compare_data()
        return Position(self._restored["epoch"], self._restored["samples"])

    def _compare_data(self):
        """Raise ValueError if the training data are not those of the checkpoint."""
        size, now, then = len(self.dataset_train), self.description(), self._restored.get("data", {})
        differing = [name for name in then if then[name] != now.get(name)]
        if self._restored["size"] == size and "contents" not in differing:
            return
        changes = [f"{name} was {then[name]!r}, and is {now[name]!r}" for name in differing if name != "contents"]
        raise ValueError(
            f"the checkpoint was taken with {self._restored['size']} training samples, found {size} others "
            f"({'; '.join(changes) or 'what is under the same names has changed'}): resume with the same "
            f"{self.same_data}"
        )

    def _batches(self):
        """How many batches the trainer has consumed."""
        return 0 if self.trainer is None else self.trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def _training_loader(self):
        """The loader that the trainer takes batches from."""
        loader = None if self.trainer is None else self.trainer.train_dataloader
        resumable = isinstance(loader, ResumableLoader) and isinstance(loader.sampler, FaultTolerantDistributedSampler)
        return loader if resumable else None

    def _epoch_is_over(self):
        """Whether the trainer has ended this epoch before all batches were taken, as Trainer(limit_train_batches=…)."""
        if self._training_loader() is None:
            return False
        fit_loop = self.trainer.fit_loop
        return fit_loop.epoch_loop.batch_progress.current.processed >= fit_loop.max_batches
