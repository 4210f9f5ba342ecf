"""Modules and scores as well-known repositories write them: right ones, and each with a mistake."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import regard

torch = pytest.importorskip("torch")
nn = torch.nn


def _names(diagnosis):
    return [one.name for one in diagnosis.mistakes]


def _weights(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# --- objects that are made for one width, or with a scale ---------------------------------------


class OfWidth(nn.Module):
    """The width of queries is an argument of the constructor."""

    def __init__(self, d_k):
        super().__init__()
        self.scale = d_k**-0.5

    def forward(self, q, k, v, mask=None):
        scores = q @ k.transpose(-1, -2) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ v


class OfWidthWrong(OfWidth):
    """Divides by the width."""

    def __init__(self, d_k):
        super().__init__(d_k)
        self.scale = 1 / d_k


class Temperature(nn.Module):
    """The caller gives the root of the width."""

    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v):
        attn = torch.matmul(q / self.temperature, k.transpose(-1, -2))
        return torch.matmul(self.dropout(attn.softmax(-1)), v)


class TemperatureTwice(Temperature):
    """Divides the weights, and not the scores."""

    def forward(self, q, k, v):
        attn = torch.matmul(q, k.transpose(-1, -2)).softmax(-1) / self.temperature
        return torch.matmul(attn, v)


class InNumPy:
    """A plain class with an option beside the width."""

    def __init__(self, dim, causal=False):
        self.dim, self.causal = dim, causal

    def __call__(self, Q, K, V):
        scores = Q @ np.swapaxes(K, -1, -2) / np.sqrt(self.dim)
        if self.causal:
            scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -1e9)
        return _weights(scores) @ V


class CoreAttention(nn.Module):
    """Megatron's order of axes, and names: (sq, b, np, hn)."""

    def __init__(self, hidden_per_head=8, num_heads=4):
        super().__init__()
        self.np, self.norm_factor = num_heads, math.sqrt(hidden_per_head)

    def forward(self, query_layer, key_layer, value_layer):
        """query_layer (sq, b, np, hn), key_layer and value_layer (sk, b, np, hn)"""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        out = (q @ k.transpose(-1, -2) / self.norm_factor).softmax(-1) @ v
        return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("kind", [OfWidth, Temperature, InNumPy, CoreAttention])
def test_an_object_is_made_for_the_width_that_it_gets(kind):
    assert regard.diagnose(kind).verdict in ("right", "fragile")


def test_a_wrong_scale_of_such_an_object_is_named():
    assert _names(regard.diagnose(OfWidthWrong)) == ["scale_by_width"]
    assert regard.diagnose(TemperatureTwice).verdict in ("mistaken", "unknown")


def by_one(q, k, v, sm_scale=1.0):
    return _weights(sm_scale * (q @ k.swapaxes(-1, -2))) @ v


def over_queries(q, k, v, sm_scale=1.0):
    scores = sm_scale * (q @ k.swapaxes(-1, -2))
    return _weights(scores.swapaxes(-1, -2)).swapaxes(-1, -2) @ v


@dataclass(frozen=True)
class Options:
    """The kernel does not scale: callers fold that into q."""

    factor: float = 1.0


def with_options(q, k, v, options=Options()):
    return _weights(options.factor * (q @ k.swapaxes(-1, -2))) @ v


def test_a_scale_of_one_is_the_callers():
    assert regard.diagnose(by_one).verdict in ("right", "fragile")
    assert regard.diagnose(with_options).verdict in ("right", "fragile")
    assert regard.diagnose(over_queries).verdict == "mistaken"


# --- layers in which one token alone asks --------------------------------------------------------


