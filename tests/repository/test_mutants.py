"""The list of faults is about the code as it is; `nox -s mutants` puts them in."""

from __future__ import annotations

import re

import pytest

from mutants import MUTANTS, ROOT, Mutant, Outcome, noticed, place_of

each_mutant = pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda one: f"{one.promise}: {one.fault}"
)


def test_every_promise_has_a_fault_that_breaks_it() -> None:
    assert {one.promise for one in MUTANTS} == {f"G{number}" for number in range(1, 16)}


@each_mutant
def test_a_fault_changes_one_place_in_the_code(mutant: Mutant) -> None:
    text = (ROOT / "src" / "regard" / mutant.file).read_text("utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old


@each_mutant
def test_the_test_that_must_notice_a_fault_exists(mutant: Mutant) -> None:
    file, _, name = place_of(mutant.test).partition("::")
    text = (ROOT / file).read_text("utf-8")
    assert len(re.findall(rf"^def {name}\(", text, re.MULTILINE)) == 1


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome([], {"test[avx512]": "wrong"}), True),
        (Outcome(["test[baseline]"], {"test[avx512]": "wrong"}), True),
        (Outcome(["test[avx512]"], {"test[baseline]": "wrong"}), False),
        (Outcome([], {"test[baseline]": "wrong"}), True),
        (Outcome(["test[1]"], {"test[2]": "wrong"}), True),
        (Outcome(["test[avx512]"], {}), False),
        (Outcome([], {}), False),
        (Outcome([], {}, "the process ends by signal 11"), True),
    ],
)
def test_a_fault_is_noticed_if_the_test_fails_on_the_best_target(outcome, expected) -> None:
    assert noticed(outcome, ["avx512", "baseline"]) == expected
