"""What the normalisations of a layer around attention reach: each is doubled while it is called.

Must not know mistakes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from regard.boundary.arrays import Array
from regard.diagnosis.calls.calling import Once
from regard.diagnosis.calls.convention import Convention, agrees
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.forms.norms import WITHIN
from regard.diagnosis.reading.surroundings import Surroundings


def what_norms_miss(tested: FunctionUnderTest, convention: Convention) -> str:
    """Whether normalisations reach the input that is "added", or not each "part" of attention.

    Or not the "sum" of both, where the text says that it is normalised.

    With F the layer, A(x) = F(x) − x and every normalisation doubled, it computes c·(x + b·A(a·x)),
    where a, b and c are 1 or 2 for each normalisation before attention, after it and at the end.
    """
    callee = tested.callee
    if callee.around is not None:
        return _missed_by_function(tested, convention, callee.around)
    names = [one for one in callee.without if one != "residual" and not WITHIN.search(one)]
    if "residual" not in callee.without or callee.roles.keys() & {"context", "query"}:
        return ""
    if not names or not callee.norm_place or callee.framework == "jax":  # which is compiled
        return ""
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None or "embeddings" not in probe.inputs:
        return ""
    rows = probe.inputs["embeddings"]
    doubled = replace(tested, put=Once(lambda one: tested.put(replace(one, looks="doubled"))))
    doubled.answers, doubled.probes = {}, {}
    seen = doubled.ask(convention, probe).output
    asked = {a: tested.ask(convention, _times(probe, a)).output for a in (1, 2, 4)}
    parts = {a: one for a, one in asked.items() if one is not None}
    if seen is None or len(parts) < len(asked):
        return ""
    whole = seen + rows  # the layer is called without the input that it adds

    def is_whole(expected: Array) -> bool:
        return agrees(whole, expected, 8 * probe.tolerance(UNITS["float32"]))

    if callee.norm_place == "last":
        return "sum" if is_whole(rows + 2 * parts[1]) else ""
    factors = itertools.product((1, 2, 4), repeat=3)
    if any(is_whole(c * (rows + b * parts[a])) for a, b, c in factors):
        return ""
    return "added" if is_whole(2 * rows + parts[2]) else "part"


def _missed_by_function(
    tested: FunctionUnderTest, convention: Convention, around: Surroundings
) -> str:
    """The same of a function whose normalisation is its own, by rows twice as large.

    The normalisation makes the same of them, and only what it does not reach is twice as large.
    """
    if around.last == "result" and tested.callee.norm_place == "last":
        return "sum"
    if not around.before or tested.callee.norm_place != "first":
        return ""
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    if probe is None:
        return ""
    twice = replace(probe, around=replace(around, factor=2.0), name=f"{probe.name}, twice as large")
    seen, once = (tested.ask(convention, one).output for one in (twice, probe))
    rows = probe.inputs["embeddings"]
    if seen is None or once is None or (around.adds and seen.shape != rows.shape):
        return ""
    bound = 8 * probe.tolerance(UNITS["float32"])
    if agrees(seen, once + rows if around.adds else once, bound):
        return ""
    return "added" if around.adds and agrees(seen, once, bound) else "part"


def _times(probe: Probe, factor: int) -> Probe:
    inputs = {**probe.inputs, "embeddings": factor * probe.inputs["embeddings"]}
    return probe if factor == 1 else replace(probe, inputs=inputs, name=f"{probe.name}, {factor} x")
