"""Habits of code in libraries and courses: names of checkpoints, words about masks, tables, NaN."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from regard.diagnosis.reading.mask_words import what_true_means
from regard.diagnosis.reading.rule_words import where_causal_aligns
from regard.diagnosis.reading.signature import Parameter
from regard.diagnosis.process.target import load


def softmax(scores, axis=-1):
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def names(thing):
    return [one.name for one in regard.diagnose(thing).mistakes]


# --- objects -------------------------------------------------------------------------------------


class OfCheckpoint:
    """x: (B, N, C); "qkv.weight" (3C, C), "qkv.bias" (3C,), "proj.weight" (C, C), "proj.bias"."""

    axis = -1

    def __init__(self, dim=32, num_heads=4, seed=0):
        rng = np.random.default_rng(seed)
        self.num_heads = num_heads
        self.params = {
            "qkv.weight": rng.normal(size=(3 * dim, dim)) / dim**0.5,
            "qkv.bias": rng.normal(size=3 * dim),
            "proj.weight": rng.normal(size=(dim, dim)) / dim**0.5,
            "proj.bias": rng.normal(size=dim),
        }

    def __call__(self, x):
        B, N, C = x.shape
        qkv = x @ self.params["qkv.weight"].T + self.params["qkv.bias"]
        q, k, v = qkv.reshape(B, N, 3, self.num_heads, -1).transpose(2, 0, 3, 1, 4)
        weights = softmax(q @ k.swapaxes(-2, -1) / q.shape[-1] ** 0.5, self.axis)
        out = (weights @ v).transpose(0, 2, 1, 3).reshape(B, N, C)
        return out @ self.params["proj.weight"].T + self.params["proj.bias"]


class OfCheckpointOverQueries(OfCheckpoint):
    """x: (B, N, C); "qkv.weight" (3C, C), "qkv.bias" (3C,), "proj.weight" (C, C), "proj.bias"."""

    axis = -2


class OfLetters:
    def __init__(self, d_model=16, n_heads=2, seed=0):
        rng = np.random.default_rng(seed)
        self.h = n_heads
        self.W = {one: rng.normal(size=(d_model, d_model)) / 4 for one in "qkvo"}
        self.b = {one: np.zeros(d_model) for one in "qkvo"}

    def _project(self, name, x):
        return x @ self.W[name].T + self.b[name]

    def _heads(self, name, x):
        return self._project(name, x).reshape(*x.shape[:2], self.h, -1).transpose(0, 2, 1, 3)

    def __call__(self, x):
        q, k, v = (self._heads(one, x) for one in "qkv")
        out = softmax(q @ self.turned(k) / np.sqrt(q.shape[-1])) @ v
        return self._project("o", out.transpose(0, 2, 1, 3).reshape(x.shape))

    def turned(self, k):
        return k.swapaxes(-1, -2)


class OfLettersReshaped(OfLetters):
    def turned(self, k):
        return k.reshape(*k.shape[:2], k.shape[-1], k.shape[-2])


class Called:
    def __init__(self, d_model, h):
        rng = np.random.default_rng(0)
        self.d_model, self.h = d_model, h
        self.w_q, self.w_k, self.w_v, self.w_o = rng.normal(size=(4, d_model, d_model)) / 4

    def call(self, query, key, value):
        """(batch, length, d_model) each."""
        q, k, v = (
            (one @ w).reshape(*one.shape[:2], self.h, -1).swapaxes(1, 2)
            for one, w in ((query, self.w_q), (key, self.w_k), (value, self.w_v))
        )
        out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(self.d_model)) @ v
        return out.swapaxes(1, 2).reshape(query.shape) @ self.w_o


@pytest.mark.parametrize("thing", [OfCheckpoint, OfLetters])
def test_dictionaries_of_weights_are_read(thing):
    assert regard.diagnose(thing).verdict == "right"


def test_mistakes_beside_dictionaries_of_weights_are_named():
    assert names(OfCheckpointOverQueries) == ["softmax_over_queries"]
    assert names(OfLettersReshaped) == ["keys_reshaped"]


def test_a_method_of_an_object_is_called_with_its_weights():
    assert names(Called(24, 4).call) == ["scale_by_model_width"]
    # With as many heads as columns in each, √(H·D) is D: objects of other sizes are asked first.
    assert names(load(f"{__file__}:Square.call")) == ["scale_by_model_width"]


class Square(Called):
    def __init__(self, d_model=64, h=8):
        super().__init__(d_model, h)


# --- functions -----------------------------------------------------------------------------------


def of_pairs(x, weights, n_heads=4):
    """x: (B, T, C); weights: {"q_proj": (W, b), "k_proj": …, "v_proj": …, "out_proj": …}."""

    def project(name, rows):
        W, b = weights[name]
        return rows @ W.T + b

    def heads(name):
        return project(name, x).reshape(*x.shape[:2], n_heads, -1).swapaxes(1, 2)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    out = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
    return project("out_proj", out.swapaxes(1, 2).reshape(x.shape))


def of_two_in_columns(X_q, X_kv, omega_q, omega_k, omega_v, beta_q, beta_k, beta_v):
    """X_q: (D, N) and X_kv: (D, M), one column for each token; beta_*: (D_out, 1)."""
    Q, K, V = beta_q + omega_q @ X_q, beta_k + omega_k @ X_kv, beta_v + omega_v @ X_kv
    return V @ softmax(K.T @ Q / np.sqrt(len(K)), 0)


def tiled_and_turned(q, k, v):
    """q: (B, T, H, D); k, v: (B, S, K, D): query head h reads key head h // (H // K)."""
    B, T, H, D = q.shape
    q = q.reshape(B, T, H // k.shape[2], k.shape[2], D).swapaxes(2, 3)
    weights = softmax(np.einsum("btkgd,bskd->bkgts", q, k) / np.sqrt(D))
    return np.einsum("bkgts,bskd->btkgd", weights, v).reshape(B, T, H, D)


def of_square_ones(X, Omega_q, Omega_k, Omega_v):
    """X: (D, N), a column for each token; Omega_*: (D, D)."""
    scores = (Omega_k @ X).T @ (Omega_q @ X) / np.sqrt(X.shape[0])
    return Omega_v @ X @ softmax(scores, 0)


def test_the_width_of_embeddings_is_that_of_queries_where_weights_are_square():
    assert regard.diagnose(of_square_ones).verdict == "right"


def test_pairs_of_weights_and_tokens_in_columns_are_read():
    assert regard.diagnose(of_pairs).verdict == "right"
    assert regard.diagnose(of_two_in_columns).verdict in ("right", "fragile")


def test_tiled_heads_that_are_put_out_in_another_order_are_named():
    assert names(tiled_and_turned) == ["key_heads_tiled"]


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("mask: (batch, seq) as the tokenizer returns it: 1 = real token, 0 = padding", "keep"),
        ("mask as returned by the collator (True = padding)", "hide"),
    ],
)
def test_what_a_tokenizer_returns_is_no_result(text, means):
    assert what_true_means(text, [Parameter("mask", "mask")]) == means


