"""Mistakes before and after softmax in one head: the scale, and which matrix goes where."""

from __future__ import annotations

from regard.diagnosis.mistakes.entry import written

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


SCALES = {
    "no_scale": (
        "the scores are not scaled",
        "q·k grows with the width, so softmax gives one key all weight, and gradients vanish.",
        "scaled = scores",
    ),
    "scale_by_width": (
        "the scores are divided by D instead of √D",
        "Scores are √D times too small, and attention is spread almost evenly.",
        "scaled = scores / D",
    ),
    "scale_multiplied": (
        "the scores are multiplied by √D instead of divided by it",
        "Scores are D times too large; softmax turns into a maximum.",
        "scaled = scores * np.sqrt(D)",
    ),
    "scale_fourth_root": (
        "only one of queries and keys is scaled by D^¼",
        "To split the scale over queries and keys, divide both by D^¼.",
        "scaled = scores / D**0.25",
    ),
    "scale_by_model_width": (
        "the scores are divided by √d_model instead of √d_k",
        "d_k is the width of one head. Where H heads share d_model, the scores are √H times too "
        "small; with one head as wide as d_model there is no difference, and a test passes.",
        "scaled = scores / np.sqrt(H * D)",
        "scaled = scores / np.sqrt(M)",
    ),
    "scale_by_width_over_heads": (
        "the width of a head is divided by the number of heads once more",
        "The arrays are split already; dividing again makes scores √H times too large.",
        "scaled = scores / np.sqrt(D / H)",
        "scaled = scores / np.sqrt(D // H)",
    ),
    "scale_by_keys": (
        "the scores are divided by √S, the number of keys, instead of √D",
        "The size of the wrong axis is used. The result changes with the length of the text.",
        "scaled = scores / np.sqrt(S)",
        "scaled = scores / np.sqrt(np.maximum(keep.sum(-1, keepdims=True), 1))",
    ),
    "scale_by_queries": (
        "the scores are divided by √L, the number of queries, instead of √D",
        "The size of the wrong axis is used. A query's result changes with the number of others.",
        "scaled = scores / np.sqrt(L)",
    ),
    "scale_by_value_width": (
        "the scores are divided by √E, the width of a value, instead of √D",
        "It shows only if values are not as wide as keys.",
        "scaled = scores / np.sqrt(E)",
    ),
    "width_from_axis_1": (
        "the width is read from axis 1 instead of the last one",
        "With four axes, axis 1 is that of the heads; the width is on the last one.",
        "scaled = scores / np.sqrt(H)",
    ),
    "given_scale_besides": (
        "a scale that is given multiplies the scores besides 1/√D, not instead of it",
        "scale= is the whole factor of q·k; 1/√D is its default.",
        "rescaled = scores * scale / np.sqrt(D)",
        (
            "scores = Q @ K.swapaxes(-1, -2) * (D**-0.5 if scale is None else scale)",
            "scores = q @ k.transpose(-1, -2) * (d**-0.5 if scale is None else scale)",
        ),
    ),
    "power_before_division": (
        "a power is taken before the division: D ** 1/2 is D / 2, and not √D",
        "** binds more tightly than /: a root is D ** 0.5 or D ** (1/2).",
        "scaled = scores / (D**1 / 2)",
        "scaled = scores * (D**-1 / 2)",
    ),
    "root_rounded": (
        "√D is rounded down to an integer",
        "A root is a float; isqrt and int() cut it.",
        "scaled = scores / int(np.sqrt(D))",
    ),
    "scores_negated": (
        "the scores have the wrong sign",
        "The keys that fit worst then get the most weight.",
        "scaled = -scores / np.sqrt(D)",
    ),
    "scale_after_softmax": (
        "the weights are divided by √D instead of the scores",
        "Softmax gets unscaled scores, and rows of weights add up to 1/√D instead of 1.",
        "scaled = scores; output = weights @ v / np.sqrt(D)",
    ),
}
PRODUCTS = {
    "queries_and_keys_swapped": (
        "queries and keys are swapped: the scores are K·Qᵀ",
        "With as many queries as keys no shape shows it, and with Q = K nothing does.",
        "scores = k @ T(q)",
    ),
    "values_for_keys": (
        "the scores are Q·Vᵀ: values are used instead of keys",
        "It runs whenever values are as wide as keys.",
        "scores = q @ T(v)",
    ),
    "queries_for_keys": (
        "the scores are Q·Qᵀ: queries are used instead of keys",
        "The scores are symmetric, and each token prefers itself.",
        "scores = q @ T(q)",
    ),
    "keys_for_queries": (
        "the scores are K·Kᵀ: keys are used instead of queries",
        "The scores are symmetric, and the query has no effect.",
        "scores = k @ T(k)",
    ),
    "keys_reshaped": (
        "the keys are reshaped instead of transposed",
        "reshape keeps the numbers in memory order, so each column mixes several keys.",
        "scores = q @ k.reshape(*k.shape[:2], D, S)",
    ),
    "cosine_scores": (
        "queries and keys are normalised to length 1 first",
        "The dot product becomes a cosine: scores stay within ±1, and weights are almost equal.",
        "scores = q / lengths_of(q) @ T(k / lengths_of(k))",
    ),
    "distance_scores": (
        "the scores are distances instead of dot products",
        "A distance ignores that long vectors should score higher.",
        "scores = -apart(q, k)",
        "scores = -(apart(q, k) ** 2)",
        "scores = -(apart(q, k) ** 2) / 2",
        "scores = apart(q, k)",
        "scores = -np.abs(q[..., :, None, :] - k[..., None, :, :]).sum(-1)",
        "scaled = -apart(q, k)",
        "scaled = -(apart(q, k) ** 2)",
    ),
}
OUTPUTS = {
    "output_scaled": (
        "the output is divided by √D once more",
        "Only the scores are scaled.",
        "output = weights @ v / np.sqrt(D)",
    ),
    "keys_for_values": (
        "the output is P·K: keys are used instead of values",
        "It runs whenever values are as wide as keys.",
        "output = weights @ k",
    ),
    "queries_for_values": (
        "the output is P·Q: queries are used instead of values",
        "It runs whenever there are as many queries as keys.",
        "output = weights @ q",
    ),
    "weights_transposed": (
        "the weights are transposed before they are multiplied with the values",
        "Row i of the output then belongs to key i instead of query i.",
        "output = T(weights) @ v",
    ),
    "residual_added": (
        "the queries are added to the output",
        "The residual connection belongs outside attention, and adds the embeddings.",
        "output = weights @ v + q",
    ),
}
MISTAKES = (
    *written("one head", SCALE, SCALES),
    *written("one head", SCORES, PRODUCTS),
    *written("one head", OUTPUT, OUTPUTS),
)
