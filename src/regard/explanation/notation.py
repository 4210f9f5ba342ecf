"""One derivation written out: as lines of text, as LaTeX, as one line of NumPy.

Each rendering interprets the declared operation of the step. Must not know where the numbers come
from.
"""

from __future__ import annotations

import math
from decimal import MAX_EMAX, MIN_EMIN, Decimal, localcontext
from typing import TYPE_CHECKING, Any

from regard.errors import safe_text

if TYPE_CHECKING:
    Derivation = Any  # of explanation.derivation, which imports this module


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


def as_text(derivation: Derivation, digits: int) -> str:
    """The arithmetic as lines of text, terms aligned, rounding said."""
    head = f"{safe_text(derivation.name, 200)} = {format_number(derivation.value, digits)}"
    lines = [f"{head}    {derivation.declared.formula}"]
    lines += [f"  {line}" for line in _body(derivation, digits)]
    if derivation.note:
        lines.append(f"  {derivation.note}")
    return "\n".join(lines)


def _body(derivation: Derivation, digits: int) -> list[str]:
    def show(value: float) -> str:
        return format_number(value, digits)

    operands = derivation.operands
    shown = [show(operand.value) for operand in operands]
    names = [safe_text(operand.name, 80) for operand in operands]
    doubt = _doubt(derivation, digits)
    verdicts = [
        f"{safe_text(leaf.rule, 80)}: {'visible' if leaf.visible else 'hidden'} ({leaf.detail})"
        for verdict in derivation.verdicts
        for leaf in verdict.leaves()
    ]
    match derivation.op:
        case "given":
            return ["a given number"]
        case "visible":
            return verdicts
        case "dot" | "sum" | "max":
            return [*_terms(derivation, digits), *doubt]
        case "multiply":
            return [f"{names[0]} · {names[1]} = {shown[0]} × {shown[1]}", *doubt]
        case "cap":
            line = f"c·tanh({names[0]} / c) = {shown[1]} × tanh({shown[0]} / {shown[1]})"
            return [line, *doubt]
        case "add":
            return [f"{' + '.join(names)} = {' + '.join(shown)}", *doubt]
        case "select":
            if operands[0].value:
                return [f"visible, so {names[1]} = {shown[1]}"]
            return ["hidden, so −∞", *verdicts]
        case "subtract":
            if derivation.hidden:
                return ["hidden, so −∞", *verdicts]
            return [f"{names[0]} − {names[1]} = {shown[0]} − {_bracketed(shown[1])}", *doubt]
        case "exp":
            if derivation.hidden:
                return ["hidden, so 0", *verdicts]
            return [f"exp({names[0]}) = exp({shown[0]})", *doubt]
        case "divide":
            if derivation.hidden:
                return ["hidden, so 0", *verdicts]
            return [f"{names[0]} / {names[1]} = {shown[0]} / {shown[1]}", *doubt]
        case "log":
            return [f"ln({names[0]}) = ln({shown[0]})", *doubt]
        case "inverse_root":
            root = show(math.sqrt(operands[0].value))
            return [f"1 / √{names[0]} = 1 / √{shown[0]} = 1 / {root}", *doubt]
        case "split" | "merge":
            return [f"the same number as {names[0]} = {shown[0]}"]
    raise NotImplementedError(derivation.op)


def _terms(derivation: Derivation, digits: int) -> list[str]:
    """One line per term, and the result below."""
    if not derivation.terms:
        if derivation.op == "max":
            return ["no visible key, so −∞"]
        over_keys = derivation.declared.op == "sum" or derivation.declared.name == "output"
        return ["no visible key, so 0" if over_keys else "nothing to add up, so 0"]
    rows = []
    for term in derivation.terms:
        factors = [format_number(derivation.operands[k].value, digits) for k in term.operands]
        product = " × ".join(factors) if len(factors) > 1 else ""
        rows.append((safe_text(term.label, 40), product, format_number(term.value, digits)))
    total = {"dot": "sum", "sum": "sum", "max": "largest"}[derivation.op]
    rows.append((total, "", format_number(derivation.value, digits)))
    label_width = max(len(row[0]) for row in rows)
    product_width = max(len(row[1]) for row in rows)
    lines = []
    for label, product, value in rows:
        middle = f"{product:<{product_width}} = " if product_width and product else ""
        if product_width and not product:
            middle = " " * (product_width + 3)
        lines.append(f"{label:<{label_width}}  {middle}{value}")
    return lines


# --- what printed numbers cannot give --------------------------------------------------------


def _doubt(derivation: Derivation, digits: int) -> list[str]:
    """A line that says so where the printed numbers do not give the printed result."""
    op, operands, value = derivation.op, derivation.operands, derivation.value
    made = [value, *(term.value for term in derivation.terms)]
    if not all(math.isfinite(operand.value) for operand in operands):
        return []
    if not all(map(math.isfinite, made)):
        if op in ("dot", "sum", "multiply", "add", "subtract", "exp"):
            return [_OVERFLOW_IN_SUM if derivation.terms else _OVERFLOW]
        return []
    printed = [format_number(operand.value, digits) for operand in operands]
    products = [[printed[k] for k in term.operands] for term in derivation.terms]
    for term, factors in zip(derivation.terms, products, strict=True):
        if len(factors) > 1 and not _gives("multiply", factors, term.value, digits):
            return [_ROUNDED.format(digits)]
    if op in ("dot", "sum"):
        terms = [format_number(term.value, digits) for term in derivation.terms]
        return [] if _gives("add", terms, value, digits) else [_ROUNDED_TERMS.format(digits)]
    if derivation.hidden or _gives(op, printed, value, digits):
        return []
    return [(_ROUNDED_TERMS if op in ("add", "subtract") else _ROUNDED).format(digits)]


