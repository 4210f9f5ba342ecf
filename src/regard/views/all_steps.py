"""Every step that any call may have, in the order of the textbook."""

from __future__ import annotations

from functools import cache

from regard.textbook.steps import PROJECTED, Step, textbook

PROJECTIONS = ("queries", "keys", "values")


@cache
def declared() -> dict[str, Step]:
    """The steps by name."""
    every = {*PROJECTED, "bias", "softcap", "sink"}
    steps: dict[str, Step] = {}
    for step in (*textbook(every, masked=True), *textbook({*PROJECTIONS})):
        steps.setdefault(step.name, step)
    return steps


@cache
def places() -> dict[str, int]:
    """The position of each step, by name."""
    return {name: place for place, name in enumerate(declared())}
