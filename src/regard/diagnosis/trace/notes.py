"""What the expressions of some code were while it ran: values, of what each was made, and where.

A value keeps its record while it is the same object and is not changed. Values may be
exchanged for others while the code runs. Must not know what the code should compute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.trace.rewrite import IN_PLACE, OPERATORS, Code, Node, updated

MOST_RECORDS = 30_000
MOST_NUMBERS = 2**16  # of one value
MOST_ALTOGETHER = 2**21
MOST_LEAVES = 300  # of a list

Exchange = Callable[..., Any]  # the value to go on with, of the value and the caller's frame


@dataclass(eq=False, slots=True)
class Record:
    """One value that one expression had, and those that it was made of."""

    number: int
    node: int
    value: Array  # float64
    kind: str  # of NumPy's dtype: f, i, u or b
    parents: tuple[Record, ...]
    owner: Any  # the object itself


class EndlessError(BaseException):
    """Exchanged values make a loop longer than it was; no `except Exception` keeps it going."""


class Notes:
    """The records of one run after the other of the same code."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.nodes: list[Node] = list(code.nodes)  # and those that libraries add
        self.instead: dict[int, Exchange] = {}  # by node; an operator's is another operator
        self.ran: dict[int, int] | None = None  # how often nodes ran while values were exchanged
        self.left = 0  # how often they may do so yet
        self._added: dict[tuple[int, str], int] = {}
        self.listening = False
        self.clear()

    def clear(self) -> None:
        """Forget what was noted."""
        self.records: list[Record] = []
        self.runs: dict[int, int] = {}  # how often each node ran
        self.first: dict[int, int] = {}  # the number of the record that was next when it did first
        self.kinds: dict[int, type] = {}  # of the last value of each node
        self.reads: dict[Record, list[int]] = {}  # the nodes that had a value again
        self.full = False
        self._numbers = 0
        self._last: dict[int, tuple[Record, ...]] = {}
        self._since: dict[int, int] = {}  # the number of the record after the last of each node
        self._owners: dict[int, Record] = {}
        self._same: dict[tuple[Any, ...], Record] = {}
        self._writes: list[Record] = []

    def names(self) -> dict[str, Callable[..., Any]]:
        """What rewritten code calls, by the names in it."""
        own = (self.note, self.operate, self.write, self.update, self.bind)
        return dict(zip(self.code.names(), own, strict=True))

    # --- what rewritten code calls -------------------------------------------------------------

    def note(self, node: int, value: Any) -> Any:
        """Take the value of an expression."""
        if node in self.instead:
            value = self.instead[node](value, sys._getframe(1))
        if self.ran is not None:
            self._count(node, self.ran)
        elif self.listening:
            kind = self.kinds[node] = type(value)
            self._ran(node)
            if kind is int or kind is bool or kind is str or value is None:
                self._last[node] = ()
            else:
                self.keep(node, value, self._parents(node))
        return value

    def operate(self, node: int, *operands: Any) -> Any:
        """Compute the value of an operator, or of the one in its place."""
        own = self.instead.get(node)
        value = OPERATORS[self.nodes[node].detail](*operands) if own is None else own(*operands)
        if self.ran is not None:
            self._count(node, self.ran)
        elif self.listening:
            self.kinds[node] = type(value)
            self._ran(node)
            self.keep(node, value, self._parents(node))
        return value

    def write(self, node: int, value: Any) -> None:
        """Take an object that a statement has changed."""
        if self.ran is not None:
            self._count(node, self.ran)
        elif self.listening:
            self._ran(node)
            self.keep(node, value, self._parents(node), written=True)

    def update(self, node: int, target: Any, value: Any, *index: Any) -> Any:
        """Compute an augmented assignment."""
        before = self._owners.get(id(target))
        own = self.instead.get(node)
        result = updated(
            IN_PLACE[self.nodes[node].detail] if own is None else own, target, value, *index
        )
        if self.ran is not None:
            self._count(node, self.ran)
        elif self.listening:
            self._ran(node)
            known = () if before is None or before.owner is not target else (before,)
            self.keep(node, result, (*known, *self._parents(node)), written=True)
        return result

    def bind(self, node: int, value: Any) -> bool:
        """Take what a loop has put into its names."""
        if self.listening:
            self.keep(node, value, self._parents(node))
        return True

    def within(self, line: int, text: str, value: Any, operands: Iterable[Any]) -> None:
        """Take a value that a library made inside the call on this line."""
        if not self.listening:
            return
        node = self._added.get((line, text))
        if node is None:
            self.nodes.append(Node(line, text, (), "Library"))
            node = self._added[line, text] = len(self.nodes) - 1
        own = (self._owners.get(id(one)) for one in leaves(list(operands)))
        self.keep(node, value, tuple(one for one in own if one is not None))

    def _ran(self, node: int) -> None:
        self.runs[node] = self.runs.get(node, 0) + 1
        self.first.setdefault(node, len(self.records))

    def last(self, node: int) -> tuple[Record, ...]:
        """The records of the last value of a node."""
        return self._last.get(node, ())

    def _count(self, node: int, ran: dict[int, int]) -> None:
        ran[node] = ran.get(node, 0) + 1
        self.left -= 1
        if self.left < 0:
            raise EndlessError

    # --- records -------------------------------------------------------------------------------

    def _parents(self, node: int) -> tuple[Record, ...]:
        return tuple(one for part in self.nodes[node].parts for one in self._last.get(part, ()))

    def keep(
        self, node: int, value: Any, parents: tuple[Record, ...], *, written: bool = False
    ) -> None:
        """Note a value, or each of a list."""
        since = max((self._since.get(part, 0) for part in self.nodes[node].parts), default=0)
        # What a library has called back has made its result, too.
        within = self.records[-1:] if self.nodes[node].kind == "Call" and since else []
        inner = tuple(one for one in within if one.number >= since)
        found = [self._record(node, one, parents, written, inner) for one in leaves(value)]
        got = tuple(one for one in found if one is not None)
        self._since[node] = len(self.records)
        # What has no numbers, such as a dictionary, passes on what it was made of.
        self._last[node] = got or (parents if isinstance(value, tuple | list | dict) else ())

    def _record(
        self,
        node: int,
        value: Any,
        parents: tuple[Record, ...],
        written: bool,
        inner: tuple[Record, ...],
    ) -> Record | None:
        own = numbers(value)
        if own is None or not 0 < own.size <= MOST_NUMBERS:
            return None
        kind, own = own.dtype.kind, np.array(own, float)
        known = self._owners.get(id(value))
        if known is not None and known.owner is value:
            if not written and np.array_equal(known.value, own, equal_nan=True):
                if len(again := self.reads.setdefault(known, [])) < MOST_LEAVES:
                    again.append(node)
                return known
            # Changed by a statement, or through a view of it.
            since = () if written else (w for w in self._writes if w.number > known.number)
            parents = (known, *(one for one in parents if one is not known), *since)
        parents = (*parents, *inner)
        content = (kind, np.sort(own, axis=None).tobytes()) if own.size > 1 else None
        if not parents:
            whole = (
                getattr(value, "base", None)
                if isinstance(value, np.ndarray)
                else getattr(value, "_base", None)
            )
            if id(whole) in self._owners:
                parents = (self._owners[id(whole)],)
            elif content in self._same:
                parents = (self._same[content],)
        if len(self.records) >= MOST_RECORDS or self._numbers > MOST_ALTOGETHER:
            self.full = True
            return None
        made = Record(len(self.records), node, own, kind, parents, value)
        self.records.append(made)
        self._numbers += own.size
        self._owners[id(value)] = made
        if content is not None:
            self._same[content] = made
        if written:
            self._writes.append(made)
        return made


