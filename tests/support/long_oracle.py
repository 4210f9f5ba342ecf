"""Attention on whole arrays in long double: an oracle fast enough for a million calls an hour.

Shares no code with the library. `oracle.py` is the simpler and slower one; a test compares both.
Who sees whom is an array here; `attack_calls.py` makes it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from oracle import Answer

LONG = np.longdouble
# A long double with fewer digits could not tell whether a float64 is within its bound.
ENOUGH = np.finfo(LONG).nmant >= 63


def attend_long(
    query: Any,
    key: Any,
    value: Any,
    visible: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Any = None,
    sink: Any = None,
) -> Answer:
    """Attention with heads, of finite numbers; `visible` is (…, H, L, S) and has all leading axes.

    Each number is rounded to float64 once, at the end.
    """
    query, key, value = (np.asarray(x).astype(np.float64).astype(LONG) for x in (query, key, value))
    heads, width = query.shape[-3], query.shape[-1]
    repeats = heads // key.shape[-3] if heads else 1
    key, value = (np.repeat(x, repeats, axis=-3)[..., :heads, :, :] for x in (key, value))
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0
    logits = np.einsum("...id,...jd->...ij", query, key) * LONG(scale)
    if softcap is not None:
        logits = LONG(softcap) * np.tanh(logits / LONG(softcap))
    if bias is not None:
        logits = logits + np.where(visible, np.asarray(bias).astype(LONG), LONG(0))
    logits = np.where(visible, logits, -LONG(np.inf))
    maximum = logits.max(axis=-1, initial=-LONG(np.inf))
    if sink is not None:
        sinks = np.broadcast_to(np.asarray(sink).astype(np.float64).astype(LONG), (heads,))
        sinks = np.broadcast_to(sinks[:, np.newaxis], maximum.shape)
        maximum = np.maximum(maximum, sinks)
    empty = ~visible.any(axis=-1)
    with np.errstate(all="ignore"):
        base = np.where(np.isfinite(maximum), maximum, LONG(0))
        powers = np.exp(logits - base[..., np.newaxis])
        row_sum = powers.sum(axis=-1)
        if sink is not None:
            row_sum = row_sum + np.exp(sinks - base)
        weights = powers / np.where(empty, LONG(1), row_sum)[..., np.newaxis]
        lse = base + np.log(row_sum)
        output = np.einsum("...ij,...jd->...id", weights, value)
        float64 = (x.astype(np.float64) for x in (output, weights, lse, logits))
        output, weights, lse, logits = float64
    return Answer(output, weights, lse, visible, logits)
