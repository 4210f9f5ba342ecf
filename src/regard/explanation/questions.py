"""The answers to questions about a whole trace.

Owns statistics, comparison, the search for the first NaN and the check of stated
expectations. Reads an explanation block by block; must not know how it was made or is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.dataframe import Level, dataframe
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.explanation.derivation import Derivation, cell_name
from regard.explanation.labels import Batch, Index, own_head
from regard.explanation.notation import format_number
from regard.explanation.table import Table, aligned, shown_of
from regard.explanation.trace import Trace
from regard.problems.parts import Expectation
from regard.rules.visibility import LeftOut
from regard.textbook.steps import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class StepStatistics:
    """Statistics of one step; hidden cells are left out after masking."""

    mean: float
    variance: float  # of the population: divided by the number of cells
    minimum: float
    maximum: float
    cells: int


@dataclass(frozen=True)
class RowStatistics:
    """How each query spreads its weight; arrays (…, H, L) without the axes the call lacks.

    Entropy and effective keys use the weights as shares of their sum, which is less than 1 with
    a sink. A row without any weight has entropy 0, no effective key and no largest one.
    """

    entropy: Array  # in nats
    effective_keys: Array  # exp(entropy): as many keys with equal weights would spread as far
    largest_weight: Array
    largest_key: NDArray[np.int64]  # −1: none
    levels: Sequence[Level] = field(default=(), repr=False, compare=False)  # of a table's index

    def to_dataframe(self) -> Any:
        """A pandas DataFrame with one row for each query; OptionError if pandas is absent."""
        names = ("entropy", "effective_keys", "largest_weight", "largest_key")
        return dataframe({name: getattr(self, name).ravel() for name in names}, self.levels)


@dataclass(frozen=True, repr=False)
class Statistics:
    """Summary statistics: `.steps` by name and `.rows`."""

    steps: Mapping[str, StepStatistics]
    rows: RowStatistics

    def to_dataframe(self) -> Any:
        """The statistics of every step as a pandas DataFrame with one row for each."""
        columns = [one.name for one in fields(StepStatistics)]
        data = {name: [getattr(one, name) for one in self.steps.values()] for name in columns}
        return dataframe(data, [("step", list(self.steps))])

    def __repr__(self) -> str:
        lines: list[tuple[str, ...]] = [("step", "mean", "variance", "minimum", "maximum", "cells")]
        for name, one in self.steps.items():
            numbers = (one.mean, one.variance, one.minimum, one.maximum)
            lines.append((name, *(format_number(n, 6) for n in numbers), str(one.cells)))
        return f"{aligned(lines)}\n.rows: entropy, effective_keys, largest_weight, largest_key"


@dataclass(frozen=True, repr=False)
class Comparison:
    """The first step in which two explanations differ, and the first cell in which it does."""

    step: str
    index: tuple[int, ...]  # leading axes first
    labels: tuple[str, ...]
    difference: float  # the largest in the whole step
    here: Derivation
    there: Derivation
    only_here: tuple[str, ...] = ()  # forward steps that only one of them has
    only_there: tuple[str, ...] = ()
    weights: tuple[Table, Table] | None = None  # of two mechanisms: here and there

    def __repr__(self) -> str:
        cell = safe_text(cell_name(self.here.symbol, self.labels), 200)
        lines = [
            f"{self.step} is the first step that differs, by {self.difference:.3g} at most",
            f"{cell} = {self.here.value!r} here, {self.there.value!r} there",
        ]
        if self.weights is None:
            return "\n".join(lines)
        named = (("here", self.only_here), ("there", self.only_there))
        lines += [f"only {where}: {', '.join(names)}" for where, names in named if names]
        for where, table in zip(("here", "there"), self.weights, strict=True):
            place = f", {table.place}" if table.place else ""
            lines += [f"weights {where}  {table.formula}{place}", table.text()]
        return "\n".join(lines)


@dataclass(frozen=True)
class Mismatch:
    """A stated expectation that the computed numbers do not meet."""

    expectation: Expectation
    step: str
    what: Literal["value", "variance"]
    index: tuple[int, ...]  # head first, where the step has one; () for a variance
    labels: tuple[str, ...]
    expected: float
    got: float
    derivation: Derivation | None


def statistics(
    trace: Trace,
    head: int | None = None,
    batch: Batch | None = None,
    only: Container[str] | None = None,
) -> Statistics:
    """Statistics of every step that is more than one number, and of every row of weights.

    Over all heads and batch elements, or those of one query head and of one batch element. `only`:
    of these steps, which include the weights.
    """
    head = None if head is None else trace.head_index(head)
    at = None if batch is None else trace.batch_index(batch)
    names = [
        name
        for name, step in trace.steps.items()
        if step.axes and step.declared.op != "visible" and (only is None or name in only)
    ]
    moments = {name: _Moments() for name in names}
    rows = _Rows(trace)
    for name, block in _together(trace, names, head, at):
        moments[name].add(block)
        if name == "weights":
            rows.add(block)
    return Statistics({name: moments[name].result() for name in names}, rows.result(head, at))


class _Block(NamedTuple):
    """Some rows of one head of a step, and which of its cells count (None: all)."""

    batch: tuple[int, ...]
    head: int
    rows: range
    values: Array
    seen: Array | None


def _together(
    trace: Trace,
    names: Sequence[str],
    head: int | None = None,
    batch: tuple[int, ...] | None = None,
) -> Iterator[tuple[str, _Block]]:
    """Every block of every step: one place in all steps, then the next place.

    A step is made from the blocks of others at the same place, which are then still at hand.
    """
    every = (_blocks(trace, name, head, batch) for name in names)
    for blocks in itertools.zip_longest(*every):
        for name, block in zip(names, blocks, strict=True):
            if block is not None:
                yield name, block


def _blocks(
    trace: Trace,
    name: str,
    head: int | None = None,
    batch: tuple[int, ...] | None = None,
) -> Iterator[_Block]:
    """Every block of a step, or of one head or batch element, so that a long one is never whole."""
    source, step = trace.source, trace.steps[name]
    lead = step.shape[: len(step.shape) - len(step.axes)]
    heads = range(next((source.sizes[axis] for axis in step.axes if axis in ("H", "G")), 1))
    if head is not None:
        own = own_head(source.sizes, step.declared, trace.head_index(head)) or 0
        heads = heads[own : own + 1]
    row_blocks = source.row_blocks() if "L" in step.axes else [range(1)]
    every = itertools.product(*map(range, lead))
    for element in every if batch is None else [batch[: len(lead)]]:
        for at, rows in itertools.product(heads, row_blocks):
            seen = None
            if step.hides:
                seen = source.block("visible", element, at, rows)
            yield _Block(element, at, rows, source.block(name, element, at, rows), seen)


def step_statistics(trace: Trace, name: str, head: int | None = None) -> StepStatistics:
    """Statistics of one step or of one query head of it, over the visible cells."""
    moments = _Moments()
    for block in _blocks(trace, name, head):
        moments.add(block)
    return moments.result()


class _Moments:
    """Mean, variance, minimum and maximum of cells that come block by block."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self.minimum = self.maximum = np.nan

    def add(self, block: _Block) -> None:
        """Chan's update: means and squared deviations of blocks combine without cancellation."""
        cells = np.asarray(block.values if block.seen is None else block.values[block.seen]).ravel()
        if not cells.size:
            return
        with np.errstate(all="ignore"):
            low, high = float(cells.min()), float(cells.max())
            # Cells that are all alike have that mean, and no variance: adding would round.
            own = low if low == high else float(cells.mean())
            total = self.count + cells.size
            self.squares += float(((cells - own) ** 2).sum())
            if self.count and own != self.mean:
                delta = np.float64(own) - self.mean
                self.squares = float(self.squares + delta**2 * self.count * cells.size / total)
                # Not mean + delta·…: that would make NaN of an infinite mean.
                share = np.float64(self.count / total)
                self.mean = float(self.mean * share + own * (cells.size / total))
            else:
                self.mean = own
            if self.count:
                low = float(np.minimum(self.minimum, low))
                high = float(np.maximum(self.maximum, high))
            self.minimum, self.maximum = low, high
        self.count = total

    def result(self) -> StepStatistics:
        """What came together; NaN if nothing did."""
        if not self.count:
            return StepStatistics(np.nan, np.nan, np.nan, np.nan, 0)
        variance = self.squares / self.count
        return StepStatistics(self.mean, variance, self.minimum, self.maximum, self.count)


