"""How code keeps weights, keys and values: what is read from there, and mistakes beside it.

Each code is a file of its own.
"""

from __future__ import annotations

import functools
import os
import sys

import pytest

from code_in_files import diagnosis_of
from regard.diagnosis.process.target import load


@pytest.fixture
def read(tmp_path):
    """The verdict on the last function or class of some code, with other text in it."""
    return functools.partial(diagnosis_of, tmp_path)


def test_a_file_is_read_as_it_is_now(tmp_path, monkeypatch):
    # Python's cache of code tells two texts apart by the second and the size alone.
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1, 2):
        (path := tmp_path / "now.py").write_text(f"def attend(q, k, v):\n    return {number}\n")
        os.utime(path, (1e9, 1e9))
        assert load(f"{path}:attend")(0, 0, 0) == number
    assert not (tmp_path / "__pycache__").exists()


# --- weights -------------------------------------------------------------------------------------

FUSED = '''
def linear(x, weight, bias):
    return x @ weight.T + bias


def vision(x, params, num_heads=4):
    """x (B, N, C); params: 'qkv.weight' (3C, C), 'qkv.bias' (3C,), 'proj.weight', 'proj.bias'."""
    qkv = linear(x, params["qkv.weight"], params["qkv.bias"])
    q, k, v = (heads_of(one, num_heads) for one in np.split(qkv, 3, axis=-1))
    s = q @ k.swapaxes(-1, -2) * (x.shape[-1] // num_heads) ** -0.5
    return linear(merged(softmax(s) @ v), params["proj.weight"], params["proj.bias"])
'''
NAMED = '''
from typing import NamedTuple


class Weights(NamedTuple):
    wqkv: np.ndarray  # (3, heads, d_model, d_head)
    wo: np.ndarray  # (heads, d_head, d_model)


def summed(params, x, padding=None):
    """x (B, T, d_model); padding (B, T), 1.0 at padded tokens."""
    q, k, v = np.einsum("btm,phmd->pbhtd", x, params.wqkv)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if padding is not None:
        s = s - 1e9 * padding[:, None, None, :]
    return np.einsum("bhtd,hdm->btm", softmax(s) @ v, params.wo)
'''
SAID = ('np.einsum("btm,phmd->pbhtd", x, params.wqkv)', "(x[:, None] @ w for w in params.wqkv)")
LISTED = '''
class Looped:
    """look_ahead_mask (T, T): 1 = hidden."""

    def __init__(self, d_model=24, num_heads=3, seed=7):
        g = np.random.default_rng(seed)
        self.depth = d_model // num_heads
        self.heads = [{n: g.normal(0, 0.3, (d_model, self.depth)) for n in "vkq"} for _ in range(num_heads)]
        self.dense = g.normal(0, 0.3, (d_model, d_model))

    def __call__(self, v, k, q, look_ahead_mask=None):
        outs = []
        for w in self.heads:
            s = (q @ w["q"]) @ (k @ w["k"]).swapaxes(-1, -2) / np.sqrt(self.depth)
            if look_ahead_mask is not None:
                s = s + look_ahead_mask * -1e9
            outs.append(softmax(s) @ (v @ w["v"]))
        return np.concatenate(outs, axis=-1) @ self.dense
'''  # noqa: E501
STACKED = '''
class Stacked:
    """valid (B, T): True for real tokens."""

    def __init__(self, dim=32, heads=4):
        self.heads = heads
        self.W = np.random.default_rng(0).standard_normal((4, dim, dim)) / np.sqrt(dim)

    def __call__(self, x, valid=None):
        q, k, v = (heads_of(x @ w, self.heads) for w in self.W[:3])
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if valid is not None:
            s = np.where(valid[:, None, None, :], s, -1e9)
        return merged(softmax(s) @ v) @ self.W[3]
'''


