"""`regard diagnose`: exit codes, the child process, and what the terminal shows.

The command itself runs in this process: what it is asked to diagnose has its own either way.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

import regard
from commands import CliRunner
from places import ROOT
from regard.cli import app
from regard.diagnosis.choice import choose
from regard.errors import OptionError, ProblemError
from regard.views.diagnosis.terminal import print_diagnosis
from verdicts import FUNCTIONS

SOURCE = """
import os, sys, ctypes
import numpy as np
print("loading")

def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def right(q, k, v):
    print("noise")
    sys.stdout.flush()
    os.write(1, b"more noise\\n")
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v

def wrong(q, k, v):
    return softmax(q @ k.swapaxes(-1, -2)) @ v

def fragile(q, k, v):
    e = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
    return e / e.sum(-1, keepdims=True) @ v

def cosine(q, k, v):
    q = q / np.linalg.norm(q, axis=-1, keepdims=True)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    return softmax(q @ k.swapaxes(-1, -2) * 0.5) @ v

def leaves(q, k, v):
    os._exit(7)

def crashes(q, k, v):
    os.kill(os.getpid(), 11)

def asks(q, k, v):
    input("? ")

class Holder:
    @staticmethod
    def right(q, k, v):
        return right(q, k, v)
"""


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE, "utf-8")
    return path


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def command(capfd):
    """Calls the command; whatever else reaches a stream of this process is in its output too."""

    def run(*arguments: Any, folder: Path = ROOT) -> Done:
        told = {"COLUMNS": "100", "NO_COLOR": "1"}
        with contextlib.chdir(folder):
            done = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], env=told)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        out, err = capfd.readouterr()
        return Done(done.exit_code, done.stdout + out, done.stderr + err)

    return run


def test_a_process_of_its_own_ends_with_the_code_and_prints_the_verdict(source):
    done = subprocess.run(
        [sys.executable, "-m", "regard", "diagnose", f"{source}:right"],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONUTF8": "1"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("right is right")


@pytest.mark.parametrize(
    "target",
    [
        *(f"regard:{name}" for name in ("MultiHeadAttention", "attention", "linear_attention")),
        "regard:gradients",
        pytest.param(
            "regard.interop.torch:scaled_dot_product_attention", marks=pytest.mark.needs("torch")
        ),
        pytest.param("regard.interop.jax:dot_product_attention", marks=pytest.mark.needs("jax")),
    ],
)
def test_the_library_does_not_accuse_itself(command, target):
    linear = ("--score", "features", "--normalize", "proportional")
    done = command(target, *(linear if target == "regard:linear_attention" else ()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("right", 0, "right is right"),
        ("wrong", 1, "wrong is wrong at line 17: the scores are not scaled"),
        ("fragile", 0, "fragile is right, but fragile: wrong with large scores"),
        ("leaves", 2, "ended the process (exit code 7)"),
        ("crashes", 2, "ended the process (signal 11)"),
        ("asks", 2, "EOFError"),
        ("Holder.right", 0, "right is right"),
    ],
)
def test_the_exit_code_and_the_first_line_say_the_verdict(source, command, name, code, says):
    done = command(f"{source}:{name}")
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout.replace("\n", " ")
    assert done.stderr == ""
    assert "noise\n" not in done.stdout.replace("prints: ", "")


def test_a_score_and_a_normalization_that_are_meant_are_compared_with(source, command):
    meant = ("--score", "general", "--normalize", "sigmoid")
    done = command(f"{source}:cosine", "--score", "cosine:temperature=0.5")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("cosine is wrong at line 26")
    done = command(f"{source}:cosine", "--score", "cosine:temperature=2")
    assert done.returncode == 0
    done = command(f"{source}:cosine", *meant)
    assert done.returncode == 2
    assert '--score is "general" without W' in done.stderr


def test_strict_makes_fragile_a_failure(source, command):
    assert command(f"{source}:fragile", "--strict").returncode == 1


def test_json_is_all_that_is_printed(source, command):
    done = command(f"{source}:wrong", "--json")
    data = json.loads(done.stdout)
    assert data["verdict"] == "wrong"
    assert data["mistakes"][0]["name"] == "no_scale"
    assert data["exit_code"] == done.returncode == 1


HELPERS = """
import numpy as np
print("loading")

def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)

def _hidden(q, k, v): pass

def flag(unknown): pass
"""
ATTENTION = """
def attention(q, k, v, *, dropout=0.0):
    return softmax(q @ k.swapaxes(-1, -2)) @ v
