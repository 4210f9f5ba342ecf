"""`regard bench`: regard beside its peers on this machine."""

from __future__ import annotations

import typer

from regard.cli.frame import check_targets, flag, option, refuse_without
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard bench
  regard bench --grid full --json results.json --plot results.png
  regard bench --against torch,numpy --threads 1
  regard bench --against numpy --compare results.json --fail-above 5
"""


def bench(
    against: str | None = option(
        "NAMES",
        "Peers, separated by commas: torch, onnxruntime, openvino, jax, numpy (all).",
        show_default=False,
    ),
    grid: str = option(
        "quick|full|gradients|spread",
        "quick: a minute or two; full: half an hour; gradients: forward, backward, both; spread: "
        "larger numbers, masks and odd keys, beside the plain call.",
        default="quick",
    ),
    as_json: str | None = option("FILE", "Save everything that was measured.", "--json"),
    plot: str | None = option("FILE", "Save a picture (.png, .svg or .pdf)."),
    threads: int | None = option("N", "Threads of every library (all CPUs)."),
    compare: str | None = option("FILE", "Tell what changed since a run saved by --json."),
    fail_above: float | None = option(
        "PERCENT", "With --compare: exit code 1 if a case is slower by more, outside the noise."
    ),
    force: bool = flag("--force", "Replace files that are there."),
) -> None:
    """Check, then time, regard and every installed peer, in turns and with the same threads.

    Each runs in a process of its own, which is stopped while others run.
    """
    from regard.bench.command import bench as measure

    if as_json is None and plot is None:
        refuse_without("--json and --plot", {"--force": force})
    if compare is None:
        refuse_without("--compare", {"--fail-above": fail_above})
    inputs = [] if compare is None else [compare]
    check_targets({"json": as_json, "plot": plot}, force=force, inputs=inputs)
    code = measure(
        console(),
        against=against,
        grid_name=grid,
        json_file=as_json,
        plot_file=plot,
        threads=threads,
        earlier_file=compare,
        fail_above=fail_above,
    )
    if code:
        raise typer.Exit(code)
