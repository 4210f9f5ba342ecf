"""Learned tables of distances: whether what is added for a distance is that of the opposite one.

A table alone says nothing of its direction. An index that a module keeps beside it does, and so
does the order of T5's buckets. Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.convention import Question
from regard.diagnosis.under_test import FunctionUnderTest

NEAR = 1e-5
# Text that says which bucket a distance has: T5's, or the place of the key minus the query's.
OF_T5 = re.compile(
    r"(?<![a-z])t5(?![a-z])|(key|memory)( position)? *(-|−|minus) *(query|context)", re.IGNORECASE
)


def is_reversed(tested: FunctionUnderTest, added: Array, rows: Array, keys: Array) -> bool:
    """Whether the numbers (H, cells) are those of a learned table with query and key exchanged."""
    question = Question("tables", ({},), reading=tested.callee.number, looks="tables")
    result = tested.put(question)[-1]
    arrays = [one.numbers for one in result.arrays if one.numbers is not None]
    tables = [x for one in arrays for x in (one, one.T) if x.shape[1] == len(added)]
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    for table in tables:
        for place, exchanged in _places(arrays, len(table), rows, keys, OF_T5.search(text)):
            there, back = (table[np.clip(one, 0, None)].T for one in (place, exchanged))
            known = (place >= 0) & (exchanged >= 0)
            if not known.any() or np.abs(there - back)[:, known].max() < NEAR:
                continue
            if np.abs(back - added)[:, known].max() < NEAR:
                return True
    return False


def _places(
    arrays: list[Array], length: int, rows: Array, keys: Array, of_t5: object
) -> Iterator[tuple[Array, Array]]:
    """The rows of a table for each cell, and with query and key exchanged; −1 is not known."""
    count = max(rows.max(), keys.max()) + 1
    for index in arrays:
        whole = index.astype(int)
        if index.shape == (count, count) and (whole == index).all() and 0 < whole.max() < length:
            yield whole[rows, keys], whole[keys, rows]
    if of_t5 and length >= 8:
        far, half = np.abs(rows - keys), length // 2
        known = far < half // 2  # farther ones share buckets
        sides = (half * (keys > rows), half * (rows > keys))
        yield tuple(np.where(known, far + side, -1) for side in sides)  # type: ignore[misc]
