"""`regard bench`: what is measured, that wrong answers are refused, and what follows from times.

No test asserts a time.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from commands import CliRunner
from places import ROOT
from regard import attention, gradients
from regard.bench import command
from regard.bench.cases import (
    GRIDS,
    MASKS,
    POSITIONS,
    SHAPES,
    Case,
    case,
    dtype_of,
    grid,
    make_inputs,
)
from regard.bench.command import checked_threads
from regard.bench.correctness import accuracy, truth
from regard.bench.libraries import NO_ROTATION, PEERS, Library, Prepare, Work, peers, prepared
from regard.bench.machine import READ_BYTES, Limits, Meter, Peak
from regard.bench.measure import (
    CaseResult,
    LibraryResult,
    Report,
    as_data,
    checked,
    measure_cases,
)
from regard.bench.tables import limits_in_words, print_report, reasons
from regard.bench.timing import Budget, InThisProcess, rotation, time_in_rotation
from regard.bench.worker import THREAD_VARIABLES, Elsewhere, Here, SideError
from regard.cli import app
from regard.errors import OptionError

FAST = Budget(seconds=0, rounds=3, pause=0, warm=0, sample=0)
TINY = (
    case("full", 1, 2, 5, 7, 4),
    case("causal", 2, 2, 6, 6, 4, causal=True),
    case("masks", 2, 2, 6, 6, 4, mask="padding", unit="ms"),
    case("decode", 1, 4, 1, 9, 4, G=2, unit="GB/s"),
)
NUMPY = next(side for side in PEERS if side.name == "numpy")
LIMITS = Limits(2, 1e9, (Peak("wide", 16, 128e9, 64e9), Peak("narrow", 4, 30e9, 15e9)), 40e9)


def tiny_report(*libraries: Library, cases: tuple[Case, ...] = TINY) -> Report:
    return measure_cases(
        cases, libraries or (NUMPY,), 1, grid="tiny", budget=FAST, meter=None, start=Here
    )


def library_that(load: Any, name: str = "numpy") -> Library:
    """A peer under the name of something that is installed."""
    return Library(name, name, load)


# --- what is measured ----------------------------------------------------------------------------


def test_the_full_grid_has_every_shape_of_the_promises_both_full_and_causal():
    shapes = {(c.B, c.H, c.L, c.S, c.D, c.causal) for c in grid("full")}
    assert {(*shape, causal) for shape in SHAPES for causal in (False, True)} <= shapes
    assert {c.mask for c in grid("full")} == {None, *MASKS, *POSITIONS}
    assert {c.dtype for c in grid("full")} == {"float16", "bfloat16", "float32", "float64"}
    assert any(c.E != c.D for c in grid("full"))
    assert any(c.G != c.H for c in grid("full"))


@pytest.mark.parametrize("name", sorted(GRIDS))
def test_every_case_of_a_grid_has_a_name_of_its_own(name):
    names = [one.name for one in grid(name)]
    assert len(set(names)) == len(names)


def test_the_quick_grid_is_part_of_the_full_one():
    assert {one.name for one in grid("quick")} <= {one.name for one in grid("full")}


def test_every_case_of_the_spread_but_ordinary_queries_is_beside_a_plain_call():
    cases = grid("spread")
    ordinary = [one for one in cases if one.plain is None]
    assert {one.group for one in ordinary} == {"spread"}
    spread = [one for one in cases if one.group == "spread"]
    np.testing.assert_equal(len(ordinary) * 5, len(spread))
    assert {one.plain for one in spread} == {None, *ordinary}
    plain = {one.group: one.plain.name for one in cases if one.plain}
    assert plain["positions"].startswith("both causal 1,")
    np.testing.assert_equal(plain["masks"], "4,8,512,512,64")
    np.testing.assert_equal(plain["tails"], "8,12,256,256,64")
    assert not any(
        one.plain for name in ("full", "quick") for one in grid(name) if one.mask is None
    )


def test_larger_queries_are_the_same_times_a_number_and_one_key_is_huge():
    one = case("spread", 1, 2, 8, 8, 4, unit="ms", queries=20)
    np.testing.assert_array_equal(make_inputs(one).query, 20 * make_inputs(one.plain).query)
    np.testing.assert_array_equal(make_inputs(one).key, make_inputs(one.plain).key)
    huge = make_inputs(replace(one.plain, huge_key=True)).key
    largest = np.finfo(np.float32).max
    np.testing.assert_equal((np.abs(huge) == largest).sum((0, 1, 3)), [0, 0, 0, 0, 8, 0, 0, 0])


@pytest.mark.parametrize("mask", [None, *MASKS, *POSITIONS])
@pytest.mark.parametrize("causal", [False, True])
def test_useful_work_counts_the_visible_scores(mask, causal):
    one = case("masks", 2, 3, 300, 300, 4, E=8, mask=mask, causal=causal)
    inputs = make_inputs(one)
    visible = np.ones((2, 3, 300, 300), bool)
    if inputs.keep is not None:
        visible &= inputs.keep
    if causal:
        visible &= np.tri(300, dtype=bool)
    np.testing.assert_equal(inputs.visible, visible.sum())
    np.testing.assert_equal(inputs.operations, 2 * visible.sum() * (4 + 8))
    for direction, work in (("backward", 2.5), ("both", 3.5)):
        other = make_inputs(replace(one, direction=direction))
        np.testing.assert_equal(other.operations, int(work * inputs.operations))
    assert visible.any(-1).all()


def test_libraries_are_given_the_bias_or_else_what_is_seen():
    biased, padded, plain = (
        make_inputs(case("masks", 1, 2, 8, 8, 4, mask=mask)) for mask in ("bias", "padding", None)
    )
    assert biased.keep_or_bias is biased.bias is not None
    assert padded.keep_or_bias is padded.keep is not None
    assert plain.keep_or_bias is None


def test_the_block_mask_hides_half_of_the_keys():
    inputs = make_inputs(case("masks", 1, 1, 1024, 1024, 4, mask="blocks"))
    np.testing.assert_equal(inputs.visible * 2, 1024 * 1024)


def test_the_bytes_of_a_decode_are_its_keys_and_values_once():
    np.testing.assert_equal(case("decode", 2, 8, 1, 10, 4, G=2, E=6).bytes, 2 * 2 * 10 * 10 * 4)


def test_inputs_are_the_same_every_time_and_aligned_for_every_peer():
    one, other = make_inputs(TINY[0]), make_inputs(TINY[0])
    np.testing.assert_array_equal(one.query, other.query)
    for array in (one.query, one.key, one.value):
        np.testing.assert_equal(array.ctypes.data % 64, 0)


# --- who is right --------------------------------------------------------------------------------


ANSWERED = [
    *(
        case("masks", 2, 2, 300, 300, 8, mask=mask, dtype=dtype, causal=mask is None)
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for mask in (None, *MASKS)
    ),
    *(case("positions", 2, 2, 300, 300, 8, mask=name, causal=True) for name in POSITIONS),
    *(case("positions", 1, 2, 70, 70, 8, mask=name, direction="both") for name in POSITIONS),
    case("full", 1, 2, 5, 9, 8),
    case("decode", 2, 4, 1, 40, 8, G=2),
    case("backward", 2, 2, 70, 70, 8, causal=True, direction="backward"),
    case("backward", 1, 2, 70, 70, 8, mask="bias", direction="backward"),
    case("both", 1, 2, 70, 70, 8, mask="bias", direction="both"),
    case("both", 2, 4, 50, 60, 8, G=2, direction="both"),
    case("spread", 1, 2, 70, 70, 8, direction="both", queries=200),
    *(case("both", 1, 2, 70, 70, 8, dtype=t, direction="both") for t in ("float16", "bfloat16")),
]


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize(
    "name",
    [
        "regard",
        "numpy",
        *(
            pytest.param(name, marks=pytest.mark.needs(name, *more))
            for name, *more in (("torch",), ("onnxruntime", "onnx"), ("openvino",), ("jax",))
        ),
    ],
)
def test_every_side_is_given_every_mask_in_a_form_that_means_the_same(name):
    side = Elsewhere(name, 1)
    wrong = {}
    for one in ANSWERED:
        reason = checked(side, one, truth(make_inputs(one))).reason
        if reason is not None:
            wrong[one] = reason
    side.close()
    if name != "regard":
        rotary = {one for one in ANSWERED if one.mask == "rotary"}
        np.testing.assert_equal({wrong.pop(one) for one in rotary}, {NO_ROTATION})
    # Not every peer has gradients, or other types, or computes them as they are.
    backward = {one for one in ANSWERED if one.direction != "forward" and one.mask != "rotary"}
    if name in ("onnxruntime", "openvino"):
        np.testing.assert_equal({wrong.pop(one) for one in backward}, {"has no gradients"})
    if name not in ("regard", "torch", "numpy"):
        wrong = {one: reason for one, reason in wrong.items() if one.dtype == "float32"}
    np.testing.assert_equal(wrong, {})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("onnxruntime", marks=pytest.mark.needs("onnxruntime", "onnx")),
        pytest.param("openvino", marks=pytest.mark.needs("openvino")),
    ],
)
# JAX, where other tests have imported it, warns of every fork, and libraries fork when they load.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_arrays_whose_memory_a_library_shares_live_as_long_as_its_work(name):
    library = next(one for one in PEERS if one.name == name)
    inputs = make_inputs(TINY[0])
    shared = [weakref.ref(array) for array in (inputs.query, inputs.key, inputs.value)]
    work = prepared(library, library.load(1), inputs)
    assert isinstance(work, Work)
    del inputs
    gc.collect()
    assert all(one() is not None for one in shared)
    (output,) = work.read(work.call())
    np.testing.assert_equal(output.shape, TINY[0].answers["output"])


@pytest.mark.needs("openvino")
def test_a_library_that_sends_statistics_of_its_use_is_told_not_to(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    side = Elsewhere("openvino", 1)
    given = Path(f"/proc/{side._process.pid}/environ").read_bytes().split(b"\0")
    side.close()
    assert b"CI=true" in given


def test_a_check_of_some_rows_has_both_ends_and_agrees_with_a_check_of_all(monkeypatch):
    inputs = make_inputs(case("full", 1, 2, 200, 200, 4, causal=True, mask="padding"))
    whole = truth(inputs)
    monkeypatch.setattr("regard.bench.correctness.CHECKED_SCORES", 50 * 2 * 200)
    some = truth(inputs)
    np.testing.assert_equal((whole.rows, some.rows), (200, 50))
    rows = some.arrays["output"].where[2]
    np.testing.assert_equal((rows[0], rows[-1]), (0, 199))
    bound = 4 * 200 * np.finfo(float).eps
    every, few = (one.arrays["output"].values for one in (whole, some))
    np.testing.assert_allclose(few, every[:, :, rows], rtol=0, atol=bound)


@pytest.mark.parametrize(
    "more",
    [{"causal": True}, *({"mask": name} for name in ("bias", "dense", *POSITIONS)), {"G": 2}],
)
def test_gradients_are_checked_with_those_of_the_reference(more, monkeypatch):
    one = case("both", 1, 4, 30, 30, 8, E=6, dtype="float64", direction="both", **more)
    inputs = make_inputs(one)
    names = tuple(name for name in one.answers if name != "output")
    arrays = inputs.query, inputs.key, inputs.value, inputs.grad_output
    made = gradients(*arrays, wrt=names, kernel="reference", **inputs.options)
    whole = truth(inputs)
    monkeypatch.setattr("regard.bench.correctness.CHECKED_SCORES", 2 * 30 * 30)
    some = truth(inputs)
    for name in names:
        array = getattr(made, name)
        for found, heads in ((whole, 4), (some, 2)):
            part = found.arrays[name]
            shared = one.H // one.G if name in ("key", "value") else 1
            np.testing.assert_equal(len(part.values), heads // shared)
            bound = 2**8 * np.finfo(float).eps * np.abs(array).max()
            np.testing.assert_allclose(part.values, array[part.where], rtol=0, atol=bound)
    answer = {**made._asdict(), "output": attention(*arrays[:3], **inputs.options)}
    assert accuracy(answer, some, one).right
    for name in names:
        spoilt = getattr(made, name).copy()
        spoilt[:, some.arrays[name].where[1][0], 7] *= 1.001
        found = accuracy({**answer, name: spoilt}, some, one)
        assert not found.right
        assert f"the error of the gradient of {name} is" in str(found.reason)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda output: output * 1.001,
        lambda output: output[:, ::-1],
        lambda output: output[..., :3],
        lambda output: np.where(np.arange(output.shape[2])[:, None] == 4, np.nan, output),
        lambda output: np.where(np.arange(output.shape[2])[:, None] == 4, 0, output),
    ],
    ids=["scaled", "heads swapped", "cut", "not finite", "one row missing"],
)
def test_a_wrong_answer_is_reported_and_not_timed(spoil):
    calls = []

    def load(threads: int) -> Prepare:
        honest = NUMPY.load(threads)

        def prepare(inputs: Any) -> Work:
            work = honest(inputs)
            assert isinstance(work, Work)

            def call() -> Any:
                calls.append(1)
                return [spoil(one) for one in work.call()]

            return Work(call, lambda output: output)

        return prepare

    report = tiny_report(library_that(load), cases=(TINY[0],))
    outcome = report.results[0].outcomes["numpy"]
    assert outcome.seconds is None
    assert "wrong answer" in str(outcome.reason)
    np.testing.assert_equal(len(calls), 1)
    assert report.results[0].ratio is None
    assert report.results[0].seconds is not None
    assert any("numpy: wrong answer" in line for line in reasons(report))


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize(
    ("computed_in", "wrong"), [("float16", False), ("bfloat16", True), ("float32", False)]
)
def test_a_peer_that_computes_in_a_narrower_type_is_wrong_and_not_fast(computed_in, wrong):
    def load(threads: int) -> Prepare:
        honest = NUMPY.load(threads)

        def prepare(inputs: Any) -> Work:
            work = honest(inputs)
            assert isinstance(work, Work)
            narrow = dtype_of(computed_in)
            return Work(lambda: [one.astype(narrow) for one in work.call()], lambda x: x)

        return prepare

    one = case("types", 1, 2, 60, 60, 8, dtype="float16")
    report = tiny_report(library_that(load), cases=(one,))
    outcome = report.results[0].outcomes["numpy"]
    # One rounding: 0.43 units of the type it is to.
    np.testing.assert_allclose(outcome.rms, 3.4 if wrong else 0.42, rtol=0.05)
    np.testing.assert_equal(outcome.seconds is None, wrong)
    np.testing.assert_equal(report.results[0].ratio is None, wrong)
    text = printed(report)
    np.testing.assert_equal("wrong (3." in text, wrong)
    np.testing.assert_equal("units of float16 (root mean square), more than 3" in text, wrong)
    assert "In brackets: the error of half types" in text


def test_a_side_that_raises_is_reported_in_its_own_words_and_the_others_go_on():
    def load(_: int) -> Prepare:
        def prepare(_: Any) -> Work:
            raise RuntimeError("no such \x1b[31moperator")

        return prepare

    outcome = tiny_report(library_that(load)).results[0].outcomes["numpy"]
    np.testing.assert_equal(outcome.reason, r"RuntimeError: no such \x1b[31moperator")


def test_a_side_that_cannot_even_be_loaded_is_missing_with_its_reason():
    def load(_: int) -> Prepare:
        raise OSError("a library is broken")

    report = tiny_report(library_that(load))
    np.testing.assert_equal(report.missing["numpy"], "OSError: a library is broken")
    assert "numpy" not in report.versions


def test_a_peer_that_is_not_installed_is_shown_as_missing():
    report = tiny_report(library_that(lambda _: NUMPY.load(1), "no_such_library"))
    np.testing.assert_equal(report.missing["no_such_library"], "not installed")
    outcome = report.results[0].outcomes["no_such_library"]
    np.testing.assert_equal(outcome, LibraryResult(reason="not installed"))
    np.testing.assert_equal(reasons(report), ["no_such_library: not installed"])


def test_a_matrix_of_scores_that_would_not_fit_is_refused():
    long = next(one for one in grid("full") if one.group == "long")
    inputs = replace(make_inputs(TINY[0]), case=long)
    found = prepared(NUMPY, NUMPY.load(1), inputs)
    np.testing.assert_equal(found, "its matrix of scores would have 1.1e+09 numbers")


# --- how it is timed -----------------------------------------------------------------------------


def test_every_round_begins_with_the_next_side():
    order = ["".join(one) for one in rotation("abc", 4)]
    np.testing.assert_equal(order, ["abc", "bca", "cab", "abc"])


def test_sides_take_turns_in_blocks_whose_first_calls_do_not_count():
    said: list[str] = []
    calls = {name: InThisProcess(lambda name=name: said.append(name)) for name in "ab"}
    taken = time_in_rotation(calls, FAST)
    # Five calls each to see how long one takes; then per round, two that do not count and one.
    warm, counted = 2, 1
    block = warm + counted
    blocks = "".join(said[10:])
    np.testing.assert_equal(blocks, "a" * block + 2 * "b" * block + 2 * "a" * block + "b" * block)
    for samples in taken.values():
        np.testing.assert_equal(len(samples.seconds), FAST.rounds)
        assert samples.median > 0


def test_short_calls_are_repeated_within_a_sample():
    taken = time_in_rotation({"a": InThisProcess(lambda: None)}, replace(FAST, sample=1e-4))
    assert taken["a"].repeats > 10


# --- in processes of their own -------------------------------------------------------------------


START = subprocess.Popen
RUNS_WORKER = """if True:
    import os, sys, time
    from regard.bench import worker
    class Here(worker.Here):
        def __init__(self, library, threads):
            def load(_):
                {load}
                return lambda inputs: worker.Work(call, lambda x: x)
            def call():
                {call}
            super().__init__(worker.Library("numpy", "numpy", load), threads)
    worker.Here = Here
    worker.main(*sys.argv[1:])
