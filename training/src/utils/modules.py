"""Helpers for modules."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn


def is_meta(module: nn.Module) -> bool:
    """Whether a module has parameters on the meta device: another process has their values."""
    return any(parameter.is_meta for parameter in module.parameters())


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], what: str, strict: bool) -> tuple[list, list]:
    """module.load_state_dict(weights, strict): names that are missing, and names that are not known.

    Raises ValueError, which begins with `what`, if they do not fit.
    """
    try:
        missing, unexpected = module.load_state_dict(weights, strict=strict)
    except RuntimeError as error:
        faults = [line.strip().rstrip(".") for line in str(error).splitlines()[1:]] or [str(error)]
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(f"{what} must have weights that fit the model, found: {'; '.join(faults[:3])}{more}") from None
    if len(missing) == len(module.state_dict()):
        raise ValueError(f"{what} must have weights of the model, found none: {', '.join(list(weights)[:3])}")
    return missing, unexpected


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
