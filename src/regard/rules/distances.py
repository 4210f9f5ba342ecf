"""Numbers for how far apart two positions are: the slopes of heads, and buckets of distances.

Owns their formulas. Must not know calls.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@lru_cache(maxsize=64)
def slopes(heads: int) -> NDArray[np.float64]:
    """One for each head (Press, Smith and Lewis 2021)."""
    power = 2 ** max(0, heads.bit_length() - 1)
    whole = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * (heads - power), 2) / power)
    made = np.concatenate([whole, between])[:heads]
    made.setflags(write=False)
    return made


def buckets(
    ahead: NDArray[Any], count: int, bidirectional: bool, max_distance: int
) -> NDArray[np.int64]:
    """The bucket, of so many, of each difference between the positions of a key and of a query."""
    first: Any = 0
    if bidirectional:
        count //= 2
        first = np.where(ahead > 0, count, 0)
        distance = np.abs(ahead)
    else:
        distance = np.maximum(-ahead, 0)
    exact = count // 2
    grown = math.log(max_distance / exact)
    far = np.log(np.maximum(distance, exact) / exact) / grown * (count - exact)
    far = np.minimum(exact + far.astype(np.int64), count - 1)
    return np.asarray(first + np.where(distance < exact, distance, far), np.int64)
