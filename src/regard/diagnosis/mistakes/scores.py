"""Mistakes before and after softmax in one head: the scale, and which matrix goes where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes.entry import (
    Entries,
    Replacement,
    Variants,
    both,
    equivalents,
    heads_of,
    mistakes,
    replacing,
    transposed,
)

SCALE = (
    "scores = Q @ K.swapaxes(-1, -2) / np.sqrt(K.shape[-1])",
    "scores = q @ k.transpose(-1, -2) / math.sqrt(k.shape[-1])",
)
SCORES = (
    "scores = Q @ K.swapaxes(-1, -2)  # (L, D) @ (D, S)",
    "scores = q @ k.transpose(-1, -2)  # (L, D) @ (D, S)",
)
OUTPUT = (
    "output = P @ V  # (L, S) @ (S, E)",
    "output = weights @ v  # (L, S) @ (S, E)",
)


def _divided_by(divisor: Callable[[Probe], float]) -> Replacement:
    """The scores divided by something else than √D; a scale of the caller's is used."""

    def scaled(values: Values, probe: Probe) -> Array:
        scale = probe.scale
        return values["scores"] / divisor(probe) if scale is None else values["scores"] * scale

    return scaled


def _besides_the_usual(values: Values, probe: Probe) -> Array:
    if probe.scale is None:
        return np.asarray(values["scores"] * values["scale"])
    return np.asarray(values["scores"] * probe.scale / np.sqrt(probe.sizes["D"]))


def _scale(*divisors: Callable[[Probe], float]) -> Variants:
    return tuple(replacing(scaled=_divided_by(divisor)) for divisor in divisors)


def _by_keys_so_far(values: Values, probe: Probe) -> Array:
    """The scores of each row divided by the root of the number of keys that it sees."""
    if probe.scale is not None or not probe.causal:
        return np.asarray(values["scores"] / np.sqrt(probe.sizes["S"]))
    count = probe.visible.sum(-1, keepdims=True)
    return np.asarray(values["scores"] / np.sqrt(np.maximum(count, 1)))


def _root(*axes: str) -> Callable[[Probe], float]:
    return lambda probe: float(np.sqrt(np.prod([probe.sizes[axis] for axis in axes])))


def _model_width(probe: Probe) -> float:
    if "embeddings" not in probe.inputs:
        return _root("H", "D")(probe)
    return float(np.sqrt(probe.inputs["embeddings"].shape[-1]))


def _scores(scores: Callable[..., Any]) -> Variants:
    """Other scores, made of queries, keys and values (B, H, …)."""
    return both(scores=lambda values, probe: scores(*heads_of(values)))


def _output(output: Callable[..., Any]) -> Variants:
    """Another output, made of weights, queries, keys and values (B, H, …)."""
    return both(output=_output_of(output))


def _output_of(output: Callable[..., Any]) -> Replacement:
    return lambda values, probe: output(values["weights"], *heads_of(values))


def _all_axes_reversed(values: Values, probe: Probe) -> Array:
    """`K.T` of an array with more than two axes."""
    queries, keys, _ = heads_of(values)
    alone = (0,) * min(2, 4 - probe.rank)
    scores = queries[alone] @ keys[alone].T
    return np.asarray(scores).reshape(probe.right["scores"].shape)


def _unit(vectors: Array) -> Array:
    return np.asarray(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))


def _distances(q: Array, k: Array) -> Array:
    return np.asarray(np.linalg.norm(q[..., :, None, :] - k[..., None, :, :], axis=-1))


def _divided_output(w: Array, q: Array, k: Array, v: Array) -> Any:
    return w @ v / np.sqrt(q.shape[-1])


def _scaled_queries(values: Values, probe: Probe) -> Array:
    queries, keys, _ = heads_of(values)
    return (queries * (probe.scale or probe.sizes["D"] ** -0.5)) @ transposed(keys)


