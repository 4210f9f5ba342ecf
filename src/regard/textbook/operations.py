"""The operations of the textbook, one entry each: value in NumPy, words, LaTeX, line of NumPy.

The page has the values in JavaScript (views/report/operations.js) and gets every template from
here; `scalar_check.py` recomputes each value from plain floats, as an independent check. A test
holds the three tables complete. Must not know which steps there are.

Templates
---------
$0 $1       an operand: its symbol in a formula, its number in a derivation
$b0        its number, in brackets if it is negative
$n0         the operand's name, such as P[she, likes]
$r0         the square root of its number
$a0         the name of the step's own axis 0
$k0         the letter that the operation runs along
⟨$0|, ⟩     what is before the bar, once per term, with what is after it in between
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: what it computes and how it is written.

    `value` takes the operands as arrays with the axes of the result. An operation with a `total`
    runs along one more axis, the last of its first operand, and takes the visible keys before its
    operands (None: all are). `formula` and `latex` are the right side of a step's formula; a pair
    is for one and for two operands. The other templates write one cell: `lead`, then `names` =
    `numbers`; `latex_numbers`; and `numpy`.
    """

    value: Callable[..., Array] | None = None  # None: the numbers come from outside
    formula: str | tuple[str, str] = ""
    latex: str | tuple[str, str] = ""
    lead: str = ""
    names: str = ""
    numbers: str = ""
    latex_numbers: str = ""
    numpy: str = ""
    hidden: float | None = None  # the value of a cell whose key is hidden
    nonzero: int | None = None  # the operand that `numpy` would divide by
    total: str = ""  # the last line below the terms
    empty: float = 0.0  # the value without any term
    exact: bool = False  # the value is one of the operands
    overflows: bool = False  # finite operands may give ∞ or NaN


def _wide(array: Array) -> Array:
    """At least float64: NumPy's own float32 exp is 2.5 ulp off, one rounding is half of one."""
    return array.astype(np.result_type(array.dtype, np.float64), copy=False)


def _dot(visible: NDArray[np.bool_] | None, a: Array, b: Array) -> Array:
    """(…, K) · (K, …) over visible keys only."""
    if visible is None or np.isfinite(b).all():
        # + 0 turns −0 into +0: else the sign of a hidden value could show in 0·(−v).
        return np.asarray(a @ b) + np.zeros((), a.dtype)
    # A hidden value that is NaN or infinite is absent, so it must not meet its weight of 0.
    seen = np.broadcast_to(visible, a.shape)
    special = sum_of_special(seen & (a > 0), seen & ~(a > 0), b)
    return np.asarray(a @ np.where(np.isfinite(b), b, 0)) + special


def _max(visible: NDArray[np.bool_] | None, cells: Array, *sink: Array) -> Array:
    largest = cells.max(axis=-1, initial=-np.inf)  # hidden cells are −∞ already
    return np.asarray(np.maximum(largest, sink[0]) if sink else largest)


def _sum(visible: NDArray[np.bool_] | None, cells: Array, *sink: Array) -> Array:
    total = cells.sum(axis=-1)  # hidden cells are 0 already
    return np.asarray(total + sink[0] if sink else total)


def _divide(a: Array, b: Array) -> Array:
    return np.asarray(a / np.where(b == 0, 1, b))  # 0 / 0 → 0


def _inverse_root(width: Array) -> Array:
    # Without width every score is 0, and any scale will do.
    return np.asarray(1 / np.sqrt(_wide(width)) if width else np.ones(()))


# Cells in another order.
_COPY = Operation(
    value=lambda x: x,
    lead="the same number as ",
    names="$n0",
    numbers="$0",
    latex_numbers="$0",
    numpy="$0",
    exact=True,
)

