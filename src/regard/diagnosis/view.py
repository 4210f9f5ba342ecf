"""`TaskView`: the `t` of an adapter, which notes what is read of it.

Owns the value of every field. Must not know functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.given import FIELDS, GRADIENTS, SOFTCAP, WHOLE_WINDOW, Given
from regard.diagnosis.task import Task
from regard.errors import safe_text
from regard.positions import Rotary
from regard.rules.rotary import turned


class _Pair(tuple[int, int]):
    """The two sides of a window, which note whether the right one is read."""

    note: Callable[[str], None]

    @classmethod
    def noting(cls, sides: tuple[int, int], note: Callable[[str], None]) -> _Pair:
        own = cls(sides)
        own.note = note
        return own

    def __getitem__(self, place: Any) -> Any:
        if place not in (0, -2):
            self.note(WHOLE_WINDOW)
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[int]:
        self.note(WHOLE_WINDOW)
        return super().__iter__()


class TaskView:
    """The `t` of an adapter: the fields of one problem, as arrays of the function's library.

    Reading a field asks for it. `convert` makes an array of the library of one of NumPy.

    Examples
    --------
    >>> t = TaskView(Given("plain"))
    >>> t.query.shape, t.heads
    ((2, 2, 5, 4), 2)
    >>> sorted(reads_of(t))
    ['heads', 'query']
    """

    def __init__(
        self,
        given: Given,
        convert: Callable[[Array], Any] = np.array,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._given, self._convert = given, convert
        self._reads: set[str] = set()
        self._fields = dict(fields or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in FIELDS:
            names = ", ".join(FIELDS)
            raise AttributeError(f"t has no field {safe_text(name, 40)}; its fields are {names}")
        self._reads.add(name)
        if name not in self._fields:
            self._fields[name] = _converted(field_of(self._given, name), self._convert)
        if name == "window":
            return _Pair.noting(self._fields[name], self._reads.add)
        return self._fields[name]

    def __dir__(self) -> list[str]:
        return list(FIELDS)


def reads_of(view: TaskView) -> frozenset[str]:
    """The fields that were read of a view."""
    return frozenset(view._reads)


def changed_in(view: TaskView, as_numpy: Callable[[Any], Array]) -> tuple[str, ...]:
    """The fields whose arrays are no longer as they were handed out."""
    return tuple(
        name
        for name, now in view._fields.items()
        for own, was in zip(_parts(now), _parts(field_of(view._given, name)), strict=True)
        if isinstance(was, np.ndarray) and not np.array_equal(as_numpy(own), was)
    )


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _converted(value: Any, convert: Callable[[Array], Any]) -> Any:
    if type(value) is tuple:
        return tuple(_converted(one, convert) for one in value)
    return convert(value) if isinstance(value, np.ndarray) else value


def field_of(given: Given, name: str) -> Any:
    """The value of one field; arrays are NumPy's."""
    own, (*_, rows, keys) = given.sizes, given.shape
    if name in GRADIENTS or name in ("grad_output", "sink"):
        return given.array(name)
    match name:
        case "heads" | "key_heads":
            return getattr(own, name)
        case "causal":
            return name in given.asks
        case "softcap":
            return SOFTCAP
        case "key_mask":
            return np.arange(keys) < given.lengths[:, None]
        case "rotary":
            angles = turned(given.positions[0], Rotary().frequencies_of(given.width, rows), 1.0)
            return tuple(np.asarray(one) for one in angles)
        case "past" if "embeddings" in given.fields:
            early = Task(given, given.fields | {"past"}).values
            return tuple(early[one][:, :, : own.past] for one in ("keys", "values"))
        case "past":
            return given.array("past key"), given.array("past value")
    return getattr(given, name)  # mask, lengths, scale, offset, window, positions
