"""What `regard bench` does: a process with as many threads for every side, one run, its results.

Owns what is refused beforehand, the environment, and where results go. The command line owns how
options are called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from regard.bench.cases import Case, grid
from regard.bench.libraries import peers
from regard.bench.measure import Report, as_data, run
from regard.bench.timing import Budget
from regard.compute import native
from regard.errors import OptionError, ProblemError

if TYPE_CHECKING:
    from rich.console import Console

BUDGETS = {"quick": Budget(seconds=0.4), "full": Budget(seconds=1.0)}
# Read when a library is loaded, so they must stand before the process begins.
THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def bench(
    console: Console,
    *,
    against: str | None,
    grid_name: str,
    json_file: str | None,
    plot_file: str | None,
    threads: int | None,
    force: bool,
) -> int:
    """Measure and show; the exit code."""
    sides = peers(None if against is None else [name.strip() for name in against.split(",")])
    cases = grid(grid_name)
    _check_files({"--json": json_file, "--plot": plot_file}, force)
    count = checked_threads(threads)
    if not is_ready(count):
        words = ["--grid", grid_name, "--threads", str(count)]
        words += [] if against is None else ["--against", against]
        words += [] if json_file is None else ["--json", json_file]
        words += [] if plot_file is None else ["--plot", plot_file]
        words += ["--force"] if force else []
        return process_for(count, ["-m", "regard", "bench", *words])
    report = _with_progress(
        cases,
        lambda watch: run(
            cases, sides, count, grid=grid_name, budget=BUDGETS[grid_name], watch=watch
        ),
    )
    if json_file is not None:
        text = json.dumps(as_data(report), allow_nan=False, ensure_ascii=True, indent=1)
        Path(json_file).write_text(text + "\n", "utf-8")
    if plot_file is not None:
        from regard.bench.plots import save_plot

        save_plot(report, plot_file)
    from regard.bench.tables import print_report

    print_report(report, console)
    return 0


def checked_threads(threads: int | None) -> int:
    """How many threads every side gets: not more than there are CPUs.

    Raises
    ------
    OptionError
        If it is less than 1 or more than the CPUs that this process may use.
    """
    cpus = native.usable_cpus()
    if threads is None:
        return min(native.default_threads(), cpus)
    if not 1 <= threads <= cpus:
        raise OptionError(f"--threads is {threads}; this process may use 1 to {cpus}")
    return threads


def is_ready(threads: int) -> bool:
    """Whether this process began with so many threads for everybody."""
    told = all(os.environ.get(name) == str(threads) for name in THREAD_VARIABLES)
    return told and (not hasattr(os, "sched_getaffinity") or _cpus_of_process() == threads)


def process_for(threads: int, arguments: Sequence[str]) -> int:
    """The exit code of a Python process in which every library has so many threads.

    Some libraries read a variable when they are loaded, and jax takes every CPU that the process
    may run on: both must be settled before it begins.
    """
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        if before is not None:
            os.sched_setaffinity(0, sorted(before)[:threads])
        sys.stdout.flush()
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
        return subprocess.run([sys.executable, *arguments], env=environment, check=False).returncode
    finally:
        if before is not None:
            os.sched_setaffinity(0, before)


def _cpus_of_process() -> int:
    return len(os.sched_getaffinity(0))


def _check_files(files: Mapping[str, str | None], force: bool) -> None:
    """What would fail only after minutes."""
    given = {option: path for option, path in files.items() if path is not None}
    for option, path in given.items():
        if not force and os.path.lexists(path):
            raise ProblemError(f"{path}: is there already; --force replaces it")
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise ProblemError(f"{option} {path}: {folder} is no folder that can be written to")
    if len({os.path.realpath(path) for path in given.values()}) < len(given):
        raise OptionError("--json and --plot would go to the same file")
    plot = given.get("--plot")
    if plot is None:
        return
    if not plot.endswith((".png", ".svg", ".pdf")):
        raise OptionError(f"--plot is {plot}; it must end in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise OptionError('--plot needs matplotlib, which pip install "regard[plot]" brings')


def _with_progress(
    cases: Sequence[Case], measure: Callable[[Callable[[Case], None]], Report]
) -> Report:
    """With a bar on a terminal; elsewhere silently."""
    if not sys.stderr.isatty():
        return measure(lambda _: None)
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from regard.views.screen import console

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn())
    # Redrawn only between cases: a thread that draws would take time from what is measured.
    with Progress(
        *columns, console=console(stderr=True), transient=True, auto_refresh=False
    ) as progress:
        task = progress.add_task("limits of the machine", total=len(cases))
        done = -1

        def watch(case: Case) -> None:
            nonlocal done
            done += 1
            progress.update(task, description=case.name, completed=done)
            progress.refresh()

        progress.refresh()
        return measure(watch)
