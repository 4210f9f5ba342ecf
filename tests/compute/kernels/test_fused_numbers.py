"""NaN of every bit pattern, and whatever else only bits can tell, in the fused kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    BFLOAT16,
    arithmetic_of,
    assert_same_bytes,
    check,
    check_result,
    every_target,
    inputs,
    numbers,
    on_path,
    path_of,
    recording,
    run,
)
from oracle import Answer

pytestmark = pytest.mark.needs("fused")

# Quiet and signalling, of either sign, with payloads that reach the lowest bit or do not.
NANS: dict[str, list[int]] = {
    "float16": [0x7E00, 0x7FFF, 0xFFFF, 0x7C01, 0xFC01, 0x7EAA],
    "bfloat16": [0x7FC0, 0x7FFF, 0xFFFF, 0x7F81, 0xFF81, 0x7FAA],
    "float32": [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF800001, 0x7FAAAAAA, 0x7FC00040],
    "float64": [
        0x7FF8 << 48,
        2**63 - 1,
        2**64 - 1,
        (0x7FF << 52) + 1,
        (0xFFF << 52) + 1,
        (0x7FF << 52) + 0x0AAAAAAAAAAAA,
        (0x7FF8 << 48) + (1 << 11),
    ],
}
TYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64)]
if BFLOAT16 is not None:
    TYPES.append(BFLOAT16)


def with_bits(x: np.ndarray, place: tuple[int, ...], bits: int) -> np.ndarray:
    x = x.copy()
    x.view(f"u{x.dtype.itemsize}")[place] = bits
    return x


@every_target
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [3, 40, 300])
def test_a_nan_is_never_hidden_whatever_its_bits(target, dtype, size):
    q, k, v = inputs((2, 4), (size, 4), (size, 3), dtype=dtype)
    with on_path(f"fused:{target}") as kernel:
        clean = run(kernel, q, k, v)
        for bits in NANS[dtype.name]:
            what = f"{bits:#x} in "
            result = run(kernel, with_bits(q, (1, 2), bits), k, v)
            assert np.isnan(result.output[1].astype(float)).all(), what + "query"
            assert np.isnan(result.weights[1].astype(float)).all(), what + "query"
            assert np.isnan(result.lse[1]), what + "query"
            assert_same_bytes(result.output[0], clean.output[0], what + "query")
            result = run(kernel, q, with_bits(k, (size - 1, 2), bits), v)
            assert np.isnan(result.output.astype(float)).all(), what + "key"
            assert np.isnan(result.lse).all(), what + "key"
            result = run(kernel, q, k, with_bits(v, (size - 1, 1), bits))
            assert np.isnan(result.output[:, 1].astype(float)).all(), what + "value"
            assert_same_bytes(result.output[:, ::2], clean.output[:, ::2], what + "value")


@every_target
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64)], ids=str)
def test_a_nan_in_a_plain_call_is_never_hidden_whatever_its_bits(target, dtype):
    q, k, v = inputs((2, 40, 8), (2, 40, 8), (2, 40, 8), dtype=dtype)
    with on_path(f"fused:{target}"):
        for bits in NANS[dtype.name]:
            result = regard.attention(q, with_bits(k, (0, 7, 2), bits), v)
            assert np.isnan(result[0]).all(), f"{bits:#x}"
            assert np.isfinite(result[1]).all(), f"{bits:#x}"


@every_target
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_nan_in_a_bias_is_never_hidden_whatever_its_bits(target, dtype):
    q, k, v = inputs((2, 4), (40, 4), (40, 3))
    with on_path(f"fused:{target}") as kernel:
        for bits in NANS[dtype.name]:
            bias = with_bits(np.zeros((2, 40), dtype), (1, 17), bits)
            result = run(kernel, q, k, v, bias=bias)
            assert np.isnan(result.output[1]).all(), f"{bits:#x}"
            assert np.isfinite(result.output[0]).all(), f"{bits:#x}"


@every_target
def test_a_nan_under_a_softcap_is_never_hidden_whatever_its_bits(target):
    q, k, v = inputs((2, 4), (40, 4), (40, 3))
    with on_path(f"fused:{target}") as kernel:
        for bits in NANS["float32"]:
            result = run(kernel, q, with_bits(k, (17, 1), bits), v, softcap=2.0)
            assert np.isnan(result.output).all(), f"{bits:#x}"


@every_target
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [1, 3, 7, 33, 250, 257, 1000])
def test_an_output_is_the_nearest_number_to_its_quotient(target, dtype, keys):
    # Equal scores, and one value that is not 0: the sum of the values is that number, and the
    # divisor the number of keys. Numbers lie all over the range, but for those that are subnormal.
    about = np.finfo(dtype)
    rng = np.random.default_rng(keys)
    value = np.zeros((keys, 4096), dtype)
    powers = rng.integers(about.minexp, about.maxexp, value.shape[1])
    number = np.ldexp(rng.uniform(1, 2, powers.shape).astype(dtype), powers)
    value[keys // 2] = number
    query, key = np.ones((1, 4), dtype), np.zeros((keys, 4), dtype)
    with on_path(f"fused:{target}") as kernel:
        output = regard.attention(query, key, value, kernel=kernel)
    assert_same_bytes(output[0], number / dtype(keys))


@every_target
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_hidden_bits_of_every_pattern_change_no_byte(target, dtype):
    q, k, v = inputs((3, 4), (300, 4), (300, 3), dtype=dtype)
    mask = np.ones((3, 300), bool)
    mask[:, ::7] = False
    mask[:, 256:] = False
    with on_path(f"fused:{target}") as kernel:
        clean = run(kernel, q, k, v, mask=mask)
        for bits in (*NANS[dtype.name], 0, 1, 2 ** (8 * dtype.itemsize - 1)):
            poisoned = []
            for x in (k, v):
                x = x.copy()
                x.view(f"u{dtype.itemsize}")[~mask[0]] = bits
                poisoned.append(x)
            result = run(kernel, q, *poisoned, mask=mask)
            for name in ("output", "weights", "lse"):
                assert_same_bytes(getattr(result, name), getattr(clean, name), f"{bits:#x}, {name}")


@every_target
@pytest.mark.parametrize("dtype", [t for t in TYPES if t.itemsize == 2], ids=str)
def test_every_half_number_goes_in_and_comes_out_as_it_is(target, dtype):
    # One key: the output is its value, through both conversions.
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    q, k = np.zeros((1, 1), dtype), np.zeros((1, 1), dtype)
    with on_path(f"fused:{target}") as kernel:
        result = regard.attention(q, k, every[np.newaxis])[0]
        least = arithmetic_of(kernel, q, k, every).least
    with np.errstate(invalid="ignore"):
        numbers_ = every.astype(np.float32)
        numbers_[np.abs(numbers_) < least] = 0  # dot instructions keep no subnormal number
        nan = np.isnan(numbers_)
        np.testing.assert_array_equal(np.isnan(result.astype(np.float32)), nan)
        np.testing.assert_array_equal(result.astype(np.float32)[~nan], numbers_[~nan])


@every_target
@pytest.mark.parametrize("dtype", [t for t in TYPES if t.itemsize == 2], ids=str)
def test_halves_between_two_numbers_are_rounded_to_the_nearest_even(target, dtype):
    # Two equal keys: the output is the mean of their values, a tie in every second case.
    step = np.arange(2**16, dtype=np.uint16)
    low = step[np.isfinite(step.view(dtype).astype(np.float32))]
    high = (low + 1).view(dtype)
    fits = np.isfinite(high.astype(np.float32)) & (low != 0x7FFF)
    low, high = low.view(dtype)[fits], high[fits]
    q, k = np.zeros((1, 1), dtype), np.zeros((2, 1), dtype)
    value = np.stack([low, high])
    with on_path(f"fused:{target}") as kernel:
        result = regard.attention(q, k, value, kernel=kernel)[0]
        least = arithmetic_of(kernel, q, k, value).least
    seen = value.astype(np.float64)
    mean = np.where(np.abs(seen) < least, 0.0, seen).mean(axis=0).astype(np.float32)  # exact
    np.testing.assert_array_equal(result.astype(np.float32), mean.astype(dtype).astype(np.float32))


@every_target
@pytest.mark.parametrize("rows", [1, 40])  # taken as they are; packed
def test_weights_below_the_smallest_normal_number_of_float32_are_zero(target, rows):
    # Weights of 2^-127 in float32, of 2^-1039 in float64, which some CPUs are slow to make.
    keys = 300
    for dtype, logit, power in ((np.float32, -88, 100), (np.float64, -720, 1000)):
        q, k = np.ones((rows, 1), dtype), np.full((keys, 1), logit, dtype)
        v = np.full((keys, 2), dtype(2.0) ** power)
        k[7] = v[7] = 0
        with on_path(f"fused:{target}") as kernel:
            result, _ = check(kernel, q, k, v, scale=1.0)
            flushed = bool(dtype is np.float32 and arithmetic_of(kernel, q, k, v).flushed)
            grads = regard.gradients(q, k, v, np.ones((rows, 2), dtype), scale=1.0)
        others = np.delete(result.weights, 7, axis=1)
        np.testing.assert_array_equal(others == 0, flushed)
        np.testing.assert_array_equal(result.output == 0, flushed)
        np.testing.assert_array_equal(np.delete(grads.value, 7, axis=0) == 0, flushed)


def small_values(dtype: Any, keys: int) -> np.ndarray:
    """Columns of ordinary numbers, of ever smaller ones, of zeros, of small numbers and zeros."""
    value = numbers((2, keys, 11), np.float32, 5)
    value *= np.float32(2.0) ** -np.array([0, 0, 90, 95, 100, 110, 120, 126, 130, 0, 125])
    value[..., 9] = value[:, : keys // 2, 10] = 0
    return value.astype(dtype)


@every_target
@pytest.mark.parametrize("dtype", [t for t in TYPES if t.name in ("float32", "bfloat16")], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 5), (1, 600), (9, 40), (200, 300)])
def test_small_values_are_as_exact_as_others_beside_whatever(target, dtype, rows, keys):
    q, k, _ = inputs((2, rows, 8), (2, keys, 8), (2, keys, 1), dtype=dtype)
    v = small_values(dtype, keys)
    mask = numbers((rows, keys), np.float32, 3) > -0.5
    mask[:, 3] = False
    with on_path(f"fused:{target}") as kernel:
        # Dot instructions take subnormal numbers for 0.
        kept = {"precision": "high"} if arithmetic_of(kernel, q, k, v).least else {}
        for options in (kept, kept | {"mask": mask}, kept | {"sink": np.float32([0.5, 9.0])}):
            result, _ = check(kernel, q, k, v, **options)  # within the bound of what is made again
            alone = run(kernel, q[:, -1:], k, v, **{**options, **last_row(options)})
            assert_same_bytes(alone.output[:, 0], result.output[:, -1], f"a row alone, {options}")
            one = run(kernel, q, k, v, threads=1, **options)
            assert_same_bytes(one.output, result.output, "one thread")
        hidden = run(kernel, q, k, v, mask=mask, **kept)
        v[:, 3] = 1e-39
        assert_same_bytes(run(kernel, q, k, v, mask=mask, **kept).output, hidden.output, "hidden")


def last_row(options: dict[str, Any]) -> dict[str, Any]:
    return {"mask": options["mask"][-1:]} if "mask" in options else {}


@every_target
def test_the_target_that_is_chosen_is_the_one_that_answers(target):
    q, k, v = inputs((2, 4), (3, 4), (3, 4))
    with on_path(f"fused:{target}") as kernel:
        with recording() as ran:
            regard.attention(q, k, v, kernel=kernel)
        assert ran == [f"fused:{target}"] == [path_of(kernel)]


@every_target
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 255, 256, 257, 300])
def test_every_number_is_within_its_bound_around_the_chunks(target, dtype, size):
    length = 1 if dtype == np.float64 else 7  # the oracle of float64 takes its time
    q, k, v = inputs((2, length, 20), (1, size, 20), (1, size, 9), dtype=dtype)
    bias = numbers((2, length, size), np.float32, 3)
    with on_path(f"fused:{target}") as kernel:
        options: dict[str, Any]
        for options in ({}, {"bias": bias, "softcap": 4.0, "sink": 0.3, "scale": 0.4}):
            check(kernel, q, k, v, **options)


@every_target
@pytest.mark.parametrize("softcap", [1e-30, 1e-6, 1e6, 1e20, 1e30, 1e37, 1e38, 2e38, 3e38, 1e100])
@pytest.mark.parametrize("scale", [None, 1e-10, -1e-20])
def test_a_softcap_of_any_size_is_within_its_bound(target, softcap, scale):
    q, k, v = inputs(
        (3, 16), (300, 16), (300, 5), size=1e3 if scale is None else abs(scale) ** -0.5
    )
    with on_path(f"fused:{target}") as kernel:
        check(kernel, q, k, v, softcap=softcap, scale=scale)


def exact_answer(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Answer:
    """The answer in longer numbers than those of the inputs, without loops."""
    q, k, v = (x.astype(np.longdouble) for x in (q, k, v))
    logits = (q @ k.swapaxes(-1, -2)) / np.sqrt(np.longdouble(q.shape[-1]))
    maximum = logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(logits - maximum)
    total = exponentials.sum(axis=-1, keepdims=True)
    weights = exponentials / total
    lse = (maximum + np.log(total))[..., 0]
    numbers = (x.astype(np.float64) for x in (weights @ v, weights, lse, logits))
    output, weights, lse, logits = numbers
    return Answer(output, weights, lse, np.ones(logits.shape, bool), logits)


@every_target
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0, 10.0])
def test_every_number_of_long_rows_is_within_its_bound(target, dtype, size):
    if dtype == np.float64 and np.finfo(np.longdouble).nmant < 63:
        pytest.skip("needs a longdouble that is longer than float64")
    for keys, width in ((1, 256), (64, 128), (1000, 64), (3000, 8)):
        q, k, v = inputs((1, 13, width), (1, keys, width), (1, keys, 12), dtype=dtype)
        q = (q * np.array(size, dtype)).astype(dtype)
        with on_path(f"fused:{target}") as kernel:
            result = run(kernel, q, k, v)
        check_result(kernel, result, exact_answer(q, k, v), q, k, v)


ALL = 1 << 30


def running_sums(terms: np.ndarray, axis: int, at_once: int) -> np.ndarray:
    """Every sum on the way where so many terms are added up from zero, and their sums then."""
    terms = np.moveaxis(terms, axis, -1)
    runs = np.split(terms, range(at_once, terms.shape[-1], at_once), axis=-1)
    within = [np.cumsum(run, axis=-1) for run in runs]
    totals = np.cumsum(np.stack([sums[..., -1] for sums in within], axis=-1), axis=-1)
    return np.concatenate([*within, totals[..., 1:]], axis=-1)


def independent_roundings(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    exact: Answer,
    columns: int = ALL,
    keys: int = ALL,
) -> Any:
    """The standard deviation of each output if every rounding erred on its own, evenly up to u.

    Far below the bound, which lets all of them err one way: a systematic error of a few units,
    which the bound allows, shows here. Sums run over so many columns and keys at once.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scale, p, logits = q.shape[-1] ** -0.5, exact.weights, exact.logits
    partial = running_sums(q[..., :, None, :] * k[..., None, :, :] * scale, -1, columns)
    below = logits - logits.max(axis=-1, keepdims=True)
    # The dot product; the scaled logit in base 2 and its constant; the distance; the exponential.
    wobble = (partial**2).sum(axis=-1) + 2 * logits**2 + 2 * below**2 + 2.0**2
    apart = v[..., None, :, :] - exact.output[..., None, :]
    variance = np.einsum("...j,...jd->...d", p**2 * wobble, apart**2)
    sums = running_sums(p[..., None] * v[..., None, :, :], -2, keys)
    variance += (sums**2).sum(axis=-1) + 2 * exact.output**2
    return np.sqrt(variance / 3) * 2.0**-24


