"""The numbers: NaN, range, dtypes, lse, accuracy within the bound, and precision="exact"."""

from __future__ import annotations

import ctypes
import functools
import itertools
import platform
import sys
import warnings

import numpy as np
import pytest

import regard
from bounds import accumulator, assert_within, error_bounds, precision_of
from calls import (
    BFLOAT16,
    FLOATS,
    answer_of,
    arithmetic_of,
    assert_same_bytes,
    assert_same_result,
    check,
    check_result,
    every_float,
    every_kernel,
    inputs,
    numbers,
    run,
)
from oracle import Answer, attend, attend_exactly

INF = np.inf
NARROW = [one for one in FLOATS if one.id != "float64"]
every_narrow_float = pytest.mark.parametrize("dtype", NARROW)


def is_nan(x):
    return np.isnan(np.asarray(x).astype(np.float64))


def all_bytes_but(kept, one, other, what):
    assert_same_bytes(one[kept], other[kept], what)


# NaN ----------------------------------------------------------------------------------------------


@every_kernel
@every_float
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"sink": 0.3}, {"softcap": 3.0}], ids=str
)
def test_nan_in_a_query_reaches_its_row_and_no_other(kernel, dtype, options):
    q, k, v = inputs((2, 5, 3), (2, 5, 3), (2, 5, 2), dtype=dtype)
    clean = run(kernel, q, k, v, **options)
    for h, i, d in itertools.product(range(2), range(5), range(3)):
        bad = q.copy()
        bad[h, i, d] = np.nan
        result = run(kernel, bad, k, v, **options)
        expected = np.zeros((2, 5), bool)
        expected[h, i] = True
        np.testing.assert_array_equal(is_nan(result.lse), expected)
        np.testing.assert_array_equal(
            is_nan(result.output), np.broadcast_to(expected[..., np.newaxis], (2, 5, 2))
        )
        all_bytes_but(~expected, result.output, clean.output, "output")
        all_bytes_but(~expected, result.weights, clean.weights, "weights")
        all_bytes_but(~expected, result.lse, clean.lse, "lse")


@every_kernel
@every_float
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1)}], ids=str)
def test_nan_in_a_key_reaches_the_rows_that_see_it_and_no_other(kernel, dtype, options):
    q, k, v = inputs((2, 5, 3), (2, 5, 3), (2, 5, 2), dtype=dtype)
    clean = run(kernel, q, k, v, **options)
    seen = answer_of(q, k, v, **options).visible
    for h, j, d in itertools.product(range(2), range(5), range(3)):
        bad = k.copy()
        bad[h, j, d] = np.nan
        result = run(kernel, q, bad, v, **options)
        expected = np.zeros((2, 5), bool)
        expected[h] = seen[h, :, j]
        np.testing.assert_array_equal(is_nan(result.lse), expected)
        np.testing.assert_array_equal(
            is_nan(result.output), np.broadcast_to(expected[..., np.newaxis], (2, 5, 2))
        )
        all_bytes_but(~expected, result.output, clean.output, "output")
        all_bytes_but(~expected, result.weights, clean.weights, "weights")


@every_kernel
@every_float
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": 0.3}], ids=str)
def test_nan_in_a_value_reaches_its_column_in_the_rows_that_see_it(kernel, dtype, options):
    q, k, v = inputs((2, 5, 3), (2, 5, 3), (2, 5, 4), dtype=dtype)
    clean = run(kernel, q, k, v, **options)
    seen = answer_of(q, k, v, **options).visible
    for h, j, d in itertools.product(range(2), range(5), range(4)):
        bad = v.copy()
        bad[h, j, d] = np.nan
        result = run(kernel, q, k, bad, **options)
        expected = np.zeros((2, 5, 4), bool)
        expected[h, :, d] = seen[h, :, j]
        np.testing.assert_array_equal(is_nan(result.output), expected)
        all_bytes_but(~expected, result.output, clean.output, "output")
        assert_same_bytes(result.weights, clean.weights)
        assert_same_bytes(result.lse, clean.lse)


@every_kernel
@every_float
def test_nan_is_never_hidden_by_a_weight_that_underflows(kernel, dtype):
    q = np.array([[30.0]]).astype(dtype)
    k = np.array([[0.0], [-100.0], [1.0]]).astype(dtype)
    v = np.array([[1.0, 2.0], [np.nan, 3.0], [4.0, 5.0]]).astype(dtype)
    result = run(kernel, q, k, v, scale=1.0)
    assert result.weights[0, 1] == 0.0
    np.testing.assert_array_equal(is_nan(result.output), [[True, False]])


@every_kernel
@every_float
@pytest.mark.parametrize("bad", [np.nan, INF])
def test_nan_is_never_hidden_by_a_score_of_minus_infinity(kernel, dtype, bad):
    q, k, v = inputs((2, 4), (600, 4), (600, 2), dtype=dtype)
    q[:, 0] = 1
    # One whole piece of keys, in whatever pieces they are read, and not all of them.
    for keys in (slice(0, 300), slice(280, 600)):
        low = k.copy()
        low[keys, 0] = -INF
        clean = run(kernel, q, low, v)
        assert np.isfinite(clean.output.astype(float)).all()
        worse = v.copy()
        worse[keys.start + 5, 1] = bad
        result = run(kernel, q, low, worse)
        np.testing.assert_array_equal(is_nan(result.output), [[False, True]] * 2)
        if kernel != "reference":  # which makes such rows again, in more digits
            assert_same_bytes(result.output[:, 0], clean.output[:, 0])
            assert_same_bytes(result.lse, clean.lse)


