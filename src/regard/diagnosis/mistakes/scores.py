"""Mistakes before and after softmax in one head: the scale, and which matrix goes where.

Each replaces the step of the textbook at which it departs.
"""

from __future__ import annotations

import numpy as np

from regard.diagnosis.mistakes.entry import (
    Array,
    Equivalent,
    Mistake,
    Replacement,
    blend,
    grouped,
    replacing,
)
from regard.diagnosis.probe import Probe, Values, Variant

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


def _divided(by: str) -> Replacement:
    """The scores divided by something else than √D; a given scale is used as it is."""

    def scaled(values: Values, probe: Probe) -> Array:
        if probe.scale is not None:
            return values["scores"] * probe.scale
        size = {letter: float(n) for letter, n in probe.sizes.items()}
        divisors = {
            "1": 1.0,
            "D": size["D"],
            "1/√D": size["D"] ** -0.5,
            "D^¼": size["D"] ** 0.25,
            "√(HD)": np.sqrt(size["H"] * size["D"]),
            "√M": np.sqrt(probe.inputs["embeddings"].shape[-1])
            if "embeddings" in probe.inputs
            else np.sqrt(size["H"] * size["D"]),
            "√S": np.sqrt(size["S"]),
            "√L": np.sqrt(size["L"]),
            "√E": np.sqrt(size["E"]),
            "√(D/H)": np.sqrt(size["D"] / size["H"]),
            "√axis 1": np.sqrt(size[{2: "D", 3: "L", 4: "H"}.get(probe.rank, "D")]),
        }
        return np.asarray(values["scores"] / divisors[by])

    return scaled


def _scale(name: str, by: str, title: str, why: str) -> Mistake:
    variants = tuple(replacing(scaled=_divided(one)) for one in by.split(" or "))
    return Mistake(name, "one head", title, why, *SCALE, variants)


def _scores_of(first: str, second: str) -> Replacement:
    def scores(values: Values, probe: Probe) -> Array:
        heads = probe.sizes["H"]
        a, b = grouped(values[first], heads), grouped(values[second], heads)
        return np.asarray(a @ b.swapaxes(-1, -2))

    return scores


def _reshaped_keys(values: Values, probe: Probe) -> Array:
    keys = grouped(values["keys"], probe.sizes["H"])
    reshaped = keys.reshape(*keys.shape[:2], keys.shape[3], keys.shape[2])
    return np.asarray(values["queries"] @ reshaped)


def _all_axes_reversed(values: Values, probe: Probe) -> Array:
    """`K.T` of an array with more than two axes: the leading ones are reversed with the others."""
    queries, keys = values["queries"], grouped(values["keys"], probe.sizes["H"])
    if probe.rank < 4:
        queries, keys = queries[0], keys[0]
    if probe.rank < 3:
        queries, keys = queries[0], keys[0]
    return np.asarray(queries @ keys.T).reshape(probe.right["scores"].shape)


def _cosine(values: Values, probe: Probe) -> Array:
    queries, keys = values["queries"], grouped(values["keys"], probe.sizes["H"])
    queries = queries / np.linalg.norm(queries, axis=-1, keepdims=True)
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.asarray(queries @ keys.swapaxes(-1, -2))


def _distance(values: Values, probe: Probe) -> Array:
    queries, keys = values["queries"], grouped(values["keys"], probe.sizes["H"])
    return np.asarray(-np.linalg.norm(queries[..., :, None, :] - keys[..., None, :, :], axis=-1))


def _blended(name: str) -> Replacement:
    return lambda values, probe: blend(values["weights"], values[name])


def _of_transposed(values: Values, probe: Probe) -> Array:
    return blend(values["weights"].swapaxes(-1, -2), values["values"])


def _with_residual(values: Values, probe: Probe) -> Array:
    return blend(values["weights"], values["values"]) + values["queries"]


def _divided_output(values: Values, probe: Probe) -> Array:
    return np.asarray(blend(values["weights"], values["values"]) / np.sqrt(probe.sizes["D"]))


def _of_scaled_queries(values: Values, probe: Probe) -> Array:
    scale = probe.scale or probe.sizes["D"] ** -0.5
    keys = grouped(values["keys"], probe.sizes["H"])
    return np.asarray((values["queries"] * scale) @ keys.swapaxes(-1, -2))


def _product(
    name: str, title: str, why: str, lines: tuple[str, str], **step: Replacement
) -> Mistake:
    variants = (Variant(step), Variant(step, absent=False))
    return Mistake(name, "one head", title, why, *lines, variants)


