"""Functions of windows of a map, made of functions that ask for a learned table of distances too.

The window gets a side that probes fill, and the table a row for each displacement in it. Must not
know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from regard.diagnosis.forms.after_attention import like_another
from regard.diagnosis.forms.construction import BY_PLACE, SIDE
from regard.diagnosis.forms.given_arrays import Given
from regard.diagnosis.forms.packing import Alternative
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import WITH_TABLES, Parameter, text_of

ROWS = (2 * SIDE - 1) ** 2
# A table (heads, rows).
HEADS_FIRST = r"\b{0}\b[\w ,/:`]{{0,30}}[(\[] *(n_?|num_)?(heads?|h) *,"


def with_window_table(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function with a square window and a table for it, if it asks for both."""
    tables = [p for p in parameters if p.required and BY_PLACE.search(p.name) and not p.role]
    windows = [p for p in parameters if role_of(p.name) == "window"]
    count = next((p.name for p in parameters if role_of(p.name) == "heads"), "")
    if len(tables) != 1 or len(windows) != 1 or not count or role_of(tables[0].name):
        return None
    text, (table,), (window,) = text_of(function), tables, windows
    own = re.escape(window.name)
    unpacked = rf"\*{own}\b|\b\w+ *, *\w+ *= *{own}\b|\b{own}\[[01]\]"
    if not re.search(r"2 *\*? *\w+ *- *1|index", text):
        return None
    is_pair = isinstance(window.default, tuple) or re.search(unpacked, text) is not None
    turned = re.search(HEADS_FIRST.format(re.escape(table.name)), text, re.IGNORECASE)

    def pack(given: dict[str, Any]) -> dict[str, Any]:
        heads = given.get(count, next(p.default for p in parameters if p.name == count))
        drawn = np.random.default_rng(50).normal(size=(ROWS, heads))
        like = next(one for one in given.values() if hasattr(one, "dtype"))
        made.arrays = {table.name: like_another(drawn.T.copy() if turned else drawn, like)}
        return {**given, **made.arrays, window.name: (SIDE, SIDE) if is_pair else SIDE}

    made = Given(function, pack)
    made.option, made.has_table = WITH_TABLES, True
    left = (table.name, window.name)
    return made, [replace(one, keyword=True) for one in parameters if one.name not in left]
