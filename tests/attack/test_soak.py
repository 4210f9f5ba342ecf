"""A soak of a second finds a planted fault and nothing else; what a leak is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fresh_process import WATCHDOG
from soak_meter import MOST_MEMORY, Reading, judge

pytestmark = [
    pytest.mark.needs("fused"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def test_a_soak_of_a_second_finds_a_planted_fault_and_nothing_else():
    few = ["--minutes", "0.01", "--calls", "12", "--targets", "baseline", "--seed", "1"]
    few += ["--kinds", "attention", "gradients", "cache", "merge", "too_much"]
    program = [sys.executable, Path(__file__).with_name("soak.py"), *few, "--plant", "answer"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=WATCHDOG)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert found["wrong"]
    assert all("cache" in one and "other bytes" in one for one in found["wrong"])
    assert found["held"]["files"]["least"] == found["held"]["files"]["most"] > 0


def readings(**changes):
    same = {"memory": 90.0, "objects": 9, "files": 6, "threads": 9, "children": 0, "leftovers": 0}
    for minute in range(20):
        more = {name: same[name] + change(minute) for name, change in changes.items()}
        yield Reading(**(same | more), at=60.0 * minute)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("memory", lambda minute: minute, "memory grew by 13.0"),
        ("objects", lambda minute: 200 * minute, "objects grew by 2600.0"),
        ("files", lambda minute: minute == 10, "files went from 6 to 7"),
        ("threads", lambda minute: minute > 15, "threads went from 9 to 10"),
    ],
)
def test_what_grows_after_the_warm_up_is_noticed(name, change, says):
    _, wrong = judge(list(readings(**{name: change})))
    assert len(wrong) == 1
    assert wrong[0].startswith(says)


def test_what_grows_in_the_warm_up_or_comes_and_goes_is_not_a_leak():
    early = {"memory": lambda minute: 50 * min(minute, 6), "files": lambda minute: min(minute, 3)}
    assert judge(list(readings(**early)))[1] == []
    assert judge(list(readings(memory=lambda minute: MOST_MEMORY * (minute % 2))))[1] == []
