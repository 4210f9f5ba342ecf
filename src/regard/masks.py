"""Which key a query may see: rules that compose and are never materialised unless asked.

Owns the rules (`Boolean`, `Causal`, `Window`, `Lengths`, `Segments`), their combination with
``&``, ``|`` and ``~``, and the verdict of each rule on one cell. Must not know scores, kernels or
what is done with a hidden key. In every rule True means: the query attends to the key.

Positions: query i stands at position i + offset, key j at position j. The offset belongs to the
call, not to the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from regard.boundary.arrays import as_numpy
from regard.errors import DtypeError, OptionError, ShapeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]

__all__ = ["Boolean", "Causal", "Lengths", "Mask", "Segments", "Verdict", "Window"]


class Block(NamedTuple):
    """Some rows of one head of one batch element: where a rule is asked."""

    shape: tuple[int, ...]  # (…, H, L, S) of the whole call
    batch: tuple[int, ...]  # index into the leading axes
    head: int
    rows: Ints  # the queries asked for
    offset: int  # query i stands at position i + offset


class Verdict(NamedTuple):
    """What one rule says about one cell, and why."""

    rule: str
    visible: bool
    detail: str
    parts: tuple[Verdict, ...] = ()

    def hidden_by(self) -> tuple[str, ...]:
        """The names of the rules that hide this cell; empty when it is visible."""
        if self.visible:
            return ()
        names = [name for part in self.parts for name in part.hidden_by()]
        return tuple(dict.fromkeys(names)) or (self.rule,)

    def leaves(self) -> Iterator[Verdict]:
        """This verdict's elementary rules, in the order in which they were combined."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()