def test_a_text_says_which_query_and_key_are_aligned():
    assert where_causal_aligns("Causal masking aligns the last query with the last key.") == "end"
    assert where_causal_aligns("It aligns the first query with the first key.") == "start"


# --- torch ---------------------------------------------------------------------------------------

TORCH = '''
import torch
import torch.nn.functional as F
from torch import nn


def with_lowest(q, k, v, mask=None):
    """mask: (B, T), 1 for real tokens and 0 for padding"""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores + (mask[:, None, None, :] == 0) * torch.finfo(scores.dtype).min
    return scores.softmax(-1) @ v


class Windowed(nn.Module):
    """Window attention with a table of relative positions; x: (windows, Ws * Ws, C)."""

    def __init__(self, dim: int, window_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * window_size - 1) ** 2, num_heads))
        one = torch.arange(window_size)
        places = torch.stack(torch.meshgrid(one, one, indexing="ij")).flatten(1)
        apart = (places[:, :, None] - places[:, None, :]).permute(1, 2, 0) + window_size - 1
        index = apart[..., 0] * (2 * window_size - 1) + apart[..., 1]
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def bias(self, N):
        own = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return own.view(N, N, self.num_heads).permute(2, 0, 1)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + self.bias(N)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class WindowedScrambled(Windowed):
    """Window attention with a table of relative positions; x: (windows, Ws * Ws, C)."""

    def bias(self, N):
        own = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return own.view(self.num_heads, N, N)


class Additive(nn.Module):
    """Additive attention: query (B, 1, H), keys (B, S, H) -> context (B, 1, H)"""

    def __init__(self, hidden_size=16):
        super().__init__()
        self.Wa, self.Ua = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = F.softmax(scores, dim=-1).transpose(1, 2)
        return torch.bmm(weights, keys)


class Angles(nn.Module):
    """Rotary attention whose angles get the type of the rows."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def turned(self, x):
        half = x.shape[-1] // 2
        place = torch.arange(x.shape[2]).float()
        angle = torch.outer(place, 10000.0 ** -(torch.arange(half).float() / half)).to(x.dtype)
        cos, sin, (a, b) = angle.cos(), angle.sin(), x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))
'''


