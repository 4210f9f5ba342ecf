"""One number and the numbers that made it.

Owns `Derivation` and how a declaration is read for one cell: which operands, grouped into which
terms, judged by which rules. Must not know kernels or how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from regard.compute.rules import Block, Mask, Verdict
from regard.errors import LabelError, safe_text
from regard.explanation.labels import Labels, as_index
from regard.explanation.notation import as_latex, as_numpy, as_text
from regard.textbook.steps import INDEX_MAPS, Ref, Step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


class Values(Protocol):
    """Where an explanation's numbers come from, block by block."""

    steps: dict[str, Step]
    sizes: dict[str, int]
    lead: tuple[int, ...]
    rules: Mask | None
    offset: NDArray[np.int64]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a step's whole value."""

    def value(self, name: str) -> Array:
        """A step's whole value."""

    def row(self, name: str, batch: tuple[int, ...], head: int, row: int) -> Array:
        """One row of a step."""

    def block(self, name: str, batch: tuple[int, ...], head: int, rows: range) -> Array:
        """Some rows of one head of a step."""

    def row_blocks(self) -> list[range]:
        """The rows cut into blocks."""


@dataclass(frozen=True, slots=True)
class Operand:
    """One cell that another cell is made of."""

    step: str
    symbol: str
    index: tuple[int, ...]  # within the batch element, head included
    labels: tuple[str, ...]
    value: float

    @property
    def name(self) -> str:
        """Such as ``P[she, likes]``."""
        return cell_name(self.symbol, self.labels)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand, or one candidate for a maximum: the operands whose product it is."""

    label: str
    operands: tuple[int, ...]  # positions in Derivation.operands
    value: float


@dataclass(frozen=True, repr=False)
class Derivation:
    """Why one cell has its value.

    `operands` are the cells it is made of; `terms` group them where the operation runs along an
    axis. `open(k)` derives operand k in turn. For the cell of a mask, `verdicts` holds what each
    rule says; `note` says in words what a formula cannot.
    """

    declared: Step
    batch: tuple[int, ...]
    index: tuple[int, ...]
    labels: tuple[str, ...]
    value: float
    operands: tuple[Operand, ...] = ()
    terms: tuple[Term, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    head: int | None = None  # what `why` takes as head: of a key head the first that reads it
    opener: Callable[[Operand], Derivation] | None = field(default=None, repr=False)

    @property
    def step(self) -> str:
        """The name of the step that the cell belongs to."""
        return self.declared.name

    @property
    def symbol(self) -> str:
        """The symbol of that step."""
        return self.declared.symbol

    @property
    def op(self) -> str:
        """The operation that made the cell."""
        return self.declared.op

    @property
    def name(self) -> str:
        """Such as ``O[she, 2]``."""
        return cell_name(self.symbol, self.labels)

    @property
    def note(self) -> str:
        """Which rules hide the cell, if any do."""
        names = [name for verdict in self.verdicts for name in verdict.hidden_by()]
        return "hidden by: " + ", ".join(safe_text(name, 80) for name in names) if names else ""

    def open(self, operand: int) -> Derivation:
        """The derivation of one operand."""
        operand = as_index("operand", operand)
        if not -len(self.operands) <= operand < len(self.operands):
            raise LabelError(
                f"{safe_text(self.name, 80)} has {len(self.operands)} operands; there is no "
                f"operand {operand}"
            )
        assert self.opener is not None
        return self.opener(self.operands[operand])

    def recompute(self) -> float:
        """The value from the operands alone, in Python floats; sums are exactly rounded.

        An independent second way to every number: NumPy made `value`, `math` makes this. Where
        terms overflow, the order of adding decides between ∞ and NaN, and the two may differ; the
        text of the derivation says so.
        """
        values = [operand.value for operand in self.operands]
        match self.op:
            case "given" | "visible" | "split" | "merge":
                return values[0] if values else self.value
            case "dot" | "sum":
                return _total([term.value for term in self.terms])
            case "max":
                return _maximum([term.value for term in self.terms])
            case "multiply":
                return values[0] * values[1]
            case "cap":
                return values[1] * math.tanh(values[0] / values[1])
            case "add":
                return _total(values)
            case "select":
                return values[1] if values[0] else -math.inf
            case "subtract":
                return values[0] - values[1] if not self.hidden else -math.inf
            case "exp":
                return _exp(values[0])
            case "divide":
                return 0.0 if self.hidden or values[1] == 0 else values[0] / values[1]
            case "inverse_root":
                return 1 / math.sqrt(values[0]) if values[0] else 1.0
            case "log":
                return -math.inf if values[0] == 0 else _log(values[0])
        raise NotImplementedError(self.op)

    @property
    def hidden(self) -> bool:
        """Whether a rule hides this cell."""
        return any(not verdict.visible for verdict in self.verdicts)

    def text(self, digits: int = 8) -> str:
        """The arithmetic as lines of text, terms aligned, rounding said."""
        return as_text(self, digits)

    def latex(self, digits: int = 8) -> str:
        """The arithmetic as one LaTeX equation."""
        return as_latex(self, digits)

    def numpy(self) -> str:
        """One line of NumPy that computes the value from its operands' exact numbers."""
        return as_numpy(self)

    def __repr__(self) -> str:
        return self.text()


