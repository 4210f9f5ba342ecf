"""A report on the terminal: the machine, one table, the summary. Must not compute anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from regard.bench.cases import POSITIONS, Case
from regard.bench.compare import Change, EarlierRun
from regard.bench.correctness import HALF
from regard.bench.libraries import REGARD
from regard.bench.measure import CaseResult, LibraryResult, Report

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from regard.bench.machine import Limits, Peak


def print_report(report: Report, console: Console) -> None:
    """Print the machine, the table and the summary."""
    if not console.is_terminal:
        console.width = max(console.width, WIDE)  # keep the rows of a file whole
    for line in _heading(report):
        console.print(line)
    console.print()
    console.print(_table(report))
    console.print()
    for line in _summary(report):
        console.print(line)


WIDE = 140


def number(value: float) -> str:
    """Three digits, without an exponent.

    >>> number(1234.5), number(0.98765), number(37.24)
    ('1234', '0.988', '37.2')
    """
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _heading(report: Report) -> list[str]:
    machine = report.machine
    lines = [
        f"{machine['cpu']}, {machine['threads']} of {machine['cpus']} CPUs, "
        f"target {machine['target']}, {machine['system']} {machine['architecture']}, "
        f"Python {machine['python']}, BLAS {machine['blas']}",
        ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    ]
    if report.limits is not None:
        lines += limits_in_words(report.limits)
    load = machine.get("load")
    if load is not None and load > BUSY:
        lines.append(
            f"The machine was busy before the run began (load {load:.1f}): the times mean little."
        )
    return lines


BUSY = 0.7


def limits_in_words(limits: Limits) -> list[str]:
    """The machine's peaks and the factors of each."""
    threads = "1 thread" if limits.threads == 1 else f"{limits.threads} threads"
    lines = [
        f"multiply-add peak, {peak.target}: {peak.float32 / 1e9:.0f} GF/s "
        f"({peak.float64 / 1e9:.0f} in float64{_of_pairs(peak)}) = {threads} × "
        f"{limits.clock / 1e9:.2f} GHz × {peak.lanes} lanes × 2 × "
        f"{limits.multiply_adds_per_cycle(peak):.2f} per cycle"
        for peak in limits.peaks
    ]
    return [*lines, f"reading: {limits.read / 1e9:.1f} GB/s from memory, {threads}"]


def _of_pairs(peak: Peak) -> str:
    return f", {peak.bfloat16 / 1e9:.0f} in bfloat16" if peak.bfloat16 else ""


def _table(report: Report) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("B,H,L,S,D", no_wrap=True)
    table.add_column("")
    names = [REGARD.name, *(name for name in report.libraries if name != REGARD.name)]
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("× best", justify="right")
    table.add_column("")
    group = None
    for result in report.results:
        if group not in (None, result.case.group):
            table.add_row()
        group = result.case.group
        cells = [_cell(result, result.outcomes[name]) for name in names]
        ratio = "–" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(result.case.name, result.case.unit, *cells, ratio, _beside(result))
    return table


def _cell(result: CaseResult, outcome: LibraryResult) -> Text:
    from rich.text import Text

    error = "" if outcome.rms is None else f" ({outcome.rms:.2f})"
    error = error if result.case.dtype in HALF else ""
    if outcome.seconds is None:
        return Text(f"wrong{error}" if outcome.error is not None else "–")
    timed = [one.seconds for one in result.outcomes.values() if one.seconds is not None]
    best = outcome.seconds == min(timed)
    return Text(number(result.speed(outcome.seconds)) + error, style="bold" if best else "")


def _beside(result: CaseResult) -> str:
    if result.cost is not None:
        return f"{result.cost:.2f} × {_plain_time(result.case)}"
    if result.share is None:
        return ""
    return f"{result.share:.0%} of {'reading' if result.case.unit == 'GB/s' else 'peak'}"


def _plain_time(case: Case) -> str:
    if case.mask is not None:
        return f"the time without {'positions' if case.mask in POSITIONS else 'mask'}"
    if case.huge_key:
        return "the time without it"
    if case.queries != 1:
        return "the time of queries×1"
    assert case.plain is not None
    return f"the time per score of {case.plain.S} keys"


def _summary(report: Report) -> list[str]:
    lines = [
        "GF/s of useful work (visible scores) and GB/s of keys and values: more is better; ms and "
        "µs per call: less is better. Medians.",
        "Work of a backward pass: 2.5 times that of the forward pass; of both together: 3.5 times.",
        "Every answer was compared with float64 before it was timed; – : not timed, the reasons "
        "are below.",
    ]
    if any(result.case.dtype in HALF for result in report.results):
        lines.append(
            "In brackets: the error of half types, root mean square, in units of the type (2⁻¹¹ of "
            "float16, 2⁻⁸ of bfloat16); rounding the exact answer once gives 0.43."
        )
    mean, worst = report.mean_ratio(), report.worst
    if mean is not None and worst is not None:
        groups = [
            f"{name} {value:.2f}" for name in report.groups if (value := report.mean_ratio(name))
        ]
        lines += [
            f"{mean:.2f} × the best peer, geometric mean ({', '.join(groups)})",
            f"{worst.ratio:.2f} × at worst: {worst.case.name}, against {worst.best_peer}",
        ]
    if any(round(result.share or 0, 2) > 1 for result in report.results):
        lines.append(
            "A share above 100%: the machine was slower whenever its peak was measured than while "
            "regard ran."
        )
    return [*lines, *reasons(report)]


def reasons(report: Report) -> list[str]:
    """Why something was not timed: each reason once, with its cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        for name, outcome in result.outcomes.items():
            if outcome.reason is not None:
                found.setdefault((name, outcome.reason), []).append(result.case.name)
    return [
        f"{name}: {reason}" + ("" if name in report.missing else f" ({_some(cases)})")
        for (name, reason), cases in found.items()
    ]


def _some(names: Sequence[str]) -> str:
    more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(names[:3]) + more


def print_changes(
    earlier: EarlierRun, changes: Sequence[Change], notes: Sequence[str], console: Console
) -> None:
    """Print each case's time then and now, how sure that is, and what the machine did meanwhile."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("regard, B,H,L,S,D", no_wrap=True)
    for name in ("", "then", "now", "× the time", "with the noise", "peers"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("")
    for one in changes:
        row = [one.case.name, one.case.unit]
        if one.before is None or one.now is None:
            table.add_row(*row, "–", "–", "–", "–", "–", one.reason)
            continue
        row += [number(one.result.speed(seconds)) for seconds in (one.before, one.now)]
        row += [f"{one.ratio:.2f}", f"{one.low:.2f} … {one.high:.2f}"]
        row += ["–" if one.peers is None else f"{one.peers:.2f}", one.verdict]
        table.add_row(*row)
    count = Counter(one.verdict for one in changes)
    console.print(f"\nCompared with {earlier.path}:\n", markup=False)
    console.print(table)
    lines = [
        f"{count['slower']} slower, {count['faster']} faster, {count['same']} the same within the "
        "noise: some round of one run is as fast as one of the other. × the time: more is slower.",
        "peers: × their time, the same versions in the same rounds; far from 1, the machine "
        "itself was faster or slower.",
        *notes,
    ]
    console.print()
    for line in lines:
        console.print(line, markup=False)
