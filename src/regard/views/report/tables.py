"""One step as a printed table: which text each cell has, how dark it is, how it is aligned.

Owns what a reader without JavaScript sees of the numbers; the page's script makes the same cells.
Must not know HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import safe_text
from regard.explanation.notation import format_number
from regard.explanation.table import Table
from regard.views.head_view import Head
from regard.views.report.plan import MOST_PRINTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

# As dark as a cell can be.
LEVELS = 9
# Of a matrix that is too large to be printed, so many rows and columns.
EXCERPT = 8
LABEL_LENGTH, RULE_LENGTH = 60, 12


@dataclass(frozen=True)
class Cell:
    """What one cell shows: `pad` stands after it, unseen, so that points stand below each other.

    `mark` stands before a number that is not what it should be.
    """

    text: str
    style: str = ""
    pad: str = ""
    hint: str = ""
    mark: str = ""


@dataclass(frozen=True)
class Printed:
    """A step, or the beginning of a large one."""

    headers: tuple[str, ...]
    labels: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...]
    rows_left: int
    columns_left: int

    @property
    def whole(self) -> bool:
        """Whether nothing was left out."""
        return not self.rows_left and not self.columns_left


def is_printed(shape: tuple[int, int]) -> bool:
    """Whether a matrix is small enough to be shown in digits as a whole."""
    return max(shape) <= MOST_PRINTED


def printed(head: Head, step: str, digits: int) -> Printed:
    """One head of a step, or the first rows and columns of a large one."""
    rows, columns = head.shape(step)
    small = is_printed((rows, columns))
    shown_rows, shown_columns = (
        (rows, columns) if small else (min(rows, EXCERPT), min(columns, EXCERPT))
    )
    table = head.table(step, range(shown_rows))
    largest = _scale(table, step, head)
    cells = [
        [_cell(table, row, column, largest, digits) for column in range(shown_columns)]
        for row in range(shown_rows)
    ]
    return Printed(
        tuple(safe_text(label, LABEL_LENGTH) for label in table.column_labels[:shown_columns]),
        tuple(safe_text(label, LABEL_LENGTH) for label in table.row_labels),
        tuple(tuple(row) for row in _aligned(cells)),
        tuple(safe_text(note, LABEL_LENGTH) for note in table.row_notes),
        rows - shown_rows,
        columns - shown_columns,
    )


def figures(
    headers: tuple[str, ...],
    labels: tuple[str, ...],
    rows: list[list[float]],
    digits: int,
    notes: tuple[str, ...] = (),
) -> Printed:
    """A plain table of numbers, without shades."""
    return Printed(
        headers,
        tuple(safe_text(label, LABEL_LENGTH) for label in labels),
        tuple(tuple(row) for row in shaded(rows, 0, digits)),
        tuple(safe_text(note, LABEL_LENGTH) for note in notes),
        0,
        0,
    )


def _scale(table: Table, step: str, head: Head) -> float:
    """The number that is darkest; 0 where nothing is shaded."""
    axes = head.source.steps[step].axes
    if table.values.dtype == np.bool_ or not axes or axes[-1] == "L":
        return 0.0
    if step == "weights":
        return 1.0
    values: NDArray[Any] = np.asarray(table.values, np.float64)
    seen = np.isfinite(values)
    if table.hidden is not None:
        seen &= ~table.hidden
    return float(np.abs(values[seen]).max(initial=0))


def _cell(table: Table, row: int, column: int, largest: float, digits: int) -> Cell:
    if table.hidden is not None and table.hidden[row, column]:
        assert table.hidden_by is not None
        names = table.hidden_by(row, column)
        name = safe_text(names[0] if names else "hidden", RULE_LENGTH)
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
        hint = "hidden by: " + ", ".join(safe_text(name, 80) for name in names)
        return Cell(name + more, "hidden", hint=hint)
    value = float(table.values[row, column])
    if table.values.dtype == np.bool_ and not value:
        return Cell("0", "off")
    if not np.isfinite(value):
        return Cell(format_number(value), "odd")
    return Cell(rounded(value, digits), _shade(value, largest))


def shaded(rows: Sequence[Sequence[float]], largest: float, digits: int) -> list[list[Cell]]:
    """Numbers as cells of one table; the `largest` would be darkest."""
    return _aligned(
        [
            [
                Cell(rounded(value, digits), _shade(value, largest))
                if np.isfinite(value)
                else Cell(format_number(value), "odd")
                for value in row
            ]
            for row in rows
        ]
    )


def rounded(value: float, digits: int) -> str:
    """A number with so many decimals; zeros at its end stay where they are not the whole truth.

    >>> rounded(0.3, 4), rounded(0.30004505, 4)
    ('0.3', '0.3000')
    """
    text = format_number(value, digits)
    if "e" in text or not digits or text == format_number(value, max(digits, 8)):
        return text
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction:0<{digits}}"


def _shade(value: float, largest: float) -> str:
    level = min(LEVELS, ceil(LEVELS * abs(value) / largest)) if largest else 0
    return f"{'n' if value < 0 else 'p'}{level}" if level else ""


def _aligned(rows: list[list[Cell]]) -> list[list[Cell]]:
    """The same cells with what has to follow each number so that a column's points align."""
    if len(rows) < 2:
        return rows
    widths = [
        max((len(_fraction(cell)) for cell in column), default=0)
        for column in zip(*rows, strict=True)
    ]
    return [
        [
            Cell(cell.text, cell.style, _padding(cell, width), cell.hint)
            for cell, width in zip(row, widths, strict=True)
        ]
        for row in rows
    ]


def _fraction(cell: Cell) -> str:
    """The point and what follows it; words and numbers such as 1e-13 are not aligned."""
    point = cell.text.find(".")
    plain = cell.style not in ("hidden", "odd") and "e" not in cell.text
    return cell.text[point:] if plain and point >= 0 else ""


def _padding(cell: Cell, width: int) -> str:
    if cell.style in ("hidden", "odd") or "e" in cell.text:
        return ""
    own = _fraction(cell)
    full = "." + "0" * (width - 1) if width else ""
    return full[len(own) :]
