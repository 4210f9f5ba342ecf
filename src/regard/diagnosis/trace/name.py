"""The name of a mistake, where the textbook with a step replaced gives all that a run gave.

Owns which entries of the catalogue can explain a departure. Must not know lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Variant, evaluate
from regard.diagnosis.mistakes import catalogue_of
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.trace.substitute import Substitute
from regard.diagnosis.trace.traced import Problem, Traced, alike

MOST_VARIANTS = 4000


def named(traced: Traced, substitute: Substitute | None) -> str:
    """The first mistake that gives what the run gave, there and on the other problems."""
    own = _told_apart(traced.problem), traced.result, traced.problem
    others = [(_told_apart(one), result, one) for one, result in traced.elsewhere]
    first = ""
    for mistake, variant in islice(_possible(traced, substitute, own[0]), MOST_VARIANTS):
        values = evaluate(own[0], variant, own[0].last_step)
        if not traced.is_result(values, *own[1:]):
            continue
        if not all(
            traced.is_result(evaluate(probe, variant, probe.last_step), result, problem)
            for probe, result, problem in others
        ):
            continue
        if substitute is None or _has(values, substitute):
            return mistake.name
        first = first or mistake.name
    return first


def _has(values: Mapping[str, Array], substitute: Substitute) -> bool:
    """Whether these are the values of the code where it departs, not in the end alone."""
    own = substitute.values
    return all(alike(np.asarray(values[x]), np.asarray(own[x])) for x in substitute.steps)


def _possible(
    traced: Traced, substitute: Substitute | None, probe: Probe
) -> Iterator[tuple[Mistake, Variant]]:
    """The variants that leave alone what the run has right, where a value explains the rest."""
    right: set[str] = set()
    if substitute is not None and substitute.steps[0] in traced.gone[:1]:
        right = {x for x in traced.order if traced.found[x] and traced.steps[x].own}
        right = right.difference(*map(traced.made_of, substitute.steps), substitute.steps)
    for mistake in catalogue_of(probe):
        for variant in mistake.variants:
            if right.isdisjoint(variant.replaced):
                yield mistake, variant


def _told_apart(problem: Problem) -> Probe:
    """The same probe, in which a causal rule and a window are not a part of the mask."""
    rules = dict(getattr(problem, "rules", {}))
    if not rules:
        return problem.probe
    causal, offset = rules.pop("causal", None) is not None, int(getattr(problem, "offset", 0))
    window = rules.pop("window", None)
    keep = np.logical_and.reduce([*rules.values()]) if rules else None
    own = replace(problem.probe, keep=keep, causal=causal, offset=offset)
    if window is None:
        return own
    for size in range(1, sum(window.shape[-2:])):
        narrow = replace(own, window=size)
        if np.array_equal(narrow.visible, problem.probe.visible):
            return narrow
    return problem.probe
