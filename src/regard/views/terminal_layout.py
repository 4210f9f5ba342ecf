"""Text in a terminal: prose, headings, tables and terms, laid out with rich.

Owns widths, alignment and the spelling of symbols where only ASCII can be printed. Digits are never
hidden, wrapped or cut. Must not know which steps there are.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

from regard.errors import safe_text
from regard.explanation.notation import format_number
from regard.explanation.table import FIRST, LAST, Table, hidden_text, shown_of
from regard.views.colours import shading

DIGITS = 8
LABEL_WIDTH, HEADER_WIDTH = 24, 14
PROSE_WIDTH = 88

STRONG, FAINT, ALARM = Style(bold=True), Style(dim=True), Style(bold=True, color="red")


@dataclass(frozen=True)
class Cell:
    """What one cell of a table prints. A word is not aligned on the decimal point."""

    text: str
    style: Style | None = None
    word: bool = False


class Layout:
    """Prints lines in the width, digits, colours and characters that a console has."""

    def __init__(self, console: Console, digits: int | None) -> None:
        self.console = console
        self.digits = DIGITS if digits is None else digits
        self.width = max(console.width, 20)
        self.ascii = not console.encoding.lower().startswith("utf")
        self.coloured = console.color_system is not None and not console.no_color
        # With sixteen colours of the user's own choosing no contrast is certain.
        self.shaded = console.color_system in ("256", "truecolor") and self.coloured

    def number(self, value: float) -> str:
        return format_number(value, self.digits)

    def spelled(self, text: str, *, label: bool = False) -> str:
        """The text in the characters that can be printed."""
        return to_ascii(text, label=label) if self.ascii else text

    # --- lines ---

    def line(self, text: str | Text, style: Style | None = None) -> None:
        shown = Text(text, style=style or "") if isinstance(text, str) else text
        plain = self.spelled(shown.plain)
        if len(plain) == len(shown.plain):
            shown.plain = plain
        else:
            shown = Text(plain)  # spans would no longer fit; ASCII terminals forgo styles
        if not self.shaded:
            shown.rstrip()
        self.console.print(shown, soft_wrap=True)

    def gap(self) -> None:
        self.console.print()

    def say(self, text: str, style: Style | None = None, indent: int = 0) -> None:
        """Prose, wrapped between words."""
        width = min(self.width, PROSE_WIDTH) - indent
        for wrapped in _wrap(self.spelled(text), width):
            self.line(" " * indent + wrapped, style)

    def section(self, title: str = "") -> None:
        self.gap()
        start = f"── {title} " if title else ""
        rule = start + "─" * max(min(self.width, PROSE_WIDTH) - cell_len(start), 2)
        self.line(rule, STRONG if title else FAINT)
        if title:
            self.gap()

    def heading(self, parts: Sequence[tuple[str, Style | None]]) -> None:
        """A name, a formula, a size: on one line as far as they fit."""
        text = Text()
        for part, style in parts:
            part = self.spelled(part)
            if text and cell_len(text.plain) + 3 + cell_len(part) > self.width:
                self.line(text)
                text = Text("  ")
            elif text:
                text.append("   ")
            text.append(part, style or "")
        self.line(text)

    def equation(self, name: str, sides: Sequence[str]) -> None:
        """A name and what it equals, one line for each; long sides go below the name."""
        start = self.spelled(f"  {name}")
        sides = [self.spelled(side) for side in sides]
        if len(sides) > 1 and max(map(cell_len, sides)) > self.width - cell_len(start) - 3:
            self.line(start)
            start = "   "
        for side in sides:
            first, *others = _wrap(side, max(self.width - cell_len(start) - 3, 12))
            self.line(f"{start} = {first}")
            start = " " * cell_len(start)
            for more in others:
                self.line(f"{start}   {more}")

    # --- tables ---

    def table(self, table: Table, darkest: float, count: int) -> None:
        """A step's matrix of so many rows, all or the first and last; long rows are elided too."""
        columns = shown_of(table.value.shape[1])
        shade = self.shades(darkest)
        cells = [
            [self._cell(table, row, column, shade) for column in columns]
            for row in range(len(table.value))
        ]
        names = table.column_labels or (self.spelled(table.symbol),)
        away = table.value.shape[1] - FIRST - LAST
        headers = [away if column is None else names[column] for column in columns]
        labels = table.row_labels or ("",) * len(cells)
        self.grid(labels, headers, cells, table.row_notes, left_out=count - len(cells))
        if None in columns or count > len(cells):
            self.say(
                f"All {count * table.value.shape[1]} numbers: --json, or "
                f'explanation.steps["{table.name}"].value in Python.',
                FAINT,
                indent=2,
            )

    def _cell(
        self,
        table: Table,
        row: int,
        column: int | None,
        shade: Callable[[float], Style | None],
    ) -> Cell:
        if column is None:
            return Cell("…", FAINT, word=True)
        if table.hidden is not None and table.hidden[row, column]:
            return Cell(hidden_text(table.hidden_by(row, column))[0], FAINT, word=True)
        value = table.value[row, column]
        if table.value.dtype == np.bool_:
            return Cell("1" if value else "0", None if value else FAINT)
        text = self.number(float(value))
        if not np.isfinite(value):
            return Cell(text, ALARM, word=True)
        return Cell(text, shade(float(value)))

    def shades(self, darkest: float) -> Callable[[float], Style | None]:
        """The style of each number of a table, of which one this large is darkest."""
        if not self.shaded or not darkest:
            return lambda value: None
        few = self.console.color_system == "256"
        return lambda value: shading(value / darkest, few=few)

    def grid(
        self,
        labels: Sequence[str],
        headers: Sequence[str | int],
        cells: Sequence[Sequence[Cell]],
        notes: Sequence[str] = (),
        notes_header: str = "",
        left_out: int = 0,
    ) -> None:
        """A table under a thin rule; too wide a one comes in pieces, the row labels on each.

        `left_out` rows are missing after the first few. A header that is a number counts the
        columns that are missing there.
        """
        names = [self._label(label, min(LABEL_WIDTH, self.width // 3)) for label in labels]
        width = max((cell_len(name) for name in names), default=0)
        tops = [
            self.spelled(f"… {header} more")
            if isinstance(header, int)
            else self._label(header, HEADER_WIDTH)
            for header in headers
        ]
        columns = [self._column(top, [row[k] for row in cells]) for k, top in enumerate(tops)]
        remarks = [self._label(note, 40) for note in notes]
        notes_width = max((cell_len(note) for note in (*remarks, notes_header)), default=0)
        pieces = self._pieces([cell_len(column[0].text) for column in columns], width, notes_width)
        for number, piece in enumerate(pieces):
            if number:
                self.gap()
            last = number == len(pieces) - 1
            own = [columns[k] for k in piece]
            body = remarks if last and any(remarks) else [""] * len(names)
            self._piece(names, width, own, body, notes_header if last else "", left_out)

    def _piece(
        self,
        names: Sequence[str],
        width: int,
        columns: Sequence[Sequence[Cell]],
        notes: Sequence[str],
        notes_header: str,
        left_out: int,
    ) -> None:
        bar = (" |" if self.ascii else " │", FAINT)
        top = Text(" " * (2 + width)).append(*bar)
        for column in columns:
            top.append(f" {column[0].text} ", STRONG)
        if notes_header:
            top.append(f"  {notes_header}", STRONG)
        self.line(top)
        across = sum(cell_len(column[0].text) + 2 for column in columns)
        if notes_header:
            across += 2 + max(cell_len(note) for note in (*notes, notes_header))
        cross, dash = ("+", "-") if self.ascii else ("┼", "─")
        self.line(f"  {dash * (width + 1)}{cross}{dash * across}", FAINT)
        for number, (name, note) in enumerate(zip(names, notes, strict=True)):
            if left_out and number == FIRST:
                self.line(f"  … {left_out} more", FAINT)
            text = Text("  ").append(_padded(name, width), STRONG).append(*bar)
            for column in columns:
                cell = column[number + 1]
                text.append(f" {cell.text} ", cell.style or "")
            if note:
                text.append(f"  {note}", Style(italic=True))
            self.line(text)

    def _pieces(self, widths: Sequence[int], label: int, notes: int) -> list[list[int]]:
        """Which columns each piece has: as few pieces as fit, of about as many columns each."""
        room = self.width - label - 4
        wanted = [width + 2 for width in widths]
        if notes:
            wanted[-1] += notes + 2
        for most in range(len(widths), 1, -1):
            count = -(-len(widths) // most)
            cuts = [round(len(widths) * k / count) for k in range(count + 1)]
            pieces = [list(range(*cut)) for cut in pairwise(cuts)]
            if all(sum(wanted[k] for k in piece) <= room for piece in pieces):
                return pieces
        return [[number] for number in range(len(widths))]

    def _column(self, header: str, cells: Sequence[Cell]) -> list[Cell]:
        """The header and the cells of a column, all equally wide, numbers aligned on the point."""
        aligned = iter(align([self.spelled(cell.text) for cell in cells if not cell.word]))
        texts = [self.spelled(cell.text) if cell.word else next(aligned) for cell in cells]
        width = max(cell_len(text) for text in (header, *texts))
        return [
            Cell(_padded(header, width, right=True)),
            *(
                Cell(_padded(text, width, right=True), cell.style)
                for text, cell in zip(texts, cells, strict=True)
            ),
        ]

    def _label(self, label: str, limit: int) -> str:
        """A label without control characters, in at most `limit` cells."""
        text = self.spelled(safe_text(label, 200), label=True)
        if cell_len(text) > limit:
            dots = self.spelled("…")
            text = set_cell_size(text, limit - cell_len(dots)).rstrip() + dots
        # After letters that run to the left, a mark that lets the numbers run to the right again.
        if any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in text):
            text = f"\u200e{text}\u200e"
        return text

    def terms(
        self,
        names: Sequence[tuple[str, str]],
        columns: Sequence[tuple[str, Sequence[str]]],
        ends: Sequence[tuple[str, str]],
        signs: Sequence[str] = ("  ", " × ", " = "),
    ) -> None:
        """Terms one below another: mark, label, factors, product; then totals, each with a word.

        A column is its header and its numbers, after one of the `signs`.
        """
        bodies = [[Cell(number) for number in numbers] for _, numbers in columns]
        bodies[-1] += [Cell(number) for _, number in ends]
        own = [
            self._column(self.spelled(header), body)
            for (header, _), body in zip(columns, bodies, strict=True)
        ]
        totals = [self.spelled(word) for word, _ in ends]
        widths = [cell_len(column[0].text) for column in own]
        room = self.width - 6 - sum(width + 3 for width in widths)
        limit = max(min(LABEL_WIDTH, room), 8, *map(cell_len, totals))
        labels = [self._label(label, limit) for _, label in names]
        width = max(map(cell_len, (*labels, *totals)))

        def line(start: Text, between: Sequence[str], cells: Sequence[Cell], style: Style) -> None:
            for sign, cell in zip(between, cells, strict=False):
                start.append(sign).append(cell.text, style)
            self.line(start)

        line(
            Text(" " * (width + 4)),
            [" " * len(sign) for sign in signs],
            [column[0] for column in own],
            FAINT,
        )
        for number, ((mark, _), label) in enumerate(zip(names, labels, strict=True), 1):
            start = Text(f"  {self.spelled(mark) or ' '} ", style=STRONG if mark else "")
            start.append(_padded(label, width))
            line(start, signs, [column[number] for column in own], Style())
        before = " " * (sum(w + 3 for w in widths[:-1]) + 2)
        for number, word in enumerate(totals, 1 + len(names)):
            line(Text("    ").append(_padded(word, width)), [before], [own[-1][number]], STRONG)


# --- text ----------------------------------------------------------------------------------------

_SPELLED = {
    "−": "-",
    "∞": "inf",
    "×": "x",
    "ᵀ": "^T",
    "′": "'",
    "Σ": "sum",
    "δ": "delta",
    "ℓ": "l",
    "½": "1/2",
    "²": "^2",
    "…": "...",
    "→": "->",
    "≤": "<=",
    "▸": ">",
    "─": "-",
    "│": "|",
    "┼": "+",
}


def to_ascii(text: str, *, label: bool = False) -> str:
    r"""Text in ASCII alone: symbols spelled out, letters that are not there as escapes.

    >>> to_ascii("A_s = Q·Kᵀ / √D, −∞"), to_ascii("naïve ×", label=True)
    ('A_s = Q * K^T / sqrt(D), -inf', 'na\\xefve \\xd7')
    """
    if not label:
        text = re.sub(r"√(\w+)", r"sqrt(\1)", text)
        text = re.sub(r" ?· ?", " * ", text)
        text = "".join(_SPELLED.get(character, character) for character in text)
    return text.encode("ascii", "backslashreplace").decode("ascii")


def align(numbers: Sequence[str]) -> list[str]:
    """Numbers as text, padded so that their decimal points align.

    >>> align(["0.5", "−12", "3.25"])
    ['  0.5 ', '−12   ', '  3.25']
    """
    parts = [number.partition(".") for number in numbers]
    before = max((len(whole) for whole, _, _ in parts), default=0)
    after = max((len(dot + rest) for _, dot, rest in parts), default=0)
    return [whole.rjust(before) + (dot + rest).ljust(after) for whole, dot, rest in parts]


def _padded(text: str, width: int, *, right: bool = False) -> str:
    space = " " * max(width - cell_len(text), 0)
    return space + text if right else text + space


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at spaces only: a number stays whole."""
    lines = [""]
    for gap, group in groupby(re.findall(r" +|[^ ]+", text), key=lambda part: part[0] == " "):
        for part in group:
            if gap:
                lines[-1] += part
            elif lines[-1].strip() and cell_len(lines[-1]) + cell_len(part) > width:
                lines[-1] = lines[-1].rstrip()
                lines.append(part)
            else:
                lines[-1] += part
    return lines
