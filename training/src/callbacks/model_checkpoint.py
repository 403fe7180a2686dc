"""Checkpoints, also when a run ends between two of them, or fails."""

import datetime
import logging
import os
import pathlib
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from src.engines.resume import back_to_last_step
from src.utils.checkpoint import AUTO_SAVE

log = logging.getLogger(__name__)


class ModelCheckpointMine(ModelCheckpoint):
    """Lightning's ModelCheckpoint, changed so that no training is lost.

    - With save_last, the last checkpoint is that of the last step, even if every_n_train_steps does not divide it.
      (Lightning keeps the one before.)
    - When it is time to save and no validation has given the monitored metric yet, the last checkpoint is saved at
      once, and the best one after the validation. (Lightning saves nothing until then.) The same holds at the end of
      an epoch and of the training. Without save_last, `{dirpath}/.pl_auto_save.ckpt` is saved instead, as long as there
      is no other checkpoint.
    - With fault_tolerant, a checkpoint is also saved when training ends with an error.

    All ranks write a checkpoint together. So after an error it is saved only if all of them have one, as at Ctrl-C; if
    one rank fails alone, while the others wait for it, the previous checkpoint remains the last one. It is not saved
    either if the error came while the optimizer was changing the weights. It has the state after the optimizer's last
    step.

    Arguments:
        args, kwargs: of ModelCheckpoint.
        fault_tolerant: whether to save when training ends with an error.
    """

    timeout = datetime.timedelta(seconds=30)  # how long the other ranks are waited for after an error

    def __init__(self, *args: Any, fault_tolerant: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fault_tolerant = fault_tolerant
        self._group: Any = None  # with gloo, because the group for gradients may be stuck
        self._begun: int | None = None  # the last step of the optimizer that has begun

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if self.fault_tolerant and trainer.world_size > 1 and stage == "fit":
            trainer.strategy.barrier()  # so that creating the group does not time out
            self._group = dist.new_group(backend="gloo", timeout=self.timeout)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self._defer_save_until_validation:
            self._last_global_step_saved = trainer.global_step  # the state that training begins with is already saved

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        waiting, self._defer_save_until_validation = self._defer_save_until_validation, False
        super().on_train_batch_end(trainer, *args)
        now = self._defer_save_until_validation and not self._should_skip_saving_checkpoint(trainer)
        self._defer_save_until_validation = waiting or now
        if now:
            self._save_before_validation(trainer)

    def _save_before_validation(self, trainer):
        """Save the last checkpoint, unless a validation comes now and is not the first: it saves when it has ended."""
        metrics, step = self._monitor_candidates(trainer), self._last_global_step_saved
        follows = trainer.fit_loop.epoch_loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
        if follows and self.monitor in metrics:
            return
        trainer.strategy.within_validation = follows  # a resumed run then begins with the validation
        self._save_last(trainer, metrics)
        trainer.strategy.within_validation = False
        if follows:
            self._last_global_step_saved = step  # the best one is still to be saved

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"defer_save_until_validation": self._defer_save_until_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._defer_save_until_validation = state_dict.get("defer_save_until_validation", False)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        now = self._every_n_epochs >= 1 and (trainer.current_epoch + 1) % self._every_n_epochs == 0
        if now and not self._should_skip_saving_checkpoint(trainer):
            self._save_last(trainer, self._monitor_candidates(trainer))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_last(trainer, self._monitor_candidates(trainer))

    def _save_last(self, trainer, metrics):
        """Save the last checkpoint; without save_last, a substitute as long as no best one has been saved."""
        if self.save_last:
            self._save_last_checkpoint(trainer, metrics)
        elif self.save_top_k != 0 and not self.best_model_path:
            self._save_checkpoint(trainer, os.path.join(self.dirpath, AUTO_SAVE))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        self._begun = trainer.global_step

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        if not self.fault_tolerant or trainer.state.fn != "fit" or trainer.sanity_checking or trainer.fast_dev_run:
            return
        if isinstance(exception, SystemExit):  # a run that was stopped on purpose is already saved
            return
        if self._all_agree(trainer):
            back_to_last_step(trainer)
            trainer.save_checkpoint(pathlib.Path(self.dirpath, AUTO_SAVE))

    def _all_agree(self, trainer):
        """Whether all ranks got here, with weights that were trained and are not half updated."""
        whole = trainer.global_step > 0 and self._begun != trainer.global_step
        if self._group is None:
            return whole
        answers = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(answers, whole, group=self._group)
        except RuntimeError:
            log.warning("Rank %d: no checkpoint is saved, since not all ranks have failed", trainer.global_rank)
            return False
        return all(answers)
