"""Linear attention without a table of scores: sums over the keys are kept, not the keys.

The order of the sums is the only difference to the textbook's steps of the score "features" and the
normalisation "proportional", which an explanation shows. Must not know how a call is checked.
"""

from __future__ import annotations

import numpy as np

from regard.boundary.arguments import round_once
from regard.boundary.arrays import Array
from regard.compute.request import Request
from regard.textbook.operations import compute

# Rows that are computed together: their own keys are met one by one, all earlier ones as sums.
_ROWS = 64
_FLOAT64 = np.dtype(np.float64)


def run(request: Request) -> Array:
    """The output of a checked call, whose only rule may be `causal`; float64, rounded once."""
    *_, heads, rows, keys = request.shape
    group = heads // (request.key.shape[-3] or 1)
    output = np.empty((*request.shape[:-1], request.value.shape[-1]), request.dtype)
    for batch in np.ndindex(*request.lead):
        for head in range(heads):
            own = (*batch, head // group)
            query, key, value = (
                array.astype(np.float64)
                for array in (request.query[(*batch, head)], request.key[own], request.value[own])
            )
            first = keys
            if request.options.mask is not None and rows:
                first = int(request.query_positions[(*batch, 0)]) + 1
            made = _of_head(_features(query), _features(key), value, first, rows)
            with np.errstate(all="ignore"):
                output[(*batch, head)] = round_once(made, request.dtype)
    return request.natural(output)


def _features(x: Array) -> Array:
    return compute("elu_plus_one", ("i", "d"), [(x, ("i", "d"))], None, _FLOAT64)


def _of_head(query: Array, key: Array, value: Array, first: int, rows: int) -> Array:
    """Rows of one head; row i sees the keys before `first` + i, of which there may be none."""
    sums, total = np.zeros((key.shape[1], value.shape[1])), np.zeros(key.shape[1])
    output, done = np.zeros((rows, value.shape[1])), 0
    with np.errstate(all="ignore"):
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            known, last = (min(max(first + row, 0), len(key)) for row in (start, stop - 1))
            sums = sums + key[done:known].T @ value[done:known]
            total = total + key[done:known].sum(axis=0)
            done = known
            here = query[start:stop]
            numerator, denominator = here @ sums, here @ total
            if last > known:  # keys that only some of these rows see
                seen = np.arange(known, last) < first + np.arange(start, stop)[:, None]
                scores = np.where(seen, here @ key[known:last].T, 0)
                operands = [(scores, ("i", "j")), (value[known:last], ("j", "e"))]
                numerator = numerator + compute("dot", ("i", "e"), operands, seen, _FLOAT64)
                denominator = denominator + scores.sum(axis=1)
            some = np.arange(start, stop) + first > 0
            output[start:stop] = np.where(some[:, None], numerator / denominator[:, None], 0)
    return output if len(key) else np.zeros_like(output)
