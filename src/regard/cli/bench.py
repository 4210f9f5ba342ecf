"""`regard bench`: regard beside its peers on this machine."""

from __future__ import annotations

import typer

from regard.cli.frame import flag, option, refuse_without
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard bench
  regard bench --grid full --json results.json --plot results.png
  regard bench --against torch,numpy --threads 1
"""


def bench(
    against: str | None = option(
        "NAMES",
        "Peers, separated by commas: torch, onnxruntime, openvino, jax, numpy (all).",
        show_default=False,
    ),
    grid: str = option("quick|full", "quick: about a minute; full: half an hour.", default="quick"),
    as_json: str | None = option("FILE", "Save everything that was measured.", "--json"),
    plot: str | None = option("FILE", "Save a picture (.png, .svg or .pdf)."),
    threads: int | None = option("N", "Threads of every side (all CPUs)."),
    force: bool = flag("--force", "Replace files that are there."),
) -> None:
    """Check, then time, regard and every installed peer, all with the same number of threads."""
    from regard.bench.command import bench as measure

    if as_json is None and plot is None:
        refuse_without("--json and --plot", {"--force": force})
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