SCALES: Entries = {
    "no_scale": (
        "the scores are not scaled",
        "q·k grows with the width, so softmax gives one key all weight, and gradients vanish.",
        _scale(_root()),
    ),
    "scale_by_width": (
        "the scores are divided by D instead of √D",
        "Scores are √D times too small, and attention is spread almost evenly.",
        _scale(lambda probe: probe.sizes["D"]),
    ),
    "scale_multiplied": (
        "the scores are multiplied by √D instead of divided by it",
        "Scores are D times too large; softmax turns into a maximum.",
        _scale(lambda probe: probe.sizes["D"] ** -0.5),
    ),
    "scale_fourth_root": (
        "only one of queries and keys is scaled by D^¼",
        "To split the scale over queries and keys, divide both by D^¼.",
        _scale(lambda probe: probe.sizes["D"] ** 0.25),
    ),
    "scale_by_model_width": (
        "the scores are divided by √d_model instead of √d_k",
        "d_k is the width of one head. Where H heads share d_model, the scores are √H times too "
        "small; with one head as wide as d_model there is no difference, and a test passes.",
        _scale(_root("H", "D"), _model_width),
    ),
    "scale_by_width_over_heads": (
        "the width of a head is divided by the number of heads once more",
        "The arrays are split already; dividing again makes scores √H times too large.",
        _scale(lambda probe: float(np.sqrt(probe.sizes["D"] / probe.sizes["H"]))),
    ),
    "scale_by_keys": (
        "the scores are divided by √S, the number of keys, instead of √D",
        "The size of the wrong axis is used. The result changes with the length of the text.",
        (*_scale(_root("S")), replacing(scaled=_by_keys_so_far)),
    ),
    "scale_by_queries": (
        "the scores are divided by √L, the number of queries, instead of √D",
        "The size of the wrong axis is used. A query's result changes with the number of others.",
        _scale(_root("L")),
    ),
    "scale_by_value_width": (
        "the scores are divided by √E, the width of a value, instead of √D",
        "It shows only if values are not as wide as keys.",
        _scale(_root("E")),
    ),
    "width_from_axis_1": (
        "the width is read from axis 1 instead of the last one",
        "Right for two axes. With three, axis 1 is that of the queries; with four, of the heads.",
        _scale(lambda probe: _root({2: "D", 3: "L", 4: "H"}.get(probe.rank, "D"))(probe)),
    ),
    "given_scale_besides": (
        "a scale that is given multiplies the scores besides 1/√D, not instead of it",
        "scale= is the whole factor of q·k; 1/√D is its default.",
        (replacing(scaled=_besides_the_usual),),
        (
            "scores = Q @ K.swapaxes(-1, -2) * (D**-0.5 if scale is None else scale)",
            "scores = q @ k.transpose(-1, -2) * (d**-0.5 if scale is None else scale)",
        ),
    ),
    "scale_after_softmax": (
        "the weights are divided by √D instead of the scores",
        "Softmax gets unscaled scores, and rows of weights add up to 1/√D instead of 1.",
        both(scaled=_divided_by(_root()), output=_output_of(_divided_output)),
    ),
}
PRODUCTS: Entries = {
    "queries_and_keys_swapped": (
        "queries and keys are swapped: the scores are K·Qᵀ",
        "With as many queries as keys no shape shows it, and with Q = K nothing does.",
        _scores(lambda q, k, v: k @ transposed(q)),
    ),
    "values_for_keys": (
        "the scores are Q·Vᵀ: values are used instead of keys",
        "It runs whenever values are as wide as keys.",
        _scores(lambda q, k, v: q @ transposed(v)),
    ),
    "queries_for_keys": (
        "the scores are Q·Qᵀ: queries are used instead of keys",
        "The scores are symmetric, and each token prefers itself.",
        _scores(lambda q, k, v: q @ transposed(q)),
    ),
    "keys_for_queries": (
        "the scores are K·Kᵀ: keys are used instead of queries",
        "The scores are symmetric, and the query has no effect.",
        _scores(lambda q, k, v: k @ transposed(k)),
    ),
    "keys_reshaped": (
        "the keys are reshaped instead of transposed",
        "reshape keeps the numbers in memory order, so each column mixes several keys.",
        _scores(lambda q, k, v: q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2])),
    ),
    "all_axes_reversed": (
        "K.T reverses all axes of the keys, the leading ones too",
        "With two axes that is a transpose; with more, heads and width change places. It runs only "
        "if the sizes agree, and heads then read each other's keys.",
        both(scores=_all_axes_reversed),
    ),
    "cosine_scores": (
        "queries and keys are normalised to length 1 first",
        "The dot product becomes a cosine: scores stay within ±1, and weights are almost equal.",
        _scores(lambda q, k, v: _unit(q) @ transposed(_unit(k))),
    ),
    "distance_scores": (
        "the scores are distances instead of dot products",
        "A distance ignores that long vectors should score higher.",
        _scores(lambda q, k, v: -_distances(q, k))
        + _scores(lambda q, k, v: -np.square(_distances(q, k)))
        + _scores(lambda q, k, v: -np.square(_distances(q, k)) / 2)
        + _scores(lambda q, k, v: _distances(q, k))
        + tuple(
            variant | replacing(scaled=lambda values, probe: values["scores"])
            for power in (1, 2)
            for variant in _scores(lambda q, k, v, power=power: -(_distances(q, k) ** power))
        ),
    ),
}
OUTPUTS: Entries = {
    "output_scaled": (
        "the output is divided by √D once more",
        "Only the scores are scaled.",
        _output(_divided_output),
    ),
    "keys_for_values": (
        "the output is P·K: keys are used instead of values",
        "It runs whenever values are as wide as keys.",
        _output(lambda w, q, k, v: w @ k),
    ),
    "queries_for_values": (
        "the output is P·Q: queries are used instead of values",
        "It runs whenever there are as many queries as keys.",
        _output(lambda w, q, k, v: w @ q),
    ),
    "weights_transposed": (
        "the weights are transposed before they are multiplied with the values",
        "Row i of the output then belongs to key i instead of query i.",
        _output(lambda w, q, k, v: transposed(w) @ v),
    ),
    "residual_added": (
        "the queries are added to the output",
        "The residual connection belongs outside attention, and adds the embeddings.",
        _output(lambda w, q, k, v: w @ v + q),
    ),
}
MISTAKES = (
    *mistakes("one head", SCALE, SCALES),
    *mistakes("one head", SCORES, PRODUCTS),
    *mistakes("one head", OUTPUT, OUTPUTS),
)

EQUIVALENTS = equivalents(
    {
        "scale_twice": (
            "dividing by √D twice",
            "scale_by_width",
            "√D·√D = D.",
            SCALES["scale_by_width"][2][0],
        ),
        "scale_on_queries": (
            "dividing the queries by √D instead of the scores",
            "right",
            "(Q/√D)·Kᵀ = Q·Kᵀ/√D; only the rounding differs.",
            Variant({"scores": _scaled_queries, "scaled": lambda values, probe: values["scores"]}),
        ),
    }
)