AS_WRITTEN = NAMED.replace("(3, heads, d_model, d_head)", "(3, d, d)").replace(
    "(heads, d_head, d_model)", "(d, d)"
)
FLAT = [
    (SAID[0], "(heads_of(x @ w, 4) for w in params.wqkv)"),
    ('np.einsum("bhtd,hdm->btm", softmax(s) @ v, params.wo)', "merged(softmax(s) @ v) @ params.wo"),
]


@pytest.mark.parametrize(
    ("text", "scaled"),
    [
        (FUSED, " * (x.shape[-1] // num_heads) ** -0.5"),
        (NAMED, " / np.sqrt(q.shape[-1])"),
        (NAMED.replace(*SAID), " / np.sqrt(q.shape[-1])"),
        (AS_WRITTEN.replace(*FLAT[0]).replace(*FLAT[1]), " / np.sqrt(q.shape[-1])"),
        (LISTED, " / np.sqrt(self.depth)"),
        (STACKED, " / np.sqrt(q.shape[-1])"),
    ],
    ids=["state dict", "axes in einsums", "axes in comments", "three in one", "list", "stacked"],
)
def test_weights_are_read_wherever_they_are(read, text, scaled):
    assert read(text).verdict == "right"
    assert read(text, (scaled, "")).names == ("no_scale",)


OF_HEADS = '''
def one_head(wq, wk, wv, x):
    """x: (T, E); wq, wk, wv: (D, E), rows are the output's columns."""
    q, k, v = wq @ x.T, wk @ x.T, wv @ x.T
    return softmax(q.T @ k / np.sqrt(len(q))) @ v.T


def of_heads(p, x):
    """p: {"q": (H, D, E), "k": (H, D, E), "v": (H, D, E), "o": (E, H * D)}, x: (B, T, E)"""
    parts = [[one_head(*w, row) for w in zip(p["q"], p["k"], p["v"])] for row in x]
    return np.stack([np.concatenate(own, -1) @ p["o"].T for own in parts])
'''
CACHED = '''
def step(x, cache_k, cache_v, start_pos, wq, wk, wv, wo, num_q_heads):
    """x (B, T, C); caches (B, max_len, heads, D); y = w @ x: weights (heads * D, C), wo (C, heads * D)."""
    B, T, C = x.shape
    end = start_pos + T
    q, k, v = (np.einsum("oc,btc->bto", w, x).reshape(B, T, num_q_heads, -1) for w in (wq, wk, wv))
    cache_k[:, start_pos:end], cache_v[:, start_pos:end] = k, v
    s = np.einsum("bthd,bshd->bhts", q, cache_k[:, :end]) * q.shape[-1] ** -0.5
    s = np.where(np.arange(end) > start_pos + np.arange(T)[:, None], -np.inf, s)
    y = np.einsum("bhts,bshd->bthd", softmax(s), cache_v[:, :end]).reshape(B, T, -1)
    return np.einsum("co,bto->btc", wo, y)
'''  # noqa: E501
FOLDED = '''
class Cached:
    """step(x): the next token (d_model,)."""

    def __init__(self, d_model=12, n_heads=3):
        self.H, self.D = n_heads, d_model // n_heads
        self.W = np.random.default_rng(0).normal(0, d_model ** -0.5, (4, d_model, d_model))
        # 1/sqrt(D) goes into the query matrix once and for all
        self.W[0] /= self.D ** 0.5
        self.keys, self.values = [], []

    def step(self, x):
        wq, wk, wv, wo = self.W
        self.keys.append((x @ wk).reshape(self.H, self.D))
        self.values.append((x @ wv).reshape(self.H, self.D))
        q, k, v = (x @ wq).reshape(self.H, self.D), np.array(self.keys), np.array(self.values)
        return np.einsum("ht,thd->hd", softmax(np.einsum("hd,thd->ht", q, k)), v).ravel() @ wo


# of Cached.step
'''


@pytest.mark.parametrize("text", [OF_HEADS, CACHED, FOLDED])
def test_weights_that_are_out_first_or_hold_the_scale_are_not_accused(read, text):
    assert read(text).verdict in ("right", "unknown")


