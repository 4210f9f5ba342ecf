"""What is said of a judgement and a trace: the first sentence, the mistake, everything beside.

Must not know how a function is called or traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from regard.diagnosis.judge import Judgement
from regard.diagnosis.lines import Told
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.properties import only_with
from regard.diagnosis.result import Departure, Finding, Line, Named, Outcome
from regard.errors import safe_text

LONGEST = 200  # characters of a line of code


def outcome(name: str, found: Judgement, told: Told, mistake: str) -> Outcome:
    """The verdict on a function of this name, and on the mistake of that name."""
    departure = told.departure and _safe(told.departure)
    mistakes = (named(mistake, departure),) if mistake else ()
    return Outcome(
        name,
        found.verdict,
        _summary(name, found, departure, mistakes),
        found.adapter.text,
        found.exact_to,
        found.assumptions,
        found.otherwise,
        departure,
        mistakes,
        tuple(map(_shown, told.lines)),
        found.compared,
        found.asked,
        tuple(one.name for one in found.wrong),
        found.not_asked,
        tuple(_findings(name, found, told)),
        found.calls,
    )


def named(name: str, departure: Departure | None = None) -> Named:
    """An entry of the catalogue, found in a function."""
    mistake = all_mistakes()[name]
    shared = ("name", "family", "severity", "title", "why", "numpy", "torch")
    own = {each: getattr(mistake, each) for each in shared}
    step = departure.step if departure else ""
    return Named(**own, step=step, in_catalogue=True)


def _summary(
    name: str, found: Judgement, departure: Departure | None, mistakes: tuple[Named, ...]
) -> str:
    match found.verdict:
        case "right":
            return f"{name} is right{_conditions(found)}{_digits(found)}"
        case "fragile":
            what = mistakes[0].title if mistakes else ""
            return f"{name} is right, but fragile: {found.why}{f': {what}' * bool(what)}"
        case "wrong":
            return f"{name} is wrong{_wrong(found, departure, mistakes)}{_otherwise(found)}"
        case "unknown":
            return f"{name} is unknown: {found.why}"
    return f"{name} could not be called: {found.why}"


def _conditions(found: Judgement) -> str:
    """What nobody has stated and no convention tells, without which it would be wrong."""
    texts = dict.fromkeys(one.text for one in found.assumptions if one.is_open)
    return f", if {' and '.join(texts)}" * bool(texts)


def _digits(found: Judgement) -> str:
    return f", to the digits of {found.exact_to}" * (found.exact_to != "float64")


def _otherwise(found: Judgement) -> str:
    texts = [one.text for one in found.otherwise]
    return f"; right, if {' and '.join(texts)}" * bool(texts)


def _wrong(found: Judgement, departure: Departure | None, mistakes: tuple[Named, ...]) -> str:
    where = f" at line {departure.line}" if departure and departure.line else ""
    if mistakes:
        return f"{where}: {mistakes[0].title}"
    only = only_with(found.wrong, found.tasks)
    only = f", only with {only}" * bool(only)
    if departure is None or not (departure.line or departure.step):
        return f"{only}: {found.why}"
    step = f", in the step {departure.step}" * bool(departure.step)
    return f"{where}{step}{only}: {departure.said or found.why}"


def _findings(name: str, found: Judgement, told: Told) -> Iterator[Finding]:
    if found.printed:
        yield Finding("prints", f"{name} prints {found.printed!r}")
    if told.why:
        yield Finding("no_lines", f"its lines are not shown: {safe_text(told.why, LONGEST)}")


def _safe(one: Departure) -> Departure:
    return replace(one, said=safe_text(one.said, LONGEST))


def _shown(line: Line) -> Line:
    return replace(line, text=safe_text(line.text.expandtabs(4), LONGEST))
