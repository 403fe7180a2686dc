"""What a run does around training: log on rank 0, adapt and show its configuration, close its loggers."""

import logging
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

_OF_A_FAST_RUN = {
    "datamodule.pin_memory": False,
    "datamodule.num_workers": 0,
    "callbacks.model_checkpoint": None,
    "callbacks.model_checkpoint_progress": None,
}
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "fatal")


def get_logger(name: str = __name__) -> logging.Logger:
    """The logger of this name, whose methods do nothing on ranks other than 0."""
    logger = logging.getLogger(name)
    for level in _LEVELS:
        setattr(logger, level, rank_zero_only(getattr(logging.Logger, level).__get__(logger)))
    return logger


class LoggingContext:
    """Another level, or one more handler, for a while.

    >>> with LoggingContext(logging.getLogger("transformers"), level=logging.ERROR):
    ...     pass

    Arguments:
        logger: a logging.Logger.
        level: its level within the block; unchanged if None.
        handler: added within the block, if there is one.
        close: close the handler at the end.
    """

    def __init__(
        self,
        logger: logging.Logger,
        level: int | str | None = None,
        handler: logging.Handler | None = None,
        close: bool = True,
    ) -> None:
        self.logger, self.level, self.handler, self.close = logger, level, handler, close

    def __enter__(self) -> logging.Logger:
        self.before = self.logger.level
        if self.level is not None:
            self.logger.setLevel(self.level)
        if self.handler is not None:
            self.logger.addHandler(self.handler)
        return self.logger

    def __exit__(self, *_: Any) -> None:
        self.logger.setLevel(self.before)
        if self.handler is not None:
            self.logger.removeHandler(self.handler)
            if self.close:
                self.handler.close()


def extras(config: DictConfig) -> None:
    """Adapt a configuration to its mode, in place.

    ignore_warnings silences Python's warnings. With trainer.fast_dev_run, data is read by this process into pageable
    memory, and there are no checkpoints: Lightning would replace last.ckpt. Raises ValueError if experiment_mode is set
    and the run has no name.
    """
    if config.get("ignore_warnings"):
        warnings.filterwarnings("ignore")
    if config.get("experiment_mode") and not config.get("name"):
        raise ValueError("mode=exp needs the name of the experiment: name=...")
    if OmegaConf.select(config, "trainer.fast_dev_run"):
        for key, value in _OF_A_FAST_RUN.items():
            if OmegaConf.select(config, key):
                OmegaConf.update(config, key, value)


@rank_zero_only
def print_config(
    config: DictConfig,
    fields: Sequence[str] = (
        "trainer",
        "model",
        "datamodule",
        "train",
        "eval",
        "callbacks",
        "logger",
        "seed",
        "name",
    ),
    resolve: bool = True,
) -> None:
    """Print these parts of a configuration as a tree, and write it to config_tree.txt in the working directory."""
    from rich.console import Console
    from rich.syntax import Syntax
    from rich.tree import Tree

    tree = Tree("CONFIG")
    for field in fields:
        part = config.get(field)
        text = OmegaConf.to_yaml(part, resolve=resolve) if OmegaConf.is_config(part) else str(part)
        tree.add(field).add(Syntax(text.rstrip(), "yaml", background_color="default"))
    Console().print(tree)
    with open("config_tree.txt", "w", encoding="utf-8") as file:
        Console(file=file, width=160).print(tree)


def finish(config: DictConfig, model: Any, datamodule: Any, trainer: Any, callbacks: Any, logger: Any) -> None:
    """Close the run of wandb, if there is one."""
    if any(type(each).__name__ == "WandbLogger" for each in logger):
        import wandb

        wandb.finish()
