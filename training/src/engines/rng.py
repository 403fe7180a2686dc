"""The random states of this process: Python's, NumPy's, and torch's of the CPU and of the current GPU."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def collect() -> dict[str, Any]:
    """All random states, as plain data without tensors."""
    kind, keys, *rest = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": (kind, keys.tobytes(), *rest),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().numpy().tobytes()
    return states


def restore(states: dict[str, Any]) -> None:
    """Go back to states that `collect` returned; the state of a GPU stays as it is if either side has none."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["cuda"]))


@contextlib.contextmanager
def isolated() -> Iterator[dict[str, Any]]:
    """A block after which all random states are as before it; yields these states."""
    states = collect()
    try:
        yield states
    finally:
        restore(states)


def _tensor(states):
    return torch.frombuffer(bytearray(states), dtype=torch.uint8)
