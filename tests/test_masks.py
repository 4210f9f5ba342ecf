"""The mask objects by themselves: what each lets through, how they combine, what they refuse."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
from layouts import layouts
from regard import masks
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.rules.visibility import Placed

SIZES = range(6)
OFFSETS = (-7, -1, 0, 1, 3, 9)


def table(queries, keys, rule):
    """What `rule(i, j)` says of every cell."""
    cells = [[bool(rule(i, j)) for j in range(keys)] for i in range(queries)]
    return np.array(cells, bool).reshape(queries, keys)


def assert_visible(mask, queries, keys, expected, **options):
    visible = mask.visible(queries, keys, **options)
    assert visible.dtype == np.bool_
    assert visible.shape[-2:] == (queries, keys)
    np.testing.assert_array_equal(visible, expected, repr(mask), strict=True)


def test_causal_sees_keys_up_to_the_position():
    for queries, keys, offset in itertools.product(SIZES, SIZES, OFFSETS):
        expected = table(queries, keys, lambda i, j, offset=offset: j <= i + offset)
        assert_visible(Causal(), queries, keys, expected, offset=offset)


@pytest.mark.parametrize("left", [None, 0, 1, 3])
@pytest.mark.parametrize("right", [None, 0, 1, 3])
def test_window_sees_both_of_its_ends(left, right):
    for queries, keys, offset in itertools.product(SIZES, SIZES, OFFSETS):

        def rule(i, j, position=offset):
            return (left is None or i + position - left <= j) and (
                right is None or j <= i + position + right
            )

        assert_visible(
            Window(left, right), queries, keys, table(queries, keys, rule), offset=offset
        )


def test_offset_is_zero_unless_it_is_given():
    np.testing.assert_array_equal(Causal().visible(3, 4), Causal().visible(3, 4, offset=0))
    np.testing.assert_array_equal(Window(1, 1).visible(3, 4), Window(1, 1).visible(3, 4, offset=0))


def test_lengths_see_the_first_so_many_keys():
    for keys in SIZES:
        for length in range(keys + 1):
            expected = table(3, keys, lambda i, j, length=length: j < length)
            assert_visible(Lengths(length), 3, keys, expected)


def test_lengths_of_a_batch_stand_before_heads_rows_and_keys():
    visible = Lengths([2, 0, 3]).visible(2, 3)
    assert visible.shape == (3, 1, 2, 3)
    for b, length in enumerate((2, 0, 3)):
        np.testing.assert_array_equal(visible[b, 0], table(2, 3, lambda i, j, n=length: j < n))
    assert Lengths([[1, 2], [3, 0]]).visible(4, 3).shape == (2, 2, 1, 4, 3)


def test_segments_see_their_own():
    ids, others = [0, 0, 1, 2], [2, 0, 1, 0, 7]
    expected = table(4, 5, lambda i, j: ids[i] == others[j])
    assert_visible(Segments(ids, others), 4, 5, expected)
    assert_visible(Segments(ids), 4, 4, table(4, 4, lambda i, j: ids[i] == ids[j]))


def test_segments_of_a_batch_stand_before_heads_rows_and_keys():
    visible = Segments([[0, 1], [1, 1]], [[0, 0, 1], [2, 1, 0]]).visible(2, 3)
    assert visible.shape == (2, 1, 2, 3)
    np.testing.assert_array_equal(visible[0, 0], [[True, True, False], [False, False, True]])
    np.testing.assert_array_equal(visible[1, 0], [[False, True, False], [False, True, False]])


@pytest.mark.parametrize("shape", [(), (5,), (1,), (4, 1), (1, 5), (4, 5), (3, 4, 5), (2, 3, 1, 5)])
def test_boolean_is_the_array_it_holds(shape):
    array = np.random.default_rng(1).random(shape) < 0.5
    expected = np.broadcast_to(array, np.broadcast_shapes(shape, (4, 5)))
    assert_visible(Boolean(array), 4, 5, expected)


def test_boolean_may_be_held_in_any_layout():
    array = np.random.default_rng(1).random((3, 4, 5)) < 0.5
    for name, other in layouts(array):
        np.testing.assert_array_equal(Boolean(other).visible(4, 5), array, name)


def leaves() -> st.SearchStrategy[Any]:
    """Pairs: a mask for four queries and five keys, and the array it stands for, for an offset."""
    side = st.one_of(st.none(), st.integers(0, 5))
    ids = st.integers(0, 2)

    def window(left, right):
        return Window(
            left, right
        ), lambda i, j, p: (left is None or p - left <= j) and (right is None or j <= p + right)

    def array(seed):
        cells = np.random.default_rng(seed).random((4, 5)) < 0.5
        return Boolean(cells), lambda i, j, p: cells[i, j]

    return st.one_of(
        st.just((Causal(), lambda i, j, p: j <= p)),
        st.builds(window, side, side),
        st.integers(0, 5).map(lambda n: (Lengths(n), lambda i, j, p: j < n)),
        st.integers(0, 99).map(array),
        st.tuples(st.lists(ids, min_size=4, max_size=4), st.lists(ids, min_size=5, max_size=5)).map(
            lambda x: (Segments(*x), lambda i, j, p: x[0][i] == x[1][j])
        ),
    )


def combined(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def both(one, other):
        return one[0] & other[0], lambda *cell: one[1](*cell) and other[1](*cell)

    def either(one, other):
        return one[0] | other[0], lambda *cell: one[1](*cell) or other[1](*cell)

    def neither(one):
        return ~one[0], lambda *cell: not one[1](*cell)

    return st.one_of(
        st.builds(both, parts, parts), st.builds(either, parts, parts), st.builds(neither, parts)
    )


@given(st.recursive(leaves(), combined, max_leaves=8), st.integers(-4, 4))
def test_combinations_let_through_what_logic_says(pair, offset):
    mask, rule = pair
    expected = table(4, 5, lambda i, j: rule(i, j, i + offset))
    placed = Placed(np.arange(4) + offset)  # an offset would count within each segment
    visible = np.broadcast_to(mask.visible(4, 5, offset=placed), (4, 5))
    np.testing.assert_array_equal(visible, expected, repr(mask))


def test_combinations_broadcast_their_parts():
    heads = np.random.default_rng(1).random((3, 1, 5)) < 0.5
    mask = Lengths([2, 4]) & Boolean(heads) | ~Causal()
    expected = Lengths([2, 4]).visible(4, 5) & heads | ~Causal().visible(4, 5)
    visible = mask.visible(4, 5)
    np.testing.assert_array_equal(np.broadcast_to(visible, (2, 3, 4, 5)), expected)


def test_combinations_with_arrays_of_booleans_are_masks():
    array = np.random.default_rng(1).random((4, 5)) < 0.5
    causal = Causal().visible(4, 5)
    for mask, expected in [
        (Causal() & array, causal & array),
        (array & Causal(), causal & array),
        (Causal() | array, causal | array),
        (array | Causal(), causal | array),
    ]:
        np.testing.assert_array_equal(mask.visible(4, 5), expected)


@pytest.mark.parametrize("other", [1, 0.0, np.ones((2, 2), int), "causal", None])
def test_combinations_with_anything_else_are_refused(other):
    for combine in (
        lambda: Causal() & other,
        lambda: other & Causal(),
        lambda: Causal() | other,
        lambda: other | Causal(),
    ):
        with pytest.raises(TypeError):
            combine()


@pytest.mark.parametrize("word", ["and", "or", "not"])
def test_masks_have_no_truth_value_so_that_none_is_dropped_silently(word):
    one, other = Causal(), Lengths(2)
    with pytest.raises(TypeError, match="&"):
        {
            "and": lambda: one and other,
            "or": lambda: one or other,
            "not": lambda: not one,
        }[word]()


@pytest.mark.parametrize(
    "mask",
    [Causal(), Window(2, None), Lengths([1, 2]), Segments([0, 1]), Boolean([True, False])],
    ids=lambda x: type(x).__name__,
)
def test_masks_are_frozen_and_readable(mask):
    with pytest.raises(AttributeError):
        mask.left = 7
    assert type(mask).__name__ in repr(mask)
    assert type(mask).__name__ in repr(~mask & Causal())
    np.testing.assert_array_equal(copy.deepcopy(mask).visible(2, 2), mask.visible(2, 2))
    one, other = mask.visible(2, 2), mask.visible(2, 2)
    np.testing.assert_array_equal(one, other)


def test_masks_do_not_write_what_they_hold():
    array = np.random.default_rng(1).random((4, 5)) < 0.5
    before = array.copy()
    mask = ~(Boolean(array) & Causal()) | Boolean(array)
    mask.visible(4, 5)
    regard.attention(np.ones((4, 2)), np.ones((5, 2)), np.ones((5, 2)), mask=mask, offset=0)
    np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize(
    ("left", "right", "name"),
    [
        (-1, 0, "left"),
        (0, -1, "right"),
        (1.0, 0, "left"),
        (0, 2.5, "right"),
        (True, 0, "left"),
        (0, "1", "right"),
        (float("nan"), 0, "left"),
        (0, float("inf"), "right"),
        ([1], 0, "left"),
    ],
)
def test_window_of_anything_but_whole_numbers_is_refused_by_name(left, right, name):
    with pytest.raises((ValueError, TypeError), match=name):
        Window(left, right)


@pytest.mark.parametrize(
    "lengths", [-1, [1, -2], 1.0, [1.5], True, [True], "3", None, [[1], [2, 3]]]
)
def test_lengths_of_anything_but_whole_numbers_are_refused_by_name(lengths):
    with pytest.raises((ValueError, TypeError), match="lengths"):
        Lengths(lengths).visible(2, 3)


@pytest.mark.parametrize("ids", [[0.0, 1.0], ["a", "b"], [None, 1], [1j, 2], 3])
def test_segments_of_anything_but_whole_numbers_are_refused_by_name(ids):
    with pytest.raises((ValueError, TypeError), match=r"(?i)segments|query"):
        Segments(ids).visible(2, 2)


@pytest.mark.parametrize(
    "array",
    [
        np.ones((2, 2), int),
        np.ones((2, 2)),
        [[1, 0]],
        "yes",
        None,
        np.ma.masked_array([True, False], mask=[False, True]),
    ],
    ids=lambda x: type(x).__name__,
)
def test_boolean_of_anything_but_booleans_is_refused(array):
    with pytest.raises(TypeError, match="mask"):
        Boolean(array)


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        (Lengths([1, 2, 3]), "lengths"),
        (Segments([0, 0, 0]), "segments"),
        (Segments([0, 0], [0, 0]), "segments"),
        (Segments([[0, 0]] * 3, [[0] * 5] * 3), "segments"),
        (Boolean(np.ones((2, 4), bool)), "mask"),
        (Boolean(np.ones((5, 2), bool)), "mask"),
        (~Boolean(np.ones((7, 1, 1, 1), bool)) | Causal(), "mask"),
    ],
    ids=repr,
)
def test_masks_that_do_not_fit_the_call_are_refused_by_name(mask, word):
    q, k = np.ones((2, 3, 2, 4)), np.ones((2, 3, 5, 4))
    with pytest.raises(regard.ShapeError, match=f"(?i){word}"):
        regard.attention(q, k, k, mask=mask, offset=0)


@pytest.mark.parametrize("mask", [Causal, Window, [Causal()], (Causal(), Lengths(1))], ids=repr)
def test_masks_in_the_wrong_wrapping_are_refused(mask):
    with pytest.raises(TypeError, match="mask"):
        regard.attention(np.ones((2, 4)), np.ones((2, 4)), np.ones((2, 4)), mask=mask)


# arguments that make no sense ---------------------------------------------------------------------


class Broken:
    """What NumPy cannot read, and says so in its own way."""

    def __array__(self, *_, **__):
        raise KeyError("no such array")

    def __deepcopy__(self, memo):
        raise ArithmeticError("cannot be copied")


def test_the_offset_may_be_the_end():
    np.testing.assert_array_equal(
        masks.Causal().visible(2, 3, offset="end"), masks.Causal().visible(2, 3, offset=1)
    )


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda: masks.Causal().visible(2, 3, offset="start"), ValueError, "offset must be an int"),
        (lambda: masks.Causal().visible(2, 3, offset=1.5), TypeError, "offset must be an int"),
        (lambda: masks.Causal().visible(2, 3, offset=True), TypeError, "offset must be an int"),
        (lambda: masks.Causal().visible(2, 3, offset=2**70), ValueError, "beyond any position"),
        (lambda: masks.Causal().visible(-1, 3), ValueError, "queries is -1"),
        (lambda: masks.Causal().visible(2, "a"), TypeError, "keys must be an int"),
        (lambda: masks.Boolean([True, False]).visible(2, 3), ValueError, "mask does not fit 2"),
        (lambda: masks.Boolean([True] * 3).visible(2, 1), ValueError, "does not fit"),
        (lambda: masks.Boolean(Broken()), TypeError, "mask must be booleans"),
        (lambda: masks.Lengths(Broken()), TypeError, "lengths must be integers"),
    ],
)
def test_what_a_rule_cannot_show_is_refused(ask, error, said):
    with pytest.raises(error) as caught:
        ask()
    assert type(caught.value).__module__ == "regard.errors"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"scale": [[1, 2], [3]]}, TypeError, "scale must be a number"),
        ({"softcap": [[1, 2], [3]]}, TypeError, "softcap must be a number"),
        ({"scale": Broken()}, TypeError, "scale must be a number"),
        ({"offset": Broken()}, TypeError, "offset must be ints"),
        ({"bias": Broken()}, TypeError, "bias is a Broken"),
        ({"mask": Broken()}, TypeError, "mask must be booleans"),
    ],
)
@pytest.mark.parametrize("door", [regard.attention, regard.explain])
def test_an_option_that_numpy_cannot_read_is_named(door, options, error, said):
    x = np.ones((3, 3))
    with pytest.raises(error, match=said) as caught:
        door(x, x, x, **options)
    assert type(caught.value).__module__ == "regard.errors"


@pytest.mark.parametrize("name", ["precision", "kernel"])
def test_an_array_for_a_word_is_refused_by_name(name):
    x = np.ones((3, 3))
    with pytest.raises(regard.OptionError, match=f"^{name} must be"):
        regard.attention(x, x, x, **{name: np.ones(2)})


@pytest.mark.parametrize("name", ["softmax", "title"])
def test_an_array_for_a_word_of_an_explanation_is_refused_by_name(name):
    x = np.ones((3, 3))
    with pytest.raises((regard.OptionError, regard.DtypeError), match=f"^{name} must be"):
        regard.explain(x, x, x, **{name: np.ones(2)})


@pytest.mark.parametrize(
    "options",
    [
        {"mask": masks.Lengths([1, 2, 3])},
        {"causal": True, "offset": [0, 3, 1]},
        {"mask": masks.Segments(np.zeros((3, 5), int))},
    ],
)
def test_three_axes_are_said_to_be_no_batch(options):
    x = np.ones((3, 5, 4))
    with pytest.raises(regard.ShapeError, match=r"a batch needs a head axis: query\[:, None\]"):
        regard.attention(x, x, x, **options)
    regard.attention(x[:, None], x[:, None], x[:, None], **options)


@pytest.mark.parametrize("argument", ["query", "key", "value"])
def test_an_explanation_checks_its_arrays_before_it_copies_them(argument):
    x = np.ones((2, 2))
    arrays = {"query": x, "key": x, "value": x, argument: Broken()}
    with pytest.raises(regard.DtypeError, match=f"^{argument} is a Broken"):
        regard.explain(**arrays)
    with pytest.raises(regard.DtypeError, match=f"^{argument} must be .*, not a generator"):
        regard.explain(**{**arrays, argument: (n for n in ())})


def test_an_explanation_keeps_the_numbers_it_was_given():
    x, bias, hidden = np.eye(3), np.zeros((3, 3)), np.ones((3, 3), bool)
    query, mask = x.copy(), masks.Boolean(hidden) & masks.Causal()
    explanation = regard.explain(query, x, x, mask=mask, bias=bias, sink=(sink := np.zeros(1)))
    expected = regard.explain(query, x, x, mask=mask, bias=bias, sink=sink).output.copy()
    query[:], bias[:], hidden[:], sink[:] = 9, 9, False, 9
    np.testing.assert_array_equal(explanation.output, expected)
    expected = regard.explain(x, x, x, mask=masks.Causal(), sink=0.0).without(0).output
    np.testing.assert_array_equal(explanation.without(0).output, expected)
