"""The command line: `regard explain`, `attention`, `diagnose`, `bench` and `info`.

Owns arguments, exit codes and what goes to which stream. Must not compute or lay out anything
itself. Exit codes: 0 fine, 1 a stated expectation differs, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from regard.errors import (
    DtypeError,
    LabelError,
    OptionError,
    ProblemError,
    ShapeError,
    safe_text,
    with_shapes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from rich.console import Console

    from regard.derivation import Derivation
    from regard.explanation import Explanation
    from regard.models import Encoder, Overview
    from regard.on_disk import Job
    from regard.problem import Problem

    Array = NDArray[Any]

BAD_INPUT = (
    *(ProblemError, ShapeError, OptionError, DtypeError, LabelError),
    *(OSError, MemoryError),
)
DIFFERS, BAD, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141

# From here on the command says beforehand what it needs.
WORTH_SAYING = 2**28
BAR_AFTER_SECONDS = 1.0


class Commands(TyperGroup):
    """All commands: every error becomes one line and an exit code, never a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, and exit with the code."""
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        options["standalone_mode"] = False
        try:
            code = super().main(*args, **options)
            _flush()
        except (typer.Abort, KeyboardInterrupt):
            sys.exit(INTERRUPTED)
        except (BrokenPipeError, SystemExit) as error:  # whoever read the output has had enough
            # rich turns the first into the second.
            if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
                raise
            _let_go_of_output()
            sys.exit(PIPE_CLOSED)
        except BAD_INPUT as error:
            _let_go_of_output()  # what could not be written must not be tried again at the end
            _complain(_in_words(error))
            sys.exit(BAD)
        except Exception as error:
            # What typer raises for a wrong option; the class moved between its versions.
            if not hasattr(error, "format_message"):
                raise
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "regard"
            _complain(f"{error.format_message()} (see {command} --help)")
            sys.exit(BAD)
        sys.exit(code if isinstance(code, int) else 0)


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _let_go_of_output() -> None:
    """Flush standard output; what it does not take is dropped."""
    try:
        _flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class ExplainCommand(TyperCommand):
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


app = typer.Typer(
    cls=Commands,
    help="Attention on NumPy arrays, with an explanation of every number.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main() -> None:
    """The command `regard`."""
    # A process may start with its streams closed; whatever is written then goes nowhere.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    app(prog_name="regard")


def _in_words(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"not enough memory: {error}" if str(error) else "not enough memory"
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename is not None else ""
        return f"{name}{error.strerror or error}"
    return str(error)


def _complain(message: str) -> None:
    typer.echo(f"regard: error: {safe_text(message)}", err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        from regard import __version__

        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Attention on NumPy arrays, with an explanation of every number."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# --- completion ----------------------------------------------------------------------------------


def complete_source(incomplete: str) -> list[str]:
    """Examples, and files that may hold a problem."""
    from regard.formats import SUFFIXES, example_names

    folder, _, start = incomplete.rpartition("/")
    found = [name for name in example_names() if name.startswith(incomplete)]
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return found
    for entry in entries:
        path = f"{folder}/{entry.name}" if "/" in incomplete else entry.name
        if entry.name.startswith(start) and safe_text(path) == path:
            if entry.is_dir():
                found.append(f"{path}/")
            elif entry.name.endswith(SUFFIXES):
                found.append(path)
    return found


def complete_step(incomplete: str) -> list[str]:
    """The names of the steps."""
    from regard.views.story import step_names

    return [name for name in step_names() if name.startswith(incomplete)]


def complete_kernel(incomplete: str) -> list[str]:
    """The names of the kernels."""
    from regard.dispatch import kernel_names

    return [name for name in kernel_names() if name.startswith(incomplete)]


# --- explain -------------------------------------------------------------------------------------

EXPLAIN_EXAMPLES = """\b
Examples:
  regard explain she-likes-coffee
  regard explain she-likes-coffee --why output she 2
  regard explain she-likes-coffee --html coffee.html --open
