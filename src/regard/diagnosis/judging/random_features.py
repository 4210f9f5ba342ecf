"""Whether random features, as a Performer's, weigh keys by their length.

The features φ(x) = exp(Wx − |x|²/2) give a query of zeros the same product with every key, but for
the spread of W. Must not know mistakes.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from regard.diagnosis.calls.convention import Convention
from regard.diagnosis.calls.probes import ready_probe
from regard.diagnosis.calls.under_test import FunctionUnderTest

RANDOM = re.compile(r"performer|favor|random_?\s?feature|softmax_?kernel|orthogonal", re.IGNORECASE)
EXPONENTIAL = re.compile(r"\bexp\(")
WIDTH = 6
SQUARED = 1.2  # of a key that is divided by the fourth root of its width
LEAST, MOST = 0.65, 1.5  # of the mean weight, where 1 is right: the spread of W stays inside


def weight_of_length(tested: FunctionUnderTest, convention: Convention) -> float | None:
    """How much weight keys with a length get on average, if one of zeros gets 1; or None."""
    text = "\n".join((tested.callee.name, *(one for _, one in tested.callee.blocks)))
    if not (RANDOM.search(text) and EXPONENTIAL.search(text)) or convention.one_query:
        return None
    keys = 2 * WIDTH + 1
    batch, heads = 1 + ("B" in convention.layout), 1 + ("H" in convention.layout)
    shape = (batch, heads, heads, keys, keys, WIDTH, keys)
    probe = ready_probe("keys along each axis", "plain", shape, 620, rank=len(convention.layout))
    along = np.sqrt(SQUARED * WIDTH**0.5) * np.eye(WIDTH)
    rows = np.concatenate([np.zeros((1, WIDTH)), along, -along])
    inputs = {
        "queries": 0 * probe.inputs["queries"],
        "keys": np.broadcast_to(rows, probe.inputs["keys"].shape).copy(),
        "values": np.broadcast_to(np.eye(keys), probe.inputs["values"].shape).copy(),
    }
    weights = tested.ask(convention, replace(probe, inputs=inputs)).output
    if weights is None or not np.isfinite(weights).all() or weights.min() < -1e-6:
        return None
    last = weights[..., -1, :]
    with np.errstate(all="ignore"):
        return float(np.median(last[..., 1:].mean(-1) / last[..., 0]))


def weighs_by_length(tested: FunctionUnderTest, convention: Convention) -> bool:
    """Whether keys get another weight because they are long."""
    found = weight_of_length(tested, convention)
    return found is not None and not LEAST < found < MOST
