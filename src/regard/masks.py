"""Which keys a query sees: rules for `attention(mask=…)`, combined with ``&``, ``|`` and ``~``.

`Causal`, `Window`, `Lengths`, `Segments`, and `Boolean` for an array. In every rule True means that
the query attends to the key. Query i is at position i + offset and key j at position j, where
`offset` is an argument of the call; `Segments` and `Lengths` say what it counts from.
`rule.visible(queries, keys)` shows a rule as an array. For a rule of your own, derive from `Mask`
and define `block`.

>>> import numpy as np
>>> rule = Causal() & ~Boolean(np.eye(3, dtype=bool))
>>> rule.visible(3, 3).astype(int)
array([[0, 0, 0],
       [1, 0, 0],
       [1, 1, 0]])
"""

# How rules combine is in rules/visibility.py.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary import answering
from regard.boundary.arguments import as_int, as_integers, check_lead
from regard.boundary.cached import cached_property
from regard.errors import OptionError, ShapeError
from regard.rules.visibility import Block, Boolean, Mask, Texts, Verdict

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

ROWS = "integers in rows of equal length"

__all__ = ["Boolean", "Causal", "Lengths", "Mask", "Segments", "Verdict", "Window"]


def __dir__() -> list[str]:
    return __all__


@answering
@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """Query i sees key j only if j ≤ i + offset: nothing later than itself.

    Examples
    --------
    >>> Causal().visible(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]])
    """

    name = "causal"

    @property
    def uses_position(self) -> bool:
        return True

    def block(self, at: Block) -> Bools:
        return np.asarray(np.arange(at.shape[-1]) <= at.positions)

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        return f"key {key} {'≤' if visible else '>'} position {at.positions[0, 0]}"


@answering
@dataclass(frozen=True, eq=False)
class Window(Mask):
    """Query i sees keys from i + offset − left to i + offset + right, both included.

    Parameters
    ----------
    left, right : int or None
        How many keys to either side, the query's own position always inside; None: unbounded.

    Examples
    --------
    >>> Window(1, 0).visible(3, 3).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
    """

    left: int | None
    right: int | None
    name = "window"

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            value = getattr(self, side)
            if value is not None:
                value = as_int(f"window {side}", value, 0, ", or None for unbounded")
                object.__setattr__(self, side, value)

    @property
    def uses_position(self) -> bool:
        return self.left is not None or self.right is not None

    def block(self, at: Block) -> Bools:
        distance = np.arange(at.shape[-1]) - at.positions
        cells = np.ones(distance.shape, dtype=np.bool_)
        if self.left is not None:
            cells &= distance >= -self.left
        if self.right is not None:
            cells &= distance <= self.right
        return cells

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        position = int(at.positions[0, 0])
        first = "…" if self.left is None else str(position - self.left)
        last = "…" if self.right is None else str(position + self.right)
        return f"key {key} is {'inside' if visible else 'outside'} {first} to {last}"


