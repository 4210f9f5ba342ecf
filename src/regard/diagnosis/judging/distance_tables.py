"""Learned tables of distances: whether what is added for a distance is that of the opposite one.

A table alone says nothing of its direction. An index that a module keeps beside it does, and so
does the order of T5's buckets. Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Question
from regard.diagnosis.calls.under_test import FunctionUnderTest

NEAR = 1e-5
# Text that says which bucket a distance has: T5's, or the place of the key minus the query's.
OF_T5 = re.compile(
    r"(?i:(?<![a-z])t5)(?![a-z])|(?i:(key|memory)( position)? *(-|−|minus) *(query|context))"
)


# Text that gives rows to distances in another order than that of the distances.
IN_ANOTHER_ORDER = re.compile(
    r"bucket|meshgrid|wrap|from the end|-(clip|k|max\w*) ?\.\.|negative ind|not (the )?sorted|"
    r"[-−]\w+, ?(\.\.\.|…), ?[-−]1\b",
    re.IGNORECASE,
)


def is_out_of_order(tested: FunctionUnderTest, added: Array, rows: Array, keys: Array) -> bool:
    """Whether distances that grow do not read rows of a learned table one after the other.

    `added` has for each head and cell a number, and then vectors that meet the query and the key.
    """
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    if IN_ANOTHER_ORDER.search(text):
        return False
    width = (added.shape[-1] - 1) // 2
    cells = added[0, :, 1 : 1 + width] if width else added[..., 0].T
    for table in _tables(tested):
        if table.shape[1] != cells.shape[1]:
            continue
        read = {}
        for distance in np.unique(keys - rows):
            alike = np.flatnonzero(keys - rows == distance)
            found = _row_of(table, cells[alike[0]], scaled=bool(width))
            if width and distance == 0 and found is None:
                continue  # the query and the key of a token depend on each other
            if found is None or np.ptp(cells[alike], 0).max() > NEAR:
                break
            read[int(distance)] = found
        else:
            steps = np.diff([*read.values()])
            in_order = bool((steps >= 0).all() or (steps <= 0).all())
            return not in_order or _leaves_rows(read, len(table))
    return False


def is_unscaled(
    tested: FunctionUnderTest, added: Array, rows: Array, keys: Array, width: int
) -> bool:
    """Whether the rows of a table meet queries as they are, although q·k is divided by √D."""
    of_queries = added[0, :, 1 : 1 + width]
    apart = of_queries[rows != keys]  # the query and the key of a token depend on each other
    for table in _tables(tested):
        if table.shape[1] == width > 1 and len(apart):
            near = np.abs(table[None] - apart[:, None]).max(-1).min(1)
            return bool(near.max() < 10 * NEAR)
    return False


def _leaves_rows(read: dict[int, int], count: int) -> bool:
    """Whether rows of a table from −n to n are not read, although all these distances are there."""
    furthest = (count - 1) // 2
    alike = count % 2 == 1 and min(read) <= -furthest and furthest <= max(read)
    return alike and len({*read.values()}) < count - (0 not in read)


def _row_of(table: Array, numbers: Array, *, scaled: bool) -> int | None:
    """The only row of a table that is these numbers, up to a positive factor if `scaled`."""
    if scaled:
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), NEAR)
        numbers = numbers / max(float(np.linalg.norm(numbers)), NEAR)
    near = np.flatnonzero(np.abs(table - numbers).max(1) < 10 * NEAR)
    return int(near[0]) if len(near) == 1 else None


def _tables(tested: FunctionUnderTest) -> list[Array]:
    """The learned arrays with two axes that a function has."""
    question = Question("tables", ({},), reading=tested.callee.number, looks="tables")
    return [one.numbers for one in tested.put(question)[-1].arrays if one.numbers is not None]


def is_reversed(tested: FunctionUnderTest, added: Array, rows: Array, keys: Array) -> bool:
    """Whether the numbers (H, cells) are those of a learned table with query and key exchanged."""
    arrays = _tables(tested)
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