@every_kernel
@every_float
def test_a_sink_takes_the_row_whose_scores_are_all_minus_infinity(kernel, dtype):
    q, k, v = inputs((2, 4), (3, 4), (3, 2), dtype=dtype)
    q[:, 0], k[:, 0] = 1, -INF
    result = run(kernel, q, k, v, sink=0.5)
    np.testing.assert_array_equal(result.output.astype(float), 0.0)
    np.testing.assert_array_equal(result.weights.astype(float), 0.0)
    np.testing.assert_array_equal(result.lse, 0.5)
    v[1, 1] = np.nan
    result = run(kernel, q, k, v, sink=0.5)
    np.testing.assert_array_equal(is_nan(result.output), [[False, True]] * 2)


@every_kernel
@pytest.mark.parametrize("size", [1, 7, 64, 65, 300])
def test_nan_is_found_at_every_key_of_long_rows(kernel, size):
    q, k, v = inputs((2, 8), (size, 8), (size, 3))
    for j in {0, size // 2, size - 1, min(size - 1, 64)}:
        bad = k.copy()
        bad[j, 3] = np.nan
        assert is_nan(run(kernel, q, bad, v).output).all()
        bad = v.copy()
        bad[j, 1] = np.nan
        result = run(kernel, q, k, bad)
        np.testing.assert_array_equal(is_nan(result.output), [[False, True, False]] * 2)


@every_kernel
@every_float
def test_nan_agrees_with_the_oracle_wherever_it_starts(kernel, dtype):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        q, k, v = inputs((2, 4, 3), (2, 6, 3), (2, 6, 2), dtype=dtype, seed=seed)
        for x in (q, k, v):
            if rng.random() < 0.6:
                x[rng.random(x.shape) < 0.08] = np.nan
        options = {"mask": rng.random((2, 4, 6)) < 0.6, "causal": True, "offset": 1}
        result = run(kernel, q, k, v, **options)
        answer = attend(q, k, v, **options)
        np.testing.assert_array_equal(is_nan(result.output), np.isnan(answer.output))
        np.testing.assert_array_equal(is_nan(result.lse), np.isnan(answer.lse))


@every_kernel
@every_float
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_is_not_made_of_an_infinite_value_that_is_seen(kernel, dtype, sign):
    q, k, v = inputs((2, 4, 3), (2, 4, 3), (2, 4, 2), dtype=dtype)
    v[0, 1, 1] = sign * INF
    result = run(kernel, q, k, v, causal=True)
    np.testing.assert_array_equal(result.output[0, 1:, 1].astype(float), sign * INF)
    rest = result.output.astype(float)
    rest[0, 1:, 1] = 0.0
    np.testing.assert_array_equal(np.isfinite(rest), True)
    v[0, 2, 1] = -sign * INF
    result = run(kernel, q, k, v, causal=True)
    np.testing.assert_array_equal(is_nan(result.output)[0, :, 1], [False, False, True, True])


@every_kernel
def test_nan_follows_ieee_where_queries_or_keys_are_infinite(kernel):
    q, k, v = inputs((3, 2), (4, 2), (4, 2))
    k[1, 0] = INF
    q[:, 0] = [1.0, -1.0, 0.0]
    result = run(kernel, q, k, v)
    answer = attend(q, k, v)
    np.testing.assert_array_equal(is_nan(result.output), np.isnan(answer.output))
    np.testing.assert_array_equal(is_nan(result.output)[:, 0], [True, False, True])
    np.testing.assert_array_equal(result.weights[1, 1], 0.0)


def above_and_below(dtype, distance):
    """A query and two keys, the second with a score that is lower by this; values to fill in."""
    q, k = np.ones((1, 1)), np.array([[0.0], [-distance]])
    return q.astype(dtype), k.astype(dtype), np.ones((2, 3), dtype)


@every_kernel
@every_float
@pytest.mark.parametrize("distance", [1.0, 95.0, 110.0, 800.0, 6e4])
@pytest.mark.parametrize("sink", [None, 900.0])
def test_an_infinite_value_that_is_seen_is_infinite_however_small_its_weight(
    kernel, dtype, distance, sink
):
    q, k, v = above_and_below(dtype, distance)
    v[1] = [INF, -INF, 2.0]
    options = {"scale": 1.0, "sink": sink}
    result = run(kernel, q, k, v, **options)
    np.testing.assert_array_equal(result.output[0, :2].astype(float), [INF, -INF])
    assert np.isfinite(result.output[0, 2].astype(float))
    v[0] = [-INF, -INF, 1.0]
    result = run(kernel, q, k, v, **options)
    np.testing.assert_array_equal(result.output[0, :2].astype(float), [np.nan, -INF])
    hidden = regard.attention(q, k, v, mask=[False, False], kernel=kernel, **options)
    np.testing.assert_array_equal(hidden.astype(float), 0.0)


@every_kernel
@every_float
def test_an_infinite_value_is_infinite_in_every_row_of_many_chunks(kernel, dtype):
    q, k, v = inputs((300, 8), (600, 8), (600, 3), dtype=dtype)
    k[:2] *= dtype.type(300)  # so that most weights of the others underflow
    v[5, 0], v[570, 1], v[7, 2], v[590, 2] = INF, -INF, INF, -INF
    for options in ({}, {"causal": True, "offset": 300}):
        result = run(kernel, q, k, v, **options)
        first = 300 - 30 if options else 0
        np.testing.assert_array_equal(result.output[:, 0].astype(float), INF)
        np.testing.assert_array_equal(result.output[first:, 1].astype(float), -INF)
        last = 300 - 10 if options else 0
        np.testing.assert_array_equal(result.output[last:, 2].astype(float), np.nan)
        np.testing.assert_array_equal(result.output[:last, 2].astype(float), INF)


@every_kernel
@every_float
@pytest.mark.parametrize("sink", [None, 0.5])
def test_an_infinite_value_at_a_score_of_minus_infinity_is_nan(kernel, dtype, sink):
    q, k, v = above_and_below(dtype, INF)
    v[1] = [INF, 2.0, -INF]
    result = run(kernel, q, k, v, sink=sink)
    np.testing.assert_array_equal(is_nan(result.output), [[True, False, True]])
    np.testing.assert_array_equal(result.weights[0, 1].astype(float), 0.0)


# range --------------------------------------------------------------------------------------------


def assert_inside(result, answer, query, key, value, **options):
    """Finite, and among the visible values (and 0 with a sink) up to the rounding of sums."""
    output = result.output.astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(output), True)
    np.testing.assert_array_equal(np.isfinite(result.weights.astype(np.float64)), True)
    repeats = query.shape[-3] // key.shape[-3] if query.ndim > 2 else 1
    values = np.repeat(value, repeats, axis=-3) if query.ndim > 2 else value
    values = values.astype(np.float64)[..., np.newaxis, :, :]
    seen = answer.visible[..., np.newaxis]
    rest = 0.0 if options.get("sink") is not None else INF
    low = np.where(seen, values, rest).min(axis=-2, initial=rest)
    high = np.where(seen, values, -rest).max(axis=-2, initial=-rest)
    any_seen = seen.any(axis=-2)
    count = answer.visible.sum(axis=-1)[..., np.newaxis]
    inner = outer = float(np.finfo(accumulator(result.output.dtype)).eps)
    if result.output.dtype.itemsize == 2:
        outer = 2.0**-7 if result.output.dtype == BFLOAT16 else 2.0**-10
    largest = np.where(seen, abs(values), 0.0).max(axis=-2, initial=0.0)
    slack = (count * inner + outer) * largest
    slack = slack + (1e-320 if result.output.dtype == np.float64 else 1e-40)
    slack = slack + (2.0**-24 if result.output.dtype == np.float16 else 0.0)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal((output >= low - slack) | ~any_seen, True)
        np.testing.assert_array_equal((output <= high + slack) | ~any_seen, True)


