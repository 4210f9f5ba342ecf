"""A worksheet: the steps of an attention as tables to fill in by hand, and a page of answers.

`write` makes the file, `html` the text of one. What is blank follows from the declared steps: all
that is computed. Must not know what a step means.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from markupsafe import Markup

from regard.errors import DtypeError, OptionError, safe_text
from regard.explanation.trace import Trace
from regard.views import report, story
from regard.views.head_view import Head, heads
from regard.views.report.page import asset, policy, template
from regard.views.report.tables import Printed, printed
from regard.views.step_words import sentences

__all__ = ["html", "write"]

DIGITS = 3
# Wider tables do not fit a sheet of paper, and nobody wants to fill them in.
MOST = 12


@dataclass(frozen=True)
class Blank:
    """One step: what to do, the table to fill in (or what is given), and the answer."""

    name: str
    symbol: str
    formula: str
    words: str
    printed: Printed
    answer: Printed | None


@dataclass(frozen=True)
class Section:
    """Steps that belong together, of one head where there are several."""

    title: str
    steps: tuple[Blank, ...]


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
    for count, head in enumerate(heads(explanation)):
        for title, names in story.outline(explanation).items():
            if title in story.HEADINGS.values() and not gradients:
                continue
            # What all heads share is on the sheet once.
            own = [name for name in names if not count or _is_of_head(explanation, name)]
            if own:
                where = f": {_place(explanation, head)}" if several else ""
                steps = tuple(_step(head, name, digits) for name in own)
                yield Section(f"{title}{where}", steps)


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
