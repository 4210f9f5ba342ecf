"""The `needs` marker: absent tools are skipped, demanded ones are not, and typos are errors."""

import pytest

from places import ROOT

pytest_plugins = "pytester"


@pytest.fixture
def run_with(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run one test that needs `tool` on its own, with the real conftest and REGARD_REQUIRE."""

    def run(tool: str, required: str) -> pytest.RunResult:
        absent = '\nTOOLS["absent"] = Tool(lambda: False, "grow one")\n'
        absent += 'TOOLS["present"] = Tool(lambda: True, "look around")\n'
        pytester.makeconftest((ROOT / "tests/conftest.py").read_text("utf-8") + absent)
        pytester.makepyfile(
            f"import pytest\n@pytest.mark.needs({tool!r})\ndef test_one():\n    pass\n"
        )
        monkeypatch.setenv("REGARD_REQUIRE", required)
        return pytester.runpytest_subprocess("-rs", "--strict-markers")

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
