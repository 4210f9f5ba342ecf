"""`regard attention`: attention on arrays in .npy files, or of Zarr."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from regard.boundary.arrays import Array
from regard.cli.completion import complete_kernel
from regard.cli.frame import (
    check_targets,
    flag,
    option,
    progress_bar,
    refuse_with,
    refuse_without,
)
from regard.errors import OptionError, naming_shapes, safe_text

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
    targets = _given(output=output, weights=weights, lse=lse)
    files = _given(query=query, key=key, value=value, mask=mask, bias=bias)
    check_targets(targets, force=force, inputs=[*files.values()])
    limit = None if max_memory is None else parse_size("--max-memory", max_memory)
    options: dict[str, Any] = {
        "causal": causal,
        "window": None if window is None else tuple(_window_side(side) for side in window),
        "offset": start,
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "precision": precision,
        "threads": threads,
    }
    of_zarr: dict[str, Any] = {"workers": workers, "scheduler": scheduler, "chunks": chunks}
    begin = time.perf_counter()
    if output.rstrip("/").endswith(".zarr"):
        from regard.cli.on_zarr import compute

        refuse_with("OUT.zarr", {"--weights": weights, "--kernel": kernel})
        results: Results = compute(files, targets, options, **of_zarr, memory=limit, force=force)
    else:
        refuse_without("-o OUT.zarr", {f"--{name}": given for name, given in of_zarr.items()})
        options |= {"kernel": kernel} | {f"return_{n}": n in targets for n in ("weights", "lse")}
        results = _in_files(files, targets, options, limit, force=force)
    seconds = time.perf_counter() - begin
    for name, path in targets.items():
        shape, dtype = results[name]
        typer.echo(f"{safe_text(path)}: {name} {shape} {dtype}")
    if seconds >= BAR_AFTER_SECONDS and sys.stderr.isatty():
        typer.echo(f"computed in {seconds:.1f} s", err=True)


def _given(**paths: str | None) -> dict[str, str]:
    return {name: path for name, path in paths.items() if path is not None}


def _in_files(
    files: Mapping[str, str],
    targets: Mapping[str, str],
    options: dict[str, Any],
    limit: int | None,
    *,
    force: bool,
) -> Results:
    """Compute over .npy files in this process."""
    from regard.cli.on_disk import Job, load_npy
    from regard.compute.request import make_request

    arrays: dict[str, Any] = {name: load_npy(path) for name, path in files.items()}
    with naming_shapes(**arrays):
        job = Job(make_request(**arrays, **options))
    _check_memory(job, {name: arrays[name] for name in ("query", "key", "value")}, limit)
    with progress_bar(BAR_AFTER_SECONDS) as watch:
        job.write(targets, force=force, watch=watch)
    return job.results


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
