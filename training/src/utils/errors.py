"""Which errors need no stack trace: their message names the input that has to be changed."""

import errno
import traceback
from collections.abc import Callable
from typing import Any

from hydra.errors import InstantiationException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from src.utils.checkpoint import CheckpointError

_OF_INPUT = (ValueError, OSError, ImportError, MisconfigurationException, OmegaConfBaseException)


def message_alone(error: BaseException) -> str | None:
    """The message of an error in the input of a run or on its disk; None for an error that needs its stack trace.

    Errors of other types need it, and all errors within a batch of training or evaluation, except for a full disk. What
    Hydra adds about the object that was being created is left out.
    """
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left on the disk: {error}"
    within_batch = any(frame.name == "advance" for frame in traceback.extract_tb(error.__traceback__))
    return str(error) if isinstance(error, _OF_INPUT) and not within_batch else None


def run_command(main: Callable[[], Any]) -> None:
    """Call the main function of a command. For an error in its input, exit with status 1 and the message alone."""
    try:
        main()
    except Exception as error:
        message = message_alone(error)
        if message is None:
            raise
        raise SystemExit(f"error: {message}") from error
