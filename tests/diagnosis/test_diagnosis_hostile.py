"""Whatever a function does in a diagnosis, the answer is a verdict in plain words.

`hostile_attentions.py` has the functions. Each runs in a process of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from places import SUPPORT
from regard.diagnosis import isolation
from regard.diagnosis.call import remote
from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Answer
from regard.diagnosis.diagnose import diagnose_at
from regard.diagnosis.given import Given
from regard.diagnosis.isolation import diagnose_target
from regard.diagnosis.lines import Told
from regard.diagnosis.process import protocol, supervisor
from regard.diagnosis.result import Assumption, Departure, Line, Shown
from regard.diagnosis.statements import Stated
from regard.errors import OptionError, ProblemError

HOSTILE = SUPPORT / "hostile_attentions.py"
KEY = b"k" * supervisor.KEY_BYTES
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def impatient(monkeypatch):
    """Waits but half a second for a call, and beyond its limit."""
    monkeypatch.setattr(isolation, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(isolation, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(isolation, "SEARCH_SECONDS", 0.5)


def diagnosed(name):
    found = diagnose_target(f"{HOSTILE}:{name}", f"{HOSTILE}:call")
    for said in (found.summary, *(one.text for one in found.findings)):
        assert "Traceback" not in said
        assert said.isprintable()
    return found


def names(found):
    return {one.name for one in found.findings}


# --- the function does something beside computing ------------------------------------------------


@linux
@pytest.mark.parametrize(
    "name",
    [
        "writes_to_every_file",
        "refuses_open_files",
        "closes_every_file",
        "reads_every_file",
        "threads_write_after_the_return",
        "replaces_stdout",
        "changes_the_process",
        "sets_an_alarm",
        "lowers_the_recursion_limit",
    ],
)
def test_what_a_function_does_to_its_own_process_does_not_change_the_verdict(name):
    found = diagnosed(name)
    assert found.verdict == "right", found.summary


@linux
@pytest.mark.parametrize("name", ["forges_a_verdict", "replaces_json"])
def test_a_function_cannot_give_its_own_verdict(name):
    assert diagnosed(name).verdict == "wrong"


@pytest.mark.parametrize("name", ["replaces_numpy", "replaces_the_library"])
def test_a_function_that_breaks_what_calls_it_has_a_verdict(name):
    assert diagnosed(name).verdict == "not_callable"


# --- the function ends, or does not --------------------------------------------------------------


@unix
@pytest.mark.parametrize(
    ("name", "finding", "said"),
    [
        ("exits", "", "SystemExit: 0"),
        ("interrupts", "ends_process", "(exit code 1)"),
        ("recurses", "", "RecursionError"),
        ("exits_at_once", "ends_process", "(exit code 0)"),
        ("segfaults", "ends_process", "(signal 11)"),
        ("kills_its_group", "ends_process", "(signal 9)"),
        pytest.param(
            *("kills_its_parent", "ends_process", "it ended the process that watches it"),
            marks=linux,
        ),
        ("asks_its_parent_to_end", "ends_process", "it ended the process that watches it"),
        ("prints_without_end", "", "it printed more than 4194304 characters in one call"),
        ("raises_a_hostile_object", "", "Hostile"),
        ("raises_a_long_text", "", r"ValueError: \x1b]0;title\x07"),
    ],
)
def test_an_early_end_is_the_verdict(name, finding, said):
    found = diagnosed(name)
    assert found.verdict == "not_callable"
    assert names(found) == {finding} - {""}
    assert said in found.summary


@unix
@pytest.mark.parametrize("name", ["stops_itself", "hears_no_signal", "catches_everything"])
def test_a_function_that_hears_no_signal_is_ended(name, impatient):
    found = diagnosed(name)
    assert names(found) == {"hangs"}
    assert "it did not return from the problem" in found.summary


# --- the function takes too much -----------------------------------------------------------------


@linux
def test_more_memory_than_allowed_is_refused_to_the_function():
    assert "MemoryError: Unable to allocate 8.00 GiB" in diagnosed("allocates_much").summary


@linux
def test_memory_that_no_limit_of_a_process_counts_is_watched():
    found = diagnosed("shares_much_memory")
    assert names(found) == {"memory"}
    assert "it took more than 1 GiB of memory in the problem" in found.summary


@linux
def test_too_many_processes_are_ended():
    found = diagnosed("forks_many")
    assert names(found) == {"processes"}
    assert "it started more than 64 processes in the problem" in found.summary


@linux
def test_a_process_that_left_its_session_is_ended_and_told():
    found = diagnosed("leaves_a_daemon")
    assert found.verdict == "right"
    assert "leaves_processes" in names(found)
    (pid,) = Path("pids.txt").read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


# --- the function returns what is no array -------------------------------------------------------


@unix
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("returns_deep_nesting", "the adapter returned"),
        ("returns_itself", "the adapter returned"),
        ("returns_a_huge_array", "for an array with shape (1048576, 1048576)"),
        ("returns_a_large_array", "it returned other arrays than a result or gradients"),
        ("returns_many_arrays", "it returned other arrays than a result or gradients"),
        ("returns_a_hostile_object", "(exit code 9)"),
    ],
)
def test_what_is_no_output_is_the_verdict(name, said):
    found = diagnosed(name)
    assert found.verdict == "not_callable"
    assert said in found.summary


# --- its process sends something else ------------------------------------------------------------

PROCESSES = {
    "junk": "os.write(1, b'\\x00junk' * 100)",
    "a list": "os.write(1, b'[1, 2]\\n' * 100)",
    "deep nesting": "os.write(1, b'[' * 60_000)",
    "no end of it": "\nwhile True: os.write(1, b'x' * 4096)",
    "a frame of 2**40 bytes": "os.write(1, bytes(24) + (2**40).to_bytes(8, 'little'))",
    "an end": "sys.exit(3)",
    "half a head": "os.write(1, bytes(5)); os.close(1)",
    "silence": "time.sleep(1000)",
    "silence, deaf": "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
}


LATE, ENDS = ("silence", "silence, deaf"), ("an end", "half a head")


@pytest.mark.parametrize("name", PROCESSES)
def test_whatever_a_process_sends_is_a_finding(name, tmp_path, monkeypatch, impatient):
    script = tmp_path / "keeper.py"
    asked = "import os, signal, sys, time\nos.read(0, 1)\n"  # an answer: it does not end before
    script.write_text(asked + PROCESSES[name], "utf-8")
    monkeypatch.setattr(supervisor, "__file__", str(script))
    monkeypatch.setattr(supervisor, "ENDING_SECONDS", 0.1)
    if name in LATE:
        monkeypatch.setattr(isolation, "LOADING_SECONDS", 0.5)
    found = diagnosed("right")
    assert names(found) == {
        "hangs" if name in LATE else "ends_process" if name in ENDS else "channel"
    }
    assert "in loading the file" in found.summary or "from loading the file" in found.summary


GIVEN = Given("p", fields=frozenset({"query"}))
ANSWER = Answer(
    frozenset({"query"}), {"output": np.ones((2, 2, 5, 4))}, changed=("query",), printed="hello"
)
WAY = Way((Adapter(len, "text", (Assumption("mask", "a"),), ("window",), 2),), "f", tried=("no",))
LINE = Line(3, "x = 1", (Shown("scores", "A", "A = Q", ((1.0, math.nan),)),), departs=True)
TOLD = Told(Departure("scores", 3, "wrong", "queries", 2, (3, 4)), "no_scale", (LINE,))


def message(made):
    chunks = iter([made[:32], made[32:]])
    return protocol.receive(lambda count: next(chunks, b""), KEY, remote.MAX_BYTES)


READERS = [remote.as_answer, remote.as_way, remote.as_told, protocol.as_error]


def test_what_one_side_writes_the_other_reads():
    asked = json.loads(json.dumps(remote.asked(GIVEN)))
    assert remote.as_given(asked, None) == GIVEN
    back = remote.as_answer(message(remote.answer_frame(KEY, 2, ANSWER)))
    np.testing.assert_array_equal(back.arrays["output"], ANSWER.arrays["output"])
    assert (back.printed, back.changed, back.reads) == ("hello", ("query",), ANSWER.reads)
    way = remote.as_way(message(remote.way_frame(KEY, 3, WAY)))
    assert way.adapters[0].assumes == WAY.adapters[0].assumes
    assert (way.name, way.tried, way.adapters[0].heads) == ("f", ("no",), 2)
    told = remote.as_told(message(remote.told_frame(KEY, 4, TOLD)))
    assert repr(told) == repr(TOLD)
    error = message(protocol.error_frame(KEY, 4, "OptionError", "no\x1b"))
    assert protocol.as_error(error) == ("OptionError", r"no\x1b")


def test_a_changed_byte_makes_a_frame_junk():
    whole = remote.told_frame(KEY, 1, TOLD)
    for place in range(0, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 4
        with pytest.raises((protocol.InvalidMessage, EOFError)):
            message(bytes(changed))
    other = remote.told_frame(b"another key, yes", 1, TOLD)
    with pytest.raises(protocol.InvalidMessage):
        message(other)


HOSTILE_JSON = [
    b"",
    b"null",
    b"[1, 2]",
    b"[" * 200_000,
    b'{"lines":' * 50_000,
    b'{"lines": [[]]}',
    b'{"error": 5, "kind": "OptionError"}',
    b'{"error": "x", "kind": "KeyboardInterrupt"}',
    b"1" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("number", range(len(HOSTILE_JSON)))
def test_hostile_text_in_a_valid_frame_is_junk(number):
    for reader in READERS:
        with contextlib.suppress(protocol.InvalidMessage):
            assert reader(protocol.Message(1, HOSTILE_JSON[number], b"")) is None  # it is no error


ODD = [None, True, -1, 2**70, 0.5, "x", "\x1b" * 5000, [], [[]], [-1], [2**62, 2**62], {}, {"a": 1}]


def test_any_value_in_any_place_is_junk_or_harmless():
    rng = random.Random(0)
    made = [
        message(remote.answer_frame(KEY, 1, ANSWER)),
        message(remote.way_frame(KEY, 1, WAY)),
        message(remote.told_frame(KEY, 1, TOLD)),
        message(protocol.error_frame(KEY, 1, "OptionError", "no")),
    ]
    refused = 0
    for _ in range(2000):
        one = rng.choice(made)
        content = json.loads(one.text)
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else range(len(place))
            key = rng.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and rng.random() < 0.8:
                place = place[key]
            else:
                break
        place[key] = rng.choice(ODD)
        data = one.data if rng.random() < 0.8 else one.data[: rng.randrange(len(one.data) + 1)]
        for reader in READERS:
            try:
                reader(protocol.Message(1, json.dumps(content).encode(), data))
            except protocol.InvalidMessage:
                refused += 1
    assert refused > 4000


def test_any_valid_answers_give_a_verdict():
    """What a process may answer at most: any shapes, numbers, problems and texts, at random."""
    rng = np.random.default_rng(0)

    class Anything:
        def ways(self):
            yield Way((Adapter(len, "text"),), "f")
            yield Way()

        def asking(self, adapter):
            return self.answer

        def answer(self, given):
            given = replace(given, fields=frozenset({"query", "key", "value", "mask"}))
            if rng.integers(6) == 0:
                return Answer(given.fields, problem="it raised", ended=rng.random() < 0.1)
            shape = given.result_shape if rng.random() < 0.9 else (2, 3)
            numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-300, 300)
            if rng.random() < 0.3:
                numbers = np.where(rng.random(shape) < 0.3, rng.choice([np.nan, np.inf]), numbers)
            dtype = str(rng.choice(["float64", "float32", "float16", "int8", "bfloat16", "?"]))
            return Answer(given.fields, {"output": numbers}, dtype, changed=("query",), printed="x")

        def tell(self, adapter, task, others):
            return TOLD

    for _ in range(4):
        found = diagnose_at(Anything(), "f", Stated())
        assert found.verdict in ("right", "fragile", "wrong", "unknown", "not_callable")
        assert json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        (f"{HOSTILE}:np", OptionError, "needs a function"),
        (f"{HOSTILE}:nameless", ProblemError, "cannot be read: ZeroDivisionError"),
        (f"{HOSTILE}:nothing", ProblemError, "has no nothing"),
    ],
)
def test_what_cannot_be_loaded_or_read_is_an_error_that_says_why(target, error, says):
    with pytest.raises(error, match=says):
        diagnose_target(target)


@unix
def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    script = (
        "from regard.diagnosis.isolation import diagnose_target\n"
        f"diagnose_target({str(HOSTILE) + ':waits_for_ever'!r}, {str(HOSTILE) + ':call'!r})"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])
    pids = tmp_path / "pids.txt"
    try:
        while not (pids.exists() and pids.read_text().endswith("\n")):
            time.sleep(0.01)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    (pid,) = map(int, pids.read_text().split())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the function's process outlives its caller")
