"""One number and the numbers that made it, written out.

Owns `Derivation`, and how the templates of its operation are filled with names and numbers. How the
declaration of a step is read for a cell is in `derive`. Must not know kernels or views.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.dataframe import dataframe
from regard.errors import LabelError, safe_text
from regard.explanation.labels import as_index
from regard.explanation.notation import (
    format_number,
    is_rounded,
    latex_number,
    latex_text,
    numpy_literal,
)
from regard.rules.visibility import Block, Mask, Verdict
from regard.textbook.operation import fill
from regard.textbook.operations import OPERATIONS
from regard.textbook.scalar_check import RECOMPUTE
from regard.textbook.steps import Step

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Operations that compare their terms: whether the largest or the smallest ones count.
COMPARED = {"max": 1, "threshold": 1, "first_at": -1}

# More terms are shown as the largest of them and one number for the rest.
MOST_TERMS = 16


class Values(Protocol):
    """Where an explanation's numbers come from, block by block."""

    steps: dict[str, Step]
    sizes: dict[str, int]
    lead: tuple[int, ...]
    inputs: Mapping[str, Array]
    rules: Mask | None
    query_positions: NDArray[np.int64]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a step's whole value."""

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


class Body(NamedTuple):
    """What a derivation says below its first line."""

    lines: list[str]  # the equation, or one line per term or rule
    sides: list[str]  # of the equation, if there is one: with names, then with numbers
    remarks: list[str]  # that the result overflows or numbers are rounded, what a gradient means