class _Rows:
    """How each row spreads its weight, block by block."""

    def __init__(self, trace: Trace) -> None:
        step = trace.steps["weights"]
        self.axes, shape, self.levels = step.axes, step.shape[:-1], step.levels()
        self.entropy, self.effective = np.zeros(shape), np.zeros(shape)
        self.largest, self.largest_key = np.zeros(shape), np.full(shape, -1, np.int64)

    def add(self, block: _Block) -> None:
        """The rows of one block of weights."""
        weights = block.values
        if not weights.shape[-1]:
            return
        at: tuple[Any, ...] = (*block.batch, *((block.head,) if "H" in self.axes else ()))
        if "L" in self.axes:
            at = (*at, slice(block.rows.start, block.rows.stop))
        with np.errstate(all="ignore"):
            total = weights.sum(axis=-1)
            self.entropy[at] = row_entropy(weights)
            self.effective[at] = np.where(total == 0, 0, np.exp(self.entropy[at]))
        self.largest[at] = weights.max(axis=-1)
        self.largest_key[at] = np.where(total == 0, -1, weights.argmax(axis=-1))

    def result(self, head: int | None, batch: tuple[int, ...] | None) -> RowStatistics:
        """All rows, or those of one head or batch element."""
        at: tuple[Any, ...] = (...,) if batch is None else batch
        if head is not None and "H" in self.axes:
            at = (*at, head, slice(None)) if "L" in self.axes else (*at, head)
        every = (self.entropy, self.effective, self.largest, self.largest_key)
        chosen = {"batch": batch, "head": head}
        levels = [one for one in self.levels if chosen.get(str(one[0]).split()[0]) is None]
        entropy, effective, largest, key = (np.asarray(array[at]) for array in every)
        return RowStatistics(entropy, effective, largest, key, levels)


