"""Which noted values are which steps of the textbook, by their numbers alone.

A step is found where a value has all its numbers, in any layout, or where values that have nothing
else make it up: one head, row, chunk or token at a time. What a mechanism leaves free is left free:
a constant for each row of scores, the base of exp, the size of weights that are not yet divided,
what hidden cells hold. Must not know lines, nor mistakes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.probe import Probe
from regard.diagnosis.trace.notes import Record
from regard.textbook.steps import Step

NEAR = 5e-6  # how far a number may be from a step's, relative where that is larger than 1
LOW = 50.0  # a score so far below the lowest that is seen is hidden
NOTHING = 1e-9  # a weight below this is hidden
MOSTLY = 0.9  # of a step's numbers, which are then told from each other
MOST_AXES = 6  # of a value whose rows are looked at
# Between scores and weights there are several ways, which do not have these.
WITHIN_SOFTMAX = {"exponentials", "sink_exponential", "row_sums", "log_sums", "lse"}
# What is among the numbers of another step anyway.
SAME_AS_BEFORE = {"row_maximum", "shifted", "sink_shifted"}


@dataclass(frozen=True, eq=False)
class Sought:
    """A step with its value, and the cells that count."""

    name: str
    axes: tuple[str, ...]
    value: Array
    seen: Array | None  # the cells that count, where some are hidden
    kind: str  # given, plain, scores, exponentials, weights
    own: bool  # whether the result cannot do without it
    pure: bool = False  # whether a value that has more is another step

    @cached_property
    def needed(self) -> Array:
        """The numbers of the cells that count."""
        own = self.value.ravel() if self.seen is None else self.value[self.seen]
        return own[np.abs(own) > NOTHING] if self.kind in ("exponentials", "weights") else own

    @cached_property
    def forms(self) -> tuple[tuple[str, Array], ...]:
        """What numbers may be taken for the cells, (form of the value, value of the step)."""
        value = self.value
        if self.kind == "scores":
            seen = np.ones(value.shape, bool) if self.seen is None else self.seen
            own = np.where(seen, value, -np.inf)
            tops = np.nan_to_num(own.max(-1, keepdims=True), neginf=0.0)
            both = (("raw", own), ("shift", own - tops))
            return tuple((form, one * base) for base in (1.0, np.log2(np.e)) for form, one in both)
        if self.kind in ("exponentials", "weights"):
            tops = value.max(-1, keepdims=True)
            return ("raw", value), ("ratio", value / np.where(tops > 0, tops, 1.0))
        return (("raw", value),)


def sought(probe: Probe) -> dict[str, Sought]:
    """The steps of a probe that values are compared with, in their order."""
    found: dict[str, Sought] = {}
    data: set[str] = set()  # what depends on queries, keys, values or embeddings
    first = {"queries", "keys", "values", "embeddings", "context"}
    for step in probe.steps:
        value = np.asarray(probe.right[step.name])
        if (step.op == "given" and step.name in first) or data & step.reads:
            data.add(step.name)
        if value.dtype.kind != "f" or value.size < 2 or step.name in SAME_AS_BEFORE:
            continue
        found[step.name] = _sought(step, value, probe, step.name in data)
    return found


def _sought(step: Step, value: Array, probe: Probe, is_data: bool) -> Sought:
    axes = ("B", *step.axes) if value.ndim > len(step.axes) else step.axes
    kind = "given" if step.op == "given" else "plain"
    seen = None
    if step.axes == ("H", "L", "S") and probe.has_rules and step.phase == "forward":
        seen = np.broadcast_to(probe.visible, value.shape)
    if step.name == "exponentials" and probe.is_plain:
        kind = "exponentials"
    elif step.name == "weights":
        kind = "weights"
    elif step.name == "masked":
        kind = "scores"
    own = is_data and kind != "given" and step.name not in WITHIN_SOFTMAX
    # The column of a sink is beside the others.
    pure = kind not in ("given", "plain") and "sink" not in probe.inputs
    return Sought(step.name, axes, value, seen, kind, own, pure)


class Finder:
    """The values of a run, all numbers in one row, and where each value begins."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        sizes = np.array([one.value.size for one in records], int)
        self.ends = np.cumsum(sizes)
        self.starts = self.ends - sizes
        self.sizes = sizes
        self.is_float = np.array([one.kind == "f" for one in records], bool)

    @cached_property
    def _raw(self) -> Array:
        if not self.records:
            return np.zeros(0)
        return np.concatenate([one.value.ravel() for one in self.records])

    def numbers(self, form: str, axis: int) -> Array:
        """All numbers in one form along an axis; NaN where a value has no such axis."""
        if form == "raw":
            return self._raw
        key = (form, axis)
        if key not in self._formed:
            parts = [_formed(one.value, form, axis) for one in self.records]
            self._formed[key] = np.concatenate(parts) if parts else np.zeros(0)
        return self._formed[key]

    @cached_property
    def _formed(self) -> dict[tuple[str, int], Array]:
        return {}

    def find(self, step: Sought, among: Array | None = None) -> list[Record]:
        """The values that are a step, or those that make it up, in order; empty if it is not there.

        `among` says of each record whether it counts.
        """
        if step.needed.size < 2 or not np.isfinite(step.needed).all():
            return []
        if np.abs(step.needed).max() < NOTHING:
            return []
        whole: set[int] = set()
        parts: list[int] = []
        for cells, near, needed, pure in self._met_by(step, among):
            least = int(needed.sum())
            enough = self._hits(near) >= least
            large = map(int, np.flatnonzero(enough & pure if step.pure else enough))
            own = [one for one in large if self._holds(one, cells, near, needed)]
            whole |= {one for one in own if self._in_order(one, step, cells, near)}
            if not whole and not parts:
                parts = self._pieces(step, cells, near, needed, pure)
        return [self.records[one] for one in sorted(whole) or parts]

    def partly(self, step: Sought, among: Array) -> tuple[list[Record], float]:
        """The values that have nothing but numbers of a step, and which share of it they make."""
        best: tuple[list[Record], float] = [], 0.0
        for cells, near, needed, pure in self._met_by(step, among):
            held = np.zeros(step.value.size, bool)
            held[cells[near & np.repeat(pure, self.sizes)]] = True
            share = float(held[needed].mean())
            if share > best[1]:
                best = [self.records[int(one)] for one in np.flatnonzero(pure)], share
        return best

    def _met_by(
        self, step: Sought, among: Array | None
    ) -> Iterator[tuple[Array, Array, Array, Array]]:
        """How all numbers meet a step, in each form that is free.

        For each number the nearest cell and whether it is near; the cells that are needed; and
        for each value whether it has nothing else.
        """
        if not self.records:
            return
        counts = self.is_float if among is None else self.is_float & among
        deepest = max(one.value.ndim for one in self.records)
        for form, target in step.forms:
            for axis in range(1 if form == "raw" else min(deepest, MOST_AXES)):
                numbers = self.numbers(form, axis)
                cells, near, needed = _met(numbers, target, step)
                near &= np.repeat(counts, self.sizes)
                absent = _hidden(numbers, step.kind, target) | ~np.isfinite(numbers)
                pure = np.minimum.reduceat(near | absent, self.starts) & (self._hits(near) > 0)
                yield cells, near, needed, pure

    def _hits(self, near: Array) -> Array:
        return np.asarray(np.add.reduceat(near.astype(int), self.starts))

    def _holds(self, one: int, cells: Array, near: Array, needed: Array) -> bool:
        """Whether a value has all cells that are needed."""
        own = slice(self.starts[one], self.ends[one])
        held = np.zeros(len(needed), bool)
        held[cells[own][near[own]]] = True
        return bool(held[needed].all())

    def _pieces(
        self, step: Sought, cells: Array, near: Array, needed: Array, pure: Array
    ) -> list[int]:
        """The values that together make up a step."""
        held = np.zeros(len(needed), bool)
        held[cells[near & np.repeat(pure, self.sizes)]] = True
        if not held[needed].all():
            return []
        held[:] = False
        pieces = [int(one) for one in np.flatnonzero(pure)]
        pieces = [x for x in pieces if self.sizes[x] == 1 or self._in_order(x, step, cells, near)]
        nodes = set()  # those that have something new: maxima of scores are scores as well
        for one in pieces:
            own = slice(self.starts[one], self.ends[one])
            now = cells[own][near[own]]
            if not held[now].all():
                nodes.add(self.records[one].node)
            held[now] = True
        return [x for x in pieces if self.records[x].node in nodes] if held[needed].all() else []

    def _in_order(self, one: int, step: Sought, cells: Array, near: Array) -> bool:
        """Whether the cells of a value are laid out along its axes."""
        record = self.records[one]
        if record.value.ndim < 1 or step.kind == "given":
            return True
        own = slice(self.starts[one], self.ends[one])
        known = near[own] & _single(step)[cells[own]]
        return laid_out(
            cells[own].reshape(record.value.shape),
            known.reshape(record.value.shape),
            step.axes,
            step.value.shape,
        )

    def scrambled(self, steps: Iterable[Sought], among: Array) -> Iterator[tuple[Record, Sought]]:
        """Values with just the numbers of a step in an order that no layout has, in order."""
        found: dict[int, Sought] = {}
        fine: set[int] = set()
        for step in steps:
            if step.kind != "plain" or step.value.ndim < 3 or _single(step).mean() < MOSTLY:
                continue
            cells, near, needed = _met(self._raw, step.value, step)
            # Key heads may be there once for each head that shares them.
            alike = (self.sizes % step.value.size == 0) & among & self.is_float
            alike &= (self.sizes == step.value.size) | (step.axes[-3:-2] == ("G",))
            alike &= self._hits(near) == self.sizes
            for one in map(int, np.flatnonzero(alike)):
                if not self._holds(one, cells, near, needed):
                    continue
                if self._in_order(one, step, cells, near):
                    fine.add(one)
                else:
                    found.setdefault(one, step)
        for one in sorted(set(found) - fine):
            yield self.records[one], found[one]

    def explained(self, step: Sought) -> Array:
        """Whether all numbers of each record are those of a step."""
        if not len(self.starts):
            return np.zeros(0, bool)
        _, near, _ = _met(self._raw, step.value, step)
        pure = np.minimum.reduceat(near | _hidden(self._raw, step.kind, step.value), self.starts)
        return np.asarray(pure & (self._hits(near) > 0) & self.is_float)