"""


@pytest.fixture
def process_that(monkeypatch):
    """Starts a side whose process runs a program; all are closed with the test."""
    started: list[Elsewhere] = []

    def start(program: str) -> Elsewhere:
        def popen(words: list[str], **options: Any) -> Any:
            return START([words[0], "-c", program, *words[3:]], **options)

        monkeypatch.setattr("regard.bench.worker.subprocess.Popen", popen)
        started.append(Elsewhere("numpy", 1))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_process_has_as_many_threads_as_it_was_given(process_that):
    before = dict(os.environ), checked_threads(None)
    call = (
        "print('a library says something'); return os.write(2, str([*map(os.environ.get, "
        "worker.THREAD_VARIABLES), len(os.sched_getaffinity(0)) if hasattr(os, "
        "'sched_getaffinity') else 1]).encode()) and os._exit(1)"
    )
    reason = ended(process_that(RUNS_WORKER.format(load="pass", call=call)))
    np.testing.assert_equal(reason.partition(": ")[2], str(["1"] * len(THREAD_VARIABLES) + [1]))
    # The process that asked stays as it was.
    np.testing.assert_equal((dict(os.environ), checked_threads(None)), before)


def ended(side: Elsewhere) -> str:
    """How its process ends when it prepares a case."""
    with pytest.raises(SideError) as caught:
        side.prepare(TINY[0])
    assert caught.value.side is side
    with pytest.raises(SideError):
        side.estimate()
    return str(caught.value)


POSIX = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("sys.exit('bad \\x1b')", r"its process ended with exit code 1: bad \x1b"),
        pytest.param("os.kill(os.getpid(), 9)", "as when memory runs out", marks=POSIX),
        pytest.param(
            "os.kill(os.getpid(), 11)",
            "its process ended by signal 11 (",
            marks=[POSIX, pytest.mark.full],
        ),
    ],
)
def test_a_library_that_ends_its_process_is_a_reason_that_says_how(process_that, call, says):
    assert says in ended(process_that(RUNS_WORKER.format(load="pass", call=call)))


def test_a_library_that_does_not_answer_is_ended(process_that, monkeypatch):
    side = process_that(RUNS_WORKER.format(load="pass", call="time.sleep(600)"))
    monkeypatch.setattr("regard.bench.worker.MOST_SECONDS", 0.5)
    np.testing.assert_equal(ended(side), "no answer for 0.5 s, so its process was ended")


def test_a_library_that_cannot_be_loaded_says_why_from_its_process(process_that):
    with pytest.raises(SideError, match=r"^OSError: a library is broken$"):
        process_that(RUNS_WORKER.format(load="raise OSError('a library is broken')", call="pass"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_waits_is_stopped_with_all_its_threads(process_that):
    spins = "import threading; [threading.Thread(target=spin, daemon=True).start() for _ in '12']"
    program = RUNS_WORKER.format(load=spins, call="return [worker.np.zeros((1, 2, 5, 4), 'f4')]")
    program = program.replace("import os", "spin = lambda: exec('while True: pass'); import os")
    side = process_that(program)
    assert not isinstance(side.prepare(TINY[0]), str)
    pid = side._process.pid
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for _ in range(2)]
    np.testing.assert_equal(fields[1][0], "T")
    np.testing.assert_equal(fields[0][11:13], fields[1][11:13])
    assert side.estimate() > 0


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux to end processes")
def test_no_process_is_left_however_the_one_that_asks_ends():
    program = """if True:
        import os, signal, sys
        from regard.bench.worker import Elsewhere
        side = Elsewhere("regard", 1)
        print(side._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False)
    np.testing.assert_equal(done.returncode, -9)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # nobody has asked for its exit code
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail("its process is still there")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SideError])
def test_all_sides_are_let_go_of_when_the_run_is_interrupted(error):
    closed = []

    class Interrupted(Here):
        def block(self, *_: int) -> list[float]:
            raise error("stop", self)

        def close(self) -> None:
            closed.append(self)

    def run() -> Any:
        return measure_cases(TINY[:1], (NUMPY,), 1, budget=FAST, meter=None, start=Interrupted)

    if error is SideError:
        outcomes = run().results[0].outcomes
        np.testing.assert_equal([one.reason for one in outcomes.values()], ["stop", "stop"])
    else:
        with pytest.raises(KeyboardInterrupt):
            run()
    np.testing.assert_equal(len(set(closed)), 2)


