"""The bar that shows how far training is."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, with the loss of the last batch.

    To show the loss takes waiting for the GPU, so it is read when the bar is drawn, every `refresh_rate` batches.
    (Lightning reads what is logged with prog_bar=True after every batch.)
    """

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        loss = trainer.callback_metrics.get("train/loss_step", trainer.callback_metrics.get("train/loss"))
        shown = {} if loss is None else {"loss": f"{float(loss):.3f}"}
        return shown | super().get_metrics(trainer, pl_module)