MISTAKES = (
    _scale(
        "no_scale",
        "1",
        "the scores are not scaled",
        "The variance of q·k grows with the width D, so softmax saturates: almost all weight falls "
        "on one key and gradients vanish.",
    ),
    _scale(
        "scale_by_width",
        "D",
        "the scores are divided by D instead of √D",
        "Scores become √D times too small, and attention is spread almost evenly.",
    ),
    _scale(
        "scale_multiplied",
        "1/√D",
        "the scores are multiplied by √D instead of divided by it",
        "Scores become D times too large; softmax turns into a maximum.",
    ),
    _scale(
        "scale_fourth_root",
        "D^¼",
        "only one of queries and keys is scaled by D^¼",
        "Splitting the scale over both sides needs D^¼ on each; one side alone divides by D^¼.",
    ),
    _scale(
        "scale_by_model_width",
        "√(HD) or √M",
        "the scores are divided by √d_model instead of √d_k",
        "d_k is the width of one head. With H heads the scores are √H times too small; with one "
        "head there is no difference, so a test with one head passes.",
    ),
    _scale(
        "scale_by_width_over_heads",
        "√(D/H)",
        "the width of a head is divided by the number of heads once more",
        "The arrays are split already; dividing again makes scores √H times too large.",
    ),
    _scale(
        "scale_by_keys",
        "√S",
        "the scores are divided by √S, the number of keys, instead of √D",
        "The wrong axis was read. The result changes with the length of the text.",
    ),
    _scale(
        "scale_by_queries",
        "√L",
        "the scores are divided by √L, the number of queries, instead of √D",
        "The wrong axis was read. A query's answer changes with how many others are asked with it.",
    ),
    _scale(
        "scale_by_value_width",
        "√E",
        "the scores are divided by √E, the width of a value, instead of √D",
        "It shows only where values are not as wide as keys.",
    ),
    _scale(
        "width_from_axis_1",
        "√axis 1",
        "the width is read from axis 1 instead of the last one",
        "Right for one head alone; with a leading axis it is the number of queries, with two of "
        "them the number of heads.",
    ),
    Mistake(
        "scale_after_softmax",
        "one head",
        "the weights are divided by √D instead of the scores",
        "Softmax sees unscaled scores, and rows of weights add up to 1/√D instead of 1.",
        *SCALE,
        (
            replacing(scaled=_divided("1"), output=_divided_output),
            replacing(absent=False, scaled=_divided("1"), output=_divided_output),
        ),
    ),
    _product(
        "output_scaled",
        "the output is divided by √D once more",
        "The scale belongs to the scores alone.",
        OUTPUT,
        output=_divided_output,
    ),
    _product(
        "queries_and_keys_swapped",
        "queries and keys are swapped: the scores are K·Qᵀ",
        "Rows become keys: each key asks the queries. With as many queries as keys no shape shows "
        "it, and with Q = K nothing does.",
        SCORES,
        scores=_scores_of("keys", "queries"),
    ),
    _product(
        "values_for_keys",
        "the queries meet the values instead of the keys",
        "Scores are Q·Vᵀ. It runs wherever values are as wide as keys.",
        SCORES,
        scores=_scores_of("queries", "values"),
    ),
    _product(
        "queries_for_keys",
        "the queries meet the queries instead of the keys",
        "Scores are Q·Qᵀ: symmetric, and each token prefers itself.",
        SCORES,
        scores=_scores_of("queries", "queries"),
    ),
    _product(
        "keys_for_queries",
        "the keys meet the keys; the queries are not used",
        "Scores are K·Kᵀ: symmetric, and the query has no say.",
        SCORES,
        scores=_scores_of("keys", "keys"),
    ),
    _product(
        "keys_reshaped",
        "the keys are reshaped where they should be transposed",
        "reshape keeps the numbers in reading order, so each column mixes several keys.",
        SCORES,
        scores=_reshaped_keys,
    ),
    _product(
        "all_axes_reversed",
        "K.T reverses all axes of the keys, the leading ones too",
        "With two axes that is a transpose; with more, heads and width change places. It runs only "
        "where sizes happen to agree, and then heads read each other's keys.",
        SCORES,
        scores=_all_axes_reversed,
    ),
    _product(
        "cosine_scores",
        "queries and keys are brought to length 1 first",
        "The dot product becomes a cosine: scores stay within ±1, and attention almost even.",
        SCORES,
        scores=_cosine,
    ),
    _product(
        "distance_scores",
        "the scores are distances instead of dot products",
        "Nearness is not the dot product; long vectors lose the say that they should have.",
        SCORES,
        scores=_distance,
    ),
    _product(
        "keys_for_values",
        "the weights blend the keys instead of the values",
        "The output is P·K. It runs wherever values are as wide as keys.",
        OUTPUT,
        output=_blended("keys"),
    ),
    _product(
        "queries_for_values",
        "the weights blend the queries instead of the values",
        "The output is P·Q, which runs where there are as many queries as keys.",
        OUTPUT,
        output=_blended("queries"),
    ),
    _product(
        "weights_transposed",
        "the weights are transposed before they meet the values",
        "Row i of the output belongs to key i: what is read and what is reading change places.",
        OUTPUT,
        output=_of_transposed,
    ),
    _product(
        "residual_added",
        "the queries are added to the output",
        "The residual connection belongs outside attention, and to its embeddings.",
        OUTPUT,
        output=_with_residual,
    ),
)

EQUIVALENTS = (
    Equivalent(
        "scale_twice",
        "dividing by √D twice",
        "scale_by_width",
        "√D·√D = D.",
        replacing(scaled=_divided("D")),
    ),
    Equivalent(
        "scale_on_queries",
        "dividing the queries by √D instead of the scores",
        "right",
        "(Q/√D)·Kᵀ = Q·Kᵀ/√D; only the rounding differs.",
        replacing(scores=_of_scaled_queries, scaled=lambda values, probe: values["scores"]),
    ),
)
