"""Pages that are made of what the library knows about itself: its commands and so on.

Must not repeat what is written there.
"""

from __future__ import annotations

from collections.abc import Iterator

from typer.testing import CliRunner

from regard.cli import app


def pages() -> Iterator[tuple[str, str]]:
    """The name and the text of every generated page."""
    yield "reference/commands.md", commands()


def commands() -> str:
    """Every command with its own help."""
    import typer.main

    group = typer.main.get_command(app)
    text = "# Commands\n\nWhat each command prints with `--help`.\n"
    for name in ("", *group.commands):
        asked = [name, "--help"] if name else ["--help"]
        run = CliRunner().invoke(
            app, asked, prog_name="regard", env={"COLUMNS": "100", "NO_COLOR": "1"}
        )
        command = " ".join(("regard", *asked))
        text += f"\n## {('regard ' + name).strip()}\n\n"
        text += f"```console\n$ {command}\n{run.stdout.strip()}\n```\n"
    return text
