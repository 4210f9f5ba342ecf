"""Linear attention: products of feature maps instead of exponentials, and the mistakes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.probe import Probe, Values, Variant
from regard.diagnosis.mistakes import channels, recurrences
from regard.diagnosis.mistakes.entry import Mistake, heads_of, softmax

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
# Where hidden keys were set to 0 before the map: a weight for φ(0), whose value may be 0 too.
_ZEROED = "linear_map_of_hidden_keys"
_OF_ZERO = tuple(name for name, phi in MAPS.items() if phi(np.zeros(2)).any())


def _with_zeros(values_too: bool) -> Weights:
    def weights(s: Array, seen: Array, q: Array, k: Array, phi: Map) -> Array:
        of_zero = phi(q) @ phi(np.zeros_like(k).swapaxes(-1, -2)).swapaxes(-1, -2)
        own = np.where(seen, s, of_zero)
        return _over_sum(own * seen if values_too else own, own)

    return weights


def _variant(phi: Map, weights: Weights) -> Variant:
    def replaced(values: Values, probe: Probe) -> Array:
        q, k, _ = heads_of(values)
        mapped = phi(q) @ phi(k).swapaxes(-1, -2)
        return weights(mapped, probe.visible, q, k.swapaxes(-1, -2), phi)

    return Variant({"weights": replaced}, absent=False)


def _with_epsilon(epsilon: float) -> Weights:
    return lambda s, seen, q, k, phi: s * seen / ((s * seen).sum(-1, keepdims=True) + epsilon)


# --- efficient attention: a softmax of queries over their features, one of keys over the tokens ---

# Nothing divides; some multiply the queries by 1/√D afterwards.
EFFICIENT = "efficient attention by softmaxes over features and over tokens"
OF_EFFICIENT = (
    "out = softmax(q, axis=-1) @ (softmax(k, axis=-2).T @ v)  # (L, D), and (S, D) over S",
    "context = k.softmax(dim=-2).transpose(-2, -1) @ v; out = q.softmax(dim=-1) @ context",
)


def _efficient(of_queries: int | None, of_keys: int | None, power: float) -> Variant:
    """Softmaxes along these axes of queries and keys, and D to some power as a factor."""

    def weights(values: Values, probe: Probe) -> Array:
        q, k, _ = heads_of(values)
        seen = probe.visible
        own = (q if of_queries is None else softmax(q, of_queries)) * q.shape[-1] ** power
        if of_keys != -2:
            keys = k if of_keys is None else softmax(k, of_keys)
            return np.asarray(own @ keys.swapaxes(-1, -2) * seen)
        raised = np.exp(k - k.max(-2, keepdims=True))
        with np.errstate(all="ignore"):
            return np.asarray((own / (seen @ raised)) @ raised.swapaxes(-1, -2) * seen)

    return Variant({"weights": weights}, absent=False)


def _at_both_scales(of_queries: int | None, of_keys: int | None) -> tuple[Variant, ...]:
    return tuple(_efficient(of_queries, of_keys, power) for power in (0.0, -0.5))


_EFFICIENT: Mapping[str, tuple[str, str, tuple[Variant, ...]]] = {
    "softmax_of_keys_over_features": (
        "the softmax of the keys runs over their features instead of the tokens",
        "Only a softmax over the tokens makes rows of weights add up to 1.",
        _at_both_scales(-1, -1),
    ),
    "softmax_of_queries_over_tokens": (
        "the softmax of the queries runs over the tokens instead of their features",
        "Queries then change the outputs of others, and rows of weights do not add up to 1.",
        _at_both_scales(-2, -2),
    ),
    "softmaxes_exchanged": (
        "the softmaxes of queries and keys run along each other's axes",
        "That of the queries belongs to their features, that of the keys to the tokens.",
        _at_both_scales(-2, -1),
    ),
    "softmax_of_queries_lost": (
        "the queries have no softmax over their features",
        "Weights may be negative, and do not add up to 1.",
        _at_both_scales(None, -2),
    ),
    "softmax_of_keys_lost": (
        "the keys have no softmax over the tokens",
        "Weights may be negative, and do not add up to 1.",
        _at_both_scales(-1, None),
    ),
}

# Maps that are meant to be elu(x) + 1, which are negative, or jump from 1 to 0.
SLIPS: tuple[Map, ...] = (
    lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    lambda x: np.where(x > 0, x, np.exp(np.minimum(x, 0))),
)
# Right ones, by the map, and the mistakes with each.
RIGHT_ONES = {
    name: tuple(_variant(phi, _with_epsilon(epsilon)) for epsilon in EPSILONS)
    for name, phi in MAPS.items()
} | {EFFICIENT: _at_both_scales(-1, -2), channels.NAME: channels.RIGHT_ONES}
RIGHT_ONES[recurrences.RETENTION] = recurrences.RIGHT_ONES
CHUNKS = recurrences.chunk_mistakes(MAPS)
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
    *channels.MISTAKES,
    *recurrences.MISTAKES,
    *CHUNKS,
    *(
        Mistake(name, "one head", title, why, *OF_EFFICIENT, variants=variants)
        for name, (title, why, variants) in _EFFICIENT.items()
    ),
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
    Mistake(
        _ZEROED,
        "one head",
        "hidden keys are set to 0 before the feature map instead of after it",
        "The map of 0 is not 0, as elu(0) + 1 = 1 is: each hidden key still counts in the sum.",
        "features = phi(keys) * keep[:, None]",
        "features = (torch.nn.functional.elu(keys) + 1) * keep[..., None]",
        variants=tuple(
            _variant(MAPS[name], _with_zeros(both)) for both in (True, False) for name in _OF_ZERO
        ),
    ),
)


def maps_of(mistake: Mistake) -> tuple[str, ...]:
    """The names of the right ones beside which the variants of a mistake are, one for each."""
    if mistake in channels.MISTAKES:
        return (channels.NAME,)
    if mistake in recurrences.MISTAKES:
        return (recurrences.RETENTION,)
    if mistake in CHUNKS:
        return tuple(MAPS)
    if mistake.name in _EFFICIENT:
        return (EFFICIENT,)
    if mistake.name == _ZEROED:
        return _OF_ZERO
    return tuple(MAPS) if len(mistake.variants) == len(MAPS) else tuple(MAPS)[:1]
