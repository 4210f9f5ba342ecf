"""bfloat16 by dot instructions: their meaning, bit for bit, and which calls they answer."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import regard
from bounds import PAIRS, assert_within, error_bounds
from calls import BFLOAT16, TARGETS, assert_same_bytes, inputs, numbers, on_path
from dots import attend_in_pairs, dot
from oracle import attend

pytestmark = [pytest.mark.needs("fused"), pytest.mark.needs("ml_dtypes")]

PAIRED = "avx512_bf16"
needs_dots = pytest.mark.skipif(PAIRED not in TARGETS, reason="this CPU has no AVX512-BF16")

# L, S, D, E: rows for a tile and for none, odd ends, more than a panel, all keys of a chunk.
SIZES = [(1, 1, 1, 1), (2, 31, 7, 3), (1, 77, 64, 16), (30, 33, 8, 48), (13, 256, 40, 20)]
SIZES += [(23, 200, 33, 65), (4, 255, 96, 32), (200, 64, 16, 16)]


def answer(target: str, *arrays: Any, **options: Any) -> Any:
    with on_path(f"fused:{target}") as kernel:
        return regard.attention(*arrays, kernel=kernel, **options)


def test_a_dot_adds_the_odd_product_first_and_keeps_no_subnormal_number():
    one, tiny = np.float32(1), np.float32(2.0**-130)
    pair = np.array([2.0**-24, 1.0], np.float32)
    # Odd first: 0 + 1, then + 2⁻²⁴, a tie that goes to 1. Even first it would be more.
    assert dot(np.float32(2.0**-24), pair, np.ones(2, np.float32)) == one
    assert dot(np.float32(0), np.array([tiny, tiny]), np.full(2, 2.0**100, np.float32)) == 0
    assert dot(tiny, np.zeros(2, np.float32), np.zeros(2, np.float32)) == 0
    small = np.full(2, 2.0**-70, np.float32)
    assert dot(np.float32(0), small, small) == 0


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_an_emulation_of_the_dot_is_within_the_bound_and_has_the_bytes_of_the_target(sizes):
    rows, keys, width, values = sizes
    q, k, v = inputs((rows, width), (keys, width), (keys, values), dtype=BFLOAT16, seed=width)
    emulated = attend_in_pairs(q, k, v)
    exact = attend(q, k, v)
    bound = error_bounds(q, k, v, exact, dtype=BFLOAT16, arithmetic=PAIRS)
    assert_within(emulated, exact.output, bound.output)
    if PAIRED in TARGETS:
        assert_same_bytes(answer(PAIRED, q, k, v), emulated)
        assert_same_bytes(answer(PAIRED, q[-1:], k, v), emulated[-1:], "a row alone")


@needs_dots
@pytest.mark.parametrize(
    "options",
    [{"precision": "high"}, {"scale": 2e6}, {"scale": -2e6}, {"out": "float32"}],
    ids=lambda options: "-".join(f"{name}={x}" for name, x in options.items()),
)
def test_what_asks_for_the_arithmetic_of_float32_has_its_bytes(options):
    q, k, v = inputs((2, 30, 24), (2, 300, 24), (2, 300, 40), dtype=BFLOAT16, size=1e-2)
    options = dict(options)
    got = []
    for target in (PAIRED, "avx512"):
        if "out" in options:
            options["out"] = np.empty((2, 30, 40), np.float32)
        got.append(answer(target, q, k, v, **options).copy())
    assert_same_bytes(*got)


@needs_dots
def test_only_calls_that_are_bfloat16_throughout_are_answered_by_dots():
    q, k, v = inputs((2, 30, 24), (2, 300, 24), (2, 300, 40), dtype=BFLOAT16)
    assert answer(PAIRED, q, k, v).tobytes() != answer("avx512", q, k, v).tobytes()
    for dtype in (np.float16, np.float32):
        arrays = [x.astype(dtype) for x in (q, k, v)]
        assert_same_bytes(answer(PAIRED, *arrays), answer("avx512", *arrays), str(dtype))
    mixed = (q, k, v.astype(np.float32))
    assert_same_bytes(answer(PAIRED, *mixed), answer("avx512", *mixed), "mixed")


@needs_dots
@pytest.mark.parametrize("rows", [1, 30])
def test_equal_values_come_out_as_they_are_and_lse_is_that_of_unrounded_weights(rows):
    q, k = inputs((rows, 24), (700, 24), dtype=BFLOAT16)
    v = np.full((700, 5), 0.3).astype(BFLOAT16)
    for sink in (None, -2.0):
        result = answer(PAIRED, q, k, v, sink=sink, return_lse=True, return_weights=True)
        high = answer(
            PAIRED, q, k, v, sink=sink, return_lse=True, return_weights=True, precision="high"
        )
        if sink is None:
            np.testing.assert_array_equal(result.output, v[:rows])
        np.testing.assert_allclose(result.lse, high.lse, rtol=2e-6)
        np.testing.assert_allclose(
            result.weights.astype(float), high.weights.astype(float), rtol=2.0**-7
        )


@needs_dots
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_hidden_value_never_meets_its_neighbour_in_the_pair(rows, bad):
    q, k, v = inputs((rows, 24), (301, 24), (301, 40), dtype=BFLOAT16)
    mask = np.random.default_rng(3).random((rows, 301)) < 0.5
    mask[:, [6, 9, 300]] = False
    mask[:, [7, 8, 299]] = True
    clean = answer(PAIRED, q, k, v, mask=mask)
    v[[6, 9, 300]] = bad
    assert_same_bytes(answer(PAIRED, q, k, v, mask=mask), clean)


@needs_dots
def test_a_strided_or_odd_array_has_the_bytes_of_a_copy():
    base = [numbers((2, n, 130), BFLOAT16, n) for n in (30, 40, 41)]
    views = (base[0][:, :, :66:2], base[1][:, :, 1:67:2], base[2][:, :40, 3:83:2])
    for threads, rows, place in itertools.product((1, 2), (30, 1), (np.asarray, three_bytes_apart)):
        q, k, v = map(place, views)
        q = q[:, :rows]
        copies = [np.ascontiguousarray(x) for x in (q, k, v)]
        assert_same_bytes(
            answer(PAIRED, q, k, v, threads=threads), answer(PAIRED, *copies, threads=1)
        )


def three_bytes_apart(array):
    packed = np.empty(array.shape, [("number", BFLOAT16), ("rest", np.uint8)])
    packed["number"] = array
    return packed["number"]
