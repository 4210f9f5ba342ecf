"""A good citizen: what the fused kernel does to the process that it runs in, which is nothing.

Most of these run in a process of their own, because what they do to it cannot be undone.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import sys
import threading
import time

import numpy as np
import pytest

import regard
from calls import assert_same_bytes, every_target, inputs, on_path
from fresh_process import START, WATCHDOG, python, well
from regard.compute import native

pytestmark = pytest.mark.needs("fused")

TRIES = 3  # the machine may be busy with something else

linux = pytest.mark.skipif(sys.platform != "linux", reason="as Linux has it")
posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and setitimer")
x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux",
    reason="the layout of fenv_t as glibc has it on x86-64",
)

# threads of Python ------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("plain", [True, False])
def test_other_python_threads_run_during_a_call(target, plain):
    q, k, v = inputs((4, 2500, 64), (4, 2500, 64), (4, 2500, 64))
    ticks: list[float] = []
    over = threading.Event()

    def tick() -> None:
        # Not over.wait(0.002): on a busy machine, a free-threaded Python 3.13 takes 0.1 s for it.
        while not over.is_set():
            time.sleep(0.002)
            ticks.append(time.perf_counter())

    with on_path(f"fused:{target}"):
        heart = threading.Thread(target=tick)
        heart.start()
        try:
            for _ in range(TRIES):
                start = time.perf_counter()
                regard.attention(q, k, v, threads=None if plain else 1)
                took = time.perf_counter() - start
                within = [t for t in ticks if start + 0.002 < t < start + took - 0.002]
                if len(within) >= 3:
                    break
        finally:
            over.set()
            heart.join()
    np.testing.assert_array_less(2, len(within), f"ticks within {took} s")


@every_target
def test_calls_from_many_python_threads_at_once_have_the_right_bytes(target):
    shapes = [
        ((4, 300, 64), (4, 300, 64), (4, 300, 64)),
        ((2, 1, 64), (2, 20_000, 64), (2, 20_000, 64)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
        ((1, 700, 32), (1, 700, 32), (1, 700, 20)),
    ]
    with on_path(f"fused:{target}"):
        calls = [inputs(*shapes[n % 4], seed=n) for n in range(8)]
        expected = [regard.attention(*call, threads=1) for call in calls]
        wrong: list[int] = []

        def work(n: int) -> None:
            for repeat in range(6):
                result = regard.attention(*calls[n], threads=(None, 2, 4)[repeat % 3])
                if result.tobytes() != expected[n].tobytes():
                    wrong.append(n)

        workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(WATCHDOG)
        assert not any(worker.is_alive() for worker in workers)
    assert wrong == []


def test_a_thread_with_a_small_stack_can_call():
    q, k, v = inputs((4, 300, 130), (4, 600, 130), (4, 600, 130))
    q[0, 0, 0] = 1e38  # one row takes the other way
    expected = regard.attention(q, k, v)
    results = []
    before = threading.stack_size(256 * 1024)
    try:
        worker = threading.Thread(target=lambda: results.append(regard.attention(q, k, v)))
        worker.start()
        worker.join(WATCHDOG)
    finally:
        threading.stack_size(before)
    assert_same_bytes(results[0], expected)


# signals ----------------------------------------------------------------------------------------

# A signal comes again and again, and at the third one its handler raises: a call that ends with
# that was looking for signals all along. What ends it otherwise takes seconds on any machine.
REPEATED = """
seen = 0
def interrupt(*_):
    global seen
    seen += 1
    if seen == 3:
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
def ends_early(call):
    global seen
    seen = 0
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.02)
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""

INTERRUPTED = {
    "a long prefill": "[rng.random((60_000, 64), np.float32)] * 3, 2",
    "a long prefill on one thread": "[rng.random((60_000, 64), np.float32)] * 3, 1",
    "few rows and very many keys": (
        "[rng.random((96, 64), np.float32)]"
        " + [np.broadcast_to(rng.random((1, 64), np.float32), (4_000_000, 64))] * 2, 1"
    ),
    "few rows and very many keys that are converted": (
        "[rng.random((96, 64)).astype(np.float16)]"
        " + [np.broadcast_to(rng.random((1, 64)).astype(np.float16), (4_000_000, 64))] * 2, 1"
    ),
    "rows that leave the range of float32": (
        "[np.full((4000, 64), 3e38, np.float32)] + [rng.random((60_000, 64), np.float32)] * 2, 1"
    ),
    "rows that leave the range of float64": (
        "[np.full((96, 64), 1.7e308)] + [rng.random((60_000, 64))] * 2, 1"
    ),
}


