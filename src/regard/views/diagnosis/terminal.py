"""A diagnosis in a terminal: the verdict, wrong beside right, and what was tried.

Owns layout and colour. Must not know how a diagnosis is made, nor what is said in which order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.measure import Measurement
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
    print_code(diagnosis, console)
    print_parts(diagnosis, console)
    if story.adapter:
        edit = story.verdict == "not_callable"
        title = "An adapter to edit, for call= or --call" if edit else "How it was called"
        console.print()
        console.print(Text(title, BOLD))
        console.print(Text(story.adapter, Style() if edit else FAINT), soft_wrap=True)
    for title, states in story.states:
        _print_states(title, states, console)
    for finding in story.findings:
        console.print(Text(f"Also: {finding}", YELLOW), width=_width(console))
    for command in story.more:
        console.print(Text.assemble("Read more: ", (command, BOLD)), width=_width(console))
    console.print(Text(story.cost, FAINT), width=_width(console))


def print_code(diagnosis: Outcome, console: Console) -> None:
    """The function's lines, each with the steps that it makes, and the numbers that are wrong."""
    story = tell(diagnosis)
    if not any(line.makes or line.departs for line in story.code):
        return
    table = Table.grid(padding=(0, 1))
    names = [len(one.name) + 2 for line in story.code for one in line.makes]
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True, min_width=min(max(names, default=0), _width(console) // 3))
    table.add_column(no_wrap=True, overflow="ellipsis")
    for line in story.code:
        if not line.follows:
            table.add_row(Text("⋮", FAINT), "", "")
        here = BOLD + RED if line.departs else Style()
        steps = Text("\n").join([Text.assemble(*_sign(one)) for one in line.makes])
        if line.departs and all(one.wrong is None and not one.departs for one in line.makes):
            steps = Text("✗ here", RED)
        table.add_row(Text(str(line.number), here or FAINT), steps, Text(line.text, here))
    console.print()
    console.print(table, width=_width(console))
    for step in story.departing:
        console.print()
        _print_step(step, console)


def _sign(step: Compared) -> tuple[tuple[str, Style], tuple[str, Style]]:
    return (("✗ ", RED), (step.name, RED)) if step.departs else (("✓ ", GREEN), (step.name, FAINT))


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
    if shown.wrong is None:
        console.print(_matrix(shown.right))
        return
    right, wrong = _matrix(shown.right), _matrix(shown.wrong)
    words = Text("right", GREEN), Text("wrong", RED)
    widths = (Measurement.get(console, console.options, one).maximum for one in (right, wrong))
    if sum(widths) + 4 > _width(console):  # one below the other
        console.print(words[0], right, words[1], wrong, sep="\n")
        return
    pair = Table.grid(padding=(0, 4))
    pair.add_row(*words)
    pair.add_row(right, wrong)
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
    """What was assumed line by line, with why; what was asked in one line for each outcome."""
    console.print()
    console.print(Text(title, BOLD))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for word, group in groupby(states, lambda state: state.word):
        rows = list(group)
        style = COLOURS[rows[0].mood]
        if rows[0].mood != "warning":
            titles = dict.fromkeys(one.title for one in rows)
            table.add_row(Text(word, style), Text("; ".join(titles)))
            continue
        for one in rows:
            detail = (f": {one.detail}" if one.detail else "", FAINT)
            table.add_row(Text(word, style), Text.assemble(one.title, detail))
    console.print(table, width=_width(console))
