"""A diagnosis in a terminal: the verdict, wrong beside right, and what was tried.

Owns layout and colour. Must not know how a diagnosis is made, nor what is said in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from regard.views.diagnosis.story import Compared, Fact, Part, Shortest, State, tell
from regard.views.report.tables import Printed

if TYPE_CHECKING:
    from regard.diagnosis.result import Outcome

BOLD, FAINT = Style(bold=True), Style(dim=True)
RED, GREEN, YELLOW = Style(color="red"), Style(color="green"), Style(color="yellow")
COLOURS = {"good": GREEN, "warning": YELLOW, "bad": RED, "none": FAINT}
WIDTH = 96


def print_diagnosis(diagnosis: Outcome, console: Console) -> None:
    """Everything that a diagnosis says, in the order in which it is needed."""
    story = tell(diagnosis)
    print_verdict(diagnosis, console)
    if story.called:
        console.print(Text(story.called, FAINT), width=_width(console))
    print_parts(diagnosis, console)
    for title, states in story.states:
        _print_states(title, states, console)
    for finding in story.findings:
        console.print(Text(f"Also: {finding}", YELLOW), width=_width(console))
    for command in story.more:
        console.print(Text.assemble("Read more: ", (command, BOLD)), width=_width(console))
    console.print(Text(story.cost, FAINT), width=_width(console))


def print_verdict(diagnosis: Outcome, console: Console) -> None:
    """The one sentence that says it."""
    story = tell(diagnosis)
    console.print(Text(story.summary, BOLD + COLOURS[story.mood]), width=_width(console))


def print_catalogue(families: Mapping[str, Sequence[tuple[str, str]]], console: Console) -> None:
    """Names and titles of mistakes, family by family."""
    for family, mistakes in families.items():
        console.print(Text(family.capitalize(), BOLD))
        for name, title in mistakes:
            console.print(Padding(Text(name), (0, 0, 0, 2)))
            console.print(Padding(Text(title, FAINT), (0, 0, 0, 6)), width=_width(console))
        console.print()
    console.print(Text("Show one with an example: regard mistakes NAME"))


def print_parts(diagnosis: Outcome, console: Console) -> None:
    """What was found, each with its smallest example."""
    for part in tell(diagnosis).parts:
        _print_part(part, console)


def _width(console: Console) -> int:
    return min(console.width, WIDTH)


def _print_part(part: Part, console: Console) -> None:
    console.print()
    tag = (f"  [{part.tag}]", FAINT)
    console.print(Text.assemble((part.title, BOLD), tag), width=_width(console))
    console.print(Text(part.words), width=_width(console))
    if part.facts:
        console.print()
        _print_facts(part.facts, console)
    if part.example is not None:
        _print_example(part.example, console)


def _print_facts(facts: Sequence[Fact], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for fact in facts:
        table.add_row(Text(fact.name, FAINT), Text(fact.text))
    console.print(table, width=_width(console))


def _print_example(example: Shortest, console: Console) -> None:
    console.print()
    console.print(Text(f"The smallest example: {example.title}", BOLD), width=_width(console))
    given = Table.grid(padding=(0, 4))
    given.add_row(*(_labelled(shown) for shown in example.given))
    console.print(given)
    for shown in example.steps:
        console.print()
        _print_step(shown, console)


def _print_step(shown: Compared, console: Console) -> None:
    here = ("  it departs here", RED) if shown.departs else ""
    here = here if shown.wrong is not None else ("  the same in both", GREEN)
    console.print(Text.assemble((f"{shown.name}  ", BOLD), shown.formula, here))
    pair = Table.grid(padding=(0, 4))
    if shown.wrong is None:
        pair.add_row(_matrix(shown.right))
    else:
        pair.add_row(Text("right", GREEN), Text("wrong", RED))
        pair.add_row(_matrix(shown.right), _matrix(shown.wrong))
    console.print(pair)


def _labelled(shown: Compared) -> Table:
    table = Table.grid()
    table.add_row(Text(f"{shown.symbol}  {shown.name}", FAINT))
    table.add_row(_matrix(shown.right))
    return table


def _matrix(shown: Printed) -> Table:
    """Numbers in columns with aligned decimal points; those that differ are bold and red."""
    table = Table.grid(padding=(0, 2))
    for _ in shown.rows[0] if shown.rows else ():
        table.add_column(justify="right")
    for row in shown.rows:
        styles = (BOLD + RED if cell.mark else Style() for cell in row)
        texts = (cell.text + " " * len(cell.pad) for cell in row)
        table.add_row(*map(Text, texts, styles))
    return table


def _print_states(title: str, states: Sequence[State], console: Console) -> None:
    """What went wrong line by line; what is right, or was not there to be tried, in one line."""
    console.print()
    console.print(Text(title, BOLD))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for word, group in groupby(states, lambda state: state.word):
        rows = list(group)
        style = COLOURS[rows[0].mood]
        if rows[0].mood in ("good", "none"):
            table.add_row(Text(word, style), Text("; ".join(one.title for one in rows)))
            continue
        for one in rows:
            detail = (f": {one.detail}" if one.detail else "", FAINT)
            table.add_row(Text(word, style), Text.assemble(one.title, detail))
    console.print(table, width=_width(console))
