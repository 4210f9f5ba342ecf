"""One run: every case on every library, checked, then timed; ratios, shares and the summary.

Must not know how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean
from typing import Any

from regard.bench.cases import Case, Inputs, make_inputs
from regard.bench.correctness import Truth, accuracy, truth
from regard.bench.libraries import REGARD, Library, Prepare, Work, prepared, reason_of
from regard.bench.machine import Limits, description, largest, measured_limits
from regard.bench.timing import Budget, Samples, time_in_rotation

UNMASKED = "regard without the mask"


@dataclass(frozen=True)
class LibraryResult:
    """One library in one case: a time, or the reason why there is none."""

    seconds: float | None = None  # the median per call
    rounds: Sequence[float] = ()  # the median of each round
    fastest: float | None = None
    samples: int = 0
    repeats: int = 0
    error: float | None = None  # against float64; None without an answer
    reason: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case: `outcomes` by library; `unmasked` is regard without the mask."""

    case: Case
    operations: int
    rows_checked: int
    tolerance: float
    outcomes: Mapping[str, LibraryResult]
    unmasked: LibraryResult | None = None

    @property
    def seconds(self) -> float | None:
        """Regard's time per call."""
        return self.outcomes[REGARD.name].seconds

    @property
    def best_peer(self) -> str | None:
        """The fastest peer that was timed."""
        timed = {name: one.seconds for name, one in self.outcomes.items() if one.seconds}
        timed.pop(REGARD.name, None)
        return min(timed, key=lambda name: timed[name], default=None)

    @property
    def ratio(self) -> float | None:
        """The best peer's time divided by regard's."""
        best = self.outcomes[self.best_peer].seconds if self.best_peer else None
        return best / self.seconds if best and self.seconds else None

    @property
    def cost_of_mask(self) -> float | None:
        """Regard's time divided by its time without the mask."""
        bare = self.unmasked.seconds if self.unmasked else None
        return self.seconds / bare if bare and self.seconds else None

    def speed(self, seconds: float) -> float:
        """A time in the unit of the case: GF/s, GB/s, ms or µs."""
        work = {"GF/s": self.operations, "GB/s": self.case.bytes}.get(self.case.unit)
        if work is not None:
            return work / seconds / 1e9
        return seconds * (1e3 if self.case.unit == "ms" else 1e6)

    def share(self, limits: Limits | None) -> float | None:
        """Regard's share of the machine's peak arithmetic (GF/s) or read bandwidth (GB/s)."""
        if limits is None or self.seconds is None or self.case.unit not in ("GF/s", "GB/s"):
            return None
        most = limits.read if self.case.unit == "GB/s" else limits.peak(self.case.dtype)
        return self.speed(self.seconds) * 1e9 / most


@dataclass(frozen=True)
class Report:
    """The results of one run."""

    grid: str
    machine: Mapping[str, Any]
    limits: Limits | None
    versions: Mapping[str, str]
    missing: Mapping[str, str]  # library -> why it was not loaded
    results: Sequence[CaseResult]

    def ratios(self, group: str | None = None) -> list[float]:
        """The ratios of all cases, or of one group."""
        own = [one.ratio for one in self.results if group in (None, one.case.group)]
        return [ratio for ratio in own if ratio is not None]

    def mean_ratio(self, group: str | None = None) -> float | None:
        """The geometric mean of the ratios."""
        ratios = self.ratios(group)
        return geometric_mean(ratios) if ratios else None

    @property
    def worst(self) -> CaseResult | None:
        """The case with the smallest ratio."""
        compared = [one for one in self.results if one.ratio is not None]
        return min(compared, key=lambda one: one.ratio or math.inf, default=None)

    @property
    def libraries(self) -> list[str]:
        """All libraries of the run, missing ones too, in order."""
        return list(dict.fromkeys(name for one in self.results for name in one.outcomes))

    @property
    def groups(self) -> list[str]:
        """The groups of cases, in order."""
        return list(dict.fromkeys(one.case.group for one in self.results))


def measure_cases(
    cases: Iterable[Case],
    libraries: Sequence[Library],
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
    libraries : sequence of Library
        The peers; one that is not installed is reported as missing.
    threads : int
        For every library. The process must already be set up for it, see `command.process_for`.
    grid : str
        Its name, for the report.
    budget : Budget, optional
        How long to measure.
    limits_of : callable
        Measures the machine with so many threads; called before the cases and after each.
    watch : callable
        Called with each case before it begins.
    """
    machine = description(threads)
    limits = [limits_of(threads)]
    loaded: dict[str, Prepare] = {}
    missing: dict[str, str] = {}
    all_of_them = {library.name: library for library in (REGARD, *libraries)}
    for name, library in all_of_them.items():
        absent = library.missing()
        try:
            if absent is None:
                loaded[name] = library.load(threads)
        except Exception as error:  # a peer may raise anything
            absent = reason_of(error)
        if absent is not None:
            missing[name] = absent
    results = []
    for case in cases:
        watch(case)
        results.append(_measured(case, all_of_them, loaded, missing, budget or Budget()))
        limits.append(limits_of(threads))
    return Report(
        grid,
        machine,
        largest([one for one in limits if one is not None]),
        {name: all_of_them[name].version() for name in loaded},
        missing,
        results,
    )


def _measured(
    case: Case,
    libraries: Mapping[str, Library],
    loaded: Mapping[str, Prepare],
    missing: Mapping[str, str],
    budget: Budget,
) -> CaseResult:
    inputs = make_inputs(case)
    right = truth(inputs)
    works: dict[str, Work] = {}
    outcomes: dict[str, LibraryResult] = {}
    tasks = [(name, library, inputs, right) for name, library in libraries.items()]
    if case.mask is not None:
        bare = _without_mask(inputs)
        tasks.append((UNMASKED, REGARD, bare, truth(bare)))
    for name, library, given, wanted in tasks:
        if name in missing:
            outcomes[name] = LibraryResult(reason=missing[name])
            continue
        work, outcomes[name] = checked(library, loaded[library.name], given, wanted)
        if work is not None:
            works[name] = work
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
    library: Library, prepare: Prepare, inputs: Inputs, right: Truth
) -> tuple[Work | None, LibraryResult]:
    """The work if its answer is right, and an outcome without times."""
    work = prepared(library, prepare, inputs)
    if isinstance(work, str):
        return None, LibraryResult(reason=work)
    case = inputs.case
    try:
        answer = work.read(work.call())
    except Exception as error:  # a peer may raise anything
        return None, LibraryResult(reason=reason_of(error))
    found = accuracy(answer, right, (case.B, case.H, case.L, case.E))
    if found.right:
        return work, LibraryResult(error=found.error)
    return None, LibraryResult(error=found.error, reason=f"wrong answer: {found.reason}")


def _with_times(outcome: LibraryResult, samples: Samples) -> LibraryResult:
    return replace(
        outcome,
        seconds=samples.median,
        rounds=samples.medians,
        fastest=min(samples.seconds),
        samples=len(samples.seconds),
        repeats=samples.repeats,
    )


def as_data(report: Report) -> dict[str, Any]:
    """The report as plain data, for JSON."""
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
    def outcome(one: LibraryResult) -> dict[str, Any]:
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
