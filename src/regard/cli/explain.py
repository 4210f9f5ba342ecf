"""`regard explain`: every step of an attention, one number of it, or a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from regard import api
from regard.cli.completion import complete_cell, complete_source, complete_step
from regard.cli.explain_input import (
    files_read,
    in_quotes,
    read_model,
    read_problem,
    with_mechanism,
    with_target,
)
from regard.cli.frame import (
    DIFFERS,
    Command,
    check_targets,
    flag,
    option,
    print_json,
    refuse_with,
    refuse_without,
    saved,
)
from regard.errors import LabelError, OptionError, ProblemError, Setting, ShapeError, safe_text
from regard.views.screen import console

if TYPE_CHECKING:
    from regard.explanation.derivation import Derivation
    from regard.faces import Explanation
    from regard.models import Overview
    from regard.problems.problem import Problem

# The headings of the options in the help; `step` is the parameter of --step.
GROUPS = {
    "What to show": ("step", "why", "head", "statistics", "gradients", "digits", "as_json"),
    "The problem": ("target", "score", "normalize", "positions", "kind"),
    "Words of your own, in place of FILE": ("text", "dim", "seed", "heads", "causal"),
    "A model that reads the --text": ("model", "layer", "truncate"),
    "Files to write": ("html", "show", "budget", "save", "force"),
}

EXAMPLES = """\b
Examples:
  regard explain she-likes-coffee
  regard explain she-likes-coffee --why output she 2
  regard explain she-likes-coffee --html coffee.html --open
  regard explain --text "the cat sat" --html cat.html --open
"""


class ExplainCommand(Command):
    """`explain`, whose --why takes a step and as many labels as the step has axes."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options into the help, in their groups."""
        records = {one.name: one.get_help_record(ctx) for one in self.get_params(ctx)}
        groups = {"Arguments": ("source",), **GROUPS, "Help": ("help",)}
        for heading, names in groups.items():
            with formatter.section(heading):
                formatter.write_dl([records[name] for name in names])

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
            if (not own or "=" in args[places[0]]) and not ctx.resilient_parsing:
                raise OptionError(
                    "--why needs a step, then a row and a column of it, such as --why output 0 0 "
                    "(see regard explain --help)"
                )
            args[first + own : first + own] = ["-"] * (3 - own)
        ctx.allow_extra_args = not ctx.resilient_parsing
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            text, source = (ctx.params.get(name) for name in ("text", "source"))
            hint = "" if ctx.params.get("why") else in_quotes(text, source, *ctx.args)
            more = safe_text(" ".join(ctx.args), 60)
            raise OptionError(f"explain takes one problem, and there is more: {more}{hint}")
        return rest


class _Wanted(NamedTuple):
    """What to show of the explanation, and the files to write."""

    steps: Sequence[str]
    why: tuple[str, str, str] | None
    head: int | None
    statistics: bool
    gradients: bool
    digits: int | None
    as_json: bool
    save: str | None
    html: str | None
    budget: str | None
    force: bool
    show: bool


class _Given(NamedTuple):
    """What to explain: a file or words, of a model or at random, and what replaces its parts."""

    source: str | None
    text: str | None
    kind: str | None
    random: dict[str, Any]  # options of random vectors
    model: str | None
    layer: int | None
    truncate: bool
    target: str | None
    mechanism: dict[str, str | None]


SOURCE: Any = typer.Argument(
    None,
    metavar="FILE",
    help="A problem (.toml, .json, .npz), the name of an example, or - for standard input.",
    autocompletion=complete_source,
    show_default=False,
)


# --- the command ---------------------------------------------------------------------------------


