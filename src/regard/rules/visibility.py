"""Which keys a query sees: the base class of all mask rules, and their combinations.

Owns what a rule answers (the cells of a block, the verdict on one cell with its reason), arrays of
booleans, and ``&``, ``|`` and ``~``. The rules by position, length and segment are in
regard/masks.py. Must not know scores or kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from inspect import signature
from operator import and_, or_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np

from regard.boundary.arguments import as_int, as_offset, check_broadcast, read_array, spread
from regard.boundary.arrays import belongs_to
from regard.errors import DtypeError, OptionError, ShapeError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]
    Ints = NDArray[np.int64]


# What libraries add to a score to hide its key: −10 000, −1e9, the lowest of a dtype.
LOWEST = -1e4


class Block(NamedTuple):
    """Some rows of one head of one batch element: where a rule is asked."""

    shape: tuple[int, ...]  # (…, H, L, S) of the whole call
    batch: tuple[int, ...]  # index into the leading axes
    head: int
    rows: Ints  # the queries asked for
    query_positions: Ints  # (…, L) of the whole call

    @property
    def positions(self) -> Ints:
        """The position of each row, as a column."""
        return np.asarray(self.query_positions[self.batch][self.rows])[:, None]


class Placed(NamedTuple):
    """An `offset` of which positions were made already: that of each query, (…, L)."""

    query_positions: Ints


class Texts(NamedTuple):
    """The text of each query: rows `first` to `last` − 1, which read keys `low` to `high` − 1.

    Each array broadcasts to (…, L).
    """

    first: Ints
    last: Ints
    low: Ints
    high: Ints

    def within(self, other: Texts) -> Texts:
        """The rows and keys that both have."""
        return Texts(
            np.maximum(self.first, other.first),
            np.minimum(self.last, other.last),
            np.maximum(self.low, other.low),
            np.minimum(self.high, other.high),
        )


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
    """A rule that says which keys a query may see. Combine rules with ``&``, ``|`` and ``~``.

    A rule of your own is a subclass with a `name` and a `block`; the reference kernel computes it.
    """

    # NumPy must leave `array & mask` to __rand__ instead of combining cell by cell.
    __array_ufunc__ = None

    name: str

    @property
    def uses_position(self) -> bool:
        """Whether the rule compares positions, so that the call's offset matters."""
        return False

    @property
    def has_segments(self) -> bool:
        """Whether it holds texts apart, so that an offset counts within each."""
        return False

    def texts(self, shape: tuple[int, ...]) -> Texts:
        """The text of each query in a call of scores (…, H, L, S): all rows and keys.

        A rule that packs several texts into one row, or cuts a text short, says so here.
        """
        start, queries, keys = map(np.asarray, (0, *shape[-2:]))
        return Texts(start, queries, start, keys)

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        """Raise unless the rule fits a call of scores (…, H, L, S), shown with `ndim` axes."""

    def block(self, at: Block) -> Bools:
        """The visible cells of one block, broadcastable to (rows, S)."""
        raise NotImplementedError

    def verdict(self, at: Block, key: int) -> Verdict:
        """What the rule says about key `key` and the block's first row."""
        visible = bool(self.block(at)[0, key])
        return Verdict(self.name, visible, self._detail(at, key, visible))

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        """Why the key is visible or hidden; a rule of the user's own need not say more."""
        return "visible" if visible else "hidden"

    def of_rows(self, rows: slice) -> Mask:
        """The rule for a contiguous slice of the rows."""
        return self

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        """The smallest shape that shows the whole rule."""
        return (queries, keys)

    def visible(
        self, queries: int, keys: int, *, offset: Ints | int | Literal["end"] | None = None
    ) -> Bools:
        """The rule as an array, True where query i may see key j: (…, L, S).

        Parameters
        ----------
        queries, keys : int
            How many there are: L and S.
        offset : int, (…) ints or "end", optional
            As for `attention`. None: query i is at position i.

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
        >>> from regard.masks import Causal
        >>> Causal().visible(2, 3, offset=1).astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        queries, keys = as_int("queries", queries, 0), as_int("keys", keys, 0)
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
        positions = query_positions(offset, self, full, used=self.uses_position)
        cells = np.empty(full, dtype=np.bool_)
        for *batch, head in np.ndindex(*full[:-2]):
            at = Block(full, tuple(batch), head, np.arange(queries), positions)
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
        return Not((self,))

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value; combine masks with &, | and ~, not and/or/not")


@dataclass(frozen=True, eq=False)
class Boolean(Mask):
    """An array of booleans, True = attend, broadcast by NumPy's rules to (…, H, L, S).

    Parameters
    ----------
    array : array_like of bool
        Read in place, one byte per cell; never copied, never expanded.
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
        array = self.array
        if type(array) is not np.ndarray:
            array = read_array(
                "mask",
                array,
                "booleans in rows of equal length",
                "its data, or ~array.mask if that is what you mean",
            )
        if array.dtype != np.bool_:
            raise DtypeError(
                f"mask must be boolean, True = attend, but has dtype {array.dtype}: "
                f"{_polarity_hint(array, self.array)}"
            )
        object.__setattr__(self, "array", array)

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, array=rows_of(self.array, rows))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        return tuple(np.broadcast_shapes(self.array.shape, (queries, keys)))

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        def or_lengths() -> str:
            padding = (
                self.array.shape[:-1] == shape[:-3] != ()
                and (self.array[..., :-1] >= self.array[..., 1:]).all()
            )
            return f" or regard.masks.Lengths({self.name}.sum(axis=-1))" if padding else ""

        check_broadcast(self.name, self.array.shape, shape, ndim, or_lengths)

    def block(self, at: Block) -> Bools:
        cells: Bools = np.broadcast_to(self.array, at.shape)[(*at.batch, at.head)]
        return cells[at.rows]

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        return f"{safe_text(self.name, 80)} is {visible} here"


