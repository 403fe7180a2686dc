"""Between the names that two libraries give to the same parameters."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

Names = str | tuple[str, ...] | dict[str, int]


class KeyMap:
    """A table of names, read in both directions.

    Arguments:
        rows: (theirs, ours), each the name of a module, which stands for all its parameters, or of a parameter. Several
            names on a side are parts that are concatenated along the first dimension, in this order: a tuple of them
            if they have one size, else a dict with their shares.

    Names that are not in the table are the same in both.

    >>> keys = KeyMap([("norm", "ln"), (("q", "k"), "qk")])
    >>> ours = keys.to_ours({"norm.bias": torch.zeros(2), "q.bias": torch.ones(2), "k.bias": torch.ones(2)})
    >>> {name: len(tensor) for name, tensor in ours.items()}
    {'ln.bias': 2, 'qk.bias': 4}
    >>> list(keys.to_theirs(ours))
    ['norm.bias', 'q.bias', 'k.bias']
    """

    def __init__(self, rows: Iterable[tuple[Names, Names]]) -> None:
        self._rows = [(_shares(theirs), _shares(ours)) for theirs, ours in rows]

    def to_ours(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict with our names, of one with theirs. Raises ValueError where parts do not fit together."""
        return _translated(state_dict, self._rows)

    def to_theirs(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A state dict with their names, of one with ours: the inverse of `to_ours`."""
        return _translated(state_dict, [(ours, theirs) for theirs, ours in self._rows])


def _shares(names):
    if isinstance(names, dict):
        return names
    return dict.fromkeys((names,) if isinstance(names, str) else names, 1)


def _translated(state_dict, rows):
    """The state dict with the names on the right of the rows instead of those on the left."""
    row_of = {name: row for row in rows for name in row[0]}
    result, done = {}, set()
    for key, tensor in state_dict.items():
        name, ending = _split(key, row_of)
        if name not in row_of:
            result[key] = tensor
            continue
        sources, targets = ([part + ending for part in side] for side in row_of[name])
        if sources[0] not in done:
            done.add(sources[0])
            result |= zip(targets, _divided(_concatenated(sources, state_dict), row_of[name][1].values()), strict=True)
    return result


def _split(key, names):
    """(key, "") if the key is one of the names or its module is not, else (module, rest of the key)."""
    module, dot, parameter = key.rpartition(".")
    return (module, dot + parameter) if key not in names and module in names else (key, "")


def _concatenated(keys, state_dict):
    missing = [key for key in keys if key not in state_dict]
    if missing:
        there = ", ".join(key for key in keys if key in state_dict)
        raise ValueError(f"state_dict must have {', '.join(missing)} beside {there}, found no such key")
    tensors = [state_dict[key] for key in keys]
    if any(tensor.shape[1:] != tensors[0].shape[1:] for tensor in tensors):
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in zip(keys, tensors, strict=True))
        raise ValueError(f"what is concatenated must differ in the first dimension only, found {shapes}")
    return torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _divided(tensor, shares):
    unit = tensor.shape[0] // sum(shares) if tensor.dim() > 0 else 0
    return tensor.split([unit * share for share in shares]) if len(shares) > 1 else [tensor]
