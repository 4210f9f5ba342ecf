"""What a diagnosis says: plain data, that can be printed, sent as JSON and read again.

Must not know how it was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from regard.boundary.dataframe import dataframe

DiagnosisVerdict = Literal["right", "fragile", "wrong", "unknown", "not_callable"]
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Assumption:
    """What a verdict holds under: what was assumed, of what, and why this and nothing else."""

    name: str  # such as "causal" or "mask"
    text: str  # "causal attention is meant"
    source: str = "tried"  # or whose convention it is

    @property
    def is_open(self) -> bool:
        """Whether no convention tells it, so that a verdict has to say it first."""
        return self.source in ("tried", "unstated")


@dataclass(frozen=True)
class NotAsked:
    """Something that a verdict says nothing of, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Finding:
    """Something about the function itself: it prints, changes its inputs, ends its process, …"""

    name: str
    text: str


@dataclass(frozen=True)
class Shown:
    """One step in numbers: expected and actual."""

    step: str
    symbol: str
    formula: str
    right: Matrix
    wrong: Matrix | None = None
    departs: bool = False


@dataclass(frozen=True)
class Example:
    """The smallest problem on which a mistake shows, in numbers."""

    title: str
    given: tuple[Shown, ...]
    steps: tuple[Shown, ...]


@dataclass(frozen=True)
class Line:
    """One line of the function's source, and which steps of the textbook it makes."""

    number: int
    text: str
    makes: tuple[Shown, ...] = ()
    departs: bool = False


@dataclass(frozen=True)
class Departure:
    """Where a function departs from the textbook: the first step that is wrong, and its line."""

    step: str  # "" where every step is there
    line: int  # 0 where none can be told
    said: str  # what was measured, or which change makes it right
    right: str = ""  # the last step that is right
    right_line: int = 0
    suspects: tuple[int, ...] = ()  # lines, the likeliest first


@dataclass(frozen=True)
class Named:
    """One mistake of the catalogue, found in this function."""

    name: str
    family: str
    severity: str
    title: str
    why: str
    step: str
    numpy: str
    torch: str
    usual_check: str = ""
    same_as: tuple[str, ...] = ()  # what else would compute just this
    breaks_on: str = ""
    example: Example | None = None
    in_catalogue: bool = False  # so that `regard mistakes` knows its name


@dataclass(frozen=True)
class Outcome:
    """The verdict on one attention function, and the evidence for it."""

    function: str
    verdict: DiagnosisVerdict
    summary: str
    adapter: str = ""  # the code that called it; one to edit, where none was found
    exact_to: str = ""  # the dtype whose digits its results have
    assumptions: tuple[Assumption, ...] = ()
    otherwise: tuple[Assumption, ...] = ()  # under which a wrong one would be right
    departure: Departure | None = None
    mistakes: tuple[Named, ...] = ()
    lines: tuple[Line, ...] = ()
    compared: tuple[str, ...] = ()  # "output", or the fields whose gradients it returns
    asked: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()  # those with another result
    not_asked: tuple[NotAsked, ...] = ()
    findings: tuple[Finding, ...] = ()
    calls: int = 0

    @property
    def ok(self) -> bool:
        """Whether ordinary inputs give the right numbers."""
        return self.verdict in ("right", "fragile")

    @property
    def line(self) -> int:
        """The line where it departs from the textbook; 0 if none can be told."""
        return 0 if self.departure is None else self.departure.line

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mistakes that were found."""
        return tuple(one.name for one in self.mistakes)

    @property
    def exit_code(self) -> int:
        """0 right, 1 wrong or unknown, 2 could not be called."""
        return 0 if self.ok else 2 if self.verdict == "not_callable" else 1

    def __str__(self) -> str:
        lines = [self.summary]
        lines += [f"  {one.why}\n  NumPy: {one.numpy}" for one in self.mistakes]
        lines += [f"  assumed: {one.text} ({one.source})" for one in self.assumptions]
        lines += [f"  {one.text}" for one in self.findings]
        names = ", ".join(dict.fromkeys(one.name for one in self.not_asked))
        lines += [f"  not asked: {names}"] * bool(names)
        if self.verdict == "not_callable" and self.adapter:
            lines += ["", self.adapter.rstrip()]
        elif any(one.makes for one in self.lines):
            lines += ["", *map(_in_margin, self.lines)]
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as data for JSON; NaN and infinity are strings.

        Examples
        --------
        >>> Outcome("f", "right", "f is right").to_json()["verdict"]
        'right'
        """
        data = as_plain(self)
        assert isinstance(data, dict)
        return data | {"ok": self.ok, "exit_code": self.exit_code}

    def to_dataframe(self) -> Any:
        """Everything that was observed as a pandas DataFrame, one row each.

        Its columns are kind, name, title, state and detail. A kind is mistake, assumption, line,
        problem, not asked or finding.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        made = ((line, one) for line in self.lines for one in line.makes)
        state = {True: "wrong", False: "right"}
        rows = [
            *(("mistake", m.name, m.title, m.severity, m.why) for m in self.mistakes),
            *(("assumption", a.name, a.text, "", a.source) for a in self.assumptions),
            *(("line", str(x.number), one.step, state[one.departs], x.text) for x, one in made),
            *(("problem", one, one, state[one in self.wrong], "") for one in self.asked),
            *(("not asked", one.name, one.name, "", one.why) for one in self.not_asked),
            *(("finding", f.name, f.text, "", "") for f in self.findings),
        ]
        return dataframe(rows, (), (None, ["kind", "name", "title", "state", "detail"]))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a diagnosis from what `to_json` returned.

        Examples
        --------
        >>> found = Outcome("f", "right", "f is right")
        >>> Outcome.from_json(found.to_json()) == found
        True
        """
        found: Self = read_plain(cls, data)
        return found


def _in_margin(line: Line) -> str:
    steps = ", ".join(f"{'✗' if one.departs else '✓'} {one.step}" for one in line.makes)
    mark = "▸" if line.departs else " "
    return f"{mark}{line.number:>4}  {line.text}{'   # ' + steps if steps else ''}"


def as_plain(value: Any) -> Any:
    """Data of these classes as data for JSON."""
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [as_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read_plain(kind: Any, data: Any) -> Any:
    """The inverse of `as_plain` for a value of a declared type; a TypeError for another one."""
    kinds = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        own = {field.name for field in fields(kind)} & data.keys()
        return kind(**{name: read_plain(hints[name], data[name]) for name in own})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(read_plain(kinds[0], one) for one in data)
    if get_origin(kind) is UnionType:  # of something and None
        return None if data is None else read_plain(kinds[0], data)
    if kind is float:
        return float(data)
    if type(data) is not (str if get_origin(kind) is Literal else kind):
        raise TypeError(f"{data!r} is no {kind}")
    return data
