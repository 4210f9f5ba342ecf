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


@pytest.mark.parametrize(
    ("right", "mistaken", "name"),
    [
        (texts_in_a_row(lambda n: n), texts_in_a_row(lambda n: 0), "earlier_texts_read"),
        (pages(whole=False), pages(whole=True), "mask_ignored"),
        (decoder(-1), decoder(0), "softmax_over_batch"),
        (fused(scaled=True), fused(scaled=False), "no_scale"),
        (joined(np.logical_and), joined(np.logical_or), "masks_joined_by_or"),
    ],
    ids=["texts", "pages", "one query", "fused", "joined"],
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
