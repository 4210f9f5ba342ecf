r"""How far from the exact answer a correct result may lie, element by element.

Owns the bound that replaces every rtol and atol, and the comparison that uses it. Knows what the
oracle returns; must not know the library under test.

The derivation. A kernel that accumulates with unit roundoff u sees logit j with an error of at most

    η_j = (D + 2)·u·|scale|·Σ|q k_j|   the dot product, the scale and its own rounding
        + 8·u·|softcap·tanh(·)|        the division, tanh and the product, with a softcap
        + u·(|bias_j| + |s_j|)         the bias and its addition, with a bias
        + u·|s_j − m|                  subtracting the maximum
        + 5.2·u                        exp, relative; 2·u in the fused kernel

(a sink is one more key: its own rounding, its distance from m, its exp). The weights p_j thus
become p_j·exp(δ_j) / Σ p_k·exp(δ_k) with |δ_j| ≤ η_j, and since Σ p_j (v_jd − o_d) = 0,

    E_d = min( Σ p_j |v_jd − o_d| (exp(η_j) − 1) / Σ p_j exp(−η_j),   max_j |v_jd − o_d| )
        + (2 c + 2)·u·Σ p_j |v_jd|     c additions in a row: row sum, output; the division
        + u·|o_d|  +  what underflows

A kernel that adds n visible keys one after the other has c = n. The fused one adds chunks of 256
keys from zero and merges them: c = min(n, 256) + 4·merges, an exp, a product and an addition each.

What underflows is smaller than the least number there is. The fused kernel makes no subnormal
number on x86-64 where it sums in float32: there it is smaller than 2⁻¹²⁶, in weights, too. Sums
below 2⁻⁹⁶ of values that are smaller still are made again in float64.

By dot instructions on pairs of bfloat16, weights are rounded before they meet the values: η_j grows
by 2⁻⁸/(1 − 2⁻⁸) in E_d, not in weights and lse. A number of the inputs that is smaller than 2⁻¹²⁶
counts as 0 there, too: a query or a key that is smaller loses |scale|·|q_d k_jd|.

A score that is a dot product of rows which are made first, each number with an error (e_q, e_k):
η_j grows by |scale|·Σ (e_q |k| + |q| e_k + e_q e_k), with q, k the exact rows.

Over int8 rows, by dot products of integers, a query is rounded to 23 bits below the largest number
of its row, and so are the weights times the scales of a chunk, to 24: η_j grows by
|scale|·2⁻²³·max|q|·Σ|k_jd|, E_d by 2⁻²⁴·max|v| for each key of a chunk.

For small η this is Σ p_j |v_jd − o_d| η_j, the first-order bound; for η so large that no kernel of
this precision could know the weights, it still says that o_d lies among the visible values.
"""

from __future__ import annotations

import math
import os
import platform
from typing import Any, NamedTuple

import numpy as np

from oracle import Answer

DOT_ROUNDINGS = 2  # beside the D of the dot product itself: the scale's own, and its product
SOFTCAP_ROUNDINGS = 8  # x / c, c·tanh, c itself, and tanh to within 2 ulp, which is 4 u
LOG_ROUNDINGS = 4  # 2 ulp
SUM_ROUNDINGS = 2  # the division, and one more where weights are rounded before they are used
UNDERFLOWS = 4  # of the smallest number there is, for each exponential and each product
SMALL = 2.0**-96  # sums of float32 numbers below this are made again in float64
LARGEST_EXPONENT = 700.0  # exp of more than this is as good as infinite


class Arithmetic(NamedTuple):
    """How a kernel computes, as far as the bound depends on it."""

    exp_roundings: float  # relative error of an exponential, in u: twice that in ulp
    chunk: int | None = None  # keys that are added from zero; None: all of a row
    merge_roundings: int = 0  # for each chunk but the first, and for a sink
    weight_error: float = 0.0  # relative error of a weight where it meets a value
    flushed: float = 0.0  # results of float32 arithmetic smaller than this are 0
    least: float = 0.0  # numbers of the inputs smaller than this count as 0
    # Queries are off by this share of the largest number of their row, and weights of a chunk times
    # their values by half of it, of the largest value there is.
    digit: float = 0.0


