"""Attention with more around it, or with arguments packed in unusual ways; of NumPy.

Each is right where SCALED is true, and otherwise lacks the scale.
"""

from __future__ import annotations

import numpy as np

SCALED = True


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def scale_of(width):
    return width**-0.5 if SCALED else 1.0


def linear(x, w, b):
    return x @ w + b


def weights_in_dictionaries(x, c_attn, c_proj, n_head):
    """Each layer's weight and bias in a dictionary; (T, C)."""
    x = linear(x, **c_attn)
    parts = [np.split(one, n_head, axis=-1) for one in np.split(x, 3, axis=-1)]
    hidden = (1 - np.tri(len(x))) * -1e10
    heads = [
        softmax(q @ k.T * scale_of(q.shape[-1]) + hidden) @ v
        for q, k, v in zip(*parts, strict=True)
    ]
    return linear(np.hstack(heads), **c_proj)


def weights_side_by_side(x, Wqkv, Wo, n_heads):
    """One matrix for queries, keys and values; (B, T, C)."""
    b, t, c = x.shape
    parts = np.split(x @ Wqkv, 3, -1)
    q, k, v = (one.reshape(b, t, n_heads, -1).transpose(0, 2, 1, 3) for one in parts)
    y = softmax(q @ k.swapaxes(-1, -2) * scale_of(c // n_heads)) @ v
    return y.transpose(0, 2, 1, 3).reshape(b, t, c) @ Wo


def weights_below_each_other(query, key, value, num_heads, in_proj_weight, out_proj_weight):
    """Weights stored as (out, in), one below the other; (L, N, E), rows before the batch."""
    length, batch, width = query.shape
    each = width // num_heads

    def project(x, w):
        return (x @ w.T).reshape(len(x), batch * num_heads, each).transpose(1, 0, 2)

    q, k, v = map(project, (query, key, value), np.split(in_proj_weight, 3))
    y = softmax(q @ k.transpose(0, 2, 1) * scale_of(each)) @ v
    return y.transpose(1, 0, 2).reshape(length, batch, width) @ out_proj_weight.T


def grouped_queries_and_sinks(Q, K, V, sinks):
    """Queries with an axis of groups and one of heads in a group; always causal."""
    n, groups, each, width = Q.shape
    scores = np.einsum("qhmd,khd->hmqk", Q, K) * scale_of(width)
    scores = scores + np.triu(np.full((n, n), -np.inf), 1)
    sink = np.broadcast_to(sinks.reshape(groups, each, 1, 1), (*scores.shape[:3], 1))
    weights = softmax(np.concatenate([scores, sink], -1))[..., :-1]
    return np.einsum("hmqk,khd->qhmd", weights, V).reshape(n, -1)


def ring(q, k, v, n_dev=4):
    """Takes only lengths that n_dev divides; (B, H, L, D)."""
    parts = np.split(k, n_dev, axis=2), np.split(v, n_dev, axis=2)
    scores = [q @ one.swapaxes(-1, -2) * scale_of(q.shape[-1]) for one in parts[0]]
    top = np.max([one.max(-1, keepdims=True) for one in scores], axis=0)
    sums = [np.exp(one - top) for one in scores]
    numerator = sum(e @ v for e, v in zip(sums, parts[1], strict=True))
    return numerator / sum(e.sum(-1, keepdims=True) for e in sums)


class Cache:
    """Its state is changed by another method than the one that is called; (T, H, D), (T, D)."""

    def __init__(self, head_dim=8):
        self.k, self.v = np.zeros((0, head_dim)), np.zeros((0, head_dim))

    def append(self, k, v):
        self.k, self.v = np.concatenate([self.k, k]), np.concatenate([self.v, v])

    def __call__(self, q, k, v):
        past = len(self.k)
        self.append(k, v)
        scores = np.einsum("thd,kd->htk", q, self.k) * scale_of(q.shape[-1])
        late = np.arange(len(self.k)) > past + np.arange(len(q))[:, None]
        return np.einsum("htk,kd->thd", softmax(np.where(late, -np.inf, scores)), self.v)


ALL = (
    weights_in_dictionaries,
    weights_side_by_side,
    weights_below_each_other,
    grouped_queries_and_sinks,
    ring,
    Cache,
)