"""


@app.command(
    cls=ExplainCommand, epilog=EXPLAIN_EXAMPLES, short_help="Show every step of an attention."
)
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
    if as_json:
        _refuse_with("--json", {"--digits": digits, "--head": None if why or model else head})
    if statistics and why is None and not step and html is None:
        _refuse_with("--statistics alone", {"--digits": digits})
    if why is not None and source is None and text is None:
        raise OptionError(
            "explain needs a problem, and --why took the words after it; put FILE before --why "
            "(see regard explain --help)"
        )
    from regard.labels import head_position

    of_model = {"--layer": layer, "--truncate": truncate or None}
    if model is None:
        _refuse_without("--model", of_model)
        problem = _given_problem(source, text, kind, own)
    else:
        encoder, words = _encoder(model, source, text, kind, own)
        if layer is None:
            asked = {"--step": step, "--why": why, "--head": head, "--save": save}
            _refuse_without("--layer", {**asked, "--statistics": statistics or None})
            with _too_long():
                overview = encoder.overview(words, truncate=truncate)
            _show_overview(overview, as_json, digits)
            return
        with _too_long():
            explained = encoder.explain(words, layer, head, truncate=truncate).problem
        assert explained is not None
        problem, head = explained, None  # the one head that was asked for, or all
    if save is not None:
        _save(problem, save, force)
    explanation = problem.explain()
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

        console = _console()
        if step or (derivation is None and not statistics and html is None):
            terminal.print_explanation(explanation, console, step or None, head, digits)
        if derivation is not None:
            if step:
                console.print()
            sizes = explanation.source.sizes
            shared = sizes.get("H", 1) // sizes.get("G", 1)
            terminal.print_derivation_walk(derivation, console, digits, shared)
        if statistics:
            terminal.print_statistics(explanation, console, head)
        count = 0 if unchecked is not None else len(problem.expect)
        if mismatches:
            terminal.print_mismatches(mismatches, console, digits)
        if count and not (html is not None and not mismatches):
            failed = len({id(mismatch.expectation) for mismatch in mismatches})
            console.print()
            console.print(_expectation_summary(count, failed))
    if unchecked is not None:
        raise unchecked
    if mismatches:
        raise typer.Exit(DIFFERS)


def _refuse_with(other: str, options: Mapping[str, Any]) -> None:
    """Options that would have no effect."""
    for option, value in options.items():
        if value is not None:
            raise OptionError(f"{option} has no effect with {other}; leave it out")


def _refuse_without(other: str, options: Mapping[str, Any]) -> None:
    """Options that would have no effect alone."""
    for option, value in options.items():
        if value is not None and value != []:
            raise OptionError(f"{option} goes with {other} only")


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


@contextmanager
def _too_long() -> Iterator[None]:
    """The error of a text that is too long, as a command line says it."""
    try:
        yield
    except OptionError as error:
        raise OptionError(str(error).replace("pass truncate=True", "give --truncate")) from None


def _show_overview(overview: Overview, as_json: bool, digits: int | None) -> None:
    from regard.views.overview import print_overview

    if as_json:
        typer.echo(json.dumps(overview.to_json(), allow_nan=False, ensure_ascii=True))
    else:
        print_overview(overview, _console(), digits)


def _given_problem(
    source: str | None, text: str | None, kind: str | None, own: Mapping[str, Any]
) -> Problem:
    from regard.formats import load_problem

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
        from regard.formats import example_names

        raise OptionError(
            "explain needs a problem: a file, - for standard input, --text with some words, or an "
            f"example ({', '.join(example_names())})"
        )
    return _problem_from_standard_input(kind) if source == "-" else load_problem(source)


def _problem_from_standard_input(kind: str | None) -> Problem:
    from regard.formats import parse_problem
    from regard.formats.text import MAX_TEXT_BYTES, decode

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
    from regard.problem import Problem, RandomMatrices

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
    _check_name("save", path)
    _refuse_existing(path, force)
    problem.save(path, force=force)
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

    _check_name("html", path)
    _refuse_existing(path, force)
    report.write(
        path,
        explanation,
        budget=report.BUDGET if budget is None else budget,
        digits=report.DIGITS if digits is None else digits,
        force=force,
    )
    _saved(path, show)


def _refuse_existing(path: str, force: bool) -> None:
    if not force and os.path.lexists(path):
        raise ProblemError(f"{path}: is there already; --force replaces it")


def _saved(path: str, show: bool) -> None:
    """Say that a page was written, and open it if that was asked for."""
    typer.echo(f"saved {safe_text(path)}", err=True)
    if show:
        import webbrowser
        from pathlib import Path

        if not webbrowser.open(Path(path).absolute().as_uri()):
            typer.echo("no browser could be started; open the file yourself", err=True)


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


def _console() -> Console:
    from rich.console import Console

    # NO_COLOR asks for no colour; rich would still print bold and dim.
    console = Console(
        markup=False,
        highlight=False,
        emoji=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
    if console.width < 1:  # COLUMNS=0: nobody knows; rich would leave out every word
        console.width = 80
    return console


# --- explain --json ------------------------------------------------------------------------------


def _print_json(
    explanation: Explanation,
    steps: Sequence[str] | None,
    derivation: Derivation | None,
    statistics: bool,
) -> None:
    from regard.views.data import as_data

    data = as_data(explanation, steps, derivation, statistics)
    # ASCII, so that labels cannot do anything to a terminal.
    typer.echo(json.dumps(data, allow_nan=False, ensure_ascii=True))


# --- attention -----------------------------------------------------------------------------------

ATTENTION_EXAMPLES = """\b
Examples:
  regard attention q.npy k.npy v.npy -o out.npy --causal
  regard attention q.npy k.npy v.npy -o out.npy --mask keep.npy --weights weights.npy
