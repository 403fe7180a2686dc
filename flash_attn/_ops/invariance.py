"""The level of batch invariance in force, of the whole process. `flash_attn.batch_invariance` is what users call.

Ops read the level when they run, so what is compiled or captured need not know it; code that torch.compile traces reads
`level`, and Dynamo guards the graph on its value.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence

import torch

from flash_attn import _library
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks

ENVIRONMENT = "FLASH_ATTENTION_BATCH_INVARIANT"
LEVELS = (0, 1, 2)
_ALIGNED = 8  # elements; of 16 bits, they are 16 bytes
_ALL = "the integer 0, 1 or 2"
_KERNELS = _library.library_path()  # the library, which this loads


def level() -> int:
    """The level in force: 0 none, 1 batch-invariant, 2 also invariant to chunks and equal in training and serving."""
    return _level


def set_level(value: int) -> None:
    """Put a level in force, in the kernel library and here."""
    global _level
    checks.integer("level", value, _ALL)
    checks.number("level", value, value in LEVELS, _ALL)
    if value == _level:
        return
    if torch.compiler.is_compiling():  # which would do it after all that the graph computes; so the graph ends here
        raise RuntimeError(f"level must be chosen outside of a graph, found a choice of {value} within one")
    _tell_kernels(int(value))
    _level = int(value)


@contextlib.contextmanager
def at_level(value: int) -> Iterator[None]:
    """A context with a level in force, for the whole process; the level before it comes back at its end."""
    before = _level
    set_level(value)
    try:
        yield
    finally:
        set_level(before)


def refuse_unkept(
    *,
    dropout_p: float | None = None,
    return_max_logit: bool = False,
    exact_gradients: bool = False,
    beyond_kernels: Sequence[str] = (),
) -> None:
    """Raise for a call of attention with one of these, for which level 2 cannot keep its promise where it is in force.

    Every such refusal is here, so that one list says what cannot be had.

    exact_gradients: with two key ranges of each row, whose results are merged before they are rounded, but after it
        in serving. beyond_kernels: what in this call kernels do not take, while they compute these rows in others.
    """
    if _level < 2:
        return
    at_level_2 = "where the level of batch invariance is 2, found"
    if dropout_p:
        raise ArgumentError(
            f"dropout_p must be 0 {at_level_2} {dropout_p}: what drops weights in training cannot equal what serves; "
            "set_batch_invariant(1) allows it"
        )
    if return_max_logit:
        raise ArgumentError(
            f"return_max_logit must be False {at_level_2} True: kernels that return the largest score round otherwise"
        )
    if exact_gradients:
        raise ArgumentError(
            f"flash_attn.precision must not use exact gradients with two key_ranges {at_level_2} them: serving merges "
            "the ranges after rounding"
        )
    if beyond_kernels:
        raise ArgumentError(
            f"attention must run in kernels {at_level_2} {' and '.join(beyond_kernels)}, which they do not take: they "
            "would compute the same rows in another call"
        )


def refuse_sums_of_many(processes: int, least: int = 2) -> None:
    """Raise from level `least` on for a sum over more than two processes: its order depends on how much is sent."""
    if _level >= least and processes > 2:
        raise NotImplementedError(
            "process_group must have at most 2 processes that sum their parts of a result where the level of batch "
            f"invariance is {_level}, found {processes}: the order of a sum depends on the size of the message"
        )


def refuse_ragged(name: str, columns: int) -> None:
    """Raise for rows of which kernels add other columns together in each row, as that is where accesses are aligned."""
    if _level and columns % _ALIGNED:
        raise NotImplementedError(
            f"{name} must have a multiple of {_ALIGNED} columns where the level of batch invariance is {_level}, found "
            f"{columns}"
        )


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x (..., columns), or a copy of it whose rows all begin where kernels can read 16 bytes at once.

    In rows that begin elsewhere, kernels add other columns together. A graph does not tell where a tensor begins: there
    it is always a copy.
    """
    if not torch.compiler.is_compiling():
        steps = x.storage_offset(), *x.stride()[:-1]
        if x.stride(-1) == 1 and not any(step % _ALIGNED for step in steps):
            return x
    columns = x.shape[-1]
    # More than nothing in each row, since compilers take what pads by nothing for the tensor itself.
    return torch.nn.functional.pad(x.contiguous(), (0, _ALIGNED - columns % _ALIGNED))[..., :columns]