@pytest.mark.sweep
@posix
@every_target
@pytest.mark.parametrize("what", INTERRUPTED)
def test_an_interrupt_ends_a_long_call_at_once_and_the_next_call_works(target, what):
    program = f"""
native.use_target(sys.argv[1])
expected = regard.attention(q, k, v).tobytes()
call, threads = {INTERRUPTED[what]}
{REPEATED}
assert ends_early(lambda: regard.attention(*call, threads=threads))
assert regard.attention(q, k, v).tobytes() == expected
"""
    well(python(program, target))


@posix
@every_target
def test_an_interrupt_ends_a_long_backward_pass_and_the_next_one_works(target):
    program = f"""
native.use_target(sys.argv[1])
def answers():
    return [x.tobytes() for x in regard.gradients(q, k, v, q, causal=True)[:3]]
expected = answers()
x = rng.random((60_000, 64), np.float32)
x.flags.writeable = False
given = regard.attention(x[:600], x, x, return_lse=True)
output, lse = (np.broadcast_to(y[:1], (60_000, *y.shape[1:])) for y in given)
{REPEATED}
for threads in (1, 2, 2):
    options = dict(threads=threads, output=output, lse=lse, wrt="key")
    assert ends_early(lambda: regard.gradients(x, x, x, x, **options))
    assert answers() == expected
"""
    well(python(program, target))


@posix
@pytest.mark.parametrize("threads", [1, 2])
def test_a_backward_pass_within_a_signal_handler_within_another_leaves_both_right(threads):
    program = f"""
outer = arrays((2, 2500, 64), (2, 2500, 64), (2, 2500, 60), (2, 2500, 60))
inner = arrays((2, 400, 64), (2, 900, 64), (2, 900, 64), (2, 400, 64))
def answers(call):
    return [x.tobytes() for x in regard.gradients(*call, threads={threads})[:3]]
expected = [answers(call) for call in (outer, inner)]
seen = []
signal.signal(signal.SIGALRM, lambda *_: seen.append(answers(inner) == expected[1]))
for part in (0.01, 0.03):
    signal.setitimer(signal.ITIMER_REAL, part)
    assert answers(outer) == expected[0]
    signal.setitimer(signal.ITIMER_REAL, 0)  # or it goes off while the process ends
assert seen and all(seen), seen
"""
    well(python(program))


@posix
@every_target
def test_an_interrupt_ends_a_long_plain_call(target):
    program = """
native.use_target(sys.argv[1])
x = rng.random((1, 60_000, 64), np.float32)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)
try:
    regard.attention(x, x, x)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert well(python(program, target)) == "interrupted"


@pytest.mark.sweep
@posix
@every_target
@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_within_a_signal_handler_within_a_call_leaves_both_right(target, threads):
    program = f"""
native.use_target(sys.argv[1])
outer = arrays((2, 5000, 64), (2, 5000, 64), (2, 5000, 60))
inner = arrays((2, 400, 128), (2, 6000, 128), (2, 6000, 128))
small = arrays((2, 3, 8), (2, 5, 8), (2, 5, 8))
threads = {threads}
expected = [regard.attention(*call, threads=threads).tobytes() for call in (outer, inner, small)]
seen = []
def handler(*_):
    seen.append(regard.attention(*inner, threads=threads).tobytes() == expected[1])
    seen.append(regard.attention(*small).tobytes() == expected[2])
signal.signal(signal.SIGALRM, handler)
right = []
for _ in range(3):
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    right.append(regard.attention(*outer, threads=threads).tobytes() == expected[0])
assert seen and all(seen), seen
assert all(right), right
"""
    well(python(program, target))


@posix
def test_a_signal_handler_that_returns_changes_no_byte():
    program = """
