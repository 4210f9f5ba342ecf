"""Rows for distances that are added to the values: whether each is that of its own distance.

They are nothing while the rest is judged. Where all else is nothing, and the weights all the same,
the output is their mean. Must not know mistakes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.arguments import NotOfferedError, arguments_for
from regard.diagnosis.calls.convention import Convention, Question
from regard.diagnosis.calls.under_test import FunctionUnderTest

# What says that rows are counted from the key that is furthest to the left: the offset j − i.
FROM_THE_LEFT = re.compile(r"\bj *[-−] *i\b|\bkey\w* *[-−] *query|memory *[-−] *query")
FROM_THE_RIGHT = re.compile(r"\bi *[-−] *j\b|\bquery\w* *[-−] *key")
NEAR = 1e-5


def reads_opposite_rows(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether values get the rows of the opposite distances, where a text gives their order."""
    callee = tested.callee
    code = "\n".join(text for _, text in callee.blocks)
    probe = next((p for p in tested.probes_for(convention) if p.keep is None), None)
    told = FROM_THE_LEFT.search(code) is not None, FROM_THE_RIGHT.search(code) is not None
    if probe is None or sum(told) != 1 or not callee.without or convention.one_query:
        return False
    tokens = ("queries", "keys", "values", "embeddings")
    biases = any(name[:2] == "b_" for name in probe.inputs)
    if biases or "context" in probe.inputs or probe.sizes["L"] != probe.sizes["S"]:
        return False
    inputs = {n: 0 * a if n in tokens else a for n, a in probe.inputs.items()}
    try:
        given = arguments_for(callee, convention, replace(probe, inputs=inputs))
    except NotOfferedError:
        return False
    question = Question("rows of values", (given,), reading=callee.number, looks="values")
    result = tested.put(question)[-1]
    output = None if result.problem else result.arrays[convention.output_at or 0].numbers
    if output is None or output.ndim != len(convention.layout):
        return False
    question = Question("rows of values, then", ({},), reading=callee.number, looks="tables")
    tables = tested.put(question)[-1]
    rows = np.moveaxis(output, convention.token_axis, 0).reshape(probe.sizes["L"], -1)
    for table in (one.numbers for one in tables.arrays if one.numbers is not None):
        if len(table) % 2 and len(table) > 1 and table.shape[1] <= rows.shape[1]:
            own = rows[:, : table.shape[1]]
            right, opposite = (
                _means(one, told[0], convention.causal_always, len(rows))
                for one in (table, table[::-1])
            )
            if _same(own, opposite) and not _same(own, right):
                return True
    return False


def _means(table: Array, from_the_left: bool, causal: bool, length: int) -> Array:
    """For each query the mean of the rows of the distances to what it sees."""
    places, furthest = np.arange(length), len(table) // 2
    far = places - places[:, None] if from_the_left else places[:, None] - places
    rows = table[np.clip(far, -furthest, furthest) + furthest]
    seen = places <= places[:, None] if causal else np.ones_like(far, bool)
    total = np.where(seen[..., None], rows, 0.0).sum(1)
    return np.asarray(total / seen.sum(1, keepdims=True))


def _same(one: Array, other: Array) -> bool:
    return bool(np.abs(one - other).max() < NEAR)
