"""Problem files: what they mean, and that writing and reading again changes nothing."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tomllib
import unicodedata
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import regard
from places import ROOT
from regard.boundary.toml_json import MAX_TEXT_BYTES
from regard.errors import ProblemError
from regard.normalizers import Hard, Proportional, Sigmoid, Sparsemax
from regard.problems import files as formats
from regard.problems.files import (
    example_names,
    load_problem,
    mapping_from_problem,
    parse_problem,
    problem_from_mapping,
    save_problem,
)
from regard.problems.parts import Expectation, RandomMatrices
from regard.problems.problem import Problem
from regard.problems.schema import KEYS, LONE_KEYS
from regard.scores import Additive, Cosine, Distance, Features, General

SUFFIXES = (".toml", ".json", ".npz")
DOCS = ROOT / "docs" / "problem-files.md"

READY = {"queries": [[1.0, 2.0]], "keys": [[1.0, 0.0], [0.0, 1.0]], "values": [[1.0], [2.0]]}
SELF = """
tokens = ["she", "likes", "she"]
[embeddings]
she = [1.0, 2.0]
likes = [3.0, 4.0]
never = [5.0, 6.0]
[weights]
W_q = [[1, 0], [0, 1]]
W_k = [[1, 0], [0, 1]]
W_v = [[1], [2]]
"""


def assert_same(one, other):
    """Bit for bit, except that one NaN is as good as another."""
    assert type(one) is type(other)
    if isinstance(one, (Problem, Expectation)):
        for each in fields(one):
            assert_same(getattr(one, each.name), getattr(other, each.name))
    elif isinstance(one, tuple):
        np.testing.assert_equal(len(one), len(other))
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, (np.ndarray, float)):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_equal(one.dtype, other.dtype)
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(
            np.signbit(one) & (one == 0) if one.dtype != bool else one,
            np.signbit(other) & (other == 0) if other.dtype != bool else other,
        )
    else:
        np.testing.assert_equal(one, other)


def saved_and_loaded(problem, folder, suffix):
    path = folder / f"problem{suffix}"
    save_problem(problem, path, force=True)
    return load_problem(path)


def complaint(call, *given, **options):
    with pytest.raises(ProblemError) as caught:
        call(*given, **options)
    assert type(caught.value) is ProblemError
    assert str(caught.value).isprintable()
    return str(caught.value)


# Any problem.

ODD_LABELS = [
    "",
    " ",
    "1",
    "-1.5e3",
    "nan",
    "true",
    "the cat",
    'say "hi"',
    "it's",
    "a.b",
    "back\\slash",
    "line\nbreak",
    "\r\n\t\b\f",
    "\x00\x1b[31m\x7f\x85",
    "\u202etac\u200b\u2028",
    "猫",
    "e\u0301",
    "\U0001f408",
    "\U000e0041",
    "[x]",
    "{",
    "#",
    "=",
    '"""',
    "'''",
    "x" * 2000,
]
labels = st.one_of(st.sampled_from(ODD_LABELS), st.text(max_size=6))
numbers = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 2.5e-308, 1e16, 1e-7, 0.1]),
)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def problems(draw):
    sizes = {letter: draw(st.integers(1, 3)) for letter in "LSMNDEF"}

    def array(*shape):
        return draw(arrays_of.arrays(np.float64, shape, elements=numbers))

    def maybe(strategy):
        return draw(st.none() | strategy)

    def names(count):
        return tuple(draw(st.lists(labels, min_size=count, max_size=count)))

    def maybe_names(count):
        return names(count) if draw(st.booleans()) else None

    key_heads = maybe(st.integers(1, 2))
    heads = key_heads and key_heads * draw(st.integers(1, 2))
    packed, grouped = heads or 1, key_heads or 1
    kind = draw(st.sampled_from(["self", "cross", "ready", "vector"]))
    rows = 1 if kind == "vector" else sizes["L"]
    keys = rows if kind == "self" else sizes["S"]
    width, wide = sizes["D"], sizes["E"]
    given = {"query_labels": maybe_names(rows)}
    if kind in ("self", "cross"):
        embeddings = array(rows, sizes["M"])
        context_width = sizes["M"]
        if kind == "cross":
            context_width = sizes["N"]
            given |= {
                "context": array(keys, context_width),
                "key_labels": maybe_names(keys),
                "context_features": maybe_names(context_width),
            }
        given |= {
            "embeddings": embeddings,
            "heads": heads,
            "key_heads": key_heads,
            "W_q": array(sizes["M"], packed * width),
            "W_k": array(context_width, grouped * width),
            "W_v": array(context_width, grouped * wide),
            "embedding_features": maybe_names(sizes["M"]),
        }
        if draw(st.booleans()):
            given |= {"b_q": array(packed * width), "b_v": array(grouped * wide)}
        if draw(st.booleans()):
            given |= {"W_o": array(packed * wide, sizes["F"]), "b_o": array(sizes["F"])}
    else:
        lead, key_lead = ((heads,), (key_heads,)) if heads and kind == "ready" else ((), ())
        heads = heads if lead else None
        given |= {
            "queries": array(width) if kind == "vector" else array(*lead, rows, width),
            "keys": array(*key_lead, keys, width),
            "values": array(*key_lead, keys, wide),
            "key_labels": maybe_names(keys),
        }
    scores = (*((heads,) if heads else ()), *((rows,) if kind != "vector" else ()), keys)
    if draw(st.booleans()):
        given["mask"] = draw(arrays_of.arrays(bool, scores))
    integers = st.integers(-9, 9)
    given |= {
        "title": draw(labels),
        "note": draw(labels),
        "bias": draw(st.none() | numbers | arrays_of.arrays(np.float64, scores, elements=numbers)),
        "causal": draw(st.booleans()),
        "window": maybe(st.tuples(*[st.none() | st.integers(0, 9)] * 2)),
        "offset": draw(st.just("end") | integers),
        "lengths": maybe(st.integers(0, keys)),
        "scale": maybe(finite),
        "softcap": maybe(st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False)),
        "sink": maybe(finite if heads is None else arrays_of.arrays(float, heads, elements=finite)),
        "softmax": draw(st.sampled_from(["shifted", "unshifted"])),
        "key_features": maybe_names(width),
        "value_features": maybe_names(wide),
        "row_notes": {"values": names(keys), "weights": names(rows)} if draw(st.booleans()) else {},
    }
    if draw(st.booleans()):
        texts = integers.map(abs)
        given["query_segments"] = tuple(sorted(draw(texts) for _ in range(rows)))
        given["key_segments"] = tuple(sorted(draw(texts) for _ in range(keys)))
    axes = 1 if kind == "vector" else 2
    cell = {
        "value": numbers,
        "at": st.none() | st.lists(labels | integers, min_size=axes, max_size=axes),
    }
    matrix = {"value": arrays_of.arrays(float, (2, 2), elements=numbers)}
    tolerance = st.floats(0.0, 1e300)
    given["expect"] = draw(
        st.lists(
            st.one_of(
                *(
                    st.builds(
                        Expectation,
                        step=st.sampled_from(["weights", "output", "queries", "scores"]),
                        variance=st.none() | numbers,
                        head=st.just(0) if heads else st.none(),
                        within=tolerance,
                        relative=tolerance,
                        **what,
                    )
                    for what in (cell, matrix)
                )
            ),
            max_size=4,
        )
    )
    return Problem(**given)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(problem=problems())