def _single(step: Sought) -> Array:
    """The cells whose number no other cell has."""
    flat = step.value.ravel()
    order = np.argsort(flat, kind="stable")
    own = flat[order]
    gap = np.diff(own, prepend=-np.inf, append=np.inf)
    with np.errstate(invalid="ignore"):
        alone = np.minimum(gap[:-1], gap[1:]) > 4 * NEAR * np.maximum(1, np.abs(own))
    single = np.zeros(len(flat), bool)
    single[order] = alone
    return single


def _met(numbers: Array, target: Array, step: Sought) -> tuple[Array, Array, Array]:
    """For each number the cell of the nearest one, whether it is near, and the cells needed."""
    flat = target.ravel()
    told = np.isfinite(flat)
    if step.kind in ("exponentials", "weights"):
        told &= np.abs(flat) > NOTHING
    needed = told if step.seen is None else told & step.seen.ravel()
    # Equal numbers are one cell.
    order = np.flatnonzero(told)
    order = order[np.lexsort((~needed[order], flat[order]))]
    values = flat[order]
    if not len(values):
        return np.zeros(len(numbers), int), np.zeros(len(numbers), bool), needed
    with np.errstate(invalid="ignore"):
        right = np.clip(np.searchsorted(values, numbers), 0, len(values) - 1)
        left = np.maximum(right - 1, 0)
        nearer = np.abs(values[left] - numbers) <= np.abs(values[right] - numbers)
        place = np.where(nearer, left, right)
        near = np.abs(values[place] - numbers) <= NEAR * np.maximum(1, np.abs(values[place]))
    # A cell that has the number of another one is held where that is.
    same = np.diff(values, prepend=-np.inf) <= NEAR * np.maximum(1, np.abs(values))
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(values))))
    needed = needed.copy()
    needed[order[same]] = False
    return order[first[place]], near, needed


