"""One probe put to a function: its calls under one convention, and the answer.

Whatever goes wrong in a call is part of the answer. Must not know mistakes, nor in which process
the function runs.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import fields, replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for, mask_role
from regard.diagnosis.calls.convention import (
    EMBEDDED,
    READY,
    Answer,
    Ask,
    CallResult,
    Convention,
    Question,
    ReturnedArray,
    from_layout,
)
from regard.diagnosis.calls.gradient_answers import gradients
from regard.diagnosis.calls.gradient_probe import GradientProbe
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.reading.signature import Callee
from regard.errors import safe_text


def call(
    callee: Callee, convention: Convention, probe: Probe, ask: Ask, forward: Answer | None = None
) -> Answer:
    """Put one probe to the function and read the answer.

    `forward` is the answer to the forward pass of a probe of gradients, unless that is given.
    """
    try:
        arguments = arguments_for(callee, convention, probe)
    except NotOfferedError as error:
        return Answer(problem=str(error), kind="refused")
    if isinstance(probe, GradientProbe):
        upstream = None if forward is None else _as_returned(convention, probe, forward)
        if upstream is None and not callee.is_backward:
            return Answer(problem="its forward pass gave no output", kind="refused")
        place = 0 if forward is None else forward.position
        return gradients(callee, convention, probe, arguments, ask, upstream, place)
    question = question_of(callee, convention, probe, arguments)
    begin = time.perf_counter()
    result = _joined(convention, ask(question), by_token=callee.steps == "dropped")
    return _answer(result, convention, probe, time.perf_counter() - begin)


def question_of(
    callee: Callee, convention: Convention, probe: Probe, arguments: Mapping[str, Any]
) -> Question:
    """The calls that a probe takes: one, or several with a cache."""
    question = Question(probe.name, (arguments,), reading=callee.number)
    in_pieces = callee.steps == "kept" and callee.says_pieces and bool(probe.chunks)
    chunks = (1,) * probe.sizes["L"] if callee.steps and not in_pieces else probe.chunks
    if chunks:
        cache = callee.roles["cache"].name if "cache" in callee.roles else ""
        calls = _chunks(callee, convention, arguments, chunks)
        question = replace(question, calls=calls, cache=cache)
    return question


def call_again(
    callee: Callee, convention: Convention, before: Probe, probe: Probe, ask: Ask
) -> Answer:
    """Put one probe to an object that has just answered another one."""
    calls = (arguments_for(callee, convention, before), arguments_for(callee, convention, probe))
    question = Question(f"{probe.name}, again", calls, reading=callee.number)
    return _answer(ask(question)[-1], convention, probe, 0.0)


def with_defaults(
    callee: Callee, convention: Convention, probe: Probe, without: Set[str], ask: Ask
) -> tuple[CallResult, CallResult]:
    """A call with some arguments left to their defaults: the first one, and after another one."""
    given = arguments_for(callee, convention, probe)
    if callee.steps:
        (given,) = _chunks(callee, convention, given, (1,))
    before = {name: value for name, value in given.items() if name not in without}
    tokens = {
        callee.roles[one].name for one in ("query", "key", "value", "x") if one in callee.roles
    }
    other = {name: -0.5 * value if name in tokens else value for name, value in before.items()}
    first, after = (
        ask(Question(f"defaults, {len(calls)}", calls, reading=callee.number, looks="defaults"))
        for calls in ((other,), (before, other))
    )
    return first[-1], after[-1]


class Once:
    """Puts questions to a function: one with the name and arguments of an earlier one only once.

    Conventions that differ in nothing that a function gets ask the same.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._known: dict[Hashable, list[CallResult]] = {}
        self.given = set[str]()  # the parameters that had a value in some call

    @property
    def calls(self) -> int:
        """How many questions were put."""
        return len(self._known)

    def __call__(self, question: Question) -> list[CallResult]:
        """The results of a question's calls."""
        arguments = [tuple(map(_content, call.items())) for call in question.calls]
        own = [getattr(question, one.name) for one in fields(Question) if one.name != "calls"]
        key = (*own, *arguments)
        if key not in self._known:
            self._known[key] = self._ask(question)
            for call in question.calls:
                self.given |= {name for name, value in call.items() if value is not None}
        return self._known[key]


def _content(argument: tuple[str, Any]) -> Hashable:
    name, value = argument
    if isinstance(value, np.ndarray):
        return name, value.dtype, value.shape, value.tobytes()
    return name, type(value), value


def _chunks(
    callee: Callee,
    convention: Convention,
    arguments: Mapping[str, Any],
    chunks: Sequence[int],
) -> tuple[dict[str, Any], ...]:
    """The arguments of each call with a cache, some tokens at a time."""
    parts, start = [], 0
    for length in chunks:
        part = dict(arguments)
        rows: Any = start if callee.steps == "dropped" else range(start, start + length)
        for role in ("query", "key", "value", "x"):
            if role in callee.roles and (name := callee.roles[role].name) in part:
                of_keys = convention.shared and role in ("key", "value")
                axis = convention.key_token_axis if of_keys else convention.token_axis
                part[name] = np.take(part[name], rows, axis=axis)
        for role in ("cos", "sin", "positions"):
            of_own = role == "positions" or not {"pos", "positions"} & callee.roles.keys()
            if of_own and role in callee.roles and (name := callee.roles[role].name) in part:
                axis = 1 if callee.tables.startswith("batch") else 0
                part[name] = part[name].take(np.atleast_1d(rows), axis=axis)
        own = mask_role(callee, keys=True)
        if own is not None and convention.mask_of_new is not None and len(chunks) > 1:
            name, end = callee.roles[own].name, start + length
            if part.get(name) is not None:
                part[name] = part[name][..., start if convention.mask_of_new else 0 : end]
        if "pos" in callee.roles:
            part[callee.roles["pos"].name] = start
        parts.append(part)
        start += length
    return tuple(parts)


