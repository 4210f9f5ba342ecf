"""Who sees whom: mask, bias, position, causal, window, empty rows, and what nobody sees."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import regard
from calls import (
    answer_of,
    assert_other_numbers,
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
from regard.masks import Boolean, Causal, Lengths, Mask, Segments, Window

INF = np.inf


class EveryOther(Mask):
    """A rule of somebody's own: keys at even distances."""

    name = "every other"

    def block(self, at):
        return (at.rows[:, None] - np.arange(at.shape[-1])) % 2 == 0


class Strict(Causal):
    """A rule that looks like one of regard's and is not."""

    def block(self, at):
        return np.arange(at.shape[-1]) < at.positions


def coins(shape: tuple[int, ...], heads: float = 0.6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) < heads


# mask ---------------------------------------------------------------------------------------------


@every_kernel
def test_mask_true_means_attend(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    one = np.zeros((3, 5), bool)
    one[[0, 1, 2], [4, 0, 2]] = True
    result, _ = check(kernel, q, k, v, mask=one)
    np.testing.assert_array_equal(result.weights, one)
    np.testing.assert_array_equal(result.output, v[[4, 0, 2]])


@every_kernel
def test_mask_broadcasts_from_every_shape_that_numpy_allows(kernel):
    full = (2, 3, 4, 5)
    q, k, v = inputs((2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2))
    for keep in itertools.product((True, False), repeat=4):
        shape = tuple(n if kept else 1 for n, kept in zip(full, keep, strict=True))
        for axes in range(5):
            if all(n == 1 for n in shape[: 4 - axes]):
                mask = coins(shape[4 - axes :], seed=axes)
                check(kernel, q, k, v, mask=mask)
                check(kernel, q, k, v, mask=Boolean(mask), rule=mask)


def test_mask_of_one_s_own_rule_is_asked_and_never_taken_for_another():
    x = inputs((5, 3))[0]
    visible = np.subtract.outer(range(5), range(5))
    for rule, cells in (
        (EveryOther(), visible % 2 == 0),
        (Strict(), visible > 0),
        (~EveryOther() & Causal() | Strict(), (visible % 2 != 0) & (visible >= 0) | (visible > 0)),
    ):
        expected = regard.attention(x, x, x, mask=cells, kernel="reference")
        assert_same_bytes(regard.attention(x, x, x, mask=rule), expected)


@pytest.mark.needs("fused")
def test_mask_of_one_s_own_rule_is_refused_by_the_kernel_that_cannot_ask_it():
    x = inputs((5, 3))[0]
    with pytest.raises(regard.OptionError, match="does not know the rule EveryOther"):
        regard.attention(x, x, x, mask=Causal() & ~EveryOther(), kernel="fused")


@every_kernel
def test_mask_of_three_axes_belongs_to_heads_not_to_the_batch(kernel):
    q, k, v = inputs((3, 3, 4, 2), (3, 3, 5, 2), (3, 3, 5, 2))
    mask = coins((3, 4, 5))
    result, answer = check(kernel, q, k, v, mask=mask)
    np.testing.assert_array_equal(answer.visible, np.broadcast_to(mask, (3, 3, 4, 5)))
    np.testing.assert_array_equal(result.weights > 0, np.broadcast_to(mask, (3, 3, 4, 5)))


@every_kernel
@pytest.mark.parametrize("mask", [True, False, np.True_, [[True, False, True]]])
def test_mask_may_be_anything_that_numpy_reads_as_bools(kernel, mask):
    check(kernel, *inputs((2, 4), (3, 4), (3, 2)), mask=mask)


@every_kernel
@pytest.mark.parametrize(
    "mask",
    [
        np.ones((3, 5), np.int64),
        np.ones((3, 5), np.uint8),
        np.ones((3, 5), np.float32),
        np.zeros((3, 5)),
        np.ones((3, 5), object),
        np.ones((3, 5), complex),
        np.full((3, 5), "x"),
        np.ma.masked_array(np.ones((3, 5), bool)),
        1,
        0.0,
        [[1, 0, 1, 1, 1]],
        "causal",
        {"causal": True},
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', x)}",
)
def test_mask_of_another_kind_is_refused_by_name(kernel, mask):
    with pytest.raises(TypeError, match="mask") as caught:
        regard.attention(*inputs((3, 4), (5, 4), (5, 2)), mask=mask, kernel=kernel)
    assert isinstance(caught.value, regard.DtypeError)


def test_mask_of_integers_is_refused_with_the_reason():
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    with pytest.raises(TypeError, match="mask") as caught:
        regard.attention(q, k, v, mask=np.ones((3, 5), np.int64))
    message = str(caught.value)
    assert "int64" in message
    assert "whether 1 means attend or ignore differs" in message
    assert "mask == 1 or mask == 0" in message
    with pytest.raises(TypeError, match="bias"):
        regard.attention(q, k, v, mask=np.zeros((3, 5), np.float32))


@every_kernel
@pytest.mark.parametrize(
    ("shape", "inputs_of"),
    [
        ((3, 4), ((3, 4), (5, 4), (5, 2))),
        ((2, 5), ((3, 4), (5, 4), (5, 2))),
        ((2, 3, 5), ((3, 4), (5, 4), (5, 2))),
        ((1, 1, 3, 5), ((3, 4), (5, 4), (5, 2))),
        ((6,), ((3, 4), (5, 4), (5, 2))),
        ((3, 5), ((4,), (5, 4), (5, 2))),
        ((2, 5), ((3, 4), (1, 4), (1, 2))),
        ((2, 1, 3, 5), ((3, 3, 4), (3, 5, 4), (3, 5, 2))),
        ((2, 3, 5), ((4, 2, 3, 3, 4), (4, 2, 3, 5, 4), (4, 2, 3, 5, 2))),
    ],
)
@pytest.mark.parametrize("kind", ["mask", "mask object", "bias"])
def test_mask_or_bias_of_an_impossible_shape_is_refused_by_name(kernel, shape, inputs_of, kind):
    q, k, v = inputs(*inputs_of)
    name = "bias" if kind == "bias" else "mask"
    given: Any = np.zeros(shape) if kind == "bias" else np.ones(shape, bool)
    given = Boolean(given) if kind == "mask object" else given
    with pytest.raises(regard.ShapeError, match=name):
        regard.attention(q, k, v, kernel=kernel, **{name: given})


@every_kernel
def test_mask_objects_combine_by_and_or_and_not(kernel):
    q, k, v = inputs((2, 3, 4, 2), (2, 3, 6, 2), (2, 3, 6, 2))
    array, lengths = coins((3, 4, 6)), np.array([4, 6])

    def lets(b, h, i, j, p):
        return (j <= p and array[h, i, j]) or not (p - 1 <= j <= p + 1) or j >= lengths[b[0]]

    mask = (Causal() & Boolean(array)) | ~Window(1, 1) | ~Lengths(lengths)
    for offset in (0, 2, -1, "end", np.array([1, 2])):
        check(kernel, q, k, v, mask=mask, rule=lets, offset=offset)


@every_kernel
def test_mask_objects_and_options_must_all_allow_a_key(kernel):
    q, k, v = inputs((2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 3))
    array, ids = coins((2, 1, 6, 6)), np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]])
    bias = np.where(coins((2, 6, 6), 0.8, 4), numbers((2, 6, 6), seed=2), -INF)

    def lets(b, h, i, j, p):
        return array[b[0], 0, i, j] and ids[b[0], i] == ids[b[0], j] and j < 5

    mask = Boolean(array) & Segments(ids) & Lengths(5)
    result, answer = check(
        kernel, q, k, v, mask=mask, rule=lets, bias=bias, causal=True, window=(3, None)
    )
    np.testing.assert_array_equal(result.weights > 0, answer.visible)
    assert 0 < answer.visible.mean() < 0.5


