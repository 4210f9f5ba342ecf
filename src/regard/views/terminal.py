"""An explanation in a terminal: labelled tables, shaded cells, derivations, with rich.

Owns layout, colour and the spelling of symbols where only ASCII can be printed. Digits are never
hidden, wrapped or cut. The words come from `story`, the numbers and formulas from the explanation.
"""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console
from rich.style import Style
from rich.text import Text

from regard.answers import Comparison, Mismatch, RowStatistics
from regard.arithmetic import format_number
from regard.derivation import Derivation
from regard.errors import safe_text
from regard.explanation import ExplainedStep, Explanation, Table
from regard.views import story
from regard.views.part import Head

DIGITS = 8
# Longer axes are shown by their first and last few.
MOST, FIRST, LAST = 12, 6, 5
MOST_TERMS = 16
MOST_MISMATCHES = 10
LABEL_WIDTH, HEADER_WIDTH, RULE_WIDTH = 24, 14, 12
PROSE_WIDTH = 88

STRONG, FAINT, ALARM = Style(bold=True), Style(dim=True), Style(bold=True, color="red")


# --- what can be printed -------------------------------------------------------------------------


def print_explanation(
    explanation: Explanation,
    console: Console,
    steps: Sequence[str] | None = None,
    head: int | None = None,
    digits: int | None = None,
) -> None:
    """Every step as a table with its formula and its meaning; only `steps` if they are named."""
    for name in steps or ():
        explanation.steps[name]  # one that is not there says so before anything is printed
    page = _Page(console, digits)
    own = Head(explanation, head)
    _print_head_line(explanation, page, head, whole=steps is None)
    if steps is not None:
        for name in steps:
            page.gap()
            _print_step(own, page, story.passage(explanation, name, head=head))
        return
    for section in story.tell(explanation, head=head):
        page.section(section.title)
        for position, passage in enumerate(section.passages):
            if position:
                page.gap()
            _print_step(own, page, passage)
    page.section()
    more = story.by_products(explanation)
    if more:
        page.say(f"Not shown: {', '.join(more)}. See one with --step {more[-1]}.", FAINT)
    if 0 not in explanation.steps["output"].shape:
        cell = explanation.derive("output", (0,) * len(explanation.steps["output"].axes))
        page.say(f"See where a number comes from with --why, such as {_why_arguments(cell)}", FAINT)
    page.say(story.READING_NOTE)


def print_derivation_walk(
    derivation: Derivation, console: Console, digits: int | None = None, shared: int = 1
) -> None:
    """Why one cell has its value, and why the numbers that made it have theirs, to the start."""
    page = _Page(console, digits)
    stops = story.walk(derivation)
    for position, stop in enumerate(stops):
        if position:
            page.gap()
        _print_derivation(page, stop.derivation, stop.followed if len(stops) > 1 else None)
    if len(stops) > 1 and any(stop.followed is not None for stop in stops):
        page.gap()
        page.say(story.the_way(), FAINT)
        other = story.beside(stops)
        if other is not None:
            page.say(f"To follow another one: --why {_why_arguments(other, shared)}", FAINT)


def print_statistics(explanation: Explanation, console: Console, head: int | None = None) -> None:
    """Mean, variance and range of each step, what the scale does, how rows spread their weight."""
    page = _Page(console, None)
    statistics = explanation.statistics()
    page.section("Statistics")
    all_heads = " over all heads" if (explanation.heads or 1) > 1 else ""
    page.say(f"Over all cells of a step{all_heads}; hidden cells do not count after masking.")
    page.gap()
    numbers = [
        (one.mean, one.variance, one.minimum, one.maximum) for one in statistics.steps.values()
    ]
    page.grid(
        tuple(statistics.steps),
        ("mean", "variance", "min", "max", "cells"),
        [
            [*(_Cell(story.significant(number)) for number in row), _Cell(str(one.cells))]
            for row, one in zip(numbers, statistics.steps.values(), strict=True)
        ],
    )
    why = story.why_the_scale(explanation, statistics)
    if why:
        page.gap()
        page.say(why)
    _print_row_statistics(explanation, statistics.rows, page, head)


