"""Whether an answer is right: the reference kernel in float64, and a tolerance.

Owns which rows are checked and the tolerance. Must not know which library gave the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from regard.api import attention
from regard.boundary.arrays import Array

if TYPE_CHECKING:
    from regard.bench.cases import Case, Inputs


# Scores that the float64 reference computes per case: about half a second.
CHECKED_SCORES = 2**23
# Peers round scores, weights and output of half types, each by at most half of eps.
ROUNDINGS_OF_HALF = 4
RANDOM_WALK = 4


@dataclass(frozen=True)
class Truth:
    """The right answer (B, H, R, E) in float64 for some rows of every head."""

    rows: Array
    output: Array
    tolerance: float


@dataclass(frozen=True)
class Accuracy:
    """`error` is the largest |answer − truth| / |truth| of a row, in the Euclidean norm."""

    error: float
    right: bool
    reason: str | None = None


def truth(inputs: Inputs, seed: int = 0) -> Truth:
    """The reference's answer for all rows, or for as many as `CHECKED_SCORES` allows."""
    case = inputs.case
    afforded = max(16, CHECKED_SCORES // (case.B * case.H * case.S))
    rows = np.arange(case.L)
    if afforded < case.L:
        # Both ends, and a random choice of the others.
        inner = np.random.default_rng(seed).choice(rows[1:-1], afforded - 2, replace=False)
        rows = np.concatenate([[0], np.sort(inner), [case.L - 1]])
    bias = inputs.bias
    output = attention(
        inputs.query[:, :, rows].astype(np.float64),
        inputs.key.astype(np.float64),
        inputs.value.astype(np.float64),
        mask=inputs.visible_keys(rows),
        bias=None if bias is None else bias[:, :, rows].astype(np.float64),
        kernel="reference",
    )
    return Truth(rows, output, tolerance(case))


def tolerance(case: Case) -> float:
    """The largest allowed `Accuracy.error`.

    Rounding errors of sums over D and S grow like the square root of their lengths; half types
    accumulate in float32 and round a few values to their own precision.

    >>> from regard.bench.cases import case
    >>> f"{tolerance(case('full', 1, 8, 1024, 1024, 64)):.1e}"
    '1.9e-05'
    """
    terms = math.sqrt(case.D) + math.sqrt(case.S)
    half = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(case.dtype, 0.0)
    working = np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps
    return float(RANDOM_WALK * terms * working + ROUNDINGS_OF_HALF * half)


def accuracy(answer: Array, truth: Truth, shape: tuple[int, ...]) -> Accuracy:
    """Whether an answer has the right shape (B, H, L, E), is finite, and close to the truth."""
    if answer.shape != shape:
        return Accuracy(math.inf, False, f"its shape is {answer.shape}, not {shape}")
    if not np.isfinite(answer).all():
        return Accuracy(math.inf, False, "it is not finite everywhere")
    distance = np.linalg.norm(answer[:, :, truth.rows].astype(np.float64) - truth.output, axis=-1)
    error = float(np.max(distance / np.linalg.norm(truth.output, axis=-1)))
    if error <= truth.tolerance:
        return Accuracy(error, True)
    return Accuracy(
        error, False, f"its error is {error:.1e}, more than the {truth.tolerance:.1e} of rounding"
    )
