"""`regard attention`: attention on arrays in .npy files, or of Zarr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from regard.boundary.arrays import Array
from regard.cli.completion import complete_kernel
from regard.cli.frame import check_targets, flag, option, refuse_with, refuse_without
from regard.errors import OptionError, naming_shapes, safe_text
from regard.views.screen import console

if TYPE_CHECKING:
    from regard.cli.on_disk import Job


Results = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype

# From here on the command says beforehand what it needs.
WORTH_SAYING = 2**28
BAR_AFTER_SECONDS = 1.0

EXAMPLES = """\b
Examples:
  regard attention q.npy k.npy v.npy -o out.npy --causal
  regard attention q.npy k.npy v.npy -o out.npy --mask keep.npy --weights weights.npy
  regard attention q.zarr k.zarr v.zarr -o out.zarr --causal --workers 4
"""


def attention(
    query: str = typer.Argument(metavar="Q.npy", help="Queries, (..., H, L, D); or Q.zarr."),
    key: str = typer.Argument(metavar="K.npy", help="Keys, (..., G, S, D)."),
    value: str = typer.Argument(metavar="V.npy", help="Values, (..., G, S, E)."),
    output: str = option(
        "OUT.npy",
        "Save the output here. OUT.zarr: all arrays are of Zarr; a run that was stopped goes on.",
        *("--output", "-o"),
        default=...,
    ),
    causal: bool = flag("--causal", "A query attends to no key after its position."),
    mask: str | None = option("M.npy", "Booleans, true = attend."),
    bias: str | None = option("B.npy", "Numbers to add to the scores."),
    window: tuple[str, str] | None = option(
        "LEFT RIGHT", "Keys to either side: a number or unbounded."
    ),
    offset: str | None = option("N|end", "Position of query 0; end aligns the last query and key."),
    scale: float | None = option("X", "Factor (1/sqrt(D))."),
    softcap: float | None = option("X", "Limit scores smoothly to below this."),
    sink: float | None = option("X", "Add a score without a key to each softmax."),
    precision: str = option(
        "working|high|exact", "high: no weights in bfloat16; exact: float64.", default="working"
    ),
    kernel: str | None = option(
        "NAME", "Kernel to use; see regard info.", autocompletion=complete_kernel
    ),
    threads: int | None = option("N", "Maximum number of threads."),
    weights: str | None = option("W.npy", "Save the weights here."),
    lse: str | None = option("LSE.npy", "Save the log-sum-exp of each row here."),
    force: bool = flag("--force", "Overwrite existing files."),
    max_memory: str | None = option(
        "SIZE",
        "Fail rather than allocate more, such as 8GB. Inputs are mapped and do not count. With "
        "OUT.zarr: of each worker's block (1GiB).",
    ),
    workers: int | None = option("N", "With Zarr: processes to start on this machine.", min=1),
    scheduler: str | None = option("ADDRESS", "With Zarr: of your dask cluster, tcp://HOST:PORT."),
    chunks: tuple[int, int, int] | None = option(
        "HEADS ROWS KEYS", "With Zarr: of a block. By default they fit the memory and the arrays."
    ),
) -> None:
    """Compute attention on arrays in .npy files or of Zarr, piece by piece."""
    from regard.boundary.parse import parse_size

    start = _offset(offset)
    if start is not None and not causal and window is None:
        raise OptionError("--offset has no effect without --causal or --window; leave it out")
    wanted = {"output": output, "weights": weights, "lse": lse}
    targets = {name: path for name, path in wanted.items() if path is not None}
    inputs = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    files = {name: path for name, path in inputs.items() if path is not None}
    check_targets(targets, force=force, inputs=[*files.values()])
    limit = None if max_memory is None else parse_size("--max-memory", max_memory)
    options: dict[str, Any] = {
        "causal": causal,
        "window": None if window is None else tuple(_window_side(side) for side in window),
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "precision": precision,
        "threads": threads,
    }
    cluster: dict[str, Any] = {"workers": workers, "scheduler": scheduler}
    begin = time.perf_counter()
    if output.rstrip("/").endswith(".zarr"):
        from regard.cli.on_zarr import compute

        refuse_with("OUT.zarr", {"--weights": weights, "--kernel": kernel})
        options["offset"] = start
        results: Results = compute(
            files, targets, options, **cluster, chunks=chunks, memory=limit, force=force
        )
    else:
        of_zarr = {**cluster, "chunks": chunks}
        refuse_without("-o OUT.zarr", {f"--{name}": one for name, one in of_zarr.items()})
        options |= {"kernel": kernel, "return_weights": "weights" in targets}
        options["return_lse"] = "lse" in targets
        results = _in_files(files, targets, options, start, limit, force=force)
    seconds = time.perf_counter() - begin
    for name, path in targets.items():
        shape, dtype = results[name]
        typer.echo(f"{safe_text(path)}: {name} {shape} {dtype}")
    if seconds >= BAR_AFTER_SECONDS:
        typer.echo(f"computed in {seconds:.1f} s", err=True)


def _in_files(
    files: Mapping[str, str],
    targets: Mapping[str, str],
    options: dict[str, Any],
    offset: int | str | None,
    limit: int | None,
    *,
    force: bool,
) -> Results:
    """Compute over .npy files in this process."""
    from regard.cli.on_disk import Job, load_npy
    from regard.compute.request import make_request

    arrays: dict[str, Any] = {name: load_npy(path) for name, path in files.items()}
    kernel = options.pop("kernel")
    with naming_shapes(**arrays):
        request = make_request(**arrays, offset=offset, **options)
    extras = {name: arrays.pop(name) for name in arrays.keys() & {"mask", "bias"}}
    by_position = options["causal"] or options["window"] is not None
    job = Job(request, extras, {**options, "kernel": kernel}, by_position)
    _check_memory(job, arrays, limit)
    job.write(targets, force=force, watch=_with_progress)
    return job.results


def _with_progress(pieces: Sequence[Any]) -> Iterator[Any]:
    """The pieces one by one, with a bar on a terminal if it takes long."""
    begin = time.monotonic()
    bar: Any = None
    task: Any = None
    try:
        for number, piece in enumerate(pieces):
            late = time.monotonic() - begin > BAR_AFTER_SECONDS
            if bar is None and late and sys.stderr.isatty():
                from rich.progress import Progress

                bar = Progress(console=console(stderr=True), transient=True)
                task = bar.add_task("attention", total=len(pieces), completed=number)
                bar.start()
            yield piece
            if bar is not None:
                bar.update(task, completed=number + 1)
    finally:
        if bar is not None:
            bar.stop()


def _check_memory(job: Job, arrays: Mapping[str, Array], limit: int | None) -> None:
    """Say what a large call needs before it starts; refuse one that needs too much."""
    from rich.filesize import decimal

    needed = job.memory()
    if limit is not None and needed > limit:
        raise OptionError(
            f"this takes about {decimal(needed)} of memory, besides the inputs, which are read "
            f"where they lie; --max-memory allows {decimal(limit)}"
        )
    if needed >= WORTH_SAYING:
        taken = ", ".join(f"{name} {a.shape} {a.dtype}" for name, a in arrays.items())
        given = ", ".join(f"{name} {shape}" for name, (shape, _) in job.results.items())
        typer.echo(
            f"{taken} -> {given}: about {decimal(needed)} of memory besides the inputs", err=True
        )


def _window_side(text: str) -> int | None:
    if text == "unbounded":
        return None
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise OptionError(f"--window has {text}; each side is 0 or more keys, or unbounded")
    return int(text)


def _offset(text: str | None) -> int | str | None:
    if text is None or text == "end":
        return text
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise OptionError(f"--offset is {text}; it must be a whole number or end")
    return int(text)
