"""Which of several ways of reading a function are likely, by how much of their answers is right.

Must not know mistakes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.patience import Patience
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.signature import Callee

SEARCH_SECONDS = 10.0  # after these no other way of reading a function is tried


def likely_readings(
    readings: Sequence[FunctionUnderTest], seconds: float = SEARCH_SECONDS
) -> list[FunctionUnderTest]:
    """The readings of a function that answer, the best first; the right one alone if there is one.

    A later library is tried only if no reading in an earlier one answers; after so many `seconds`
    no other reading is.
    """
    if len(readings) == 1:
        return list(readings)
    found: list[tuple[float, FunctionUnderTest]] = []
    nothing: list[FunctionUnderTest] = []
    patience = Patience()
    for tested in readings:
        if patience.spent > seconds or (found and _stage(tested) != _stage(found[0][1])):
            break
        if tested.callee.steps and tested.callee.says_pieces and any(one > 0.5 for one, _ in found):
            continue  # it is meant to take several tokens in a call, and does
        several = any(one > 0 and not other.callee.steps for one, other in found)
        if tested.callee.steps and tested.callee.remembers and several:
            continue  # it takes several tokens at a time, rightly at first: one alone hides more
        share = max((_share_right(tested, one) for one in find_conventions(tested)), default=None)
        if share == 1 or tested.hung or tested.out_of_time:
            return [tested]
        if share is not None and not tested.callee.narrow and _has_only_nan(tested):
            nothing.append(tested)  # as a constant of float32 gives in float64
        elif share is not None:
            found.append((share, tested))
    found.sort(key=lambda one: (_is_as_wide_as_heads(one[1].callee), -one[0]))
    return [tested for _, tested in found] or nothing[:1] or list(readings[:1])


def only_nan(tested: FunctionUnderTest) -> bool:
    """Whether a function returns nothing but NaN."""
    outputs = [answer.output for answer in tested.answers.values() if answer.output is not None]
    return all(bool(np.isnan(output).all()) for output in outputs)


def _has_only_nan(tested: FunctionUnderTest) -> bool:
    """Whether a function returns nothing but NaN for one of the probes, as where it has a mask."""
    outputs = [answer.output for answer in tested.answers.values() if answer.output is not None]
    return any(bool(np.isnan(output).all()) for output in outputs)


def _stage(tested: FunctionUnderTest) -> tuple[str, bool, bool, bool, bool]:
    """What distinguishes readings of which a later kind is tried only if an earlier one fails."""
    callee, roles = tested.callee, tested.callee.roles
    by_token = bool(callee.steps) and "cache" in roles and not roles["cache"].required
    of_blocks = "block" in roles and roles["block"].required
    return callee.framework, of_blocks, by_token, callee.narrow, _has_fewer_keys(callee.weights)


def _is_as_wide_as_heads(callee: Callee) -> bool:
    """Whether a head has as many columns as there are heads: √(H·D) and D are then the same."""
    return "W_q" in callee.weights and callee.weights["W_q"].shape[-1] == (callee.heads or 0) ** 2


def _has_fewer_keys(weights: Mapping[str, Any]) -> bool:
    """Whether there are fewer key heads than query heads: as many would hide mistakes."""
    return bool(weights) and weights["W_k"].shape[-1] < weights["W_q"].shape[-1]


def _share_right(tested: FunctionUnderTest, conventions: Sequence[Convention]) -> float:
    """How many of the answers under one hypothesis are right."""
    asked = [(one, probe) for one in conventions for probe in tested.probes_for(one)]
    answered = [pair for pair in asked if tested.ask(*pair).output is not None]
    return sum(tested.is_right(*pair) for pair in answered) / max(1, len(answered))