@every_target
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("keys", [3, 30, 250])
def test_errors_are_as_small_as_those_of_independent_roundings(target, size, keys):
    q, k, v = inputs((4, 40, 24), (4, keys, 24), (4, keys, 16))
    q = (q * np.float32(size)).astype(np.float32)
    with on_path(f"fused:{target}"):
        output = regard.attention(q, k, v)
    exact = exact_answer(q, k, v)
    ratio = (output - exact.output) / independent_roundings(q, k, v, exact)
    np.testing.assert_array_less(np.sqrt((ratio**2).mean()), 1.0)


@every_target
@pytest.mark.parametrize(("keys", "width", "mean"), [(64, 1024, 0.0), (256, 16, 3.0)])
def test_errors_of_long_sums_are_as_small_as_those_of_sums_in_runs(target, keys, width, mean):
    # The width by 16 columns, a chunk by 64 keys: one long sum errs about three times as much.
    q, k, v = inputs((4, 40, width), (4, keys, width), (4, keys, 16))
    v += np.float32(mean)  # else sums over keys stay small; but it hides errors of the weights
    with on_path(f"fused:{target}"):
        output = regard.attention(q, k, v)
    exact = exact_answer(q, k, v)
    ratio = (output - exact.output) / independent_roundings(q, k, v, exact, columns=16, keys=64)
    np.testing.assert_array_less(np.sqrt((ratio**2).mean()), 1.0)
