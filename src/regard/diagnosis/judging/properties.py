"""Properties that every correct attention has, tried without the catalogue.

Each is a changed input and what that must do to the output. Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Convention, agrees
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.probes import ready_probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.result import Property

# What is true of dot products alone, and what of a softmax.
_OF_DOT = {"shift"}
_OF_SOFTMAX = {"rows_add_up", "convex", "equal_keys", "one_key"}


def properties(
    tested: FunctionUnderTest, convention: Convention, unit: float
) -> Iterator[Property]:
    """The properties that can be tried on a function of queries, keys and values."""
    mechanism, without = tested.stated.mechanism, set[str]()
    if mechanism is not None:
        without = _OF_DOT if mechanism.normalize is None else _OF_DOT | _OF_SOFTMAX
    yield from (one for one in _properties(tested, convention, unit) if one.name not in without)


def _properties(
    tested: FunctionUnderTest, convention: Convention, unit: float
) -> Iterator[Property]:
    if tested.callee.kind != "arrays" or convention.one_query:
        return
    causal = convention.causal_always
    mechanism = tested.stated.mechanism
    base = ready_probe("properties", "plain", (1, 1, 1, 5, 5, 5, 5), 300, causal=causal)
    output = tested.ask(convention, base).output
    if output is None:
        return
    tolerance = 4 * base.tolerance(unit)
    one = ready_probe("one key", "plain", (1, 1, 1, 1, 1, 5, 5), 310, causal=causal)
    if mechanism is not None:
        base, one = mechanism.of([base, one])
        output = tested.ask(convention, base).output
        if output is None:
            return
    queries, keys, values = (base.inputs[name] for name in ("queries", "keys", "values"))

    def given(**inputs: Array) -> Array | None:
        changed = replace(base, inputs={**base.inputs, **inputs})
        return tested.ask(convention, changed).output

    def equal(name: str, title: str, got: Array | None, expected: Array, how: str = "") -> Property:
        if got is None:
            return Property(name, title, None)
        if agrees(got, expected, tolerance * max(1.0, float(np.abs(expected).max()))):
            return Property(name, title, True)
        with np.errstate(all="ignore"):
            apart = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
        at = np.unravel_index(int(apart.argmax()), got.shape)
        text = f"{how}expected {expected[at]:.4g}, got {got[at]:.4g}"
        return Property(name, title, False, text)

    ones = np.ones_like(values)
    how = "values of 1 give 1: "
    yield equal("rows_add_up", "rows add up to 1", given(values=ones), ones, how)
    yield _positive(given(values=np.eye(5)[None, None]), tolerance)
    yield _convex(output, values, tolerance)
    title = "twice the values give twice the output"
    yield equal("linear", title, given(values=2 * values), 2 * output)
    # q·(k + c) = q·k + q·c: the same for every key of a row.
    title = "the same vector added to every key changes nothing"
    yield equal("shift", title, given(keys=keys + 0.75), output)
    title = "equal keys give the mean of the values"
    same = given(keys=np.broadcast_to(keys[..., :1, :], keys.shape))
    mean = np.broadcast_to(values.mean(-2, keepdims=True), values.shape)
    if causal:
        mean = np.cumsum(values, -2) / np.arange(1, 6)[:, None]
    yield equal("equal_keys", title, same, mean)
    got = tested.ask(convention, one).output
    yield equal("one_key", "one key gives its value", got, one.inputs["values"])
    if not causal:
        order = np.array([3, 0, 4, 1, 2])
        title = "the order of keys with their values does not matter"
        moved = given(keys=keys[..., order, :], values=values[..., order, :])
        yield equal("key_order", title, moved, output)
        title = "each query is answered for itself"
        moved = given(queries=queries[..., order, :])
        yield equal("query_order", title, moved, output[..., order, :])
    if causal or "causal" in tested.callee.roles:
        yield _no_leak(tested, convention, replace(base, causal=True), tolerance)


def _positive(weights: Array | None, tolerance: float) -> Property:
    name, title = "weights_positive", "weights lie between 0 and 1"
    if weights is None:
        return Property(name, title, None)
    low, high = float(weights.min()), float(weights.max())
    holds = low >= -tolerance and high <= 1 + tolerance  # false for NaN
    text = f"values of the identity show weights from {low:.4g} to {high:.4g}"
    return Property(name, title, holds, text)


def _convex(output: Array, values: Array, tolerance: float) -> Property:
    name, title = "convex", "the output lies among the values"
    low, high = values.min(-2, keepdims=True), values.max(-2, keepdims=True)
    if np.all((output >= low - tolerance) & (output <= high + tolerance)):
        return Property(name, title, True)
    beyond = np.nan_to_num(np.maximum(output - high, low - output), nan=np.inf)
    at = np.unravel_index(int(beyond.argmax()), output.shape)
    low, high = low[0, 0, 0, at[-1]], high[0, 0, 0, at[-1]]
    text = f"{output[at]:.4g} in a column whose values go from {low:.4g} to {high:.4g}"
    return Property(name, title, False, text)


def _no_leak(
    tested: FunctionUnderTest, convention: Convention, base: Probe, tolerance: float
) -> Property:
    """A later key must not change an earlier row; the first pair that does is named."""
    name, title = "no_leak", "a later key changes no earlier row"
    before = tested.ask(convention, base).output
    if before is None:
        return Property(name, title, None)
    for key in range(1, 5):
        values = base.inputs["values"].copy()
        values[..., key, :] += 1.0
        changed = replace(base, inputs={**base.inputs, "values": values})
        after = tested.ask(convention, changed).output
        if after is None:
            continue
        with np.errstate(all="ignore"):
            apart = np.abs(after - before)[0, 0, :key].max(-1)
        leaking = np.flatnonzero(~(apart <= tolerance))
        if leaking.size:
            row = int(leaking[-1])
            return Property(name, title, False, f"key {key} changes row {row} by {apart[row]:.3g}")
    return Property(name, title, True)