@every_kernel
@every_float
@pytest.mark.parametrize("keys", [3, 300])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_range_of_partial_sums_that_overflow_changes_no_number(kernel, dtype, keys, softcap):
    """The sum reaches −∞ on its way to a number, and no NaN ever shows it."""
    top = precision_of(dtype).largest
    q = np.array([[0.9, 0.9, 0.9 / 300]]) * top
    k = np.zeros((keys, 3))
    k[0], k[1], k[keys - 1] = [-2, 2, 2], [0, 0, 1], [-1.5, 1.5, 1]
    q, k, v = q.astype(dtype), k.astype(dtype), numbers((keys, 2), dtype)
    for scale in (1.0, -1.0, 4 / top, None):
        options = {"scale": scale, "softcap": softcap}
        result = run(kernel, q, k, v, **options)
        answer = attend_exactly(q, k, v, **options)
        unit = dict(scale=scale * top if scale else top / 3**0.5, softcap=softcap)
        bound = error_bounds(  # of the same logits, from numbers of an ordinary size
            q.astype(float) / top, k, v, answer, dtype=dtype, **unit
        )
        assert_within(result.output, answer.output, bound.output, f"{options}")


@every_kernel
@every_float
@pytest.mark.parametrize("sign", [1, -1])
def test_range_of_products_is_that_of_no_type(kernel, dtype, sign):
    """Powers of two in queries and keys that the scale takes back change no logit."""
    most = {"float16": 15, "bfloat16": 126, "float32": 126, "float64": 1020}[dtype.name]
    q0, k0, v = inputs((2, 5, 8), (2, 300, 8), (2, 300, 3), dtype=dtype)
    q0, k0 = (np.clip(x.astype(float), -1, 1) for x in (q0, k0))
    least = -1070 if dtype == np.float64 else -2 * most
    for q_up, k_up in ((most // 2 + 10, most // 2 + 10), (most, 40), (40, most), (most, most)):
        q_up, k_up = min(q_up, most), min(k_up, most)
        k_up = min(k_up, -least - q_up)
        q, k = (q0 * 2.0**q_up).astype(dtype), (k0 * 2.0**k_up).astype(dtype)
        options = {"scale": sign * 2.0 ** -(q_up + k_up), "causal": True, "offset": 100}
        result = run(kernel, q, k, v, **options)
        plain = (
            (q.astype(float) * 2.0**-q_up).astype(dtype),
            (k.astype(float) * 2.0**-k_up).astype(dtype),
        )
        options["scale"] = float(sign)
        answer = answer_of(*plain, v, **options)
        assert answer.weights.max() < 0.9
        check_result(kernel, result, answer, *plain, v, **options)


@functools.cache
def calls_of_every_size(dtype):
    """Calls whose scores, biases, sinks and values are near the ends of float64, with answers."""
    top, calls = precision_of(dtype).largest, []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        sizes = rng.choice([1.0, top**0.5, top, 1 / top], (3, 4, 1))
        q, k, v = (x.astype(dtype) for x in rng.uniform(-1, 1, (3, 4, 3)) * sizes)
        options = {
            "scale": [None, 1.0, -1e300, 1e-300][seed % 4],
            "bias": rng.choice([0.0, 1e300, -1.7e308], (4, 4)) if seed % 2 else None,
            "sink": [1.7e308, None, -1.0][seed % 3],
            "softcap": rng.choice([None, 1e300, 3.0]),
            "causal": bool(seed % 3),
        }
        calls.append((q, k, v, options, attend_exactly(q, k, v, **options)))
    return calls


@every_kernel
@every_float
def test_range_ends_at_no_score_bias_or_value(kernel, dtype):
    for q, k, v, options, answer in calls_of_every_size(dtype):
        result = run(kernel, q, k, v, **options)
        assert_inside(result, answer, q, k, v, **options)
        # Where one logit is far above all others, its value is the output.
        sink = np.full((4, 1), -INF if options["sink"] is None else options["sink"])
        logits = np.concatenate([answer.logits, sink], axis=-1)
        quarters = np.clip(logits, -1.7e308, 1.7e308) / 4
        first, second = np.sort(quarters, axis=-1)[:, [-1, -2]].T
        values = np.concatenate([v.astype(float), np.zeros((1, 3))])
        for row in np.flatnonzero((first - second > 1e6) & (first - second > 1e-3 * abs(first))):
            expected = values[logits[row].argmax()]
            np.testing.assert_array_equal(result.output[row].astype(float), expected)


BESIDE = [{}, {"causal": True}, {"sink": 1.0}, {"softcap": 30.0}, {"scale": -1.0}, {"bias": 1e30}]


@every_kernel
@every_narrow_float
@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e12, 1e16, 1e19, 1e25, 1e30, 1e37])
def test_range_of_finite_inputs_gives_finite_outputs_among_the_values(kernel, dtype, size):
    size = min(size, 60000.0 / 5) if dtype == np.float16 else size
    q, k = (numbers(s, np.float64, n) for n, s in enumerate([(2, 4, 8), (2, 4, 8)]))
    q, k = ((np.clip(x, -3, 3) * size).astype(dtype) for x in (q, k))
    v = numbers((2, 4, 5), dtype, 2)
    for options in BESIDE:
        result, answer = check(kernel, q, k, v, **options)
        assert_inside(result, answer, q, k, v, **options)


