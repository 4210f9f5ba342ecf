"""What an explanation shows: its steps, shapes, labels, tables, and the kernel beside it."""

from __future__ import annotations

import dataclasses
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import regard
import regard.compute.dispatch
from bounds import assert_within, error_bounds, precision_of
from calls import arithmetic_of, every_float, numbers
from layouts import layouts
from oracle import attend
from regard import Expectation, Explanation, Problem
from regard.compute.evaluation import Run
from regard.compute.kernels import reference
from regard.masks import Boolean, Causal, Lengths, Segments, Window
from regard.positions import Rotary
from regard.problems.parts import READY
from regard.textbook.steps import textbook

INF, NAN = np.inf, np.nan
UNIT = 2.0**-53  # of float64, in which every step is computed
# How exactly two ways of dividing the same difference by the same ulp agree.
SAME_RATIO = 16 * UNIT


def inputs(*shapes: tuple[int, ...], dtype: Any = np.float64, seed: int = 0) -> tuple[Any, ...]:
    return tuple(numbers(shape, dtype, 100 * seed + n) for n, shape in enumerate(shapes))


PLAIN = inputs((3, 2), (4, 2), (4, 3))
SQUARE = inputs((3, 2), (3, 2), (3, 2))
HEADS = inputs((4, 3, 2), (2, 5, 2), (2, 5, 3))
BATCH = inputs((2, 1, 4, 3, 2), (3, 2, 5, 2), (2, 5, 3))


