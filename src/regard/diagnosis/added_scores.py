"""Numbers that a function adds to its scores by the places of query and key, by looking at them.

A learned table of distances, as in Swin and T5, or rows of relative positions that meet the query,
as in Transformer-XL: what is added is read from the scores that the softmax gets, and counts as
given. Must not know mistakes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.arguments import NotOfferedError, arguments_for
from regard.diagnosis.convention import Convention, Question
from regard.diagnosis.probe import Probe
from regard.diagnosis.signature import LATENTS
from regard.diagnosis.under_test import FunctionUnderTest

# Code that adds nothing by place has none of these words.
WORDS = re.compile(
    r"relative|rel_|_rel|bias|position|pos_|_pos|dist|alibi|slope|decay|edge|spatial|bucket|offset",
    re.IGNORECASE,
)
LOW = -1e3  # below this a cell is hidden
LARGEST_PROBE = 2**15  # cells of the scores that are looked at


@dataclass(frozen=True, eq=False)
class AddedScores:
    """What is added to the scores of a probe by the places of its queries and keys."""

    tested: FunctionUnderTest
    conventions: Sequence[Convention]
    by: str  # what it depends on: the distance, or the places

    def __str__(self) -> str:
        return f"numbers added to the scores by the {self.by} of query and key (not judged)"

    def of(self, probe: Probe) -> Array | None:
        """The numbers (B, H, L, S), seen without the probe's rules; None if they are not seen."""
        asked = ((c, p) for c in self.conventions for p in self.tested.probes_for(c))
        found = next((pair for pair in asked if pair[1].name == probe.name), None)
        if found is None:
            return None
        own, bare = found[0], _without_rules(*found)
        scores = scores_inside(self.tested, own, bare)
        if scores is None:
            return None
        added = scores - _right(self.tested, bare)
        return np.where(bare.visible & (scores > LOW), added, 0.0)


