"""Functions that ask for more than the usual arguments."""

import numpy as np
import pytest

import regard
from regard.diagnosis.forms.einsums import axes_in_einsums
from regard.diagnosis.reading.documented import documented_sizes


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
