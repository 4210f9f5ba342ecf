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
