"""One head of an explanation, some rows at a time, so that no view needs a whole long step.

Owns which blocks hold the rows that are asked for. Must not know words or how anything is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arrays import Array
from regard.explanation.derivation import verdict
from regard.explanation.labels import AXIS_NAMES, batch_position, head_position, own_head
from regard.explanation.table import Table
from regard.explanation.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Head:
    """One head of one batch element; every step of it is a matrix (rows, columns)."""

    def __init__(
        self, explanation: Trace, head: int | None, batch: tuple[int, ...] | None = None
    ) -> None:
        self.explanation = explanation
        self.source = explanation.source
        self.number = head_position(self.source.sizes, head)
        self.batch = batch_position(self.source.lead, batch)

    def shape(self, step: str) -> tuple[int, int]:
        """How many rows and columns a step has; a vector over the queries is a column."""
        axes = [axis for axis in self.source.steps[step].axes if axis not in ("H", "G")]
        sizes = [self.source.sizes[axis] for axis in axes]
        if axes == ["L"]:
            return sizes[0], 1
        rows, columns = [1, 1, *sizes][-2:]
        return rows, columns

    def blocks(self, step: str) -> Iterator[tuple[int, Array, NDArray[np.bool_]]]:
        """The rows of a step, some at a time: the first row, the numbers, which are hidden."""
        for rows in self._row_blocks(step):
            yield rows.start, self._block(step, rows), self._hidden(step, rows)

    def rows(self, step: str, wanted: Sequence[int]) -> Array:
        """Some rows of a step, in ascending order."""
        found = [np.empty((0, self.shape(step)[1]), np.bool_)]
        for rows in self._row_blocks(step):
            own = [row - rows.start for row in wanted if row in rows]
            if own:
                found.append(self._block(step, rows)[own])
        return np.concatenate(found)

    def table(self, step: str, wanted: Sequence[int] | None = None) -> Table:
        """A step, or some rows of it, as a labelled table."""
        explained = self.explanation.steps[step]
        hides = self.explanation.hides(explained.declared)
        shown = range(self.shape(step)[0]) if wanted is None else wanted

        def picked(words: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(words[row] for row in shown) if words else ()

        def hidden_by(row: int, column: int) -> tuple[str, ...]:
            if not hides:
                return ()
            return verdict(self.source, self.batch, self.number, shown[row], column).hidden_by()

        rows, columns = self.explanation.matrix_axes(explained.declared)
        return Table(
            explained.name,
            explained.symbol,
            explained.formula,
            self.rows(step, shown),
            picked(explained.row_labels),
            explained.column_labels,
            picked(explained.row_notes),
            ~self.rows("visible", shown) if hides else None,
            hidden_by,
            explained.declared.latex_symbol,
            AXIS_NAMES.get(rows or "", ""),
            AXIS_NAMES.get(columns or "", ""),
        )

    def darkest(self, table: Table) -> float:
        """The number that is darkest where a step's table is shaded; 0 where nothing is."""
        axes = self.source.steps[table.name].axes
        if table.values.dtype == np.bool_ or not axes or axes[-1] == "L":
            return 0.0
        if table.name == "weights":
            return 1.0
        seen = np.isfinite(table.values)
        if table.hidden is not None:
            seen &= ~table.hidden
        return float(np.abs(table.values[seen]).max(initial=0))

    def _row_blocks(self, step: str) -> list[range]:
        by_query = "L" in self.source.steps[step].axes
        return self.source.row_blocks() if by_query else [range(self.shape(step)[0])]

    def _block(self, step: str, rows: range) -> Array:
        declared = self.source.steps[step]
        head = own_head(self.source.sizes, declared, self.number) or 0
        asked = rows if "L" in declared.axes else range(1)
        block = np.asarray(self.source.block(step, self.batch, head, asked))
        return block.reshape(len(rows), self.shape(step)[1])

    def _hidden(self, step: str, rows: range) -> NDArray[np.bool_]:
        if not self.explanation.hides(self.source.steps[step]):
            return np.zeros((len(rows), 1), np.bool_)
        return ~self._block("visible", rows)


def heads(explanation: Trace) -> Iterator[Head]:
    """Every head of every batch element."""
    for batch in np.ndindex(*explanation.batch_shape):
        for head in range(explanation.heads or 1):
            yield Head(explanation, head, batch)
