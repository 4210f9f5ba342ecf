"""One head of one batch element of an explanation, through all its steps.

Must not know words or how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arrays import Array
from regard.explanation.labels import Batch, batch_position, head_position, own_head
from regard.explanation.table import Table
from regard.explanation.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Head:
    """One head of one batch element; every step of it is a matrix (rows, columns)."""

    def __init__(self, explanation: Trace, head: int | None, batch: Batch | None = None) -> None:
        self.explanation = explanation
        self.source = explanation.source
        self.number = head_position(self.source.sizes, head)
        self.batch = batch_position(self.source.lead, batch)

    def shape(self, step: str) -> tuple[int, int]:
        """How many rows and columns a step has; a vector over the queries is a column."""
        return self.explanation.steps[step].matrix_shape

    def blocks(self, step: str) -> Iterator[tuple[int, Array, NDArray[np.bool_]]]:
        """The rows of a step, some at a time: the first row, the numbers, which are hidden."""
        return self.explanation.steps[step].blocks(self._own(step), self.batch)

    def rows(self, step: str, wanted: Sequence[int]) -> Array:
        """Some rows of a step, in ascending order."""
        return self.explanation.steps[step].rows(wanted, self._own(step), self.batch)

    def table(self, step: str, wanted: Sequence[int] | None = None) -> Table:
        """A step, or some rows of it, as a labelled table."""
        shown = range(self.shape(step)[0]) if wanted is None else wanted
        return self.explanation.steps[step].excerpt(shown, self._own(step), self.batch)

    def darkest(self, table: Table) -> float:
        """The number that is darkest where a step's table is shaded; 0 where nothing is."""
        axes = self.source.steps[table.name].axes
        if table.value.dtype == np.bool_ or not axes or axes[-1] == "L":
            return 0.0
        if table.name == "weights":
            return 1.0
        seen = np.isfinite(table.value)
        if table.hidden is not None:
            seen &= ~table.hidden
        return float(np.abs(table.value[seen]).max(initial=0))

    def _own(self, step: str) -> int:
        return own_head(self.source.sizes, self.source.steps[step], self.number) or 0


def heads(explanation: Trace) -> Iterator[Head]:
    """Every head of every batch element."""
    for batch in np.ndindex(*explanation.batch_shape):
        for head in range(explanation.heads or 1):
            yield Head(explanation, head, batch)
