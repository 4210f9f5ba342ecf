"""What code says of itself decides where its answers alone do not."""

from __future__ import annotations

import numpy as np
import pytest

import regard


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def turned(x):
    return x.swapaxes(-1, -2)


class Heads:
    """Self-attention of (B, L, M) with two heads; its causal rule is written here."""

    hides, rule = -np.inf, "causal"

    def __init__(self, width=8, heads=2):
        rng = np.random.default_rng(3)
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(0, 0.6, (4, width, width))
        self.heads = heads

    def split(self, x, weight):
        batch, length, _ = x.shape
        return (x @ weight).reshape(batch, length, self.heads, -1).swapaxes(1, 2)

    def __call__(self, x):
        q, k, v = (self.split(x, weight) for weight in (self.W_q, self.W_k, self.W_v))
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        mask = np.triu(np.ones(scores.shape[-2:]), 1)
        scores = np.where(mask == 1, scores + self.hides, scores)
        out = softmax(scores) @ v
        return out.swapaxes(1, 2).reshape(x.shape) @ self.W_o


class TooSmall(Heads):
    hides = -1e-9

    def __call__(self, x):
        """The causal rule of the other class, with np.triu."""
        return Heads.__call__(self, x)


def test_code_with_a_causal_rule_that_hides_nothing_is_not_right():
    assert regard.diagnose(Heads()).verdict != "mistaken"
    found = regard.diagnose(TooSmall())
    assert found.names == ("later_tokens_seen",), found


@pytest.mark.full
def test_a_layer_that_may_be_causal_and_is_not_is_right():
    class Either(Heads):
        def __call__(self, x, causal_rule=None):
            if causal_rule is not None:
                raise NotImplementedError
            q, k, v = (self.split(x, weight) for weight in (self.W_q, self.W_k, self.W_v))
            out = softmax(q @ turned(k) / np.sqrt(q.shape[-1])) @ v
            return out.swapaxes(1, 2).reshape(x.shape) @ self.W_o

    assert regard.diagnose(Either()).ok


class Decoder:
    """One token a call: x (M,); rotary positions, and a cache of its own."""

    first = True

    def __init__(self, width=8):
        rng = np.random.default_rng(4)
        self.W_q, self.W_k, self.W_v, self.W_o = rng.normal(0, 0.6, (4, width, width))
        self.reset()

    def reset(self):
        self.keys, self.values = [], []

    def __call__(self, x):
        place = 0 if self.first else len(self.keys)
        q, k = rotary(x @ self.W_q, place), rotary(x @ self.W_k, place)
        self.keys.append(k)
        self.values.append(x @ self.W_v)
        keys, values = np.stack(self.keys), np.stack(self.values)
        return softmax(keys @ q / np.sqrt(len(q))) @ values @ self.W_o