@dataclass(frozen=True, repr=False)
class Derivation:
    """Why one cell has its value.

    A terminal shows it as text, a notebook as a formula. `operands` are the cells it is made of;
    `terms` group them where the operation runs along an axis. `open(k)` derives operand k in turn.
    For the cell of a mask, `verdicts` holds what each rule says; `note` says what hides a cell.
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
    slope_of: str = ""  # the cell that this is the gradient of, such as Q[she, 2]
    place: int = 0  # of the step among those of the explanation

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
        if not self.operands and not self.declared.running:  # given
            return self.value
        values = [one.value for one in (self.terms or self.operands)]
        return RECOMPUTE[self.op](values, self.hidden)

    @property
    def hidden(self) -> bool:
        """Whether a rule hides this cell."""
        return any(not verdict.visible for verdict in self.verdicts)

    def shown_terms(self, most: int | None = MOST_TERMS) -> tuple[list[int], Term | None]:
        """Positions of the largest terms, and one term for the rest if there are more than `most`.

        The value of that term is the sum of those that are left out, exactly rounded, or for a
        maximum the largest of them.
        """
        terms = self.terms
        if most is None or len(terms) <= most:
            return [*range(len(terms))], None
        sign = COMPARED.get(self.op, 0)

        def size(term: Term) -> float:
            if math.isnan(term.value):
                return math.inf
            return sign * term.value if sign else abs(term.value)

        by_size = sorted(range(len(terms)), key=lambda k: -size(terms[k]))
        left_out = [terms[k].value for k in by_size[most - 1 :]]
        label = f"{len(left_out)} more, {('at least', 'together', 'at most')[sign + 1]}"
        op = "max" if sign > 0 else self.op
        rest = Term(label, (), RECOMPUTE[op](left_out, self.hidden))
        return sorted(by_size[: most - 1]), rest

    def term_text(self, term: Term, digits: int = 8) -> str:
        """How one term is made of its operands; "" of a single number."""
        factors = [format_number(self.operands[k].value, digits) for k in term.operands]
        template = OPERATIONS[self.op].term
        if not (template and factors):
            return " × ".join(factors) if len(factors) > 1 else ""

        def word(kind: str, number: int) -> str:
            own = factors[number]
            return f"({own})" if kind == "b" and own.startswith("−") else own

        return fill(template, word)

    def meaning(self, digits: int = 8) -> str:
        """What a gradient says about the number that it belongs to; "" of any other number."""
        if not self.slope_of or self.hidden or not math.isfinite(self.value):
            return ""
        moved = f"as {safe_text(self.slope_of, 80)} rises, the loss"
        if self.value == 0:
            return f"{moved} stays the same"
        way = "rises" if self.value > 0 else "falls"
        return f"{moved} {way} {format_number(abs(self.value), digits)} times as fast"

    def body(self, digits: int = 8, terms: int | None = MOST_TERMS) -> Body:
        """The parts of the text below its first line."""
        operation = OPERATIONS[self.op]
        rules = [
            f"{safe_text(leaf.rule, 80)}: {'visible' if leaf.visible else 'hidden'} ({leaf.detail})"
            for verdict in self.verdicts
            for leaf in verdict.leaves()
        ]
        absent = [f"hidden, so {format_number(self.value, digits)}", *rules]
        if operation.total:
            lines = absent if self.hidden else _terms(self, digits, terms)
            return Body(lines, [], _remarks(self, digits))
        if not operation.names:  # given, or a cell of the mask
            meaning = self.meaning(digits)
            return Body(rules or [operation.lead], [], [f"({meaning})"] if meaning else [])
        if self.hidden:
            return Body(absent, [], [])

        def word(kind: str, number: int) -> str:
            operand = self.operands[number]
            if kind == "n":
                return safe_text(operand.name, 80)
            value = math.sqrt(operand.value) if kind == "r" else operand.value
            shown = format_number(value, digits)
            return f"({shown})" if kind == "b" and shown.startswith("−") else shown

        names, numbers = (_filled(t, self, word) for t in (operation.names, operation.numbers))
        lines = [f"{operation.lead}{names} = {numbers}"]
        sides = [] if operation.lead else [names, *numbers.split(" = ")]
        return Body(lines, sides, _remarks(self, digits))

    def text(self, digits: int = 8, terms: int | None = MOST_TERMS) -> str:
        """The arithmetic as lines of text, and whether numbers are rounded.

        A sum of more than `terms` terms shows the largest, and the rest as one number; None shows
        all.
        """
        head = f"{safe_text(self.name, 200)} = {format_number(self.value, digits)}"
        lines, _, remarks = self.body(digits, terms)
        note = [self.note] if self.note else []
        below = [f"  {line}" for line in (*lines, *remarks, *note)]
        return "\n".join([f"{head}    {self.declared.formula}", *below])

    def latex(self, digits: int = 8, terms: int | None = MOST_TERMS) -> str:
        """The arithmetic as one LaTeX equation; of many terms those that `text` shows."""
        sides = [self._latex_cell(), latex_number(self.value, digits)]
        if self.operands and not self.hidden:
            sides.insert(1, self._latex_side(digits, terms))
        return " = ".join(sides)

    def _latex_side(self, digits: int, terms: int | None) -> str:
        operation, (shown, rest) = OPERATIONS[self.op], self.shown_terms(terms)
        alone = [(k,) for k in range(len(self.operands))]
        wanted = [self.terms[k].operands for k in shown] or alone
        side = fill(operation.latex_numbers, self._latex_word(digits), wanted)
        if rest is None:
            return side
        if operation.total == "sum":
            sign, size = "+-"[rest.value < 0], latex_number(abs(rest.value), digits)
            return rf"{side} {sign} \underbrace{{{size}}}_{{{latex_text(rest.label)}}}"
        at_most = latex_number(rest.value, digits)
        return rf"{side} \quad {latex_text(f'and {rest.label}')} \; {at_most}"

    def _latex_cell(self) -> str:
        return f"{{{self.declared.latex_symbol}}}_{{{', '.join(map(latex_text, self.labels))}}}"

    def _latex_word(self, digits: int) -> Callable[[str, int], str]:
        def word(kind: str, number: int) -> str:
            shown = latex_number(self.operands[number].value, digits)
            return f"({shown})" if kind == "b" and shown.startswith("-") else shown

        return word

    def _repr_latex_(self) -> str:
        """What a notebook shows: the formula, and the numbers with each term on a line."""
        operation, digits = OPERATIONS[self.op], 8
        word, (shown, rest) = self._latex_word(digits), self.shown_terms()
        terms = [(self.terms[k].operands, latex_text(self.terms[k].label)) for k in shown]
        sides = [latex_number(self.value, digits)]
        if operation.total == "sum" and terms:
            lines = [f"{fill(operation.latex_numbers, word, [one])} && {two}" for one, two in terms]
            if rest:
                sign, size = "+-"[rest.value < 0], latex_number(abs(rest.value), digits)
                lines[-1] += rf" \\ &\quad {{}} {sign} {size} && {latex_text(rest.label)}"
            sum_of_lines = r" \\ &\quad {} + ".join(lines)
            sides.insert(0, sum_of_lines.replace("{} + -", "{} - "))
        elif self.operands and not self.hidden:
            sides.insert(0, self._latex_side(digits, MOST_TERMS))
        lines = [f"{self._latex_cell()} &= {sides[0]}", *(f"&= {side}" for side in sides[1:])]
        if operation.latex:
            lines.insert(0, self.declared.latex.replace(" = ", " &= ", 1))
        for words in filter(None, (self.note, self.meaning(digits))):
            lines.append(rf"&\quad {latex_text(words)}")
        return "\n".join([r"$$\begin{aligned}", " \\\\\n".join(lines), r"\end{aligned}$$"])

    def to_dataframe(self) -> Any:
        """The numbers of the arithmetic as a pandas DataFrame; OptionError if pandas is absent.

        There is one row for each term of a sum or a maximum, else one row, and one column for each
        factor or operand, named by its symbol. The last column has the products, or the value.
        """
        if not self.terms:
            data = [[*(one.value for one in self.operands), self.value]]
            columns = [*(one.symbol for one in self.operands), self.symbol]
            return dataframe(data, [("cell", [self.name])], (None, columns))
        factors = [[self.operands[k].value for k in term.operands] for term in self.terms]
        symbols = [self.operands[k].symbol for k in self.terms[0].operands]
        if len(symbols) > 1:
            symbols.append("·".join(symbols))
            factors = [[*row, term.value] for row, term in zip(factors, self.terms, strict=True)]
        rows = [("term", [term.label for term in self.terms])]
        return dataframe(factors, rows, (None, symbols))

    def numpy(self) -> str:
        """One line of NumPy that computes the value from its operands' exact numbers."""
        operation, operands = OPERATIONS[self.op], self.operands
        divisor = None if operation.nonzero is None else operands[operation.nonzero].value
        if self.hidden or divisor == 0 or not operation.numpy:
            return numpy_literal(self.value)
        return _filled(operation.numpy, self, lambda _, n: numpy_literal(operands[n].value))

    def __repr__(self) -> str:
        return self.text()


