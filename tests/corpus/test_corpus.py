"""The corpus of attentions: its files, its problems, and what is counted of verdicts on it."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention_corpus import CORPUS, Case, callable_of, cases, faults
from consuming_lines import consuming_lines
from corpus.judges import Judged, stated_beside
from corpus.mutations import changed, changes, mutations_of
from corpus.run import PAGE, judged, marks, page_with, recorded, recorded_tables, table
from corpus.run import WRONG as COLUMNS
from corpus_tasks import PLAIN, Task, answers, differs, expected, is_right, reading_of
from failing_judges import endless, raising

CASES = {case.name: case for case in cases()}
WRONG = [case for case in CASES.values() if case.wrong]
RIGHT = [case for case in CASES.values() if not case.wrong]
A_CASE = CASES["dot_of_matrices"]


# --- the files ------------------------------------------------------------------------------------


def test_every_file_has_its_fields_and_code_that_parses_with_its_line_and_its_correction():
    assert {case.name: list(faults(case)) for case in CASES.values() if list(faults(case))} == {}


def test_files_are_in_the_folder_of_right_or_of_wrong_ones_and_no_name_is_there_twice():
    for path in CORPUS.rglob("*.toml"):
        assert path.parent.name == ("wrong" if CASES[path.stem].wrong else "right")
    assert len(CASES) == len(list(CORPUS.rglob("*.toml")))


def test_the_names_of_mistakes_are_those_of_the_catalogue():
    from regard.diagnosis.mistakes import all_mistakes

    named = {name for case in WRONG for name in (*(case.names or ()), *case.near)}
    assert named <= set(all_mistakes())


def test_a_file_without_its_line_or_with_names_it_should_not_have_is_noticed():
    assert list(faults(A_CASE)) == []
    assert list(faults(replace(A_CASE, line=999)))
    assert list(faults(replace(A_CASE, mistake="")))
    assert list(faults(replace(A_CASE, corrected=A_CASE.code.splitlines()[A_CASE.line - 1])))
    assert list(faults(replace(A_CASE, stated={"mask": "maybe"})))
    assert list(faults(replace(A_CASE, function="nothing")))
    assert list(faults(replace(RIGHT[0], names=("no_scale",))))
    with pytest.raises(SyntaxError):
        list(faults(replace(A_CASE, corrected="    return (")))


# --- the problems, and what is right --------------------------------------------------------------


def each(some: list[Case]) -> list[Any]:
    """The cases; those that need more than NumPy wait for --full."""
    alone = [case.library == "numpy" and "scipy" not in case.code for case in some]
    return [
        pytest.param(case, id=case.name, marks=() if plain else pytest.mark.full)
        for case, plain in zip(some, alone, strict=True)
    ]


@pytest.mark.parametrize("case", each(RIGHT))
def test_right_code_gives_what_plain_loops_give(case, tmp_path):
    found = answers(*callable_of(case, tmp_path), case.library, case.stated)
    assert is_right(found, reading_of(found))


@pytest.mark.parametrize("case", each(WRONG))
def test_wrong_code_gives_something_else_until_its_line_is_corrected(case, tmp_path):
    cured = answers(*callable_of(case, tmp_path, case.cured), case.library, case.stated)
    reading = reading_of(cured)
    assert is_right(cured, reading)
    found = answers(*callable_of(case, tmp_path), case.library, case.stated)
    assert differs(found, cured, reading)


@pytest.mark.parametrize("causal", ["start", "end"])
def test_a_problem_of_causal_code_lets_every_query_see_a_key(causal):
    for seed in range(7):
        task = Task(seed, "numpy", {"causal": causal}, {"window", "mask"})
        assert task.query.shape[2] <= task.key.shape[2]
        assert task.window
        assert task.mask.any(-1).all()
        assert np.isfinite(expected(task)["output"]).all()


def test_a_field_is_the_same_whenever_it_is_read_and_others_are_other_numbers():
    task = Task(0, "numpy", {}, set())
    np.testing.assert_array_equal(task.query, task.query)
    assert not np.array_equal(task.query, task.key)
    assert task.asked == {"query", "key"}


# --- lines ----------------------------------------------------------------------------------------

CODE = """\
def attention(q, k, v, mask):
    scale = 8
    s = q @ k.T / scale
    if mask is not None:
        s = hide(s,
                 mask)
    w = softmax(s)
    s = w.sum()
    for j in range(3):
        out = w * s
        total = out + w
    return total, s
