"""Attention whose bits depend on nothing but the entry itself, by one switch for the whole process.

    import flash_attn

    flash_attn.set_batch_invariant(2)

docs/guides/batch_invariance.md says what each level promises, what it costs, and what it cannot cover.
"""

import contextlib
from collections.abc import Iterator

from flash_attn._ops import invariance

__all__ = ["batch_invariant", "get_batch_invariant", "set_batch_invariant"]


def set_batch_invariant(level: int) -> None:
    """Choose the level of batch invariance of all calls that follow in this process, in every thread.

    A process starts with the level that the environment variable FLASH_ATTENTION_BATCH_INVARIANT names, or with 0.
    Compiled functions are compiled anew where the level changes what they call, and a choice within one breaks its
    graph. A CUDA graph keeps the kernels that it was captured with: capture after the choice.

    Arguments:
        level: 0: kernels choose what is fastest. 1: the bits of a batch entry do not depend on the other entries, on
            their number or order, on capacity, padding or pages, and gradients are deterministic. 2: neither do they
            depend on how a prompt was cut into chunks, or on whether a token was decoded, prefilled or trained;
            `num_splits` of calls is then overridden.

    Raises ValueError for another number, TypeError for what is no integer, and RuntimeError where the kernels were
    built before there were levels.

    Example:
        >>> from flash_attn import set_batch_invariant
        >>> set_batch_invariant(1)
        >>> get_batch_invariant()
        1
        >>> set_batch_invariant(0)
    """
    invariance.set_level(level)


def get_batch_invariant() -> int:
    """The level of batch invariance in force: 0, 1 or 2. See `set_batch_invariant`.

    >>> from flash_attn import get_batch_invariant
    >>> get_batch_invariant()
    0
    """
    return invariance.level()


@contextlib.contextmanager
def batch_invariant(level: int = 1) -> Iterator[None]:
    """A context with a level of batch invariance, for the whole process; the level before it comes back at its end.

    Contexts of several threads must not overlap: one would end with the level of another.

    Arguments:
        level: as for `set_batch_invariant`.

    Raises what that raises.

    Example:
        >>> from flash_attn import batch_invariant
        >>> with batch_invariant(2):
        ...     get_batch_invariant()
        2
        >>> get_batch_invariant()
        0
    """
    with invariance.at_level(level):
        yield