def cell_name(symbol: str, labels: Sequence[str]) -> str:
    """Such as ``P[she, likes]``."""
    return f"{symbol}[{', '.join(labels)}]" if labels else symbol


def verdict(source: Values, batch: tuple[int, ...], head: int, row: int, key: int) -> Verdict:
    """What the rules of the call say about one query and one key."""
    sizes = source.sizes
    shape = (*source.lead, sizes.get("H", 1), sizes.get("L", 1), sizes["S"])
    assert source.rules is not None
    at = Block(shape, batch, head, np.array([row]), source.query_positions)
    return source.rules.verdict(at, key)


# --- written out ---------------------------------------------------------------------------------


def _filled(template: str, derivation: Derivation, word: Callable[[str, int], str]) -> str:
    """A template of the operation, where a sum runs over the terms, or over the operands."""
    alone = [(number,) for number in range(len(derivation.operands))]
    return fill(template, word, [term.operands for term in derivation.terms] or alone)


def _terms(derivation: Derivation, digits: int, most: int | None) -> list[str]:
    """One line per term, and the result below."""
    result = format_number(derivation.value, digits)
    if not derivation.terms:
        keys = derivation.declared.running == "j"
        return [f"{'no visible key' if keys else 'nothing to add up'}, so {result}"]
    rows = []
    shown, rest = derivation.shown_terms(most)
    for term in (*(derivation.terms[k] for k in shown), *([rest] if rest else [])):
        product = derivation.term_text(term, digits)
        rows.append((safe_text(term.label, 40), product, format_number(term.value, digits)))
    rows.append((OPERATIONS[derivation.op].total, "", result))
    label_width = max(len(row[0]) for row in rows)
    product_width = max(len(row[1]) for row in rows)
    lines = []
    for label, product, value in rows:
        middle = f"{product:<{product_width}}{' = ' if product else '   '}" if product_width else ""
        lines.append(f"{label:<{label_width}}  {middle}{value}")
    return lines


_ROUNDED = "(numbers are rounded to {} decimals; the result is of unrounded ones)"
_OVERFLOW = "(the result overflows: it is beyond the largest 64-bit float, 1.8e308)"
_OVERFLOW_IN_SUM = (
    "(the terms overflow: beyond the largest 64-bit float, 1.8e308, everything is ∞, and where ∞ "
    "and −∞ meet, the order of adding decides between ∞, −∞ and NaN)"
)


def _remarks(derivation: Derivation, digits: int) -> list[str]:
    """That finite operands overflow, and that a shown number is rounded."""
    operation = OPERATIONS[derivation.op]
    operands = [operand.value for operand in derivation.operands]
    made = [derivation.value, *(term.value for term in derivation.terms)]
    found = []
    overflows = all(map(math.isfinite, operands)) and not all(map(math.isfinite, made))
    if operation.overflows and overflows:
        found.append(_OVERFLOW_IN_SUM if derivation.terms else _OVERFLOW)
    if not operation.exact and any(is_rounded(value, digits) for value in (*operands, *made)):
        found.append(_ROUNDED.format(digits))
    meaning = derivation.meaning(digits)
    return [*found, f"({meaning})"] if meaning else found
