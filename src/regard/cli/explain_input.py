"""What `regard explain` reads: a problem, words with random vectors, or a model and its text."""

from __future__ import annotations

import glob
import os
import shlex
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from regard.cli.frame import refuse_without
from regard.errors import OptionError, ProblemError, safe_text

if TYPE_CHECKING:
    from regard.models import Encoder, LanguageModel
    from regard.problems.problem import Problem


_FORMAT = "--format goes with standard input only, which is the file name -"


def files_read(source: str | None, model: str | None) -> list[str | int]:
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


def read_model(
    directory: str, source: str | None, text: str | None, kind: str | None, own: Mapping[str, Any]
) -> tuple[Encoder | LanguageModel, str]:
    """The model in a directory and what it is to read."""
    from regard.models import load

    if source is not None:
        raise OptionError(
            f"--model explains words, which --text gives it, and no problem; leave out --model to "
            f"explain {safe_text(source, 60)}, or {safe_text(source, 60)} to explain the model"
        )
    if text is None:
        raise OptionError('--model needs the words to read, such as --text "the cat sat"')
    if kind is not None:
        raise OptionError(_FORMAT)
    for option, value in own.items():
        if value is not None:
            raise OptionError(f"{option} is for random vectors; it has no effect with --model")
    return load(directory), text


def read_problem(
    source: str | None, text: str | None, kind: str | None, own: Mapping[str, Any]
) -> Problem:
    """The problem of a file, an example or standard input, or random vectors for words."""
    from regard.problems.files import SUFFIXES, load_problem

    if text is not None and source is not None:
        raise OptionError(
            f"give either --text or a problem ({safe_text(source, 60)}), not both"
            f"{in_quotes(text, source)}"
        )
    if kind is not None and source != "-":
        raise OptionError(_FORMAT)
    if text is not None:
        return _random_problem(text, own)
    refuse_without("--text", own)
    if source is None:
        from regard.problems.files import example_names

        raise OptionError(
            "explain needs a problem: a file, - for standard input, --text with some words, or an "
            f"example ({', '.join(example_names())})"
        )
    if " " in source and not source.endswith(SUFFIXES):
        raise OptionError(
            f"{safe_text(source, 60)}: there is no file or example of this name{in_quotes(source)}"
        )
    return _read_standard_input(kind) if source == "-" else load_problem(source)


def in_quotes(*words: str | None) -> str:
    """What to type where a sentence was given as something else."""
    sentence = safe_text(" ".join(filter(None, words)), 100)
    return f"; to explain a sentence, type regard explain --text {shlex.quote(sentence)}"


def _read_standard_input(kind: str | None) -> Problem:
    from regard.boundary.files import MAX_TEXT_BYTES, about, decode
    from regard.problems.files import parse_problem

    if kind not in (None, "toml", "json"):
        raise OptionError(f"--format is {safe_text(kind, 40)}; it must be toml or json")
    if sys.stdin is None:
        raise ProblemError("standard input is closed; give a file or an example")
    data = sys.stdin.buffer.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise ProblemError(f"standard input has more than {MAX_TEXT_BYTES} bytes")
    with about("standard input"):
        text = decode(data)
    is_json = text.lstrip().startswith("{") if kind is None else kind == "json"
    return parse_problem(text, "json" if is_json else "toml", "standard input")


def with_target(problem: Problem, path: str) -> Problem:
    """The problem with the target in a file."""
    if path.lower().endswith(".npy"):
        import numpy as np

        from regard.boundary.files import about
        from regard.cli.on_disk import load_npy

        target = np.array(load_npy(path))
        with about(path):
            return problem.replace(target=target)
    from regard.problems.files import load_target

    return load_target(problem, path)


def with_mechanism(problem: Problem, **given: str | None) -> Problem:
    """The problem with another score, normalisation or positions, as the command spells them."""
    from regard.compute.spelling import spelled

    changes: dict[str, Any] = {}
    for name, text in given.items():
        if text is not None:
            changes[name] = spelled(name, text)
    if changes:
        changes["expect"] = ()  # what the problem expects is of its own mechanism
    return problem.replace(**changes) if changes else problem


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
