"""Functions that ask for more than the usual arguments, and blocks of several layers."""

import numpy as np
import pytest

import regard
from regard.diagnosis.documented import documented_sizes
from regard.diagnosis.einsums import axes_in_einsums


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def names_of(function):
    found = regard.diagnose(function)
    return ("right",) if found.ok else found.names or (found.verdict,)


# --- arrays that are given ------------------------------------------------------------------------


def shaw(x, wq, wk, wv, rel_k, rel_v, clip, low, high):
    n = len(x)
    rows = np.clip(np.arange(n) - np.arange(n)[:, None] + clip, low, high)
    q, k, v = x @ wq, x @ wk, x @ wv
    weights = softmax((q @ k.T + np.einsum("id,ijd->ij", q, rel_k[rows])) / np.sqrt(q.shape[1]))
    return weights @ v + np.einsum("ij,ijd->id", weights, rel_v[rows])


def distances(x, wq, wk, wv, rel_k, rel_v, clip):
    """x: (n, d); wq, wk, wv: (d, z); rel_k, rel_v: (2 * clip + 1, z), one row for each distance."""
    return shaw(x, wq, wk, wv, rel_k, rel_v, clip, 0, 2 * clip)


def distances_cut(x, wq, wk, wv, rel_k, rel_v, clip):
    """x: (n, d); wq, wk, wv: (d, z); rel_k, rel_v: (2 * clip + 1, z), one row for each distance."""
    return shaw(x, wq, wk, wv, rel_k, rel_v, clip, 0, clip)


def xl(x, mem, Wq, Wk, Wv, Wr, u, w, of_rows):
    both = np.concatenate([mem, x])
    far = np.arange(len(x))[:, None] + len(mem) - np.arange(len(both))
    angles = np.arange(len(both))[:, None] / 100.0 ** (np.arange(0, x.shape[1], 2) / x.shape[1])
    rows = np.concatenate([np.sin(angles), np.cos(angles)], 1) @ Wr
    q, k, v = x @ Wq, both @ Wk, both @ Wv
    scores = (q + u) @ k.T + np.einsum("id,ijd->ij", q + of_rows, rows[np.clip(far, 0, None)])
    return softmax(np.where(far >= 0, scores / np.sqrt(q.shape[1]), -np.inf)) @ v


def with_two_biases(x, mem, Wq, Wk, Wv, Wr, u, w):
    """x: (T, d), mem: (M, d), M may be 0. Wq, Wk, Wv, Wr: (d, e); u, w: (e,)"""
    return xl(x, mem, Wq, Wk, Wv, Wr, u, w, w)


def with_one_bias(x, mem, Wq, Wk, Wv, Wr, u, w):
    """x: (T, d), mem: (M, d), M may be 0. Wq, Wk, Wv, Wr: (d, e); u, w: (e,)"""
    return xl(x, mem, Wq, Wk, Wv, Wr, u, None, u)


def with_pairs(x, pair, w_q, w_k, w_v, w_b):
    """x: (n, d), pair: (n, n, p), w_q, w_k, w_v: (d, d), w_b: (p, 1)"""
    scores = (x @ w_q) @ (x @ w_k).T / np.sqrt(x.shape[-1])
    return softmax(scores + (pair @ w_b)[..., 0]) @ (x @ w_v)


def in_columns(X, omega_v, omega_q, omega_k, beta_v, beta_q, beta_k):
    """X: (D, N), tokens are columns; beta_*: (D, 1)."""
    q, k, v = beta_q + omega_q @ X, beta_k + omega_k @ X, beta_v + omega_v @ X
    return v @ softmax(q.T @ k / np.sqrt(len(q))).T


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (distances, "right"),
        (distances_cut, "distance_rows_out_of_order"),
        (with_two_biases, "right"),
        (with_one_bias, "layer_unused"),
        (with_pairs, "right"),
        (in_columns, "right"),
    ],
)
def test_arrays_that_are_asked_for_besides_are_given(function, name):
    assert names_of(function) == (name,)


def test_lengths_are_read_as_they_are_written():
    text = "u, v: (heads, d); rel: [2*clip + 1, d] or None"
    assert documented_sizes(text, ["v", "rel"]) == {
        "v": ["heads", "d"],
        "rel": ["2*clip + 1", "d"],
    }


