"""Every step that any call may have, in the order of the textbook."""

from __future__ import annotations

from functools import cache

from regard.textbook.mechanisms import NORMALIZATIONS, SCORES
from regard.textbook.steps import PROJECTED, Step, textbook

PROJECTIONS = ("queries", "keys", "values")


@cache
def declared() -> dict[str, Step]:
    """The steps by name; those that not every mechanism has follow the step before them."""
    every = {*PROJECTED, "bias", "softcap", "sink"}
    books = [textbook(every, masked=True), textbook({*PROJECTIONS})]
    own = {*PROJECTIONS, "score_W", "score_W_q", "score_W_k", "score_v", "score_temperature"}
    own |= {"normalize_bias", "key_numbers", "scale"}
    books += [textbook(own, masked=True, score=score) for score in SCORES]
    books += [textbook(own, masked=True, normalize=name) for name in NORMALIZATIONS]
    steps: list[Step] = []
    for book in books:
        place = 0
        for step in book:
            names = [one.name for one in steps]
            if step.name not in names:
                steps.insert(place, step)
                names.insert(place, step.name)
            place = names.index(step.name) + 1
    return {step.name: step for step in steps}


@cache
def places() -> dict[str, int]:
    """The position of each step, by name."""
    return {name: place for place, name in enumerate(declared())}
