"""Code as courses and small libraries write it: a loop over heads, caches apart, odd names."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.diagnosis.process.target import load


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def attend(q, k, v, width=None):
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(width or q.shape[-1])) @ v


def names(found):
    return [one.name for one in found.mistakes]


# --- matrices of each head in a loop -------------------------------------------------------------


def zipped(x, Wq, Wk, Wv, Wo):
    heads = [attend(x @ q, x @ k, x @ v) for q, k, v in zip(Wq, Wk, Wv, strict=True)]
    return np.concatenate(heads, axis=-1) @ Wo


def indexed(x, Wq, bq, Wk, bk, Wv, bv, Wo, bo):
    heads = []
    for h in range(len(Wq)):
        heads.append(attend(x @ Wq[h] + bq[h], x @ Wk[h] + bk[h], x @ Wv[h] + bv[h]))
    return np.concatenate(heads, axis=-1) @ Wo + bo


def summed(x, Wq, Wk, Wv, Wo):
    out = 0
    for q, k, v, o in zip(Wq, Wk, Wv, Wo, strict=True):
        out = out + attend(x @ q, x @ k, x @ v) @ o
    return out


def zipped_by_model_width(x, Wq, Wk, Wv, Wo):
    heads = []
    for q, k, v in zip(Wq, Wk, Wv, strict=True):
        heads.append(attend(x @ q, x @ k, x @ v, width=x.shape[-1]))
    return np.concatenate(heads, axis=-1) @ Wo


@pytest.mark.parametrize("function", [zipped, indexed, summed])
def test_matrices_that_a_loop_takes_one_by_one_are_those_of_heads(function):
    assert regard.diagnose(function).verdict == "right"


def test_a_mistake_in_a_loop_over_heads_is_named():
    assert names(regard.diagnose(zipped_by_model_width)) == ["scale_by_model_width"]


# --- caches as two arguments ---------------------------------------------------------------------


class InPieces:
    def __init__(self, dim=16, n_head=2, seed=0):
        rng = np.random.default_rng(seed)
        self.n_head = n_head
        self.wq, self.wk, self.wv, self.wo = rng.normal(size=(4, dim, dim)) / np.sqrt(dim)

    def forward(self, x, kcache=None, vcache=None):
        """The next tokens, after those of the caches; each sees all up to itself."""
        q, k, v = (
            (x @ one).reshape(len(x), self.n_head, -1) for one in (self.wq, self.wk, self.wv)
        )
        if kcache is not None:
            k, v = np.concatenate([kcache, k]), np.concatenate([vcache, v])
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        seen = np.tril(np.ones(scores.shape[1:], bool), k=self.first(len(k) - len(x)))
        weights = softmax(np.where(seen, scores, -np.inf))
        return np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1) @ self.wo, k, v

    def first(self, past):
        return past


class FromTheStart(InPieces):
    def first(self, past):
        return 0


def of_tree(params, x, k_cache=None, v_cache=None, n_heads=4):
    q, k, v = (np.reshape(x @ params[one], (len(x), n_heads, -1)) for one in ("wq", "wk", "wv"))
    if k_cache is not None:
        k, v = np.concatenate([k_cache, k]), np.concatenate([v_cache, v])
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    seen = np.arange(len(k)) <= np.arange(len(x))[:, None] + len(k) - len(x)
    weights = softmax(np.where(seen, scores, -1e30))
    out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
    return out @ params["wo"], (k, v)


@pytest.mark.parametrize("thing", [InPieces, of_tree])
def test_caches_of_keys_and_values_as_two_arguments_are_filled(thing):
    found = regard.diagnose(thing)
    assert found.verdict == "right"
    assert "cache" in [one.name for one in found.abilities if one.state == "right"]


def test_a_mistake_with_caches_as_two_arguments_is_named():
    assert names(regard.diagnose(FromTheStart)) == ["cache_offset_ignored"]


# --- retention -----------------------------------------------------------------------------------


def retention(q, k, v, gammas):
    """Retention: q, k, v (H, T, D), gammas (H,), the decay of each head."""
    state, out = 0 * q[:, 0, :, None] * v[:, 0, None, :], []
    for n in range(q.shape[1]):
        state = gammas[:, None, None] * state + k[:, n, :, None] * v[:, n, None, :]
        out.append(np.einsum("hd,hdm->hm", q[:, n], state))
    return np.stack(out, axis=1)


def retention_before(q, k, v, gammas):
    """Retention: q, k, v (H, T, D), gammas (H,), the decay of each head."""
    state, out = 0 * q[:, 0, :, None] * v[:, 0, None, :], []
    for n in range(q.shape[1]):
        out.append(np.einsum("hd,hdm->hm", q[:, n], state))
        state = gammas[:, None, None] * state + k[:, n, :, None] * v[:, n, None, :]
    return np.stack(out, axis=1)


def test_retention_gets_the_decays_that_it_asks_for():
    assert regard.diagnose(retention).verdict == "right"
    assert names(regard.diagnose(retention_before)) == ["retention_state_before_token"]


# --- names, zeros and causal masks ---------------------------------------------------------------


def in_columns(X, beta_v, Omega_v, beta_q, Omega_q, beta_k, Omega_k):
    """X is D x N: each token is a column; beta_* are column vectors."""
    q, k, v = beta_q + Omega_q @ X, beta_k + Omega_k @ X, beta_v + Omega_v @ X
    return v @ softmax(q.T @ k / np.sqrt(len(k))).T


def masked_after(q, k, v):
    """Causal attention."""
    weights = softmax(q @ k.T / np.sqrt(q.shape[-1]))
    return weights * np.tril(np.ones(weights.shape)) @ v


def masked_after_of_embeddings(x, Wq, Wk, Wv):
    """Causal self-attention."""
    return masked_after(x @ Wq, x @ Wk, x @ Wv)


class LinearSteps:
    def __init__(self, heads=2, dim=8):
        self.size = heads, dim
        self.reset()

    def reset(self):
        self.S, self.z = np.zeros((*self.size, self.size[1])), np.zeros(self.size)

    def run(self, q, k, v):
        """q, k, v (T, H, D): linear attention, causal, from a fresh state."""
        self.reset()
        out = []
        for one, key, value in zip(*map(self.phi, (q, k)), v, strict=True):
            self.S += key[..., None] * value[:, None]
            self.z += key
            sums = (one * self.z).sum(-1, keepdims=True)
            out.append(np.einsum("hd,hdm->hm", one, self.S) / sums)
        return np.stack(out)

    def phi(self, x):
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def test_biases_may_come_before_the_matrices():
    assert regard.diagnose(in_columns).verdict == "right"


@pytest.mark.parametrize("function", [masked_after, masked_after_of_embeddings])
def test_a_causal_mask_after_the_softmax_is_named(function):
    assert names(regard.diagnose(function)) == ["mask_after_softmax"]


def test_sums_that_code_adds_to_are_no_weights():
    assert regard.diagnose(load(f"{__file__}:LinearSteps.run")).verdict == "right"


# --- courses: columns, numbered heads, streams ---------------------------------------------------


def columns(scores):
    weights = np.exp(scores - scores.max(0))
    return weights / weights.sum(0)


def with_numbered(
    X,
    omega_q1,
    omega_k1,
    omega_v1,
    beta_q1,
    beta_k1,
    beta_v1,
    omega_q2,
    omega_k2,
    omega_v2,
    beta_q2,
    beta_k2,
    beta_v2,
    omega_c,
):
    """X is D x N: tokens are columns."""
    first = beta_v1 + omega_v1 @ X
    second = beta_v2 + omega_v2 @ X
    q1, k1, q2, k2 = (
        beta + omega @ X
        for beta, omega in (
            (beta_q1, omega_q1),
            (beta_k1, omega_k1),
            (beta_q2, omega_q2),
            (beta_k2, omega_k2),
        )
    )
    first = first @ columns(k1.T @ q1 / np.sqrt(len(q1)))
    second = second @ columns(k2.T @ q2 / np.sqrt(len(q2)))
    return omega_c @ np.concatenate([first, second])


def with_numbered_rows(x, Wq1, Wk1, Wv1, Wq2, Wk2, Wv2, Wo):
    heads = [attend(x @ Wq1, x @ Wk1, x @ Wv1), attend(x @ Wq2, x @ Wk2, x @ Wv2)]
    return np.concatenate(heads, axis=-1) @ Wo


def with_numbered_wrong(x, Wq1, Wk1, Wv1, Wq2, Wk2, Wv2, Wo):
    heads = [attend(x @ Wq1, x @ Wk1, x @ Wv1), attend(x @ Wq2, x @ Wk2, x @ Wv2)]
    return np.concatenate(heads[::-1], axis=-1) @ Wo


def of_entries_in_columns(X, params, H=2):
    """X is D x N: one column for each token; beta_q, beta_k and beta_v are D x 1."""
    Q = params["beta_q"] + params["omega_q"] @ X
    K = params["beta_k"] + params["omega_k"] @ X
    V = params["beta_v"] + params["omega_v"] @ X
    out, d = np.zeros_like(V), len(X) // H
    for h in range(H):
        r = slice(h * d, (h + 1) * d)
        out[r] = V[r] @ columns(K[r].T @ Q[r] / np.sqrt(d))
    return params["omega_c"] @ out


def of_a_stream(p, resid):
    """resid (pos, d_model); p["WQ"], p["WK"], p["WV"] (d_model, d), p["WO"] (d, d_model)."""
    return attend(resid @ p["WQ"], resid @ p["WK"], resid @ p["WV"]) @ p["WO"]


def layer_norm(x, g, b):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-5) * g + b


def of_block(p, x):
    return attend(*np.split(x @ p["qkv"], 3, axis=-1)) @ p["out"]


def block(p, x):
    """A pre-norm block. p: "qkv" (C, 3C), "out" (C, C), "g" (C,), "b" (C,); x (T, C)."""
    return x + of_block(p, layer_norm(x, p["g"], p["b"]))


def block_wrong(p, x):
    """A pre-norm block. p: "qkv" (C, 3C), "out" (C, C), "g" (C,), "b" (C,); x (T, C)."""
    x = layer_norm(x, p["g"], p["b"])
    return x + of_block(p, x)


@pytest.mark.parametrize(
    "function",
    [with_numbered, with_numbered_rows, of_entries_in_columns, of_a_stream, block],
)
def test_code_as_courses_write_it_is_right(function):
    assert regard.diagnose(function).verdict == "right"


def test_mistakes_in_code_as_courses_write_it_are_named():
    assert names(regard.diagnose(with_numbered_wrong)) == ["head_order_reversed"]
    assert names(regard.diagnose(block_wrong)) == ["normalised_input_added"]


# --- small libraries: lengths, tables, buffers ---------------------------------------------------


def with_lengths(q, k, v, lengths):
    """q, k, v (B, T, D); lengths (B,): how many tokens of each text are real."""
    seen = np.arange(k.shape[1]) < lengths[:, None, None]
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    return softmax(scores) @ v


def with_lengths_inverted(q, k, v, lengths):
    """q, k, v (B, T, D); lengths (B,): how many tokens of each text are real."""
    seen = np.arange(k.shape[1]) >= lengths[:, None, None]
    scores = np.where(seen, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    with np.errstate(all="ignore"):
        return np.nan_to_num(softmax(scores) @ v)


def with_table(x, w, table):
    """x (T, d); w: "q", "k", "v", "o", each (d, d); table (num_buckets, h), a bias of each head."""
    h, place = table.shape[1], np.arange(len(x))
    distance = np.clip(place - place[:, None] + 3, 0, 6)
    q, k, v = (np.reshape(x @ w[one], (len(x), h, -1)) for one in "qkv")
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    weights = softmax(scores + table[distance].transpose(2, 0, 1))
    return np.einsum("hqk,khd->qhd", weights, v).reshape(x.shape) @ w["o"]


class Ring:
    """The last `window` keys in a buffer that begins empty in each run; q, k, v (T, H, d)."""

    def __init__(self, heads=2, width=8, window=4):
        self.k, self.v = np.zeros((2, heads, window, width))
        self.window, self.seen = window, 0

    def step(self, q, k, v):
        self.k[:, self.seen % self.window] = k
        self.v[:, self.seen % self.window] = v
        self.seen += 1
        n = min(self.seen, self.window)
        scores = np.einsum("hd,hnd->hn", q, self.k[:, :n]) / np.sqrt(q.shape[-1])
        return np.einsum("hn,hnd->hd", softmax(scores), self.v[:, :n])

    def run(self, q, k, v):
        self.seen = 0
        return np.stack([self.step(*one) for one in zip(q, k, v, strict=True)])


class OfExported:
    """Weights of a checkpoint: the columns of each head's q, k and v, one head after the other."""

    def __init__(self, w_qkv, b_qkv, w_dense, b_dense, n_heads=4):
        self.w_qkv, self.b_qkv, self.n = w_qkv, b_qkv, n_heads
        self.w_dense, self.b_dense = w_dense, b_dense

    def __call__(self, x, residual=None):
        B, T, D = x.shape
        fused = (x @ self.w_qkv + self.b_qkv).reshape(B, T, self.n, 3, -1)
        q, k, v = (fused[..., one, :].swapaxes(1, 2) for one in range(3))
        out = attend(q, k, v).swapaxes(1, 2).reshape(B, T, D) @ self.w_dense + self.b_dense
        return out if residual is None else out + residual


