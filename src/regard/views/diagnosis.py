"""A diagnosis in a terminal: the verdict, wrong beside right, and what was tried.

Owns layout and colour. Must not know how a diagnosis is made: it shows the data of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from regard.diagnosis.result import Diagnosis, Example, Matrix, Named, Shown

BOLD, FAINT = Style(bold=True), Style(dim=True)
RED, GREEN, YELLOW = Style(color="red"), Style(color="green"), Style(color="yellow")
COLOURS = {
    "right": GREEN,
    "fragile": YELLOW,
    "mistaken": RED,
    "unknown": RED,
    "unusable": RED,
    "wrong": RED,
    "refused": YELLOW,
    "not offered": FAINT,
}
WIDTH = 96


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Everything that a diagnosis says, in the order in which it is needed."""
    console.print(Text(diagnosis.summary, BOLD + COLOURS[diagnosis.verdict]), width=_width(console))
    if diagnosis.called:
        console.print(Text(f"Called as {diagnosis.called}.", FAINT), width=_width(console))
    for one in diagnosis.mistakes:
        # The first line has said the only one already.
        _print_mistake(one, console, alone=len(diagnosis.mistakes) == 1)
    for one in diagnosis.nearest:
        _section(console, f"Nearest: {one.title}", one.name)
        console.print(f"{one.breaks_on.capitalize()}. {one.why}", width=_width(console))
    for one in diagnosis.fragilities:
        _section(console, one.title[0].upper() + one.title[1:], f"{one.name}, {one.severity}")
        _facts(console, _fragility(one))
        if one.severity == "fragile" and one.example is not None:
            _print_example(one.example, console)
    _print_tried(diagnosis, console)
    for finding in diagnosis.findings:
        console.print(Text(f"Also: {finding.text}.", YELLOW), width=_width(console))
    console.print(
        Text(f"{diagnosis.calls} calls, {diagnosis.seconds:.2f} s.", FAINT), width=_width(console)
    )


def _width(console: Console) -> int:
    return min(console.width, WIDTH)


def _print_mistake(one: Named, console: Console, alone: bool) -> None:
    title = "What happens" if alone else one.title[0].upper() + one.title[1:]
    _section(console, title, f"{one.name}, {one.family}")
    console.print(one.why, width=_width(console))
    console.print()
    facts = [("Departs at", one.step)] if one.step else []
    facts += [("In NumPy", one.numpy), ("In torch", one.torch), ("Usual check", one.usual_check)]
    facts += [("The same as", "; ".join(one.same_as))] if one.same_as else []
    _facts(console, facts)
    if one.example is not None:
        _print_example(one.example, console)


def _fragility(one: Named) -> Iterable[tuple[str, str]]:
    yield "Why", one.why
    yield "Breaks on", one.breaks_on
    if one.numpy:
        yield "In NumPy", one.numpy
        yield "In torch", one.torch


def _section(console: Console, title: str, name: str) -> None:
    console.print()
    console.print(Text.assemble((title, BOLD), (f"  [{name}]", FAINT)), width=_width(console))


def _facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, text in facts:
        table.add_row(Text(name, FAINT), Text(text))
    console.print(table, width=_width(console))


def _print_example(example: Example, console: Console) -> None:
    console.print()
    console.print(Text(f"The smallest example: {example.title}", BOLD), width=_width(console))
    given = Table.grid(padding=(0, 4))
    given.add_row(*(_labelled(shown) for shown in example.given))
    console.print(given)
    for shown in example.steps:
        assert shown.wrong is not None
        console.print()
        here = "  it departs here" if shown.departs else ""
        console.print(Text.assemble((f"{shown.step}  ", BOLD), shown.formula, (here, RED)))
        pair = Table.grid(padding=(0, 4))
        pair.add_row(Text("right", GREEN), Text("wrong", RED))
        pair.add_row(_matrix(shown.right, None), _matrix(shown.wrong, shown.right))
        console.print(pair)


def _labelled(shown: Shown) -> Table:
    table = Table.grid()
    table.add_row(Text(f"{shown.symbol}  {shown.step}", FAINT))
    table.add_row(_matrix(shown.right, None))
    return table


def _matrix(matrix: Matrix, other: Matrix | None) -> Table:
    """Numbers in columns; those that differ from the other matrix stand out."""
    table = Table.grid(padding=(0, 2))
    for _ in matrix[0]:
        table.add_column(justify="right")
    for i, row in enumerate(matrix):
        cells = []
        for j, number in enumerate(row):
            differs = other is not None and not _near(number, other[i][j])
            cells.append(Text(_number(number), BOLD + RED if differs else Style()))
        table.add_row(*cells)
    return table


def _near(one: float, other: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= 1e-9 * max(1.0, abs(other))


def _number(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    text = f"{number:.4f}" if abs(number) < 1e5 else f"{number:.3e}"
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _print_tried(diagnosis: Diagnosis, console: Console) -> None:
    """What went wrong line by line; what is right, or was not there to be tried, in one line."""
    rows = [(one.state, COLOURS[one.state], one.title, one.detail) for one in diagnosis.abilities]
    _print_states("What was tried", rows, ("wrong", "refused"), ("right", "not offered"), console)
    words = {True: ("holds", GREEN), False: ("fails", RED), None: ("not tried", FAINT)}
    own = [(*words[one.holds], one.title, one.evidence) for one in diagnosis.properties]
    title = "What holds of every attention"
    _print_states(title, own, ("fails",), ("holds", "not tried"), console)


def _print_states(
    title: str,
    rows: Sequence[tuple[str, Style, str, str]],
    apart: Sequence[str],
    together: Sequence[str],
    console: Console,
) -> None:
    if not rows:
        return
    console.print()
    console.print(Text(title, BOLD))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for state in apart:
        for one, style, name, detail in rows:
            if one == state:
                table.add_row(Text(state, style), Text.assemble(name, (f": {detail}", FAINT)))
    for state in together:
        names = [name for one, _, name, _ in rows if one == state]
        if names:
            style = next(style for one, style, _, _ in rows if one == state)
            table.add_row(Text(state, style), Text("; ".join(names)))
    console.print(table, width=_width(console))
