"""`regard diagnose`: whether an attention is right, and which of its lines is wrong."""

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
  regard diagnose package.module:attention --causal end
  regard diagnose notebook.ipynb:attention --call adapters.py:call
"""


def diagnose(
    target: str = typer.Argument(
        metavar="FILE:NAME",
        help="file.py:name, module:name, book.ipynb:name. Without :name, the one function in the "
        "file that can be an attention; if there are several, they are listed.",
    ),
    call: str | None = option(
        "FILE:NAME", "An adapter: call(f, t) calls it with the fields of a problem."
    ),
    mask: str | None = option("attend|hide|add", "What True in a mask means; or it is added."),
    causal: str | None = option(
        "yes|no|start|end", "Whether later keys are hidden, or how unequal lengths align."
    ),
    window: str | None = option(
        "inclusive|exclusive", "Whether a window counts the query's own key."
    ),
    scale: str | None = option("NUMBER|none", "What multiplies the scores, if not 1/√D."),
    heads: int | None = option("N", "Number of heads."),
    score: str | None = option(
        "SCORE", "Score that is meant: cosine, cosine:temperature=0.5, distance, features."
    ),
    normalize: str | None = option(
        "NAME", "Normalization that is meant: sigmoid, sigmoid:bias=-1, hard, sparsemax."
    ),
    library: str | None = option("numpy|torch|jax", "Whose arrays it takes."),
    strict: bool = flag("--strict", "Exit with 1 for fragile as for wrong."),
    in_process: bool = flag("--in-process", "Call it in this process, not in a child process."),
    as_json: bool = flag("--json", "Print JSON and nothing else."),
    html: str | None = option("OUT.html", "Write the diagnosis as one HTML file."),
    show: bool = flag("--open", "Open that file in the browser."),
    force: bool = flag("--force", "Let --html replace a file that is no page of regard."),
) -> None:
    """Find where an attention function is wrong: exit code 0 right, 1 wrong, 2 not callable."""
    from regard.diagnosis.choice import choose
    from regard.diagnosis.isolation import diagnose_target
    from regard.diagnosis.process.target import files_of

    target, chosen = choose(target)
    if html is None:
        refuse_without("--html", {"--open": show, "--force": force})
    else:
        check_targets({"html": html}, force=force, inputs=files_of(target))
    options: dict[str, Any] = {
        "mask": mask,
        "causal": {"yes": True, "no": False}.get(causal or "", causal),
        "window": window,
        "scale": _number(scale),
        "heads": heads,
        "library": library,
    }
    for name, text in (("score", score), ("normalize", normalize)):
        if text is not None:
            from regard.compute.spelling import spelled

            options[name] = spelled(name, text)
    if chosen and not as_json:
        typer.echo(chosen, err=True)
    found = diagnose_target(target, call, in_process=in_process, **options)
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


def _number(text: str | None) -> float | str | None:
    """A number, or the text, which is refused where it is no word for one."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