def test_a_process_that_ends_is_reported_and_started_again_for_the_next_case():
    started = []

    class Ends(Here):
        def __init__(self, library: Library, threads: int) -> None:
            super().__init__(library, threads)
            self.name = library.name
            started.append(self.name)

        def block(self, *numbers: int) -> list[float]:
            if self.name == "numpy" and started.count("numpy") == 1:
                raise SideError("its process ended with exit code -9", self)
            return super().block(*numbers)

    first, second = measure_cases(
        TINY[:2], (NUMPY,), 1, budget=FAST, meter=None, start=Ends
    ).results
    np.testing.assert_equal(first.outcomes["numpy"].reason, "its process ended with exit code -9")
    assert first.seconds is not None
    assert second.outcomes["numpy"].seconds is not None
    np.testing.assert_equal(started, ["regard", "numpy", "numpy"])


def test_sides_in_processes_of_their_own_are_checked_and_timed():
    (found,) = measure_cases(TINY[:1], (NUMPY,), 1, budget=FAST, meter=None).results
    for name in ("regard", "numpy"):
        np.testing.assert_equal(len(found.outcomes[name].rounds), FAST.rounds)
        assert found.outcomes[name].error is not None


# --- what follows from times ---------------------------------------------------------------------


def result(seconds: dict[str, float | None], one: Case = TINY[0], **more: Any) -> CaseResult:
    return CaseResult(
        one,
        2_000_000,
        5,
        1e-6,
        {name: LibraryResult(seconds=s) for name, s in seconds.items()},
        **more,
    )


