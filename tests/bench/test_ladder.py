"""The ladder from plain loops to the kernel: every rung is right, and the README tells of each."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from places import ROOT

SCRIPT = ROOT / "benchmarks/ladder.py"
README = ROOT / "src/regard/compute/kernels/cpp/README.md"


@pytest.fixture(scope="module")
def ladder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ladder", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.needs("compiler", "fused")
def test_every_rung_agrees_with_float64(ladder):
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    checked = re.findall(r"^(.+?) +error ", run.stdout, flags=re.MULTILINE)
    assert checked == [row.name for row in ladder.ROWS]


@pytest.mark.parametrize("wrong", [0.0, np.nan])
def test_a_rung_that_is_wrong_is_named_and_not_timed(ladder, monkeypatch, wrong):
    given = ladder.inputs(1, 32)
    monkeypatch.setattr(ladder, "call", lambda *_: lambda: np.full_like(given.query, wrong))
    with pytest.raises(SystemExit, match=r"^1: off by"):
        ladder.check(SimpleNamespace(), given)


def test_a_gain_is_counted_from_the_rung_that_it_names(ladder):
    rates = {row.name: [10.0 * place] for place, row in enumerate(ladder.ROWS, 1)}
    rates |= {"peak": [240.0, 240.0], "peak threads": [480.0, 480.0]}
    rates["2"] = [20.0, 20.0, 20.0, 26.0]
    about = SimpleNamespace(lanes=lambda: 16, threads=lambda: 2)
    lines = ladder.table(rates, rates, about)
    assert lines[3].endswith("| 20.0 | 20.0 | 8% | 2.00 × rung 1 |")
    assert next(line for line in lines if line.startswith("| 8 |")).endswith(
        "| 90.0 | 90.0 | 19% | 1.50 × rung 6 |"
    )


def test_the_readme_lists_every_rung_as_the_program_prints_it(ladder):
    printed = re.findall(r"^\| (\d.*?|kernel.*?) \| (.+?) \|", README.read_text("utf-8"), re.M)
    assert printed == [(row.name, row.adds) for row in ladder.ROWS]
