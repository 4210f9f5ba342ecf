"""Keras' AdditiveAttention and `regard.scores.Additive`: the same weights from the same numbers."""

from __future__ import annotations

import numpy as np
import pytest

import regard
from calls import numbers
from regard.scores import Additive

pytestmark = [
    pytest.mark.needs("keras", "torch"),
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning"),  # Keras' own
]


@pytest.fixture
def keras(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    return pytest.importorskip("keras")


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_additive_attention_is_that_of_keras(keras, use_scale, masked, causal):
    query, key, value = (
        numbers(s, seed=n) for n, s in enumerate(((2, 4, 6), (2, 5, 6), (2, 5, 3)))
    )
    layer = keras.layers.AdditiveAttention(use_scale=use_scale)
    layer.build([query.shape, value.shape, key.shape])
    factors = numbers((6,), seed=3) if use_scale else np.ones(6, np.float32)
    if use_scale:
        layer.scale.assign(factors)
    keep = numbers((2, 5), seed=4) > -0.5 if masked else None
    if keep is not None:
        keep[:, 0] = True  # a row without keys gets the mean of all values in Keras, 0 here
    output, weights = layer(
        [query, value, key],
        mask=None if keep is None else [None, keep],
        return_attention_scores=True,
        use_causal_mask=causal,
    )
    # Keras takes queries and keys that are multiplied with matrices already.
    found = regard.attention(
        *(x[:, None] for x in (query, key, value)),
        score=Additive(np.eye(6), np.eye(6), factors),
        mask=None if keep is None else keep[:, None, None],
        causal=causal,
        offset=0,
        return_weights=True,
    )
    for own, theirs in ((found.output, output), (found.weights, weights)):
        np.testing.assert_allclose(own[:, 0], keras.ops.convert_to_numpy(theirs), 1e-5, 1e-6)
