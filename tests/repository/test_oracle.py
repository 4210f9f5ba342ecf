"""The oracle against numbers worked out by hand, against 50 digits, and the bound against both."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bounds import assert_within, error_bounds, precision_of
from layouts import alike, layouts
from oracle import attend, attend_exactly, total

BOTH = pytest.mark.parametrize("oracle", [attend, attend_exactly])
ROUNDINGS = 8 * 2.0**-53  # for answers of a handful of float64 operations on numbers around 1


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@BOTH
def test_logits_of_log_two_and_zero_weigh_two_to_one(oracle):
    answer = oracle([[1.0]], [[math.log(2)], [0.0]], [[3.0], [6.0]], scale=1.0)
    np.testing.assert_allclose(answer.weights, [[2 / 3, 1 / 3]], rtol=ROUNDINGS)
    np.testing.assert_allclose(answer.output, [[4.0]], rtol=ROUNDINGS)
    np.testing.assert_allclose(answer.lse, [math.log(3)], rtol=ROUNDINGS)


@BOTH
def test_the_scale_is_one_over_the_root_of_the_width(oracle):
    answer = oracle([[2.0] * 4], [[math.log(2)] * 4, [0.0] * 4], [[1.0], [0.0]])
    np.testing.assert_allclose(answer.weights, [[16 / 17, 1 / 17]], rtol=ROUNDINGS)


@BOTH
def test_the_softcap_comes_before_the_bias(oracle):
    answer = oracle([[100.0]], [[1.0], [-1.0]], [[1.0], [0.0]], softcap=2.0, bias=[[-3.0, 1.0]])
    np.testing.assert_allclose(answer.logits, [[-1.0, -1.0]], rtol=ROUNDINGS)
    np.testing.assert_allclose(answer.output, [[0.5]], rtol=ROUNDINGS)


@BOTH
def test_a_sink_takes_weight_and_gives_no_value(oracle):
    answer = oracle([[0.0]], [[1.0]], [[8.0]], sink=math.log(3))
    np.testing.assert_allclose(answer.output, [[2.0]], rtol=ROUNDINGS)
    np.testing.assert_allclose(answer.lse, [math.log(4)], rtol=ROUNDINGS)


@BOTH
@pytest.mark.parametrize(("sink", "lse"), [(None, -math.inf), (0.7, 0.7), (-math.inf, -math.inf)])
def test_a_row_that_sees_nothing_is_zero(oracle, sink, lse):
    answer = oracle([[1.0]], [[math.nan]], [[math.nan]], mask=[[False]], sink=sink)
    np.testing.assert_array_equal(answer.output, [[0.0]])
    np.testing.assert_array_equal(answer.weights, [[0.0]])
    np.testing.assert_array_equal(answer.lse, [lse])


def seen(length, size, **options):
    zeros = np.zeros((length, 1)), np.zeros((size, 1)), np.zeros((size, 1))
    return attend(*zeros, **options).visible.astype(int).tolist()


def test_causal_counts_from_the_offset():
    assert seen(2, 3, causal=True) == [[1, 0, 0], [1, 1, 0]]
    assert seen(2, 3, causal=True, offset="end") == [[1, 1, 0], [1, 1, 1]]
    assert seen(2, 3, causal=True, offset=-1) == [[0, 0, 0], [1, 0, 0]]


def test_windows_include_both_of_their_ends():
    assert seen(3, 4, window=(1, 0)) == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert seen(3, 4, window=(0, 1)) == [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert seen(3, 4, window=(None, 0), offset=1) == [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_every_rule_must_allow_a_key():
    options = {"causal": True, "lengths": 2, "segments": ([0, 0, 1], [0, 0, 1])}
    assert seen(3, 3, **options) == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]
    assert seen(3, 3, **options, mask=lambda b, h, i, j, p: i != j) == [[0] * 3, [1, 0, 0], [0] * 3]
    assert seen(3, 3, bias=[-math.inf, 0, -1e300]) == [[0, 1, 1]] * 3


def test_offsets_and_lengths_may_differ_within_the_batch():
    q = np.zeros((2, 1, 1, 1))
    k = np.zeros((2, 1, 3, 1))
    assert attend(q, k, k, causal=True, offset=[0, 2]).visible.sum(axis=-1).ravel().tolist() == [
        1,
        3,
    ]
    assert attend(q, k, k, lengths=[2, 0]).visible.sum(axis=-1).ravel().tolist() == [2, 0]


@BOTH
def test_heads_share_a_key_head_in_consecutive_groups(oracle):
    q, k = np.zeros((4, 1, 1)), np.zeros((2, 1, 1))
    answer = oracle(q, k, np.array([[[10.0]], [[20.0]]]))
    assert answer.output.ravel().tolist() == [10.0, 10.0, 20.0, 20.0]


@BOTH
@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 1, 2, 3, 4), (1, 3, 2, 5, 4), (3, 2, 5, 6)),
        ((2, 3, 4), (7, 2, 5, 4), (7, 2, 5, 6)),
        ((3, 4), (5, 4), (5, 6)),
    ],
)
def test_leading_axes_broadcast_as_einsum_does(oracle, shapes):
    q, k, v = (normal(*shape, seed=n) for n, shape in enumerate(shapes))
    scores = np.einsum("...id,...jd->...ij", q, k) / 2.0
    powers = np.exp(scores)
    weights = powers / powers.sum(axis=-1, keepdims=True)
    answer = oracle(q, k, v)
    np.testing.assert_allclose(answer.weights, weights, rtol=64 * ROUNDINGS)
    np.testing.assert_allclose(
        answer.output, np.einsum("...ij,...jd->...id", weights, v), atol=64 * ROUNDINGS
    )
    np.testing.assert_allclose(answer.lse, np.log(powers.sum(axis=-1)), atol=64 * ROUNDINGS)


def test_a_vector_is_a_row_without_its_axis():
    q, k, v = normal(4), normal(5, 4, seed=1), normal(5, 3, seed=2)
    one, row = attend(q, k, v), attend(q[np.newaxis], k, v)
    assert (one.output.shape, one.weights.shape, one.lse.shape) == ((3,), (5,), ())
    np.testing.assert_array_equal(one.output, row.output[0])


def test_a_nan_reaches_what_depends_on_it_and_nothing_else():
    q, k, v = normal(3, 2), normal(3, 2, seed=1), normal(3, 2, seed=2)
    k[1, 0] = math.nan
    v[2, 1] = math.nan
    answer = attend(q, k, v, causal=True)
    np.testing.assert_array_equal(
        np.isnan(answer.output), [[False, False], [True, True], [True, True]]
    )
    k = normal(3, 2, seed=1)
    answer = attend(q, k, v, causal=True)
    np.testing.assert_array_equal(
        np.isnan(answer.output), [[False, False], [False, False], [False, True]]
    )


def test_infinite_scores_follow_ieee():
    answer = attend([[1.0]], [[math.inf], [0.0]], [[1.0], [2.0]])
    assert math.isnan(answer.output[0, 0])
    answer = attend([[1.0]], [[-math.inf], [0.0]], [[1.0], [2.0]])
    assert answer.output.tolist() == [[2.0]]
    answer = attend([[1.0]], [[-math.inf]], [[1.0]])
    assert math.isnan(answer.output[0, 0])


def test_sums_lose_nothing():
    assert total([1e100, 1.0, -1e100]) == 1.0
    assert total([math.inf, 1.0]) == math.inf
    assert math.isnan(total([math.inf, -math.inf]))
    assert total([1.7e308, 1.7e308]) == math.inf
    assert total([]) == 0.0


@st.composite
def problems(draw):
    """Random numbers of random shapes, and options of every kind."""
    count = st.integers(1, 4)
    heads, groups, length, size, d, e = (draw(count) for _ in range(6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    heads *= groups
    spread = draw(st.sampled_from([0.1, 1.0, 5.0]))
    q = rng.normal(size=(heads, length, d)) * spread
    k = rng.normal(size=(groups, size, d)) * spread
    v = rng.normal(size=(groups, size, e))
    bias = rng.normal(size=(length, size))
    bias[rng.random((length, size)) < 0.2] = -np.inf
    options = {
        "mask": rng.random((heads, length, size)) < 0.7,
        "bias": bias,
        "causal": True,
        "window": (draw(st.integers(0, 3)), draw(st.sampled_from([0, 2, None]))),
        "offset": draw(st.sampled_from([0, 1, -1, "end"])),
        "scale": draw(st.sampled_from([1.0, -0.5, 0.0])),
        "softcap": draw(st.sampled_from([0.5, 10.0])),
        "sink": rng.normal(size=heads),
        "lengths": draw(st.integers(0, size)),
    }
    kept = draw(st.sets(st.sampled_from(sorted(options))))
    return q, k, v, {name: options[name] for name in kept}


@given(problems())
def test_the_two_oracles_agree_to_the_precision_of_float64(problem):
    q, k, v, options = problem
    floats, exact = attend(q, k, v, **options), attend_exactly(q, k, v, **options)
    np.testing.assert_array_equal(floats.visible, exact.visible)
    options = {n: options[n] for n in ("scale", "softcap", "bias", "sink") if n in options}
    bound = error_bounds(q, k, v, exact, dtype=np.float64, **options)
    assert_within(floats.output, exact.output, bound.output)
    assert_within(floats.weights, exact.weights, bound.weights)
    assert_within(floats.lse, exact.lse, bound.lse)


def test_fifty_digits_are_enough_where_floats_overflow():
    q, k = [[1e38]], [[1e38], [np.nextafter(1e38, 0)]]
    answer = attend_exactly(q, k, [[1.0], [2.0]], scale=1e300)
    assert answer.weights.tolist() == [[1.0, 0.0]]
    assert answer.lse.tolist() == [math.inf]
    answer = attend_exactly(q, k, [[1.0], [2.0]], scale=1e-300)
    np.testing.assert_allclose(answer.weights, [[0.5, 0.5]], rtol=ROUNDINGS)


def test_fifty_digits_give_the_digits_of_an_exponential():
    answer = attend_exactly([[1.0]], [[1.0], [0.0]], [[1.0], [0.0]])
    with mpmath.workdps(60):
        expected = float(mpmath.mp.e / (mpmath.mp.e + 1))
    assert answer.output.tolist() == [[expected]]


def naive(q, k, v, dtype):
    """Attention as one would first write it, in the working precision."""
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    scores = (q @ k.T) * dtype(1 / math.sqrt(q.shape[-1]))
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = powers / powers.sum(axis=-1, keepdims=True)
    return weights @ v


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_an_honest_result_is_within_its_bound(dtype, spread):
    q, k, v = normal(6, 16), normal(60, 16, seed=1), normal(60, 5, seed=2)
    q, k, v = ((x * s).astype(dtype) for x, s in ((q, spread), (k, spread), (v, 1.0)))
    answer = attend_exactly(q, k, v)
    bound = error_bounds(q, k, v, answer, dtype=dtype)
    assert_within(naive(q, k, v, dtype), answer.output, bound.output)


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_the_bound_is_tight_enough_to_notice_a_narrower_dtype(spread):
    q, k, v = normal(6, 16), normal(60, 16, seed=1), normal(60, 5, seed=2)
    q, k, v = ((x * s).astype(np.float32) for x, s in ((q, spread), (k, spread), (v, 1.0)))
    answer = attend(q, k, v)
    bound = error_bounds(q, k, v, answer, dtype=np.float32)
    assert bound.output.max() < 200 * precision_of(np.float32).unit * abs(v).max()
    with pytest.raises(AssertionError, match="off by"):
        assert_within(naive(q, k, v, np.float16).astype(np.float32), answer.output, bound.output)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_bound_is_tight_enough_to_notice_one_key_too_many(dtype):
    q, k, v = normal(6, 16), normal(60, 16, seed=1), normal(60, 5, seed=2)
    mask = np.ones((6, 60), bool)
    mask[3, 17] = False
    answer = attend_exactly(q, k, v, mask=mask)
    bound = error_bounds(q, k, v, answer, dtype=dtype)
    with pytest.raises(AssertionError, match="of 30 numbers are off"):
        assert_within(naive(q, k, v, dtype), answer.output, bound.output)


def test_where_no_kernel_could_know_the_weights_the_bound_is_the_range_of_the_values():
    q, k = np.full((1, 1), 1e19), np.array([[1e19], [1.0000001e19]])
    v = np.array([[-3.0], [5.0]])
    answer = attend_exactly(q, k, v)
    bound = error_bounds(q, k, v, answer, dtype=np.float32).output
    assert answer.output[0, 0] == 5.0
    np.testing.assert_allclose(bound, [[8.0]], rtol=1e-5)


def test_what_is_not_seen_does_not_loosen_the_bound():
    q, k, v = normal(2, 4), normal(3, 4, seed=1), normal(3, 2, seed=2)
    mask = np.array([True, True, False])
    answer = attend(q, k, v, mask=mask)
    clean = error_bounds(q, k, v, answer, dtype=np.float32)
    k[2], v[2] = 1e30, math.nan
    poisoned = error_bounds(q, k, v, attend(q, k, v, mask=mask), dtype=np.float32)
    np.testing.assert_array_equal(poisoned.output, clean.output)
    np.testing.assert_array_equal(poisoned.lse, clean.lse)


@pytest.mark.parametrize(
    ("actual", "exact"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.inf, 1.0),
        (1.0, math.inf),
        (-math.inf, math.inf),
        (math.nan, math.inf),
        (1.0, -math.inf),
    ],
)
def test_a_comparison_treats_nan_and_infinity_as_data(actual, exact):
    one = np.ones(2)
    with pytest.raises(AssertionError):
        assert_within(np.array([1.0, actual]), np.array([1.0, exact]), one)
    assert_within(np.array([1.0, exact]), np.array([1.0, exact]), one)


def test_a_comparison_wants_the_same_shape():
    with pytest.raises(AssertionError, match="shape"):
        assert_within(np.ones((1, 2)), np.ones(2), np.ones(2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.bool_, np.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (1, 2, 1, 3), (2, 0)])
def test_all_layouts_hold_the_same_numbers(shape, dtype):
    x = alike(np.asarray(normal(*shape) * 3).astype(dtype), (0,) if shape else ())
    names = set()
    for name, y in layouts(x):
        np.testing.assert_array_equal(y, x, name)
        names.add(name)
    assert {"unaligned", "read-only"} <= names
    if len(shape) == 3:
        assert {"zero stride in axis 0", "negative strides", "heads after rows"} <= names


@given(st.integers(-6, 6), st.integers(0, 3))
def test_the_window_and_causal_of_the_oracle_are_those_of_a_table(offset, reach):
    expected = [
        [int(j <= i + offset and i + offset - reach <= j) for j in range(5)] for i in range(4)
    ]
    assert seen(4, 5, causal=True, window=(reach, None), offset=offset) == expected
    assert seen(4, 5, window=(reach, 0), offset=offset) == expected
