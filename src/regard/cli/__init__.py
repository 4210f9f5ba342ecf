"""The command line: `regard tour`, `explain`, `diagnose` and the rest.

Owns arguments, exit codes and what goes to which stream, one module for each command. Must not
compute or lay out anything itself. Exit codes: 0 fine, 1 a stated expectation differs, 2 bad input,
130 interrupted. A command that a script starts in the background, where interrupts are ignored,
goes on ignoring them.
"""

from __future__ import annotations

import os
import sys

import typer

from regard.cli import (
    attention,
    bench,
    diagnose,
    examples,
    explain,
    generate,
    info,
    mistakes,
    tour,
    worksheet,
)
from regard.cli.frame import Command, Commands, flag

FIRST_STEPS = """\b
First steps:
  regard tour                         see what regard does, in two minutes
  regard examples                     list the examples
  regard explain she-likes-coffee     show every step of one
  regard explain --text "I like tea"  explain words of your own
  regard explain --help               what else explain can do
"""

app = typer.Typer(
    cls=Commands,
    epilog=FIRST_STEPS,
    help="Attention on NumPy arrays, with an explanation of every number.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from regard import __version__

        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: bool = flag(
        "--version", "Print the version.", "-V", callback=_print_version, is_eager=True
    ),
) -> None:
    """Attention on NumPy arrays, with an explanation of every number."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command(
    cls=Command,
    epilog=tour.EXAMPLES,
    short_help="See what regard does, in two minutes.",
)(tour.tour)
app.command(
    cls=explain.ExplainCommand,
    epilog=explain.EXAMPLES,
    short_help="Show every step of an attention.",
)(explain.explain)
app.command(
    cls=Command,
    epilog=generate.EXAMPLES,
    short_help="Let a language model write on after a text.",
)(generate.generate)
app.command(
    cls=Command,
    epilog=examples.EXAMPLES,
    short_help="List the examples, or print one.",
)(examples.examples)
app.command(
    cls=Command,
    epilog=worksheet.EXAMPLES,
    short_help="Write a page to compute an attention by hand.",
)(worksheet.worksheet)
app.command(
    cls=Command,
    epilog=attention.EXAMPLES,
    short_help="Compute attention on arrays in .npy files.",
)(attention.attention)
app.command(
    cls=Command,
    epilog=diagnose.EXAMPLES,
    short_help="Find the mistake in an attention function.",
)(diagnose.diagnose)
app.command(
    cls=Command,
    epilog=mistakes.EXAMPLES,
    short_help="List the mistakes that diagnose can name.",
)(mistakes.mistakes)
app.command(
    cls=Command,
    epilog=bench.EXAMPLES,
    short_help="Time regard and its peers on this machine.",
)(bench.bench)
app.command(short_help="Show versions, kernels, threads and extras.")(info.info)


def main() -> None:
    """The command `regard`."""
    # A process may start with its streams closed; whatever is written then goes nowhere.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    app(prog_name="regard")