@every_kernel
@pytest.mark.parametrize("scale", [1e20, -1e20])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"sink": 2.0}], ids=str)
def test_range_of_weights_where_every_score_is_beyond_float64(kernel, scale, options):
    """q·k fits and its product with the scale does not: its differences still make weights."""
    q, k = np.array([[1e305], [-1e304], [3e304]]), np.array([[1e-6], [1e-6], [2e-6]])
    v = np.array([[1.0, -2.0], [3.0, 5.0], [0.0, 7.0]])
    result = run(kernel, q, k, v, scale=scale, **options)
    hidden = np.triu(np.ones((3, 3), bool), 1) & bool(options.get("causal"))
    best = np.where(hidden, -np.inf, q @ k.T * np.sign(scale))
    largest = best == best.max(-1, keepdims=True)
    below = (best.max(-1, keepdims=True) < 0) & ("sink" in options)  # the sink has all the weight
    weights = np.where(below, 0, largest / largest.sum(-1, keepdims=True))
    np.testing.assert_array_equal(result.weights, weights)
    np.testing.assert_allclose(result.output, weights @ v, rtol=1e-15)
    infinite = np.where(best.max(-1) > 0, np.inf, 2.0 if "sink" in options else -np.inf)
    np.testing.assert_array_equal(result.lse, infinite)


@every_kernel
def test_range_of_queries_and_keys_is_that_of_float32_itself(kernel):
    largest = np.finfo(np.float32).max
    q = np.array([[largest, largest], [largest, -largest], [-largest, 1.0]], np.float32)
    k = np.array([[largest, largest], [-largest, largest], [1.0, -1.0], [0, 0]], np.float32)
    v = numbers((4, 3))
    for scale in (None, 1.0, -1.0, 1e-38, 1e-76, 1e-300, 1e300, 1.7e308, -1e300, 5e-324):
        result = run(kernel, q, k, v, scale=scale)
        answer = attend_exactly(q, k, v, scale=scale)
        assert_inside(result, answer, q, k, v)
        bound = error_bounds(q, k, v, answer, dtype=np.float32, scale=scale)
        assert_within(result.output, answer.output, bound.output, f"scale {scale}")


