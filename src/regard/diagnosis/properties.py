"""What holds of every attention, tried on somebody's without any catalogue.

Each property is a changed input and what that must do to the output. Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import Convention
from regard.diagnosis.convention_search import Trial, agrees
from regard.diagnosis.probe import Probe, ready
from regard.diagnosis.result import Property

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]


def properties(trial: Trial, way: Convention, unit: float) -> Iterator[Property]:
    """The properties of attention on ready arrays that can be tried here."""
    if trial.subject.kind != "arrays" or way.layout == "D":
        return
    base = ready("properties", "plain", (1, 1, 1, 5, 5, 5, 5), 300, causal=way.causal_always)
    output = trial.ask(way, base).output
    if output is None:
        return

    def given(**inputs: Array) -> Array | None:
        changed = replace(base, inputs={**base.inputs, **inputs})
        return trial.ask(way, changed).output

    tolerance = 4 * base.tolerance(unit)
    queries, keys, values = (base.inputs[name] for name in ("queries", "keys", "values"))
    shape = values.shape

    ones = given(values=np.ones(shape))
    yield _same("rows add up to 1", "rows_add_up", "values of 1 give 1", ones, 1.0, tolerance)
    weights = given(values=np.eye(5)[None, None])
    if weights is None:
        yield Property("weights_positive", "weights lie between 0 and 1", None)
    else:
        low, high = float(weights.min()), float(weights.max())
        fine = low >= -tolerance and high <= 1 + tolerance and not np.isnan(weights).any()
        said = f"values of the identity show weights from {low:.4g} to {high:.4g}"
        yield Property("weights_positive", "weights lie between 0 and 1", fine, said)
    inside = np.all(
        (output >= values.min(-2, keepdims=True) - tolerance)
        & (output <= values.max(-2, keepdims=True) + tolerance)
    )
    yield Property(
        "convex",
        "the output lies among the values",
        bool(inside),
        "" if inside else _worst(output, values),
    )
    doubled = given(values=2 * values)
    yield _same(
        "twice the values give twice the output", "linear", "", doubled, 2 * output, tolerance
    )
    # q·(k + c) = q·k + q·c: the same for every key of a row.
    shifted = given(keys=keys + 0.75)
    yield _same(
        "the same vector added to every key changes nothing",
        "shift",
        "",
        shifted,
        output,
        tolerance,
    )
    same = given(keys=np.broadcast_to(keys[..., :1, :], keys.shape))
    if way.causal_always:
        mean = np.cumsum(values, -2) / np.arange(1, 6)[:, None]
    else:
        mean = np.broadcast_to(values.mean(-2, keepdims=True), shape)
    yield _same("equal keys give the mean of the values", "equal_keys", "", same, mean, tolerance)
    one = ready("one key", "plain", (1, 1, 1, 1, 1, 5, 5), 310, causal=way.causal_always)
    yield _same(
        "one key gives its value",
        "one_key",
        "",
        trial.ask(way, one).output,
        one.inputs["values"],
        tolerance,
    )
    order = np.array([3, 0, 4, 1, 2])
    if not way.causal_always:
        moved = given(keys=keys[..., order, :], values=values[..., order, :])
        yield _same(
            "the order of keys with their values does not matter",
            "key_order",
            "",
            moved,
            output,
            tolerance,
        )
        asked = given(queries=queries[..., order, :])
        yield _same(
            "each query is answered for itself",
            "query_order",
            "",
            asked,
            output[..., order, :],
            tolerance,
        )
    yield from _no_leaks(trial, way, base, unit)


def _no_leaks(trial: Trial, way: Convention, base: Probe, unit: float) -> Iterator[Property]:
    """A later key must not change an earlier row: the pair that leaks is named."""
    if not way.causal_always and "causal" not in trial.subject.roles:
        return
    causal = replace(base, causal=True)
    before = trial.ask(way, causal).output
    title = "a later key changes no earlier row"
    if before is None:
        yield Property("no_leak", title, None)
        return
    for key in range(1, 5):
        changed = causal.inputs["values"].copy()
        changed[..., key, :] += 1.0
        own = replace(causal, inputs={**causal.inputs, "values": changed})
        after = trial.ask(way, own).output
        if after is None:
            continue
        with np.errstate(all="ignore"):
            apart = np.abs(after - before)[0, 0, :key].max(-1)
        leaking = np.flatnonzero(~(apart <= 4 * base.tolerance(unit)))
        if leaking.size:
            row = int(leaking[-1])
            said = f"key {key} changes row {row} by {apart[row]:.3g}"
            yield Property("no_leak", title, False, said)
            return
    yield Property("no_leak", title, True)


def _same(
    title: str, name: str, how: str, got: Array | None, expected: Array | float, tolerance: float
) -> Property:
    if got is None:
        return Property(name, title, None)
    expected = np.broadcast_to(expected, got.shape)
    if agrees(got, expected, tolerance * max(1.0, float(np.abs(expected).max()))):
        return Property(name, title, True)
    with np.errstate(all="ignore"):
        apart = np.where(np.isfinite(got), np.abs(got - expected), np.inf)
    at = np.unravel_index(int(apart.argmax()), got.shape)
    said = f"expected {expected[at]:.4g}, got {got[at]:.4g}"
    return Property(name, title, False, f"{how}: {said}" if how else said)


def _worst(output: Array, values: Array) -> str:
    low, high = values.min(-2, keepdims=True), values.max(-2, keepdims=True)
    over = np.maximum(output - high, low - output)
    at = np.unravel_index(int(np.nan_to_num(over, nan=np.inf).argmax()), output.shape)
    column = at[-1]
    return (
        f"{output[at]:.4g} in a column whose values go from "
        f"{low[0, 0, 0, column]:.4g} to {high[0, 0, 0, column]:.4g}"
    )