@every_kernel
def test_mask_objects_give_the_bytes_of_the_arrays_they_stand_for(kernel):
    q, k, v = inputs((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    rows, keys = np.arange(5)[:, np.newaxis], np.arange(7)
    lengths = np.array([0, 4])
    ids, other = np.array([0, 0, 1, 1, 1]), np.array([0, 1, 1, 1, 0, 0, 0])
    for mask, array in [
        (Causal(), keys <= rows + 2),
        (Window(1, 2), (rows + 2 - 1 <= keys) & (keys <= rows + 2 + 2)),
        (Lengths(3), keys < 3),
        (Lengths(lengths), (keys < lengths[:, np.newaxis])[:, np.newaxis, np.newaxis]),
        (Segments(ids, other), ids[:, np.newaxis] == other),
        (~Causal() | Lengths(2), (keys > rows + 2) | (keys < 2)),
    ]:
        one = run(kernel, q, k, v, mask=mask, offset=2)
        assert_same_result(one, run(kernel, q, k, v, mask=array), repr(mask))


@every_kernel
def test_lengths_and_segments_follow_the_leading_axes(kernel):
    q, k, v = inputs((2, 3, 2, 4, 2), (2, 3, 2, 4, 2), (2, 3, 2, 4, 2))
    lengths = np.array([[0, 1, 2], [3, 4, 2]])
    ids = np.random.default_rng(0).integers(0, 2, (2, 3, 4))
    check(kernel, q, k, v, mask=Lengths(lengths), rule=lambda b, h, i, j, p: j < lengths[b])
    check(kernel, q, k, v, mask=Lengths([1, 2, 3]), rule=lambda b, h, i, j, p: j < b[1] + 1)
    check(kernel, q, k, v, mask=Segments(ids), rule=lambda b, h, i, j, p: ids[b][i] == ids[b][j])
    check(
        kernel,
        q,
        k,
        v,
        mask=Segments(ids[0]),
        rule=lambda b, h, i, j, p: ids[0][b[1]][i] == ids[0][b[1]][j],
    )


@every_kernel
@pytest.mark.parametrize("lengths", [6, -1, [0, 6], [-1, 5]], ids=str)
def test_lengths_that_are_no_number_of_keys_are_refused_by_name(kernel, lengths):
    q, k, v = inputs((2, 1, 3, 4), (2, 1, 5, 4), (2, 1, 5, 2))
    with pytest.raises(regard.OptionError, match=r"lengths.* 5 keys.*(6|-1)"):
        regard.attention(q, k, v, mask=Lengths(lengths), kernel=kernel)


# bias ---------------------------------------------------------------------------------------------


@every_kernel
@every_float
def test_bias_of_minus_infinity_masks_exactly_like_false(kernel, dtype):
    q, k, v = inputs((2, 3, 4, 8), (2, 3, 9, 8), (2, 3, 9, 5), dtype=dtype)
    mask = coins((2, 3, 4, 9))
    mask[0, 0, 1] = False
    one = run(kernel, q, k, v, mask=mask)
    for kind in (dtype, np.float64, np.float16):
        other = run(kernel, q, k, v, bias=np.where(mask, 0.0, -INF).astype(kind))
        assert_same_result(other, one, str(kind))


@every_kernel
def test_bias_is_added_after_scale_and_softcap(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2), size=3.0)
    bias = numbers((3, 5), np.float64, 7, 4.0)
    check(kernel, q, k, v, bias=bias, scale=0.25)
    check(kernel, q, k, v, bias=bias, scale=0.25, softcap=1.5)


@every_kernel
def test_bias_broadcasts_like_a_mask(kernel):
    q, k, v = inputs((2, 3, 4, 2), (2, 3, 5, 2), (2, 3, 5, 2))
    for shape in [(), (5,), (4, 1), (4, 5), (3, 1, 1), (3, 4, 5), (2, 1, 1, 5), (2, 3, 4, 5), (1,)]:
        check(kernel, q, k, v, bias=numbers(shape, seed=11))
    check(kernel, q, k, v, bias=-2.5)
    check(kernel, q, k, v, bias=[0, 1, 2, 3, 4])


@every_kernel
@pytest.mark.parametrize("low", [-1e4, -1e9, -1e30, float(np.finfo(np.float32).min)])
def test_bias_that_is_finite_is_a_number_however_low(kernel, low):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    bias = np.full((3, 5), low, np.float32)
    bias[1, 2] = 0.0
    result, answer = check(kernel, q, k, v, bias=bias)
    assert answer.visible.all()
    np.testing.assert_allclose(result.weights.sum(axis=-1), 1.0, rtol=1e-6)


@every_kernel
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_bias_too_low_for_the_accumulator_is_still_not_a_mask(kernel, dtype):
    q, k, v = inputs((2, 4), (5, 4), (5, 2), dtype=dtype)
    result, answer = check(kernel, q, k, v, bias=np.full((2, 5), np.finfo(np.float64).min))
    assert answer.visible.all()
    np.testing.assert_array_equal(np.isfinite(result.output), True)
    np.testing.assert_allclose(result.weights.astype(float).sum(axis=-1), 1.0, rtol=1e-2)


@every_kernel
def test_bias_of_nan_or_plus_infinity_follows_ieee(kernel):
    q, k, v = inputs((4, 3), (5, 3), (5, 2))
    bias = np.zeros((4, 5), np.float32)
    bias[1, 2], bias[3, 0] = np.nan, INF
    clean = run(kernel, q, k, v)
    result, _ = check(kernel, q, k, v, bias=bias)
    np.testing.assert_array_equal(np.isnan(result.output[:, 0]), [False, True, False, True])
    assert_same_bytes(result.output[[0, 2]], clean.output[[0, 2]])
    mask = np.isfinite(bias)
    result, _ = check(kernel, q, k, v, bias=bias, mask=mask)
    np.testing.assert_array_equal(np.isfinite(result.output), True)


@every_kernel
def test_bias_of_minus_infinity_hides_its_own_cell_and_no_other(kernel):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    bias = np.zeros((3, 5), np.float32)
    bias[:, 4] = -INF
    bias[0, :4], bias[1, 2] = -1e30, np.nan
    result, answer = check(kernel, q, k, v, bias=bias)
    np.testing.assert_array_equal(answer.visible, bias != -INF)
    np.testing.assert_allclose(result.weights[[0, 2]].sum(axis=-1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(np.isnan(result.output[:, 0]), [False, True, False])


@every_kernel
@pytest.mark.parametrize("kind", [np.float16, np.float64, np.int64, np.uint8])
def test_bias_never_decides_the_dtype_of_the_result(kernel, kind):
    q, k, v = inputs((3, 4), (5, 4), (5, 2))
    result, _ = check(kernel, q, k, v, bias=(numbers((3, 5), seed=3) * 3).astype(kind))
    assert result.output.dtype == np.float32


# position, causal, window -------------------------------------------------------------------------


@every_kernel
@pytest.mark.parametrize("offset", [0, "end"])
def test_causal_sees_keys_up_to_its_position_for_all_lengths(kernel, offset):
    for length, size in itertools.product(range(8), repeat=2):
        q, k, v = inputs((length, 3), (size, 3), (size, 2))
        shift = 0 if offset == 0 else size - length
        expected = [[j <= i + shift for j in range(size)] for i in range(length)]
        result, answer = check(kernel, q, k, v, causal=True, offset=offset)
        np.testing.assert_array_equal(result.weights > 0, answer.visible)
        np.testing.assert_array_equal(
            answer.visible, np.array(expected, bool).reshape(length, size)
        )


@every_kernel
@pytest.mark.parametrize("causal", [False, True])
def test_window_includes_both_ends_and_itself_for_all_offsets(kernel, causal):
    q, k, v = inputs((4, 3), (6, 3), (6, 2))
    sides = (None, 0, 1, 2, 9)
    for left, right, offset in itertools.product(sides, sides, (-5, -1, 0, 2, "end", 7)):
        result, answer = check(kernel, q, k, v, causal=causal, window=(left, right), offset=offset)
        np.testing.assert_array_equal(result.weights > 0, answer.visible)


@every_kernel
def test_window_of_zero_on_both_sides_is_the_key_at_the_same_position(kernel):
    q, k, v = inputs((5, 3), (5, 3), (5, 2))
    output = regard.attention(q, k, v, window=(0, 0), kernel=kernel)
    assert_same_bytes(output, v)


@every_kernel
def test_window_on_the_right_of_zero_is_causal(kernel):
    q, k, v = inputs((5, 3), (5, 3), (5, 2))
    assert_same_result(
        run(kernel, q, k, v, window=(None, 0)), run(kernel, q, k, v, causal=True), "window"
    )


@every_kernel
@pytest.mark.parametrize("window", [(1, 0), [1, 0], (np.int64(1), np.uint8(0))])
def test_window_may_be_any_pair_of_whole_numbers(kernel, window):
    check(kernel, *inputs((5, 3), (5, 3), (5, 2)), window=window)


@every_kernel
def test_position_defaults_to_zero_only_where_nothing_can_be_meant_by_it(kernel):
    q, k, v = inputs((5, 3), (5, 3), (5, 2))
    assert_same_result(
        run(kernel, q, k, v, causal=True), run(kernel, q, k, v, causal=True, offset=0)
    )
    assert_same_result(
        run(kernel, q, k, v, causal=True), run(kernel, q, k, v, causal=True, offset="end")
    )


@every_kernel
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"window": (1, 0)},
        {"causal": True, "window": (1, 1)},
        {"mask": Causal()},
        {"mask": ~Window(1, 0)},
        {"mask": Lengths(0) & (Boolean(True) | Causal())},
    ],
    ids=str,
)
@pytest.mark.parametrize(("length", "size"), [(2, 5), (5, 2), (1, 5), (2, 0), (0, 2)])
def test_position_is_never_guessed(kernel, options, length, size):
    q, k, v = inputs((length, 3), (size, 3), (size, 2))
    with pytest.raises(ValueError, match="offset") as caught:
        regard.attention(q, k, v, kernel=kernel, **options)
    message = str(caught.value)
    assert "offset=0" in message
    assert "end" in message
    assert str(length) in message
    assert str(size) in message
    regard.attention(q, k, v, kernel=kernel, offset=0, **options)
    regard.attention(q, k, v, kernel=kernel, offset="end", **options)