def _hidden(numbers: Array, kind: str, target: Array) -> Array:
    """What hidden cells may hold."""
    with np.errstate(invalid="ignore"):
        if kind == "scores":
            return np.asarray(~(numbers >= target[np.isfinite(target)].min(initial=0) - LOW))
        if kind in ("exponentials", "weights"):
            return np.asarray(np.abs(np.nan_to_num(numbers)) <= NOTHING)
    return np.zeros(len(numbers), bool)


def _formed(value: Array, form: str, axis: int) -> Array:
    if value.ndim <= axis or value.shape[axis] < 2:  # of one number nothing is left
        return np.full(value.size, np.nan)
    with np.errstate(all="ignore"):
        top = np.max(np.where(np.isnan(value), -np.inf, value), axis=axis, keepdims=True)
        return np.asarray(value - top if form == "shift" else value / top).ravel()


def laid_out(cells: Array, known: Array, axes: Sequence[str], shape: Sequence[int]) -> bool:
    """Whether the cells of a step follow the axes of a value.

    Each axis of the step lies along one axis of the value, or is cut into the blocks of two. Axes
    may be joined, but not a cut one with another than the batch: that is a mere reshape.
    """
    if known.sum() < 2:
        return True
    places = np.unravel_index(cells, shape)
    along: dict[int, list[str]] = {}
    cuts: list[tuple[str, tuple[int, ...]]] = []
    for name, place, length in zip(axes, places, shape, strict=True):
        if length == 1:
            continue
        own = _axes_of(place, known)
        if own is None:
            return False
        for axis in own:
            along.setdefault(axis, []).append(name)
        if len(own) > 1 and len(name) > 1:
            return False  # heads that are split are another step's
        if len(own) > 1:
            cuts.append((name, own))
        if len(own) == 1 and (len(name) > 1 or name == "G") and not _rises(place, known, own[0]):
            return False  # features side by side have one order, and so have heads with one key
    return not any(set(along[axis]) - {name, "B"} for name, own in cuts for axis in own)