def report_of(*results: CaseResult) -> Report:
    about = {"cpu": "a CPU", "threads": 2, "cpus": 2, "target": "wide", "system": "Linux"}
    about |= {"architecture": "x86_64", "python": "3", "blas": "a BLAS", "load": 0.0}
    return Report("tiny", about, LIMITS, {"regard": "1", "torch": "2"}, {}, results)


def test_the_ratio_is_to_the_fastest_peer_that_was_timed():
    one = result({"regard": 2.0, "torch": 5.0, "jax": 3.0, "numpy": None})
    np.testing.assert_equal((one.best_peer, one.ratio), ("jax", 1.5))
    np.testing.assert_equal(result({"regard": 2.0, "numpy": None}).ratio, None)
    np.testing.assert_equal(result({"regard": None, "numpy": 1.0}).ratio, None)


def test_the_summary_is_the_geometric_mean_and_the_worst():
    slow = replace(TINY[1], group="causal")
    report = report_of(
        result({"regard": 1.0, "torch": 8.0}), result({"regard": 2.0, "torch": 1.0}, slow)
    )
    np.testing.assert_allclose(report.mean_ratio(), 2.0, rtol=1e-15)
    np.testing.assert_allclose(report.mean_ratio("full"), 8.0, rtol=1e-15)
    assert report.worst is report.results[1]
    np.testing.assert_equal(report_of(result({"regard": 1.0})).mean_ratio(), None)


