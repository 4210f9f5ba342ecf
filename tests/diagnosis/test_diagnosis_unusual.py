"""Interfaces that are not those of textbooks: each is called, found right, and wrong if it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import regard
import wrong_attentions as wrong

softmax = wrong.plain_softmax


def scores_of(q, k):
    return q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])


def texts_in_a_row(first):
    """Texts one after the other, (T, H, D); keys from `first(begin)` on."""

    def f(q, k, v, cu_seqlens):
        parts = []
        for begin, end in itertools.pairwise(cu_seqlens):
            own = q[begin:end].swapaxes(0, 1)
            keys, values = (x[first(begin) : end].swapaxes(0, 1) for x in (k, v))
            parts.append((softmax(scores_of(own, keys)) @ values).swapaxes(0, 1))
        return np.concatenate(parts)

    return f


def pages(whole):
    def f(q, k_cache, v_cache, block_table, context_lens):
        out = np.zeros_like(q)
        for b in range(len(q)):
            keys, values = (x[block_table[b]] for x in (k_cache, v_cache))
            count = keys.shape[0] * keys.shape[1] if whole else int(context_lens[b])
            keys, values = (x.reshape(-1, *x.shape[2:])[:count] for x in (keys, values))
            s = np.einsum("hd,thd->ht", q[b], keys) / np.sqrt(q.shape[-1])
            out[b] = np.einsum("ht,thd->hd", softmax(s), values)
        return out

    return f


def decoder(axis):
    def f(state, encoder_outputs):
        s = np.einsum("bd,bsd->bs", state, encoder_outputs) / np.sqrt(state.shape[-1])
        return np.einsum("bs,bsd->bd", wrong.plain_softmax(s, axis), encoder_outputs)

    return f


def fused(scaled):
    def f(qkv, num_heads):
        batch, rows, width = qkv.shape
        split = qkv.reshape(batch, rows, 3, num_heads, -1).transpose(2, 0, 3, 1, 4)
        q, k, v = split
        s = scores_of(q, k) if scaled else q @ k.swapaxes(-1, -2)
        return (softmax(s) @ v).swapaxes(1, 2).reshape(batch, rows, width // 3)

    return f


def joined(join):
    def f(q, k, v, pad_mask):
        """pad_mask: 1 for real tokens. A causal decoder."""
        causal = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
        keep = join(causal[None, None], pad_mask[:, None, None, :].astype(bool))
        return softmax(np.where(keep, scores_of(q, k), -np.inf)) @ v

    return f


def of_lengths(ends):
    def f(q, k, v, lengths):
        keep = np.arange(k.shape[-2]) < ends(np.asarray(lengths))[:, None, None, None]
        return softmax(np.where(keep, scores_of(q, k), -1e30)) @ v

    return f


def of_borders(side):
    def f(q, k, v, cu_seqlens):
        """q, k, v: (total, heads, dim), several texts one after the other."""
        text = np.searchsorted(cu_seqlens[1:], np.arange(len(q)), side=side)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        weights = softmax(np.where(text[:, None] == text, scores, -np.inf))
        return np.einsum("hqk,khd->qhd", weights, v)

    return f


@pytest.mark.parametrize(
    ("right", "mistaken", "name"),
    [
        (of_lengths(lambda n: n), of_lengths(lambda n: n + 1), "padding_one_key_more"),
        (of_lengths(lambda n: n), of_lengths(lambda n: n - 1), "padding_one_key_less"),
        (of_borders("right"), of_borders("left"), "texts_begin_late"),
        (texts_in_a_row(lambda n: n), texts_in_a_row(lambda n: 0), "earlier_texts_read"),
        (pages(whole=False), pages(whole=True), "mask_ignored"),
        (decoder(-1), decoder(0), "softmax_over_batch"),
        (fused(scaled=True), fused(scaled=False), "no_scale"),
        (joined(np.logical_and), joined(np.logical_or), "masks_joined_by_or"),
    ],
    ids=["lengths", "shorter lengths", "borders", "texts", "pages", "one query", "fused", "joined"],
)
def test_an_unusual_interface_is_called_and_judged(right, mistaken, name):
    assert regard.diagnose(right).verdict == "right"
    assert regard.diagnose(mistaken).names == (name,)


def test_scores_are_not_missing_a_scale_where_the_text_says_that_they_have_none():
    def t5_attention(q, k, v):
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    def forgotten(q, k, v):
        return softmax(q @ k.swapaxes(-1, -2)) @ v

    found = regard.diagnose(t5_attention)
    assert (found.verdict, "unscaled" in found.summary) == ("right", True)
    assert regard.diagnose(forgotten).names == ("no_scale",)


def test_a_window_is_as_long_as_the_text_says():
    def windowed(q, k, v, window):
        i, j = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])
        keep = (j <= i) & (j >= i - window)
        return softmax(np.where(keep, scores_of(q, k), -np.inf)) @ v

    def described(q, k, v, window):
        """Each query sees `window` keys, including its own."""
        return windowed(q, k, v, window)

    assert regard.diagnose(windowed).verdict == "right"
    assert regard.diagnose(described).names == ("window_one_long",)


def test_with_a_past_the_last_query_belongs_to_the_last_key():
    def f(q, k, v, past_k=None, past_v=None):
        if past_k is not None:
            k, v = np.concatenate([past_k, k], -2), np.concatenate([past_v, v], -2)
        keep = np.tril(np.ones((q.shape[-2], k.shape[-2]), bool))
        return softmax(np.where(keep, scores_of(q, k), -np.inf)) @ v

    assert regard.diagnose(f).names == ("causal_aligned_at_start",)


@pytest.mark.parametrize("left_on", [False, True])
def test_dropout_that_is_left_on_is_named(left_on):
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    class Layer(torch.nn.Module):
        def __init__(self, cfg):
            super().__init__()
            self.heads, self.rate = cfg["n_heads"], cfg["drop_rate"]
            self.qkv = torch.nn.Linear(cfg["emb_dim"], 3 * cfg["emb_dim"])

        def forward(self, x):
            batch, rows, width = x.shape
            split = self.qkv(x).view(batch, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = split
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
            weights = functional.dropout(weights, self.rate, training=left_on or self.training)
            return (weights @ v).transpose(1, 2).reshape(batch, rows, width)

    found = regard.diagnose(Layer)
    assert found.names == (("dropout_left_on",) if left_on else ())


def test_a_mask_of_keys_that_is_broadcast_over_cells_is_no_mistake():
    def f(x, W_q, W_k, W_v, num_heads, mask=None):
        """mask: (B, S), 1 for real tokens."""
        shape = (*x.shape[:2], num_heads, -1)
        q, k, v = ((x @ w).reshape(shape).swapaxes(1, 2) for w in (W_q, W_k, W_v))
        s = scores_of(q, k)
        if mask is not None:
            s = s + 1e9 * (mask[:, None, None, :] - 1.0)
        return (softmax(s) @ v).swapaxes(1, 2).reshape(x.shape)

    assert regard.diagnose(f).verdict == "right"


@pytest.mark.parametrize("spec", ["btc,chd->bthd", "btc,hcd->bthd", ""])
def test_a_tree_of_weights_may_have_axes_of_heads(spec):
    def f(params, x):
        shape = (*x.shape[:2], 4, -1)
        q, k, v = (
            np.einsum(spec, x, params[name]) if spec else (x @ params[name]).reshape(shape)
            for name in ("wq", "wk", "wv")
        )
        s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        return np.einsum("bhqk,bkhd->bqhd", softmax(s), v).reshape(x.shape)

    assert regard.diagnose(f).verdict == "right"


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def layer_of(torch, learned=False):
    """A class whose objects have four projections, and queries of their own if `learned`."""

    class Layer(torch.nn.Module):
        def __init__(self, dim, num_heads=2):
            super().__init__()
            self.heads = num_heads
            self.q, self.k, self.v, self.proj = (torch.nn.Linear(dim, dim) for _ in range(4))
            if learned:
                self.latents = torch.nn.Parameter(torch.zeros(3, dim))

        def split(self, x):
            return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        def mixed(self, q, k, v, keep=None, scale=None):
            s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            s = s if keep is None else s.masked_fill(~keep, -torch.inf)
            return self.proj((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

    return Layer


class Growing:
    def __init__(self):
        self.k = self.v = None
        self.length = 0

    def update(self, k, v):
        cat = __import__("torch").cat
        self.k = k if self.k is None else cat([self.k, k], 2)
        self.v = v if self.v is None else cat([self.v, v], 2)
        self.length = self.k.shape[2]
        return self.k, self.v


def cached(layer, torch, start=True):
    class Cached(layer):
        def forward(self, x, cache=None):
            q, k, v = (self.split(one(x)) for one in (self.q, self.k, self.v))
            past = 0
            if cache is not None:
                past = cache.length if start else 0
                k, v = cache.update(k, v)
            keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
            return self.mixed(q, k, v, keep)

    return Cached


def perceiver(layer, torch, scale=None):
    class Perceiver(layer):
        def forward(self, x, latents):
            both = torch.cat([x, latents], 1)
            q, k, v = self.q(latents), self.k(both), self.v(both)
            return self.mixed(*map(self.split, (q, k, v)), scale=scale)

    return Perceiver


def pooled(layer, torch, scale=None):
    class Pooled(layer):
        def forward(self, x):
            q = self.q(self.latents).expand(len(x), -1, -1)
            return self.mixed(*map(self.split, (q, self.k(x), self.v(x))), scale=scale)

    return Pooled


def test_a_cache_that_is_an_object_is_filled(torch):
    assert regard.diagnose(cached(layer_of(torch), torch)).verdict == "right"
    late = cached(layer_of(torch), torch, start=False)
    assert regard.diagnose(late).names == ("cache_offset_ignored",)


@pytest.mark.parametrize("attend", [perceiver, pooled])
def test_queries_may_be_learned_or_read_themselves_too(torch, attend):
    layer = layer_of(torch, learned=attend is pooled)
    assert regard.diagnose(attend(layer, torch)).verdict == "right"
    wrong_one = attend(layer, torch, scale=1.0)
    assert regard.diagnose(wrong_one).names == ("no_scale",)


def test_a_scale_of_the_keys_so_far_is_named():
    class Decoder:
        def __init__(self, d, seed=0):
            rng = np.random.default_rng(seed)
            self.Wq, self.Wk, self.Wv = (rng.normal(size=(d, d)) for _ in range(3))
            self.keys, self.values = [], []

        def step(self, x):
            self.keys.append(x @ self.Wk)
            self.values.append(x @ self.Wv)
            keys, values = np.stack(self.keys), np.stack(self.values)
            return softmax(keys @ (x @ self.Wq) / np.sqrt(len(keys))) @ values

    assert regard.diagnose(Decoder).names == ("scale_by_keys",)


@pytest.mark.parametrize("name", ["", "linear_unnormalised", "linear_sum_of_hidden_keys"])
def test_linear_attention_is_judged_as_such(name):
    def linear_attention(q, k, v, causal=False):
        q, k = (np.where(x > 0, x + 1, np.exp(x)) for x in (q, k))
        s = q @ k.swapaxes(-1, -2)
        seen = s * np.tril(np.ones(s.shape[-2:]), s.shape[-1] - s.shape[-2]) if causal else s
        if name == "linear_unnormalised":
            return seen @ v
        total = s if name == "linear_sum_of_hidden_keys" else seen
        return seen @ v / (total.sum(-1, keepdims=True) + 1e-6)

    found = regard.diagnose(linear_attention)
    assert found.names == ((name,) if name else ())
    assert found.verdict == ("mistaken" if name else "right")


class Counting:
    """`step` takes any number of new tokens, (H, T, D), that follow the earlier ones; causal."""

    ONE = False

    def __init__(self, heads, head_dim, max_len=64):
        self.k, self.v = np.zeros((2, heads, max_len, head_dim))
        self.pos = 0

    def step(self, q, k, v):
        end = self.pos + q.shape[1]
        self.k[:, self.pos : end], self.v[:, self.pos : end] = k, v
        scores = q @ self.k[:, :end].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        later = np.arange(end) > np.arange(self.pos, end)[:, None]
        weights = np.exp(np.where(later, -np.inf, scores))
        self.pos += 1 if self.ONE else q.shape[1]
        return weights / weights.sum(-1, keepdims=True) @ self.v[:, :end]


class CountingOne(Counting):
    """`step` takes any number of new tokens, (H, T, D), that follow the earlier ones; causal."""

    ONE = True


def test_a_cache_that_takes_several_tokens_gets_them():
    assert regard.diagnose(Counting).ok
    assert regard.diagnose(CountingOne).names == ("tokens_misplaced_in_a_cache",)


def with_reach(q, k, v, reach):
    """Each query sees `reach` keys on either side, and its own. q, k, v: (n, d)"""
    places = np.arange(len(q))
    scores = q @ k.T / np.sqrt(q.shape[1])
    scores = np.where(np.abs(places[:, None] - places[: len(k)]) <= reach, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_an_argument_whose_role_is_a_guess_is_not_said_to_be_ignored():
    assert not regard.diagnose(with_reach).mistakes
