"""Attentions in the idioms of well-known projects, each in words of its own: all are right."""

from __future__ import annotations

import math

import numpy as np


def softmax(s):
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def llama_eager(query, key, value, attention_mask, scaling):
    """Key heads repeated in place, an additive mask, weights returned too."""
    shared = query.shape[1] // key.shape[1]
    key, value = (np.repeat(one, shared, axis=1) for one in (key, value))
    weights = query @ key.swapaxes(2, 3) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = softmax(weights)
    return weights @ value, weights


def nanogpt_slow(q, k, v):
    length = q.shape[-2]
    att = (q @ k.swapaxes(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    att = np.where(np.tril(np.ones((length, length))) == 0, -np.inf, att)
    return softmax(att) @ v


def t5_unscaled(query, key, value, position_bias=None):
    """T5 does not scale: its scale is part of the weights before."""
    scores = query @ key.swapaxes(-1, -2)
    return softmax(scores if position_bias is None else scores + position_bias) @ value


def vit(q, k, v):
    q = q * q.shape[-1] ** -0.5
    return softmax(q @ k.swapaxes(-2, -1)) @ v


def swin_window(q, k, v, relative_position_bias):
    attn = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-2, -1)
    return softmax(attn + relative_position_bias) @ v


def mistral_window(q, k, v, sliding_window=3):
    rows = np.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]
    keys = np.arange(k.shape[-2])[None]
    seen = (keys <= rows) & (keys > rows - sliding_window)
    return softmax(np.where(seen, q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]), -np.inf)) @ v


def gpt_oss_sinks(query, key, value, sinks):
    """A sink beside the scores of each head takes part in the softmax, and is left out after it."""
    scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    own = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return softmax(np.concatenate([scores, own], axis=-1))[..., :-1] @ value


def gemma_softcap(query, key, value, softcap=5.0):
    scores = query @ key.swapaxes(-1, -2) * query.shape[-1] ** -0.5
    return softmax(np.tanh(scores / softcap) * softcap) @ value


def bert(query_layer, key_layer, value_layer, attention_mask=None):
    scores = query_layer @ key_layer.swapaxes(-1, -2) / math.sqrt(query_layer.shape[-1])
    if attention_mask is not None:
        scores = scores + attention_mask
    return softmax(scores) @ value_layer


def whisper(q, k, v, mask=None):
    """Queries and keys are each scaled by D^-1/4."""
    scale = q.shape[-1] ** -0.25
    qk = (q * scale) @ (k * scale).swapaxes(-1, -2)
    if mask is not None:
        qk = qk + mask
    return softmax(qk) @ v


def annotated_transformer(query, key, value, mask=None):
    scores = query @ key.swapaxes(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ value, weights


def d2l_valid_lens(queries, keys, values, valid_lens=None):
    scores = queries @ keys.swapaxes(1, 2) / math.sqrt(queries.shape[-1])
    if valid_lens is not None:
        hidden = np.arange(keys.shape[1])[None, None] >= np.asarray(valid_lens)[:, None, None]
        scores = np.where(hidden, -1e6, scores)
    return softmax(scores) @ values


def flash_tutorial(Q, K, V, block=2):
    out, total = np.zeros((*Q.shape[:-1], V.shape[-1])), np.zeros((*Q.shape[:-1], 1))
    top = np.full((*Q.shape[:-1], 1), -np.inf)
    for start in range(0, K.shape[-2], block):
        part = slice(start, start + block)
        s = Q @ K[..., part, :].swapaxes(-1, -2) / np.sqrt(Q.shape[-1])
        new = np.maximum(top, s.max(-1, keepdims=True))
        p, fade = np.exp(s - new), np.exp(top - new)
        total = total * fade + p.sum(-1, keepdims=True)
        out = out * fade + p @ V[..., part, :]
        top = new
    return out / total


def keras_einsum(query, value, key=None, attention_mask=None):
    """(B, L, H, D); a missing key is the value, and a mask is 1 where a query may attend."""
    key = value if key is None else key
    scores = np.einsum("aecd,abcd->acbe", key, query / math.sqrt(query.shape[-1]))
    if attention_mask is not None:
        scores = scores + (1.0 - attention_mask) * -1e9
    return np.einsum("acbe,aecd->abcd", softmax(scores), value)


def flax_dot_product(query, key, value, bias=None, mask=None):
    weights = np.einsum("...qhd,...khd->...hqk", query / np.sqrt(query.shape[-1]), key)
    if bias is not None:
        weights = weights + bias
    if mask is not None:
        weights = np.where(mask, weights, np.finfo(weights.dtype).min)
    return np.einsum("...hqk,...khd->...qhd", softmax(weights), value)


def x_transformers(q, k, v, mask=None, causal=False):
    sim = np.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
    low = -np.finfo(sim.dtype).max
    if mask is not None:
        sim = np.where(mask, sim, low)
    if causal:
        i, j = sim.shape[-2:]
        sim = np.where(np.triu(np.ones((i, j), bool), j - i + 1), low, sim)
    return np.einsum("bhij,bhjd->bhid", softmax(sim), v)


NUMPY = (llama_eager, nanogpt_slow, vit, swin_window, mistral_window)
NUMPY += (gpt_oss_sinks, gemma_softcap, bert, whisper, annotated_transformer, d2l_valid_lens)
NUMPY += (flash_tutorial, keras_einsum, flax_dot_product, x_transformers)