@pytest.mark.parametrize("function", [with_lengths, with_table, OfExported])
def test_code_as_small_libraries_write_it_is_right(function):
    assert regard.diagnose(function).verdict in ("right", "fragile")


def test_a_buffer_that_begins_empty_in_each_run_is_a_window():
    found = regard.diagnose(load(f"{__file__}:Ring.run"))
    assert (found.verdict, "window" in found.summary) == ("right", True)


def test_lengths_that_are_read_the_wrong_way_round_are_found_where_nan_becomes_zero():
    assert names(regard.diagnose(with_lengths_inverted)) == ["mask_inverted"]


# --- torch ---------------------------------------------------------------------------------------

TORCH = '''
import torch
import torch.nn.functional as F
from torch import nn


class OneKeyHead(nn.Module):
    def __init__(self, width=40, heads=5):
        super().__init__()
        self.heads, self.hd = heads, width // heads
        self.wide = nn.Linear(width, width + 2 * self.hd)
        self.back = nn.Linear(width, width)

    def forward(self, x):
        b, n, w = x.shape
        q, kv = self.wide(x).split([w, 2 * self.hd], dim=-1)
        k, v = kv.split(self.hd, dim=-1)
        q = q.reshape(b, n, self.heads, self.hd)
        scores = torch.einsum("bqhd,bkd->bhqk", q, k) / self.hd**0.5
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.back(torch.einsum("bhqk,bkd->bqhd", weights, v).reshape(b, n, w))


class OfItself(nn.Module):
    def __init__(self, embed_dim=32, num_heads=4, self_attention=True):
        super().__init__()
        self.num_heads, self.self_attention = num_heads, self_attention
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(embed_dim, embed_dim) for _ in range(4)
        )

    def forward(self, query, key=None, value=None):
        """(B, T, C)"""
        if self.self_attention:
            key = value = query
        B, T, C = query.shape
        q, k, v = (
            layer(one).view(B, one.shape[1], self.num_heads, -1).transpose(1, 2)
            for layer, one in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, C))


class Joint(nn.Module):
    """Text and image attend together, with RMS-normalised queries and keys."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.img_qkv, self.txt_qkv = nn.Linear(dim, 3 * dim), nn.Linear(dim, 3 * dim)
        self.img_out, self.txt_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.ones(dim // heads))

    @staticmethod
    def _rms(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale

    def _qkv(self, layer, x):
        q, k, v = layer(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(2, 3)
        return self._rms(q, self.scale), self._rms(k, self.scale), v

    def forward(self, img, txt):
        """img (B, N, C), txt (B, L, C) -> (img, txt)"""
        both = zip(self._qkv(self.txt_qkv, txt), self._qkv(self.img_qkv, img))
        y = F.scaled_dot_product_attention(*(torch.cat(one, dim=-2) for one in both))
        y = y.transpose(1, 2).flatten(-2)
        return self.img_out(y[:, txt.shape[1]:]), self.txt_out(y[:, :txt.shape[1]])
'''


@pytest.mark.needs("torch")
@pytest.mark.parametrize("name", ["OneKeyHead", "OfItself", "Joint"])
def test_modules_of_other_habits_are_right(name, tmp_path):
    path = tmp_path / "layers.py"
    path.write_text(TORCH)
    assert regard.diagnose(load(f"{path}:{name}")).verdict == "right"
