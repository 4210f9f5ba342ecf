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


class ShiftedWindows:
    """Attention in windows of a map x (B, H, W, C) that is rolled by -shift and rolled back.

    Pixels that only became neighbours by rolling are masked from each other.
    """

    def __init__(self, dim=32, heads=4, window=4, shift=2, wrong="", seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.window, self.shift, self.wrong = heads, window, shift, wrong
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, dim, dim)) / np.sqrt(dim)
        self.relative_bias = rng.normal(size=((2 * window - 1) ** 2, heads))
        rows, columns = np.divmod(np.arange(window**2), window)
        down = rows[:, None] - rows + window - 1
        self.index = down * (2 * window - 1) + columns[:, None] - columns + window - 1

    def cut(self, x):
        b, h, w, c = x.shape
        s = self.window
        x = x.reshape(b, h // s, s, w // s, s, c).transpose(0, 1, 3, 2, 4, 5)
        return x.reshape(b, -1, s * s, c)

    def __call__(self, x):
        b, h, w, c = x.shape
        s = self.window
        turned = np.roll(x, (-self.shift, -self.shift), (1, 2))
        places = np.zeros((1, h, w, 1), int)
        cuts = slice(0, -s), slice(-s, -self.shift), slice(-self.shift, None)
        for number, (rows, columns) in enumerate((r, c) for r in cuts for c in cuts):
            places[:, rows, columns] = number
        places = self.cut(places)[..., 0]
        q, k, v = (
            (self.cut(turned) @ one).reshape(b, -1, s * s, self.heads, c // self.heads)
            for one in (self.w_q, self.w_k, self.w_v)
        )
        scores = np.einsum("bnqhd,bnkhd->bnhqk", q, k) / np.sqrt(c // self.heads)
        scores = scores + self.relative_bias[self.index].transpose(2, 0, 1)
        if self.wrong != "window_wraps_around":
            alike = places[..., :, None] == places[..., None, :]
            scores = np.where(alike[:, :, None], scores, -100.0)
        out = np.einsum("bnhqk,bnkhd->bnqhd", softmax(scores), v).reshape(b, -1, c) @ self.w_o
        out = out.reshape(b, h // s, w // s, s, s, c).transpose(0, 1, 3, 2, 4, 5)
        back = -self.shift if self.wrong == "pixels_misplaced" else self.shift
        return np.roll(out.reshape(b, h, w, c), (back, back), (1, 2))


class OfPixels:
    """Attention over the pixels of a map x (b, c, h, w), with 1 x 1 convolutions; x is added."""

    def __init__(self, channels=16, heads=2, wrong="", seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.wrong = heads, wrong
        self.queries, self.keys, self.values, self.output = (
            (rng.normal(size=(channels, channels)) / 4, rng.normal(size=(channels, 1)))
            for _ in range(4)
        )

    def __call__(self, x):
        b, c, h, w = x.shape
        flat = x.reshape(b, c, h * w)
        if self.wrong == "map_reshaped":
            flat = x.reshape(b, h * w, c).swapaxes(1, 2)
        q, k, v = (
            (one[0] @ flat + one[1]).reshape(b, self.heads, c // self.heads, h * w)
            for one in (self.queries, self.keys, self.values)
        )
        s = q.swapaxes(-1, -2) @ k / np.sqrt(c // self.heads)
        weights = softmax(s, -2 if self.wrong == "softmax_over_queries" else -1)
        out = (v @ weights.swapaxes(-1, -2)).reshape(b, c, h * w)
        return x + (self.output[0] @ out + self.output[1]).reshape(b, c, h, w)


class EfficientAttention:
    """Efficient attention on maps x (b, c, h, w): softmaxes over features, and over pixels."""

    of_queries, of_keys = 2, 3

    def __init__(self, channels=16, heads=2, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.queries, self.keys, self.values, self.output = (
            (rng.normal(size=(channels, channels)) / 4, rng.normal(size=(channels, 1)))
            for _ in range(4)
        )

    def __call__(self, x):
        b, c, h, w = x.shape
        q, k, v = (
            (one[0] @ x.reshape(b, c, h * w) + one[1]).reshape(b, self.heads, -1, h * w)
            for one in (self.queries, self.keys, self.values)
        )
        context = softmax(k, self.of_keys) @ v.swapaxes(-1, -2)
        out = context.swapaxes(-1, -2) @ softmax(q, self.of_queries)
        return (self.output[0] @ out.reshape(b, c, h * w) + self.output[1]).reshape(b, c, h, w)


class KeysOverFeatures(EfficientAttention):
    of_keys = 2


class QueriesOverPixels(EfficientAttention):
    of_queries = 3


def neighbourhood(q, k, v, kernel_size=3):
    """Neighbourhood attention. q, k, v: (heads, H, W, d); at the border it is cut off."""
    heads, h, w, d = q.shape
    rows, columns = np.divmod(np.arange(h * w), w)
    near = np.maximum(abs(rows[:, None] - rows), abs(columns[:, None] - columns))
    q, k, v = (one.reshape(heads, h * w, d) for one in (q, k, v))
    s = np.where(near <= kernel_size // 2, q @ k.swapaxes(-1, -2) / np.sqrt(d), -np.inf)
    return (softmax(s) @ v).reshape(heads, h, w, d)


def neighbourhood_unscaled(q, k, v, kernel_size=3):
    """Neighbourhood attention. q, k, v: (heads, H, W, d); at the border it is cut off."""
    return neighbourhood(q * q.shape[-1] ** 0.5, k, v, kernel_size)


class CosineWindow:
    """Scaled cosine attention in a window x (B, N, C), as in Swin V2, with a bias by distance."""

    def __init__(self, dim=24, heads=4, window=4, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, dim, dim)) / np.sqrt(dim)
        self.logit_scale = np.log(10.0 * np.ones((heads, 1, 1)))
        rows, columns = np.divmod(np.arange(window**2), window)
        down, across = rows[:, None] - rows, columns[:, None] - columns
        table = rng.normal(size=(2 * window - 1, 2 * window - 1, heads))
        bias = table[down + window - 1, across + window - 1]
        self.bias_by_place = 16 / (1 + np.exp(-bias.transpose(2, 0, 1)))

    def __call__(self, x):
        b, n, c = x.shape
        q, k, v = (
            (x @ one).reshape(b, n, self.heads, -1).swapaxes(1, 2)
            for one in (self.w_q, self.w_k, self.w_v)
        )
        q, k = (one / np.linalg.norm(one, axis=-1, keepdims=True) for one in (q, k))
        s = q @ k.swapaxes(-1, -2) * np.exp(np.minimum(self.logit_scale, np.log(100.0)))
        out = (softmax(s + self.bias_by_place) @ v).swapaxes(1, 2).reshape(b, n, c)
        return out @ self.w_o
