"""Attention by dot products of pairs of bfloat16, in NumPy: what the target avx512_bf16 computes.

Owns the meaning of one dot instruction, bit for bit, on any machine. Takes exponentials from the
native module; must not know how it cuts a call into tiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calls import BFLOAT16
from regard.compute import native

LEAST = np.float32(2.0**-126)
LANES = 16
LOG2_E = 1.4426950408889634074


def _flushed(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < LEAST, np.copysign(np.float32(0), x), x)


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a·b + c, rounded once to float32; the product of two bfloat16 is exact in float64."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    near = product + c
    rest = near - product
    off = (product - (near - rest)) + (c - rest)
    # Rounded to odd on the way, so that rounding again to float32 is as good as rounding once.
    even = (near.view(np.int64) & 1) == 0
    towards = np.where(off > 0, np.inf, -np.inf)
    near = np.where((off != 0) & even, np.nextafter(near, towards), near)
    return _flushed(near.astype(np.float32))


def dot(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """total + a₁·b₁, then + a₀·b₀, each rounded to float32; pairs along the last axis."""
    total, a, b = (_flushed(np.asarray(x, np.float32)) for x in (total, a, b))
    shape = np.broadcast_shapes(total.shape, a.shape[:-1], b.shape[:-1])
    total = np.broadcast_to(total, shape)
    for part in (1, 0):
        total = _multiply_add(a[..., part], b[..., part], total)
    return total


def _pairs(x: Any, axis: int) -> np.ndarray:
    """Neighbours along an axis as pairs along a last one, the odd end with 0; pairs come first."""
    x = np.moveaxis(np.asarray(x).astype(np.float32), axis, 0)
    if len(x) % 2:
        x = np.concatenate([x, np.zeros_like(x[:1])])
    return np.moveaxis(x.reshape(len(x) // 2, 2, *x.shape[1:]), 1, -1)


def attend_in_pairs(query: Any, key: Any, value: Any) -> np.ndarray:
    """The output (L, E) of one head with at most 256 keys, the default scale and no option."""
    length, size = len(query), len(key)
    scores = np.zeros((length, size), np.float32)
    for q, k in zip(_pairs(query, 1), _pairs(key, 1), strict=True):
        scores = dot(scores, q[:, np.newaxis], k)
    unit = np.float32(LOG2_E / np.sqrt(query.shape[1]))
    below = (scores - scores.max(axis=1, keepdims=True)) * unit
    target = next(one for one, runs in native.targets().items() if runs)
    weights = np.stack([native.module.exponential(row, target) for row in below])
    weights = _pairs(weights.astype(BFLOAT16), 1)  # (⌈S/2⌉, L, 2)
    output = np.zeros((length, value.shape[1]), np.float32)
    for p, v in zip(weights, _pairs(value, 0), strict=True):
        output = dot(output, p[:, np.newaxis], v)
    lanes = np.zeros((length, LANES), np.float32)
    ones = np.ones(2, np.float32)
    for begin in range(0, len(weights), LANES):
        some = weights[begin : begin + LANES].swapaxes(0, 1)
        lanes[:, : some.shape[1]] = dot(lanes[:, : some.shape[1]], some, ones)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return (output / lanes).astype(BFLOAT16)
