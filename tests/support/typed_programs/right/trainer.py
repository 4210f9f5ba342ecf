"""Gradient descent by hand, on queries, keys and values, and on the weights of a layer."""

import numpy as np
from numpy.typing import NDArray

import regard


def train(steps: int, rate: float) -> list[float]:
    """The loss before each step."""
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(3, 1, 4, 8))
    wanted = rng.normal(size=(1, 4, 8))
    losses: list[float] = []
    for _ in range(steps):
        result = regard.attention(query, key, value, return_lse=True)
        error: NDArray[np.float64] = result.output - wanted
        losses.append(float((error**2).mean()))
        made = regard.gradients(
            query, key, value, 2 * error / error.size, output=result.output, lse=result.lse
        )
        query = query - rate * made.query
        key = key - rate * made.key
        value = value - rate * made.value
    return losses


losses = train(20, 0.5)
assert losses[-1] < losses[0] / 2
print(round(losses[0], 3), round(losses[-1], 3))

layer = regard.MultiHeadAttention(np.eye(4), np.eye(4), np.eye(4), heads=2)
x = np.random.default_rng(0).normal(size=(3, 4))
slopes = layer.gradients(x, np.ones((3, 4)))
print((layer.W_q - 0.1 * slopes.W_q).shape, (x - 0.1 * slopes.x).shape)
some = regard.gradients(x, x, x, x, wrt=("query", "scale"))
assert some.query is not None
assert some.key is None
print(some.query.shape, some.scale)