def refuse_angles_of_length(found: str) -> None:
    """Raise for rotary embeddings of a batch, or of a cache, whose angles or scales depend on its length."""
    if _level:
        raise NotImplementedError(
            "rotary embeddings must have angles and scales that do not depend on the length of a sequence where the "
            f"level of batch invariance is {_level}, found {found}: a token would get others in a longer batch or cache"
        )


def refuse_convolutions(name: str) -> None:
    """Raise at level 2 for convolutions over tokens, whose order of sums libraries choose by the batch."""
    if _level == 2:
        raise NotImplementedError(f"{name} must be False where the level of batch invariance is 2, found True")


def refuse_torch_attention() -> None:
    """Raise for attention by torch's own products, whose order of sums depends on the batch."""
    if _level:
        raise NotImplementedError(
            f"use_flash_attn must be True where the level of batch invariance is {_level}, found False"
        )


def refuse_masks_of_batches(query: torch.Tensor, moves_tokens: bool = False) -> None:
    """Raise for a mask with which a row is computed otherwise than in a batch without it.

    On a GPU that is any: kernels compute rows without ranges otherwise. On the CPU it is one with padding or other
    sequences before tokens, since blocks of keys are counted from the first one.
    """
    if not _level:
        return
    if moves_tokens:
        where = ""
        found = "tokens that padding or packing moves, within a sequence or beside chunks, sinks or a bias"
    elif _library.is_where_kernels_run(query):
        where, found = " on a GPU", "another mask, padding beside a bias, or padding in a compiled model"
    else:
        return
    raise NotImplementedError(
        "attention_mask must hide nothing but padding before or after each sequence, the future and what a window "
        f"leaves out, where the level of batch invariance is {_level}{where}, found {found}: pass sequences "
        "one by one, or on a CPU padded behind"
    )


def refuse_rolling_caches(dropped: int) -> None:
    """Raise at level 2 for a cache that has dropped its first keys: those left are counted from another one."""
    if _level == 2 and dropped:
        raise NotImplementedError(
            "past_key_values must hold all keys, also those that a window leaves out, where the level of batch "
            f"invariance is 2, found {dropped} keys dropped: use transformers.DynamicCache() without a config"
        )


def refusing(composite: Callable, least: int = 1) -> Callable:
    """Returns `composite`, an op in operations of torch, as a function that raises from level `least` on.

    The order of these operations depends on the shapes of the batch.
    """

    @functools.wraps(composite)
    def refused_in_force(*args):
        if _level >= least:
            raise NotImplementedError(
                "attention and layers must have no tangents and be in no transform of torch.func where the level of "
                f"batch invariance is {_level}, found one: call them within batch_invariant(0)"
            )
        return composite(*args)

    return refused_in_force


def _from_environment() -> int:
    value = os.environ.get(ENVIRONMENT, "").strip()
    if value not in ("", *map(str, LEVELS)):
        raise ValueError(f"the environment variable {ENVIRONMENT} must be 0, 1 or 2, found {value!r}")
    return int(value or 0)


def _tell_kernels(value: int) -> None:
    """Give a level to the planners of the kernels, if a library of them is loaded."""
    tell = getattr(torch.ops.flash_attn, "set_batch_invariant", None)
    if tell is not None:
        tell(value)
    elif _KERNELS is not None and value:
        raise RuntimeError(
            f"level must be 0 with the kernels of {_KERNELS}, found {value}: they were built before there was batch "
            "invariance. Build them again"
        )


_level = _from_environment()
if _level:
    _tell_kernels(_level)