def print_mismatches(
    mismatches: Sequence[Mismatch], console: Console, digits: int | None = None
) -> None:
    """What was expected and what came out, each with the numbers that made it."""
    page = _Page(console, digits)
    for mismatch in mismatches[:MOST_MISMATCHES]:
        page.gap()
        where = f"[{', '.join(mismatch.labels)}]" if mismatch.labels else ""
        allowed = mismatch.expectation.within
        allowed += mismatch.expectation.relative * abs(mismatch.expected)
        page.say(f"{mismatch.step}{safe_text(where, 200)} differs", STRONG)
        page.say(f"expected {_exact(mismatch.expected)}", indent=2)
        page.say(f"got      {_exact(mismatch.got)}", indent=2)
        apart = abs(mismatch.got - mismatch.expected)
        if np.isfinite(apart):
            page.say(
                f"apart    {story.significant(apart, 3)}, "
                f"more than {story.significant(allowed, 3)}",
                indent=2,
            )
        if mismatch.derivation is not None:
            _print_derivation(page, mismatch.derivation, None)
    if len(mismatches) > MOST_MISMATCHES:
        page.gap()
        page.say(f"… {len(mismatches) - MOST_MISMATCHES} more differ")


def print_comparison(
    comparison: Comparison | None, console: Console, digits: int | None = None
) -> None:
    """The first step in which two explanations differ, with both derivations."""
    page = _Page(console, digits)
    if comparison is None:
        page.say("No step differs.")
        return
    cell = comparison.step
    if comparison.labels:
        cell += f"[{', '.join(comparison.labels)}]"
    page.say(f"{safe_text(cell, 200)} is the first number that differs", STRONG)
    page.say(
        f"In {comparison.step} they are at most {story.significant(comparison.difference, 3)} "
        "apart."
    )
    for name, derivation in (("here", comparison.here), ("there", comparison.there)):
        page.gap()
        page.say(name, FAINT)
        _print_derivation(page, derivation, None)


# --- one step ------------------------------------------------------------------------------------


def _print_head_line(
    explanation: Explanation, page: _Page, head: int | None, *, whole: bool
) -> None:
    if explanation.title:
        page.say(safe_text(explanation.title, 200), STRONG)
    if whole:
        if explanation.note:
            page.say(safe_text(explanation.note, 1000))
        for sentence in story.opening(explanation):
            page.say(sentence)
    heads = explanation.heads or 1
    if heads > 1:
        page.say(f"Head {head or 0} of {heads}, counted from 0; --head shows another.", STRONG)
    if explanation.batch_shape:
        first = ", ".join("0" for _ in explanation.batch_shape)
        shape = " × ".join(str(size) for size in explanation.batch_shape)
        page.say(f"Batch element {first} of {shape}.", STRONG)
    found = story.nonfinite(explanation) if whole else None
    if found:
        sentence, first_cell = found
        shared = heads // explanation.source.sizes.get("G", 1)
        page.say(f"{sentence} See why: --why {_why_arguments(first_cell, shared)}", ALARM)


def _print_step(own: Head, page: _Page, passage: story.Passage) -> None:
    step = own.explanation.steps[passage.step]
    rows, columns = own.shape(step.name)
    number = "L" not in step.axes and not step.column_labels and columns == 1
    formula = "given" if step.given and step.name == step.symbol else step.formula
    heading = [(step.name, STRONG), (formula, None)]
    if not number:
        heading.append((_shape_words(step), FAINT))
    page.heading(heading)
    for sentence in passage.words:
        page.say(sentence)
    if number:
        page.line(f"  {step.symbol} = {page.number(float(own.rows(step.name, [0])[0, 0]))}")
    elif rows and columns:
        page.gap()
        shown = _ends(rows)
        page.table(own.table(step.name, [row for row in shown if row is not None]), step, rows)


def _shape_words(step: ExplainedStep) -> str:
    """Such as "3 queries × 4 numbers"."""
    nouns = {"L": "tokens" if step.name == "embeddings" else "queries", "S": "keys"}
    axes = [axis for axis in step.axes if axis not in ("H", "G")]
    sizes = step.shape[len(step.shape) - len(axes) :]
    words = []
    for axis, size in zip(axes, sizes, strict=True):
        noun = nouns.get(axis, "numbers" if axis == axes[-1] else "")
        noun = {"queries": "query", "keys": "key"}.get(noun, noun[:-1]) if size == 1 else noun
        words.append(f"{size} {noun}".strip())
    return " × ".join(words)