x = rng.random((2, 3000, 64), np.float32)
expected = regard.attention(x, x, x).tobytes()
count = []
signal.signal(signal.SIGALRM, lambda *_: count.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
for _ in range(5):
    assert regard.attention(x, x, x).tobytes() == expected
signal.setitimer(signal.ITIMER_REAL, 0)
assert count
"""
    well(python(program))


# fork -------------------------------------------------------------------------------------------

FORK = """
def child_is_right():
    child = os.fork()
    if child == 0:
        same = all(
            regard.attention(q, k, v, threads=n).tobytes() == expected for n in (1, 2, 4, None)
        )
        os._exit(0 if same else 3)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return False
expected = regard.attention(q, k, v, threads=1).tobytes()
"""


@posix
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_after_use_leaves_a_child_that_computes():
    well(
        python(
            START
            + FORK
            + """
regard.attention(q, k, v, threads=4)
assert child_is_right()
assert regard.attention(q, k, v, threads=4).tobytes() == expected
assert child_is_right()
if os.path.isdir("/proc/self/task"):  # the child makes threads of its own
    child = os.fork()
    if not child:
        regard.attention(q, k, v, threads=4)
        os._exit(len(os.listdir("/proc/self/task")) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) > 0
""",
            start="import warnings; warnings.simplefilter('ignore')\n",
        )
    )


@posix
def test_a_fork_during_a_call_of_another_thread_leaves_a_child_that_computes():
    well(
        python(
            START
            + FORK
            + """
x = rng.random((2, 6000, 64), np.float32)
whole = regard.attention(x, x, x, threads=2).tobytes()
results = []
def work():
    results.extend(regard.attention(x, x, x, threads=2).tobytes() for _ in range(4))
other = threading.Thread(target=work)
other.start()
right = []
while other.is_alive() and len(right) < 8:
    time.sleep(0.01)
    right.append(child_is_right())
other.join()
assert right and all(right), right
assert results == [whole] * 4
""",
            start="import warnings; warnings.simplefilter('ignore')\n",
        )
    )


@posix
def test_a_fork_within_a_call_leaves_a_child_that_computes():
    well(
        python(
            START
            + FORK
            + """
x = rng.random((2, 6000, 64), np.float32)
whole = regard.attention(x, x, x, threads=2).tobytes()
right = []
signal.signal(signal.SIGALRM, lambda *_: right.append(child_is_right()))
signal.setitimer(signal.ITIMER_REAL, 0.03)
assert regard.attention(x, x, x, threads=2).tobytes() == whole
assert right == [True], right
""",
            start="import warnings; warnings.simplefilter('ignore')\n",
        )
    )


FORKING = {
    "keys packed by all threads": "[rng.random((2, 6000, 64), np.float32)] * 3",
    "keys split over threads": (
        "[rng.random((1, 8, 64), np.float32)]"
        " + [np.broadcast_to(rng.random((1, 1, 64), np.float32), (1, 1_000_000, 64))] * 2"
    ),
    "rows that are computed again": (
        "[np.full((1, 48, 64), 3e38, np.float32)] + [rng.random((1, 30_000, 64), np.float32)] * 2"
    ),
    "gradients": "[rng.random((2, 2500, 64), np.float32)] * 4",
}
FORKED = {"gradients": "regard.gradients(*call"}


@posix
@pytest.mark.parametrize("what", FORKING)
def test_a_call_that_forks_ends_in_both_processes(what):
    well(
        python(
            START
            + f"""
call = {FORKING[what]}
def answers(threads):
    result = {FORKED.get(what, "regard.attention(*call, return_lse=True")}, threads=threads)
    return [x.tobytes() for x in result if x is not None]
parent, children = os.getpid(), []
signal.signal(signal.SIGALRM, lambda *_: children.append(os.fork()))
for threads in (1, 2, 4):
    before = time.perf_counter()
    expected = answers(threads)
    took = time.perf_counter() - before
    for part in (0.2, 0.5, 0.8):
        signal.setitimer(signal.ITIMER_REAL, part * took)
        right = answers(threads) == expected
        while not children:  # the call was over before
            pass
        if os.getpid() != parent:
            right = right and regard.attention(q, k, v, threads=2).shape == q.shape
            os._exit(0 if right else 3)
        assert right
        child, until = children.pop(), time.monotonic() + 60
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.01)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
        assert ended == (child, 0), (threads, part, ended)
""",
            start="import warnings; warnings.simplefilter('ignore')\n",
        )
    )


@posix
def test_an_interrupt_ends_a_call_in_a_child_of_another_thread():
    program = f"""
x = rng.random((60_000, 64), np.float32)
ended = []
{REPEATED}
def work():
    child = os.fork()
    if child == 0:
        os._exit(0 if ends_early(lambda: regard.attention(x, x, x, threads=1)) else 1)
    ended.append(os.waitpid(child, 0)[1])
worker = threading.Thread(target=work)
worker.start()
worker.join()
assert ended == [0]
"""
    start = "import warnings; warnings.simplefilter('ignore')\n" + START
    well(python(program, start=start))


@posix
def test_a_grandchild_computes_too():
    well(
        python(
            START
            + FORK
            + """
for generation in range(3):
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status == 0, (generation, status)
        break
    assert regard.attention(q, k, v, threads=2).tobytes() == expected
""",
            start="import warnings; warnings.simplefilter('ignore')\n",
        )
    )


# the end ----------------------------------------------------------------------------------------


def test_the_process_ends_with_sleeping_and_spinning_threads_alive():
    ends = itertools.product((2, 3, 4), (0, 0.001, 0.002))
    for threads, pause in ends:
        well(python(f"regard.attention(q, k, v, threads={threads})\ntime.sleep({pause})"))


def test_the_process_ends_within_the_call_of_a_daemon_thread():
    for n in range(6):
        process = python(
            f"""
x = rng.random((1, 20_000, 64), np.float32)
work = lambda: [regard.attention(x, x, x, threads=2) for _ in range(3)]
threading.Thread(target=work, daemon=True).start()
time.sleep(0.03 + 0.01 * {n})
"""
        )
        well(process)


def test_the_process_ends_when_an_exception_leaves_while_others_compute():
    process = python(
        """
x = rng.random((1, 5_000, 64), np.float32)
other = threading.Thread(target=lambda: regard.attention(x, x, x, threads=2))
other.start()
sys.exit(7)
"""
    )
    assert process.returncode == 7, process.stderr
    assert process.stderr == ""


# how many threads -------------------------------------------------------------------------------

BIG = """
x = rng.random((4, 2000, 64), np.float32)
before = tasks()
regard.attention(x, x, x)
print(tasks() - before)
"""


@linux
def test_as_many_threads_as_cpus_that_the_process_may_use():
    cpus = len(os.sched_getaffinity(0))
    printed = well(python("print(native.default_threads())\n" + BIG)).split()
    assert 1 <= int(printed[0]) <= cpus
    assert int(printed[1]) == int(printed[0]) - 1


@linux
def test_a_process_on_one_cpu_gets_no_further_thread():
    pinned = "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    assert well(python(pinned + BIG)) == "0"
    # Also where the affinity changes after the import and after the first call.
    later = "regard.attention(q, k, v)\n" + pinned + "print(native.default_threads())\n"
    assert well(python(later)) == "1"


@linux
def test_regard_num_threads_is_honoured():
    assert well(python(BIG, REGARD_NUM_THREADS="3")) == "2"
    assert well(python(BIG, REGARD_NUM_THREADS="1")) == "0"
    general = BIG.replace("(x, x, x)", "(x, x, x, return_lse=True)")
    assert well(python(general, REGARD_NUM_THREADS="3")) == "2"


@linux
def test_threads_of_a_call_are_at_most_as_many_as_it_says():
    assert well(python(BIG.replace("(x, x, x)", "(x, x, x, threads=1)"))) == "0"
    assert well(python(BIG.replace("(x, x, x)", "(x, x, x, threads=4)"))) == "3"


@linux
def test_a_small_call_wakes_nobody():
    program = (
        "before = tasks()\nregard.attention(q[:, :9], k, v, threads=8)\nprint(tasks() - before)"
    )
    assert well(python(program)) == "0"


@pytest.mark.parametrize("threads", [2**31 - 1, 2**31, 2**63, 2**70])
def test_threads_that_are_far_too_many_are_no_accident(threads):
    q, k, v = inputs((2, 3, 4), (2, 5, 4), (2, 5, 4))
    expected = regard.attention(q, k, v)
    try:
        result = regard.attention(q, k, v, threads=threads)
    except ValueError as error:
        np.testing.assert_equal("threads" in str(error), True, str(error))
    else:
        assert_same_bytes(result, expected)


# targets ----------------------------------------------------------------------------------------


@every_target
def test_regard_target_chooses_the_instructions(target):
    program = (
        "from regard.compute.kernels import fused\n"
        "print(native.target, fused.status())\nprint(regard.attention(q, k, v).tobytes().hex())"
    )
    name, status, *_, data = well(python(program, REGARD_TARGET=target)).split()
    assert name == target
    assert status == "usable,"
    with on_path(f"fused:{target}"):
        rng = np.random.default_rng(0)
        call = [rng.normal(size=(4, 300, 64)).astype(np.float32) for _ in range(3)]
        assert regard.attention(*call).tobytes().hex() == data


def test_a_target_that_is_unknown_is_refused_and_the_old_one_stays():
    before = native.target
    with pytest.raises(ValueError, match="sse9"):
        native.use_target("sse9")
    assert native.target == before


def test_the_baseline_is_always_usable_and_last():
    assert list(native.targets())[-1] == "baseline"
    assert native.targets()["baseline"]


@x86
@pytest.mark.needs("qemu")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="not under an emulator")
def test_a_cpu_without_avx_answers_with_the_bytes_of_the_baseline():
    program = "print(native.target, regard.attention(q[:, :9], k, v).tobytes().hex())"
    name = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    oldest = (str(name), "-cpu", "Nehalem")  # that NumPy itself runs on
    emulated = well(python(program, emulator=oldest))
    assert emulated.startswith("baseline ")
    assert emulated == well(python(program, REGARD_TARGET="baseline"))


# not built --------------------------------------------------------------------------------------

UNBUILT = "import sys; sys.modules['regard._fused'] = None\n"


def test_regard_require_fused_makes_a_missing_module_an_error():
    process = python("import regard", start=UNBUILT, REGARD_REQUIRE_FUSED="1")
    assert process.returncode != 0
    last = process.stderr.splitlines()[-1]
    assert last.startswith("ImportError: REGARD_REQUIRE_FUSED")
    assert "pip install --no-cache-dir" in last


@pytest.mark.parametrize("given", [{}, {"REGARD_REQUIRE_FUSED": ""}, {"REGARD_REQUIRE_FUSED": "0"}])
def test_a_missing_module_leaves_the_reference_kernel(given):
    program = """