def rotary(row, place):
    angle = place * 10000.0 ** (-np.arange(0, len(row), 2) / len(row))
    even, odd = row[::2], row[1::2]
    out = np.empty_like(row)
    out[::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


class Counting(Decoder):
    first = False

    def __call__(self, x):
        q, k = rotary(x @ self.W_q, len(self.keys)), rotary(x @ self.W_k, len(self.keys))
        self.keys.append(k)
        self.values.append(x @ self.W_v)
        keys, values = np.stack(self.keys), np.stack(self.values)
        return softmax(keys @ q / np.sqrt(len(q))) @ values @ self.W_o


def test_rotary_positions_that_begin_at_0_in_every_call_have_no_effect():
    assert regard.diagnose(Decoder()).names == ("positions_unused",)
    assert regard.diagnose(Counting()).verdict != "mistaken"


def test_a_mask_of_1_and_0_that_is_added_is_not_taken_for_an_additive_one():
    def attention(q, k, v, mask=None):
        """mask (batch, keys): 1 for real tokens, 0 for the rest."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask[:, None, None, :].astype(scores.dtype)
        return softmax(scores) @ v

    def added(q, k, v, mask=None):
        """mask (batch, keys): additive, 0 for real tokens (those of ones), -inf for the rest."""
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask[:, None, None, :]
        return softmax(scores) @ v

    assert regard.diagnose(attention).names == ("mask_added_as_ones",)
    assert regard.diagnose(added).verdict != "mistaken"


def capped(after_mask):
    def attention(q, k, v, mask=None, softcap=None):
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        if mask is not None and after_mask:
            scores = scores + mask
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if mask is not None and not after_mask:
            scores = scores + mask
        return softmax(scores) @ v

    return attention


def test_a_softcap_that_is_off_by_default_is_tried_too():
    right = regard.diagnose(capped(after_mask=False), mask="add")
    assert right.verdict != "mistaken", right
    assert "softcap" in [one.name for one in right.abilities]
    wrong = regard.diagnose(capped(after_mask=True), mask="add")
    assert wrong.names == ("softcap_after_mask",), wrong


def seen_by(length, window):
    """True where attention is allowed: `window` keys of each query, including its own."""
    apart = np.arange(length)[:, None] - np.arange(length)
    return (apart >= 0) & (apart <= window)


def local(q, k, v, window=3):
    """q, k, v: (B, H, L, D); see seen_by."""
    scores = q @ turned(k) / np.sqrt(q.shape[-1])
    return softmax(np.where(seen_by(q.shape[-2], window), scores, -np.inf)) @ v


def test_what_a_window_means_may_be_written_at_the_function_that_makes_its_mask():
    assert regard.diagnose(local).names == ("window_one_long",)


def backward(q, k, v, d_output):
    """All arrays (B, H, T, D); the causal rule hides later keys."""
    length = q.shape[2]
    scores = q @ turned(k) / np.sqrt(q.shape[-1])
    later = np.triu_indices(length, 1)
    scores[:, :, later[0], later[1]] = -np.inf
    weights = softmax(scores)
    d_weights = d_output @ turned(v)
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    d_scores /= np.sqrt(q.shape[-1])
    return d_scores @ k, turned(d_scores) @ q, turned(weights) @ d_output


def test_lengths_that_documentation_rules_out_are_not_held_against_a_function():
    assert regard.diagnose(backward).ok


def test_a_mask_under_which_all_is_nan_says_nothing():
    def counted(query, key, value, attention_mask):
        """attention_mask (batch, keys): 1 = token; positions are counted from it."""
        places = attention_mask.cumsum(-1) * attention_mask
        scores = query @ turned(key) / np.sqrt(query.shape[-1]) + 0.0 * places[:, None, None, :]
        hidden = attention_mask[:, None, None, :] == 0
        return softmax(np.where(hidden, -1e30, scores)) @ value

    assert regard.diagnose(counted).verdict != "mistaken"


def test_a_diagnosis_asks_the_same_after_others():
    def attention(q, k, v, mask=None, softcap=None):
        scores = q @ turned(k) / np.sqrt(q.shape[-1])
        return softmax(scores if mask is None else np.where(mask, scores, -np.inf)) @ v

    def plain(q, k, v):
        return softmax(q @ turned(k) / np.sqrt(q.shape[-1])) @ v

    before = regard.diagnose(plain).calls
    regard.diagnose(attention)
    assert regard.diagnose(plain).calls == before


class OverGraphs:
    """h: (batch, n, width); adj: (batch, n, n), 1 between neighbours and 0 elsewhere."""

    multiplies = True

    def __init__(self, width=6):
        rng = np.random.default_rng(5)
        self.W = rng.normal(size=(width, width))
        self.a = rng.normal(size=(2, width))

    def __call__(self, h, adj):
        """h: (batch, n, width); adj: (batch, n, n), 1 between neighbours and 0 elsewhere."""
        x = h @ self.W
        scores = np.tanh((x @ self.a[0])[..., None] + (x @ self.a[1])[..., None, :])
        scores = scores * adj if self.multiplies else np.where(adj > 0, scores, -np.inf)
        return softmax(scores) @ x


def test_graphs_in_a_batch_have_neighbours_each():
    found = regard.diagnose(OverGraphs())
    assert found.names == ("padding_changes_the_output",), found
    right = OverGraphs()
    right.multiplies = False
    assert regard.diagnose(right).verdict != "mistaken"