@every_kernel
@every_narrow_float
def test_range_of_products_that_overflow_is_brought_back_by_the_scale(kernel, dtype):
    size = 1e19 if dtype != np.float16 else 6e4
    q = np.array([[1, 2], [3, -1]]).astype(float) * size / 4
    k = np.array([[1, 1], [2, -1], [-1, 3]]).astype(float) * size / 4
    q, k, v = q.astype(dtype), k.astype(dtype), numbers((3, 2), dtype)
    _, answer = check(kernel, q, k, v, scale=1.0 / size**2)
    assert answer.weights.min() > 0.01


@every_kernel
def test_range_of_products_that_underflow_is_brought_back_by_the_scale(kernel):
    q = np.array([[1, 2], [3, -1]], np.float32) * np.float32(1e-30)
    k = np.array([[1, 1], [2, -1], [-1, 3]], np.float32) * np.float32(1e-30)
    v = numbers((3, 2))
    answer = attend_exactly(q, k, v, scale=1e60)
    assert answer.weights.max() > 0.5
    result = run(kernel, q, k, v, scale=1e60)
    np.testing.assert_array_equal(np.isfinite(result.output), True)


@every_kernel
def test_range_of_one_hot_rows_picks_the_value_itself(kernel):
    q = np.eye(6, dtype=np.float32) * np.float32(1e18)
    k = np.eye(6, dtype=np.float32) * np.float32(1e18)
    v = numbers((6, 4))
    assert_same_bytes(run(kernel, q, k, v).output, v)


@every_kernel
@every_float
@pytest.mark.parametrize("logit", [0.0, 1.0, 1e4, 3e4, -3e4])
def test_range_of_equal_logits_gives_equal_weights_at_any_height(kernel, dtype, logit):
    q, k = np.ones((2, 1)), np.full((4, 1), logit)
    v = np.array([[1.0], [2.0], [3.0], [6.0]])
    result = run(kernel, *(x.astype(dtype) for x in (q, k, v)), scale=1.0)
    np.testing.assert_array_equal(result.weights.astype(float), 0.25)
    np.testing.assert_array_equal(result.output.astype(float), 3.0)


@every_kernel
def test_range_of_one_outlier_key_leaves_the_others_exact(kernel):
    q, k, v = inputs((4, 16), (200, 16), (200, 8))
    k[17] *= 300.0
    check(kernel, q, k, v)
    check(kernel, q, k, v, mask=np.arange(200) != 17)


@every_kernel
@every_float
def test_range_includes_denormal_numbers(kernel, dtype):
    tiny = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1e-42, "float64": 1e-320}[dtype.name]
    q, k, _ = inputs((2, 4), (3, 4), (3, 2), dtype=dtype)
    v = np.full((3, 2), tiny).astype(dtype)
    kept = {"precision": "high"} if arithmetic_of(kernel, q, k, v).least else {}
    result, _ = check(kernel, q, k, v, **kept)
    np.testing.assert_array_equal(result.output.astype(float) > 0, True)
    check(kernel, q, k, v)
    q, k = (np.full(s, tiny).astype(dtype) for s in ((2, 4), (3, 4)))
    result, _ = check(kernel, q, k, numbers((3, 2), dtype))


@every_kernel
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [5, 700])
def test_range_of_values_is_that_of_the_type_itself(kernel, dtype, keys):
    top = np.finfo(dtype).max
    q, k, v = inputs((3, 4), (keys, 4), (keys, 2), dtype=dtype)
    v[:5] = np.array([[1, -1], [1, 1], [-1, 1 / top], [1 / top, 1 / top], [0.9, 2 / top]]) * top
    for value in (v, np.full((keys, 2), top), np.full((keys, 2), -top)):
        for sink in (None, 1.0):
            result = run(kernel, q, k, value, sink=sink)
            answer = attend_exactly(q, k, value, sink=sink)
            assert_inside(result, answer, q, k, value, sink=sink)
            small = Answer(answer.output / top, *answer[1:])  # bounds of numbers that have a sum
            bound = error_bounds(q, k, value / top, small, dtype=dtype, sink=sink)
            assert_within(
                (result.output.astype(float) / top).astype(dtype), small.output, bound.output
            )


@every_kernel
@every_narrow_float
def test_range_of_half_products_is_wider_than_half(kernel, dtype):
    q, k = np.full((2, 128), 256.0).astype(dtype), np.full((3, 128), 256.0).astype(dtype)
    k[1] = 255.0
    result, answer = check(kernel, q, k, numbers((3, 2), dtype), scale=1.0)
    assert_inside(result, answer, q, k, numbers((3, 2), dtype))


