"""Mistakes between the scores and the weights: the axis of softmax, and what is used instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.mistakes.entry import (
    NINES,
    Entries,
    Replacement,
    Variants,
    both,
    filled,
    logits,
    mistakes,
    replacing,
    softmax,
)

SOFTMAX = (
    "e = np.exp(s - s.max(axis=-1, keepdims=True)); P = e / e.sum(axis=-1, keepdims=True)",
    "weights = torch.softmax(scores, dim=-1)",
)


def _weights(*ways: Callable[[Array], Any]) -> Variants:
    """Other weights, made of the scores (B, H, L, S) that softmax gets."""

    def made(way: Callable[[Array], Any]) -> Callable[[Array, int], Any]:
        return lambda scores, rank: way(scores)

    return _weights_by_rank(*map(made, ways))


def _weights_by_rank(*ways: Callable[[Array, int], Any]) -> Variants:
    """The same, if they depend on how many axes the function gets."""

    def made(way: Callable[[Array, int], Any]) -> Replacement:
        return lambda values, probe: way(logits(values), probe.rank)

    skipping, using = zip(*(both(weights=made(way)) for way in ways), strict=True)
    return (*skipping, *using)


def _over_axis(*ways: Callable[[Array, int], Any]) -> Variants:
    """The same, and with hidden scores that are large and finite, where whole columns may be."""
    found = _weights_by_rank(*ways)
    large = (one | replacing(masked=filled(NINES)) for one in found[len(found) // 2 :])
    return (*found, *large)


def _exp(scores: Array) -> Array:
    return np.asarray(np.exp(scores - scores.max(axis=-1, keepdims=True)))


def _sums(exponentials: Array, axis: int = -1) -> Array:
    return np.asarray(exponentials.sum(axis, keepdims=True))


def _over(scores: Array, axes: tuple[int, ...]) -> Array:
    """Exponentials below 1, divided by the sum over several axes."""
    exponentials = _exp(scores)
    return np.asarray(exponentials / exponentials.sum(axes, keepdims=True))


def _shifted_beside_one(scores: Array) -> Array:
    """Exponentials shifted by the maximum, 0 among them, and the 1 beside them not shifted."""
    exponentials = np.exp(scores - np.maximum(scores.max(axis=-1, keepdims=True), 0))
    return np.asarray(exponentials / (1 + _sums(exponentials)))


def _axis_1(rank: int) -> int:
    """Axis 1 of an array of this rank, as an axis of (B, H, L, S)."""
    return {3: -2, 4: 1}.get(rank, -1)


def _without_hidden(scores: Array) -> Array:
    return np.where(np.isneginf(scores), 0, scores)


def _maximum_of_other_row(scores: Array) -> Array:
    """Maxima without keepdims: of square scores the one of row j meets column j."""
    if scores.shape[-1] != scores.shape[-2]:
        return softmax(scores)
    return softmax(scores - scores.max(-1)[..., np.newaxis, :])


WEIGHTS: Entries = {
    "softmax_over_queries": (
        "softmax runs over the queries instead of the keys",
        "Columns add up to 1, rows do not: queries compete for each key.",
        _over_axis(lambda s, rank: softmax(s, -2)),
    ),
    "softmax_over_heads": (
        "softmax runs over the heads instead of the keys",
        "Heads compete with each other; with one head every weight is 1.",
        _over_axis(
            lambda s, rank: softmax(s, 1),
            lambda s, rank: softmax(s, 1 if rank > 2 else -2),
        ),
    ),
    "softmax_over_batch": (
        "softmax runs over the batch instead of the keys",
        "Texts compete with each other; in a batch of one, every weight is 1.",
        _over_axis(
            lambda s, rank: softmax(s, 0 if rank == 4 else -1),
            lambda s, rank: softmax(s, {2: -2, 3: 1}.get(rank, 0)),
            lambda s, rank: softmax(s, 0),
        ),
    ),
    "softmax_over_axis_1": (
        "softmax runs over axis 1 instead of the last one",
        "Right for two axes. With three, axis 1 is that of the queries; with four, of the heads.",
        _over_axis(lambda s, rank: softmax(s, _axis_1(rank))),
    ),
    "denominator_over_axis_1": (
        "the sum of the exponentials runs over axis 1 instead of the last one",
        "Right for two axes. With three, axis 1 is that of the queries; with four, of the heads.",
        _weights_by_rank(lambda s, rank: _exp(s) / _sums(_exp(s), _axis_1(rank))),
    ),
    "softmax_over_everything": (
        "softmax runs over the whole matrix of scores",
        "All weights of a head together add up to 1, and each row to a part of it.",
        _weights(
            lambda s: softmax(s, (2, 3)),
            lambda s: softmax(s, (1, 2, 3)),
            *(partial(_over, axes=axes) for axes in ((2, 3), (1, 2, 3), (0, 1, 2, 3))),
        ),
    ),
    "softmax_over_heads_and_keys": (
        "softmax runs over heads and keys together",
        "The weights of all heads together add up to 1; one head with high scores takes most.",
        _weights(lambda s: softmax(s, (1, 3))),
    ),
    "denominator_over_queries": (
        "the exponentials are divided by the sums of their columns",
        "exp and the maximum follow the row, the sum the column; rows do not add up to 1.",
        _weights(lambda s: _exp(s) / _sums(_exp(s), -2)),
    ),
    "keepdims_lost": (
        "the row sums lost their axis (no keepdims): column j is divided by the sum of row j",
        "On a square matrix NumPy broadcasts the sums along the wrong axis without an error.",
        _weights(
            lambda s: _exp(s) / _exp(s).sum(-1)[..., None, :],
            lambda s: np.exp(s) / np.exp(s).sum(-1)[..., None, :],
        ),
    ),
    "maximum_over_queries": (
        "the maximum of each column is subtracted instead of that of each row",
        "Only a constant along the row cancels; a constant along the column changes weights.",
        _weights(lambda s: softmax(s - s.max(-2, keepdims=True))) + _weights(_maximum_of_other_row),
    ),
    "no_softmax": (
        "there is no softmax",
        "Scores are used as weights: they may be negative and do not add up to 1.",
        _weights(_without_hidden, lambda s: s),
    ),
    "softmax_twice": (
        "softmax is applied twice",
        "The second one gets numbers between 0 and 1, so its weights are almost equal.",
        _weights(lambda s: softmax(softmax(s))),
    ),
    "exp_missing": (
        "scores are divided by their sum without exp",
        "Negative scores give negative weights, and a sum near 0 makes them huge.",
        _weights(lambda s: _without_hidden(s) / _sums(_without_hidden(s)), lambda s: s / _sums(s)),
    ),
    "power_of_two": (
        "2 is raised to the scores instead of e",
        "Scores count ln 2 = 0.69 times as much as they should.",
        _weights(lambda s: softmax(s * np.log(2))),
    ),
    "log_softmax": (
        "log_softmax is used instead of softmax",
        "The weights are logarithms: all negative, and they do not add up to 1.",
        _weights(lambda s: np.log(softmax(s))),
    ),
    "unnormalised": (
        "the exponentials are not divided by their sum",
        "Rows do not add up to 1, so the output grows with the number of keys.",
        _weights(np.exp, _exp),
    ),
    "sigmoid": (
        "a sigmoid is used instead of softmax",
        "Each weight depends on its own score alone, and rows do not add up to 1.",
        _weights(lambda s: 1 / (1 + np.exp(-s))),
    ),
    "hard_maximum": (
        "the key with the highest score gets all weight",
        "Attention blends values; a maximum has no gradient and ignores the other keys.",
        _weights(lambda s: np.arange(s.shape[-1]) == s.argmax(axis=-1, keepdims=True)),
    ),
    "weights_all_equal": (
        "every token gets the same weight",
        "Scores have no effect: the softmax gets the same number for every key, as where all are "
        "hidden by a finite one, or it runs over an axis of length 1.",
        _weights(
            lambda s: softmax(np.where(np.isneginf(s), s, 0)),
            lambda s: np.full_like(s, 1 / s.shape[-1]),
        ),
        (
            "weights = softmax(scores, axis=1)  # (batch, tokens)",
            "weights = scores.softmax(dim=1)  # (batch, tokens)",
        ),
    ),
    "one_in_the_denominator": (
        "1 is added to the sum of the exponentials",
        "Rows add up to less than 1. As a sink that is a choice (softmax1), but if the maximum "
        "m was subtracted, the 1 has to be exp(0 − m).",
        _weights(
            lambda s: _exp(s) / (1 + _sums(_exp(s))),
            lambda s: np.exp(s) / (1 + _sums(np.exp(s))),
            _shifted_beside_one,
        ),
    ),
}
MISTAKES = mistakes("one head", SOFTMAX, WEIGHTS)