"""


@app.command(epilog=ATTENTION_EXAMPLES)
def attention(
    query: Annotated[str, typer.Argument(metavar="Q.npy", help="Queries, (..., H, L, D).")],
    key: Annotated[str, typer.Argument(metavar="K.npy", help="Keys, (..., G, S, D).")],
    value: Annotated[str, typer.Argument(metavar="V.npy", help="Values, (..., G, S, E).")],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="OUT.npy", help="Where the output goes.")
    ],
    causal: Annotated[
        bool, typer.Option("--causal", help="No query sees a key after its position.")
    ] = False,
    mask: Annotated[
        str | None, typer.Option(metavar="M.npy", help="Booleans, true = attend.")
    ] = None,
    bias: Annotated[
        str | None, typer.Option(metavar="B.npy", help="Numbers to add to the scores.")
    ] = None,
    window: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="LEFT RIGHT", help="Keys to either side; a number or unbounded."),
    ] = None,
    offset: Annotated[
        str | None,
        typer.Option(metavar="N|end", help="Position of the first query; end: last meets last."),
    ] = None,
    scale: Annotated[float | None, typer.Option(metavar="X", help="Instead of 1/sqrt(D).")] = None,
    softcap: Annotated[
        float | None, typer.Option(metavar="X", help="Bend scores to stay below this.")
    ] = None,
    sink: Annotated[
        float | None, typer.Option(metavar="X", help="A score that belongs to no key.")
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="working|exact", help="exact: accumulate in float64.")
    ] = "working",
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Which kernel answers; see regard info.",
            autocompletion=complete_kernel,
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="At most so many threads.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="W.npy", help="Where the weights go, if they are wanted.")
    ] = None,
    lse: Annotated[
        str | None, typer.Option(metavar="LSE.npy", help="Where the log-sum-exp goes, if wanted.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Refuse to take more, such as 8GB.")
    ] = None,
) -> None:
    """Attention on arrays in .npy files, computed piece by piece."""
    from regard.on_disk import Job, load_npy
    from regard.request import make_request
    from regard.values import parse_size

    start = _offset(offset)
    if start is not None and not causal and window is None:
        raise OptionError("--offset has no effect without --causal or --window; leave it out")
    wanted = {"output": output, "weights": weights, "lse": lse}
    targets = {name: path for name, path in wanted.items() if path is not None}
    _check_targets(targets, force)
    limit = None if max_memory is None else parse_size("--max-memory", max_memory)
    arrays = {"query": load_npy(query), "key": load_npy(key), "value": load_npy(value)}
    options: dict[str, Any] = {
        "causal": causal,
        "window": None if window is None else tuple(_window_side(side) for side in window),
        "scale": scale,
        "softcap": softcap,
        "sink": sink,
        "precision": precision,
        "threads": threads,
        "return_weights": "weights" in targets,
        "return_lse": "lse" in targets,
    }
    tables = {"mask": mask, "bias": bias}
    extras = {name: load_npy(path) for name, path in tables.items() if path is not None}
    try:
        request = make_request(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            mask=extras.get("mask"),
            bias=extras.get("bias"),
            offset=start,
            **options,
        )
    except (ShapeError, OptionError, DtypeError) as error:
        in_options = type(error)(_as_options(str(error)))
        raise with_shapes(in_options, {**arrays, **extras}) from None
    job = Job(request, extras, {**options, "kernel": kernel}, causal or window is not None)
    _check_memory(job, arrays, limit)

    begin = time.perf_counter()
    job.run(targets, force=force, watch=_with_progress)
    seconds = time.perf_counter() - begin
    for name, path in targets.items():
        shape, dtype = job.results[name]
        typer.echo(f"{safe_text(path)}: {name} {shape} {dtype}")
    if seconds >= BAR_AFTER_SECONDS:
        typer.echo(f"computed in {seconds:.1f} s", err=True)


# What the library says to its callers in Python, and how the same is said on a command line.
_IN_OPTIONS = {
    r"\bpass offset=(\S+)": r"give --offset \1",
    r'\boffset="end"': "--offset end",
    r"\bNone for unbounded": "unbounded",
    r" \(\w+=None\)": "",
    r"\b(causal|window|offset|scale|softcap|sink|threads|precision|kernel)="
    r'"?([^\s",;()]+)"?': r"--\1 \2",
}


def _as_options(message: str) -> str:
    for python, option in _IN_OPTIONS.items():
        message = re.sub(python, option, message)
    return message


def _with_progress(pieces: Sequence[Any]) -> Iterator[Any]:
    """The pieces one by one, with a bar on a terminal if it takes long."""
    begin = time.monotonic()
    bar: Any = None
    task: Any = None
    try:
        for number, piece in enumerate(pieces):
            late = time.monotonic() - begin > BAR_AFTER_SECONDS
            if bar is None and late and sys.stderr.isatty():
                from rich.console import Console
                from rich.progress import Progress

                bar = Progress(console=Console(stderr=True), transient=True)
                task = bar.add_task("attention", total=len(pieces), completed=number)
                bar.start()
            yield piece
            if bar is not None:
                bar.update(task, completed=number + 1)
    finally:
        if bar is not None:
            bar.stop()


def _check_name(option: str, path: str) -> None:
    if path in ("", "-"):
        raise OptionError(
            f"--{option} needs the name of a file, not "
            + ("an empty one" if not path else "- (./- would be a file of that name)")
        )


def _check_targets(targets: Mapping[str, str], force: bool) -> None:
    places: dict[str, str] = {}
    for name, path in targets.items():
        _check_name(name, path)
        other = places.setdefault(os.path.realpath(path), name)
        if other != name:
            raise OptionError(f"{other} and {name} would go to the same file, {path}")
        _refuse_existing(path, force)


def _check_memory(job: Job, arrays: Mapping[str, Array], limit: int | None) -> None:
    """Say what a large call needs before it starts; refuse one that needs too much."""
    inputs = sum(array.nbytes for array in (*arrays.values(), *job.extras.values()))
    needed = inputs + job.memory()
    if limit is not None and needed > limit:
        raise OptionError(
            f"this takes about {size_text(needed)} of memory, {size_text(inputs)} of it for the "
            f"inputs; --max-memory allows {size_text(limit)}"
        )
    if needed >= WORTH_SAYING:
        taken = ", ".join(f"{name} {a.shape} {a.dtype}" for name, a in arrays.items())
        given = ", ".join(f"{name} {shape}" for name, (shape, _) in job.results.items())
        typer.echo(f"{taken} -> {given}: about {size_text(needed)} of memory", err=True)


def size_text(size: int) -> str:
    """A number of bytes for people.

    >>> size_text(999), size_text(8_000_000_000)
    ('999 bytes', '8.0 GB')
    """
    if size < 1000:
        return f"{size} bytes"
    power = min((len(str(size)) - 1) // 3, 4)
    return f"{size / 1000**power:.1f} {'kMGT'[power - 1]}B"


def _window_side(text: str) -> int | None:
    if text == "unbounded":
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise OptionError(f"--window has {text}; each side is a whole number or unbounded")
    return int(text)


def _offset(text: str | None) -> int | str | None:
    if text is None or text == "end":
        return text
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise OptionError(f"--offset is {text}; it must be a whole number or end")
    return int(text)


# --- diagnose ------------------------------------------------------------------------------------

DIAGNOSE_EXAMPLES = """\b
Examples:
  regard diagnose my_attention.py:attention
  regard diagnose my_attention.py:attention --html diagnosis.html --open
  regard diagnose package.module:attention --mask keep --causal end
  regard diagnose notebook.ipynb:attention --signature "a=query, b=key, c=value"
