"""Merging partial results over disjoint keys, and the plain softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from bounds import assert_within, error_bounds
from calls import (
    FLOATS,
    answer_of,
    arithmetic_of,
    assert_same_bytes,
    every_float,
    every_kernel,
    inputs,
    numbers,
    result_dtype,
    run,
)
from layouts import layouts
from oracle import attend, attend_exactly

INF, NAN = np.inf, np.nan
SECOND_ORDER = 1.01  # of errors of errors, where bounds are added up to the first order


def merged_exactly(outputs: Any, lses: Any) -> tuple[np.ndarray, ...]:
    """Output and lse of a merge, and how far each may be off: softmax over lses, for each row."""
    outputs, lses = np.asarray(outputs), np.asarray(lses)
    dtype = outputs.dtype
    outputs, lses = outputs.astype(float), lses.astype(float)
    rows = np.moveaxis(lses, 0, -1)[..., np.newaxis, :]  # (…, 1, parts)
    values = np.moveaxis(outputs, 0, -2)  # (…, parts, E)
    values = np.broadcast_to(values, (*rows.shape[:-2], *values.shape[-2:]))
    query, key = np.zeros((*rows.shape[:-1], 0)), np.zeros((*values.shape[:-1], 0))
    shape = rows.shape[:-2]
    output = np.zeros((*shape, values.shape[-1]))
    lse, slack, lse_slack = np.zeros(shape), np.zeros_like(output), np.zeros(shape)
    for index in np.ndindex(*shape):
        problem = query[index], key[index], values[index]
        answer = attend_exactly(*problem, bias=rows[index])
        bound = error_bounds(*problem, answer, dtype=dtype, bias=rows[index])
        output[index], lse[index] = answer.output[0], answer.lse[0]
        slack[index], lse_slack[index] = bound.output[0], bound.lse[0]
    return output, lse, slack, lse_slack


def assert_merges(outputs: Any, lses: Any) -> Any:
    result = regard.merge(outputs, lses)
    output, lse, slack, lse_slack = merged_exactly(outputs, lses)
    assert_within(result.output, output, slack, "output")
    assert_within(result.lse, lse, lse_slack, "lse")
    return result


def part(options, key, value, first, last, number):
    """Keys, values and options of one part; the sink belongs to the first of the parts."""
    options = dict(options)
    for name in ("mask", "bias"):
        options[name] = options[name][..., first:last]
    if number:
        options.pop("sink", None)
    return key[..., first:last, :], value[..., first:last, :], options


# merging ------------------------------------------------------------------------------------------


CUTS = [(), (4,), (1, 2), (0,), (9,), (3, 3, 3), (1, 2, 3, 4, 5, 8)]


@pytest.mark.sweep
@every_kernel
@every_float
@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("with_sink", [False, True])
def test_merging_parts_gives_attention_over_all_keys(kernel, dtype, cuts, with_sink):
    q, k, v = inputs((2, 4, 3, 5), (2, 2, 9, 5), (2, 2, 9, 6), dtype=dtype)
    mask = np.random.default_rng(5).random((4, 3, 9)) < 0.6
    mask[1] = False
    options: dict[str, Any] = {"mask": mask, "bias": numbers((3, 9), seed=6)}
    if with_sink:
        options["sink"] = np.array([0.5, -1.0, 2.0, 0.0])
    runs = enumerate(zip((0, *cuts), (*cuts, 9), strict=True))
    parts = [part(options, k, v, *ends, number) for number, ends in runs]
    results = [run(kernel, q, keys, values, **few) for keys, values, few in parts]
    outputs, lses = [x.output for x in results], [x.lse for x in results]
    merged = assert_merges(outputs, lses)
    assert merged.output.dtype == dtype

    # How far the merged may be off: what each part may be off, and what merging them may add.
    whole = answer_of(q, k, v, **options)
    _, _, allowed, allowed_lse = merged_exactly(outputs, lses)
    for keys, values, few in parts:
        answer = answer_of(q, keys, values, **few)
        few.pop("mask")
        how = arithmetic_of(kernel, q, keys, values)
        bound = error_bounds(q, keys, values, answer, dtype=dtype, arithmetic=how, **few)
        with np.errstate(invalid="ignore"):
            share = np.nan_to_num(np.exp(answer.lse - whole.lse))
        distance = abs(answer.output - whole.output)
        allowed += share[..., np.newaxis] * (bound.output + bound.lse[..., np.newaxis] * distance)
        allowed_lse += share * bound.lse
    assert_within(merged.output, whole.output, SECOND_ORDER * allowed, "output")
    assert_within(merged.lse, whole.lse, SECOND_ORDER * allowed_lse, "lse")


@every_kernel
def test_merging_one_part_gives_it_back(kernel):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 6))
    one = run(kernel, q, k, v)
    result = regard.merge([one.output], [one.lse])
    assert_same_bytes(result.output, one.output)
    assert_same_bytes(result.lse, one.lse)


@every_float
def test_merging_nothing_but_empty_parts_gives_zero_and_minus_infinity(dtype):
    kind = np.float64 if dtype == np.float64 else np.float32
    outputs = [np.zeros((2, 3, 4), dtype)] * 3
    lses = [np.full((2, 3), -INF, kind)] * 3
    result = regard.merge(outputs, lses)
    assert_same_bytes(result.output, outputs[0])
    assert_same_bytes(result.lse, lses[0])


def test_merging_leaves_empty_parts_out():
    outputs = numbers((3, 4, 2), np.float64)
    lses = np.array([[0.0, -INF, -INF, 1.0], [1.0, 2.0, -INF, -INF], [-INF, -INF, 3.0, 2.0]])
    result = assert_merges(outputs, lses)
    assert_same_bytes(result.output[1], outputs[1, 1])
    assert_same_bytes(result.output[2], outputs[2, 2])


@every_kernel
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merging_keeps_an_infinite_output_whose_share_underflows(kernel, dtype):
    q, k, v = np.ones((1, 1), dtype), np.array([[0], [-2000]], dtype), np.ones((2, 2), dtype)
    v[1] = [np.inf, 3.0]
    parts = [
        regard.attention(q, k[j : j + 1], v[j : j + 1], return_lse=True, kernel=kernel)
        for j in range(2)
    ]
    merged = regard.merge([p.output for p in parts], [p.lse for p in parts])
    np.testing.assert_array_equal(merged.output, [[np.inf, 1.0]])


def test_merging_outputs_near_the_largest_number_stays_finite():
    top = np.finfo(np.float64).max
    merged = regard.merge([np.full((1, 1), top)] * 3, [np.array([x]) for x in (0.1, 0.2, 0.3)])
    np.testing.assert_array_less(top * (1 - 1e-15), merged.output)
    assert np.isfinite(merged.output).all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e300])
def test_merging_never_looks_at_the_output_of_an_empty_part(bad):
    outputs = numbers((2, 3, 2), np.float64)
    lses = np.array([[0.5, -INF, 0.0], [-INF, -INF, 0.0]])
    clean = regard.merge(outputs, lses)
    outputs[np.isneginf(lses)] = bad
    result = regard.merge(outputs, lses)
    np.testing.assert_array_equal(result.output[0], outputs[0, 0])
    np.testing.assert_array_equal(result.output[1], 0.0)
    assert_same_bytes(result.output[2], clean.output[2])


def test_merging_keeps_a_nan_where_it_belongs():
    outputs, lses = numbers((2, 3, 2)), numbers((2, 3), seed=1)
    clean = regard.merge(outputs, lses)
    outputs[0, 1, 1] = NAN
    result = regard.merge(outputs, lses)
    expected = np.zeros((3, 2), bool)
    expected[1, 1] = True
    np.testing.assert_array_equal(np.isnan(result.output), expected)
    assert_same_bytes(result.output[~expected], clean.output[~expected])
    assert_same_bytes(result.lse, clean.lse)
    lses[0, 2] = NAN
    result = regard.merge(outputs, lses)
    np.testing.assert_array_equal(np.isnan(result.lse), [False, False, True])
    np.testing.assert_array_equal(np.isnan(result.output[2]), True)


@pytest.mark.parametrize("height", [0.0, 100.0, -100.0, 1e4, -1e30, 1e38])
def test_merging_works_at_any_height(height):
    lses = np.array([[0.0], [np.log(3.0)]]) + height
    result = assert_merges(np.array([[[4.0]], [[8.0]]]), lses)
    if abs(height) < 1e3:
        np.testing.assert_allclose(result.output, 7.0, rtol=1e-12)
    else:
        assert 4.0 <= result.output[0, 0] <= 8.0
        assert np.isfinite(result.lse).all()


def test_merging_in_another_order_gives_the_same_within_the_bound():
    outputs, lses = numbers((4, 3, 2)), numbers((4, 3), seed=1, size=3.0)
    assert_merges(outputs, lses)
    assert_merges(outputs[::-1], lses[::-1])
    pair = regard.merge(outputs[:2], lses[:2])
    rest = regard.merge(outputs[2:], lses[2:])
    both = regard.merge([pair.output, rest.output], [pair.lse, rest.lse])
    output, _, slack, _ = merged_exactly(outputs, lses)
    assert_within(both.output, output, 4 * slack)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**32))
def test_merging_is_a_softmax_over_the_parts(parts, length, width, seed):
    rng = np.random.default_rng(seed)
    outputs = rng.normal(size=(parts, 2, length, width)).astype(np.float32)
    lses = (rng.normal(size=(parts, 2, length)) * rng.choice([0.1, 5, 100])).astype(np.float32)
    lses[rng.random(lses.shape) < 0.3] = -INF
    result = assert_merges(list(outputs), list(lses))
    assert result._fields == ("output", "lse")
    assert (result.output.shape, result.lse.shape) == (outputs.shape[1:], lses.shape[1:])


@every_float
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 2, 3, 4), (0,), (2, 0)])
def test_merging_goes_with_every_number_of_axes_and_dtype(dtype, shape):
    kind = np.float64 if dtype == np.float64 else np.float32
    outputs = numbers((3, *shape, 5), dtype)
    lses = np.asarray(numbers((3, *shape), kind, 1))
    result = assert_merges(outputs, lses)
    assert (result.output.dtype, result.lse.dtype) == (dtype, kind)
    assert (result.output.shape, result.lse.shape) == ((*shape, 5), shape)


def test_merging_any_layout_gives_the_same_bytes():
    outputs, lses = numbers((2, 3, 4)), numbers((2, 3), seed=1)
    expected = regard.merge(outputs, lses)
    for name, x in layouts(outputs):
        assert_same_bytes(regard.merge(x, lses).output, expected.output, name)
    for name, x in layouts(lses):
        assert_same_bytes(regard.merge(outputs, x).output, expected.output, name)


def test_merging_never_writes_its_inputs():
    outputs, lses = numbers((2, 3, 4)), numbers((2, 3), seed=1)
    before = outputs.copy(), lses.copy()
    result = regard.merge(outputs, lses)
    assert not np.shares_memory(result.output, outputs)
    result.output[...] = 0
    assert_same_bytes(outputs, before[0])
    assert_same_bytes(lses, before[1])
    one = regard.merge(outputs[:1], lses[:1])
    assert not np.shares_memory(one.output, outputs)


@pytest.mark.parametrize(
    ("outputs", "lses", "words"),
    [
        ([np.ones((3, 4))] * 2, [np.ones(3)], ("outputs", "lses")),
        ([np.ones((3, 4))], [np.ones(3)] * 2, ("outputs", "lses")),
        ([np.ones((3, 4)), np.ones((2, 4))], [np.ones(3)] * 2, ("outputs",)),
        ([np.ones((3, 4)), np.ones((3, 5))], [np.ones(3)] * 2, ("outputs",)),
        ([np.ones((3, 4))] * 2, [np.ones(3), np.ones(4)], ("lses",)),
        ([np.ones((3, 4))] * 2, [np.ones(4)] * 2, ("lses", "output")),
        ([np.ones((3, 4))] * 2, [np.ones((3, 4))] * 2, ("lses", "output")),
        ([], [], ("outputs",)),
    ],
)
def test_merging_parts_that_do_not_fit_is_refused_by_name(outputs, lses, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        regard.merge(outputs, lses)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", [complex, object, np.longdouble, "U3"])
@pytest.mark.parametrize("which", ["outputs", "lses"])
def test_merging_anything_but_real_numbers_is_refused_by_name(kind, which):
    arrays: dict[str, Any] = {"outputs": np.ones((2, 3, 4)), "lses": np.ones((2, 3))}
    arrays[which] = np.ones(arrays[which].shape).astype(kind)
    with pytest.raises(TypeError, match=which):
        regard.merge(**arrays)


def test_merging_never_warns():
    with np.errstate(all="raise"):
        regard.merge(np.zeros((2, 1, 1)), np.full((2, 1), -INF))
        regard.merge(np.full((2, 1, 1), 1e308), np.array([[0.0], [-1e300]]))
        regard.merge(np.full((2, 1, 1), NAN), np.array([[0.0], [NAN]]))


# softmax ------------------------------------------------------------------------------------------


def softmax_exactly(scores: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights along an axis, and how far each may be off."""
    dtype = result_dtype(scores)
    rows = np.moveaxis(scores.astype(float), axis, -1)
    weights, slack = np.zeros(rows.shape), np.zeros(rows.shape)
    size = rows.shape[-1]
    nothing = np.zeros((1, 0)), np.zeros((size, 0)), np.zeros((size, 0))
    for index in np.ndindex(*rows.shape[:-1]):
        row = rows[index][np.newaxis]
        known = np.isfinite(row) | np.isneginf(row)
        answer = (attend_exactly if known.all() else attend)(*nothing, bias=row)
        weights[index] = answer.weights[0]
        slack[index] = error_bounds(*nothing, answer, dtype=dtype, bias=row).weights[0]
    return np.moveaxis(weights, -1, axis), np.moveaxis(slack, -1, axis)


