"""How steps, tables and derivations show themselves, and how one of several heads is asked for."""

from __future__ import annotations

import copy
import re
import sys

import numpy as np
import pytest

import regard
from regard.explanation.overview import Overview
from regard.faces import Diagnosis

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
    labels = ["<script>alert(1)</script>", "$x$"]
    html = regard.explain(X[:1], X[:2], X[:2], key_labels=labels)["weights"]._repr_html_()
    assert "<script" not in html
    assert "mathjax_ignore" in html


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
    explanation = regard.explain(*np.ones((3, 2, 3000, 2)))
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


# formulas -----------------------------------------------------------------------------------------


def test_a_derivation_in_a_notebook_is_a_formula_with_a_line_for_each_term():
    latex = labelled(causal=True).why("output", "coffee", 1)._repr_latex_()
    assert latex.startswith("$$\\begin{aligned}\nO &= P V \\\\\n")
    assert latex.endswith("\\end{aligned}$$")
    for word in WORDS:
        assert f"&& \\text{{{word}}}" in latex
    assert latex.count("{} + ") == 2


def test_a_hidden_cell_says_in_its_formula_what_hides_it():
    latex = labelled(causal=True).why("weights", "she", "coffee")._repr_latex_()
    assert r"\text{hidden by: causal}" in latex


def test_a_long_formula_has_the_largest_terms_and_one_for_the_rest():
    explanation = regard.explain(*np.random.default_rng(1).normal(size=(3, 300, 2)))
    assert explanation.why("output", 0, 0)._repr_latex_().count(r"\quad {}") == 15
    assert r"\text{285 more, together}" in explanation.why("output", 0, 0)._repr_latex_()
    assert r"\text{and 285 more, at most} \;" in explanation.why("row_maximum", 0)._repr_latex_()


def test_a_negative_number_is_subtracted_in_a_sum() -> None:
    ones = np.ones((2, 1, 1))
    cell = regard.explain(ones, ones[:1], ones[:1], grad_output=-ones).why("d_values", 0, 0)
    assert cell.latex().endswith("= -1 - 1 = -2")
    lines = cell._repr_latex_().split("\\\\")
    assert r"&= -1 && \text{head 0}" in lines[1]
    assert r"&\quad {} - 1 && \text{head 1}" in lines[2]


@pytest.mark.parametrize("step", ["queries", "scale", "visible", "lse", "width", "row_sums"])
def test_every_kind_of_step_has_a_formula_with_its_value(step):
    explanation = labelled(causal=True)
    declared = explanation[step].axes
    cell = explanation.why(step, *[0] * len(declared))
    latex = cell._repr_latex_()
    assert latex.count(r"\begin{") == latex.count(r"\end{") == 1
    assert latex.count("{") == latex.count("}")


# tables for pandas --------------------------------------------------------------------------------


@pytest.mark.needs("pandas")
def test_a_step_as_a_dataframe_has_its_labels_and_exact_numbers():
    explanation = labelled(causal=True)
    frame = explanation["weights"].to_dataframe()
    np.testing.assert_array_equal(frame.to_numpy(), explanation["weights"].value, strict=True)
    assert (list(frame.index), list(frame.columns)) == (WORDS, WORDS)
    assert (frame.index.name, frame.columns.name) == ("query row", "key")
    assert explanation.to_dataframe().equals(frame)
    assert explanation["row_sums"].to_dataframe().columns.tolist() == ["row_sums"]
    assert explanation["scale"].to_dataframe().shape == (1, 1)
    table = explanation.contributions("likes")
    np.testing.assert_array_equal(table.to_dataframe().loc["she"], table.value[0])


@pytest.mark.needs("pandas")
def test_the_labels_of_dataframes_name_rows_and_columns_unless_others_are_given():
    from pandas import DataFrame

    words, counted = DataFrame(X, WORDS, [*"abcd"]), DataFrame(X)
    values, named = words.set_axis([3, 4, 5]), {"value_features": [*"efgh"]}
    explanation = regard.explain(words, counted, values, **named)
    queries, values = (explanation[name].to_dataframe() for name in ("queries", "values"))
    assert [*map(list, (queries.index, queries.columns))] == [WORDS, [*"abcd"]]
    assert [*map(list, (values.index, values.columns))] == [["3", "4", "5"], [*"efgh"]]
    weights = dict.fromkeys(("W_q", "W_k", "W_v"), np.eye(4))
    problem = regard.Problem(embeddings=words, **weights)
    assert (problem.query_labels, problem.embedding_features) == (tuple(WORDS), tuple("abcd"))
    given = regard.Problem(embeddings=words, query_labels=("a", "b", "c"), **weights)
    assert given.query_labels == ("a", "b", "c")
    assert regard.Problem(embeddings=words, labels=[*"abc"], **weights).query_labels == tuple("abc")
    assert regard.explain(words, words, words, labels=[*"abc"])["keys"].row_labels == tuple("abc")
    assert regard.Problem(embeddings=counted, **weights).query_labels is None


