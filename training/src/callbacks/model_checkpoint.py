"""Checkpoints, also when a run ends between two of them, or fails."""

import datetime
import logging
import pathlib
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from src.utils.checkpoint import AUTO_SAVE

log = logging.getLogger(__name__)


class ModelCheckpointMine(ModelCheckpoint):
    """Lightning's ModelCheckpoint, with everything that was trained in what is kept.

    With save_last, the last checkpoint is that of the last step, also if every_n_train_steps does not divide it.
    Lightning would keep the one before. And when training ends with an error, `{dirpath}/.pl_auto_save.ckpt` can be
    saved.

    All ranks write a checkpoint together. So it is saved if all of them have an error, such as Ctrl-C, and not if the
    others wait for a rank that failed alone; the checkpoint before is then the last one. It is not saved either if the
    optimizer was changing the weights.

    Arguments:
        args, kwargs: of ModelCheckpoint.
        fault_tolerant: whether to save when training ends with an error.
    """

    timeout = datetime.timedelta(seconds=30)  # for the other ranks to fail, too

    def __init__(self, *args: Any, fault_tolerant: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault_tolerant = fault_tolerant
        self._group: Any = None  # of gloo: the one for gradients may be stuck
        self._begun: int | None = None  # the last step of the optimizer that has begun

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.fault_tolerant and trainer.world_size > 1 and stage == "fit":
            trainer.strategy.barrier()  # making the group has the same timeout as using it
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._last_global_step_saved = trainer.global_step  # what training begins with is there already

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._begun = trainer.global_step

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if not self.fault_tolerant or trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        if isinstance(exception, SystemExit):  # whoever stops a run on purpose has saved it
            return
        if self._all_agree(trainer):
            trainer.save_checkpoint(pathlib.Path(self.dirpath, AUTO_SAVE))

    def _all_agree(self, trainer):
        """Whether all ranks are here, with whole weights that are not those of the start."""
        whole = trainer.global_step > 0 and self._begun != trainer.global_step
        if self._group is None:
            return whole
        answers = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(answers, whole, group=self._group)
        except RuntimeError:
            log.warning("Rank %d: no checkpoint, since not all ranks have got an error", trainer.global_rank)
            return False
        return all(answers)
