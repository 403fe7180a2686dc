"""The bar that shows how far training is."""

import contextlib
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from tqdm.contrib.logging import logging_redirect_tqdm

_SHOWN_AS = {
    "time/tokens_per_s": ("tokens/s", "{:,.0f}"),
    "time/samples_per_s": ("samples/s", "{:,.0f}"),
    "time/mfu": ("MFU", "{:.1%}"),
}


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the loss of the last batch, up to `max_steps` if that comes before the end of the epoch.

    Reading the loss waits for the GPU, so it is read only when the bar is drawn, every `refresh_rate` batches.
    (Lightning reads what is logged with prog_bar=True after every batch.) Log messages are printed above the bar.
    """

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_start(trainer, *args)
        self._while_drawn = contextlib.ExitStack()
        if not self.is_disabled:
            self._while_drawn.enter_context(logging_redirect_tqdm())
        if done := self._done():  # on_train_epoch_start is not called where an epoch goes on
            bar = self.train_progress_bar
            bar.total, bar.n, bar.initial = self.total_train_batches, done, done
            bar.set_description(f"Epoch {trainer.current_epoch}")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        bar = self.train_progress_bar
        if not bar.disable and self._should_update(batch_idx + 1, bar.total):
            bar.n = batch_idx + 1
            bar.set_postfix(self.get_metrics(trainer, pl_module))  # which draws it, once

    def on_train_end(self, *args: Any) -> None:
        super().on_train_end(*args)
        self._while_drawn.close()

    def on_exception(self, trainer: L.Trainer, *args: Any) -> None:
        if self._train_progress_bar is not None and hasattr(self, "_while_drawn"):
            self.on_train_end(trainer)

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        loss = trainer.callback_metrics.get("train/loss_step", trainer.callback_metrics.get("train/loss"))
        shown = {} if loss is None else {"loss": f"{float(loss):.3f}"}
        for name, value in super().get_metrics(trainer, pl_module).items():
            if name in _SHOWN_AS:
                name, pattern = _SHOWN_AS[name]
                value = pattern.format(value)
            if name != "v_num":  # the last four letters of the run's name
                shown[name] = value
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