@every_kernel
@pytest.mark.parametrize("mask", [Lengths(2), Boolean(np.ones((2, 5), bool))], ids=str)
def test_position_need_not_be_told_to_masks_that_do_not_use_it(kernel, mask):
    run(kernel, *inputs((2, 3), (5, 3), (5, 2)), mask=mask)


@every_kernel
def test_position_of_a_vector_query_must_be_told_too(kernel):
    q, k, v = inputs((3,), (5, 3), (5, 2))
    with pytest.raises(ValueError, match="offset"):
        regard.attention(q, k, v, causal=True, kernel=kernel)
    one = run(kernel, q, k, v, causal=True, offset="end")
    assert_same_result(one, run(kernel, q, k, v))


@every_kernel
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, list])
def test_position_may_differ_from_batch_to_batch(kernel, kind):
    q, k, v = inputs((3, 2, 4, 3), (3, 2, 6, 3), (3, 2, 6, 2))
    offset = [0, 1, 2] if kind is list else np.array([0, 1, 2], kind)
    result, _ = check(kernel, q, k, v, causal=True, window=(1, None), offset=offset)
    for b in range(3):
        alone = run(kernel, q[b], k[b], v[b], causal=True, window=(1, None), offset=b)
        assert_same_bytes(result.output[b], alone.output)
    check(kernel, q, k, v, mask=Causal(), rule=lambda b, h, i, j, p: j <= p, offset=offset)