class ClassAttention(nn.Module):
    """The class token reads all tokens, itself among them."""

    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.q, self.k = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def scores(self, q, k):
        return (q * self.scale) @ k.transpose(-2, -1)

    def forward(self, x):
        B, N, C = x.shape
        q = self.q(x[:, 0]).reshape(B, 1, self.num_heads, C // self.num_heads).transpose(1, 2)
        k = self.k(x).reshape(B, N, self.num_heads, C // self.num_heads).transpose(1, 2)
        v = self.v(x).reshape(B, N, self.num_heads, C // self.num_heads).transpose(1, 2)
        out = self.scores(q, k).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(B, 1, C))


class ClassAttentionNoFactor(ClassAttention):
    """The factor is made and never read."""

    def scores(self, q, k):
        return q @ k.transpose(-2, -1)


def last_asks(x, wq, wk, wv, wo, n_heads=4):
    """The last token of each text (B, T, C) alone asks."""
    b, t, c = x.shape
    q = (x[:, -1] @ wq).reshape(b, n_heads, 1, -1)
    k, v = ((x @ w).reshape(b, t, n_heads, -1).swapaxes(1, 2) for w in (wk, wv))
    weights = _weights(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return (weights @ v).reshape(b, c) @ wo


def last_asks_by_model(x, wq, wk, wv, wo, n_heads=4):
    """The same with another root."""
    b, t, c = x.shape
    q = (x[:, -1] @ wq).reshape(b, n_heads, 1, -1)
    k, v = ((x @ w).reshape(b, t, n_heads, -1).swapaxes(1, 2) for w in (wk, wv))
    weights = _weights(q @ k.swapaxes(-1, -2) / np.sqrt(c))
    return (weights @ v).reshape(b, c) @ wo


def test_a_token_that_asks_alone_is_put_in_the_place_of_each():
    assert regard.diagnose(ClassAttention).verdict == "right"
    assert regard.diagnose(last_asks).verdict in ("right", "fragile")
    assert _names(regard.diagnose(ClassAttentionNoFactor)) == ["no_scale"]
    assert _names(regard.diagnose(last_asks_by_model)) == ["scale_by_model_width"]


# --- keys and values that another method makes ---------------------------------------------------


class CrossAttention(nn.Module):
    """A decoder's layer that gets the keys and values of the encoder ready."""

    def __init__(self, d_model=32, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.q_proj, self.k_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.v_proj, self.o_proj = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def split(self, x):
        return x.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)

    def project_kv(self, memory):
        return self.split(self.k_proj(memory)), self.split(self.v_proj(memory))

    def attend(self, x, k, v, width):
        weights = (self.split(self.q_proj(x)) @ k.transpose(-1, -2) / width**0.5).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x, kv):
        k, v = kv
        return self.attend(x, k, v, k.shape[-1])


class CrossAttentionApart(CrossAttention):
    """Gets them as two arguments."""

    def forward(self, x, k, v):
        return self.attend(x, k, v, k.shape[-1])


class CrossAttentionByModel(CrossAttention):
    """Divides by the root of the wrong width."""

    def forward(self, x, kv):
        k, v = kv
        return self.attend(x, k, v, x.shape[-1])


def test_keys_and_values_of_another_method_are_made_of_a_context():
    assert regard.diagnose(CrossAttention).verdict == "right"
    assert regard.diagnose(CrossAttentionApart).verdict == "right"
    assert _names(regard.diagnose(CrossAttentionByModel)) == ["scale_by_model_width"]


# --- a matrix between queries and keys -----------------------------------------------------------


def luong(state, encoder_outputs, W_a, src_len):
    """
    Luong's general score, without a scale as in the paper.

    state: (batch, dec), encoder_outputs: (src_max, batch, enc), W_a: (dec, enc), src_len: (batch,)
    returns context (batch, enc), align (src_max, batch)
    """
    scores = np.einsum("be,sbe->sb", state @ W_a, encoder_outputs)
    scores[np.arange(len(encoder_outputs))[:, None] >= src_len[None, :]] = -np.inf
    align = _weights(scores.T).T
    return np.einsum("sb,sbe->be", align, encoder_outputs), align


def luong_one_more(state, encoder_outputs, W_a, src_len):
    """
    Luong's general score, without a scale as in the paper.

    state: (batch, dec), encoder_outputs: (src_max, batch, enc), W_a: (dec, enc), src_len: (batch,)
    returns context (batch, enc), align (src_max, batch)
    """
    scores = np.einsum("be,sbe->sb", state @ W_a, encoder_outputs)
    scores[np.arange(len(encoder_outputs))[:, None] > src_len[None, :]] = -np.inf
    align = _weights(scores.T).T
    return np.einsum("sb,sbe->be", align, encoder_outputs), align


def luong_transposed(state, encoder_outputs, W_a):
    """
    Luong's general score, without a scale as in the paper.

    state: (batch, dec), encoder_outputs: (src_max, batch, enc), W_a: (dec, enc)
    """
    scores = np.einsum("be,sbe->bs", state @ W_a.T, encoder_outputs)
    return np.einsum("bs,sbe->be", _weights(scores), encoder_outputs)


def test_the_matrix_of_a_general_score_meets_queries_that_are_turned_back():
    assert regard.diagnose(luong).verdict in ("right", "fragile")
    assert _names(regard.diagnose(luong_one_more)) == ["padding_one_key_more"]
    assert regard.diagnose(luong_transposed).verdict == "unknown"


# --- fused columns of groups of heads ------------------------------------------------------------


class Grouped(nn.Module):
    """As in Falcon and InternLM2: for each group its query heads, a key and a value."""

    def __init__(self, hidden_size=32, num_heads=4, num_kv_heads=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim = hidden_size // num_heads
        columns = (num_heads + 2 * num_kv_heads) * self.head_dim
        self.wqkv = nn.Linear(hidden_size, columns, bias=False)
        self.wo = nn.Linear(hidden_size, hidden_size, bias=False)

    def spread(self, k):
        return k.repeat_interleave(self.num_heads // self.num_kv_heads, 1)

    def forward(self, x):
        b, t, _ = x.shape
        group = self.num_heads // self.num_kv_heads
        qkv = self.wqkv(x).view(b, t, self.num_kv_heads, group + 2, self.head_dim)
        q = qkv[..., :group, :].reshape(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k, v = (self.spread(qkv[..., n, :].transpose(1, 2)) for n in (-2, -1))
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(b, t, -1))


class GroupedTiled(Grouped):
    """Spreads keys otherwise."""

    def spread(self, k):
        return k.repeat(1, self.num_heads // self.num_kv_heads, 1, 1)


def test_fused_columns_may_be_those_of_one_group_after_the_other():
    assert regard.diagnose(Grouped).verdict == "right"
    assert _names(regard.diagnose(GroupedTiled)) == ["key_heads_tiled"]


# --- Transformer-XL in a tree of parameters ------------------------------------------------------


def _sines(positions, width):
    angles = np.outer(positions, 10000.0 ** (-np.arange(0.0, width, 2.0) / width))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)


def _rel_shift(x):
    rows, columns = x.shape[:2]
    padded = np.concatenate([np.zeros((rows, 1, *x.shape[2:])), x], axis=1)
    return padded.reshape(columns + 1, rows, *x.shape[2:])[1:].reshape(x.shape)


def transformer_xl(w, p, n_head=2):
    """w: (qlen, bsz, d_model); p: qkv (d_model, 3*d_model), r (d_model, d_model),
    o (d_model, d_model), r_w_bias, r_r_bias (n_head, d_head); positions of Transformer-XL."""
    length, batch, width = w.shape
    d_head = width // n_head
    distances = np.arange(length - 1.0, -1.0, -1.0)
    q, k, v = (
        one.reshape(length, batch, n_head, d_head) for one in np.split(w @ p["qkv"], 3, axis=-1)
    )
    r = (_sines(distances, width) @ p["r"]).reshape(length, n_head, d_head)
    content = np.einsum("ibnd,jbnd->ijbn", q + p["r_w_bias"], k)
    place = _rel_shift(np.einsum("ibnd,jnd->ijbn", q + p["r_r_bias"], r))
    scores = (content + place) / d_head**0.5
    scores = np.where(np.triu(np.ones((length, length)), 1)[:, :, None, None] > 0, -1e30, scores)
    weights = _weights(scores.transpose(2, 3, 0, 1))
    return np.einsum("bnij,jbnd->ibnd", weights, v).reshape(w.shape) @ p["o"]


def transformer_xl_upwards(w, p, n_head=2):
    """w: (qlen, bsz, d_model); p: qkv (d_model, 3*d_model), r (d_model, d_model),
    o (d_model, d_model), r_w_bias, r_r_bias (n_head, d_head); positions of Transformer-XL."""
    length, batch, width = w.shape
    d_head = width // n_head
    distances = np.arange(1.0 * length)
    q, k, v = (
        one.reshape(length, batch, n_head, d_head) for one in np.split(w @ p["qkv"], 3, axis=-1)
    )
    r = (_sines(distances, width) @ p["r"]).reshape(length, n_head, d_head)
    content = np.einsum("ibnd,jbnd->ijbn", q + p["r_w_bias"], k)
    place = _rel_shift(np.einsum("ibnd,jnd->ijbn", q + p["r_r_bias"], r))
    scores = (content + place) / d_head**0.5
    scores = np.where(np.triu(np.ones((length, length)), 1)[:, :, None, None] > 0, -1e30, scores)
    weights = _weights(scores.transpose(2, 3, 0, 1))
    return np.einsum("bnij,jbnd->ibnd", weights, v).reshape(w.shape) @ p["o"]


def test_positions_of_transformer_xl_are_seen_in_a_tree():
    assert regard.diagnose(transformer_xl).verdict in ("right", "fragile")
    assert _names(regard.diagnose(transformer_xl_upwards)) == ["distances_counted_from_the_end"]


# --- a factor of each feature --------------------------------------------------------------------


class PerDimScale(nn.Module):
    """As in lingvo: the softplus of a number for each feature, and the usual factor at 0."""

    over = math.log(2)

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.per_dim_scale = nn.Parameter(torch.zeros(dim // heads))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        softplus = nn.functional.softplus(self.per_dim_scale)
        q = q * softplus / (self.over * q.shape[-1] ** 0.5)
        return self.o_proj(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


class PerDimScaleAlone(PerDimScale):
    """Forgets that the softplus of 0 is not 1."""

    over = 1.0


def test_a_factor_of_each_feature_is_the_usual_one_at_zero():
    assert regard.diagnose(PerDimScale).verdict == "right"
    assert regard.diagnose(PerDimScaleAlone).verdict == "mistaken"
