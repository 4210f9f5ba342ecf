"""How one number and one label are written: as text, as LaTeX, as NumPy source.

Must not know where they come from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.errors import safe_text


def format_number(value: float, digits: int = 8) -> str:
    """A number with at most `digits` decimals; very large and small ones in scientific form.

    Zeros at the end stay where more of up to eight decimals would show another number.

    >>> format_number(0.5053029375), format_number(1.10228985e-13), format_number(-math.inf)
    ('0.50530294', '1.10228985e-13', '−∞')
    >>> format_number(0.3, 4), format_number(0.30004505, 4)
    ('0.3', '0.3000')
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
    short = fixed.rstrip("0")
    if "." in fixed and (digits >= 8 or short == f"{value:.8f}".rstrip("0")):
        fixed = short.rstrip(".")
    return fixed.replace("-", "−")


def numpy_literal(value: float) -> str:
    """A number as Python source that gives exactly this float64 back."""
    value = float(value)
    if math.isnan(value):
        return "np.nan"
    if math.isinf(value):
        return "np.inf" if value > 0 else "-np.inf"
    return repr(value)


def exactly(value: float) -> str:
    """As many digits as tell this float64 from all others."""
    if not math.isfinite(value):
        return format_number(value)
    return repr(float(value)).replace("-", "−", int(value < 0))


def is_rounded(value: float, digits: int) -> bool:
    """Whether the printed number, read back, is another one.

    A float64 has 15 certain decimal digits; a difference behind these, as between 0.1 · 3 and
    0.3, does not count.
    """
    if not math.isfinite(value):
        return False
    printed = float(format_number(value, digits).replace("−", "-"))
    return printed not in (value, float(f"{value:.14e}"))


def plain(value: Any) -> Any:
    """Data that JSON can hold: lists for tuples and arrays; NaN and infinity as strings."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "f" or np.isfinite(value).all():
            return value.tolist()
        value = value.tolist()
    if isinstance(value, (tuple, list)):
        return [plain(part) for part in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value


def latex_number(value: float, digits: int) -> str:
    """A number as LaTeX writes it."""
    text = format_number(value, digits).replace("−", "-").replace("∞", r"\infty")
    text = text.replace("NaN", r"\mathrm{NaN}")
    if "e" in text and text[0] != "\\":
        mantissa, exponent = text.split("e")
        return rf"{mantissa} \cdot 10^{{{int(exponent)}}}"
    return text


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
