"""A labelled table of numbers, as every view shows a step.

Must not know where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from regard.boundary.arrays import Array
from regard.errors import safe_text
from regard.explanation.notation import format_number

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# How much of a table is printed.
MOST_ROWS, MOST_COLUMNS = 20, 10


@dataclass(frozen=True, repr=False)
class Table:
    """A labelled matrix, vector (one row) or number: what a view shows of a step."""

    name: str
    symbol: str
    formula: str
    values: Array  # (rows, columns)
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_notes: tuple[str, ...] = ()
    hidden: NDArray[np.bool_] | None = None
    hidden_by: Callable[[int, int], tuple[str, ...]] = lambda row, column: ()
    latex_symbol: str = ""
    row_axis: str = ""  # what its rows are, such as "query rows"
    column_axis: str = ""

    def rule(self, row: int, column: int) -> str:
        """The first rule that hides a cell, shortened, and how many more there are."""
        first, *more = self.hidden_by(row, column) or ("hidden",)
        return safe_text(first, 12) + (f" +{len(more)}" if more else "")

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        shown = range(min(columns, MOST_COLUMNS))
        more = ("…",) if columns > MOST_COLUMNS else ()
        lines = []
        if self.column_labels:
            lines.append(("", *(safe_text(self.column_labels[k], 20) for k in shown), *more))
        for number in range(min(rows, MOST_ROWS)):
            label = safe_text(self.row_labels[number], 20) if self.row_labels else ""
            cells = [format_number(float(self.values[number, k]), 6) for k in shown]
            lines.append((label, *cells, *more))
        title = f"{self.name}  {self.formula}  {rows} × {columns}"
        rest = ["…"] if rows > MOST_ROWS else []
        return "\n".join([title, *([aligned(lines)] if lines else []), *rest])


def aligned(rows: Sequence[Sequence[str]], place: Callable[[str, int], str] = str.rjust) -> str:
    """Rows of words as lines of columns: the first to the left, the others as `place` says."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            place(word, width) if number else word.ljust(width)
            for number, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
