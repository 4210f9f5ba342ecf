"""Mistakes between the scores and the weights: the axis of softmax, and what stands in its place.

Each replaces the weights of the textbook.
"""

from __future__ import annotations

import numpy as np

from regard.diagnosis.mistakes.entry import (
    Array,
    Mistake,
    Replacement,
    logits,
    replacing,
    softmax,
)
from regard.diagnosis.probe import Probe, Values, Variant

SOFTMAX = (
    "e = np.exp(s - s.max(axis=-1, keepdims=True)); P = e / e.sum(axis=-1, keepdims=True)",
    "weights = torch.softmax(scores, dim=-1)",
)


def _softmax(name: str, title: str, why: str, *ways: Replacement) -> Mistake:
    variants = tuple(replacing(weights=way) for way in ways)
    variants += tuple(Variant(one.replaced, absent=False) for one in variants)
    return Mistake(name, "one head", title, why, *SOFTMAX, variants)


def _exponentials(values: Values) -> Array:
    scores = logits(values)
    return np.asarray(np.exp(scores - scores.max(axis=-1, keepdims=True)))


def _sum_over_axis_1(values: Values, probe: Probe) -> Array:
    e = _exponentials(values)
    return np.asarray(e / e.sum({3: -2, 4: 1}.get(probe.rank, -1), keepdims=True))


def _without_keepdims(values: Values, probe: Probe) -> Array:
    e = _exponentials(values)
    return np.asarray(e / e.sum(axis=-1)[..., None, :])


def _linear(values: Values, probe: Probe) -> Array:
    scores = np.where(np.isneginf(logits(values)), 0, logits(values))
    return np.asarray(scores / scores.sum(axis=-1, keepdims=True))


def _hard(values: Values, probe: Probe) -> Array:
    scores = logits(values)
    return np.asarray(np.arange(scores.shape[-1]) == scores.argmax(axis=-1, keepdims=True))


def _over_heads_and_keys(values: Values, probe: Probe) -> Array:
    return softmax(logits(values), axis=(1, 3))


MISTAKES = (
    _softmax(
        "softmax_over_queries",
        "softmax runs over the queries instead of the keys",
        "Columns add up to 1, rows do not: queries compete for each key, instead of sharing out "
        "their own attention.",
        lambda values, probe: softmax(logits(values), axis=-2),
    ),
    _softmax(
        "softmax_over_heads",
        "softmax runs over the heads instead of the keys",
        "Heads compete with each other; with one head every weight is 1.",
        lambda values, probe: softmax(logits(values), axis=1),
        lambda values, probe: softmax(logits(values), axis=1 if probe.rank > 2 else -2),
    ),
    _softmax(
        "softmax_over_batch",
        "softmax runs over the batch instead of the keys",
        "Sentences compete with each other; alone in its batch, every weight is 1.",
        lambda values, probe: softmax(logits(values), axis=0 if probe.rank == 4 else -1),
        lambda values, probe: softmax(logits(values), axis={2: -2, 3: 1}.get(probe.rank, 0)),
    ),
    _softmax(
        "softmax_over_axis_1",
        "softmax runs over axis 1 instead of the last one",
        "Right for two axes. With three, axis 1 is that of the queries; with four, of the heads.",
        lambda values, probe: softmax(logits(values), axis={3: -2, 4: 1}.get(probe.rank, -1)),
    ),
    _softmax(
        "denominator_over_axis_1",
        "the sum of the exponentials runs over axis 1 instead of the last one",
        "Right for two axes. With three, axis 1 is that of the queries; with four, of the heads.",
        _sum_over_axis_1,
    ),
    _softmax(
        "softmax_over_everything",
        "softmax runs over the whole matrix of scores",
        "All weights of a head together add up to 1, so each row gets a fraction of its own.",
        lambda values, probe: softmax(logits(values), axis=(2, 3)),
    ),
    _softmax(
        "softmax_over_heads_and_keys",
        "softmax runs over heads and keys together",
        "The heads of one query share one unit of attention; one strong head silences the others.",
        _over_heads_and_keys,
    ),
    _softmax(
        "denominator_over_queries",
        "the exponentials are divided by the sums of their columns",
        "exp and the maximum go along the row, the sum along the column; rows do not add up to 1.",
        lambda values, probe: _exponentials(values) / _exponentials(values).sum(-2, keepdims=True),
    ),
    _softmax(
        "keepdims_lost",
        "the row sums lost their axis (no keepdims), so column j is divided by the sum of row j",
        "On a square matrix NumPy broadcasts the sums along the wrong axis without a word.",
        _without_keepdims,
        lambda values, probe: (
            np.exp(logits(values)) / np.exp(logits(values)).sum(axis=-1)[..., None, :]
        ),
    ),
    _softmax(
        "maximum_over_queries",
        "the maximum of each column is subtracted instead of that of each row",
        "Only a constant along the row cancels; a constant along the column changes the weights.",
        lambda values, probe: softmax(logits(values) - logits(values).max(-2, keepdims=True)),
    ),
    _softmax(
        "no_softmax",
        "there is no softmax",
        "Scores are used as weights: they may be negative and do not add up to 1.",
        lambda values, probe: np.where(np.isneginf(logits(values)), 0, logits(values)),
        lambda values, probe: logits(values),
    ),
    _softmax(
        "softmax_twice",
        "softmax is applied twice",
        "The second one gets numbers between 0 and 1, so its weights are almost equal.",
        lambda values, probe: softmax(softmax(logits(values))),
    ),
    _softmax(
        "exp_missing",
        "scores are divided by their sum without exp",
        "Negative scores give negative weights, and a sum near 0 makes them huge.",
        _linear,
        lambda values, probe: logits(values) / logits(values).sum(axis=-1, keepdims=True),
    ),
    _softmax(
        "power_of_two",
        "2 is raised to the scores instead of e",
        "Scores count ln 2 = 0.69 times as much as they should.",
        lambda values, probe: softmax(logits(values) * np.log(2)),
    ),
    _softmax(
        "log_softmax",
        "log_softmax stands where softmax should",
        "The weights are logarithms: all negative, and they do not add up to 1.",
        lambda values, probe: np.log(softmax(logits(values))),
    ),
    _softmax(
        "unnormalised",
        "the exponentials are not divided by their sum",
        "Rows do not add up to 1, so the output grows with the number of keys.",
        lambda values, probe: np.exp(logits(values)),
        lambda values, probe: _exponentials(values),
    ),
    _softmax(
        "sigmoid",
        "a sigmoid stands where softmax should",
        "Each key is weighed alone, and rows do not add up to 1.",
        lambda values, probe: 1 / (1 + np.exp(-logits(values))),
    ),
    _softmax(
        "hard_maximum",
        "the best key takes everything",
        "Attention blends; picking the maximum has no gradient and forgets the other keys.",
        _hard,
    ),
    _softmax(
        "one_in_the_denominator",
        "1 is added to the sum of the exponentials",
        "Rows add up to less than 1. As a sink that is a choice (softmax1), but then the 1 has to "
        "be exp(0 − m) where the maximum m was subtracted.",
        lambda values, probe: (
            _exponentials(values) / (1 + _exponentials(values).sum(-1)[..., None])
        ),
        lambda values, probe: (
            np.exp(logits(values)) / (1 + np.exp(logits(values)).sum(-1)[..., None])
        ),
    ),
)
