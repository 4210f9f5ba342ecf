"""Weights as they are stored, decoded number by number, and the bound of a product's error.

Must not know how a product is computed, but for its order: what of a row is added in one lane.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from regard.compute import native
from regard.compute.stored import Stored, rounded

KINDS = ["float32", "float16", "bfloat16", "int8"]
_GROUP = np.dtype([("scale", "<f2"), ("integers", "i1", 32)])


def kept(numbers: np.ndarray, kind: str) -> Any:
    """Rows of float32 as weights of a kind."""
    if kind == "float32":
        return numbers
    if kind == "float16":
        return Stored(numbers.astype(np.float16), numbers.shape[1])
    return rounded(numbers, kind)


def exact(weights: Any) -> np.ndarray:
    """What they are, (N, K) in float64."""
    if not isinstance(weights, Stored):
        return weights.astype(np.float64)
    rows = weights.rows
    if rows.dtype == np.uint16:
        return (rows.astype("<u4") << 16).view("<f4").astype(np.float64)
    if rows.dtype != np.int8:
        return rows.astype(np.float64)
    groups = rows.view(_GROUP)
    whole = groups["integers"] * groups["scale"].astype(np.float64)[..., None]
    return whole.reshape(len(rows), whole.shape[1] * 32)[:, : weights.width]


def bound(x: np.ndarray, weights: Any, target: str) -> np.ndarray:
    """How far each number may be from its sum: a lane adds one of so many products."""
    lanes, sizes = native.module.lanes(target), np.abs(exact(weights))
    additions = -(-x.shape[1] // lanes) + 32 // lanes + math.log2(lanes) + 4
    own = (additions + 1) * 2.0**-24
    return own / (1 - own) * (np.abs(x.astype(np.float64)) @ sizes.T) + 2.0**-140