def test_every_problem_comes_back_exactly(problem, suffix, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    assert_same(saved_and_loaded(problem, folder, suffix), problem)


@pytest.mark.parametrize("kind", ["toml", "json"])
@given(given_labels=st.lists(labels, min_size=1, max_size=5))
@example(given_labels=ODD_LABELS)
@example(given_labels=["the", "cat", "the"])
def test_every_label_comes_back_exactly(kind, given_labels, tmp_path_factory):
    count = len(given_labels)
    problem = Problem(
        queries=np.eye(count), keys=np.eye(count), values=np.eye(count), query_labels=given_labels
    )
    again = saved_and_loaded(problem, tmp_path_factory.getbasetemp(), f".{kind}")
    np.testing.assert_equal(again.query_labels, tuple(given_labels))
    np.testing.assert_array_equal(again.queries, problem.queries)


@pytest.mark.parametrize("kind", ["toml", "json"])
@given(text=st.text())
def test_a_written_file_shows_nothing_that_a_terminal_would_obey(kind, text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / f"inert.{kind}"
    save_problem(Problem(**READY, title=text, query_labels=(text,)), path, force=True)
    written = path.read_text("utf-8").replace("\n", "")
    # Cc control, Cf bidirectional and invisible, Co and Cn without a shape, Zl and Zp line ends.
    obeyed = {"Cc", "Cf", "Co", "Cn", "Zl", "Zp"}
    assert not obeyed & {unicodedata.category(character) for character in written}


@given(bits=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8))
def test_an_archive_keeps_every_bit_of_every_number(bits, tmp_path_factory):
    values = np.array(bits, dtype=np.uint64).view(np.float64)[:, None]
    problem = Problem(queries=[[1.0]], keys=np.ones_like(values), values=values)
    again = saved_and_loaded(problem, tmp_path_factory.getbasetemp(), ".npz")
    np.testing.assert_array_equal(again.values.view(np.uint64), values.view(np.uint64))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", example_names())
def test_every_example_comes_back_exactly(name, suffix, tmp_path):
    problem = load_problem(name)
    assert_same(saved_and_loaded(problem, tmp_path, suffix), problem)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_same_problem_is_written_as_the_same_bytes(suffix, tmp_path):
    problem = parse_problem(SELF, "toml")
    regard.save_problem(problem, tmp_path / f"one{suffix}")
    regard.save_problem(load_problem(tmp_path / f"one{suffix}"), tmp_path / f"two{suffix}")
    one, two = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("one", "two"))
    np.testing.assert_equal(one, two)


