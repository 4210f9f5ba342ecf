"""The command `regard bench`: checks, one run, results.

Must not know how options are parsed.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from regard.bench import compare
from regard.bench.cases import Case, grid
from regard.bench.libraries import REGARD, peers
from regard.bench.machine import description
from regard.bench.measure import Report, as_data, measure_cases
from regard.bench.timing import Budget
from regard.boundary.files import write_file
from regard.compute import native
from regard.errors import OptionError, ProblemError

if TYPE_CHECKING:
    from rich.console import Console

BUDGETS = {
    "quick": Budget(seconds=0.4),
    "full": Budget(seconds=1.0),
    "gradients": Budget(),
    "spread": Budget(rounds=10),  # each beside its plain call, whose ratio is wanted closely
}


def bench(
    console: Console,
    *,
    against: str | None,
    grid_name: str,
    json_file: str | None,
    plot_file: str | None,
    threads: int | None,
    earlier_file: str | None,
    fail_above: float | None,
) -> int:
    """Measure, save and print; returns the exit code.

    It is 1 if a case is slower than in `earlier_file` by more than `fail_above` percent, whichever
    rounds of the two runs are compared.
    """
    libraries = peers(None if against is None else [name.strip() for name in against.split(",")])
    cases = grid(grid_name)
    _check_files({"--json": json_file, "--plot": plot_file})
    if fail_above is not None and not 0 <= fail_above < math.inf:
        raise OptionError(f"--fail-above is {fail_above}; it must be a percentage, 0 or more")
    count = checked_threads(threads)
    earlier = None if earlier_file is None else compare.read_run(earlier_file)
    if earlier is not None:
        compare.check_comparable(earlier, description(count), cases)

    budget = BUDGETS[grid_name]
    names = [REGARD.name, *(one.name for one in libraries if one.missing() is None)]
    _say(f"{len(cases)} cases with {', '.join(names)}")

    def measure(watch: Callable[[Case], None]) -> Report:
        return measure_cases(cases, libraries, count, grid=grid_name, budget=budget, watch=watch)

    report = _with_progress(cases, measure)
    if json_file is not None:
        text = json.dumps(as_data(report), allow_nan=False, ensure_ascii=True, indent=1)
        with write_file(json_file, force=True) as file:  # the command has asked about --force
            file.write(f"{text}\n".encode())
    if plot_file is not None:
        from regard.bench.plots import save_plot

        save_plot(report, plot_file)
    from regard.bench.tables import print_changes, print_report

    print_report(report, console)
    if earlier is None:
        return 0
    found = compare.changes(earlier, report)
    print_changes(earlier, found, compare.notes(earlier, report), console)
    if fail_above is None:
        return 0
    slower = [one.case.name for one in found if one.low > 1 + fail_above / 100]
    if slower:
        console.print(f"Slower by more than {fail_above:g}%: {'; '.join(slower)}")
    return 1 if slower else 0


def checked_threads(threads: int | None) -> int:
    """The number of threads for every library; an OptionError unless 1 to the usable CPUs."""
    cpus = native.usable_cpus()
    if threads is None:
        return min(native.default_threads(), cpus)
    if not 1 <= threads <= cpus:
        raise OptionError(f"--threads is {threads}; this process may use 1 to {cpus}")
    return threads


def _check_files(files: Mapping[str, str | None]) -> None:
    """Refuse now what would fail only after the run."""
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ProblemError(f"{option} {path}: {folder} is not a writable folder")
    plot = given.get("--plot")
    if plot is None:
        return
    if not plot.endswith((".png", ".svg", ".pdf")):
        raise OptionError(f"--plot is {plot}; it must end in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise OptionError('--plot needs matplotlib; pip install "regard[plot]"')


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _say(words: str) -> None:
    if sys.stderr is not None:
        print(words, file=sys.stderr, flush=True)


def _with_progress(
    cases: Sequence[Case], measure: Callable[[Callable[[Case], None]], Report]
) -> Report:
    """Measure with a progress bar on a terminal, and a line for each case elsewhere."""
    done = -1
    if sys.stderr is None or not sys.stderr.isatty():
        begin = time.monotonic()

        def tell(case: Case) -> None:
            nonlocal done
            done += 1
            left = (time.monotonic() - begin) / max(done, 1) * (len(cases) - done)
            _say(f"{done + 1}/{len(cases)}  {case.name}" + f", {_spoken(left)} left" * bool(done))

        return measure(tell)
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from regard.views.screen import console

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn only between cases, so as not to disturb the times.
    with Progress(
        *columns, console=console(stderr=True), transient=True, auto_refresh=False
    ) as progress:
        task = progress.add_task("peaks of the machine", total=len(cases))

        def watch(case: Case) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=case.name, completed=done)
            progress.refresh()

        progress.refresh()
        return measure(watch)
