"""What is no array, and what has the wrong shape, is answered with what to pass instead."""

from __future__ import annotations

import re

import numpy as np
import pytest

import regard
from regard import masks

B, H, L, S, D = 2, 4, 3, 5, 8
Q, K = np.ones((B, H, L, D)), np.ones((B, H, S, D))
X = np.ones((L, D))
PADDING = np.arange(S) < np.array([[3], [5]])
HOLES = PADDING ^ (np.arange(S) == 1)


def refusal(call) -> str:
    with pytest.raises((regard.DtypeError, regard.ShapeError)) as caught:
        call()
    return str(caught.value).partition(" (query")[0]


@pytest.mark.parametrize(
    ("mask", "line"),
    [
        (PADDING, "mask[:, None, None, :] or regard.masks.Lengths(mask.sum(axis=-1))"),
        (HOLES, "mask[:, None, None, :]"),
        (PADDING[:, None], "mask[:, None, :, :]"),
        (np.tile(PADDING[:, None], (1, L, 1)), "mask[:, None, :, :]"),
        (np.ones((H, S), bool), "mask[:, None, :]"),
        (np.ones((B * H, L, S), bool), "mask.reshape(2, 4, 3, 5)"),
    ],
)
def test_a_mask_without_some_axes_is_answered_with_the_line_that_makes_it_fit(mask, line):
    message = refusal(lambda: regard.attention(Q, K, K, mask=mask))
    assert message.endswith(f"each must be 1 or equal; pass {line}")
    for text in line.split(" or "):
        given = eval(text, {"mask": mask, "regard": regard})
        regard.attention(Q, K, K, mask=given)


def test_the_line_that_makes_a_mask_fit_means_what_the_mask_meant():
    value = np.random.default_rng(0).normal(size=(B, H, S, D))
    by_view = regard.attention(Q, K, value, mask=PADDING[:, None, None, :])
    by_lengths = regard.attention(Q, K, value, mask=masks.Lengths(PADDING.sum(axis=-1)))
    np.testing.assert_array_equal(by_view, by_lengths)
    np.testing.assert_allclose(
        by_view[0], np.broadcast_to(value[0, :, :3].mean(1), (H, D))[:, None].repeat(L, 1)
    )


def test_axes_that_are_equal_are_taken_for_those_that_users_mean():
    """With as many queries as keys, and heads, (B, S) hides keys and (B, L, S) has no heads."""
    x = np.ones((B, S, S, D))
    for shape, line in (((B, S), "[:, None, None, :]"), ((B, S, S), "[:, None, :, :]")):
        message = refusal(lambda shape=shape: regard.attention(x, x, x, mask=np.ones(shape, bool)))
        assert f"pass mask{line}" in message


def test_a_bias_a_sink_and_lengths_get_such_a_line_too():
    assert refusal(lambda: regard.attention(Q, K, K, bias=np.ones((B, S)))).endswith(
        "pass bias[:, None, None, :]"
    )
    assert refusal(lambda: regard.attention(Q, K, K, sink=np.ones(B))).endswith(
        "pass sink[:, None]"
    )
    assert refusal(
        lambda: regard.attention(Q, K, K, mask=masks.Boolean(HOLES, name="padding"))
    ).endswith("pass padding[:, None, None, :]")


def test_a_shape_that_no_view_mends_gets_no_line():
    for given in ((7,), (B, L, S, 1, 1), (B, 7), (B * H, L, 7)):
        message = refusal(lambda given=given: regard.attention(Q, K, K, mask=np.ones(given, bool)))
        assert message.endswith("each must be 1 or equal")
    name = "two words"
    message = refusal(lambda: regard.attention(Q, K, K, mask=masks.Boolean(HOLES, name=name)))
    assert message.endswith("each must be 1 or equal")


def test_rows_before_heads_are_recognised_where_heads_do_not_fit():
    rows_first = Q.swapaxes(1, 2), K.swapaxes(1, 2), K.swapaxes(1, 2)
    message = refusal(lambda: regard.attention(*rows_first))
    assert message.endswith("; if rows come before heads, pass query.swapaxes(-3, -2) and so on")
    regard.attention(*(array.swapaxes(-3, -2) for array in rows_first))
    message = refusal(lambda: regard.attention(Q[:, :3], K[:, :2], K[:, :2]))
    assert message.endswith("must be a multiple of the number of key heads")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "value must be an array of numbers, not None"),
        ("she likes coffee", "value must be an array of numbers, not the text 'she likes coffee'"),
        ("v.npy", "not the name of a file; pass numpy.load('v.npy')"),
        (np.ndarray, "not the class ndarray"),
        (len, "not a function; pass what it returns"),
        (iter(X), "not an iterator; pass list(value)"),
        ((row for row in X), "not a generator; pass list(value)"),
        ([[1.0], [2.0, 3.0]], "unequal parts: value[0] has shape (1,) but value[1] has shape (2,)"),
        ([[1.0], [2.0, 3.0]], "hide the padding with mask=regard.masks.Lengths(…)"),
        ([[[1.0], [2.0, 3.0]], [[1.0], [1.0]]], "value is a list of unequal parts in a part; pad"),
    ],
)
def test_what_is_no_array_is_named_with_what_to_pass_instead(value, text):
    assert text in refusal(lambda: regard.attention(X, X, value))