def test_speeds_are_in_the_unit_of_the_case():
    times = {"regard": 1e-3}
    np.testing.assert_allclose(result(times).speed(1e-3), 2.0)
    np.testing.assert_allclose(result(times, TINY[2]).speed(1e-3), 1.0)
    np.testing.assert_allclose(result(times, TINY[3]).speed(1e-6), TINY[3].bytes / 1e3)
    np.testing.assert_allclose(result(times, replace(TINY[0], unit="µs")).speed(1e-6), 1.0)


def test_a_share_is_of_what_the_machine_can_do_at_most():
    np.testing.assert_allclose(result({"regard": 1e-3}, limit=128e9).share, 2 / 128)
    decode = result({"regard": 1e-6}, TINY[3], limit=40e9)
    np.testing.assert_allclose(decode.share, TINY[3].bytes / 1e-6 / 40e9)
    np.testing.assert_equal(result({"regard": None}, limit=1e9).share, None)
    np.testing.assert_equal(result({"regard": 1e-3}).share, None)


def test_a_mask_is_compared_with_the_same_call_without_it():
    masked = tiny_report().results[2]
    assert masked.plain is not None
    assert masked.plain.seconds is not None
    assert masked.cost is not None
    np.testing.assert_allclose(masked.cost, masked.seconds / masked.plain.seconds)
    assert "regard, the plain call" not in masked.outcomes


@pytest.mark.parametrize(
    ("more", "cost", "beside"),
    [
        ({"queries": 20}, 3.0, "3.00 × the time of queries×1"),
        ({"huge_key": True}, 3.0, "3.00 × the time without it"),
        ({"mask": "alibi", "causal": True}, 3.0, "3.00 × the time without positions"),
        ({"group": "tails"}, 3 * 4**2 / 5**2, "1.92 × the time per score of 4 keys"),
    ],
)
def test_what_a_case_costs_is_measured_beside_its_plain_call(more, cost, beside, monkeypatch):
    monkeypatch.setattr("regard.bench.cases.WHOLE", 4)
    one = replace(case("spread", 1, 2, 5, 5, 4, unit="ms"), **more)
    found = result({"regard": 3e-3}, one, plain=LibraryResult(seconds=1e-3))
    np.testing.assert_allclose(found.cost, cost)
    assert beside in printed(report_of(found))
    (timed,) = tiny_report(cases=(one,)).results
    assert timed.cost is not None


# --- the machine ---------------------------------------------------------------------------------


PAIRS = replace(LIMITS, peaks=(replace(LIMITS.peaks[0], bfloat16=300e9), LIMITS.peaks[1]))


@pytest.mark.parametrize(
    ("limits", "more", "what"),
    [
        (LIMITS, {}, "float32"),
        (LIMITS, {"dtype": "float16"}, "float32"),
        (LIMITS, {"dtype": "float64"}, "float64"),
        (LIMITS, {"dtype": "bfloat16"}, "float32"),
        (PAIRS, {"dtype": "bfloat16"}, "bfloat16"),
        (LIMITS, {"unit": "ms"}, None),
        (LIMITS, {"unit": "GB/s"}, f"read {TINY[0].bytes}"),
        (LIMITS, {"unit": "GB/s", "S": 2**25}, f"read {READ_BYTES}"),
    ],
)
def test_a_case_is_bounded_by_the_peak_of_its_type_or_by_reading_as_much(limits, more, what):
    np.testing.assert_equal(limits.what(replace(TINY[0], **more)), what)