WHOLE_ROWS = Arithmetic(
    exp_roundings=5.2
)  # 2.6 ulp: the worst known of NumPy's float32 exp is 2.52
X86 = platform.machine() in ("x86_64", "AMD64") and not os.environ.get("REGARD_TEST_KERNEL")
FUSED = Arithmetic(2.0, chunk=256, merge_roundings=4, flushed=2.0**-126 if X86 else 0.0)
INTEGERS = FUSED._replace(digit=1.01 * 2.0**-23)
SHORT_INTEGERS = FUSED._replace(digit=1.01 * 2.0**-15)  # for results of half types
PAIRS = FUSED._replace(weight_error=2.0**-8 / (1 - 2.0**-8), least=2.0**-126)


class Precision(NamedTuple):
    """A floating-point format: half the distance from 1 to the next number, and its floor."""

    unit: float
    floor: float
    largest: float


def precision_of(dtype: Any) -> Precision:
    name = np.dtype(dtype).name
    if name == "bfloat16":
        return Precision(2.0**-8, 2.0**-133, float.fromhex("0x1.fep127"))
    information = np.finfo(name)
    return Precision(
        float(information.eps) / 2,
        float(information.smallest_subnormal),
        float(information.max),
    )


def accumulator(dtype: Any) -> np.dtype:
    """What sums of this dtype are kept in: float32 for everything narrower than float64."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


class Bounds(NamedTuple):
    output: np.ndarray
    weights: np.ndarray
    lse: np.ndarray


def error_bounds(
    query: Any,
    key: Any,
    value: Any,
    answer: Answer,
    *,
    dtype: Any,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    sink: Any = None,
    exact: bool = False,
    arithmetic: Arithmetic = WHOLE_ROWS,
    rows_off: tuple[np.ndarray, np.ndarray] | None = None,
) -> Bounds:
    """The largest error that each number of the result may have, in float64.

    `answer` is the oracle's, `dtype` the result's, and `exact` means float64 accumulation. With
    `rows_off`, query and key (with heads) are made rows, and these are the errors of their numbers.
    """
    query, key, value = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    vector, headless = query.ndim == 1, query.ndim <= 2
    if vector:
        query = query[np.newaxis]
        answer = Answer(*(x[np.newaxis] for x in answer))
    if headless:
        query, key, value = query[np.newaxis], key[np.newaxis], value[np.newaxis]
        answer = Answer(*(x[np.newaxis] for x in answer))
    with np.errstate(all="ignore"):
        bounds = _error_bounds(
            *(query, key, value, answer, dtype, scale, softcap, bias, sink, exact, arithmetic),
            rows_off,
        )
    if headless:
        bounds = Bounds(*(x[0] for x in bounds))
    if vector:
        bounds = Bounds(*(x[0] for x in bounds))
    return bounds


def _error_bounds(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    answer: Answer,
    dtype: Any,
    scale: float | None,
    softcap: float | None,
    bias: Any,
    sink: Any,
    exact: bool,
    arithmetic: Arithmetic,
    rows_off: tuple[np.ndarray, np.ndarray] | None,
) -> Bounds:
    heads, width = query.shape[-3], query.shape[-1]
    repeats = heads // key.shape[-3] if heads else 1
    key, value = (np.repeat(x, repeats, axis=-3)[..., :heads, :, :] for x in (key, value))
    inner = precision_of(np.float64 if exact else accumulator(dtype))
    outer = precision_of(dtype)
    log_outer = precision_of(accumulator(dtype))
    visible, weights, lse = answer.visible, answer.weights, answer.lse
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0

    # The errors of the logits. What is not visible takes no part in anything below.
    sizes = np.einsum("...id,...jd->...ij", abs(query), abs(key)) * abs(scale)
    narrow = inner == precision_of(np.float32)
    floor = max(inner.floor, arithmetic.flushed if narrow else 0.0, arithmetic.least)
    underflow = floor * (UNDERFLOWS + (width + DOT_ROUNDINGS) * abs(scale))
    for one, other in ((query, key), (key, query)) if arithmetic.least else ():
        lost = np.where(abs(one) < arithmetic.least, abs(one), 0.0)
        letters = "...id,...jd->...ij" if one is query else "...jd,...id->...ij"
        underflow = underflow + np.einsum(letters, lost, abs(other)) * abs(scale)
    wobble = (width + DOT_ROUNDINGS) * inner.unit * sizes + underflow
    if rows_off is not None:
        off, key_off = rows_off[0], np.repeat(rows_off[1], repeats, axis=-3)
        pairs = ((off, abs(key)), (abs(query), key_off), (off, key_off))
        parts = [np.einsum("...id,...jd->...ij", *pair) for pair in pairs]
        wobble = wobble + abs(scale) * sum(parts)
    if arithmetic.digit:  # 0 times a sum that overflows would be NaN
        largest = abs(query).max(axis=-1, initial=0.0)[..., np.newaxis]
        digits = arithmetic.digit * abs(scale) * abs(key).sum(axis=-1)[..., np.newaxis, :]
        wobble = wobble + digits * largest
    logits = np.where(visible, answer.logits, -np.inf)
    if softcap is not None:
        wobble = wobble + SOFTCAP_ROUNDINGS * inner.unit * np.minimum(sizes, softcap)
    if bias is not None:
        added = np.abs(np.asarray(bias).astype(np.float64))
        wobble = wobble + inner.unit * (added + np.where(visible, abs(logits), 0.0))
    maximum = logits.max(axis=-1, initial=-np.inf)
    if sink is not None:
        sinks = np.broadcast_to(np.asarray(sink).astype(np.float64), (heads,))
        sinks = np.broadcast_to(sinks[:, np.newaxis], lse.shape)
        maximum = np.maximum(maximum, sinks)
    wobble = wobble + inner.unit * (
        abs(logits - maximum[..., np.newaxis]) + arithmetic.exp_roundings
    )
    wobble = np.where(visible, wobble, 0.0)

    # The weights with those errors: `risen` bounds p·(exp(η) − 1), `least` is Σ p·exp(−η).
    def raised(wobble: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        risen = _risen(weights, logits - lse[..., np.newaxis], wobble)
        return risen, (weights * np.exp(-wobble)).sum(axis=-1)

    risen, least = raised(wobble)
    met = np.where(visible, wobble + arithmetic.weight_error, 0.0)  # as they meet the values
    met_risen, met_least = raised(met) if arithmetic.weight_error else (risen, least)
    count = visible.sum(axis=-1)
    sink_risen = np.zeros_like(lse)
    if sink is not None:
        sink_weight = np.exp(sinks - lse)
        sink_wobble = inner.unit * (abs(sinks) + abs(sinks - maximum) + arithmetic.exp_roundings)
        sink_wobble = np.where(np.isfinite(sinks), sink_wobble, 0.0)
        sink_risen = _risen(sink_weight, sinks - lse, sink_wobble)
        sink_least = sink_weight * np.exp(-sink_wobble)
        least, met_least = least + sink_least, met_least + sink_least
        count = count + 1

    values = np.where(visible[..., np.newaxis], value[..., np.newaxis, :, :], 0.0)
    distance = abs(values - answer.output[..., np.newaxis, :])
    distance = np.where(visible[..., np.newaxis], distance, 0.0)  # (…, H, L, S, E)
    drift = np.einsum("...j,...jd->...d", met_risen, distance)
    farthest = distance.max(axis=-2, initial=0.0)
    most = abs(values).max(axis=-2, initial=0.0) * count[..., np.newaxis]
    kept = not arithmetic.least and not arithmetic.digit  # small sums are made again
    column = np.where(kept & (most < SMALL), inner.floor, floor)
    tiny = UNDERFLOWS * (column * count[..., np.newaxis] + floor * distance.sum(axis=-2))
    if sink is not None:
        drift = drift + sink_risen[..., np.newaxis] * abs(answer.output)
        farthest = np.maximum(farthest, abs(answer.output))
        tiny = tiny + floor * UNDERFLOWS * abs(answer.output)
    digits = arithmetic.digit / 2 * np.minimum(count, arithmetic.chunk or 0)
    tiny = tiny + (digits * abs(values).max(axis=(-2, -1), initial=0.0))[..., np.newaxis]
    mass = np.einsum("...j,...jd->...d", weights, abs(values))
    additions = _additions(count, visible.shape[-1], sink is not None, arithmetic)
    roundings = (2 * additions + SUM_ROUNDINGS) * inner.unit
    output = np.minimum(_ratio(drift, met_least), farthest)
    output = output + roundings[..., np.newaxis] * mass + inner.unit * abs(answer.output) + tiny

    # A weight is the output for a value that is 1 at its own key and 0 at all others.
    everything = (risen.sum(axis=-1) + sink_risen)[..., np.newaxis]
    drift = weights * (everything - risen) + (1.0 - weights) * risen
    weight = np.minimum(_ratio(drift, least), np.maximum(weights, 1.0 - weights))
    weight = weight + (roundings[..., np.newaxis] + inner.unit) * weights
    weight = weight + floor * UNDERFLOWS * (count[..., np.newaxis] + 1)
    weight = np.where(visible, weight, 0.0)

    # The log of the row's sum, which is at most that of Σ p·exp(η).
    risen_logs = logits - lse[..., np.newaxis] + wobble
    risen_logs[np.isnan(risen_logs)] = -np.inf  # so far below that the distance overflowed
    if sink is not None:
        sink_logs = (sinks - lse + sink_wobble)[..., np.newaxis]
        risen_logs = np.concatenate([risen_logs, sink_logs], axis=-1)
    log_sum = np.logaddexp.reduce(risen_logs, axis=-1, initial=-np.inf)
    log_sum = np.where(log_sum < 1.0, np.log1p(everything[..., 0]), log_sum)
    log_sum = log_sum + additions * inner.unit + LOG_ROUNDINGS * inner.unit * abs(lse - maximum)
    log_sum = log_sum + (inner.unit + log_outer.unit) * abs(lse) + inner.floor
    log_sum = np.where(visible.any(axis=-1), log_sum, (inner.unit + log_outer.unit) * abs(lse))

    return Bounds(
        _rounded(output, answer.output, outer),
        np.where(visible, _rounded(weight, weights, outer), 0.0),
        np.where(np.isfinite(lse), log_sum, 0.0),
    )


def _additions(count: np.ndarray, keys: int, sink: bool, arithmetic: Arithmetic) -> np.ndarray:
    """Roundings in a row on the way of one number into a sum over the visible keys."""
    if arithmetic.chunk is None:
        return count
    merges = max(-(-keys // arithmetic.chunk) - 1, 0) + sink
    return np.minimum(count, arithmetic.chunk) + arithmetic.merge_roundings * merges


def _risen(weights: np.ndarray, logs: np.ndarray, wobble: np.ndarray) -> np.ndarray:
    """p·(exp(η) − 1), where p may have underflowed while its logarithm has not."""
    small = weights * np.expm1(np.minimum(wobble, 1.0))
    large = np.exp(np.minimum(logs + wobble, LARGEST_EXPONENT)) - weights
    return np.nan_to_num(np.where(wobble < 1.0, small, large), nan=0.0)


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    if numerator.ndim > denominator.ndim:
        denominator = denominator[..., np.newaxis]
    ratio = numerator / denominator
    return np.where(denominator > 0, ratio, np.where(numerator > 0, np.inf, 0.0))


def _rounded(bound: np.ndarray, exact: np.ndarray, outer: Precision) -> np.ndarray:
    """The bound after one more rounding, to the dtype of the result."""
    return bound + outer.unit * (abs(exact) + bound) + outer.floor / 2


def assert_within(actual: Any, exact: np.ndarray, bound: np.ndarray, what: str = "output") -> None:
    """Each number within its bound; NaN exactly where the exact answer has NaN; ±inf alike."""
    dtype = np.asarray(actual).dtype
    actual = np.asarray(actual).astype(np.float64)
    exact, bound = np.asarray(exact), np.asarray(bound)
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, not {exact.shape}"
    if (np.isnan(actual) != np.isnan(exact)).any():
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(exact), f"{what}: where NaN is")

    with np.errstate(all="ignore"):
        overflows = np.isfinite(exact) & (abs(exact) + bound > precision_of(dtype).largest)
    settled = ~np.isfinite(exact) | (overflows & np.isinf(actual))
    infinite = np.isinf(exact)
    if (actual[infinite] != exact[infinite]).any():
        np.testing.assert_array_equal(
            np.where(infinite, actual, 0.0),
            np.where(infinite, exact, 0.0),
            f"{what}: where infinity is",
        )
    unsettled = np.isinf(actual) & ~settled
    if unsettled.any():
        np.testing.assert_array_equal(
            unsettled, np.zeros_like(settled), f"{what}: infinite, but should not be"
        )
    error = np.where(
        settled, 0.0, abs(np.where(settled, 0.0, actual) - np.where(settled, 0, exact))
    )
    excess = np.where(settled, -1.0, error - bound)
    if excess.size and excess.max() > 0:
        worst = np.unravel_index(np.argmax(excess), excess.shape)
        place = tuple(int(i) for i in worst)
        raise AssertionError(
            f"{what}{list(place)} is {float(actual[worst])!r}, exactly {float(exact[worst])!r}: "
            f"off by {float(error[worst]):.3g}, at most {float(bound[worst]):.3g} is allowed "
            f"({int((excess > 0).sum())} of {excess.size} numbers are off)"
        )