"""


def test_the_one_attention_of_a_file_or_a_notebook_is_chosen_and_the_others_named(
    tmp_path, command
):
    (tmp_path / "one.py").write_text(HELPERS + ATTENTION, "utf-8")
    cells = [{"cell_type": "code", "source": one} for one in ("%time\n1 +", HELPERS, ATTENTION)]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": cells}), "utf-8")
    for name in ("one.py", "one.ipynb"):
        done = command(name, folder=tmp_path)
        assert done.returncode == 1
        assert done.stdout.startswith("attention is wrong at line ")
        assert done.stderr == (
            f"{name}: diagnosing attention(q, k, v, *, dropout=0.0); also there: "
            "softmax(x, axis=-1), flag(unknown)\n"
        )
    done = command("one.py", "--json", folder=tmp_path)
    assert (json.loads(done.stdout)["verdict"], done.stderr) == ("wrong", "")
    assert command("one.py", "--html", "one.py", "--force", folder=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("source", "chosen"),
    [
        ("def f(x): pass", "f"),
        ("def f(a, b, c): pass", "f"),
        ("def f(a, b, c): pass\ndef g(x): pass", "g"),
        ("def f(q, k, v=None, *, scale): pass", "f"),
        ("class F(nn.Module):\n    def forward(self, x, mask=None): pass\nclass G: pass", "F"),
    ],
)
def test_what_can_be_an_attention_is_chosen_by_its_parameters(source, chosen, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source, "utf-8")
    assert choose(str(path))[0] == f"{path}:{chosen}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "def f(q, k, v): pass\ndef g(query, c): pass\ndef h(x): pass",
            "has 2 functions that may be an attention: f(q, k, v), g(query, c); name one, such as",
        ),
        ("\n".join(f"def f{n}(q, k, v): pass" for n in range(9)), "f7(q, k, v), and 1 more; name"),
        (
            "def f(a, b): pass\ndef g(a): pass",
            "no function that is recognised as an attention; it has f(a, b), g(a)",
        ),
        ("x = 1", "no function that is recognised as an attention; name one"),
        ("def f(:", "mine.py: is not valid Python: invalid syntax (mine.py, line 1)"),
        ("x\0", "mine.py: is not valid Python"),
    ],
)
def test_a_file_in_which_no_function_can_be_chosen_is_bad_input(source, says, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source, "utf-8")
    with pytest.raises((OptionError, ProblemError), match=re.escape(says)):
        choose(str(path))


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": 3}', '{"cells": [3]}'])
def test_what_is_no_notebook_is_bad_input(text, tmp_path):
    path = tmp_path / "mine.ipynb"
    path.write_text(text, "utf-8")
    with pytest.raises(ProblemError, match="is not a notebook"):
        choose(str(path))


def test_a_module_and_a_notebook_will_do_and_in_process_gives_the_same(source, tmp_path, command):
    cells = [
        {"cell_type": "markdown", "source": ["# mine"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "1 / 0"]},
        {"cell_type": "code", "source": SOURCE.splitlines(keepends=True)},
    ]
    notebook = tmp_path / "book.ipynb"
    notebook.write_text(json.dumps({"cells": cells}), "utf-8")
    assert command("mine:wrong", folder=tmp_path).returncode == 1
    assert command(f"{notebook}:wrong").returncode == 1
    assert command(f"{source}:wrong", "--in-process").returncode == 1


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere.py:f", "no such file"),
        ("nowhere_at_all:f", "cannot be loaded"),
        ("mine", "write path/to/file.py:function"),
        ("nowhere.py", "nowhere.py: cannot be read: No such file"),
        ("nowhere.ipynb", "nowhere.ipynb: no such file"),
        ("nowhere.ipynb:x", "nowhere.ipynb: no such file"),
        ("mine.py:nothing", "has no nothing; it has"),
    ],
)
def test_a_target_that_is_not_there_is_bad_input(source, command, target, says):
    done = command(target, folder=source.parent)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_loading_that_fails_says_why(tmp_path, command):
    (tmp_path / "broken.py").write_text("import nothing_of_that_name", "utf-8")
    done = command("broken.py:f", folder=tmp_path)
    assert done.returncode == 2
    assert "ModuleNotFoundError" in done.stderr


def test_a_hanging_function_in_native_code_is_ended(tmp_path, command, monkeypatch):
    monkeypatch.setattr("regard.diagnosis.isolation.SEARCH_SECONDS", 0.5)
    text = "import ctypes\ndef f(q, k, v):\n    ctypes.PyDLL(None).sleep(10000)\n"
    (tmp_path / "hangs.py").write_text(text, "utf-8")
    done = command("hangs.py:f", folder=tmp_path)
    assert done.returncode == 2
    assert "did not return" in done.stdout


def test_an_adapter_of_another_file_says_how_it_is_called(source, tmp_path, command):
    (tmp_path / "adapters.py").write_text(
        "def call(f, t):\n    return f(t.query, t.key * 2, t.value)\n", "utf-8"
    )
    done = command(f"{source}:right", "--call", f"{tmp_path}/adapters.py:call")
    assert (done.returncode, done.stderr) == (1, "")
    assert command(f"{source}:right", "--call", "nowhere.py:call").returncode == 2


def shown(found, width=100):
    console = Console(width=width, record=True, color_system=None, file=io.StringIO())
    print_diagnosis(found, console)
    return console.export_text()


def test_the_terminal_shows_the_lines_wrong_beside_right_and_the_line_to_change():
    text = shown(regard.diagnose(FUNCTIONS["wrong"]))
    for part in ("✗ scaled", "✓ scores", "Departs at", "In NumPy", "In torch", "right", "wrong"):
        assert part in text
    assert "assumed" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width):
    found = regard.diagnose(FUNCTIONS["wrong"])
    lines = shown(found, width).split("\n")
    code = found.adapter.split("\n")  # to be copied, so that it is not broken
    prose = [x for x in lines if x not in code and not any(ch.isdigit() for ch in x)]
    assert max(map(len, prose)) <= width


def test_what_a_function_says_cannot_reach_the_terminal_as_it_is():
    def f(q, k, v):
        raise ValueError("[bold]\x1b]0;title\x07")

    text = shown(regard.diagnose(f))
    assert "\x1b" not in text
    assert "[bold]" in text