def assert_softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    weights = regard.softmax(scores, axis=axis)
    assert weights.dtype == result_dtype(scores)
    assert_within(weights, *softmax_exactly(scores, axis), "weights")
    return weights


@every_float
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 1000.0])
def test_softmax_of_every_dtype_is_within_the_bound(dtype, size):
    assert_softmax(numbers((3, 40), dtype, size=size))


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_softmax_runs_along_any_axis(axis):
    weights = assert_softmax(numbers((2, 3, 4)), axis)
    np.testing.assert_allclose(weights.sum(axis=axis), 1.0, rtol=1e-6)


def test_softmax_runs_along_the_last_axis_unless_told_otherwise():
    scores = numbers((3, 4))
    assert_same_bytes(regard.softmax(scores), regard.softmax(scores, axis=-1))


def test_softmax_of_a_list_of_integers_is_float64():
    weights = regard.softmax([0, 0])
    assert weights.dtype == np.float64
    np.testing.assert_array_equal(weights, [0.5, 0.5])
    assert_softmax(np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("dtype", [one for one in FLOATS if one.id in ("float32", "float64")])
@pytest.mark.parametrize("height", [1e4, -1e4, 1e30, -1e30, 3e38])
def test_softmax_works_at_any_height(dtype, height):
    weights = regard.softmax(np.full(4, height, dtype))
    np.testing.assert_array_equal(weights, 0.25)
    assert_softmax(np.array([height, -height, 0.0], dtype))


def test_softmax_takes_minus_infinity_for_absent():
    weights = assert_softmax(np.array([[0.0, -INF, 0.0], [-INF, -INF, -INF], [-INF, 3.0, -INF]]))
    np.testing.assert_array_equal(weights, [[0.5, 0, 0.5], [0, 0, 0], [0, 1, 0]])


def test_softmax_keeps_a_nan_in_its_row():
    scores = numbers((3, 4))
    clean = regard.softmax(scores)
    scores[1, 2] = NAN
    weights = regard.softmax(scores)
    np.testing.assert_array_equal(np.isnan(weights[1]), True)
    assert_same_bytes(weights[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_softmax_of_nothing_is_nothing(shape):
    for axis in range(len(shape)):
        assert regard.softmax(np.zeros(shape), axis=axis).shape == shape


def test_softmax_of_any_layout_gives_the_same_bytes_and_writes_nothing():
    scores = numbers((3, 4, 5))
    for axis in range(3):
        expected = regard.softmax(scores, axis=axis)
        for name, x in layouts(scores):
            assert_same_bytes(regard.softmax(x, axis=axis), expected, f"{name}, axis {axis}")
            np.testing.assert_array_equal(x, scores)


@pytest.mark.parametrize("kind", [complex, object, np.longdouble, "U3", "datetime64[s]"])
def test_softmax_of_anything_but_real_numbers_is_refused_by_name(kind):
    with pytest.raises(TypeError, match="scores"):
        regard.softmax(np.ones(3).astype(int).astype(kind))


def test_softmax_of_a_masked_array_is_refused():
    with pytest.raises(TypeError, match="scores"):
        regard.softmax(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


@pytest.mark.parametrize("axis", [2, -3, 1.0, None, "last"])
def test_softmax_along_an_axis_that_is_not_there_is_refused_by_name(axis):
    with pytest.raises((ValueError, TypeError), match="axis"):
        regard.softmax(np.ones((2, 3)), axis=axis)


def test_softmax_of_a_single_number_is_refused():
    with pytest.raises(ValueError, match=r"scores|axis"):
        regard.softmax(1.0)


def test_softmax_never_warns():
    with np.errstate(all="raise"):
        for row in ([-INF, -INF], [INF, 0.0], [NAN, 1.0], [1e308, -1e308], [0.0, -740.0]):
            regard.softmax(np.array(row))
        regard.softmax(np.array([3e38, -3e38], np.float32))
        regard.softmax(np.array([6e4, -6e4], np.float16))


@pytest.mark.parametrize("arguments", [(3, 4), (None, None), (np.float64(1), [1.0])])
def test_parts_that_are_no_sequence_are_refused(arguments):
    with pytest.raises(regard.DtypeError, match="outputs must be a sequence of arrays"):
        regard.merge(*arguments)


def test_parts_that_are_single_numbers_are_refused():
    with pytest.raises(regard.ShapeError, match=r"outputs\[0\] is a single number"):
        regard.merge(np.ones(3), np.ones(3))


def test_softmax_of_a_masked_array_says_what_softmax_takes_instead():
    with pytest.raises(regard.DtypeError, match=r"scores\.filled\(-np\.inf\)") as caught:
        regard.softmax(np.ma.masked_array([1.0, 2.0], [True, False]))
    assert "mask=" not in str(caught.value)
