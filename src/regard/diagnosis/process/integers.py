"""Integers in the place of other numbers, as in a cache of 8 or of 4 bits: whether they fit these.

Must not know how a function is called, nor what it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from regard.boundary.arrays import Array

FEWEST = 7  # values between the least and the largest integer: those of 4 bits, or of 3
FEWEST_OF_SHORT, SHORT = 30, 6  # more of them where a row is so short that others fit by chance
NEAR = 0.75  # of a step, by which a number and its integer may differ: half a step, and more
MOST_ROWS = 4000  # of integers


def steps_of(array: Array, integers: Sequence[Array]) -> Array:
    """The distance of two neighbours where integers are those of `array`, rounded; else 0.

    Rows along one of its axes have each a scale and an offset of their own, or all have the same.
    """
    for axis in range(array.ndim - 1, -1, -1):
        rows = np.moveaxis(array, axis, -1)
        length = rows.shape[-1]
        of_integers = [*_rows(integers, length)][:MOST_ROWS]
        if length < 4 or not of_integers:
            continue
        steps = _steps(rows.reshape(-1, length).astype(float), np.stack(of_integers))
        if steps is not None:
            whole = np.broadcast_to(steps[:, None], (len(steps), length)).reshape(rows.shape)
            return np.moveaxis(whole, -1, axis).copy()
    return np.zeros(array.shape)


def _rows(integers: Sequence[Array], length: int) -> Iterator[Array]:
    """The rows of so many integers along any axis that have enough different ones."""
    fewest = FEWEST_OF_SHORT if length < SHORT else FEWEST
    for one in integers:
        for axis in range(one.ndim):
            if one.shape[axis] == length:
                for row in np.moveaxis(one, axis, -1).reshape(-1, length):
                    if np.ptp(row) >= fewest:
                        yield row


def _steps(rows: Array, integers: Array) -> Array | None:
    """For each row how far two neighbours are apart in the finest integers that fit it."""
    centred = integers - integers.mean(-1, keepdims=True)
    own = rows - rows.mean(-1, keepdims=True)
    scales = own @ centred.T / np.square(centred).sum(-1)
    with np.errstate(all="ignore"):
        apart = np.abs(own[:, None] - scales[..., None] * centred).max(-1)
    fits = (apart <= NEAR * np.abs(scales)) & (scales != 0)
    if not fits.any(-1).all():
        return None
    return np.asarray(np.where(fits, np.abs(scales), np.inf).min(-1))
