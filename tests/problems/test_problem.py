"""A Problem holds together, or says in one line what does not fit."""

from __future__ import annotations

import copy
import math
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from regard.boundary.parse import MAX_NUMBERS, as_booleans, as_numbers
from regard.errors import ProblemError
from regard.problems.parts import Expectation, RandomMatrices
from regard.problems.problem import Problem

READY = {
    "queries": np.ones((2, 3)),
    "keys": np.ones((4, 3)),
    "values": np.ones((4, 5)),
}
PROJECTED = {
    "embeddings": np.ones((3, 4)),
    "W_q": np.ones((4, 6)),
    "W_k": np.ones((4, 6)),
    "W_v": np.ones((4, 2)),
}
RECIPE = {
    "generator": "legacy",
    "seed": 42,
    "distribution": "uniform",
    "draw": ("X", "W_q"),
    "shapes": {"X": (3, 4), "W_q": (4, 4)},
}


def complaint(kind, **given):
    with pytest.raises(ProblemError) as caught:
        kind(**given)
    assert type(caught.value) is ProblemError
    return str(caught.value)


# What a problem keeps.


def test_arrays_are_float64_copies_that_cannot_be_written():
    given = np.arange(6, dtype=np.int32).reshape(2, 3)
    problem = Problem(**READY | {"queries": given})
    given[:] = 7
    np.testing.assert_array_equal(problem.queries, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    np.testing.assert_equal(problem.queries.dtype, np.float64)
    with pytest.raises(ValueError, match="read-only"):
        problem.queries[0, 0] = 1.0


def test_a_mask_is_a_read_only_copy_of_booleans():
    given = np.ones((2, 4), dtype=bool)
    problem = Problem(**READY, mask=given)
    given[:] = False
    assert problem.mask.all()
    assert problem.mask.dtype == bool
    assert not problem.mask.flags.writeable


def test_lists_serve_as_arrays():
    problem = Problem(queries=[1, 2], keys=[[1, 2.5], [3, 4]], values=[[1], [2]])
    np.testing.assert_array_equal(problem.keys, [[1.0, 2.5], [3.0, 4.0]])


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f8", "uint8", "int64", "uint64"])
def test_every_real_dtype_of_at_most_64_bits_is_taken_exactly(dtype):
    problem = Problem(**READY | {"values": np.array([[3], [5], [7], [9]], dtype=dtype)})
    np.testing.assert_array_equal(problem.values, [[3.0], [5.0], [7.0], [9.0]])


@pytest.mark.needs("ml_dtypes")
def test_bfloat16_is_taken_exactly():
    import ml_dtypes

    given = np.array([[1.5], [2.5], [0.1], [4.0]], dtype=ml_dtypes.bfloat16)
    problem = Problem(**READY | {"values": given})
    np.testing.assert_array_equal(problem.values, given.astype(np.float64))


def test_nan_and_infinity_may_stand_in_matrices():
    values = np.full((4, 5), np.nan)
    values[0, 0] = -np.inf
    np.testing.assert_array_equal(Problem(**READY | {"values": values}).values, values)


def test_in_self_attention_keys_bear_the_names_of_the_queries():
    problem = Problem(**PROJECTED, query_labels=("a", "b", "b"))
    assert problem.key_labels == ("a", "b", "b")


def test_labels_are_an_argument_and_no_field():
    problem = Problem(**PROJECTED, labels=["a", "b", "c"])
    assert (problem.query_labels, problem.key_labels) == (("a", "b", "c"),) * 2
    assert not hasattr(problem, "labels")
    assert copy.deepcopy(problem).query_labels == ("a", "b", "c")


def test_new_labels_replace_those_of_both_sides():
    x = np.eye(3)
    problem = Problem(
        queries=x, keys=x, values=x, query_labels=tuple("abc"), key_labels=tuple("def")
    )
    changed = problem.replace(labels=("x", "y", "z"))
    assert changed.query_labels == changed.key_labels == ("x", "y", "z")


def test_ready_vectors_share_no_names():
    assert Problem(**READY, query_labels=("a", "b")).key_labels is None


def test_key_heads_are_as_many_as_heads_if_not_given():
    assert Problem(**PROJECTED, heads=2).key_heads == 2


def test_ready_vectors_bring_their_own_number_of_heads():
    problem = Problem(
        queries=np.ones((4, 2, 3)), keys=np.ones((2, 5, 3)), values=np.ones((2, 5, 1))
    )
    assert (problem.heads, problem.key_heads) == (4, 2)


def test_grouped_heads_are_packed_side_by_side():
    problem = Problem(
        embeddings=np.ones((3, 4)),
        W_q=np.ones((4, 8)),
        W_k=np.ones((4, 4)),
        W_v=np.ones((4, 6)),
        W_o=np.ones((12, 5)),
        b_q=np.ones(8),
        b_k=np.ones(4),
        b_v=np.ones(6),
        b_o=np.ones(5),
        heads=4,
        key_heads=2,
        sink=np.zeros(4),
        key_features=("k0", "k1"),
        value_features=("v0", "v1", "v2"),
        output_features=("a", "b", "c", "d", "e"),
    )
    assert problem.value_features == ("v0", "v1", "v2")


def test_cross_attention_has_a_width_of_its_own():
    problem = Problem(
        embeddings=np.ones((2, 3)),
        context=np.ones((5, 4)),
        W_q=np.ones((3, 6)),
        W_k=np.ones((4, 6)),
        W_v=np.ones((4, 2)),
        key_labels=("a", "b", "c", "d", "e"),
        context_features=("w", "x", "y", "z"),
        mask=np.ones((2, 5), dtype=bool),
    )
    assert problem.query_labels is None


def test_expectations_are_in_the_order_of_the_steps():
    asked = [Expectation(step=step, value=float(i)) for i, step in enumerate(("lse", "W_q", "lse"))]
    problem = Problem(**PROJECTED, expect=asked)
    assert [(one.step, one.value) for one in problem.expect] == [
        ("W_q", 1.0),
        ("lse", 0.0),
        ("lse", 2.0),
    ]


def test_an_expected_number_stays_a_number_and_a_matrix_becomes_an_array():
    assert isinstance(Expectation(step="queries", at=("she", 0), value=1).value, float)
    np.testing.assert_array_equal(
        Expectation(step="weights", value=[[1, -math.inf]]).value, [[1.0, -np.inf]]
    )


def test_a_problem_cannot_be_changed():
    problem = Problem(**READY, row_notes={"values": list("abcd")})
    with pytest.raises(FrozenInstanceError):
        problem.scale = 2.0
    with pytest.raises(TypeError):
        problem.row_notes["values"] = ()


def test_a_copy_is_as_complete_and_as_frozen():
    problem = Problem(
        **PROJECTED | {"embeddings": None, "W_q": None},
        random=RandomMatrices(**RECIPE | {"shapes": {"X": (3, 4), "W_q": (4, 6)}}),
        row_notes={"values": ("x", "y", "z")},
    )
    again = copy.deepcopy(problem)
    for each in fields(Problem):
        if each.name not in ("random", "expect"):
            np.testing.assert_equal(getattr(again, each.name), getattr(problem, each.name))
    assert again.random == problem.random
    assert not again.embeddings.flags.writeable


# Changing a problem.


def test_replacing_keeps_everything_else():
    problem = Problem(**PROJECTED, title="pets", query_labels=("a", "b", "c"), heads=2)
    changed = problem.replace(causal=True)
    assert (changed.causal, changed.title, changed.heads) == (True, "pets", 2)
    assert not problem.causal


def test_names_of_keys_follow_those_of_queries():
    problem = Problem(**PROJECTED, query_labels=("a", "b", "c"))
    assert problem.replace(query_labels=("x", "y", "z")).key_labels == ("x", "y", "z")


def test_key_heads_follow_heads_unless_they_differ():
    problem = Problem(**PROJECTED, heads=2)
    assert problem.replace(heads=1).key_heads == 1
    grouped = Problem(**PROJECTED | {"W_k": np.ones((4, 3))}, heads=2, key_heads=1)
    assert grouped.replace(causal=True).key_heads == 1


def test_heads_of_ready_vectors_follow_the_vectors():
    problem = Problem(
        queries=np.ones((2, 1, 3)), keys=np.ones((2, 4, 3)), values=np.ones((2, 4, 5))
    )
    assert problem.replace(**READY).heads is None


def test_one_of_several_queries_can_be_asked_alone():
    problem = Problem(**READY, query_labels=("a", "b"))
    alone = problem.replace(queries=problem.queries[1], query_labels=("b",))
    assert alone.queries.shape == (3,)


def test_changing_a_drawn_matrix_keeps_the_others_and_drops_the_recipe():
    problem = Problem(random=RandomMatrices(**RECIPE), W_k=np.eye(4), W_v=np.eye(4))
    changed = problem.replace(W_q=np.eye(4))
    assert changed.random is None
    np.testing.assert_array_equal(changed.embeddings, problem.embeddings)
    np.testing.assert_array_equal(changed.W_q, np.eye(4))


def test_changing_the_recipe_draws_anew():
    problem = Problem(random=RandomMatrices(**RECIPE), W_k=np.eye(4), W_v=np.eye(4))
    other = RandomMatrices(**RECIPE | {"seed": 7})
    changed = problem.replace(random=other)
    np.testing.assert_array_equal(changed.W_q, other.matrices()["W_q"])
    assert not np.array_equal(changed.W_q, problem.W_q)


# What does not fit: (what is given, what is said).

MISFITS = [
    ({}, "embeddings, W_q, W_k and W_v are needed, or queries, keys and values"),
    (
        {"queries": [1.0]},
        "keys is missing; queries is given, which needs values too; embeddings, W",
    ),
    ({"W_q": [[1.0]]}, "embeddings is missing; W_q is given"),
    (PROJECTED | {"W_k": None}, "W_k is missing; embeddings is given"),
    (PROJECTED | READY, "queries and embeddings are both given"),
    (READY | {"W_o": np.ones((5, 5))}, "queries and W_o are both given"),
    (PROJECTED | {"W_q": np.ones((5, 6))}, "W_q has 5 rows but needs 4: embeddings has 4 columns"),
    (PROJECTED | {"context": np.ones((2, 3))}, "W_k has 4 rows but needs 3: context has 3 columns"),
    (PROJECTED | {"heads": 4}, "W_q has 6 columns but heads is 4"),
    (PROJECTED | {"heads": 2, "key_heads": 3}, "heads is 2 but key_heads is 3"),
    (PROJECTED | {"key_heads": 2}, "key_heads is 2 but heads is not given"),
    (PROJECTED | {"heads": 0}, "heads is 0; it must be 1 or more"),
    (PROJECTED | {"heads": 2.0}, "heads must be a whole number, not 2.0"),
    (PROJECTED | {"heads": True}, "heads must be a whole number, not true"),
    (PROJECTED | {"heads": 10**30}, "heads is an integer of 100 bits"),
    (PROJECTED | {"W_k": np.ones((4, 5))}, "W_k has 5 columns but needs 6: W_q has 6 columns"),
    (
        PROJECTED | {"heads": 2, "key_heads": 1},
        "W_k has 6 columns but needs 3: W_q has 6 columns (heads 2, key_heads 1, each 3 wide)",
    ),
    (PROJECTED | {"b_q": np.ones(4)}, "b_q has 4 numbers but needs 6: W_q has 6 columns"),
    (PROJECTED | {"b_o": np.ones(4)}, "b_o is given without W_o"),
    (PROJECTED | {"W_o": np.ones((3, 4))}, "W_o has 3 rows but needs 2: the output is 2 wide"),
    (
        PROJECTED | {"heads": 2, "W_o": np.ones((3, 4))},
        "W_o has 3 rows but needs 2: the output is 2 wide (2 heads of 1)",
    ),
    (PROJECTED | {"embeddings": np.ones(4)}, "embeddings has 1 axes, shape (4,), but needs 2"),
    (PROJECTED | {"embeddings": np.ones((0, 4))}, "embeddings is empty, shape (0, 4)"),
    (READY | {"keys": []}, "keys has 1 axes, shape (0,), but needs 2"),
    (
        READY | {"keys": np.ones((4, 2))},
        "queries is 3 wide but keys is 2 wide; their last axes must match (D)",
    ),
    (READY | {"values": np.ones((3, 5))}, "keys has 4 rows but values has 3; they must match"),
    (READY | {"queries": np.ones((2, 2, 3))}, "keys has 2 axes, shape (4, 3), but needs 3"),
    (READY | {"heads": 2}, "heads is 2 but queries has 2 axes"),
    (
        {"queries": np.ones((2, 1, 3)), "keys": np.ones((1, 4, 3)), "values": np.ones((2, 4, 1))},
        "keys has 1 heads but values has 2; they must match",
    ),
    (
        {"queries": np.ones((3, 1, 3)), "keys": np.ones((2, 4, 3)), "values": np.ones((2, 4, 1))},
        "queries has 3 heads but keys has 2; the number of query heads must be a multiple of",
    ),
    (READY | {"keys": [[1, 2, 3], [1, 2]]}, "keys row 1 has 2 numbers but row 0 has 3"),
    (
        READY | {"keys": [[[1, 2], [1, 2]], [[1, 2], [1]]]},
        "keys row (1, 1) has 1 numbers but row (0, 0) has 2",
    ),
    (READY | {"keys": [[1, 2, 3], 4]}, "keys row 1 is 4 but the row before is a list"),
    (READY | {"keys": [[[[1]]]]}, "keys is nested deeper than 3 lists"),
    (READY | {"keys": [[1, 2, True]]}, "keys at (0, 2) is true; it must be a number"),
    (READY | {"keys": [[1, 2, "3"]]}, 'keys at (0, 2) must be a number, not "3"'),
    (READY | {"keys": [[1, 2, "nan"]]}, 'keys at (0, 2) must be a number, not "nan"'),
    (READY | {"keys": [[1, 2, None]]}, "keys at (0, 2) must be a number, not nothing"),
    (READY | {"keys": [[1, 2, 2**53 + 1]]}, "keys at (0, 2) is 9007199254740993, which a 64-bit"),
    (READY | {"keys": [[1, 2, 10**400]]}, "keys at (0, 2) is an integer of 1329 bits"),
    (READY | {"keys": np.array([[1, 2, 2**53 + 1]])}, "keys at (0, 2) is 9007199254740993"),
    (READY | {"keys": "abc"}, "keys must be a list of numbers or of rows"),
    (READY | {"keys": np.ones((4, 3), bool)}, "keys has the dtype bool"),
    (READY | {"keys": np.ones((4, 3), complex)}, "keys has the dtype complex128"),
    (READY | {"keys": np.ones((4, 3), object)}, "keys has the dtype object"),
    (READY | {"keys": np.ma.ones((4, 3))}, "keys is a MaskedArray"),
    (READY | {"mask": np.ones((2, 4))}, "mask at (0, 0) is 1.0; it must be true"),
    (READY | {"mask": [[True, 0, True, True]]}, "mask at (0, 1) is 0; it must be true"),
    (
        READY | {"mask": np.ones((3, 4), bool)},
        "mask has shape (3, 4), which does not broadcast to (2, 4)",
    ),
    (
        READY | {"bias": np.ones((1, 2, 4))},
        "bias has shape (1, 2, 4), which does not broadcast to (2, 4)",
    ),
    (READY | {"bias": True}, "bias is true; it must be a number"),
    (READY | {"sink": [1.0]}, "sink has shape (1,) but needs one number"),
    (READY | {"sink": math.inf}, "sink must be finite"),
    (READY | {"scale": math.nan}, "scale is nan; it must be finite"),
    (READY | {"softcap": 0}, "softcap is 0.0; it must be positive and finite"),
    (READY | {"causal": 1}, "causal must be True or False, not 1"),
    (
        READY | {"causal": True},
        "causal and window compare positions, but there are 2 queries and 4 keys: pass offset=0",
    ),
    (
        READY | {"window": (1, None)},
        "causal and window compare positions, but there are 2 queries and 4 keys",
    ),
    (
        READY | {"window": (1,)},
        "window must be a pair (left, right) of ints, None for unbounded, not (1,)",
    ),
    (READY | {"window": (1, -2)}, "window right is -2; it must be 0 or more"),
    (READY | {"offset": "start"}, "offset must be an int, ints or \"end\", not 'start'"),
    (READY | {"offset": 2**62}, "offset is 4611686018427387904; it must lie within ±2**62"),
    (READY | {"lengths": 5}, "lengths must lie between 0 and the 4 keys, but they run from 5 to 5"),
    (
        READY | {"lengths": -1},
        "lengths must lie between 0 and the 4 keys, but they run from -1 to -1",
    ),
    (READY | {"key_segments": [1, 1, 1, 1]}, "query_segments is missing"),
    (READY | {"query_segments": [1, 1]}, "segments names 2 keys but there are 4"),
    (
        READY | {"query_segments": [1], "key_segments": [1, 1, 1, 1]},
        "segments names 1 queries but there are 2",
    ),
    (READY | {"softmax": "plain"}, 'softmax is "plain"; it must be "shifted" or "unshifted"'),
    (READY | {"query_labels": ("a",)}, "query_labels has 1 names but queries has 2 rows"),
    (READY | {"query_labels": "ab"}, 'query_labels must be a list of strings, not "ab"'),
    (READY | {"query_labels": ("a", 1)}, "query_labels has 1 where a string is expected"),
    (READY | {"query_labels": ("a", "\ud800")}, "query_labels has "),
    (PROJECTED | {"query_labels": ("a", "b")}, "query_labels has 2 names but embeddings has 3"),
    (PROJECTED | {"key_labels": ("a", "b", "c")}, "key_labels must be the same as query_labels"),
    (READY | {"value_features": ("a",)}, "value_features has 1 names but values has 5 columns"),
    (READY | {"embedding_features": ("a",)}, "embedding_features is given but embeddings is not"),
    (PROJECTED | {"context_features": ()}, "context_features is given but context is not"),
    (READY | {"row_notes": {"values": ["a"]}}, "row_notes.values has 1 notes but values has 4"),
    (READY | {"row_notes": {"W_q": ["a"]}}, "row_notes.W_q is given but W_q has no rows here"),
    (READY | {"row_notes": {"sink": ["a"]}}, "row_notes.sink is given but sink has no rows"),
    (READY | {"row_notes": {"vals": ["a"]}}, 'row_notes names the step "vals", which does not'),
    (READY | {"row_notes": ["a"]}, "row_notes must be a table, not a list of 1"),
    (READY | {"title": 3}, "title has 3 where a string is expected"),
    (READY | {"expect": "all"}, 'expect must be a tuple of Expectation, not "all"'),
    (READY | {"expect": [1]}, "expect must hold Expectation, not 1"),
    (
        READY | {"expect": [Expectation(step="weights", value=1.0, head=0)]},
        "expect.weights.head is 0 but the problem has no head axis",
    ),
    (
        PROJECTED | {"heads": 2, "expect": [Expectation(step="weights", value=1.0, head=2)]},
        "expect.weights.head is 2 but the problem has 2 heads",
    ),
    (
        READY | {"expect": [Expectation(step="weights", value=1.0, at=(0,))]},
        "expect.weights.at has 1 entries but weights has 2 axes here (L, S)",
    ),
    (
        READY
        | {"queries": np.ones(3), "expect": [Expectation(step="weights", value=1.0, at=(0, 1))]},
        "expect.weights.at has 2 entries but weights has 1 axes here (S)",
    ),
    (READY | {"random": RECIPE}, "random must be a RandomMatrices, not a table"),
    (
        {"random": RandomMatrices(**RECIPE), "W_q": np.eye(4), "W_k": np.eye(4), "W_v": np.eye(4)},
        "W_q is given and also drawn by random",
    ),
]


@pytest.mark.parametrize(("given", "said"), MISFITS, ids=[said for _, said in MISFITS])
def test_what_does_not_fit_is_said_in_one_line(given, said):
    message = complaint(Problem, **given)
    np.testing.assert_equal(message[: len(said)], said)
    assert "\n" not in message


def test_a_hostile_title_stays_inert_in_messages_and_in_print():
    hostile = "cat\x1b]0;gone\x07\u202etac\n"
    message = complaint(Problem, **READY, query_labels=(hostile, hostile), softmax=hostile)
    shown = repr(Problem(**READY, title=hostile, query_labels=(hostile, hostile)))
    for text in (message, shown.replace("\n  ", " ")):
        assert text.isprintable()
    assert "\\x1b" in message
    assert "\\u202e" in shown


# Expectations.

WRONG_EXPECTATIONS = [
    ({"step": "wieghts", "value": 1.0}, 'expect names the step "wieghts", which does not exist'),
    ({"step": 3, "value": 1.0}, "expect names the step 3, which does not exist"),
    ({"step": "weights"}, "expect.weights says neither value nor variance"),
    ({"step": "weights", "value": [[1], [1, 2]]}, "expect.weights.value row 1 has 2 numbers"),
    ({"step": "weights", "variance": 1.0, "at": (0,)}, "expect.weights.at names a cell but there"),
    (
        {"step": "weights", "value": [1.0, 2.0], "at": (0, 1)},
        "expect.weights.at names one cell but value has the shape (2,)",
    ),
    ({"step": "weights", "value": 1.0, "at": "cat"}, "expect.weights.at must be a list of labels"),
    ({"step": "weights", "value": 1.0, "at": (1.5,)}, "expect.weights.at must be a whole number"),
    ({"step": "weights", "value": 1.0, "within": -1}, "expect.weights.within is -1.0; it must be"),
    ({"step": "weights", "value": 1.0, "within": math.nan}, "expect.weights.within is nan"),
    (
        {"step": "weights", "value": 1.0, "relative": "1"},
        "expect.weights.relative must be a number",
    ),
    ({"step": "weights", "value": 1.0, "head": -1}, "expect.weights.head is -1; heads count from"),
]


@pytest.mark.parametrize(("given", "said"), WRONG_EXPECTATIONS)
def test_a_wrong_expectation_is_said_in_one_line(given, said):
    np.testing.assert_equal(complaint(Expectation, **given)[: len(said)], said)


# Recipes.


def test_the_legacy_stream_is_that_of_numpy_random_seed():
    recipe = RandomMatrices(
        generator="legacy",
        seed=42,
        distribution="uniform",
        draw=("X", "W_q", "W_k", "W_v"),
        shapes={"X": (3, 4), "W_q": (4, 4), "W_k": (4, 4), "W_v": (4, 4)},
    )
    # Printed by a worked example that calls np.random.seed(42) and then np.random.rand(3, 4).
    np.testing.assert_array_equal(
        recipe.matrices()["embeddings"].round(8),
        [
            [0.37454012, 0.95071431, 0.73199394, 0.59865848],
            [0.15601864, 0.15599452, 0.05808361, 0.86617615],
            [0.60111501, 0.70807258, 0.02058449, 0.96990985],
        ],
    )


def test_weights_drawn_from_seed_zero_are_those_of_the_worked_example():
    recipe = RandomMatrices(
        generator="legacy",
        seed=0,
        distribution="uniform",
        draw=("W_q", "W_k", "W_v"),
        shapes=dict.fromkeys(("W_v", "W_k", "W_q"), (4, 4)),
    )
    drawn = recipe.matrices()
    np.testing.assert_array_equal(
        drawn["W_q"].round(8)[0], [0.5488135, 0.71518937, 0.60276338, 0.54488318]
    )
    np.testing.assert_array_equal(
        drawn["W_v"].round(8)[3], [0.66676672, 0.67063787, 0.21038256, 0.1289263]
    )


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("generator", ["legacy", "default_rng"])
def test_all_matrices_come_from_one_stream_in_the_order_of_draw(generator, distribution):
    recipe = RandomMatrices(
        generator=generator,
        seed=5,
        distribution=distribution,
        draw=("queries", "values", "keys"),
        shapes={"keys": (4, 3), "queries": (3,), "values": (4, 2)},
    )
    if generator == "legacy":
        stream = np.random.RandomState(5)
        draw = {"uniform": stream.rand, "normal": stream.randn}[distribution]
    else:
        generator_ = np.random.default_rng(5)
        sample = {"uniform": generator_.random, "normal": generator_.standard_normal}[distribution]
        draw = lambda *shape: sample(shape)  # noqa: E731
    expected = {"queries": draw(3), "values": draw(4, 2), "keys": draw(4, 3)}
    np.testing.assert_equal(recipe.matrices(), expected)


def test_drawing_leaves_the_global_stream_alone():
    np.random.seed(1)
    expected = np.random.RandomState(1).rand()
    RandomMatrices(**RECIPE).matrices()
    np.testing.assert_equal(np.random.rand(), expected)


WRONG_RECIPES = [
    ({"generator": "mt"}, 'random.generator is "mt"; it must be "legacy" or "default_rng"'),
    ({"distribution": 1}, 'random.distribution is 1; it must be "uniform" or "normal"'),
    ({"seed": -1}, "random.seed is -1; with the generator legacy it must be at least 0"),
    ({"seed": 2**32}, "random.seed is 4294967296; with the generator legacy"),
    ({"seed": 10**5000}, "random.seed is an integer of 16610 bits"),
    ({"seed": True}, "random.seed must be a whole number, not true"),
    ({"draw": ()}, "random.draw is empty"),
    ({"draw": "X"}, 'random.draw must be a list of strings, not "X"'),
    ({"draw": ("X", "Q")}, 'random.draw names "Q"; it may name X, embeddings'),
    ({"draw": ("X", "embeddings")}, "random.draw names a matrix twice: X, embeddings"),
    ({"draw": ("X",)}, 'random.shapes has "W_q" but random.draw has not'),
    ({"draw": ("X", "W_q", "W_k")}, 'random.draw has "W_k" but random.shapes has not'),
    ({"shapes": [3, 4]}, "random.shapes must be a table, not a list of 2"),
    ({"draw": ("X",), "shapes": {"X": (0, 4)}}, "random.shapes.X has the size 0; sizes are 1"),
    ({"draw": ("X",), "shapes": {"X": ()}}, "random.shapes.X must be a list of 1 to 3 sizes"),
    ({"draw": ("X",), "shapes": {"X": (3, 4.0)}}, "random.shapes.X must be a whole number"),
    (
        {"draw": ("X",), "shapes": {"X": (10**9, 10**9)}},
        f"random.shapes asks for {10**18} numbers in total; at most {MAX_NUMBERS}",
    ),
]


@pytest.mark.parametrize(("change", "said"), WRONG_RECIPES)
def test_a_wrong_recipe_is_said_in_one_line(change, said):
    np.testing.assert_equal(complaint(RandomMatrices, **RECIPE | change)[: len(said)], said)


def test_the_printed_problem_says_what_is_there():
    problem = Problem(
        **PROJECTED | {"embeddings": None, "W_q": None},
        title="Pets",
        query_labels=("cat", "dog", "cow"),
        random=RandomMatrices(**RECIPE | {"shapes": {"X": (3, 4), "W_q": (4, 6)}}),
        causal=True,
        expect=[Expectation(step="lse", variance=1.0)],
    )
    assert repr(problem).splitlines() == [
        "Problem: Pets",
        "  tokens      cat, dog, cow",
        "  given       embeddings (3, 4)  W_q (4, 6)  W_k (4, 6)  W_v (4, 2)",
        "  options     causal",
        "  random      X, W_q (legacy, seed 42, uniform)",
        "  expects     lse",
    ]


def test_a_long_problem_prints_few_labels():
    labels = tuple(f"token{i}" for i in range(1000))
    problem = Problem(
        queries=[1.0], keys=np.ones((1000, 1)), values=np.ones((1000, 1)), key_labels=labels
    )
    assert "token7, … (1000 in all)" in repr(problem)


def test_a_masked_array_of_booleans_is_refused_as_mask():
    mask = np.ma.masked_array([[True, False]], [[True, False]])
    with pytest.raises(ProblemError, match="mask is a MaskedArray"):
        Problem(queries=[[1.0]], keys=[[1.0], [2.0]], values=[[1.0], [2.0]], mask=mask)


@pytest.mark.parametrize("read", [as_numbers, as_booleans])
def test_an_array_without_numbers_is_read_at_once_however_long_its_axes_are(read):
    long = np.empty((1, 2**31, 2, 0, 1), np.int64)  # as nested lists, of which there are 2**31
    assert read("keys", long).shape == long.shape