def _print_row_statistics(
    explanation: Explanation, rows: RowStatistics, page: _Page, head: int | None
) -> None:
    step = explanation.steps["weights"]
    at: tuple[int, ...] = (0,) * len(explanation.batch_shape)
    if "H" in step.axes:
        at = (*at, head or 0)
    entropy, effective, largest, best = (
        np.atleast_1d(array[at])
        for array in (rows.entropy, rows.effective_keys, rows.largest_weight, rows.largest_key)
    )
    page.section(f"Weights by row{f', head {head or 0}' if (explanation.heads or 1) > 1 else ''}")
    page.say(
        "Effective keys: as many keys with equal weights would spread the weight as far "
        "(exp of the entropy)."
    )
    page.gap()
    keys = step.column_labels
    shown = [row for row in _ends(len(entropy)) if row is not None]
    cells, notes = [], []
    for row in shown:
        values = (entropy[row], effective[row], largest[row])
        cells.append([_Cell(story.significant(float(value))) for value in values])
        notes.append(keys[int(best[row])] if best[row] >= 0 else "")
    page.grid(
        [step.row_labels[row] if step.row_labels else "" for row in shown],
        ("entropy", "effective keys", "largest weight"),
        cells,
        notes,
        notes_header="its key",
        left_out=len(entropy) - len(shown),
    )
    if len(entropy) > len(shown):
        page.say(
            f"All {len(entropy)} rows: --statistics --json, or explanation.statistics().rows in "
            "Python.",
            FAINT,
            indent=2,
        )


# --- one derivation ------------------------------------------------------------------------------

# A result that reads as an equation: cell = names = numbers = value.
_EQUATIONS = {"multiply", "cap", "add", "subtract", "exp", "divide", "log"}


def _print_derivation(page: _Page, derivation: Derivation, followed: int | None) -> None:
    page.heading([(derivation.step, STRONG), (derivation.declared.formula, None)])
    name = safe_text(derivation.name, 200)
    value = page.number(derivation.value)
    lines = [line.strip() for line in derivation.text(page.digits).split("\n")[1:]]
    lines = [line for line in lines if line != derivation.note]  # the rules' verdicts say it
    remarks = [line for line in lines if line.startswith("(")]
    body = [line for line in lines if line not in remarks]
    if derivation.terms:
        page.equation(name, [value])
        _print_terms(page, derivation, followed)
    elif derivation.op in _EQUATIONS and len(body) == 1 and not derivation.hidden:
        sides = [*body[0].rsplit(" = ", 1), value]
        page.equation(name, [side for side, _ in groupby(sides)])  # ln z = 2.4 = 2.4 says it twice
    else:
        page.equation(name, [value])
        for line in body:
            page.say(line, indent=4)
    for remark in remarks if not derivation.terms else ():
        page.say(remark, FAINT, indent=4)


def _print_terms(page: _Page, derivation: Derivation, followed: int | None) -> None:
    """One line per term, aligned, and their sum or the largest below."""
    terms = derivation.terms
    shown = list(range(len(terms)))
    if len(terms) > MOST_TERMS:
        by_size = sorted(shown, key=lambda k: -abs(np.nan_to_num(terms[k].value, nan=np.inf)))
        keep = {*by_size[: MOST_TERMS - 1], *([followed] if followed is not None else [])}
        shown = sorted(keep)
    first = derivation.operands[terms[0].operands[0]]
    second = derivation.operands[terms[0].operands[-1]]
    pairs = len(terms[0].operands) == 2
    columns: list[list[str]] = [
        [
            first.symbol,
            *(page.number(derivation.operands[terms[k].operands[0]].value) for k in shown),
        ]
    ]
    if pairs:
        columns.append(
            [
                second.symbol,
                *(page.number(derivation.operands[terms[k].operands[1]].value) for k in shown),
            ]
        )
        columns.append(
            [f"{first.symbol}·{second.symbol}", *(page.number(terms[k].value) for k in shown)]
        )
    labels = ["", *(terms[k].label for k in shown)]
    marks = ["", *("▸" if k == followed else "" for k in shown)]
    total = {"dot": "sum", "sum": "sum", "max": "largest"}[derivation.op]
    rest = [k for k in range(len(terms)) if k not in shown]
    ends = []
    if rest:
        words = f"… {len(rest)} smaller"
        left = float(np.sum([terms[k].value for k in rest]))
        ends.append((words, page.number(left) if derivation.op != "max" else ""))
    ends.append((total, page.number(derivation.value)))
    page.terms(marks, labels, columns, ends)
    if derivation.op != "max" and not page.adds_up(
        [*(terms[k].value for k in shown), *([left] if rest else [])], derivation.value
    ):
        page.say(
            f"The terms are rounded to {page.digits} decimals, the sum is of the unrounded ones.",
            FAINT,
            indent=4,
        )


