"""What is made for a function: weights by its file, a cache with room, a pair of texts, sizes."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import regard
from regard.diagnosis.probes import one_query_probes


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# --- weights that a function of the same file makes ----------------------------------------------


@dataclass
class Sizes:
    """The sizes of a layer."""

    width: int
    heads: int


def init(rng, config: Sizes):
    """Weights, with a factor for the features of queries that nothing else tells the shape of."""
    d = config.width // config.heads
    return {
        "wq": rng.normal(size=(config.width, config.width)),
        "wkv": rng.normal(size=(config.width, 2 * d)),
        "wo": rng.normal(size=(config.width, config.width)),
        "gain": np.ones((config.heads, 1, d)),
    }


def shared_keys(params, x, config: Sizes):
    """x: (n, width), one head of keys and values"""
    n = len(x)
    q = (x @ params["wq"]).reshape(n, config.heads, -1).swapaxes(0, 1) * params["gain"]
    k, v = np.split(x @ params["wkv"], 2, -1)
    out = softmax(q @ k.T / np.sqrt(k.shape[-1])) @ v
    return out.swapaxes(0, 1).reshape(n, -1) @ params["wo"]


def test_weights_are_made_as_their_file_makes_them():
    assert regard.diagnose(shared_keys).verdict == "right"


class Checkpoint:
    """Attention with the arrays of torch.nn.MultiheadAttention."""

    def __init__(self, in_proj_weight, in_proj_bias, out_proj_weight, out_proj_bias, num_heads):
        self.wq, self.wk, self.wv = np.split(in_proj_weight, 3)
        self.bq, self.bk, self.bv = np.split(in_proj_bias, 3)
        self.wo, self.bo, self.heads = out_proj_weight, out_proj_bias, num_heads

    def __call__(self, x):
        b, n, m = x.shape
        both = ((self.wq, self.bq), (self.wk, self.bk), (self.wv, self.bv))
        parts = ((x @ w.T + c).reshape(b, n, self.heads, -1).swapaxes(1, 2) for w, c in both)
        q, k, v = parts
        out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return out.swapaxes(1, 2).reshape(b, n, m) @ self.wo.T + self.bo


def test_a_class_gets_the_arrays_of_a_checkpoint():
    assert regard.diagnose(Checkpoint).verdict == "right"


# --- caches with room, texts in pairs ------------------------------------------------------------


def step(more):
    def decode_step(q, k_new, v_new, k_cache, v_cache, pos):
        """q, k_new, v_new: (B, H, D); k_cache, v_cache: (B, H, S, D), filled up to pos"""
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        k_cache[:, :, pos], v_cache[:, :, pos] = k_new, v_new
        s = np.einsum("bhd,bhsd->bhs", q, k_cache) / np.sqrt(q.shape[-1])
        s = np.where(np.arange(s.shape[-1]) < pos + more, s, -np.inf)
        return np.einsum("bhs,bhsd->bhd", softmax(s), v_cache), k_cache, v_cache

    return decode_step


def step_of_requests(more):
    def decode_step(q, k_new, v_new, k_cache, v_cache, lengths):
        """q, k_new, v_new: (B, H, D); k_cache, v_cache: (B, S, H, D); lengths: (B,) so far"""
        k_cache, v_cache = k_cache.copy(), v_cache.copy()
        rows = np.arange(len(q))
        k_cache[rows, lengths], v_cache[rows, lengths] = k_new, v_new
        s = np.einsum("bhd,bshd->bhs", q, k_cache) / np.sqrt(q.shape[-1])
        s = np.where(np.arange(s.shape[-1]) < lengths[:, None, None] + more, s, -np.inf)
        return np.einsum("bhs,bshd->bhd", softmax(s), v_cache), k_cache, v_cache

    return decode_step


@pytest.mark.parametrize(
    ("make", "name"), [(step, "last_key_lost"), (step_of_requests, "padding_one_key_less")]
)
def test_a_step_on_a_cache_with_room_is_called(make, name):
    assert regard.diagnose(make(1)).verdict == "right"
    assert regard.diagnose(make(0)).names == (name,)


class Texts(NamedTuple):
    """The number of the text of each query and of each key."""

    q: np.ndarray
    kv: np.ndarray


def of_texts(join):
    def attention(q, k, v, segment_ids: Texts | None = None, causal=False):
        """q: (B, H, L, D); causal lines up the first query with the first key"""
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        keep = np.ones(s.shape, bool)
        if segment_ids is not None:
            keep &= (segment_ids.q[:, :, None] == segment_ids.kv[:, None])[:, None]
        if causal:
            later = np.tri(*s.shape[-2:], dtype=bool)
            keep = later & keep if segment_ids is None else join(keep, later)
        return softmax(np.where(keep, s, -1e30)) @ v

    return attention


def test_texts_may_come_in_a_pair():
    assert regard.diagnose(of_texts(np.logical_and)).verdict == "right"
    assert regard.diagnose(of_texts(np.logical_or)).names == ("masks_joined_by_or",)


def test_every_probe_of_one_query_has_a_right_result():
    for rank in (2, 3, 4):
        for probe in one_query_probes(rank):
            assert np.isfinite(probe.result(probe.right)).all(), probe.name


# --- blocks ---------------------------------------------------------------------------------------


def split_by(of_maximum):
    def decode(q, k_cache, v_cache, cache_seqlens, num_splits=4):
        """q: (B, H, D), k_cache, v_cache: (B, S, H, D), cache_seqlens: (B,) valid entries"""
        out = np.empty((*q.shape[:2], v_cache.shape[-1]))
        for b, n in enumerate(cache_seqlens):
            size, parts, marks = -(-n // num_splits), [], []
            for start in range(0, n, size):
                own = slice(start, min(start + size, n))
                s = np.einsum("hd,shd->hs", q[b], k_cache[b, own]) / np.sqrt(q.shape[-1])
                top = s.max(-1)
                e = np.exp(s - top[:, None])
                parts.append(np.einsum("hs,shd->hd", e, v_cache[b, own]) / e.sum(-1)[:, None])
                marks.append(top if of_maximum else top + np.log(e.sum(-1)))
            share = softmax(np.stack(marks, -1))
            out[b] = (share[..., None] * np.stack(parts, 1)).sum(1)
        return out

    return decode


def test_blocks_of_what_is_visible_may_not_change_a_result():
    assert regard.diagnose(split_by(False)).verdict == "right"
    assert regard.diagnose(split_by(True)).names == ("blocks_change_the_output",)


# --- linear attention -----------------------------------------------------------------------------


def linear(one):
    def linear_attention(q, k, v):
        """phi(q) (phi(k)ᵀ v) / phi(q) Σ phi(k), with phi = elu + 1"""
        phi_q, phi_k = (np.where(x > 0, x + one, np.exp(np.minimum(x, 0))) for x in (q, k))
        kv = phi_k.swapaxes(-1, -2) @ v
        return phi_q @ kv / (phi_q @ phi_k.sum(-2)[..., None])

    return linear_attention


def test_a_feature_map_without_its_one_is_named():
    assert regard.diagnose(linear(1)).verdict == "right"
    assert regard.diagnose(linear(0)).names == ("linear_map_without_one",)


# --- what this or that text means -----------------------------------------------------------------


def local_chunks(q, k, v, chunk_size):
    """Attention is causal inside each chunk, nothing crosses a border. (heads, seq, dim)"""
    out = np.zeros((*q.shape[:-1], v.shape[-1]))
    for low in range(0, q.shape[1], chunk_size):
        own = slice(low, low + chunk_size)
        s = q[:, own] @ k[:, own].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s[:, ~np.tri(s.shape[-1], dtype=bool)] = -np.inf
        out[:, own] = softmax(s) @ v[:, own]
    return out


def banded(q, k, v, *, left, right=0):
    """Query i sees keys i-left .. i+right (both ends included). (batch, length, heads, dim)"""
    apart = np.arange(k.shape[1]) - np.arange(q.shape[1])[:, None]
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    s = np.where((apart >= -left) & (apart <= right), s, -1e30)
    return np.einsum("bhqk,bkhd->bqhd", softmax(s), v)


def rows_without_keys(query, key, value, key_valid):
    """query (B, T, D), key (B, S, D), key_valid (B, S). Rows without any valid key give zeros."""
    keep = key_valid[:, None]
    s = np.einsum("bqd,bkd->bqk", query, key) / np.sqrt(query.shape[-1])
    weights = np.where(keep, np.exp(s - s.max(-1, keepdims=True)), 0)
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ value


def zero_is_padding(q, k, v, segment_ids, causal=True):
    """Packed texts, segment 0 is padding. q, k, v: (B, L, H, D), padding gives zeros."""
    keep = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids > 0)[:, None]
    keep = (keep & np.tri(q.shape[1], dtype=bool) if causal else keep)[:, None]
    s = np.where(keep, np.einsum("blhd,bmhd->bhlm", q, k) / np.sqrt(q.shape[-1]), -np.inf)
    top = s.max(-1, keepdims=True)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    p = np.divide(e, total, out=np.zeros_like(e), where=total > 0)
    return np.einsum("bhlm,bmhd->blhd", p, v)


def tiny_number(q, k, v):
    e = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return e / (e.sum(-1, keepdims=True) + 1e-10) @ v


def prefix_lm(q, k, v, prefix_len):
    """q, k, v: (batch, len, heads, dim); prefix_len: (batch,) tokens that all see."""
    places = np.arange(q.shape[1])
    keep = (places <= places[:, None]) | (places < prefix_len[:, None, None])
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    return np.einsum("bhqk,bkhd->bqhd", softmax(np.where(keep[:, None], s, -1e30)), v)


@pytest.mark.parametrize(
    "function", [local_chunks, banded, rows_without_keys, zero_is_padding, tiny_number, prefix_lm]
)
def test_right_code_with_unusual_rules_is_right(function):
    found = regard.diagnose(function)
    assert (found.mistakes, found.verdict in ("right", "fragile")) == ((), True), str(found)


def packed(begins):
    def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k):
        """q: (total_q, H, D); k, v: (total_k, H, D); cumulative lengths that begin with 0"""
        out = np.empty((*q.shape[:2], v.shape[-1]))
        bounds = cu_seqlens_q if begins == "q" else cu_seqlens_k
        for b in range(len(cu_seqlens_q) - 1):
            rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = slice(bounds[b], cu_seqlens_k[b + 1])
            s = np.einsum("qhd,khd->hqk", q[rows], k[keys]) / np.sqrt(q.shape[-1])
            out[rows] = np.einsum("hqk,khd->qhd", softmax(s), v[keys])
        return out

    return varlen


def test_texts_of_keys_may_be_longer_than_those_of_queries():
    assert regard.diagnose(packed("k")).verdict == "right"
    assert not regard.diagnose(packed("q")).ok


class Streaming:
    """Attention over the last `window` frames, the current frame being one of them."""

    more = 1

    def __init__(self, heads, dim, window):
        self.window = window
        self.keys = np.zeros((0, heads, dim))
        self.values = np.zeros((0, heads, dim))

    def step(self, q, k, v):
        start = max(len(self.keys) - self.window + self.more, 0)
        self.keys = np.concatenate([self.keys[start:], k[None]])
        self.values = np.concatenate([self.values[start:], v[None]])
        s = np.einsum("hd,thd->ht", q, self.keys) / np.sqrt(q.shape[-1])
        return np.einsum("ht,thd->hd", softmax(s), self.values)


class LongStreaming(Streaming):
    """Attention over the last `window` frames, the current frame being one of them."""

    more = 0


def test_an_object_that_gets_queries_and_keys_has_heads_of_its_own_width():
    assert regard.diagnose(Streaming).verdict in ("right", "fragile")
    assert regard.diagnose(LongStreaming).names[:1] == ("window_one_long",)


@pytest.mark.needs("torch")
def test_a_head_alone_has_another_width_than_the_embeddings():
    import torch

    class Head(torch.nn.Module):
        def __init__(self, n_embd, head_size):
            super().__init__()
            self.query, self.key, self.value = (
                torch.nn.Linear(n_embd, head_size, bias=False) for _ in range(3)
            )

        def forward(self, x):
            s = self.query(x) @ self.key(x).transpose(-2, -1) * x.shape[-1] ** -0.5
            return s.softmax(-1) @ self.value(x)

    assert regard.diagnose(Head).names == ("scale_by_model_width",)


@pytest.mark.needs("torch")
@pytest.mark.parametrize("tiled", [False, True])
def test_a_mask_of_padded_keys_beside_another_one_is_judged(tiled):
    import torch

    class Layer(torch.nn.Module):
        """key_padding_mask: (N, S) bool, True marks keys to be ignored; attn_mask: (L, S)"""

        def __init__(self, embed_dim, num_heads):
            super().__init__()
            self.heads = num_heads
            self.q, self.k, self.v, self.out = (
                torch.nn.Linear(embed_dim, embed_dim) for _ in range(4)
            )

        def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
            n, width = len(query), query.shape[-1]
            parts = ((self.q, query), (self.k, key), (self.v, value))
            shape = (self.heads, width // self.heads)
            q, k, v = (
                one(x).unflatten(-1, shape).transpose(1, 2).flatten(0, 1) for one, x in parts
            )
            s = q @ k.mT * shape[1] ** -0.5
            if attn_mask is not None:
                s = s.masked_fill(attn_mask, -torch.inf)
            if key_padding_mask is not None:
                pad = key_padding_mask.repeat_interleave(self.heads, 0)
                pad = key_padding_mask.repeat(self.heads, 1) if tiled else pad
                s = s.masked_fill(pad[:, None], -torch.inf)
            whole = (s.softmax(-1) @ v).unflatten(0, (n, self.heads))
            return self.out(whole.transpose(1, 2).flatten(2))

    assert regard.diagnose(Layer).names == (("mask_tiled_over_heads",) if tiled else ())
