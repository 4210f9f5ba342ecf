"""What no right attention does is a mistake, whatever else a function computes."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.diagnosis.reading.documented import documented_axes, letters_of


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def turned(x):
    return x.swapaxes(-1, -2)


def with_distances(change):
    """Attention of (B, H, L, D) with a bias that no catalogue has, and a mistake besides."""

    def attention(q, k, v):
        """q, k, v: (batch, heads, length, dim); a softmax of scores."""
        length, other = q.shape[2], k.shape[2]
        near = np.cos(np.arange(length)[:, None] - 1.7 * np.arange(other)) ** 2
        return change(q @ turned(k) / np.sqrt(q.shape[-1]) + near, v)

    return attention


def without_a_key(s, v):
    weights = softmax(s[..., :-1])
    return weights @ v[..., :-1, :]


def over_heads(s, v):
    weights = softmax(s) * softmax(s, axis=1)
    return weights / weights.sum(-1, keepdims=True) @ v


def over_queries(s, v):
    return softmax(s - s.mean(-2, keepdims=True)) @ v


def not_to_one(s, v):
    return softmax(s) ** 1.5 @ v


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("keys_never_seen", without_a_key),
        ("heads_mixed", over_heads),
        ("queries_mixed", over_queries),
        ("weights_do_not_add_up", not_to_one),
    ],
)
def test_it_is_named_beside_scores_that_are_not_known(name, change):
    found = regard.diagnose(with_distances(change))
    assert found.names == (name,), found
    assert "measured:" in found.summary


@pytest.mark.full
def test_without_it_scores_that_are_not_known_stay_unknown():
    found = regard.diagnose(with_distances(lambda s, v: softmax(s + 0.3 * np.sin(3 * s)) @ v))
    assert (found.verdict, found.names) == ("unknown", ()), found


@pytest.mark.full
def test_without_it_what_places_add_to_the_scores_counts_as_given():
    found = regard.diagnose(with_distances(lambda s, v: softmax(s) @ v))
    assert (found.verdict, found.names) == ("right", ()), found
    assert "numbers added to the scores by the places of query and key" in str(found)


def talking_heads(q, k, v):
    """Talking heads: the softmax of each head is mixed with the others. q, k, v: (b, h, l, d)."""
    weights = softmax(q @ turned(k) / np.sqrt(q.shape[-1]) + 0.1 * q.shape[1])
    return (0.7 * weights + 0.3 * weights[:, ::-1]) @ v


def gated(q, k, v):
    """A gate of each query, a sigmoid, lowers its weights. q, k, v: (b, h, l, d)."""
    weights = softmax(q @ turned(k) / np.sqrt(q.shape[-1]))
    return weights / (1 + np.exp(-q.sum(-1, keepdims=True))) @ v


def odd_normalization(q, k, v):
    """q, k, v: (b, h, l, d)"""
    return np.tanh(q @ turned(k)) @ v


@pytest.mark.parametrize(
    "function", [pytest.param(talking_heads, marks=pytest.mark.full), gated, odd_normalization]
)
def test_what_the_code_says_it_means_is_no_mistake(function):
    found = regard.diagnose(function)
    assert (found.verdict, found.names) == ("unknown", ()), found


def in_halves(q, k, v, half=4):
    """Causal attention, half by half, each with the half before. q, k, v: (batch, length, dim)."""
    batch, length, dim = q.shape
    assert length % half == 0
    q, k, v = (x.reshape(batch, -1, half, dim) for x in (q, k, v))
    k, v = (np.concatenate([np.roll(x, 1, axis=1), x], axis=2) for x in (k, v))
    later = np.arange(2 * half) > half + np.arange(half)[:, None]
    s = np.where(later, -np.inf, q @ turned(k) / np.sqrt(dim))
    return (softmax(s) @ v).reshape(batch, length, dim)


def turned_triangle(q, k, v):
    """Causal attention with a bias of its own. q, k, v: (batch, heads, length, dim)."""
    length = q.shape[2]
    near = np.cos(np.arange(length)[:, None] - 1.7 * np.arange(length)) ** 2
    scores = q @ turned(k) / np.sqrt(q.shape[-1]) + near
    return softmax(np.where(np.tril(np.ones((length, length))).T > 0, scores, -np.inf)) @ v


def test_later_tokens_that_are_seen_are_named():
    found = regard.diagnose(turned_triangle)
    assert found.names == ("later_tokens_seen",), found


def chunks(q, k, v, size=4):
    """Each chunk sees itself and the one before. q, k, v: (batch, length, dim)."""
    batch, length, dim = q.shape
    assert length % size == 0
    q, k, v = (x.reshape(batch, -1, size, dim) for x in (q, k, v))
    k, v = (np.concatenate([np.roll(x, 1, axis=1), x], axis=2) for x in (k, v))
    return (softmax(q @ turned(k) / np.sqrt(dim)) @ v).reshape(batch, length, dim)


def test_windows_that_wrap_around_are_named():
    found = regard.diagnose(chunks)
    assert found.names == ("window_wraps_around",), found


@pytest.mark.full
def test_windows_that_wrap_around_are_named_in_causal_code_too():
    found = regard.diagnose(in_halves)
    assert found.names == ("window_wraps_around",), found


def with_tokens(inverted):
    def attention(q, k, v, attention_mask):
        """q, k, v: (batch, length, dim); attention_mask: int64 (batch, length), 1 real, 0 not."""
        hidden = inverted(attention_mask)[:, None]
        return softmax(np.where(hidden, -1e9, q @ turned(k) / np.sqrt(q.shape[-1]))) @ v

    return attention


def test_masks_of_integers_are_tried_where_the_code_inverts_them():
    def bit_by_bit(q, k, v, attention_mask):
        """q, k, v: (batch, length, dim); attention_mask: int64 (batch, length), 1 real, 0 not."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        return softmax(np.where(~attention_mask[:, None], -1e9, scores)) @ v

    assert regard.diagnose(bit_by_bit).names == ("integer_mask_inverted",)
    assert regard.diagnose(with_tokens(lambda mask: mask == 0)).ok