def cell_name(symbol: str, labels: Sequence[str]) -> str:
    """Such as ``P[she, likes]``."""
    return f"{symbol}[{', '.join(labels)}]" if labels else symbol


def derive(
    source: Values, labels: Labels, step: str, batch: tuple[int, ...], index: tuple[int, ...]
) -> Derivation:
    """Read the declaration of one cell of a step; `index` has the head first, if there is one."""
    declared = source.steps[step]
    at = dict(zip(declared.index, index, strict=True))

    def operand(ref: Ref, at: Mapping[str, int]) -> Operand:
        where = tuple(
            INDEX_MAPS[letter](at, source.sizes) if letter in INDEX_MAPS else at[letter]
            for letter in ref.index
        )
        own = source.steps[ref.step]
        value = _cell(source, own, batch, where)
        return Operand(ref.step, own.symbol, where, labels.cell(own, where), value)

    running = _running_letter(source, declared, at)
    operands: list[Operand] = []
    terms: list[Term] = []
    if running is None:
        operands = [operand(ref, at) for ref in declared.operands]
    else:
        axis, letter = running
        along = labels.along(axis)
        together = [ref for ref in declared.operands if letter in ref.index]
        for position in _positions(source, declared, batch, at, axis):
            factors = [operand(ref, {**at, letter: position}) for ref in together]
            numbers = tuple(range(len(operands), len(operands) + len(factors)))
            operands += factors
            product = math.prod(factor.value for factor in factors)
            terms.append(Term(along[position], numbers, product))
        for ref in declared.operands:
            if letter not in ref.index:  # the sink, beside the keys
                operands.append(operand(ref, at))
                terms.append(Term("sink", (len(operands) - 1,), operands[-1].value))
    verdicts: tuple[Verdict, ...] = ()
    judged = declared.op == "visible" or declared.over == "visible"
    if judged and "j" in at and source.rules is not None:
        verdicts = (verdict(source, batch, at.get("h", 0), at.get("i", 0), at["j"]),)
    head = at.get("h")
    if "g" in at:
        head = at["g"] * (source.sizes["H"] // source.sizes["G"])
    return Derivation(
        declared=declared,
        batch=batch,
        index=index,
        labels=labels.cell(declared, index),
        value=_cell(source, declared, batch, index),
        operands=tuple(operands),
        terms=tuple(terms),
        verdicts=verdicts,
        head=head,
        opener=partial(_open, source, labels, batch),
    )


def _open(source: Values, labels: Labels, batch: tuple[int, ...], chosen: Operand) -> Derivation:
    return derive(source, labels, chosen.step, batch, chosen.index)


def verdict(source: Values, batch: tuple[int, ...], head: int, row: int, key: int) -> Verdict:
    """What the rules of the call say about one query and one key."""
    sizes = source.sizes
    shape = (*source.lead, sizes.get("H", 1), sizes.get("L", 1), sizes["S"])
    assert source.rules is not None
    at = Block(shape, batch, head, np.array([row]), int(source.offset[batch]))
    return source.rules.verdict(at, key)


def _running_letter(source: Values, step: Step, at: Mapping[str, int]) -> tuple[str, str] | None:
    """The axis and letter that a dot, a sum or a maximum runs along: one that the cell has not."""
    for ref in step.operands:
        for axis, letter in zip(source.steps[ref.step].axes, ref.index, strict=True):
            if letter not in at and letter not in INDEX_MAPS:
                return axis, letter
    return None


def _positions(
    source: Values, step: Step, batch: tuple[int, ...], at: Mapping[str, int], axis: str
) -> list[int]:
    """Where the running letter goes: along keys, over the visible ones only if so declared."""
    if step.over != "visible" or axis != "S":
        return list(range(source.sizes[axis]))
    row = source.row("visible", batch, at.get("h", 0), at.get("i", 0))
    return [int(key) for key in np.flatnonzero(row)]


def _cell(source: Values, step: Step, batch: tuple[int, ...], index: tuple[int, ...]) -> float:
    at = dict(zip(step.axes, index, strict=True))
    row = source.row(step.name, batch, at.get("H", at.get("G", 0)), at.get("L", 0))
    return float(row[tuple(at[axis] for axis in step.axes if axis not in ("H", "G", "L"))])


def _total(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond float64
        return sum(values)


def _maximum(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=-math.inf)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _log(value: float) -> float:
    return math.nan if value < 0 or math.isnan(value) else math.log(value)