def test_lists_of_rows_are_arrays():
    output = regard.attention(X.tolist(), tuple(map(tuple, X)), list(X))
    np.testing.assert_array_equal(output, regard.attention(X, X, X))


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (masks.Causal, "mask is the class Causal, not a rule; pass Causal()"),
        (masks.Window, "mask is the class Window, not a rule; pass Window(left, right)"),
        ("causal", "not the text 'causal'; pass causal=True"),
        ("lower", "mask must be booleans in rows of equal length, not the text 'lower'"),
        (lambda i, j: i >= j, "not a function; pass what it returns"),
        (np.ones((L, L), int), "in Hugging Face 1 means attend: mask.astype(bool)"),
        (np.where(np.eye(L), 0.0, -np.inf), "go to bias=; if 0 means attend and all others hide"),
        (np.where(np.eye(L), 0.0, np.finfo("f4").min), "hide, pass mask=mask == 0"),
    ],
)
def test_a_mask_of_another_kind_is_answered_with_what_to_pass_instead(mask, text):
    assert text in refusal(lambda: regard.attention(X, X, X, mask=mask))


def test_a_class_without_parentheses_is_found_within_a_combination():
    with pytest.raises(regard.DtypeError, match=re.escape("pass Causal()")):
        _ = masks.Window(1, 1) & masks.Causal


def test_numbers_that_are_only_added_are_sent_to_bias_alone():
    message = refusal(lambda: regard.attention(X, X, X, mask=np.full((L, L), -1.5)))
    assert message.endswith("numbers to be added to the scores go to bias=")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"causal": "end"}, "not 'end'; how positions are aligned is offset="),
        ({"window": 128}, "not 128; pass (128, 0) for as many earlier keys"),
        ({"window": "all"}, "None for unbounded, not 'all'"),
        ({"scale": "sqrt"}, "scale must be a number, not the text 'sqrt'"),
    ],
)
def test_an_option_of_another_kind_is_answered_with_what_to_pass_instead(options, text):
    assert refusal(lambda: regard.attention(X, X, X, **options)).endswith(text)


def test_booleans_for_lengths_are_answered_with_their_sum():
    assert refusal(lambda: masks.Lengths(PADDING)).endswith(
        "the number of True in each row is .sum(axis=-1)"
    )


@pytest.mark.needs("pandas")
def test_pandas_is_read_where_it_is_of_numbers_and_named_where_it_is_not():
    import pandas as pd

    frame = pd.DataFrame(X)
    np.testing.assert_array_equal(regard.attention(frame, frame, frame), X)
    words = pd.DataFrame({"word": list("abc"), "x": [1.0, 2.0, 3.0]})
    text = "query is a pandas DataFrame with text or without some of its numbers; pass "
    message = refusal(lambda: regard.attention(words, X, X))
    assert message == f"{text}query.select_dtypes('number').to_numpy(float)"
    columns = {
        "x": pd.array([1.0, None, 2.0], dtype="Float64"),
        "y": pd.array([1, 2, 3], dtype="Int64"),
    }
    absent = pd.DataFrame(columns)
    assert refusal(lambda: regard.attention(absent, X, X)).startswith(text)
    series = pd.Series([True, None, False])
    assert refusal(lambda: regard.attention(X, X, X, mask=series)).endswith(
        "pass mask.to_numpy(bool)"
    )


@pytest.mark.needs("xarray")
def test_an_xarray_dataset_is_answered_with_one_of_its_arrays():
    import xarray as xr

    data = xr.Dataset({"q": (("l", "d"), X)})
    message = refusal(lambda: regard.attention(X, data, X))
    assert message.endswith("not an xarray Dataset; pass one of its arrays, key['q']")


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: regard.attention(x, x, x, threads=-n),
        lambda x, n: regard.attention(x, x, x, window=n),
        lambda x, n: regard.softmax(x, axis=n),
        lambda x, n: regard.MultiHeadAttention(x, x, x, heads=n),
        lambda x, n: regard.positions.Rotary(width=n + 1),
        lambda x, n: regard.explain(x, x, x).statistics(head=n),
    ],
)
def test_a_number_of_very_many_digits_is_cut_in_a_message(call):
    with pytest.raises(regard.errors.RegardError) as caught:
        call(np.eye(2), 10**600)
    assert "10000000000000000000… (601 digits)" in str(caught.value)
    assert len(str(caught.value)) < 240
