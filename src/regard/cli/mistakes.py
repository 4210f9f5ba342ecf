"""`regard mistakes`: what `regard diagnose` can name, each with an example in numbers."""

from __future__ import annotations

import typer

from regard.cli.completion import complete_mistake
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard mistakes
  regard mistakes no_scale
"""


def mistakes(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="Show this mistake, the line to write instead, and an example.",
        autocompletion=complete_mistake,
        show_default=False,
    ),
) -> None:
    """List the mistakes that regard diagnose can name, or show one with right and wrong numbers."""
    from regard.diagnosis.catalogue import SEVERITIES, described, families

    if name is None:
        from regard.views.diagnosis.terminal import print_catalogue

        listed = {
            family: [(one.name, one.title) for one in own] for family, own in families().items()
        }
        print_catalogue(listed, console())
        return
    from regard.views.diagnosis.terminal import print_parts, print_verdict

    found = described(name)
    print_verdict(found, console())
    print_parts(found, console())
    severity = found.mistakes[0].severity
    typer.echo(f"\n{severity}: {SEVERITIES[severity]}")
    typer.echo(f"On the site: reference/mistakes/{name}.html")
