"""The bar that shows how far training is."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the loss of the last batch, up to `max_steps` if that comes before the end of the epoch.

    To show the loss takes waiting for the GPU, so it is read when the bar is drawn, every `refresh_rate` batches.
    (Lightning reads what is logged with prog_bar=True after every batch.)
    """

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        if done := self._done():  # on_train_epoch_start is not called where an epoch goes on
            bar = self.train_progress_bar
            bar.total, bar.n, bar.initial = self.total_train_batches, done, done
            bar.set_description(f"Epoch {trainer.current_epoch}")

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
        return min(batches, self._done() + (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)

    def _done(self):
        """Batches of this epoch that the run which is resumed has done."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return 0 if progress.is_last_batch else progress.current.ready