def test_a_measurement_raises_a_limit_and_never_lowers_it():
    for what, high in (("float32", 200e9), ("float64", 99e9), (f"read {READ_BYTES}", 50e9)):
        raised = LIMITS.raised(what, high)
        np.testing.assert_equal(raised.raised(what, 1e9), raised)
        found = raised.read if what.startswith("read") else getattr(raised.peaks[0], what)
        np.testing.assert_equal((found, raised.peaks[1]), (high, LIMITS.peaks[1]))
    np.testing.assert_equal(LIMITS.raised("read 4096", 99e9), LIMITS)
    np.testing.assert_equal(Limits.from_data(json.loads(json.dumps(asdict(PAIRS)))), PAIRS)


class FakeMeter(Here):
    """Finds the next of these rates in every round."""

    def __init__(self, rates: Iterator[float], order: list[str]) -> None:
        self.rates, self.order = rates, order

    def limits(self) -> Limits:
        return LIMITS

    def prepare(self, case: Case) -> Any:
        self.order.append(f"{case.name}:")
        return {}

    def estimate(self) -> float:
        return 1 / 1e9

    def block(self, *_: int) -> list[float]:
        self.order.append("meter")
        return [1 / next(self.rates)]

    def release(self) -> None:
        pass


def test_the_meter_takes_its_turn_and_the_best_of_the_run_bounds_every_case():
    order: list[str] = []

    class Ordered(Here):
        def block(self, *numbers: int) -> list[float]:
            order.append("library")
            return super().block(*numbers)

    cases = TINY[0], TINY[1], TINY[2], TINY[3]
    rates = iter([1e9, 2e9, 3e9, 1e9, 200e9, 1e9, 5e9, 7e9, 6e9])
    report = measure_cases(
        cases, (), 1, budget=FAST, start=Ordered, meter=lambda _: FakeMeter(rates, order)
    )
    np.testing.assert_equal([one.limit for one in report.results], [200e9, 200e9, None, 7e9])
    np.testing.assert_equal(report.limits.peaks[0].float32, 200e9)
    turns = ["library", "meter", "meter", "library", "library", "meter"]
    np.testing.assert_equal(order[:7], [f"{TINY[0].name}:", *turns])
    assert not any(one.startswith("padding") for one in order), "nothing bounds it"


def test_a_meter_that_ends_leaves_the_case_without_a_limit_of_its_own():
    class Broken(FakeMeter):
        def block(self, *_: int) -> list[float]:
            raise SideError("its process ended", self)

    (found,) = measure_cases(
        TINY[:1], (NUMPY,), 1, budget=FAST, start=Here, meter=lambda _: Broken(iter([]), [])
    ).results
    np.testing.assert_equal(found.limit, 128e9)
    np.testing.assert_equal(list(found.outcomes), ["regard", "numpy"])
    assert found.ratio is not None


@pytest.mark.parametrize(
    ("free", "timed"), [(2**31, ["regard", "numpy"]), (2**29 + 5000, ["regard"]), (2**29, [])]
)
def test_what_does_not_fit_into_memory_is_refused_before(monkeypatch, free, timed):
    monkeypatch.setattr("regard.bench.measure.free_memory", lambda: free)
    report = tiny_report(cases=TINY[:1])
    outcomes = report.results[0].outcomes
    np.testing.assert_equal([name for name, one in outcomes.items() if one.seconds], timed)
    for name in outcomes.keys() - set(timed):
        assert "GB of memory, of which" in str(outcomes[name].reason)
    assert printed(report)


@pytest.mark.parametrize(("seconds", "says"), [(1.5e-5, True), (1e-3, False)])
def test_a_share_above_one_is_not_left_unexplained(seconds, says):
    text = printed(report_of(result({"regard": seconds}, limit=128e9)))
    np.testing.assert_equal("A share above 100%" in text, says)


def test_the_peak_is_printed_beside_what_it_follows_from():
    first, *_, last = limits_in_words(LIMITS)
    np.testing.assert_equal(
        first,
        "multiply-add peak, wide: 128 GF/s (64 in float64) = "
        "2 threads × 1.00 GHz × 16 lanes × 2 × 2.00 per cycle",
    )
    assert last.startswith("reading: 40.0 GB/s")
    assert "(64 in float64, 300 in bfloat16)" in limits_in_words(PAIRS)[0]


@pytest.mark.needs("fused")
def test_the_meter_measures_every_target_of_this_machine(monkeypatch):
    from regard.compute import native

    monkeypatch.setattr("regard.bench.machine.BURST", 0.002)
    meter = Meter(1)
    limits = Limits.from_data(meter.limits())
    targets = [target for target, runs in native.targets().items() if runs]
    np.testing.assert_equal([peak.target for peak in limits.peaks], targets)
    assert all(peak.float32 > 0 and peak.float64 > 0 for peak in limits.peaks)
    assert limits.read > 0
    assert limits.clock > 0
    for one in (TINY[0], replace(TINY[3], S=4096)):
        np.testing.assert_equal(meter.prepare(one), {})
        (seconds,) = meter.block(1, 1, 9)
        assert 0 < seconds < np.inf
    np.testing.assert_equal(meter.prepare(TINY[2]), "nothing bounds it")


# --- where it goes -------------------------------------------------------------------------------


