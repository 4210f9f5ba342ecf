"""Whatever a function does in a diagnosis, the answer is a verdict in plain words.

`hostile_attentions.py` has the functions. Each runs in a process of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import json
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
from regard.diagnosis.calls.convention import CallResult, Question, ReturnedArray
from regard.diagnosis.isolation import diagnose_target
from regard.diagnosis.process import protocol, supervisor
from regard.diagnosis.process.running import MAX_BYTES
from regard.diagnosis.reading.signature import Callee, Parameter
from regard.diagnosis.verdict import diagnose
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
    """Waits but half a second beyond the limit of a call."""
    monkeypatch.setattr(isolation, "GRACE_SECONDS", 0.5)


def diagnosed(name, **options):
    found = diagnose_target(f"{HOSTILE}:{name}", options)
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
    assert diagnosed(name).verdict == "right"


@linux
@pytest.mark.parametrize("name", ["forges_a_verdict", "replaces_json"])
def test_a_function_cannot_give_its_own_verdict(name):
    assert diagnosed(name).names == ("no_scale",)


@pytest.mark.parametrize("name", ["replaces_numpy", "replaces_the_library"])
def test_a_function_that_breaks_what_calls_it_has_a_verdict(name):
    assert diagnosed(name).verdict == "unusable"


# --- the function ends, or does not --------------------------------------------------------------


@unix
@pytest.mark.parametrize(
    ("name", "finding", "said"),
    [
        ("exits", "raised", "SystemExit: 0"),
        ("interrupts", "raised", "KeyboardInterrupt"),
        ("recurses", "raised", "RecursionError"),
        ("exits_at_once", "ends_process", "(exit code 0)"),
        ("segfaults", "ends_process", "(signal 11)"),
        ("kills_its_group", "ends_process", "(signal 9)"),
        pytest.param(
            *("kills_its_parent", "ends_process", "it ended the process that watches it"),
            marks=linux,
        ),
        ("asks_its_parent_to_end", "ends_process", "it ended the process that watches it"),
        ("prints_without_end", "prints", "it printed more than 4194304 characters in one call"),
        ("raises_a_hostile_object", "raised", "Hostile"),
        ("raises_a_long_text", "raised", r"ValueError: \x1b]0;title\x07"),
    ],
)
def test_an_early_end_is_the_verdict(name, finding, said):
    found = diagnosed(name)
    assert found.verdict == "unusable"
    assert finding in names(found)
    assert said in found.summary


@unix
@pytest.mark.parametrize("name", ["stops_itself", "hears_no_signal", "catches_everything"])
def test_a_function_that_hears_no_signal_is_ended(name, impatient):
    found = diagnosed(name, time_limit=0.5)
    assert names(found) == {"hangs"}
    assert "it did not return from the probe" in found.summary


# --- the function takes too much -----------------------------------------------------------------


@linux
def test_more_memory_than_allowed_is_refused_to_the_function():
    assert "MemoryError: Unable to allocate 8.00 GiB" in diagnosed("allocates_much").summary


@linux
def test_memory_that_no_limit_of_a_process_counts_is_watched():
    found = diagnosed("shares_much_memory", time_limit=20)
    assert names(found) == {"memory"}
    assert "it took more than 1 GiB of memory in the probe" in found.summary


@linux
def test_too_many_processes_are_ended():
    found = diagnosed("forks_many", time_limit=20)
    assert names(found) == {"processes"}
    assert "it started more than 64 processes in the probe" in found.summary


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
    ("name", "finding", "said"),
    [
        ("returns_deep_nesting", "type", "it returned list, which holds no array"),
        ("returns_itself", "type", "it returned list, which holds no array"),
        ("returns_a_huge_array", "shape", "it returned shape (1048576, 1048576)"),
        ("returns_a_large_array", "shape", "it returned shape (3, 8388608)"),
        ("returns_many_arrays", "shape", "it returned shape (3,) and (3,) and (3,)"),
        ("returns_a_hostile_object", "raised", "KeyError"),
        ("returns_what_never_ends", "hung", "it did not return within 0.5 s"),
    ],
)
def test_what_is_no_output_is_the_verdict(name, finding, said):
    found = diagnosed(name, time_limit=0.5 if finding == "hung" else 10.0)
    assert found.verdict == "unusable"
    assert finding in names(found)
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
    found = diagnosed("right", time_limit=0.5)
    assert names(found) == {
        "hangs" if name in LATE else "ends_process" if name in ENDS else "channel"
    }
    assert "in loading the file" in found.summary or "from loading the file" in found.summary


QUESTION = Question("p", ({"q": np.ones((2, 3)), "scale": 0.5},))
RETURNED = CallResult(
    (ReturnedArray((2, 3), "float64", np.ones((2, 3))),), printed="hello", changed=("q",)
)
CALLEE = Callee(
    "f",
    (Parameter("q", "query"), Parameter("p", None, False, True, 0)),
    weights={name: np.ones((3, 3)) for name in ("W_q", "W_k", "W_v")},
)


def message(made):
    chunks = iter([made[:32], made[32:]])
    return protocol.receive(lambda count: next(chunks, b""), KEY, MAX_BYTES)


def readers():
    return [protocol.as_callees, protocol.as_error, lambda one: protocol.as_results(one, QUESTION)]


def test_what_one_side_writes_the_other_reads():
    got = protocol.as_question(message(protocol.question_frame(KEY, 1, QUESTION)))
    np.testing.assert_array_equal(got.calls[0]["q"], QUESTION.calls[0]["q"])
    assert got.calls[0]["scale"] == 0.5
    (back,) = protocol.as_results(message(protocol.results_frame(KEY, 2, [RETURNED])), QUESTION)
    np.testing.assert_array_equal(back.arrays[0].numbers, RETURNED.arrays[0].numbers)
    assert (back.printed, back.changed, back.arrays[0].dtype) == ("hello", ("q",), "float64")
    readings = [CALLEE, replace(CALLEE, heads=3)]
    callee, other = protocol.as_callees(message(protocol.callees_frame(KEY, 3, readings)))
    assert (callee.number, other.number, other.heads) == (0, 1, 3)
    assert (callee.name, callee.parameters) == (CALLEE.name, CALLEE.parameters)
    np.testing.assert_array_equal(callee.weights["W_k"], CALLEE.weights["W_k"])
    np.testing.assert_array_equal(other.weights["W_v"], CALLEE.weights["W_v"])
    error = message(protocol.error_frame(KEY, 4, "OptionError", "no\x1b"))
    assert protocol.as_error(error) == ("OptionError", r"no\x1b")


def test_a_changed_byte_makes_a_frame_junk():
    whole = protocol.results_frame(KEY, 1, [RETURNED])
    for place in range(0, len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 4
        with pytest.raises((protocol.InvalidMessage, EOFError)):
            message(bytes(changed))
    other = protocol.results_frame(b"another key, yes", 1, [RETURNED])
    with pytest.raises(protocol.InvalidMessage):
        message(other)


HOSTILE_JSON = [
    b"",
    b"null",
    b"[1, 2]",
    b"[" * 200_000,
    b'{"calls":' * 50_000,
    b'{"calls": [[]]}',
    b'{"error": 5, "kind": "OptionError"}',
    b'{"error": "x", "kind": "KeyboardInterrupt"}',
    b"1" * 100_000,
    b"\xff\xfe",
    b'{"calls": [{"arrays": [[[1e999], "f", true]], "a_list": false, "problem": "", "kind": "", '
    b'"printed": "", "changed": []}]}',
]


@pytest.mark.parametrize("number", range(len(HOSTILE_JSON)))
def test_hostile_text_in_a_valid_frame_is_junk(number):
    for reader in readers():
        with contextlib.suppress(protocol.InvalidMessage):
            assert reader(protocol.Message(1, HOSTILE_JSON[number], b"")) is None  # it is no error


ODD = [None, True, -1, 2**70, 0.5, "x", "\x1b" * 5000, [], [[]], [-1], [2**62, 2**62], {}, {"a": 1}]


def test_any_value_in_any_place_is_junk_or_harmless():
    rng = random.Random(0)
    made = {
        "callee": message(protocol.callees_frame(KEY, 1, [CALLEE])),
        "returned": message(protocol.results_frame(KEY, 1, [RETURNED, RETURNED])),
        "error": message(protocol.error_frame(KEY, 1, "OptionError", "no")),
    }
    refused = 0
    for _ in range(3000):
        one = rng.choice(list(made.values()))
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
        for reader in readers():
            try:
                reader(protocol.Message(1, json.dumps(content).encode(), data))
            except protocol.InvalidMessage:
                refused += 1
    assert refused > 5000


def test_any_valid_answers_give_a_verdict():
    """What a process may answer at most: any shapes, numbers, problems and texts, at random."""
    rng = np.random.default_rng(0)
    parameters = tuple(
        Parameter(name, role) for name, role in zip("qkv", ("query", "key", "value"), strict=True)
    )
    mask = Parameter("mask", "mask", False, True)

    def answer(question):
        shapes = [value.shape for value in question.calls[0].values() if np.ndim(value)]
        kind = rng.integers(6)
        if kind == 0:
            return [
                CallResult(problem="it raised", kind=str(rng.choice(["raised", "hung", "type"])))
            ]
        arrays = []
        for _ in range(rng.integers(1, 4)):
            shape = shapes[0] if rng.random() < 0.8 else tuple(rng.integers(0, 4, rng.integers(5)))
            numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-300, 300)
            if rng.random() < 0.3:
                numbers = np.where(rng.random(shape) < 0.3, rng.choice([np.nan, np.inf]), numbers)
            dtype = str(rng.choice(["float64", "float32", "float16", "int8", "bfloat16", "?"]))
            arrays.append(ReturnedArray(shape, dtype, numbers if rng.random() < 0.9 else None))
        return [CallResult(tuple(arrays), printed="x", changed=tuple("q")[: rng.integers(2)])]

    for _ in range(4):
        callee = Callee("f", parameters if rng.random() < 0.5 else (*parameters, mask))
        found = diagnose(None, connect=lambda *_, one=callee: ([one], answer))
        assert found.verdict in ("right", "fragile", "mistaken", "unknown", "unusable")
        assert json.dumps(found.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"W_q": (6, 6), "W_k": (6,), "W_v": (6, 6)}, "W_k has 1 axes"),
        (
            {"W_q": (6, 6), "W_k": (5, 6), "W_v": (6, 6)},
            "W_k has 5 rows but needs 6: W_q has 6 rows",
        ),
        ({"W_q": (6, 6), "W_k": (6, 4), "W_v": (6, 6)}, "W_k has 4 columns but needs 6: W_q has"),
        (
            {"W_q": (6, 6), "W_k": (6, 6), "W_v": (6, 6), "W_o": (5, 4)},
            "W_o has 5 rows but needs 6",
        ),
        (
            {"W_q": (6, 6), "W_k": (6, 6), "W_v": (6, 6), "b_k": (5,)},
            "b_k has 5 numbers but needs 6",
        ),
    ],
)
def test_weights_that_do_not_fit_together_are_refused(shapes, says):
    class Own:
        def __init__(self):
            for name, shape in shapes.items():
                setattr(self, name, np.ones(shape))

        def __call__(self, x):
            return x

    with pytest.raises(OptionError, match=says):
        diagnose(Own())


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
        diagnose_target(target, {})


@unix
def test_nothing_is_left_when_the_caller_is_killed(tmp_path):
    script = (
        "from regard.diagnosis.isolation import diagnose_target\n"
        f"diagnose_target({str(HOSTILE) + ':waits_for_ever'!r}, {{}})"
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
