"""The names along each axis, and how a reader points at a row, a column or a cell.

Owns unique labels, lookup and the words of a failed one. Must not know numbers.
"""

from __future__ import annotations

import difflib
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from regard.errors import DtypeError, LabelError, safe_text
from regard.textbook.steps import Step

Index = int | str
Batch = int | tuple[int, ...]

AXIS_NAMES = {
    "L": "query rows",
    "S": "keys",
    "D": "key features",
    "E": "value features",
    "M": "embedding features",
    "N": "context features",
    "F": "output features",
    "K": "key features",
    "U": "hidden features",
    "T": "buckets",
    "I": "inner features",
    "V": "vocabulary",
    "X": "different tokens",
    "HD": "packed features",
    "GD": "packed features",
    "GE": "packed features",
    "HE": "packed features",
}


def head_position(sizes: Mapping[str, int], head: int | None) -> int:
    """A query head, checked; 0 if not given."""
    heads = sizes.get("H", 1)
    number = 0 if head is None else as_index("head", head)
    if not 0 <= number < heads:
        are = "is one head" if heads == 1 else f"are {heads} heads"
        raise LabelError(f"there {are}, counted from 0; there is no head {number}")
    return number


def own_head(sizes: Mapping[str, int], step: Step, head: int) -> int | None:
    """The head of a step that a query head reads: of keys and values the key head it shares."""
    if "G" in step.axes:
        return head // (sizes["H"] // sizes["G"])
    return head if "H" in step.axes else None


def batch_position(lead: tuple[int, ...], batch: Batch | None) -> tuple[int, ...]:
    """An index into the leading axes, checked; the first element if not given."""
    if batch is None:
        return (0,) * len(lead)
    given = tuple(batch) if isinstance(batch, Iterable) else (batch,)
    at = tuple(as_index("batch", one) for one in given)
    if len(at) != len(lead) or any(not 0 <= one < size for one, size in zip(at, lead, strict=True)):
        raise LabelError(f"batch {at} is not an index into the leading axes {lead}")
    return at


def as_index(name: str, value: object) -> int:
    """A whole number by its kind; a boolean or 1.0 is none."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        wanted = "an int" if name != "batch" else "a tuple of ints"
        raise DtypeError(f"{name} must be {wanted}, not {safe_text(repr(value), 60)}") from None


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
        # One plain query has a label but no axis: its label may be given, without effect.
        alone = self.own.get("L", ()) if "L" not in self.sizes and len(axes) < 2 else ()
        if len(where) == len(axes) + 1 and where[0] in alone:
            where = where[1:]
        if len(where) != len(axes):
            names = ", ".join(AXIS_NAMES[axis] for axis in axes) or "it is one number"
            plural = "index" if len(axes) == 1 else "indices"
            after = " after the head" if len(axes) < len(step.axes) else ""
            raise LabelError(
                f"{step.name} needs {len(axes)} {plural}{after} ({names}), got {len(where)}"
            )
        return [self.position(axis, key) for axis, key in zip(axes, where, strict=True)]

    def position(self, axis: str, key: Index) -> int:
        """The position of a label along an axis; a number, if no label matches, counts from 0."""
        labels, what = self.along(axis), AXIS_NAMES[axis]
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
        if own.count(key) == 1:  # a given label comes before one made unique
            return own.index(key)
        if key in labels:
            return labels.index(key)
        if key in own:  # repeated, so the plain label names several
            several = [label for label, plain in zip(labels, own, strict=True) if plain == key]
            raise LabelError(
                f"{safe_text(key, 60)} names {len(several)} of the {AXIS_NAMES[axis]}: say "
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
