"""The command line as a shell meets it: what is printed where, exit codes, files, bad input."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.filesize import decimal

import regard
from commands import CliRunner
from fresh_process import COMMAND, many
from regard.boundary.parse import parse_size
from regard.cli import app
from regard.cli.explain import GROUPS, explain
from regard.cli.on_disk import PIECE_CELLS, Job
from regard.problems.files import example_names, example_text, load_problem

FINE, DIFFERS, BAD, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
PATIENCE = 60  # seconds that a process may take to do what it must do at once

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals, pipes and FIFOs are POSIX")

SMALL = """
tokens = ["a", "b"]
embeddings = [[1.0, 0.0], [0.0, 2.0]]
[weights]
W_q = [[1.0, 0.0], [0.0, 1.0]]
W_k = [[1.0, 0.0], [0.0, 1.0]]
W_v = [[1.0, 0.0], [0.0, 1.0]]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "COLORFGBG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def call(*words: object, stdin: str | bytes | None = None, columns: int = 100) -> Any:
    """The command in this process: .exit_code, .stdout, .stderr."""
    result = CliRunner().invoke(
        app, [str(word) for word in words], input=stdin, env={"COLUMNS": str(columns)}
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def succeed(*words: object, **kind: Any) -> str:
    result = call(*words, **kind)
    np.testing.assert_equal((result.exit_code, result.stderr), (FINE, ""))
    return str(result.stdout)


def refuse(*words: object, **kind: Any) -> str:
    """The one line of an error."""
    result = call(*words, **kind)
    np.testing.assert_equal((result.exit_code, result.stdout), (BAD, ""), err_msg=result.stderr)
    (line, end) = result.stderr.split("\n")
    assert line.startswith("regard: error: ")
    np.testing.assert_equal(end, "")
    return line.removeprefix("regard: error: ")


def process(
    *words: object, start: Sequence[str] = ("-m", "regard"), **more: Any
) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, *start, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **more,
    )


def strict(text: str) -> Any:
    """JSON by the standard, without NaN and Infinity."""

    def refused(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refused)


# --- what there is -------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_is_printed(option: str) -> None:
    np.testing.assert_equal(succeed(option), f"regard {regard.__version__}\n")