@given(problem=problems())
def test_a_mapping_is_all_that_a_problem_says(problem):
    assert_same(problem_from_mapping(mapping_from_problem(problem), "here"), problem)


# What a file says.


def test_tokens_give_the_order_of_the_rows_and_may_repeat():
    problem = parse_problem(SELF, "toml")
    np.testing.assert_array_equal(problem.embeddings, [[1, 2], [3, 4], [1, 2]])
    assert problem.query_labels == problem.key_labels == ("she", "likes", "she")


def test_without_tokens_the_table_gives_the_order():
    problem = parse_problem(SELF.replace("tokens =", "#"), "toml")
    assert problem.query_labels == ("she", "likes", "never")


def test_values_stand_in_the_order_of_the_keys():
    text = "queries = [1]\n[keys]\na = [1]\nb = [2]\n[values]\nb = [20]\na = [10]"
    np.testing.assert_array_equal(parse_problem(text, "toml").values, [[10.0], [20.0]])


def test_a_repeated_word_with_two_vectors_is_written_as_rows(tmp_path):
    problem = Problem(**READY | {"queries": [[1, 2], [3, 4]]}, query_labels=("the", "the"))
    regard.save_problem(problem, tmp_path / "p.toml")
    data = tomllib.loads((tmp_path / "p.toml").read_text())
    assert data["queries"] == [[1.0, 2.0], [3.0, 4.0]]
    assert data["tokens"] == ["the", "the"]


def test_one_plain_vector_bears_a_query_label(tmp_path):
    text = 'query_label = "mammal"\nqueries = [8.7, 3.2]\nkeys = [[1, 2]]\nvalues = [[3]]'
    problem = parse_problem(text, "toml")
    assert problem.query_labels == ("mammal",)
    regard.save_problem(problem, tmp_path / "p.toml")
    assert 'query_label = "mammal"' in (tmp_path / "p.toml").read_text()


def test_a_matrix_is_written_one_row_to_a_line(tmp_path):
    regard.save_problem(
        Problem(**READY | {"keys": [[1, -math.inf], [0.1, 1e300]]}), tmp_path / "p.toml"
    )
    assert "keys = [\n  [1.0, -inf],\n  [0.1, 1e+300],\n]\n" in (tmp_path / "p.toml").read_text()
    regard.save_problem(
        Problem(**READY | {"keys": [[1, -math.inf], [0.1, 1e300]]}), tmp_path / "p.json"
    )
    written = (tmp_path / "p.json").read_text()
    assert '  "keys": [\n    [1.0, "-inf"],\n    [0.1, 1e+300]\n  ],\n' in written
    json.loads(written, parse_constant=pytest.fail)


def test_words_stand_for_numbers_that_have_no_digits():
    words = {"values": [["inf"], ["-inf"]], "options": {"bias": ["-inf", "nan"]}}
    problem = parse_problem(json.dumps(READY | words), "json")
    np.testing.assert_array_equal(problem.values, [[np.inf], [-np.inf]])
    np.testing.assert_array_equal(problem.bias, [-np.inf, np.nan])
    problem = parse_problem('queries = [[1, "-inf"]]\nkeys = [[1, inf]]\nvalues = [[1]]', "toml")
    np.testing.assert_array_equal(problem.queries, [[1.0, -np.inf]])
    np.testing.assert_array_equal(problem.keys, [[1.0, np.inf]])