def added_scores(
    tested: FunctionUnderTest, conventions: Sequence[Convention]
) -> AddedScores | None:
    """What a function adds to its scores, if that is a matter of places alone; else None."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    if not WORDS.search(code) or LATENTS in tested.callee.weights or tested.of_gradients:
        return None
    convention = max(conventions, key=lambda one: len(one.layout))
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or probe.chunks or not probe.is_plain or probe.sizes["L"] < 3:
        return None
    by = _depends_on(tested, convention, _without_rules(convention, probe))
    return None if by is None else AddedScores(tested, conventions, by)


def _without_rules(convention: Convention, probe: Probe) -> Probe:
    causal = probe.causal and convention.causal_always
    inputs = {name: array for name, array in probe.inputs.items() if name != "bias"}
    bare = replace(probe, inputs=inputs, keep=None, window=None, chunks=(), causal=causal)
    return replace(bare, name=f"{probe.name}, without rules")


def _right(tested: FunctionUnderTest, probe: Probe) -> Array:
    """The scores as they are scaled, before anything is added or hidden."""
    right = probe.right
    unscaled = tested.callee.unscaled and probe.scale is None
    return right["scores"] if unscaled else right["scaled"]


def scores_inside(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> Array | None:
    """The scores (B, H, L, S) that the softmax of a function gets for a probe, if it is seen."""
    sizes = [probe.sizes[axis] for axis in "BHLS"]
    if math.prod(sizes) > LARGEST_PROBE:
        return None
    try:
        given = arguments_for(tested.callee, convention, probe)
    except NotOfferedError:
        return None
    question = Question(probe.name, (given,), reading=tested.callee.number, looks=True)
    result = tested.put(question)[-1]
    arrays = [one.numbers for one in result.arrays if one.numbers is not None]
    return None if result.problem else next(_arranged(arrays, probe), None)


def _arranged(arrays: Sequence[Array], probe: Probe) -> Iterator[Array]:
    """Scores with the axes (B, H, L, S), also of heads or texts that come one after the other."""
    size = probe.sizes
    whole = tuple(size[axis] for axis in "BHLS")
    for array in arrays:
        if array.size == math.prod(whole) and array.shape[-1] == size["S"]:
            own = tuple(n for n in array.shape[:-1] if n > 1)
            for order in itertools.permutations(range(3)):
                if tuple(whole[n] for n in order if whole[n] > 1) == own:
                    turned = array.reshape([*(whole[n] for n in order), size["S"]])
                    yield turned.transpose([*np.argsort(order), 3])
                    break
            else:
                if array.shape[-2:] == whole[-2:]:
                    yield array.reshape(whole)
    cells = [one for one in arrays if one.shape[-2:] == whole[-2:]]
    for lead in ((0, 1), (0,), (1,)):
        rest = tuple(whole[n] for n in (0, 1) if n not in lead)
        own_count = math.prod(whole[n] for n in lead)
        parts = [one for one in cells if one.size == math.prod(whole) // own_count]
        if own_count > 1 and len(parts) == own_count:
            stacked = np.stack([part.reshape(*rest, *whole[2:]) for part in parts])
            if lead == (1,):
                yield stacked.swapaxes(0, 1)
            else:
                yield stacked.reshape(whole)


def _depends_on(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> str | None:
    """What the numbers depend on that are added to the scores of different texts."""
    visible = probe.visible[0, 0]
    rows, keys = np.nonzero(visible)
    for of_rows in (False, True):
        unknown = 2 + 2 * probe.sizes["D"] * of_rows
        samples: list[tuple[Array, Array, Array, Array]] = []
        for seed in itertools.count():
            if len(samples) >= unknown + 4:
                break
            own = _drawn(probe, seed)
            scores = scores_inside(tested, convention, own)
            if scores is None or not np.isfinite(scores[:, :, visible]).all():
                return None
            if scores[:, :, visible].min() < LOW:  # it hides what nothing asked it to hide
                return None
            queries, of_keys = own.right["queries"], own.right["keys"]
            of_keys = of_keys.repeat(queries.shape[1] // of_keys.shape[1], 1)
            samples += list(zip(scores, _right(tested, own), queries, of_keys, strict=True))
        found = _solved(samples, rows, keys, of_rows=of_rows)
        if found is not None:
            return _by(found, rows, keys, probe.sizes)
    return None


def _drawn(probe: Probe, seed: int) -> Probe:
    """The same problem with other numbers."""
    rng = np.random.default_rng(700 + seed)
    names = ("embeddings", "context", "queries", "keys", "values")
    drawn = {n: rng.normal(size=a.shape) for n, a in probe.inputs.items() if n in names}
    name = f"{probe.name}, drawn {seed}"
    return replace(probe, inputs={**probe.inputs, **drawn}, name=name)


def _solved(
    samples: Sequence[tuple[Array, Array, Array, Array]],
    rows: Array,
    keys: Array,
    *,
    of_rows: bool,
) -> Array | None:
    """What is added in each visible cell, (H, cells, unknowns), if that explains all samples.

    A constant, and with `of_rows` a vector that meets the query and one that meets the key.
    """
    scores, right, queries, of_keys = (np.stack(one) for one in zip(*samples, strict=True))
    heads = scores.shape[1]
    found, factors = [], []
    for head in range(heads):
        for row, key in zip(rows, keys, strict=True):
            known = [right[:, head, row, key, None], np.ones((len(scores), 1))]
            if of_rows:
                known += [queries[:, head, row], of_keys[:, head, key]]
            table, own = np.concatenate(known, -1), scores[:, head, row, key]
            solution = np.linalg.lstsq(table, own, rcond=None)[0]
            size = max(1.0, float(np.abs(own).max()))
            if np.abs(table @ solution - own).max() > 1e-5 * size:
                return None
            factors.append(solution[0])
            found.append(solution[1:])
    if np.ptp(factors) > 1e-3 * max(1.0, float(np.abs(factors).max())):
        return None
    return np.reshape(found, (heads, len(rows), -1))


def _by(found: Array, rows: Array, keys: Array, size: dict[str, int]) -> str | None:
    """Whether numbers for cells are a matter of the distance, or of the places; None of neither."""
    near = 1e-4 * max(1.0, float(np.abs(found).max()))
    if np.ptp(found, 1).max() < near:  # the same everywhere, and none is no position
        return None
    side = math.isqrt(size["S"])
    apart = [rows - keys]
    if side > 1 and side**2 == size["S"] == size["L"]:
        apart.append((rows // side - keys // side) * size["S"] + rows % side - keys % side)
    for distance in apart:
        same = (found[:, distance == one] for one in np.unique(distance))
        if all(np.ptp(one, 1).max(initial=0) < near for one in same):
            return "distance"
    return "places"
