"""What NaN and infinite numbers add to a sum of products in which some keys are hidden.

A hidden number is absent: it is never multiplied, not even by a weight of 0. Must not know
operations. Where a NaN in a result comes from is a question of explanation/questions.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arrays import Array

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sum_of_special(
    counted: NDArray[np.bool_],
    lost: NDArray[np.bool_],
    values: Array,
    taken: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """What NaN and infinite values (…, S, E) add to rows (…, L, S); 0 where there are none.

    A row adds the values of the keys that it counts, subtracts those of the keys that are `taken`
    from it, and adds NaN for those of the keys that it lost: 0 · ∞ is NaN, and so is ∞ − ∞.
    """
    special = ~np.isfinite(values)
    keys = np.flatnonzero(special.any(axis=(*range(special.ndim - 2), -1)))
    counted, lost = counted[..., keys], lost[..., keys]
    taken = np.zeros_like(counted) if taken is None else taken[..., keys]
    values, special = values[..., keys, :], special[..., keys, :]

    def met(rows: NDArray[np.bool_], cells: NDArray[np.bool_]) -> NDArray[np.bool_]:
        if not (rows.any() and cells.any()):
            return np.zeros((*rows.shape[:-1], cells.shape[-1]), np.bool_)
        return np.asarray(rows.astype(np.float32) @ cells.astype(np.float32) > 0)

    up, down = (met(counted, values == x) | met(taken, values == -x) for x in (np.inf, -np.inf))
    nan = met(counted | taken, np.isnan(values)) | met(lost, special) | (up & down)
    return np.where(nan, np.nan, np.where(up, np.inf, np.where(down, -np.inf, 0.0)))
