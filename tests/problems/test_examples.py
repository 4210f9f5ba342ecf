"""Every example in examples/ loads, explains, and matches the numbers that it says to expect."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from places import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
CLASSROOM = {
    "animals-matrix",
    "animals-vector",
    "causal-mask",
    "random-three-tokens",
    "she-likes-coffee",
    "the-cat-sat",
}

every_example = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)


@cache
def load(path: Path) -> regard.Problem:
    return regard.load_problem(path)


def classroom(name: str) -> regard.Problem:
    return load(next(path for path in EXAMPLES if path.stem == name))


def off_by_more_than_allowed(expectation: regard.Expectation) -> regard.Expectation:
    """The same expectation, its first number moved to three times its tolerance from itself."""
    if expectation.variance is not None:
        moved = expectation.variance + 3 * tolerance(expectation, expectation.variance)
        return dataclasses.replace(expectation, variance=moved)
    value = np.array(expectation.value, dtype=np.float64)
    value.flat[0] += 3 * tolerance(expectation, value.flat[0])
    return dataclasses.replace(expectation, value=value if value.ndim else float(value))


def sent(value: Any) -> Any:
    """What another process of a pool receives."""
    return ForkingPickler.loads(ForkingPickler.dumps(value))


def tolerance(expectation: regard.Expectation, number: float) -> float:
    allowed = expectation.within + expectation.relative * abs(number)
    return allowed or 1.0  # an exact expectation, of a 0 or a 1


def test_the_classroom_examples_are_there() -> None:
    assert {path.stem for path in EXAMPLES} >= CLASSROOM


@every_example
def test_an_example_has_a_title_a_note_and_something_to_expect(path: Path) -> None:
    problem = load(path)
    assert problem.title
    assert problem.note
    assert problem.expect


@every_example
def test_an_example_matches_its_expectations(path: Path) -> None:
    assert regard.explain(load(path)).check() == ()


@every_example
def test_a_wrong_expectation_is_reported_and_no_other(path: Path) -> None:
    problem = load(path)
    explanation = regard.explain(problem)
    for index, right in enumerate(problem.expect):
        wrong = off_by_more_than_allowed(right)
        expect = (*problem.expect[:index], wrong, *problem.expect[index + 1 :])
        mismatches = explanation.check(expect)
        assert mismatches
        assert all(mismatch.expectation is wrong for mismatch in mismatches)


def test_a_mismatch_names_the_cell_and_both_numbers() -> None:
    problem = classroom("she-likes-coffee")
    wrong = regard.Expectation(step="weights", at=("likes", "coffee"), value=0.25)
    (mismatch,) = regard.explain(problem).check((wrong,))
    assert mismatch.index == (1, 2)
    assert mismatch.labels == ("likes", "coffee")
    np.testing.assert_equal(mismatch.expected, 0.25)
    np.testing.assert_allclose(mismatch.got, 0.34409169, rtol=0, atol=5e-9)  # as printed


@pytest.mark.parametrize("suffix", [".toml", ".json", ".npz"])
@every_example
def test_an_example_survives_saving_and_loading(path: Path, suffix: str, tmp_path: Path) -> None:
    saved = tmp_path / f"saved{suffix}"
    regard.save_problem(load(path), saved)
    assert_same(contents(regard.load_problem(saved)), contents(load(path)))


@every_example
def test_an_explained_example_goes_to_another_process(path: Path) -> None:
    explanation = regard.explain(load(path))
    there = sent(explanation)
    for name, step in explanation.steps.items():
        np.testing.assert_array_equal(there.steps[name].value, step.value)
    last = list(there.steps)[-1]
    cell = (0,) * there.steps[last].head(0).ndim
    own, theirs = (
        one.why(last, *cell, head=0 if one.heads else None) for one in (explanation, there)
    )
    assert str(theirs) == str(own)
    assert str(sent(own).open(0)) == str(own.open(0))
    np.testing.assert_array_equal(there.without(0).output, explanation.without(0).output)


@every_example
def test_an_example_loads_by_its_name_alone(path: Path) -> None:
    assert_same(contents(regard.load_problem(path.stem)), contents(load(path)))


def contents(record: Any) -> dict[str, Any]:
    """The fields of a problem or of anything that it holds."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def assert_same(one: Any, other: Any) -> None:
    """Equal all the way down: arrays with their dtype and every bit, records field by field."""
    if isinstance(other, np.ndarray):
        assert isinstance(one, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, strict=True)
    elif dataclasses.is_dataclass(other):
        assert type(one) is type(other)
        assert_same(contents(one), contents(other))
    elif isinstance(other, dict) or hasattr(other, "keys"):
        assert list(one) == list(other)
        for key in other:
            assert_same(one[key], other[key])
    elif isinstance(other, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert type(one) is type(other)
        np.testing.assert_equal(one, other)


# What the comments in the examples tell a learner.

# "#   regard explain name --why step row column  and what to see there"
SUGGESTION = re.compile(
    r"^#   regard explain (\S+)(?: --why (\S+(?: \S+)*))?(?:  .*)?$", re.MULTILINE
)


@every_example
def test_whatever_an_example_suggests_to_ask_has_an_answer(path: Path) -> None:
    suggestions = SUGGESTION.findall(path.read_text(encoding="utf-8"))
    assert (path.stem, "") in suggestions
    assert any(question for _, question in suggestions)
    for name, question in suggestions:
        explanation = regard.explain(classroom(name))
        if question:
            assert explanation.why(*question.split()).step == question.split()[0]


def test_she_is_a_query_whose_first_number_is_four_products() -> None:
    derivation = regard.explain(classroom("she-likes-coffee")).why("queries", "she", 0)
    # Each product is correctly rounded, and so is 0.18 as written; they may differ by one unit.
    np.testing.assert_array_max_ulp(
        np.array([term.value for term in derivation.terms]),
        np.array([0.18, 0.09, 0.01, 0.05]),
        maxulp=1,
    )


def test_equal_query_and_key_weights_make_symmetric_scores() -> None:
    scores = regard.explain(classroom("she-likes-coffee")).steps["scores"].value
    # Four products each way, in whatever order.
    np.testing.assert_allclose(scores, scores.T, rtol=4 * np.finfo(float).eps, atol=0)


def test_without_the_option_the_softmax_is_shifted_and_the_weights_stay() -> None:
    problem = classroom("she-likes-coffee")
    shifted = regard.explain(problem.replace(softmax="shifted"))
    assert {"row_maximum", "shifted"} <= shifted.steps.keys()
    assert not {"row_maximum", "shifted"} & regard.explain(problem).steps.keys()
    assert shifted.check(matching(problem, "weights", "output")) == ()


def test_asking_two_questions_at_once_changes_neither_answer() -> None:
    both = regard.explain(classroom("animals-matrix")).steps
    alone = classroom("animals-vector")
    for row, label in enumerate(both["queries"].row_labels):
        query = both["queries"].value[row]
        steps = regard.explain(alone.replace(queries=query, query_labels=(label,))).steps
        for name in ("weights", "output"):
            # Three products in a score of up to 94, then exp, which makes absolute errors relative.
            allowed = 8 * 94 * np.finfo(float).eps
            np.testing.assert_allclose(
                steps[name].value, both[name].value[row], rtol=allowed, atol=0
            )


def test_the_constant_in_the_bias_changes_the_masked_scores_and_not_the_weights() -> None:
    problem = classroom("causal-mask")
    without = regard.explain(problem.replace(bias=None))
    assert without.check(matching(problem, "weights", "output")) == ()
    assert without.check(matching(problem, "masked"))


def test_a_hidden_cell_says_that_causal_hides_it() -> None:
    derivation = regard.explain(classroom("causal-mask")).why("masked", 0, 3)
    np.testing.assert_equal(derivation.value, -np.inf)
    assert "causal" in derivation.text()


def test_the_first_position_of_a_causal_row_gets_its_own_value() -> None:
    steps = regard.explain(classroom("causal-mask")).steps
    np.testing.assert_array_equal(steps["output"].value[0], steps["values"].value[0])


def matching(problem: regard.Problem, *steps: str) -> tuple[regard.Expectation, ...]:
    return tuple(expectation for expectation in problem.expect if expectation.step in steps)
