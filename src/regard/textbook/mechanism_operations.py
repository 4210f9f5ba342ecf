"""The operations of scores and normalisations other than the dot product and the softmax.

One entry each, as in operations.py, which has them in its table. Those with a `term` add up, or
compare, what a function of several operands gives at each place: no array ever has one axis more
than the result, apart from a buffer of a bounded size. Must not know which steps there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arrays import Array
from regard.textbook.operation import Operation, wide

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Numbers of terms that are computed at once: 2 MiB in float64.
_TERMS_AT_ONCE = 2**18


def sum_of(term: Callable[..., Array]) -> Callable[..., Array]:
    """The value of an operation that adds up terms, from left to right whatever the block is."""

    def value(visible: NDArray[np.bool_] | None, *operands: Array) -> Array:
        axes = max(one.ndim for one in operands)  # the last of them is the one that is added up
        fronted = [np.moveaxis(one, -1, 0) if one.ndim == axes else one[None] for one in operands]
        count, *shape = np.broadcast_shapes(*(one.shape for one in fronted))
        seen = None if visible is None else np.moveaxis(visible, -1, 0)
        total, at_once = np.zeros(shape), max(1, _TERMS_AT_ONCE // max(1, int(np.prod(shape))))
        for start in range(0, count, at_once):
            stop = min(start + at_once, count)
            parts = [one if len(one) == 1 else one[start:stop] for one in fronted]
            terms = np.array(np.broadcast_to(term(*parts), (stop - start, *shape)), np.float64)
            if seen is not None:
                terms = np.where(seen if len(seen) == 1 else seen[start:stop], terms, 0.0)
            terms[0] += total
            total = np.add.accumulate(terms, axis=0)[-1]
        return total

    return value


def _bent(x: Array) -> Array:
    """The slope of tanh, 1 − tanh²(x), without cancellation where tanh is near 1."""
    e = np.exp(-2 * np.abs(x))
    return np.asarray(4 * e / np.square(1 + e))


def _length(visible: NDArray[np.bool_] | None, x: Array) -> Array:
    """√Σx², whose squares may be beyond float64."""
    x = x if visible is None else np.where(visible, x, 0)
    most = np.abs(x).max(axis=-1, initial=0, keepdims=True)
    unit = np.where((most > 0) & np.isfinite(most), most, 1)
    return np.asarray(unit[..., 0] * np.sqrt(np.square(x / unit).sum(axis=-1)))


def _sigmoid(x: Array) -> Array:
    e = np.exp(-np.abs(wide(x)))
    return np.asarray(np.where(x >= 0, 1, e) / (1 + e))


def _sigmoid_slope(x: Array) -> Array:
    e = np.exp(-np.abs(wide(x)))
    return np.asarray(e / np.square(1 + e))


def _first_at(visible: NDArray[np.bool_] | None, x: Array, largest: Array, number: Array) -> Array:
    hits = x == largest[..., None]
    found = np.where(hits if visible is None else hits & visible, number, np.inf)
    first = found.min(axis=-1, initial=np.inf)
    return np.asarray(np.where(np.isnan(largest), np.nan, first))


def _one_hot(number: Array, chosen: Array, _: Array) -> Array:
    return np.asarray(np.where(np.isnan(chosen), np.nan, number == chosen))


def _threshold(visible: NDArray[np.bool_] | None, x: Array) -> Array:
    """The τ with Σ max(x − τ, 0) = 1, or −∞; no other n gives more than that of the support."""
    x = x if visible is None else np.where(visible, x, -np.inf)
    if not x.shape[-1]:
        return np.full(x.shape[:-1], -np.inf)
    largest = x.max(axis=-1, keepdims=True)
    below = np.sort(x - np.where(np.isfinite(largest), largest, 0), axis=-1)[..., ::-1]
    each = (np.cumsum(below, axis=-1) - 1) / np.arange(1, x.shape[-1] + 1)
    threshold = largest[..., 0] + each.max(axis=-1)
    return np.asarray(np.where(largest[..., 0] == -np.inf, -np.inf, threshold))


def _elu_plus_one(x: Array) -> Array:
    return np.asarray(np.where(x > 0, x + 1, np.exp(np.minimum(wide(x), 0))))


# Σ v·tanh(a + b): the score of additive attention, v along the hidden width.
_TANH_DOT = Operation(
    value=sum_of(lambda v, a, b: v * np.tanh(a + b)),
    formula="Σ_$k0 $0·tanh($1 + $2)",
    latex=r"\sum_$k0 $0 \tanh($1 + $2)",
    term="$0 × tanh($1 + $b2)",
    latex_numbers=r"⟨$b0 \tanh\left($1 + $b2\right)| + ⟩",
    numpy="np.sum([⟨$0 * np.tanh($1 + $2)|, ⟩])",
    hidden=0.0,
    adjoint=("tanh_sum d 1 2", "tanh_slope_sum d 0 1 2", "tanh_slope_sum d 0 2 1"),
    total="sum",
    overflows=True,
)

_SIGMOID = Operation(
    value=_sigmoid,
    formula="1 / (1 + exp(−$0))",
    latex=r"1 / (1 + \exp(-$0))",
    names="1 / (1 + exp(−$n0))",
    numbers="1 / (1 + exp(−$b0))",
    latex_numbers=r"\frac{1}{1 + \exp\left(-$b0\right)}",
    numpy="1 / (1 + np.exp(-($0)))",
    hidden=0.0,
    adjoint=("sigmoid_slope 0, multiply d _",),
)

_ELU = Operation(
    value=_elu_plus_one,
    formula="$0 + 1 where $0 > 0, else exp($0)",
    latex=r"$0 + 1 \text{ where } $0 > 0 \text{, else } \exp($0)",
    names="$n0 + 1 where $n0 > 0, else exp($n0)",
    numbers="$0 + 1 where $0 > 0, else exp($0)",
    latex_numbers=r"$0 + 1 \text{ where } $0 > 0 \text{, else } \exp\left($0\right)",
    numpy="np.where($0 > 0, $0 + 1, np.exp(np.minimum($0, 0)))",
    adjoint=("elu_slope 0, multiply d _",),
    overflows=True,
)

_ONE_HOT = Operation(
    value=_one_hot,
    formula="1 where $0 = $1, else 0",
    latex=r"1 \text{ where } $0 = $1 \text{, else } 0",
    names="1 where $n0 = $n1, else 0",
    numbers="1 where $0 = $1, else 0",
    latex_numbers=r"1 \text{ where } $0 = $1 \text{, else } 0",
    numpy="np.where(np.isnan($1), np.nan, $0 == $1) + 0.0",
    hidden=0.0,
    adjoint=("", "", "zero d"),  # a small change of a score chooses no other key
)

MECHANISM_OPERATIONS: dict[str, Operation] = {
    "tanh_dot": _TANH_DOT,
    "tanh_sum": replace(_TANH_DOT, adjoint=("",)),
    "tanh_slope_sum": replace(
        _TANH_DOT,
        value=sum_of(lambda d, v, a, b: d * v * _bent(a + b)),
        formula="Σ_$k0 $0·$1·(1 − tanh²($2 + $3))",
        latex=r"\sum_$k0 $0 \cdot $1 \cdot (1 - \tanh^2($2 + $3))",
        term="$0 × $1 × (1 − tanh²($2 + $b3))",
        latex_numbers=r"⟨$b0 \cdot $b1 \cdot \left(1 - \tanh^2\left($2 + $b3\right)\right)| + ⟩",
        numpy="np.sum([⟨$0 * $1 / np.cosh($2 + $3) ** 2|, ⟩])",
        adjoint=("",),
    ),
    "squared_distance": replace(
        _TANH_DOT,
        value=sum_of(lambda a, b: np.square(a - b)),
        formula="Σ_$k0 ($0 − $1)²",
        latex=r"\sum_$k0 ($0 - $1)^2",
        term="($0 − $b1)²",
        latex_numbers=r"⟨\left($0 - $b1\right)^2| + ⟩",
        numpy="np.sum([⟨($0 - $1) ** 2|, ⟩])",
        adjoint=("pull d 0 1", "pull d 1 0"),
    ),
    # The adjoint of a squared distance: the slope of (a − b)² is 2·(a − b).
    "pull": replace(
        _TANH_DOT,
        value=sum_of(lambda d, a, b: 2 * d * (a - b)),
        formula="Σ_$k0 2·$0·($1 − $2)",
        latex=r"\sum_$k0 2 \cdot $0 \cdot ($1 - $2)",
        term="2 × $0 × ($1 − $b2)",
        latex_numbers=r"⟨2 \cdot $b0 \cdot \left($1 - $b2\right)| + ⟩",
        numpy="np.sum([⟨2 * $0 * ($1 - $2)|, ⟩])",
        adjoint=("",),
    ),
    "length": Operation(
        value=_length,
        formula="√(Σ_$k0 $0²)",
        latex=r"\sqrt{\sum_$k0 $0^2}",
        latex_numbers=r"\sqrt{⟨$b0^2| + ⟩}",
        numpy="np.linalg.norm([⟨$0|, ⟩])",
        adjoint=("divide 0 y, multiply d _",),
        total="length",
        overflows=True,
    ),
    "sigmoid": _SIGMOID,
    "sigmoid_slope": replace(
        _SIGMOID,
        value=_sigmoid_slope,
        formula="σ($0)·(1 − σ($0)), where σ(x) = 1 / (1 + exp(−x))",
        latex=r"\sigma($0) (1 - \sigma($0)),\; \sigma(x) = 1 / (1 + \exp(-x))",
        names="σ($n0)·(1 − σ($n0))",
        numbers="σ($0) × (1 − σ($0))",
        latex_numbers=r"\sigma\left($0\right) \left(1 - \sigma\left($0\right)\right)",
        numpy="np.exp(-np.abs($0)) / (1 + np.exp(-np.abs($0))) ** 2",
        # y·(1 − 2σ)
        adjoint=("sigmoid 0, add _ _, multiply _ y, subtract y _, multiply d _",),
    ),
    "elu_plus_one": _ELU,
    "elu_slope": replace(
        _ELU,
        value=lambda x: np.where(x > 0, 1.0, np.exp(np.minimum(wide(x), 0))),
        formula="1 where $0 > 0, else exp($0)",
        latex=r"1 \text{ where } $0 > 0 \text{, else } \exp($0)",
        names="1 where $n0 > 0, else exp($n0)",
        numbers="1 where $0 > 0, else exp($0)",
        latex_numbers=r"1 \text{ where } $0 > 0 \text{, else } \exp\left($0\right)",
        numpy="np.exp(np.minimum($0, 0))",
        adjoint=("",),
        overflows=False,
    ),
    # The lowest number of a key whose logit is the row's largest.
    "first_at": Operation(
        value=_first_at,
        formula="the smallest $2 where $0 = $1",
        latex=r"\min \{$2 \text{ where } $0 = $1\}",
        term="$2 where $0 = $1, else ∞",
        latex_numbers=r"\min\left(⟨$2 \text{ where } $0 = $1|, ⟩\right)",
        numpy="np.min([⟨$2 if $0 == $1 else np.inf|, ⟩], initial=np.inf)",
        total="smallest",
        empty=np.inf,
        exact=True,
    ),
    "one_hot": _ONE_HOT,
    # Its gradient is that of the identity.
    "one_hot_straight": replace(_ONE_HOT, adjoint=("", "", "same d")),
    "zero": Operation(
        value=np.zeros_like,
        formula="0·$0",
        latex=r"0 \cdot $0",
        names="0 · $n0",
        numbers="0 × $0",
        latex_numbers=r"0 \cdot $b0",
        numpy="0 * $0",
        hidden=0.0,
        adjoint=("zero d",),
    ),
    "threshold": Operation(
        value=_threshold,
        formula="max_n (Σ of the n largest $0 − 1) / n",
        latex=r"\max_n (\text{sum of the } n \text{ largest } $0 - 1) / n",
        latex_numbers=r"\max_n \frac{\text{sum of the } n \text{ largest of } ⟨$0|, ⟩ - 1}{n}",
        numpy=(
            "(lambda x: np.max((np.cumsum(x) - 1) / (1 + np.arange(x.size)), initial=-np.inf))"
            "(-np.sort([⟨-($0)|, ⟩]))"
        ),
        total="threshold",
        empty=-np.inf,
    ),
    # Together with the threshold's its gradient is that of a whole sparsemax: see gradients.py.
    "above": Operation(
        value=lambda x, threshold: np.maximum(x - threshold, 0.0),
        formula="max($0 − $1, 0)",
        latex=r"\max($0 - $1, 0)",
        names="max($n0 − $n1, 0)",
        numbers="max($0 − $b1, 0)",
        latex_numbers=r"\max\left($0 - $b1, 0\right)",
        numpy="np.maximum($0 - $1, 0.0)",
        hidden=0.0,
    ),
    "positive": Operation(
        value=lambda x: np.where(np.isnan(x), np.nan, x > 0),
        formula="1 where $0 > 0, else 0",
        latex=r"1 \text{ where } $0 > 0 \text{, else } 0",
        names="1 where $n0 > 0, else 0",
        numbers="1 where $0 > 0, else 0",
        latex_numbers=r"1 \text{ where } $0 > 0 \text{, else } 0",
        numpy="np.heaviside($0, 0.0)",
        hidden=0.0,
    ),
}
