"""The value of every operation a second time, on plain floats with Python's `math`.

The independent check of OPERATIONS, written twice on purpose: it recomputes a number of an
explanation from its operands alone. Must not import NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def _total(values: Sequence[float]) -> float:
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # infinities of both signs, or beyond float64
        return sum(values)


def _largest(values: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, values)) else max(values, default=-math.inf)


def _softcap_slope(value: float, softcap: float) -> float:
    try:
        return 1 / math.cosh(value / softcap) ** 2
    except OverflowError:
        return 0.0


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _log(value: float) -> float:
    if value == 0:
        return -math.inf
    return math.nan if value < 0 or math.isnan(value) else math.log(value)


# From the operands, or the terms of a sum or a maximum, and whether the cell's key is hidden.
RECOMPUTE: dict[str, Callable[[Sequence[float], bool], float]] = {
    "dot": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "row_dot": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "sum": lambda terms, _: _total(terms),
    "max": lambda terms, _: _largest(terms),
    "multiply": lambda x, hidden: 0.0 if hidden else x[0] * x[1],
    "softcap": lambda x, _: x[1] * math.tanh(x[0] / x[1]),
    "softcap_slope": lambda x, hidden: 0.0 if hidden else _softcap_slope(x[0], x[1]),
    "add": lambda x, _: _total(x),
    "select": lambda x, _: x[1] if x[0] else -math.inf,
    "keep": lambda x, _: x[1] if x[0] else 0.0,
    "at_maximum": lambda x, hidden: 0.0 if hidden or x[1] != x[2] else x[0],
    "subtract": lambda x, hidden: -math.inf if hidden else x[0] - x[1],
    "exp": lambda x, hidden: 0.0 if hidden else _exp(x[0]),
    "divide": lambda x, hidden: 0.0 if hidden or x[1] == 0 else x[0] / x[1],
    "log": lambda x, _: _log(x[0]),
    "negate": lambda x, hidden: 0.0 if hidden else -x[0],
    "softmax_gradient": lambda x, hidden: 0.0 if hidden else x[0] * (x[1] - x[2]),
    "half_square": lambda x, _: 0.5 * (x[0] - x[1]) * (x[0] - x[1]),
    "inverse_root": lambda x, _: 1 / math.sqrt(x[0]) if x[0] else 1.0,
    "same": lambda x, hidden: 0.0 if hidden else x[0],
    "split": lambda x, _: x[0],
    "merge": lambda x, _: x[0],
}
