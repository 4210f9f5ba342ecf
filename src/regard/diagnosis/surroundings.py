"""What a function computes around attention: a normalisation before it or after it, and its input
added.

Rows of which a normalisation makes the same rows pass it unchanged, so that what it does is judged
with the rest. Must not know a function, nor any probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

import numpy as np

from regard.boundary.arrays import Array

Place = Literal["", "sum", "sum twice", "result"]


@dataclass(frozen=True)
class Surroundings:
    """A normalisation of the input, whether the input is added, and a normalisation at the end."""

    before: bool = False
    adds: bool = False
    last: Place = ""  # what the last one gets: the sum with the input, once more, or what is added
    centred: bool = True  # a mean is subtracted
    epsilon: float = 0.0
    outside: bool = False  # it is added to the root
    unbiased: bool = False  # squares are divided by one less than there are
    factor: float = 1.0  # of the rows that the function gets

    @classmethod
    def checked(cls, content: Sequence[Any]) -> Self:
        """What the other process says of them, or a ValueError."""
        found = cls(*content)
        defaults = (getattr(cls, one.name) for one in fields(cls))
        if [*map(type, content)] != [*map(type, defaults)] or found.last not in get_args(Place):
            raise ValueError("these are no surroundings")
        return found

    def rows(self, rows: Array) -> Array:
        """Rows with a mean of 0, and as large as the normalisation leaves them."""
        if not self.before:
            return rows
        apart = rows - rows.mean(-1, keepdims=True)
        size = rows.shape[-1]
        squares = (1 - self.epsilon) ** 2 if self.outside else 1 - self.epsilon
        squares *= (size - 1) / size if self.unbiased else 1.0
        lengths = np.sqrt(np.square(apart).mean(-1, keepdims=True) / squares)
        return np.asarray(apart / np.where(lengths > 0, lengths, 1.0))

    def finish(self, result: Array, rows: Array) -> Array:
        """What a function returns that computes this around attention."""
        if rows.shape != result.shape:
            return result
        rows = self.factor * rows
        result = self._normalised(result) if self.last == "result" else result
        whole = rows + result if self.adds else result
        whole = self._normalised(whole) if self.last in ("sum", "sum twice") else whole
        return self._normalised(whole) if self.last == "sum twice" else whole

    def _normalised(self, rows: Array) -> Array:
        apart = rows - rows.mean(-1, keepdims=True) if self.centred else rows
        size = rows.shape[-1] - self.unbiased
        squares = np.square(apart).sum(-1, keepdims=True) / size
        if self.outside:
            return np.asarray(apart / (np.sqrt(squares) + self.epsilon))
        return np.asarray(apart / np.sqrt(squares + self.epsilon))