def query_positions(offset: Any, rules: Mask | None, shape: tuple[int, ...], *, used: bool) -> Ints:
    """The position of each query, (…, L), in a call of scores (…, H, L, S); key j is at j.

    With an offset of 0 the first query of a text is at its first key, with "end" the last at its
    last, and a number is added to what 0 gives. None, or where positions are not `used`: query i
    is at i.
    """
    *lead, _, queries, _ = shape
    if isinstance(offset, Placed):
        return spread(offset.query_positions, (*lead, queries))
    rows = np.arange(queries)
    if offset is None:
        return spread(rows, (*lead, queries))
    at_end = isinstance(offset, str) and offset == "end"
    added = as_offset(0 if at_end else offset, tuple(lead))[..., None]
    if not used:
        return spread(rows, (*lead, queries))
    text = (Mask() if rules is None else rules).texts(shape)
    first = text.high - text.last if at_end else text.low - text.first
    return spread(rows + (first + added), (*lead, queries))


class LeftOut(Boolean):
    """The mask that `Explanation.without` adds."""

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        return "not left out" if visible else "left out by without()"


def rows_of(array: NDArray[Any], rows: slice) -> NDArray[Any]:
    """Some rows of an array that broadcasts to (…, L, S), as a view."""
    return array if array.ndim < 2 or array.shape[-2] == 1 else array[..., rows, :]


def _polarity_hint(array: NDArray[Any], value: Any) -> str:
    kind = array.dtype.kind
    if kind in "iu":
        return (
            "whether 1 means attend or ignore differs between libraries; "
            "pass mask == 1 or mask == 0, whichever you mean "
            "(in Hugging Face 1 means attend: mask.astype(bool))"
        )
    if kind == "f":
        added = "numbers to be added to the scores go to bias="
        if ((array == 0) | (array <= LOWEST)).all():
            return f"{added}; if 0 means attend and all others hide, pass mask=mask == 0"
        return added
    if belongs_to("pandas", value):
        return "pass mask.to_numpy(bool)"
    return "pass an array of booleans"


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

    def _detail(self, at: Block, key: int, visible: bool) -> str:
        return "the bias is not −inf here" if visible else "the bias is −inf here"