def test_the_version_needs_nothing_that_only_showing_needs() -> None:
    program = (
        "import sys; sys.argv = ['regard', '--version']\n"
        "from regard.cli import main\n"
        "try: main()\n"
        "except SystemExit: print(*(n for n in ('rich.console', 'jinja2') if n in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    np.testing.assert_equal(done.stdout.decode().split("\n")[1:], ["", ""])


def test_without_a_command_the_help_is_printed() -> None:
    text = succeed()
    for command in ("explain", "attention", "info"):
        assert command in text


@pytest.mark.parametrize("columns", [40, 80])
def test_the_help_cuts_no_summary_off(columns: int) -> None:
    summaries = [one.short_help for one in app.registered_commands]
    text = " ".join(succeed("--help", columns=columns).split())
    np.testing.assert_equal([one for one in summaries if not one or one not in text], [])


@pytest.mark.parametrize("command", ["explain", "attention", "info"])
def test_help_is_ascii_and_shows_examples(command: str) -> None:
    text = succeed(command, "--help")
    assert text.isascii()
    if command != "info":
        assert len(re.findall(rf"^    regard {command} ", text, re.M)) >= 2


@pytest.mark.parametrize("command", ["explain", "examples", "mistakes"])
def test_the_examples_in_the_help_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    lines = re.findall(rf"^    regard ({command}\b[^>\n]*)", succeed(command, "--help"), re.M)
    assert len(lines) >= 2
    for line in lines:
        assert call(*shlex.split(line)).exit_code == FINE


def test_the_options_of_explain_are_in_groups() -> None:
    names = [name for group in GROUPS.values() for name in group]
    np.testing.assert_equal(sorted([*names, "source"]), sorted(signature(explain).parameters))
    text = succeed("explain", "--help")
    assert all(f"\n{heading}:\n" in text for heading in GROUPS)


def test_the_examples_are_listed_with_one_line_each_smallest_first() -> None:
    lines = succeed("examples").split("\n\n")[0].split("\n")
    names = [line.split()[0] for line in lines]
    np.testing.assert_equal(tuple(sorted(names)), example_names())
    explained = [regard.explain(load_problem(name)) for name in names]
    sizes = [sum(step.value.size for step in one.steps.values()) for one in explained]
    np.testing.assert_equal(sizes, sorted(sizes))
    for name, line in zip(names, lines, strict=True):
        assert example_text(name).startswith(f"# {line.removeprefix(name).strip()}\n")
        assert len(line) <= 80


def test_a_narrow_terminal_breaks_the_list_of_examples_between_words() -> None:
    narrow, wide = succeed("examples", columns=30), succeed("examples")
    assert max(map(len, narrow.split("\n"))) <= 30
    np.testing.assert_equal(narrow.split(), wide.split())


def test_what_the_list_of_examples_proposes_runs(tmp_path: Path) -> None:
    proposed = re.findall("regard (explain|examples) ([a-z-]+)", succeed("examples"))
    np.testing.assert_equal(len(proposed), 3)
    for words in proposed:
        succeed(*words)
    (tmp_path / "mine.toml").write_text(succeed("examples", "she-likes-coffee"), "utf-8")
    succeed("explain", "mine.toml")


def test_an_example_that_is_not_there_is_answered_with_the_nearest() -> None:
    assert "did you mean she-likes-coffee?" in refuse("examples", "she")
    assert "did you mean causal-mask?" in refuse("explain", "Casual-Mask")


def test_info_lists_the_kernels() -> None:
    text = succeed("info")
    for word in ("regard", "numpy", "reference", "threads", "bfloat16"):
        assert word in text


# --- explain -------------------------------------------------------------------------------------


def test_a_file_is_explained_from_top_to_bottom(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    text = succeed("explain", "small.toml")
    for step in ("embeddings", "W_q", "queries", "scores", "scaled", "weights", "output"):
        assert re.search(rf"^{step}   ", text, re.M)
    assert text.rstrip().endswith("Weights say where this head reads, not why a model answered.")


def test_an_example_is_explained_and_its_expectations_are_counted() -> None:
    text = succeed("explain", "she-likes-coffee")
    count = len(regard.load_problem("she-likes-coffee").expect)
    np.testing.assert_equal(text.rstrip().split("\n")[-1], f"All {count} expectations hold.")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_standard_input_is_read_and_its_format_guessed(suffix: str, tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    regard.save_problem(regard.load_problem("small.toml"), tmp_path / f"saved.{suffix}")
    text = (tmp_path / f"saved.{suffix}").read_text()
    expected = succeed("explain", "small.toml")
    np.testing.assert_equal(succeed("explain", "-", stdin=text), expected)
    np.testing.assert_equal(succeed("explain", "-", "--format", suffix, stdin=text), expected)


def test_only_the_named_steps_are_shown() -> None:
    text = succeed("explain", "the-cat-sat", "--step", "weights", "--step", "lse")
    assert "weights   P = Y / z" in text
    assert "lse   lse = m + ln z" in text
    assert "scores   A" not in text


def test_a_number_is_traced_by_labels_and_by_positions() -> None:
    by_label = succeed("explain", "she-likes-coffee", "--why", "output", "she", "2")
    assert by_label.startswith("output   O = P·V\n  O[she, 2] = 0.50530294\n")
    np.testing.assert_equal(
        succeed("explain", "she-likes-coffee", "--why", "output", "0", "2"), by_label
    )


@pytest.mark.parametrize(
    ("words", "cell"),
    [
        (["row_sums", "she", "-"], "z[she] = 5.67359329"),
        (["row_sums", "she"], "z[she] = 5.67359329"),
        (["scale", "-", "-"], "      = 0.5"),
        (["scale"], "      = 0.5"),
    ],
)
def test_an_axis_that_a_step_does_not_have_may_be_left_out(words: list[str], cell: str) -> None:
    for line in (["she-likes-coffee", "--why", *words], ["--why", *words, "--digits=8"]):
        source = [] if line[0] != "--why" else ["she-likes-coffee"]
        text = succeed("explain", *source, *line)
        assert f"\n  {cell}\n" in text


def test_a_label_that_is_a_dash_can_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "dash.toml").write_text(SMALL.replace('"b"', '"-"'))
    assert "A[a, -] = 0" in succeed("explain", "dash.toml", "--why", "scores", "a", "-")
    assert "z[-] = " in succeed("explain", "dash.toml", "--why", "row_sums", "-", "-")


def test_a_label_that_looks_like_a_number_is_a_label_first(tmp_path: Path) -> None:
    (tmp_path / "numbers.toml").write_text(SMALL.replace('["a", "b"]', '["1", "0"]'))
    assert "X[1, 0] = 1\n" in succeed("explain", "numbers.toml", "--why", "embeddings", "1", "0")


def test_the_head_is_chosen(tmp_path: Path) -> None:
    words = ("explain", "--text", "a b c", "--heads", "2", "--dim", "4")
    assert "Head 0 of 2" in succeed(*words, "--step", "weights")
    assert "Head 1 of 2" in succeed(*words, "--step", "weights", "--head", "1")
    one = succeed(*words, "--why", "output", "a", "0", "--head", "1")
    assert "O[head 1, a, 0]" in one


def test_words_are_explained_with_random_vectors_that_can_be_saved(tmp_path: Path) -> None:
    result = call(
        "explain", "--text", "the cat the", "--dim", "6", "--seed", "3", "--save", "p.toml"
    )
    np.testing.assert_equal(result.exit_code, FINE)
    assert "Random, not learned" in result.stdout
    assert "the@0" in result.stdout
    np.testing.assert_equal(result.stderr, "saved p.toml\n")
    again = succeed("explain", "p.toml")
    np.testing.assert_equal(again, result.stdout)
    np.testing.assert_equal(regard.load_problem("p.toml").random.seed, 3)
    other = succeed("explain", "--text", "the cat the", "--dim", "6", "--seed", "4")
    assert other != again


@pytest.mark.parametrize(
    "asked",
    [
        (),
        ("--step", "scores"),
        ("--step", "scores", "--step", "weights", "--digits", "2"),
        ("--statistics",),
        ("--why", "scores", "I", "tea"),
        ("--why", "scores", "I", "tea", "--step", "scores", "--statistics"),
        ("--why", "scores", "I", "tea", "--statistics"),
    ],
    ids=" ".join,
)
def test_whatever_is_shown_of_words_says_once_that_their_vectors_are_random(
    asked: tuple[str, ...],
) -> None:
    text = succeed("explain", "--text", "I drink tea", *asked)
    assert text.count("Random, not learned: embeddings, W_q, W_k and W_v") == 1
    lines = text.splitlines()
    assert all(line or after for line, after in itertools.pairwise(lines))


def test_the_gradients_of_random_words_say_so_too(tmp_path: Path) -> None:
    np.save(tmp_path / "target.npy", np.zeros((3, 4)))
    words = ("explain", "--text", "I drink tea", "--target", "target.npy")
    assert "Random, not learned: embeddings" in succeed(*words, "--gradients")
    assert "Random" not in succeed("explain", "coffee-target", "--gradients")


def test_causal_hides_what_comes_later() -> None:
    text = succeed("explain", "--text", "a b", "--causal", "--step", "weights")
    assert re.search(r"^  a │ +1 +causal$", text, re.M)


def test_statistics_say_why_the_scale_is_there() -> None:
    text = " ".join(succeed("explain", "causal-mask", "--statistics").split())
    assert "here it is 2.4433005. Dividing by √8 brings it to 0.30541256." in text


def test_steps_a_derivation_and_statistics_can_be_had_together() -> None:
    text = succeed(
        *("explain", "the-cat-sat", "--step", "scores", "--why", "scores", "cat", "sat"),
        "--statistics",
    )
    places = [text.index(part) for part in ("scores   A = ", "A[cat, sat]", "Statistics")]
    np.testing.assert_equal(places, sorted(places))


def test_a_blank_line_stands_between_a_table_and_a_derivation() -> None:
    text = succeed("explain", "the-cat-sat", "--step", "lse", "--why", "scores", "cat", "sat")
    assert "\n\nscores   A = Q·Kᵀ\n  A[cat, sat]" in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.toml", "[target]\nlikes = [0, 0, 0, 1]\nshe = [1, 0, 0, 0]\ncoffee = [0, 1, 0, 0]\n"),
        ("t.toml", "target = [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]\n"),
        ("t.json", "[[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0]]"),
        ("t.npy", None),
        ("t.npz", None),
    ],
)
def test_a_target_comes_from_a_file(name: str, text: str | None) -> None:
    target = np.eye(4)[[0, 3, 1]]
    if text is not None:
        Path(name).write_text(text)
    elif name == "t.npy":
        np.save(name, target)
    else:
        np.savez(name, target=target)
    asked = ("explain", "she-likes-coffee", "--target", name, "--gradients")
    shown = succeed(*asked)
    output = regard.explain(regard.load_problem("she-likes-coffee")).output
    assert f"  L = {np.square(output - target).sum() / 2:.8f}".rstrip("0") in shown
    assert "d_queries   dQ = dA·K   3 queries × 4 numbers" in shown
    assert "embeddings   given" not in shown
    steps = [step["name"] for step in json.loads(succeed(*asked, "--json"))["steps"]]
    np.testing.assert_equal((steps[0], steps[-1]), ("target", "d_embeddings"))
    why = succeed(*asked[:-1], "--why", "d_scores", "she", "coffee")
    assert "target[she, " in why
    call(*asked[:-1], "--save", "saved.npz")
    np.testing.assert_array_equal(regard.load_problem("saved.npz").target, target)


def test_an_example_with_a_target_checks_its_gradients() -> None:
    text = succeed("explain", "look-back")
    assert "Loss" in text
    assert "Gradients" in text
    assert "All 5 expectations hold." in text
    Path("wrong.toml").write_text(
        SMALL + "[target]\na = [0, 0]\nb = [0, 0]\n[expect.loss]\nvalue = 5.0\n"
    )
    result = call("explain", "wrong.toml", "--step", "loss")
    np.testing.assert_equal(result.exit_code, DIFFERS)
    assert "loss differs" in result.stdout


def test_fewer_digits_can_be_asked_for() -> None:
    text = succeed("explain", "the-cat-sat", "--step", "weights", "--digits", "2")
    assert not re.search(r"\d\.\d{3}", text)


