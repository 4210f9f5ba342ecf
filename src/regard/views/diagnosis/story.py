"""What a diagnosis tells, in which order and in which words: the terminal and the page show this.

Owns the headings, which cells of an example are marked, and how their numbers are written. Text
that came with the function is made safe here. Must not know how anything is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from regard.errors import safe_text
from regard.explanation.notation import format_number
from regard.views.all_steps import declared, places
from regard.views.report.tables import Printed, PrintedCell, shaded

if TYPE_CHECKING:
    from regard.diagnosis.result import Departure, Example, Matrix, Named, Outcome, Shown

# Whether something is as it should be; each view has its own colours and signs for these.
Mood = Literal["good", "warning", "bad", "none"]

VERDICTS: Mapping[str, Mood] = {"right": "good", "fragile": "warning"}
STATES: Mapping[str, Mood] = {
    "wrong": "bad",
    "assumed": "warning",
    "right": "good",
    "not asked": "none",
    "tried": "none",
}
# Why something was assumed that nobody has stated.
SOURCES = {"tried": "what was tried otherwise differs", "unstated": "not stated, and tried"}
DIFFERS = "≠"
# Two numbers that differ are shown with as many decimals as it takes to see that.
DECIMALS = (4, 8, 12)
# The steps between which a mistake is shown; the one where it departs is always among them.
MAIN = ("embeddings", "queries", "keys", "values", "scores", "scaled", "weights", "output")
NAME_LENGTH, TEXT_LENGTH = 80, 1000
ROWS = {"L": "query", "S": "key"}


@dataclass(frozen=True)
class Compared:
    """One step of an example: as it should be, and as the function has it if that differs."""

    name: str
    symbol: str
    formula: str
    size: str
    right: Printed
    wrong: Printed | None = None
    departs: bool = False


@dataclass(frozen=True)
class Shortest:
    """The smallest example: what was given, and the steps to the result."""

    title: str
    given: tuple[Compared, ...]
    steps: tuple[Compared, ...]


@dataclass(frozen=True)
class Fact:
    """One line about a mistake; `is_code` where it is a line to be typed."""

    name: str
    text: str
    is_code: bool = False


@dataclass(frozen=True)
class PathStep:
    """One step between what is given and the result."""

    name: str
    symbol: str
    place: Literal["before", "departs", "after"]


@dataclass(frozen=True)
class Part:
    """One thing that was found: a mistake, the nearest one, or something fragile."""

    title: str
    tag: str
    words: str
    facts: tuple[Fact, ...] = ()
    way: tuple[PathStep, ...] = ()
    example: Shortest | None = None


@dataclass(frozen=True)
class State:
    """What became of one thing that was assumed or asked."""

    word: str
    mood: Mood
    title: str
    detail: str = ""


@dataclass(frozen=True)
class CodeLine:
    """One line of the function, and the steps of the textbook that it makes."""

    number: int
    text: str
    makes: tuple[Compared, ...]
    departs: bool
    follows: bool  # whether the line before it is shown, too

    @property
    def mood(self) -> Mood:
        """Whether what it makes is right."""
        return "bad" if self.departs else "good" if self.makes else "none"


@dataclass(frozen=True)
class Story:
    """The whole of a diagnosis, in the order in which it is needed."""

    function: str
    verdict: str
    mood: Mood
    summary: str
    code: tuple[CodeLine, ...]
    adapter: str  # code: how it was called, or one to edit
    parts: tuple[Part, ...]
    states: tuple[tuple[str, tuple[State, ...]], ...]
    findings: tuple[str, ...]
    more: tuple[str, ...]  # commands
    cost: str

    @property
    def departing(self) -> tuple[Compared, ...]:
        """The steps that the code has with other numbers."""
        every = (one for line in self.code for one in line.makes)
        return tuple(one for one in every if one.wrong is not None)


def tell(diagnosis: Outcome) -> Story:
    """Everything that a diagnosis says."""
    assumed = [
        _state("assumed", one.text, SOURCES.get(one.source, one.source))
        for one in diagnosis.assumptions
    ]
    asked = [_state("wrong", one) for one in diagnosis.wrong]
    asked += [_state("right", one) for one in diagnosis.asked if one not in diagnosis.wrong]
    asked += [_state("not asked", one.name, one.why) for one in diagnosis.not_asked]
    title = "What was asked"
    if diagnosis.verdict == "not_callable":
        title, asked = "What was tried", [_state("tried", one.why) for one in diagnosis.not_asked]
    states = (("What is assumed", assumed), (title, asked))
    return Story(
        safe_text(diagnosis.function, NAME_LENGTH),
        diagnosis.verdict,
        VERDICTS.get(diagnosis.verdict, "bad"),
        _text(diagnosis.summary),
        tuple(_code(diagnosis)),
        "\n".join(map(_text, diagnosis.adapter.strip().split("\n"))),
        tuple(_parts(diagnosis)),
        tuple((title, tuple(rows)) for title, rows in states if rows),
        tuple(f"{_text(one.text)}." for one in diagnosis.findings),
        tuple(f"regard mistakes {_tag(x.name)}" for x in diagnosis.mistakes if x.in_catalogue),
        f"{diagnosis.calls} calls.",
    )


def _state(word: str, title: str, detail: str = "") -> State:
    return State(word, STATES[word], _text(title), _text(detail))


def _code(diagnosis: Outcome) -> Iterator[CodeLine]:
    before = 0
    for line in diagnosis.lines:
        follows = before == 0 or line.number == before + 1
        makes = tuple(map(_compared, line.makes))
        yield CodeLine(line.number, _text(line.text), makes, line.departs, follows)
        before = line.number


def _text(text: str) -> str:
    return safe_text(text, TEXT_LENGTH)


# --- what was found ------------------------------------------------------------------------------


def _parts(diagnosis: Outcome) -> Iterator[Part]:
    where = tuple(_where(diagnosis.departure))
    for one in diagnosis.mistakes:
        # The summary has said the only one already.
        title = "What happens" if len(diagnosis.mistakes) == 1 else _sentence(one.title)
        facts = (*where, *_facts(one))
        example = _example(one.example)
        yield Part(title, _tag(one.name, one.family), _text(one.why), facts, _way(one), example)
    if where and not diagnosis.mistakes and diagnosis.departure is not None:
        yield Part("Where it departs", "", f"{_sentence(diagnosis.departure.said)}.", where)
    if diagnosis.otherwise:
        words = " and ".join(_text(one.text) for one in diagnosis.otherwise)
        yield Part("It would be right", "", f"If {words}. An option states it.")


def _where(found: Departure | None) -> Iterator[Fact]:
    """The last right step, the first wrong one, and which lines may be wrong."""
    if found is None:
        return
    if found.right:
        line = f", line {found.right_line}" * bool(found.right_line)
        yield Fact("Right up to", f"{_text(found.right)}{line}")
    if found.line:
        yield Fact("Departs at", f"line {found.line}{f', {_text(found.step)}' * bool(found.step)}")
    others = [str(one) for one in found.suspects if one != found.line]
    if others and found.line:
        yield Fact("If not there", f"lines {', '.join(others[:3])}")


def _sentence(text: str) -> str:
    text = _text(text)
    return text[:1].upper() + text[1:]


def _tag(*names: str) -> str:
    return ", ".join(safe_text(name, NAME_LENGTH) for name in names if name)


def _facts(one: Named) -> tuple[Fact, ...]:
    breaks = one.severity in ("fragile", "note")
    every = (
        Fact("Breaks on", _text(one.breaks_on)),
        Fact("In NumPy", _text(one.numpy), is_code=True),
        Fact("In torch", _text(one.torch), is_code=True),
        Fact("Usual check", "" if breaks else _text(one.usual_check)),
        Fact("The same as", "; ".join(map(_text, one.same_as))),
    )
    return tuple(fact for fact in every if fact.text)


def _way(one: Named) -> tuple[PathStep, ...]:
    """The main steps of the smallest example, and where on that way the mistake departs."""
    if one.example is None or one.step not in declared():
        return ()
    shown = {shown.step for shown in (*one.example.given, *one.example.steps)}
    names = [n for n in declared() if n in {*MAIN, one.step, *shown}]
    if "embeddings" not in shown:
        names = [name for name in names if name != "embeddings"]
    at = names.index(one.step)
    return tuple(
        PathStep(
            name,
            declared()[name].symbol,
            "before" if n < at else "after" if n > at else "departs",
        )
        for n, name in enumerate(names)
    )


# --- the smallest example ------------------------------------------------------------------------


def _example(example: Example | None) -> Shortest | None:
    if example is None:
        return None
    steps = sorted(example.steps, key=lambda one: places().get(one.step, len(places())))
    return Shortest(
        _text(example.title),
        tuple(_compared(shown) for shown in example.given),
        tuple(_compared(shown) for shown in steps),
    )


def _compared(shown: Shown) -> Compared:
    right, wrong = shown.right, shown.wrong
    differs = {
        (i, j): (number, _at(right, i, j))
        for i, row in enumerate(wrong or ())
        for j, number in enumerate(row)
        if not _near(number, _at(right, i, j))
    }
    digits = next((d for d in DECIMALS if all(_tells(*p, d) for p in differs.values())), 17)
    every = (number for matrix in (right, wrong or ()) for row in matrix for number in row)
    largest = max((abs(number) for number in every if math.isfinite(number)), default=0.0)
    as_it_is = _sheet(shown, wrong, largest, digits, differs) if wrong and differs else None
    step = safe_text(shown.step, NAME_LENGTH)
    return Compared(
        step,
        safe_text(shown.symbol, NAME_LENGTH),
        _text(shown.formula),
        f"{len(right)} × {len(right[0]) if right else 0}",
        _sheet(shown, right, largest, digits),
        as_it_is,
        shown.departs,
    )


def _sheet(
    shown: Shown,
    matrix: Matrix,
    largest: float,
    digits: int,
    differs: Collection[tuple[int, int]] = (),
) -> Printed:
    """A matrix with its queries and keys numbered from 0; cells that differ say what is right."""
    known = declared().get(shown.step)
    axes = [axis for axis in known.axes if axis not in ("H", "G")] if known else []
    names = [ROWS.get(axis, "") for axis in axes] + ["", ""]
    if shown.step == "embeddings":
        names[0] = "token"
    # One number for each row is under the step's symbol.
    columns = range(len(matrix[0]) if matrix and len(axes) != 1 else 0)
    cells = shaded(matrix, largest, digits)

    def dressed(i: int, j: int) -> PrintedCell:
        # A score of −∞ is expected: it hides a key.
        cell = cells[i][j]._replace(style="hidden") if matrix[i][j] == -math.inf else cells[i][j]
        if (i, j) not in differs:
            return cell
        style = f"{cell.style} differs".strip()
        hint = f"should be {format_number(_at(shown.right, i, j), digits)}"
        return cell._replace(style=style, mark=DIFFERS, hint=hint)

    return Printed(
        tuple(f"{names[1]} {j}".strip() for j in columns),
        tuple(f"{names[0]} {i}".strip() for i in range(len(matrix))),
        tuple(tuple(dressed(i, j) for j in range(len(row))) for i, row in enumerate(matrix)),
    )


def _at(matrix: Matrix, i: int, j: int) -> float:
    return matrix[i][j] if i < len(matrix) and j < len(matrix[i]) else math.nan


def _near(one: float, other: float) -> bool:
    if math.isnan(one) and math.isnan(other):
        return True
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def _tells(one: float, other: float, digits: int) -> bool:
    """Whether so many decimals are those of different numbers: 0.3 and 0.3000 are not."""
    printed = (format_number(number, digits) for number in (one, other))
    first, second = (float(text.replace("−", "-").replace("∞", "inf")) for text in printed)
    return first != second
