"""Mistakes that ordinary numbers do not show: overflow, lost digits, constants that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Variants,
    blend,
    both,
    equivalents,
    logits,
    mistakes,
    raw_weights,
    replacing,
    softmax,
)
from regard.diagnosis.mistakes.softmax import SOFTMAX

DTYPE = (
    "np.asarray(x, dtype=query.dtype)  # every constant and buffer in the dtype of the inputs",
    "torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)  # wide inside, own dtype out",
)
ROUNDED = ("print(weights.round(3))  # round what is shown, not what is used",) * 2
FLOATS = ("query = np.asarray(query, float)", "q = q.float()")
INFINITY = (
    "scores = np.where(keep, scores, -np.inf)",
    "scores = scores.masked_fill(~keep, float('-inf'))",
)


def _shift(shift: Callable[[Array], Array]) -> Variants:
    """Something other than the row maximum is subtracted."""

    def row_maximum(values: Values, probe: Probe) -> Array:
        scores = logits(values)
        return np.broadcast_to(shift(scores), scores.shape)[..., 0]

    return both(row_maximum=row_maximum, weights=raw_weights)


def _zero(values: Values, probe: Probe) -> Array:
    return np.zeros(logits(values).shape[:-1])


def _mean(scores: Array) -> Array:
    return np.asarray(np.where(np.isneginf(scores), 0, scores).mean(-1, keepdims=True))


def _blended_first(values: Values, probe: Probe) -> Array:
    """exp(scores)·V, divided by the sum of the row at the end."""
    exponentials = np.exp(logits(values))
    return np.asarray(blend(exponentials, values["values"]) / exponentials.sum(-1, keepdims=True))


def _by_logarithm(values: Values, probe: Probe) -> Array:
    """exp(scores − ln Σ exp(scores))."""
    scores = logits(values)
    return np.asarray(np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True))))


def _with_epsilon(epsilon: float) -> Variants:
    def divided(e: Array) -> Array:
        return np.asarray(e / (e.sum(-1, keepdims=True) + epsilon))

    return (
        replacing(weights=lambda v, p: divided(np.exp(logits(v) - logits(v).max(-1)[..., None]))),
        replacing(weights=lambda v, p: divided(np.exp(logits(v)))),
    )


def _rounded(decimals: int) -> Variants:
    return (
        replacing(weights=lambda v, p: softmax(logits(v)).round(decimals)),
        replacing(output=lambda v, p: blend(v["weights"], v["values"]).round(decimals)),
        replacing(scaled=lambda v, p: v["scores"].round(decimals) * v["scale"]),
        replacing(scaled=lambda v, p: (v["scores"] * v["scale"]).round(decimals)),
    )


def _clipped(*limits: float) -> Variants:
    def at(limit: float) -> Variant:
        return replacing(weights=lambda v, p: softmax(np.clip(logits(v), -limit, limit)))

    return tuple(map(at, limits))


def _piece_by_piece(values: Values, probe: Probe) -> Array:
    """Two keys at a time, with the maximum and the sum so far."""
    scores = logits(values)
    highest = np.full((*scores.shape[:-1], 1), -np.inf)
    total = np.zeros_like(highest)
    for start in range(0, scores.shape[-1], 2):
        piece = scores[..., start : start + 2]
        rising = np.maximum(highest, piece.max(-1, keepdims=True))
        finite = np.where(np.isneginf(rising), 0, rising)
        total = total * np.exp(highest - finite) + np.exp(piece - finite).sum(-1, keepdims=True)
        highest = rising
    return np.asarray(np.exp(scores - highest) / total)


ORDINARY: Entries = {
    "scores_clipped": (
        "scores are clipped before exp",
        "Large scores become equal, and a clear choice becomes a blend.",
        _clipped(1.0, 2.0),
    ),
    "rounded": (
        "numbers are rounded on the way",
        "round() is for printing; digits that it removes are lost for everything after it.",
        tuple(variant for decimals in (1, 2, 3, 4, 5, 6, 8) for variant in _rounded(decimals)),
        ROUNDED,
    ),
    "epsilon_in_the_denominator": (
        "a small number is added to the sum of the exponentials",
        "Once the maximum is subtracted, the sum is at least 1; the number only lowers weights.",
        # Smaller ones change no digit of float32, which is a note.
        tuple(v for power in range(1, 7) for v in _with_epsilon(10.0**-power)),
    ),
}
MISTAKES = mistakes("numerics", SOFTMAX, ORDINARY)

# What is recognised by the size of the error, not by the values.
DIGITS: Entries = {
    "computed_in_float32": (
        "float64 goes in and out, but something between has only the digits of float32",
        "A buffer, a constant or a softmax in float32 loses half of the digits; "
        "so does a small number that is added to a sum.",
        (),
    ),
    "computed_in_half_precision": (
        "something between has only the digits of a half-precision type",
        "Three digits are left. Keep the scores and softmax in float32, and round the result once.",
        (),
    ),
}
# What is seen in the call, not in the values.
COMPUTED_IN_FLOAT32, COMPUTED_IN_HALF = mistakes("numerics", DTYPE, DIGITS)
DTYPES: Entries = {
    "integers_truncated": (
        "integers go in, and the result is truncated to integers",
        "A buffer was made like the query (empty_like, zeros_like): it keeps no fractions.",
        (),
        FLOATS,
    ),
    "half_precision_constant": (
        "the number that hides keys does not exist in float16",
        "−10⁹ is −∞ there, and 0·∞ is NaN; torch refuses to fill with it.",
        (),
        INFINITY,
    ),
}
INTEGERS_TRUNCATED, HALF_CONSTANT = mistakes("numerics", DTYPE, DTYPES, "fragile", "range")

LARGE_SCORES: Entries = {
    "no_maximum_subtracted": (
        "exp is taken without subtracting the row maximum",
        "exp overflows above 709.8 (float64) or 88.7 (float32): ∞/∞ is NaN. Far below it is 0/0.",
        both(row_maximum=_zero, weights=raw_weights)
        + both(output=_blended_first)
        + both(weights=_by_logarithm),
    ),
    "no_maximum_subtracted_and_one_added": (
        "exp is taken without subtracting the row maximum, and 1 is added to visible scores",
        "The 1 cancels in softmax, but exp overflows one earlier: above 708.8 (float64).",
        both(
            scaled=lambda v, p: v["scores"] * v["scale"] + 1,
            row_maximum=_zero,
            weights=raw_weights,
        ),
    ),
    "global_maximum": (
        "the maximum of the whole matrix is subtracted instead of that of each row",
        "A row far below the highest one becomes 0/0.",
        _shift(lambda s: s.max((-1, -2), keepdims=True)) + _shift(lambda s: s.max(keepdims=True)),
    ),
    "mean_subtracted": (
        "the mean is subtracted instead of the maximum",
        "A score far above the mean of its row still overflows.",
        _shift(_mean) + _shift(lambda scores: scores.mean((-1, -2), keepdims=True)),
    ),
    "overflow_hidden": (
        "NaN and infinity are replaced by numbers",
        "nan_to_num hides the overflow; the row is then wrong, and nothing shows it.",
        (replacing(row_maximum=_zero, weights=lambda v, p: np.nan_to_num(raw_weights(v, p))),),
    ),
    "large_scores_clipped": (
        "large scores are clipped before exp",
        "Scores beyond the limit become equal, so the largest of them no longer wins.",
        _clipped(5.0, 10.0, 20.0, 30.0, 50.0, 60.0, 80.0, 88.0, 100.0, 500.0, 700.0),
    ),
}
FRAGILE = mistakes("numerics", SOFTMAX, LARGE_SCORES, "fragile", "range")

EQUIVALENTS = equivalents(
    {
        "any_shift": (
            "subtracting another number than the maximum, the same along the row",
            "right",
            "Softmax does not change. It is fragile: see no_maximum_subtracted, global_maximum and "
            "mean_subtracted.",
            _shift(_mean)[0],
        ),
        "exp_and_log": (
            "exp of log_softmax",
            "right",
            "exp undoes the logarithm.",
            replacing(weights=lambda v, p: np.exp(np.log(softmax(logits(v))))),
        ),
        "online_softmax": (
            "softmax piece by piece with a running maximum",
            "right",
            "Each piece is corrected by exp of the rise of the maximum.",
            replacing(weights=_piece_by_piece),
        ),
    }
)