# --- tokens' numbers, of which one is padding -----------------------------------------------------

PAD = 1


def by_numbers(x, tokens, weights, heads, axis):
    def split(name):
        y = x @ weights[name + "_w"] + weights[name + "_b"]
        return y.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)

    q, k, v = split("q"), split("k"), split("v")
    padding = (tokens == PAD)[:, None, :, None]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    weights_of = softmax(np.where(padding.swapaxes(-1, axis), -1e9, scores))
    return (weights_of @ v).swapaxes(1, 2).reshape(x.shape)


def padded(x, tokens, weights, heads=4):
    """x: (B, L, E) embeddings of tokens (B, L), of which PAD is padding that nothing attends to."""
    return by_numbers(x, tokens, weights, heads, -2)


def padded_queries(x, tokens, weights, heads=4):
    """x: (B, L, E) embeddings of tokens (B, L), of which PAD is padding that nothing attends to."""
    return by_numbers(x, tokens, weights, heads, -1)


def test_a_number_that_stands_for_padding_makes_a_mask():
    assert names_of(padded) == ("right",)
    assert names_of(padded_queries) == ("mask_on_the_query_axis",)


# --- heads in two axes ----------------------------------------------------------------------------


def grouped(params, x):
    """params: q (D, R, G, K), kv (2, D, G, K), o (R, G, K, D); x: (B, L, D)"""
    q = np.einsum("bld,drgk->blrgk", x, params["q"]) / np.sqrt(params["q"].shape[-1])
    k, v = np.einsum("bmd,zdgk->zbmgk", x, params["kv"])
    weights = softmax(np.einsum("blrgk,bmgk->brglm", q, k))
    return np.einsum("brglm,bmgk,rgkd->bld", weights, v, params["o"])


def test_heads_may_have_an_axis_of_groups_and_one_within_them():
    found = axes_in_einsums(grouped)
    assert (found["q"], found["kv"], found["o"]) == ("MRGD", "PMGD".replace("G", "H"), "RGDM")
    assert names_of(grouped) == ("right",)


# --- blocks of several layers ---------------------------------------------------------------------

torch = pytest.importorskip("torch")


class Layer(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x, memory, causal=False):
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in (self.q(x), self.k(memory), self.v(memory))
        )
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Decoder(torch.nn.Module):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(d_model), torch.nn.LayerNorm(d_model)
        self.own, self.cross = Layer(d_model, n_heads), Layer(d_model, n_heads)

    def forward(self, y, memory):
        h = self.norm1(y)
        z = y + self.own(h, h, causal=True)
        return z + self.cross(self.norm2(z), memory)


class Forgetful(Decoder):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def forward(self, y, memory):
        h = self.norm1(y)
        z = y + self.own(h, h, causal=True)
        return y + self.cross(self.norm2(z), memory)


class Normalised(Decoder):
    """Pre-norm: y = y + layer(norm(y)). y: (B, T, d), memory: (B, S, d)."""

    def forward(self, y, memory):
        h = self.norm1(y)
        z = self.norm2(y + self.own(h, h, causal=True))
        return z + self.cross(z, memory)


class Detector(torch.nn.Module):
    """Positions are added to queries and keys. tgt: (Q, B, C), memory: (S, B, C), pos: (S, B, C)"""

    def __init__(self, d_model=32, n_heads=4, wrong=False):
        super().__init__()
        self.own = torch.nn.MultiheadAttention(d_model, n_heads)
        self.cross = torch.nn.MultiheadAttention(d_model, n_heads)
        self.norm1, self.norm2 = torch.nn.LayerNorm(d_model), torch.nn.LayerNorm(d_model)
        self.wrong = wrong

    def forward(self, tgt, memory, pos=None):
        tgt = self.norm1(tgt + self.own(tgt, tgt, tgt)[0])
        keys = memory if pos is None else memory + pos
        values = keys if self.wrong else memory
        return self.norm2(tgt + self.cross(tgt, keys, values)[0])


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (Decoder, "unknown"),
        (Forgetful, "sublayer_lost"),
        (Normalised, "normalised_input_added"),
        (Detector, "unknown"),
        (Detector(wrong=True), "positions_in_values"),
    ],
)
def test_what_the_layers_of_a_block_compute_is_added(block, name):
    assert names_of(block) == (name,)