def test_json_has_every_case_and_side_and_no_number_that_json_does_not_have():
    report = tiny_report(NUMPY, library_that(lambda _: NUMPY.load(1), "no_such_library"))
    data = json.loads(json.dumps(as_data(report), allow_nan=False))
    np.testing.assert_equal([one["name"] for one in data["cases"]], [one.name for one in TINY])
    for one in data["cases"]:
        assert set(one["sides"]) == {"regard", "numpy", "no_such_library"}
        for side in ("regard", "numpy"):
            timed = one["sides"][side]
            np.testing.assert_equal(timed["samples"], FAST.rounds)
            assert timed["seconds"] > 0
            assert 0 <= timed["error"] <= one["tolerance"]
        assert one["sides"]["no_such_library"]["reason"] == "not installed"
        np.testing.assert_allclose(
            one["ratio"], one["sides"]["numpy"]["seconds"] / one["sides"]["regard"]["seconds"]
        )
    assert data["missing"] == {"no_such_library": "not installed"}
    assert data["machine"]["threads"] == 1
    assert set(data["versions"]) == {"regard", "numpy"}
    assert data["summary"]["worst"]["case"] in [one.name for one in TINY]


def test_an_infinite_error_is_null_in_json():
    one = replace(TINY[0], unit="ms")
    wrong = CaseResult(one, 1, 1, 1.0, {"regard": LibraryResult(error=math.inf, reason="wrong")})
    data = as_data(report_of(wrong))
    np.testing.assert_equal(data["cases"][0]["sides"]["regard"]["error"], None)


def printed(report: Report) -> str:
    console = Console(width=140, file=None, color_system=None)
    with console.capture() as capture:
        print_report(report, console)
    return capture.get()


def test_the_table_shows_times_ratios_shares_and_reasons():
    text = printed(
        report_of(
            result({"regard": 1e-3, "torch": 4e-3}, limit=128e9),
            result({"regard": 2e-3, "torch": None}, TINY[2], plain=LibraryResult(seconds=1e-3)),
        )
    )
    first = next(line for line in text.splitlines() if line.startswith("1,2,5,7,4"))
    np.testing.assert_equal(" ".join(first.split()), "1,2,5,7,4 GF/s 2 0.5 4.00 2% of peak")
    second = next(line for line in text.splitlines() if line.startswith("padding"))
    assert second.split()[2:5] == ["ms", "2", "–"]
    assert "2.00 × the time without mask" in second
    assert "4.00 × the best peer, geometric mean" in text


