"""Which errors need no stack: their message names what was given and is to be changed."""

import traceback

from hydra.errors import InstantiationException
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from src.utils.checkpoint import CheckpointError

_OF_INPUT = (ValueError, OSError, ImportError, MisconfigurationException, OmegaConfBaseException)


def message_alone(error: BaseException) -> str | None:
    """The message of an error in what a run was given, or of its disk; None for one that needs its stack.

    Such are errors of other types, and those within a batch of training or evaluation. What Hydra says of the object
    that was being made is left out.
    """
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, CheckpointError):
        return str(error)
    within_batch = any(frame.name == "advance" for frame in traceback.extract_tb(error.__traceback__))
    return str(error) if isinstance(error, _OF_INPUT) and not within_batch else None
