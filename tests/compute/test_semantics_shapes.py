"""Shapes: leading axes, missing axes, grouped heads, and sizes of zero."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

import regard
from calls import assert_same_bytes, check, every_kernel, inputs, numbers, run
from oracle import attend

SIZES = (0, 1, 2)


@every_kernel
@pytest.mark.parametrize(
    ("query", "key", "value", "output"),
    [
        ((3, 4), (5, 4), (5, 6), (3, 6)),
        ((2, 3, 4), (2, 5, 4), (2, 5, 6), (2, 3, 6)),
        ((7, 2, 3, 4), (7, 2, 5, 4), (7, 2, 5, 6), (7, 2, 3, 6)),
        ((2, 3, 2, 3, 4), (2, 3, 2, 5, 4), (2, 3, 2, 5, 6), (2, 3, 2, 3, 6)),
    ],
)
def test_shapes_follow_the_alphabet(kernel, query, key, value, output):
    result, _ = check(kernel, *inputs(query, key, value))
    assert result.output.shape == output
    assert result.weights.shape == (*query[:-1], key[-2])
    assert result.lse.shape == query[:-1]


@every_kernel
def test_shapes_of_a_vector_query_have_no_axis_for_rows(kernel):
    result, _ = check(kernel, *inputs((4,), (5, 4), (5, 6)))
    assert result.output.shape == (6,)
    assert result.weights.shape == (5,)
    assert result.lse.shape == ()


@every_kernel
def test_shapes_of_a_vector_query_take_masks_and_biases_over_the_keys(kernel):
    q, k, v = inputs((4,), (5, 4), (5, 6))
    mask, bias = np.array([True, False, True, True, False]), numbers((5,), seed=9)
    check(kernel, q, k, v, mask=mask, bias=bias, sink=0.5)
    check(kernel, q, k, v, causal=True, offset=2)
    check(kernel, q, k, v, window=(1, 0), offset="end")


@every_kernel
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((7, 2, 3, 4), (2, 5, 4), (2, 5, 6)),
        ((2, 3, 4), (7, 2, 5, 4), (7, 2, 5, 6)),
        ((2, 3, 4), (2, 5, 4), (7, 2, 5, 6)),
        ((7, 1, 2, 3, 4), (1, 3, 2, 5, 4), (3, 2, 5, 6)),
        ((1, 2, 3, 4), (7, 2, 5, 4), (1, 2, 5, 6)),
        ((0, 2, 3, 4), (1, 2, 5, 4), (2, 5, 6)),
    ],
)
def test_shapes_of_leading_axes_broadcast_as_in_numpy(kernel, query, key, value):
    result, answer = check(kernel, *inputs(query, key, value))
    assert result.output.shape == answer.output.shape
    assert result.output.flags.writeable


@every_kernel
def test_shapes_that_broadcast_give_the_bytes_of_repeated_inputs(kernel):
    q, k, v = inputs((3, 2, 4, 8), (2, 9, 8), (1, 2, 9, 5))
    small = run(kernel, q, k, v)
    full = run(kernel, q, *(np.broadcast_to(x, (3, *x.shape[-3:])).copy() for x in (k, v)))
    assert_same_bytes(small.output, full.output)
    assert_same_bytes(small.lse, full.lse)


@every_kernel
@pytest.mark.parametrize("e", [1, 3, 4, 5, 9])
def test_shapes_of_values_may_have_another_width(kernel, e):
    result, _ = check(kernel, *inputs((2, 3, 4), (2, 5, 4), (2, 5, e)))
    assert result.output.shape == (2, 3, e)


@every_kernel
@pytest.mark.parametrize("order", ["heads first", "rows first"])
def test_shapes_of_head_axes_and_row_axes_are_not_confused(kernel, order):
    shapes = ((3, 5, 4), (3, 5, 4), (3, 5, 4)) if order == "heads first" else ((5, 3, 4),) * 3
    check(kernel, *inputs(*shapes))


@every_kernel
@pytest.mark.parametrize(
    ("query", "key", "value", "names", "figures"),
    [
        ((3, 4), (5, 4), (6, 4), ("key", "value"), ("5", "6")),
        ((3, 4), (5, 3), (5, 4), ("query", "key"), ("4", "3")),
        ((2, 2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4), ("query", "key"), ("2", "3")),
        ((2, 2, 3, 4), (2, 2, 5, 4), (3, 2, 5, 4), ("value",), ("2", "3")),
        ((2, 3, 4), (2, 5, 4), (1, 5, 4), ("key", "value"), ("2", "1")),
        ((2, 3, 4), (1, 5, 4), (2, 5, 4), ("key", "value"), ("2", "1")),
        ((3, 2, 4), (2, 5, 4), (2, 5, 4), ("query", "key"), ("3", "2")),
        ((2, 2, 4), (3, 5, 4), (3, 5, 4), ("query", "key"), ("2", "3")),
        ((2, 2, 4), (0, 5, 4), (0, 5, 4), ("query", "key"), ("2", "0")),
        ((), (5, 4), (5, 4), ("query",), ()),
        ((3, 4), (4,), (4,), ("key",), ()),
        ((3, 4), (5, 4), (5,), ("value",), ()),
    ],
)
def test_shapes_that_do_not_fit_are_refused_by_name(kernel, query, key, value, names, figures):
    q, k, v = (np.ones(shape, np.float32) for shape in (query, key, value))
    with pytest.raises(ValueError, match="|".join(names)) as caught:
        regard.attention(q, k, v, kernel=kernel)
    assert isinstance(caught.value, regard.ShapeError)
    cause = str(caught.value).split(" (query")[0]
    for word in (*names, *figures):
        assert word in cause


def test_shapes_in_an_error_are_those_of_the_call():
    q, k, v = (np.ones(s, np.float32) for s in ((2, 8, 3, 64), (2, 8, 12, 64), (2, 8, 10, 64)))
    with pytest.raises(regard.ShapeError) as caught:
        regard.attention(q, k, v)
    message = str(caught.value)
    assert message.startswith("key has 12 rows but value has 10; they must match (")
    assert "key (2, 8, 12, 64)" in message
    assert "value (2, 8, 10, 64)" in message
    assert message.count("(2, 8, 12, 64)") == 1


@every_kernel
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (6, 2), (6, 3), (4, 1), (3, 3), (8, 4)])
def test_grouped_heads_read_the_key_head_of_their_group(kernel, heads, groups):
    q, k, v = inputs((2, heads, 3, 4), (2, groups, 5, 4), (2, groups, 5, 6))
    result, _ = check(kernel, q, k, v)
    repeats = heads // groups
    full, _ = check(kernel, q, k.repeat(repeats, axis=1), v.repeat(repeats, axis=1))
    assert result.output.shape == full.output.shape


@every_kernel
def test_grouped_heads_are_consecutive_not_interleaved(kernel):
    q, k = np.zeros((4, 1, 2), np.float32), np.zeros((2, 3, 2), np.float32)
    v = np.stack([np.full((3, 1), 10.0), np.full((3, 1), 20.0)]).astype(np.float32)
    output = regard.attention(q, k, v, kernel=kernel)
    np.testing.assert_array_equal(output.ravel(), [10, 10, 20, 20])


@every_kernel
def test_grouped_heads_have_masks_biases_and_sinks_of_their_own(kernel):
    q, k, v = inputs((2, 4, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6))
    mask = np.random.default_rng(3).random((2, 4, 3, 5)) < 0.6
    bias, sink = numbers((4, 3, 5), seed=5), numbers((4,), seed=6)
    check(kernel, q, k, v, mask=mask, bias=bias, sink=sink)


@every_kernel
@pytest.mark.parametrize(
    ("heads", "groups"), [(h, g) for h in range(7) for g in range(7) if g and h % g]
)
def test_grouped_heads_that_do_not_divide_are_refused(kernel, heads, groups):
    q, k, v = inputs((heads, 2, 4), (groups, 3, 4), (groups, 3, 4))
    with pytest.raises(regard.ShapeError, match=rf"{heads}.*{groups}"):
        regard.attention(q, k, v, kernel=kernel)


@pytest.mark.sweep
@every_kernel
@pytest.mark.parametrize("precision", ["working", "exact"])
def test_empty_sizes_of_every_kind_give_the_right_shapes_and_numbers(kernel, precision):
    for b, h, length, size, d, e in itertools.product(SIZES, repeat=6):
        q, k, v = inputs((b, h, length, d), (b, h, size, d), (b, h, size, e))
        result, _ = check(kernel, q, k, v, precision=precision)
        assert result.output.shape == (b, h, length, e)
        assert result.weights.shape == (b, h, length, size)
        assert result.lse.shape == (b, h, length)


@every_kernel
def test_empty_sizes_of_values_leave_the_sum_over_many_keys_whole(kernel):
    result, _ = check(kernel, *inputs((2, 4), (300, 4), (300, 0)))
    np.testing.assert_allclose(result.weights.sum(axis=-1), 1, rtol=1e-4)


@every_kernel
def test_empty_sizes_go_with_every_option(kernel):
    for h, length, size, d, e in itertools.product(SIZES, repeat=5):
        q, k, v = inputs((h, length, d), (h, size, d), (h, size, e))
        check(
            kernel,
            q,
            k,
            v,
            mask=np.ones((length, size), bool),
            bias=np.zeros((h, 1, size)),
            causal=True,
            window=(1, 0),
            offset="end",
            softcap=2.0,
            sink=np.zeros(h),
        )


@every_kernel
@pytest.mark.parametrize(
    "mask",
    [regard.masks.Causal(), regard.masks.Window(1, 1), regard.masks.Lengths(0)],
    ids=["causal", "window", "lengths"],
)
def test_empty_sizes_go_with_mask_objects(kernel, mask):
    for length, size in itertools.product(SIZES, repeat=2):
        q, k, v = inputs((2, length, 3), (2, size, 3), (2, size, 1))
        for rule in (mask, ~mask, mask & mask, mask | ~mask):
            result = run(kernel, q, k, v, mask=rule, offset=0)
            assert result.weights.shape == (2, length, size)


@every_kernel
def test_empty_sizes_of_heads_never_divide_by_zero(kernel):
    for heads, groups in itertools.product(SIZES, repeat=2):
        q, k, v = inputs((2, heads, 3, 4), (2, groups, 5, 4), (2, groups, 5, 6))
        if heads and (groups == 0 or heads % groups):
            with pytest.raises(regard.ShapeError):
                run(kernel, q, k, v)
        else:
            assert run(kernel, q, k, v).output.shape == (2, heads, 3, 6)


@every_kernel
def test_empty_sizes_of_keys_give_zeros_and_a_log_sum_of_minus_infinity(kernel):
    result = run(kernel, *inputs((2, 3, 4), (2, 0, 4), (2, 0, 5)))
    np.testing.assert_array_equal(result.output, np.zeros((2, 3, 5)))
    np.testing.assert_array_equal(result.lse, np.full((2, 3), -np.inf))
    assert not np.signbit(result.output).any()


@every_kernel
@pytest.mark.parametrize("scale", [None, 2.0])
def test_empty_sizes_of_key_width_mean_equal_weights(kernel, scale):
    result = run(kernel, *inputs((2, 3, 0), (2, 4, 0), (2, 4, 5)), scale=scale)
    np.testing.assert_array_equal(result.weights, np.full((2, 3, 4), 0.25))


def test_empty_sizes_never_end_the_process():
    program = """
