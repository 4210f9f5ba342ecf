"""The catalogue as something to read: every mistake with its code and the first numbers of it.

`regard mistakes` and the site show the same. Must not know any function of a user's.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import written
from regard.diagnosis.given import Given, Sizes
from regard.diagnosis.mistakes import CLASSIC, all_mistakes
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.mistakes.program import Program
from regard.diagnosis.mistakes.programs import PROGRAMS
from regard.diagnosis.mistakes.written import Unfit
from regard.diagnosis.probe import Probe, Values, Variant, evaluate
from regard.diagnosis.result import Example, Line, Matrix, Outcome, Shown
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import Reading, Task
from regard.diagnosis.verdict import named
from regard.diagnosis.view import TaskView, reads_of
from regard.errors import OptionError, safe_text

SEVERITIES = {
    "wrong": "ordinary inputs give wrong numbers",
    "fragile": "ordinary inputs give right numbers, and some inputs do not",
}
VISIBLE = 0.005  # smaller differences do not show in the printed digits
# Texts, heads, key heads, queries, keys and widths, the smallest first.
_TINY = tuple(
    Sizes(*own, past=2)
    for own in (
        (1, 1, 1, 2, 2, 2, 2),
        (1, 1, 1, 3, 3, 2, 2),
        (1, 1, 1, 2, 3, 2, 2),
        (1, 1, 1, 5, 5, 2, 2),
        (1, 2, 2, 2, 2, 2, 2),
        (1, 2, 2, 2, 2, 3, 2),
        (1, 2, 2, 3, 3, 4, 4),
        (1, 4, 2, 2, 2, 2, 2),
        (2, 2, 2, 2, 2, 2, 2),
        (3, 4, 4, 4, 4, 4, 4),
    )
)
_USUAL = (Sizes(1, 1, 1, 4, 4, 4, 4),)


def families() -> dict[str, list[Mistake]]:
    """Every mistake that a diagnosis can name, by its family; the classic ones first."""
    known = all_mistakes()
    found = {"classic mistakes": [known[name] for name in CLASSIC]}
    for mistake in known.values():
        if mistake.name not in CLASSIC:
            found.setdefault(mistake.family, []).append(mistake)
    return found


@lru_cache(maxsize=512)
def described(name: str) -> Outcome:
    """What a diagnosis says of a function that has just this mistake.

    Raises
    ------
    OptionError
        If no mistake has this name.

    Examples
    --------
    >>> described("scale_by_width").mistakes[0].step
    'scaled'
    """
    known = all_mistakes()
    if name not in known:
        near = difflib.get_close_matches(name[:100], known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise OptionError(
            f"{safe_text(name, 100)}: there is no mistake of this name; {hint}"
            "regard mistakes lists all"
        )
    mistake, own = known[name], named(name)
    if mistake.codes:
        example, step = smallest_example(mistake)
        own = replace(own, example=example, step=step, usual_check=usual_check(mistake))
    title = mistake.title[:1].upper() + mistake.title[1:]
    return Outcome("", "wrong", title, mistakes=(own,), lines=tuple(_code(mistake)))


def _code(mistake: Mistake) -> Iterator[Line]:
    """The lines of its example, the wrong ones marked."""
    for number, text in enumerate(mistake.source.splitlines() if mistake.codes else (), 1):
        yield Line(number, text, departs=number in mistake.lines)


def smallest_example(mistake: Mistake) -> tuple[Example | None, str]:
    """The first tiny problem on which a mistake shows, and the step where it departs."""
    best: tuple[Probe, str, Values] | None = None
    for probe in _tiny(mistake.program):
        for variant in mistake.variants:
            departs, values = _departure(probe, variant)
            if departs is None:
                continue
            if not _equal(_result(probe, values), _result(probe, probe.right), VISIBLE):
                return _example(probe, departs, values), departs
            best = best or (probe, departs, values)
    return (None, "") if best is None else (_example(*best), best[1])


def usual_check(mistake: Mistake) -> str:
    """Whether one head with as many queries as keys shows a mistake."""
    task = next(_tasks(mistake.program, _USUAL, asking=False), None)
    if task is None:
        return ""
    departs, values = _departure(task.probe, mistake.variants[0])
    problem = "One head, as many queries as keys, nothing hidden but later keys"
    if not task.is_causal:
        problem = "One head, as many queries as keys, nothing hidden"
    if departs is None:
        return f"{problem}: every number is right, and it passes."
    if task.wanted:
        return f"{problem}: the shapes are right; torch.autograd.gradcheck shows it."
    weights = values["weights"]
    if np.allclose(weights.sum(-1), 1, atol=1e-6) and (weights >= -1e-9).all():
        return (
            f"{problem}: the shape is right and rows of weights add up to 1; only a comparison "
            "with another implementation shows it."
        )
    return f"{problem}: the shape is right; weights.sum(-1), which should be 1, shows it."


# --- tiny problems --------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _tiny(program: str) -> tuple[Probe, ...]:
    return tuple(task.probe for task in _tasks(program, _TINY))


def _tasks(name: str, sizes: tuple[Sizes, ...], *, asking: bool = True) -> Iterator[Task]:
    """Tiny problems with everything in them that a program reads, or neutral ones."""
    program = PROGRAMS[name]
    causal = program.stated["causal"]
    aligned: Any = "start" if causal == "start" else "end"
    reading = Reading(bool(causal), aligned, **program.means)
    mechanism = Stated(**program.stated).mechanism
    for own in sizes:
        given = _asking_all(program, Given(_said(own), own, seed=2, mechanism=mechanism))
        if given is None or (own.queries != own.keys and not given.has_own_keys):
            continue
        given = given if asking else replace(given, asks=frozenset())
        wanted = _GRADIENTS if "grad_output" in given.fields else ()
        yield Task(given, given.fields, reading, wanted)


_GRADIENTS = ("query", "key", "value")


def _asking_all(program: Program, given: Given) -> Given | None:
    """The same problem with all fields that the program reads; None if it does not take it."""
    function, call = _loaded(program), written(program.call, "numpy").call
    fields: frozenset[str] = frozenset()
    for _ in range(8):
        view = TaskView(replace(given, fields=fields))
        try:
            with np.errstate(all="ignore"):
                call(function, view)
        except ValueError:
            if reads_of(view) <= fields:
                return None
        if reads_of(view) <= fields:
            break
        fields |= reads_of(view)
    asks = {"key_mask"} if "lengths" in fields else set()
    asks |= fields & {"mask", "key_mask", "window", "scale"}
    return replace(given, fields=fields, asks=frozenset(asks))


def _loaded(program: Program) -> object:
    names: dict[str, object] = {}
    exec(compile(program.source(), "<program>", "exec"), names)
    return names["attention"]


def _said(own: Sizes) -> str:
    """The sizes of a problem in words."""
    parts = [f"{own.batch} texts"] * (own.batch > 1) + [f"{own.heads} heads"] * (own.heads > 1)
    parts += [f"{own.key_heads} key heads"] * (own.key_heads < own.heads)
    tokens = f"{own.queries} queries, {own.keys} keys"
    parts.append(f"{own.queries} tokens" if own.queries == own.keys else tokens)
    return ", ".join([*parts, *[f"width {own.width}"] * (own.width != 2)])


def _departure(probe: Probe, variant: Variant) -> tuple[str | None, dict[str, Array]]:
    """The first step that differs from the textbook, None if the results agree; and all values."""
    try:
        values = evaluate(probe, variant)
    except Unfit:
        return None, {}
    if _equal(_result(probe, values), _result(probe, probe.right)):
        return None, values
    known = (name for name, step in probe.declared.items() if step.op != "visible")
    return next(x for x in known if not _equal(values[x], probe.right[x])), values


def _result(probe: Probe, values: Values) -> Array:
    return np.concatenate([np.ravel(values[name]) for name in probe.results])


def _equal(first: Array, second: Array, atol: float = 1e-12) -> bool:
    rtol = 0.0 if atol == VISIBLE else 1e-9
    return bool(np.allclose(first, second, rtol=rtol, atol=atol, equal_nan=True))


def _example(probe: Probe, departs: str, values: Values) -> Example:
    """The head and the text with the largest difference, in numbers."""
    right, declared = probe.right, probe.declared
    last = [probe.result_step, *(n for n, step in declared.items() if step.phase == "backward")]
    result = next((n for n in reversed(last) if not _equal(values[n], right[n])), last[0])
    batch = head = 0
    for name in (result, departs):  # the step that departs tells it where it can
        with np.errstate(all="ignore"):
            far = np.nan_to_num(np.abs(values[name] - right[name]), nan=np.inf)
        apart = np.where(values[name] == right[name], 0.0, far)  # −∞ is no distance from itself
        if apart.ndim > len(declared[name].axes):
            batch = int(apart.reshape(len(apart), -1).max(-1).argmax())
            apart = apart[batch]
        if declared[name].axes[:1] in (("H",), ("G",)):
            head = int(apart.reshape(len(apart), -1).max(-1).argmax())
            head *= probe.sizes["H"] // len(apart)

    def matrix(values: Values, name: str) -> Matrix:
        array = np.atleast_1d(probe.part(values[name], declared[name].axes, batch, head))
        rows = array[:, None] if array.ndim == 1 else array
        return tuple(tuple(float(number) for number in row) for row in rows)

    def shown(name: str, wrong: Matrix | None = None) -> Shown:
        step = declared[name]
        return Shown(name, step.symbol, step.formula, matrix(right, name), wrong, name == departs)

    given = ("embeddings", "queries", "keys", "values", f"d_{probe.result_step}")
    inputs = [name for name in given if name in probe.inputs]
    names = dict.fromkeys((departs, "weights", result))
    steps = tuple(shown(name, matrix(values, name)) for name in names)
    title = [probe.name]
    title += [f"text {batch}"] * (probe.sizes["B"] > 1)
    title += [f"head {head}"] * (probe.sizes["H"] > 1)
    return Example(", ".join(title), tuple(map(shown, inputs)), steps)
