"""Mistakes of other scores and normalizations: a step left out, a matrix transposed, another score.

Those of a caller's own score follow from its steps. Must not know how a function is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values
from regard.diagnosis.mistakes.entry import (
    Mistake,
    Replacement,
    Variants,
    both,
    heads_of,
    logits,
    replacing,
    softmax,
    transposed,
)
from regard.textbook.mechanisms import Declared
from regard.textbook.steps import Step

# The line to write instead, in NumPy and in torch.
LINES = {
    "general": ("scores = Q @ W @ K.swapaxes(-1, -2)", "scores = q @ W @ k.transpose(-1, -2)"),
    "additive": (
        "scores = np.tanh((Q @ W_q)[..., :, None, :] + (K @ W_k)[..., None, :, :]) @ v",
        "scores = torch.tanh((q @ W_q).unsqueeze(-2) + (k @ W_k).unsqueeze(-3)) @ v",
    ),
    "cosine": (
        "scores = unit(Q) @ unit(K).swapaxes(-1, -2) / temperature  # unit: rows of length 1",
        "scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) / temperature",
    ),
    "distance": (
        "scores = -np.square(Q[..., :, None, :] - K[..., None, :, :]).sum(-1)",
        "scores = -torch.cdist(q, k).square()",
    ),
    "features": (
        "scores = phi(Q) @ phi(K).swapaxes(-1, -2)  # phi(x) = np.where(x > 0, x + 1, np.exp(x))",
        "scores = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)",
    ),
    "sigmoid": (
        "weights = 1 / (1 + np.exp(-(scores + bias)))",
        "weights = torch.sigmoid(scores + bias)",
    ),
    "hard": (
        "weights = np.arange(S) == scores.argmax(-1, keepdims=True)",
        "weights = F.one_hot(scores.argmax(-1), S)",
    ),
}
_NONE = ("", "")


@lru_cache(maxsize=16)
def of_mechanism(steps: tuple[Step, ...], score: str | Declared, normalize: str) -> list[Mistake]:
    """The mistakes of the steps that a mechanism has instead of the plain ones."""
    lines = (
        LINES.get(score, _NONE) if isinstance(score, str) else _NONE,
        LINES.get(normalize.partition(",")[0], _NONE),
    )
    names = [step.name for step in steps]
    at = names.index("scores")
    found: list[Mistake] = []

    def add(name: str, title: str, why: str, variants: Variants, of: int = 0) -> None:
        found.append(Mistake(name, "one head", title, why, *lines[of], variants))

    if score != "dot":
        for name, title, why, variants in _of_score(steps[: at + 1], score):
            add(name, title, why, variants)
    if normalize != "softmax":
        for step in steps[at + 1 : names.index("weights")]:
            if step.name == "with_bias":
                add(*_left_out(step), of=1)
        for name, title, why, replaced, way in _NORMALIZED.get(normalize.partition(",")[0], ()):
            add(name, title, why, both(**{replaced: way}), of=1)
        title = "a softmax makes the weights"
        why = "It is another normalization than the one that is meant."
        add("softmax_instead", title, why, _weights(softmax), of=1)
    return found


def _of_score(
    steps: tuple[Step, ...], score: str | Declared
) -> Iterator[tuple[str, str, str, Variants]]:
    declared = {step.name: step for step in steps}
    own = _NAMED.get(score, ()) if isinstance(score, str) else ()
    for name, title, why, change in own:
        yield name, title, why, both(scores=change)
    for step in steps:
        if step.op == "given" and step.name.startswith("score_") and len(step.axes) == 2:
            name = step.name.removeprefix("score_")
            title = f"{name} is transposed"
            why = "Rows of the matrix belong to the features that come in. It runs if it is square."
            yield f"{name}_transposed", title, why, (replacing(**{step.name: _turned(step.name)}),)
        if step.op == "divide" and declared[step.operands[1].step].op == "given":
            what = declared[step.operands[1].step].name.removeprefix("score_")
            title = f"the scores are multiplied by {what} instead of divided by it"
            why = f"A {what} below 1 must make weights sharper, not flatter."
            yield f"{what}_multiplied", title, why, both(**{step.name: _multiplied(step)})
        if step.operands and step.name not in ("queries", "keys"):
            yield _left_out(step)
    yield from _exchanged(steps)
    # A temperature after the product may be wrong too.
    last = steps[-1].operands[0].step if steps[-1].op in ("divide", "negate") else "scores"
    why = "Only a dot product grows with the width; this score is not scaled."
    title = "the scores are divided by √D too"
    yield "scaled_by_width", title, why, both(**{last: _divided(last, "D", 0.5)})
    for name, title, input_, other in (
        ("values_as_keys", "values are used instead of keys", "keys", "values"),
        ("queries_as_keys", "queries are used instead of keys", "keys", "queries"),
        ("keys_as_queries", "keys are used instead of queries", "queries", "keys"),
    ):
        why = "It runs whenever the shapes agree."
        yield name, title, why, (replacing(**{input_: _other(input_, other)}),)
    for name, title, root in (
        ("dot_product_instead", "the scores are plain dot products", 0.0),
        ("scaled_dot_product_instead", "the scores are dot products divided by √D", 0.5),
    ):
        yield (
            name,
            title,
            "It is another score than the one that is meant.",
            both(scores=_dot(root)),
        )


def _left_out(step: Step) -> tuple[str, str, str, Variants]:
    """A step that hands on what it is made of."""

    def passed(values: Values, probe: Probe) -> Array:
        return np.asarray(values[step.operands[0].step])

    title = f"a step is left out: {step.formula}"
    why = "What it is made of is used in its place."
    return f"{step.name}_left_out", title, why, both(**{step.name: passed})


def _divided(name: str, axis: str, power: float) -> Replacement:
    return lambda values, probe: probe.right[name] / probe.sizes[axis] ** power


def _other(name: str, other: str) -> Replacement:
    def rows(values: Values, probe: Probe) -> Array:
        array = probe.right[other]
        if array.shape != probe.right[name].shape:
            raise ValueError("a function would raise")
        return array

    return rows


def _turned(name: str) -> Replacement:
    return lambda values, probe: transposed(probe.right[name])


def _multiplied(step: Step) -> Replacement:
    first, second = (ref.step for ref in step.operands)
    return lambda values, probe: values[first] * values[second]


def _exchanged(steps: tuple[Step, ...]) -> Iterator[tuple[str, str, str, Variants]]:
    """Two given matrices of the same axes, each in the place of the other."""
    given = [step for step in steps if step.op == "given" and step.name.startswith("score_")]
    for n, one in enumerate(given):
        for other in given[:n]:
            if one.axes == other.axes and one.axes:
                names = [x.name.removeprefix("score_") for x in (other, one)]
                variant = replacing(
                    **{
                        one.name: lambda values, probe, name=other.name: probe.right[name],
                        other.name: lambda values, probe, name=one.name: probe.right[name],
                    }
                )
                title = f"{names[0]} and {names[1]} are exchanged"
                why = "They have the same shape, so nothing but the numbers shows it."
                yield f"{names[0]}_and_{names[1]}_exchanged", title, why, (variant,)


def _weights(way: Callable[[Array], Array]) -> Variants:
    skipping, using = both(weights=lambda values, probe: way(logits(values)))
    return skipping, using


def _dot(power: float) -> Replacement:
    def scores(values: Values, probe: Probe) -> Array:
        queries, keys, _ = heads_of(values)
        return np.asarray(queries @ transposed(keys) / probe.sizes["D"] ** power)

    return scores


def _of_rows(change: Callable[[Array, Array, Values], Array]) -> Replacement:
    """Other scores, made of queries and keys (B, H, …) and what else there is."""
    return lambda values, probe: np.asarray(change(*heads_of(values)[:2], values))


def _hidden_sum(q: Array, k: Array, values: Values) -> Array:
    first, second = q @ values["score_W_q"], k @ values["score_W_k"]
    return np.asarray(first[..., :, None, :] + second[..., None, :, :])


def _apart(q: Array, k: Array) -> Array:
    return np.asarray(q[..., :, None, :] - k[..., None, :, :])


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _elu(x: Array) -> Array:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _shares(w: Array) -> Array:
    return np.asarray(w / w.sum(-1, keepdims=True))


def _largest(scores: Array, axis: int) -> Array:
    best = np.expand_dims(scores.argmax(axis), axis)
    places = np.expand_dims(np.arange(scores.shape[axis]), -1 if axis == -2 else 0)
    return np.asarray(places == best)


# Mistakes of a normalization: name, title, why, the step that is replaced, and by what.
_NORMALIZED: dict[str, tuple[tuple[str, str, str, str, Replacement], ...]] = {
    "sigmoid": (
        (
            "bias_subtracted",
            "the bias is subtracted instead of added",
            "A negative bias makes weights small where there are many keys.",
            "with_bias",
            lambda values, probe: logits(values) - values["normalize_bias"],
        ),
        (
            "sigmoid_normalised",
            "the sigmoids are divided by their sum",
            "Each weight is for itself: rows need not add up to 1.",
            "weights",
            lambda values, probe: _shares(1 / (1 + np.exp(-values["with_bias"]))),
        ),
    ),
    "hard": (
        (
            "largest_of_queries",
            "the largest score is that of a column instead of a row",
            "Queries then compete for each key.",
            "weights",
            lambda values, probe: _largest(logits(values), -2),
        ),
        (
            "last_of_the_largest",
            "the last of several largest scores is taken",
            "The first of several keys with equal scores gets all weight.",
            "weights",
            lambda values, probe: _largest(logits(values)[..., ::-1], -1)[..., ::-1],
        ),
    ),
    "sparsemax": (
        (
            "cut_at_zero",
            "scores below 0 are cut off and the others divided by their sum",
            "Sparsemax subtracts the threshold at which the rest adds up to 1.",
            "weights",
            lambda values, probe: _shares(np.maximum(logits(values), 0)),
        ),
    ),
}
_Named = tuple[tuple[str, str, str, Replacement], ...]
_ADDITIVE: _Named = (
    (
        "scaled_by_hidden_width",
        "the scores are divided by √U, the hidden width",
        "This score is not scaled.",
        lambda values, probe: probe.right["scores"] / np.sqrt(values["score_v"].size),
    ),
    (
        "no_tanh",
        "there is no tanh",
        "The query then adds the same to the score of every key, which cancels in softmax.",
        _of_rows(lambda q, k, values: _hidden_sum(q, k, values) @ values["score_v"]),
    ),
    (
        "tanh_after_v",
        "tanh is taken of the sum instead of its terms",
        "Each hidden feature has a tanh of its own, before v adds them up.",
        _of_rows(lambda q, k, values: np.tanh(_hidden_sum(q, k, values) @ values["score_v"])),
    ),
    (
        "relu_for_tanh",
        "a ReLU is used instead of tanh",
        "Negative hidden features then count nothing.",
        _of_rows(lambda q, k, values: _relu(_hidden_sum(q, k, values)) @ values["score_v"]),
    ),
    (
        "v_left_out",
        "the hidden features are added up without v",
        "v says how much each hidden feature counts.",
        _of_rows(lambda q, k, values: np.tanh(_hidden_sum(q, k, values)).sum(-1)),
    ),
    (
        "hidden_multiplied",
        "the parts of query and key are multiplied instead of added",
        "Additive attention adds them; a product is another score.",
        _of_rows(
            lambda q, k, values: (
                np.tanh(
                    (q @ values["score_W_q"])[..., :, None, :]
                    * (k @ values["score_W_k"])[..., None, :, :]
                )
                @ values["score_v"]
            )
        ),
    ),
)
_GENERAL: _Named = (
    (
        "keys_transformed_too",
        "W multiplies the keys as well as the queries",
        "One of them is multiplied: q·W·k has W once.",
        _of_rows(lambda q, k, values: q @ values["score_W"] @ transposed(k @ values["score_W"])),
    ),
)
_DISTANCE: _Named = (
    (
        "distance_averaged",
        "the squared differences are averaged instead of added up",
        "The score is D times too small.",
        _of_rows(lambda q, k, values: -np.square(_apart(q, k)).mean(-1)),
    ),
    (
        "distance_not_squared",
        "the distances are not squared",
        "A Gaussian kernel has the square; without it far keys keep more weight.",
        _of_rows(lambda q, k, values: -np.sqrt(np.square(_apart(q, k)).sum(-1))),
    ),
    (
        "distance_halved",
        "the squared distances are halved",
        "This score has no factor; scale=0.5 gives it one.",
        _of_rows(lambda q, k, values: -np.square(_apart(q, k)).sum(-1) / 2),
    ),
    (
        "distance_of_axes",
        "the distances are sums of absolute differences",
        "The score is the squared Euclidean distance.",
        _of_rows(lambda q, k, values: -np.abs(_apart(q, k)).sum(-1)),
    ),
)
_FEATURES: _Named = (
    (
        "elu_alone",
        "1 is not added to elu",
        "Features may then be negative, and so may shares of their products.",
        _of_rows(lambda q, k, values: _elu(q) @ transposed(_elu(k))),
    ),
    (
        "relu_features",
        "the features are a ReLU",
        "It is another feature map: numbers below 0 count nothing.",
        _of_rows(lambda q, k, values: _relu(q) @ transposed(_relu(k))),
    ),
    (
        "exp_features",
        "the features are exponentials",
        "The map is exp(x) below 0 only, and x + 1 above.",
        _of_rows(lambda q, k, values: np.exp(q) @ transposed(np.exp(k))),
    ),
)


def _unit(x: Array, power: float = 1.0, axis: int | tuple[int, ...] = -1) -> Array:
    return np.asarray(x / np.square(x).sum(axis, keepdims=True) ** (power / 2))


_COSINE: _Named = (
    (
        "columns_normalised",
        "the columns of queries and keys are normalised instead of the rows",
        "The length of a vector is a sum over its features, the last axis.",
        _of_rows(
            lambda q, k, values: (
                _unit(q, axis=-2) @ transposed(_unit(k, axis=-2)) / values["score_temperature"]
            )
        ),
    ),
    (
        "heads_normalised",
        "queries and keys are normalised over the heads instead of their features",
        "F.normalize takes axis 1 unless it gets dim=-1.",
        _of_rows(
            lambda q, k, values: (
                _unit(q, axis=1) @ transposed(_unit(k, axis=1)) / values["score_temperature"]
            )
        ),
    ),
    (
        "heads_normalised_together",
        "queries and keys are normalised over all heads together instead of each by itself",
        "The length of a head's vector is a sum over its own features, the last axis alone.",
        _of_rows(
            lambda q, k, values: (
                _unit(q, axis=(1, -1))
                @ transposed(_unit(k, axis=(1, -1)))
                / values["score_temperature"]
            )
        ),
    ),
    (
        "squares_for_lengths",
        "vectors are divided by the squares of their lengths",
        "The root is missing.",
        _of_rows(
            lambda q, k, values: _unit(q, 2) @ transposed(_unit(k, 2)) / values["score_temperature"]
        ),
    ),
    (
        "lengths_left_out",
        "neither queries nor keys are normalised",
        "A dot product prefers long vectors; a cosine knows directions alone.",
        _of_rows(lambda q, k, values: q @ transposed(k) / values["score_temperature"]),
    ),
)


def cosine_ways() -> Iterator[Replacement]:
    """How people make cosines, the right way first."""
    yield lambda values, probe: values["cosines"]
    yield from (way for name, _, _, way in _COSINE if name != "lengths_left_out")


_NAMED = {
    "general": _GENERAL,
    "additive": _ADDITIVE,
    "cosine": _COSINE,
    "distance": _DISTANCE,
    "features": _FEATURES,
}
