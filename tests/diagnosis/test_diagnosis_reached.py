"""Code whose weights, keys or results lie elsewhere: in a class, a smaller map, another tuple."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from tests.support.wrong_attentions import plain_softmax as softmax

import regard
from regard.diagnosis.reading.documented import length_of_any
from regard.diagnosis.process.target import load


def names(thing):
    return [one.name for one in regard.diagnose(thing).mistakes]


def verdict(thing):
    return regard.diagnose(thing).verdict


# --- weights -------------------------------------------------------------------------------------


class OfParameters:
    """params: "query", "key", "value", "out", each {"weight": (out, in), "bias": (out,)}."""

    def __init__(self, params, num_heads=4):
        self.p = params
        self.num_heads = num_heads

    def _dense(self, name, x):
        return x @ self.p[name]["weight"].T + self.p[name]["bias"]

    def weights(self, scores):
        return softmax(scores)

    def __call__(self, x):
        length, dim = x.shape
        q, k, v = (
            self._dense(name, x).reshape(length, self.num_heads, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        out = self.weights(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])) @ v
        return self._dense("out", out.swapaxes(0, 1).reshape(length, dim))


class OverEverything(OfParameters):
    """params: "query", "key", "value", "out", each {"weight": (out, in), "bias": (out,)}."""

    def __init__(self, params, num_heads=4):
        self.p = params
        self.num_heads = num_heads

    def weights(self, scores):
        large = np.exp(scores - scores.max(-1, keepdims=True))
        return large / large.sum((1, 2), keepdims=True)


class OfStateDict:
    """sd: "q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.weight", "out_proj.bias".

    Weights are (out, in), and only the last has a bias. Causal, without 1/sqrt(d).
    """

    def __init__(self, sd, num_heads, max_positions=64):
        self.sd, self.num_heads = sd, num_heads
        self.bias = np.tril(np.ones((max_positions, max_positions), dtype=bool))

    def _heads(self, x, name):
        y = x @ self.sd[name + ".weight"].T
        return y.reshape(*y.shape[:-1], self.num_heads, -1).swapaxes(-2, -3)

    def __call__(self, hidden_states):
        q, k, v = (self._heads(hidden_states, w) for w in ("q_proj", "k_proj", "v_proj"))
        seen = self.bias[: q.shape[-2], : q.shape[-2]]
        out = softmax(np.where(seen, q @ k.swapaxes(-1, -2), -1e9)) @ v
        out = out.swapaxes(-2, -3).reshape(hidden_states.shape)
        return out @ self.sd["out_proj.weight"].T + self.sd["out_proj.bias"]


def test_a_class_that_gets_its_weights_is_called_with_some():
    found = regard.diagnose(OfParameters)
    assert found.verdict == "right"
    assert "W_k" in found.called
    assert "b_v" in found.called
    assert names(OverEverything) == ["softmax_over_everything"]
    unscaled = regard.diagnose(OfStateDict)
    assert unscaled.verdict == "right"
    assert "unscaled" in unscaled.summary


class Weights(NamedTuple):
    q: np.ndarray  # (heads, dim, d)
    k: np.ndarray  # (heads, dim, d)
    v: np.ndarray  # (heads, dim, d)
    o: np.ndarray  # (heads, d, dim)


def one_head(wq, wk, wv, wo, x):
    scores = (x @ wq) @ (x @ wk).swapaxes(-1, -2) / np.sqrt(wq.shape[1])
    return softmax(scores) @ (x @ wv) @ wo


def heads_added(params, x):
    """x: (batch, time, dim). Heads are added up after their own output matrix."""
    return sum(one_head(*(one[h] for one in params), x) for h in range(len(params.q)))


def test_a_tree_without_an_annotation_has_the_class_of_its_file():
    assert verdict(heads_added) == "right"


def fused_in_one(x, params, n_heads):
    """x: (B, T, C). params: dict with 'in_w' (C, 3C), 'in_b' (3C,), 'out_w', 'out_b'."""
    B, T, C = x.shape
    qkv = x @ params["in_w"] + params["in_b"]
    q, k, v = (
        a.reshape(B, T, n_heads, C // n_heads).transpose(0, 2, 1, 3)
        for a in np.split(qkv, 3, axis=-1)
    )
    weights = softmax(q @ k.swapaxes(-1, -2) * (C // n_heads) ** -0.5)
    out = (weights.swapaxes(-1, -2) @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
    return out @ params["out_w"] + params["out_b"]


def test_the_bias_beside_a_fused_weight_has_its_columns():
    assert names(fused_in_one) == ["weights_transposed"]


def buckets(distance, num_buckets):
    half = num_buckets // 2
    return (distance > 0) * half + np.minimum(np.abs(distance), half - 1)


def of_buckets(x, wq, wk, wv, wo, rel_bias, mask=None, num_heads=4):
    """x: (B, T, d_model); wq, wk, wv: (d_model, num_heads * d_kv); wo: (num_heads * d_kv, d_model);
    rel_bias: (num_buckets, num_heads); mask: optional (B, T), 1 = token, 0 = padding.
    T5 has no 1/sqrt(d_kv).
    """
    B, T, _ = x.shape
    q, k, v = ((x @ w).reshape(B, T, num_heads, -1).transpose(0, 2, 1, 3) for w in (wq, wk, wv))
    place = np.arange(T)
    bias = rel_bias[buckets(place[None, :] - place[:, None], rel_bias.shape[0])].transpose(2, 0, 1)
    scores = q @ k.swapaxes(-1, -2) + bias
    if mask is not None:
        scores = scores + (1.0 - mask[:, None, None, :]) * -1e9
    return (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(B, T, -1) @ wo


def test_a_table_of_buckets_gets_the_shape_that_is_said():
    found = regard.diagnose(of_buckets)
    assert found.verdict == "right"
    assert "by the distance" in found.summary


def never_filled(x, W_q, W_k, W_v, cache, pos):
    """x: (n, d), the tokens from pos on; causal. cache: keys and values, (longest, d) each."""
    (n, d), (keys, values) = x.shape, cache
    keys = keys.copy()
    keys[pos : pos + n] = x @ W_k
    np.put_along_axis(values.copy(), np.arange(pos, pos + n)[:, None], x @ W_v, axis=0)
    scores = x @ W_q @ keys.T / np.sqrt(d)
    seen = np.arange(len(keys)) <= pos + np.arange(n)[:, None]
    return softmax(np.where(seen, scores, -1e9)) @ values, (keys, values)


def test_values_that_never_reach_a_cache_are_named():
    assert names(never_filled) == ["cache_never_filled"]


# --- what is around ------------------------------------------------------------------------------


class Block:
    """y = x + MHA(LN(x)), pre-norm."""

    def __init__(self, d_model=24, n_heads=4, seed=0):
        rng = np.random.default_rng(seed)
        size = n_heads, d_model, d_model // n_heads
        self.W_Q, self.W_K, self.W_V = rng.normal(size=(3, *size))
        self.W_O = rng.normal(size=(n_heads, d_model // n_heads, d_model))

    def __call__(self, x):
        resid = x  # (batch, pos, d_model)
        h = layer_norm(x)[:, None]
        q, k, v = h @ self.W_Q, h @ self.W_K, h @ self.W_V
        z = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return resid + np.einsum("bnqh,nhd->bqd", z, self.W_O)


def layer_norm(x, eps=1e-5):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


class BlockOfNormalised(Block):
    """y = x + MHA(LN(x)), pre-norm."""

    def __call__(self, x):
        x = layer_norm(x)
        resid = x
        q, k, v = (x[:, None] @ w for w in (self.W_Q, self.W_K, self.W_V))
        z = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v
        return resid + np.einsum("bnqh,nhd->bqd", z, self.W_O)


def test_a_block_that_says_so_adds_its_input():
    assert verdict(Block) == "right"
    assert names(BlockOfNormalised) == ["normalised_input_added"]


@pytest.mark.needs("torch")
def test_a_normalised_input_that_a_module_adds_is_named():
    from torch import nn

    class PreNorm(nn.Module):
        """Pre-LN residual attention block: y = x + Attn(LN(x))."""

        def __init__(self, dim=12, heads=3):
            super().__init__()
            self.norm = nn.LayerNorm(dim)
            self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)

        def forward(self, x):
            h = self.norm(x)
            out, _ = self.attn(h, h, h, need_weights=False)
            return h + out

    assert names(PreNorm) == ["normalised_input_added"]


def attentional_state(dec, enc, Wa, Wc, src_mask):
    """Luong's 'general' score, h_t^T Wa h_s, without a scale.

    dec (B, T, H), enc (B, S, H), Wa (H, H), Wc (2H, H), src_mask (B, S) with 1 for words.
    """
    score = np.where(src_mask[:, None, :] == 1, dec @ Wa @ enc.transpose(0, 2, 1), -1e9)
    align = softmax(score)
    return np.tanh(np.concatenate([align @ enc, dec], axis=-1) @ Wc), align


def attentional_state_transposed(dec, enc, Wa, Wc):
    """dec (B, T, H), enc (B, T, H), Wa (H, H), Wc (H, 2H); h_t^T Wa h_s, without a scale."""
    align = softmax(dec @ Wa @ enc.transpose(0, 2, 1))
    context = align.swapaxes(-1, -2) @ enc
    return np.tanh(np.concatenate([dec, context], axis=-1) @ Wc.T)


def test_a_projection_of_the_output_beside_the_queries_is_taken_back():
    found = regard.diagnose(attentional_state)
    assert found.verdict == "right"
    assert "unscaled" in found.summary
    assert names(attentional_state_transposed) == ["weights_transposed"]


LAYERS = """
import math
import torch
import torch.nn.functional as F
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("speeds", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))

    def forward(self, x, seq_dim=-2):
        angles = torch.outer(torch.arange(x.shape[seq_dim]).to(self.speeds), self.speeds)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class OfTokens(nn.Module):
    turned_first = False

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.rotary = Rotary(dim // heads)
        self.to_qkv, self.to_out = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1) for t in self.to_qkv(x).chunk(3, dim=-1))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = self.rotary(q), self.rotary(k)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class OfHeads(OfTokens):
    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1) for t in self.to_qkv(x).chunk(3, dim=-1))
        q, k = self.rotary(q), self.rotary(k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class OfContext(nn.Module):
    def __init__(self, dim=24, heads=3, dim_head=8):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_k = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_v = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Named(nn.Module):
    def __init__(self, d=32, nhead=4):
        super().__init__()
        self.nhead = nhead
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        B, T, D = x.shape
        v, k, q = self.in_proj(x).view(B, T, 3, self.nhead, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, D))
