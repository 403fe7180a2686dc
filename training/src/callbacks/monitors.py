"""A check that the metrics exist which callbacks monitor, and which a sweep optimises."""

import lightning as L


class MonitorsExist(L.Callback):
    """Ends a run before its training if a callback monitors, or a sweep optimises, a metric of validation that does not
    exist.

    Otherwise its checkpoints, or the run itself, would fail at the first validation, hours later. Which metrics
    exist is known after the few validation batches with which Lightning begins (num_sanity_val_steps).

    Arguments:
        optimized_metric: the metric of a sweep, if there is one.

    Raises ValueError that names the callback or optimized_metric, and the existing metrics.
    """

    def __init__(self, optimized_metric: str | None = None) -> None:
        self.optimized_metric = optimized_metric

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        there = sorted(name for name in trainer.callback_metrics if name.startswith("val/"))
        monitors = [("optimized_metric", self.optimized_metric)]
        monitors += [(f"the monitor of {type(x).__name__}", getattr(x, "monitor", None)) for x in trainer.callbacks]
        for what, monitor in monitors:
            if monitor is not None and monitor.startswith("val/") and monitor not in there:
                raise ValueError(f"{what} must be one of {', '.join(there)}, found {monitor!r}")
