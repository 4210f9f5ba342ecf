"""Mistakes that ordinary numbers hide: overflow, lost digits, constants that do not fit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from regard.diagnosis.mistakes.entry import (
    Array,
    Equivalent,
    Mistake,
    Severity,
    blend,
    logits,
    raw_weights,
    replacing,
    softmax,
)
from regard.diagnosis.mistakes.softmax import SOFTMAX
from regard.diagnosis.probe import Probe, Values, Variant

DTYPE = (
    "np.asarray(x, dtype=query.dtype)  # every constant and buffer in the inputs' own dtype",
    "torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)  # wide inside, own dtype out",
)


def _shift(by: Callable[[Array], Array]) -> tuple[Variant, ...]:
    """Something else than the row maximum is subtracted."""

    def row_maximum(values: Values, probe: Probe) -> Array:
        scores = logits(values)
        return np.broadcast_to(by(scores), scores.shape)[..., 0]

    return (
        replacing(row_maximum=row_maximum, weights=raw_weights),
        replacing(False, row_maximum=row_maximum, weights=raw_weights),
    )


def _blended_first(values: Values, probe: Probe) -> Array:
    """The blend exp(scores)·V, divided by the sum of the row at the end."""
    exponentials = np.exp(logits(values))
    return np.asarray(blend(exponentials, values["values"]) / exponentials.sum(-1, keepdims=True))


def _by_logarithm(values: Values, probe: Probe) -> Array:
    """exp(scores − ln Σ exp(scores))."""
    scores = logits(values)
    return np.asarray(np.exp(scores - np.log(np.exp(scores).sum(-1, keepdims=True))))


def _mean(scores: Array) -> Array:
    return np.asarray(np.where(np.isneginf(scores), 0, scores).mean(-1, keepdims=True))


def _plus_one(values: Values, probe: Probe) -> Array:
    return np.asarray(values["scores"] * values["scale"] + 1)


def _zeros(values: Values, probe: Probe) -> Array:
    return np.zeros(logits(values).shape[:-1])


def _with_epsilon(epsilon: float) -> tuple[Variant, ...]:
    def shifted(values: Values, probe: Probe) -> Array:
        scores = logits(values)
        e = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(e / (e.sum(-1, keepdims=True) + epsilon))

    def bare(values: Values, probe: Probe) -> Array:
        e = np.exp(logits(values))
        return np.asarray(e / (e.sum(-1, keepdims=True) + epsilon))

    return (replacing(weights=shifted), replacing(weights=bare))


def _rounded(decimals: int) -> tuple[Variant, ...]:
    return (
        replacing(weights=lambda v, p: softmax(logits(v)).round(decimals)),
        replacing(output=lambda v, p: blend(v["weights"], v["values"]).round(decimals)),
        replacing(scaled=lambda v, p: v["scores"].round(decimals) * v["scale"]),
        replacing(
            scaled=lambda v, p: (v["scores"] * v["scale"]).round(decimals),
        ),
    )


def _clipped(limit: float) -> Variant:
    return replacing(weights=lambda v, p: softmax(np.clip(logits(v), -limit, limit)))


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


def _numeric(
    name: str,
    title: str,
    why: str,
    variants: tuple[Variant, ...],
    severity: Severity,
    lines: tuple[str, str] = SOFTMAX,
) -> Mistake:
    breaks = "range" if severity == "fragile" else ""
    return Mistake(name, "numerics", title, why, *lines, variants, severity, breaks)


MISTAKES = (
    _numeric(
        "scores_clipped",
        "scores are clipped before exp",
        "Large scores become equal, and what was a clear choice becomes a blend.",
        tuple(_clipped(limit) for limit in (1.0, 2.0)),
        "wrong",
    ),
    _numeric(
        "rounded",
        "numbers are rounded on the way",
        "round() is for printing; what is rounded is lost for everything after it.",
        tuple(variant for decimals in (1, 2, 3, 4, 5, 6, 8) for variant in _rounded(decimals)),
        "wrong",
        ("print(weights.round(3))  # round what is shown, not what is used",) * 2,
    ),
    _numeric(
        "epsilon_in_the_denominator",
        "a small number is added to the sum of the exponentials",
        "The sum is at least 1 once the maximum is subtracted; what is added only takes away from "
        "the weights.",
        tuple(
            v for power in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12) for v in _with_epsilon(10.0**-power)
        ),
        "wrong",
    ),
)

# What is told by how far off a result is, not by what it is.
COMPUTED_IN_FLOAT32 = _numeric(
    "computed_in_float32",
    "float64 goes in and out, but something between has only the digits of float32",
    "A buffer, a constant or a softmax in float32 throws away half of the digits.",
    (),
    "wrong",
    DTYPE,
)
COMPUTED_IN_HALF = _numeric(
    "computed_in_half_precision",
    "something between has only the digits of a half type",
    "Three digits are left. Keep the scores and softmax in float32, and round the result once.",
    (),
    "wrong",
    DTYPE,
)
INTEGERS_TRUNCATED = _numeric(
    "integers_truncated",
    "integers go in, and the result is cut to integers",
    "A buffer was made like the query (empty_like, zeros_like): what is written into it loses "
    "everything after the point.",
    (),
    "fragile",
    ("query = np.asarray(query, float)", "q = q.float()"),
)
HALF_CONSTANT = _numeric(
    "half_precision_constant",
    "the number that hides keys does not exist in float16",
    "−10⁹ is −∞ there, and 0·∞ is NaN; torch refuses to fill with it.",
    (),
    "fragile",
    (
        "scores = np.where(keep, scores, -np.inf)",
        "scores = scores.masked_fill(~keep, float('-inf'))",
    ),
)

FRAGILE = (
    _numeric(
        "no_maximum_subtracted",
        "exp is taken without subtracting the row maximum",
        "exp overflows above 709.8 (float64) or 88.7 (float32): ∞/∞ is NaN. Far below it is 0/0.",
        (
            *_shift(lambda scores: np.zeros(())),
            replacing(output=_blended_first),
            replacing(False, output=_blended_first),
            replacing(weights=_by_logarithm),
            replacing(False, weights=_by_logarithm),
        ),
        "fragile",
    ),
    _numeric(
        "no_maximum_subtracted_and_one_added",
        "exp is taken without subtracting the row maximum, and 1 is added to visible scores",
        "The 1 cancels in softmax, but exp overflows one earlier: above 708.8 (float64).",
        (
            replacing(scaled=_plus_one, row_maximum=_zeros, weights=raw_weights),
            replacing(False, scaled=_plus_one, row_maximum=_zeros, weights=raw_weights),
        ),
        "fragile",
    ),
    _numeric(
        "global_maximum",
        "the maximum of the whole matrix is subtracted instead of that of each row",
        "A row far below the highest one becomes 0/0.",
        _shift(lambda scores: scores.max((-1, -2), keepdims=True))
        + _shift(lambda scores: scores.max(keepdims=True)),
        "fragile",
    ),
    _numeric(
        "mean_subtracted",
        "the mean is subtracted instead of the maximum",
        "A score far above the mean of its row still overflows.",
        _shift(_mean) + _shift(lambda scores: scores.mean((-1, -2), keepdims=True)),
        "fragile",
    ),
    _numeric(
        "overflow_hidden",
        "NaN and infinity are replaced by numbers",
        "nan_to_num hides where something went wrong; the row is then wrong without a sign of it.",
        tuple(
            replacing(
                row_maximum=v.replaced["row_maximum"],
                weights=lambda v, p: np.nan_to_num(raw_weights(v, p)),
            )
            for v in _shift(lambda scores: np.zeros(()))
        ),
        "fragile",
    ),
    _numeric(
        "large_scores_clipped",
        "large scores are clipped before exp",
        "Scores beyond the limit become equal, so the largest of them no longer wins.",
        tuple(
            _clipped(limit)
            for limit in (5.0, 10.0, 20.0, 30.0, 50.0, 60.0, 80.0, 88.0, 100.0, 500.0, 700.0)
        ),
        "fragile",
    ),
)

EQUIVALENTS = (
    Equivalent(
        "any_shift",
        "subtracting something else than the maximum, the same along the row",
        "right",
        "Softmax does not change. It is fragile: see no_maximum_subtracted, global_maximum and "
        "mean_subtracted.",
        _shift(_mean)[0],
    ),
    Equivalent(
        "exp_and_log",
        "exp of log_softmax",
        "right",
        "exp undoes the logarithm.",
        replacing(weights=lambda v, p: np.exp(np.log(softmax(logits(v))))),
    ),
    Equivalent(
        "online_softmax",
        "softmax piece by piece with a running maximum",
        "right",
        "Each piece is corrected by exp of how far the maximum rose.",
        replacing(weights=_piece_by_piece),
    ),
)