# --- expectations --------------------------------------------------------------------------------


def wrong(tmp_path: Path) -> str:
    (tmp_path / "wrong.toml").write_text(
        SMALL + "[[expect.scores]]\nat = ['a', 'b']\nvalue = 0.5\n[[expect.scores]]\n"
        "at = ['b', 'b']\nvalue = 4.0\n"
    )
    return "wrong.toml"


def test_an_expectation_that_fails_is_shown_with_its_derivation(tmp_path: Path) -> None:
    result = call("explain", wrong(tmp_path))
    np.testing.assert_equal((result.exit_code, result.stderr), (DIFFERS, ""))
    assert "scores[a, b] differs\n  expected 0.5\n  got      0.0\n" in result.stdout
    assert result.stdout.endswith("1 of 2 expectations does not hold.\n")


def test_a_failed_expectation_fails_json_too(tmp_path: Path) -> None:
    result = call("explain", wrong(tmp_path), "--json")
    np.testing.assert_equal(result.exit_code, DIFFERS)
    expectations = strict(result.stdout)["expectations"]
    np.testing.assert_equal(expectations["count"], 2)
    (mismatch,) = expectations["mismatches"]
    np.testing.assert_equal((mismatch["expected"], mismatch["got"]), (0.5, 0.0))


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        ("[expect.masked]\nvalue = [[0, 0], [0, 0]]", "nothing hides a key"),
        ("[expect.scores]\nvalue = [[0, 0, 0]]", "has shape (1, 3)"),
        ("[expect.scores]\nat = ['c', 'a']\nvalue = 1", "c is none of the query rows"),
    ],
)
def test_an_expectation_that_cannot_be_checked_is_named_after_the_explanation(
    expectation: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "plain.toml").write_text(SMALL)
    (tmp_path / "p.toml").write_text(SMALL + expectation)
    result = call("explain", "p.toml")
    np.testing.assert_equal(
        (result.exit_code, result.stdout), (BAD, succeed("explain", "plain.toml"))
    )
    step = expectation[1:].split("]")[0]
    assert result.stderr.startswith(f"regard: error: p.toml: {step} cannot be checked: ")
    assert message in result.stderr
    assert message in refuse("explain", "p.toml", "--json")


# --- json ----------------------------------------------------------------------------------------


def test_json_is_strict_and_complete() -> None:
    data = strict(succeed("explain", "causal-mask", "--json"))
    steps = {step["name"]: step for step in data["steps"]}
    weights = regard.explain(regard.load_problem("causal-mask")).steps["weights"].value
    np.testing.assert_array_equal(steps["weights"]["value"], weights)
    np.testing.assert_equal(steps["masked"]["value"][0][3], "-inf")
    np.testing.assert_equal(data["expectations"]["mismatches"], [])
    assert "why" not in data
    assert "statistics" not in data


def test_json_has_the_derivation_and_the_statistics_if_they_are_asked_for() -> None:
    text = succeed(
        *("explain", "the-cat-sat", "--json", "--step", "output", "--statistics"),
        *("--why", "output", "cat", "1"),
    )
    data = strict(text)
    np.testing.assert_equal([step["name"] for step in data["steps"]], ["output"])
    first = data["why"][0]
    np.testing.assert_equal((first["step"], first["labels"]), ("output", ["cat", "1"]))
    np.testing.assert_allclose(
        sum(term["value"] for term in first["terms"]), first["value"], rtol=1e-14
    )
    np.testing.assert_equal(eval(first["numpy"], {"np": np}), first["value"])
    np.testing.assert_equal(len(data["statistics"]["rows"]["entropy"]), 3)
    assert data["statistics"]["steps"]["scores"]["variance"] > 0


def test_json_writes_what_json_has_no_number_for_as_a_string(tmp_path: Path) -> None:
    (tmp_path / "nan.json").write_text(
        '{"queries": [["nan", 1]], "keys": [["inf", 1]], "values": [[1]]}'
    )
    words = ("--step", "queries", "--statistics", "--why", "scores", "0", "0")
    text = succeed("explain", "nan.json", "--json", *words)
    data = strict(text)
    np.testing.assert_equal(data["steps"][0]["value"], [["nan", 1.0]])
    np.testing.assert_equal(data["why"][0]["value"], "nan")
    np.testing.assert_equal(data["statistics"]["rows"]["entropy"], ["nan"])


def test_json_is_ascii_whatever_the_labels(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SMALL.replace('"a"', '"\\u202e日"'), encoding="utf-8")
    text = succeed("explain", "p.toml", "--json")
    assert text.isascii()
    np.testing.assert_equal(strict(text)["steps"][0]["row_labels"][0], "\u202e日")


# --- streams -------------------------------------------------------------------------------------


def test_a_width_of_zero_is_one_that_nobody_knows():
    for words in (["explain", "causal-mask"], ["explain", "causal-mask", "--statistics"]):
        assert succeed(*words, columns=0) == succeed(*words, columns=80)


@pytest.mark.parametrize("columns", [60, 120])
def test_the_width_is_that_of_the_terminal(columns: int) -> None:
    text = succeed("explain", "causal-mask", columns=columns)
    widest = max(map(len, text.split("\n")))
    np.testing.assert_array_less(columns - 21, widest)
    np.testing.assert_array_less(widest, columns + 1)


def test_a_pipe_gets_no_escapes_and_no_color_wins_over_force_color() -> None:
    assert "\x1b" not in succeed("explain", "causal-mask")
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    for extra, escapes in (({}, True), ({"NO_COLOR": "1"}, False)):
        child = process("explain", "causal-mask", env={**environment, **extra})
        out, _ = child.communicate(timeout=PATIENCE)
        np.testing.assert_equal(b"\x1b[" in out, escapes)


ONE_AFTER_ANOTHER = """
import json, sys
from regard.__main__ import main
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code or 0)
"""


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(SMALL.replace('"a"', '"日本"'), encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"}
    commands = (
        ["explain", "p.toml", "--statistics"],
        ["explain", "p.toml"],
        ["explain", "p.toml", "--why", "output", "0", "0"],
        ["explain", "--help"],
        ["attention", "--help"],
        ["info"],
    )
    child = process(json.dumps(commands), start=["-c", ONE_AFTER_ANOTHER], env=environment)
    out, error = child.communicate(timeout=PATIENCE)
    np.testing.assert_equal((child.returncode, error), (FINE, b""))
    assert out.isascii()
    np.testing.assert_equal(out.count(b"ended with 0\n"), len(commands))


@POSIX
@pytest.mark.parametrize(
    ("words", "streams", "code", "message"),
    [
        ("explain she-likes-coffee", ">&-", FINE, ""),
        ("info", ">&-", FINE, ""),
        ("explain nowhere.toml", "2>&-", BAD, ""),
        (
            "explain -",
            "<&-",
            BAD,
            "regard: error: standard input is closed; give a file or an example\n",
        ),
    ],
)
def test_closed_streams_are_no_surprise(words: str, streams: str, code: int, message: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m regard {words} {streams}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, timeout=PATIENCE, check=False)
    np.testing.assert_equal((done.returncode, done.stdout.decode()), (code, ""))
    np.testing.assert_equal(done.stderr.decode(), message)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
@pytest.mark.parametrize("words", ["--version", "--help", "info", "explain the-cat-sat"])
def test_a_full_disk_is_one_line(words: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "regard", *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            check=False,
        )
    np.testing.assert_equal(
        (done.returncode, done.stderr.decode()),
        (BAD, "regard: error: No space left on device\n"),
    )


def test_an_interrupt_while_the_command_line_is_imported_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    child = process("info", env={**os.environ, "PYTHONPATH": path})
    out, error = child.communicate(timeout=PATIENCE)
    np.testing.assert_equal((child.returncode, out, error), (INTERRUPTED, b"", b""))


@POSIX
def test_a_reader_that_stops_reading_ends_it_quietly() -> None:
    for words in ("explain the-cat-sat", "explain the-cat-sat --json", "info", "--help"):
        child = process(*words.split())
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()  # long before anything is written
        np.testing.assert_equal(child.stderr.read(), b"")
        np.testing.assert_equal(child.wait(PATIENCE), PIPE_CLOSED)
        child.stderr.close()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.toml"], "nowhere.toml: cannot be read: No such file"),
        (["."], "a file ends in"),
        (["folder.toml"], "is a directory"),
        (["she-likes-tea"], "did you mean she-likes-coffee"),
        (["broken.toml"], "not valid TOML"),
        ([], "explain needs a problem"),
        (["she-likes-coffee", "--text", "a"], "not both"),
        (["--text", "  "], "--text has no words"),
        (["--text", "a", "--dim", "0"], "--dim is 0"),
        (["--text", "a", "--heads", "3"], "--heads is 3 but --dim is 4"),
        (["--text", "a", "--seed", "-1"], "seed"),
        (["the-cat-sat", "--seed", "1"], "--seed goes with --text only"),
        (["the-cat-sat", "--causal"], "--causal goes with --text only"),
        (["the-cat-sat", "--format", "json"], "--format goes with standard input only"),
        (["-", "--format", "yaml"], "it must be toml or json"),
        (["the-cat-sat", "--step", "wieghts"], "did you mean weights"),
        (["the-cat-sat", "--step", "masked"], "nothing hides a key"),
        (["the-cat-sat", "--head", "1"], "there is one head"),
        (["the-cat-sat", "--why", "wieghts", "a", "b"], "did you mean weights"),
        (["the-cat-sat", "--why", "output", "dog", "0"], "dog is none of the query rows"),
        (["the-cat-sat", "--why", "output", "cat", "4"], "there is no 4"),
        (["the-cat-sat", "--why", "output", "cat"], "needs 2 indices"),
        (["the-cat-sat", "--why", "row_sums", "cat", "0"], "needs 1 index"),
        (["the-cat-sat", "--why"], "--why needs a step"),
        (["the-cat-sat", "--why=scale"], "--why needs a step"),
        (["the-cat-sat", "--why", "--statistics"], "--why needs a step"),
        (["the-cat-sat", "--why", "scale", "--why", "lse", "cat"], "--why was given twice"),
        (["--why", "scale", "the-cat-sat"], "regard explain --help"),
        (["the-cat-sat", "--json", "--digits", "3"], "--digits has no effect with --json"),
        (["the-cat-sat", "--json", "--head", "0"], "--head has no effect with --json"),
        (["the-cat-sat", "--statistics", "--digits", "3"], "--digits has no effect"),
        (["the-cat-sat", "--force"], "--force goes with --save and --html only"),
        (["--text", "a", "--format", "toml"], "--format goes with standard input only"),
        (["--text", "a", "--dim", "4", "--heads", "2", "--head", "2"], "there are 2 heads"),
        (["the-cat-sat", "--digits", "18"], "17"),
        (["the-cat-sat", "--digits", "many"], "--digits"),
        (["the-cat-sat", "--unknown"], "--unknown"),
        (["the-cat-sat", "second"], "second"),
        (["the-cat-sat", "--save", "x.csv"], "suffix"),
        (["the-cat-sat", "--save", "there.toml"], "pass --force to replace it"),
        (["the-cat-sat", "--save", "no/such/folder.toml"], "folder.toml: cannot be written"),
        (["the-cat-sat", "--html", "x", "--head", "0"], "--head has no effect with --html alone"),
        (["the-cat-sat", "--html", "there.toml"], "pass --force to replace it"),
        (["the-cat-sat", "--save", "x.toml", "--html", "./x.toml"], "would go to the same file"),
        (["the-cat-sat", "--save", "x.toml", "--html", "there.toml"], "pass --force to replace it"),
        (["\x1b[31mred\x1b[0m.toml"], "\\x1b[31mred"),
        (["the-cat-sat", "--gradients"], "--gradients needs a loss; give --target FILE"),
        (["look-back", "--gradients", "--step", "loss"], "--step has no effect with --gradients"),
        (["look-back", "--gradients", "--why", "loss"], "--why has no effect with --gradients"),
        (["the-cat-sat", "--target", "target.txt"], "says no format"),
        (["the-cat-sat", "--target", "nowhere.npy"], "nowhere.npy: cannot be read"),
        (["the-cat-sat", "--target", "target.json"], "target.json: target has shape (2,)"),
        (["the-cat-sat", "--target", "other.json"], "has one key, target; this one has aim"),
        (["the-cat-sat", "--target", "empty.json"], "has one key, target; this one is empty"),
        (["the-cat-sat", "--target", "t.json", "--save", "t.json"], "t.json"),
        (["the-cat-sat", "--step", "d_queries"], "without a loss there are no gradients"),
        (["look-back", "--why", "d_mask", "the", "cat"], "a key is visible or not"),
    ],
)
def test_bad_input_of_explain_is_one_line(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "there.toml").write_text("kept")
    (tmp_path / "broken.toml").write_text("a = [\n")
    (tmp_path / "target.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text('{"aim": [1, 2]}')
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "t.json").write_text("[[1]]")
    assert message in refuse("explain", *words)
    np.testing.assert_equal((tmp_path / "there.toml").read_text(), "kept")
    assert not (tmp_path / "x.toml").exists()


@pytest.mark.parametrize(
    ("words", "says", "command"),
    [
        ("explain --html", "Option '--html' requires an argument (see ", " explain"),
        ("attention", "Missing argument 'Q.npy' (see ", " attention"),
        ("explan", "No such command 'explan'. Did you mean 'explain'? (see ", ""),
    ],
)
def test_wrong_words_are_answered_with_the_help_to_read(
    words: str, says: str, command: str
) -> None:
    line = refuse(*words.split())
    assert line.startswith(says)
    assert line.endswith(f"{command} --help)")


def test_a_file_named_without_its_suffix_is_proposed(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SMALL)
    assert "did you mean mine.toml?" in refuse("explain", "mine")


def test_bad_input_of_the_program_itself_is_one_line() -> None:
    assert "frobnicate" in refuse("frobnicate")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "embeddings"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "UTF-16"),
        (b"title = '\xe4'", "not UTF-8"),
        (b" " * (16 * 2**20 + 1), "bytes"),
        (SMALL.encode() + b"\nsurprise = 1", "surprise"),
    ],
)
def test_bad_standard_input_is_one_line(data: bytes, message: str) -> None:
    line = refuse("explain", "-", stdin=data)
    assert message in line
    assert "standard input" in line


