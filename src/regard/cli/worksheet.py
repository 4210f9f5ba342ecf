"""`regard worksheet`: an attention to compute by hand, with a page of answers."""

from __future__ import annotations

import typer

from regard import api
from regard.cli.completion import complete_source
from regard.cli.explain_input import files_read, read_problem
from regard.cli.frame import check_targets, flag, option, saved

EXAMPLES = """\b
Examples:
  regard worksheet she-likes-coffee --html coffee.html --open
  regard worksheet coffee-target --gradients --html learning.html
"""


def worksheet(
    source: str = typer.Argument(
        metavar="FILE",
        help="A problem (.toml, .json, .npz), the name of an example, or - for standard input.",
        autocompletion=complete_source,
    ),
    html: str = option("OUT.html", "Write the worksheet here, one HTML file.", default=...),
    digits: int = option("N", "Decimals to round to.", min=0, max=8, default=3),
    gradients: bool = flag("--gradients", "Leave the loss and the gradients to fill in too."),
    show: bool = flag("--open", "Open it in the browser, to print it."),
    force: bool = flag("--force", "Replace a file that is no page of regard."),
) -> None:
    """Write a page to print: what is given, empty tables for each step, and the answers."""
    check_targets({"html": html}, force=force, inputs=files_read(source, None))
    explanation = api.explain(read_problem(source, None, None, {}))
    explanation.to_worksheet(html, digits=digits, gradients=gradients, force=force)
    saved(html, show)