def row_entropy(weights: Array) -> Array:
    """The entropy of every row of weights as shares of their sum, in nats.

    >>> row_entropy(np.array([[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]])).round(3)
    array([0.693, 0.   , 0.   ])
    """
    with np.errstate(all="ignore"):
        total = weights.sum(axis=-1)
        shares = weights / np.where(total == 0, 1, total)[..., None]
        logs = np.log(np.where(shares == 0, 1, shares))  # 0·ln 0 is 0
        # 0 − Σ…: a row with all its weight on one key has the entropy 0, not −0
        return np.asarray(0 - (shares * logs).sum(axis=-1))


def compare(here: Trace, there: Trace, tolerance: float) -> Comparison | None:
    """The first cell of the first step in which both have numbers that differ."""
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float, np.number)):
        raise DtypeError(f"tolerance must be a number, not {safe_text(repr(tolerance), 60)}")
    if not tolerance >= 0:
        raise OptionError(f"tolerance is {tolerance}; it must be 0 or more")
    for name in here.steps:
        if name not in there.steps:
            continue
        mine, theirs = here.steps[name].value, there.steps[name].value
        if mine.shape != theirs.shape:
            raise ShapeError(
                f"{name} has shape {mine.shape} here but {theirs.shape} there; "
                "only attentions of the same sizes can be compared"
            )
        with np.errstate(all="ignore"):
            size = np.abs(np.subtract(mine, theirs, dtype=np.float64))
            # NaN equals NaN, and each infinity itself.
            same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
        differs = ~(same | (size <= tolerance))
        if differs.any():
            at = tuple(int(n) for n in np.unravel_index(int(differs.argmax()), differs.shape))
            lead = len(at) - len(here.steps[name].axes)
            own, other = (one.derive(name, at[lead:], at[:lead]) for one in (here, there))
            found = Comparison(name, at, own.labels, float(size[differs].max()), own, other)
            return found if here.mechanism == there.mechanism else _beside(found, here, there)
    return None


def _beside(found: Comparison, here: Trace, there: Trace) -> Comparison:
    """The comparison of two mechanisms, with the weights of each where they differ first."""
    both = (here, there)
    steps = [[n for n, one in each.steps.items() if one.phase == "forward"] for each in both]
    only = [
        tuple(name for name in own if name not in other)
        for own, other in zip(steps, steps[::-1], strict=True)
    ]
    head = found.here.head or 0
    tables = []
    for each in both:
        step = each.steps["weights"]
        at, own = step.one(head, found.here.batch or None)
        shown = [row for row in shown_of(step.matrix_shape[0]) if row is not None]
        tables.append(step.excerpt(shown, own, at))
    return replace(found, only_here=only[0], only_there=only[1], weights=(tables[0], tables[1]))


def first_nonfinite(trace: Trace) -> Derivation | None:
    """The first cell, in the order of steps, that is NaN or infinite without saying "absent"."""
    names = [n for n, step in trace.steps.items() if step.declared.op != "visible"]
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for name, block in _together(trace, names):
        bad = ~np.isfinite(block.values)
        if name in found or not bad.any():
            continue
        step = trace.steps[name]
        if "visible" in trace.steps and "S" in step.axes:
            at = (block.batch, block.head, block.rows)
            bad = bad & _in_sight(trace, step.declared, *at)
        if step.declared.absent:
            bad = bad & (block.values != -np.inf)
        if bad.any():
            index = [int(n) for n in np.unravel_index(int(bad.argmax()), bad.shape)]
            if "L" in step.axes:
                index[0] += block.rows.start
            if {"H", "G"} & set(step.axes):
                index.insert(0, block.head)
            found[name] = (block.batch, tuple(index))
    for name in names:
        if name in found:
            return trace.derive(name, found[name][1], found[name][0])
    return None