def numbers(value: Any) -> Array | None:
    """A value as an array of numbers; None if it is none. What JAX batches has its axis first."""
    if isinstance(value, float | np.ndarray | np.generic):
        own = np.asarray(value)
    elif isinstance(value, int | str | bytes | type | None) or not hasattr(value, "dtype"):
        return None
    else:
        try:
            own = _foreign(value)
        except Exception:  # an array that is only traced has no numbers, others may be anything
            return None
    if own.dtype.kind == "c":
        return np.stack([own.real, own.imag], -1)
    if own.dtype.kind in "fiub":
        return own
    return own.astype(float) if own.dtype.name == "bfloat16" else None


def _foreign(value: Any) -> Array:
    if hasattr(value, "detach"):
        value = value.detach()
        if value.is_floating_point():
            value = value.double()
        return np.asarray(value.numpy())
    while hasattr(value, "primal"):  # of a gradient that JAX takes
        value = value.primal
    if hasattr(value, "batch_dim"):
        inner = _foreign(value.val)
        axis = value.batch_dim
        return np.moveaxis(inner, axis, 0) if isinstance(axis, int) else inner
    return np.asarray(value)


def leaves(value: Any) -> list[Any]:
    """The single values in lists, tuples and dictionaries."""
    return list(_leaves(value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value[:MOST_LEAVES]:
            yield from _leaves(one)
    else:
        yield value
