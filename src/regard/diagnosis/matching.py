"""Which entry of the catalogue computes what somebody's attention computed.

Owns the comparison of answers with candidates: one mistake, then two at once, then the nearest.
Must not know how a function is called.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.diagnosis.convention_search import UNITS, agrees
from regard.diagnosis.mistakes import CATALOGUE
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.probe import RIGHT, Probe, Variant, walk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# How much of a processor's time the search for two mistakes at once may take.
PAIR_SECONDS = 2.0


Entry = tuple[Mistake, Variant]


@dataclass(frozen=True, eq=False)
class Seen:
    """What a function gave for one probe."""

    probe: Probe
    output: Array


@dataclass(eq=False)
class Candidates:
    """What every candidate gives for every probe, computed once for all hypotheses."""

    results: dict[tuple[Probe, Variant], Array] = field(default_factory=dict)
    pairs: dict[tuple[Variant, Variant], Variant] = field(default_factory=dict)

    def result(self, probe: Probe, variant: Variant) -> Array:
        """What a candidate gives for a probe."""
        key = (probe, variant)
        if key not in self.results:
            self.results[key] = probe.result(walk(probe, variant))
        return self.results[key]

    def both(self, one: Variant, other: Variant) -> Variant:
        """Two candidates at once."""
        if (one, other) not in self.pairs:
            self.pairs[one, other] = one | other
        return self.pairs[one, other]


@dataclass(eq=False)
class Matcher:
    """The answers under one hypothesis of how a function is called."""

    seen: Sequence[Seen]
    unit: float
    candidates: Candidates
    practical: bool = False  # fewer digits than the dtype has: a bound that nothing hides behind

    def expected(self, number: int, variant: Variant) -> Array:
        """What a candidate gives for one of the probes."""
        return self.candidates.result(self.seen[number].probe, variant)

    def agrees(self, number: int, variant: Variant) -> bool:
        """Whether a candidate gives what the function gave."""
        seen = self.seen[number]
        expected = self.expected(number, variant)
        bound = seen.probe.practical_tolerance if self.practical else seen.probe.tolerance
        tolerance = bound(self.unit)
        if np.isfinite(expected).any():
            # A wrong result may be larger than any right one; its rounding is then, too.
            tolerance *= max(1.0, float(np.abs(expected[np.isfinite(expected)]).max()))
        return agrees(seen.output, expected, tolerance)

    def alters(self, number: int, variant: Variant) -> bool:
        """Whether a candidate differs from the right attention on a probe."""
        probe = self.seen[number].probe
        expected, right = self.expected(number, variant), self.expected(number, RIGHT)
        return not agrees(expected, right, probe.tolerance(UNITS["float32"]))

    @cached_property
    def wrong(self) -> list[int]:
        """The probes on which the function is not right."""
        return [n for n in range(len(self.seen)) if not self.agrees(n, RIGHT)]

    @cached_property
    def of_matrices(self) -> Matcher:
        """Without single queries, where the function is wrong on matrices too.

        Whoever writes for matrices takes (D,) by accident, and an axis counted from the left (the
        0 in sum(axis=0), in q.shape[0]) is then another one.
        """
        seen = [one for one in self.seen if one.probe.rank > 1]
        if not 0 < len(seen) < len(self.seen):
            return self
        fewer = Matcher(seen, self.unit, self.candidates, self.practical)
        return fewer if fewer.wrong else self

    def fits(self, variant: Variant, numbers: Sequence[int]) -> bool:
        """Whether a candidate explains all of these answers."""
        return all(self.agrees(number, variant) for number in numbers)


def single(matcher: Matcher) -> Entry | None:
    """The first mistake that explains every answer."""
    order = _telling_first(matcher)
    catalogue: Sequence[Mistake] = CATALOGUE
    if "embeddings" in matcher.seen[0].probe.inputs:
        # Keys projected by W_q are the queries again: the line to change is in the projection.
        catalogue = sorted(catalogue, key=lambda one: one.family != "heads and projections")
    for mistake in catalogue:
        for variant in mistake.variants:
            if matcher.fits(variant, order):
                return mistake, variant
    return None


def _telling_first(matcher: Matcher) -> list[int]:
    """The wrong answers before the right ones, small probes before large."""
    wrong = matcher.wrong
    right = [n for n in range(len(matcher.seen)) if n not in wrong]

    def simplicity(number: int) -> tuple[bool, int]:
        probe = matcher.seen[number].probe
        return probe.has_rules, matcher.seen[number].output.size

    return sorted(wrong, key=simplicity) + right


def pair(matchers: Sequence[Matcher]) -> tuple[int, tuple[Entry, Entry]] | None:
    """Two mistakes that explain every answer under one of the hypotheses, and which one it is.

    First those of which one alone explains the simplest answer, then those that meet there.
    """
    deadline = time.process_time() + PAIR_SECONDS
    for meeting in (False, True):
        for number, matcher in enumerate(matchers):
            found = _pair(matcher, meeting, deadline)
            if found is not None:
                return number, found
    return None


def _pair(matcher: Matcher, meeting: bool, deadline: float) -> tuple[Entry, Entry] | None:
    order = _telling_first(matcher)
    first = order[0]
    ways = [(mistake, variant) for mistake in CATALOGUE for variant in mistake.variants[:2]]
    touching = [(m, v) for m, v in ways if matcher.alters(first, v)]
    for n, (one, own) in enumerate(touching):
        alone = matcher.agrees(first, own)
        if alone == meeting:
            continue
        # What one of them leaves unexplained, the other has to explain.
        left = [first] if meeting else [k for k in order if not matcher.agrees(k, own)]
        for other, its in touching[:n] if meeting else ways:
            if time.process_time() > deadline:
                return None
            if one is other or own.replaced.keys() & its.replaced.keys() or not left:
                continue
            both = matcher.candidates.both(own, its)
            if matcher.agrees(left[0], both) and matcher.fits(both, order):
                return (one, own), (other, its)
    return None


def nearest(matcher: Matcher) -> tuple[Entry, float]:
    """The mistake that explains most answers, then the one whose numbers are closest.

    With it the share of the answers that it explains; 0 if none of those is a wrong one.
    """
    best: tuple[tuple[float, float], Entry] | None = None
    for mistake in CATALOGUE:
        for variant in mistake.variants[:2]:
            if not any(matcher.alters(n, variant) for n in matcher.wrong):
                continue
            agreeing = sum(matcher.agrees(n, variant) for n in range(len(matcher.seen)))
            apart = float(np.mean([_distance(matcher, n, variant) for n in matcher.wrong]))
            score = (agreeing, -apart)
            if best is None or score > best[0]:
                best = (score, (mistake, variant))
    assert best is not None
    (share, _), entry = best
    explains = any(matcher.agrees(number, entry[1]) for number in matcher.wrong)
    return entry, share / len(matcher.seen) if explains else 0.0


def _distance(matcher: Matcher, number: int, variant: Variant) -> float:
    got, expected = matcher.seen[number].output, matcher.expected(number, variant)
    right = matcher.expected(number, RIGHT)
    with np.errstate(all="ignore"):
        apart = np.abs(got - expected).max() / max(float(np.abs(right).max()), 1e-30)
    return float(np.nan_to_num(min(apart, 10.0), nan=10.0))