@every_kernel
def test_range_of_a_bias_that_overflows_the_sum_with_the_scores(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    largest = float(np.finfo(np.float32).max)
    for bias in (largest, -largest, [largest, -largest, 0.0, largest, 1.0]):
        big = q * np.float32(1e19), k * np.float32(1e18)
        result, answer = check(kernel, *big, v, bias=np.asarray(bias))
        assert_inside(result, answer, q, k, v)


@every_kernel
@pytest.mark.parametrize("low", [-1e39, -1e300, -1.7e308])
def test_range_of_a_bias_in_float64_is_wider_than_float32_without_harm(kernel, low):
    q, k, v = inputs((2, 4), (5, 4), (5, 2))
    for bias in (low, -low, [low, -low, 0.0, 0.0, 0.0], [-low, -low / 2, 0.0, 0.0, low]):
        result, answer = check(kernel, q, k, v, bias=np.array(bias))
        assert_inside(result, answer, q, k, v)


@every_kernel
@pytest.mark.parametrize("sink", [1e39, -1e39, 1e300, -1e300])
def test_range_of_a_sink_in_float64_is_wider_than_float32_without_harm(kernel, sink):
    q, k, v = inputs((2, 4), (5, 4), (5, 2))
    result, answer = check(kernel, q, k, v, sink=sink)
    assert_inside(result, answer, q, k, v, sink=sink)


@every_kernel
@pytest.mark.parametrize("softcap", [1e-300, 1e-50, 1e39, 1e300])
@pytest.mark.parametrize("scale", [None, 1e-300, 1e300])
def test_range_of_a_softcap_is_that_of_every_positive_number(kernel, softcap, scale):
    q, k, v = inputs((2, 4), (5, 4), (5, 2))
    result, answer = check(kernel, q, k, v, softcap=softcap, scale=scale)
    assert_inside(result, answer, q, k, v)


# dtypes -------------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_dtypes_that_come_in_go_out(kernel, dtype):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype)
    result, _ = check(kernel, q, k, v)
    assert result.output.dtype == dtype
    assert regard.attention(q, k, v, kernel=kernel).dtype == dtype


MIXED = [np.float16, np.float32, np.float64, np.int32, np.int64, np.uint64]


@every_kernel
@pytest.mark.parametrize("one", MIXED)
def test_dtypes_that_are_mixed_follow_numpy_and_integers_are_float64(kernel, one):
    q = numbers((3, 4)) * 2
    q = (abs(q) if one == np.uint64 else q).astype(one)
    for other, third in itertools.product(MIXED, repeat=2):
        k = (abs(numbers((5, 4), seed=1)) * 2).astype(other)
        v = (abs(numbers((5, 2), seed=2)) * 9).astype(third)
        expected = np.result_type(one, other, third)
        expected = expected if expected.kind == "f" else np.dtype(np.float64)
        result, _ = check(kernel, q, k, v)
        assert result.output.dtype == expected, (other, third)


@every_kernel
@pytest.mark.parametrize("kind", [np.bool_, np.int8, np.uint8, np.int16, np.int64])
def test_dtypes_of_integers_and_bools_become_float64(kernel, kind):
    q, k, v = (abs(x * 2).astype(kind) for x in inputs((3, 4), (5, 4), (5, 2)))
    result, _ = check(kernel, q, k, v)
    assert (result.output.dtype, result.lse.dtype) == (np.float64, np.float64)


@every_kernel
@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize(
    ("other", "expected"), [(np.float32, np.float32), (np.float64, np.float64), (None, None)]
)
def test_dtypes_mixed_with_bfloat16_follow_numpy(kernel, other, expected):
    q, k, v = inputs((3, 4), (5, 4), (5, 2), dtype=BFLOAT16)
    result, _ = check(kernel, q, k.astype(other or BFLOAT16), v)
    assert result.output.dtype == (expected or BFLOAT16)


@every_kernel
@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("halves", [(0, 1), (1, 2), (0, 2)])
def test_dtypes_that_numpy_cannot_mix_are_refused_by_name(kernel, halves):
    arrays = [x.astype(BFLOAT16) for x in inputs((3, 4), (5, 4), (5, 2))]
    arrays = [x.astype(np.float16) if n in halves else x for n, x in enumerate(arrays)]
    with pytest.raises(regard.DtypeError) as caught:
        regard.attention(*arrays, kernel=kernel)
    for word in ("query", "key", "value", "float16", "bfloat16"):
        assert word in str(caught.value).split(" (query")[0]


@every_kernel
@pytest.mark.needs("ml_dtypes")
def test_dtypes_of_integers_beside_bfloat16_are_float64_too(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2), dtype=BFLOAT16)
    output = regard.attention((q * 2).astype(np.int64), k, v, kernel=kernel)
    assert output.dtype == np.float64


@every_kernel
def test_dtypes_mixed_are_never_narrowed_on_the_way(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2), dtype=np.float64)
    for narrow in range(3):
        mixed = [x.astype(np.float16) if n == narrow else x for n, x in enumerate((q, k, v))]
        check(kernel, *mixed)  # the bound is that of float64


@every_kernel
def test_dtypes_of_half_accumulate_in_float32(kernel):
    q, k = np.zeros((1, 2), np.float16), np.zeros((4096, 2), np.float16)
    v = np.ones((4096, 1), np.float16)
    result = run(kernel, q, k, v)
    np.testing.assert_array_equal(result.output, 1.0)  # in half, a sum of ones stops at 2048
    np.testing.assert_allclose(result.lse, np.log(4096.0), rtol=1e-6)