import itertools, numpy, regard
from regard.compute.dispatch import kernels
for kernel in [one.name for one in kernels() if "usable" in one.status()]:
    for dtype in (numpy.float16, numpy.float32, numpy.float64):
        for b, h, g, l, s, d, e in itertools.product((0, 1, 2), repeat=7):
            q, k, v = (numpy.ones(n, dtype) for n in ((b, h, l, d), (b, g, s, d), (b, g, s, e)))
            try:
                regard.attention(q, k, v, causal=True, offset=0, kernel=kernel, return_lse=True)
            except ValueError:
                assert h and (g == 0 or h % g)
        for lead in ((0, 9999), (2, 0, 9999), (9999, 0)):  # an empty axis before a long one
            x = numpy.ones((*lead, 1, 2, 3), dtype)
            seen = numpy.ones((*lead, 1, 2, 2), bool)
            assert regard.attention(x, x, x, kernel=kernel).size == 0
            result = regard.attention(x, x, x, mask=seen, kernel=kernel, return_lse=True)
            assert result.lse.shape == (*lead, 1, 2)
            assert regard.gradients(x, x, x, x, kernel=kernel).query.shape == x.shape
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_empty_sizes_agree_with_what_the_oracle_says_of_them():
    answer = attend(np.zeros((2, 0)), np.zeros((3, 0)), np.arange(3.0)[:, np.newaxis])
    np.testing.assert_array_equal(answer.output, [[1.0], [1.0]])
