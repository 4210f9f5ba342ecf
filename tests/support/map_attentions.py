"""Attention over maps of pixels and over pairs in NumPy, right and with a mistake by name."""

import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def pooled(x, positions, w_q, w_k, w_v, w_o, num_heads=2, wrong=""):
    """x: (b, c, h, w), positions: (h * w + 1, c) -> (b, c)"""
    b, c, h, w = x.shape
    pixels = (
        x.reshape(b, h * w, c) if wrong == "map_reshaped" else x.reshape(b, c, -1).swapaxes(1, 2)
    )
    tokens = np.concatenate([pixels.mean(1, keepdims=True), pixels], 1)
    if wrong == "mean_token_without_position":
        positions = positions * (np.arange(len(positions)) > 0)[:, None]
    tokens = tokens if wrong == "pooled_without_positions" else tokens + positions
    read = tokens[:, 1:] if wrong == "mean_token_is_no_key" else tokens
    asks = tokens.mean(1) if wrong == "another_token_asks" else tokens[:, 0]
    q = (asks @ w_q).reshape(b, 1, num_heads, -1)
    k, v = ((read @ one).reshape(b, -1, num_heads, c // num_heads) for one in (w_k, w_v))
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhqk,bkhd->bqhd", softmax(s), v).reshape(b, c) @ w_o


class EndingNode:
    """Triangle attention around the ending node. z: (N, N, c), mask: (N, N), 1 where a pair is."""

    def __init__(self, c=16, heads=2, wrong="", seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.wrong = heads, wrong
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, c, c)) / np.sqrt(c)
        self.w_b = rng.normal(size=(c, heads))

    def __call__(self, z, mask=None):
        bias = z @ self.w_b
        z = z.swapaxes(0, 1)
        if self.wrong != "pair_bias_transposed":
            bias = z @ self.w_b
        if mask is not None and self.wrong != "pair_mask_transposed":
            mask = mask.swapaxes(0, 1)
        n, _, c = z.shape
        q, k, v = (
            (z @ w).reshape(n, n, self.heads, -1).swapaxes(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        s = q @ k.swapaxes(-1, -2)
        bias = bias.transpose(2, 0, 1) * (self.wrong != "pair_bias_lost")
        if self.wrong == "pair_bias_scaled":
            s = (s + bias) / np.sqrt(q.shape[-1])
        else:
            s = s / np.sqrt(q.shape[-1]) + bias
        if mask is not None:
            s = s + 1e9 * (mask[:, None, None] - 1.0)
        out = (softmax(s) @ v).swapaxes(1, 2).reshape(n, n, c) @ self.w_o
        return out if self.wrong == "pairs_not_exchanged_back" else out.swapaxes(0, 1)


class TriangleAttention:
    """Around the starting node rows of the pairs z (N, N, c) attend, around the ending one columns.

    The latter is the former of the transposed pairs, transposed back.
    """

    wrong = ""

    def __init__(self, c=16, heads=2, starting=True, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.starting = heads, starting
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, c, c)) / np.sqrt(c)
        self.w_b = rng.normal(size=(c, heads))

    def __call__(self, z):
        n, _, c = z.shape
        if not self.starting and self.wrong != "pairs_of_the_other_node":
            z = z.swapaxes(0, 1)
        q, k, v = (
            (z @ w).reshape(n, n, self.heads, -1).swapaxes(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + (z @ self.w_b).transpose(2, 0, 1)
        out = (softmax(s) @ v).swapaxes(1, 2).reshape(n, n, c) @ self.w_o
        return out if self.starting or self.wrong else out.swapaxes(0, 1)


class Unturned(TriangleAttention):
    wrong = "pairs_of_the_other_node"


class NotTurnedBack(TriangleAttention):
    wrong = "pairs_not_exchanged_back"


def triangle(params, pair, orientation="per_row"):
    """A pair representation (N, N, c); "per_column" is per_row of the transposed pairs."""
    if orientation == "per_column":
        pair = np.swapaxes(pair, 0, 1)
    q = np.einsum("iqc,chd->ihqd", pair, params["q"])
    k = np.einsum("ikc,chd->ihkd", pair, params["k"])
    v = np.einsum("ikc,chd->ihkd", pair, params["v"])
    s = np.einsum("ihqd,ihkd->ihqk", q, k) / np.sqrt(q.shape[-1])
    s = s + np.einsum("qkc,ch->hqk", pair, params["b"])
    gate = 1 / (1 + np.exp(-np.einsum("iqc,chd->iqhd", pair, params["gate"])))
    out = np.einsum("ihqk,ihkd->iqhd", softmax(s), v) * gate
    out = np.einsum("iqhd,hdc->iqc", out, params["o"])
    return np.swapaxes(out, 0, 1) if orientation == "per_column" else out
