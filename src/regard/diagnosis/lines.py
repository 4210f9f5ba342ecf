"""One problem traced: where the code departs from the textbook, and what each of its lines makes.

Owns what of a trace is shown, as plain data. It runs where the function is, so that all of it may
come from another process. Must not know any verdict.
"""

from __future__ import annotations

import ast
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.call.asking import guarded, running
from regard.diagnosis.mistakes import all_mistakes
from regard.diagnosis.probe import Probe
from regard.diagnosis.result import Departure, Line, Matrix, Shown
from regard.diagnosis.task import Task
from regard.diagnosis.trace import depart, live
from regard.diagnosis.trace.rewrite import Code
from regard.diagnosis.trace.traced import Traced

CPU_SECONDS = 30.0  # that a trace may take, with all values that are put in
MOST_LINES = 400
MOST_SUSPECTS = 8
MOST_CELLS = 64  # of one step


@dataclass(frozen=True)
class Told:
    """What a trace tells of a function on one problem."""

    departure: Departure | None = None
    mistake: str = ""  # a name of the catalogue
    lines: tuple[Line, ...] = ()
    why: str = ""  # no line can be told


Tell = Callable[[Adapter, Task, Sequence[Task]], Told]


def tell(function: Any, adapter: Adapter, library: str, task: Task, others: Sequence[Task]) -> Told:
    """What a trace tells of one problem, and of others on which a change has to hold as well.

    Where the last one is the same problem, two equal calls are compared.
    """
    found = guarded(lambda: _told(function, adapter, library, task, others), library, CPU_SECONDS)
    return found.value or Told(why=found.problem)


def means(function: Any, adapter: Adapter, library: str, tasks: Sequence[Task]) -> int:
    """The number of the reading of one problem that has most of its own steps in the code."""
    run = running(function, adapter, library, tasks[0].given)
    code = live.code_of(function)
    found = guarded(lambda: depart.nearest(run, code, function, tasks), library, CPU_SECONDS)
    return found.value or 0


def _told(
    function: Any, adapter: Adapter, library: str, task: Task, others: Sequence[Task]
) -> Told:
    code = live.code_of(function)
    if code.broken:
        return Told(why=code.broken)
    runs = [(running(function, adapter, library, one.given), one) for one in (task, *others)]
    found: depart.Departure | None
    if others and others[-1].given == task.given:
        traced, found = depart.differing(runs[0][0], code, function, task, runs[1:-1])
    else:
        traced, found = depart.trace(runs[0][0], code, function, task, runs[1:])
    shown = {} if found is None or not found.line else {found.line: found}
    lines = _lines(function, code, traced, depart.story(traced, found), shown)
    if found is None:
        return Told(lines=lines)
    right, right_line = found.right or ("", 0)
    said = f"it comes right {found.said}" if found.how == "put" else found.said
    suspects = found.suspects[:MOST_SUSPECTS]
    departure = Departure(found.step, found.line, said, right, right_line, suspects)
    return Told(departure, found.mistake if found.mistake in all_mistakes() else "", lines)


def _lines(
    function: Any,
    code: Code,
    traced: Traced,
    story: depart.Story,
    departs: Mapping[int, depart.Departure],
) -> tuple[Line, ...]:
    """The lines of the functions that ran, each with the steps that it makes."""
    texts = [*io.StringIO(code.text)]
    ran = {traced.notes.nodes[one].line for one in traced.notes.runs}
    own = {
        number for span in live.spans(function, code) if not ran.isdisjoint(span) for number in span
    }
    own -= _documents(code.text)
    found, seen = [], set[str]()
    for number in sorted(own | set(departs))[:MOST_LINES]:
        here = departs.get(number)
        wrong = here.step if here is not None else ""
        right = [x for x in story.right.get(number, ()) if x != wrong and x not in seen]
        seen.update(right)
        makes = [_shown(traced.problem.probe, x) for x in right]
        if here is not None and wrong in traced.problem.probe.declared:
            makes.append(_shown(traced.problem.probe, wrong, here.numbers, departs=True))
        text = texts[number - 1].rstrip() if number <= len(texts) else ""
        found.append(Line(number, text, tuple(makes), here is not None))
    return tuple(found)


def _documents(text: str) -> set[int]:
    """The lines of docstrings, which compute nothing."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    every = (one.body[0] for one in ast.walk(ast.parse(text)) if isinstance(one, kinds))
    return {
        number
        for one in every
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
        for number in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }


def _shown(probe: Probe, name: str, wrong: Array | None = None, *, departs: bool = False) -> Shown:
    """A step in numbers: the text and the head in which it is most wrong, or the first ones."""
    step, right = probe.declared[name], np.asarray(probe.right[name])
    batch = head = 0
    if wrong is not None and wrong.shape == right.shape:
        with np.errstate(all="ignore"):
            apart = np.nan_to_num(np.abs(wrong - right), nan=np.inf)
        place = np.unravel_index(int(apart.argmax()), apart.shape)
        batch = int(place[0]) if right.ndim > len(step.axes) else 0
        if step.axes[:1] in (("H",), ("G",)):
            shared = probe.sizes["H"] // probe.sizes["G"] if step.axes[0] == "G" else 1
            head = int(place[right.ndim - len(step.axes)]) * shared
    else:
        wrong = None

    def part(array: Array) -> Matrix:
        own = np.atleast_1d(probe.part(array, step.axes, batch, head))
        rows = own[:, None] if own.ndim == 1 else own.reshape(-1, own.shape[-1])
        return tuple(tuple(float(x) for x in row) for row in _few(rows))

    other = None if wrong is None else part(wrong)
    return Shown(name, step.symbol, step.formula, part(right), other, departs)


def _few(rows: Array) -> Iterator[Array]:
    yield from rows[: max(1, MOST_CELLS // max(1, rows.shape[1])), :MOST_CELLS]
