"""The name of a mistake, where the textbook with a step replaced gives all that a run gave.

Owns what a run tells of a departure to the catalogue. Must not know lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from regard.diagnosis.mistakes.naming import name
from regard.diagnosis.trace.substitute import Substitute
from regard.diagnosis.trace.traced import Problem, Traced


def named(traced: Traced, substitute: Substitute | None, kept: Collection[str] = ()) -> str:
    """The mistake that gives what the run gave, there and on the other problems.

    It replaces none of the `kept` steps.
    """
    every = [(traced.problem, traced.result), *traced.elsewhere]
    told = [(problem, result) for problem, result in every if _has_its_shape(problem, result)]
    right = set(kept)
    there = {}
    if substitute is not None and told and told[0][0] is traced.problem:
        there = {step: substitute.values[step] for step in substitute.steps}
        if substitute.steps[0] in traced.gone[:1]:
            right = {x for x in traced.order if traced.found[x] and traced.steps[x].own}
            right = right.difference(*map(traced.made_of, substitute.steps), substitute.steps)
    found = name(
        [problem.probe for problem, _ in told],
        lambda number, values: traced.is_result(values, told[number][1], told[number][0]),
        there,
        right,
    )
    return found.name if found else ""


def _has_its_shape(problem: Problem, result: Mapping[str, Any] | None) -> bool:
    """Whether a run gave what is of the right shape; else a mistake says nothing of its numbers."""
    own = result or {}
    right = problem.expected.items()
    return all(name in own and np.shape(own[name]) == one.shape for name, one in right)