def test_axes_of_heads_beside_the_width_of_a_token(read):
    assert read(OF_HEADS).verdict == "right"
    assert read(OF_HEADS, (" / np.sqrt(len(q))", "")).names == ("no_scale",)


COLUMNS = '''
class Columns:
    """forward(X): X is (d, T), a column for each token; backward(G) returns dX."""

    def __init__(self, d=5, m=3):
        r = np.random.default_rng(1)
        self.params = {n: r.normal(0, 0.5, (m, d)) for n in ("Wq", "Wk", "Wv")}
        self.params["Wo"] = r.normal(0, 0.5, (d, m))
        self.m = m

    def forward(self, X):
        P = self.params
        Q, K, V = P["Wq"] @ X, P["Wk"] @ X, P["Wv"] @ X
        A = softmax(Q.T @ K / self.m ** 0.5).T
        self.tape = X, Q, K, V, A
        return P["Wo"] @ V @ A

    def backward(self, G):
        P = self.params
        X, Q, K, V, A = self.tape
        dH = P["Wo"].T @ G
        dA = V.T @ dH
        dS = A * (dA - (A * dA).sum(0)) / self.m ** 0.5
        return P["Wq"].T @ K @ dS + P["Wk"].T @ Q @ dS.T + P["Wv"].T @ dH @ A.T
'''


def test_a_backward_pass_has_weights_of_tokens_that_are_columns(read):
    assert read(COLUMNS).verdict == "right"
    assert read(COLUMNS, (".sum(0)) / self.m ** 0.5", ".sum(0))")).names == ("gradient_not_scaled",)


JOINED = '''
def attention(inp, NH=4, dout=None):
    """inp (B, T, 3C): q | k | v of every token; the gradient too where dout is given."""
    q, k, v = (heads_of(one, NH) for one in np.split(inp, 3, -1))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    s = np.where(np.tri(inp.shape[1], dtype=bool), s, -np.inf)
    out = merged(softmax(s) @ v)
    return out if dout is None else (out, dout)
'''


def test_what_may_come_with_a_gradient_is_a_forward_pass(read):
    assert read(JOINED).verdict == "right"


METHOD = '''
class Encoder:
    """params: wq, wk, wv, wo of (d, d). tokens_mask (batch, len), 1 = token."""

    def __init__(self, num_heads=2):
        self.num_heads = num_heads

    def __call__(self, params, x, tokens_mask):
        q, k, v = (heads_of(x @ params[n], self.num_heads) for n in ("wq", "wk", "wv"))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        s = np.where(tokens_mask[:, None, None, :], s, -1e9)
        return merged(softmax(s) @ v) @ params["wo"]
'''


def test_a_method_may_take_the_weights(read):
    assert read(METHOD).verdict == "right"
    assert read(METHOD, ("s, -1e9)", "s, 0.0)")).names == ("mask_multiplied",)


# --- caches --------------------------------------------------------------------------------------

TOKEN = '''
def step(q, key_cache, value_cache, pos, n_heads=4, n_kv_heads=2):
    """q (n_heads * head_size,); key_cache, value_cache (seq_len, n_kv_heads * head_size)."""
    size = len(q) // n_heads
    out = np.zeros(len(q))
    for h in range(n_heads):
        own = slice(h * size, (h + 1) * size)
        at = h // (n_heads // n_kv_heads) * size
        s = key_cache[: pos + 1, at : at + size] @ q[own] / np.sqrt(size)
        out[own] = softmax(s) @ value_cache[: pos + 1, at : at + size]
    return out
'''


def test_a_token_with_its_heads_in_one_row(read):
    assert read(TOKEN).verdict == "right"
    found = read(TOKEN, ("h // (n_heads // n_kv_heads)", "h % n_kv_heads"))
    assert found.names == ("key_heads_tiled",)
    assert read(TOKEN, ("key_cache[: pos + 1", "key_cache[: pos + 2")).verdict != "right"