OPERATIONS: dict[str, Operation] = {
    "given": Operation(lead="a given number"),
    "visible": Operation(
        formula="may query i see key j?",
        latex=r"\text{may query } i \text{ see key } j\text{?}",
    ),
    "dot": Operation(
        value=_dot,
        formula="$0·$1",
        latex="$0 $1",
        latex_numbers=r"⟨$b0 \cdot $b1| + ⟩",
        numpy="np.dot([⟨$0|, ⟩], [⟨$1|, ⟩])",
        total="sum",
        overflows=True,
    ),
    "multiply": Operation(
        value=np.multiply,
        formula="$0·$1",
        latex=r"$0 \cdot $1",
        names="$n0 · $n1",
        numbers="$0 × $1",
        latex_numbers=r"$b0 \cdot $b1",
        numpy="$0 * $1",
        overflows=True,
    ),
    "softcap": Operation(
        value=lambda x, softcap: softcap * np.tanh(_wide(x) / softcap),
        formula="$1·tanh($0 / $1)",
        latex=r"$1 \tanh($0 / $1)",
        names="c·tanh($n0 / c)",
        numbers="$1 × tanh($0 / $1)",
        latex_numbers=r"$1 \tanh\left($0 / $1\right)",
        numpy="$1 * np.tanh($0 / $1)",
    ),
    "add": Operation(
        value=lambda a, *b: a + b[0] if b else a,
        formula="⟨$0| + ⟩",
        latex="⟨$0| + ⟩",
        names="⟨$n0| + ⟩",
        numbers="⟨$0| + ⟩",
        latex_numbers="⟨$b0| + ⟩",
        numpy="⟨$0| + ⟩",
        overflows=True,
    ),
    "select": Operation(
        value=lambda visible, x: np.where(visible, x, -np.inf),
        formula="$1 where visible, else −∞",
        latex=r"$1 \text{ where visible, else } {-\infty}",
        lead="visible, so ",
        names="$n1",
        numbers="$1",
        latex_numbers="$1",
        numpy="np.where(True, $1, -np.inf)",
        exact=True,
    ),
    "max": Operation(
        value=_max,
        formula=("max_$k0 $0", "max(max_$k0 $0, $1)"),
        latex=(r"\max_$k0 $0", r"\max(\max_$k0 $0, $1)"),
        latex_numbers=r"\max\left(⟨$0|, ⟩\right)",
        numpy="np.max([⟨$0|, ⟩], initial=-np.inf)",
        total="largest",
        empty=-np.inf,
        exact=True,
    ),
    "subtract": Operation(
        value=np.subtract,
        formula="$0 − $1",
        latex="$0 - $1",
        names="$n0 − $n1",
        numbers="$0 − $b1",
        latex_numbers="$0 - $b1",
        numpy="$0 - $1",
        hidden=-np.inf,
        overflows=True,
    ),
    "exp": Operation(
        value=lambda x: np.exp(_wide(x)),
        formula="exp($0)",
        latex=r"\exp($0)",
        names="exp($n0)",
        numbers="exp($0)",
        latex_numbers=r"\exp\left($0\right)",
        numpy="np.exp($0)",
        hidden=0.0,
        overflows=True,
    ),
    "sum": Operation(
        value=_sum,
        formula=("Σ_$k0 $0", "Σ_$k0 $0 + $1"),
        latex=(r"\sum_$k0 $0", r"\sum_$k0 $0 + $1"),
        latex_numbers="⟨$b0| + ⟩",
        numpy="np.sum([⟨$0|, ⟩])",
        total="sum",
        overflows=True,
    ),
    "divide": Operation(
        value=_divide,
        formula="$0 / $1",
        latex="$0 / $1",
        names="$n0 / $n1",
        numbers="$0 / $1",
        latex_numbers=r"\frac{$0}{$1}",
        numpy="$0 / $1",
        hidden=0.0,
        nonzero=1,
    ),
    "log": Operation(
        value=lambda x: np.log(_wide(x)),
        formula="the natural logarithm of $0",
        latex=r"\ln($0)",
        names="ln($n0)",
        numbers="ln($0)",
        latex_numbers=r"\ln\left($0\right)",
        numpy="np.log($0)",
    ),
    "inverse_root": Operation(
        value=_inverse_root,
        formula="1 / √$0",
        latex=r"1 / \sqrt{$0}",
        names="1 / √$n0",
        numbers="1 / √$0 = 1 / $r0",
        latex_numbers=r"1 / \sqrt{$0}",
        numpy="1 / np.sqrt($0)",
        nonzero=0,
    ),
    "split": replace(
        _COPY, formula="$0 split into $a0 heads of width $a2", latex=r"\mathrm{split}($0)"
    ),
    "merge": replace(_COPY, formula="the heads of $0 side by side", latex=r"\mathrm{merge}($0)"),
}