# --- positions in half precision ------------------------------------------------------------------


def turned(x, positions, base):
    angles = torch.outer(positions, base ** (-torch.arange(0, x.shape[-1], 2) / x.shape[-1]))
    cos, sin = (torch.cat([one, one], -1).to(x.dtype) for one in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def with_positions(q, k, v, positions, upcast):
    q, k = turned(q, positions, 10000.0), turned(k, positions, 10000.0)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores.float() if upcast else scores
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return weights.to(v.dtype) @ v


def in_float32(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(torch.float32), True)


def in_float32_with_scores_in_half(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(torch.float32), False)


def in_the_dtype_of_queries(q, k, v):
    """Causal, with rotary positions, in any dtype."""
    return with_positions(q, k, v, torch.arange(q.shape[-2]).to(q.dtype).float(), True)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_float32, "right"),
        (in_float32_with_scores_in_half, "right"),
        (in_the_dtype_of_queries, "positions_rounded"),
    ],
)
def test_positions_beyond_256_are_not_rounded(function, name):
    assert names_of(function) == (name,)


# --- additive scores, and channels before time ----------------------------------------------------


class Additive(torch.nn.Module):
    """score = v · tanh(W s + U h). query: (B, 1, d), keys: (B, T, d)"""

    def __init__(self, hidden=16, apart=False):
        super().__init__()
        self.Wa, self.Ua = torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, hidden)
        self.Va, self.apart = torch.nn.Linear(hidden, 1), apart

    def forward(self, query, keys):
        parts = self.Wa(query), self.Ua(keys)
        mixed = sum(map(torch.tanh, parts)) if self.apart else torch.tanh(sum(parts))
        weights = self.Va(mixed).transpose(1, 2).softmax(-1)
        return weights @ keys, weights


def test_a_query_changes_what_is_read():
    assert names_of(Additive) == ("unknown",)
    assert names_of(Additive(apart=True)) == ("queries_without_effect",)


class OfChannels(torch.nn.Module):
    """qkv: (N, H * 3 * C, T), one head after the other."""

    def __init__(self, n_heads=2, power=-0.25):
        super().__init__()
        self.n_heads, self.power = n_heads, power

    def forward(self, qkv):
        batch, width, length = qkv.shape
        ch = width // (3 * self.n_heads)
        q, k, v = qkv.reshape(batch * self.n_heads, 3 * ch, length).split(ch, 1)
        weights = (torch.einsum("bct,bcs->bts", q, k) * ch ** (2 * self.power)).softmax(-1)
        return torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, length)


def test_channels_may_come_before_time():
    assert names_of(OfChannels) == ("right",)
    assert names_of(OfChannels(power=-0.5)) == ("scale_by_width",)


# --- rows that are added to values ----------------------------------------------------------------


def both_tables(x, Wq, Wk, Wv, rel_k, rel_v, exchanged):
    far = np.arange(len(x)) - np.arange(len(x))[:, None]
    rows = np.clip(far, -(len(rel_k) // 2), len(rel_k) // 2) + len(rel_k) // 2
    q, k, v = x @ Wq, x @ Wk, x @ Wv
    weights = softmax((q @ k.T + np.einsum("id,ijd->ij", q, rel_k[rows])) / np.sqrt(q.shape[1]))
    read = rel_v[rows].swapaxes(0, 1) if exchanged else rel_v[rows]
    return weights @ v + np.einsum("ij,ijd->id", weights, read)


def rows_of_values(x, Wq, Wk, Wv, rel_k, rel_v):
    """x: (n, d), Wq, Wk, Wv: (d, z), rel_k, rel_v: (2c + 1, z), row r is of the offset j - i."""
    return both_tables(x, Wq, Wk, Wv, rel_k, rel_v, False)


def opposite_rows_of_values(x, Wq, Wk, Wv, rel_k, rel_v):
    """x: (n, d), Wq, Wk, Wv: (d, z), rel_k, rel_v: (2c + 1, z), row r is of the offset j - i."""
    return both_tables(x, Wq, Wk, Wv, rel_k, rel_v, True)


def test_values_get_the_rows_of_their_own_distances():
    assert names_of(rows_of_values) == ("right",)
    assert names_of(opposite_rows_of_values) == ("value_rows_reversed",)
