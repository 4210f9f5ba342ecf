"""A researcher decodes with a cache, looks at weights later, and merges parts of the keys."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

import regard
from regard import OutputLse, OutputWeights

Singles = NDArray[np.float32]


def parts(query: Singles, key: Singles, value: Singles, size: int) -> OutputLse[Singles]:
    found: list[OutputLse[Singles]] = []
    for start in range(0, key.shape[-2], size):
        piece = slice(start, start + size)
        found.append(regard.attention(query, key[piece], value[piece], return_lse=True))
    return regard.merge([part.output for part in found], [part.lse for part in found])


def entropy(weights: Singles) -> Singles:
    found: Singles = -(weights * np.log(weights)).sum(axis=-1)
    return found


def summary(query: Singles, key: Singles, value: Singles, with_lse: Literal[True, False]) -> str:
    result = regard.attention(query, key, value, return_lse=with_lse)
    return f"{result.lse.max()}" if isinstance(result, OutputLse) else f"{result.dtype}"


rng = np.random.default_rng(0)
query, key, value = (rng.normal(size=(6, 8)).astype(np.float32) for _ in range(3))

whole = regard.attention(query, key, value)
print(np.abs(parts(query, key, value, 4).output - whole).max())
print(summary(query, key, value, True), summary(query, key, value, False))

output, weights, lse = regard.attention(query, key, value, return_weights=True, return_lse=True)
again = regard.weights(query, key, lse, rows=[0, 5])
print(entropy(weights), np.allclose(again, weights[[0, 5]]))

cache = regard.KVCache(capacity=16, window=(4, 0))
for token in range(6):
    cache.append(key[None, token : token + 1], value[None, token : token + 1])
    step = cache.attend(query[None, token : token + 1], return_weights=True, precision="exact")
    print(step.output.shape, step.weights.shape, len(cache), cache.lengths)

layer = regard.MultiHeadAttention(np.eye(8), np.eye(8), np.eye(8), heads=2)
heads: OutputWeights[NDArray[np.float64]] = layer(query, causal=True, return_weights=True)
print(heads.weights.sum(axis=-1).round(6), layer(query).shape)
made = layer.gradients(query, np.ones((6, 8), np.float32), causal=True, wrt=("x", "W_q"))
if made.W_q is not None:
    print(made.W_q.shape)

room = np.empty((6, 8), np.float32)
regard.attention(query, key, value, window=(2, 0), out=room, kernel="reference", threads=1)
both = regard.masks.Causal() & ~regard.masks.Boolean(np.eye(6, dtype=bool))
print(room.shape, regard.attention(query, key, value, mask=both, sink=0.0).dtype)
counts = np.arange(12).reshape(3, 4)
print(regard.attention(counts, counts, counts).dtype)
