"""A check that the metrics exist which callbacks monitor."""

import lightning as L


class MonitorsExist(L.Callback):
    """Ends a run before its training if a callback monitors a validation metric that does not exist.

    Otherwise its checkpoints, or the run itself, would fail at the first validation, hours later. Which metrics
    exist is known after the few validation batches with which Lightning begins (num_sanity_val_steps).

    Raises ValueError that names the callback and the existing metrics.
    """

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        there = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        for each in trainer.callbacks:
            monitor = getattr(each, "monitor", None)
            if monitor is not None and monitor.startswith("val/") and monitor not in there:
                raise ValueError(
                    f"the monitor of {type(each).__name__} must be one of {', '.join(there)}, found {monitor!r}"
                )
