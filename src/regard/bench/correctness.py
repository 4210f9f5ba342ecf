"""Whether an answer is right: the same in float64, and a tolerance.

Owns which rows and heads are checked, and the tolerance. Must not know whose answer it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.api import attention
from regard.boundary.arrays import Array
from regard.positions import Rotary

if TYPE_CHECKING:
    from regard.bench.cases import Case, Inputs


# Scores that are computed in float64 per case: about half a second.
CHECKED_SCORES = 2**23
# Peers round scores, weights and output of half types, each by at most half of eps.
ROUNDINGS_OF_HALF = 4
RANDOM_WALK = 4
# Root mean square, in units of a half type. Rounding normal numbers once gives 0.43 units, each
# rounding of the peers as much; rounding to bfloat16 what should be float16 gives 3.4.
MOST_UNITS_OF_HALF = 3.0
UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Right:
    """What a part of one array must be, in float64; `where` is that part."""

    where: tuple[Any, ...]
    values: Array
    sizes: Array  # of each row, what its error is measured by


@dataclass(frozen=True)
class Truth:
    """The right answer: a part of each array that a call returns, by name."""

    arrays: Mapping[str, Right]
    tolerance: float
    rows: int  # how many rows of queries were computed


@dataclass(frozen=True)
class Accuracy:
    """`error` is the largest |answer − truth| of a row in the Euclidean norm, divided by |truth|.

    A row of a gradient is divided by the root mean square of its head's rows if that is more: it
    may be 0 where all that is added up cancels. `rms` is the root mean square of answer − truth,
    divided by that of the truth, in units of the type: half the distance from 1 to the next number.
    Of several arrays, the largest counts.
    """

    error: float
    right: bool
    reason: str | None = None
    rms: float | None = None


def truth(inputs: Inputs, seed: int = 0) -> Truth:
    """The answer for as many rows, and gradients for as many heads, as `CHECKED_SCORES` allows."""
    case = inputs.case
    rng = np.random.default_rng(seed)
    arrays: dict[str, Right] = {}
    checked = case.L
    if "output" in case.answers:
        arrays["output"] = _output(inputs, rng)
        checked = arrays["output"].values.shape[2]
    if case.direction != "forward":
        arrays |= _gradients(inputs, rng)
    return Truth(arrays, tolerance(case), checked)


def _output(inputs: Inputs, rng: np.random.Generator) -> Right:
    """Some rows of every head, both ends among them: the reference kernel."""
    case = inputs.case
    afforded = max(16, CHECKED_SCORES // (case.B * case.H * case.S))
    rows = np.arange(case.L)
    if afforded < case.L:
        inner = rng.choice(rows[1:-1], afforded - 2, replace=False)
        rows = np.concatenate([[0], np.sort(inner), [case.L - 1]])
    bias = inputs.bias
    output = attention(
        inputs.query[:, :, rows].astype(np.float64),
        inputs.key.astype(np.float64),
        inputs.value.astype(np.float64),
        mask=inputs.visible_keys(rows),
        bias=None if bias is None else bias[:, :, rows].astype(np.float64),
        positions=Rotary(query_positions=rows) if case.mask == "rotary" else None,
        kernel="reference",
    )
    return Right((slice(None), slice(None), rows), output, np.linalg.norm(output, axis=-1))


def _gradients(inputs: Inputs, rng: np.random.Generator) -> dict[str, Right]:
    """All rows of some heads of keys with their queries, in plain lines.

    The reference kernel would take a hundred times as long: it keeps what it can explain.
    """
    case = inputs.case
    group = case.H // case.G
    assert case.B == 1 or inputs.bias is None, "its gradient would add up over the batch"
    b = int(rng.integers(case.B))
    afforded = min(case.G, max(1, CHECKED_SCORES // (group * case.L * case.S)))
    some = np.sort(rng.choice(case.G, afforded, replace=False))
    heads = (some[:, None] * group + np.arange(group)).ravel()
    found: dict[str, list[Array]] = {name: [] for name in case.answers if name != "output"}
    for head in heads:
        made = _gradients_of_head(inputs, b, int(head), int(head) // group)
        for name in found:
            found[name].append(made[name])
    where = {name: (b, some if name in ("key", "value") else heads) for name in found}
    arrays = {}
    for name, values in found.items():
        array = np.stack(values)
        if name in ("key", "value"):  # queries of a group add up
            array = array.reshape(len(some), group, *array.shape[1:]).sum(1)
        norms = np.linalg.norm(array, axis=-1)
        usual = np.sqrt(np.mean(norms**2, axis=-1, keepdims=True))
        arrays[name] = Right(where[name], array, np.maximum(norms, usual))
    return arrays


def _gradients_of_head(inputs: Inputs, b: int, head: int, group: int) -> dict[str, Array]:
    assert inputs.grad_output is not None
    query, grad = (x[b, head].astype(np.float64) for x in (inputs.query, inputs.grad_output))
    key, value = (array[b, group].astype(np.float64) for array in (inputs.key, inputs.value))
    rotary = inputs.case.mask == "rotary"
    if rotary:
        query, key = _turned(query, 1), _turned(key, 1)
    scale = 1 / math.sqrt(inputs.case.D)
    scores = query @ key.T * scale
    if inputs.bias is not None:
        scores += inputs.bias[0, head]
    keep = inputs.visible_keys()
    if keep is not None:
        keep = np.broadcast_to(keep, (inputs.case.B, inputs.case.H, *scores.shape))[b, head]
        scores[~keep] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    by_weights = grad @ value.T
    delta = (weights * by_weights).sum(-1, keepdims=True)
    by_scores = weights * (by_weights - delta)
    by_query, by_key = by_scores @ key * scale, by_scores.T @ query * scale
    return {
        "query": _turned(by_query, -1) if rotary else by_query,
        "key": _turned(by_key, -1) if rotary else by_key,
        "value": weights.T @ grad,
        "bias": by_scores,
    }


def _turned(rows: Array, way: int) -> Array:
    """Rows (L, D) as Rotary() turns them, in complex numbers."""
    half = rows.shape[-1] // 2
    angles = np.arange(len(rows))[:, None] * 10000.0 ** (-np.arange(half) / half)
    numbers = (rows[:, :half] + 1j * rows[:, half:]) * np.exp(way * 1j * angles)
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


def tolerance(case: Case) -> float:
    """The largest allowed `Accuracy.error`.

    Rounding errors of sums grow like the square root of their lengths: over D and S, for gradients
    also over E and L. Those of scores, which are exponents, grow like the queries. Half types
    accumulate in float32 and round a few values to their own precision.

    >>> from regard.bench.cases import case
    >>> f"{tolerance(case('full', 1, 8, 1024, 1024, 64)):.1e}"
    '1.9e-05'
    """
    sums = (case.D, case.S) if case.direction == "forward" else (case.D, case.S, case.E, case.L)
    terms = sum(map(math.sqrt, sums))
    half = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(case.dtype, 0.0)
    working = np.finfo(np.float64 if case.dtype == "float64" else np.float32).eps
    return float(RANDOM_WALK * terms * case.queries * working + ROUNDINGS_OF_HALF * half)


def accuracy(answer: Mapping[str, Array], truth: Truth, case: Case) -> Accuracy:
    """Whether every array has its shape, is finite, and close to the truth.

    Close in every row, and half types also on average: a peer that computes float16 in bfloat16
    is wrong, though no row of it is far off.
    """
    error = rms = 0.0
    reasons = []
    for name, shape in case.answers.items():
        array = answer[name]
        what = "it" if name == "output" else f"the gradient of {name}"
        if array.shape != shape:
            return Accuracy(math.inf, False, f"{what} has shape {array.shape}, not {shape}")
        if not np.isfinite(array).all():
            return Accuracy(math.inf, False, f"{what} is not finite everywhere")
        right = truth.arrays[name]
        off = array[right.where].astype(np.float64) - right.values
        far = float(np.max(np.linalg.norm(off, axis=-1) / right.sizes))
        units = float(np.linalg.norm(off) / np.linalg.norm(right.values) / UNITS[case.dtype])
        error, rms = max(error, far), max(rms, units)
        words = "its error" if name == "output" else f"the error of {what}"
        if far > truth.tolerance:
            reasons.append(f"{words} is {far:.1e}, more than the {truth.tolerance:.1e} of rounding")
        elif case.dtype in HALF and units > MOST_UNITS_OF_HALF:
            reasons.append(
                f"{words} is {units:.1f} units of {case.dtype} (root mean square), more than "
                f"{MOST_UNITS_OF_HALF:g}: it was computed in a narrower type"
            )
    return Accuracy(error, not reasons, reasons[0] if reasons else None, rms)
