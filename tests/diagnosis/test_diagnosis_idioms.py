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
