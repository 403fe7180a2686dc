"""The loss scale of training in fp16."""

import lightning as L
from torch.optim import Optimizer

from src.callbacks.loggers import is_logging_step, log_metrics


class LossScaleMonitor(L.Callback):
    """Logs `scaler/scale`, and `scaler/growth_tracker`, the steps since it last changed, at logging steps.

    Does nothing with a precision that has no loss scale, such as bf16.
    """

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None or not is_logging_step(trainer):
            return
        if state := scaler.state_dict():  # which is empty if the scaler is disabled
            log_metrics(trainer, {"scaler/scale": state["scale"], "scaler/growth_tracker": state["_growth_tracker"]})
