"""How the five classroom documents compute attention, put into functions, and the verdicts on them.

What is right is called right; what is fragile is called so, with the input on which it breaks.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "function", [document_000, document_000_on_arrays, document_004], ids=lambda one: one.__name__
)
def test_what_subtracts_no_maximum_is_right_and_fragile(function):
    found = regard.diagnose(function)
    assert found.verdict == "fragile"
    assert "large scores" in found.summary


@pytest.mark.parametrize(
    "function", [document_001, document_002, document_003], ids=lambda one: one.__name__
)
def test_what_subtracts_it_is_right(function):
    assert regard.diagnose(function).verdict == "right"


def test_a_document_that_is_always_causal_says_so():
    found = regard.diagnose(document_004)
    assert "causal attention is meant" in [one.text for one in found.assumptions]
    assert regard.diagnose(document_004, causal=False).verdict == "wrong"
