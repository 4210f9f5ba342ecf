"""The names along each axis, and how a reader points at a row, a column or a cell.

Owns unique labels, lookup and the words of a failed one. Must not know numbers.
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from regard.errors import LabelError, safe_text
from regard.steps import Step

Index = int | str

_AXIS_NAMES = {
    "L": "query rows",
    "S": "keys",
    "D": "key features",
    "E": "value features",
    "M": "embedding features",
    "N": "context features",
    "F": "output features",
    "HD": "packed features",
    "GD": "packed features",
    "GE": "packed features",
    "HE": "packed features",
}


@dataclass(frozen=True)
class Labels:
    """Labels by axis letter, where there are any, over axes of known sizes."""

    own: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    _along: dict[str, tuple[str, ...]] = field(default_factory=dict, init=False, repr=False)

    def along(self, axis: str) -> tuple[str, ...]:
        """The labels along an axis, each one unique: a repeated token becomes ``the@3``."""
        if axis not in self._along:
            labels = self.own.get(axis)
            if labels is None:
                self._along[axis] = tuple(str(number) for number in range(self.sizes[axis]))
            else:
                self._along[axis] = _unique(labels)
        return self._along[axis]

    def cell(self, step: Step, index: tuple[int, ...]) -> tuple[str, ...]:
        """The labels of one cell; a head is named only where there are several."""
        names = []
        for axis, position in zip(step.axes, index, strict=True):
            if axis not in ("H", "G"):
                names.append(self.along(axis)[position])
            elif self.sizes[axis] > 1:
                names.append(f"{'head' if axis == 'H' else 'key head'} {position}")
        return tuple(names)

    def positions(self, step: Step, where: tuple[Index, ...]) -> list[int]:
        """Where a reader's labels or numbers point, one per axis after the head."""
        axes = [axis for axis in step.axes if axis not in ("H", "G")]
        if len(where) != len(axes):
            names = ", ".join(_AXIS_NAMES[axis] for axis in axes) or "it is one number"
            plural = "index" if len(axes) == 1 else "indices"
            raise LabelError(
                f"{step.name} needs {len(axes)} {plural} after the head ({names}), got {len(where)}"
            )
        return [self.position(axis, key) for axis, key in zip(axes, where, strict=True)]

    def position(self, axis: str, key: Index) -> int:
        """Where a label stands along an axis; a number, if no label matches, counts from 0."""
        labels, what = self.along(axis), _AXIS_NAMES[axis]
        if isinstance(key, str):
            named = self._named(axis, key)
            if named is not None:
                return named
            if not key.removeprefix("-").isdecimal():
                near = difflib.get_close_matches(key, labels, n=1)
                known = ", ".join(labels[:12]) + (", …" if len(labels) > 12 else "")
                hint = f"did you mean {near[0]}?" if near else f"there are {known}"
                raise LabelError(
                    f"{safe_text(key, 60)} is none of the {what}; {safe_text(hint, 300)}"
                )
        size = len(labels)
        try:
            number = int(key[:20]) if isinstance(key, str) else operator.index(key)
        except TypeError:
            raise LabelError(
                f"{safe_text(repr(key), 60)} is neither a label nor a position among the {what}"
            ) from None
        if not -size <= number < size:
            raise LabelError(
                f"there are {size} {what}, counted from 0; there is no {safe_text(key, 40)}"
            )
        return number % size

    def _named(self, axis: str, key: str) -> int | None:
        labels, own = self.along(axis), self.own.get(axis, ())
        if key in labels:
            return labels.index(key)
        if key in own:  # repeated, so the plain label names several
            several = [label for label, plain in zip(labels, own, strict=True) if plain == key]
            raise LabelError(
                f"{safe_text(key, 60)} names {len(several)} of the {_AXIS_NAMES[axis]}: say "
                + " or ".join(safe_text(label, 60) for label in several)
            )
        plain, at, number = key.rpartition("@")
        if at and number.isdecimal() and int(number) < len(own) and own[int(number)] == plain:
            return int(number)
        return None


def _unique(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Positions behind the labels that are not unique, until all are."""
    unique = tuple(labels)
    while len(times := Counter(unique)) < len(unique):
        unique = tuple(
            label if times[label] == 1 else f"{label}@{position}"
            for position, label in enumerate(unique)
        )
    return unique
