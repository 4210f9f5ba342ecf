"""Attention over Zarr arrays, on worker processes or a dask cluster.

Owns who computes blocks. Blocks, and going on where a run was stopped, are `regard.interop.zarr`'s.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from regard.cli.frame import progress_bar
from regard.errors import OptionError, ProblemError, naming_shapes, safe_text

# A terminal's Ctrl-C reaches workers too; they are ended from here, without a word of their own.
QUIET = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
# What dask measures for its dashboard, which nobody sees here: 4 % of the time of two CPUs.
UNMEASURED = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}
INSTALL = 'is not installed: pip install "regard[zarr]"'


def compute(
    files: Mapping[str, str],
    targets: Mapping[str, str],
    options: dict[str, Any],
    *,
    workers: int | None,
    scheduler: str | None,
    chunks: tuple[int, int, int] | None,
    memory: int | None,
    force: bool,
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Compute; returns the shape and the dtype of each result."""
    if workers is not None and scheduler is not None:
        raise OptionError("--workers starts processes, and --scheduler names yours; give one")
    try:
        from regard.interop import zarr as over_zarr
        from regard.interop.zarr_files import Output, open_array
    except ModuleNotFoundError as error:
        raise OptionError(f"OUT.zarr needs {safe_text(error.name, 60)}, which {INSTALL}") from None

    arrays: dict[str, Any] = {name: open_array(path) for name, path in files.items()}
    given: dict[str, Any] = {**files, **targets, **options, "chunks": chunks, "force": force}
    if memory is not None:
        given["memory"] = memory
    try:
        with (
            naming_shapes(**arrays),
            _executor(workers, scheduler) as (executor, number),
            progress_bar() as watch,
        ):
            end = over_zarr.attention(**given, executor=executor, workers=number, watch=watch)
    except KeyboardInterrupt:
        # The process ends; what zarr's own loop had begun is nothing that a user has to know of.
        warnings.simplefilter("ignore", RuntimeWarning)
        logging.getLogger("asyncio").disabled = True
        place = safe_text(Output(targets["output"]).folder, 200)
        raise KeyboardInterrupt(f"the same command goes on from {place}") from None
    if end.kept:
        typer.echo(f"{end.kept} of {end.of} blocks were whole and kept", err=True)
    made = {name: open_array(path) for name, path in targets.items()}
    return {name: (array.shape, array.dtype) for name, array in made.items()}


@contextmanager
def _executor(workers: int | None, scheduler: str | None) -> Iterator[tuple[Any, int]]:
    """What computes blocks, and how many at the same time."""
    if workers is None and scheduler is None:
        yield None, 1
        return
    try:
        import distributed
    except ModuleNotFoundError:
        raise OptionError(f"--workers and --scheduler need dask, which {INSTALL}") from None
    for name in ("distributed", "distributed.client"):  # what they say is said in one line here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with _cluster(distributed, workers, scheduler) as client:
        try:
            yield client, sum(client.nthreads().values()) or 1
        except distributed.KilledWorker as error:
            raise ProblemError(
                f"a block ended {error.allowed_failures + 1} workers, perhaps for want of memory; "
                "the same command goes on with the others. --max-memory or --chunks make blocks "
                "smaller"
            ) from error
        except ModuleNotFoundError as error:
            raise ProblemError(f"a worker lacks {error.name}, which {INSTALL} there") from error


@contextmanager
def _cluster(distributed: Any, workers: int | None, scheduler: str | None) -> Iterator[Any]:
    if scheduler is not None:
        with distributed.Client(scheduler) as client:
            yield client
        return
    import dask

    with (
        dask.config.set(UNMEASURED),
        distributed.LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",  # any free port: None means one that may be taken
            silence_logs=logging.CRITICAL,  # what a worker raises is raised here
            preload=QUIET,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
