"""The gradients of multi-head attention: back through W_o, then attention, then W_q, W_k and W_v.

The textbook's backward steps are evaluated for the projections; a kernel answers for attention.
Must not know how either is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute import dispatch
from regard.compute.evaluation import Run, unite
from regard.compute.gradients import wanted_names
from regard.compute.request import make_request
from regard.errors import ShapeError
from regard.normalizers import as_normalizer
from regard.positions import as_positions
from regard.scores import as_score
from regard.textbook.gradients import backward

_OPTIONS = ("bias", "sink", "scale")  # of a call, that have gradients
_PROJECTED = {"queries": "query", "keys": "key", "values": "value"}


def parameters_of(options: Mapping[str, Any]) -> list[str]:
    """The names of the numbers that score, normalisation and positions of a call are given."""
    parts = (
        as_score(options.get("score")),
        as_normalizer(options.get("normalize")),
        as_positions(options.get("positions")),
    )
    return [f"{part.option}.{name}" for part in parts if part for name in part.parameters()]


def wanted_of_layer(
    wrt: Any, given: Mapping[str, Array], parameters: Collection[str]
) -> frozenset[str]:
    """The names in `wrt` as the steps have them ("embeddings" for x); by default all of `given`."""
    if wrt is None:
        return frozenset(given)
    known = ("x", *(name for name in given if name != "embeddings"), *_OPTIONS, *parameters)
    names = wanted_names(wrt, known, _OPTIONS)
    steps = {"x": "embeddings", "positions.vectors": "positions_vectors"}
    return frozenset(steps.get(name, name) for name in names)


def layer_gradients(
    projected: Run,
    last: str,
    grad: Array,
    wanted: frozenset[str],
    options: dict[str, Any],
) -> Iterator[tuple[str, Any]]:
    """Each wanted gradient with its name, from the gradient `grad` of the step `last`.

    `projected` has the steps from the embeddings to queries, keys and values. A weight's gradient
    is summed over the leading axes.
    """
    query, key, value = (projected.value(name) for name in _PROJECTED)
    request = make_request(query, key, value, **options)
    # What was computed here saves work where dot products and a softmax alone have gradients.
    saves = not request.parts and not any(name.startswith("positions.") for name in wanted)
    if saves:
        request = request.with_options(return_lse=True)
    forward = dispatch.run(request)
    united = unite({**projected.inputs, "output": forward.output}, projected.dtype)
    shape = united.shape(last)
    if grad.shape != shape:
        raise ShapeError(
            f"grad_output has shape {grad.shape} but the output has {shape}; they must match"
        )
    united = _continued(united, wanted | {"output"}, {last: grad})
    yield from _found(united, wanted)
    through = not wanted.isdisjoint(projected.steps)
    parameters = wanted & request.parameters.keys()
    wrt = (wanted & {*_OPTIONS}) | parameters | ({*_PROJECTED.values()} if through else set())
    if not wrt:
        return
    inner = dispatch.gradients_of_arrays(
        query,
        key,
        value,
        united.value("d_output"),
        output=forward.output if saves else None,
        lse=forward.lse,
        wrt=wrt,
        **options,
    )
    for name in wanted & {*_OPTIONS}:
        yield name, getattr(inner, name)
    if parameters:
        yield "parameters", inner.parameters
    if through:
        arrives = {name: getattr(inner, one) for name, one in _PROJECTED.items()}
        yield from _found(_continued(projected, wanted, arrives), wanted)


def _continued(run: Run, wanted: frozenset[str], arrives: Mapping[str, Array]) -> Run:
    """The run followed by its backward steps, which begin with the gradients in `arrives`."""
    there = {step.name for step in run.steps.values() if step.op == "given"}
    steps = backward(tuple(run.steps.values()), wanted & there, arrives.keys())
    return run.continued(steps, {f"d_{name}": array for name, array in arrives.items()})


def _found(run: Run, wanted: frozenset[str]) -> Iterator[tuple[str, Array]]:
    for name in wanted:
        step = run.steps.get(f"d_{name}")
        if step is None:
            continue
        if {"L", "S"} & {*step.axes}:
            yield name, run.value(step.name)
            continue
        total = np.zeros(run.shape(name))
        for batch in np.ndindex(*run.lead):
            total += run.block(step.name, batch, 0, None)
            run.forget()
        yield name, total
