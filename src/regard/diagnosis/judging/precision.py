"""Whether a function computes in half precision: from evidence, not from the size of an error.

Must not know mistakes.
"""

from __future__ import annotations

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Convention, agrees
from regard.diagnosis.calls.probe import UNITS, Probe
from regard.diagnosis.calls.under_test import FunctionUnderTest

HALF = ("float16", "bfloat16")
# Roundings of a half-precision softmax.
ROUNDINGS = 6
MOVED = 0.1  # the share by which rounded scores move at most of what others move


def half_type(tested: FunctionUnderTest, convention: Convention) -> str | None:
    """The half-precision type that numbers pass through on the way; None if nothing shows it.

    Scores that are exact in such a type come out right if only scores are rounded. Otherwise the
    weights, which values of the identity show, or else the results, are numbers of the type.
    """
    if tested.callee.kind == "arrays" and not convention.one_query:
        probe = _exact(convention)
        weights = tested.ask(convention, probe).output
        if weights is None:
            return None
        right = probe.right["weights"]
        if agrees(weights, right, 4 * probe.tolerance(UNITS["float32"])):
            return "float16" if _rounds_scores(tested, convention) else None
        near = (
            name for name in HALF if agrees(weights, right, ROUNDINGS * UNITS[name] * right + 1e-6)
        )
        return next((name for name in near if _on_grid(weights, name)), None)
    outputs = [one.output for one in tested.answers.values() if one.output is not None]
    whole = np.concatenate([one.ravel() for one in outputs])
    return next((name for name in HALF if _on_grid(whole, name)), None)


def _exact(convention: Convention) -> Probe:
    """Values of the identity, and scores that are multiples of ½ below 4."""
    numbers = np.array([[1, 0, 2, -1], [0, 1, -1, 1], [2, 1, 0, 0], [-1, 0, 1, 2.0]])
    inputs = {
        "queries": numbers,
        "keys": numbers[::-1].T - np.array([0.0, 1, 0, 0]),
        "values": np.eye(4),
    }
    ready = {name: array[None, None].copy() for name, array in inputs.items()}
    rank, causal = len(convention.layout), convention.causal_always
    return Probe("exact scores", "plain", ready, rank=rank, causal=causal)


def _rounds_scores(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether errors come from rounding scores.

    Exact ones of any size give right results, and others a little beside give the same ones.
    """
    small = _exact(convention)
    found, right = list[Array](), list[Array]()
    for name, factor in (("exact large scores", 4.0), ("beside large scores", 4.0 + 2.0**-11)):
        inputs = {**small.inputs, "queries": factor * small.inputs["queries"]}
        probe = Probe(name, "plain", inputs, rank=small.rank, causal=small.causal)
        output = tested.ask(convention, probe).output
        near = 16 * probe.tolerance(UNITS["float32"])
        if output is None or not (found or agrees(output, probe.right["output"], near)):
            return False
        found.append(output)
        right.append(probe.right["output"])
    moved, would_move = (float(np.abs(one[1] - one[0]).max()) for one in (found, right))
    return moved < MOVED * would_move


def _on_grid(numbers: Array, name: str) -> bool:
    """Whether all numbers are ones of a half-precision type, and not only simple ones."""
    numbers = numbers[np.isfinite(numbers)]
    if name == "float16":
        rounded = numbers.astype(np.float16).astype(np.float64)
    else:
        bits = numbers.astype(np.float32).view(np.uint32)
        rounded = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)
    if not np.array_equal(rounded, numbers):
        return False
    simple = np.round(numbers * 64) == numbers * 64
    return int((~simple).sum()) >= 4
