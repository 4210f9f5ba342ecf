"""One run: every case with every side, checked, then timed, and what follows from the times.

Owns ratios, shares and the summary. Must not know how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean
from typing import Any

from regard.bench.cases import Case, Inputs, make_inputs
from regard.bench.correctness import Truth, truth, verdict
from regard.bench.libraries import REGARD, Prepare, Side, Work, prepared, reason_of
from regard.bench.machine import Limits, description, largest, measured_limits
from regard.bench.timing import Budget, Samples, time_in_rotation

UNMASKED = "regard without the mask"


@dataclass(frozen=True)
class Outcome:
    """What one side did in one case: a time, or the reason why there is none."""

    seconds: float | None = None  # the median per call
    fastest: float | None = None
    samples: int = 0
    repeats: int = 0
    error: float | None = None  # against float64; None if there was no answer
    reason: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case: `outcomes` by the name of the side, `unmasked` regard's time without the mask."""

    case: Case
    operations: int
    rows_checked: int
    tolerance: float
    outcomes: Mapping[str, Outcome]
    unmasked: Outcome | None = None

    @property
    def seconds(self) -> float | None:
        """Of regard."""
        return self.outcomes[REGARD.name].seconds

    @property
    def best_peer(self) -> str | None:
        """The fastest peer that was timed."""
        timed = {
            name: outcome.seconds
            for name, outcome in self.outcomes.items()
            if name != REGARD.name and outcome.seconds is not None
        }
        return min(timed, key=lambda name: timed[name]) if timed else None

    @property
    def ratio(self) -> float | None:
        """How many times as fast regard is as the best peer."""
        if self.best_peer is None or self.seconds is None:
            return None
        best = self.outcomes[self.best_peer].seconds
        return None if best is None else best / self.seconds

    @property
    def cost_of_mask(self) -> float | None:
        """Regard's time with the mask, relative to none."""
        if self.unmasked is None or self.unmasked.seconds is None or self.seconds is None:
            return None
        return self.seconds / self.unmasked.seconds

    def speed(self, seconds: float) -> float:
        """A time in the unit of the case: GF/s, GB/s, ms or µs."""
        match self.case.unit:
            case "GF/s":
                return self.operations / seconds / 1e9
            case "GB/s":
                return self.case.bytes / seconds / 1e9
            case "ms":
                return seconds * 1e3
            case _:
                return seconds * 1e6

    def share(self, limits: Limits | None) -> float | None:
        """Regard's part of what the machine does at most: multiply-adds, or reading."""
        if limits is None or self.seconds is None:
            return None
        if self.case.unit == "GB/s":
            return self.case.bytes / self.seconds / limits.read
        if self.case.unit == "GF/s":
            return self.operations / self.seconds / limits.peak(self.case.dtype)
        return None


@dataclass(frozen=True)
class Report:
    """Everything that one run found."""

    grid: str
    machine: Mapping[str, Any]
    limits: Limits | None
    versions: Mapping[str, str]
    missing: Mapping[str, str]  # side -> why it took no part at all
    results: Sequence[CaseResult]

    def ratios(self, group: str | None = None) -> list[float]:
        """Of all cases, or of those of one group."""
        return [
            one.ratio
            for one in self.results
            if one.ratio is not None and group in (None, one.case.group)
        ]

    def mean_ratio(self, group: str | None = None) -> float | None:
        """The geometric mean of the ratios to the best peer of each case."""
        ratios = self.ratios(group)
        return geometric_mean(ratios) if ratios else None

    @property
    def worst(self) -> CaseResult | None:
        """The case with the smallest ratio."""
        compared = [one for one in self.results if one.ratio is not None]
        return min(compared, key=lambda one: one.ratio or math.inf, default=None)

    @property
    def sides(self) -> list[str]:
        """Whoever was asked, missing or not, in order."""
        return list(dict.fromkeys(name for one in self.results for name in one.outcomes))

    @property
    def groups(self) -> list[str]:
        """Groups of cases, in order."""
        return list(dict.fromkeys(one.case.group for one in self.results))


