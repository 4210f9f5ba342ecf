"""`regard explain`: every step of an attention, one number of it, or a report."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from regard import api
from regard.cli.completion import complete_source, complete_step
from regard.cli.frame import (
    DIFFERS,
    Command,
    check_targets,
    refuse_with,
    refuse_without,
    saved,
)
from regard.errors import LabelError, OptionError, ProblemError, ShapeError, safe_text
from regard.views.screen import console

if TYPE_CHECKING:
    from regard.explanation.derivation import Derivation
    from regard.faces import Explanation
    from regard.models import Encoder, Overview
    from regard.problems.problem import Problem

EXAMPLES = """\b
Examples:
  regard explain she-likes-coffee
  regard explain she-likes-coffee --why output she 2
  regard explain she-likes-coffee --html coffee.html --open
"""


class ExplainCommand(Command):
    """`explain`, whose --why takes a step and as many labels as the step has axes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Fill up what follows --why to the three words that the parser wants."""
        args = list(args)
        places = [n for n, word in enumerate(args) if word.partition("=")[0] == "--why"]
        if len(places) > 1:
            raise OptionError("--why was given twice; ask for one number at a time")
        if places:
            options = {name for parameter in self.params for name in parameter.opts}
            options |= {"--help", "-h"}
            first = places[0] + 1
            words = args[first : first + 3]
            own = next(
                (n for n, word in enumerate(words) if word.partition("=")[0] in options), len(words)
            )
            if not own or "=" in args[places[0]]:
                raise OptionError(
                    "--why needs a step, then a row and a column of it, such as --why output 0 0 "
                    "(see regard explain --help)"
                )
            args[first + own : first + own] = ["-"] * (3 - own)
        return super().parse_args(ctx, args)


def explain(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="A problem (.toml, .json, .npz), the name of an example, or - for standard input.",
            autocompletion=complete_source,
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(
            "--step",
            metavar="STEP",
            help="Show only this step; may be given several times.",
            autocompletion=complete_step,
        ),
    ] = None,
    why: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            metavar="STEP ROW COL",
            help="Where one number comes from. Labels first, then positions from 0; - for an axis "
            "that the step does not have.",
            autocompletion=complete_step,
        ),
    ] = None,
    head: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Which head, from 0; of keys and values the ones that it reads."
        ),
    ] = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Variances, entropy, and why the scale is there.")
    ] = False,
    digits: Annotated[
        int | None, typer.Option(min=0, max=17, metavar="N", help="Decimals to print (8).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    text: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="Explain these, with random vectors, instead of FILE."),
    ] = None,
    dim: Annotated[
        int | None, typer.Option(metavar="N", help="With --text: how wide the vectors are (4).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="With --text: the random seed (0).")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(metavar="N", help="With --text: how many heads.")
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="With --text: no word sees a later one.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --text: the encoder in this directory reads it."),
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --model: one layer, from 0; else all are measured."),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="With --model: cut a text that is too long.")
    ] = False,
    save: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save the problem (.toml, .json or .npz).")
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            "--html", metavar="OUT.html", help="Write one HTML file in which numbers can be opened."
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that file in the browser.")] = False,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The most that file may have (5MB); the rest is pooled."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --save and --html replace a file.")
    ] = False,
    kind: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="toml|json", help="Of standard input; guessed if not given."
        ),
    ] = None,
) -> None:
    """Show every step of an attention, and where its numbers come from."""
    own = {"--dim": dim, "--seed": seed, "--heads": heads, "--causal": causal or None}
    if force and save is None and html is None:
        raise OptionError("--force goes with --save and --html only")
    if html is None and (show or budget is not None):
        raise OptionError(f"{'--open' if show else '--budget'} goes with --html only")
    if save is not None or html is not None:
        inputs = _files_read(source, model)
        check_targets({"save": save, "html": html}, force=force, inputs=inputs)
    if as_json:
        refuse_with("--json", {"--digits": digits, "--head": None if why or model else head})
    if statistics and why is None and not step and html is None:
        refuse_with("--statistics alone", {"--digits": digits})
    if html is not None and why is None and not step and not statistics and model is None:
        refuse_with("--html alone", {"--head": head})
    if why is not None and source is None and text is None:
        raise OptionError(
            "explain needs a problem, and --why took the words after it; put FILE before --why "
            "(see regard explain --help)"
        )
    from regard.explanation.labels import head_position

    of_model = {"--layer": layer, "--truncate": truncate or None}
    if model is None:
        refuse_without("--model", of_model)
        problem = _given_problem(source, text, kind, own)
    else:
        encoder, words = _encoder(model, source, text, kind, own)
        if layer is None:
            asked = {"--step": step, "--why": why, "--head": head, "--save": save, "--html": html}
            refuse_without("--layer", {**asked, "--statistics": statistics or None})
            overview = encoder.overview(words, truncate=truncate)
            _show_overview(overview, as_json, digits)
            return
        explained = encoder.explain(words, layer, head, truncate=truncate).problem
        assert explained is not None
        problem, head = explained, None  # the one head that was asked for, or all
    if save is not None:
        _save(problem, save, force)
    explanation = api.explain(problem)
    head_position(explanation.source.sizes, head)
    derivation = None if why is None else _derivation(explanation, why, head)
    if html is not None:
        _write_report(explanation, html, budget, digits, force=force, show=show)
    mismatches, unchecked = _mismatches(explanation, source or "--text")

    if as_json:
        if unchecked is not None:
            raise unchecked
        _print_json(explanation, step, derivation, statistics)
    else:
        from regard.views import terminal

        screen = console()
        if step or (derivation is None and not statistics and html is None):
            terminal.print_explanation(explanation, screen, step or None, head, digits)
        if derivation is not None:
            if step:
                screen.print()
            sizes = explanation.source.sizes
            shared = sizes.get("H", 1) // sizes.get("G", 1)
            terminal.print_derivation_walk(derivation, screen, digits, shared)
        if statistics:
            terminal.print_statistics(explanation, screen, head)
        count = 0 if unchecked is not None else len(problem.expect)
        if mismatches:
            terminal.print_mismatches(mismatches, screen, digits)
        if count and not (html is not None and not mismatches):
            failed = len({id(mismatch.expectation) for mismatch in mismatches})
            screen.print()
            screen.print(_expectation_summary(count, failed))
    if unchecked is not None:
        raise unchecked
    if mismatches:
        raise typer.Exit(DIFFERS)


def _files_read(source: str | None, model: str | None) -> list[str | int]:
    """What this command reads, and so must not replace."""
    if model is not None:  # its files, and those of its modules
        below = [glob.escape(model), "*"]
        return [*glob.glob(os.path.join(*below)), *glob.glob(os.path.join(*below, "*"))]
    if source is None:
        return []
    if source == "-":
        return [0]  # standard input, which may be a file
    from regard.problems.files import file_of

    return [file_of(source)]


def _encoder(
    directory: str, source: str | None, text: str | None, kind: str | None, own: Mapping[str, Any]
) -> tuple[Encoder, str]:
    """The model in a directory and what it is to read."""
    from regard.models import load

    if text is None or source is not None or kind is not None:
        raise OptionError("--model reads what --text gives it, and no problem")
    for option, value in own.items():
        if value is not None:
            raise OptionError(f"{option} is for random vectors; it has no effect with --model")
    return load(directory), text


def _show_overview(overview: Overview, as_json: bool, digits: int | None) -> None:
    from regard.views.overview import print_overview

    if as_json:
        typer.echo(json.dumps(overview.to_json(), allow_nan=False, ensure_ascii=True))
    else:
        print_overview(overview, console(), digits)


def _given_problem(
    source: str | None, text: str | None, kind: str | None, own: Mapping[str, Any]
) -> Problem:
    from regard.problems.files import load_problem

    if text is not None and source is not None:
        raise OptionError(f"give either --text or a problem ({safe_text(source, 60)}), not both")
    if kind is not None and source != "-":
        raise OptionError("--format goes with standard input only, which is the file name -")
    if text is not None:
        return _random_problem(text, own)
    for option, value in own.items():
        if value is not None:
            raise OptionError(f"{option} goes with --text only")
    if source is None:
        from regard.problems.files import example_names

        raise OptionError(
            "explain needs a problem: a file, - for standard input, --text with some words, or an "
            f"example ({', '.join(example_names())})"
        )
    return _problem_from_standard_input(kind) if source == "-" else load_problem(source)


def _problem_from_standard_input(kind: str | None) -> Problem:
    from regard.problems.files import parse_problem
    from regard.problems.toml_json import MAX_TEXT_BYTES, decode

    if kind not in (None, "toml", "json"):
        raise OptionError(f"--format is {safe_text(kind, 40)}; it must be toml or json")
    if sys.stdin is None:
        raise ProblemError("standard input is closed; give a file or an example")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ProblemError(f"standard input has more than {MAX_TEXT_BYTES} bytes")
    try:
        text = decode(data)
    except ProblemError as error:
        raise ProblemError(f"standard input: {error}") from None
    guess: Literal["toml", "json"] = "json" if text.lstrip().startswith("{") else "toml"
    chosen: Literal["toml", "json"] = (
        guess if kind is None else "json" if kind == "json" else "toml"
    )
    return parse_problem(text, chosen, "standard input")


def _random_problem(text: str, own: Mapping[str, Any]) -> Problem:
    from regard.problems.parts import RandomMatrices
    from regard.problems.problem import Problem

    tokens = tuple(text.split())
    width = 4 if own["--dim"] is None else own["--dim"]
    heads = own["--heads"]
    if not tokens:
        raise OptionError("--text has no words")
    if width < 1:
        raise OptionError(f"--dim is {width}; it must be 1 or more")
    if heads is not None and (heads < 1 or width % heads):
        raise OptionError(
            f"--heads is {heads} but --dim is {width}; the second must be a multiple of the first"
        )
    square = (width, width)
    return Problem(
        title=" ".join(tokens),
        query_labels=tokens,
        heads=heads,
        causal=bool(own["--causal"]),
        random=RandomMatrices(
            generator="default_rng",
            seed=own["--seed"] or 0,
            distribution="normal",
            draw=("X", "W_q", "W_k", "W_v"),
            shapes={"X": (len(tokens), width), "W_q": square, "W_k": square, "W_v": square},
        ),
    )


def _save(problem: Problem, path: str, force: bool) -> None:
    from regard.problems.files import save_problem

    save_problem(problem, path, force=force)
    typer.echo(f"saved {safe_text(path)}", err=True)


def _write_report(
    explanation: Explanation,
    path: str,
    budget: str | None,
    digits: int | None,
    *,
    force: bool,
    show: bool,
) -> None:
    from regard.views import report

    report.write(
        path,
        explanation,
        budget=report.BUDGET if budget is None else budget,
        digits=report.DIGITS if digits is None else digits,
        force=force,
    )
    saved(path, show)


def _derivation(
    explanation: Explanation, why: tuple[str, str, str], head: int | None
) -> Derivation:
    step, *where = why
    axes = [axis for axis in explanation.steps[step].axes if axis not in ("H", "G")]
    surplus = [word for word in where[len(axes) :] if word != "-"]
    # A dash fills up; it is a label only where there is one of that name.
    given = [
        word
        for word, axis in zip(where, axes, strict=False)
        if word != "-" or "-" in explanation.names.along(axis)
    ]
    return explanation.why(step, *given, *surplus, head=head)


def _mismatches(explanation: Explanation, source: str) -> tuple[list[Any], ProblemError | None]:
    """What differs, and the first expectation that does not fit the problem, as an error."""
    found: list[Any] = []
    for one in explanation.problem.expect if explanation.problem else ():
        try:
            found += explanation.check((one,))
        except (LabelError, ShapeError, OptionError) as error:
            name = "standard input" if source == "-" else source
            step = f"expect.{one.step}"
            return found, ProblemError(f"{name}: {step} cannot be checked: {error}")
    return found, None


def _expectation_summary(count: int, failed: int) -> str:
    if failed:
        return f"{failed} of {count} expectations {'does' if failed == 1 else 'do'} not hold."
    return "The one expectation holds." if count == 1 else f"All {count} expectations hold."


def _print_json(
    explanation: Explanation,
    steps: Sequence[str] | None,
    derivation: Derivation | None,
    statistics: bool,
) -> None:
    from regard.views.json_output import as_data

    data = as_data(explanation, steps, derivation, statistics)
    # ASCII, so that labels cannot do anything to a terminal.
    typer.echo(json.dumps(data, allow_nan=False, ensure_ascii=True))
