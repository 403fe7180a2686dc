"""When callbacks log, and how."""

from collections.abc import Mapping
from typing import Any

import lightning as L


def is_logging_step(trainer: L.Trainer) -> bool:
    """Whether Lightning logs at the present optimizer step, one of every `log_every_n_steps`.

    True for all batches whose gradients make up such a step.
    """
    return trainer._logger_connector.should_update_logs


def log_metrics(trainer: L.Trainer, metrics: Mapping[str, Any], step: int | None = None) -> None:
    """Give numbers to all loggers, at a step; by default that at which Lightning logs the loss of this batch."""
    for logger in trainer.loggers:
        logger.log_metrics(metrics, step=present_step(trainer) if step is None else step)


def log_hyperparams(trainer: L.Trainer, params: Mapping[str, Any]) -> None:
    """Give facts about a run to all loggers."""
    for logger in trainer.loggers:
        logger.log_hyperparams(dict(params))


def present_step(trainer: L.Trainer) -> int:
    """How many optimizer steps were over when this batch began."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped
