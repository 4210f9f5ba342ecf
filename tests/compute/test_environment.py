"""Environment variables: which are read, which values are refused, and when that is said."""

from __future__ import annotations

import functools
import re
import subprocess
from collections.abc import Iterable

import pytest

from fresh_process import COMMAND, many
from places import ROOT
from regard.compute import native

SOURCES = ROOT / "src" / "regard"
PAGE = (ROOT / "docs" / "environment.md").read_text("utf-8")
COMMANDS = {
    "attention": ["q.npy", "q.npy", "q.npy", "-o", "out.npy"],
    "bench": ["--against", "numpy"],
    "diagnose": ["file.py:function"],
    "explain": ["causal-mask"],
    "generate": ["model", "--text", "a"],
    "mistakes": ["no_scale"],
    "tour": [],
    "worksheet": ["causal-mask", "--html", "sheet.html"],
}

NO_THREADS = ["abc", "0", "00", "-1", "+3", "1.5", "1e3", " ", " 3", "3 ", "3\n", "0x3", "1_0"]
NO_THREADS += ["٣", "²", "３", "Ⅳ", "nan", "inf", "3,4", "\x1b[31m", "9" * 5000 + "x"]
THREADS = {"1": 1, "3": 3, "007": 7, "0000000000003": 3, "256": 256, "257": 256}
THREADS |= {"3000000000": 256, "9" * 20: 256, "9" * 5000: 256}
NO_SPIN = ["abc", "-1", "1.5", "٣"]
SPINS = {"": native.SPIN, "0": 0, "007": 7, "1000": 1000, "1001": 1000, "9" * 5000: 1000}
NO_TARGETS = ["xyz", "sse9", "AVX2", "baseline ", "baseline,avx2", "\x1b[31m", "x" * 5000]


NONE = {"REGARD_NUM_THREADS": NO_THREADS, "REGARD_SPIN_US": NO_SPIN, "REGARD_TARGET": NO_TARGETS}


def commands(
    lines: Iterable[Iterable[str]], **environment: str
) -> list[subprocess.CompletedProcess[str]]:
    return many([((COMMAND, "regard", *words), environment) for words in lines])


def in_short(value: str) -> str:
    return ascii(value[:20])


# values -----------------------------------------------------------------------------------------

CALLS = """
import sys
import numpy as np
import regard
x = np.ones((2, 3, 4))
def call(**options):
    try:
        regard.attention(x, x, x, **options)
    except regard.OptionError as error:
        assert str(error).startswith(f"{sys.argv[0]} is "), error
        assert len(str(error)) < 300 and str(error).isprintable(), error
        return "refused"
    return "answered"
cache = regard.KVCache()
cache.append(x, x)
print(call(), call(return_lse=True), call(threads=2), call(kernel="reference"))
regard.set_threads(2)
print(call(), call(return_lse=True))
regard.set_threads(None)
print(call(), call(return_lse=True))
x = x.astype(np.float32)[:, :1]
print(call(), call(kernel="fused"))
"""


@functools.cache
def called(variable: str) -> dict[str, subprocess.CompletedProcess[str]]:
    """What the calls above have answered for each value that the variable cannot have."""
    ended = many([((CALLS, variable), {variable: value}) for value in NONE[variable]])
    return dict(zip(NONE[variable], ended, strict=True))


@pytest.mark.needs("fused")
@pytest.mark.parametrize(
    ("variable", "given"),
    [(one, given) for one in sorted(native.OF_THREADS) for given in NONE[one]],
    ids=in_short,
)
def test_a_number_of_threads_that_is_none_is_refused_by_the_first_call_that_needs_it(
    variable, given
):
    done = called(variable)[given]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused refused answered answered",
        "answered answered",
        "refused refused",
        "refused refused",
    ]


@pytest.mark.needs("fused")
@pytest.mark.parametrize("given", NO_TARGETS, ids=in_short)
def test_a_target_that_is_none_is_refused_by_the_first_call_that_needs_it(given):
    done = called("REGARD_TARGET")[given]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "refused refused refused answered",
        "refused refused",
        "refused refused",
        "refused refused",
    ]


def test_a_number_of_threads_is_read():
    program = "from regard.compute import native; print(native.default_threads())"
    ended = many([((program,), {"REGARD_NUM_THREADS": given}) for given in THREADS])
    assert [done.stderr for done in ended] == [""] * len(THREADS)
    assert {given: int(done.stdout) for given, done in zip(THREADS, ended, strict=True)} == THREADS


