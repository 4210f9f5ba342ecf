"""Which entry of the catalogue computes what a function computed.

Compares outputs with candidates: one mistake, then two at once, then the nearest. Must not know
how a function is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Self

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.diagnosis.calls.convention import agrees
from regard.diagnosis.calls.probe import RIGHT, UNITS, Probe, Variant, evaluate, largest
from regard.diagnosis.judging.built_in import BuiltIn, with_built_in
from regard.diagnosis.mistakes import catalogue_of, mistakes_of_built_in
from regard.diagnosis.mistakes.entry import Mistake

# Pairs of mistakes that are tried at most.
MOST_PAIRS = 2000

# Wrong answers of which the nearest mistake explains one.
MOST_WRONG = 6

Found = tuple[Mistake, Variant]
# What is returned where attention adds nothing: a bias, or what is around it.
NOTHING = Variant({"output": lambda values, probe: np.zeros_like(probe.right["output"])})


@dataclass(frozen=True, eq=False)
class ProbeOutput:
    """What a function returned for one probe."""

    probe: Probe
    output: Array
    empty: Array | None = None  # rows of padding that are as without attention, (B, …, L, 1)

    @classmethod
    def of(cls, probe: Probe, output: Array) -> Self:
        """With what is right in rows of padding to which attention adds 0: nothing reads them."""
        size, keep = probe.sizes, probe.keep
        if keep is None or keep.ndim != 4 or size["L"] != size["S"]:
            return cls(probe, output)
        right, idle = probe.result(probe.right), output == 0
        if right.ndim > 1 and right.shape == output.shape:  # and no gradients, one after the other
            idle |= np.abs(output - probe.output(NOTHING)) <= probe.tolerance(UNITS["float32"])
        real = np.broadcast_to(keep[:, 0, 0, :, None], (size["B"], size["L"], 1))
        real = real if right.ndim == 3 else real[:, None]
        mended = np.where(real | ~idle, output, right)
        is_right = agrees(mended, right, probe.tolerance(UNITS["float32"]))
        if is_right:
            return cls(probe, mended)
        none = ~real & idle.all(-1, keepdims=True)
        return cls(probe, output, none if none.any() else None)


@dataclass(eq=False)
class Matcher:
    """The outputs under one hypothesis of how a function is called."""

    outputs: Sequence[ProbeOutput]
    unit: float
    practical: bool = False  # below the precision of the dtype: the tolerance is then practical
    order: Sequence[int] = ()  # in which outputs are compared, if that is known
    base: Variant = RIGHT  # what is right
    mends_nan: bool = False  # whether the function makes 0 of NaN, afterwards

    def expected(self, number: int, variant: Variant) -> Array:
        """What a candidate returns for one of the probes."""
        return self.outputs[number].probe.output(variant)

    def agrees(self, number: int, variant: Variant) -> bool:
        """Whether a candidate returns what the function did."""
        own, expected = self.outputs[number], self.expected(number, variant)
        if own.empty is not None:
            expected = np.where(own.empty, own.output, expected)
        if self.mends_nan:
            expected = np.where(np.isnan(expected) & (own.output == 0), 0, expected)
        bound = self._bound(own.probe) * own.probe.largest(variant)
        return agrees(own.output, expected, bound)

    def tolerance(self, probe: Probe, expected: Array) -> float:
        """How far an output may be from what a candidate returns."""
        return self._bound(probe) * largest(expected)

    def _bound(self, probe: Probe) -> float:
        """The same where no number is larger than 1."""
        return (probe.practical_tolerance if self.practical else probe.tolerance)(self.unit)

    def alters(self, number: int, variant: Variant) -> bool:
        """Whether a candidate differs from the right attention on a probe."""
        expected, right = self.expected(number, variant), self.expected(number, RIGHT)
        tolerance = self.outputs[number].probe.tolerance(UNITS["float32"])
        return not agrees(expected, right, tolerance)

    @cached_property
    def richest(self) -> Probe:
        """A probe with whatever the function computes besides, by itself or as an option."""
        probes = [one.probe for one in self.outputs]
        return next((one for one in probes if "softcap" in one.inputs), probes[0])

    @cached_property
    def catalogue(self) -> Sequence[Mistake]:
        """The mistakes that a function of this mechanism may have."""
        return catalogue_of(self.richest)

    @cached_property
    def ways(self) -> list[Found]:
        """The usual ways of each, for searches in which none fits exactly or two do at once."""
        several = (one for one in self.catalogue if one.family != "blocks of keys")
        return [(one, variant) for one in several for variant in one.variants[:2]]

    @cached_property
    def wrong(self) -> list[int]:
        """The probes on which the function is not right."""
        return [n for n in range(len(self.outputs)) if not self.agrees(n, self.base)]

    @cached_property
    def informative_first(self) -> Sequence[int]:
        """The wrong outputs before the right ones, small probes before large."""
        if self.order:
            return self.order

        def simplicity(number: int) -> tuple[bool, int]:
            own = self.outputs[number]
            return own.probe.has_rules, own.output.size

        right = [n for n in range(len(self.outputs)) if n not in self.wrong]
        return sorted(self.wrong, key=simplicity) + right

    @cached_property
    def without_accidents(self) -> Matcher:
        """Without outputs for calls that a function may not be made for, if it is wrong on others.

        A function for matrices may take (D,) by accident, and an axis that it counts from the left
        (the 0 in sum(axis=0), in q.shape[0]) is then another one. Fewer key heads may run too.
        """
        outputs = [
            one for one in self.outputs if one.probe.rank > 1 and one.probe.ability != "grouped"
        ]
        if not 0 < len(outputs) < len(self.outputs):
            return self
        fewer = Matcher(outputs, self.unit, self.practical)
        return fewer if fewer.wrong else self

    def with_built_in(self, own: BuiltIn) -> Matcher | None:
        """The same outputs as those of a computation that has this; None if it fits none.

        The most informative come first, so that most candidates end at the first output.
        """
        outputs = (self.outputs[number] for number in self.informative_first)
        probes = ((with_built_in(own, one.probe), one.output) for one in outputs)
        found = [ProbeOutput.of(probe, output) for probe, output in probes if probe is not None]
        in_order = range(len(found))
        return Matcher(found, self.unit, self.practical, in_order) if found else None

    def compute(self, number: int, variant: Variant) -> Array:
        """What a candidate returns for one of the probes, not kept."""
        probe = self.outputs[number].probe
        return probe.result(evaluate(probe, variant))

    @property
    def is_right(self) -> bool:
        """Whether every output is right."""
        return self.fits(RIGHT)

    def fits(self, variant: Variant) -> bool:
        """Whether a candidate explains every output; where NaN becomes 0, not by NaN alone."""
        order = self.informative_first
        if not all(self.agrees(number, variant) for number in order):
            return False
        return not self.mends_nan or not all(
            np.isnan(self.expected(number, variant)).all() for number in order
        )


def single(matcher: Matcher, *, whole: bool = True) -> Found | None:
    """The first mistake that explains every output; without `whole`, one of what is built in."""
    catalogue = matcher.catalogue if whole else mistakes_of_built_in(matcher.richest)
    if "embeddings" in matcher.outputs[0].probe.inputs:
        # Keys projected by W_q equal the queries: the line to change is in the projection.
        catalogue = sorted(catalogue, key=lambda one: one.family != "heads and projections")
    ways = ((mistake, variant) for mistake in catalogue for variant in mistake.variants)
    return next((found for found in ways if matcher.fits(found[1])), None)


def pair(matchers: Sequence[Matcher]) -> tuple[int, tuple[Found, Found]] | None:
    """Two mistakes that explain every output under one of the hypotheses, and its position.

    First pairs of which one mistake alone explains the simplest output, then those that both
    change it.
    """
    pairs = (
        (number, pair)
        for meeting in (False, True)
        for number, matcher in enumerate(matchers)
        for pair in _pairs(matcher, meeting)
    )
    both = cache(Variant.__or__)
    for number, (first, one, other) in islice(pairs, MOST_PAIRS):
        variant = both(one[1], other[1])
        if matchers[number].agrees(first, variant) and matchers[number].fits(variant):
            return number, (one, other)
    return None


def _pairs(matcher: Matcher, meeting: bool) -> Iterator[tuple[int, Found, Found]]:
    """Pairs of mistakes, each with the output that the second one has to explain."""
    order = matcher.informative_first
    first = order[0]
    touching = [way for way in matcher.ways if matcher.alters(first, way[1])]
    for n, one in enumerate(touching):
        if matcher.agrees(first, one[1]) == meeting:
            continue
        # The second mistake has to explain what the first one does not.
        left = first if meeting else next((k for k in order if not matcher.agrees(k, one[1])), None)
        for other in touching[:n] if meeting else matcher.ways:
            apart = one[0] is not other[0] and not one[1].replaced.keys() & other[1].replaced.keys()
            if apart and left is not None:
                yield left, one, other


def nearest(matcher: Matcher) -> tuple[Found, float] | None:
    """The mistake that explains most answers, and the share of the answers that it explains.

    None if none explains a wrong answer.
    """
    every = range(len(matcher.outputs))
    best, most = None, 0
    for way in matcher.ways:
        if any(matcher.agrees(number, way[1]) for number in matcher.wrong[:MOST_WRONG]):
            explained = sum(matcher.agrees(number, way[1]) for number in every)
            best, most = (way, explained) if explained > most else (best, most)
    return None if best is None else (best, most / len(every))