@pytest.mark.needs("pandas")
def test_heads_and_batch_elements_are_levels_of_the_index():
    explanation = regard.explain(*BATCH)
    for name in ("weights", "lse", "keys"):
        step = explanation[name]
        frame = step.to_dataframe()
        width = step.shape[-1] if name != "lse" else 1
        np.testing.assert_array_equal(frame.to_numpy(), step.value.reshape(-1, width))
    frame = explanation["weights"].to_dataframe()
    assert frame.index.names == ["batch", "head", "query row"]
    np.testing.assert_array_equal(frame.loc[1, 2], explanation["weights"].value[1, 2])
    several = regard.explain(*np.ones((3, 2, 3, 1, 4, 2)))["weights"].to_dataframe()
    assert several.index.names == ["batch 0", "batch 1", "head", "query row"]
    one = regard.explain(X[0], X, X, query_labels=["she"])["weights"].to_dataframe()
    assert (list(one.index), one.shape) == (["she"], (1, 3))


@pytest.mark.needs("pandas")
def test_answers_have_a_row_for_each_term_or_step():
    explanation = labelled()
    cell = explanation.why("output", "she", 1)
    frame = cell.to_dataframe()
    assert list(frame.columns) == ["P", "V", "P·V"]
    np.testing.assert_array_equal(frame["P·V"], [term.value for term in cell.terms])
    share = explanation.why("weights", "she", "likes")
    np.testing.assert_array_equal(
        share.to_dataframe(), [[*(one.value for one in share.operands), share.value]]
    )
    statistics = explanation.statistics()
    frame = statistics.to_dataframe()
    assert list(frame.index) == list(statistics.steps)
    assert frame.loc["weights", "mean"] == statistics.steps["weights"].mean
    frame = statistics.rows.to_dataframe()
    assert (list(frame.index), frame.index.name) == (WORDS, "query row")
    np.testing.assert_array_equal(frame["entropy"], statistics.rows.entropy)
    with_sink = regard.explain(X, X, X, sink=0.5).why("row_maximum", 0).to_dataframe()
    assert with_sink.index[-1] == "sink"


@pytest.mark.needs("pandas")
def test_statistics_of_rows_as_a_dataframe_have_the_levels_that_were_not_chosen():
    explanation = regard.explain(*BATCH)
    whole = explanation.statistics().rows.to_dataframe()
    for chosen, levels in (
        ({}, ["batch", "head", "query row"]),
        ({"head": 2}, ["batch", "query row"]),
        ({"batch": 1}, ["head", "query row"]),
        ({"batch": 1, "head": 2}, ["query row"]),
    ):
        frame = explanation.statistics(**chosen).rows.to_dataframe()
        assert list(frame.index.names) == levels
        part = whole.xs(tuple(chosen.values()), level=list(chosen)) if chosen else whole
        np.testing.assert_array_equal(frame.to_numpy(), part.to_numpy())
    assert regard.explain(X[0], X, X).statistics().rows.to_dataframe().shape == (1, 4)


@pytest.mark.needs("pandas")
def test_an_overview_as_a_dataframe_has_a_row_for_each_head():
    measures = np.random.default_rng(0).random((6, 2, 3))
    frame = Overview(("a", "b"), *measures).to_dataframe()
    assert (list(frame.index.names), len(frame)) == (["layer", "head"], 6)
    np.testing.assert_array_equal(frame["previous"].unstack(), measures[2])


@pytest.mark.needs("pandas")
def test_a_diagnosis_as_a_dataframe_lists_what_was_observed():
    frame = regard.diagnose(lambda q, k, v: q @ k.swapaxes(-1, -2) @ v).to_dataframe()
    assert list(frame.columns) == ["kind", "name", "title", "state", "detail"]
    assert {"line", "problem", "assumption"} <= set(frame["kind"])


def test_without_pandas_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(regard.OptionError, match=r'pip install "regard\[pandas\]"'):
        labelled().to_dataframe()


# pages and names ----------------------------------------------------------------------------------


def test_without_a_path_to_html_returns_the_page(tmp_path):
    explanation = labelled()
    explanation.to_html(tmp_path / "page.html", digits=3)
    assert explanation.to_html(digits=3) == (tmp_path / "page.html").read_text("utf-8")
    found = Diagnosis("f", "right", "f is right", "f(q, k, v)")
    found.to_html(tmp_path / "diagnosis.html")
    assert found.to_html() == (tmp_path / "diagnosis.html").read_text("utf-8")


def test_dir_lists_what_users_need():
    explanation = labelled()
    assert {"steps", "why", "table", "output", "to_html", "plot"} <= set(dir(explanation))
    assert not {"source", "rebuild", "derive", "names", "check_kernel"} & set(dir(explanation))
    assert {"value", "table", "to_dataframe", "formula"} <= set(dir(explanation["weights"]))
    assert not {"source", "declared", "blocks"} & set(dir(explanation["weights"]))
    for shown in (explanation, explanation["weights"], explanation.table("weights")):
        assert all(hasattr(shown, name) for name in dir(shown))


@pytest.mark.needs("matplotlib")
def test_a_plot_of_one_of_several_heads_says_which():
    from matplotlib import use

    use("Agg")
    axes = regard.explain(*BATCH).plot(head=2, batch=1)
    assert axes.get_title().endswith("batch 1, head 2")