@every_kernel
def test_position_of_arrays_broadcasts_to_the_leading_axes(kernel):
    q, k, v = inputs((2, 3, 2, 4, 3), (3, 2, 6, 3), (2, 1, 2, 6, 2))
    for offset in ([0, 1, 2], [[0], [2]], [[0, 1, 2], [3, -1, -4]], [1]):
        check(kernel, q, k, v, causal=True, offset=np.array(offset))


@every_kernel
@pytest.mark.parametrize("offset", [-7, -2, 3, 100, np.int32(2), 2**40, -(2**40)])
def test_position_may_lie_before_and_after_all_keys(kernel, offset):
    check(kernel, *inputs((4, 3), (6, 3), (6, 2)), causal=True, offset=offset)
    check(kernel, *inputs((4, 3), (6, 3), (6, 2)), window=(2, 2), offset=offset)


@every_kernel
def test_position_at_the_end_is_that_of_the_lengths(kernel):
    q, k, v = inputs((2, 2, 2, 3), (2, 2, 6, 3), (2, 2, 6, 2))
    lengths = np.array([3, 6])
    options = {"mask": Lengths(lengths), "causal": True, "window": (2, None)}
    placed, _ = check(
        kernel, q, k, v, rule=lambda b, h, i, j, p: j < lengths[b], offset=[1, 4], **options
    )
    assert_same_result(run(kernel, q, k, v, offset="end", **options), placed)
    # Under | they are no condition by themselves, and a number is one whatever they say.
    mask = Lengths(lengths) | Boolean(np.zeros(6, bool))
    options["mask"] = mask
    at_end = run(kernel, q, k, v, offset="end", **options)
    assert_same_result(at_end, run(kernel, q, k, v, offset=4, **options))