def test_options_are_read():
    options = """
    [options]
    causal = true
    window = [2, "unbounded"]
    offset = "end"
    scale = 2
    softcap = 30.0
    sink = -1
    bias = [[0, -inf, 0]]
    mask = [[true, false, true]]
    lengths = 2
    segments = { queries = [1, 1, 2], keys = [1, 2, 2] }
    softmax = "unshifted"
    """
    problem = parse_problem(SELF + options, "toml")
    assert (problem.causal, problem.window, problem.offset) == (True, (2, None), "end")
    assert (problem.scale, problem.softcap, problem.sink, problem.lengths) == (2.0, 30.0, -1.0, 2)
    np.testing.assert_array_equal(problem.bias, [[0, -np.inf, 0]])
    np.testing.assert_array_equal(problem.mask, [[True, False, True]])
    assert (problem.query_segments, problem.key_segments) == ((1, 1, 2), (1, 2, 2))
    assert problem.softmax == "unshifted"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("score", "normalize"),
    [
        (General([[1.0, 0.1], [-1 / 3, 2.0]]), Sigmoid(-0.5)),
        (Additive([[1.0], [2.0]], [[3.0], [4.0]], [0.1]), Hard(straight_through=True)),
        (Cosine(0.3), Sparsemax()),
        (Distance(), Hard()),
        (Features(), Proportional()),
    ],
)
def test_a_score_and_a_normalization_come_back_exactly(score, normalize, suffix, tmp_path):
    problem = Problem(**READY, score=score, normalize=normalize)
    save_problem(problem, tmp_path / f"saved{suffix}")
    again = load_problem(tmp_path / f"saved{suffix}")
    assert again.score == score
    assert again.normalize == normalize
    ours, theirs = (regard.explain(one).output for one in (problem, again))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"score": "cosin"}, 'options.score is "cosin"; the kinds are dot, general, additive'),
        ({"score": "general"}, 'options.score is "general" without W; it needs W, in a table'),
        ({"score": {"W": [[1.0]]}}, "options.score is a table without kind"),
        ({"score": {"kind": "cosine", "tau": 1}}, "which cosine does not take; it takes temperat"),
        ({"score": {"kind": "general", "W": [[1.0]]}}, "score.W has shape (1, 1) but queries"),
        ({"normalize": {"kind": "hard", "straight_through": 1}}, "must be True or False"),
        ({"normalize": "hard", "sink": 0.0}, "sink takes part in the sum of a softmax"),
        ({"normalize": "proportional"}, "pass score=regard.scores.Features()"),
    ],
)
def test_a_score_or_a_normalization_that_makes_no_sense_is_refused(options, said):
    with pytest.raises(ProblemError) as refused:
        problem_from_mapping({**READY, "options": options})
    assert said in str(refused.value)


def test_several_things_may_be_expected_of_one_step():
    text = (
        SELF + "[[expect.weights]]\nvariance = 0.5\n[[expect.weights]]\nat = ['she', 1]\nvalue = 1"
    )
    first, second = parse_problem(text, "toml").expect
    assert (first.variance, second.at, second.value) == (0.5, ("she", 1), 1.0)
    assert (second.within, second.relative) == (5.0e-9, 0.0)


def test_a_recipe_is_kept_as_a_recipe(tmp_path):
    text = """
    tokens = ["a", "b", "c"]
    [random]
    generator = "legacy"
    seed = 42
    distribution = "uniform"
    draw = ["X", "W_q", "W_k", "W_v"]
    shapes = { X = [3, 4], W_q = [4, 4], W_k = [4, 4], W_v = [4, 4] }
    """
    problem = parse_problem(text, "toml")
    np.testing.assert_allclose(problem.embeddings[0, 0], 0.37454012, rtol=0, atol=5e-9)
    for suffix in (".toml", ".json"):
        regard.save_problem(problem, tmp_path / f"p{suffix}")
        assert "37454" not in (tmp_path / f"p{suffix}").read_text()
        assert_same(load_problem(tmp_path / f"p{suffix}"), problem)