def test_a_busy_machine_is_said():
    report = report_of(result({"regard": 1.0}))
    assert "was busy" not in printed(report)
    assert "was busy" in printed(replace(report, machine={**report.machine, "load": 3.0}))


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_picture_has_a_bar_per_compared_case(count, tmp_path):
    from regard.bench.plots import draw, save_plot

    ratios = {"regard": 1.0, "torch": 2.0, "numpy": 9.0}
    report = report_of(result({"regard": 1.0}), *[result(ratios) for _ in range(count)])
    axes = draw(report)
    np.testing.assert_equal(len(axes.patches), count)
    np.testing.assert_equal([text.get_text() for text in axes.texts], ["2.00"] * count)
    save_plot(report, str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.needs("matplotlib")
@pytest.mark.parametrize("slowest", [1.0, 1e-4, 1e4])
def test_the_picture_shows_every_mark_and_all_that_is_written(slowest):
    from matplotlib.collections import PathCollection
    from matplotlib.text import Text

    from regard.bench.plots import draw

    report = report_of(result({"regard": slowest, "torch": 2.0, "numpy": 90.0}))
    machine = {**report.machine, "cpu": "A Processor of $x_1$ and of many more words " * 9}
    axes = draw(replace(report, machine=machine))
    axes.figure.canvas.draw()
    for text in axes.figure.findobj(Text):
        if text.get_visible() and text.get_text():
            box = text.get_window_extent()
            ends = [*axes.figure.bbox.min - box.min, *box.max - axes.figure.bbox.max]
            np.testing.assert_array_less(ends, 1e-9, text.get_text())
    assert "$x_1$" in axes.get_title()
    assert not axes.title.get_parse_math()
    for marks in axes.findobj(PathCollection):
        for across, _ in marks.get_offsets():
            np.testing.assert_array_less(axes.get_xlim()[0], across)
            np.testing.assert_array_less(across, axes.get_xlim()[1])


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the repository")
def test_saved_results_become_the_tables_and_verdicts_of_the_documentation():
    report = report_of(
        result({"regard": 1e-3, "torch": 4e-3}, limit=128e9),
        result({"regard": 2e-3, "torch": 1e-3}, replace(TINY[0], group="causal", L=1024)),
    )
    data = json.loads(json.dumps(as_data(report)))
    lines = script("table").markdown(data)
    assert "| 1,2,5,7,4 | **2** | 0.5 | 4.00 | 2% |" in lines
    half = {**data["cases"][0], "dtype": "float16"}
    half["sides"]["regard"]["rms"] = 0.4249
    half["sides"]["torch"] |= {"rms": 8.1, "seconds": None, "reason": "wrong answer: …"}
    assert "| 1,2,5,7,4 | **2** (0.42) | wrong (8.10) | 4.00 | 2% |" in script("table").table(
        [half]
    )
    kept = {one.words: one for one in script("promises").promises(data)}
    assert kept["nowhere slower than a peer"].holds is False
    assert kept["causal 2 × from L = 1024"].found.startswith("0.50 at worst")
    assert kept["float64 1.5 × torch"].holds is None
    assert kept["backward, D = 64 2.4 × torch"].holds is None


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the repository")
@pytest.mark.parametrize(("seconds", "holds"), [(1.05e-3, True), (7e-3, False)])
def test_promises_of_the_spread_ask_for_the_time_of_the_plain_call(seconds, holds):
    results = [
        result({"regard": seconds}, one, plain=LibraryResult(seconds=1e-3))
        for one in grid("spread")
        if one.plain
    ]
    data = json.loads(json.dumps(as_data(report_of(*results))))
    kept = [one for one in script("promises").promises(data) if one.holds is not None]
    words = ("larger queries", "ALiBi", "33 keys", "more odd keys", "one huge key", "masks cost")
    asked = [one for one in kept if one.words.startswith(words)]
    np.testing.assert_equal(len(asked), len(words) + 1)
    np.testing.assert_equal({one.holds for one in asked}, {holds})
    assert any("× the plain call, per score" in line for line in script("table").markdown(data))


@pytest.mark.skipif(not (ROOT / "benchmarks").exists(), reason="needs the repository")
def test_promises_of_the_backward_pass_are_of_that_direction_alone():
    sizes = (1, 8, 512, 512, 64)
    cases = [case(one, *sizes, direction=one) for one in ("forward", "backward", "both")]
    results = [
        result({"regard": 1e-3, "torch": ratio * 1e-3, "numpy": 1e-9}, one)
        for one, ratio in zip(cases, (1.0, 2.5, 1.0), strict=True)
    ]
    data = json.loads(json.dumps(as_data(report_of(*results))))
    kept = {one.words: one for one in script("promises").promises(data)}
    found = kept["backward, D = 64 2.4 × torch"]
    np.testing.assert_equal(
        (found.holds, found.found), (True, "2.50 at worst, backward 1,8,512,512,64")
    )


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def tiny_command(monkeypatch, tmp_path):
    """The command on a tiny grid, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(GRIDS, "quick", TINY)
    monkeypatch.setitem(command.BUDGETS, "quick", FAST)
    measure = partial(command.measure_cases, meter=None, start=Here)
    monkeypatch.setattr(command, "measure_cases", measure)

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "140"})

    return call


def test_the_command_prints_a_table_and_saves_everything(tiny_command):
    done = tiny_command("--against", "numpy", "--threads", "1", "--json", "results.json")
    np.testing.assert_equal(done.exit_code, 0)
    announced, *told = done.stderr.splitlines()
    np.testing.assert_equal(announced, f"{len(TINY)} cases with regard, numpy")
    for number, (one, line) in enumerate(zip(TINY, told, strict=True), 1):
        assert re.fullmatch(
            rf"{number}/{len(TINY)}  {re.escape(one.name)}(, \d+ (s|min) left)?", line
        )
    assert "decode" not in done.stdout.split("\n")[0]
    for one in TINY:
        assert one.name in done.stdout
    data = json.loads(Path("results.json").read_text("utf-8"))
    np.testing.assert_equal((data["grid"], len(data["cases"])), ("quick", len(TINY)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--against", "tensorflow"), "'tensorflow'; known are torch, onnxruntime, openvino, jax"),
        (("--against", ""), "no peer ''"),
        (("--grid", "huge"), "grid is 'huge'; known are full, gradients, quick, spread"),
        (("--threads", "0"), "--threads is 0; this process may use 1 to"),
        (("--threads", "100000"), "--threads is 100000; this process may use 1 to"),
        (("--plot", "plot.jpg"), "--plot is plot.jpg; it must end in .png, .svg or .pdf"),
        (("--json", "nowhere/results.json"), "nowhere is not a writable folder"),
        (("--json", "x.png", "--plot", "x.png"), "--json and --plot would go to the same file"),
        (("--force",), "--force goes with --json and --plot only"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(tiny_command, words, message):
    done = tiny_command(*words)
    np.testing.assert_equal(done.exit_code, 2)
    assert message in done.stderr
    np.testing.assert_equal(done.stdout, "")


def test_results_that_are_there_are_replaced_only_with_force(tiny_command):
    Path("results.json").write_text("{}")
    done = tiny_command("--json", "results.json")
    np.testing.assert_equal(done.exit_code, 2)
    assert "results.json: already exists; pass --force to replace it" in done.stderr
    words = "--against", "numpy", "--threads", "1", "--json", "results.json", "--force"
    np.testing.assert_equal(tiny_command(*words).exit_code, 0)
    assert json.loads(Path("results.json").read_text())["cases"]


@pytest.mark.parametrize(
    "option", ["--json", pytest.param("--plot", marks=pytest.mark.needs("matplotlib"))]
)
def test_a_file_is_not_touched_until_the_new_one_is_whole(tiny_command, monkeypatch, option):
    Path("results.svg").write_text("before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    done = tiny_command("--against", "numpy", "--threads", "1", option, "results.svg", "--force")
    np.testing.assert_equal(done.exit_code, 2)
    assert "results.svg: cannot be written: No space left on device" in done.stderr
    np.testing.assert_equal([path.name for path in Path().iterdir()], ["results.svg"])
    np.testing.assert_equal(Path("results.svg").read_text(), "before")


def test_without_matplotlib_a_plot_is_refused_beforehand(tiny_command, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    done = tiny_command("--plot", "plot.png")
    np.testing.assert_equal(done.exit_code, 2)
    assert 'pip install "regard[plot]"' in done.stderr


def test_importing_the_bench_loads_no_peer():
    program = "import sys, regard.bench.command, regard.bench.libraries; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"torch", "onnx", "onnxruntime", "openvino", "jax", "matplotlib", "rich"}


def test_names_of_peers_are_those_of_the_option():
    np.testing.assert_equal(
        [side.name for side in peers(["numpy", "torch", "numpy"])], ["numpy", "torch"]
    )
    with pytest.raises(OptionError, match="known are torch, onnxruntime, openvino, jax, numpy"):
        peers(["torch", "keras"])