class Mask:
    """A rule that says which keys a query may see. Combine rules with ``&``, ``|`` and ``~``."""

    # NumPy must leave `array & mask` to __rand__ instead of combining cell by cell.
    __array_ufunc__ = None

    name: str

    @property
    def uses_position(self) -> bool:
        """Whether the rule compares positions, so that the call's offset matters."""
        return False

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        """Raise unless the rule fits a call of scores (…, H, L, S), shown with `ndim` axes."""

    def block(self, at: Block) -> Bools:
        """The visible cells of one block, broadcastable to (rows, S)."""
        raise NotImplementedError

    def verdict(self, at: Block, key: int) -> Verdict:
        """What the rule says about key `key` and the block's first row."""
        raise NotImplementedError

    def of_rows(self, rows: slice) -> Mask:
        """The rule of a call with these rows only, a run of them whose offset moves along."""
        return self

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        """The smallest shape that shows the whole rule."""
        return (queries, keys)

    def visible(self, queries: int, keys: int, *, offset: int | Literal["end"] = 0) -> Bools:
        """The rule as an array, True where query i may see key j: (…, L, S).

        Parameters
        ----------
        queries, keys : int
            How many there are: L and S.
        offset : int or "end"
            Query i stands at position i + offset; "end" is S − L.

        Returns
        -------
        ndarray of bool
            (L, S), with leading axes where the rule itself has them.

        Raises
        ------
        ShapeError, OptionError, DtypeError
            If the rule does not fit so many queries and keys, or an argument makes no sense.

        Examples
        --------
        >>> Causal().visible(2, 3, offset=1).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        queries, keys = _count("queries", queries), _count("keys", keys)
        position = _position(offset, queries, keys)
        try:
            shape = self.natural_shape(queries, keys)
        except ValueError:
            shape = ()
        if shape[-2:] != (queries, keys):
            raise ShapeError(
                f"{safe_text(self.name, 80)} does not fit {queries} queries and {keys} keys"
            )
        full = (1,) * max(0, 3 - len(shape)) + shape
        self.check(full, len(full))
        cells = np.empty(full, dtype=np.bool_)
        for *batch, head in np.ndindex(*full[:-2]):
            at = Block(full, tuple(batch), head, np.arange(queries), position)
            cells[(*batch, head)] = self.block(at)
        return cells.reshape(shape)

    def __and__(self, other: Any) -> Mask:
        return _combine(self, other, All)

    def __rand__(self, other: Any) -> Mask:
        return _combine(other, self, All)

    def __or__(self, other: Any) -> Mask:
        return _combine(self, other, AnyOf)

    def __ror__(self, other: Any) -> Mask:
        return _combine(other, self, AnyOf)

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with &, | and ~, not and/or/not")


def _count(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise DtypeError(f"{name} must be an int, not {safe_text(repr(value), 60)}")
    if value < 0:
        raise OptionError(f"{name} is {value}; it must be 0 or more")
    return int(value)


def _position(offset: Any, queries: int, keys: int) -> int:
    if isinstance(offset, str) and offset == "end":
        return keys - queries
    if isinstance(offset, (bool, np.bool_)) or not isinstance(offset, (int, np.integer)):
        raise DtypeError(f'offset must be an int or "end", not {safe_text(repr(offset), 60)}')
    if abs(int(offset)) >= 2**62:
        raise OptionError(f"offset {safe_text(offset, 60)} is beyond any position")
    return int(offset)


def plain_array(name: str, value: Any, wanted: str) -> NDArray[Any]:
    """What NumPy makes of a value; whatever keeps it from that is an error about the argument."""
    if isinstance(value, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a MaskedArray, whose mask would be lost; pass its data where that is meant"
        )
    try:
        return as_numpy(name, value)
    except (MemoryError, DtypeError):
        raise
    except Exception as error:
        ragged = isinstance(error, ValueError) and isinstance(value, (list, tuple))
        reason = "" if ragged else f": {safe_text(error, 120)}"
        raise DtypeError(f"{name} must be {wanted}{reason}") from None


def as_mask(value: Any) -> Mask:
    """A mask object as it is, an array as `Boolean`."""
    return value if isinstance(value, Mask) else Boolean(value)


def _combine(first: Any, second: Any, kind: type[All] | type[AnyOf]) -> Mask:
    parts: list[Mask] = []
    for part in (as_mask(first), as_mask(second)):
        parts.extend(part.parts if isinstance(part, kind) else (part,))
    return kind(tuple(parts))


@dataclass(frozen=True, eq=False)
class Boolean(Mask):
    """An array of booleans, True = attend, broadcast by NumPy's rules to (…, H, L, S).

    Parameters
    ----------
    array : array_like of bool
        Read as it stands, one byte per cell; never copied, never expanded.
    name : str
        What an explanation calls this rule.

    Raises
    ------
    DtypeError
        If the array holds anything but booleans: in integers and floats the polarity is a guess,
        and a float mask is a bias.

    Examples
    --------
    >>> Boolean([True, False], name="padding").visible(1, 2)
    array([[ True, False]])
    """

    array: Any
    name: str = "mask"

    def __post_init__(self) -> None:
        if isinstance(self.array, np.ma.MaskedArray):
            raise DtypeError(
                "mask is a MaskedArray, whose own mask would be lost; pass its data, "
                "or ~array.mask if that is what you mean"
            )
        array = plain_array("mask", self.array, "booleans in rows of equal length")
        if array.dtype != np.bool_:
            raise DtypeError(
                f"mask must be boolean, True = attend, but has dtype {array.dtype}: "
                f"{_polarity_hint(array)}"
            )
        object.__setattr__(self, "array", array)

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, array=rows_of(self.array, rows))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        return tuple(np.broadcast_shapes(self.array.shape, (queries, keys)))

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        check_broadcast(self.name, self.array.shape, shape, ndim)

    def block(self, at: Block) -> Bools:
        cells: Bools = np.broadcast_to(self.array, at.shape)[(*at.batch, at.head)]
        return cells[at.rows]

    def verdict(self, at: Block, key: int) -> Verdict:
        visible = bool(self.block(at)[0, key])
        return Verdict(self.name, visible, f"{safe_text(self.name, 80)} is {visible} here")


class LeftOut(Boolean):
    """Keys that a question takes away: had they not been there."""

    def verdict(self, at: Block, key: int) -> Verdict:
        visible = bool(self.block(at)[0, key])
        return Verdict(self.name, visible, "not left out" if visible else "left out by without()")


def _polarity_hint(array: NDArray[Any]) -> str:
    if array.dtype.kind in "iu":
        return (
            "whether 1 means attend or ignore differs between libraries; "
            "pass mask == 1 or mask == 0, whichever you mean"
        )
    if array.dtype.kind == "f":
        return "numbers to be added to the scores go to bias="
    return "pass an array of booleans"


def rows_of(array: NDArray[Any], rows: slice) -> NDArray[Any]:
    """What an array that broadcasts to (…, L, S) says of some rows, as a view."""
    return array if array.ndim < 2 or array.shape[-2] == 1 else array[..., rows, :]


def check_broadcast(
    name: str, given: tuple[int, ...], shape: tuple[int, ...], ndim: int | None = None
) -> None:
    """Raise unless `given` broadcasts by NumPy's rules *to* `shape` (of which `ndim` axes show)."""
    shown = shape if ndim is None else shape[len(shape) - ndim :]
    fits = len(given) <= len(shown) and all(
        size in (1, wanted) for size, wanted in zip(given[::-1], shown[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{safe_text(name, 80)} has shape {given}, which does not broadcast to {shown}; "
            "axes align from the right and each must be 1 or equal"
        )


def check_lead(name: str, given: tuple[int, ...], lead: tuple[int, ...]) -> None:
    """Raise unless what is said of batch elements fits the leading axes."""
    if given and not lead:
        raise ShapeError(
            f"{name} has shape {given}, one for each batch element, but there is no batch: three "
            "axes are (H, L, D); a batch needs a head axis: query[:, None]"
        )
    check_broadcast(name, given, lead)


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
        return np.asarray(np.arange(at.shape[-1]) <= (at.rows + at.offset)[:, None])

    def verdict(self, at: Block, key: int) -> Verdict:
        position = int(at.rows[0]) + at.offset
        visible = key <= position
        relation = "≤" if visible else ">"
        return Verdict(self.name, visible, f"key {key} {relation} position {position}")


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
            if value is None:
                continue
            if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                raise DtypeError(
                    f"window {side} must be an int or None (unbounded), not {type(value).__name__}"
                )
            if value < 0:
                raise OptionError(
                    f"window {side} is {value}; it counts keys and must be 0 or more, "
                    "None for unbounded"
                )
            object.__setattr__(self, side, int(value))

    @property
    def uses_position(self) -> bool:
        return self.left is not None or self.right is not None

    def block(self, at: Block) -> Bools:
        distance = np.arange(at.shape[-1]) - (at.rows + at.offset)[:, None]
        cells = np.ones(distance.shape, dtype=np.bool_)
        if self.left is not None:
            cells &= distance >= -self.left
        if self.right is not None:
            cells &= distance <= self.right
        return cells

    def verdict(self, at: Block, key: int) -> Verdict:
        position = int(at.rows[0]) + at.offset
        first = "…" if self.left is None else str(position - self.left)
        last = "…" if self.right is None else str(position + self.right)
        visible = bool(self.block(at)[0, key])
        where = "inside" if visible else "outside"
        return Verdict(self.name, visible, f"key {key} is {where} {first} to {last}")


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """Only the first so many keys are there; the rest is padding.

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
        object.__setattr__(self, "lengths", _integers("lengths", self.lengths))

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

    def _length(self, at: Block) -> int:
        return int(np.broadcast_to(self.lengths, at.shape[:-3])[at.batch])

    def block(self, at: Block) -> Bools:
        return np.asarray(np.arange(at.shape[-1]) < self._length(at))[None]

    def verdict(self, at: Block, key: int) -> Verdict:
        length = self._length(at)
        visible = key < length
        detail = f"key {key} is {'among' if visible else 'after'} the first {length}"
        return Verdict(self.name, visible, detail)


@dataclass(frozen=True, eq=False)
class Segments(Mask):
    """Query and key must belong to the same segment: several texts packed into one row.

    Parameters
    ----------
    query, key : array_like of int
        The segment of each query (…, L) and of each key (…, S); `key` defaults to `query`.

    Examples
    --------
    >>> Segments([0, 0, 1]).visible(3, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 0],
           [0, 0, 1]])
    """

    query: Any
    key: Any = None
    name = "segments"

    def __post_init__(self) -> None:
        query = _integers("segments of the queries", self.query)
        key = query if self.key is None else _integers("segments of the keys", self.key)
        for side, array in (("queries", query), ("keys", key)):
            if array.ndim == 0:
                raise ShapeError(f"segments of the {side} must be an array, one per row")
        object.__setattr__(self, "query", query)
        object.__setattr__(self, "key", key)

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

    def _of(self, array: Ints, at: Block, size: int) -> Ints:
        row: Ints = np.broadcast_to(array, (*at.shape[:-3], size))[at.batch]
        return row

    def block(self, at: Block) -> Bools:
        query = self._of(self.query, at, at.shape[-2])[at.rows]
        return np.asarray(query[:, None] == self._of(self.key, at, at.shape[-1]))

    def verdict(self, at: Block, key: int) -> Verdict:
        mine = int(self._of(self.query, at, at.shape[-2])[at.rows[0]])
        its = int(self._of(self.key, at, at.shape[-1])[key])
        return Verdict(self.name, mine == its, f"query in segment {mine}, key in segment {its}")


def _integers(name: str, value: Any) -> Ints:
    array = plain_array(name, value, "integers in rows of equal length")
    if array.dtype.kind not in "iu":
        raise DtypeError(f"{name} must be integers, but have dtype {array.dtype}")
    return array.astype(np.int64)


@dataclass(frozen=True, eq=False)
class AllowedByBias(Mask):
    """−inf in a bias hides a key exactly as False in a mask does; NaN does not."""

    bias: Any
    name = "bias −inf"

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, bias=rows_of(self.bias, rows))

    def block(self, at: Block) -> Bools:
        cells = np.broadcast_to(self.bias, at.shape)[(*at.batch, at.head)][at.rows]
        return np.asarray(cells != -np.inf)

    def verdict(self, at: Block, key: int) -> Verdict:
        visible = bool(self.block(at)[0, key])
        detail = "the bias is not −inf here" if visible else "the bias is −inf here"
        return Verdict(self.name, visible, detail)


@dataclass(frozen=True, eq=False)
class _Combined(Mask):
    parts: tuple[Mask, ...]

    @property
    def uses_position(self) -> bool:
        return any(part.uses_position for part in self.parts)

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, parts=tuple(part.of_rows(rows) for part in self.parts))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        return np.broadcast_shapes(*(part.natural_shape(queries, keys) for part in self.parts))

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        for part in self.parts:
            part.check(shape, ndim)


class All(_Combined):
    """Visible where every part says so (``&``)."""

    name = "all of"

    def block(self, at: Block) -> Bools:
        cells = self.parts[0].block(at)
        for part in self.parts[1:]:
            cells = cells & part.block(at)
        return cells

    def verdict(self, at: Block, key: int) -> Verdict:
        parts = tuple(part.verdict(at, key) for part in self.parts)
        return Verdict(self.name, all(p.visible for p in parts), "every rule must agree", parts)


class AnyOf(_Combined):
    """Visible where at least one part says so (``|``)."""

    name = "any of"

    def block(self, at: Block) -> Bools:
        cells = self.parts[0].block(at)
        for part in self.parts[1:]:
            cells = cells | part.block(at)
        return cells

    def verdict(self, at: Block, key: int) -> Verdict:
        parts = tuple(part.verdict(at, key) for part in self.parts)
        return Verdict(self.name, any(p.visible for p in parts), "one rule is enough", parts)


@dataclass(frozen=True, eq=False)
class Not(Mask):
    """Visible where the part is not (``~``)."""

    part: Mask

    @property
    def name(self) -> str:  # type: ignore[override]
        spelled = _spelled(self.part)
        return f"not ({spelled})" if isinstance(self.part, _Combined) else f"not {spelled}"

    @property
    def uses_position(self) -> bool:
        return self.part.uses_position

    def of_rows(self, rows: slice) -> Mask:
        return Not(self.part.of_rows(rows))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        return self.part.natural_shape(queries, keys)

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        self.part.check(shape, ndim)

    def block(self, at: Block) -> Bools:
        return ~self.part.block(at)

    def verdict(self, at: Block, key: int) -> Verdict:
        inner = self.part.verdict(at, key)
        leaves = list(inner.leaves())
        detail = leaves[0].detail
        if len(leaves) > 1:
            detail = ", ".join(
                f"{leaf.rule} {'visible' if leaf.visible else 'hidden'} ({leaf.detail})"
                for leaf in leaves
            )
        return Verdict(self.name, not inner.visible, f"the opposite of: {detail}")


def _spelled(mask: Mask) -> str:
    """A rule, or the rules that it combines, by name."""
    if not isinstance(mask, _Combined):
        return mask.name
    sign = " & " if isinstance(mask, All) else " | "
    return sign.join(
        f"({_spelled(part)})" if isinstance(part, _Combined) else _spelled(part)
        for part in mask.parts
    )