@every_kernel
@pytest.mark.parametrize(
    "mask",
    [
        Segments([0, 1, 0], [0, 0, 0, 1, 1]),
        Segments([0, 0, 1], [0, 1, 0, 1, 1]),
        ~Segments([0, 0, 1], [0, 0, 0, 1, 1]),
        Segments([0, 0, 1], [0, 0, 0, 1, 1]) | Lengths(2),
        Boolean(True) & (Lengths(2) | ~Segments([0, 0, 1], [0, 0, 0, 1, 1])),
    ],
    ids=str,
)
def test_position_is_refused_where_no_text_can_be_told(kernel, mask):
    q, k, v = inputs((3, 3), (5, 3), (5, 2))
    for options in ({"causal": True}, {"window": (1, 0)}, {"positions": regard.positions.Alibi()}):
        for offset in (0, "end", 1):
            with pytest.raises(ValueError, match=r"offset.*segments|segments.*offset"):
                regard.attention(q, k, v, mask=mask, offset=offset, kernel=kernel, **options)
    # Where no position is looked at, nothing depends on it.
    plain = run(kernel, q, k, v, mask=mask)
    assert_same_result(run(kernel, q, k, v, mask=mask, offset=1), plain)


@every_kernel
def test_position_without_an_offset_does_not_know_of_texts(kernel):
    q, k, v = inputs((5, 3), (5, 3), (5, 2))
    texts = Segments([0, 0, 1, 0, 1], [1, 0, 0, 1, 0])
    for mask in (texts, ~texts, texts | Lengths(2), texts & Lengths(3)):
        cells = mask.visible(5, 5) & np.tri(5, dtype=bool)
        expected = run(kernel, q, k, v, mask=cells)
        assert_same_result(run(kernel, q, k, v, mask=mask, causal=True), expected)


