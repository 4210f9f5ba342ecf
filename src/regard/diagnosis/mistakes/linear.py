"""Linear attention: products of feature maps instead of exponentials, and the mistakes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.mistakes import channels
from regard.diagnosis.mistakes.entry import Mistake, heads_of, softmax
from regard.diagnosis.probe import Probe, Values, Variant

Map = Callable[[Array], Array]
# Feature maps by the words for them.
MAPS: Mapping[str, Map] = {
    "elu(x) + 1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu(x)": lambda x: np.maximum(x, 0),
    "relu(x) + 0.001": lambda x: np.maximum(x, 0) + 1e-3,
    "relu(x)²": lambda x: np.maximum(x, 0) ** 2,
    "exp(x)": np.exp,
    "softmax(x)": softmax,
    "x²": np.square,
    "sigmoid(x)": lambda x: 1 / (1 + np.exp(-x)),
}
EPSILONS = (0.0, 1e-6, 1e-8, 1e-5, 1e-12, 1e-10, 1e-3)
LINES = ("out = phi(q) @ (phi(k).T @ v) / (phi(q) @ phi(k).sum(0))[:, None]",) * 2
Weights = Callable[[Array, Array, Array, Array, Map], Array]


def _over_sum(scores: Array, own: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(scores / own.sum(-1, keepdims=True))


# Weights made of the products φ(q)·φ(k), what is visible, the queries, the keys and the map.
_WRONG: Mapping[str, tuple[str, str, Weights]] = {
    "linear_unnormalised": (
        "linear attention is not divided by φ(q)·Σ φ(k)",
        "Rows of weights do not add up to 1, so the output grows with the number of keys.",
        lambda s, seen, q, k, phi: s * seen,
    ),
    "linear_sum_of_hidden_keys": (
        "the sum that divides linear attention also counts hidden keys",
        "Rows add up to less than 1: the sum has to run over the visible keys alone.",
        lambda s, seen, q, k, phi: _over_sum(s * seen, s),
    ),
    "linear_hides_nothing": (
        "linear attention reads hidden keys",
        "One sum over all keys serves every query; causal sums run along the text.",
        lambda s, seen, q, k, phi: _over_sum(s, s),
    ),
    "linear_map_of_queries_alone": (
        "the feature map is applied to the queries and not to the keys",
        "Products of the two may be negative, and their sum near 0.",
        lambda s, seen, q, k, phi: _over_sum(own := phi(q) @ k * seen, own),
    ),
    "linear_map_of_keys_alone": (
        "the feature map is applied to the keys and not to the queries",
        "Products of the two may be negative, and their sum near 0.",
        lambda s, seen, q, k, phi: _over_sum(
            own := q @ phi(k.swapaxes(-1, -2)).swapaxes(-1, -2) * seen, own
        ),
    ),
    "linear_divided_by_keys": (
        "linear attention is divided by the number of keys instead of φ(q)·Σ φ(k)",
        "The sizes of φ stay in the output.",
        lambda s, seen, q, k, phi: s * seen / s.shape[-1],
    ),
    "linear_divided_by_sum_of_keys": (
        "linear attention is divided by Σ φ(k) without φ(q)",
        "The sum that divides a row is the product of its own φ(q) with Σ φ(k).",
        lambda s, seen, q, k, phi: (
            s * seen / phi(k.swapaxes(-1, -2)).sum((-1, -2))[..., None, None]
        ),
    ),
}


def _variant(phi: Map, weights: Weights) -> Variant:
    def replaced(values: Values, probe: Probe) -> Array:
        q, k, _ = heads_of(values)
        mapped = phi(q) @ phi(k).swapaxes(-1, -2)
        return weights(mapped, probe.visible, q, k.swapaxes(-1, -2), phi)

    return Variant({"weights": replaced}, absent=False)


def _with_epsilon(epsilon: float) -> Weights:
    return lambda s, seen, q, k, phi: s * seen / ((s * seen).sum(-1, keepdims=True) + epsilon)


# Maps that are meant to be elu(x) + 1, which are negative, or jump from 1 to 0.
SLIPS: tuple[Map, ...] = (
    lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0))),
)
# Queries get a softmax over their features and keys one over the tokens, and nothing divides; some
# multiply the queries by 1/√D afterwards.
EFFICIENT = "efficient attention by softmaxes over features and over tokens"


def _efficient(scaled: bool, of_queries: int = -1, of_keys: int = -2) -> Variant:
    def replaced(values: Values, probe: Probe) -> Array:
        q, k, _ = heads_of(values)
        seen = probe.visible
        mapped = softmax(q, of_queries) * (q.shape[-1] ** -0.5 if scaled else 1.0)
        if of_keys == -1:
            return np.asarray(mapped @ softmax(k).swapaxes(-1, -2) * seen)
        raised = np.exp(k - k.max(-2, keepdims=True))
        with np.errstate(all="ignore"):
            return np.asarray((mapped / (seen @ raised)) @ raised.swapaxes(-1, -2) * seen)

    return Variant({"weights": replaced}, absent=False)


_WRONG_AXIS = Mistake(
    "efficient_softmax_axis",
    "one head",
    "a softmax of efficient attention runs along the wrong axis",
    "That of a query runs over its features, and that of the keys over the tokens, one feature at "
    "a time: only then do the weights of a query add up to 1.",
    "q, k = softmax(q, axis=-1), softmax(k, axis=-2)  # (..., L, D) and (..., S, D)",
    "q, k = q.softmax(-1), k.softmax(-2)  # (..., L, D) and (..., S, D)",
    variants=tuple(
        _efficient(scaled, *axes)
        for axes in ((-2, -2), (-1, -1), (-2, -1))
        for scaled in (False, True)
    ),
)
# Right ones, by the map, and the mistakes with each.
RIGHT_ONES = {
    name: tuple(_variant(phi, _with_epsilon(epsilon)) for epsilon in EPSILONS)
    for name, phi in MAPS.items()
} | {EFFICIENT: (_efficient(False), _efficient(True)), channels.NAME: channels.RIGHT_ONES}
_WITHOUT_ONE = Mistake(
    "linear_map_without_one",
    "one head",
    "the feature map is elu(x) without the 1 that is added",
    "Features below 0 make negative weights; elu(x) + 1 is x + 1 above 0, and exp(x) below.",
    "phi = np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))",
    "phi = torch.nn.functional.elu(x) + 1",
    variants=tuple(_variant(phi, _with_epsilon(one)) for phi in SLIPS for one in EPSILONS),
)
MISTAKES = (
    _WITHOUT_ONE,
    _WRONG_AXIS,
    *channels.MISTAKES,
    *(
        Mistake(
            name,
            "one head",
            title,
            why,
            *LINES,
            variants=tuple(_variant(phi, weights) for phi in MAPS.values()),
        )
        for name, (title, why, weights) in _WRONG.items()
    ),
)


def maps_of(mistake: Mistake) -> tuple[str, ...]:
    """The names of the right ones beside which the variants of a mistake are, one for each."""
    if mistake in channels.MISTAKES:
        return (channels.NAME,)
    if mistake is _WRONG_AXIS:
        return (EFFICIENT,)
    return tuple(MAPS) if len(mistake.variants) == len(MAPS) else tuple(MAPS)[:1]
