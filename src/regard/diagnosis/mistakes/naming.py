"""The name of a mistake, where what it puts in the place of a step explains what code has there.

Must not know lines, nor how code is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.gradient_probe import GradientProbe
from regard.diagnosis.mistakes import REPLACING, gradients, other_scores
from regard.diagnosis.mistakes.entry import Mistake
from regard.diagnosis.mistakes.written import Unfit
from regard.diagnosis.probe import Probe, Values, Variant, evaluate

NEAR = 1e-5  # relative where a number is larger than 1
HIDDEN = -1e4  # what is lower hides as well as −∞
MOST_VARIANTS = 6000


def name(
    probes: Sequence[Probe],
    gives: Callable[[int, Values], bool],
    there: Mapping[str, Array] | None = None,
    right: Collection[str] = (),
) -> Mistake | None:
    """The mistake that explains the value of the code at its departing step, and all after it.

    Parameters
    ----------
    probes : sequence of Probe
        The problem on which code departs, and others that it answered, in the right shape.
    gives : callable
        Whether the code gave, on a problem by its number, what these values of the steps end in.
    there : mapping, optional
        What the code has for the departing steps, by name, where a value takes their place.
    right : collection of str
        The steps that the code has right, and that a mistake must not replace.
    """
    if not probes:
        return None
    probe, own = probes[0], there or {}
    first: Mistake | None = None
    for mistake, variant in islice(_possible(probe, right), MOST_VARIANTS):
        try:
            values = evaluate(probe, variant, probe.last_step)
            exact = all(_alike(values[step], value) for step, value in own.items())
            if (first is not None and not exact) or not gives(0, values):
                continue
            others = [evaluate(other, variant, other.last_step) for other in probes[1:]]
            # One that is exact here may have no meaning for other sizes, where code just runs.
            if not all(
                gives(number, values) or (exact and _means_nothing(values, variant))
                for number, values in enumerate(others, 1)
            ):
                continue
        except Unfit:  # the code does not raise
            continue
        if exact:
            return mistake
        first = mistake
    return first


def _tried(probe: Probe) -> tuple[Mistake, ...]:
    """Every mistake, those of what is meant first."""
    if isinstance(probe, GradientProbe):
        return (*gradients.MISTAKES, *REPLACING)
    return REPLACING if probe.is_plain else (*other_scores.MISTAKES, *REPLACING)


def _possible(probe: Probe, right: Collection[str]) -> Iterator[tuple[Mistake, Variant]]:
    """The variants that replace a step of a probe, and none that is right."""
    for mistake in _tried(probe):
        for variant in mistake.variants:
            if not variant.absent and not probe.has_rules:
                continue  # nothing is hidden
            own = variant.replaced.keys() & probe.declared.keys()
            # What a mistake has for the scores is about dot products, unless it is about others.
            of_dots = "scores" in own and mistake.family != "other scores"
            if own and own.isdisjoint(right) and (probe.is_plain or not of_dots):
                yield mistake, variant


def _means_nothing(values: Values, variant: Variant) -> bool:
    """Whether what is put in the place of a step does not fit there."""
    own = [values[name] for name in variant.replaced if name in values]
    return any(bool(np.isnan(one).all()) for one in own)


def _alike(one: Array, other: Array) -> bool:
    both = np.broadcast_arrays(np.asarray(one, float), np.asarray(other, float))
    one, other = (np.maximum(x, HIDDEN) for x in both)
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= NEAR * np.maximum(1.0, np.abs(other))
    return bool((near | (one == other) | (np.isnan(one) & np.isnan(other))).all())