@every_kernel
def test_position_in_segments_is_that_within_the_text(kernel):
    q, k, v = inputs((4, 3), (7, 3), (7, 2))
    texts = Segments([5, 5, 5, 2], [2, 2, 5, 5, 5, 5, 5])
    firsts = {0: [2, 2, 2, -3], "end": [4, 4, 4, -2], -1: [1, 1, 1, -4]}
    for offset, first in firsts.items():

        def sees(b, h, i, j, p, first=first):
            return texts.query[i] == texts.key[j] and i + first[i] - 1 <= j <= i + first[i]

        result = run(kernel, q, k, v, mask=texts, causal=True, window=(1, None), offset=offset)
        answer = answer_of(q, k, v, mask=sees)
        check_result(kernel, result, answer, q, k, v)


# empty rows ---------------------------------------------------------------------------------------


def every_subset(size: int) -> np.ndarray:
    return np.array(list(itertools.product((False, True), repeat=size)), bool)


@every_kernel
@every_float
@pytest.mark.parametrize("by", ["mask", "mask object", "bias", "mask and bias", "window and mask"])
@pytest.mark.parametrize("sink", [None, -0.5])
def test_empty_row_is_zero_among_all_masks_of_up_to_six_keys(kernel, dtype, by, sink):
    for size in range(7):
        mask = every_subset(size)
        q, k, v = inputs((len(mask), 3), (size, 3), (size, 2), dtype=dtype)
        options: dict[str, Any] = {"sink": sink, "mask": mask}
        if by == "mask object":
            options = {"sink": sink, "mask": Boolean(mask), "rule": mask}
        elif by == "bias":
            options = {"sink": sink, "bias": np.where(mask, 0.5, -INF)}
        elif by == "mask and bias":
            odd = np.arange(size) % 2 == 1
            options = {"sink": sink, "mask": mask | odd, "bias": np.where(mask | ~odd, 0.0, -INF)}
        elif by == "window and mask":
            options |= {"window": (1, 1), "causal": True, "offset": size // 2 - 1}
        result, answer = check(kernel, q, k, v, **options)
        empty = ~answer.visible.any(axis=-1)
        assert empty.any()
        assert_same_bytes(result.output[empty], np.zeros_like(result.output[empty]), "output")
        assert_same_bytes(result.weights[empty], np.zeros_like(result.weights[empty]), "weights")
        np.testing.assert_array_equal(result.lse[empty], -INF if sink is None else sink)


@every_kernel
def test_empty_row_alone_is_zero_for_every_mask(kernel):
    for size in range(1, 5):
        q, k, v = inputs((1, 3), (size, 3), (size, 2))
        for mask in every_subset(size):
            check(kernel, q, k, v, mask=mask)
            check(kernel, q[0], k, v, mask=mask)


@every_kernel
@pytest.mark.parametrize("bad", [np.nan, INF, -INF])
def test_empty_row_is_decided_on_mask_and_bias_never_on_scores(kernel, bad):
    q, k, v = inputs((3, 2), (4, 2), (4, 2))
    q[1] = bad
    mask = np.ones((3, 4), bool)
    mask[:2] = False
    result = run(kernel, q, k, v, mask=mask)
    np.testing.assert_array_equal(result.output[:2], 0.0)
    np.testing.assert_array_equal(result.lse[:2], -INF)
    k[:] = bad
    result = run(kernel, q, k, v)
    np.testing.assert_array_equal(np.isnan(result.output), True)


@every_kernel
def test_empty_row_is_not_one_whose_scores_are_all_minus_infinity(kernel):
    q, k, v = np.ones((1, 1)), np.full((2, 1), -INF), np.ones((2, 1))
    result = run(kernel, q, k, v)
    np.testing.assert_array_equal(np.isnan(result.output), True)
    result = run(kernel, q, k, v, bias=np.full((1, 2), -INF))
    np.testing.assert_array_equal(result.output, 0.0)


@every_kernel
def test_empty_row_leaves_the_other_rows_alone(kernel):
    q, k, v = inputs((4, 3), (5, 3), (5, 2))
    mask = np.ones((4, 5), bool)
    full = run(kernel, q, k, v, mask=mask)
    mask[2] = False
    result = run(kernel, q, k, v, mask=mask)
    assert_same_bytes(result.output[[0, 1, 3]], full.output[[0, 1, 3]])


# masked means absent ------------------------------------------------------------------------------

ROWS, KEYS = 4, 9
POISONS = ["nan", "inf", "-inf", "largest", "1e38", "denormal", "random", "mixed"]


def poison(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    half = dtype.itemsize == 2
    largest = 65504.0 if dtype == np.float16 else 1e38 if half else float(np.finfo(dtype).max)
    denormal = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1e-42, "float64": 1e-310}[dtype.name]
    if name == "random":
        return numbers(shape, dtype, 77, 50.0)
    if name == "mixed":
        many = np.array([np.nan, INF, -INF, -largest, denormal])
        return np.resize(many, shape).astype(dtype)
    one = {"largest": -largest, "1e38": min(largest, 1e38), "denormal": denormal}
    with np.errstate(over="ignore"):
        return np.full(shape, one.get(name, name), float).astype(dtype)


def hidings() -> list[Any]:
    """Options that hide keys, and for each row of each head which keys they hide."""
    rows, keys = np.arange(ROWS)[:, np.newaxis], np.arange(KEYS)
    array = coins((2, ROWS, KEYS), 0.5, 5)
    array[:, 2] = False  # a row that sees nothing
    array[..., 4] = False  # a key between others
    ids, others = np.array([0, 1, 1, 2]), np.array([0, 0, 1, 3, 1, 1, 0, 2, 3])
    causal = keys <= rows + 2
    cases: list[tuple[str, dict[str, Any], np.ndarray]] = [
        ("mask", {"mask": array}, array),
        ("mask over keys", {"mask": keys % 3 == 1}, keys % 3 == 1),
        ("mask object", {"mask": Boolean(array)}, array),
        ("bias", {"bias": np.where(array, 0.3, -INF)}, array),
        ("causal", {"causal": True, "offset": 2}, causal),
        ("window", {"window": (1, 1), "offset": 2}, abs(rows + 2 - keys) <= 1),
        ("lengths", {"mask": Lengths(4)}, keys < 4),
        ("no keys at all", {"mask": Lengths(0)}, keys < 0),
        ("segments", {"mask": Segments(ids, others)}, ids[:, np.newaxis] == others),
        ("not", {"mask": ~Causal(), "offset": 2}, ~causal),
        ("or", {"mask": Causal() | Boolean(array), "offset": 2}, causal | array),
        (
            "everything",
            {
                "mask": (Lengths(8) | Causal()) & ~Boolean(array),
                "bias": np.where(keys == 1, -INF, 0.0),
                "causal": True,
                "window": (6, 3),
                "offset": 3,
                "softcap": 2.0,
                "sink": 0.1,
            },
            ((keys < 8) | causal) & ~array & (keys != 1) & (keys <= rows + 3) & (keys >= rows - 3),
        ),
    ]
    return [
        pytest.param(options, np.broadcast_to(seen, (2, ROWS, KEYS)), id=name)
        for name, options, seen in cases
    ]


@every_kernel
@every_float
@pytest.mark.parametrize(("options", "seen"), hidings())
def test_masked_means_absent_for_keys_that_no_row_sees(kernel, dtype, options, seen):
    q, k, v = inputs((2, ROWS, 8), (2, KEYS, 8), (2, KEYS, 5), dtype=dtype)
    clean = run(kernel, q, k, v, **options)
    hidden = ~seen.any(axis=1)  # (heads, keys)
    for name in POISONS:
        for where in ("key", "value", "both"):
            k2, v2 = k.copy(), v.copy()
            if where != "value":
                k2[hidden] = poison(name, k2[hidden].shape, dtype)
            if where != "key":
                v2[hidden] = poison(name, v2[hidden].shape, dtype)
            result = run(kernel, q, k2, v2, **options)
            assert_same_result(result, clean, f"{name} in {where}")


@pytest.mark.sweep
@every_kernel
@every_float
@pytest.mark.parametrize(("options", "seen"), hidings())
def test_masked_means_absent_for_the_rows_that_do_not_see_a_key(kernel, dtype, options, seen):
    q, k, v = inputs((2, ROWS, 8), (2, KEYS, 8), (2, KEYS, 5), dtype=dtype)
    clean = run(kernel, q, k, v, **options)
    for name, j in itertools.product(("nan", "inf", "largest", "random"), range(KEYS)):
        k2, v2 = k.copy(), v.copy()
        k2[:, j] = poison(name, k2[:, j].shape, dtype)
        v2[:, j] = poison(name, v2[:, j].shape, dtype)
        result = run(kernel, q, k2, v2, **options)
        blind = ~seen[:, :, j]  # (heads, rows)
        for field in ("output", "weights", "lse"):
            assert_same_bytes(
                getattr(result, field)[blind],
                getattr(clean, field)[blind],
                f"{name} in key {j}: {field}",
            )
        if name == "nan":  # and the poison does arrive where it should
            assert np.isnan(result.output.astype(float))[~blind].all()


@every_kernel
@pytest.mark.parametrize("name", POISONS)
def test_masked_means_absent_over_many_keys_and_whole_runs_of_them(kernel, name):
    size = 600
    q, k, v = inputs((2, 3, 16), (2, size, 16), (2, size, 16))
    for first, last in [(0, 1), (0, 256), (0, 599), (64, 128), (100, 400), (255, 600), (599, 600)]:
        mask = np.ones(size, bool)
        mask[first:last] = False
        k2, v2 = k.copy(), v.copy()
        k2[:, ~mask] = poison(name, k2[:, ~mask].shape, k.dtype)
        v2[:, ~mask] = poison(name, v2[:, ~mask].shape, v.dtype)
        assert_same_result(
            run(kernel, q, k2, v2, mask=mask),
            run(kernel, q, k, v, mask=mask),
            f"{name} in {first}:{last}",
        )


@every_kernel
@every_float
def test_masked_means_absent_for_a_bias_that_stands_under_a_mask(kernel, dtype):
    q, k, v = inputs((2, ROWS, 8), (2, KEYS, 8), (2, KEYS, 5), dtype=dtype)
    mask = coins((2, ROWS, KEYS), 0.5, 5)
    bias = numbers((2, ROWS, KEYS), np.float32, 8)
    clean = run(kernel, q, k, v, mask=mask, bias=bias)
    for bad in (np.nan, INF, -INF, 3e38, -3e38):
        result = run(kernel, q, k, v, mask=mask, bias=np.where(mask, bias, bad).astype(np.float32))
        assert_same_result(result, clean, str(bad))


@every_kernel
def test_masked_means_absent_however_the_mask_changes_with_the_row(kernel):
    q, k, v = inputs((6, 8), (6, 8), (6, 5))
    clean = run(kernel, q, k, v, causal=True)
    for j in range(1, 6):
        k2, v2 = k.copy(), v.copy()
        k2[j:], v2[j:] = np.nan, INF
        result = run(kernel, q, k2, v2, causal=True)
        assert_same_bytes(result.output[:j], clean.output[:j])
        assert np.isnan(result.output[j:]).all()


@every_kernel
def test_masked_means_absent_but_seen_means_present(kernel):
    q, k, v = inputs((2, ROWS, 8), (2, KEYS, 8), (2, KEYS, 5))
    clean = regard.attention(q, k, v, causal=True, offset=2, kernel=kernel)
    for j in range(2 + ROWS):
        v2 = v.copy()
        v2[:, j] += 3.0
        assert_other_numbers(
            regard.attention(q, k, v2, causal=True, offset=2, kernel=kernel), clean, f"value {j}"
        )
