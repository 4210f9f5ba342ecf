"""What changed since an earlier run: each case's times then and now, with the noise of both.

Owns reading the JSON of an earlier run, and the verdicts. Must not know how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from regard.bench.cases import Case
from regard.bench.libraries import REGARD
from regard.bench.measure import CaseResult, Report
from regard.boundary.files import MAX_TEXT_BYTES, decode, read_file
from regard.boundary.toml_json import parse
from regard.errors import ProblemError, safe_text

# Another value of one of these makes times that say nothing about the code.
SAME_MACHINE = ("cpu", "architecture", "system", "threads")
# Another value of one of these may be what is compared.
MENTIONED = ("target", "python", "blas")


@dataclass(frozen=True)
class Times:
    """One library in one case: the median per call in seconds, and the median of each round."""

    seconds: float
    rounds: Sequence[float]


@dataclass(frozen=True)
class EarlierRun:
    """What an earlier run saved: `times` by case and library, `operations` by case."""

    path: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    operations: Mapping[str, int]
    times: Mapping[str, Mapping[str, Times]]


@dataclass(frozen=True)
class Change:
    """Regard's time now divided by its time then, in one case.

    The ratio lies in [low, high] whichever round is taken for the median of each run. `peers` is
    the geometric mean of the same ratio of peers of the same version: what the machine did.
    """

    case: Case
    result: CaseResult
    before: float | None = None  # seconds
    now: float | None = None
    low: float = math.nan
    high: float = math.nan
    peers: float | None = None
    reason: str | None = None  # why there is no ratio

    @property
    def ratio(self) -> float | None:
        """Above 1: slower."""
        return self.now / self.before if self.now and self.before else None

    @property
    def verdict(self) -> str:
        """A change counts where no round of one run is as fast as any round of the other."""
        if self.ratio is None:
            return "–"
        return "slower" if self.low > 1 else "faster" if self.high < 1 else "same"


def read_run(path: str) -> EarlierRun:
    """Read what `regard bench --json` saved.

    Raises
    ------
    ProblemError
        If the file cannot be read, or was not saved by it.
    """
    place = safe_text(path, 200)
    try:
        data = parse(decode(read_file(path, MAX_TEXT_BYTES)), "json")
    except ProblemError as error:
        raise ProblemError(f"{place}: {error}") from None
    try:
        return EarlierRun(
            place,
            {name: data["machine"][name] for name in (*SAME_MACHINE, *MENTIONED)},
            {str(name): str(version) for name, version in data["versions"].items()},
            {str(one["name"]): one["operations"] for one in data["cases"]},
            {
                str(one["name"]): {
                    str(name): _times(side)
                    for name, side in one["sides"].items()
                    if side["seconds"] is not None
                }
                for one in data["cases"]
            },
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ProblemError(
            f"{place}: is not a run saved by regard bench --json of this version: "
            f"{type(error).__name__} {safe_text(error, 80)}; measure and save it again"
        ) from None


def _times(side: Mapping[str, Any]) -> Times:
    times = Times(side["seconds"], tuple(side["rounds"]))
    for one in (times.seconds, *times.rounds):
        if type(one) is not float or not 0 < one < math.inf:
            raise ValueError(f"a time is {one!r}")
    if not times.rounds:
        raise ValueError("a time has no rounds")
    return times


def check_comparable(
    earlier: EarlierRun, machine: Mapping[str, Any], cases: Sequence[Case]
) -> None:
    """Refuse an earlier run of another machine or of other cases.

    Raises
    ------
    ProblemError
        With both values of everything that differs.
    """
    other = [name for name in SAME_MACHINE if earlier.machine[name] != machine[name]]
    if other:
        differences = "; ".join(
            f"{name} {safe_text(repr(earlier.machine[name]), 60)} then, {machine[name]!r} now"
            for name in other
        )
        raise ProblemError(
            f"{earlier.path}: was measured on another machine or with other threads "
            f"({differences}), so its times say nothing about a change"
        )
    if not any(one.name in earlier.times for one in cases):
        raise ProblemError(
            f"{earlier.path}: has none of these cases; its first is "
            f"{safe_text(next(iter(earlier.times), 'missing'), 60)}"
        )


def changes(earlier: EarlierRun, report: Report) -> list[Change]:
    """Every case of the run, compared."""
    same = {
        name
        for name, version in report.versions.items()
        if name != REGARD.name and earlier.versions.get(name) == version
    }
    return [_change(earlier, result, same) for result in report.results]


def notes(earlier: EarlierRun, report: Report) -> list[str]:
    """What else differs between the runs, a sentence each."""
    then = {**{name: earlier.machine[name] for name in MENTIONED}, **earlier.versions}
    now = {**{name: report.machine[name] for name in MENTIONED}, **report.versions}
    return [
        f"{name} was {safe_text(then[name], 60)} then and is {now[name]} now."
        for name in now
        if name in then and then[name] != now[name]
    ]


def _change(earlier: EarlierRun, result: CaseResult, peers: set[str]) -> Change:
    case = result.case
    then, now = earlier.times.get(case.name), result.outcomes
    if then is None:
        return Change(case, result, reason="not in the earlier run")
    if REGARD.name not in then or result.seconds is None:
        return Change(case, result, reason="not timed in both runs")
    if earlier.operations[case.name] != result.operations:
        return Change(case, result, reason="other work in the earlier run")
    old, new = then[REGARD.name], now[REGARD.name]
    others = [
        seconds / then[name].seconds
        for name in peers & then.keys() & now.keys()
        if (seconds := now[name].seconds)
    ]
    return Change(
        case,
        result,
        old.seconds,
        new.seconds,
        min(new.rounds) / max(old.rounds),
        max(new.rounds) / min(old.rounds),
        geometric_mean(others) if others else None,
    )