"""


@pytest.mark.parametrize(
    ("line", "consuming"),
    [
        (2, {3}),
        (3, {5, 6, 7}),
        (4, {5, 6}),
        (5, {6, 7}),
        (6, {5, 7}),
        (7, {8, 10, 11}),
        (8, {10, 12}),
        (11, {12}),
        (12, set()),
    ],
)
def test_a_line_is_consumed_by_what_reads_its_value_before_it_is_bound_anew(line, consuming):
    assert consuming_lines(CODE, line) == consuming


def test_an_attribute_is_consumed_wherever_it_is_read_and_a_loop_by_its_beginning():
    layer = "class A:\n def __init__(self):\n  self.n = 3\n def f(self, x):\n  return x / self.n\n"
    assert consuming_lines(layer, 3) == {5}
    loop = "def f(x):\n m = 0\n for a in x:\n  n = m + a\n  m = n\n return m\n"
    assert consuming_lines(loop, 5) == {4, 6}


# --- changed tokens -------------------------------------------------------------------------------


def test_a_changed_token_is_another_program_of_the_same_lines():
    case = CASES["queries_in_chunks"]
    found = [changed(case, one) for one in changes(case.code)]
    assert len({one.name for one in found}) == len(found) > 20
    for one in found:
        assert one.code != case.code
        assert len(one.code.splitlines()) == len(case.code.splitlines())
        assert one.cured == case.code


def test_a_seed_draws_changes_that_run_and_change_a_result(tmp_path):
    case = CASES["queries_in_chunks"]
    found = mutations_of(case, 0, each=3)
    assert [one.code for one in found] == [one.code for one in mutations_of(case, 0, each=3)]
    assert len(found) == 3
    for one in found:
        ast.parse(one.code)
        answered = answers(*callable_of(one, tmp_path), case.library, case.stated)
        assert not answered[0].error
        assert not is_right(answered, PLAIN)


# --- what is counted ------------------------------------------------------------------------------


def test_a_verdict_is_marked_by_its_line_and_its_name():
    case = replace(A_CASE, line=3, code=CODE, names=("no_scale",), near=("scale_other",))
    assert marks(case, Judged("wrong", ("no_scale",), 3)) == ("wrong", "line", "named")
    assert marks(case, Judged("wrong", ("scale_other",), 7)) == ("wrong", "consuming", "near")
    assert marks(case, Judged("wrong", ("other",), 8)) == ("wrong", "another", "misnamed")
    assert marks(case, Judged("wrong")) == ("wrong", "", "")
    assert marks(case, Judged("right")) == ("called right", "", "")
    assert marks(case, Judged("fragile")) == ("called right", "", "")
    assert marks(case, Judged("stopped")) == ("unknown", "", "")
    assert marks(case, Judged("not_callable")) == ("not callable", "", "")
    assert marks(RIGHT[0], Judged("wrong", (), 3)) == ("accused", "", "")


def test_a_table_counts_marks():
    case = replace(A_CASE, line=3, code=CODE)
    rows = {"so": [marks(case, Judged("wrong", ("no_scale",), n)) for n in (3, 7)]}
    last = table("wrong ones", COLUMNS, rows).splitlines()[-1]
    assert last == "| so | 2 | 1 | 1 | 0 | 2 | 0 | 0 | 0 | 0 |"


def test_what_an_adapter_says_itself_is_not_stated_beside_it():
    case = replace(A_CASE, stated={"mask": "hide", "causal": True, "window": "inclusive"})
    assert stated_beside(case) == {"causal": True}
    reads = replace(case, adapter="def call(f, t):\n    return f(t.causal)\n")
    assert stated_beside(reads) == {}
    assert stated_beside(replace(reads, stated={"causal": "end"})) == {"causal": "end"}


def test_a_case_that_needs_too_long_or_a_tool_that_raises_is_a_verdict(monkeypatch):
    monkeypatch.setattr("corpus.run.LOADED", ())
    assert judged(A_CASE, True, endless, seconds=1).verdict == "stopped"
    assert judged(A_CASE, True, raising).verdict.startswith("raised KeyError")


# --- what is recorded -----------------------------------------------------------------------------


def test_the_tables_in_the_documentation_are_those_of_what_is_recorded():
    page = PAGE.read_text("utf-8")
    assert page == page_with(recorded_tables(), page)


def test_every_case_is_recorded_with_its_marks():
    for way, found in recorded().items():
        if way in ("with adapters", "without adapters"):
            assert found.keys() == CASES.keys(), f"run.py --record {way}"
            assert {name: marks(CASES[name], one) for name, (one, _) in found.items()} == {
                name: mark for name, (_, mark) in found.items()
            }


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(recorded().get("with adapters", ())))
def test_a_case_is_judged_as_it_is_recorded(name):
    assert judged(CASES[name], adapter=True) == recorded()["with adapters"][name][0]
