"""One run: every case on every library, checked, then timed; ratios, shares and the summary.

Must not know how anything is shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from statistics import geometric_mean
from typing import Any, Protocol, TypeAlias

from regard.bench.cases import Case, dtype_of, make_inputs
from regard.bench.correctness import Truth, accuracy, truth
from regard.bench.libraries import REGARD, Library
from regard.bench.machine import KINDS, Limits, description, free_memory
from regard.bench.timing import Budget, Samples, time_in_rotation
from regard.bench.worker import METER, Elsewhere, Side, SideError

PLAIN = "regard, the plain call"
# What this process takes beside the arrays of a case: some scores in float64, and their weights.
OWN_MEMORY = 2**29
# Starts a library with so many threads; a SideError if it cannot.
Start: TypeAlias = Callable[[Library, int], Side]


class MeterSide(Side, Protocol):
    """See `machine.Meter`."""

    def limits(self) -> Limits | None:
        """What it found at its start."""


def in_its_own_process(library: Library, threads: int) -> Side:
    """See `Elsewhere`."""
    return Elsewhere(library.name, threads)


def meter_of_this_machine(threads: int) -> MeterSide:
    """The meter, in a process of its own too."""
    return Elsewhere(METER, threads)


@dataclass(frozen=True)
class LibraryResult:
    """One library in one case: a time, or the reason why there is none."""

    seconds: float | None = None  # the median per call
    rounds: Sequence[float] = ()  # the median of each round
    fastest: float | None = None
    samples: int = 0
    repeats: int = 0
    error: float | None = None  # against float64; None without an answer
    rms: float | None = None  # of all errors, in units of the type: see `Accuracy`
    reason: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """One case: `outcomes` by library; `plain` is regard in `case.plain`.

    `limit` is what the machine can do at most, in operations or bytes read per second.
    """

    case: Case
    operations: int
    rows_checked: int
    tolerance: float
    outcomes: Mapping[str, LibraryResult]
    plain: LibraryResult | None = None
    limit: float | None = None

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
    def cost(self) -> float | None:
        """Regard's time per score, hidden or not, divided by that of the plain call."""
        plain, bare = self.case.plain, self.plain.seconds if self.plain else None
        if not plain or not bare or not self.seconds:
            return None
        return self.seconds / bare * plain.scores / self.case.scores

    def speed(self, seconds: float) -> float:
        """A time in the unit of the case: GF/s, GB/s, ms or µs."""
        work = {"GF/s": self.operations, "GB/s": self.case.bytes}.get(self.case.unit)
        if work is not None:
            return work / seconds / 1e9
        return seconds * (1e3 if self.case.unit == "ms" else 1e6)

    @property
    def share(self) -> float | None:
        """Regard's share of the machine's peak arithmetic (GF/s) or of reading (GB/s)."""
        if self.limit is None or self.seconds is None:
            return None
        return self.speed(self.seconds) * 1e9 / self.limit


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
    start: Start = in_its_own_process,
    meter: Callable[[int], MeterSide] | None = meter_of_this_machine,
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
        For every library.
    grid : str
        Its name, for the report.
    budget : Budget, optional
        How long to measure.
    start : callable
        Starts a library with so many threads.
    meter : callable or None
        Starts what measures the machine, which takes its turn in each case.
    watch : callable
        Called with each case before it begins.
    """
    machine = description(threads)
    with closing(_Sides((REGARD, *libraries), threads, start, meter)) as sides:
        sides.load()
        results = []
        for case in cases:
            watch(case)
            results.append(_measured(case, sides, budget or Budget()))
            sides.release()
    limits, results = _with_limits(sides.limits, results)
    return Report(
        grid,
        machine,
        limits,
        {one.name: one.version() for one in sides.libraries if one.name not in sides.missing},
        sides.missing,
        results,
    )


def _with_limits(
    limits: Limits | None, results: list[CaseResult]
) -> tuple[Limits | None, list[CaseResult]]:
    """The limits of the run, and those of its cases: each the best of all measurements of it."""
    if limits is None:
        return None, results
    bounds = [limits.what(one.case) for one in results]
    best = {kind: float(getattr(limits.best(kind), kind)) for kind in KINDS}
    for what, one in zip(bounds, results, strict=True):
        if what is not None and one.limit is not None:
            best[what] = max(best.get(what, 0.0), one.limit)
    for what, rate in best.items():
        limits = limits.raised(what, rate)
    raised = zip(bounds, results, strict=True)
    return limits, [replace(one, limit=best.get(what) if what else None) for what, one in raised]


class _Sides:
    """Every library, started once; one whose process ended is started again for the next case."""

    def __init__(
        self,
        libraries: Sequence[Library],
        threads: int,
        start: Start,
        meter: Callable[[int], MeterSide] | None,
    ) -> None:
        self.libraries = tuple({one.name: one for one in libraries}.values())
        self.missing: dict[str, str] = {}
        self.limits: Limits | None = None
        self._threads = threads
        self._start = start
        self._meter = meter
        self._started: dict[str, Side] = {}

    def load(self) -> None:
        """Measure the machine, and start every library that is installed."""
        if self._meter is not None:
            meter = self._meter(self._threads)
            self._started[METER] = meter
            self.limits = meter.limits()
        for library in self.libraries:
            absent = library.missing()
            try:
                if absent is None:
                    self.side(library.name)
            except SideError as error:
                absent = str(error)
            if absent is not None:
                self.missing[library.name] = absent

    def close(self) -> None:
        """Let go of all sides."""
        for name in list(self._started):
            self.end(name)

    def release(self) -> None:
        """Let every side let go of its case."""
        for name, side in list(self._started.items()):
            try:
                side.release()
            except SideError:  # started again when it is needed
                self.end(name)

    def side(self, name: str) -> Side:
        """The side of this name; `PLAIN` is regard once more. A SideError if it cannot be."""
        if name not in self._started:
            if name == METER:
                assert self._meter is not None
                self._started[name] = self._meter(self._threads)
            else:
                wanted = REGARD.name if name == PLAIN else name
                library = next(one for one in self.libraries if one.name == wanted)
                self._started[name] = self._start(library, self._threads)
        return self._started[name]

    def end(self, name: str) -> None:
        """Let go of a side."""
        side = self._started.pop(name, None)
        if side is not None:
            side.close()


def _measured(case: Case, sides: _Sides, budget: Budget) -> CaseResult:
    refused = too_large(case, [one for one in sides.libraries if one.name not in sides.missing])
    outcomes = {
        name: LibraryResult(reason=why) for name, why in {**sides.missing, **refused}.items()
    }
    names = [one.name for one in sides.libraries]
    if REGARD.name in refused:
        return CaseResult(case, 0, 0, 0.0, {name: outcomes[name] for name in names})
    inputs = make_inputs(case)
    right = truth(inputs)
    ready: dict[str, Side] = {}
    tasks = [(name, case, right) for name in names if name not in outcomes]
    if case.plain is not None:
        tasks.append((PLAIN, case.plain, truth(make_inputs(case.plain))))
    for name, given, wanted in tasks:
        try:
            side = sides.side(name)
            outcomes[name] = checked(side, given, wanted)
        except SideError as error:
            outcomes[name] = LibraryResult(reason=str(error))
            sides.end(name)
            continue
        if outcomes[name].reason is None:
            ready[name] = side
    taken = dict(_in_rotation(case, sides, ready, outcomes, budget))
    fastest = taken.pop(METER, None)
    outcomes.pop(METER, None)
    outcomes |= {name: _with_times(outcomes[name], samples) for name, samples in taken.items()}
    return CaseResult(
        case,
        inputs.operations,
        right.rows,
        right.tolerance,
        {name: outcomes[name] for name in names},
        outcomes.get(PLAIN),
        None if fastest is None else 1 / min(fastest.seconds),
    )


def _in_rotation(
    case: Case,
    sides: _Sides,
    ready: dict[str, Side],
    outcomes: dict[str, LibraryResult],
    budget: Budget,
) -> Mapping[str, Samples]:
    """Times of all that are ready, and of the meter; who ends meanwhile is left out, and why."""
    if ready and sides.limits is not None and sides.limits.what(case) is not None:
        with suppress(SideError):  # then there is no share
            meter = sides.side(METER)
            meter.prepare(case)
            ready[METER] = meter
    while ready.keys() - {METER}:
        try:
            return time_in_rotation(ready, budget)
        except SideError as error:
            ended = next(name for name, side in ready.items() if side is error.side)
            outcomes[ended] = LibraryResult(reason=str(error))
            sides.end(ended)
            del ready[ended]
    return {}


def too_large(case: Case, libraries: Sequence[Library]) -> dict[str, str]:
    """The libraries, in order, for which memory does not suffice beside those before, and why."""
    left = free_memory() - OWN_MEMORY - (1 + 8 / dtype_of(case.dtype).itemsize) * case.array_bytes
    refused = {}
    for library in libraries:
        needed = library.memory(case) * (2 if library is REGARD and case.plain else 1)
        if needed > left:
            refused[library.name] = (
                f"needs {needed / 1e9:.2g} GB of memory, of which {max(0, left) / 1e9:.2g} GB "
                "would be free"
            )
        else:
            left -= needed
    return refused


def checked(side: Side, case: Case, right: Truth) -> LibraryResult:
    """An outcome without times: how right the answer is, or why there is none."""
    answer = side.prepare(case)
    if isinstance(answer, str):
        return LibraryResult(reason=answer)
    found = accuracy(answer, right, case)
    reason = None if found.right else f"wrong answer: {found.reason}"
    return LibraryResult(error=found.error, rms=found.rms, reason=reason)


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
        "cases": [_case_data(one) for one in report.results],
        "summary": {
            "mean_ratio": report.mean_ratio(),
            "mean_ratio_by_group": {group: report.mean_ratio(group) for group in report.groups},
            "worst": None if worst is None else {"case": worst.case.name, "ratio": worst.ratio},
        },
    }


def _case_data(result: CaseResult) -> dict[str, Any]:
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
        "limit": result.limit,
        "share": result.share,
        "plain": None if result.plain is None else outcome(result.plain),
        "cost": result.cost,
    }