def _joined(convention: Convention, results: Sequence[CallResult], *, by_token: bool) -> CallResult:
    """The outputs of all calls with a cache as one, or the first problem among them.

    With `by_token` each is of one token and has no axis for it.
    """
    last = results[-1]
    if last.problem or (len(results) == 1 and not by_token):
        return last
    outputs = [one.arrays[0] for one in results]
    try:
        if any(output.numbers is None for output in outputs):
            raise ValueError
        numbers = [output.numbers for output in outputs if output.numbers is not None]
        join = np.stack if by_token else np.concatenate
        whole = join(numbers, axis=convention.token_axis)
    except ValueError:
        shapes = safe_text(", ".join(str(output.shape) for output in outputs), 200)
        return CallResult(problem=f"with a cache it returned shapes {shapes}", kind="shape")
    return replace(last, arrays=(ReturnedArray(whole.shape, outputs[-1].dtype, whole),))


def _answer(result: CallResult, convention: Convention, probe: Probe, seconds: float) -> Answer:
    """Which of the returned arrays is the output, and which the weights."""
    answer = Answer(
        printed=result.printed, changed=result.changed, dropped=result.dropped, seconds=seconds
    )
    if result.problem:
        return replace(answer, problem=result.problem, kind=result.kind)
    arrays = result.arrays
    outputs = [_as_output(array, convention, probe) for array in arrays]
    places = [n for n, output in enumerate(outputs) if output is not None]
    if not places:
        shapes = " and ".join(safe_text(array.shape, 100) for array in arrays[:3])
        expected = _output_shape(convention, probe)
        text = f"it returned shape {shapes}; the output should be {expected}"
        return replace(answer, problem=text, kind="shape", shape=arrays[0].shape)
    place = convention.output_at if convention.output_at in places else places[0]
    weights = None
    names = ["output" if n == place else "more" for n in range(len(arrays))]
    for n, array in enumerate(arrays):
        if n != place and weights is None and (own := _as_weights(array, probe)) is not None:
            weights, names[n] = own, "weights"
    return replace(
        answer,
        output=outputs[place],
        weights=weights,
        returned=("a list: " if result.a_list else "") + ", ".join(names),
        position=place,
        shape=arrays[place].shape,
        dtype=arrays[place].dtype,
    )


def _output_shape(convention: Convention, probe: Probe) -> tuple[int, ...]:
    sizes = probe.sizes | dict.fromkeys("DM", int(probe.result(probe.right).shape[-1]))
    return tuple(sizes[axis] for axis in convention.layout)


def _as_output(found: ReturnedArray, convention: Convention, probe: Probe) -> Array | None:
    """With the probe's axes, or None if it has another shape."""
    if (array := found.numbers) is None:
        return None
    expected, size, layout = _output_shape(convention, probe), probe.sizes, convention.layout
    axes = READY if "queries" in probe.inputs else EMBEDDED
    if array.shape == expected and not convention.turned_output:
        return from_layout(array, axes, layout, probe.result(probe.right).shape)
    if axes == EMBEDDED and size["L"] == 1 and array.size == np.prod(expected):
        alone = tuple(n for axis, n in zip(layout, expected, strict=True) if axis != "L")
        if array.shape == alone:  # a single learned query, without its axis
            return array.reshape(probe.result(probe.right).shape)
    side_by_side = (*expected[:-2], int(np.prod(expected[-2:])))
    heads_last = layout.endswith("HD") and "L" in layout and not convention.turned_output
    if heads_last and array.shape == side_by_side:
        array = array.reshape(expected)
        return from_layout(array, axes, layout, probe.result(probe.right).shape)
    if axes != READY or len(expected) != 4 or convention.one_query:
        return None
    # Heads go in by themselves and come out side by side, or rows before heads.
    rows_first = (size["B"], size["L"], size["H"], size["E"])
    if array.shape == (size["B"], size["L"], size["H"] * size["E"]) or (
        layout == READY and array.shape == rows_first
    ):
        return array.reshape(rows_first).swapaxes(1, 2)
    return None


def _as_returned(convention: Convention, probe: GradientProbe, forward: Answer) -> Array | None:
    """The given gradient with the axes that the output was returned with."""
    if forward.output is None or probe.forward is None:
        return None
    count = int(np.prod(forward.shape))
    numbers = np.arange(float(count)).reshape(forward.shape)
    places = _as_output(ReturnedArray(forward.shape, "", numbers), convention, probe.forward)
    if places is None:
        return None
    upstream = np.empty(count)
    upstream[places.astype(int).ravel()] = probe.inputs[f"d_{probe.forward.result_step}"].ravel()
    return upstream.reshape(forward.shape)


def _as_weights(found: ReturnedArray, probe: Probe) -> Array | None:
    if (array := found.numbers) is None:
        return None
    whole = tuple(probe.sizes[axis] for axis in "BHLS")
    fits = array.shape[-1:] == whole[-1:] and array.size == np.prod(whole)
    return array.reshape(whole) if fits else None