def run(
    cases: Iterable[Case],
    sides: Sequence[Side],
    threads: int,
    *,
    grid: str = "",
    budget: Budget | None = None,
    limits_of: Callable[[int], Limits | None] = measured_limits,
    watch: Callable[[Case], None] = lambda _: None,
) -> Report:
    """Check and time every case with regard and the given peers.

    Parameters
    ----------
    cases : iterable of Case
        Such as `cases.grid("quick")`.
    sides : sequence of Side
        The peers; one that is not installed is reported as missing.
    threads : int
        What every side is told. The environment of the process must already say the same, see
        `command.process_for`.
    grid : str
        Its name, for the report.
    budget : Budget, optional
        How long to measure.
    limits_of : callable
        What the machine does at most with so many threads; asked before and after.
    watch : callable
        Told each case before it begins.

    Returns
    -------
    Report
    """
    machine = description(threads)
    limits = limits_of(threads)
    loaded: dict[str, Prepare] = {}
    missing: dict[str, str] = {}
    everyone = {side.name: side for side in (REGARD, *sides)}
    for name, side in everyone.items():
        absent = side.missing()
        if absent is None:
            try:
                loaded[name] = side.load(threads)
                continue
            except Exception as error:  # a peer may raise anything
                absent = reason_of(error)
        missing[name] = absent
    results = []
    for case in cases:
        watch(case)
        results.append(_measured(case, everyone, loaded, missing, budget or Budget()))
    again = limits_of(threads)
    return Report(
        grid,
        machine,
        largest([limits, again]) if limits and again else None,
        {name: side.version() for name, side in everyone.items() if name in loaded},
        missing,
        results,
    )


def _measured(
    case: Case,
    sides: Mapping[str, Side],
    loaded: Mapping[str, Prepare],
    missing: Mapping[str, str],
    budget: Budget,
) -> CaseResult:
    inputs = make_inputs(case)
    right = truth(inputs)
    works: dict[str, Work] = {}
    outcomes: dict[str, Outcome] = {}
    for name, side in sides.items():
        if name in missing:
            outcomes[name] = Outcome(reason=missing[name])
            continue
        work, outcomes[name] = checked(side, loaded[name], inputs, right)
        if work is not None:
            works[name] = work
    if case.mask is not None:
        bare = _without_mask(inputs)
        work, outcomes[UNMASKED] = checked(REGARD, loaded[REGARD.name], bare, truth(bare))
        if work is not None:
            works[UNMASKED] = work
    taken = time_in_rotation({name: work.call for name, work in works.items()}, budget)
    outcomes |= {name: _with_times(outcomes[name], samples) for name, samples in taken.items()}
    unmasked = outcomes.pop(UNMASKED, None)
    rows = len(right.rows)
    return CaseResult(case, inputs.operations, rows, right.tolerance, outcomes, unmasked)


def _without_mask(inputs: Inputs) -> Inputs:
    return replace(
        inputs,
        case=replace(inputs.case, mask=None),
        keep=None,
        bias=None,
        lengths=None,
        options={"causal": inputs.case.causal},
    )


def checked(
    side: Side, prepare: Prepare, inputs: Inputs, right: Truth
) -> tuple[Work | None, Outcome]:
    """The work if its answer is right; else only why not."""
    work = prepared(side, prepare, inputs)
    if isinstance(work, str):
        return None, Outcome(reason=work)
    case = inputs.case
    try:
        answer = work.read(work.call())
    except Exception as error:  # a peer may raise anything
        return None, Outcome(reason=reason_of(error))
    found = verdict(answer, right, (case.B, case.H, case.L, case.E))
    if found.right:
        return work, Outcome(error=found.error)
    return None, Outcome(error=found.error, reason=f"wrong answer: {found.reason}")


def _with_times(outcome: Outcome, samples: Samples) -> Outcome:
    return replace(
        outcome,
        seconds=samples.median,
        fastest=min(samples.seconds),
        samples=len(samples.seconds),
        repeats=samples.repeats,
    )


def as_data(report: Report) -> dict[str, Any]:
    """The whole report as plain data, for JSON."""
    limits = report.limits
    worst = report.worst
    return {
        "grid": report.grid,
        "machine": dict(report.machine),
        "limits": None if limits is None else asdict(limits),
        "versions": dict(report.versions),
        "missing": dict(report.missing),
        "cases": [_case_data(one, limits) for one in report.results],
        "summary": {
            "mean_ratio": report.mean_ratio(),
            "mean_ratio_by_group": {group: report.mean_ratio(group) for group in report.groups},
            "worst": None if worst is None else {"case": worst.case.name, "ratio": worst.ratio},
        },
    }


def _case_data(result: CaseResult, limits: Limits | None) -> dict[str, Any]:
    def outcome(one: Outcome) -> dict[str, Any]:
        data = asdict(one)
        if one.error is not None and not math.isfinite(one.error):
            data["error"] = None  # JSON has no infinity
        data["speed"] = None if one.seconds is None else result.speed(one.seconds)
        return data

    return {
        "name": result.case.name,
        **asdict(result.case),
        "operations": result.operations,
        "bytes": result.case.bytes,
        "rows_checked": result.rows_checked,
        "tolerance": result.tolerance,
        "sides": {name: outcome(one) for name, one in result.outcomes.items()},
        "best_peer": result.best_peer,
        "ratio": result.ratio,
        "share": result.share(limits),
        "unmasked": None if result.unmasked is None else outcome(result.unmasked),
        "cost_of_mask": result.cost_of_mask,
    }
