"""The operations of the textbook, one entry each: value in NumPy, words, LaTeX, line of NumPy.

The page has the values in JavaScript (views/report/operations.js) and gets every template from
here; `scalar_check.py` recomputes each value from plain floats, as an independent check. A test
holds the three tables complete. mechanism_operations.py has the entries of other scores and
normalisations than the dot product and the softmax, position_operations.py those of positions,
block_operations.py those of the block around attention. Must not know which steps there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.textbook.block_operations import BLOCK_OPERATIONS
from regard.textbook.mechanism_operations import MECHANISM_OPERATIONS
from regard.textbook.operation import Operation, wide
from regard.textbook.position_operations import POSITION_OPERATIONS
from regard.textbook.special_values import sum_of_special

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Turn = Callable[[Array], Array]  # gives an array other axes


def _dot(visible: NDArray[np.bool_] | None, a: Array, b: Array) -> Array:
    """(…, K) · (K, …) over visible keys only."""
    if visible is None or np.isfinite(b).all():
        # + 0 turns −0 into +0: else the sign of a hidden value could show in 0·(−v).
        return np.asarray(a @ b + a.dtype.type(0))
    # A hidden value that is NaN or infinite is absent, so it must not meet its weight of 0.
    seen = np.broadcast_to(visible, a.shape)
    above, below = seen & (a > 0), seen & (a < 0)
    special = sum_of_special(above, seen & ~above & ~below, b, below)
    return np.asarray(a @ np.where(np.isfinite(b), b, 0)) + special


def _dot_of_rows(visible: NDArray[np.bool_] | None, a: Array, b: Array) -> Array:
    """Each row of a with the same row of b, over visible keys only."""
    products = a * b
    return np.asarray((products if visible is None else np.where(visible, products, 0)).sum(-1))


def _max(visible: NDArray[np.bool_] | None, cells: Array, *sink: Array) -> Array:
    largest = np.maximum.reduce(cells, axis=-1, initial=-np.inf)  # hidden cells are −∞ already
    return np.asarray(np.maximum(largest, sink[0]) if sink else largest)


def _sum(visible: NDArray[np.bool_] | None, cells: Array, *sink: Array) -> Array:
    total = np.add.reduce(cells, axis=-1)  # hidden cells are 0 already
    return np.asarray(total + sink[0] if sink else total)


def _divide(a: Array, b: Array) -> Array:
    if (nothing := b == 0).any():
        return np.asarray(np.where(nothing, 0, a / np.where(nothing, 1, b)))  # 0 / 0 → 0
    return np.asarray(a / b)


def _softcap_slope(x: Array, softcap: Array) -> Array:
    # 1 − tanh² would cancel where tanh is near 1.
    e = np.exp(-2 * np.abs(wide(x) / softcap))
    return np.asarray(4 * e / np.square(1 + e))


def _inverse_root(width: Array) -> Array:
    # Without width every score is 0, and any scale will do.
    return np.asarray(1 / np.sqrt(wide(width)) if width else np.ones(()))


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

_SELECT = Operation(
    value=lambda visible, x: np.where(visible, x, -np.inf),
    formula="$1 where visible, else −∞",
    latex=r"$1 \text{ where visible, else } {-\infty}",
    lead="visible, so ",
    names="$n1",
    numbers="$1",
    latex_numbers="$1",
    numpy="np.where(True, $1, -np.inf)",
    adjoint=("", "keep 0 d"),
    exact=True,
)

_DOT = Operation(
    value=_dot,
    formula="$0·$1",
    latex="$0 $1",
    latex_numbers=r"⟨$b0 \cdot $b1| + ⟩",
    numpy="np.dot([⟨$0|, ⟩], [⟨$1|, ⟩])",
    hidden=0.0,
    adjoint=("dot d 1", "dot d 0"),
    total="sum",
    overflows=True,
)

OPERATIONS: dict[str, Operation] = {
    "given": Operation(lead="a given number"),
    "visible": Operation(
        formula="may query i see key j?",
        latex=r"\text{may query } i \text{ see key } j\text{?}",
    ),
    # Every row of the first operand with every column of the second.
    "dot": _DOT,
    # Every row of the first operand with the same row of the second.
    "row_dot": replace(
        _DOT,
        value=_dot_of_rows,
        formula="Σ_$k0 $0·$1",
        latex=r"\sum_$k0 $0 \cdot $1",
        adjoint=("multiply d 1", "multiply d 0"),
    ),
    "multiply": Operation(
        value=np.multiply,
        formula="$0·$1",
        latex=r"$0 \cdot $1",
        names="$n0 · $n1",
        numbers="$0 × $1",
        latex_numbers=r"$b0 \cdot $b1",
        numpy="$0 * $1",
        hidden=0.0,
        adjoint=("multiply d 1", "multiply d 0"),
        overflows=True,
    ),
    "softcap": Operation(
        value=lambda x, softcap: softcap * np.tanh(wide(x) / softcap),
        formula="$1·tanh($0 / $1)",
        latex=r"$1 \tanh($0 / $1)",
        names="c·tanh($n0 / c)",
        numbers="$1 × tanh($0 / $1)",
        latex_numbers=r"$1 \tanh\left($0 / $1\right)",
        numpy="$1 * np.tanh($0 / $1)",
        adjoint=("softcap_slope 0 1, multiply d _", ""),
    ),
    "softcap_slope": Operation(
        value=_softcap_slope,
        formula="1 − tanh²($0 / $1)",
        latex=r"1 - \tanh^2($0 / $1)",
        names="1 − tanh²($n0 / c)",
        numbers="1 − tanh²($0 / $1)",
        latex_numbers=r"1 - \tanh^2\left($0 / $1\right)",
        numpy="1 / np.cosh($0 / $1) ** 2",
        hidden=0.0,
        # −2·tanh(x/c)/c times the slope
        adjoint=(
            "softcap 0 1, divide _ 1, divide _ 1, multiply _ y, add _ _, negate _, multiply d _",
            "",
        ),
    ),
    "add": Operation(
        value=lambda *x: reduce(np.add, x),
        formula="⟨$0| + ⟩",
        latex="⟨$0| + ⟩",
        names="⟨$n0| + ⟩",
        numbers="⟨$0| + ⟩",
        latex_numbers="⟨$0| + ⟩",
        numpy="⟨$0| + ⟩",
        adjoint=("same d",),
        overflows=True,
    ),
    "select": _SELECT,
    "keep": replace(
        _SELECT,
        value=lambda visible, x: np.where(visible, x, 0.0),
        formula="$1 where visible, else 0",
        latex=r"$1 \text{ where visible, else } 0",
        numpy="np.where(True, $1, 0.0)",
    ),
    "max": Operation(
        value=_max,
        formula=("max_$k0 $0", "max(max_$k0 $0, $1)"),
        latex=(r"\max_$k0 $0", r"\max(\max_$k0 $0, $1)"),
        latex_numbers=r"\max\left(⟨$0|, ⟩\right)",
        numpy="np.max([⟨$0|, ⟩], initial=-np.inf)",
        adjoint=("at_maximum d 0 y", "at_maximum d 1 y"),
        total="largest",
        empty=-np.inf,
        exact=True,
    ),
    "at_maximum": Operation(
        value=lambda d, x, maximum: np.where(x == maximum, d, 0.0),
        formula="$0 where $1 = $2, else 0",
        latex=r"$0 \text{ where } $1 = $2 \text{, else } 0",
        names="$n0 where $n1 = $n2",
        numbers="$0 where $1 = $2, else 0",
        latex_numbers=r"$0 \text{ where } $1 = $2 \text{, else } 0",
        numpy="np.where($1 == $2, $0, 0.0)",
        hidden=0.0,
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
        adjoint=("same d", "negate d"),
        overflows=True,
    ),
    "exp": Operation(
        value=lambda x: np.exp(wide(x)),
        formula="exp($0)",
        latex=r"\exp($0)",
        names="exp($n0)",
        numbers="exp($0)",
        latex_numbers=r"\exp\left($0\right)",
        numpy="np.exp($0)",
        hidden=0.0,
        adjoint=("multiply d y",),
        overflows=True,
    ),
    "sum": Operation(
        value=_sum,
        formula=("Σ_$k0 $0", "Σ_$k0 $0 + $1"),
        latex=(r"\sum_$k0 $0", r"\sum_$k0 $0 + $1"),
        latex_numbers="⟨$0| + ⟩",
        numpy="np.sum([⟨$0|, ⟩])",
        adjoint=("same d",),
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
        adjoint=("divide d 1", "multiply d y, divide _ 1, negate _"),
        nonzero=1,
    ),
    "log": Operation(
        value=lambda x: np.log(wide(x)),
        formula="the natural logarithm of $0",
        latex=r"\ln($0)",
        names="ln($n0)",
        numbers="ln($0)",
        latex_numbers=r"\ln\left($0\right)",
        numpy="np.log($0)",
        adjoint=("divide d 0",),
    ),
    "negate": Operation(
        value=np.negative,
        formula="−$0",
        latex="-$0",
        names="−$n0",
        numbers="−$b0",
        latex_numbers="-$b0",
        numpy="-$0",
        hidden=0.0,
        adjoint=("negate d",),
    ),
    # The adjoint of a whole softmax: from the weights, their gradient and δ.
    "softmax_gradient": Operation(
        value=lambda weights, d_weights, delta: weights * (d_weights - delta),
        formula="$0·($1 − $2)",
        latex=r"$0 \cdot ($1 - $2)",
        names="$n0 · ($n1 − $n2)",
        numbers="$0 × ($1 − $b2)",
        latex_numbers=r"$b0 \cdot \left($1 - $b2\right)",
        numpy="$0 * ($1 - $2)",
        hidden=0.0,
        adjoint=("subtract 1 2, multiply d _", "multiply d 0", "multiply d 0, negate _"),
        overflows=True,
    ),
    "half_square": Operation(
        value=lambda a, b: np.square(a - b) / 2,
        formula="½·($0 − $1)²",
        latex=r"\frac{1}{2} ($0 - $1)^2",
        names="½·($n0 − $n1)²",
        numbers="½ × ($0 − $b1)²",
        latex_numbers=r"\frac{1}{2} \left($0 - $b1\right)^2",
        numpy="($0 - $1) ** 2 / 2",
        adjoint=("subtract 0 1, multiply d _", "subtract 1 0, multiply d _"),
        overflows=True,
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
    "same": replace(_COPY, formula="$0", latex="$0", hidden=0.0, adjoint=("same d",)),
    "split": replace(
        _COPY,
        formula="$0 split into $a0 heads of width $a2",
        latex=r"\mathrm{split}($0)",
        adjoint=("merge d",),
    ),
    "merge": replace(
        _COPY,
        formula="the heads of $0 side by side",
        latex=r"\mathrm{merge}($0)",
        adjoint=("split d",),
    ),
    **MECHANISM_OPERATIONS,
    **POSITION_OPERATIONS,
    **BLOCK_OPERATIONS,
}


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
    seen = None if visible is None else ("i", "j")[-visible.ndim :]
    block = block_of(op, letters, tuple(own for _, own in operands), seen)
    with np.errstate(all="ignore"):  # NaN and infinity are results here, not accidents
        return block([array for array, _ in operands], visible, dtype)


@lru_cache(maxsize=4096)
def block_of(
    op: str,
    letters: tuple[str, ...],
    owns: tuple[tuple[str, ...], ...],
    seen: tuple[str, ...] | None,
    lead: tuple[str, ...] = (),
) -> Callable[[Sequence[Array], NDArray[np.bool_] | None, np.dtype[Any]], Array]:
    """What `compute` calls: a function of the operands, of what is visible, and of the dtype.

    `owns` and `seen` are the letters of their axes. `lead` are those of the letters that number
    blocks which are computed at once; `seen` has them too.
    """
    operation = OPERATIONS[op]
    value, hidden = operation.value, operation.hidden
    if value is None:
        raise NotImplementedError(op)
    running = next((one for own in owns for one in own if one not in letters), "")
    turns = _along(op, letters, running, owns, lead)
    runs_over_seen = seen is not None and running in seen
    if seen is not None:
        rest = tuple(letter for letter in seen if letter != running)
        wanted = letters if operation.term or not runs_over_seen else rest
        turn_seen = _aligned(seen, wanted, running)

    def block(
        operands: Sequence[Array], visible: NDArray[np.bool_] | None, dtype: np.dtype[Any]
    ) -> Array:
        own = [turn(one) for turn, one in zip(turns, operands, strict=True)]
        if running:
            counted = turn_seen(visible) if runs_over_seen and visible is not None else None
            result = value(counted, *own)
        else:
            result = value(*own)
        if visible is not None and not runs_over_seen and hidden is not None:
            result = np.where(turn_seen(visible), result, hidden)
        if letters:
            return np.asarray(result).astype(dtype, copy=False)
        return np.asarray(result)  # one number for the whole call keeps its own precision

    return block


def _aligned(own: tuple[str, ...], letters: tuple[str, ...], running: str = "") -> _Turn:
    """Gives an array the axes `letters`, of size 1 where it has none, and last the running one."""
    wanted = (*letters, running) if running in own else letters
    order = [own.index(letter) for letter in wanted if letter in own]
    places = tuple(slice(None) if letter in own else None for letter in wanted)
    moved, added = order != [*range(len(own))], None in places
    if moved:
        return lambda x: x.transpose(order)[places] if added else x.transpose(order)
    return (lambda x: x[places]) if added else _unchanged


def _along(
    op: str,
    letters: tuple[str, ...],
    running: str,
    owns: tuple[tuple[str, ...], ...],
    lead: tuple[str, ...],
) -> list[_Turn]:
    """Gives operands the axis `running` last; in a product's second factor it is a row's."""
    if op != "dot":
        return [_aligned(own, letters, running) for own in owns]
    own, other = owns
    if not lead:
        turned = own[-1] != running, other[0] != running
        return [(lambda x: x.T) if one else _unchanged for one in turned]
    row, column = ([one for one in letters if one in x and one not in lead] for x in owns)
    second = _aligned(other, (*lead, *column), running)
    return [_aligned(own, (*lead, *row), running), lambda x: second(x).swapaxes(-1, -2)]


def _unchanged(array: Array) -> Array:
    return array