"""


@pytest.mark.needs("torch")
def test_rotary_angles_of_heads_have_no_effect(tmp_path):
    (path := tmp_path / "layers.py").write_text(LAYERS)
    assert verdict(load(f"{path}:OfTokens")) == "right"
    assert names(load(f"{path}:OfHeads")) == ["positions_unused"]


@pytest.mark.needs("torch")
def test_a_context_is_asked_for_as_long_as_what_asks(tmp_path):
    (path := tmp_path / "layers.py").write_text(LAYERS)
    (found,) = regard.diagnose(load(f"{path}:OfContext")).mistakes
    assert "self.to_v(context)" in found.title


@pytest.mark.needs("torch")
def test_columns_have_the_order_of_the_code_unless_the_layer_is_pretrained(tmp_path):
    (path := tmp_path / "layers.py").write_text(LAYERS)
    assert verdict(load(f"{path}:Named")) == "right"
    said = "nn.Linear(d, d)  # the rows of a pretrained layer"
    (other := tmp_path / "other.py").write_text(LAYERS.replace("nn.Linear(d, d)", said))
    assert names(load(f"{other}:Named")) == ["W_q_and_W_v_swapped"]


def dense(p, x):
    return x @ p["w"] + p["b"]


def norm(p, x):
    scale = 1 / np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return (x - x.mean(-1, keepdims=True)) * scale * p["g"] + p["b"]


def attention(p, x, heads, merge):
    b, n, c = x.shape
    q, k, v = dense(p["qkv"], x).reshape(b, n, 3, heads, -1).transpose(2, 0, 3, 1, 4)
    y = softmax(q @ k.swapaxes(-1, -2) * (c // heads) ** -0.5) @ v
    return dense(p["out"], merge(y).reshape(b, n, c))


def block(p, x, heads=4):
    """x: (batch, tokens, dim)."""
    x = x + attention(p, norm(p["ln1"], x), heads, lambda y: y.swapaxes(1, 2))
    h = np.maximum(dense(p["fc1"], norm(p["ln2"], x)), 0)
    return x + dense(p["fc2"], h)


def block_of_reshaped(p, x, heads=4):
    """x: (batch, tokens, dim)."""
    x = x + attention(p, norm(p["ln1"], x), heads, lambda y: y)
    h = np.maximum(dense(p["fc1"], norm(p["ln2"], x)), 0)
    return x + dense(p["fc2"], h)


def test_layers_in_a_tree_are_those_that_helpers_read():
    assert verdict(block) == "right"
    assert names(block_of_reshaped) == ["heads_merged_without_transpose"]


# --- smaller maps --------------------------------------------------------------------------------


@pytest.mark.needs("torch")
def test_keys_of_a_smaller_map_are_those_that_a_convolution_makes():
    import torch
    from torch import nn

    class Reduced(nn.Module):
        def __init__(self, hidden_size=32, num_attention_heads=4, sr_ratio=2):
            super().__init__()
            self.heads = num_attention_heads
            self.query = nn.Linear(hidden_size, hidden_size)
            self.key = nn.Linear(hidden_size, hidden_size)
            self.value = nn.Linear(hidden_size, hidden_size)
            self.sr = nn.Conv2d(hidden_size, hidden_size, sr_ratio, sr_ratio)
            self.layer_norm = nn.LayerNorm(hidden_size)

        def split(self, x):
            return x.view(*x.shape[:-1], self.heads, -1).permute(0, 2, 1, 3)

        def map_of(self, x, height, width):
            return x.permute(0, 2, 1).reshape(x.shape[0], x.shape[2], height, width)

        def forward(self, hidden_states, height, width):
            q = self.split(self.query(hidden_states))
            small = self.sr(self.map_of(hidden_states, height, width))
            small = self.layer_norm(small.flatten(2).permute(0, 2, 1))
            k, v = self.split(self.key(small)), self.split(self.value(small))
            weights = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1)
            return (weights @ v).permute(0, 2, 1, 3).flatten(2)

    class Reshaped(Reduced):
        def map_of(self, x, height, width):
            return x.reshape(x.shape[0], x.shape[2], height, width)

    found = regard.diagnose(Reduced)
    assert found.verdict == "right"
    assert any("sr" in one.text for one in found.findings if one.name == "left_out")
    assert names(Reshaped) == ["map_reshaped"]


# --- results, scales, lengths --------------------------------------------------------------------


def with_gradients(x, Wq, Wk, Wv, dout, turned=True):
    """x: (T, D); Wq, Wk, Wv: (D, H); dout: (T, H). Returns out, (dx, dWq, dWk, dWv)."""
    q, k, v = x @ Wq, x @ Wk, x @ Wv
    scale = 1.0 / np.sqrt(q.shape[1])
    a = softmax(scale * q @ k.T)
    da = dout @ v.T
    ds = scale * a * (da - (a * da).sum(axis=1, keepdims=True))
    dq, dk, dv = ds @ k, (ds.T if turned else ds) @ q, a.T @ dout
    dx = dq @ Wq.T + dk @ Wk.T + dv @ Wv.T
    return a @ v, (dx, x.T @ dq, x.T @ dk, x.T @ dv)


def not_turned(x, Wq, Wk, Wv, dout):
    """x: (T, D); Wq, Wk, Wv: (D, H); dout: (T, H). Returns out, (dx, dWq, dWk, dWv)."""
    out, (dx, dWq, dWk, dWv) = with_gradients(x, Wq, Wk, Wv, dout, turned=False)
    return out, (dx, dWq, dWk, dWv)


def test_gradients_in_a_tuple_beside_the_output_are_read():
    assert verdict(with_gradients) == "right"
    assert names(not_turned) == ["gradient_of_keys_not_transposed"]


class Tempered:
    """mask: True at the places to hide."""

    def __init__(self, temperature=4.0):
        self.temperature = temperature

    def __call__(self, q, k, v, mask=None):
        return softmax(q @ k.swapaxes(-1, -2) / self.temperature) @ v


def test_a_class_gets_the_temperature_of_each_width():
    assert names(Tempered) == ["mask_ignored"]


def of_one_length(q, k, v, causal=False):
    """q, k, v: (..., T, d) with the same T."""
    length = q.shape[-2]
    scores = q @ k[..., :length, :].swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    return softmax(scores) @ v[..., :length, :]


def test_lengths_that_are_said_to_be_the_same_are_the_same():
    assert length_of_any("q: (..., T, d), k: (..., S, d)", "k") == "S"
    assert verdict(of_one_length) == "right"


class Sliding:
    """A token attends to itself and to the window - 1 tokens before it."""

    more = 0

    def __init__(self, n_heads=2, window=4):
        self.n_heads, self.window = n_heads, window

    def __call__(self, q, k, v):
        """q, k, v: (B, T, C), projected already."""
        B, T, C = q.shape
        q, k, v = (a.reshape(B, T, self.n_heads, -1).transpose(0, 2, 1, 3) for a in (q, k, v))
        row, key = np.arange(T)[:, None], np.arange(T)
        seen = (key <= row) & (row - key < self.window + self.more)
        scores = np.where(seen, q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5, -np.inf)
        return (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(B, T, C)


class SlidingOneMore(Sliding):
    """A token attends to itself and to the window - 1 tokens before it."""

    more = 1


def test_packed_heads_are_asked_for_more_tokens_than_a_window_has():
    assert verdict(Sliding) == "right"
    assert names(SlidingOneMore) == ["window_one_long"]


def running(q, k, v, chunk=16):
    """q: (b, q_len, d); k, v: (b, kv_len, d), kv_len a multiple of chunk."""
    count = k.shape[1] // chunk
    largest = np.full((*q.shape[:2], 1), -1e30)
    total, out = np.zeros_like(largest), np.zeros((*q.shape[:2], v.shape[-1]))
    parts = (a.reshape(a.shape[0], count, chunk, -1).swapaxes(0, 1) for a in (k, v))
    for kc, vc in zip(*parts, strict=True):
        s = q @ kc.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        new_max = np.maximum(largest, s.max(-1, keepdims=True))
        e, correction = np.exp(s - new_max), np.exp(largest - new_max)
        out, total, largest = out * correction + e @ vc, total + e.sum(-1, keepdims=True), new_max
    return out / total


def test_one_block_does_not_hide_what_several_do():
    assert names(running) == ["blocks_change_the_output"]


@pytest.mark.parametrize("axes", [(-2, -1), None])
def test_sums_over_several_axes_are_named_whatever_maximum_is_subtracted(axes):
    def f(q, k, v):
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        large = np.exp(scores - scores.max(-1, keepdims=True))
        return large / large.sum(axes, keepdims=True) @ v

    assert names(f) == ["softmax_over_everything"]
