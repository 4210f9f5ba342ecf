"""`regard bench`: regard beside its peers on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from regard.cli.frame import refuse_without
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard bench
  regard bench --grid full --json results.json --plot results.png
  regard bench --against torch,numpy --threads 1
"""


def bench(
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Peers, separated by commas: torch, onnxruntime, openvino, jax, numpy (all).",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        str, typer.Option(metavar="quick|full", help="quick: about a minute; full: half an hour.")
    ] = "quick",
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Save everything that was measured."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save a picture (.png, .svg or .pdf).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of every side (all CPUs).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Check, then time, regard and every installed peer, all with the same number of threads."""
    from regard.bench.command import bench as measure

    if as_json is None and plot is None:
        refuse_without("--json and --plot", {"--force": force or None})
    code = measure(
        console(),
        against=against,
        grid_name=grid,
        json_file=as_json,
        plot_file=plot,
        threads=threads,
        force=force,
    )
    if code:
        raise typer.Exit(code)
