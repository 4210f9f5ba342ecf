"""Right backward passes, and attentions with other scores. Must not know any single mistake."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from regard.diagnosis.mistakes.program import CAUSAL, HEADS, Program
from regard.normalizers import Proportional, Sigmoid
from regard.scores import Additive, Cosine, Distance, Features, General

_BACKWARD = """names = "query", "key", "value"
return dict(zip(names, f(t.query, t.key, t.value, t.grad_output{})))"""
_PARTS = np.linspace(-1, 1, 12).reshape(4, 3), np.linspace(1, -2, 12).reshape(4, 3)

OTHERS: Mapping[str, Program] = {
    "backward": Program(
        """def attention(q, k, v, d_output):
    B, H, L, D = q.shape
    scale = «scale: D**-0.5»
    scores = q @ T(k)
    logits = scores * scale
    m = logits.max(-1, keepdims=True)
    e = np.exp(logits - m)
    z = e.sum(-1, keepdims=True)
    weights, lse = e / z, m + np.log(z)
    output = weights @ v
    d_weights = «d_weights: d_output @ T(v)»
    delta = («delta: (d_output * output).sum(-1)»)[..., None]
    d_scaled = «d_logits: weights * (d_weights - delta)»
    d_scores = «d_scores: d_scaled * scale»
    dq = «d_queries: d_scores @ k»
    dk = «d_keys: T(d_scores) @ q»
    dv = «d_values: T(weights) @ d_output»
    return «dq: dq», «dk: dk», «dv: dv»
