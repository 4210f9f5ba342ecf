"""What a function makes of tokens that see all others and that all others see, as in Longformer.

There are none in the usual probes. Must not know mistakes.
"""

from __future__ import annotations

import re

import numpy as np

from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.global_tokens import GLOBAL
from regard.diagnosis.judging.local_blocks import seen_with

# What says that global tokens see all, and that all see them.
_ALL = r"(everything|every\b|all\b|the (whole|full|entire)|each)"
SEE_ALL = re.compile(
    rf"global[^.;]{{0,80}}\b(attend|see|look|read)s?\b[^.;]{{0,20}}\b{_ALL}|"
    rf"(these|they) see {_ALL}|"
    r"both (directions|ways)|symmetric|longformer",
    re.IGNORECASE,
)
SEEN_BY_ALL = re.compile(
    rf"\b{_ALL}[^.;]{{0,60}}\b(attend|see|look|read)s?\b[^.;]{{0,60}}(global|them)|seen by {_ALL}|"
    r"(attend|see|look|read)s? [^;]{0,60}\band (to )?(all |the )?global|longformer",
    re.IGNORECASE,
)


def what_globals_miss(tested: FunctionUnderTest, convention: Convention) -> str:
    """The name of what is wrong with a first token that is global; nothing if it is right."""
    names = [one.name for one in tested.callee.parameters if GLOBAL.search(one.name)]
    if len(names) != 1:
        return ""
    seen, without = (seen_with(tested, convention, {names[0]: n}) for n in (1, None))
    if seen is None or without is None or without.all() or np.array_equal(seen, without):
        return ""
    if not np.array_equal(seen[1:, 1:], without[1:, 1:]):
        return ""
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    hides_later = not np.triu(without, 1).any()
    if not seen[:, 0].all() and SEEN_BY_ALL.search(text):
        return "global_keys_not_seen"
    sees_less = not (seen[0].all() or hides_later)
    return "global_queries_see_a_window" * (sees_less and SEE_ALL.search(text) is not None)
