"""Which errors need no stack: their message names what was given and is to be changed."""

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
    """The message of an error in what a run was given, or of its disk; None for one that needs its stack.

    Such are errors of other types, and those within a batch of training or evaluation, but for a disk that is full.
    What Hydra says of the object that was being made is left out.
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
    """Call the main function of a command. Of an error in what it was given, it prints the message; the status is 1."""
    try:
        main()
    except Exception as error:
        message = message_alone(error)
        if message is None:
            raise
        raise SystemExit(f"error: {message}") from error