def test_how_long_threads_wait_for_a_call_is_read():
    program = "from regard.compute import native; print(native.spin)"
    ended = many([((program,), {"REGARD_SPIN_US": given}) for given in SPINS])
    assert {given: int(done.stdout) for given, done in zip(SPINS, ended, strict=True)} == SPINS


def test_an_empty_value_is_none():
    program = "from regard.compute import native; print(native.default_threads(), native.target)"
    empty = dict.fromkeys([*NONE, "REGARD_REQUIRE_FUSED"], "")
    one, other = many([((program,), empty), ((program,), {})])
    assert one.stdout == other.stdout != ""


@pytest.mark.needs("fused")
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("REGARD_NUM_THREADS", "abc", "1 or more, in the digits 0 to 9 alone"),
        ("REGARD_SPIN_US", "-1", "0 or more, in the digits 0 to 9 alone"),
        ("REGARD_TARGET", "xyz", ", ".join(t for t, runs in native.targets().items() if runs)),
    ],
)
def test_commands_say_in_one_line_what_is_refused(name, value, allowed):
    line = f"{name} is '{value}'"
    words = [["info", "--verify"], *([name, *rest] for name, rest in COMMANDS.items())]
    lines = [["info"], ["explain", "--help"], *words]
    info, helped, *refused = commands(lines, **{name: value})
    assert (info.returncode, info.stderr) == (0, "")
    assert re.search(rf"^ *(fused|threads) .*{line}.*{allowed}$", info.stdout, re.MULTILINE)
    assert helped.returncode == 0
    for done in refused:
        assert done.returncode == 2
        assert re.fullmatch(rf"regard: error: {line}.*{allowed}\n", done.stderr)


def test_no_command_is_left_out():
    listed = commands([["--help"]])[0].stdout.partition("Commands:\n")[2]
    named = {line.split()[0] for line in listed.partition("\n\n")[0].splitlines()}
    assert named == {"info", "examples", *COMMANDS}  # the first two compute nothing


def test_what_a_terminal_cannot_be_counts_as_not_said():
    words = (COMMAND, "regard", "explain", "causal-mask", "--step", "weights")
    values = ("", "²", "٣", "abc", "-5", "999999999", "9" * 5000, "1;²")
    told = [dict.fromkeys(("COLUMNS", "LINES", "COLORFGBG"), value) for value in values]
    expected, *others = many([(words, one | {"FORCE_COLOR": "1"}) for one in told])
    assert (expected.returncode, expected.stderr) == (0, "")
    for value, done in zip(values[1:], others, strict=True):
        assert (done.returncode, done.stdout, done.stderr) == (0, expected.stdout, ""), value


# the page ---------------------------------------------------------------------------------------


def named_on_the_page() -> set[str]:
    return set(re.findall(r"`([A-Z][A-Z0-9_]{3,})(?:=\d)?`", PAGE))


def test_the_page_names_every_variable_that_the_sources_read():
    read = set()
    for file in sorted(SOURCES.rglob("*.py")):
        text = file.read_text("utf-8")
        if not re.search(r"\benviron\b|getenv", text):
            continue
        names = re.findall(r'"([A-Z][A-Z0-9_]{3,})"', text)
        assert names, f"{file} reads the environment, and this test does not see what"
        read |= set(names)
    for file in sorted((SOURCES / "compute" / "kernels" / "cpp").iterdir()):
        assert not re.search(r"\b(secure_)?getenv\b|\benviron\b", file.read_text("utf-8")), file
    build = (ROOT / "CMakeLists.txt").read_text("utf-8")
    read |= set(re.findall(r"ENV\{(\w+)\}", build))
    read |= set(re.findall(r"\benv\.(\w+)", (ROOT / "pyproject.toml").read_text("utf-8")))
    read |= {name for name in re.findall(r"\bREGARD_[A-Z_]+\b", lines_that_read())}
    assert {"REGARD_TARGET", "REGARD_REQUIRE", "NO_COLOR", "COLUMNS", "OMP_NUM_THREADS"} <= read
    assert read - named_on_the_page() == set()


def test_the_page_names_no_variable_of_regard_that_nothing_reads():
    own = {name for name in named_on_the_page() if name.startswith("REGARD_")}
    sources = "".join(file.read_text("utf-8") for file in sorted(SOURCES.rglob("*.py")))
    assert own <= set(re.findall(r"\bREGARD_[A-Z_]+\b", sources + lines_that_read()))


def lines_that_read() -> str:
    """The lines of the tests in which a variable is read."""
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tests").rglob("*.mjs")]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
    return "\n".join(line for line in lines if re.search(r"environ\.get\(|process\.env\.", line))
