"""Which entry of the catalogue computes what a function computed.

Compares outputs with candidates: one mistake, then two at once, then the nearest. Must not know
how a function is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.convention import agrees
from regard.diagnosis.mistakes import catalogue_of
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.probe import RIGHT, UNITS, Probe, Variant

# Processor time that the search for two mistakes at once may take.
PAIR_SECONDS = 2.0

Found = tuple[Mistake, Variant]


@dataclass(frozen=True, eq=False)
class ProbeOutput:
    """What a function returned for one probe."""

    probe: Probe
    output: Array


@dataclass(eq=False)
class Matcher:
    """The outputs under one hypothesis of how a function is called."""

    outputs: Sequence[ProbeOutput]
    unit: float
    practical: bool = False  # below the precision of the dtype: the tolerance is then practical

    def expected(self, number: int, variant: Variant) -> Array:
        """What a candidate returns for one of the probes."""
        return self.outputs[number].probe.output(variant)

    def agrees(self, number: int, variant: Variant) -> bool:
        """Whether a candidate returns what the function did."""
        own = self.outputs[number]
        expected = self.expected(number, variant)
        return agrees(own.output, expected, self.tolerance(own.probe, expected))

    def tolerance(self, probe: Probe, expected: Array) -> float:
        """How far an output may be from what a candidate returns."""
        bound = probe.practical_tolerance if self.practical else probe.tolerance
        tolerance = bound(self.unit)
        if np.isfinite(expected).any():
            # A wrong result may be larger than any right one, and so is its rounding.
            tolerance *= max(1.0, float(np.abs(expected[np.isfinite(expected)]).max()))
        return tolerance

    def alters(self, number: int, variant: Variant) -> bool:
        """Whether a candidate differs from the right attention on a probe."""
        expected, right = self.expected(number, variant), self.expected(number, RIGHT)
        tolerance = self.outputs[number].probe.tolerance(UNITS["float32"])
        return not agrees(expected, right, tolerance)

    @cached_property
    def catalogue(self) -> Sequence[Mistake]:
        """The mistakes that a function of this mechanism may have."""
        return catalogue_of(self.outputs[0].probe)

    @cached_property
    def ways(self) -> list[Found]:
        """The usual ways of each, for searches in which none fits exactly or two do at once."""
        return [(one, variant) for one in self.catalogue for variant in one.variants[:2]]

    @cached_property
    def wrong(self) -> list[int]:
        """The probes on which the function is not right."""
        return [n for n in range(len(self.outputs)) if not self.agrees(n, RIGHT)]

    @cached_property
    def informative_first(self) -> list[int]:
        """The wrong outputs before the right ones, small probes before large."""

        def simplicity(number: int) -> tuple[bool, int]:
            own = self.outputs[number]
            return own.probe.has_rules, own.output.size

        right = [n for n in range(len(self.outputs)) if n not in self.wrong]
        return sorted(self.wrong, key=simplicity) + right

    @cached_property
    def without_single_queries(self) -> Matcher:
        """Without probes of one query, if the function is wrong on others too.

        A function for matrices may take (D,) by accident, and an axis that it counts from the left
        (the 0 in sum(axis=0), in q.shape[0]) is then another one.
        """
        outputs = [one for one in self.outputs if one.probe.rank > 1]
        if not 0 < len(outputs) < len(self.outputs):
            return self
        fewer = Matcher(outputs, self.unit, self.practical)
        return fewer if fewer.wrong else self

    def fits(self, variant: Variant) -> bool:
        """Whether a candidate explains every output."""
        return all(self.agrees(number, variant) for number in self.informative_first)


def single(matcher: Matcher) -> Found | None:
    """The first mistake that explains every output."""
    catalogue = matcher.catalogue
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
    deadline = time.process_time() + PAIR_SECONDS
    both = cache(Variant.__or__)
    for meeting in (False, True):
        for number, matcher in enumerate(matchers):
            found = _pair(matcher, meeting, deadline, both)
            if found is not None:
                return number, found
    return None


def _pair(
    matcher: Matcher,
    meeting: bool,
    deadline: float,
    both: Callable[[Variant, Variant], Variant],
) -> tuple[Found, Found] | None:
    order = matcher.informative_first
    first = order[0]
    touching = [(m, v) for m, v in matcher.ways if matcher.alters(first, v)]
    for n, (one, own) in enumerate(touching):
        if matcher.agrees(first, own) == meeting:
            continue
        # The second mistake has to explain what the first one does not.
        left = [first] if meeting else [k for k in order if not matcher.agrees(k, own)]
        for other, its in touching[:n] if meeting else matcher.ways:
            if time.process_time() > deadline:
                return None
            if one is other or own.replaced.keys() & its.replaced.keys() or not left:
                continue
            variant = both(own, its)
            if matcher.agrees(left[0], variant) and matcher.fits(variant):
                return (one, own), (other, its)
    return None


def nearest(matcher: Matcher) -> tuple[Found, float]:
    """The mistake that explains most answers, then the one whose numbers are closest.

    With it the share of the answers that it explains; 0 if none of those is a wrong one.
    """
    every = range(len(matcher.outputs))

    def score(way: Found) -> tuple[int, float]:
        apart = float(np.mean([_distance(matcher, n, way[1]) for n in matcher.wrong]))
        return sum(matcher.agrees(n, way[1]) for n in every), -apart

    altering = (
        one for one in matcher.ways if any(matcher.alters(n, one[1]) for n in matcher.wrong)
    )
    best = max(altering, key=score)
    explains = any(matcher.agrees(number, best[1]) for number in matcher.wrong)
    return best, score(best)[0] / len(every) if explains else 0.0


def _distance(matcher: Matcher, number: int, variant: Variant) -> float:
    got, expected = matcher.outputs[number].output, matcher.expected(number, variant)
    right = matcher.expected(number, RIGHT)
    with np.errstate(all="ignore"):
        apart = np.abs(got - expected).max() / max(float(np.abs(right).max()), 1e-30)
    return float(np.nan_to_num(min(apart, 10.0), nan=10.0))