@every_kernel
def test_dtypes_of_lists_are_those_that_numpy_gives_them(kernel):
    output = regard.attention([[1.0, 2.0]], [[1, 2], [3, 4]], [[1.0], [2.0]], kernel=kernel)
    answer = attend([[1.0, 2.0]], [[1, 2], [3, 4]], [[1.0], [2.0]])
    assert output.dtype == np.float64
    np.testing.assert_allclose(output, answer.output, rtol=1e-14)


@every_kernel
@every_float
def test_dtypes_of_bias_and_sink_do_not_decide(kernel, dtype):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6), dtype=dtype)
    for kind in (np.float16, np.float32, np.float64, np.int32):
        bias = (numbers((3, 5), seed=3) * 3).astype(kind)
        result, _ = check(kernel, q, k, v, bias=bias, sink=np.array([1, 2], kind))
        assert result.output.dtype == dtype


@every_kernel
@every_narrow_float
@pytest.mark.parametrize(("name", "shape"), [("bias", (40, 5, 9)), ("sink", (40,))])
def test_dtypes_of_bias_and_sink_convert_to_that_of_the_sums(kernel, dtype, name, shape):
    q, k, v = inputs((40, 5, 4), (40, 9, 4), (40, 9, 3), dtype=dtype)
    given = numbers(shape, np.float64, 8, 3.0)
    wide = run(kernel, q, k, v, **{name: given})
    assert_same_result(run(kernel, q, k, v, **{name: given.astype(accumulator(dtype))}), wide)


# lse ----------------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_lse_is_the_natural_log_of_the_sum_of_exponentials(kernel, dtype):
    q, k, v = np.zeros((1, 1), dtype), np.zeros((8, 1), dtype), np.ones((8, 1), dtype)
    result = run(kernel, q, k, v)
    assert result.lse.dtype == accumulator(dtype)
    bound = 4 * np.finfo(accumulator(dtype)).eps
    np.testing.assert_allclose(result.lse, [np.log(8.0)], rtol=bound)
    result = run(kernel, q, k, v, sink=0.0)
    np.testing.assert_allclose(result.lse, [np.log(9.0)], rtol=bound)


@every_kernel
@every_float
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_lse_weights_and_output_belong_together(kernel, dtype, size):
    q, k, v = inputs((2, 6, 8), (2, 40, 8), (2, 40, 5), dtype=dtype, size=size)
    for sink in (None, np.array([0.5, -1.0])):
        check(kernel, q, k, v, sink=sink)


@every_kernel
def test_lse_of_high_logits_keeps_their_height(kernel):
    q, k = np.ones((1, 1), np.float32), np.full((4, 1), 1e6, np.float32)
    result, _ = check(kernel, q, k, np.ones((4, 1), np.float32), scale=1.0)
    np.testing.assert_allclose(result.lse, [1e6 + np.log(4)], rtol=1e-7)


# accuracy -----------------------------------------------------------------------------------------


@every_kernel
@every_float
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize(("keys", "width"), [(1, 1), (2, 64), (77, 3), (130, 33)])
def test_accuracy_of_every_number_is_within_the_stated_bound(kernel, dtype, size, keys, width):
    q, k, v = inputs((3, width), (keys, width), (keys, 6), dtype=dtype, size=size)
    v = numbers((keys, 6), dtype, 99)
    check(kernel, q, k, v)
    check(kernel, q, k, v, causal=True, offset="end", bias=numbers((3, keys), seed=5), sink=0.2)


@every_kernel
@pytest.mark.parametrize("size", [1.0, 5.0])
def test_accuracy_holds_for_long_rows(kernel, size):
    q, k, v = inputs((1, 64), (3000, 64), (3000, 2), size=size)
    check(kernel, q, k, v)


@every_kernel
def test_accuracy_of_float64_is_that_of_float64(kernel):
    for size in (0.1, 1.0, 10.0):
        q, k, v = inputs((4, 16), (30, 16), (30, 5), dtype=np.float64, size=size)
        result, answer = check(kernel, q, k, v, softcap=20.0, sink=0.5)
        error = abs(result.output - answer.output).max()
        assert error < 1e-10 * size**3  # a float32 softmax in the middle leaves 1e-8 at best


# precision="exact" --------------------------------------------------------------------------------


