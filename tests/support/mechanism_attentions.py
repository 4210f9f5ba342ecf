"""Functions that compute attention with another score or normalization: right ones, and wrong ones.

Each is written as people write it, with its parameters inside, and with what it is meant to be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.normalizers import Hard, Sigmoid, Sparsemax
from regard.scores import Additive, Cosine, Distance, Features, General
from regard.textbook import Mechanism

RNG = np.random.default_rng(17)
W, W_Q, W_K, V = (RNG.normal(size=n).round(2) for n in ((6, 6), (6, 4), (6, 4), (4,)))
GATED = Mechanism(
    "gated",
    [
        ("W", "W_s", "D K", "given"),
        ("turned", "Q_w", "H L K", "dot", "queries", "W"),
        ("gates", "B", "H L K", "sigmoid", "turned"),
        ("scores", "A", "H L S", "dot", "gates", ("keys", "h//(H//G) j k")),
    ],
    W=W,
)
MEANT: dict[str, dict[str, Any]] = {
    "cosine": {"score": Cosine(0.5)},
    "additive": {"score": Additive(W_Q, W_K, V)},
    "general": {"score": General(W)},
    "distance": {"score": Distance()},
    "linear": {"score": Features()},
    "gated": {"score": GATED},
    "sigmoid": {"normalize": Sigmoid(-1.0)},
    "sparsemax": {"normalize": Sparsemax()},
    "hard": {"normalize": Hard()},
    "both": {"score": Cosine(0.5), "normalize": Sigmoid(-1.0)},
}


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def t(x):
    return np.swapaxes(x, -1, -2)


def right_cosine_attention(query, key, value, mask=None):
    q = query / np.linalg.norm(query, axis=-1, keepdims=True)
    k = key / np.linalg.norm(key, axis=-1, keepdims=True)
    s = 2.0 * q @ t(k)
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    return softmax(s) @ value


def right_cosine_loops(q, k, v):
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        sims = [q[i] @ one / (np.sqrt(q[i] @ q[i]) * np.sqrt(one @ one)) for one in k]
        w = softmax(np.array(sims) / 0.5)
        for j, weight in enumerate(w):
            out[i] += weight * v[j]
    return out


def right_bahdanau(q, k, v):
    hidden = np.tanh((q @ W_Q)[..., :, None, :] + (k @ W_K)[..., None, :, :])
    return softmax(hidden @ V) @ v


def right_bahdanau_concat(queries, keys, values):
    both = np.concatenate([W_Q, W_K])
    out = []
    for q in queries:
        e = np.array([np.tanh(np.concatenate([q, k]) @ both) @ V for k in keys])
        out.append(softmax(e) @ values)
    return np.array(out)


def right_luong_general(q, k, v, causal=False):
    s = q @ W @ t(k)
    if causal:
        n, m = s.shape[-2:]
        s = np.where(np.arange(m) <= np.arange(n)[:, None] + m - n, s, -np.inf)
    return softmax(s) @ v


def right_gaussian(q, k, v):
    squared = (q * q).sum(-1)[..., None] - 2 * q @ t(k) + (k * k).sum(-1)[..., None, :]
    return softmax(-squared) @ v


def right_sigmoid(q, k, v):
    return 1 / (1 + np.exp(1.0 - q @ t(k) / np.sqrt(q.shape[-1]))) @ v


def right_gates(q, k, v):
    return softmax(1 / (1 + np.exp(-(q @ W))) @ t(k)) @ v


def cosine_of_keys_alone(q, k, v):
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return softmax(q @ t(k) / 0.5) @ v


def cosine_temperature_times(q, k, v):
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return softmax(q @ t(k) * 0.5) @ v


def cosine_scaled_too(q, k, v):
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return softmax(q @ t(k) / 0.5 / np.sqrt(q.shape[-1])) @ v


def cosine_softmax_of_queries(q, k, v):
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return softmax(q @ t(k) / 0.5, axis=-2) @ v


def bahdanau_without_tanh(q, k, v):
    return softmax(((q @ W_Q)[..., :, None, :] + (k @ W_K)[..., None, :, :]) @ V) @ v


def bahdanau_matrices_swapped(q, k, v):
    hidden = np.tanh((q @ W_K)[..., :, None, :] + (k @ W_Q)[..., None, :, :])
    return softmax(hidden @ V) @ v


def bahdanau_mask_after_softmax(q, k, v, mask=None):
    hidden = np.tanh((q @ W_Q)[..., :, None, :] + (k @ W_K)[..., None, :, :])
    p = softmax(hidden @ V)
    if mask is not None:
        p = p * mask
    return p @ v


def general_matrix_transposed(q, k, v):
    return softmax(q @ W.T @ t(k)) @ v


def general_scaled(q, k, v):
    return softmax(q @ W @ t(k) / np.sqrt(q.shape[-1])) @ v


def distance_not_squared(q, k, v):
    d = np.sqrt(((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1))
    return softmax(-d) @ v


def distance_far_wins(q, k, v):
    d = ((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1)
    return softmax(d) @ v


def gates_without_sigmoid(q, k, v):
    return softmax((q @ W) @ t(k)) @ v


def sigmoid_bias_forgotten(q, k, v):
    return 1 / (1 + np.exp(-q @ t(k) / np.sqrt(q.shape[-1]))) @ v


def sparsemax_that_is_softmax(q, k, v):
    return softmax(q @ t(k) / np.sqrt(q.shape[-1])) @ v


def elu_without_one(q, k, v):
    def feature(x):
        return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)

    return softmax(feature(q) @ t(feature(k))) @ v


def unit(x):
    return x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def hidden_part(q, k):
    return np.tanh((q @ W_Q)[..., :, None, :] + (k @ W_K)[..., None, :, :])


def squares(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]) ** 2


def right_cosine_with_floor(q, k, v):
    return softmax(unit(q) @ t(unit(k)) / 0.5) @ v


def right_with_a_mask_that_hides(q, k, v, mask=None):
    d = squares(q, k).sum(-1)
    if mask is not None:
        d = np.where(mask, np.inf, d)
    return softmax(-d) @ v


def right_both(q, k, v):
    return 1 / (1 + np.exp(1.0 - unit(q) @ t(unit(k)) / 0.5)) @ v


def right_additive_without_maximum(q, k, v):
    e = np.exp(hidden_part(q, k) @ V)
    return e / e.sum(-1, keepdims=True) @ v


def fragile_general_without_maximum(q, k, v):
    e = np.exp(q @ W @ t(k))
    return e / e.sum(-1, keepdims=True) @ v


def cosine_without_the_own_key(q, k, v, causal=False):
    s = unit(q) @ t(unit(k)) / 0.5
    if causal:
        n, m = s.shape[-2:]
        s = np.where(np.arange(m) < np.arange(n)[:, None] + m - n, s, -1e9)
    return softmax(s) @ v


def cosine_without_temperature(q, k, v):
    return softmax(unit(q) @ t(unit(k))) @ v


def cosine_of_columns(q, k, v):
    s = q / np.linalg.norm(q, axis=0) @ (k / np.linalg.norm(k, axis=0)).T
    return softmax(s / 0.5) @ v


def cosine_scaled_without_temperature(q, k, v):
    return softmax(unit(q) @ t(unit(k)) / np.sqrt(q.shape[-1])) @ v


def bahdanau_scaled(q, k, v):
    return softmax(hidden_part(q, k) @ V / np.sqrt(len(V))) @ v


def bahdanau_of_values(q, k, v):
    return softmax(hidden_part(q, v) @ V) @ v


def general_on_both_sides(q, k, v):
    return softmax(q @ W @ t(k @ W)) @ v


def general_of_keys(q, k, v):
    return softmax(q @ W @ t(k)) @ k


def distance_averaged(q, k, v):
    return softmax(-squares(q, k).mean(-1)) @ v


def sigmoid_normalised(q, k, v):
    p = 1 / (1 + np.exp(1.0 - q @ t(k) / np.sqrt(q.shape[-1])))
    return p / p.sum(-1, keepdims=True) @ v


def sigmoid_unscaled(q, k, v):
    return 1 / (1 + np.exp(1.0 - q @ t(k))) @ v


def sigmoid_bias_subtracted(q, k, v):
    return 1 / (1 + np.exp(-1.0 - q @ t(k) / np.sqrt(q.shape[-1]))) @ v


def hard_over_queries(q, k, v):
    s = q @ t(k)
    return (np.arange(s.shape[-2])[:, None] == s.argmax(-2)[..., None, :]).astype(float) @ v


def gates_transposed(q, k, v):
    return softmax(1 / (1 + np.exp(-(q @ W.T))) @ t(k)) @ v


def both_with_softmax(q, k, v):
    return softmax(unit(q) @ t(unit(k)) / 0.5) @ v


# What each is meant to be, and the mistake that is in it.
RIGHT = {
    right_cosine_attention: "cosine",
    right_cosine_loops: "cosine",
    right_bahdanau: "additive",
    right_bahdanau_concat: "additive",
    right_luong_general: "general",
    right_gaussian: "distance",
    right_sigmoid: "sigmoid",
    right_gates: "gated",
    right_cosine_with_floor: "cosine",
    right_with_a_mask_that_hides: "distance",
    right_both: "both",
    right_additive_without_maximum: "additive",
}
WRONG = {
    cosine_of_keys_alone: ("cosine", "unit_queries_left_out"),
    cosine_temperature_times: ("cosine", "temperature_multiplied"),
    cosine_scaled_too: ("cosine", "scaled_by_width"),
    cosine_softmax_of_queries: ("cosine", "softmax_over_queries"),
    bahdanau_without_tanh: ("additive", "no_tanh"),
    bahdanau_matrices_swapped: ("additive", "W_q_and_W_k_exchanged"),
    bahdanau_mask_after_softmax: ("additive", "mask_after_softmax"),
    general_matrix_transposed: ("general", "W_transposed"),
    general_scaled: ("general", "scaled_by_width"),
    distance_not_squared: ("distance", "distance_not_squared"),
    distance_far_wins: ("distance", "scores_left_out"),
    gates_without_sigmoid: ("gated", "gates_left_out"),
    sigmoid_bias_forgotten: ("sigmoid", "with_bias_left_out"),
    sparsemax_that_is_softmax: ("sparsemax", "softmax_instead"),
    elu_without_one: ("linear", "elu_alone"),
    cosine_without_the_own_key: ("cosine", "causal_hides_own_key"),
    cosine_without_temperature: ("cosine", "scores_left_out"),
    cosine_of_columns: ("cosine", "columns_normalised"),
    cosine_scaled_without_temperature: ("cosine", "scaled_by_width scores_left_out"),
    bahdanau_scaled: ("additive", "scaled_by_hidden_width"),
    bahdanau_of_values: ("additive", "values_as_keys"),
    general_on_both_sides: ("general", "keys_transformed_too"),
    general_of_keys: ("general", "keys_for_values"),
    distance_averaged: ("distance", "distance_averaged"),
    sigmoid_normalised: ("sigmoid", "sigmoid_normalised"),
    sigmoid_unscaled: ("sigmoid", "no_scale"),
    sigmoid_bias_subtracted: ("sigmoid", "bias_subtracted"),
    hard_over_queries: ("hard", "largest_of_queries"),
    gates_transposed: ("gated", "W_transposed"),
    both_with_softmax: ("both", "softmax_instead"),
}