def _why_arguments(derivation: Derivation, shared: int = 1) -> str:
    """What to type after --why to ask for a cell: labels, or positions of those hard to type.

    So many query heads share a key head; --head names one of them.
    """
    words, head = [derivation.step], 0
    labels = iter(derivation.labels[::-1])
    places = list(zip(derivation.declared.axes, derivation.index, strict=True))
    for axis, position in places[::-1]:
        if axis in ("H", "G"):
            head = position * (shared if axis == "G" else 1)
        else:
            label = next(labels)
            plain = label == safe_text(label, 60) and not label.startswith("-")
            words.insert(1, shlex.quote(label if plain else str(position)))
    return " ".join([*words, *([f"--head {head}"] if head else [])])


# --- the page ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cell:
    """What one cell of a table prints. A word is not aligned on the decimal point."""

    text: str
    style: Style | None = None
    word: bool = False


class _Page:
    """Where lines go: knows the width, the digits, and whether there are colours and Unicode."""

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

    def adds_up(self, terms: Sequence[float], total: float) -> bool:
        """Whether the terms as printed add up to the total as printed."""
        if not np.isfinite([*terms, total]).all():
            return True
        printed = sum(float(self.number(term).replace("−", "-")) for term in terms)
        return self.number(printed) == self.number(total)

    # --- lines ---

    def line(self, text: str | Text, style: Style | None = None) -> None:
        shown = Text(text, style=style or "") if isinstance(text, str) else text
        if self.ascii:
            plain = to_ascii(shown.plain)
            if len(plain) != len(shown.plain):
                shown = Text(plain)  # spans would no longer fit; ASCII terminals forgo styles
            else:
                shown.plain = plain
        if not self.shaded:
            shown.rstrip()
        self.console.print(shown, soft_wrap=True)

    def gap(self) -> None:
        self.console.print()

    def say(self, text: str, style: Style | None = None, indent: int = 0) -> None:
        """Prose, wrapped between words."""
        if self.ascii:
            text = to_ascii(text)
        width = min(self.width, PROSE_WIDTH) - indent
        for wrapped in _wrap(text, width):
            self.line(" " * indent + wrapped, style)

    def section(self, title: str = "") -> None:
        self.gap()
        start = f"── {title} " if title else ""
        rule = start + "─" * max(min(self.width, PROSE_WIDTH) - cell_len(start), 2)
        self.line(rule, FAINT if not title else STRONG)
        if title:
            self.gap()

    def heading(self, parts: Sequence[tuple[str, Style | None]]) -> None:
        """A name, a formula, a size: on one line as far as they fit."""
        text = Text()
        for part, style in parts:
            part = to_ascii(part) if self.ascii else part
            if text and cell_len(text.plain) + 3 + cell_len(part) > self.width:
                self.line(text)
                text = Text("  ")
            elif text:
                text.append("   ")
            text.append(part, style or "")
        self.line(text)

    def equation(self, name: str, sides: Sequence[str]) -> None:
        """A name and what it equals, one line for each; long sides go below the name."""
        start = f"  {name}"
        if self.ascii:
            start = to_ascii(start)
        room = self.width - cell_len(start) - 3
        sides = [to_ascii(side) if self.ascii else side for side in sides]
        if len(sides) > 1 and max(cell_len(side) for side in sides) > room:
            self.line(start)
            start = "   "
        for side in sides:
            lines = _wrap(side, max(self.width - cell_len(start) - 3, 12))
            self.line(f"{start} = {lines[0]}")
            start = " " * cell_len(start)
            for more in lines[1:]:
                self.line(f"{start}   {more}")

    # --- tables ---

    def table(self, table: Table, step: ExplainedStep, count: int) -> None:
        """A step's matrix of so many rows, all or the first and last; long rows are elided too."""
        columns = _ends(table.values.shape[1])
        shade = self._shading(table, step)
        cells = [
            [self._cell(table, row, column, shade) for column in columns]
            for row in range(len(table.values))
        ]
        names = table.column_labels or (table.symbol,)
        away = table.values.shape[1] - FIRST - LAST
        headers = [away if column is None else names[column] for column in columns]
        labels = table.row_labels or ("",) * len(cells)
        self.grid(labels, headers, cells, table.row_notes, left_out=count - len(cells))
        if None in columns or count > len(cells):
            self.say(
                f"All {count * table.values.shape[1]} numbers: --json, or "
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
    ) -> _Cell:
        if column is None:
            return _Cell("…", FAINT, word=True)
        if table.hidden is not None and table.hidden[row, column]:
            assert table.hidden_by is not None
            return _Cell(_rule_name(table.hidden_by(row, column)), FAINT, word=True)
        value = table.values[row, column]
        if table.values.dtype == np.bool_:
            return _Cell("1" if value else "0", None if value else FAINT)
        text = self.number(float(value))
        if not np.isfinite(value):
            return _Cell(text, ALARM, word=True)
        return _Cell(text, shade(float(value)))

    def _shading(self, table: Table, step: ExplainedStep) -> Callable[[float], Style | None]:
        values = np.asarray(table.values, dtype=np.float64)
        finite = values[np.isfinite(values)]
        size = float(np.abs(finite).max()) if finite.size else 0.0
        most = 1.0 if step.name == "weights" else size
        if not self.shaded or most == 0 or step.axes == ("H", "L"):
            return lambda value: None
        few = self.console.color_system == "256"
        return lambda value: shading(value / most, few=few)

    def grid(
        self,
        labels: Sequence[str],
        headers: Sequence[str | int],
        cells: Sequence[Sequence[_Cell]],
        notes: Sequence[str] = (),
        notes_header: str = "",
        left_out: int = 0,
    ) -> None:
        """A table under a thin rule; too wide a one comes in pieces, the row labels on each.

        So many rows are left out after the first few. A header that is a number stands for so
        many columns.
        """
        names = [self._label(label, min(LABEL_WIDTH, self.width // 3)) for label in labels]
        width = max((cell_len(name) for name in names), default=0)
        tops = [
            _ascii_if(self, f"… {header} more")
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
        columns: Sequence[Sequence[_Cell]],
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
        """Which columns stand together: as few pieces as fit, with about as many columns each."""
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

    def _column(self, header: str, cells: Sequence[_Cell]) -> list[_Cell]:
        """The header and the cells of a column, all equally wide, numbers aligned on the point."""
        texts = [to_ascii(cell.text) if self.ascii else cell.text for cell in cells]
        numbers = [text for text, cell in zip(texts, cells, strict=True) if not cell.word]
        aligned = iter(align(numbers))
        texts = [
            text if cell.word else next(aligned) for text, cell in zip(texts, cells, strict=True)
        ]
        width = max(cell_len(text) for text in (header, *texts))
        return [
            _Cell(_padded(header, width, right=True)),
            *(
                _Cell(_padded(text, width, right=True), cell.style)
                for text, cell in zip(texts, cells, strict=True)
            ),
        ]

    def _label(self, label: str, limit: int) -> str:
        """A label that cannot do anything, in at most `limit` cells."""
        text = safe_text(label, 200)
        if self.ascii:
            text = to_ascii(text, label=True)
        if cell_len(text) > limit:
            dots = "..." if self.ascii else "…"
            text = set_cell_size(text, limit - cell_len(dots)).rstrip() + dots
        # After letters that run to the left, a mark that lets the numbers run to the right again.
        if any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in text):
            text = f"\u200e{text}\u200e"
        return text

    def terms(
        self,
        marks: Sequence[str],
        labels: Sequence[str],
        columns: Sequence[Sequence[str]],
        ends: Sequence[tuple[str, str]],
    ) -> None:
        """Terms one below the other: mark, label, factors, product; then the totals."""
        columns = [[to_ascii(t) if self.ascii else t for t in column] for column in columns]
        last = align([*columns[-1][1:], *(_ascii_if(self, text) for _, text in ends)])
        bodies = [align(column[1:]) for column in columns[:-1]] + [last[: len(labels) - 1]]
        widths = [
            max(cell_len(text) for text in (column[0], *body))
            for column, body in zip(columns, bodies, strict=True)
        ]
        widths[-1] = max(widths[-1], *(cell_len(text) for text in last))
        totals = [_ascii_if(self, word) for word, _ in ends]
        room = self.width - 6 - sum(width + 3 for width in widths)
        limit = max(min(LABEL_WIDTH, room), 8, *(cell_len(word) for word in totals))
        names = [self._label(label, limit) for label in labels]
        width = max(cell_len(text) for text in (*names, *totals))
        signs = [" × ", " = "][: len(columns) - 1] if len(columns) > 1 else []
        for number, (mark, name) in enumerate(zip(marks, names, strict=True)):
            sign = _ascii_if(self, mark) or " "
            text = Text(f"  {sign} ", style=STRONG if mark else "")
            text.append(_padded(name, width))
            for k, column_width in enumerate(widths):
                cell = columns[k][0] if number == 0 else bodies[k][number - 1]
                between = "  " if k == 0 else ("   " if number == 0 else signs[k - 1])
                text.append(between)
                text.append(_padded(cell, column_width, right=True), FAINT if number == 0 else "")
            self.line(text)
        before = sum(w + 3 for w in widths[:-1])
        for k, word in enumerate(totals):
            text = Text("    ").append(_padded(word, width)).append(" " * (before + 2))
            text.append(_padded(last[len(labels) - 1 + k], widths[-1], right=True), STRONG)
            self.line(text)


def _ascii_if(page: _Page, text: str) -> str:
    return to_ascii(text) if page.ascii else text


# --- text ----------------------------------------------------------------------------------------

_SPELLED = {
    "−": "-",
    "∞": "inf",
    "×": "x",
    "ᵀ": "^T",
    "′": "'",
    "Σ": "sum",
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
    """Numbers as text, padded so that their decimal points stand below each other.

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


def _ends(size: int) -> list[int | None]:
    """The positions along an axis that are shown; None stands for those left out."""
    if size <= MOST:
        return list(range(size))
    return [*range(FIRST), None, *range(size - LAST, size)]


def _rule_name(names: Sequence[str]) -> str:
    name = safe_text(names[0] if names else "hidden", RULE_WIDTH)
    return f"{name} +{len(names) - 1}" if len(names) > 1 else name


def _exact(value: float) -> str:
    """As many digits as tell this float64 from all others."""
    return (
        repr(value).replace("-", "−", int(value < 0))
        if np.isfinite(value)
        else format_number(value)
    )


# --- colour --------------------------------------------------------------------------------------

# Blue for positive, orange for negative: told apart by every kind of colour vision.
_POSITIVE, _NEGATIVE = (33, 102, 172), (179, 88, 6)
# The grey from which both start: near the background where it is known, else between the two.
_DARK, _LIGHT, _UNKNOWN = 28, 246, 112


# Where there are only 256 colours, the positive and the negative ones by hand, weakest first:
# mixed ones would be rounded to two or three.
_RAMPS = {
    _DARK: ((17, 18, 25, 26, 33), (52, 94, 130, 166, 208)),
    _LIGHT: ((195, 153, 117, 75, 33), (230, 223, 216, 215, 208)),
    _UNKNOWN: ((67, 68, 32, 26, 20), (137, 136, 172, 166, 130)),
}


def shading(share: float, *, few: bool = False) -> Style | None:
    """The background for a value between −1 and 1, and a foreground that can be read on it.

    `few`: one of 256 colours, not of all.
    """
    strength = min(abs(share), 1.0)
    base = _base()
    if strength < (0.08 if base == _UNKNOWN else 0.02):
        return None
    if few:
        ramp = _RAMPS[base][int(share < 0)]
        background = Color.from_ansi(ramp[min(int(strength * len(ramp)), len(ramp) - 1)])
    else:
        hue = _POSITIVE if share > 0 else _NEGATIVE
        background = Color.from_rgb(*(round(base + (part - base) * strength) for part in hue))
    behind = background.get_truecolor()
    text = max((0, 255), key=lambda grey: contrast((grey,) * 3, behind))
    return Style(color=Color.from_rgb(text, text, text), bgcolor=background)


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """The contrast of two colours by the WCAG definition: 1 to 21, text needs 4.5."""

    def luminance(colour: Sequence[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _base() -> int:
    """By what the terminal says of its background in COLORFGBG, which many do not."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if not background.isdecimal():
        return _UNKNOWN
    return _LIGHT if int(background) in (7, *range(9, 16)) else _DARK