_ROUNDED = "(numbers are rounded to {} decimals; the result is of unrounded ones)"
_ROUNDED_TERMS = "(terms are rounded to {} decimals; the sum is of unrounded ones)"
_OVERFLOW = "(the result overflows: it is beyond the largest 64-bit float, 1.8e308)"
_OVERFLOW_IN_SUM = (
    "(the terms overflow: beyond the largest 64-bit float, 1.8e308, everything is ∞, and where ∞ "
    "and −∞ meet, the order of adding decides between ∞, −∞ and NaN)"
)


def _gives(op: str, printed: list[str], value: float, digits: int) -> bool:
    """Whether the printed operands, taken at their word, give the printed result."""
    result = format_number(value, digits)
    with localcontext(prec=60, Emax=MAX_EMAX, Emin=MIN_EMIN):
        exact = _exactly(op, [_decimal(text) for text in printed], digits)
        if exact is None:
            return True
        shown = _decimal(result)
        power = shown.adjusted() if "e" in result else 0
        return abs(exact - shown) * 2 <= Decimal(1).scaleb(power - digits)


def _exactly(op: str, numbers: list[Decimal], digits: int) -> Decimal | None:
    """The operation on decimal numbers; None where nothing is calculated from them."""
    match op:
        case "add":
            return sum(numbers, Decimal(0))
        case "subtract":
            return numbers[0] - numbers[1]
        case "multiply":
            return numbers[0] * numbers[1]
        case "divide" if numbers[1]:
            return numbers[0] / numbers[1]
        case "exp":
            return numbers[0].exp()
        case "log" if numbers[0] > 0:
            return numbers[0].ln()
        case "cap":
            ratio = max(min(numbers[0] / numbers[1], Decimal(100)), Decimal(-100))
            if abs(ratio) < Decimal("1e-10"):  # grown − 1 would cancel
                return numbers[1] * (ratio - ratio**3 / 3)
            grown = (2 * ratio).exp()
            return numbers[1] * (grown - 1) / (grown + 1)
        case "inverse_root" if numbers[0] > 0:
            return 1 / _decimal(format_number(math.sqrt(numbers[0]), digits))
    return None


def as_latex(derivation: Derivation, digits: int) -> str:
    """The arithmetic as one LaTeX equation."""
    operands = derivation.operands
    shown = [latex_number(operand.value, digits) for operand in operands]
    result = latex_number(derivation.value, digits)
    match derivation.op:
        case "given" | "visible":
            right = ""
        case "dot":
            products = [
                r" \cdot ".join(_in_latex_product(shown[k]) for k in term.operands)
                for term in derivation.terms
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
            right = "" if derivation.hidden else f"{shown[0]} - {_in_latex_product(shown[1])}"
        case "exp":
            right = rf"\exp\left({shown[0]}\right)"
        case "divide":
            right = "" if derivation.hidden else rf"\frac{{{shown[0]}}}{{{shown[1]}}}"
        case "log":
            right = rf"\ln\left({shown[0]}\right)"
        case "inverse_root":
            right = rf"1 / \sqrt{{{shown[0]}}}"
        case _:  # split, merge
            right = shown[0]
    name = (
        f"{{{derivation.declared.latex_symbol}}}"
        f"_{{{', '.join(map(latex_text, derivation.labels))}}}"
    )
    return f"{name} = {right} = {result}" if right else f"{name} = {result}"


def as_numpy(derivation: Derivation) -> str:
    """One line of NumPy that computes the value from its operands' exact numbers."""
    values = [numpy_literal(operand.value) for operand in derivation.operands]
    match derivation.op:
        case "dot":
            firsts, seconds = (
                ", ".join(values[term.operands[side]] for term in derivation.terms)
                for side in (0, 1)
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
            return f"np.where({bool(derivation.operands[0].value)}, {values[1]}, -np.inf)"
        case "subtract" if not derivation.hidden:
            return f"{values[0]} - {values[1]}"
        case "exp":
            return f"np.exp({values[0]})"
        case "divide" if not derivation.hidden and derivation.operands[1].value != 0:
            return f"{values[0]} / {values[1]}"
        case "log":
            return f"np.log({values[0]})"
        case "inverse_root" if derivation.operands[0].value:
            return f"1 / np.sqrt({values[0]})"
    return numpy_literal(derivation.value)


def _bracketed(number: str) -> str:
    return f"({number})" if number.startswith("−") else number


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace("−", "-"))


def latex_number(value: float, digits: int) -> str:
    """A number as LaTeX writes it."""
    text = format_number(value, digits).replace("−", "-").replace("∞", r"\infty")
    text = text.replace("NaN", r"\mathrm{NaN}")
    if "e" in text and text[0] != "\\":
        mantissa, exponent = text.split("e")
        return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"
    return text


def _in_latex_product(number: str) -> str:
    return f"({number})" if number.startswith("-") else number


def latex_text(label: str) -> str:
    """Text from outside, in which LaTeX finds nothing to do."""
    special = {
        "\\": r"\textbackslash{}",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        **{character: "\\" + character for character in "&%$#_{}"},
    }
    inert = "".join(special.get(character, character) for character in safe_text(label, 80))
    return rf"\text{{{inert}}}"