def test_a_recipe_of_which_one_matrix_was_changed_is_written_as_numbers(tmp_path):
    recipe = RandomMatrices(
        generator="default_rng",
        seed=1,
        distribution="normal",
        draw=("queries", "keys", "values"),
        shapes=dict.fromkeys(("queries", "keys", "values"), (2, 2)),
    )
    changed = Problem(random=recipe).replace(values=np.eye(2))
    regard.save_problem(changed, tmp_path / "p.toml")
    assert_same(load_problem(tmp_path / "p.toml"), changed)


def test_arrays_saved_by_numpy_make_a_problem(tmp_path):
    np.savez_compressed(
        tmp_path / "p.npz",
        queries=np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        keys=np.ones((4, 3), dtype=">i2"),
        values=np.ones((4, 1), dtype=np.float16),
        tokens=np.array(["cat", "猫"]),
        **{"options.scale": 0.5, "options.causal": True, "options.offset": 2},
    )
    problem = load_problem(tmp_path / "p.npz")
    np.testing.assert_array_equal(problem.queries, [[0, 1, 2], [3, 4, 5]])
    assert problem.query_labels == ("cat", "猫")
    assert (problem.scale, problem.causal, problem.offset) == (0.5, True, 2)


def test_numpy_reads_a_saved_archive_without_unpickling(tmp_path):
    regard.save_problem(Problem(**READY, title="pets"), tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["keys"], READY["keys"])
        assert json.loads(str(archive["problem"]))["title"] == "pets"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    for kind, text in (("toml", SELF), ("json", json.dumps(READY))):
        (tmp_path / f"p.{kind}").write_bytes(b"\xef\xbb\xbf" + text.encode())
        load_problem(tmp_path / f"p.{kind}")
        parse_problem("\ufeff" + text, kind)


# What a file may not say: (change to a file that is right, what is said about it).


def expecting(**entry):
    return {"expect": {"weights": entry}}


