"""`regard diagnose`: which mistake is in an attention."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from regard.cli.frame import check_targets, refuse_without, saved
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard diagnose my_attention.py:attention
  regard diagnose my_attention.py:attention --html diagnosis.html --open
  regard diagnose package.module:attention --mask keep --causal end
  regard diagnose notebook.ipynb:attention --signature "a=query, b=key, c=value"
"""


def diagnose(
    target: Annotated[
        str, typer.Argument(metavar="FILE:NAME", help="file.py:name, module:name, book.ipynb:name.")
    ],
    signature: Annotated[
        str | None,
        typer.Option(metavar="P=ROLE,…", help="Meaning of its parameters, such as a=query, b=key."),
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="Number of heads.")] = None,
    causal: Annotated[
        str | None,
        typer.Option(
            metavar="yes|no|start|end",
            help="Whether it is always causal, or how unequal lengths align.",
        ),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="How a mask is read: keep, keep01, add, hide or hide01."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="inclusive|exclusive", help="Whether a window counts the query's own key."
        ),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Time limit of one call.")
    ] = 10.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for fragile as for mistaken.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Call it in this process, not in a child process.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="OUT.html", help="Write the diagnosis as one HTML file."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that file in the browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Let --html overwrite a file.")] = False,
) -> None:
    """Find the mistake in an attention function: exit code 0 right, 1 mistaken, 2 not run."""
    from regard.diagnosis.isolation import diagnose_target
    from regard.diagnosis.target import files_of

    if html is None:
        refuse_without("--html", {"--open": show or None, "--force": force or None})
    else:
        check_targets({"html": html}, force=force, inputs=files_of(target))
    options = {
        "signature": signature,
        "heads": heads,
        "causal": {"yes": True, "no": False}.get(causal or "", causal),
        "mask": mask,
        "window": window,
        "time_limit": time_limit,
    }
    found = diagnose_target(target, options, in_process=in_process)
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False, ensure_ascii=True))
    else:
        from regard.views.diagnosis.terminal import print_diagnosis, print_verdict

        (print_diagnosis if html is None else print_verdict)(found, console())
    if html is not None:
        from regard.views import diagnosis

        diagnosis.write(html, found, force=force)
        saved(html, show)
    raise typer.Exit(1 if strict and found.verdict == "fragile" else found.exit_code)
