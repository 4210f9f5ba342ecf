"""Functions that take few lengths: those that blocks, windows and images of the usual sizes divide.

Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from regard.diagnosis.calls.convention import READY
from regard.diagnosis.calls.convention_search import find_conventions
from regard.diagnosis.calls.likely import likely_readings
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.signature import WITH_TABLES

# What a function says of a length that it does not take.
LENGTH = re.compile(
    "equal division|divisible|divide|multiple of|AssertionError|reshape|for input of",
    re.IGNORECASE,
)
# What its text says of such lengths.
SAID_OF_LENGTH = re.compile(
    r"(must|should|has to|have to|needs to) (evenly )?(divide|be divisible)|"
    r"(?<!not )(?<!no )(?<!not be )\b(a multiple|multiples) of"
    r"(?!\W+(n_?|num_?)?(h|q|heads?)\b|\W+\w*(kv|head|group))|"
    r"(?<!not )\bdivides? (the |both )?(sequence )?lengths?\b|"
    r"divisible by \W?\w*(window|block|chunk|size)",
    re.IGNORECASE,
)
# Text, or code, that fills up what others refuse.
FILLED_UP = re.compile(
    r"pad\w*[^.\n]{0,40}\bmultiple of|\bany \w+ ?(>=?|length|sequence length)|"
    r"[=(,\[:] *\(?- ?\w+(\.shape\[-?\d\])?\)? ?% ?\w|"
    r"(need|have)( not|n't) (to )?be (evenly )?(divisible|a multiple|multiples)|"
    r"last (block|chunk|window)[^.\n]{0,20}(shorter|smaller|partial|not full)",
    re.IGNORECASE,
)


def of_round_lengths(
    readings: Sequence[FunctionUnderTest], likely: list[FunctionUnderTest]
) -> list[FunctionUnderTest]:
    """The same asked with round lengths alone, if others are refused, and they are not."""
    first = likely[0]
    conventions = find_conventions(first)
    usual = first.callee.kind not in ("arrays", "self") or any(
        one.layout == READY for own in conventions for one in own
    )
    known = {one for own in conventions for one in own}
    answered = {
        probe.sizes["S"]
        for (convention, probe), one in first.answers.items()
        if convention in known and one.output is not None
    }
    usual = usual or len(answered) > 2  # it takes any length
    told = any(SAID_OF_LENGTH.search(text) for _, text in first.callee.blocks)
    told &= first.callee.kind in ("arrays", "self")
    told &= not any(FILLED_UP.search(text) for _, text in first.callee.blocks)
    told |= first.callee.option == WITH_TABLES  # as many rows as a table of a square map has
    refused = [  # also where values are as wide as keys
        one.problem
        for (_, probe), one in first.answers.items()
        if one.kind == "raised" and probe.sizes["D"] == probe.sizes["E"]
    ]
    keeps = usual or not any(map(LENGTH.search, refused))
    if first.hung or (conventions and keeps and not told):
        return likely
    round_ones = [replace(one, is_round=True, answers={}, probes={}) for one in readings]
    found = likely_readings(round_ones)
    return found if find_conventions(found[0]) else likely
