"""A labelled table of numbers, as every view shows a step, and how it shows itself.

Must not know where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.dataframe import Level, dataframe
from regard.errors import safe_text
from regard.explanation.notation import format_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Longer axes are shown by their first and last few.
FIRST, LAST = 6, 5
DIGITS, LABEL_LENGTH = 4, 14
# What is behind numbers above and below 0 in a notebook: as strong as the number is large.
ABOVE, BELOW, STRENGTH = "217, 120, 10", "42, 114, 184", 0.5


def shown_of(size: int, first: int = FIRST, last: int = LAST) -> list[int | None]:
    """The positions along an axis that are shown, with None in place of those left out."""
    if size <= first + 1 + last:
        return list(range(size))
    return [*range(first), None, *range(size - last, size)]


@dataclass(frozen=True, eq=False, repr=False)
class Table:
    """A labelled matrix, vector (one row) or number: what a view shows of a step.

    `value` is its array of (rows, columns); so is `numpy.asarray(table)`.
    """

    name: str
    symbol: str
    formula: str
    value: Array
    row_labels: tuple[str, ...]
    column_labels: tuple[str, ...]
    row_notes: tuple[str, ...] = ()
    hidden: NDArray[np.bool_] | None = None
    hidden_by: Callable[[int, int], tuple[str, ...]] = lambda row, column: ()
    latex_symbol: str = ""
    row_axis: str = ""  # what its rows are, such as "query rows"
    column_axis: str = ""
    left_out: int = 0  # rows that are missing after the first few
    place: str = ""  # such as "batch 1, head 2", where there are several
    slopes: bool = False  # of the loss: each number says how the loss changes with another one

    def __dir__(self) -> list[str]:
        """What a user needs, without what the views read."""
        return [name for name in super().__dir__() if name not in ("text", "html")]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """The array `value`, for `numpy.asarray` and for NumPy's functions."""
        return np.array(self.value, dtype, copy=copy)

    def to_dataframe(self) -> Any:
        """The numbers as a pandas DataFrame, with the labels as index and columns.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        across: Level = (self.column_axis.removesuffix("s") or None, self.column_labels)
        rows: list[Level] = [(self.row_axis.removesuffix("s") or None, self.row_labels)]
        return dataframe(
            self.value,
            rows if self.row_labels else (),
            across if self.column_labels else (None, [self.name]),
        )

    # --- shown -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{self.name}  {self.formula}  {self._size()}\n{self.text()}"

    def _repr_html_(self) -> str:
        return caption(self.name, self.formula, self._size()) + self.html()

    def _size(self) -> str:
        rows, columns = self.value.shape
        down = counting(rows, self.row_axis or "rows")
        across = counting(columns, self.column_axis or "columns")
        return f"{down} × {across}" + (f"  {self.place}" if self.place else "")

    def text(self) -> str:
        """The numbers and labels as lines of text; large ones by their first and last few."""
        return aligned([row for row, _ in self._words()])

    def html(self) -> str:
        """As `text`, as an HTML table with a colour behind each number."""
        seen = np.isfinite(self.value) & (True if self.hidden is None else ~self.hidden)
        darkest = float(np.abs(self.value[seen].astype(np.float64)).max(initial=0)) or 1.0
        lines = []
        for number, (row, places) in enumerate(self._words()):
            header = bool(self.column_labels) and number == 0
            cells = []
            for position, (word, place) in enumerate(zip(row, (None, *places), strict=True)):
                style = f"text-align: {'right' if position else 'left'}"
                if place is not None and seen[place] and self.value.dtype != np.bool_:
                    share = float(self.value[place]) / darkest
                    hue = ABOVE if share > 0 else BELOW
                    style += f"; background: rgba({hue}, {abs(share) * STRENGTH:.2f})"
                elif place is not None and self.hidden is not None and self.hidden[place]:
                    style += "; opacity: 0.55"
                tag = "th" if header or position == 0 else "td"
                cells.append(f'<{tag} style="{style}">{_spaced(word)}</{tag}>')
            lines.append(f"<tr>{''.join(cells)}</tr>")
        above = f"<div>{escape(self.place)}</div>" if self.place else ""
        style = "border-collapse: collapse; font-variant-numeric: tabular-nums"
        # Classes by which notebooks know that a $ in a label is no formula.
        ignored = "tex2jax_ignore mathjax_ignore"
        return f'{above}<table class="{ignored}" style="{style}">{"".join(lines)}</table>'

    def _words(self) -> list[tuple[tuple[str, ...], Sequence[tuple[int, int] | None]]]:
        """Every line that is shown: its words, the label first, and the places of its cells."""
        rows, columns = self.value.shape
        down: list[int | None] = list(range(rows))
        if self.left_out:
            down.insert(FIRST, None)
        else:
            down = shown_of(rows)
        across = shown_of(columns, FIRST - 1, LAST - 2)
        body = [
            [None if row is None or column is None else (row, column) for column in across]
            for row in down
        ]
        words = [_decimals([self._word(line[k]) for line in body]) for k in range(len(across))]
        lines: list[tuple[tuple[str, ...], Sequence[tuple[int, int] | None]]] = []
        if self.column_labels:
            names = ["…" if k is None else _label(self.column_labels[k]) for k in across]
            lines.append((("", *names), [None] * len(across)))
        for number, (row, line) in enumerate(zip(down, body, strict=True)):
            label = "…" if row is None else _label(self.row_labels[row]) if self.row_labels else ""
            lines.append(((label, *(column[number] for column in words)), line))
        return lines

    def _word(self, place: tuple[int, int] | None) -> str:
        if place is None:
            return "…"
        if self.hidden is not None and self.hidden[place]:
            return hidden_text(self.hidden_by(*place))[0]
        return format_number(float(self.value[place]), DIGITS)


def _spaced(word: str) -> str:
    """A word as HTML; the spaces behind it are as wide as the decimal point and digits there."""
    digits = word.rstrip()
    wide = "\u2007" * (len(word) - len(digits))
    return escape(digits) + (wide if "." in digits or not wide else "\u2008" + wide[1:])


def caption(name: str, formula: str, size: str) -> str:
    """What is above a table in a notebook."""
    return (
        f"<div><strong>{escape(name)}</strong> &emsp;{escape(formula)} &emsp;{escape(size)}</div>"
    )


def counting(count: int, things: str) -> str:
    """A count and its noun, such as ``1 key`` or ``3 query rows``."""
    return f"{count} {things.removesuffix('s') if count == 1 else things}"


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


def _label(label: str) -> str:
    return safe_text(label, LABEL_LENGTH)


def _decimals(words: Sequence[str]) -> list[str]:
    """Numbers of one column with spaces behind, so that their decimal points are in line."""
    behind = [
        len(word) - word.index(".") if "." in word and "e" not in word else 0 for word in words
    ]
    most = max(behind, default=0)
    return [
        word + " " * (most - own) if word[-1:].isdigit() and "e" not in word else word
        for word, own in zip(words, behind, strict=True)
    ]


@lru_cache(256)
def hidden_text(names: tuple[str, ...]) -> tuple[str, str]:
    """What a hidden cell shows, the first rule and how many more; and the names of all."""
    first, *more = names or ("hidden",)
    short = safe_text(first, 12) + (f" +{len(more)}" if more else "")
    return short, ", ".join(safe_text(name, 80) for name in names)
