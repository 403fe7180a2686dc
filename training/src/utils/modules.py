"""Helpers for modules."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """A block in which a module is in evaluation mode. Afterwards each submodule is in the mode that it had."""
    modes = {each: each.training for each in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes.items():
            each.training = mode