MORE = '''
import torch
from torch import nn


class InAnOrder(nn.Module):
    def __init__(self, n_embd=32, n_head=4):
        super().__init__()
        # the fused projection gives v, k, q in that order
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x):
        B, T, C = x.shape
        v, k, q = (
            one.view(B, T, self.n_head, -1).transpose(1, 2) for one in self.c_attn(x).split(C, 2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class OverQueries(nn.Module):
    """q, k, v: (batch, len, d_model); mask: (batch, 1, len_k), 0 = do not attend."""

    def __init__(self, n_head=4, d_model=32, d_k=8, d_v=8):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.softmax = nn.Softmax(dim=2)

    def forward(self, q, k, v, mask=None):
        B, L, _ = q.shape
        q, k, v = (
            layer(one).view(B, one.shape[1], self.n_head, -1).transpose(1, 2)
            for layer, one in ((self.w_qs, q), (self.w_ks, k), (self.w_vs, v))
        )
        scores = q @ k.transpose(2, 3) / self.d_k**0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.fc((self.softmax(scores) @ v).transpose(1, 2).reshape(B, L, -1))


class Decomposed(nn.Module):
    """x: (B, H, W, C), with relative positions of rows and columns that the queries meet."""

    def __init__(self, dim=32, num_heads=4, input_size=(6, 6)):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * input_size[0] - 1, dim // num_heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * input_size[1] - 1, dim // num_heads))

    def forward(self, x):
        B, H, W, _ = x.shape
        qkv = self.qkv(x).reshape(B, H * W, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, B * self.num_heads, H * W, -1).unbind(0)
        of_rows, of_columns = (
            table[torch.arange(n)[:, None] - torch.arange(n) + n - 1]
            for table, n in ((self.rel_pos_h, H), (self.rel_pos_w, W))
        )
        rows = q.view(-1, H, W, q.shape[-1])
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).view(-1, H, W, H, W)
        scores = scores + torch.einsum("bhwc,hkc->bhwk", rows, of_rows)[..., None]
        scores = scores + torch.einsum("bhwc,wkc->bhwk", rows, of_columns)[:, :, :, None]
        out = scores.view(-1, H * W, H * W).softmax(-1) @ v
        out = out.view(B, self.num_heads, H, W, -1).permute(0, 2, 3, 1, 4).reshape(B, H, W, -1)
        return self.proj(out)
'''


@pytest.mark.needs("torch")
def test_a_comment_says_the_order_of_columns_whose_layer_does_not(tmp_path):
    (path := tmp_path / "habits.py").write_text(MORE)
    assert regard.diagnose(load(f"{path}:InAnOrder")).verdict == "right"
    unsaid = MORE.replace("gives v, k, q in that order", "is fused")
    (own := tmp_path / "unsaid.py").write_text(unsaid)  # the weights are its own: only names
    assert regard.diagnose(load(f"{own}:InAnOrder")).verdict == "right"
    loaded = MORE.replace("gives v, k, q in that order", "is loaded from a GPT-2 checkpoint")
    (other := tmp_path / "loaded.py").write_text(loaded)
    assert names(load(f"{other}:InAnOrder")) == ["W_q_and_W_v_swapped"]


@pytest.mark.needs("torch")
def test_hidden_scores_that_are_finite_share_their_column(tmp_path):
    (path := tmp_path / "habits.py").write_text(MORE)
    assert names(load(f"{path}:OverQueries")) == ["softmax_over_queries"]


@pytest.mark.needs("torch")
def test_a_verdict_says_which_tables_were_left_out(tmp_path):
    (path := tmp_path / "habits.py").write_text(MORE)
    found = regard.diagnose(load(f"{path}:Decomposed"))
    assert (found.verdict, "without its rel_pos_h and rel_pos_w" in found.summary) == (
        "right",
        True,
    )


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("name", "verdict", "found"),
    [
        ("with_lowest", "right", ()),
        ("Windowed", "right", ()),
        ("WindowedScrambled", "mistaken", ("relative_bias_misplaced",)),
        ("Additive", "mistaken", ("weights_do_not_add_up", "queries_without_effect")),
        ("Angles", "fragile", ("computed_in_float32", "positions_rounded")),
    ],
)
def test_habits_of_torch(name, verdict, found, tmp_path):
    path = tmp_path / "habits.py"
    path.write_text(TORCH)
    diagnosis = regard.diagnose(load(f"{path}:{name}"))
    assert (diagnosis.verdict, diagnosis.names) == (verdict, found)
