"""Scores that are dot products of rows made of queries with rows made of keys.

For kernels that know dot products alone: the textbook's steps make the rows, in float64 and rounded
once to the dtype of the sums, and the adjoints of these steps take the rows' gradients on to
queries, keys and parameters. Must not know a formula or a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from regard.boundary.arguments import round_once, spread
from regard.boundary.arrays import Array
from regard.compute.evaluation import Run
from regard.compute.gradients import GradientRequest
from regard.compute.request import Request
from regard.scores import Score
from regard.textbook.gradients import backward
from regard.textbook.mechanisms import Declared
from regard.textbook.steps import Step, textbook

# Rows that are made at once: 2 MiB in float64 where they are 256 wide.
_ROWS_AT_ONCE = 512
# The step that each input is.
_SIDES = {"query": "queries", "key": "keys"}


@dataclass(frozen=True, slots=True)
class _Rows:
    """The steps from queries, and from keys, to the rows that are multiplied; in order."""

    query: tuple[Step, ...]
    key: tuple[Step, ...]
    divisor: str  # the given number that the products are divided by; "" if there is none


def refused(request: Request) -> str | None:
    """None if the call's score is a dot product of rows, else why not."""
    score = request.options.score
    if score is None:
        return None
    rows = _rows_of(score)
    if rows is None:
        return f"it does not know score={type(score).__name__}"
    if not math.isfinite(_scale(request, rows)):
        return f"scale and {rows.divisor.replace('_', '.', 1)} give scores beyond float64"
    return None


def dot_request(request: Request) -> Request:
    """The same call as dot products of the rows that its score makes; itself without a score."""
    if request.options.score is None:
        return request
    rows = _rows_of(request.options.score)
    assert rows is not None
    if request.quantized and len(rows.key) > 1:
        request = request.with_floats()
    made = {side: _made(request, side, getattr(rows, side)) for side in _SIDES}
    scored = request.with_options(score=None, scale=_scale(request, rows))
    return replace(scored, query=made["query"], key=made["key"])


