"""int8 caches by dot instructions: their meaning, bit for bit, and which calls they answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from bounds import INTEGERS, SHORT_INTEGERS, assert_within, error_bounds
from calls import BFLOAT16, TARGETS, assert_same_bytes, inputs, numbers, on_path
from integers import attend_in_integers
from oracle import attend
from regard.compute.quantized import parts, quantized

pytestmark = [pytest.mark.needs("fused")]

WHOLE = "avx512_bf16"
needs_dots = pytest.mark.skipif(WHOLE not in TARGETS, reason="this CPU has no AVX512-VNNI")

BFLOAT = pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.needs("ml_dtypes"))
DTYPES = [np.float32, np.float16, BFLOAT]

# L, S, D, E: few rows and tiles, odd ends, more than a vector of columns, all keys of a chunk.
SIZES = [(1, 1, 1, 1), (2, 31, 7, 3), (1, 77, 64, 64), (5, 33, 8, 48), (13, 256, 40, 20)]
SIZES += [(3, 200, 129, 65), (4, 255, 96, 130), (30, 64, 16, 16)]


def cache_of(key: np.ndarray, value: np.ndarray) -> regard.KVCache:
    cache = regard.KVCache(dtype="int8")
    cache.append(key, value)
    return cache


def answer(target: str, cache: regard.KVCache, query: np.ndarray, **options: Any) -> Any:
    with on_path(f"fused:{target}") as kernel:
        return cache.attend(query, causal=False, kernel=kernel, **options)


def rows_of_all_sizes(length: int, width: int, seed: int) -> np.ndarray:
    """Normal numbers, rows and columns of very different size."""
    rng = np.random.default_rng(seed)
    sizes = 2.0 ** rng.integers(-9, 2, size=(length, 1)) * 2.0 ** rng.integers(-12, 1, size=width)
    return (rng.normal(size=(length, width)) * sizes).astype(np.float32)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_emulation_in_integers_is_within_the_bound_and_has_the_bytes_of_the_target(sizes, dtype):
    rows, keys, width, columns = sizes
    how, places = (INTEGERS, 3) if dtype == np.float32 else (SHORT_INTEGERS, 2)
    q = numbers((rows, width), seed=width) * 3
    k, v = (rows_of_all_sizes(keys, n, seed=n) for n in (width, columns))
    q[0, ::3] *= 2.0**-20  # far below the largest of its row
    q = q.astype(dtype)
    cache = cache_of(k, v)
    wide = q.astype(np.float32)
    emulated = attend_in_integers(wide, parts(quantized(k)), parts(quantized(v)), places)
    exact = attend(wide, cache.keys, cache.values)
    bound = error_bounds(wide, cache.keys, cache.values, exact, dtype=np.float32, arithmetic=how)
    assert_within(emulated, exact.output, bound.output)
    if WHOLE in TARGETS:
        emulated = emulated.astype(dtype)
        assert_same_bytes(answer(WHOLE, cache, q), emulated)
        assert_same_bytes(answer(WHOLE, cache, q[-1:]), emulated[-1:], "a row alone")


@needs_dots
def test_only_float32_throughout_has_the_bytes_of_float32():
    q, k, v = inputs((30, 24), (300, 24), (300, 40))
    cache = cache_of(k, v)
    high, elsewhere = answer(WHOLE, cache, q, precision="high"), answer("avx512", cache, q)
    assert_same_bytes(high, elsewhere)
    assert answer(WHOLE, cache, q).tobytes() != high.tobytes()


@needs_dots
@pytest.mark.parametrize("rows", [1, 30])
def test_what_is_far_from_one_is_as_exact(rows):
    q, k, v = (x.astype(np.float64) for x in inputs((rows, 24), (300, 24), (300, 40)))
    near = answer(WHOLE, cache_of(k, v), q.astype(np.float32))
    for power in (-120, 100):
        far = answer(WHOLE, cache_of(np.ldexp(k, -power), v), np.ldexp(q, power).astype(np.float32))
        assert_same_bytes(far, near, str(power))
    large = answer(WHOLE, cache_of(k, np.ldexp(v, 100)), q.astype(np.float32))
    assert_same_bytes(large, np.ldexp(near, 100))
    none = answer(WHOLE, cache_of(k, v), np.zeros((1, 24), np.float32))
    mean = cache_of(k, v).values.mean(axis=0, keepdims=True)
    np.testing.assert_allclose(none, mean, atol=1e-6)


@needs_dots
@pytest.mark.parametrize("rows", [1, 30])
def test_a_hidden_nan_meets_no_weight_and_a_seen_one_reaches_its_row(rows):
    q, k, v = inputs((rows, 24), (301, 24), (301, 40))
    mask = np.random.default_rng(3).random((rows, 301)) < 0.5
    mask[:, [6, 9, 300]] = False
    clean = answer(WHOLE, cache_of(k, v), q, mask=mask)
    v[[6, 9, 300]] = np.nan
    k[9] = np.inf
    assert_same_bytes(answer(WHOLE, cache_of(k, v), q, mask=mask), clean)
    mask[0, 300] = True
    seen = answer(WHOLE, cache_of(k, v), q, mask=mask)
    assert np.isnan(seen[0]).all()
    assert_same_bytes(seen[1:], clean[1:])
    q[0, 3] = np.nan
    assert np.isnan(answer(WHOLE, cache_of(k[:5], v[:5]), q)[0]).all()