""",
        _BACKWARD.format(""),
    ),
    "backward with a saved lse": Program(
        """def attention(q, k, v, d_output):
    (L, D), S = q.shape[-2:], k.shape[-2]
    keep = np.arange(S) <= np.arange(L)[:, None] + S - L
    raw = q @ T(k) / np.sqrt(D)
    logits = np.where(keep, raw, -np.inf)
    m = logits.max(-1, keepdims=True)
    lse = m + np.log(np.exp(logits - m).sum(-1, keepdims=True))
    output = softmax(logits) @ v
    weights = «again: np.exp(logits - lse)»
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(""),
        CAUSAL,
    ),
    "masked backward": Program(
        """def attention(q, k, v, d_output, keep):
    D = q.shape[-1]
    raw = q @ T(k) / np.sqrt(D)
    output = softmax(np.where(keep, raw, -np.inf)) @ v
    seen = «seen: keep»
    weights = softmax(np.where(seen, raw, -np.inf))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (d_output * output).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(", t.mask"),
    ),
    "softcap backward": Program(
        """def attention(q, k, v, d_output, cap):
    scale = q.shape[-1] ** -0.5
    scaled = q @ T(k) * scale
    capped = cap * np.tanh(scaled / cap)
    weights = softmax(capped)
    d_weights = d_output @ T(v)
    d_capped = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
    d_scaled = «d_scaled: d_capped * (1 - np.tanh(scaled / cap) ** 2)»
    d_scores = d_scaled * scale
    return d_scores @ k, T(d_scores) @ q, T(weights) @ d_output
""",
        _BACKWARD.format(", t.softcap"),
    ),
    "grouped backward": Program(
        """def attention(q, k, v, d_output):
    (B, H, L, D), G = q.shape, k.shape[1]

    def together(gradient):
        each = gradient.reshape(B, G, H // G, *gradient.shape[2:])
        return «together: each.sum(2)»

    k, v = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return d_scores @ k, together(T(d_scores) @ q), together(T(weights) @ d_output)
""",
        _BACKWARD.format(""),
    ),
    "backward by queries": Program(
        """def blocks(weights, d_scores, q, k, d_output, n):
    L = q.shape[-2]
    dq, dk, dv = np.zeros(q.shape), 0.0, 0.0
    for rows in «blocks_of_queries: cuts(L, n)»:
        dq[..., rows, :] = d_scores[..., rows, :] @ k
        dk = «sum_of_keys: dk» + T(d_scores[..., rows, :]) @ q[..., rows, :]
        dv = «sum_of_values: dv» + T(weights[..., rows, :]) @ d_output[..., rows, :]
    return dq, dk, dv


def attention(q, k, v, d_output):
    D = q.shape[-1]
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return blocks(weights, d_scores, q, k, d_output, 2)
""",
        _BACKWARD.format(""),
        helper="blocks",
        makes=("d_queries", "d_keys_by_head", "d_values_by_head"),
    ),
    "backward by keys": Program(
        """def blocks(weights, d_scores, q, k, d_output, n):
    S, v = k.shape[-2], d_output
    dq, dk, dv = 0.0, np.zeros(k.shape), np.zeros((*k.shape[:-1], v.shape[-1]))
    for keys in «blocks_of_keys: cuts(S, n)»:
        dq = «sum_of_queries: dq» + d_scores[..., keys] @ k[..., keys, :]
        dk[..., keys, :] = T(d_scores[..., keys]) @ q
        dv[..., keys, :] = T(weights[..., keys]) @ d_output
    return dq, dk, dv


def attention(q, k, v, d_output):
    D = q.shape[-1]
    weights = softmax(q @ T(k) / np.sqrt(D))
    d_weights = d_output @ T(v)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(D)
    return blocks(weights, d_scores, q, k, d_output, 2)
""",
        _BACKWARD.format(""),
        helper="blocks",
        makes=("d_queries", "d_keys_by_head", "d_values_by_head"),
    ),
    "cosines": Program(
        """temperature = 0.5


def attention(queries, keys, values):
    D = queries.shape[-1]
    unit_queries = «unit_queries: queries / lengths_of(queries)»
    unit_keys = «unit_keys: keys / lengths_of(keys)»
    cosines = unit_queries @ T(unit_keys)
    logits = «scores: cosines / temperature»
    return softmax(logits) @ values
""",
        HEADS,
        {"causal": False, "score": Cosine(temperature=0.5)},
    ),
    "additive score": Program(
        """W_q = np.linspace(-1, 1, 12).reshape(4, 3)
W_k = np.linspace(1, -2, 12).reshape(4, 3)
u = np.array([1.0, -2.0, 0.5])


def attention(q, k, v):
    D = q.shape[-1]
    query_parts, key_parts = q @ W_q, k @ W_k
    hidden = query_parts[..., :, None, :] + key_parts[..., None, :, :]
    logits = «scores: np.tanh(hidden) @ u»
    return softmax(logits) @ v
""",
        HEADS,
        {"causal": False, "score": Additive(*_PARTS, np.array([1.0, -2.0, 0.5]))},
    ),
    "general score": Program(
        """W = np.linspace(-1, 2, 16).reshape(4, 4)


def attention(queries, k, v):
    D = queries.shape[-1]
    transformed_queries = «transformed_queries: queries @ W»
    logits = «scores: transformed_queries @ T(k)»
    return softmax(logits) @ v
""",
        HEADS,
        {"causal": False, "score": General(np.linspace(-1, 2, 16).reshape(4, 4))},
    ),
    "distances": Program(
        """def attention(q, k, v):
    D = q.shape[-1]
    logits = «scores: -(apart(q, k) ** 2)»
    return softmax(logits) @ v
""",
        HEADS,
        {"causal": False, "score": Distance()},
    ),
    "linear attention": Program(
        """def attention(queries, keys, v):
    S = keys.shape[-2]
    query_features = «query_features: phi(queries)»
    key_features = «key_features: phi(keys)»
    scores = query_features @ T(key_features)
    weights = «weights: scores / scores.sum(-1, keepdims=True)»
    return weights @ v
""",
        HEADS,
        {"causal": False, "score": Features(), "normalize": Proportional()},
    ),
    "sigmoid": Program(
        """shift = -1.0


def attention(q, k, v):
    logits = q @ T(k) / np.sqrt(q.shape[-1])
    with_bias = «with_bias: logits + shift»
    weights = «weights: 1 / (1 + np.exp(-with_bias))»
    return weights @ v
""",
        HEADS,
        {"causal": False, "normalize": Sigmoid(bias=-1.0)},
    ),
}