PAGES = '''
def paged(query, key_cache, value_cache, block_tables, context_lens):
    """query (B, H, D); caches (blocks, size, H, D); block_tables (B, blocks of a text)."""
    out = np.zeros_like(query)
    size = key_cache.shape[1]
    for b, length in enumerate(context_lens):
        places = np.arange(int(length))
        block = block_tables[b][places // size]
        k, v = (cache[block, places % size] for cache in (key_cache, value_cache))
        s = np.einsum("hd,khd->hk", query[b], k) / np.sqrt(query.shape[-1])
        out[b] = np.einsum("hk,khd->hd", softmax(s), v)
    return out
'''


def test_a_table_of_pages_that_nothing_reads_is_named(read):
    assert read(PAGES).verdict == "right"
    found = read(PAGES, ("block_tables[b][places // size]", "places // size"))
    assert found.names == ("layer_unused",)
    assert "block_tables" in found.summary


RUNNER = """
class Runner:
    def __init__(self, dim=32, n_heads=4):
        g = np.random.default_rng(1)
        self.n = n_heads
        self.wq, self.wk, self.wv, self.wo = g.normal(0, dim ** -0.5, (4, dim, dim))
        self.key_cache, self.value_cache = np.zeros((2, 80, dim))

    def forward(self, x, pos):
        q = rope(heads_of((self.wq @ x)[None], self.n), [pos])
        k = rope(heads_of((self.wk @ x)[None], self.n), [pos])
        self.key_cache[pos], self.value_cache[pos] = merged(k)[0], self.wv @ x
        k, v = (heads_of(c[: pos + 1], self.n) for c in (self.key_cache, self.value_cache))
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        return self.wo @ merged(softmax(s) @ v)[0]

    def generate(self, xs):
        return np.stack([self.forward(x, p) for p, x in enumerate(xs)])


# of Runner.generate
"""


def test_tokens_that_are_numbered_from_0_in_every_call_need_no_earlier_ones(read):
    assert read(RUNNER).verdict == "right"
    assert read(RUNNER, ("[: pos + 1]", "[: pos + 2]")).verdict != "right"


# --- names ---------------------------------------------------------------------------------------

SIDES = '''
def local(q, k, v, back=3, ahead=1):
    """(T, B, H, C) all; step t attends to t - back … t + ahead, both included."""
    out = np.zeros(v.shape)
    for t in range(len(q)):
        own = slice(max(t - back, 0), t + ahead + 1)
        s = (k[own] * q[t]).sum(-1, keepdims=True) / np.sqrt(q.shape[-1])
        s = np.exp(s - s.max(0))
        out[t] = (s * v[own]).sum(0) / s.sum(0)
    return out
'''


def test_a_window_with_two_sides(read):
    assert read(SIDES).verdict == "right"
    assert read(SIDES, ("(t - back, 0)", "(t - back + 1, 0)")).verdict != "right"


BEFORE = '''
def local(q, k, v, window_size=4):
    """q, k, v (B, H, T, D): a query sees its own window and the previous one, causally."""
    at = np.arange(q.shape[-2])
    own = at // window_size
    keep = (at[:, None] >= at) & (own[:, None] - own <= 1)
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(keep, s, -np.inf)) @ v
'''
TURNED = '''
def turning(q, k, v, causal=True):
    """q, k, v: (B, H, T, D), turned by their positions."""
    q, k = rope(q, range(q.shape[-2])), rope(k, range(k.shape[-2]))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tri(s.shape[-1], dtype=bool), s, -np.inf)
    return softmax(s) @ v
'''


@pytest.mark.parametrize("text", [BEFORE, TURNED])
def test_what_a_text_says_of_windows_and_lengths_is_believed(read, text):
    assert read(text).verdict == "right"
    assert read(text, (" / np.sqrt(q.shape[-1])", "")).names == ("no_scale",)


