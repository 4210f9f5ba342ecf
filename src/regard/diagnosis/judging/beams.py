"""Whether what a cache keeps of beams is reordered as the argument for it says.

The function itself says what is right: it is asked for texts in that order. Must not know
mistakes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.calling import question_of
from regard.diagnosis.calls.convention import Convention, Question, agrees
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest

AT = 2  # the call that reorders the beams: each has two tokens by then


def beams_are_misplaced(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether beams in another order get what neither these nor the former ones would get.

    They may be reordered before a call reads them, or after it.
    """
    beams, axis = tested.callee.roles.get("beams"), convention.layout.find("B")
    if beams is None or axis < 0 or tested.of_gradients:
        return False
    for probe in tested.probes_for(convention):
        if probe.keep is None and probe.sizes["B"] > 1 and AT + 2 <= probe.sizes["L"] < 10:
            calls = _calls(tested, convention, probe)
            if len(calls) < AT + 2:
                continue
            order = np.roll(np.arange(probe.sizes["B"]), 1)
            name = tested.callee.roles["x" if "x" in tested.callee.roles else "query"].name
            given = [*calls[:AT], {**calls[AT], beams.name: order}, calls[AT + 1]]
            own = _last_two(tested, convention, probe, given)
            arrays = {n for n, one in calls[0].items() if np.shape(one) == np.shape(calls[0][name])}
            turned = [
                {n: np.take(one, order, axis) if n in arrays else one for n, one in call.items()}
                for call in calls
            ]
            same, before, after = (
                _last_two(tested, convention, probe, [*turned[:n], *calls[n : AT + 2]])
                for n in (0, AT, AT + 1)
            )
            if own is None or same is None or before is None or after is None:
                return False
            near = probe.tolerance(UNITS["float32"])
            later = [same[0], after[1]]
            known = (same, before, later)
            return not any(all(map(_near(near), own, one)) for one in known)
    return False


def _near(near: float) -> Any:
    return lambda one, other: agrees(one, other, near)


def _calls(
    tested: FunctionUnderTest, convention: Convention, probe: Probe
) -> Sequence[Mapping[str, Any]]:
    """The calls of a probe, one token each."""
    with contextlib.suppress(NotOfferedError):
        own = replace(probe, chunks=(1,) * probe.sizes["L"], causal=True)
        given = arguments_for(tested.callee, convention, own)
        return question_of(tested.callee, convention, own, given).calls
    return ()


def _last_two(
    tested: FunctionUnderTest,
    convention: Convention,
    probe: Probe,
    calls: Sequence[Mapping[str, Any]],
) -> list[Array] | None:
    """The outputs of the last two calls."""
    roles, name = tested.callee.roles, f"{probe.name}, beams"
    cache = roles["cache"].name if "cache" in roles else ""
    results = tested.put(Question(name, tuple(calls), cache, tested.callee.number))
    place = convention.output_at or 0
    found = [
        one.arrays[place].numbers for one in results[-2:] if not one.problem and one.arrays[place:]
    ]
    arrays = [one for one in found if one is not None]
    return arrays if len(arrays) == 2 and len(results) == len(calls) else None
