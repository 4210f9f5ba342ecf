"""2^x of the native kernel for given numbers, and how far it is off."""

from __future__ import annotations

import numpy as np

MOST_ULPS = 1.0
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def exponential(x: np.ndarray, target: str) -> np.ndarray:
    from regard import _fused

    return _fused.exponential(np.ascontiguousarray(x, np.float32), target)


def ulps_off(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How many units in the last place, those of the exact result, `y` is away from 2^x."""
    exact = np.exp2(x.astype(np.float64))
    unit = np.maximum(np.exp2(np.frexp(exact)[1] - 24.0), SMALLEST)
    return abs(y.astype(np.float64) - exact) / unit
