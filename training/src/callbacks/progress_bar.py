"""The bar that shows how far training is."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the loss of the last batch, up to `max_steps` if that comes before the end of the epoch.

    To show the loss takes waiting for the GPU, so it is read when the bar is drawn, every `refresh_rate` batches.
    (Lightning reads what is logged with prog_bar=True after every batch.)
    """

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        loss = trainer.callback_metrics.get("train/loss_step", trainer.callback_metrics.get("train/loss"))
        shown = {} if loss is None else {"loss": f"{float(loss):.3f}"}
        shown |= super().get_metrics(trainer, pl_module)
        shown.pop("v_num", None)  # the last four letters of the run's name
        return shown

    @property
    def total_train_batches(self) -> int | float:
        trainer, batches = self.trainer, super().total_train_batches
        if trainer.max_steps < 0:
            return batches
        progress = trainer.fit_loop.epoch_loop.batch_progress
        done = 0 if progress.is_last_batch else progress.current.ready  # of this epoch, by the run that was resumed
        return min(batches, done + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
