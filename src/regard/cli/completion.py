"""What the shell offers to complete: sources, steps, labels and kernels."""

from __future__ import annotations

import os
import shlex
from glob import escape, glob

import typer

from regard import api
from regard.errors import RegardError, safe_text


def complete_example(incomplete: str) -> list[str]:
    """The names of the examples."""
    from regard.problems.files import example_names

    return [name for name in example_names() if name.startswith(incomplete)]


def complete_mistake(incomplete: str) -> list[str]:
    """The names of the mistakes that a diagnosis can give."""
    from regard.diagnosis.mistakes import all_mistakes

    return [name for name in all_mistakes() if name.startswith(incomplete)]


def complete_source(incomplete: str) -> list[str]:
    """Examples, and files that may hold a problem."""
    from regard.problems.files import SUFFIXES

    found = complete_example(incomplete)
    for path in sorted(glob(f"{escape(incomplete)}*")):
        if os.path.isdir(path):
            path += "/"
        if path.endswith(("/", *SUFFIXES)) and safe_text(path) == path:
            found.append(path)
    return found


def complete_step(incomplete: str) -> list[str]:
    """The names of the steps, those of the loss and the gradients too."""
    from regard.problems.parts import backward_axes
    from regard.views.all_steps import declared

    return [name for name in (*declared(), *backward_axes()) if name.startswith(incomplete)]


def complete_cell(ctx: typer.Context, incomplete: str) -> list[str]:
    """What follows --why: a step, then labels of its rows and columns in the problem named before.

    A label that a shell would have to quote is offered as its position.
    """
    from regard.cli.explain_input import with_target
    from regard.problems.files import load_problem

    step, *where = ctx.params.get("why") or ("-",)
    if step == "-":
        return complete_step(incomplete)
    source, target = ctx.params.get("source"), ctx.params.get("target")
    if source in (None, "-"):  # standard input is not there yet
        return []
    try:
        problem = load_problem(source)
        explanation = api.explain(with_target(problem, target) if target else problem)
        axes = [axis for axis in explanation.steps[step].axes if axis not in ("H", "G")]
        labels = explanation.names.along(axes[sum(word != "-" for word in where)])
    except (RegardError, IndexError):
        return []
    words = [label if shlex.quote(label) == label else str(k) for k, label in enumerate(labels)]
    return [word for word in words if word.startswith(incomplete)]


def complete_kernel(incomplete: str) -> list[str]:
    """The names of the kernels."""
    from regard.compute.dispatch import kernel_names

    return [name for name in kernel_names() if name.startswith(incomplete)]