@answering
@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Only the first `lengths` keys are visible; the rest is padding.

    With ``offset="end"`` the last query is at the last of them: query i is at i + lengths − L.

    Parameters
    ----------
    lengths : int or array_like of int
        One length per batch element; broadcasts to the leading axes.

    Examples
    --------
    >>> Lengths(2).visible(1, 4)
    array([[ True,  True, False, False]])
    """

    lengths: Any
    name = "lengths"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", as_integers("lengths", self.lengths, ROWS))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        lead = self.lengths.shape
        return (*lead, 1, queries, keys) if lead else (queries, keys)

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        check_lead("lengths", self.lengths.shape, shape[:-3])
        if self.lengths.size and not 0 <= self.lengths.min() <= self.lengths.max() <= shape[-1]:
            raise OptionError(
                f"lengths must lie between 0 and the {shape[-1]} keys, but they run from "
                f"{self.lengths.min()} to {self.lengths.max()}"
            )

    def texts(self, shape: tuple[int, ...]) -> Texts:
        return super().texts(shape)._replace(high=self.lengths[..., None])

    def _length(self, at: Block) -> int:
        return int(np.broadcast_to(self.lengths, at.shape[:-3])[at.batch])

    def block(self, at: Block) -> Bools:
        return np.asarray(np.arange(at.shape[-1]) < self._length(at))[None]

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        return f"key {key} is {'among' if visible else 'after'} the first {self._length(at)}"


@answering
@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Query and key must belong to the same segment: several texts packed into one row.

    With an `offset`, each text is placed by itself, as if it were alone: with 0 its first query is
    at its first key, with "end" its last query at its last key, and a number is added to what 0
    gives. The rows of a text must then follow one another.

    Parameters
    ----------
    query, key : array_like of int
        The segment of each query (…, L) and of each key (…, S), 0 or more; `key` defaults to
        `query`.

    Examples
    --------
    >>> Segments([0, 0, 1]).visible(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])

    Two texts with more keys than queries, each causal up to its own end:

    >>> (Segments([0, 1, 1], [0, 0, 1, 1, 1]) & Causal()).visible(3, 5, offset="end").astype(int)
    array([[1, 1, 0, 0, 0],
           [0, 0, 1, 1, 0],
           [0, 0, 1, 1, 1]])
    """

    query: Any
    key: Any = None
    name = "segments"

    def __post_init__(self) -> None:
        key = self.query if self.key is None else self.key
        for field, side, value in (("query", "queries", self.query), ("key", "keys", key)):
            array = as_integers(f"segments of the {side}", value, ROWS)
            if array.ndim == 0:
                raise ShapeError(f"segments of the {side} must be an array, one per row")
            if array.size and array.min() < 0:
                raise OptionError(
                    f"segments of the {side} has {array.min()}; segments are numbered from 0. Give "
                    "padding a number of its own"
                )
            object.__setattr__(self, field, array)

    @classmethod
    def from_lengths(cls, query_lengths: Any, key_lengths: Any = None) -> Segments:
        """Texts one after the other, number 0, 1, 2, …, of so many queries and so many keys each.

        Parameters
        ----------
        query_lengths, key_lengths : array_like of int, (texts,)
            0 or more; `key_lengths` defaults to `query_lengths`.

        Examples
        --------
        >>> Segments.from_lengths([1, 2], [2, 3]).visible(3, 5).astype(int)
        array([[1, 1, 0, 0, 0],
               [0, 0, 1, 1, 1],
               [0, 0, 1, 1, 1]])
        """
        key_lengths = query_lengths if key_lengths is None else key_lengths
        given = {"query_lengths": query_lengths, "key_lengths": key_lengths}
        lengths = {name: as_integers(name, one, ROWS) for name, one in given.items()}
        for name, one in lengths.items():
            if one.ndim != 1:
                raise ShapeError(
                    f"{name} has {one.ndim} axes; it must be (texts,), one number each"
                )
            if one.size and one.min() < 0:
                raise OptionError(f"{name} has {one.min()}; a text has 0 rows or more")
        of_queries, of_keys = lengths.values()
        if of_queries.size != of_keys.size:
            raise ShapeError(
                f"query_lengths has {of_queries.size} texts but key_lengths has {of_keys.size}; "
                "they must match"
            )
        return cls(*(np.repeat(np.arange(one.size), one) for one in (of_queries, of_keys)))

    @property
    def has_segments(self) -> bool:
        return True

    def texts(self, shape: tuple[int, ...]) -> Texts:
        return self._texts

    @cached_property  # layers of a model have one mask
    def _texts(self) -> Texts:
        lead = np.broadcast_shapes(self.query.shape[:-1], self.key.shape[:-1])
        query, key = (np.broadcast_to(x, (*lead, x.shape[-1])) for x in (self.query, self.key))
        found = np.empty((4, *query.shape), np.int64)
        for batch in np.ndindex(*lead):
            own, first, last = _runs("queries", query[batch])
            theirs, low, high = _runs("keys", key[batch])
            order = np.argsort(theirs)
            place = np.searchsorted(theirs, own, sorter=order)
            # A text without keys is nowhere: it sees nothing.
            theirs, low, high = (
                np.append(x[order], other) for x, other in ((theirs, -1), (low, 0), (high, 0))
            )
            there = theirs[place] == own
            runs = np.stack([first, last, low[place] * there, high[place] * there])
            found[(slice(None), *batch)] = np.repeat(runs, last - first, axis=1)
        return Texts(*found)

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, query=self.query[..., rows])

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        lead = np.broadcast_shapes(self.query.shape[:-1], self.key.shape[:-1])
        return (*lead, 1, queries, keys) if lead else (queries, keys)

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        sizes = (("queries", self.query, shape[-2]), ("keys", self.key, shape[-1]))
        for side, array, size in sizes:
            if array.shape[-1] != size:
                raise ShapeError(
                    f"segments names {array.shape[-1]} {side} but there are {size}; "
                    "give one segment per row"
                )
            check_lead(f"segments of the {side}", array.shape[:-1], shape[:-3])

    def _at(self, at: Block) -> tuple[Ints, Ints]:
        """The segments of the block's rows and of all keys."""
        *lead, _, queries, keys = at.shape
        query, key = (
            np.broadcast_to(array, (*lead, size))[at.batch]
            for array, size in ((self.query, queries), (self.key, keys))
        )
        return query[at.rows], key

    def block(self, at: Block) -> Bools:
        query, key = self._at(at)
        return np.asarray(query[:, None] == key)

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        query, keys = self._at(at)
        return f"query in segment {query[0]}, key in segment {keys[key]}"


def _runs(side: str, segments: Ints) -> tuple[Ints, Ints, Ints]:
    """The number of each segment in a row, where it begins, and where it ends."""
    cuts = np.flatnonzero(segments[1:] != segments[:-1]) + 1
    starts = np.append([0], cuts)[: segments.size]
    stops = np.append(cuts, segments.size)[: segments.size]
    numbers = segments[starts]
    order = np.argsort(numbers, kind="stable")
    again = np.flatnonzero(numbers[order][1:] == numbers[order][:-1])
    if again.size:
        first, second = order[again[0] : again[0] + 2]
        raise OptionError(
            f"segments of the {side} has {numbers[first]} from {side} {starts[first]} and again "
            f"from {starts[second]}, but offset counts within each text; put the rows of a text "
            "side by side, or leave offset out where L = S"
        )
    return numbers, starts, stops
