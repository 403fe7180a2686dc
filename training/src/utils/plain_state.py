"""Nested state as JSON and tensors, and back, exactly.

    tree, tensors = encode({"step": 3, "betas": (0.9, 0.95), "scale": torch.tensor(2.0)})
    json.dumps(tree)                            # text that any program can read
    decode(tree, tensors)                       # equal to what was given, with the same types

What JSON has no form for is written as an object with one key that begins with "!": `{"!tuple": [0.9, 0.95]}`. Nothing
is pickled, so that reading a state runs no code; values of other types are refused with their place in the state.
"""

import base64
import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def encode(state: Any, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Returns (tree, tensors): `state` as values that JSON has, and its tensors by their place ("state.scale").

    Takes None, bool, int, float, str, bytes, tensors, NumPy arrays and numbers, dtypes and devices of torch, and lists,
    tuples, sets and mappings of these, whose keys are such values without tensors. NumPy numbers become Python's.
    Raises TypeError that names the place of a value of another type.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, name, tensors), tensors


def decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `encode` was given. Raises ValueError for a tag that is not known, KeyError without a tensor."""
    if isinstance(tree, list):
        return [decode(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    tag, value = next(iter(tree.items()), ("", None))
    if not (len(tree) == 1 and tag.startswith("!")):
        return {key: decode(each, tensors) for key, each in tree.items()}
    if tag not in _DECODERS:
        raise ValueError(f"the state has a value of the kind {tag!r}, expected one of {', '.join(_DECODERS)}")
    return _DECODERS[tag](value, tensors)


def tensor_names(tree: Any) -> list[str]:
    """The names of the tensors that `decode` needs."""
    if isinstance(tree, list):
        return [name for each in tree for name in tensor_names(each)]
    if not isinstance(tree, dict):
        return []
    if len(tree) == 1 and next(iter(tree)) in ("!tensor", "!array"):
        return list(tree.values())
    return tensor_names(list(tree.values()))


def _encode(x, place, tensors):
    if x is None or type(x) in (bool, int, str):
        return x
    if isinstance(x, np.generic):
        return _encode(x.item(), place, tensors)
    if type(x) is float:
        return x if math.isfinite(x) else {"!float": repr(x)}
    if type(x) is list or isinstance(x, collections.deque):
        return [_encode(each, f"{place}.{i}", tensors) for i, each in enumerate(x)]
    if isinstance(x, Mapping):
        return _encode_mapping(x, place, tensors)
    if type(x) is tuple or isinstance(x, torch.Size):
        return {"!tuple": [_encode(each, f"{place}.{i}", tensors) for i, each in enumerate(x)]}
    if type(x) is set:
        return {"!set": [_encode(each, place, tensors) for each in sorted(x, key=repr)]}
    if isinstance(x, bytes):
        return {"!bytes": base64.b64encode(x).decode()}
    if isinstance(x, torch.dtype):
        return {"!dtype": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"!device": str(x)}
    if isinstance(x, Tensor):
        return {"!tensor": _add(x.detach(), place, tensors)}
    if isinstance(x, np.ndarray) and x.dtype != object:
        return {"!array": _add(torch.from_numpy(np.ascontiguousarray(x)).reshape(x.shape), place, tensors)}
    raise TypeError(
        f"{place} must be plain data (numbers, text, bytes, tensors, and lists, tuples, sets and dicts of them) to be "
        f"saved, found {type(x).__module__}.{type(x).__qualname__}"
    )


def _encode_mapping(x, place, tensors):
    as_json = all(type(key) is str for key in x) and not any(key.startswith("!") for key in x)
    items = [(key, _encode(value, f"{place}.{key}", tensors)) for key, value in x.items()]
    if as_json:
        return dict(items)
    none: dict[str, Tensor] = {}
    pairs = [[_encode(key, f"the key {key!r} of {place}", none), value] for key, value in items]
    if none:
        raise TypeError(f"the keys of {place} must not be tensors to be saved")
    return {"!dict": pairs}


def _add(tensor, place, tensors):
    """Keep a tensor under a name that no other has: `a.b` may be a key, or a path."""
    name, n = place, 1
    while name in tensors:
        n += 1
        name = f"{place}#{n}"
    tensors[name] = tensor
    return name


_DECODERS = {
    "!float": lambda x, tensors: float(x),
    "!tuple": lambda x, tensors: tuple(decode(x, tensors)),
    "!set": lambda x, tensors: set(decode(x, tensors)),
    "!dict": lambda x, tensors: {decode(key, tensors): decode(value, tensors) for key, value in x},
    "!bytes": lambda x, tensors: base64.b64decode(x),
    "!dtype": lambda x, tensors: getattr(torch, x),
    "!device": lambda x, tensors: torch.device(x),
    "!tensor": lambda x, tensors: tensors[x],
    "!array": lambda x, tensors: tensors[x].numpy(),
}