def whole_numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """So small that every product and sum of them is exact in float64."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float64)


def projected(**more: Any) -> Problem:
    """Self-attention of three tokens, 4 query heads on 2 key heads, with every weight there is."""
    fields = {
        "embeddings": whole_numbers(3, 5),
        "W_q": whole_numbers(5, 8, seed=1),
        "W_k": whole_numbers(5, 4, seed=2),
        "W_v": whole_numbers(5, 6, seed=3),
        "W_o": whole_numbers(12, 7, seed=4),
        "b_q": whole_numbers(8, seed=5),
        "b_k": whole_numbers(4, seed=6),
        "b_v": whole_numbers(6, seed=7),
        "b_o": whole_numbers(7, seed=8),
        "heads": 4,
        "key_heads": 2,
        "query_labels": ("she", "likes", "coffee"),
        "scale": 0.05,
    }
    return Problem(**(fields | more))


def lookup(*labels: str) -> Explanation:
    """Keys of these names; the queries are q0, q1."""
    count = len(labels)
    arrays = inputs((2, 2), (count, 2), (count, 2))
    return regard.explain(*arrays, query_labels=["q0", "q1"], key_labels=labels)


# the numbers --------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"causal": True, "offset": "end"},
    {"window": (1, 0), "offset": 0},
    {"mask": np.arange(15).reshape(3, 5) % 4 > 0},
    {"bias": np.where(np.arange(15).reshape(3, 5) % 4 == 1, -INF, numbers((3, 5)))},
    {"softcap": 0.75, "scale": -1.5},
    {"sink": 0.25},
    {"mask": np.zeros((3, 5), bool), "sink": -1.0},
    {"mask": np.arange(3)[:, np.newaxis] > 0},
    {"causal": True, "offset": 1, "softcap": 2.0, "bias": numbers((5,)), "sink": 0.0, "scale": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 2), (5, 2), (5, 3)),
        ((4, 3, 2), (2, 5, 2), (2, 5, 3)),
        ((2, 4, 3, 2), (2, 5, 2), (2, 5, 3)),
    ],
    ids=["plain", "heads", "batch"],
)
def test_the_steps_are_those_of_attention(shapes, options):
    arrays = inputs(*shapes)
    explanation = regard.explain(*arrays, **options)
    answer = attend(*arrays, **options)
    given = {n: options[n] for n in ("scale", "softcap", "bias", "sink") if n in options}
    bounds = error_bounds(*arrays, answer, dtype=np.float64, **given)
    for name in ("output", "weights", "lse"):
        value = explanation.steps[name].value
        assert_within(value, getattr(answer, name), getattr(bounds, name), name)
    if "visible" in explanation.steps:
        np.testing.assert_array_equal(explanation.steps["visible"].value, answer.visible)
        np.testing.assert_array_equal(
            np.isneginf(explanation.steps["masked"].value), ~answer.visible
        )
    else:
        assert answer.visible.all()


def test_projections_split_into_heads_as_columns_side_by_side():
    problem = projected()
    steps = regard.explain(problem).steps
    x = problem.embeddings
    for name, letter, heads in (("queries", "q", 4), ("keys", "k", 2), ("values", "v", 2)):
        packed = x @ getattr(problem, f"W_{letter}") + getattr(problem, f"b_{letter}")
        singular = {"queries": "query", "keys": "key", "values": "value"}[name]
        np.testing.assert_array_equal(
            steps[f"{singular}_products"].value, x @ getattr(problem, f"W_{letter}")
        )
        np.testing.assert_array_equal(steps[f"projected_{name}"].value, packed)
        np.testing.assert_array_equal(
            steps[name].value, np.moveaxis(packed.reshape(3, heads, -1), 1, 0)
        )


def test_heads_are_merged_and_projected_by_w_o_and_b_o():
    problem = projected()
    steps = regard.explain(problem).steps
    output = steps["output"].value  # (H, L, E)
    merged = np.concatenate(list(output), axis=-1)
    np.testing.assert_array_equal(steps["merged"].value, merged)
    roundings = 2 * merged.shape[-1] * UNIT * (abs(merged) @ abs(problem.W_o))
    assert_within(steps["output_products"].value, merged @ problem.W_o, roundings)
    np.testing.assert_array_equal(
        steps["projected_output"].value, steps["output_products"].value + problem.b_o
    )


def test_the_keys_and_values_of_cross_attention_come_from_the_context():
    problem = Problem(
        embeddings=whole_numbers(2, 3),
        context=whole_numbers(4, 5, seed=1),
        W_q=whole_numbers(3, 2, seed=2),
        W_k=whole_numbers(5, 2, seed=3),
        W_v=whole_numbers(5, 1, seed=4),
    )
    steps = regard.explain(problem).steps
    np.testing.assert_array_equal(steps["queries"].value, problem.embeddings @ problem.W_q)
    np.testing.assert_array_equal(steps["keys"].value, problem.context @ problem.W_k)
    np.testing.assert_array_equal(steps["values"].value, problem.context @ problem.W_v)


def test_numbers_do_not_depend_on_how_the_inputs_lie_in_memory():
    expected = {name: step.value for name, step in regard.explain(*SQUARE).steps.items()}
    for position in range(3):
        for layout, array in layouts(SQUARE[position]):
            arrays = [array if n == position else x for n, x in enumerate(SQUARE)]
            for name, step in regard.explain(*arrays).steps.items():
                assert step.value.tobytes() == expected[name].tobytes(), (layout, name)


@every_float
def test_every_step_is_in_float64_whatever_the_inputs_are(dtype):
    arrays = inputs((3, 2), (4, 2), (4, 3), dtype=dtype)
    explanation = regard.explain(*arrays, softcap=2.0, bias=numbers((4,), dtype), sink=0.5)
    wide = regard.explain(
        *(x.astype(np.float64) for x in arrays),
        softcap=2.0,
        bias=numbers((4,), dtype).astype(np.float64),
        sink=0.5,
    )
    for name, step in explanation.steps.items():
        assert step.value.dtype == np.float64
        np.testing.assert_array_equal(step.value, wide.steps[name].value)


# steps as a mapping -------------------------------------------------------------------------------


def everything() -> list[str]:
    given = {"embeddings", "context", *(f"{kind}_{x}" for kind in "Wb" for x in "qkvo")}
    return [step.name for step in textbook(given | {"bias", "softcap", "sink"}, masked=True)]


def test_steps_are_in_the_order_of_the_textbook():
    order = everything()
    for explanation in (regard.explain(*PLAIN, sink=0.5), regard.explain(projected(causal=True))):
        names = list(explanation.steps)
        kept = [name for name in names if name in order]
        assert kept == [name for name in order if name in names]
        assert len(explanation.steps) == len(names)
        for name in names:
            assert explanation.steps[name].name == name
            assert name in explanation.steps


def test_a_step_says_what_the_textbook_says_of_it():
    step = regard.explain(*HEADS).steps["weights"]
    assert (step.symbol, step.formula, step.latex) == ("P", "P = Y / z", "P = Y / z")
    assert step.axes == ("H", "L", "S")
    assert step.given is False
    assert regard.explain(*HEADS).steps["queries"].given is True


SHORTEST = regard.explain(*PLAIN, softmax="unshifted", scale=1.0)


@pytest.mark.parametrize("name", [name for name in everything() if name not in SHORTEST.steps])
def test_a_step_that_a_call_does_not_have_says_why(name):
    with pytest.raises(KeyError) as error:
        SHORTEST.steps[name]
    assert isinstance(error.value, regard.LabelError)
    reason = str(error.value).removeprefix(f"there is no step {name}: ")
    assert reason != str(error.value)
    assert len(reason) > 10


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("softcap", {}, "no softcap"),
        ("biased", {}, "no bias"),
        ("masked", {}, "hides"),
        ("sink_exponential", {}, "no sink"),
        ("row_maximum", {"softmax": "unshifted"}, "unshifted"),
        ("sink_shifted", {"softmax": "unshifted", "sink": 1.0}, "unshifted"),
        ("embeddings", {}, "ready"),
        ("context", {}, "ready"),
        ("query_products", {}, "ready"),
        ("projected_keys", {}, "ready"),
        ("merged", {}, "heads"),
    ],
)
def test_the_reason_why_a_step_is_missing_is_true_of_this_call(name, options, reason):
    with pytest.raises(KeyError, match=reason):
        regard.explain(*PLAIN, **options).steps[name]


def test_the_reason_why_a_projection_has_no_packed_or_biased_step_is_true_too():
    plain = regard.explain(
        Problem(
            embeddings=whole_numbers(2, 2),
            W_q=whole_numbers(2, 2),
            W_k=whole_numbers(2, 2),
            W_v=whole_numbers(2, 2),
        )
    )
    for name, reason in (
        ("context", "same rows"),
        ("b_q", "given"),
        ("query_products", "b_q|bias"),
        ("projected_queries", "head"),
        ("merged", "head"),
        ("W_o", "given"),
        ("output_products", "projection"),
        ("projected_output", "projection"),
    ):
        with pytest.raises(KeyError, match=reason):
            plain.steps[name]


def test_an_unknown_step_suggests_the_nearest_one():
    with pytest.raises(KeyError, match="no step wieghts; did you mean weights"):
        regard.explain(*PLAIN).steps["wieghts"]
    with pytest.raises(regard.LabelError, match="no step zz; there are queries, keys"):
        regard.explain(*PLAIN).why("zz", 0, 0)


@pytest.mark.parametrize("key", [0, None, 1.5, ("weights",)])
def test_what_is_no_name_at_all_is_not_among_the_steps(key):
    steps = regard.explain(*PLAIN).steps
    assert key not in steps
    assert steps.get(key) is None
    with pytest.raises(KeyError):
        steps[key]


# shapes and labels --------------------------------------------------------------------------------


def shapes_of(explanation: Explanation, *names: str) -> list[tuple[int, ...]]:
    shapes = [explanation.steps[name].shape for name in names]
    assert shapes == [explanation.steps[name].value.shape for name in names]
    return shapes


ASKED = ("queries", "keys", "values", "scores", "visible", "row_sums", "weights", "output", "lse")


@pytest.mark.parametrize(
    ("query", "key", "value", "shapes"),
    [
        ((2,), (4, 2), (4, 3), [(2,), (4, 2), (4, 3), (4,), (4,), (), (4,), (3,), ()]),
        (
            *((3, 2), (4, 2), (4, 5)),
            [(3, 2), (4, 2), (4, 5), (3, 4), (3, 4), (3,), (3, 4), (3, 5), (3,)],
        ),
        (
            *((6, 3, 2), (2, 4, 2), (2, 4, 5)),
            [
                *((6, 3, 2), (2, 4, 2), (2, 4, 5), (6, 3, 4), (6, 3, 4)),
                *((6, 3), (6, 3, 4), (6, 3, 5), (6, 3)),
            ],
        ),
        (
            *((7, 1, 6, 3, 2), (8, 2, 4, 2), (2, 4, 5)),
            [
                *((7, 8, 6, 3, 2), (7, 8, 2, 4, 2), (7, 8, 2, 4, 5), (7, 8, 6, 3, 4)),
                *((7, 8, 6, 3, 4), (7, 8, 6, 3), (7, 8, 6, 3, 4), (7, 8, 6, 3, 5), (7, 8, 6, 3)),
            ],
        ),
    ],
    ids=["one query", "matrices", "heads", "batches"],
)
def test_every_step_has_the_shape_that_its_axes_say(query, key, value, shapes):
    explanation = regard.explain(*inputs(query, key, value), mask=np.arange(4) != 2)
    assert shapes_of(explanation, *ASKED) == shapes
    for step in explanation.steps.values():
        own = tuple(explanation.source.sizes[axis] for axis in step.axes)
        assert step.shape[len(step.shape) - len(own) :] == own
        assert step.value.shape == step.shape


def test_an_explanation_knows_its_heads_and_leading_axes():
    assert (regard.explain(*PLAIN).heads, regard.explain(*PLAIN).batch_shape) == (None, ())
    assert (regard.explain(*HEADS).heads, regard.explain(*HEADS).batch_shape) == (4, ())
    assert (regard.explain(*BATCH).heads, regard.explain(*BATCH).batch_shape) == (4, (2, 3))


def test_the_output_is_the_last_result_there_is():
    plain = regard.explain(*HEADS)
    assert plain.output is plain.steps["output"].value
    whole = regard.explain(projected())
    assert whole.output is whole.steps["projected_output"].value
    unprojected = regard.explain(projected(W_o=None, b_o=None))
    assert unprojected.output is unprojected.steps["merged"].value


def test_rows_and_columns_bear_the_labels_of_their_axes():
    explanation = regard.explain(
        *PLAIN,
        query_labels=["she", "likes", "coffee"],
        key_labels=["a", "cat", "sat", "down"],
        key_features=["x", "y"],
        value_features=["u", "v", "w"],
        title="Cats",
    )
    rows, keys = ("she", "likes", "coffee"), ("a", "cat", "sat", "down")
    expected = {
        "queries": (rows, ("x", "y")),
        "keys": (keys, ("x", "y")),
        "values": (keys, ("u", "v", "w")),
        "scores": (rows, keys),
        "weights": (rows, keys),
        "row_sums": (rows, ()),
        "output": (rows, ("u", "v", "w")),
        "lse": (rows, ()),
        "scale": ((), ()),
    }
    for name, labels in expected.items():
        step = explanation.steps[name]
        assert (step.row_labels, step.column_labels) == labels, name
    assert explanation.title == "Cats"


def test_rows_and_columns_without_labels_are_numbered():
    step = regard.explain(*PLAIN).steps["weights"]
    assert (step.row_labels, step.column_labels) == (("0", "1", "2"), ("0", "1", "2", "3"))


def test_a_problem_labels_every_axis_it_names():
    problem = projected(
        embedding_features=tuple("abcde"),
        key_features=("x", "y"),
        value_features=("u", "v", "w"),
        output_features=tuple("ABCDEFG"),
        row_notes={"embeddings": ("subject", "verb", "object")},
        note="Heads share keys.",
        title="Coffee",
    )
    explanation = regard.explain(problem)
    tokens = ("she", "likes", "coffee")
    expected = {
        "embeddings": (tokens, tuple("abcde")),
        "W_q": (tuple("abcde"), tuple("01234567")),
        "queries": (tokens, ("x", "y")),
        "weights": (tokens, tokens),
        "output": (tokens, ("u", "v", "w")),
        "projected_output": (tokens, tuple("ABCDEFG")),
        "b_o": ((), tuple("ABCDEFG")),
    }
    for name, labels in expected.items():
        step = explanation.steps[name]
        assert (step.row_labels, step.column_labels) == labels, name
    assert explanation.steps["embeddings"].row_notes == ("subject", "verb", "object")
    assert explanation.steps["queries"].row_notes == ()
    assert explanation.table("embeddings").row_notes == ("subject", "verb", "object")
    assert (explanation.title, explanation.note) == ("Coffee", "Heads share keys.")
    assert explanation.problem is problem


def test_a_single_query_bears_its_label_where_there_is_no_query_axis():
    explanation = regard.explain(*inputs((2,), (3, 2), (3, 2)), query_labels=["mammal"])
    assert explanation.steps["weights"].row_labels == ("mammal",)
    assert explanation.steps["weights"].column_labels == ("0", "1", "2")
    assert explanation.steps["keys"].row_labels == ("0", "1", "2")
    assert explanation.steps["scale"].row_labels == ()
    assert explanation.why("weights", 1).labels == ("1",)


# pointing at a cell -------------------------------------------------------------------------------


def test_a_cell_is_found_by_label_and_by_position():
    explanation = lookup("cat", "sat", "mat")
    for key in ("sat", 1, -2, "1", "-2", np.int64(1)):
        assert explanation.why("weights", "q1", key).index == (1, 1)
        assert explanation.why("weights", "q1", key).labels == ("q1", "sat")
    assert explanation.why("weights", "q1", "sat").value == explanation.steps["weights"].value[1, 1]


def test_a_label_comes_before_a_number():
    explanation = lookup("2", "0", "1")
    assert [explanation.why("weights", 0, key).index[1] for key in ("0", "1", "2")] == [1, 2, 0]
    assert [explanation.why("weights", 0, key).index[1] for key in (0, 1, 2)] == [0, 1, 2]
    assert explanation.why("weights", 0, "-1").index[1] == 2


def test_repeated_labels_are_told_apart_by_their_position():
    explanation = lookup("the", "cat", "saw", "the", "dog")
    labels = ("the@0", "cat", "saw", "the@3", "dog")
    assert explanation.steps["weights"].column_labels == labels
    assert explanation.why("keys", "the@3", 0).index == (3, 0)
    assert explanation.why("keys", "the@3", 0).labels == ("the@3", "0")
    with pytest.raises(regard.LabelError, match="the names 2 of the keys: say the@0 or the@3"):
        explanation.why("keys", "the", 0)


def test_a_label_that_is_there_once_may_be_written_with_its_position_too():
    explanation = lookup("the", "cat")
    assert explanation.why("keys", "cat@1", 0).index == (1, 0)
    with pytest.raises(regard.LabelError, match="cat@0 is none of the keys; did you mean cat"):
        explanation.why("keys", "cat@0", 0)


@pytest.mark.parametrize("labels", [["the", "the@0", "the"], ["a@1", "a", "a"], ["", "", "@0"]])
def test_a_label_that_looks_like_a_repeated_one_is_still_told_apart(labels):
    shown = lookup(*labels).steps["keys"].row_labels
    assert len(set(shown)) == len(shown)


@given(
    st.lists(st.sampled_from(["a", "b", "a@0", "a@1", "0", "1", "-1", "@"]), min_size=1, max_size=5)
)
def test_the_label_that_is_shown_finds_its_own_row(labels):
    explanation = lookup(*labels)
    for position, label in enumerate(explanation.steps["keys"].row_labels):
        assert explanation.why("keys", label, 0).index == (position, 0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("cats", "cats is none of the keys; did you mean cat"),
        ("zebra", "zebra is none of the keys; there are cat, sat, mat"),
        ("", "is none of the keys"),
        ("@", "@ is none of the keys"),
        ("cat@", "is none of the keys"),
        ("--1", "is none of the keys"),
        ("1.0", "is none of the keys"),
        ("²", "is none of the keys"),
        (3, "there are 3 keys, counted from 0; there is no 3"),
        (-4, "there are 3 keys, counted from 0; there is no -4"),
        ("3", "there are 3 keys, counted from 0; there is no 3"),
        ("\x1b[31mcat", r"\\x1b\[31mcat is none of the keys"),
        ("9" * 5000, "keys"),
    ],
)
def test_a_label_that_is_not_there_is_named(key, message):
    with pytest.raises(KeyError, match=message) as error:
        lookup("cat", "sat", "mat").why("weights", "q0", key)
    assert isinstance(error.value, regard.LabelError)
    assert len(str(error.value)) < 500
    assert "\x1b" not in str(error.value)


@pytest.mark.parametrize("key", [1.5, 1.0, None, [1], np.float64(1)])
def test_an_index_that_is_neither_label_nor_whole_number_is_refused(key):
    with pytest.raises((TypeError, regard.LabelError)):
        lookup("cat", "sat", "mat").why("weights", "q0", key)


@pytest.mark.parametrize("where", [(), (0,), (0, 0, 0)])
def test_too_many_or_too_few_indices_are_counted(where):
    with pytest.raises(
        regard.LabelError, match=rf"weights needs 2 .*query rows, keys.*{len(where)}"
    ):
        regard.explain(*HEADS).why("weights", *where)


def test_a_single_number_needs_no_index():
    explanation = regard.explain(*PLAIN, scale=0.25)
    assert explanation.why("scale").value == 0.25
    with pytest.raises(regard.LabelError, match="scale needs 0"):
        explanation.why("scale", 0)


def test_heads_and_batches_are_chosen_by_keyword():
    explanation = regard.explain(*BATCH)
    cell = explanation.why("weights", 2, 1, head=3, batch=(1, 2))
    assert cell.value == explanation.steps["weights"].value[1, 2, 3, 2, 1]
    assert (cell.index, cell.batch) == ((3, 2, 1), (1, 2))
    assert cell.labels == ("head 3", "2", "1")


def test_for_keys_and_values_the_head_is_the_query_head_that_reads_them():
    explanation = regard.explain(*HEADS)
    for head in range(4):
        cell = explanation.why("keys", 4, 1, head=head)
        assert cell.value == explanation.steps["keys"].value[head // 2, 4, 1]
        assert cell.value == explanation.steps["keys"].head(head)[4, 1]
        assert cell.labels == (f"key head {head // 2}", "4", "1")
    with pytest.raises(regard.LabelError, match="4 heads, counted from 0; there is no head 4"):
        explanation.why("keys", 0, 0, head=4)


def test_a_derivation_says_the_head_with_which_it_is_asked_for():
    explanation = regard.explain(*HEADS)
    output = explanation.why("output", 1, 2, head=3)
    assert output.head == 3
    (value, *_) = (k for k, one in enumerate(output.operands) if one.step == "values")
    opened = output.open(value)
    assert (opened.index[0], opened.head) == (1, 2)
    again = explanation.why("values", *opened.index[1:], head=opened.head)
    assert (again.index, again.value) == (opened.index, opened.value)
    assert explanation.why("scale").head is None


def test_a_score_is_made_of_the_key_head_of_its_group():
    explanation = regard.explain(*HEADS)
    for head in range(4):
        cell = explanation.why("scores", 0, 0, head=head)
        assert {o.index[0] for o in cell.operands if o.step == "keys"} == {head // 2}
        output = explanation.why("output", 0, 0, head=head)
        assert {o.index[0] for o in output.operands if o.step == "values"} == {head // 2}


@pytest.mark.parametrize("head", [4, -1, 100])
def test_a_head_that_is_not_there_is_refused(head):
    for ask in (
        lambda: regard.explain(*HEADS).why("weights", 0, 0, head=head),
        lambda: regard.explain(*HEADS).table("weights", head=head),
        lambda: regard.explain(*HEADS).contributions(0, head=head),
    ):
        with pytest.raises(
            regard.LabelError, match=f"4 heads, counted from 0; there is no head {head}"
        ):
            ask()
    with pytest.raises(regard.LabelError, match="one head"):
        regard.explain(*PLAIN).why("weights", 0, 0, head=head)


def test_a_head_that_is_not_there_is_refused_even_where_a_step_has_no_heads():
    with pytest.raises(regard.LabelError, match="no head 9"):
        regard.explain(projected()).why("embeddings", 0, 0, head=9)


@pytest.mark.parametrize("batch", [(2, 0), (0, 3), (-1, 0), (0,), (0, 0, 0), ()])
def test_a_batch_element_that_is_not_there_is_refused(batch):
    with pytest.raises(regard.LabelError, match="leading axes"):
        regard.explain(*BATCH).why("weights", 0, 0, batch=batch)


class CountingLabel(str):
    """A label that counts how often it is compared."""

    compared = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        CountingLabel.compared += 1
        return str.__eq__(self, other)


COMPARISONS_PER_LABEL = 50  # of one question; comparing each label with each other is another order


def test_labels_of_a_long_axis_are_not_all_compared_for_every_operand():
    count = 120
    labels = [CountingLabel(f"token {number}") for number in range(count)]
    arrays = inputs((1, 2), (count, 2), (count, 1))
    explanation = regard.explain(*arrays, key_labels=labels)
    CountingLabel.compared = 0
    cell = explanation.why("output", 0, 0)
    assert len(cell.terms) == count
    assert CountingLabel.compared <= COMPARISONS_PER_LABEL * count


# one head at a time -------------------------------------------------------------------------------


def test_one_head_of_one_batch_element_is_a_matrix_a_vector_or_a_number():
    explanation = regard.explain(*BATCH, sink=numbers((4,)))
    steps = explanation.steps
    np.testing.assert_array_equal(steps["weights"].head(3, (1, 2)), steps["weights"].value[1, 2, 3])
    np.testing.assert_array_equal(
        steps["row_sums"].head(1, (0, 1)), steps["row_sums"].value[0, 1, 1]
    )
    np.testing.assert_array_equal(steps["sink"].head(2, (1, 0)), steps["sink"].value[1, 0, 2])
    assert steps["scale"].head(3, (1, 2)).shape == ()
    matrix = regard.explain(*PLAIN).steps["weights"]
    np.testing.assert_array_equal(matrix.head(), matrix.value)


def test_a_query_head_shows_the_keys_of_its_group():
    keys = regard.explain(*HEADS).steps["keys"]
    for head in range(4):
        np.testing.assert_array_equal(keys.head(head), keys.value[head // 2])


def test_a_step_that_has_no_leading_axes_is_the_same_for_every_batch_element():
    steps = regard.explain(projected()).steps
    np.testing.assert_array_equal(steps["W_q"].head(2), steps["W_q"].value)


# tables -------------------------------------------------------------------------------------------


def test_a_table_is_always_a_matrix_with_its_labels():
    explanation = regard.explain(*HEADS, query_labels=["a", "b", "c"])
    weights = explanation.table("weights", head=2)
    np.testing.assert_array_equal(weights.value, explanation.steps["weights"].value[2])
    assert (weights.name, weights.symbol, weights.formula) == ("weights", "P", "P = Y / z")
    assert (weights.row_labels, weights.column_labels) == (("a", "b", "c"), tuple("01234"))
    assert weights.hidden is None
    sums = explanation.table("row_sums", head=1)
    np.testing.assert_array_equal(sums.value, explanation.steps["row_sums"].value[1][:, np.newaxis])
    assert (sums.row_labels, sums.column_labels) == (("a", "b", "c"), ())
    assert explanation.table("scale").value.shape == (1, 1)
    single = regard.explain(*inputs((2,), (3, 2), (3, 2)), mask=[True, False, True])
    table = single.table("weights")
    np.testing.assert_array_equal(table.value, single.steps["weights"].value[np.newaxis])
    np.testing.assert_array_equal(table.hidden, [[False, True, False]])
    assert table.hidden_by(0, 1) == ("mask",)


NOTHING_TO_SEE = inputs((2, 2), (0, 2), (0, 1))


@pytest.mark.parametrize("arrays", [PLAIN, HEADS, BATCH, NOTHING_TO_SEE], ids=range(4))
@pytest.mark.parametrize("step", ["masked", "row_maximum", "shifted", "exponentials", "weights"])
def test_every_kind_of_call_has_its_tables(step, arrays):
    explanation = regard.explain(*arrays, causal=True, offset=0)
    table = explanation.table(step, head=0, batch=(0,) * len(explanation.batch_shape))
    assert table.value.shape[0] == len(table.row_labels)
    if step != "row_maximum":
        assert table.value.shape == (len(table.row_labels), len(table.column_labels))
        assert table.hidden.shape == table.value.shape


RULES: dict[str, tuple[dict[str, Any], dict[tuple[int, int], tuple[str, ...]]]] = {
    "causal": ({"causal": True}, {(0, 1): ("causal",), (0, 2): ("causal",), (1, 2): ("causal",)}),
    "window": ({"window": (0, 1)}, {(0, 2): ("window",), (1, 0): ("window",), (2, 1): ("window",)}),
    "lengths": ({"mask": Lengths(2)}, {(0, 2): ("lengths",), (2, 2): ("lengths",)}),
    "segments": ({"mask": Segments([0, 0, 1])}, {(0, 2): ("segments",), (2, 0): ("segments",)}),
    "mask": ({"mask": np.eye(3) == 1}, {(0, 1): ("mask",), (2, 0): ("mask",)}),
    "a named mask": ({"mask": Boolean([True, False, True], "padding")}, {(1, 1): ("padding",)}),
    "bias": ({"bias": [[0.0, -INF, 0.0]]}, {(0, 1): ("bias −inf",), (2, 1): ("bias −inf",)}),
    "several": (
        {
            "mask": Boolean([True, False, False], "padding"),
            "causal": True,
            "bias": [0.0, 0.0, -INF],
        },
        {
            (0, 1): ("padding", "causal"),
            (0, 2): ("padding", "causal", "bias −inf"),
            (1, 1): ("padding",),
            (2, 2): ("padding", "bias −inf"),
        },
    ),
    "any of": (
        {"mask": Lengths(1) | Segments([0, 1, 1])},
        {(0, 1): ("lengths", "segments"), (0, 2): ("lengths", "segments")},
    ),
    "the opposite": ({"mask": ~Lengths(2)}, {(0, 0): ("not lengths",), (1, 1): ("not lengths",)}),
    "the opposite of any": (
        {"mask": ~(Lengths(1) | Window(0, 0))},
        {at: ("not (lengths | window)",) for at in ((0, 0), (2, 0), (2, 2))},
    ),
    "nested": (
        {"mask": (Lengths(2) & Causal()) | ~Window(1, None)},
        {(0, 1): ("causal", "not window"), (0, 2): ("lengths", "causal", "not window")},
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_hidden_cell_of_a_table_names_the_rules_that_hide_it(rule):
    options, expected = RULES[rule]
    explanation = regard.explain(*SQUARE, **options)
    for name in ("masked", "shifted", "exponentials", "weights"):
        table = explanation.table(name)
        np.testing.assert_array_equal(table.hidden, ~explanation.steps["visible"].value)
        for at, names in expected.items():
            assert table.hidden_by(*at) == names
        for at in itertools.product(range(3), repeat=2):
            assert bool(table.hidden_by(*at)) == table.hidden[at]
        absent = 0.0 if name in ("exponentials", "weights") else -INF
        np.testing.assert_array_equal(table.value[table.hidden], absent)
    for name in ("scores", "scaled", "keys", "output"):
        assert explanation.table(name).hidden is None


def test_hidden_cells_are_those_of_the_head_and_batch_element_asked_for():
    mask = numbers((2, 1, 4, 3, 5), seed=7) > 0
    explanation = regard.explain(*BATCH, mask=mask & np.ones((2, 3, 1, 1, 1), bool))
    table = explanation.table("weights", head=2, batch=(1, 2))
    np.testing.assert_array_equal(table.hidden, ~mask[1, 0, 2])
    for at in itertools.product(range(3), range(5)):
        assert table.hidden_by(*at) == (() if mask[1, 0, 2][at] else ("mask",))


# as text and data ---------------------------------------------------------------------------------


SHORT_TABLE = """\
Two words
step                   formula                            shape
queries       Q        given                              2 × 2
keys          K        given                              2 × 2
values        V        given                              2 × 2
scores        A        A = Q·Kᵀ                           2 × 2
scale         scale    given = 0.5                        number
scaled        A_s      A_s = A·scale                      2 × 2
softcap       c        given = 2                          number
capped        A_c      A_c = c·tanh(A_s / c)              2 × 2
visible       visible  visible = may query i see key j?   2 × 2
masked        A_m      A_m = A_c where visible, else −∞   2 × 2
row_maximum   m        m = max_j A_m                      2
shifted       T        T = A_m − m                        2 × 2
exponentials  Y        Y = exp(T)                         2 × 2
row_sums      z        z = Σ_j Y                          2
weights       P        P = Y / z                          2 × 2
output        O        O = P·V                            2 × 2
log_sums      ln z     ln z = the natural logarithm of z  2
lse           lse      lse = m + ln z                     2
Weights say where this head reads, not why a model answered."""


def test_printing_an_explanation_prints_a_short_table_and_the_note():
    x = np.array([[1.0, 0.0], [0.0, 1.0]])
    explanation = regard.explain(x, x, x, causal=True, softcap=2.0, scale=0.5, title="Two words")
    assert repr(explanation) == SHORT_TABLE


def test_a_hostile_title_is_inert_in_print():
    explanation = regard.explain(*PLAIN, title="\x1b[31mred\u202e\ntwo lines")
    first = repr(explanation).split("\n")[0]
    assert first == r"\x1b[31mred\u202e\x0atwo lines"


@pytest.mark.parametrize(
    "arrays", [PLAIN, HEADS, BATCH, inputs((2,), (3, 2), (3, 1))], ids=range(4)
)
def test_printing_shows_one_line_for_every_step(arrays):
    explanation = regard.explain(*arrays)
    lines = repr(explanation).split("\n")
    assert [line.split()[0] for line in lines[1:-1]] == list(explanation.steps)
    assert len({len(line) for line in lines}) > 1  # nothing is padded to the right
    assert not [line for line in lines if line != line.rstrip()]


def read_back(value: Any) -> np.ndarray:
    words = {"nan": NAN, "inf": INF, "-inf": -INF}

    def number(x: Any) -> Any:
        return [number(y) for y in x] if isinstance(x, list) else words.get(x, x)

    return np.asarray(number(value))


@pytest.mark.parametrize(
    "explain",
    [
        lambda: regard.explain(*PLAIN, causal=True, offset=0, mask=[False, True, True, False]),
        lambda: regard.explain(*BATCH, sink=numbers((4,))),
        lambda: regard.explain(PLAIN[0] * NAN, PLAIN[1] * INF, PLAIN[2], bias=[0, -INF, 0, INF]),
        lambda: regard.explain([NAN], [[1.0]], [[1.0]]),
        lambda: regard.explain(*inputs((2, 2), (0, 2), (0, 1))),
        lambda: regard.explain(projected(causal=True)),
    ],
    ids=["masked", "batch", "not finite", "one number", "empty", "problem"],
)
def test_an_explanation_as_json_is_strict_and_reads_back_exactly(explain):
    explanation = explain()
    data = json.loads(json.dumps(explanation.to_json(), allow_nan=False))
    assert data["format"] == "regard-explanation/1"
    assert data["heads"] == explanation.heads
    assert data["batch_shape"] == list(explanation.batch_shape)
    assert data["reading_note"].startswith("Weights say where")
    assert [step["name"] for step in data["steps"]] == list(explanation.steps)
    for step in data["steps"]:
        mine = explanation.steps[step["name"]]
        assert step["shape"] == list(mine.shape)
        assert step["axes"] == list(mine.axes)
        assert step["given"] == mine.given
        assert (step["row_labels"], step["column_labels"]) == (
            list(mine.row_labels),
            list(mine.column_labels),
        )
        np.testing.assert_array_equal(read_back(step["value"]).reshape(mine.shape), mine.value)


def test_json_keeps_hostile_labels_as_they_are():
    label = "\x1b[31m<script>\u202e"
    explanation = regard.explain(*PLAIN, query_labels=[label, "b", "c"], title=label)
    data = json.loads(json.dumps(explanation.to_json()))
    assert data["title"] == label
    assert data["steps"][0]["row_labels"][0] == label


# nothing can be changed ---------------------------------------------------------------------------


def test_the_numbers_of_a_step_cannot_be_written():
    for explanation in (regard.explain(*HEADS, causal=True, offset=0), regard.explain(projected())):
        for name, step in explanation.steps.items():
            before = step.value.copy()
            for array in (step.value, step.head(1), explanation.table(name, head=1).value):
                if array.flags.writeable:  # then it is a copy, of a single number
                    array[...] = 0
                else:
                    with pytest.raises(ValueError, match="read-only"):
                        array[...] = 0
            assert not step.value.flags.writeable
            np.testing.assert_array_equal(explanation.steps[name].value, before)


def test_a_step_is_computed_once():
    step = regard.explain(*HEADS).steps["weights"]
    assert step.value is step.value


def test_an_explanation_and_its_steps_are_frozen():
    explanation = regard.explain(*PLAIN)
    for thing, name in (
        (explanation, "title"),
        (explanation.steps["weights"], "declared"),
        (explanation.table("weights"), "values"),
        (explanation.kernel, "largest_ulp"),
    ):
        with pytest.raises((dataclasses.FrozenInstanceError, AttributeError)):
            setattr(thing, name, None)
    with pytest.raises(TypeError):
        explanation.steps["weights"] = explanation.steps["output"]


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias", "sink"])
def test_arrays_that_change_after_the_call_do_not_change_its_explanation(name):
    def fresh() -> dict[str, np.ndarray]:
        q, k, v, bias = inputs((2, 3, 2), (2, 3, 2), (2, 3, 2), (3, 3))
        mask, sink = np.ones((3, 3), bool), np.array([0.5, -0.5])
        return {"query": q, "key": k, "value": v, "mask": mask, "bias": bias, "sink": sink}

    arrays = fresh()
    explanation, expected = regard.explain(**arrays), regard.explain(**fresh())
    np.testing.assert_array_equal(explanation.steps["scores"].value, expected.steps["scores"].value)
    arrays[name][...] = 0
    np.testing.assert_array_equal(explanation.output, expected.output)
    np.testing.assert_array_equal(explanation.without(0).output, expected.without(0).output)


# the library's own kernel beside it ---------------------------------------------------------------


def ulp_of(exact: np.ndarray, dtype: Any) -> np.ndarray:
    """The distance of neighbouring numbers of this dtype at each of these."""
    unit, floor, _ = precision_of(dtype)
    with np.errstate(all="ignore"):
        exponent = np.floor(np.log2(abs(exact)))
    return np.maximum(2 * unit * 2.0**exponent, floor)


@every_float
@pytest.mark.parametrize(
    "options", [{}, {"causal": True, "offset": 2}, {"sink": 0.5, "softcap": 2.0}], ids=range(3)
)
def test_the_kernel_is_named_and_its_distance_is_the_largest_there_is(dtype, options):
    arrays = inputs((4, 3, 8), (2, 5, 8), (2, 5, 6), dtype=dtype)
    explanation = regard.explain(*arrays, **options)
    check = explanation.kernel
    assert check.name in regard.compute.dispatch.kernel_names()
    assert check.output.dtype == dtype
    exact = explanation.steps["output"].value
    ulp = ulp_of(exact, dtype)
    distance = abs(check.output.astype(np.float64) - exact) / ulp
    np.testing.assert_allclose(check.largest_ulp, distance.max(), rtol=SAME_RATIO)
    given = {name: options[name] for name in ("softcap", "sink") if name in options}
    how = arithmetic_of(check.name, *arrays)
    answer = attend(*arrays, **options)
    bounds = error_bounds(*arrays, answer, dtype=dtype, arithmetic=how, **given)
    assert check.largest_ulp <= (bounds.output / ulp).max()
    assert_within(check.lse, explanation.steps["lse"].value, 2 * bounds.lse, "lse")


def test_the_kernel_runs_only_when_it_is_asked_for_and_once(monkeypatch):
    ran = []
    kernel = SimpleNamespace(
        name="counting",
        supports=lambda request: None,
        run=lambda request: ran.append(request) or reference.run(request),
    )
    monkeypatch.setattr(regard.compute.dispatch, "fused", kernel)
    explanation = regard.explain(*HEADS)
    explanation.why("output", 0, 0, head=0)
    assert explanation.output.shape == (4, 3, 3)
    assert ran == []
    assert explanation.kernel is explanation.kernel
    assert explanation.kernel.name == "counting"
    assert len(ran) == 1


@pytest.mark.parametrize(("wrong", "least"), [(0.5, 1e6), (INF, INF), (NAN, INF)])
def test_a_kernel_that_answers_wrongly_is_far_off(monkeypatch, wrong, least):
    def run(request: Any) -> Any:
        result = reference.run(request)
        output = result.output.copy()
        output[1, 2] += wrong
        return dataclasses.replace(result, output=output)

    kernel = SimpleNamespace(name="wrong", supports=lambda request: None, run=run)
    monkeypatch.setattr(regard.compute.dispatch, "fused", kernel)
    assert regard.explain(*PLAIN).kernel.largest_ulp >= least


def test_a_kernel_that_has_nan_where_float64_has_it_is_not_off():
    bad = PLAIN[2].copy()
    bad[1, 0] = NAN
    check = regard.explain(*PLAIN[:2], bad).kernel
    assert np.isnan(check.output[:, 0]).all()
    assert np.isfinite(check.largest_ulp)


@pytest.mark.parametrize("shapes", [((0, 2), (3, 2), (3, 1)), ((2, 2), (0, 2), (0, 1))])
def test_a_kernel_that_has_nothing_to_answer_is_not_off(shapes):
    assert regard.explain(*inputs(*shapes)).kernel.largest_ulp == 0


def test_the_kernel_answers_what_attention_answers():
    problem = projected(causal=True)
    explanation = regard.explain(problem)
    q, k, v = (explanation.steps[name].value for name in ("queries", "keys", "values"))
    expected = regard.attention(q, k, v, causal=True, scale=0.05)
    np.testing.assert_array_equal(explanation.kernel.output, expected)


# what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "labels", "message"),
    [
        ("query_labels", ["a"], "query_labels has 1 names but query has 3 rows"),
        ("key_labels", ["a"] * 5, "key_labels has 5 names but key has 4 rows"),
        ("key_features", [], "key_features has 0 names but key has 2 columns"),
        ("value_features", ["a", "b"], "value_features has 2 names but value has 3 columns"),
    ],
)
def test_labels_that_are_too_many_or_too_few_are_counted(argument, labels, message):
    with pytest.raises(regard.ShapeError, match=message):
        regard.explain(*PLAIN, **{argument: labels})


@pytest.mark.parametrize(
    "argument", ["query_labels", "key_labels", "key_features", "value_features"]
)
@pytest.mark.parametrize("labels", ["abc", [1, 2, 3], ["a", None, "c"], 3, [b"a", b"b", b"c"]])
def test_labels_that_are_no_strings_are_refused_by_name(argument, labels):
    with pytest.raises(TypeError, match=argument):
        regard.explain(*inputs((3, 3), (3, 3), (3, 3)), **{argument: labels})


NAMES = ["she", "likes", "coffee"]
SQUARE_WEIGHTS = dict.fromkeys(("W_q", "W_k", "W_v"), np.eye(2))


@pytest.mark.parametrize(
    "told",
    [
        lambda: regard.explain(*SQUARE, labels=NAMES),
        lambda: regard.explain(SQUARE[0], **SQUARE_WEIGHTS, labels=NAMES),
        lambda: regard.explain(Problem(**dict(zip(READY, SQUARE, strict=True)), labels=NAMES)),
        lambda: regard.explain(Problem(embeddings=SQUARE[0], **SQUARE_WEIGHTS, labels=NAMES)),
        lambda: regard.MultiHeadAttention(**SQUARE_WEIGHTS).explain(SQUARE[0], labels=NAMES),
    ],
    ids=["arrays", "parts", "ready", "problem", "layer"],
)
def test_labels_name_queries_and_keys_alike(told):
    weights = told().steps["weights"]
    assert weights.row_labels == weights.column_labels == tuple(NAMES)


@pytest.mark.parametrize("name", ["query_labels", "key_labels"])
def test_labels_beside_the_names_of_one_side_are_refused_by_name(name):
    layer = regard.MultiHeadAttention(**SQUARE_WEIGHTS)
    for call, arrays in (
        (regard.explain, SQUARE),
        (layer.explain, SQUARE[:1]),
        (lambda x, **names: Problem(queries=x, keys=x, values=x, **names), SQUARE[:1]),
    ):
        with pytest.raises(ValueError, match=f"labels and {name} are both given"):
            call(*arrays, labels=NAMES, **{name: NAMES})


def test_labels_of_rows_that_are_not_the_same_are_refused_with_what_to_pass():
    layer, context = regard.MultiHeadAttention(**SQUARE_WEIGHTS), SQUARE[1]
    unequal = "query has 3 rows and key has 4 rows; pass query_labels and key_labels"
    with pytest.raises(regard.ShapeError, match=unequal):
        regard.explain(*PLAIN, labels=NAMES)
    with pytest.raises(regard.ProblemError, match="queries has 3 rows and keys has 4 rows; pass"):
        Problem(**dict(zip(READY, PLAIN, strict=True)), labels=NAMES)
    for call in (layer.explain, lambda x, c, **more: regard.explain(x, context=c, **more)):
        weights = SQUARE_WEIGHTS if call != layer.explain else {}
        with pytest.raises(regard.ProblemError, match="context has rows of its own; pass query_l"):
            call(SQUARE[0], context, labels=NAMES, **weights)


def test_labels_that_are_too_many_or_no_strings_are_refused_by_their_name():
    with pytest.raises(regard.ShapeError, match=r"^labels has 2 names but query has 3 rows"):
        regard.explain(*SQUARE, labels=NAMES[:2])
    with pytest.raises(regard.ProblemError, match=r"^labels has 2 names but embeddings has 3 rows"):
        regard.explain(SQUARE[0], **SQUARE_WEIGHTS, labels=NAMES[:2])
    for labels in ("abc", 3, [1, 2, 3]):
        with pytest.raises(TypeError, match=r"^labels must be a sequence of strings"):
            regard.explain(*SQUARE, labels=labels)


def test_labels_may_be_any_sequence_of_strings():
    for labels in (("a", "b", "c"), np.array(["a", "b", "c"]), {"a": 1, "b": 2, "c": 3}.keys()):
        explanation = regard.explain(*SQUARE, query_labels=labels)
        assert explanation.steps["queries"].row_labels == ("a", "b", "c")


@pytest.mark.parametrize(
    "argument", ["precision", "return_weights", "out", "kernel", "threads", "x"]
)
def test_an_argument_that_explain_does_not_have_is_refused(argument):
    with pytest.raises(TypeError, match=argument):
        regard.explain(*PLAIN, **{argument: None})


def test_a_query_alone_is_not_enough():
    with pytest.raises(regard.OptionError, match="query, key and value, or a Problem"):
        regard.explain(PLAIN[0])
    with pytest.raises(regard.OptionError, match="query, key and value, or a Problem"):
        regard.explain(PLAIN[0], PLAIN[1])


@pytest.mark.parametrize("softmax", ["stable", "", "SHIFTED", 1])
def test_a_softmax_that_is_not_known_is_refused(softmax):
    for call in (
        lambda: regard.explain(*PLAIN, softmax=softmax),
        lambda: regard.explain(projected(), softmax=softmax),
    ):
        with pytest.raises(ValueError, match=r'softmax .*"shifted" or "unshifted"'):
            call()


def test_errors_of_a_call_name_its_shapes_once():
    with pytest.raises(regard.ShapeError, match="query is 2 wide but key is 3 wide") as error:
        regard.explain(*inputs((3, 2), (4, 3), (4, 3)))
    assert str(error.value).count("(4, 3)") == 2  # that of key and that of value
    with pytest.raises(regard.OptionError, match="scale"):
        regard.explain(*PLAIN, scale=NAN)
    with pytest.raises(regard.DtypeError, match="mask"):
        regard.explain(*PLAIN, mask=np.ones((3, 4)))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("key", PLAIN[1]),
        ("value", PLAIN[2]),
        ("labels", ["a"]),
        ("query_labels", ["a"]),
        ("key_labels", ["a"]),
        ("key_features", ["a"]),
        ("value_features", ["a"]),
    ],
)
def test_what_comes_from_a_problem_cannot_be_given_beside_it(argument, value):
    with pytest.raises(regard.OptionError, match=f"{argument} comes from the problem"):
        regard.explain(projected(), **{argument: value})


@pytest.mark.parametrize("argument", ["lengths", "heads", "W_q", "colour", "precision", "\x1b[31m"])
def test_only_options_of_a_problem_can_be_overridden(argument):
    with pytest.raises(regard.OptionError, match="cannot be overridden") as error:
        regard.explain(projected(), **{argument: 1})
    assert "\x1b" not in str(error.value)


# the parts of a problem ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "scale": 0.5, "title": "Who reads whom", "softmax": "unshifted"},
        {"target": np.ones((3, 7)), "positions": Rotary(), "offset": 2},
        {"context": whole_numbers(4, 5, seed=9), "query_labels": None, "bias": -1.0},
        {"lengths": 2, "query_segments": (1, 1, 2), "sink": 0.0},
    ],
    ids=range(5),
)
def test_embeddings_and_weights_are_explained_as_the_problem_that_they_make(options):
    parts = {each.name: getattr(projected(), each.name) for each in dataclasses.fields(Problem)}
    if "context" in options:
        parts["key_labels"] = None
    explanation = regard.explain(parts.pop("embeddings"), **(parts | options))
    expected = regard.explain(projected(**options))
    assert list(explanation.steps) == list(expected.steps)
    assert explanation.compare(expected) is None
    assert (explanation.title, explanation.names) == (expected.title, expected.names)


def test_embeddings_are_projected_once(monkeypatch):
    made, part = [], Run.part

    def noted(run, step, *place):
        made.append(step.name)
        return part(run, step, *place)

    monkeypatch.setattr(Run, "part", noted)
    explanation = regard.explain(regard.load_problem("she-likes-coffee"))
    np.array(explanation.output)
    assert [made.count(name) for name in ("queries", "keys", "values", "output")] == [1, 1, 1, 1]


def test_a_mask_object_goes_with_the_parts_of_a_problem():
    x = whole_numbers(3, 2)
    explanation = regard.explain(x, W_q=np.eye(2), W_k=np.eye(2), W_v=np.eye(2), mask=Causal())
    assert explanation.compare(regard.explain(x, x, x, mask=Causal())) is None
    assert explanation.table("weights").hidden_by(0, 1) == ("causal",)


def test_arrays_that_are_ready_take_what_a_problem_has_besides():
    explanation = regard.explain(*PLAIN, lengths=2, note="from a notebook")
    assert explanation.compare(regard.explain(*PLAIN, mask=Lengths(2))) is None
    assert explanation.note == "from a notebook"


def test_a_problem_may_be_given_by_the_names_of_its_parts_alone():
    weights = dict.fromkeys(("W_q", "W_k", "W_v"), np.eye(2))
    explanation = regard.explain(embeddings=whole_numbers(3, 2), **weights)
    assert explanation.compare(regard.explain(whole_numbers(3, 2), **weights)) is None
    ready = regard.explain(queries=PLAIN[0], keys=PLAIN[1], values=PLAIN[2])
    assert ready.compare(regard.explain(*PLAIN)) is None


def test_parts_that_make_no_problem_are_refused_by_name():
    x, W = whole_numbers(3, 2), np.eye(2)
    with pytest.raises(regard.ProblemError, match=r"^W_k is missing"):
        regard.explain(x, W_q=W)
    with pytest.raises(regard.ProblemError, match="queries and W_q are both given"):
        regard.explain(x, x, x, W_q=W, W_k=W, W_v=W)
    with pytest.raises(regard.OptionError, match="embeddings is given twice"):
        regard.explain(x, embeddings=x, W_q=W, W_k=W, W_v=W)
    with pytest.raises(TypeError, match=r"no argument w_k: did you mean W_k=\?$"):
        regard.explain(x, W_q=W, w_k=W, W_v=W)


# overriding a problem -----------------------------------------------------------------------------


def test_explaining_a_problem_is_the_same_by_either_door():
    problem = projected(causal=True)
    one, other = regard.explain(problem), regard.explain(problem)
    assert one.compare(other) is None
    assert list(one.steps) == list(other.steps)


def test_options_override_those_of_a_problem_and_leave_it_alone():
    problem = projected(scale=0.05, softcap=3.0)
    plain = regard.explain(problem)
    for overrides, step, value in (
        ({"scale": 2.0}, "scale", 2.0),
        ({"softcap": 1.0}, "softcap", 1.0),
        ({"bias": 0.5}, "bias", np.full((4, 3, 3), 0.5)),
        ({"sink": (1.0, 2.0, 3.0, 4.0)}, "sink", [1.0, 2.0, 3.0, 4.0]),
    ):
        changed = regard.explain(problem, **overrides)
        np.testing.assert_array_equal(changed.steps[step].value, value)
        assert changed.compare(plain) is not None
        assert changed.problem is not problem
    assert regard.explain(problem).compare(plain) is None
    assert "shifted" not in regard.explain(problem, softmax="unshifted").steps
    assert regard.explain(problem, title="Other").title == "Other"
    assert "capped" not in regard.explain(problem, softcap=None).steps
    for positions in ({"causal": True}, {"window": (0, 0)}, {"causal": True, "offset": -1}):
        explanation = regard.explain(problem, **positions)
        expected = attend(*SQUARE, **positions).visible
        np.testing.assert_array_equal(explanation.steps["visible"].value[0], expected)


OWN_MASK = np.arange(9).reshape(3, 3) != 3


def test_a_mask_object_given_with_a_problem_replaces_its_mask_and_no_other_rule():
    problem = projected(lengths=2, mask=OWN_MASK)
    explanation = regard.explain(problem, mask=~Boolean([False, True, False], name="second"))
    table = explanation.table("weights", head=0)
    assert table.hidden_by(1, 0) == ()
    assert table.hidden_by(1, 1) == ("not second",)
    assert table.hidden_by(0, 2) == ("lengths",)
    np.testing.assert_array_equal(explanation.steps["visible"].value[3], [[True, False, False]] * 3)


@pytest.mark.parametrize("mask", [np.ones((3, 3), bool), np.ones((3, 3), bool).tolist()])
def test_an_array_given_as_mask_replaces_that_of_the_problem(mask):
    explanation = regard.explain(projected(mask=OWN_MASK), mask=mask)
    assert explanation.steps["visible"].value.all()
    assert explanation.problem.mask.all()


def test_no_mask_takes_away_that_of_the_problem():
    explanation = regard.explain(projected(mask=OWN_MASK), mask=None)
    assert "visible" not in explanation.steps


def test_without_keeps_the_mask_that_replaced_that_of_the_problem():
    explanation = regard.explain(projected(mask=OWN_MASK), mask=Causal()).without(0)
    table = explanation.table("weights", head=0)
    assert table.hidden_by(1, 0) == ('without "she"',)
    assert table.hidden_by(0, 1) == ("causal",)
    np.testing.assert_array_equal(explanation.without(1).steps["visible"].value[0, 1], [False] * 3)


def test_expectations_of_a_problem_survive_an_override():
    problem = projected(expect=(Expectation(step="scale", value=0.05),))
    assert regard.explain(problem).check() == ()
    (mismatch,) = regard.explain(problem, scale=0.5).check()
    assert (mismatch.expected, mismatch.got) == (0.05, 0.5)


# softmax without subtracting the maximum ----------------------------------------------------------


def test_an_unshifted_softmax_gives_the_same_weights_while_it_holds():
    shifted, unshifted = (
        regard.explain(*PLAIN, softmax=s, sink=0.5) for s in ("shifted", "unshifted")
    )
    answer = attend(*PLAIN, sink=0.5)
    bounds = error_bounds(*PLAIN, answer, dtype=np.float64, sink=0.5)
    for name in ("weights", "output", "lse"):
        expected, bound = getattr(answer, name), getattr(bounds, name)
        assert_within(shifted.steps[name].value, expected, bound, name)
        assert_within(unshifted.steps[name].value, expected, bound, name)
    np.testing.assert_array_equal(
        unshifted.steps["exponentials"].value, np.exp(unshifted.steps["scaled"].value)
    )


def test_an_unshifted_softmax_overflows_and_shows_where():
    arrays = [[1.0], [1000.0]], [[1.0], [2.0]], [[1.0], [3.0]]
    explanation = regard.explain(*arrays, softmax="unshifted", query_labels=["small", "large"])
    np.testing.assert_array_equal(
        np.isinf(explanation.steps["exponentials"].value), [[0, 0], [1, 1]]
    )
    assert np.isnan(explanation.steps["weights"].value[1]).all()
    first = explanation.first_nonfinite()
    assert (first.step, first.index, first.value) == ("exponentials", (1, 0), INF)
    assert first.text().startswith("Y[large, 0] = ∞ ")
    assert regard.explain(*arrays).first_nonfinite() is None
    np.testing.assert_array_equal(explanation.kernel.output, regard.explain(*arrays).kernel.output)


def test_an_unshifted_sink_has_one_exponential_for_every_row():
    explanation = regard.explain(*PLAIN, sink=0.5, softmax="unshifted")
    np.testing.assert_array_equal(explanation.steps["sink_exponential"].value, np.exp([0.5] * 3))
    assert [explanation.why("sink_exponential", row).value for row in range(3)] == [np.exp(0.5)] * 3


# empty sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shapes",
    [
        ((0, 2), (3, 2), (3, 1)),
        ((2, 2), (0, 2), (0, 1)),
        ((2, 0), (3, 0), (3, 1)),
        ((2, 2), (3, 2), (3, 0)),
        ((2,), (0, 2), (0, 1)),
        ((0, 2, 2), (0, 3, 2), (0, 3, 2)),
        ((0, 1, 2, 2), (0, 1, 3, 2), (0, 1, 3, 2)),
        ((2, 2, 0), (1, 3, 0), (1, 3, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "options", [{}, {"mask": Lengths(0), "sink": 0.5}], ids=["plain", "masked"]
)
def test_empty_sizes_are_explained_like_any_other(shapes, options):
    explanation = regard.explain(*inputs(*shapes), **options)
    expected = regard.attention(*inputs(*shapes), **options, kernel="reference")
    np.testing.assert_array_equal(explanation.output, expected)
    assert explanation.first_nonfinite() is None
    assert explanation.compare(explanation) is None
    assert json.dumps(explanation.to_json(), allow_nan=False)
    assert repr(explanation)
    assert explanation.statistics().rows.entropy.shape == explanation.steps["lse"].shape
    if explanation.heads != 0 and 0 not in explanation.batch_shape:
        for name in explanation.steps:
            assert explanation.table(name, head=0).value.ndim == 2
