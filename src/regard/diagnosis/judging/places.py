"""Which keys a query sees by its place in a map: windows, rows and columns, neighbourhoods.

Measured: each token is changed in turn, and the rows that change see it. Must not know mistakes but
by their names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.probe import Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.images import FIRST, LAST, sides_of

WORDS = re.compile(r"window|neighbou?r|axial|\bgrid|local|stripe|shift|roll|dilat", re.IGNORECASE)
MAPS = re.compile(r"\(\s*\w+,(?:\s*\w+,)?\s*(H|height),\s*(W|width),\s*\w+\s*\)|\bh, w\b", re.I)
APART = re.compile(r"mask|not see|neighbou?rs|separate|wrap", re.IGNORECASE)
ROLLS = re.compile(r"\broll\(")
LARGE = 64  # pixels, of which windows of a side of 4 have a fourth
MOST_TOKENS = 72
NEAR = 1e-5


@dataclass(frozen=True, eq=False)
class SeenPlaces:
    """Which keys each query of a text of some length sees, (L, S), as they were measured."""

    tested: FunctionUnderTest
    convention: Convention
    misplaced: bool = False  # whether what pixels get is put at other pixels
    fault: str = ""
    known: dict[int, Array | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return "keys that are hidden by their places in a map (not judged)"

    def of(self, probe: Probe) -> Array | None:
        """The cells that are seen in a probe; None if that is not known."""
        length = probe.sizes["S"]
        if length != probe.sizes["L"] or length > MOST_TOKENS:
            return None
        if length not in self.known:
            self.known[length] = _measured(self.tested, self.convention, probe)
        seen = self.known[length]
        return _same_sets(seen) if seen is not None and self.misplaced else seen


def _same_sets(seen: Array) -> Array | None:
    """Which tokens are in one set, if what rows see are sets that share none; else None."""
    sets = np.unique(seen, axis=0)
    apart = (sets.sum(0) == 1).all()
    return np.asarray(sets.T.astype(int) @ sets.astype(int) > 0) if apart else None


def are_in_another_order(output: Array, right: Array) -> bool:
    """Whether the rows of an output (B, L, E) are the right ones in another order."""
    near = NEAR * max(1.0, float(np.abs(right).max()))
    apart = np.abs(output[0][:, None] - right[0][None]).max(-1)
    order = apart.argmin(1)
    is_order = len(np.unique(order)) == len(order) and (order != np.arange(len(order))).any()
    return bool(is_order and np.abs(output - right[:, order]).max() < near)


def _rolled(length: int, by: tuple[int, int]) -> Array:
    """The token of which each row of a rolled map is."""
    places = np.arange(length).reshape(sides_of(length))
    return np.roll(places, by, (0, 1)).ravel()


def seen_places(
    tested: FunctionUnderTest, convention: Convention, probes: Sequence[Probe]
) -> Iterator[SeenPlaces]:
    """What is seen in maps by place: what is meant, or what a mistake makes of it."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    maps = FIRST.search(code) or LAST.search(code) or MAPS.search(code)
    free = (one for one in probes if _is_free(one))
    probe = max(free, key=lambda one: one.sizes["L"], default=None)
    if not (WORDS.search(code) and maps) or probe is None or tested.of_gradients:
        return
    plain = SeenPlaces(tested, convention)
    seen = plain.of(probe)
    if seen is None or seen.all():
        return
    sides = sides_of(len(seen))
    if _is_of_rectangles(seen, sides):
        yield plain
    elif np.diagonal(seen).all():
        if _is_of_rectangles_that_wrap(seen, sides) and APART.search(code):
            yield replace(plain, fault="window_wraps_around", known=plain.known)
    elif (sets := _same_sets(seen)) is not None and _is_of_rectangles(sets, sides):
        yield replace(plain, misplaced=True, fault="pixels_misplaced", known=plain.known)


def larger(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> Probe | None:
    """The same of a map with more pixels, for code that rolls it; None if it does not take that."""
    code = "\n".join(text for _, text in tested.callee.blocks)
    if not ROLLS.search(code) or probe.has_rules or "context" in probe.inputs:
        return None
    rng = np.random.default_rng(77)
    inputs = dict(probe.inputs)
    for name in ("embeddings", "queries", "keys", "values"):
        if name in inputs:
            rows = inputs[name]
            inputs[name] = rng.normal(size=(*rows.shape[:-2], LARGE, rows.shape[-1]))
    found = replace(probe, inputs=inputs, name=f"{LARGE} pixels")
    return found if tested.ask(convention, found).output is not None else None


def _is_free(probe: Probe) -> bool:
    sizes = probe.sizes
    return not probe.has_rules and 8 < sizes["L"] == sizes["S"] <= MOST_TOKENS


def _measured(tested: FunctionUnderTest, convention: Convention, probe: Probe) -> Array | None:
    """Which tokens change which rows of a function's output."""
    names = ("embeddings",) if "embeddings" in probe.inputs else ("keys", "values", "queries")
    bare = replace(probe, keep=None, name=f"{probe.name}, places")
    before = tested.ask(convention, bare).output
    if before is None or "context" in probe.inputs:
        return None
    length, found = probe.sizes["L"], []
    for token in range(length):
        changed = dict(probe.inputs)
        for name in names:
            changed[name] = probe.inputs[name].copy()
            changed[name][..., token, :] += 0.5
        after = tested.ask(convention, replace(bare, inputs=changed)).output
        if after is None:
            return None
        apart = np.abs(after - before).max(-1).reshape(-1, length).max(0)
        found.append(apart > NEAR * max(1.0, float(np.abs(before).max())))
    return np.stack(found, -1)


def _is_of_rectangles(seen: Array, sides: tuple[int, int]) -> bool:
    """Whether each query sees a rectangle of pixels, its own among them.

    All rows and columns of all rectangles are as far apart, as those of windows, and of grids.
    Who is seen sees as well, unless all see as many, as in neighbourhoods that end at a border.
    """
    even = len(np.unique(seen.sum(1))) == 1 or np.array_equal(seen, seen.T)
    found = [_steps(one.reshape(sides)) for one in seen]
    steps = [set(itertools.chain.from_iterable(own)) for own in zip(*found, strict=True)]
    return bool(even and np.diagonal(seen).all()) and all(len(one) < 2 for one in steps)


def _steps(image: Array) -> tuple[set[int], set[int]]:
    """How far apart the rows, and the columns, of pixels are; several if they are no rectangle."""
    rows, columns = image.any(1), image.any(0)
    if not (image == np.asarray(rows)[:, None] & columns).all():
        return {0, 1}, {0, 1}
    down, across = ({*np.diff(np.flatnonzero(one)).tolist()} for one in (rows, columns))
    return down, across


def _is_of_rectangles_that_wrap(seen: Array, sides: tuple[int, int]) -> bool:
    """Whether rectangles go on at the opposite side of the map."""
    rolls = itertools.product(range(sides[0]), range(sides[1]))
    orders = (_rolled(len(seen), by) for by in rolls)
    return any(_is_of_rectangles(seen[np.ix_(own, own)], sides) for own in orders)
