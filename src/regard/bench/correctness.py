"""Whether an answer is right: the reference in float64, and how far an answer may be from it.

Owns which rows are looked at and the tolerance. Must not know who gave the answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.api import attention

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from regard.bench.cases import Case, Inputs

    Array = NDArray[Any]

# How many scores the float64 reference computes for one case: about half a second.
CHECKED_SCORES = 2**23
# A half type rounds scores, weights and output at its own precision in the libraries that are
# measured here; each rounding is at most half of eps.
ROUNDINGS_OF_HALF = 4
RANDOM_WALK = 4


@dataclass(frozen=True)
class Truth:
    """Some rows of every head as they should be, (B, H, R, E) in float64."""

    rows: Array
    output: Array
    tolerance: float


@dataclass(frozen=True)
class Verdict:
    """`error`: the largest over the rows of |answer − truth| / |truth|, by their lengths."""

    error: float
    right: bool
    reason: str | None = None


def truth(inputs: Inputs, seed: int = 0) -> Truth:
    """What the reference answers for as many rows of every head as can be afforded."""
    case = inputs.case
    afforded = max(16, CHECKED_SCORES // (case.B * case.H * case.S))
    rows = np.arange(case.L)
    if afforded < case.L:
        # Both ends, and others that no tile's width divides.
        inner = np.random.default_rng(seed).choice(rows[1:-1], afforded - 2, replace=False)
        rows = np.concatenate([[0], np.sort(inner), [case.L - 1]])
    keep = inputs.keep
    if keep is not None:
        keep = np.broadcast_to(keep, (case.B, case.H, case.L, case.S))[:, :, rows]
    if case.causal:
        below = rows[:, None] >= np.arange(case.S)
        keep = below if keep is None else keep & below
    bias = inputs.bias
    output = attention(
        inputs.query[:, :, rows].astype(np.float64),
        inputs.key.astype(np.float64),
        inputs.value.astype(np.float64),
        mask=keep,
        bias=None if bias is None else bias[:, :, rows].astype(np.float64),
        kernel="reference",
    )
    return Truth(rows, output, tolerance(case))


def tolerance(case: Case) -> float:
    """How far the row of a right answer may be from the truth, relative to its length.

    Rounding errors of sums over D and over S grow like the root of the number of terms; half types
    accumulate in float32 and round a few values at their own precision.

    >>> from regard.bench.cases import case
    >>> f"{tolerance(case('full', 1, 8, 1024, 1024, 64)):.1e}"
    '1.9e-05'
    """
    terms = math.sqrt(case.D) + math.sqrt(case.S)
    half = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(case.dtype, 0.0)
    working = np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps
    return float(RANDOM_WALK * terms * working + ROUNDINGS_OF_HALF * half)


def verdict(answer: Array, truth: Truth, shape: tuple[int, ...]) -> Verdict:
    """Whether an answer (B, H, L, E) has the right shape, is finite, and is close to the truth."""
    if answer.shape != shape:
        return Verdict(math.inf, False, f"its shape is {answer.shape}, not {shape}")
    if not np.isfinite(answer).all():
        return Verdict(math.inf, False, "it is not finite everywhere")
    distance = np.linalg.norm(answer[:, :, truth.rows].astype(np.float64) - truth.output, axis=-1)
    error = float(np.max(distance / np.linalg.norm(truth.output, axis=-1)))
    if error <= truth.tolerance:
        return Verdict(error, True)
    return Verdict(
        error, False, f"its error is {error:.1e}, more than the {truth.tolerance:.1e} of rounding"
    )