_PLACE = re.compile(r"⟨([^|]*)\|([^⟩]*)⟩|\$([a-z]?)(\d)")


def fill(
    template: str, word: Callable[[str, int], str], terms: Sequence[tuple[int, ...]] = ()
) -> str:
    """A template with its places filled: `word(kind, number)` is what goes into "$kind number".

    `terms` are the operands of each term, by their positions.
    """

    def written(match: re.Match[str]) -> str:
        each, between, kind, number = match.groups()
        if each is None:
            return word(kind, int(number))

        def one(term: tuple[int, ...]) -> str:
            return fill(each, lambda kind, number: word(kind, term[number]))

        return str(between.join(map(one, terms)))

    return _PLACE.sub(written, template)


def compute(
    op: str,
    letters: tuple[str, ...],
    operands: Sequence[tuple[Array, tuple[str, ...]]],
    visible: NDArray[np.bool_] | None,
    dtype: np.dtype[Any],
) -> Array:
    """One block of a step from the blocks of its operands, in the working dtype.

    Each operand is an array and the letters of its axes; the block has the axes `letters`.
    `visible` are the keys that count; None: all do.
    """
    operation = OPERATIONS[op]
    if operation.value is None:
        raise NotImplementedError(op)
    arrays = [_aligned(array, own, letters, place) for place, (array, own) in enumerate(operands)]
    with np.errstate(all="ignore"):  # NaN and infinity are results here, not accidents
        if operation.total:
            result = operation.value(visible, *arrays)
        else:
            result = operation.value(*arrays)
            if visible is not None and operation.hidden is not None:
                result = np.where(visible, result, operation.hidden)
        if letters:
            result = np.asarray(result).astype(dtype, copy=False)
    return np.asarray(result)  # one number for the whole call keeps its own precision


def _aligned(array: Array, own: tuple[str, ...], letters: tuple[str, ...], place: int) -> Array:
    """`array` with an axis of size 1 for every letter of the step that it does not have.

    An operand that the operation runs along keeps its axes, that one last in the first operand
    and first in the second.
    """
    if not set(own) <= set(letters):
        return array.T if place and own[-1] not in letters else array
    return array[tuple(slice(None) if letter in own else None for letter in letters)]


def sum_of_special(
    counted: NDArray[np.bool_], lost: NDArray[np.bool_], values: Array
) -> NDArray[np.float64]:
    """What NaN and infinite values (S, E) add to rows (L, S); 0 where there are none.

    A row adds the values of the keys that it counts, and NaN for those of the keys that it lost:
    0 · ∞ is NaN, and so is ∞ − ∞.
    """
    special = ~np.isfinite(values)
    keys = np.flatnonzero(special.any(axis=-1))
    counted, lost = counted[..., keys], lost[..., keys]
    values, special = values[keys], special[keys]

    def met(rows: NDArray[np.bool_], cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not (rows.any() and cells.any()):
            return np.zeros((*rows.shape[:-1], cells.shape[-1]), np.bool_)
        return np.asarray(rows.astype(np.float32) @ cells.astype(np.float32) > 0)

    up, down = met(counted, values == np.inf), met(counted, values == -np.inf)
    nan = met(counted, np.isnan(values)) | met(lost, special) | (up & down)
    return np.where(nan, np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0.0)))
