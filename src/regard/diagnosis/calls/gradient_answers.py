"""The answer to a probe of gradients: which of the returned arrays is the gradient of which input.

Must not know mistakes, nor in which process the function runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import arguments_for
from regard.diagnosis.calls.convention import (
    UPSTREAM,
    Answer,
    Ask,
    CallResult,
    Convention,
    Question,
    ReturnedArray,
)
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.forms.differentiation import BESIDE, gradient_of, roles_wanted
from regard.diagnosis.reading.signature import DIFFERENTIATED, Callee, Parameter
from regard.errors import safe_text


def gradients(
    callee: Callee,
    convention: Convention,
    probe: GradientProbe,
    arguments: Mapping[str, Any],
    ask: Ask,
    upstream: Array | None,
    place: int,
) -> Answer:
    """Ask for the gradients at one probe; `upstream`, if it is not given, is an argument."""
    wanted = roles_wanted(callee)
    own = [
        one
        for one in callee.parameters
        if one.role in wanted and isinstance(arguments.get(one.name), np.ndarray)
    ]
    question = Question(probe.name, (arguments,), reading=callee.number)
    if upstream is not None:
        given = {**arguments, UPSTREAM: upstream.astype(convention.dtype)}
        question = replace(question, calls=(given,), wrt=tuple(p.name for p in own), place=place)
    result = ask(question)[-1]
    answer = Answer(printed=result.printed, changed=result.changed)
    if result.problem:
        return replace(answer, problem=result.problem, kind=result.kind)
    if len(result.arrays) > len(own) and not result.names:
        arrays = tuple(one for one in result.arrays if not _is_output(one, probe))
        result = replace(result, arrays=arrays if len(arrays) >= len(own) else result.arrays)
    found = _by_parameter(callee, own, result, arguments)
    if isinstance(found, str):
        return replace(answer, problem=found, kind="shape")
    names = ", ".join(one.name for one in own)
    return replace(
        answer,
        output=_as_one(callee, convention, probe, found),
        returned=f"the gradients of {names}",
        dtype=result.arrays[0].dtype,
    )


def _is_output(found: ReturnedArray, probe: GradientProbe) -> bool:
    """Whether an array has the numbers of the output itself, in whatever order."""
    right = probe.right["output"]
    if found.numbers is None or found.numbers.size != right.size:
        return False
    return np.allclose(np.sort(found.numbers, None), np.sort(right, None), 1e-4, 1e-4)


def _by_parameter(
    callee: Callee, own: Sequence[Parameter], result: CallResult, arguments: Mapping[str, Any]
) -> dict[str, Array] | str:
    """The gradient of each parameter, NaN if its shape is another; or what is wrong, in words."""
    arrays = result.arrays
    names = result.names or (callee.returns if len(callee.returns) == len(arrays) else ())
    by_role = {
        gradient_of(name) or gradient_of(f"d_{name}"): one
        for name, one in zip(names, arrays, strict=False)
    }
    by_name = dict(zip(names, arrays, strict=False))
    found: dict[str, ReturnedArray] = {}
    for one in own:
        if (array := by_name.get(one.name) or by_role.get(one.role)) is not None:
            found[one.name] = array
    if len(found) < len(own):
        if len(arrays) < len(own):
            text = ", ".join(safe_text(one.shape, 60) for one in arrays)
            return f"it returned {text}; the gradients of {len(own)} inputs are asked for"
        order = {role: place for place, role in enumerate((*DIFFERENTIATED, *BESIDE))}
        inputs = sorted(own, key=lambda one: order.get(str(one.role), 0))
        found = {one.name: array for one, array in zip(inputs, arrays, strict=False)}
    shapes = {one.name: arguments[one.name].shape for one in own}
    for one in own:
        if one.role == "sink":
            found[one.name] = _of_all_texts(found[one.name], len(shapes[one.name]))
    if not any(found[name].shape == shape for name, shape in shapes.items()):
        returned = " and ".join(safe_text(one.shape, 60) for one in found.values())
        wanted = " and ".join(map(str, shapes.values()))
        return f"it returned shapes {returned}; the gradients should be {wanted}"
    return {
        name: np.full(shape, np.nan) if own is None else own
        for name, shape in shapes.items()
        for own in [found[name].numbers if found[name].shape == shape else None]
    }


def _of_all_texts(found: ReturnedArray, axes: int) -> ReturnedArray:
    """The gradient of what all texts share, where code for one text was given several."""
    if found.numbers is None or len(found.shape) <= axes:
        return found
    whole = found.numbers.sum(tuple(range(len(found.shape) - axes)))
    return replace(found, shape=whole.shape, numbers=whole)


def _as_one(
    callee: Callee, convention: Convention, probe: GradientProbe, found: Mapping[str, Array]
) -> Array:
    """The gradients in the order of the probe's inputs, which several parameters may share."""
    assert probe.forward is not None
    numbered: dict[str, Array] = {}
    for names in probe.groups_of_inputs:
        place = probe.places[names[0]]
        shape = probe.inputs[names[0]].shape
        numbered |= dict.fromkeys(names, np.arange(place.start, place.stop, 1.0).reshape(shape))
    numbers = replace(probe.forward, inputs={**probe.forward.inputs, **numbered})
    # Called with the numbers of their cells, a function would get these cells.
    cells = arguments_for(callee, replace(convention, dtype="float64"), numbers)
    whole = np.zeros(sum(place.stop - place.start for place in probe.places.values()))
    for name, gradient in found.items():
        np.add.at(whole, cells[name].astype(int).ravel(), gradient.astype(float).ravel())
    return whole
