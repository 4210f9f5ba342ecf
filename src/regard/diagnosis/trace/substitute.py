"""Which value of a run takes the place of a step: the textbook goes on with it to the result.

A wrong value takes the place of a step, and the steps after it are computed of it. Where that gives
what the run gave, everything after the value is right, and what made it is not. Must not know how
values were made.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.probe import Variant, evaluate
from regard.diagnosis.trace.find import LOW, Sought, downstream
from regard.diagnosis.trace.notes import Record
from regard.diagnosis.trace.put import is_mask
from regard.diagnosis.trace.traced import RIGHT, Traced, alike

MOST_CANDIDATES = 40  # for one step
MOST_ARRANGEMENTS = 6
MOST_PAIRS = 60


@dataclass(frozen=True)
class Substitute:
    """A value, or those of all rounds of a loop, that the code takes for these steps."""

    steps: tuple[str, ...]
    records: tuple[Record, ...]
    values: Mapping[str, Array]  # of every step, as the textbook goes on with it


class Substitutes:
    """The substitutes in one wrong run."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.after: set[Record] = set()

    @cached_property
    def found(self) -> Substitute | None:
        """The one for the earliest steps."""
        traced = self.traced
        if not traced.gone:
            return None
        first = traced.gone[0]
        before = [x for x in traced.before(first) if traced.steps[x].kind != "given"]
        # Numbers of a mechanism, such as slopes or frequencies, may be wrong themselves.
        own = (x for x in traced.made_of(first) if not traced.found.get(x, True))
        before += [x for x in own if traced.steps[x].axes in (("H",), ("D",))]
        # What is right may be changed once more.
        names = [*before, *(["exponentials"] if first == "weights" else []), *traced.gone]
        names = [x for x in traced.order if x in names]
        # What is made of no right step, such as a mask, is none.
        read = list(dict.fromkeys(x for name in traced.gone for x in traced.before(name)))
        sources = {one for x in read for one in traced.found[x]}
        self.after = downstream(traced.cone, sources) | sources
        frontier = [x for x in traced.gone if not set(traced.gone) & traced.made_of(x)]
        if len(frontier) == 2 and (both := self._of_both(*frontier)):
            return both
        one = next((one for one in map(self._last_of, names) if one is not None), None)
        if one is not None and one.steps[0] not in traced.gone[len(frontier) :]:
            return one
        # Not the first step that is not there, but a later one: what is before is wrong twice.
        pairs = itertools.combinations(read, 2)
        return next((both for two in pairs if (both := self._of_both(*two))), one)

    def _last_of(self, name: str) -> Substitute | None:
        """The last value that takes the place of a step: code may change one before it is used.

        One that differs in what is free there is the same one.
        """
        found: Substitute | None = None
        tried: dict[bytes, Mapping[str, Array] | None] = {}
        for records, value, _ in self.candidates(name):
            own = value.tobytes()
            if own not in tried:
                tried[own] = self.goes_on({name: value})
            values = tried[own]
            if values is None:
                continue
            if found is not None and self._follows(found, value):
                continue
            later = found is None or not self._same(name, found.values[name], value)
            if found is not None and name == "masked":
                later |= self.masked.isdisjoint(found.records) > self.masked.isdisjoint(records)
            if later:
                found = Substitute((name,), records, values)
        return found

    def _follows(self, found: Substitute, value: Array) -> bool:
        """Whether a value is what the textbook makes of a substitute, and no other one."""
        name = found.steps[0]
        rest = (x for x in self.traced.order if x != name and name in self.traced.made_of(x))
        own = (found.values[x] for x in rest)
        return any(x.shape == value.shape and np.allclose(x, value, RIGHT, RIGHT) for x in own)

    @cached_property
    def masked(self) -> set[Record]:
        """The values that are made of a mask."""
        cone, probe = self.traced.cone, self.traced.problem.probe
        rules = [np.broadcast_to(one, probe.visible.shape) for one in probe.rules.values()]
        masks = (one for one in cone if any(is_mask(one.value, cells) for cells in rules))
        return downstream(cone, masks)

    def _same(self, name: str, one: Array, other: Array) -> bool:
        seen = self.traced.steps[name].seen
        if seen is not None and name in self.traced.made_of("masked"):
            one, other = (np.where(seen, x, -np.inf) for x in (one, other))
        if name in self.traced.made_of("weights") and one.ndim == 4:
            one, other = (np.maximum(x - x.max(-1, keepdims=True), -LOW) for x in (one, other))
        if name == "exponentials":
            one, other = (x / x.sum(-1, keepdims=True) for x in (one, other))
        return bool(np.allclose(one, other, RIGHT, RIGHT, equal_nan=True))

    def _of_both(self, first: str, second: str) -> Substitute | None:
        """Values of two steps that do not depend on each other, as the same helper makes them."""
        both = itertools.product(self.candidates(first), self.candidates(second))
        pairs = (
            (own, other)
            for own, other in both
            if own[0][0].node == other[0][0].node and own[0] is not other[0] and own[2] == other[2]
        )
        for own, other in itertools.islice(pairs, MOST_PAIRS):
            values = self.goes_on({first: own[1], second: other[1]})
            if values is not None:
                return Substitute((first, second), (*own[0], *other[0]), values)
        return None

    def candidates(self, name: str) -> Iterator[tuple[tuple[Record, ...], Array, int]]:
        """Values of a step's size in each layout, by its number, in the order they were made."""
        step, count = self.traced.steps[name], 0
        for own in self._groups:
            size = sum(one.value.size for one in own)
            if size != step.value.size or any(one.kind != "f" for one in own):
                continue
            if step.kind != "given" and self.after and self.after.isdisjoint(own):
                continue
            count += 1
            if count > MOST_CANDIDATES:
                return
            value = own[0].value if len(own) == 1 else np.stack([one.value for one in own])
            for number, arranged in enumerate(arranged_as(value, step)):
                yield own, arranged, number

    @cached_property
    def _groups(self) -> list[tuple[Record, ...]]:
        """Each value alone, and those of all rounds of a loop, where they have one shape."""
        by_node: dict[int, list[Record]] = {}
        for one in self.traced.cone:
            by_node.setdefault(one.node, []).append(one)
        loops = [tuple(own) for own in by_node.values() if len(own) > 1]
        loops = [own for own in loops if len({one.value.shape for one in own}) == 1]
        alone = [(one,) for one in self.traced.cone]
        return sorted([*alone, *loops], key=lambda own: own[-1].number)

    def goes_on(self, instead: Mapping[str, Array]) -> Mapping[str, Array] | None:
        """The steps after other values for some, if they end in what the run gave."""
        traced = self.traced
        if all(alike(own, traced.steps[name].value) for name, own in instead.items()):
            return None
        replaced = {name: (lambda values, probe, own=own: own) for name, own in instead.items()}
        # From the mask on, what a hidden cell has is used where the code uses it.
        hides = not set(instead) & {"masked", "exponentials", "weights"}
        values = evaluate(traced.problem.probe, Variant(replaced, absent=hides))
        return values if traced.is_result(values) else None


def arranged_as(value: Array, step: Sought) -> Iterator[Array]:
    """A value with the axes of a step, which it may have in any order and joined."""
    small = tuple(n for n in value.shape if n != 1)
    whole = step.value.shape
    inner = [axis for axis, n in enumerate(whole) if n != 1]
    seen = 0
    for order in itertools.permutations(inner):
        lengths = tuple(whole[axis] for axis in order)
        if not joins(lengths, small) and not joins(small, lengths):
            continue
        own = value.reshape(lengths).transpose(np.argsort(order)) if order else value
        yield own.reshape(whole)
        seen += 1
        if seen == MOST_ARRANGEMENTS:
            return


def joins(own: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether axes of these lengths, some joined with the next, have the wanted lengths."""
    left = list(own)
    for length in wanted:
        product = 1
        while left and product < length:
            product *= left.pop(0)
        if product != length:
            return False
    return not left
