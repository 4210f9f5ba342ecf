"""How the five classroom documents compute attention, put into functions, and the verdicts on them.

What is right is called right; what is fragile is called so, with the input on which it breaks.
"""

from __future__ import annotations

import math

import numpy as np

import regard


def document_000(X, W_q, W_k, W_v):
    Q, K, V = X @ W_q, X @ W_k, X @ W_v
    scores = np.dot(Q, K.T)
    scaled = scores / np.sqrt(K.shape[1])
    e = np.exp(scaled)
    return (e / e.sum(axis=1, keepdims=True)) @ V


def document_000_on_arrays(Q, K, V):
    e = np.exp(np.dot(Q, K.T) / np.sqrt(K.shape[1]))
    return (e / e.sum(axis=1, keepdims=True)) @ V


def shifted_softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def document_001(Q, K, V):
    weights = shifted_softmax(np.dot(Q, K.T) / np.sqrt(Q.shape[-1]))
    return np.dot(weights, V), weights


def document_002(query, keys, values):
    scores = query @ keys.T / np.sqrt(query.shape[-1])
    e = np.exp(scores - np.max(scores, axis=-1, keepdims=True))  # as scipy's softmax does
    return e / np.sum(e, axis=-1, keepdims=True) @ values


def document_003(X, W_q, W_k, W_v):
    Q, K, V = X @ W_q, X @ W_k, X @ W_v
    return shifted_softmax(Q @ K.T / np.sqrt(Q.shape[1])) @ V


def document_004(q, k, v):
    n = len(q)
    scaled = np.matmul(q, k.T) / math.sqrt(q.shape[1])
    mask = np.tril(np.ones((n, n)))
    mask[mask == 0] = -np.inf
    x = scaled + mask
    weights = (np.exp(x).T / np.sum(np.exp(x), axis=-1)).T
    return np.matmul(weights, v)


def names(found):
    return {one.name for one in found.fragilities if one.severity == "fragile"}


def test_000_is_right():
    found = regard.diagnose(document_000)
    assert found.ok
    assert found.mistakes == ()


def test_000_overflows_on_large_scores():
    found = regard.diagnose(document_000_on_arrays)
    assert found.verdict == "fragile"
    assert names(found) == {"no_maximum_subtracted"}
    assert "large scores" in found.fragilities[0].breaks_on


def test_001_is_right_and_returns_its_weights():
    found = regard.diagnose(document_001)
    assert found.verdict == "right"
    assert "returns output, weights" in found.called


def test_002_is_right_for_one_query_and_for_several():
    found = regard.diagnose(document_002)
    assert found.verdict == "right"
    assert "(D,)" in found.called
    assert "(L, D)" in found.called


def test_003_is_right():
    assert regard.diagnose(document_003).verdict == "right"


def test_004_is_right_and_always_causal():
    found = regard.diagnose(document_004)
    assert found.ok
    assert "always causal" in found.called
    assert found.mistakes == ()


def test_004_overflows_one_earlier_because_it_adds_1_to_visible_scores():
    found = regard.diagnose(document_004)
    assert found.verdict == "fragile"
    assert names(found) == {"no_maximum_subtracted_and_one_added"}
    assert "edge of exp" in found.fragilities[0].breaks_on
