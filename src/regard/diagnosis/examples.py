"""The smallest problem on which a mistake shows, and whether the usual check would have shown it.

Owns the tiny problems that are printed. Must not know how a mistake was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention import Convention
from regard.diagnosis.convention_search import Trial
from regard.diagnosis.mistakes import EQUIVALENTS
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.probe import Probe, Values, Variant, edges, ready, walk
from regard.diagnosis.result import Example, Matrix, Named, Shown

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Smaller differences would not be seen in the printed digits.
VISIBLE = 0.005


def named(mistake: Mistake, variant: Variant, trial: Trial, ways: Sequence[Convention]) -> Named:
    """An entry of the catalogue as it was found in a function, with its smallest example."""
    example, step = smallest_example(variant, trial, ways)
    return Named(
        mistake.name,
        mistake.family,
        mistake.severity,
        mistake.title,
        mistake.why,
        step,
        mistake.numpy,
        mistake.torch,
        usual_check(variant, causal=ways[0].causal_always)
        if mistake.variants
        else "A comparison with rtol=1e-5 passes.",
        tuple(one.title for one in EQUIVALENTS if one.same_as == mistake.name),
        "",
        example,
    )


def smallest_example(
    variant: Variant, trial: Trial, ways: Sequence[Convention]
) -> tuple[Example | None, str]:
    """The first tiny problem on which a mistake shows, and the step where it departs."""
    best = None
    for probe in _tiny(trial.subject.kind, ways[0]):
        departs, values = _departure(probe, variant)
        if departs is None:
            continue
        if best is None or _departs_visibly(probe, values):
            best = (probe, departs, values)
        if _departs_visibly(probe, values):
            break
    if best is None:
        names = list(variant.replaced)
        return None, names[0] if names else ""
    return _shown(*best), best[1]


def usual_check(variant: Variant, *, causal: bool = False) -> str:
    """Whether one head with as many queries as keys would have shown it; causal if always so."""
    probe = _usual(causal)
    values = walk(probe, variant)
    departs, _ = _departure(probe, variant)
    where = "One head, as many queries as keys" + ("" if causal else ", no mask")
    if departs is None:
        return f"{where}: every number is right, and it passes."
    sums = values["weights"].sum(-1)
    if np.allclose(sums, 1, atol=1e-6) and (values["weights"] >= -1e-9).all():
        return (
            f"{where}: the shape is right and rows of weights add up to 1; only a comparison with "
            "another implementation shows it."
        )
    return f"{where}: the shape is right; weights.sum(-1), which should be 1 throughout, shows it."


@lru_cache(maxsize=2)
def _usual(causal: bool) -> Probe:
    return replace(ready("usual", "plain", (1, 1, 1, 4, 4, 4, 4), 500, rank=2), causal=causal)


@lru_cache(maxsize=8)
def _tiny(kind: str, way: Convention) -> tuple[Probe, ...]:
    return tuple(_tiny_problems(kind, way))


def _tiny_problems(kind: str, way: Convention) -> Iterator[Probe]:
    from regard.diagnosis.probe import projected

    if kind in ("projected", "packed"):
        square = {f"W_{part}": (2, 2) for part in "qkvo"} | {f"b_{part}": (2,) for part in "qkvo"}
        for heads in (1, 2):
            yield from projected(square, heads, rows=2)
        four = {f"W_{part}": (4, 4) for part in "qkvo"} | {f"b_{part}": (4,) for part in "qkvo"}
        yield from projected(four, 2, rows=3)
        return
    causal = way.causal_always
    yield ready("2 queries, 2 keys", "plain", (1, 1, 1, 2, 2, 2, 2), 501, rank=2, causal=causal)
    yield ready("3 queries, 3 keys", "plain", (1, 1, 1, 3, 3, 2, 2), 504, rank=2, causal=causal)
    yield ready("1 query, 3 keys", "rectangular", (1, 1, 1, 1, 3, 2, 2), 505, rank=2)
    yield ready("2 queries, 3 keys", "rectangular", (1, 1, 1, 2, 3, 2, 1), 505, rank=2)
    keep = np.array([[True, False, True], [True, True, False], [False, True, True]])
    yield ready("a mask", "mask", (1, 1, 1, 3, 3, 2, 2), 506, rank=2, keep=keep)
    yield ready("causal", "causal", (1, 1, 1, 3, 3, 2, 2), 507, rank=2, causal=True)
    ends = dict(rank=2, causal=True, offset=1)
    yield ready("causal, 2 queries, 3 keys", "causal", (1, 1, 1, 2, 3, 2, 2), 508, **ends)
    starts = dict(rank=2, causal=True)
    yield ready("causal, 2 queries, 3 keys", "causal", (1, 1, 1, 2, 3, 2, 2), 508, **starts)
    padding = np.array([True, True, False])[None, None, None]
    yield ready("padding", "key mask", (1, 1, 1, 3, 3, 2, 2), 509, rank=2, keep=padding)
    for rank in (3, 4):
        yield ready("2 heads", "heads", (1, 2, 2, 2, 2, 2, 2), 510, rank=rank)
        yield ready("2 heads, width 3", "heads", (1, 2, 2, 2, 2, 3, 2), 510, rank=rank)
        yield ready("4 heads, 2 key heads", "grouped", (1, 4, 2, 2, 2, 2, 2), 511, rank=rank)
    yield ready("2 heads, 2 texts", "heads", (2, 2, 2, 2, 2, 2, 2), 512, rank=4)
    yield ready("3 heads, 3 texts", "heads", (3, 3, 3, 3, 3, 3, 3), 513, rank=4)
    yield ready("3 heads", "heads", (1, 3, 3, 3, 3, 3, 3), 513, rank=3)
    two = np.array([[True, False], [True, True]])[:, None, None]
    yield ready("padding, 2 texts", "key mask", (2, 2, 2, 2, 2, 2, 2), 514, rank=4, keep=two)
    half = dict(rank=4, keep=np.array([[True, False], [True, True]]))
    yield ready("a mask, 2 heads", "mask", (1, 2, 2, 2, 2, 2, 2), 515, **half)
    window = dict(rank=2, causal=True, window=2)
    yield ready("a window of 2", "window", (1, 1, 1, 4, 4, 2, 2), 516, **window)
    late = dict(rank=2, causal=True, window=2, offset=2)
    yield ready("a window of 2, 2 queries", "window", (1, 1, 1, 2, 4, 2, 2), 517, **late)
    chunks = dict(rank=2, causal=True, chunks=(2, 2))
    yield ready("a cache, 2 tokens and 2 more", "cache", (1, 1, 1, 4, 4, 2, 2), 518, **chunks)
    yield from edges(np.dtype(np.float64), masks=True)


def _departure(probe: Probe, variant: Variant) -> tuple[str | None, dict[str, Array]]:
    """The first step whose value is not the textbook's, in the textbook's order."""
    values = walk(probe, variant)
    right = probe.right
    if _same(probe.result(values), probe.result(right)):
        return None, values
    for step in probe.steps:
        if not _same(values[step.name], right[step.name]):
            return step.name, values
    return None, values


def _same(first: Array, second: Array) -> bool:
    return bool(np.allclose(first, second, rtol=1e-9, atol=1e-12, equal_nan=True))


def _departs_visibly(probe: Probe, values: Values) -> bool:
    got, right = probe.result(values), probe.result(probe.right)
    return not bool(np.allclose(got, right, rtol=0, atol=VISIBLE, equal_nan=True))


def _shown(probe: Probe, departs: str, values: Values) -> Example:
    """One head of one batch element: the one where the difference is largest."""
    right = probe.right
    result = next(n for n in ("projected_output", "merged", "output") if n in right)
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(np.abs(values[result] - right[result]), nan=np.inf)
    batch = int(apart.reshape(len(apart), -1).max(-1).argmax())
    head = 0
    if apart.ndim == 4:
        head = int(apart[batch].reshape(apart.shape[1], -1).max(-1).argmax())
    given = tuple(
        Shown(
            step.name,
            step.symbol,
            step.formula,
            _matrix(right[step.name], step.axes, batch, head, probe),
        )
        for step in probe.steps
        if step.op == "given"
        and step.axes
        and step.name in ("queries", "keys", "values", "embeddings")
    )
    names = [departs, *(n for n in ("weights", result) if n != departs)]
    declared = {step.name: step for step in probe.steps}
    steps = tuple(
        Shown(
            name,
            declared[name].symbol,
            declared[name].formula,
            _matrix(right[name], declared[name].axes, batch, head, probe),
            _matrix(values[name], declared[name].axes, batch, head, probe),
            name == departs,
        )
        for name in names
    )
    more = f", head {head}" if probe.sizes["H"] > 1 and apart.ndim == 4 else ""
    more = f", batch element {batch}{more}" if probe.sizes["B"] > 1 else more
    return Example(f"{probe.name}{more}", given, steps)


def _matrix(array: Array, axes: tuple[str, ...], batch: int, head: int, probe: Probe) -> Matrix:
    if array.ndim > len(axes):
        array = array[batch]
    if axes[:1] == ("H",):
        array = array[head]
    elif axes[:1] == ("G",):
        array = array[head // (probe.sizes["H"] // probe.sizes["G"])]
    array = np.atleast_1d(array)
    rows = array[:, None] if array.ndim == 1 else array
    return tuple(tuple(float(number) for number in row) for row in rows)
