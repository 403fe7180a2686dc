"""What loading checkpoints has in common: pieces of files under a bar, and lists of names in errors."""

import contextlib
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from flash_attn.utils import pretrained

_LISTED = 20  # the most names of each kind in an error


def listed(what: str, names: Sequence[str]) -> str:
    """Lines of an error, empty without names."""
    if not names:
        return ""
    more = f"\n    and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"\n  {what}:" + "".join(f"\n    {name}" for name in names[:_LISTED]) + more


def wrong_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], made_of: Callable[[str], str] = lambda name: ""
) -> list[str]:
    """Lines of an error: the tensors of a wrong shape, then those that are not of floating-point numbers.

    made_of: name -> what is told about the tensors that it is made of, after a wrong shape.
    """
    both = [(name, tensor, expected[name]) for name, tensor in found.items() if name in expected]
    shapes = [
        f"{name}: expected {tuple(ours.shape)}, found {tuple(tensor.shape)}{made_of(name)}"
        for name, tensor, ours in both
        if tensor.shape != ours.shape
    ]
    return shapes + [
        f"{name}: expected a floating-point dtype, found {tensor.dtype}"
        for name, tensor, _ in both
        if not tensor.is_floating_point()
    ]


def pieces(files: Sequence[pathlib.Path], progress: bool) -> Iterator[dict[str, Tensor]]:
    """The tensors of files piece by piece, with a bar if it is wanted and there are several pieces."""
    sizes = [path.stat().st_size for path in files]
    with _bar(sum(sizes), progress and (len(files) > 1 or sum(sizes) > pretrained.PIECE)) as bar:
        for path in files:
            for piece in pretrained.pieces_of_file(path):
                size = sum(tensor.nbytes for tensor in piece.values())
                yield piece
                bar.update(size)


def _bar(size, is_wanted):
    """A progress bar of the bytes that are loaded; without the package tqdm, an object that shows nothing."""
    try:
        from tqdm import tqdm
    except ImportError:
        return contextlib.nullcontext(types.SimpleNamespace(update=lambda size: None))
    return tqdm(total=size, desc="loading", unit="B", unit_scale=True, disable=not is_wanted)