def explain(
    source: str | None = SOURCE,
    step: list[str] | None = option(
        "STEP",
        "Show only this step; may be given several times.",
        "--step",
        autocompletion=complete_step,
    ),
    why: tuple[str, str, str] | None = option(
        "STEP ROW COL",
        "Derive one number. A row or column is a label or a position from 0; - for an axis that "
        "the step does not have.",
        autocompletion=complete_cell,
    ),
    head: int | None = option(
        "N", "Query head, from 0; of keys and values, the key head that it uses."
    ),
    statistics: bool = flag("--statistics", "Show variances, entropy and the effect of the scale."),
    target: str | None = option(
        "FILE", "What the output should be (.npy, .toml, .json or .npz): adds loss and gradients."
    ),
    score: str | None = option(
        "SCORE", "Compare queries and keys so: cosine, cosine:temperature=0.5, distance, features."
    ),
    normalize: str | None = option(
        "NAME", "Make weights so: sigmoid, sigmoid:bias=-1, hard, sparsemax, proportional."
    ),
    positions: str | None = option(
        "NAME",
        "Use positions: rotary, rotary:base=10000,interleaved=true, alibi, alibi:slopes=0.5.",
    ),
    gradients: bool = flag("--gradients", "Show only the loss and the gradients."),
    digits: int | None = option("N", "Decimals to print (8).", min=0, max=17),
    as_json: bool = flag("--json", "Print JSON and nothing else."),
    text: str | None = option("WORDS", "Explain these words, as random vectors."),
    dim: int | None = option("N", "Width of a vector (4)."),
    seed: int | None = option("N", "Random seed (0)."),
    heads: int | None = option("N", "Number of heads."),
    causal: bool = flag("--causal", "No word attends to a later one."),
    model: str | None = option("DIR", "Explain the model in this directory or GGUF file."),
    layer: int | None = option("N", "Explain this layer, from 0, not an overview."),
    truncate: bool = flag("--truncate", "Cut a text that is too long."),
    save: str | None = option("FILE", "Save the problem (.toml, .json or .npz)."),
    html: str | None = option("OUT.html", "Write an interactive report, one HTML file."),
    show: bool = flag("--open", "Open the report in the browser."),
    budget: str | None = option(
        "SIZE", "Maximum size of the report (5MB); what does not fit is downsampled."
    ),
    force: bool = flag("--force", "Replace any file; --html replaces a page of regard without."),
    kind: str | None = option(
        "toml|json", "Format of standard input; guessed if not given.", "--format"
    ),
) -> None:
    """Show every step of an attention, and where each number comes from."""
    shown = (step or (), why, head, statistics, gradients, digits, as_json)
    wanted = _Wanted(*shown, save, html, budget, force, show)
    random = {"--dim": dim, "--seed": seed, "--heads": heads, "--causal": causal or None}
    mechanism = {"score": score, "normalize": normalize, "positions": positions}
    words = (source, text, kind, random, model, layer, truncate, target, mechanism)
    _explain(_Given(*words), wanted)


def _explain(given: _Given, wanted: _Wanted) -> None:
    """Check what was given and wanted, then show it."""
    inputs = [*files_read(given.source, given.model), *([given.target] if given.target else [])]
    _check_files(wanted, inputs)
    _check_wanted(wanted, given.model)
    if wanted.why is not None and given.source is None and given.text is None:
        raise OptionError(
            "explain needs a problem, and --why took the words after it; put FILE before --why "
            "(see regard explain --help)"
        )
    if given.model is None:
        refuse_without("--model", {"--layer": given.layer, "--truncate": given.truncate})
        problem = read_problem(given.source, given.text, given.kind, given.random)
    else:
        of_model = _of_model(given.model, given, wanted)
        if of_model is None:
            return
        problem = of_model
        wanted = wanted._replace(head=None)  # the problem has the one head, or all are shown
    if given.target is not None:
        problem = with_target(problem, given.target)
    problem = with_mechanism(problem, **given.mechanism)
    if wanted.save is not None:
        from regard.problems.files import save_problem

        save_problem(problem, wanted.save, force=wanted.force)
        typer.echo(f"saved {safe_text(wanted.save)}", err=True)
    _show(problem, given.source or "--text", wanted)


def _of_model(model: str, given: _Given, wanted: _Wanted) -> Problem | None:
    """A layer of a model as a problem; None where an overview of all layers was shown."""
    encoder, words = read_model(model, given.source, given.text, given.kind, given.random)
    if given.layer is not None:
        explained = encoder.explain(words, given.layer, wanted.head, truncate=given.truncate)
        assert explained.problem is not None
        problem: Problem = explained.problem
        return problem
    _refuse_for_overview(wanted, given.target)
    if not hasattr(encoder, "overview"):
        raise OptionError(
            f"{safe_text(model, 60)} is a language model; say which layer to explain, such as ",
            Setting("layer", 0),
        )
    overview = encoder.overview(words, truncate=given.truncate)
    _show_overview(overview, wanted.as_json, wanted.digits)
    return None


def _show(problem: Problem, source: str, wanted: _Wanted) -> None:
    """Explain the problem, write and print what is wanted, and compare with its expectations."""
    from regard.explanation.labels import head_position

    explanation = api.explain(problem)
    if wanted.gradients:
        wanted = wanted._replace(steps=_gradients(explanation))
    head_position(explanation.source.sizes, wanted.head)
    derivation = None if wanted.why is None else _derivation(explanation, wanted.why, wanted.head)
    if wanted.html is not None:
        _write_report(explanation, wanted.html, wanted)
    mismatches, unchecked = _mismatches(explanation, source)
    if wanted.as_json and unchecked is None:
        from regard.views.json_output import as_data

        print_json(as_data(explanation, wanted.steps or None, derivation, wanted.statistics))
    elif not wanted.as_json:
        count, quiet = 0 if unchecked is not None else len(problem.expect), wanted.html is not None
        _print(explanation, wanted, derivation, quiet)
        _print_expectations(mismatches, count, wanted.digits, quiet=quiet)
    if unchecked is not None:
        raise unchecked
    if mismatches:
        raise typer.Exit(DIFFERS)


