"""`regard examples`: the problems that come with regard."""

from __future__ import annotations

from textwrap import fill

import typer

from regard.cli.completion import complete_example
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard examples
  regard examples she-likes-coffee > mine.toml
"""

HOW_TO = """
Explain one:            regard explain she-likes-coffee
Print its file:         regard examples she-likes-coffee
Start one of your own:  regard examples she-likes-coffee > mine.toml"""


def examples(
    name: str | None = typer.Argument(
        None,
        metavar="NAME",
        help="Print the file of this example.",
        autocompletion=complete_example,
        show_default=False,
    ),
) -> None:
    """List the examples with one line for each, smallest first, or print the file of one."""
    from regard import api
    from regard.problems.files import example_names, example_text, load_problem

    if name is not None:
        typer.echo(example_text(name), nl=False)
        return

    def size(one: str) -> int:
        """How many numbers an explanation of it has."""
        return sum(step.value.size for step in api.explain(load_problem(one)).steps.values())

    names = sorted(example_names(), key=size)
    width = max(map(len, names), default=0)
    # The first line of every example is a comment that says what it shows.
    lines = [f"{one:<{width}}  {example_text(one).splitlines()[0].lstrip('# ')}" for one in names]
    room = max(console().width, width + 1)
    for line in (*lines, *HOW_TO.split("\n")):
        typer.echo(fill(line, room, subsequent_indent="    ", break_on_hyphens=False))
