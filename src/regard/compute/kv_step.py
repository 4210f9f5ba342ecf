"""One more token of each text: turned, appended and attended to in one go.

Owns the usual call of a model that writes, and nothing that `KVCache` does not do too: what is not
plain is its `append` and `attend`. Must not know models.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute import native
from regard.compute.kv_buffers import plain_rows
from regard.compute.kv_cache import KVCache
from regard.compute.options import BY_POSITION, Options
from regard.compute.positioned import turn_rows
from regard.positions import Rotary
from regard.rules import rotary


def step(cache: KVCache, query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Append keys and values (…, G, T, D) and attend by the queries of the same tokens.

    The bytes are those of `append` and `attend`.
    """
    one = None
    if query.shape[-2] == 1 and not options.keys() - {"scale"}:
        one = _plain(cache, query, key, value, options.get("scale"))
    if one is not None:
        return one
    cache.append(key, value)
    output: Array = cache.attend(query, **options)
    return output


def _plain(
    cache: KVCache, query: Array, key: Array, value: Array, scale: float | None
) -> Array | None:
    buffers, end, positions = cache._buffers, cache._end, cache._positions
    rows = plain_rows(buffers, key, value)
    if rows is None or buffers is None or not isinstance(end, int) or cache._window is not None:
        return None
    keys, values = buffers
    if end >= keys.shape[-2] or query.dtype != keys.dtype or query.ndim != keys.ndim:
        return None
    if isinstance(positions, Rotary):
        own = cache._frequencies
        if own is None or query.shape[-1] != cache._turns or key.shape[-1] != cache._turns:
            return None
        angles = rotary.table(own, positions.factor, range(end, end + 1))
        turned = np.empty(query.shape, query.dtype), np.empty(key.shape, key.dtype)
        sides = [(query, turned[0], *angles), (key, turned[1], *angles)]
        turn_rows(sides, interleaved=positions.interleaved)
        query, key = turned
    elif positions is not None:
        return None
    keys[..., end : end + 1, :] = key
    values[..., end : end + 1, :] = value
    held = keys[..., : end + 1, :], values[..., : end + 1, :]
    call = Options(causal=False, scale=scale)[:BY_POSITION]
    output: Array | None = native.fast_path(query, *held, *call)
    if output is not None:  # else nothing has happened that `append` does not do again
        cache._end = end + 1
    return output