SHIFTED = '''
def weigh(query, states, lengths, W):
    """query (B, d_q), states (B, T, d_s), lengths (B,), W (d_q, d_s)."""
    s = np.einsum("bq,qs,bts->bt", query, W, states)
    s = np.where(np.arange(states.shape[1]) < lengths[:, None], s, -np.inf)
    return np.einsum("bt,bts->bs", softmax(s), states)
'''


def test_states_beside_a_matrix_are_attended_to(read):
    assert read(SHIFTED).verdict != "mistaken"
    after = ("softmax(s)", "softmax(s0) * (np.arange(states.shape[1]) < lengths[:, None])")
    first = ("    s = np.where(", "    s0 = s\n    s = np.where(")
    assert read(SHIFTED, first, after).names == ("padding_changes_the_output",)


LATER = '''
class Generator:
    """x -> x + attn(norm(x)); decoder only."""

    def __init__(self, d=16, n_head=2):
        g = np.random.default_rng(1)
        self.n_head = n_head
        self.wqkv, self.wo = g.normal(0, d ** -0.5, (d, 3 * d)), g.normal(0, d ** -0.5, (d, d))

    def __call__(self, x):
        q, k, v = (heads_of(a, self.n_head) for a in np.split(layer_norm(x) @ self.wqkv, 3, -1))
        mask = (1 - np.tri(len(x))) * -1e10
        return x + merged(softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]) + mask) @ v) @ self.wo
'''  # noqa: E501


def test_code_that_makes_a_triangle_means_to_be_causal(read):
    assert read(LATER).verdict == "right"
    assert read(LATER, ("-1e10", "-1e-10")).names == ("later_tokens_seen",)


# --- in torch ------------------------------------------------------------------------------------

PIXELS = '''
import torch
from torch import nn


class Pixels(nn.Module):
    """src, pos: (HW, N, d_model); src_key_padding_mask: (N, HW), True = padded."""

    def __init__(self, d_model=32, nhead=4):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, src, src_key_padding_mask=None, pos=None):
        q = k = src if pos is None else src + pos
        out = self.self_attn(q, k, src, key_padding_mask=src_key_padding_mask)[0]
        return self.norm(src + out)
'''
DECODER = '''
import torch
from torch import nn


class Decoder(nn.Module):
    """x (B, T, D), memory (B, S, D), memory_pad (B, S), True = padding."""

    def __init__(self, d_model=16, n_heads=2):
        super().__init__()
        self.own = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.cross = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, memory, memory_pad=None):
        h = self.norm1(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.own(h, h, h, attn_mask=later)[0]
        return x + self.cross(self.norm2(x), memory, memory, key_padding_mask=memory_pad)[0]
'''
BUCKETS = """
import math
import torch
from torch import nn


class T5Attention(nn.Module):
    def __init__(self, d_model=64, d_kv=16, num_heads=4, num_buckets=32, max_distance=128):
        super().__init__()
        self.h, self.n, self.far = num_heads, num_buckets // 2, max_distance
        self.q, self.k, self.v = (nn.Linear(d_model, num_heads * d_kv, bias=False) for _ in "qkv")
        self.o = nn.Linear(num_heads * d_kv, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(T)
        apart = at[None, :] - at[:, None]
        near, size = self.n // 2, apart.abs()
        far = near + (torch.log(size.clamp(min=1) / near) / math.log(self.far / near) * (self.n - near)).long()
        bucket = (apart > 0) * self.n + torch.where(size < near, size, far.clamp(max=self.n - 1))
        s = q @ k.mT + self.relative_attention_bias(bucket).permute(2, 0, 1)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))
"""  # noqa: E501


