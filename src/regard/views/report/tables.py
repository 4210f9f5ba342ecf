"""One step as a printed table: which text each cell has, how dark it is, how it is aligned.

Owns what a reader without JavaScript sees of the numbers; the page's script makes the same cells.
Must not know HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isfinite
from typing import NamedTuple

from regard.errors import safe_text
from regard.explanation.notation import format_number
from regard.explanation.table import Table, hidden_text
from regard.views.head_view import Head

# Larger matrices are drawn, not printed.
MOST_PRINTED = 32
LEVELS = 9  # of shade
EXCERPT = 8  # rows and columns of a matrix that is too large to be printed
LABEL_LENGTH = 60


class PrintedCell(NamedTuple):
    """What one cell shows.

    `pad` follows it, unseen, so that decimal points align; `mark` precedes a wrong number.
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
    rows: tuple[tuple[PrintedCell, ...], ...]
    notes: tuple[str, ...] = ()
    notes_header: str = ""
    rows_left: int = 0
    columns_left: int = 0

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
    most = MOST_PRINTED if is_printed((rows, columns)) else EXCERPT
    shown = min(rows, most), min(columns, most)
    table = head.table(step, range(shown[0]))
    largest = head.darkest(table)
    cells = [
        [_cell(table, row, column, value, largest, digits) for column, value in enumerate(values)]
        for row, values in enumerate(table.value[:, : shown[1]].tolist())
    ]
    return Printed(
        _labels(table.column_labels[: shown[1]]),
        _labels(table.row_labels),
        tuple(map(tuple, _aligned(cells))),
        _labels(table.row_notes),
        rows_left=rows - shown[0],
        columns_left=columns - shown[1],
    )


def turned(one: Printed) -> Printed:
    """The same table with its rows as columns."""
    cells = [[cell._replace(pad="") for cell in column] for column in zip(*one.rows, strict=True)]
    return Printed(
        one.labels,
        one.headers,
        tuple(map(tuple, _aligned(cells))),
        rows_left=one.columns_left,
        columns_left=one.rows_left,
    )


@lru_cache(maxsize=256)
def _labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(safe_text(label, LABEL_LENGTH) for label in labels)


def figures(
    headers: tuple[str, ...],
    labels: tuple[str, ...],
    rows: Sequence[Sequence[float]],
    digits: int,
    notes: tuple[str, ...] = (),
    notes_header: str = "",
) -> Printed:
    """A plain table of numbers, without shades."""
    cells = tuple(map(tuple, shaded(rows, 0, digits)))
    return Printed(headers, _labels(labels), cells, _labels(notes), notes_header)


def _cell(
    table: Table, row: int, column: int, value: float, largest: float, digits: int
) -> PrintedCell:
    if table.hidden is not None and table.hidden[row, column]:
        rule, names = hidden_text(table.hidden_by(row, column))
        return PrintedCell(rule, "hidden", hint=f"hidden by: {names}")
    if value is False:
        return PrintedCell("0", "off")
    return _number_cell(float(value), largest, digits)


def _number_cell(value: float, largest: float, digits: int) -> PrintedCell:
    """A number and its shade, a ninth darker for each ninth of the largest."""
    if not isfinite(value):
        return PrintedCell(format_number(value), "odd")
    level = min(LEVELS, ceil(LEVELS * abs(value) / largest)) if largest else 0
    shade = f"{'n' if value < 0 else 'p'}{level}" if level else ""
    return PrintedCell(format_number(value, digits), shade)


def shaded(rows: Sequence[Sequence[float]], largest: float, digits: int) -> list[list[PrintedCell]]:
    """Numbers as cells of one table; the `largest` would be darkest."""
    return _aligned([[_number_cell(value, largest, digits) for value in row] for row in rows])


def _aligned(rows: list[list[PrintedCell]]) -> list[list[PrintedCell]]:
    """The same cells with what has to follow each number so that a column's points align."""
    columns = [_padded(column) for column in zip(*rows, strict=True)]
    return list(map(list, zip(*columns, strict=True))) if columns else rows


def _padded(column: Sequence[PrintedCell]) -> list[PrintedCell]:
    """Cells of a column; words, and numbers such as 1e-13, are not aligned."""
    words = [cell.style in ("hidden", "odd") or "e" in cell.text for cell in column]
    sizes = [len("".join(cell.text.partition(".")[1:])) for cell in column]  # from the point on
    most = max((size for size, word in zip(sizes, words, strict=True) if not word), default=0)
    full = "." + "0" * (most - 1)
    return [
        cell if word or size == most else cell._replace(pad=full[size:])
        for cell, size, word in zip(column, sizes, words, strict=True)
    ]