WRONG = [
    ({"weights": {"W_Q": 1}}, "weights.W_Q is not a known key; did you mean weights.W_q?"),
    ({"W_q": [[1]]}, "W_q is not a known key; did you mean weights.W_q?"),
    ({"options": {"casual": 1}}, "options.casual is not a known key; did you mean options.causal?"),
    ({"causal": True}, "causal is not a known key; did you mean options.causal?"),
    ({"key_labels": ["a"]}, "key_labels is not a known key; did you mean context_tokens?"),
    ({"labels": ["a"]}, "labels is not a known key; did you mean tokens?"),
    ({"token": ["a"]}, "token is not a known key; did you mean tokens?"),
    ({"options": {"zzz": 1}}, "options.zzz is not a known key; known here are options.causal, o"),
    ({"weights.W_q": 1}, '"weights.W_q" is one key with a dot in it; write it as nested'),
    ({"options": 1}, "options must be a table of keys, not 1"),
    ({"format": "regard/2"}, 'format is "regard/2"; it must be "regard/1"'),
    ({"query_label": "a", "tokens": ["b"]}, "query_label and tokens are both given"),
    ({"query_label": "a"}, "query_label names one plain vector"),
    ({"query_label": "a", "queries": [[1, 2], [3, 4]]}, "query_label has 1 names but queries has"),
    ({"tokens": ["a", "b"]}, "tokens has 2 names but queries has 1 rows"),
    ({"tokens": 3}, "tokens must be a list of strings, not 3"),
    ({"context_tokens": ["a"]}, "context_tokens has 1 names but keys has 2 rows"),
    ({"queries": [[1, 2], [1]]}, "queries row 1 has 1 numbers but row 0 has 2; all rows"),
    ({"queries": [[1, "two"]]}, 'queries at (0, 1) is "two"; the only words for numbers are "inf"'),
    ({"queries": [[1, True]]}, "queries at (0, 1) is true; it must be a number"),
    ({"queries": [[1, 2**53 + 1]]}, "queries at (0, 1) is 9007199254740993, which a 64-bit float"),
    ({"queries": []}, "queries is empty, shape (0,); it needs at least one row"),
    (
        {"queries": [[1, 2, 3]]},
        "queries is 3 wide but keys is 2 wide; their last axes must match (D)",
    ),
    ({"queries": {}}, "queries is an empty table"),
    ({"queries": {"a": [1, 2], "b": [1]}}, 'queries."b" has 1 numbers but queries."a" has 2; all'),
    ({"queries": {"a": {"b": [1, 2]}}}, 'queries."a" is a table, not a vector; quote a label'),
    ({"queries": {"a": [[1, 2]]}}, 'queries."a" has 2 axes; a vector has 1'),
    ({"queries": {"a": [1, None]}}, 'queries."a" at (1,) must be a number, not nothing'),
    (
        {"tokens": ["a", "c", "d"], "queries": {"a": [1, 2], "b": [1, 2]}},
        'queries has no vector for "c", "d"; it has 2 labels, among them "a", "b"',
    ),
    ({"tokens": [[1]], "queries": {"a": [1, 2]}}, "tokens must be a list of strings, in quotes"),
    ({"keys": {"a": [1, 2]}, "values": {"b": [1]}}, 'values has "b" but keys has not'),
    ({"heads": True}, "heads must be a whole number, not true"),
    (
        {"options": {"window": ["all", 0]}},
        'options.window has "all"; each side is a whole number or "unbounded"',
    ),
    (
        {"keys": {"cat": [1.0, 2.0], "values": [[1.0], [2.0]]}},
        'keys."values" has 2 axes; a vector has 1; if values is not a label here: '
        "keys outside a table come before the first [table]",
    ),
    (
        {"queries": {"pet": [1.0, 2.0], "tokens": ["pet"]}},
        'queries."tokens" at (0,) is "pet"; the only words for numbers are "inf", "-inf", "nan"; '
        "if tokens is not a label here: keys outside a table come before the first [table]",
    ),
    (
        {"weights": {"tokens": ["pet"]}},
        "weights.tokens is not a known key; did you mean tokens? "
        "(keys outside a table come before the first [table])",
    ),
    ({"options": {"causal": True}}, "options.offset: causal and window compare positions"),
    ({"options": {"mask": [[1, 0]]}}, "options.mask at (0, 0) is 1; it must be true"),
    (
        {"options": {"bias": [1, 2, 3]}},
        "options.bias: bias has shape (3,), which does not broadcast to (1, 2)",
    ),
    ({"options": {"scale": "inf"}}, "options.scale: scale is inf; it must be finite"),
    ({"options": {"segments": [1]}}, "options.segments must be a table of keys, not a list of 1"),
    (
        {"options": {"segments": {"query": [1]}}},
        "options.segments.query is not a known key; did you mean options.segments.queries?",
    ),
    ({"features": {"values": ["a", "b"]}}, "features.values has 2 names but values has 1 columns"),
    ({"row_notes": {"values": ["a"]}}, "row_notes.values has 1 notes but values has 2 rows"),
    ({"random": 1}, "random must be a table of keys, not 1"),
    ({"random": {"seed": 1}}, "random.distribution is missing; a recipe has the keys generator"),
    ({"random": {"sead": 1}}, "random.sead is not a known key; did you mean random.seed?"),
    (
        {"expect": {"wieghts": {"value": 1}}},
        'expect names the step "wieghts", which does not exist; did you mean weights?',
    ),
    ({"expect": {"a": {"value": 1}}}, 'expect names the step "a", which does not exist; the steps'),
    ({"expect": 1}, "expect must be a table of steps, not 1"),
    ({"expect": {"weights": 1}}, "expect.weights must be a table of keys, not 1"),
    ({"expect": {"weights": [1]}}, "expect.weights must be a table of keys, not 1"),
    (
        expecting(wthin=1),
        "expect.weights.wthin is not a known key; did you mean expect.weights.with",
    ),
    (expecting(value="1"), 'expect.weights.value is "1"; write 1, without quotes'),
    ({"options": {"scale": "0.5"}}, 'options.scale is "0.5"; write 0.5, without quotes'),
    ({"options": {"bias": "-1e3"}}, 'options.bias is "-1e3"; write -1e3, without quotes'),
    ({"options": {"scale": ".5"}}, 'options.scale is ".5"; the only words for numbers'),
    ({"queries": [[1, "2.0"]]}, 'queries at (0, 1) is "2.0"; write 2.0, without quotes'),
    ({3: 4}, "3 is not a known key"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_is_wrong_is_said_with_the_file_and_the_key(change, said):
    message = complaint(problem_from_mapping, READY | change, "pets.toml")
    np.testing.assert_equal(message[: len(said) + 11], f"pets.toml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("queries = [[1, 2020-01-01]]", "queries at (0, 1) must be a number, not a date"),
        ("queries = [[1, 1e999]]", "text is not valid TOML: the number 1e999 is too large"),
        (
            "queries.a.b = [1, 2]",
            'queries."a" is a table, not a vector; quote a label that has dots',
        ),
        ("heads = 1\nheads = 2", "text is not valid TOML: Cannot overwrite a value"),
        ("queries = [", "text is not valid TOML: "),
    ],
)
def test_what_only_toml_can_say_wrong(text, said):
    message = complaint(parse_problem, text, "toml", "pets.toml")
    np.testing.assert_equal(message[: len(said) + 11], f"pets.toml: {said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": 1, "a": 2}', 'text is not valid JSON: the key "a" appears twice in one object'),
        ('{"queries": [NaN]}', 'text is not valid JSON: JSON has no number NaN; write "nan" as a'),
        ('{"queries": [-Infinity]}', 'text is not valid JSON: JSON has no number -Infi'),
        ('{"queries": [1e999]}', "text is not valid JSON: the number 1e999 is too large"),
        ('{"queries": null}', "queries is null; leave the key out"),
        ('{"expect": {"weights": {"at": null}}}', "expect.weights.at is null; leave the key out"),
        ("[1]", "problem must be a table, not a list of 1"),
        ("", "text is not valid JSON: "),
    ],
)  # fmt: skip
def test_what_only_json_can_say_wrong(text, said):
    message = complaint(parse_problem, text, "json", "pets.json")
    np.testing.assert_equal(message[: len(said) + 11], f"pets.json: {said}")


