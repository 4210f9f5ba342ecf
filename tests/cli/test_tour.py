"""The tour: every number in it is computed, it waits only for a person, and it fits a terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import regard
import regard.tour
from commands import CliRunner
from fresh_process import COMMAND
from regard.bench.timing import Budget
from regard.bench.worker import Here
from regard.cli import app
from regard.cli.tour import PROMPT
from regard.diagnosis.mistakes import all_mistakes
from regard.problems.files import load_problem

FAST = Budget(seconds=0, rounds=3, pause=0, warm=0, sample=0)


@pytest.fixture
def tour(monkeypatch: pytest.MonkeyPatch):
    """The tour in this process, with a small case and without a process for each library."""
    measure = partial(regard.tour.measure_cases, meter=None, start=Here)
    monkeypatch.setattr(regard.tour, "measure_cases", measure)
    monkeypatch.setattr(regard.tour, "CASE", replace(regard.tour.CASE, L=8, S=8))
    monkeypatch.setattr(regard.tour, "BUDGET", FAST)

    def shown(columns: int = 80) -> str:
        done = CliRunner().invoke(app, ["tour"], env={"COLUMNS": str(columns), "NO_COLOR": "1"})
        assert done.exit_code == 0, done.output
        return done.stdout

    return shown


def test_the_tour_says_what_the_library_computes(tour):
    text = tour()
    assert PROMPT not in text  # nobody is there to press a key
    flat = " ".join(text.split())
    lines = [line.strip() for line in text.splitlines()]
    begin = next(n for n, line in enumerate(lines) if line.startswith("scores = q @ k"))
    assert (lines[begin - 1], lines[begin + 4]) == ("", "")  # code is set apart from sentences
    explanation = regard.explain(load_problem("she-likes-coffee"))
    shares = [f"{share:.0%}" for share in explanation.steps["weights"].value[0]]
    assert re.search("takes {} from she, {} from likes and {} from coffee".format(*shares), flat)
    assert "attention is right" in flat
    title = all_mistakes()["scale_by_width"].title
    assert f": {title}" in flat
    learned = regard.explain(load_problem("coffee-target"))
    before, after = re.search(r"loss goes from ([\d.]+) to ([\d.]+)", flat).groups()
    np.testing.assert_allclose(float(before), learned.steps["loss"].value, atol=5e-9)
    slope = (float(after) - float(before)) / regard.tour.NUDGE
    # The loss bends: over a step the slope changes by at most the step times the curvature.
    np.testing.assert_allclose(slope, learned.steps["d_W_v"].value[0, 0], atol=regard.tour.NUDGE)
    assert re.search(r"regard +[\d.]+ ms NumPy +[\d.]+ ms", flat)


@pytest.mark.parametrize("columns", [60, 80])
def test_the_tour_keeps_within_the_width(tour, columns):
    assert max(len(line.rstrip()) for line in tour(columns).splitlines()) <= columns


def test_every_command_that_the_tour_names_is_one(tour):
    named = re.findall(r"^  regard (\S+)", tour(), re.MULTILINE)
    helped = CliRunner().invoke(app, ["--help"]).stdout
    assert len(named) >= 6
    for name in {*named} - {"--help"}:
        assert re.search(rf"^  {name} ", helped, re.MULTILINE)


@pytest.mark.skipif(os.name != "posix", reason="a terminal is POSIX")
@pytest.mark.parametrize("keys", [b"q", b"xQ", b"\x04"])
def test_on_a_terminal_the_tour_waits_and_q_leaves(keys):
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "tour"], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    text = b""
    try:
        while PROMPT.encode() not in text:
            text += os.read(ours, 4096)
        for _ in range(600):  # what is typed before the tour listens is dropped
            os.write(ours, keys)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
                break
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"1 of 4" in text
    assert b"2 of 4" not in text
