"""`regard diagnose`: which mistake is in an attention."""

from __future__ import annotations

from typing import Any

import typer

from regard.cli.frame import check_targets, flag, option, print_json, refuse_without, saved
from regard.views.screen import console

EXAMPLES = """\b
Examples:
  regard diagnose my_attention.py
  regard diagnose my_attention.py:attention
  regard diagnose my_attention.py:attention --html diagnosis.html --open
  regard diagnose package.module:attention --mask keep --causal end
  regard diagnose notebook.ipynb:attention --signature "a=query, b=key, c=value"
"""


def diagnose(
    target: str = typer.Argument(
        metavar="FILE:NAME",
        help="file.py:name, module:name, book.ipynb:name. Without :name, the one function in the "
        "file that can be an attention; if there are several, they are listed.",
    ),
    signature: str | None = option(
        "P=ROLE,…", "Meaning of its parameters, such as a=query, b=key."
    ),
    heads: int | None = option("N", "Number of heads."),
    causal: str | None = option(
        "yes|no|start|end", "Whether it is always causal, or how unequal lengths align."
    ),
    mask: str | None = option("KIND", "How a mask is read: keep, keep01, add, hide or hide01."),
    window: str | None = option(
        "inclusive|exclusive", "Whether a window counts the query's own key."
    ),
    time_limit: float = option("SECONDS", "Time limit of one call.", default=10.0),
    score: str | None = option(
        "SCORE", "Score that is meant: cosine, cosine:temperature=0.5, distance, features."
    ),
    normalize: str | None = option(
        "NAME", "Normalization that is meant: sigmoid, sigmoid:bias=-1, hard, sparsemax."
    ),
    layout: str | None = option("AXES", "Axes of its arrays, such as BLHD, LD or DL."),
    library: str | None = option("numpy|torch|jax", "Whose arrays it takes."),
    strict: bool = flag("--strict", "Exit with 1 for fragile as for mistaken."),
    in_process: bool = flag("--in-process", "Call it in this process, not in a child process."),
    as_json: bool = flag("--json", "Print JSON and nothing else."),
    html: str | None = option("OUT.html", "Write the diagnosis as one HTML file."),
    show: bool = flag("--open", "Open that file in the browser."),
    force: bool = flag("--force", "Let --html overwrite a file."),
) -> None:
    """Find the mistake in an attention function: exit code 0 right, 1 mistaken, 2 not run."""
    from regard.diagnosis.choice import choose
    from regard.diagnosis.isolation import diagnose_target
    from regard.diagnosis.process.target import files_of

    target, chosen = choose(target)
    if html is None:
        refuse_without("--html", {"--open": show, "--force": force})
    else:
        check_targets({"html": html}, force=force, inputs=files_of(target))
    options: dict[str, Any] = {
        "signature": signature,
        "heads": heads,
        "causal": {"yes": True, "no": False}.get(causal or "", causal),
        "mask": mask,
        "window": window,
        "time_limit": time_limit,
        "layout": layout,
        "library": library,
    }
    for name, text in (("score", score), ("normalize", normalize)):
        if text is not None:
            from regard.problems.mechanisms import spelled

            options[name] = spelled(name, text)
    if chosen and not as_json:
        typer.echo(chosen, err=True)
    found = diagnose_target(target, options, in_process=in_process)
    if as_json:
        print_json(found.to_json())
    else:
        from regard.views.diagnosis.terminal import print_diagnosis, print_verdict

        (print_diagnosis if html is None else print_verdict)(found, console())
    if html is not None:
        from regard.views import diagnosis

        diagnosis.write(html, found, force=force)
        saved(html, show)
    raise typer.Exit(1 if strict and found.verdict == "fragile" else found.exit_code)
