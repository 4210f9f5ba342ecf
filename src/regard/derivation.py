"""One number and the numbers that made it.

Owns `Derivation`: the operands of one cell with their values and labels, the operation and the
result, as text, LaTeX and one NumPy line. Every rendering interprets the declared operation of the
step; no formula stands here twice. Must not know where values come from or how they are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from regard.errors import LabelError, safe_text
from regard.masks import Verdict
from regard.steps import Step


def format_number(value: float, digits: int = 8) -> str:
    """A number with at most `digits` decimals; very large and small ones in scientific form.

    >>> format_number(0.5053029375), format_number(1.10228985e-13), format_number(-math.inf)
    ('0.50530294', '1.10228985e-13', '−∞')
    """
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "−0" if math.copysign(1, value) < 0 else "0"
    size = abs(value)
    if value == int(value) and size < 1e15:
        return str(int(value)).replace("-", "−")
    if size < 10.0 ** -min(4, digits) or size >= 1e9:
        mantissa, exponent = f"{value:.{digits}e}".split("e")
        trimmed = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{trimmed}e{exponent}".replace("-", "−", int(value < 0))
    fixed = f"{value:.{digits}f}"
    if "." in fixed:
        fixed = fixed.rstrip("0").rstrip(".")
    return fixed.replace("-", "−")


def numpy_literal(value: float) -> str:
    """A number as Python source that gives exactly this float64 back."""
    value = float(value)
    if math.isnan(value):
        return "np.nan"
    if math.isinf(value):
        return "np.inf" if value > 0 else "-np.inf"
    return repr(value)


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
        return _cell_name(self.symbol, self.labels)


@dataclass(frozen=True, slots=True)
class Term:
    """One summand, or one candidate for a maximum: the operands whose product it is."""

    label: str
    operands: tuple[int, ...]  # positions in Derivation.operands
    value: float


@dataclass(frozen=True)
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
    note: str = ""
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
        return _cell_name(self.symbol, self.labels)

    def open(self, operand: int) -> Derivation:
        """The derivation of one operand."""
        if not -len(self.operands) <= operand < len(self.operands):
            raise LabelError(
                f"{safe_text(self.name, 80)} has {len(self.operands)} operands; there is no "
                f"operand {operand}"
            )
        assert self.opener is not None
        return self.opener(self.operands[operand])

    def recompute(self) -> float:
        """The value from the operands alone, in Python floats; sums are exactly rounded.

        An independent second way to every number: NumPy made `value`, `math` makes this.
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
                return values[0] - values[1] if not self._hidden else -math.inf
            case "exp":
                return _exp(values[0])
            case "divide":
                return 0.0 if self._hidden or values[1] == 0 else values[0] / values[1]
            case "log":
                return -math.inf if values[0] == 0 else _log(values[0])
        raise NotImplementedError(self.op)

    @property
    def _hidden(self) -> bool:
        return any(not verdict.visible for verdict in self.verdicts)

    # --- renderings ----------------------------------------------------------------------------

    def text(self, digits: int = 8) -> str:
        """The arithmetic as lines of text, terms aligned, rounding said."""
        head = f"{safe_text(self.name, 200)} = {format_number(self.value, digits)}"
        lines = [f"{head}    {self.declared.formula}"]
        lines += [f"  {line}" for line in self._body(digits)]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def _body(self, digits: int) -> list[str]:
        def show(value: float) -> str:
            return format_number(value, digits)

        operands = self.operands
        shown = [show(operand.value) for operand in operands]
        names = [safe_text(operand.name, 80) for operand in operands]
        verdicts = [
            f"{safe_text(leaf.rule, 80)}: {'visible' if leaf.visible else 'hidden'} ({leaf.detail})"
            for verdict in self.verdicts
            for leaf in verdict.leaves()
        ]
        match self.op:
            case "given":
                return ["a given number"]
            case "visible":
                return verdicts
            case "dot" | "sum" | "max":
                return self._terms(digits)
            case "multiply":
                return [f"{names[0]} · {names[1]} = {shown[0]} × {shown[1]}"]
            case "cap":
                return [f"c·tanh({names[0]} / c) = {shown[1]} × tanh({shown[0]} / {shown[1]})"]
            case "add":
                return [f"{' + '.join(names)} = {' + '.join(shown)}"]
            case "select":
                if operands[0].value:
                    return [f"visible, so {names[1]} = {shown[1]}"]
                return ["hidden, so −∞", *verdicts]
            case "subtract":
                if self._hidden:
                    return ["hidden, so −∞", *verdicts]
                return [f"{names[0]} − {names[1]} = {shown[0]} − {_bracketed(shown[1])}"]
            case "exp":
                return [f"exp({names[0]}) = exp({shown[0]})"]
            case "divide":
                if self._hidden:
                    return ["hidden, so 0", *verdicts]
                return [f"{names[0]} / {names[1]} = {shown[0]} / {shown[1]}"]
            case "log":
                return [f"ln({names[0]}) = ln({shown[0]})"]
            case "split" | "merge":
                return [f"the same number as {names[0]} = {shown[0]}"]
        raise NotImplementedError(self.op)

    def _terms(self, digits: int) -> list[str]:
        """One line per term, the result below, and what the printed rounding leaves out."""
        if not self.terms:
            return ["no visible key, so 0" if self.op != "max" else "no visible key, so −∞"]
        rows = []
        for term in self.terms:
            factors = [format_number(self.operands[k].value, digits) for k in term.operands]
            product = " × ".join(factors) if len(factors) > 1 else ""
            rows.append((safe_text(term.label, 40), product, format_number(term.value, digits)))
        total = {"dot": "sum", "sum": "sum", "max": "largest"}[self.op]
        rows.append((total, "", format_number(self.value, digits)))
        label_width = max(len(row[0]) for row in rows)
        product_width = max(len(row[1]) for row in rows)
        lines = []
        for label, product, value in rows:
            middle = f"{product:<{product_width}} = " if product_width and product else ""
            if product_width and not product:
                middle = " " * (product_width + 3)
            lines.append(f"{label:<{label_width}}  {middle}{value}")
        if self.op != "max" and self._rounding_shows(digits):
            lines.append(f"(terms are rounded to {digits} decimals; the sum is of unrounded ones)")
        return lines

    def _rounding_shows(self, digits: int) -> bool:
        """Whether the printed terms do not add up to the printed sum."""
        values = [term.value for term in self.terms]
        if not all(map(math.isfinite, [*values, self.value])):
            return False
        printed = math.fsum(_parsed(format_number(value, digits)) for value in values)
        return format_number(printed, digits) != format_number(self.value, digits)

    def latex(self, digits: int = 8) -> str:
        """The arithmetic as one LaTeX equation."""
        operands = self.operands
        shown = [_latex_number(operand.value, digits) for operand in operands]
        result = _latex_number(self.value, digits)
        match self.op:
            case "given" | "visible":
                right = ""
            case "dot":
                products = [
                    r" \cdot ".join(_in_latex_product(shown[k]) for k in term.operands)
                    for term in self.terms
                ]
                right = " + ".join(products) or "0"
            case "sum":
                right = " + ".join(_in_latex_product(value) for value in shown) or "0"
            case "max":
                right = rf"\max\left({', '.join(shown)}\right)"
            case "multiply":
                right = r" \cdot ".join(_in_latex_product(value) for value in shown)
            case "cap":
                right = rf"{shown[1]} \tanh\left({shown[0]} / {shown[1]}\right)"
            case "add":
                right = " + ".join(_in_latex_product(value) for value in shown)
            case "select":
                right = shown[1] if operands[0].value else ""
            case "subtract":
                right = "" if self._hidden else f"{shown[0]} - {_in_latex_product(shown[1])}"
            case "exp":
                right = rf"\exp\left({shown[0]}\right)"
            case "divide":
                right = "" if self._hidden else rf"\frac{{{shown[0]}}}{{{shown[1]}}}"
            case "log":
                right = rf"\ln\left({shown[0]}\right)"
            case _:  # split, merge
                right = shown[0]
        name = f"{self.declared.latex_symbol}_{{{', '.join(map(_latex_text, self.labels))}}}"
        return f"{name} = {right} = {result}" if right else f"{name} = {result}"

    def numpy(self) -> str:
        """One line of NumPy that computes the value from its operands' exact numbers."""
        values = [numpy_literal(operand.value) for operand in self.operands]
        match self.op:
            case "dot":
                firsts, seconds = (
                    ", ".join(values[term.operands[side]] for term in self.terms) for side in (0, 1)
                )
                return f"np.dot([{firsts}], [{seconds}])"
            case "sum":
                return f"np.sum([{', '.join(values)}])"
            case "max":
                return f"np.max([{', '.join(values)}], initial=-np.inf)"
            case "multiply":
                return f"{values[0]} * {values[1]}"
            case "cap":
                return f"{values[1]} * np.tanh({values[0]} / {values[1]})"
            case "add":
                return " + ".join(values)
            case "select":
                return f"np.where({bool(self.operands[0].value)}, {values[1]}, -np.inf)"
            case "subtract" if not self._hidden:
                return f"{values[0]} - {values[1]}"
            case "exp":
                return f"np.exp({values[0]})"
            case "divide" if not self._hidden and self.operands[1].value != 0:
                return f"{values[0]} / {values[1]}"
            case "log":
                return f"np.log({values[0]})"
        return numpy_literal(self.value)


def _cell_name(symbol: str, labels: Sequence[str]) -> str:
    return f"{symbol}[{', '.join(labels)}]" if labels else symbol


def _bracketed(number: str) -> str:
    return f"({number})" if number.startswith("−") else number


def _parsed(number: str) -> float:
    return float(number.replace("−", "-").replace("∞", "inf"))


def _latex_number(value: float, digits: int) -> str:
    text = format_number(value, digits).replace("−", "-").replace("∞", r"\infty")
    text = text.replace("NaN", r"\mathrm{NaN}")
    if "e" in text and text[0] != "\\":
        mantissa, exponent = text.split("e")
        return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"
    return text


def _in_latex_product(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def _latex_text(label: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        **{character: "\\" + character for character in "&%$#_{}"},
    }
    inert = "".join(special.get(character, character) for character in safe_text(label, 80))
    return rf"\text{{{inert}}}"


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
