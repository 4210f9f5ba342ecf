"""A worksheet: the crosses of the picture as tables to fill in by hand, and a page of answers.

`write` makes the file, `html` the text of one. Where a table is, and which
steps are on the way to it, `views/picture.py` says; what is blank follows from the declared steps:
all that is computed. Must not know what a step means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from markupsafe import Markup

from regard.errors import DtypeError, OptionError, safe_text
from regard.explanation.trace import Trace
from regard.views import report, story
from regard.views.head_view import Head, heads
from regard.views.picture import Station, picture
from regard.views.report.page import asset, policy, template
from regard.views.report.tables import Printed, printed, turned
from regard.views.step_words import sentences

__all__ = ["html", "write"]

DIGITS = 3
# Wider tables do not fit a sheet of paper, and nobody wants to fill them in.
MOST = 12


@dataclass(frozen=True)
class Blank:
    """One step: the table to fill in (or what is given), the answer, and where it is in a cross."""

    name: str
    symbol: str
    formula: str
    words: str  # what to do
    printed: Printed
    answer: Printed | None
    place: str = ""
    again: bool = False


@dataclass(frozen=True)
class Section:
    """A result with the steps on the way to it, of one head where there are several."""

    title: str
    steps: tuple[Blank, ...]
    cross: tuple[Blank, ...] = ()

    @property
    def width(self) -> int:
        """How many columns the cross has."""
        places = {one.place.split()[0]: 0 for one in self.cross}
        for one in self.cross:
            column = one.place.split()[0]
            places[column] = max(places[column], len(one.printed.rows[0]))
        return sum(places.values())

    @property
    def own(self) -> list[Blank]:
        """The tables that are here first."""
        return [one for one in (*self.steps, *self.cross) if not one.again]


def write(
    path: str | os.PathLike[str],
    explanation: Trace,
    *,
    digits: int = DIGITS,
    gradients: bool = False,
    force: bool = False,
) -> None:
    """Write a worksheet as one HTML file; the arguments are those of `to_worksheet`."""
    page = html(explanation, digits=digits, gradients=gradients)
    report.save(path, page, force=force)


def html(explanation: Trace, *, digits: int = DIGITS, gradients: bool = False) -> str:
    """The page that `write` puts into a file."""
    if isinstance(digits, bool) or not isinstance(digits, int):
        raise DtypeError(f"digits must be an int, not {safe_text(repr(digits), 60)}")
    if not 0 <= digits <= 8:
        raise OptionError(f"digits is {digits}; on a worksheet it must be between 0 and 8")
    if gradients and not set(story.HEADINGS.values()) & story.outline(explanation).keys():
        raise OptionError("gradients need a loss; give the problem a target")
    style = asset("report/style.css") + asset("worksheet/style.css")
    text: str = template("worksheet/page.html.j2").render(
        title=safe_text(explanation.title, 200) or "Attention",
        note=safe_text(explanation.note, 1000),
        opening=story.opening(explanation),
        sections=tuple(_sections(explanation, digits, gradients)),
        digits=digits,
        policy=policy(style),
        style=Markup(style),
    )
    return text


def _sections(explanation: Trace, digits: int, gradients: bool) -> Iterator[Section]:
    several = (explanation.heads or 1) * len([*heads(explanation)]) > 1
    shown = story.outline(explanation)
    named = {name for names in shown.values() for name in names}
    order = list(explanation.steps)
    groups = picture(explanation.source.steps.values()).narrow
    for count, head in enumerate(heads(explanation)):
        where = f": {_place(explanation, head)}" if several else ""
        first = partial(_is_of_head, explanation) if count else bool  # all heads share the others
        for group in groups:
            if not any(first(one.step) for one in group if not one.copy):
                continue
            inside = [name for one in group for name in one.inside if name in named and first(name)]
            steps = tuple(_step(head, name, digits) for name in inside)
            top = min(one.row for one in group)
            there = sorted(group, key=lambda one: order.index(one.step))
            cross = tuple(_station(head, one, top, digits, first) for one in there)
            yield Section(f"{group[0].step}{where}", steps, cross)
        for title in story.HEADINGS.values() if gradients else ():
            own = [name for name in shown.get(title, ()) if first(name)]
            if own:
                yield Section(f"{title}{where}", tuple(_step(head, one, digits) for one in own))


def _station(
    head: Head, one: Station, top: int, digits: int, first: Callable[[str], bool]
) -> Blank:
    """A table in its place, turned if its rows are columns there."""
    made = _step(head, one.step, digits)
    if one.turned:
        made = replace(
            made, printed=turned(made.printed), answer=made.answer and turned(made.answer)
        )
    place = f"c{one.column + 1} r{one.row - top + 1}"
    return replace(made, place=place, again=one.copy or not first(one.step))


def _is_of_head(explanation: Trace, name: str) -> bool:
    axes = explanation.steps[name].axes
    return bool({"H", "G"} & {*axes}) or bool(explanation.batch_shape)


def _place(explanation: Trace, head: Head) -> str:
    batch = [f"batch element {', '.join(map(str, head.batch))}"] if explanation.batch_shape else []
    return ", ".join([*batch, *([f"head {head.number}"] if explanation.heads else [])])


def _step(head: Head, name: str, digits: int) -> Blank:
    rows, columns = head.shape(name)
    if max(rows, columns) > MOST:
        raise OptionError(
            f"{name} is {rows} × {columns}; a worksheet has room for {MOST} × {MOST}. Take fewer "
            "words or features"
        )
    step, answer = head.explanation.steps[name], printed(head, name, digits)
    # The first sentence says what to do; others are about the numbers that come out.
    words = "".join(sentences(head, name)[:1])
    if step.given:
        return Blank(step.name, step.symbol, "given", words, answer, None)
    return Blank(step.name, step.symbol, step.formula, words, _emptied(answer), answer)


def _emptied(answer: Printed) -> Printed:
    """The same table without its numbers; what a rule hides keeps the rule's name."""
    rows = tuple(
        tuple(
            cell if cell.style == "hidden" else cell._replace(text="", style="blank", pad="")
            for cell in row
        )
        for row in answer.rows
    )
    return replace(answer, rows=rows)
