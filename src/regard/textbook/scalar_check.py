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


def _threshold(scores: Sequence[float]) -> float:
    if any(math.isnan(one) for one in scores):
        return math.nan
    ordered = sorted(scores, reverse=True)
    most = ordered[0] if ordered else -math.inf
    if math.isinf(most):
        return most if most < 0 else math.nan
    below = [one - most for one in ordered]
    for count in range(len(below), 0, -1):  # the largest support that is one
        total = _total(below[:count])
        if 1 + count * below[count - 1] > total:
            return most + (total - 1) / count
    return math.nan


def _sigmoid(x: float) -> float:
    e = _exp(-abs(x))
    return (1 if x >= 0 else e) / (1 + e)


def _sigmoid_slope(x: float) -> float:
    e = _exp(-abs(x))
    return e / (1 + e) ** 2


def _normal(x: float) -> float:
    """The distribution function of the normal distribution."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _cube(x: float) -> float:
    return math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)


def _gelu_tanh_slope(x: float) -> float:
    steep = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    return (1 + math.tanh(_cube(x))) / 2 + x * steep * _softcap_slope(_cube(x), 1) / 2


def _one_hot(x: Sequence[float], hidden: bool) -> float:
    return 0.0 if hidden else math.nan if math.isnan(x[1]) else float(x[0] == x[1])


def _first(numbers: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else min(numbers, default=math.inf)


# One term from its operands, where it is not their product.
TERMS: dict[str, Callable[..., float]] = {
    "tanh_dot": lambda v, a, b: v * math.tanh(a + b),
    "tanh_sum": lambda d, a, b: d * math.tanh(a + b),
    "tanh_slope_sum": lambda d, v, a, b: d * v * _softcap_slope(a + b, 1),
    "squared_distance": lambda a, b: (a - b) * (a - b),
    "pull": lambda d, a, b: 2 * d * (a - b),
    "pick": lambda number, place, wanted: number if place == wanted else 0.0,
    "first_at": lambda x, most, number: (
        math.nan if math.isnan(most) else number if x == most else math.inf
    ),
}

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
    "tanh_dot": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "tanh_sum": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "tanh_slope_sum": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "squared_distance": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "pull": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "length": lambda terms, _: math.hypot(*terms),
    "sigmoid": lambda x, hidden: 0.0 if hidden else _sigmoid(x[0]),
    "sigmoid_slope": lambda x, hidden: 0.0 if hidden else _sigmoid_slope(x[0]),
    "elu_plus_one": lambda x, _: x[0] + 1 if x[0] > 0 else _exp(x[0]),
    "elu_slope": lambda x, _: 1.0 if x[0] > 0 else _exp(x[0]),
    "first_at": lambda terms, _: _first(terms),
    "one_hot": _one_hot,
    "one_hot_straight": _one_hot,
    "zero": lambda x, hidden: 0.0,
    "threshold": lambda terms, _: _threshold(terms),
    "cos": lambda x, _: math.cos(x[0]) if math.isfinite(x[0]) else math.nan,
    "sin": lambda x, _: math.sin(x[0]) if math.isfinite(x[0]) else math.nan,
    "angle": lambda x, _: x[0] * x[1] + 0.0,
    "rotate": lambda x, _: x[0] * x[1] + (x[2] * x[3] if x[3] else 0.0),
    "rotate_back": lambda x, _: x[0] * x[1] - (x[2] * x[3] if x[3] else 0.0),
    "apart": lambda x, _: abs(x[0] - x[1]),
    "pick": lambda terms, hidden: 0.0 if hidden else _total(terms),
    "above": lambda x, hidden: 0.0 if hidden else _largest((x[0] - x[1], 0.0)),
    "norm_factor": lambda x, _: 1 / math.sqrt(x[0] + x[1]) if x[0] + x[1] else math.inf,
    "gelu": lambda x, hidden: 0.0 if hidden else x[0] * _normal(x[0]),
    "gelu_slope": lambda x, hidden: (
        0.0 if hidden else _normal(x[0]) + x[0] * _exp(-x[0] * x[0] / 2) / math.sqrt(2 * math.pi)
    ),
    "gelu_tanh": lambda x, hidden: 0.0 if hidden else x[0] * (1 + math.tanh(_cube(x[0]))) / 2,
    "gelu_tanh_slope": lambda x, hidden: 0.0 if hidden else _gelu_tanh_slope(x[0]),
    "silu": lambda x, hidden: 0.0 if hidden else x[0] / (1 + _exp(-x[0])),
    "silu_slope": lambda x, hidden: (
        0.0 if hidden else _sigmoid(x[0]) * (1 + x[0] * _sigmoid(-x[0]))
    ),
    "relu": lambda x, hidden: 0.0 if hidden else _largest((x[0], 0.0)),
    "positive": lambda x, hidden: 0.0 if hidden else x[0] if math.isnan(x[0]) else float(x[0] > 0),
}