def gradients(
    call: GradientRequest, of_dot: Callable[[GradientRequest], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """The gradients of a call by those of the dot products of its rows; None if there are none."""
    request = call.request
    assert request.options.score is not None
    rows = _rows_of(request.options.score)
    assert rows is not None
    wanted = {
        side: {step.name for step in getattr(rows, side) if _input(step) in call.wrt}
        for side in _SIDES
    }
    wrt = (call.wrt & {"value", "bias", "sink", "scale", "normalize.bias"}) | {
        s for s in _SIDES if wanted[s]
    }
    divisor = rows.divisor.replace("_", ".", 1)
    if divisor in call.wrt:
        wrt |= {"scale"}
    dot = dot_request(request)
    inputs = {**call.inputs, "query": dot.query, "key": dot.key}
    made = of_dot(replace(call, request=dot, wrt=wrt, inputs=inputs))
    if made is None:
        return None
    for side in _SIDES:
        if wanted[side]:
            steps, arrived = getattr(rows, side), made.pop(side)
            for name, one in _taken_on(call, side, steps, wanted[side], arrived).items():
                made[name] = made[name] + one if name in made else one  # both sides may share it
    if "scale" in made and divisor:
        by = float(request.parameters[divisor])
        each = made.pop("scale") / by
        if divisor in call.wrt:
            made[divisor] = np.asarray(-each * _scale(request, rows))
        if "scale" in call.wrt:
            made["scale"] = each
    return made


def _rows_of(score: Score) -> _Rows | None:
    return _found(score.kind, frozenset(f"score_{name}" for name in score.parameters()))


@lru_cache(maxsize=64)
def _found(kind: str | Declared, given: frozenset[str]) -> _Rows | None:
    """What a score makes of each query and of each key by itself, if their product is the score."""
    inputs = {"queries", "keys", "values"}
    steps = {step.name: step for step in textbook({*inputs, *given}, score=kind)}
    last, divisor = steps["scores"], ""
    if last.op == "divide" and steps[last.operands[1].step].op == "given":
        last, divisor = steps[last.operands[0].step], last.operands[1].step
    if last.op != "dot" or divisor not in ("", *given) or last.axes != ("H", "L", "S"):
        return None
    made = []
    for ref, index, source in zip(
        last.operands, (("h", "i"), ("h//(H//G)", "j")), _SIDES.values(), strict=True
    ):
        own = _before(steps, ref.step)
        if ref.index[:2] != index or not _by_rows(own, source, index[1]):
            return None
        made.append(own)
    query, key = made
    return _Rows(query, key, divisor)


def _by_rows(steps: tuple[Step, ...], source: str, letter: str) -> bool:
    """Whether each row of the last step is made of one row of `source`, and of nothing else."""
    rows = set()
    for step in steps:
        refs = [ref for ref in step.operands if ref.step in rows]
        if step.name == source or refs:
            rows.add(step.name)
            if letter not in step.index or any(letter not in ref.index for ref in refs):
                return False
    others = {"queries", "keys", "values"} - {source}
    return source in rows and not others & _names(steps)


def _names(steps: tuple[Step, ...]) -> set[str]:
    return {step.name for step in steps}


def _before(steps: dict[str, Step], name: str) -> tuple[Step, ...]:
    """The step of that name, after all that it is made of."""
    needed = {name}
    for step in reversed(steps.values()):
        if step.name in needed:
            needed |= {ref.step for ref in step.operands}
    return tuple(step for step in steps.values() if step.name in needed)


def _input(step: Step) -> str:
    """What a caller calls a given step, such as "query" or "score.W"."""
    sides = {source: side for side, source in _SIDES.items()}
    return sides.get(step.name, step.name.replace("_", ".", 1)) if step.op == "given" else ""


def _scale(request: Request, rows: _Rows) -> float:
    scale = 1.0 if request.options.scale is None else request.options.scale
    if not rows.divisor:
        return scale
    by = float(request.parameters[rows.divisor.replace("_", ".", 1)])
    return scale / by if by else math.inf


def _pieces(
    request: Request, side: str, array: Array, steps: tuple[Step, ...]
) -> Iterator[tuple[slice, Run]]:
    """Runs of the steps over some rows at a time."""
    parameters = {name.replace(".", "_"): own for name, own in request.parameters.items()}
    names = _names(steps)
    heads = {"H": request.shape[-3], "G": request.key.shape[-3]}
    for start in range(0, max(1, array.shape[-2]), _ROWS_AT_ONCE):
        rows = slice(start, min(start + _ROWS_AT_ONCE, array.shape[-2]))
        given = {_SIDES[side]: array[..., rows, :]}
        given |= {name: own for name, own in parameters.items() if name in names}
        # All rows of a piece are one block.
        sizes = {**heads, "S": 1, "L": 1}
        yield rows, Run(steps, given, sizes, dtype=np.dtype(np.float64), lead=array.shape[:-3])


def _made(request: Request, side: str, steps: tuple[Step, ...]) -> Array:
    """The rows of one side; leading axes that were broadcast still are.

    They have the dtype of the sums, or float64 where a number is beyond it: a kernel computes the
    rows that such a number is in again, and reads all others as if they were rounded here.
    """
    whole: Array = getattr(request, side)
    if len(steps) == 1:
        return whole
    own = whole[tuple(slice(0, None if step else 1) for step in whole.strides[:-3])]
    made = np.empty(0)
    for dtype in dict.fromkeys((request.accumulator, np.dtype(np.float64))):
        made, fits = _rounded(request, side, steps, own, dtype)
        if fits:
            break
    return spread(made, (*whole.shape[:-1], made.shape[-1]))


def _rounded(
    request: Request, side: str, steps: tuple[Step, ...], own: Array, dtype: np.dtype[Any]
) -> tuple[Array, bool]:
    """The rows in a dtype, and whether it holds all that float64 does."""
    name, made, fits = steps[-1].name, np.empty(0, dtype), True
    for rows, run in _pieces(request, side, own, steps):
        if not made.size:
            made = np.empty((*own.shape[:-1], run.shape(name)[-1]), dtype)
        for batch in np.ndindex(*run.lead):
            for head in range(own.shape[-3]):
                block = run.block(name, batch, head, range(rows.stop - rows.start))
                part = made[(*batch, head)][rows]
                with np.errstate(all="ignore"):
                    part[...] = block
                infinite = np.isinf(part)
                fits &= not infinite.any() or bool(np.isinf(block[infinite]).all())
                run.forget()
    return made, fits


def _taken_on(
    call: GradientRequest, side: str, steps: tuple[Step, ...], wanted: set[str], arrived: Array
) -> dict[str, Array]:
    """The gradients of an input and of parameters, from those of the rows made of them."""
    if len(steps) == 1:
        return {side: arrived}
    request, source = call.request, _SIDES[side]
    array: Array = getattr(request, side)
    # What takes part in nothing has the gradient 0, which slopes that are not finite would change.
    array = np.where((arrived != 0).any(axis=-1, keepdims=True), array, np.zeros((), array.dtype))
    back = backward(steps, wanted, {steps[-1].name})
    made: dict[str, Array] = {}
    for rows, run in _pieces(request, side, array, steps):
        onward = run.continued(back, {f"d_{steps[-1].name}": arrived[..., rows, :]})
        for name in wanted:
            gradient = onward.value(f"d_{name}")
            if name == source:
                whole = made.setdefault(side, np.empty(array.shape, call.dtype(side)))
                with np.errstate(all="ignore"):
                    whole[..., rows, :] = round_once(gradient, whole.dtype)
            else:
                given = name.replace("_", ".", 1)
                own = request.parameters[given]
                made[given] = made.get(given, 0) + gradient.reshape((-1, *own.shape)).sum(axis=0)
    return made
