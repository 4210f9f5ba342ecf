"""`regard info`: what is installed, and whether it keeps its promises here."""

from __future__ import annotations

import typer

from regard.cli.frame import DIFFERS, flag
from regard.compute import native


def info(
    verify: bool = flag("--verify", "Check here what regard promises; a few seconds."),
) -> None:
    """Show versions, kernels, threads and extras."""
    from regard.compute.config import show_config

    show_config()
    if verify:
        native.check_environment()
        from regard.testing.self_test import verify as checks

        broken = 0
        for check in checks():
            state = "kept" if check.kept else f"BROKEN: {check.failure}"
            typer.echo(f"{check.number:<10}{check.promise:<45}{state}")
            broken += not check.kept
        typer.echo("Every promise is kept here." if not broken else f"{broken} are broken here.")
        raise typer.Exit(DIFFERS if broken else 0)