def rounded(numbers_in_float64: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return numbers_in_float64.astype(dtype)


@pytest.mark.sweep
@every_kernel
@every_narrow_float
@pytest.mark.parametrize("size", [0.1, 1.0, 3.0, 10.0])
def test_exact_precision_is_correctly_rounded(kernel, dtype, size):
    q, k, v = inputs((2, 8, 16), (2, 60, 16), (2, 60, 8), dtype=dtype, size=size)
    for options in ({}, {"causal": True, "offset": 52}, {"softcap": 5.0, "sink": 0.3}):
        result = run(kernel, q, k, v, precision="exact", **options)
        answer = attend_exactly(q, k, v, **options)
        assert_same_bytes(result.output, rounded(answer.output, dtype), "output")
        assert_same_bytes(result.weights, rounded(answer.weights, dtype), "weights")
        assert_same_bytes(result.lse, rounded(answer.lse, np.dtype(np.float32)), "lse")


@every_kernel
@pytest.mark.parametrize(
    "dtype",
    [
        np.float16,
        pytest.param(BFLOAT16, marks=pytest.mark.needs("ml_dtypes")),
    ],
    ids=["float16", "bfloat16"],
)
def test_exact_precision_rounds_once_on_the_way_to_a_half_type(kernel, dtype):
    step = 2.0**-10 if dtype == np.float16 else 2.0**-7  # from 1 to the next number
    # The mean is 1 + step / 2 + 2**-26: above the middle, by less than float32 can tell.
    v = np.array([[2.0], [2.0 + 2 * step], [2.0**-24], [0.0]]).astype(dtype)
    q, k = np.zeros((1, 1), dtype), np.zeros((4, 1), dtype)
    output = regard.attention(q, k, v, precision="exact", kernel=kernel)
    np.testing.assert_array_equal(output.astype(float), 1.0 + step)


@every_kernel
def test_exact_precision_goes_with_every_option(kernel):
    q, k, v = inputs((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 3))
    check(
        kernel,
        q,
        k,
        v,
        precision="exact",
        mask=np.random.default_rng(0).random((4, 5, 7)) < 0.7,
        bias=numbers((5, 7), np.float64, 3),
        causal=True,
        window=(4, None),
        offset=2,
        scale=-0.7,
        softcap=2.0,
        sink=numbers((4,), np.float64, 4),
    )


@every_kernel
def test_exact_precision_changes_the_bits_but_hardly_the_numbers(kernel):
    q, k, v = inputs((8, 16), (200, 16), (200, 8), size=3.0)
    working, exact = (run(kernel, q, k, v, precision=p).output for p in ("working", "exact"))
    assert working.dtype == exact.dtype == np.float32
    assert (working != exact).any()
    np.testing.assert_allclose(working, exact, atol=1e-3)


@every_kernel
@pytest.mark.parametrize("wide", [(0, 1, 2), (0,), (1,), (2,)])
def test_exact_precision_of_float64_is_refused(kernel, wide):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    mixed = [x.astype(np.float64) if n in wide else x for n, x in enumerate((q, k, v))]
    with pytest.raises(ValueError, match="precision") as caught:
        regard.attention(*mixed, precision="exact", kernel=kernel)
    assert "float64" in str(caught.value)


# good manners -------------------------------------------------------------------------------------


EXTREMES = [
    {},
    {"softcap": 2.0},
    {"scale": 1e300, "sink": 1e300, "bias": 1e300},
    {"scale": -1e-300, "softcap": 1e-300, "bias": -1e300},
    {"mask": [True, False, False, False, True], "softcap": 1e300, "scale": 50.0},
    {"causal": True, "offset": 1, "sink": -1e300, "bias": -INF},
    {"mask": False, "window": (1, 1), "offset": 0, "scale": 1e300},
]


@every_kernel
@every_float
@pytest.mark.parametrize("sort", ["plain", "nan", "overflow", "underflow", "infinite"])
def test_numbers_never_warn_and_leave_the_error_state_alone(kernel, dtype, sort):
    q, k, v = inputs((3, 4), (5, 4), (5, 2), dtype=dtype)
    if sort == "nan":
        q[0, 0] = k[1, 1] = v[2, 0] = np.nan
    elif sort == "overflow":
        largest = {"float16": 6e4, "float64": 1e308}.get(dtype.name, 1e38)
        q[:], k[:] = largest, -largest
        k[1] = largest
    elif sort == "underflow":
        q[:], k[0] = 60.0, -60.0
        k[1:] = 60.0
    elif sort == "infinite":
        q[0, 0], k[1, 1], v[2, 0] = INF, -INF, INF
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        before = np.geterr()
        for options in EXTREMES:
            run(kernel, q, k, v, **options)
            regard.attention(q, k, v, kernel=kernel, **options)
            if dtype.itemsize < 8:
                run(kernel, q, k, v, precision="exact", **options)
            assert np.geterr() == before, options
            np.testing.assert_array_equal(np.ones(3, np.float32) + np.ones(3, np.float32), 2.0)


@every_kernel
def test_numbers_leave_rounding_and_denormals_of_the_process_alone(kernel):
    denormal = np.array([5e-324, 1e-310])
    narrow = np.array([1e-45, 1e-40], np.float32)
    q, k, v = inputs((64, 64), (64, 64), (64, 64), size=1e3)
    run(kernel, q, k, v)
    np.testing.assert_array_equal(denormal / 1.0 > 0, True)
    np.testing.assert_array_equal(narrow / np.float32(1.0) > 0, True)
    assert 1.0 + 2.0**-53 == 1.0
    assert -1.0 - 2.0**-53 == -1.0
    assert 1.0 + (2.0**-53 + 2.0**-60) > 1.0


@every_kernel
@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library of Linux")
def test_numbers_leave_the_exception_flags_of_the_processor_alone(kernel):
    library = ctypes.CDLL(None)
    alarming = 0xF if platform.machine() == "aarch64" else 0x1D  # all but "inexact"
    q, k, v = inputs((8, 8), (9, 8), (9, 5), size=1e20)
    q[0, 0], k[1, 1], v[2, 2], v[3] = np.nan, np.inf, -np.inf, 1e-45
    mode = library.fegetround()
    library.feclearexcept(alarming)
    regard.attention(q, k, v, kernel=kernel)
    assert library.fetestexcept(alarming) == 0
    assert library.fegetround() == mode
