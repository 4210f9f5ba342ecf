"""The smallest problem on which a mistake shows, and whether the usual check would show it.

Owns the tiny problems that are printed. Must not know how a mistake was found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.gradient_probe import GradientProbe, with_gradients
from regard.diagnosis.calls.mechanism import Mechanism
from regard.diagnosis.calls.probe import Probe, Values, Variant, evaluate
from regard.diagnosis.calls.probes import extreme_probes, projected_probes, ready_probe
from regard.diagnosis.calls.under_test import FunctionUnderTest, as_always_causal
from regard.diagnosis.judging.built_in import PLAIN, BuiltIn
from regard.diagnosis.mistakes import EQUIVALENTS, all_mistakes
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.result import Example, Matrix, Named, Shown

# What a function computes besides attention over dot products, or instead.
Besides = Mechanism | BuiltIn
# Smaller differences do not show in the printed digits.
VISIBLE = 0.005


def named(
    mistake: Mistake,
    variant: Variant,
    tested: FunctionUnderTest,
    conventions: Sequence[Convention],
    built_in: BuiltIn = PLAIN,
) -> Named:
    """An entry of the catalogue found in a function, with its smallest example."""
    always = conventions[0].causal_always
    # What is added by place is the function's own: an example has none of it.
    besides = tested.stated.mechanism or replace(built_in, added=None, places=None)
    own = tested.of_gradients
    example, step = smallest_example(variant, tested.callee.kind, always, besides, gradients=own)
    check = ""
    if mistake.variants:
        check = usual_check(variant, causal=always, besides=besides, gradients=own)
    return replace(without_example(mistake), step=step, usual_check=check, example=example)


def without_example(mistake: Mistake) -> Named:
    """An entry of the catalogue that no numbers of a probe show."""
    shared = ("name", "family", "severity", "title", "why", "numpy", "torch")
    same_as = tuple(one.title for one in EQUIVALENTS if one.same_as == mistake.name)
    own = {name: getattr(mistake, name) for name in shared}
    return Named(**own, step="", same_as=same_as, in_catalogue=mistake.name in all_mistakes())


@lru_cache(maxsize=256)
def smallest_example(
    variant: Variant,
    kind: str,
    always: bool,
    besides: Besides = PLAIN,
    *,
    gradients: bool = False,
) -> tuple[Example | None, str]:
    """The first tiny problem on which a mistake shows, and the step where it departs.

    `always`: the function hides later keys without being asked to. `gradients`: it returns them.
    """
    best = None
    for probe in _tiny_probes(kind, always, besides, gradients):
        departs, values = _departure(probe, variant)
        if departs is None:
            continue
        visible = not _equal(probe.result(values), probe.result(probe.right), 0, VISIBLE)
        if best is None or visible:
            best = (probe, departs, values)
        if visible:
            break
    if best is None:
        return None, next(iter(variant.replaced), "")
    return _example(*best), best[1]


@lru_cache(maxsize=256)
def usual_check(
    variant: Variant, *, causal: bool = False, besides: Besides = PLAIN, gradients: bool = False
) -> str:
    """Whether one head with as many queries as keys shows a mistake; `causal` if always causal."""
    probe = _usual_probe(causal, besides)
    departs, values = _departure(with_gradients(probe) if gradients else probe, variant)
    problem = "One head, as many queries as keys" + ("" if causal else ", no mask")
    if departs is None:
        return f"{problem}: every number is right, and it passes."
    if gradients:
        return f"{problem}: the shapes are right; torch.autograd.gradcheck shows it."
    weights = values["weights"]
    if np.allclose(weights.sum(-1), 1, atol=1e-6) and (weights >= -1e-9).all():
        return (
            f"{problem}: the shape is right and rows of weights add up to 1; only a comparison "
            "with another implementation shows it."
        )
    return f"{problem}: the shape is right; weights.sum(-1), which should be 1, shows it."


@lru_cache(maxsize=8)
def _usual_probe(causal: bool, besides: Besides) -> Probe:
    probe = ready_probe("usual", "plain", (1, 1, 1, 4, 4, 4, 4), 500, rank=2, causal=causal)
    return next(besides.of([probe]))


@lru_cache(maxsize=8)
def _tiny_probes(kind: str, always: bool, besides: Besides, gradients: bool) -> tuple[Probe, ...]:
    tiny = _tiny_projected() if kind in ("projected", "packed") else _tiny_ready()
    made = tuple(besides.of(map(as_always_causal, tiny) if always else tiny))
    if not gradients:
        return made
    return tuple(with_gradients(one) for one in made if not (one.chunks or _is_extreme(one)))


def _is_extreme(probe: Probe) -> bool:
    return probe.ability in ("range", "hiding", "empty row", "hidden NaN")


def _tiny_projected() -> Iterator[Probe]:
    for width, rows, counts in ((2, 2, (1, 2)), (4, 3, (2,))):
        shapes: dict[str, tuple[int, ...]] = {f"W_{part}": (width, width) for part in "qkvo"}
        shapes |= {f"b_{part}": (width,) for part in "qkvo"}
        for heads in counts:
            yield from projected_probes(shapes, heads, rows=rows)


def _tiny_ready() -> Iterator[Probe]:
    """One head, masks, causal, several heads, a window and a cache; sizes (B, H, G, L, S, D, E)."""
    keep = np.array([[True, False, True], [True, True, False], [False, True, True]])
    last = np.array([True, True, False])[None, None, None]
    two = np.array([[True, False], [True, True]])
    texts, late = two[:, None, None], dict(causal=True, offset=1)
    window, chunks = dict(causal=True, window=2), dict(causal=True, chunks=(2, 2))
    later = window | dict(offset=2)
    for name, ability, sizes, seed, rank, more in (
        ("2 queries, 2 keys", "plain", (1, 1, 1, 2, 2, 2, 2), 501, 2, {}),
        ("3 queries, 3 keys", "plain", (1, 1, 1, 3, 3, 2, 2), 504, 2, {}),
        ("1 query, 3 keys", "rectangular", (1, 1, 1, 1, 3, 2, 2), 505, 2, {}),
        ("2 queries, 3 keys", "rectangular", (1, 1, 1, 2, 3, 2, 1), 505, 2, {}),
        ("a mask", "mask", (1, 1, 1, 3, 3, 2, 2), 506, 2, dict(keep=keep)),
        ("causal", "causal", (1, 1, 1, 3, 3, 2, 2), 507, 2, dict(causal=True)),
        ("causal, 2 queries, 3 keys", "causal", (1, 1, 1, 2, 3, 2, 2), 508, 2, late),
        ("causal, 2 queries, 3 keys", "causal", (1, 1, 1, 2, 3, 2, 2), 508, 2, dict(causal=True)),
        ("padding", "key mask", (1, 1, 1, 3, 3, 2, 2), 509, 2, dict(keep=last)),
        ("2 heads", "heads", (1, 2, 2, 2, 2, 2, 2), 510, 3, {}),
        ("2 heads, width 3", "heads", (1, 2, 2, 2, 2, 3, 2), 510, 3, {}),
        ("4 heads, 2 key heads", "grouped", (1, 4, 2, 2, 2, 2, 2), 511, 3, {}),
        ("2 heads", "heads", (1, 2, 2, 2, 2, 2, 2), 510, 4, {}),
        ("2 heads, width 3", "heads", (1, 2, 2, 2, 2, 3, 2), 510, 4, {}),
        ("4 heads, 2 key heads", "grouped", (1, 4, 2, 2, 2, 2, 2), 511, 4, {}),
        ("2 heads, 2 texts", "heads", (2, 2, 2, 2, 2, 2, 2), 512, 4, {}),
        ("3 heads, 3 texts", "heads", (3, 3, 3, 3, 3, 3, 3), 513, 4, {}),
        ("3 heads", "heads", (1, 3, 3, 3, 3, 3, 3), 513, 3, {}),
        ("padding, 2 texts", "key mask", (2, 2, 2, 2, 2, 2, 2), 514, 4, dict(keep=texts)),
        ("a mask, 2 heads", "mask", (1, 2, 2, 2, 2, 2, 2), 515, 4, dict(keep=two)),
        ("a window of 2", "window", (1, 1, 1, 4, 4, 2, 2), 516, 2, window),
        ("a window of 2, 2 queries", "window", (1, 1, 1, 2, 4, 2, 2), 517, 2, later),
        ("a cache, 2 tokens and 2 more", "cache", (1, 1, 1, 4, 4, 2, 2), 518, 2, chunks),
    ):
        yield ready_probe(name, ability, sizes, seed, rank=rank, **more)
    yield from extreme_probes(np.dtype(np.float64), masks=True)


def _departure(probe: Probe, variant: Variant) -> tuple[str | None, dict[str, Array]]:
    """The first step that differs from the textbook, None if the results agree; and all values."""
    values = evaluate(probe, variant)
    if _equal(probe.result(values), probe.result(probe.right)):
        return None, values
    gone = (name for name, right in probe.right.items() if not _equal(values[name], right))
    return next(gone, None), values


def _equal(first: Array, second: Array, rtol: float = 1e-9, atol: float = 1e-12) -> bool:
    return bool(np.allclose(first, second, rtol=rtol, atol=atol, equal_nan=True))


def _example(probe: Probe, departs: str, values: Values) -> Example:
    """The head and batch element with the largest difference, in numbers."""
    right, result = probe.right, probe.result_step
    if isinstance(probe, GradientProbe):
        names = [f"d_{name}" for names in probe.groups_of_inputs for name in names]
        result = next((n for n in names if not _equal(values[n], right[n])), names[0])
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(np.abs(values[result] - right[result]), nan=np.inf)
    batch = int(apart.reshape(len(apart), -1).max(-1).argmax())
    head = 0
    if apart.ndim == 4:
        head = int(apart[batch].reshape(apart.shape[1], -1).max(-1).argmax())
    declared = probe.declared

    def matrix(values: Values, name: str) -> Matrix:
        array = np.atleast_1d(probe.part(values[name], declared[name].axes, batch, head))
        rows = array[:, None] if array.ndim == 1 else array
        return tuple(tuple(float(number) for number in row) for row in rows)

    def shown(name: str, wrong: Matrix | None = None) -> Shown:
        step = declared[name]
        return Shown(name, step.symbol, step.formula, matrix(right, name), wrong)

    given = ("embeddings", "queries", "keys", "values", f"d_{probe.result_step}")
    inputs = [name for name in given if name in probe.inputs]
    names = [departs, *(name for name in ("weights", result) if name != departs)]
    steps = [shown(name, matrix(values, name)) for name in names]
    steps = [replace(step, departs=step.step == departs) for step in steps]
    title = [probe.name]
    if probe.sizes["B"] > 1:
        title.append(f"batch element {batch}")
    if probe.sizes["H"] > 1 and apart.ndim == 4:
        title.append(f"head {head}")
    return Example(", ".join(title), tuple(map(shown, inputs)), tuple(steps))
