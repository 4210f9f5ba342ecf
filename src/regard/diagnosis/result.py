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

DiagnosisVerdict = Literal["right", "fragile", "mistaken", "unknown", "unusable"]
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Ability:
    """One ability that was tested, and the outcome."""

    name: str
    title: str
    state: Literal["right", "wrong", "refused", "not offered"]
    detail: str = ""


@dataclass(frozen=True)
class Finding:
    """Something about the function itself: it prints, changes its inputs, is random, …"""

    name: str
    text: str


@dataclass(frozen=True)
class Property:
    """A property of every correct attention, tested without the catalogue."""

    name: str
    title: str
    holds: bool | None  # None: could not be tried
    evidence: str = ""


@dataclass(frozen=True)
class Shown:
    """One step of an example: expected and actual."""

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
    called: str
    exact_to: str = ""
    mistakes: tuple[Named, ...] = ()
    nearest: tuple[Named, ...] = ()
    fragilities: tuple[Named, ...] = ()
    abilities: tuple[Ability, ...] = ()
    findings: tuple[Finding, ...] = ()
    properties: tuple[Property, ...] = ()
    gradients: tuple[Ability, ...] = ()  # of each input, where the function has them
    calls: int = 0
    seconds: float = 0.0
    script: str = ""  # lines of Python that show a wrong number
    measured: bool = False  # whether a mistake is known by what was measured alone, not its cause

    @property
    def ok(self) -> bool:
        """Whether ordinary inputs give the right numbers."""
        return self.verdict in ("right", "fragile")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mistakes that were found, or else of the fragilities."""
        return tuple(one.name for one in self.mistakes or self.fragilities)

    @property
    def exit_code(self) -> int:
        """0 right, 1 mistaken, 2 could not be run."""
        return 0 if self.ok else 2 if self.verdict == "unusable" else 1

    def __str__(self) -> str:
        lines = [self.summary, f"called as {self.called}"] if self.called else [self.summary]
        for one in self.mistakes:
            departs = f"departs at {one.step}; " * bool(one.step)
            lines += [f"  {one.why}", f"  {departs}NumPy: {one.numpy}"]
        for one in self.nearest:
            lines.append(f"  nearest: {one.title}")
        lines += [f"  fragile: {one.title} ({one.breaks_on})" for one in self.fragilities]
        tried = (*self.gradients, *self.abilities)
        lines += [f"  {one.title}: {one.detail}" for one in tried if one.state == "wrong"]
        lines += [f"  {one.text}" for one in self.findings]
        return "\n".join(lines)

    __repr__ = __str__

    def reproduce(self) -> str:
        """About ten lines of Python that print a wrong number of the function beside the right one.

        They import the function, draw arrays, call it as it was called here, and regard. For calls
        that regard's functions have no equal of, such as a cache, they are a comment that says so.

        Examples
        --------
        >>> print(Outcome("f", "right", "f is right", "f(q, k, v)").reproduce())
        # f is right
        """
        return self.script or f"# {self.summary}"

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as data for JSON; NaN and infinity are strings.

        Examples
        --------
        >>> Outcome("f", "right", "f is right", "f(q, k, v)").to_json()["verdict"]
        'right'
        """
        data = _plain(self)
        assert isinstance(data, dict)
        return data | {"ok": self.ok, "exit_code": self.exit_code}

    def to_dataframe(self) -> Any:
        """Everything that was observed as a pandas DataFrame, one row each.

        Its columns are kind, name, title, state and detail. A kind is mistake, nearest, fragility,
        gradient, ability, property or finding.

        Raises
        ------
        OptionError
            If pandas is not installed.
        """
        held = {True: "holds", False: "does not hold", None: "not tried"}
        rows = [
            *(("mistake", m.name, m.title, m.severity, m.why) for m in self.mistakes),
            *(("nearest", m.name, m.title, m.severity, m.why) for m in self.nearest),
            *(("fragility", m.name, m.title, m.severity, m.breaks_on) for m in self.fragilities),
            *(("gradient", a.name, a.title, a.state, a.detail) for a in self.gradients),
            *(("ability", a.name, a.title, a.state, a.detail) for a in self.abilities),
            *(("property", p.name, p.title, held[p.holds], p.evidence) for p in self.properties),
            *(("finding", f.name, f.text, "", "") for f in self.findings),
        ]
        return dataframe(rows, (), (None, ["kind", "name", "title", "state", "detail"]))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild a diagnosis from what `to_json` returned.

        Examples
        --------
        >>> found = Outcome("f", "right", "f is right", "f(q, k, v)")
        >>> Outcome.from_json(found.to_json()) == found
        True
        """
        found: Self = _read(cls, data)
        return found


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _read(kind: Any, data: Any) -> Any:
    """The inverse of `_plain` for a value of a declared type."""
    kinds = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        own = {field.name for field in fields(kind)} & data.keys()
        return kind(**{name: _read(hints[name], data[name]) for name in own})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_read(kinds[0], one) for one in data)
    if get_origin(kind) is UnionType:  # of something and None
        return None if data is None else _read(kinds[0], data)
    return float(data) if kind is float else data