"""


@app.command(epilog=DIAGNOSE_EXAMPLES)
def diagnose(
    target: Annotated[
        str, typer.Argument(metavar="FILE:NAME", help="file.py:name, module:name, book.ipynb:name.")
    ],
    signature: Annotated[
        str | None,
        typer.Option(metavar="P=ROLE,…", help="What its parameters mean, such as a=query, b=key."),
    ] = None,
    heads: Annotated[int | None, typer.Option(metavar="N", help="How many heads it has.")] = None,
    causal: Annotated[
        str | None,
        typer.Option(
            metavar="yes|no|start|end", help="Whether it always is, or how unequal lengths align."
        ),
    ] = None,
    mask: Annotated[
        str | None,
        typer.Option(metavar="KIND", help="How a mask is read: keep, keep01, add, hide or hide01."),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="inclusive|exclusive", help="Whether a window counts the own key."),
    ] = None,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long one call may take.")
    ] = 10.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fragile counts as mistaken: exit code 1.")
    ] = False,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Run it in this process, not in a child.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="OUT.html", help="Write it as one HTML file."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open that file in the browser.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Let --html replace a file.")] = False,
) -> None:
    """Say which mistake is in an attention: exit code 0 right, 1 mistaken, 2 could not be run."""
    from regard.diagnosis.child import diagnose_target

    if html is None:
        _refuse_without("--html", {"--open": show or None, "--force": force or None})
    else:
        _check_name("html", html)
        _refuse_existing(html, force)
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

        (print_diagnosis if html is None else print_verdict)(found, _console())
    if html is not None:
        found.to_html(html, force=force)
        _saved(html, show)
    raise typer.Exit(1 if strict and found.verdict == "fragile" else found.exit_code)


# --- bench ---------------------------------------------------------------------------------------

BENCH_EXAMPLES = """\b
Examples:
  regard bench
  regard bench --grid full --json results.json --plot results.png
  regard bench --against torch,numpy --threads 1