# --- combinations ---------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Combined(Mask):
    """Several rules as one."""

    parts: tuple[Mask, ...]
    sign: ClassVar[str]
    meaning: ClassVar[str]
    operation: ClassVar[Any]  # of two answers

    @property
    def uses_position(self) -> bool:
        return any(part.uses_position for part in self.parts)

    @property
    def has_segments(self) -> bool:
        return any(part.has_segments for part in self.parts)

    def texts(self, shape: tuple[int, ...]) -> Texts:
        if self.has_segments:
            raise OptionError(
                f"offset counts within each text, but segments in {safe_text(_spelled(self), 80)} "
                "are no condition by themselves; join them to the other rules with &, or leave "
                "offset out where L = S"
            )
        return super().texts(shape)

    def of_rows(self, rows: slice) -> Mask:
        return replace(self, parts=tuple(part.of_rows(rows) for part in self.parts))

    def natural_shape(self, queries: int, keys: int) -> tuple[int, ...]:
        return np.broadcast_shapes(*(part.natural_shape(queries, keys) for part in self.parts))

    def check(self, shape: tuple[int, ...], ndim: int) -> None:
        for part in self.parts:
            part.check(shape, ndim)

    def block(self, at: Block) -> Bools:
        return reduce(self.operation, (part.block(at) for part in self.parts))

    def verdict(self, at: Block, key: int) -> Verdict:
        parts = tuple(part.verdict(at, key) for part in self.parts)
        visible = reduce(self.operation, (part.visible for part in parts))
        return Verdict(self.name, visible, self.meaning, parts)


class All(Combined):
    """Visible where every part is visible (``&``)."""

    name, sign, meaning = "all of", " & ", "every rule must agree"
    operation = staticmethod(and_)

    def texts(self, shape: tuple[int, ...]) -> Texts:
        return reduce(Texts.within, (part.texts(shape) for part in self.parts))


class AnyOf(Combined):
    """Visible where at least one part is visible (``|``)."""

    name, sign, meaning = "any of", " | ", "one rule is enough"
    operation = staticmethod(or_)


class Not(Combined):
    """Visible where its one part is hidden (``~``)."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"not {_spelled(self.parts[0])}"

    def block(self, at: Block) -> Bools:
        return ~self.parts[0].block(at)

    def verdict(self, at: Block, key: int) -> Verdict:
        inner = self.parts[0].verdict(at, key)
        leaves = list(inner.leaves())
        detail = leaves[0].detail
        if len(leaves) > 1:
            detail = ", ".join(
                f"{leaf.rule} {'visible' if leaf.visible else 'hidden'} ({leaf.detail})"
                for leaf in leaves
            )
        return Verdict(self.name, not inner.visible, f"the opposite of: {detail}")


def _spelled(rule: Mask) -> str:
    if isinstance(rule, (All, AnyOf)):
        return f"({rule.sign.join(map(_spelled, rule.parts))})"
    return rule.name


def as_mask(value: Any) -> Mask:
    """The mask itself, or an array of booleans as `Boolean`."""
    if isinstance(value, Mask):
        return value
    if isinstance(value, type) and issubclass(value, Mask):
        call = f"{value.__name__}({', '.join(signature(value).parameters)})"
        raise DtypeError(f"mask is the class {value.__name__}, not a rule; pass {call}")
    if isinstance(value, str) and value == "causal":
        raise DtypeError("mask must be booleans or rules, not the text 'causal'; pass causal=True")
    if isinstance(value, (list, tuple)) and any(isinstance(part, Mask) for part in value):
        kind = "list" if isinstance(value, list) else "tuple"
        raise DtypeError(f"mask is a {kind} of rules; join them: first & second where both hold")
    return Boolean(value)


def all_of(rules: Sequence[Mask]) -> Mask | None:
    """The rules combined with ``&``; None if there are none."""
    return reduce(and_, rules) if rules else None


def _combine(first: Any, second: Any, kind: type[All] | type[AnyOf]) -> Mask:
    parts: list[Mask] = []
    for part in (as_mask(first), as_mask(second)):
        parts.extend(part.parts if isinstance(part, kind) else (part,))
    return kind(tuple(parts))
