"""How steps, tables and derivations show themselves, and how one of several heads is asked for."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest

import regard

WORDS = ["she", "likes", "coffee"]
RNG = np.random.default_rng(5)
X = RNG.normal(size=(3, 4))
HEADS = [RNG.normal(size=(count, 5, 4)) for count in (4, 2, 2)]
BATCH = [RNG.normal(size=(2, count, 3, 4)) for count in (3, 3, 3)]
LARGE = [RNG.normal(size=(12, 40, 4)) for _ in range(3)]


def labelled(**options):
    return regard.explain(X, X, X, query_labels=WORDS, key_labels=WORDS, **options)


# steps --------------------------------------------------------------------------------------------


def test_a_step_shows_its_numbers_with_their_labels_and_what_hides_a_key():
    step = labelled(causal=True)["weights"]
    weights = step.value
    title, header, *rows = repr(step).split("\n")
    assert title == "weights  P = Y / z  3 query rows × 3 keys"
    assert header.split() == WORDS
    assert rows[0].split() == ["she", "1", "causal", "causal"]
    assert rows[1].split() == ["likes", *(f"{one:.4f}" for one in weights[1, :2]), "causal"]
    assert rows[2].split() == ["coffee", *(f"{one:.4f}" for one in weights[2])]


def test_decimal_points_of_a_column_are_in_line():
    values = np.array([[1.0, -10.5], [0.25, 2.125]])
    _, _, *rows = repr(regard.explain(np.eye(2), np.eye(2), values)["values"]).split("\n")
    assert rows == ["0  1     −10.5", "1  0.25    2.125"]


def test_a_step_in_a_notebook_is_a_table_that_says_the_same():
    html = labelled(causal=True)["weights"]._repr_html_()
    words = re.sub(r"<[^>]+>", " ", html)
    for word in ("weights", "P = Y / z", "3 query rows × 3 keys", *WORDS, "causal"):
        assert word in words
    assert html.count("<tr>") == 4
    assert html.count("rgba(") == 6  # six numbers are seen, and coloured


def test_labels_in_a_notebook_are_text():
    explanation = regard.explain(X[:1], X[:1], X[:1], key_labels=["<script>alert(1)</script>"])
    assert "<script" not in explanation["weights"]._repr_html_()


def test_a_long_step_shows_the_first_and_last_rows_and_says_what_is_left():
    explanation = regard.explain(*LARGE)
    text = repr(explanation["weights"])
    lines = text.split("\n")
    assert lines[0].endswith("12 heads × 40 query rows × 40 keys")
    assert lines[1] == "head 0"
    assert [line.split()[0] for line in lines[3:15]] == [*"012345", "…", *map(str, range(35, 40))]
    assert lines[15] == "head 1"
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "… 10 more: .table() takes head"


def test_small_heads_are_shown_together():
    text = repr(regard.explain(*HEADS)["weights"])
    assert [line for line in text.split("\n") if line.startswith("head")] == [
        f"head {k}" for k in range(4)
    ]
    assert "key head 1" in repr(regard.explain(*HEADS)["keys"])
    assert "batch 1, head 2" in repr(regard.explain(*BATCH)["weights"])


def test_showing_a_long_step_does_not_compute_all_of_it():
    explanation = regard.explain(*(RNG.normal(size=(2, 3000, 2)) for _ in range(3)))
    repr(explanation["weights"])
    assert "value" not in vars(explanation["weights"])


@pytest.mark.parametrize("call", [(X, X, X), HEADS, BATCH], ids=["plain", "heads", "batch"])
def test_numpy_takes_a_step_as_its_array(call):
    explanation = regard.explain(*call)
    for step in explanation.steps.values():
        np.testing.assert_array_equal(np.asarray(step), step.value, strict=True)
        assert np.asarray(step, np.float32).dtype == np.float32
    np.array(explanation["weights"])[...] = 0  # a copy, which may be written


def test_numpy_takes_a_table_as_its_array():
    table = labelled().contributions("she")
    np.testing.assert_array_equal(np.asarray(table), table.value, strict=True)


def test_a_step_is_found_by_its_name():
    explanation = labelled()
    assert explanation["weights"] is explanation.steps["weights"]
    with pytest.raises(KeyError, match="there is no step wieghts; did you mean weights"):
        explanation["wieghts"]
    with pytest.raises(AttributeError, match=r'for the step write explanation\["weights"\]'):
        _ = explanation.weights
    with pytest.raises(AttributeError, match=r'for the step write explanation\["weights"\]'):
        _ = explanation.wieghts
    with pytest.raises(AttributeError, match=r"no attribute nonsense$"):
        _ = explanation.nonsense
    assert not hasattr(explanation, "_repr_latex_")


def test_an_attribute_that_is_missing_while_an_explanation_is_made_is_just_missing():
    made = object.__new__(type(labelled()))
    assert not hasattr(made, "source")
    np.testing.assert_array_equal(copy.copy(labelled()).output, labelled().output)


# one of several -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda e, **one: e.why("weights", 0, 0, **one),
        lambda e, **one: e.table("weights", **one),
        lambda e, **one: e["weights"].head(**one),
        lambda e, **one: e.contributions(0, **one),
        lambda e, **one: e.to_markdown("weights", **one),
        lambda e, **one: e.to_latex("weights", **one),
    ],
    ids=["why", "table", "head", "contributions", "to_markdown", "to_latex"],
)
def test_one_of_several_heads_or_batch_elements_is_named(ask):
    explanation = regard.explain(*BATCH)
    both = "weights has a batch of 2 and 3 heads; say which one, such as batch=0, head=0"
    with pytest.raises(KeyError, match=both):
        ask(explanation)
    with pytest.raises(KeyError, match=r"weights has 3 heads; say which one, such as head=0"):
        ask(explanation, batch=1)
    with pytest.raises(KeyError, match=r"weights has a batch of 2; say .* such as batch=0"):
        ask(explanation, head=1)
    ask(explanation, head=1, batch=1)


def test_with_several_leading_axes_the_message_shows_a_position_for_each():
    explanation = regard.explain(*np.ones((3, 2, 3, 1, 4, 2)))
    with pytest.raises(KeyError, match=r"a batch of 2 × 3; say which one, such as batch=\(0, 0\)"):
        explanation.why("weights", 0, 0)


def test_where_there_is_one_only_it_needs_no_name():
    explanation = regard.explain(*np.ones((3, 1, 1, 2, 2)))
    assert explanation.why("weights", 0, 0).value == 0.5
    assert explanation.table("weights").value.shape == (2, 2)
    explanation = regard.explain(*HEADS)
    assert explanation.why("scale").value == 0.5  # all heads have the same
    shared = regard.explain(HEADS[0], HEADS[1][:1], HEADS[1][:1])
    assert shared.why("keys", 0, 0).value == HEADS[1][0, 0, 0]  # so have these


def test_a_head_that_is_not_there_is_said_before_a_missing_batch():
    with pytest.raises(KeyError, match="there are 3 heads, counted from 0; there is no head 7"):
        regard.explain(*BATCH).why("weights", 0, 0, head=7)