def _in_sight(
    trace: Trace, step: Step, batch: tuple[int, ...], head: int, rows: range
) -> NDArray[np.bool_]:
    """Which cells of a block any query sees: of a score its own query, of a key or value any."""
    source = trace.source
    if step.axes[-1] == "S":
        return np.asarray(source.block("visible", batch, head, rows))
    heads, groups = source.sizes.get("H", 1), source.sizes.get("G", 1)
    shared = range(heads)
    if "G" in step.axes:
        shared = range(head * (heads // groups), (head + 1) * (heads // groups))
    seen = np.zeros(source.sizes["S"], dtype=np.bool_)
    for one, block in itertools.product(shared, source.row_blocks()):
        visible = source.block("visible", batch, one, block)
        seen |= visible.reshape(-1, seen.size).any(axis=0) if visible.size else False
    return seen[:, None]


def without(trace: Trace, key: Index) -> Trace:
    """The same attention with one key left out."""
    position = trace.names.position("S", key)
    keep = np.arange(trace.source.sizes["S"]) != position
    label = trace.names.along("S")[position]
    assert trace.rebuild is not None
    return trace.rebuild(LeftOut(keep, name=f'without "{label}"'))


def check(
    trace: Trace, expectations: Expectation | Sequence[Expectation] | None = None
) -> tuple[Mismatch, ...]:
    """The stated expectations that the numbers do not meet; those of the problem by default."""
    if expectations is None:
        expectations = trace.problem.expect if trace.problem else ()
    given = tuple(expectations) if isinstance(expectations, Iterable) else (expectations,)
    for one in given:
        if not isinstance(one, Expectation):
            raise DtypeError(f"expectations must be Expectation objects, not {type(one).__name__}")
    return tuple(found for one in given for found in _mismatches(trace, one))


def _mismatches(trace: Trace, expected: Expectation) -> Iterator[Mismatch]:
    """Every number of one expectation that did not come out."""
    step = trace.steps[expected.step]
    if expected.variance is not None:
        got = step_statistics(trace, expected.step, expected.head).variance
        if not _meets(expected, got, expected.variance):
            wanted = expected.variance
            yield Mismatch(expected, step.name, "variance", (), (), wanted, got, None)
    if expected.value is None:
        return
    if expected.at is not None:
        cell = stated_cell(trace, expected)
        wanted = float(np.asarray(expected.value))
        if not _meets(expected, cell.value, wanted):
            yield _mismatch(expected, cell, wanted)
        return
    ours = (
        step.value if expected.head is None else step.head(expected.head, trace.batch_index(None))
    )
    theirs = np.asarray(expected.value, dtype=np.float64)
    if theirs.shape != ours.shape:
        raise OptionError(
            f"expect.{step.name} has shape {theirs.shape} but {step.name} has {ours.shape}; "
            "they must match"
        )
    for at in np.ndindex(*ours.shape):
        if not _meets(expected, float(ours[at]), float(theirs[at])):
            lead, own = ours.ndim - len(step.axes), None
            if expected.head is not None:
                lead, own = 0, own_head(trace.source.sizes, step.declared, expected.head)
            index = at[lead:] if own is None else (own, *at)
            yield _mismatch(expected, trace.derive(step.name, index, at[:lead]), float(theirs[at]))


def stated_cell(trace: Trace, expected: Expectation) -> Derivation:
    """The cell that an expectation is about; in head 0 if it names none."""
    assert expected.at is not None
    batch = trace.batch_index(None)
    return trace.why(expected.step, *expected.at, head=expected.head or 0, batch=batch)


def _mismatch(expected: Expectation, cell: Derivation, wanted: float) -> Mismatch:
    return Mismatch(expected, cell.step, "value", cell.index, cell.labels, wanted, cell.value, cell)


def _meets(expected: Expectation, got: float, wanted: float) -> bool:
    if not (np.isfinite(got) and np.isfinite(wanted)):
        return got == wanted or bool(np.isnan(got) and np.isnan(wanted))
    return abs(got - wanted) <= expected.within + expected.relative * abs(wanted)
