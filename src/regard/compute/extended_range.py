"""Rows of attention in float64, with logits beyond the range of float64.

The reference computes a row again here if its numbers leave the range of the working dtype, or if
NaN or infinity reaches it. Must not know the textbook's steps.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.request import Request
from regard.textbook.special_values import sum_of_special

if TYPE_CHECKING:
    from numpy.typing import NDArray


# Numbers of any size as pairs, fraction · 2^exponent: finite fractions are below 2^_ROOM.
_Pair = tuple["Array", "Array"]
_ROOM = 1000  # powers of two up to which float64 has room for sums and differences
_NO_EXPONENT = np.zeros((1, 1), np.int64)


def _pair(x: Array, power: Array = _NO_EXPONENT) -> _Pair:
    if not power.any() and not (np.abs(x) > 2.0**_ROOM).any():
        return x, _NO_EXPONENT
    fraction, exponent = np.frexp(np.asarray(x, np.float64))
    return fraction, exponent.astype(np.int64) + power


def _times(fraction: Array, power: Array) -> Array:
    """The nearest float64 to fraction · 2^power; infinite or 0 where it is beyond."""
    if not power.any():
        return fraction
    return np.asarray(np.ldexp(fraction, np.clip(power, -9999, 9999).astype(np.int32)))


def _plus(x: _Pair, y: _Pair) -> _Pair:
    power = np.maximum(*(np.where(one[0] == 0, -(2**40), one[1]) for one in (x, y)))
    power = np.where(power < -_ROOM, 0, power)
    return _pair(_times(x[0], x[1] - power) + _times(y[0], y[1] - power), power)


def _in_reach(x: Array) -> _Pair:
    """Rows divided by powers of two until no number exceeds 2^400, and the exponents."""
    sizes = np.where(np.isfinite(x), np.abs(x), 0).max(axis=-1, keepdims=True, initial=0)
    power = np.maximum(np.frexp(sizes)[1] - 400, 0)
    return _times(x, -power), power


def _base(x: _Pair, seen: NDArray[np.bool_]) -> Array:
    """Powers of two, one per row, by which its largest number has room in float64."""
    fraction, exponent = x
    if not (exponent > _ROOM).any():
        return _NO_EXPONENT
    finite = seen & np.isfinite(fraction) & (fraction != 0)
    above = finite & (fraction > 0)
    # The largest number has the greatest exponent, or the least where none is above 0.
    greatest = np.where(above, exponent, 0).max(axis=-1, keepdims=True)
    least = np.where(finite, exponent, 2**40).min(axis=-1, keepdims=True)
    zero = (seen & (fraction == 0)).any(axis=-1, keepdims=True) | ~finite.any(-1, keepdims=True)
    below = np.where(zero, 0, least)
    power = np.where(above.any(axis=-1, keepdims=True), greatest, below)
    return np.asarray(np.maximum(power - _ROOM, 0))


class HeadInFloat64:
    """Keys and values of one head in float64, prepared once for all of its blocks."""

    def __init__(self, request: Request, batch: tuple[int, ...], head: int) -> None:
        group = head // (request.shape[-3] // request.key.shape[-3])
        self.request, self.batch, self.head = request, batch, head
        self.value = request.value[batch][group].astype(np.float64)
        self.finite_value = np.where(np.isfinite(self.value), self.value, 0)
        self.key, self.key_power = _in_reach(request.key[batch][group].astype(np.float64))

    def _dots(self, rows: NDArray[np.int64]) -> tuple[Array, Array]:
        """Some rows of queries times the keys, and the powers of two that are missing."""
        at = (*self.batch, self.head)
        query, power = _in_reach(self.request.query[at][rows].astype(np.float64))
        return query @ self.key.T, power + self.key_power.T

    def scores(self, rows: NDArray[np.int64]) -> Array:
        """The products of finite queries and keys, beyond float64 as its largest number."""
        dots, power = self._dots(rows)
        most = np.finfo(np.float64).max
        return np.where(np.isfinite(dots), np.clip(_times(dots, power), -most, most), dots)

    def logits(self, rows: NDArray[np.int64]) -> _Pair:
        """The logits of some rows; powers of two bring them into range without rounding."""
        request, at = self.request, (*self.batch, self.head)
        dots, power = self._dots(rows)
        width = request.query.shape[-1]
        scale = (
            request.options.scale
            if request.options.scale is not None
            else 1 / math.sqrt(width or 1)
        )
        own, up = np.frexp(scale)
        x = _pair(dots * own, power + int(up))
        if request.options.softcap is not None:
            own, up = np.frexp(request.options.softcap)
            part = _times(x[0] / own, x[1] - int(up))
            bounded = request.options.softcap * np.tanh(part)
            # A softcap changes a number far below it by less than rounding does.
            small = np.abs(part) < 2.0**-30
            x = np.where(small, x[0], bounded), np.where(small, x[1], 0)
        if request.own_bias is not None:
            bias = request.own_bias[at][rows]
            x = _plus(x, _pair(bias.astype(np.float64)))
        return x


def extended_range_rows(
    own: HeadInFloat64, rows: NDArray[np.int64], seen: NDArray[np.bool_]
) -> dict[str, Array]:
    """Rows of one head in float64, with logits of any size.

    A weight that underflows to 0 is still positive, so an infinite value that is seen makes its
    column infinite.
    """
    sink, keys = own.request.options.sink, len(own.value)
    with np.errstate(all="ignore"):
        fraction, exponent = own.logits(rows)
        if sink is not None:  # one more key, without a value
            last = _pair(np.full((len(rows), 1), sink[(*own.batch, own.head)], np.float64))
            both = np.broadcast_arrays(fraction, exponent), np.broadcast_arrays(*last)
            fraction, exponent = (np.concatenate(x, axis=-1) for x in zip(*both, strict=True))
            seen = np.concatenate([seen, np.ones((len(rows), 1), np.bool_)], axis=-1)
        base = _base((fraction, exponent), seen)
        near = np.where(seen, _times(fraction, exponent - base), -np.inf)
        most = near.max(axis=-1, keepdims=True)
        exponentials = np.exp(_times(near - most, base))
        sums = exponentials.sum(axis=-1, keepdims=True)
        weights = np.where(seen, exponentials / sums, 0)[:, :keys]
        output = weights @ own.finite_value
        if not np.isfinite(output).all():  # no sum of halves overflows
            half, largest = weights @ (own.finite_value / 2), np.finfo(np.float64).max / 2
            halves = np.clip(half, -largest, largest)
            output = np.where(np.isfinite(output), output, halves * 2)
        lost = seen & (fraction == -np.inf)
        output += sum_of_special((seen & ~lost)[:, :keys], lost[:, :keys], own.value)
        lse = (_times(most, base) + np.log(sums))[:, 0]
    return {"output": output, "weights": weights, "lse": lse}
