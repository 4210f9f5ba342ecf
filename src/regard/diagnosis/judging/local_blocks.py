"""What a function of queries, keys and values sees with blocks or windows of its own size.

Elsewhere one block holds all, so that nothing is said of the others. Must not know mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.convention import Convention, Question
from regard.diagnosis.calls.probes import ready_probe
from regard.diagnosis.calls.under_test import FunctionUnderTest

# Code that reads the block before, or after, each block, and what joins the ends by design.
READS_OTHERS = re.compile(r"\broll\b|look|prev|before|neighbo|concat|\bcat\b", re.IGNORECASE)
CIRCULAR = re.compile(r"circular|cyclic|wrap|torus|periodic|\bring\b|reformer|lsh", re.IGNORECASE)
FAR = re.compile("global|random|sparse|big_?bird|dilat|strid", re.IGNORECASE)
BLOCKS = 4  # of a text, each of the size that is the default
LONGEST = 64


def seen_by_default(tested: FunctionUnderTest, convention: Convention) -> Array | None:
    """Which keys each query sees with blocks of the default size, (L, S); None if unknown."""
    sizes = _sizes(tested)
    return seen_with(tested, convention, {}) if len(sizes) == 1 else None


def _sizes(tested: FunctionUnderTest) -> dict[str, int]:
    """The sizes of blocks or windows that a function has by default."""
    return {
        one.name: one.default
        for one in tested.callee.parameters
        if one.role in ("window", "block", "longest")
        if type(one.default) is int and 1 < one.default <= LONGEST // BLOCKS
    }


def seen_with(
    tested: FunctionUnderTest, convention: Convention, more: Mapping[str, Any]
) -> Array | None:
    """The same with other arguments besides, of a text that has four blocks, or twelve tokens."""
    callee, sizes = tested.callee, _sizes(tested)
    if callee.kind != "arrays" or "value" not in callee.roles or convention.one_query:
        return None
    keys = BLOCKS * max(sizes.values(), default=3)
    batch, heads = 1 + ("B" in convention.layout), 1 + ("H" in convention.layout)
    shape = (batch, heads, heads, keys, keys, keys, keys)
    probe = ready_probe(f"{BLOCKS} blocks", "plain", shape, 610)
    identity = np.broadcast_to(np.eye(keys), probe.inputs["values"].shape).copy()
    inputs = {**probe.inputs, "values": identity}
    probe = replace(probe, rank=len(convention.layout), inputs=inputs)
    try:
        given = arguments_for(callee, convention, probe)
    except NotOfferedError:
        return None
    given = {name: one for name, one in {**given, **more}.items() if name not in sizes}
    question = Question(probe.name, (given,), reading=callee.number)
    result = tested.put(question)[-1]
    out = None if result.problem or not result.arrays else result.arrays[0].numbers
    if out is None or out.ndim != len(convention.layout) or not np.isfinite(out).all():
        return None
    if out.size != batch * heads * keys * keys:
        return None
    axes = [convention.layout.index(axis) for axis in "BHLD" if axis in convention.layout]
    weights = out.transpose(axes).reshape(-1, keys, keys)[0]
    return np.asarray(weights > 1e-6)


def may_be_meant(tested: FunctionUnderTest, mistake: str) -> bool:
    """Whether a text says something by which the first tokens may be meant to see the last ones.

    A single block that is its own neighbour shows its keys twice.
    """
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    words = {"window_wraps_around": (CIRCULAR, FAR), "keys_counted_twice": (CIRCULAR,)}
    return any(one.search(text) for one in words.get(mistake, ()))


def wraps_around(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether the first block sees the last one, where the next ones see nothing so far away."""
    text = "\n".join(one for _, one in tested.callee.blocks)
    if not READS_OTHERS.search(text) or may_be_meant(tested, "window_wraps_around"):
        return False
    seen = seen_by_default(tested, convention)
    if seen is None:
        return False
    size = len(seen) // BLOCKS
    ends = seen[:size, -size:].any()
    between = seen[:size, 2 * size : -size].any()
    inner = seen[size : 2 * size, -size:].any()
    return bool(ends and not between and not inner)
