"""The values of activation functions and of their slopes, in float32 and float64.

Must not know models, nor which steps there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from regard.boundary.arrays import Array

# Error bound of `gelu` in unit roundoffs of |x·Φ(x)|, where that is a normal number. (The usual
# formula 0.5·x·(1 + erf(x/√2)) cancels for x < 0 and loses all digits.)
GELU_ROUNDOFFS = 8

# Numbers per chunk: three arrays of this size fit the L2 cache.
_CHUNK = 2**15
# Beyond this, exp(−x²/2) is 0 in float64 too.
_FAR = 40.0


def gelu(x: Array) -> Array:
    """x·Φ(x) in float32 or float64, within `GELU_ROUNDOFFS`; Φ is the normal distribution function.

    References
    ----------
    Hendrycks, Gimpel, "Gaussian Error Linear Units" (2016). The tail follows the idea of Shepherd
    and Laframboise, "Chebyshev approximation of (1 + 2x)exp(x²)erfc x" (1981).

    Examples
    --------
    >>> gelu(np.array([-1.0, 0.0, 2.0])).round(6)
    array([-0.158655,  0.      ,  1.9545  ])
    """
    return _in_chunks(_gelu, x)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of `gelu`: x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))/2."""

    def chunk(x: Array, out: Array) -> None:
        np.multiply(x, x, out=out)
        out *= x.dtype.type(0.044715)
        out += 1
        out *= x
        out *= x.dtype.type(math.sqrt(2 / math.pi))
        np.tanh(out, out=out)
        out += 1
        out *= x
        out *= x.dtype.type(0.5)

    return _in_chunks(chunk, x)


def silu(x: Array) -> Array:
    """x/(1 + exp(−x)), also called swish."""

    def chunk(x: Array, out: Array) -> None:
        np.negative(x, out=out)
        np.exp(out, out=out)
        out += 1
        np.divide(x, out, out=out)

    return _in_chunks(chunk, x)


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


def gelu_slope(x: Array) -> Array:
    """Φ(x) + x·φ(x), where φ is the density of the normal distribution."""
    share = np.where(x == 0, 0.5, gelu(x) / np.where(x == 0, 1, x))
    return np.asarray(share + x * np.exp(-np.square(x) / 2) / math.sqrt(2 * math.pi))


def gelu_tanh_slope(x: Array) -> Array:
    """The slope of `gelu_tanh`."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    steep = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return np.asarray((1 + np.tanh(inner)) / 2 + x * steep / (2 * np.square(np.cosh(inner))))


def silu_slope(x: Array) -> Array:
    """σ(x)·(1 + x·(1 − σ(x))), where σ(x) = 1/(1 + exp(−x))."""
    share = 1 / (1 + np.exp(-x))
    return np.asarray(share * (1 + x * (1 - share)))


def _in_chunks(function: Callable[[Array, Array], None], x: Array) -> Array:
    out = np.empty(x.shape, x.dtype)
    with np.errstate(all="ignore"):
        if x.size <= _CHUNK:
            function(x, out)
            return out
        flat, made = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            function(flat[start : start + _CHUNK], made[start : start + _CHUNK])
    return out


# x·Φ(x) = max(x, 0) − |x|·Q(|x|), where Q(t) = erfc(t/√2)/2 = exp(−t²/2)·P(s)/(t + 4) with
# s = (t − 4)/(t + 4). P is smooth on −1 ≤ s ≤ 1 (all t ≥ 0). These are its Chebyshev coefficients,
# computed with 40 decimals. The omitted ones add less than a quarter of a unit roundoff of P, which
# is at least 0.398.
_TAIL = (
    0.9704512045660766,
    -0.7517088168395706,
    0.22219355567525104,
    -0.048517753260446085,
    0.006925920496242481,
    -0.00032059847439814995,
    -0.00010054739163210679,
    1.8903369019706965e-05,
    1.010356885474631e-06,
    -6.145334749397824e-07,
    -3.3810201200691756e-09,
    2.0686508061742833e-08,
    -1.1282603632469507e-10,
    -7.774015228388695e-10,
    -9.941424191404708e-12,
    3.174482949858303e-11,
    1.842480684470494e-12,
    -1.3128616466710965e-12,
    -1.7415362652654813e-13,
    4.9072740317044244e-14,
    1.2931384326165576e-14,
    -1.2180663521726341e-15,
    -8.052147372620933e-16,
    -2.8604941442616213e-17,
    4.057064424335354e-17,
    7.006400772814596e-18,
)
_POWERS = {
    np.dtype(np.float32): np.polynomial.chebyshev.cheb2poly(_TAIL[:12]).astype(np.float32),
    np.dtype(np.float64): np.polynomial.chebyshev.cheb2poly(_TAIL),
}


def _gelu(x: Array, out: Array) -> None:
    number = x.dtype.type
    *powers, last = _POWERS[x.dtype]
    t = np.minimum(np.abs(x), number(_FAR))
    reciprocal = t + 4
    np.reciprocal(reciprocal, out=reciprocal)
    s = t - 4
    s *= reciprocal
    tail = s * last
    tail += powers.pop()
    for power in reversed(powers):
        tail *= s
        tail += power
    tail *= reciprocal
    tail *= t
    # exp(−t²/2) as exp(−h²/2)·exp(−(t − h)(t + h)/2): h has few digits, so h² is exact.
    h = t * 16
    np.rint(h, out=h)
    h *= number(1 / 16)
    np.subtract(t, h, out=s)
    t += h
    s *= t
    s *= number(-0.5)
    tail *= np.exp(s, out=s)
    h *= h
    h *= number(-0.5)
    tail *= np.exp(h, out=h)
    np.maximum(x, 0, out=out)
    out -= tail