def grouped_sinks(Q, K, V, S):
    """Q: (tokens, groups, each, dim); K, V: (tokens, groups, dim); S: (groups * each,), a sink."""
    n, groups, q_mult, dim = Q.shape
    scores = np.einsum("qhmd,khd->hmqk", Q, K) / np.sqrt(dim)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    sinks = np.broadcast_to(S.reshape(groups, q_mult, 1, 1), (*scores.shape[:3], 1))
    weights = softmax(np.concatenate([scores, sinks], -1))[..., :-1]
    return np.einsum("hmqk,khd->qhmd", weights, V)


def test_groups_of_queries_with_sinks_are_right():
    assert regard.diagnose(grouped_sinks).ok


def heads_beside(q, k, v, mask=None):
    """q, k, v: (batch, length, dim), with four heads side by side; mask: True at padding."""
    b, _, dim = q.shape
    q, k, v = (x.reshape(b, -1, 4, dim // 4).swapaxes(1, 2) for x in (q, k, v))
    scores = q @ turned(k) / np.sqrt(dim // 4)
    if mask is not None:
        scores = np.where(mask[:, None, None], -np.inf, scores)
    return (softmax(scores) @ v).swapaxes(1, 2).reshape(b, -1, dim)


def test_a_stated_number_of_heads_may_lie_side_by_side():
    assert regard.diagnose(heads_beside, heads=4).ok


def of_history(candidates, history, ignore=None):
    """candidates: (users, n, dim); history: (users, m, dim); ignore: (users, m), True: unused."""
    scores = candidates @ turned(history) / np.sqrt(history.shape[-1])
    if ignore is not None:
        scores = np.where(ignore[:, None], -np.inf, scores)
    return softmax(scores * 1.1 + 0.1 * np.cos(scores)) @ history


def test_keys_that_are_the_values_are_not_accused():
    found = regard.diagnose(of_history)
    assert (found.verdict, found.names) == ("unknown", ()), found


def of_windows(wrong):
    def attention(q, k, v, mask=None):
        """q, k, v: (images * windows, heads, l, d); mask: (windows, l, l), added, or None."""
        s = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None:
            n = len(mask)
            first, second = (n, -1) if wrong else (-1, n)
            own = mask[:, None, None] if wrong else mask[None, :, None]
            s = (s.reshape(first, second, *s.shape[1:]) + own).reshape(s.shape)
        return softmax(s) @ v

    return attention


def test_masks_of_windows_are_tried_with_several_images():
    assert regard.diagnose(of_windows(False)).ok
    found = regard.diagnose(of_windows(True))
    assert found.names == ("masks_of_windows_misplaced",), found


def cosine(axis, sharpness=10.0):
    def attention(q, k, v, mask=None):
        """Cosine attention. q, k, v: (batch, heads, length, dim)."""
        assert q.ndim == 4
        q, k = (x / np.linalg.norm(x, axis=axis, keepdims=True) for x in (q, k))
        s = sharpness * q @ turned(k)
        return softmax(s if mask is None else np.where(mask, s, -np.inf)) @ v

    return attention


@pytest.mark.parametrize(
    "sharpness", [10.0, *(pytest.param(x, marks=pytest.mark.full) for x in (1.0, 37.5))]
)
def test_cosines_and_their_factor_are_found(sharpness):
    found = regard.diagnose(cosine(-1, sharpness))
    assert found.ok, found
    assert f"Cosine(temperature={1 / sharpness:.3g}"[:22] in found.summary


@pytest.mark.full
def test_cosines_of_another_axis_are_named():
    found = regard.diagnose(cosine(1))
    assert set(found.names) & {"heads_normalised", "heads_mixed"}, found


def graph(axis):
    def attention(h, a, b, adj):
        """h: (nodes, dim); a, b: (dim,); adj: (nodes, nodes), 1 where a node reads another."""
        e = np.where(adj > 0, np.maximum((h @ a)[:, None] + h @ b, 0), -9e15)
        return softmax(e, axis) @ h

    return attention


def test_arguments_of_documented_axes_are_given_as_such():
    found = regard.diagnose(graph(1))
    assert (found.verdict, found.names) == ("unknown", ()), found
    found = regard.diagnose(graph(0))
    assert found.names == ("padding_changes_the_output",), found


def along_edges(per):
    def attention(q, k, v, edge_index):
        """q, k, v: (nodes, heads, dim); edge_index: (2, edges), from a node to its reader."""
        start, end = edge_index
        scores = np.exp((q[end] * k[start]).sum(-1) / np.sqrt(q.shape[-1]))
        sums, out = np.zeros(q.shape[:2]), np.zeros(v.shape)
        np.add.at(sums, (start, end)[per], scores)
        np.add.at(out, end, (scores / sums[(start, end)[per]])[..., None] * v[start])
        return out

    return attention


def test_a_mask_is_given_as_the_edges_of_a_graph():
    assert regard.diagnose(along_edges(1)).ok
    assert regard.diagnose(along_edges(0)).verdict == "mistaken"


class GraphLayer:
    """Additive scores along edges (2, E), normalised at their ends, or where they start."""

    def __init__(self, dim=6, per=1):
        rng = np.random.default_rng(2)
        self.mix, self.a, self.b, self.per = (
            rng.normal(size=(dim, dim)),
            *rng.normal(size=(2, dim)),
            per,
        )

    def __call__(self, x, edge_index):
        start, end = edge_index
        z = np.tanh(x @ self.mix)
        scores = np.exp((z @ self.a)[start] + (z @ self.b)[end])
        sums, out = np.zeros(len(x)), np.zeros_like(z)
        np.add.at(sums, (start, end)[self.per], scores)
        np.add.at(out, end, (scores / sums[(start, end)[self.per]])[:, None] * z[start])
        return out


def test_a_layer_over_the_edges_of_a_graph_is_judged_by_what_holds_for_all():
    assert regard.diagnose(GraphLayer()).verdict == "unknown"
    assert regard.diagnose(GraphLayer(per=0)).names == ("padding_changes_the_output",)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("q, k: (batch, heads, seq, dim)", {"q": "BaTc", "k": "BaTc"}),
        (
            "def f(q: Tensor,  # [b, t, h, d]\n k: Tensor,  # [b, t, h, d]",
            {"q": "BTac", "k": "BTac"},
        ),
        (
            'q: Float[Array, "batch len dim"], k: Float[Array, "batch len dim"]',
            {"q": "BTa", "k": "BTa"},
        ),
        ("b, n, d = q.shape\nb, m, d = k.shape", {"q": "Bac", "k": "BTc"}),
        ("q: (n_windows * B, heads, tokens, dim)", {"q": "BaTc"}),
        ("f(q, k)", {}),
        ("q[None, None], k[None]", {}),
    ],
)
def test_axes_are_read_from_documentation(text, axes):
    assert (letters_of(documented_axes(text, ["q", "k"])) or {}) == axes
