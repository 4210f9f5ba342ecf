"""Where queries are when texts are packed into one row, or end before the row does: by plain loops.

Owns what docs/semantics.md says of `offset` beside Segments and Lengths. Shares no code with the
package.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def positions_in_texts(
    offset: Any,
    batch: tuple[int, ...],
    queries: int,
    keys: int,
    *,
    text_of_query: Callable[[tuple[int, ...], int], Any] = lambda b, i: 0,
    text_of_key: Callable[[tuple[int, ...], int], Any] = lambda b, j: 0,
    length: Callable[[tuple[int, ...]], int] | None = None,
) -> np.ndarray:
    """The position of each query, (…, L); key j is at j. `offset` as regard takes it, not None."""
    made = np.zeros((*batch, queries), np.int64)
    added = np.broadcast_to(0 if isinstance(offset, str) else offset, batch)
    for b in np.ndindex(*batch):
        for i in range(queries):
            text = text_of_query(b, i)
            rows = [r for r in range(queries) if text_of_query(b, r) == text]
            own = [j for j in range(keys) if text_of_key(b, j) == text]
            if not isinstance(offset, str):
                first = own[0] if own else 0
                made[(*b, i)] = first + i - rows[0] + added[b]
                continue
            end = own[-1] + 1 if own else 0
            if length is not None:
                end = min(end, length(b))
            made[(*b, i)] = end - 1 - (rows[-1] - i)
    return made
