"""Right attentions, each written in another way: the diagnosis must not accuse any of them."""

from __future__ import annotations

import math

import numpy as np


def einsum(q, k, v, mask=None):
    s = np.einsum("...id,...jd->...ij", q, k) / math.sqrt(q.shape[-1])
    if mask is not None:
        s = np.where(mask, s, -np.inf)
    e = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("...ij,...je->...ie", e / e.sum(-1, keepdims=True), v)


def loops(queries, keys, values):
    out = np.zeros((len(queries), values.shape[1]))
    for i, query in enumerate(queries):
        scores = [
            sum(a * b for a, b in zip(query, key, strict=True)) / len(query) ** 0.5 for key in keys
        ]
        top = max(scores)
        shares = [math.exp(score - top) for score in scores]
        for share, value in zip(shares, values, strict=True):
            out[i] += share / sum(shares) * value
    return out


def blockwise(q, k, v, causal=False):
    """Some keys at a time, with a running maximum and sum."""
    rows, keys = q.shape[-2], k.shape[-2]
    top = np.full((*q.shape[:-1], 1), -np.inf)
    total = np.zeros_like(top)
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for start in range(0, keys, 2):
        s = q @ k[..., start : start + 2, :].swapaxes(-1, -2) * q.shape[-1] ** -0.5
        if causal:
            i, j = np.arange(rows)[:, None] + keys - rows, np.arange(start, start + s.shape[-1])
            s = np.where(j <= i, s, -np.inf)
        new = np.maximum(top, s.max(-1, keepdims=True))
        e, fade = np.exp(s - new), np.exp(top - new)
        total = total * fade + e.sum(-1, keepdims=True)
        out = out * fade + e @ v[..., start : start + 2, :]
        top = new
    return out / total


def scaled_queries(q, k, v):
    q = q / np.sqrt(q.shape[-1])
    w = np.exp(q @ np.swapaxes(k, -1, -2))
    return w @ v / w.sum(axis=-1, keepdims=True)


def both_scaled(q, k, v):
    root = q.shape[-1] ** 0.25
    s = (q / root) @ (k / root).swapaxes(-1, -2)
    return np.exp(s - np.log(np.exp(s).sum(-1, keepdims=True))) @ v


def columns(Q, K, V):
    """Column by column, with the transposed matrices of some textbooks."""
    s = (K @ Q.T) / np.sqrt(K.shape[1])
    e = np.exp(s - s.max(axis=0))
    return (V.T @ (e / e.sum(axis=0))).T


def finite_mask(q, k, v, mask):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        s = s + (1.0 - mask) * -1e9
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def hides_true(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        s[..., :, :] = np.where(mask, -np.inf, s)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def additive(q, k, v, attn_bias=None):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = s if attn_bias is None else s + attn_bias
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def rows_before_heads(q, k, v):
    """(B, L, H, D), as flash-attention has it."""
    if q.ndim != 4:
        raise ValueError("four axes, please")
    s = np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(q.shape[-1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bhls,bshe->blhe", e / e.sum(-1, keepdims=True), v)


def always_causal(q, k, v):
    n = q.shape[-2]
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = s + np.triu(np.full((n, n), -np.inf), 1)
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def weights_first(query, key, value):
    s = query @ key.T / np.sqrt(key.shape[1])
    w = np.exp(s - s.max(1, keepdims=True))
    w /= w.sum(1, keepdims=True)
    return w, w @ value


def single_query(q, K, V):
    s = K @ q / np.sqrt(len(q))
    e = np.exp(s - s.max())
    return e @ V / e.sum()


def half(q, k, v):
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    s = (q @ k.swapaxes(-1, -2)) * np.float16(q.shape[-1] ** -0.5)
    e = np.exp(s - s.max(-1, keepdims=True))
    return (e / e.sum(-1, keepdims=True)) @ v


def self_attention(X):
    s = X @ X.T / np.sqrt(X.shape[1])
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ X


def projected(X, W_q, W_k, W_v):
    return einsum(X @ W_q, X @ W_k, X @ W_v)


def packed_heads(queries, keys, values, num_heads):
    parts = [np.split(x, num_heads, axis=-1) for x in (queries, keys, values)]
    return np.concatenate([einsum(*part) for part in zip(*parts, strict=True)], axis=-1)


def ball_window(q, k, v, causal=False, window=None):
    n, m = q.shape[-2], k.shape[-2]
    i, j = np.arange(n)[:, None] + m - n, np.arange(m)
    see = (j <= i) if causal else (j >= 0) & (i >= -1)
    see = see if window is None else see & (i - j <= window)  # the own key is not counted
    return einsum(q, k, v, see)


class Layer:
    """Heads and weights of its own, in NumPy."""

    def __init__(self):
        rng = np.random.default_rng(3)
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(size=(4, 6, 6)) / 2
        self.num_heads = 3

    def __call__(self, x):
        return packed_heads(x @ self.W_q, x @ self.W_k, x @ self.W_v, self.num_heads) @ self.W_o


RIGHT = [
    einsum,
    loops,
    blockwise,
    scaled_queries,
    both_scaled,
    columns,
    finite_mask,
    hides_true,
    additive,
    rows_before_heads,
    always_causal,
    weights_first,
    single_query,
    half,
    self_attention,
    projected,
    packed_heads,
    ball_window,
    Layer(),
]