import numpy as np, regard
from regard.compute import native
x = np.eye(3)
assert np.array_equal(regard.attention(x, x, x), regard.attention(x, x, x, kernel="reference"))
try:
    regard.attention(x, x, x, kernel="fused")
except ValueError as error:
    assert "not built" in str(error), error
else:
    raise AssertionError("answered")
assert native.targets() == {}
assert native.default_threads() == 1
print(regard.show_config("dict")["kernels"]["fused"])
"""
    printed = well(python(program, start=UNBUILT, **given))
    assert printed.startswith("not built")
    assert "pip install" in printed


def test_regard_require_fused_changes_nothing_where_the_module_is_there():
    assert well(python("print(native.BUILT)", REGARD_REQUIRE_FUSED="1")) == "True"


# floating-point state ---------------------------------------------------------------------------

STATE = (
    START
    + """
import ctypes, struct
libm = ctypes.CDLL("libm.so.6")
state, fresh = ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
AT = 28  # MXCSR in glibc's fenv_t
def set_control(bits):
    libm.fegetenv(state)
    struct.pack_into("<I", state, AT, bits)
    libm.fesetenv(state)
def control():
    libm.fegetenv(fresh)
    return struct.unpack_from("<I", fresh, AT)[0]
DEFAULT, FLUSH, ZERO, UP, FLAGS = 0x1F80, 0x8000, 0x0040, 0x4000, 0x003F
def plainly(*call):
    return native.fast_path(*call, None, None, False, None, None, None, None, None, "working",
                        False, False, None, None, None)
"""
)


@x86
@every_target
def test_flushing_of_subnormal_numbers_by_the_caller_changes_no_byte_and_stays_on(target):
    # The first call: threads that are made now would inherit the state.
    well(
        python(
            """