"""


@app.command(epilog=BENCH_EXAMPLES, short_help="Time regard beside its peers on this machine.")
def bench(
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Peers, separated by commas: torch, onnxruntime, openvino, jax, numpy (all).",
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        str, typer.Option(metavar="quick|full", help="quick: about a minute; full: half an hour.")
    ] = "quick",
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Save everything that was measured."),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE", help="Save a picture (.png, .svg or .pdf).")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of every side (all CPUs).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Check, then time, regard and every installed peer, all with the same number of threads."""
    from regard.bench.command import bench as measure

    code = measure(
        _console(),
        against=against,
        grid_name=grid,
        json_file=as_json,
        plot_file=plot,
        threads=threads,
        force=force,
    )
    if code:
        raise typer.Exit(code)


# --- info ----------------------------------------------------------------------------------------


@app.command()
def info(
    verify: Annotated[
        bool, typer.Option("--verify", help="Check here what regard promises; a few seconds.")
    ] = False,
) -> None:
    """Show versions, kernels, threads and extras."""
    from regard.config import show_config

    show_config()
    if verify:
        from regard.verification import verify as checks

        broken = 0
        for check in checks():
            state = "kept" if check.kept else f"BROKEN: {check.failure}"
            typer.echo(f"{check.number:<5}{check.promise:<45}{state}")
            broken += not check.kept
        typer.echo("Every promise is kept here." if not broken else f"{broken} are broken here.")
        raise typer.Exit(DIFFERS if broken else 0)