def test_a_drawn_matrix_may_not_be_given_as_well():
    text = SELF + (
        '[random]\ngenerator = "legacy"\nseed = 0\ndistribution = "uniform"\n'
        'draw = ["W_q"]\nshapes = { W_q = [2, 2] }'
    )
    message = complaint(parse_problem, text, "toml", "p.toml")
    assert message.startswith("p.toml: random.draw names W_q, but weights.W_q is given as well")


# Files.


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_existing_file_is_replaced_only_with_force(suffix, tmp_path):
    path = tmp_path / f"p{suffix}"
    path.write_bytes(b"precious")
    message = complaint(save_problem, Problem(**READY), path)
    assert message == f"{path}: already exists; pass force=True to replace it"
    assert path.read_bytes() == b"precious"
    save_problem(Problem(**READY), path, force=True)
    np.testing.assert_array_equal(load_problem(path).keys, READY["keys"])
    assert os.listdir(tmp_path) == [path.name]


def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def fail(*given):
        raise OSError(28, "No space left on device")

    path = tmp_path / "p.toml"
    path.write_bytes(b"precious")
    monkeypatch.setattr(formats.files.os, "replace", fail)
    message = complaint(save_problem, Problem(**READY), path, force=True)
    assert message == f"{path}: cannot be written: No space left on device"
    assert os.listdir(tmp_path) == ["p.toml"]
    assert path.read_bytes() == b"precious"


