"""Attention between channels, as in XCiT: cosines of channels over all tokens, and its mistakes."""

from __future__ import annotations

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import Mistake, heads_of, softmax

NAME = "attention between channels"
SMALLEST = 1e-12


def _unit(rows: Array, axis: int | None) -> Array:
    """Vectors of length 1 along an axis; as they are without one."""
    if axis is None:
        return rows
    norms = np.linalg.norm(rows, axis=axis, keepdims=True)
    return np.asarray(rows / np.maximum(norms, SMALLEST))


def _between(
    queries: int | None = -2,
    keys: int | None = -2,
    softmax_axis: int = -1,
    *,
    turned: bool = False,
    by: str = "",
) -> Variant:
    """Queries and keys (B, H, L, D) normalised along an axis; each channel reads all channels.

    `by` is the axis whose length's root divides the cosines.
    """

    def output(values: Values, probe: Probe) -> Array:
        q, k, v = heads_of(values)
        if q.shape[-2] != k.shape[-2]:  # a channel is as long in both
            raise ValueError("as many keys as queries")
        scores = _unit(q, queries).swapaxes(-1, -2) @ _unit(k, keys)  # (B, H, D, D)
        scores = scores / (probe.sizes[by] ** 0.5 if by else 1.0)
        weights = softmax(scores, softmax_axis)
        return np.asarray(v @ (weights if turned else weights.swapaxes(-1, -2)))

    return Variant({"output": output})


RIGHT_ONES = (_between(),)
_LINES = (
    "q, k = unit(q, axis=-2), unit(k, axis=-2)  # (..., L, D), along the tokens",
    "q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)  # (..., D, L), along the tokens",
)
_SOFTMAX = (
    "weights = softmax(q.swapaxes(-1, -2) @ k, axis=-1)  # (..., D, D)",
    "weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)  # q, k (..., D, L)",
)
MISTAKES = (
    Mistake(
        "channels_normalised_along_an_axis",
        "one head",
        "queries or keys of attention between channels are not normalised along the tokens",
        "A score is the cosine of two channels over all tokens; along the channels of each token "
        "it is another number, which grows with the length of the text.",
        *_LINES,
        variants=tuple(
            _between(one, other)
            for one, other in (
                (-1, -2),
                (-2, -1),
                (-1, -1),
                (None, None),
                (None, -2),
                (-2, None),
            )
        ),
    ),
    Mistake(
        "channels_softmax_axis",
        "one head",
        "the softmax of attention between channels runs along the channels of the queries",
        "The weights that a channel gives to others add up to 1, along the last axis.",
        *_SOFTMAX,
        variants=(_between(softmax_axis=-2),),
    ),
    Mistake(
        "channels_transposed",
        "one head",
        "the weights of attention between channels are transposed",
        "Channel c of the output is the sum over channels c' of weight (c, c') times value c'.",
        *_SOFTMAX,
        variants=(_between(turned=True), _between(softmax_axis=-2, turned=True)),
    ),
    Mistake(
        "channels_scaled",
        "one head",
        "cosines of channels are divided by a root",
        "A cosine is at most 1 already: a learned temperature takes the place of 1/√D.",
        *_LINES,
        variants=(_between(by="D"), _between(by="L")),
    ),
)