def _axes_of(place: Array, known: Array) -> tuple[int, ...] | None:
    """The axes of a value along which a place of a step changes: none, one or two; else None."""
    inner = [axis for axis in range(place.ndim) if place.shape[axis] > 1]
    for count in (0, 1, 2):
        for own in combinations(inner, count):
            table = _table(place, known, own)
            if table is None:
                continue
            if count < 2 or _adds_up(table):
                return own
    return None


def _table(place: Array, known: Array, axes: tuple[int, ...]) -> Array | None:
    """The place for each index of some axes, NaN where it is not known; None if it differs."""
    others = tuple(axis for axis in range(place.ndim) if axis not in axes)
    low = np.where(known, place, np.inf).min(axis=others)
    high = np.where(known, place, -np.inf).max(axis=others)
    some = known.any(axis=others)
    if not np.array_equal(low[some], high[some]):
        return None
    return np.where(some, low, np.nan)


def _adds_up(table: Array) -> bool:
    """Whether a table is a number of its row plus one of its column."""
    for one in (table, table.T):
        steps = np.diff(one, axis=0)
        for row in steps:
            own = row[~np.isnan(row)]
            if len(own) and (own != own[0]).any():
                return False
    return True


def _rises(place: Array, known: Array, axis: int) -> bool:
    table = _table(place, known, (axis,))
    own = table[~np.isnan(table)] if table is not None else np.zeros(0)
    return bool((np.diff(own) >= 0).all())


def downstream(records: Iterable[Record], of: Iterable[Record]) -> set[Record]:
    """The records that are made of any of these."""
    found = set(of)
    first = set(found)
    for one in records:
        if any(parent in found for parent in one.parents):
            found.add(one)
    return found - first


def upstream(of: Iterable[Record], until: Iterable[Record] = ()) -> set[Record]:
    """What records are made of, themselves included, without passing the last ones."""
    found: set[Record] = set()
    ends = set(until)
    waiting = [one for one in of if one not in ends]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting += [parent for parent in one.parents if parent not in ends]
    return found
