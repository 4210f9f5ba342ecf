"""What comes back: its form, its dtype, its owner; and `out=`."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest

import regard
from calls import (
    assert_same_bytes,
    assert_same_result,
    every_float,
    every_kernel,
    inputs,
    numbers,
    run,
)
from layouts import layouts, unaligned
from oracle import attend

SHAPES = (2, 3, 4), (2, 5, 4), (2, 5, 6)


@every_kernel
def test_result_without_more_is_the_output_itself(kernel):
    q, k, v = inputs(*SHAPES)
    output = regard.attention(q, k, v, kernel=kernel)
    assert type(output) is np.ndarray
    assert_same_bytes(output, run(kernel, q, k, v).output)


@every_kernel
@pytest.mark.parametrize(("weights", "lse"), [(True, False), (False, True), (True, True)])
def test_result_with_more_has_names_and_unpacks_in_their_order(kernel, weights, lse):
    q, k, v = inputs(*SHAPES)
    names = ("output", *["weights"] * weights, *["lse"] * lse)
    result = regard.attention(q, k, v, return_weights=weights, return_lse=lse, kernel=kernel)
    assert isinstance(result, tuple)
    assert result._fields == names
    full = run(kernel, q, k, v)
    for name, part in zip(names, result, strict=True):
        assert type(part) in (np.ndarray, np.float32)
        assert_same_bytes(part, getattr(full, name), name)
        assert_same_bytes(getattr(result, name), part, name)


@every_kernel
@pytest.mark.parametrize("shapes", [SHAPES, ((4,), (5, 4), (5, 6)), ((1, 4), (1, 4), (1, 1))])
@every_float
def test_result_is_the_same_whatever_else_is_asked_for(kernel, dtype, shapes):
    q, k, v = inputs(*shapes, dtype=dtype)
    outputs = [
        regard.attention(q, k, v, kernel=kernel, return_weights=w, return_lse=e)
        for w, e in itertools.product((False, True), repeat=2)
    ]
    outputs = [x if isinstance(x, np.ndarray) else x.output for x in outputs]
    answer = attend(q, k, v)
    for output in outputs:
        assert output.shape == answer.output.shape
        assert_same_bytes(output, outputs[0])


@every_kernel
def test_result_owns_its_memory(kernel):
    q, k, v = inputs(*SHAPES)
    result = run(kernel, q, k, v)
    copies = [x.copy() for x in result]
    for part in result:
        assert part.flags.writeable
        assert not any(np.shares_memory(part, x) for x in (q, k, v))
    for one, other in itertools.combinations(result, 2):
        assert not np.shares_memory(one, other)
    q[:], k[:], v[:] = 0, 0, 0
    del q, k, v
    gc.collect()
    for part, copy in zip(result, copies, strict=True):
        assert_same_bytes(part, copy)
        part[...] = 0


@every_kernel
def test_result_of_one_call_is_not_touched_by_the_next(kernel):
    q, k, v = inputs(*SHAPES)
    first = run(kernel, q, k, v)
    copies = [x.copy() for x in first]
    run(kernel, q * 2, k, v)
    for part, copy in zip(first, copies, strict=True):
        assert_same_bytes(part, copy)


@every_kernel
def test_result_is_contiguous_and_in_native_order(kernel):
    q, k, v = (x.astype(">f4") for x in inputs(*SHAPES))
    for part in run(kernel, q, k, v):
        assert part.dtype == np.float32
        assert part.dtype.isnative
        assert part.flags.c_contiguous
        assert part.flags.aligned


@every_kernel
def test_result_of_a_subclass_is_a_plain_array(kernel):
    class Tagged(np.ndarray):
        pass

    q, k, v = inputs(*SHAPES)
    for tagged in itertools.product((False, True), repeat=3):
        arrays = [x.view(Tagged) if t else x for x, t in zip((q, k, v), tagged, strict=True)]
        assert type(regard.attention(*arrays, kernel=kernel)) is np.ndarray


# out= ---------------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_out_receives_the_bytes_and_is_returned(kernel, dtype):
    q, k, v = inputs(*SHAPES, dtype=dtype)
    expected = run(kernel, q, k, v)
    out = np.full((2, 3, 6), np.nan, dtype)
    assert regard.attention(q, k, v, out=out, kernel=kernel) is out
    assert_same_bytes(out, expected.output)
    out[...] = np.nan
    result = run(kernel, q, k, v, out=out)
    assert result.output is out
    assert_same_result(result, expected)


@every_kernel
@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_in_float32_receives_half_results_before_their_rounding(kernel, dtype):
    q, k, v = (array.astype(dtype) for array in inputs(*SHAPES))
    unrounded = np.empty((2, 3, 6), np.float32)
    result = run(kernel, q, k, v, out=unrounded)
    assert result.output is unrounded
    # An output in float32 has the arithmetic of float32.
    assert_same_bytes(unrounded.astype(dtype), run(kernel, q, k, v, precision="high").output)
    assert (unrounded != unrounded.astype(dtype).astype(np.float32)).any()
    grad = np.ones_like(result.output, dtype=dtype)
    given = regard.gradients(q, k, v, grad, output=unrounded, lse=result.lse)
    for made, expected in zip(given, regard.gradients(q, k, v, grad), strict=True):
        if made is not None:
            assert_same_bytes(made, expected)


@every_kernel
def test_out_is_filled_where_rows_are_empty_too(kernel):
    q, k, v = inputs(*SHAPES)
    out = np.full((2, 3, 6), np.nan, np.float32)
    run(kernel, q, k, v, mask=False, out=out)
    np.testing.assert_array_equal(out, 0.0)
    out[...] = np.nan
    run(kernel, q, k[:, :0], v[:, :0], out=out)
    np.testing.assert_array_equal(out, 0.0)


@every_kernel
@pytest.mark.parametrize("shapes", [((4,), (5, 4), (5, 6)), ((0, 4), (5, 4), (5, 6))])
def test_out_goes_with_every_number_of_axes(kernel, shapes):
    q, k, v = inputs(*shapes)
    expected = run(kernel, q, k, v).output
    out = np.full(expected.shape, np.nan, np.float32)
    assert regard.attention(q, k, v, out=out, kernel=kernel) is out
    assert_same_bytes(out, expected)


@every_kernel
@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.full((2, 3, 5), 7, np.float32), ValueError),
        (np.full((3, 6), 7, np.float32), ValueError),
        (np.full((1, 3, 6), 7, np.float32), ValueError),
        (np.full((1, 2, 3, 6), 7, np.float32), ValueError),
        (np.full((2, 6, 3), 7, np.float32), ValueError),
        (np.full((), 7, np.float32), ValueError),
        (np.full((2, 3, 6), 7, np.float64), (TypeError, ValueError)),
        (np.full((2, 3, 6), 7, np.float16), (TypeError, ValueError)),
        (np.full((2, 3, 6), 7, np.int32), (TypeError, ValueError)),
        (np.full((2, 3, 6), 7, complex), (TypeError, ValueError)),
        (np.full((2, 3, 6), 7, object), (TypeError, ValueError)),
    ],
    ids=lambda x: f"{x.dtype}-{x.shape}" if isinstance(x, np.ndarray) else "",
)
def test_out_that_does_not_fit_is_refused_and_left_alone(kernel, out, error):
    with pytest.raises(error, match="out") as caught:
        regard.attention(*inputs(*SHAPES), out=out, kernel=kernel)
    assert isinstance(caught.value, (regard.ShapeError, regard.OptionError, regard.DtypeError))
    np.testing.assert_array_equal(out, 7)


@every_kernel
def test_out_that_is_read_only_is_refused_and_left_alone(kernel):
    out = np.full((2, 3, 6), 7, np.float32)
    out.setflags(write=False)
    with pytest.raises(ValueError, match="out"):
        regard.attention(*inputs(*SHAPES), out=out, kernel=kernel)
    np.testing.assert_array_equal(out, 7)


@every_kernel
@pytest.mark.parametrize(
    "out", [[[0.0]], "out", 1.0, np.float32(1), np.ma.zeros((2, 3, 6))], ids=repr
)
def test_out_that_is_not_an_array_is_refused(kernel, out):
    with pytest.raises((TypeError, ValueError), match="out"):
        regard.attention(*inputs(*SHAPES), out=out, kernel=kernel)


@every_kernel
def test_out_is_left_alone_when_anything_else_is_wrong(kernel):
    q, k, v = inputs(*SHAPES)
    out = np.full((2, 3, 6), 7, np.float32)
    for options in ({"scale": np.nan}, {"mask": np.ones(9, bool)}, {"causal": True}):
        with pytest.raises(ValueError, match=r"scale|mask|offset"):
            regard.attention(q, k, v, out=out, kernel=kernel, **options)
        np.testing.assert_array_equal(out, 7)
    with pytest.raises(ValueError, match="key"):
        regard.attention(q, k[:, :4], v, out=out, kernel=kernel)
    np.testing.assert_array_equal(out, 7)


@every_kernel
def test_out_in_any_layout_is_filled(kernel):
    q, k, v = inputs(*SHAPES)
    expected = run(kernel, q, k, v).output
    for name, out in layouts(np.full((2, 3, 6), 7, np.float32)):
        if out.flags.writeable and out.dtype.isnative:
            assert regard.attention(q, k, v, out=out, kernel=kernel) is out, name
            np.testing.assert_array_equal(out, expected, name)


@every_kernel
def test_out_in_the_other_byte_order_is_refused(kernel):
    out = np.full((2, 3, 6), 7, np.dtype(np.float32).newbyteorder("S"))
    with pytest.raises((TypeError, ValueError), match="out"):
        regard.attention(*inputs(*SHAPES), out=out, kernel=kernel)
    np.testing.assert_array_equal(out, 7)


@every_kernel
def test_out_whose_numbers_lie_on_top_of_each_other_is_refused(kernel):
    q, k, v = inputs(*SHAPES)
    out = np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (2, 3, 6), (0, 0, 4))
    with pytest.raises(ValueError, match="out"):
        regard.attention(q, k, v, out=out, kernel=kernel)


@every_kernel
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_out_may_be_an_input(kernel, which):
    arrays = dict(zip(("query", "key", "value"), inputs(*[(2, 5, 4)] * 3), strict=True))
    expected = run(kernel, **{name: x.copy() for name, x in arrays.items()}, causal=True)
    before = {name: x.copy() for name, x in arrays.items()}
    result = run(kernel, **arrays, causal=True, out=arrays[which])
    assert_same_result(result, expected)
    for name in arrays.keys() - {which}:
        assert_same_bytes(arrays[name], before[name])


@every_kernel
def test_out_may_overlap_inputs_in_any_way(kernel):
    rng = np.random.default_rng(0)
    for _ in range(60):
        memory = numbers((400,), seed=1)
        starts = rng.integers(0, 400 - 40, 4)
        views = [memory[n : n + 40].reshape(2, 5, 4) for n in starts]
        if rng.random() < 0.5:
            views[rng.integers(0, 3)] = memory[399:359:-1].reshape(2, 5, 4)
        expected = run(kernel, *(x.copy() for x in views[:3]))
        outside = np.ones(400, bool)
        outside[starts[3] : starts[3] + 40] = False
        before = memory.copy()
        result = run(kernel, *views[:3], out=views[3])
        assert_same_result(result, expected)
        assert_same_bytes(memory[outside], before[outside])


@every_kernel
def test_out_may_be_the_bias(kernel):
    q, k, v = inputs((2, 5, 4), (2, 5, 4), (2, 5, 5))
    bias = numbers((2, 5, 5), seed=5)
    expected = run(kernel, q, k, v, bias=bias.copy())
    assert_same_result(run(kernel, q, k, v, bias=bias, out=bias), expected)


@every_kernel
def test_out_that_is_not_aligned_keeps_its_neighbours(kernel):
    q, k, v = inputs(*SHAPES)
    out = unaligned(np.full((2, 3, 6), 7, np.float32))
    memory = out.base
    while memory.base is not None:
        memory = memory.base
    first = memory[0]
    regard.attention(q, k, v, out=out, kernel=kernel)
    assert_same_bytes(out, run(kernel, q, k, v).output)
    assert memory[0] == first