SCALES = '''
import torch
from torch import nn


class Text(nn.Module):
    """A learned bias for each distance and *no*
    division by sqrt(d_kv); that is in the initialisation.
    """

    def __init__(self, d_model=32, n_heads=4, far=6):
        super().__init__()
        self.h, self.far = n_heads, far
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model, bias=False) for _ in "qkvo")
        self.rel = nn.Embedding(2 * far + 1, n_heads)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        bias = self.rel((at[None] - at[:, None]).clamp(-self.far, self.far) + self.far)
        s = q @ k.mT + bias.permute(2, 0, 1)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))
'''  # noqa: E501
FILE = '''"""Keeps the convention: key_padding_mask (B, S) is True at the keys that are padding."""
import torch
import torch.nn.functional as F
from torch import nn


class Fast(nn.Module):
    def __init__(self, embed_dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(embed_dim, embed_dim) for _ in "qkvo")

    def forward(self, query, key, value, key_padding_mask=None):
        cut = lambda x: x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = cut(self.wq(query)), cut(self.wk(key)), cut(self.wv(value))
        mask = None if key_padding_mask is None else ~key_padding_mask.bool()[:, None, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(out.transpose(1, 2).flatten(2))
'''
WITH_CACHE = '''
import torch
import torch.nn.functional as F
from torch import nn


class OneByOne(nn.Module):
    """A prompt is read without a cache, causally; afterwards tokens are fed one at a time."""

    def __init__(self, n_embd=32, n_head=4):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head = n_head

    def forward(self, x, cache=None):
        cut = lambda t: t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        q, k, v = map(cut, self.c_attn(x).chunk(3, -1))
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=-2), torch.cat([cache[1], v], dim=-2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.c_proj(y.transpose(1, 2).flatten(2)), (k, v)
'''
LUONG = '''
import torch
from torch import nn


class Global(nn.Module):
    """hidden: (batch, 1, hidden), outputs: (batch, src_len, hidden); returns (batch, 1, hidden)"""

    def __init__(self, hidden_size=8):
        super().__init__()
        self.attn = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden, outputs):
        energies = (hidden * self.attn(outputs)).sum(2)
        return (energies.softmax(dim=1)[:, None] @ outputs).tanh()
'''
FEATURES = '''
import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    """Linear attention, causal: queries, keys (N, L, H, E), values (N, L, H, M)."""

    def __init__(self, feature_map=None, eps=1e-6):
        super().__init__()
        self.feature_map = feature_map or (lambda x: F.elu(x) + 1)
        self.eps = eps

    def forward(self, queries, keys, values):
        Q, K = self.feature_map(queries), self.feature_map(keys)
        KV = torch.einsum("nlhe,nlhm->nlhem", K, values).cumsum(1)
        Z = 1 / (torch.einsum("nlhe,nlhe->nlh", Q, K.cumsum(1)) + self.eps)
        return torch.einsum("nlhe,nlhem,nlh->nlhm", Q, KV, Z)
'''


@pytest.mark.needs("torch")
@pytest.mark.parametrize(
    ("text", "old", "new", "name"),
    [
        (PIXELS, "attn(q, k, src,", "attn(q, k, k,", "positions_in_values"),
        (DECODER, ", key_padding_mask=memory_pad", "", "padding_changes_the_output"),
        (
            *(BUCKETS, "at[None, :] - at[:, None]", "at[:, None] - at[None, :]"),
            "relative_bias_reversed",
        ),
        (
            SCALES,
            "*no*\n    division by sqrt(d_kv); that is in the initialisation.",
            "",
            "no_scale",
        ),
        (WITH_CACHE, "is_causal=cache is None", "is_causal=True", "cache_offset_ignored"),
        (FILE, "else ~key", "else key", "mask_inverted"),
        (LUONG, ".softmax(dim=1)[:, None]", "[:, None].softmax(dim=1)", "weights_do_not_add_up"),
        (FEATURES, "K.cumsum(1)", "K.sum(1, True).expand_as(K)", "linear_sum_of_hidden_keys"),
    ],
    ids=[
        *("pixels first", "padding of a memory", "a name in capitals", "words in stars"),
        *("one at a time", "what the file says", "an axis with the name of an argument"),
        "a function of features",
    ],
)
def test_what_names_and_texts_tell(read, text, old, new, name):
    assert read(text).verdict != "mistaken"
    assert read(text, (old, new)).names == (name,)
