"""The outputs of models: tuples of the values that are present, with names."""

import functools
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, ClassVar, TypeVar

from flash_attn._torch_private import register_pytree

Self = TypeVar("Self", bound="ModelOutput")


class ModelOutput(tuple[Any, ...]):
    """A tuple of the fields that are not None, which also has them as attributes and by their names.

    The classes that inherit from it annotate their fields in order. One of them may have the default None; where it is
    None, as a loss without labels, the tuple is without it: so it counts for neither an index, a slice, an iteration,
    `len` nor `keys`. This is what transformers calls a ModelOutput, except that iteration gives values, as unpacking
    needs it.

    The arguments are the fields, or one iterator, list or tuple of the values that are not None: thus torch,
    accelerate and transformers build a tuple again from another.

    Raises TypeError for fields that are missing or unknown.

    >>> class Example(ModelOutput):
    ...     loss: float | None = None
    ...     logits: str
    >>> output = Example(logits="x")
    >>> output, output[0], output.loss, output["logits"], list(output.keys())
    (Example(logits='x'), 'x', None, 'x', ['logits'])
    """

    __slots__ = ()
    _columns: ClassVar[tuple[str, ...]]
    _needed: ClassVar[tuple[str, ...]]  # without the one that may be None

    def __init_subclass__(cls) -> None:
        cls._columns = tuple(cls.__annotations__)
        cls._needed = tuple(name for name in cls._columns if name not in vars(cls))
        if len(cls._columns) - len(cls._needed) > 1:
            raise TypeError(f"at most one field of {cls.__name__} may have a default, found {cls._columns}")
        for name in cls._columns:
            setattr(cls, name, _field(name))
        register_pytree(cls, lambda output: (list(output), output._names()), functools.partial(_unflatten, cls))

    def __new__(cls: type[Self], *values: Any, **fields: Any) -> Self:
        if not fields and len(values) == 1 and isinstance(values[0], (tuple, list, Iterator)):
            values = tuple(values[0])
        if fields or len(values) != len(cls._needed):
            given = dict(zip(cls._columns, values)) | fields
            if len(given) != len(values) + len(fields) or not set(cls._needed) <= set(given) <= set(cls._columns):
                found = f"{len(values)} without a name and {', '.join(fields) or 'none by name'}"
                raise TypeError(f"the fields of {cls.__name__} must be {', '.join(cls._columns)}, found {found}")
            values = tuple(given[name] for name in cls._columns if name in cls._needed or given.get(name) is not None)
        return tuple.__new__(cls, values)

    def _names(self) -> tuple[str, ...]:
        """The names of the values in the tuple."""
        return self._columns if len(self) == len(self._columns) else self._needed

    def _asdict(self) -> dict[str, Any]:
        """The values that are present, as a dict by name."""
        return dict(zip(self._names(), self))

    def _replace(self: Self, **fields: Any) -> Self:
        """Another one, with other values of these fields."""
        return type(self)(**self._asdict() | fields)

    def keys(self) -> KeysView[str]:
        """The names of what is not None."""
        return self._asdict().keys()

    def values(self) -> ValuesView[Any]:
        """What is not None."""
        return self._asdict().values()

    def items(self) -> ItemsView[str, Any]:
        """(name, value) of what is not None."""
        return self._asdict().items()

    def get(self, name: str, default: Any = None) -> Any:
        """The value with this name, or the default if there is none."""
        return self._asdict().get(name, default)

    def to_tuple(self) -> tuple[Any, ...]:
        """A plain tuple of what is not None."""
        return tuple(self)

    def __getitem__(self, key: Any) -> Any:
        """By name, index or slice. Raises KeyError for a name that is None or unknown."""
        return self._asdict()[key] if isinstance(key, str) else tuple(self)[key]

    def __contains__(self, key: object) -> bool:
        """Whether there is something with this name; of anything else, whether it is one of the values."""
        return key in self._names() if isinstance(key, str) else tuple.__contains__(self, key)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"


def _field(name):
    # tuple(self)[i], here and above, since graphs of torch before 2.13 have no tuple.__getitem__.
    def value(self):
        names = self._names()
        return tuple(self)[names.index(name)] if name in names else None

    return property(value, doc=f"The field {name}.")


def _unflatten(cls, values, names):
    return tuple.__new__(cls, values)
