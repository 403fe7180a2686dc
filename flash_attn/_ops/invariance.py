"""The level of batch invariance in force, of the whole process. `flash_attn.batch_invariance` is what users call.

Ops read the level when they run, so what is compiled or captured need not know it; code that torch.compile traces reads
`level`, and Dynamo guards the graph on its value.
"""

import functools
import os
from collections.abc import Callable

import torch

from flash_attn import _library
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks

ENVIRONMENT = "FLASH_ATTENTION_BATCH_INVARIANT"
LEVELS = (0, 1, 2)
_ALL = "the integer 0, 1 or 2"


def level() -> int:
    """The level in force: 0 none, 1 batch-invariant, 2 also invariant to chunks and equal in training and serving."""
    return _level


def set_level(value: int) -> None:
    """Put a level in force, here and in the kernel library."""
    global _level
    checks.integer("level", value, _ALL)
    checks.number("level", value, value in LEVELS, _ALL)
    _level = int(value)
    _tell_kernels()


def refuse_unkept(dropout_p: float | None = None) -> None:
    """Raise for a call of attention whose arguments the level in force cannot keep its promise for.

    Every such refusal is here, so that one list says what cannot be had.
    """
    if _level == 2 and dropout_p:
        raise ArgumentError(
            f"dropout_p must be 0 where the level of batch invariance is 2, found {dropout_p}: what drops weights in "
            "training cannot equal what serves; set_batch_invariant(1) allows it"
        )


def refusing(composite: Callable) -> Callable:
    """Returns `composite`, an op in operations of torch, as a function that raises where a level is in force.

    The order of these operations depends on the shapes of the batch.
    """

    @functools.wraps(composite)
    def refused_in_force(*args):
        if _level:
            raise NotImplementedError(
                "attention must have no tangents and be in no transform of torch.func where the level of batch "
                f"invariance is {_level}, found one: call it within batch_invariant(0)"
            )
        return composite(*args)

    return refused_in_force


def _from_environment() -> int:
    value = os.environ.get(ENVIRONMENT, "").strip()
    if value not in ("", *map(str, LEVELS)):
        raise ValueError(f"the environment variable {ENVIRONMENT} must be 0, 1 or 2, found {value!r}")
    return int(value or 0)


def _tell_kernels() -> None:
    """Give the level to the planners of the kernels, if a library of them is loaded."""
    _library.load_error()
    tell = getattr(torch.ops.flash_attn, "set_batch_invariant", None)
    if tell is not None:
        tell(_level)


_level = _from_environment()
if _level:
    _tell_kernels()