def test_an_interrupt_while_writing_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*given, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(formats.npz.np.lib.format, "write_array", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_problem(Problem(**READY), tmp_path / "p.npz")
    assert os.listdir(tmp_path) == []


INTERRUPTED = """
import contextlib, gc, os, signal, sys
from regard.problems.files import load_problem, save_problem

def interrupt(number, frame):
    raise KeyboardInterrupt

path = sys.argv[1]
problem = load_problem(path)
save_problem(problem, path, force=True)  # imports what it needs: that is Python's own
signal.signal(signal.SIGALRM, interrupt)
for count in range(300):
    with contextlib.suppress(KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + count % 60))
        save_problem(problem, path, force=True)
        load_problem(path)
        signal.setitimer(signal.ITIMER_REAL, 0)
signal.setitimer(signal.ITIMER_REAL, 0)
gc.collect()  # an interrupt between two steps leaves a file to the collector
files = []
for number in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
        files.append(os.readlink(f"/proc/self/fd/{number}"))
print([one for one in files if one.startswith(os.path.dirname(path))])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is open in /proc")
def test_interrupts_at_any_moment_leave_no_file_open_and_none_behind(tmp_path):
    path = tmp_path / "p.json"
    save_problem(Problem(**READY), path)
    # A process of its own: here other tests' hooks may keep an exception, and with it a file.
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERRUPTED, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "[]\n", "")
    assert os.listdir(tmp_path) == ["p.json"]


def test_a_saved_file_has_the_mode_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        save_problem(Problem(**READY), tmp_path / "p.toml")
    finally:
        os.umask(old)
    assert (tmp_path / "p.toml").stat().st_mode & 0o777 == 0o640


def test_there_must_be_a_folder_to_save_in(tmp_path):
    message = complaint(save_problem, Problem(**READY), tmp_path / "none" / "p.toml")
    assert message.endswith(f"there is no folder {tmp_path / 'none'}")


def test_only_a_plain_file_is_ever_replaced(tmp_path):
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "real.toml").write_text("precious")
    (tmp_path / "link.toml").symlink_to(tmp_path / "real.toml")
    for name, kind in (("folder", "a directory"), ("link", "a symbolic link")):
        message = complaint(save_problem, Problem(**READY), tmp_path / f"{name}.toml", force=True)
        assert f"is {kind}, which is never replaced" in message
    assert (tmp_path / "real.toml").read_text() == "precious"


@pytest.mark.parametrize("name", ["p.yaml", "p", "p.toml.bak"])
def test_the_suffix_says_the_format(name, tmp_path):
    for call in (load_problem, lambda path: save_problem(Problem(**READY), path)):
        assert "must be one of .toml, .json, .npz" in complaint(call, tmp_path / name)


def test_the_suffix_may_be_in_capitals(tmp_path):
    save_problem(Problem(**READY), tmp_path / "P.TOML")
    np.testing.assert_array_equal(load_problem(str(tmp_path / "P.TOML")).keys, READY["keys"])


@pytest.mark.parametrize("most", [2**12, pytest.param(MAX_TEXT_BYTES, marks=pytest.mark.full)])
def test_what_could_not_be_read_again_is_not_written(tmp_path, monkeypatch, most):
    monkeypatch.setattr("regard.boundary.toml_json.MAX_TEXT_BYTES", most)
    keys = np.full((most // 18, 1), 1 / 3)  # 18 bytes each, with its brackets more
    problem = Problem(queries=[1.0], keys=keys, values=keys, expect=())
    message = complaint(save_problem, problem, tmp_path / "p.toml")
    assert f"at most {most} could be read again; save it as .npz" in message
    save_problem(problem, tmp_path / "p.npz")
    np.testing.assert_array_equal(load_problem(tmp_path / "p.npz").keys, keys)


# Examples.


def test_an_example_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "pets.toml").write_text(SELF)
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.setattr(formats, "_example_folder", lambda: tmp_path)
    assert example_names() == ("pets",)
    assert load_problem("pets").query_labels == ("she", "likes", "she")


def test_an_unknown_name_lists_the_examples(tmp_path, monkeypatch):
    (tmp_path / "pets.toml").write_text(SELF)
    (tmp_path / "birds.toml").write_text(SELF)
    monkeypatch.setattr(formats, "_example_folder", lambda: tmp_path)
    message = complaint(load_problem, "pet")
    assert message.startswith("pet: there is no example of this name; did you mean pets? ")
    assert "the examples are birds, pets; a file ends in .toml, .json, .npz" in message


def test_without_examples_a_name_is_still_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_example_folder", lambda: tmp_path / "absent")
    assert example_names() == ()
    assert "no examples are installed" in complaint(load_problem, "pets")


def test_an_error_in_an_example_names_its_file(tmp_path, monkeypatch):
    (tmp_path / "pets.toml").write_text("heads = 0")
    monkeypatch.setattr(formats, "_example_folder", lambda: tmp_path)
    assert complaint(load_problem, "pets").startswith("pets.toml: embeddings, W_q")


# The page about problem files.


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS.read_text("utf-8"), re.M | re.S)


def test_the_documented_file_is_a_problem():
    (text,) = blocks("toml")
    problem = parse_problem(text, "toml")
    assert problem.query_labels == ("the", "cat", "sat")
    assert len(problem.expect) == 2


def test_every_key_is_documented():
    documented = set(re.findall(r"`([^`\s]+)`", DOCS.read_text("utf-8")))
    parts = {f"random.{each.name}" for each in fields(RandomMatrices)}
    parts |= {each.name for each in fields(Expectation)} - {"step"}
    known = {key.path for key in KEYS} - {"expect", "random"} | set(LONE_KEYS) | parts
    assert known - documented == set()
