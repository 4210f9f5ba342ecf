"""Attention in maps, over pairs and over edges in NumPy, right and wrong."""

import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


class Layer:
    def __init__(self, dim=16, heads=2, window=4, seed=0):
        rng = np.random.default_rng(seed)
        self.heads, self.window = heads, window
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, dim, dim)) / np.sqrt(dim)
        self.rel_pos_h = rng.normal(size=(2 * window - 1, dim // heads))
        self.rel_pos_w = rng.normal(size=(2 * window - 1, dim // heads))
        self.bias_table = rng.normal(size=(2 * window - 1, 2 * window - 1, heads))

    def split(self, x):
        parts = ((x @ w).reshape(*x.shape[:-1], self.heads, -1) for w in self.three())
        return (one.swapaxes(-2, -3) for one in parts)

    def three(self):
        return self.w_q, self.w_k, self.w_v

    def merge(self, out):
        out = out.swapaxes(-2, -3)
        return out.reshape(*out.shape[:-2], -1) @ self.w_o


class ByRowsAndColumns(Layer):
    """A window x (B, H, W, C), with a term of the rows and one of the columns, as in SAM."""

    axes = "bnhwij"

    def __call__(self, x):
        b, h, w, c = x.shape
        q, k, v = self.split(x.reshape(b, h * w, c))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        rows = self.rel_pos_h[np.arange(h)[:, None] - np.arange(h) + self.window - 1]
        columns = self.rel_pos_w[np.arange(w)[:, None] - np.arange(w) + self.window - 1]
        q = q.reshape(b, self.heads, h, w, -1)
        s = s.reshape(b, self.heads, h, w, h, w)
        s = s + self.placed(np.einsum("bnhwc,hic->bnhwi", q, rows), -1)
        s = s + self.placed(np.einsum("bnhwc,wjc->bnhwj", q, columns), -2)
        s = s.reshape(b, self.heads, h * w, h * w)
        return self.merge(softmax(s) @ v).reshape(b, h, w, c)

    def placed(self, term, axis):
        return np.expand_dims(term, axis)


class ColumnsForRows(ByRowsAndColumns):
    def placed(self, term, axis):
        return np.expand_dims(term, -3 - axis)


class CutWindows(Layer):
    """Windows of a map x (B, H, W, C), cut by one reshape, with a table by place."""

    turned = False

    def __call__(self, x):
        b, H, W, c = x.shape
        m = self.window
        cut = x.reshape(b, H // m, m, W // m, m, c).transpose(0, 1, 3, 2, 4, 5)
        q, k, v = self.split(cut.reshape(b, -1, m * m, c))
        rows, columns = np.divmod(np.arange(m * m), m)
        down, across = rows[:, None] - rows, columns[:, None] - columns
        if self.turned:
            across = columns[:, None] - rows
        bias = self.bias_table[down + m - 1, across + m - 1].transpose(2, 0, 1)
        out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + bias) @ v
        out = self.merge(out).reshape(b, H // m, W // m, m, m, c)
        return out.transpose(0, 1, 3, 2, 4, 5).reshape(b, H, W, c)


class PlacesExchanged(CutWindows):
    turned = True


class Grid(Layer):
    """A grid of pixels of the map x (B, H, W, C): each is H // g and W // g from the next."""

    back = (0, 3, 1, 4, 2, 5)

    def __init__(self, dim=16, heads=2, grid_size=4, seed=0):
        super().__init__(dim, heads, grid_size, seed)
        self.grid_size = grid_size

    def partition(self, x):
        b, H, W, c = x.shape
        g = self.grid_size
        return x.reshape(b, g, H // g, g, W // g, c).transpose(0, 2, 4, 1, 3, 5)

    def __call__(self, x):
        b, H, W, c = x.shape
        g = self.grid_size
        q, k, v = self.split(self.partition(x).reshape(b, -1, g * g, c))
        out = self.merge(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v)
        out = out.reshape(b, H // g, W // g, g, g, c)
        return out.transpose(self.back).reshape(b, H, W, c)


class GridAsWindows(Grid):
    back = (0, 1, 3, 2, 4, 5)


class EndingNode:
    """Triangle attention around the ending node. z: (N, N, c), mask: (N, N), 1 where a pair is."""

    def __init__(self, c=16, heads=2, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, c, c)) / np.sqrt(c)
        self.w_b = rng.normal(size=(c, heads))

    def __call__(self, z, mask=None):
        mask = np.ones(z.shape[:-1]) if mask is None else mask
        z = z.swapaxes(-2, -3)
        hidden = 1e9 * (mask - 1)[..., :, None, None, :]
        n, _, c = z.shape
        q, k, v = (
            (z @ w).reshape(n, n, self.heads, -1).swapaxes(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + hidden
        s = s + (z @ self.w_b).transpose(2, 0, 1)
        out = (softmax(s) @ v).swapaxes(1, 2).reshape(n, n, c) @ self.w_o
        return out.swapaxes(0, 1)


def over_edges(q, k, v, read, reads, shared):
    """Every edge leads from a node that is read to one that reads; weights add up where shared."""
    n = len(q)
    s = (q[reads] * k[read]).sum(-1) / np.sqrt(q.shape[-1])
    top = np.full((n, s.shape[1]), -np.inf)
    np.maximum.at(top, shared, s)
    e = np.exp(s - top[shared])
    total = np.zeros((n, s.shape[1]))
    np.add.at(total, shared, e)
    out = np.zeros_like(q)
    np.add.at(out, reads, (e / total[shared])[..., None] * v[read])
    return out.reshape(n, -1)


class GraphLayer:
    """x: (N, C); edge_index: (2, E), row 0 the sources, row 1 the targets, which read these."""

    of_senders, turned = False, False

    def __init__(self, dim=12, heads=3, edge_dim=4, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.w_q, self.w_k, self.w_v = rng.normal(size=(3, dim, dim)) / np.sqrt(dim)
        self.lin_edge = rng.normal(size=(edge_dim, dim))
        self.lin_skip = rng.normal(size=(dim, dim))

    def __call__(self, x, edge_index, edge_attr):
        src, dst = edge_index[::-1] if self.turned else edge_index
        q, k, v = ((x @ w).reshape(len(x), self.heads, -1) for w in (self.w_q, self.w_k, self.w_v))
        assert (edge_attr @ self.lin_edge).shape == (len(src), x.shape[1])
        shared = src if self.of_senders else dst
        return over_edges(q, k, v, src, dst, shared) + x @ self.lin_skip


class GraphOfSenders(GraphLayer):
    of_senders = True


class GraphTurned(GraphLayer):
    turned = True


class UndirectedGraph:
    """x: (N, C); edge_index: (2, E), both nodes of each edge."""

    def __init__(self, dim=12, heads=3, seed=0):
        rng = np.random.default_rng(seed)
        self.heads = heads
        self.w_q, self.w_k, self.w_v = rng.normal(size=(3, dim, dim)) / np.sqrt(dim)

    def __call__(self, x, edge_index):
        i, j = edge_index
        q, k, v = ((x @ w).reshape(len(x), self.heads, -1) for w in (self.w_q, self.w_k, self.w_v))
        return over_edges(q, k, v, j, i, i)


def on_edges(x, senders, receivers, w_q, w_k, w_v, num_heads=2):
    """x: (N, C); receivers[e] reads senders[e]."""
    q, k, v = ((x @ w).reshape(len(x), num_heads, -1) for w in (w_q, w_k, w_v))
    return over_edges(q, k, v, senders, receivers, receivers)


def on_edges_of_senders(x, senders, receivers, w_q, w_k, w_v, num_heads=2):
    """x: (N, C); receivers[e] reads senders[e]."""
    q, k, v = ((x @ w).reshape(len(x), num_heads, -1) for w in (w_q, w_k, w_v))
    return over_edges(q, k, v, senders, receivers, senders)
