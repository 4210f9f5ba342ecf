"""`regard bench --compare`: what counts as a change, and which earlier runs are refused.

No test asserts a time: all of them are made up.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from commands import CliRunner
from regard.bench import command
from regard.bench.cases import case, grid
from regard.bench.compare import changes, check_comparable, notes, read_run
from regard.bench.machine import description
from regard.bench.measure import CaseResult, LibraryResult, Report, as_data
from regard.bench.tables import print_changes
from regard.cli import app
from regard.errors import ProblemError

ONE, OTHER = case("full", 1, 2, 5, 7, 4), case("masks", 1, 2, 8, 8, 4, mask="dense", unit="ms")
THREE = (1.0e-3, 1.1e-3, 1.2e-3)  # seconds per call in three rounds


def timed(*rounds: float) -> LibraryResult:
    return LibraryResult(float(np.median(rounds)), rounds, min(rounds), 9, 1, 1e-9)


def run_of(*results: CaseResult, **versions: str) -> Report:
    known = {"regard": "1", "numpy": "2", **versions}
    return Report("quick", description(1), None, known, {}, results)


def result(one: Any = ONE, regard: LibraryResult | None = None, **peers: Any) -> CaseResult:
    return CaseResult(one, 1000, 5, 1e-6, {"regard": regard or timed(*THREE), **peers})


def saved(folder: Path, report: Report, **machine: Any) -> str:
    data = as_data(report)
    data["machine"] |= machine
    (folder / "then.json").write_text(json.dumps(data))
    return str(folder / "then.json")


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ((1.0e-3, 1.1e-3, 1.2e-3), "same"),
        ((1.19e-3, 1.5e-3, 1.6e-3), "same"),  # its best round is within the earlier ones
        ((1.21e-3, 1.5e-3, 1.6e-3), "slower"),
        ((0.5e-3, 0.6e-3, 1.01e-3), "same"),
        ((0.5e-3, 0.6e-3, 0.99e-3), "faster"),
    ],
)
def test_a_change_counts_where_the_rounds_of_the_runs_lie_apart(now, verdict, tmp_path):
    earlier = read_run(saved(tmp_path, run_of(result())))
    (found,) = changes(earlier, run_of(result(regard=timed(*now))))
    np.testing.assert_equal(found.verdict, verdict)
    np.testing.assert_allclose(found.ratio, np.median(now) / 1.1e-3, rtol=1e-15)
    ratios = np.divide.outer(now, THREE)
    np.testing.assert_allclose([found.low, found.high], [ratios.min(), ratios.max()], rtol=1e-15)


def test_peers_of_the_same_version_tell_what_the_machine_did(tmp_path):
    then = run_of(result(numpy=timed(2.0), torch=timed(1.0), jax=timed(1.0)), torch="1", jax="1")
    now = run_of(result(numpy=timed(3.0), torch=timed(6.0), jax=timed(9.0)), torch="1", jax="2")
    (found,) = changes(read_run(saved(tmp_path, then)), now)
    np.testing.assert_allclose(found.peers, np.sqrt(1.5 * 6.0), rtol=1e-15)
    (alone,) = changes(read_run(saved(tmp_path, then)), run_of(result()))
    np.testing.assert_equal(alone.peers, None)


def test_a_case_without_an_equal_in_the_earlier_run_says_why(tmp_path):
    wrong = result(OTHER, LibraryResult(reason="wrong answer"))
    earlier = read_run(saved(tmp_path, run_of(result(), wrong)))
    now = [replace(result(), operations=999), result(OTHER), result(case("full", 1, 1, 3, 3, 4))]
    found = changes(earlier, run_of(*now))
    np.testing.assert_equal(
        [one.reason for one in found],
        ["other work in the earlier run", "not timed in both runs", "not in the earlier run"],
    )
    np.testing.assert_equal({(one.verdict, one.ratio) for one in found}, {("–", None)})


@pytest.mark.parametrize("name", ["cpu", "architecture", "system", "threads"])
def test_a_run_of_another_machine_is_refused_with_both_values(name, tmp_path):
    earlier = read_run(saved(tmp_path, run_of(result()), **{name: "another"}))
    here = description(1)
    with pytest.raises(ProblemError, match="was measured on another machine") as caught:
        check_comparable(earlier, here, [ONE])
    assert f"({name} 'another' then, {here[name]!r} now)" in str(caught.value)
    assert changes(earlier, run_of(result()))  # only the check refuses it


def test_a_run_of_other_cases_is_refused(tmp_path):
    earlier = read_run(saved(tmp_path, run_of(result())))
    check_comparable(earlier, description(1), [OTHER, ONE])
    with pytest.raises(ProblemError, match="has none of these cases; its first is 1,2,5,7,4"):
        check_comparable(earlier, description(1), [OTHER])


def test_what_else_differs_is_said(tmp_path):
    earlier = read_run(saved(tmp_path, run_of(result(), numpy="1.9"), target="\x1b[1mwide"))
    first, second = notes(earlier, run_of(result()))
    assert first.startswith("target was ")
    assert "\x1b" not in first
    np.testing.assert_equal(second, "numpy was 1.9 then and is 2 now.")


BROKEN = {
    "no JSON": ("{", "is not valid JSON"),
    "another JSON": ("{}", "KeyError 'machine'"),
    "a list": ("[]", "TypeError"),
    "no rounds": ('"rounds": []', "a time has no rounds"),
    "a round of zero": ('"rounds": [0.0]', "a time is 0.0"),
    "a round of text": ('"rounds": ["1"]', "a time is '1'"),
    "a number as rounds": ('"rounds": 1', "TypeError"),
    "an earlier form": ('"pauses": []', "KeyError 'rounds'"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_saved_run_is_refused_by_name(what, tmp_path):
    content, said = BROKEN[what]
    if content.startswith('"'):
        spelled = '"rounds": [1.0, 1.0]'
        whole = Path(saved(tmp_path, run_of(result(regard=timed(1.0, 1.0))))).read_text()
        assert spelled in whole
        content = whole.replace(spelled, content)
    (tmp_path / "then.json").write_text(content)
    with pytest.raises(ProblemError, match=said) as caught:
        read_run(str(tmp_path / "then.json"))
    assert str(caught.value).startswith(str(tmp_path / "then.json"))
    assert "\n" not in str(caught.value)


def test_the_table_has_both_times_the_noise_the_peers_and_the_verdict(tmp_path):
    then = run_of(result(numpy=timed(2.0)), result(OTHER))
    now = run_of(result(regard=timed(2e-3, 3e-3), numpy=timed(2.2)), replace(result(), case=OTHER))
    earlier = read_run(saved(tmp_path, then))
    console = Console(width=140, file=None, color_system=None)
    with console.capture() as capture:
        print_changes(earlier, changes(earlier, now), ["numpy was older."], console)
    lines = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert "1,2,5,7,4 GF/s 0.000909 0.0004 2.27 1.67 … 3.00 1.10 slower" in lines
    assert "dense 1,2,8,8,4 ms 1.1 1.1 1.00 0.83 … 1.20 – same" in lines
    assert any(line.startswith("1 slower, 0 faster, 1 the same") for line in lines)
    np.testing.assert_equal(lines[-1], "numpy was older.")


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """The command with a run that is made up, in this process and in an empty folder."""
    monkeypatch.chdir(tmp_path)
    one = grid("quick")[0]
    then, now = result(one), result(one, timed(1.3e-3, 1.4e-3, 1.5e-3))
    monkeypatch.setattr(command, "measure_cases", lambda *_, **__: run_of(now))
    saved(tmp_path, run_of(then))

    def call(*words: str) -> Any:
        words = "bench", "--threads", "1", "--compare", "then.json", *words
        return CliRunner().invoke(app, words, env={"COLUMNS": "140"})

    return call


@pytest.mark.parametrize(
    ("words", "code"), [([], 0), (["--fail-above", "9"], 0), (["--fail-above", "8"], 1)]
)
def test_the_exit_code_is_one_where_a_case_is_slower_by_more_in_every_round(compared, words, code):
    done = compared(*words)  # 1.3 against at most 1.2: 8.3 % at least
    np.testing.assert_equal(done.exit_code, code)
    assert "1 slower, 0 faster" in done.stdout
    np.testing.assert_equal("Slower by more than 8%: 1,1,3,3,4" in done.stdout, code == 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--json", "then.json", "--force"], "--json would replace the input then.json"),
        (["--fail-above", "-1"], "--fail-above is -1.0; it must be a percentage, 0 or more"),
        (["--fail-above", "nan"], "--fail-above is nan; it must be a percentage, 0 or more"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(compared, words, message):
    before = Path("then.json").read_bytes()
    done = compared(*words)
    np.testing.assert_equal((done.exit_code, done.stdout), (2, ""))
    assert message in done.stderr
    np.testing.assert_equal(Path("then.json").read_bytes(), before)


def test_a_limit_without_a_comparison_is_refused():
    done = CliRunner().invoke(app, ["bench", "--fail-above", "5"])
    np.testing.assert_equal(done.exit_code, 2)
    assert "--fail-above goes with --compare only" in done.stderr