native.use_target(sys.argv[1])
tiny = [x * np.float32(1e-40) for x in (v, v[:, :5].copy())]
assert (tiny[0] != 0).any()
few = q[:, :4].copy(), k[:, :5].copy(), tiny[1]
flushing = DEFAULT | FLUSH | ZERO
answers = []
for bits in (flushing, DEFAULT):
    set_control(bits)
    now = []
    for call in ((q, k, tiny[0]), few, (q * np.float32(40), k, v)):
        now += [plainly(*call), regard.attention(*call, kernel="fused", threads=3)]
    ends = control()
    set_control(DEFAULT)
    answers.append([x.tobytes() for x in now])
    assert ends & ~FLAGS == bits, hex(ends)
    assert (now[0] != 0).any()
assert answers[0] == answers[1]
""",
            target,
            start=STATE,
        )
    )


@x86
@every_target
def test_a_call_leaves_the_floating_point_state_and_flags_as_they_were(target):
    well(
        python(
            """
native.use_target(sys.argv[1])
for width in (2, 3, 5, 64):
    calls = [[np.ascontiguousarray(x[..., :width]) for x in (q, k, v)],
             [np.ascontiguousarray(x[:, :3, :width]) for x in (q, k, v)]]
    calls.append([x * np.float32(1e30) for x in calls[1]])
    calls.append([x * np.float32(1e-30) for x in calls[1]])
    for call in calls:
        for bits in (DEFAULT, DEFAULT | UP, DEFAULT | FLUSH, DEFAULT | 0x21, DEFAULT | 0x2000):
            set_control(bits)
            plainly(*call)
            ends = control()
            set_control(DEFAULT)
            assert ends == bits, (width, hex(bits), hex(ends))
""",
            target,
            start=STATE,
        )
    )


@x86
@every_target
def test_the_floating_point_state_of_the_caller_changes_no_byte_of_a_gradient(target):
    well(
        python(
            """
native.use_target(sys.argv[1])
tiny = [x * np.float32(1e-20) for x in (q, k, v, v)]
for call in ((q, k, v, v), tiny):
    expected = None
    for bits in (DEFAULT, DEFAULT | UP, DEFAULT | FLUSH | ZERO, DEFAULT | 0x2000):
        with np.errstate(all="ignore"):
            set_control(bits)
            made = regard.gradients(*call, threads=2)
            ends = control()
            set_control(DEFAULT)
        assert ends & ~FLAGS == bits & ~FLAGS, hex(ends)
        made = [x.tobytes() for x in made[:3]]
        expected = expected or made
        assert made == expected, hex(bits)
""",
            target,
            start=STATE,
        )
    )


@x86
@every_target
def test_the_rounding_mode_of_the_caller_changes_no_byte(target):
    well(
        python(
            """
native.use_target(sys.argv[1])
for width in range(1, 40):
    dtype = (np.float32, np.float64)[width % 2]
    call = [x[:, :20, :width].astype(dtype, order="C") for x in (q, k, v)]
    expected = plainly(*call).tobytes()
    for bits in (DEFAULT | UP, DEFAULT | 0x2000, DEFAULT | 0x6000):
        set_control(bits)
        one, other = plainly(*call), regard.attention(*call, kernel="fused", return_lse=True)
        set_control(DEFAULT)
        assert one.tobytes() == expected, (width, hex(bits), "plain")
        assert other.output.tobytes() == expected, (width, hex(bits), "general")
""",
            target,
            start=STATE,
        )
    )


@x86
def test_the_import_leaves_the_floating_point_state_as_it_was():
    start = STATE.replace("import regard\nfrom regard.compute import native\n", "")
    well(
        python(
            """
before = control() & ~FLAGS
import regard
regard.attention(*np.ones((3, 2, 2)), causal=True, window=(1, 0))
assert control() & ~FLAGS == before == DEFAULT
assert np.float64(5e-324) / 1 > 0
""",
            start=start,
        )
    )


@every_target
def test_numpy_hears_of_no_floating_point_trouble_from_a_call(target):
    q, k, v = inputs((4, 30, 8), (4, 300, 8), (4, 300, 8))
    q[0, 0], q[1], v[2] = 1e38, 1e-38, 3e38
    with on_path(f"fused:{target}"), np.errstate(all="raise"):
        regard.attention(q, k, v)
        regard.attention(q, k, v, threads=2, return_lse=True)
        regard.gradients(q, k, v, q, wrt=("query", "value", "scale"))
        np.float32(1) + np.float32(1)  # would raise what a call had left behind
