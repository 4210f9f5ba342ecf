"""`regard tour`: what regard does, in two minutes."""

from __future__ import annotations

import sys

import typer

from regard.cli.frame import flag
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard tour
  regard tour --no-wait
"""
PROMPT = "Enter: go on   q: leave "


def tour(
    no_wait: bool = flag("--no-wait", "Show everything at once, without waiting for Enter."),
) -> None:
    """Explain a sentence, find a mistake, check a gradient and time this machine: two minutes."""
    from regard.tour import walk

    wait = not no_wait and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    for more in walk(console()):
        if more and wait and not _goes_on():
            return


def _goes_on() -> bool:
    """Wait for a key; whether the reader wants to see more."""
    typer.echo(PROMPT, nl=False)
    key = ""
    try:
        while not key.lower().endswith(("\r", "\n", "q")):
            key = typer.getchar()
    except EOFError:
        key = "q"
    typer.echo(f"\r{'':{len(PROMPT)}}\r", nl=False)  # the prompt is gone
    return not key.lower().endswith("q")
