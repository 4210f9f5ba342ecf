"""Rows of 8-bit integers with one scale each: the rows of an int8 cache.

A row is D integers and, in the four bytes after them, the float32 by which each is multiplied. The
native kernel reads the same layout. Must not know what the rows are for.
"""

from __future__ import annotations

import numpy as np

from regard.boundary.arrays import Array

_SCALE_BYTES = 4

_MOST = 127
# A scale has 17 binary digits, so that its product with an integer of 7 is exact in float32, and is
# a normal number, so that it has all of them.
_KEPT_BITS = np.uint32(0xFFFFFF80)
_LEAST_SCALE = np.finfo(np.float32).tiny


def quantized(array: Array) -> Array:
    """Floats (…, D) as rows (…, D + 4); rows with a NaN or an infinity get the scale NaN."""
    numbers = array if array.dtype == np.float64 else array.astype(np.float32)
    most = np.abs(numbers).max(axis=-1, keepdims=True, initial=0)
    with np.errstate(all="ignore"):
        scale = (most / _MOST).astype(np.float32)
        scale = np.maximum((scale.view(np.uint32) & _KEPT_BITS).view(np.float32), _LEAST_SCALE)
        finite = np.isfinite(most)
        nearest = np.where(finite, np.rint(numbers / scale), 0)
    return joined(nearest, np.where(finite, scale, np.float32(np.nan)))


def joined(integers: Array, scale: Array) -> Array:
    """Rows of integers (…, D) and scales (…, 1)."""
    rows = np.empty((*integers.shape[:-1], integers.shape[-1] + _SCALE_BYTES), np.int8)
    rows[..., :-_SCALE_BYTES] = integers
    rows[..., -_SCALE_BYTES:] = scale.astype("=f4").view(np.int8)
    return rows


def parts(rows: Array) -> tuple[Array, Array]:
    """Views of the integers (…, D) and the scales (…, 1) of rows."""
    scale: Array = rows[..., -_SCALE_BYTES:].view(np.float32)
    return rows[..., :-_SCALE_BYTES], scale


def whole_rows(integers: Array) -> Array:
    """The rows whose integers are given, as `parts` returned them."""
    shape = (*integers.shape[:-1], integers.shape[-1] + _SCALE_BYTES)
    return np.lib.stride_tricks.as_strided(integers, shape, integers.strides, writeable=False)


def floats(rows: Array) -> Array:
    """The numbers that rows hold, as float32: each exactly its integer times the scale."""
    integers, scale = parts(rows)
    with np.errstate(all="ignore"):  # there may be anything beyond a cache's last token
        product: Array = np.multiply(integers, scale, dtype=np.float32)
    return product