def _check_files(wanted: _Wanted, inputs: Sequence[str | int]) -> None:
    """Whether the files can be written, and options about them have an effect."""
    targets = {"save": wanted.save, "html": wanted.html}
    if wanted.force and not any(path is not None for path in targets.values()):
        raise OptionError("--force goes with --save and --html only")
    if wanted.html is None:
        refuse_without("--html", {"--open": wanted.show, "--budget": wanted.budget})
    check_targets(targets, force=wanted.force, inputs=inputs)


def _check_wanted(wanted: _Wanted, model: str | None) -> None:
    """Refuse options that would have no effect on what is printed."""
    digits, head = {"--digits": wanted.digits}, {"--head": wanted.head}
    if wanted.gradients:
        refuse_with("--gradients", {"--step": wanted.steps or None, "--why": wanted.why})
    if wanted.as_json:
        refuse_with("--json", digits | ({} if wanted.why or model else head))
    if wanted.why is not None or wanted.steps or wanted.gradients:
        return
    if wanted.statistics and wanted.html is None:
        refuse_with("--statistics alone", digits)
    if wanted.html is not None and not wanted.statistics and model is None:
        refuse_with("--html alone", head)


def _refuse_for_overview(wanted: _Wanted, target: str | None) -> None:
    asked: dict[str, Any] = {"--step": [*wanted.steps], "--why": wanted.why, "--head": wanted.head}
    asked |= {"--save": wanted.save, "--html": wanted.html, "--statistics": wanted.statistics}
    asked |= {"--target": target, "--gradients": wanted.gradients}
    refuse_without("--layer", asked)


def _show_overview(overview: Overview, as_json: bool, digits: int | None) -> None:
    from regard.views.overview import print_overview

    if as_json:
        print_json(overview.to_json())
    else:
        print_overview(overview, console(), digits)


# --- computing and showing -----------------------------------------------------------------------


def _gradients(explanation: Explanation) -> list[str]:
    """The steps of the loss and the gradients that are shown by default."""
    from regard.views.story import HEADINGS, outline

    sections = outline(explanation)
    names = [name for title in HEADINGS.values() for name in sections.get(title, ())]
    if not names:
        raise OptionError(
            "--gradients needs a loss; give --target FILE, or a target in the problem"
        )
    return names


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


def _write_report(explanation: Explanation, path: str, wanted: _Wanted) -> None:
    from regard.views import report

    report.write(
        path,
        explanation,
        budget=report.BUDGET if wanted.budget is None else wanted.budget,
        digits=report.DIGITS if wanted.digits is None else wanted.digits,
        force=wanted.force,
    )
    saved(path, wanted.show)


def _print(
    explanation: Explanation, wanted: _Wanted, derivation: Derivation | None, quiet: bool
) -> None:
    """What was asked for, or all steps unless a report has them."""
    from regard.views import story, terminal

    screen = console()
    if wanted.steps or (derivation is None and not wanted.statistics and not quiet):
        terminal.print_explanation(
            explanation, screen, wanted.steps or None, wanted.head, wanted.digits
        )
    elif derivation is not None or wanted.statistics:
        terminal.print_drawn(explanation, screen)
    if derivation is not None:
        if wanted.steps or story.drawn(explanation):
            screen.print()
        sizes = explanation.source.sizes
        shared = sizes.get("H", 1) // sizes.get("G", 1)
        terminal.print_derivation_walk(derivation, screen, wanted.digits, shared)
    if wanted.statistics:
        terminal.print_statistics(explanation, screen, wanted.head)


def _print_expectations(
    mismatches: Sequence[Any], count: int, digits: int | None, *, quiet: bool
) -> None:
    """The expectations that do not hold, and how many hold; with `quiet`, only if one does not."""
    from regard.views import terminal

    screen = console()
    if mismatches:
        terminal.print_mismatches(mismatches, screen, digits)
    if not count or (quiet and not mismatches):
        return
    screen.print()
    failed = len({id(mismatch.expectation) for mismatch in mismatches})
    if failed:
        verb = "does" if failed == 1 else "do"
        screen.print(f"{failed} of {count} expectations {verb} not hold.")
    else:
        holds = "The one expectation holds." if count == 1 else f"All {count} expectations hold."
        screen.print(holds)