@POSIX
def test_a_pipe_with_a_name_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    os.mkfifo(tmp_path / "pipe.npy")
    assert "named pipe" in refuse("explain", "pipe.toml")
    write_arrays(tmp_path)
    assert "pipe.npy: is a named pipe" in refuse("attention", "pipe.npy", "k.npy", "v.npy", "-oo")


def test_a_saved_problem_replaces_a_file_only_if_forced(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text("old")
    refuse("explain", "the-cat-sat", "--save", "p.toml")
    result = call("explain", "the-cat-sat", "--save", "p.toml", "--force")
    np.testing.assert_equal(result.exit_code, FINE)
    succeed("explain", "p.toml")
    np.testing.assert_equal(sorted(os.listdir(tmp_path)), ["p.toml"])


def test_memory_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr("regard.api.explain", exhausted)
    np.testing.assert_equal(
        refuse("explain", "the-cat-sat"), "not enough memory: Unable to allocate 9 TiB"
    )


def test_an_interrupt_says_what_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.api.explain", interrupted)
    result = call("explain", "the-cat-sat")
    said = "\nregard: explain was interrupted; no unfinished file is left\n"
    np.testing.assert_equal((result.exit_code, result.stderr), (INTERRUPTED, said))


def test_a_mistake_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("regard.api.explain", mistaken)
    with pytest.raises(ZeroDivisionError):
        CliRunner().invoke(app, ["explain", "the-cat-sat"], catch_exceptions=False)


# --- completion ----------------------------------------------------------------------------------


def completed(folder: Path, *lines: str) -> Iterator[set[str]]:
    """What a shell in this folder is told of each of these lines."""
    program = f"import os; os.chdir({str(folder)!r})\n{COMMAND}"
    cases = [
        (
            (program, "regard"),
            {
                "_REGARD_COMPLETE": "complete_bash",
                "_TYPER_COMPLETE_ARGS": f"regard {words}",
                "COMP_WORDS": f"regard {words}",
                "COMP_CWORD": str(len(words.split(" "))),
            },
        )
        for words in lines
    ]
    for child in many(cases):
        np.testing.assert_equal(child.stderr, "")
        yield set(child.stdout.split())


def test_a_shell_can_complete_commands_examples_files_and_steps(tmp_path: Path) -> None:
    (tmp_path / "she.toml").write_text(SMALL)
    (tmp_path / "she.txt").write_text(SMALL)
    (tmp_path / "shelf").mkdir()
    commands, targets, gradients, steps, cells, kernels, options = completed(
        tmp_path,
        "ex",
        "explain sh",
        "explain look-back --step d_q",
        "explain the-cat-sat --step sca",
        "explain the-cat-sat --why sca",
        "attention --kernel r",
        "explain --st",
    )
    assert "explain" in commands
    np.testing.assert_equal(targets, {"she-likes-coffee", "she.toml", "shelf/"})
    assert "d_queries" in gradients
    np.testing.assert_equal(steps, {"scale", "scaled"})
    np.testing.assert_equal(cells, {"scale", "scaled"})
    assert "reference" in kernels
    assert "--statistics" in options


def test_a_shell_can_complete_the_labels_of_the_problem_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace('"b"', '"of course"'))
    rows, columns, gradients, unread = completed(
        tmp_path,
        "explain the-cat-sat --why weights s",
        "explain small.toml --why weights a ",
        "explain look-back --why d_queries ",
        "explain - --why weights s",
    )
    np.testing.assert_equal(rows, {"sat"})
    np.testing.assert_equal(columns, {"a", "1"})  # the other one has a blank
    np.testing.assert_equal(gradients, {"the", "cat", "sat", "down"})
    np.testing.assert_equal(unread, set())


# --- attention -----------------------------------------------------------------------------------


def write_arrays(folder: Path, dtype: Any = np.float32, lead: tuple[int, ...] = (2,)) -> None:
    """q.npy (…, 4, 6, 8), k.npy (…, 2, 9, 8), v.npy (…, 2, 9, 5), a mask and a bias."""
    draw = np.random.default_rng(5)
    for name, shape in (("q", (4, 6, 8)), ("k", (2, 9, 8)), ("v", (2, 9, 5))):
        np.save(folder / f"{name}.npy", draw.standard_normal((*lead, *shape)).astype(dtype))
    np.save(folder / "mask.npy", draw.random((6, 9)) < 0.7)
    np.save(folder / "bias.npy", draw.standard_normal((4, 1, 9)))


def load(name: str) -> Any:
    return np.load(f"{name}.npy", allow_pickle=False)


QKV = ("attention", "q.npy", "k.npy", "v.npy")
EVERYTHING = (
    *("--causal", "--offset", "end", "--mask", "mask.npy", "--bias", "bias.npy"),
    *("--window", "4", "unbounded", "--scale", "0.3", "--softcap", "20", "--sink", "0.5"),
    *("--precision", "exact", "--kernel", "reference", "--threads", "1"),
)


def everything_in_one_call() -> Any:
    return regard.attention(
        *(load(name) for name in "qkv"),
        causal=True,
        offset="end",
        mask=load("mask"),
        bias=load("bias"),
        window=(4, None),
        scale=0.3,
        softcap=20.0,
        sink=0.5,
        precision="exact",
        kernel="reference",
        threads=1,
        return_weights=True,
        return_lse=True,
    )


