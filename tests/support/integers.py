"""Attention over int8 rows by dot products of integers: what the target avx512_bf16 computes.

In NumPy. Owns the meaning of its digits, bit for bit, on any machine. Takes exponentials from the
native module; must not know how it cuts a call into tiles.
"""

from __future__ import annotations

import numpy as np

from dots import LOG2_E
from regard.compute import native

LANES = 16
SMALLEST = -126  # the exponent of numbers that are subnormal


def _powers(numbers: np.ndarray, bits: int, room: float) -> np.ndarray:
    """For each row, the power of two that makes integers of `bits` bits of it."""
    most = np.abs(numbers).max(axis=-1, keepdims=True) * np.float32(room)
    return bits - np.maximum(np.frexp(most)[1], SMALLEST)


def _digits(numbers: np.ndarray, powers: np.ndarray, places: int, signed: bool) -> list[np.ndarray]:
    integers = np.rint(np.ldexp(numbers.astype(np.float64), powers)).astype(np.int64)
    if not signed:
        return [integers >> 8 * place & 255 for place in range(places)]
    borrow = 0x808080 >> 8 * (3 - places)
    integers = (integers + borrow) ^ borrow
    return [(integers >> 8 * n).astype(np.int8).astype(np.int64) for n in range(places)]


def _joined(sums: list[np.ndarray], powers: np.ndarray) -> np.ndarray:
    """Sums of digits put together, each step rounded to float32 once."""
    whole = sums[0].astype(np.float32)
    for place, one in enumerate(sums[1:], 1):
        digits = one.astype(np.float32).astype(np.float64)
        whole = (digits * 2 ** (8 * place) + whole).astype(np.float32)
    return np.ldexp(whole, -powers)


def _exponentials(numbers: np.ndarray) -> np.ndarray:
    target = next(one for one, runs in native.targets().items() if runs)
    return np.stack([native.module.exponential(row, target) for row in numbers])


def _sums(weights: np.ndarray) -> np.ndarray:
    """The sum of each row: even and odd vectors of lanes, then halves of lanes."""
    length, size = weights.shape
    padded = np.zeros((length, -(-size // (2 * LANES)), 2, LANES), np.float32)
    padded.reshape(length, -1)[:, :size] = weights
    lanes = np.zeros((length, 2, LANES), np.float32)
    for vectors in padded.swapaxes(0, 1):
        lanes = lanes + vectors
    lanes = lanes[:, 0] + lanes[:, 1]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def attend_in_integers(
    query: np.ndarray,
    key: tuple[np.ndarray, np.ndarray],
    value: tuple[np.ndarray, np.ndarray],
    places: int,
) -> np.ndarray:
    """The output (L, E) of one head, not rounded to a half type.

    The query is float32; at most 256 keys and values are integers (S, D) and scales (S, 1) each; a
    number has so many `places` of 8 bits.
    """
    integers, scales = key[0].astype(np.int64), key[1][:, 0]
    powers = _powers(query, 8 * places - 1, 1.004)
    digits = _digits(query, powers, places, signed=True)
    scores = _joined([one @ integers.T for one in digits], powers) * scales
    unit = np.float32(LOG2_E / np.sqrt(query.shape[1]))
    weights = _exponentials((scores - scores.max(axis=1, keepdims=True)) * unit)
    scaled = weights * value[1][:, 0]
    powers = _powers(scaled, 8 * places, 1 if places == 3 else 1.0001)
    digits = _digits(scaled, powers, places, signed=False)
    output = _joined([one @ value[0].astype(np.int64) for one in digits], powers)
    return output / _sums(weights)
