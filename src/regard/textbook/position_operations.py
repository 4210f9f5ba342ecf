"""The operations of positions: angles, rotation, distances, and a look-up in a table.

One entry each, as in operations.py, which has them in its table. Must not know which steps there
are.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.boundary.arrays import Array
from regard.textbook.mechanism_operations import sum_of
from regard.textbook.operation import Operation, wide


def _rotate(x: Array, cosine: Array, other: Array, sine: Array) -> Array:
    # An angle of 0 leaves a number alone, whatever the other one of its pair is.
    return np.asarray(x * cosine + np.where(sine == 0, 0, other * sine))


_COSINE = Operation(
    value=lambda x: np.cos(wide(x)),
    formula="cos($0)",
    latex=r"\cos($0)",
    names="cos($n0)",
    numbers="cos($0)",
    latex_numbers=r"\cos\left($0\right)",
    numpy="np.cos($0)",
    adjoint=("sin 0, multiply d _, negate _",),
)

# The third operand is the other number of a pair; how the gradient goes on: gradients.py.
_ROTATE = Operation(
    value=_rotate,
    formula="$0·$1 + $2⊥·$3",
    latex=r"$0 \cdot $1 + {$2}^{\perp} \cdot $3",
    names="$n0·$n1 + $n2·$n3",
    numbers="$0 × $b1 + $b2 × $b3",
    latex_numbers=r"$b0 \cdot $b1 + $b2 \cdot $b3",
    numpy="$0 * $1 + ($2 * $3 if $3 else 0.0)",
    adjoint=("rotate_back", ""),
    overflows=True,
)

POSITION_OPERATIONS: dict[str, Operation] = {
    "cos": _COSINE,
    "sin": replace(
        _COSINE,
        value=lambda x: np.sin(wide(x)),
        formula="sin($0)",
        latex=r"\sin($0)",
        names="sin($n0)",
        numbers="sin($0)",
        latex_numbers=r"\sin\left($0\right)",
        numpy="np.sin($0)",
        adjoint=("cos 0, multiply d _",),
    ),
    # A product that is 0, not −0, at position 0 where a frequency is negative.
    "angle": Operation(
        value=lambda position, frequency: position * frequency + 0.0,
        formula="$0·$1",
        latex=r"$0 \cdot $1",
        names="$n0 · $n1",
        numbers="$0 × $1",
        latex_numbers=r"$b0 \cdot $b1",
        numpy="$0 * $1 + 0.0",
        overflows=True,
    ),
    "rotate": _ROTATE,
    # Its gradient, by the opposite angle; the two are each other's adjoint.
    "rotate_back": replace(
        _ROTATE,
        value=lambda x, cosine, other, sine: _rotate(x, cosine, other, -sine),
        formula="$0·$1 − $2⊥·$3",
        latex=r"$0 \cdot $1 - {$2}^{\perp} \cdot $3",
        names="$n0·$n1 − $n2·$n3",
        numbers="$0 × $b1 − $b2 × $b3",
        latex_numbers=r"$b0 \cdot $b1 - $b2 \cdot $b3",
        numpy="$0 * $1 - ($2 * $3 if $3 else 0.0)",
        adjoint=("rotate", ""),
    ),
    "apart": Operation(
        value=lambda a, b: np.abs(a - b),
        formula="|$0 − $1|",
        latex="|$0 - $1|",
        names="|$n0 − $n1|",
        numbers="|$0 − $b1|",
        latex_numbers=r"\left|$0 - $b1\right|",
        numpy="np.abs($0 - $1)",
    ),
    # The number of a table that is at a given place.
    "pick": Operation(
        value=sum_of(lambda number, place, wanted: np.where(place == wanted, number, 0.0)),
        formula="$0 where $1 = $2",
        latex=r"$0 \text{ where } $1 = $2",
        term="$0 where $1 = $2, else 0",
        latex_numbers=r"⟨$b0 [$1 = $2]| + ⟩",
        numpy="np.sum([⟨$0 * ($1 == $2)|, ⟩])",
        hidden=0.0,
        adjoint=("pick d 1 2", ""),
        total="sum",
    ),
}