def test_the_output_of_arrays_on_disk_is_that_of_one_call(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    text = succeed(*QKV, "-o", "out.npy")
    np.testing.assert_equal(text, "out.npy: output (2, 4, 6, 5) float32\n")
    expected = regard.attention(*(load(name) for name in "qkv"))
    np.testing.assert_array_equal(load("out"), expected, strict=True)


@pytest.mark.parametrize("cells", [PIECE_CELLS, 6 * 9 * 4, 6 * 9, 1], ids=str)
def test_pieces_give_the_same_bytes_as_one_call(
    cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.on_disk.PIECE_CELLS", cells)
    monkeypatch.setattr("regard.compute.evaluation.BLOCK_CELLS", 2 * 9)  # blocks of two rows
    write_arrays(tmp_path)
    succeed(*QKV, "-o", "out.npy", "--weights", "w.npy", "--lse", "lse.npy", *EVERYTHING)
    for found, expected in zip(("out", "w", "lse"), everything_in_one_call(), strict=True):
        np.testing.assert_array_equal(load(found), expected, strict=True)


def test_large_calls_are_cut_into_batches_then_heads_then_rows() -> None:
    def pieces(lead: tuple[int, ...], heads: int, rows: int, keys: int) -> int:
        from regard.compute.request import make_request

        def array(*shape: int) -> Any:
            return np.broadcast_to(np.zeros((), np.float32), (*lead, *shape))

        request = make_request(array(heads, rows, 1), array(heads, keys, 1), array(heads, keys, 1))
        found = Job(request).pieces()
        cells = sum(
            (own.stop - own.start) * (h.stop - h.start) * (1 if len(found) > 1 else max(lead[0], 1))
            for _, h, own, _ in found
        )
        np.testing.assert_equal(cells, lead[0] * heads * rows)
        return len(found)

    np.testing.assert_equal(pieces((2,), 4, 8, 8), 1)
    np.testing.assert_equal(pieces((8,), 4, 1024, 1024), 8)
    np.testing.assert_equal(pieces((2,), 16, 4096, 4096), 32)
    np.testing.assert_equal(pieces((1,), 1, 8192, 8192), 4)


@pytest.mark.parametrize("lead", [(), (2,), (2, 1, 3)])
def test_any_number_of_leading_axes_will_do(lead: tuple[int, ...], tmp_path: Path) -> None:
    write_arrays(tmp_path, np.float64, lead)
    succeed(*QKV, "-o", "out.npy")
    expected = regard.attention(*(load(name) for name in "qkv"))
    np.testing.assert_array_equal(load("out"), expected, strict=True)


def test_arrays_without_heads_and_a_single_query_keep_their_shape(tmp_path: Path) -> None:
    draw = np.random.default_rng(1).standard_normal
    np.save("k.npy", draw((3, 4)))
    np.save("v.npy", draw((3, 2)))
    np.save("m.npy", np.array([True, False, True]))
    for shape in ((5, 4), (4,)):
        np.save("q.npy", draw(shape))
        succeed(*QKV, "-o", "out.npy", "--lse", "lse.npy", "--force", "--mask", "m.npy")
        output, lse = regard.attention(
            *(load(name) for name in "qkv"), mask=load("m"), return_lse=True
        )
        np.testing.assert_array_equal(load("out"), output, strict=True)
        np.testing.assert_array_equal(load("lse"), lse, strict=True)


def test_order_byte_order_and_size_zero_make_no_difference(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    expected = regard.attention(*(load(name) for name in "qkv"))
    np.save("q.npy", np.asfortranarray(load("q")))
    np.save("k.npy", load("k").astype(">f4"))
    succeed(*QKV, "-o", "out.npy")
    np.testing.assert_array_equal(load("out"), expected)
    for name in "kv":
        np.save(f"{name}.npy", load(name)[:, :, :0])
    succeed(*QKV, "-o", "none.npy")
    np.testing.assert_array_equal(load("none"), np.zeros((2, 4, 6, 5)))


def test_what_is_written_can_be_read_by_numpy_alone_and_has_its_usual_bytes(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    succeed(*QKV, "-o", "out.npy")
    np.save("again.npy", load("out"))
    np.testing.assert_equal(
        (tmp_path / "out.npy").read_bytes(), (tmp_path / "again.npy").read_bytes()
    )


def test_a_large_call_says_beforehand_what_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.cli.attention.WORTH_SAYING", 1)
    write_arrays(tmp_path)
    result = call(*QKV, "-o", "out.npy")
    assert "query (2, 4, 6, 8) float32" in result.stderr
    assert "-> output (2, 4, 6, 5)" in result.stderr
    assert re.search(r"about \d+\.\d MB of memory", result.stderr)


def test_more_memory_than_allowed_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write_arrays(tmp_path)
    line = refuse(*QKV, "-o", "out.npy", "--max-memory", "1MB")
    assert re.search(r"about \d+\.\d MB of memory, .* --max-memory allows 1\.0 MB", line)
    assert not (tmp_path / "out.npy").exists()
    succeed(*QKV, "-o", "out.npy", "--max-memory", "1GB")


def test_only_what_is_allocated_counts_as_memory(tmp_path: Path) -> None:
    shape = (16, 20_000, 64)
    np.save(tmp_path / "q.npy", np.ones((16, 1, 64), np.float32))
    for dtype in (np.float32, np.int8):
        for name in ("k", "v"):  # sparse files of zeros
            path = tmp_path / f"{name}.npy"
            np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
        size = (tmp_path / "k.npy").stat().st_size
        if dtype == np.float32:  # mapped: 82 MB each
            assert size > 60e6
            succeed(*QKV, "-o", "out.npy", "--max-memory", "60MB")
        else:  # converted to float64: 20 MB become 164
            line = refuse(*QKV, "-o", "out.npy", "--force", "--max-memory", "300MB")
            assert re.search("takes about 38[0-9].[0-9] MB of memory, besides the inputs", line)


MEASURE = """
import sys
import numpy as np
import regard
from regard.cli.on_disk import Job, load_npy
from regard.compute.request import make_request

def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

names = ("query", "key", "value")
arrays = {name: load_npy(f"{name[0]}.npy") for name in names}
job = Job(make_request(**arrays))
for array in arrays.values():  # what is mapped is here already, and counts no more
    array.max()
with open("/proc/self/clear_refs", "w") as peak:
    peak.write("5")
before = status("VmRSS:")
job.write({"output": "out.npy"}, force=True)
print(job.memory(), status("VmHWM:") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the peak")
@pytest.mark.parametrize(
    ("heads", "rows", "keys", "dtype"),
    [(16, 128, 8192, "f2"), (8, 64, 16384, "f4"), (4, 2048, 2048, "f4"), (2, 256, 8192, "i4")],
)
def test_no_more_memory_is_taken_than_was_said(
    heads: int, rows: int, keys: int, dtype: str, tmp_path: Path
) -> None:
    for name, length in (("q", rows), ("k", keys), ("v", keys)):
        np.save(tmp_path / f"{name}.npy", np.ones((heads, length, 64), dtype))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], cwd=tmp_path, capture_output=True, check=True
    )
    said, taken = map(int, done.stdout.split())
    assert taken <= said <= taken + 10**8


def test_sizes_are_read_and_written_as_people_do() -> None:
    read = {"8GB": 8 * 10**9, "8 gib": 2**33, "1.5k": 1500, "7": 7, "2TiB": 2**41, "10b": 10}
    np.testing.assert_equal({text: parse_size("budget", text) for text in read}, read)
    np.testing.assert_equal(decimal(1234567), "1.2 MB")


def spoilt(name: str) -> bytes:
    """The bytes of an NPY file that must not be read."""
    whole = Path("q.npy").read_bytes()
    if name == "cut":
        return whole[:-1]
    if name == "long":
        return whole + b"\x00"
    if name == "text":
        return b"1 2 3\n"
    if name == "empty":
        return b""
    if name == "huge header":
        return b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little") + whole[10:]
    if name == "huge shape":
        return whole.replace(b"(2, 4, 6, 8), }", b"(2, 4, 6, %d), }" % 10**9)
    if name == "negative":
        return whole.replace(b"(2, 4, 6, 8)", b"(2, -4, 6,8)")
    if name == "nested":
        return b"\x93NUMPY\x01\x00" + (4000).to_bytes(2, "little") + b"(" * 4000
    assert name == "version"
    return whole[:6] + b"\x09" + whole[7:]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cut", "bytes are there"),
        ("long", "bytes are there"),
        ("text", "is not an NPY file"),
        ("empty", "is not an NPY file"),
        ("huge header", "has a header of 2147483648 bytes"),
        ("huge shape", "bytes are there"),
        ("negative", "shape"),
        ("nested", "damaged header"),
        ("version", "is not an NPY file"),
    ],
)
def test_a_spoilt_array_is_refused(name: str, message: str, tmp_path: Path) -> None:
    write_arrays(tmp_path)
    (tmp_path / "spoilt.npy").write_bytes(spoilt(name))
    line = refuse("attention", "spoilt.npy", "k.npy", "v.npy", "-o", "out.npy")
    assert line.startswith("spoilt.npy: ")
    assert message in line
    assert not (tmp_path / "out.npy").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["q.npy", "k.npy", "nowhere.npy"], "nowhere.npy: cannot be read: No such file"),
        (["q.npy", "k.npy", "folder"], "folder: is a directory"),
        (["objects.npy", "k.npy", "v.npy"], "objects.npy: holds Python objects"),
        (["fields.npy", "k.npy", "v.npy"], "not supported"),
        (["q.npy", "k.npy"], "V.npy"),
        (["q.npy", "q.npy", "v.npy"], "key has 6 rows but value has 9"),
        (["q.npy", "k.npy", "v.npy", "--causal"], "pass --offset 0 (query 0 aligned"),
        (["q.npy", "k.npy", "v.npy", "--causal"], "or --offset end"),
        (["q.npy", "k.npy", "v.npy", "--offset", "0"], "--offset has no effect"),
        (["q.npy", "k.npy", "v.npy", "--weights", ""], "--weights needs the name of a file"),
        (["q.npy", "k.npy", "v.npy", "--lse", "-"], "./-"),
        (["q.npy", "k.npy", "v.npy", "--sink", "inf"], "leave it out where there is none"),
        (
            ["q.npy", "k.npy", "v.npy", "--window", "-1", "0", "--offset", "0"],
            "0 or more keys, or unbounded",
        ),
        (["q.npy", "k.npy", "v.npy", "--offset", "start"], "--offset is start"),
        (["q.npy", "k.npy", "v.npy", "--window", "1", "all"], "--window has all"),
        (["q.npy", "k.npy", "v.npy", "--window", "-1", "0", "--offset", "0"], "--window has -1"),
        (["q.npy", "k.npy", "v.npy", "--scale", "nan"], "scale is nan"),
        (["q.npy", "k.npy", "v.npy", "--scale", "x"], "--scale"),
        (["q.npy", "k.npy", "v.npy", "--softcap", "-1"], "softcap is -1"),
        (["q.npy", "k.npy", "v.npy", "--sink", "inf"], "sink must be finite"),
        (["q.npy", "k.npy", "v.npy", "--precision", "highest"], "precision must be"),
        (["q.npy", "k.npy", "v.npy", "--kernel", "zip"], "kernel must be one of"),
        (["q.npy", "k.npy", "v.npy", "--threads", "0"], "threads is 0"),
        (["q.npy", "k.npy", "v.npy", "--mask", "bias.npy"], "mask must be boolean"),
        (["q.npy", "k.npy", "v.npy", "--mask", "q.npy"], "mask must be boolean"),
        (["q.npy", "k.npy", "v.npy", "--bias", "k.npy"], "does not broadcast"),
        (["q.npy", "k.npy", "v.npy", "--max-memory", "lots"], "--max-memory is lots"),
        (["q.npy", "k.npy", "v.npy", "--weights", "out.npy"], "would go to the same file"),
        (["q.npy", "k.npy", "v.npy", "--lse", "./out.npy"], "would go to the same file"),
        (["q.npy", "k.npy", "v.npy", "--weights", "there.npy"], "there.npy: already exists"),
        (["q.npy", "k.npy", "v.npy", "--weights", "no/w.npy"], "no/w.npy: cannot be written"),
    ],
)
def test_bad_input_of_attention_is_one_line_and_leaves_no_file(
    words: list[str], message: str, tmp_path: Path
) -> None:
    write_arrays(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "there.npy").write_text("kept")
    np.save("objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save("fields.npy", np.zeros(3, dtype=[("a", "f4")]))
    before = sorted(os.listdir(tmp_path))
    assert message in refuse("attention", *words, "-o", "out.npy")
    np.testing.assert_equal(sorted(os.listdir(tmp_path)), before)
    np.testing.assert_equal((tmp_path / "there.npy").read_text(), "kept")


SPELLINGS = {
    "the same": lambda path: path.name,
    "with a dot": lambda path: f"./{path.name}",
    "with a way around": lambda path: f"folder/../{path.name}",
    "from the root": lambda path: str(path),
    "through a link to the folder": lambda path: f"{linked(path.parent)}/{path.name}",
    "by a link": lambda path: str(linked(path)),
    "by another link to the same bytes": lambda path: str(linked(path, os.link)),
}


def linked(path: Path, link: Any = os.symlink) -> Path:
    folder = Path("links")
    folder.mkdir(exist_ok=True)
    link(path, folder / path.name)
    return folder / path.name


@POSIX
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_command_replaces_what_it_reads(spelling: str, tmp_path: Path) -> None:
    write_arrays(tmp_path)
    np.save("m.npy", np.ones((6, 9), bool))
    np.save("b.npy", np.ones((6, 9), np.float32))
    (tmp_path / "folder").mkdir()
    (tmp_path / "problem.toml").write_text(SMALL)
    (tmp_path / "mine.py").write_text("def attention(q, k, v):\n    return v\n")
    (tmp_path / "mine.ipynb").write_text('{"cells": []}')
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("def attention(q, k, v):\n    return v\n")
    arrays = [*QKV, "--mask", "m.npy", "--bias", "b.npy"]
    problem, mine = ["explain", "problem.toml"], ["diagnose", "mine.py:attention"]
    module = ["diagnose", "package.inner:attention"]
    calls = [
        *((name, [*arrays, "-o"]) for name in ("q.npy", "k.npy", "v.npy", "m.npy", "b.npy")),
        ("k.npy", [*arrays, "-o", "out.npy", "--weights"]),
        ("m.npy", [*arrays, "-o", "out.npy", "--lse"]),
        ("problem.toml", [*problem, "--save"]),
        ("problem.toml", [*problem, "--html"]),
        ("problem.toml", [*problem, "--save", "other.toml", "--html"]),
        ("mine.py", [*mine, "--html"]),
        ("mine.ipynb", ["diagnose", "mine.ipynb:attention", "--html"]),
        ("package/inner.py", [*module, "--html"]),
        ("package/__init__.py", [*module, "--html"]),
    ]
    for name, words in calls:
        path = tmp_path / name
        before = path.read_bytes()
        target = SPELLINGS[spelling](path) if path.parent == tmp_path else name
        for force in ([], ["--force"]):
            assert "would replace the input" in refuse(*words, target, *force)
        assert path.read_bytes() == before
        shutil.rmtree("links", ignore_errors=True)
    assert not {"out.npy", "other.toml"} & set(os.listdir(tmp_path))


def test_standard_input_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "problem.toml").write_text(SMALL)
    for option in ("--save", "--html"):
        with open(tmp_path / "problem.toml", encoding="utf-8") as file:
            child = process("explain", "-", option, "problem.toml", "--force", stdin=file)
            _, said = child.communicate(timeout=PATIENCE)
        np.testing.assert_equal(child.returncode, BAD)
        assert b"would replace the input" in said
    np.testing.assert_equal((tmp_path / "problem.toml").read_text(), SMALL)


def test_an_example_is_not_replaced(tmp_path: Path) -> None:
    from regard.problems.files import file_of

    place = Path(file_of("causal-mask"))
    before = place.read_bytes()
    line = refuse("explain", "causal-mask", "--save", place, "--force")
    assert "would replace the input" in line
    assert place.read_bytes() == before


def test_a_result_replaces_a_file_only_if_forced_and_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path)
    (tmp_path / "out.npy").write_text("old")
    assert "--force" in refuse(*QKV, "-o", "out.npy")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr("regard.cli.on_disk.PIECE_CELLS", 1)
    compute, calls = Job.compute, []

    def fail_later(job: Job, *piece: Any) -> Any:
        calls.append(piece)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return compute(job, *piece)

    monkeypatch.setattr(Job, "compute", fail_later)
    assert "No space left" in refuse(*QKV, "-o", "out.npy", "--force", "--weights", "w.npy")
    np.testing.assert_equal(len(calls), 3)
    np.testing.assert_equal((tmp_path / "out.npy").read_text(), "old")
    np.testing.assert_equal(sorted(os.listdir(tmp_path)), before)
    monkeypatch.setattr(Job, "compute", compute)
    succeed(*QKV, "-o", "out.npy", "--force")
    np.testing.assert_equal(load("out").shape, (2, 4, 6, 5))


# The command as a terminal starts it, or as a script does in the background. Whether interrupts are
# ignored is inherited, from whatever runs these tests too.
STARTED = """
import os, signal, sys
signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
os.execv(sys.executable, [sys.executable, "-m", "regard", *sys.argv[2:]])
"""


@contextmanager
def at_work(tmp_path: Path, handling: str, rows: int) -> Iterator[subprocess.Popen[bytes]]:
    """A command that computes, with its handling of an interrupt: SIG_DFL or SIG_IGN."""
    for name in "qkv":
        np.save(f"{name}.npy", np.zeros((64, rows, 32), np.float32))
    words = [handling, *QKV, "-o", "out.npy", "--lse", "lse.npy"]
    child = process(*words, start=["-c", STARTED], cwd=tmp_path)
    # However the test ends, the process does.
    watchdog = threading.Timer(PATIENCE, child.kill)
    watchdog.start()
    try:
        while len(list(tmp_path.glob(".*.part"))) < 2 and child.poll() is None:
            time.sleep(0.02)
        yield child
    finally:
        watchdog.cancel()


@POSIX
def test_an_interrupt_leaves_no_file(tmp_path: Path) -> None:
    # half a minute of work, of which little is done
    with at_work(tmp_path, "SIG_DFL", 4096) as child:
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        out, error = child.communicate()
    said = b"\nregard: attention was interrupted; no unfinished file is left\n"
    np.testing.assert_equal((child.returncode, out, error), (INTERRUPTED, b"", said))
    np.testing.assert_equal(sorted(os.listdir(tmp_path)), ["k.npy", "q.npy", "v.npy"])


@POSIX
def test_a_command_that_is_started_to_ignore_interrupts_ends_its_work(tmp_path: Path) -> None:
    with at_work(tmp_path, "SIG_IGN", 1024) as child:
        while child.poll() is None:
            child.send_signal(signal.SIGINT)
            time.sleep(0.01)
        _, error = child.communicate()
    np.testing.assert_equal(child.returncode, FINE, error.decode())
    files = [f"{name}.npy" for name in ("k", "lse", "out", "q", "v")]
    np.testing.assert_equal(sorted(os.listdir(tmp_path)), files)


# --- explain --html ------------------------------------------------------------------------------


def test_html_writes_a_page_and_prints_nothing_else() -> None:
    result = call("explain", "she-likes-coffee", "--html", "page.html", "--digits", "6")
    assert (result.exit_code, result.stdout) == (FINE, "")
    assert result.stderr == "saved page.html\n"
    text = Path("page.html").read_text("utf-8")
    assert "She likes coffee" in text
    assert '<option value="6" selected>' in text


def test_html_goes_with_what_is_asked_for_besides() -> None:
    result = call("explain", "she-likes-coffee", "--html", "p.html", "--why", "output", "she", "2")
    assert "0.50530294" in result.stdout
    assert Path("p.html").exists()


def test_html_of_an_expectation_that_fails_is_written_and_the_failure_told() -> None:
    Path("wrong.toml").write_text(SMALL + "[expect.keys]\nvalue = [[1.0, 0.0], [0.0, 3.0]]\n")
    result = call("explain", "wrong.toml", "--html", "page.html")
    assert result.exit_code == DIFFERS
    assert "keys[b, 1] differs" in result.stdout
    assert Path("page.html").exists()


@pytest.mark.parametrize("option", ["html", "save"])
def test_a_dash_or_nothing_is_no_file_to_write(option: str) -> None:
    assert refuse("explain", "causal-mask", f"--{option}", "-") == (
        f"--{option} needs the name of a file, not - (./- would be a file of that name)"
    )
    assert refuse("explain", "causal-mask", f"--{option}", "") == (
        f"--{option} needs the name of a file, not an empty one"
    )
    assert not Path("-").exists()


def test_html_replaces_a_page_of_its_own_and_another_file_only_by_force() -> None:
    for words in ([], [], ["--save", "mine.toml"]):
        call("explain", "she-likes-coffee", "--html", "page.html", *words)
        assert "She likes coffee" in Path("page.html").read_text("utf-8")
    Path("page.html").write_text("mine")
    assert refuse("explain", "causal-mask", "--html", "page.html") == (
        "page.html: already exists; pass --force to replace it"
    )
    assert Path("page.html").read_text() == "mine"
    assert call("explain", "causal-mask", "--html", "page.html", "--force").exit_code == FINE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--open"], "--open goes with --html only"),
        (["--budget", "5MB"], "--budget goes with --html only"),
        (["--html", "p.html", "--budget", "tiny"], "budget is tiny; give a number of bytes"),
        (["--html", "p.html", "--budget", "1kB"], "budget is 1000 bytes; a page needs at least"),
        (["--html", "none/p.html"], "none/p.html: cannot be written: there is no folder none"),
    ],
)
def test_html_options_that_make_no_sense_are_refused(words: list[str], message: str) -> None:
    assert refuse("explain", "causal-mask", *words).startswith(message)
    assert not Path("p.html").exists()


def test_open_shows_the_file_in_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert call("explain", "causal-mask", "--html", "page.html", "--open").exit_code == FINE
    assert opened == [Path("page.html").absolute().as_uri()]


# other mechanisms ---------------------------------------------------------------------------------


def test_an_example_is_explained_with_another_score_and_normalization() -> None:
    own = ("--score", "cosine:temperature=0.5", "--normalize", "sparsemax")
    said = succeed("explain", "she-likes-coffee", *own, "--step", "weights")
    assert "P = max(A − τ_s, 0)" in said
    assert "0.55110613" in said
    walk = succeed("explain", "she-likes-coffee", *own[:2], "--why", "scores", "she", "likes")
    assert "A[she, likes] = cos[she, likes] / τ" in walk
    term = succeed("explain", "bahdanau-alignment", "--why", "scores", "drink", "bois")
    assert "2 × tanh(1 + 0)" in term


@pytest.mark.parametrize(
    "words", [("I like tea",), ("I", "like", "tea"), ("--text", "I", "like", "tea")]
)
def test_a_sentence_that_is_not_given_as_text_is_answered_with_the_line_to_type(words):
    line = refuse("explain", *words).partition("type regard ")[2]
    np.testing.assert_equal(shlex.split(line), ["explain", "--text", "I like tea"])
    assert "I like tea" in succeed(*shlex.split(line))


def test_more_labels_than_why_takes_are_no_sentence():
    line = refuse("explain", "causal-mask", "--why", "output", "0", "0", "0", "0")
    np.testing.assert_equal(line, "explain takes one problem, and there is more: 0 0")
