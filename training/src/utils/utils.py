"""What a run does around training: log on rank 0, adapt and show its configuration, close its loggers."""

import logging
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

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
