"""How much memory the fused kernel takes from the system, and what it does where there is none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import fresh_process
from calls import every_target
from fresh_process import START, well
from regard.compute import native

pytestmark = [
    pytest.mark.needs("fused"),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc and RLIMIT_AS as Linux has them"),
]

MIB = 1 << 20
PER_THREAD = 8 * MIB
SLACK = 2 * MIB  # pages of Python's own, stacks of new threads
LENGTH, WIDTH = 8192, 64
ARRAY = LENGTH * WIDTH * 4
THREADS = 2
MOST = THREADS * PER_THREAD + 2 * ARRAY + SLACK  # a copy of the keys, and the output

# Not ru_maxrss: a process starts with that of the process that started it, so that after a large
# test nothing would seem to grow.
PEAK = """
def peak():
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
"""

LONG_CALL = """
native.use_target(sys.argv[1])
n, width, threads = (int(x) for x in sys.argv[2:5])
q, k, v = (rng.random((n, width), np.float32) for _ in range(3))
bias = np.zeros((1, n), np.float32)
ids = np.arange(n) // 5000
regard.attention(q[:40], k[:40], v[:40], threads=threads)
before = peak()
regard.attention(q, k, v, threads=threads, **eval(sys.argv[5]))
print(peak() - before)
"""

# Whatever the rules are, nothing is kept per query and key.
RULES = {
    "none": "{}",
    "causal": "{'causal': True}",
    "window": "{'window': (3000, 100)}",
    "a tree of rules": (
        "{'mask': (regard.masks.Segments(ids) & ~regard.masks.Window(3, 3))"
        " | regard.masks.Lengths(n // 2)}"
    ),
    "a bias that broadcasts": "{'bias': bias}",
    "lse": "{'return_lse': True, 'softcap': 20.0, 'sink': 0.0}",
}


def python(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fresh_process.python(program, *arguments, start=START + PEAK)


def test_the_peak_that_is_measured_is_that_of_the_process_alone():
    program = """
import subprocess
np.ones(300 << 17)
small = subprocess.check_output([sys.executable, "-c", sys.argv[1] + "print(peak())"], text=True)
print(peak(), small)
"""
    large, small = map(int, well(python(program, PEAK)).split())
    np.testing.assert_array_less(300 * MIB, large)
    np.testing.assert_array_less(small, 100 * MIB)


def grown(target: str, rules: str, length: int = LENGTH, threads: int = THREADS) -> int:
    return int(well(python(LONG_CALL, target, str(length), str(WIDTH), str(threads), RULES[rules])))


@every_target
def test_a_long_call_takes_a_copy_of_the_keys_and_a_bounded_scratch(target):
    np.testing.assert_array_less(grown(target, "none"), MOST)


@pytest.mark.parametrize("rules", RULES)
def test_a_long_call_takes_no_more_memory_whatever_its_rules(rules):
    np.testing.assert_array_less(grown(native.target, rules), MOST)


def test_a_long_backward_pass_takes_a_copy_of_keys_and_values_and_a_bounded_scratch():
    # A gradient of the bias as well, which every row shares.
    program = """
n, threads = 8192, 2
x = rng.random((n, 64), np.float32)
bias = np.zeros((1, n), np.float32)
def call(rows):
    regard.gradients(x[:rows], x, x, x[:rows], bias=bias, threads=threads, output=x[:rows],
                     lse=np.zeros(rows, np.float32), wrt=("query", "key", "value", "bias"))
for rows in (40, n):
    before = peak()
    try:
        call(rows)
    except regard.OptionError:  # after the pass: these are of no call
        pass
print(peak() - before)
"""
    own = 8192 * 64 * 4
    most = THREADS * 24 * MIB + 3 * own + 2 * own + SLACK  # three gradients, and the copy
    np.testing.assert_array_less(int(well(python(program))), most)


def test_the_memory_of_a_call_grows_with_the_length_and_not_with_its_square():
    short, long = (grown(native.target, "none", LENGTH // 4 * n, 1) for n in (1, 4))
    np.testing.assert_array_less(long, max(short, PER_THREAD) + 2 * ARRAY + SLACK)


LONG_GRADIENTS = """
from regard.bench.cases import dtype_of
n, width, threads = (int(x) for x in sys.argv[1:4])
arrays = [rng.random((n, width), np.float32).astype(dtype_of(sys.argv[4])) for _ in "qkvg"]
causal = sys.argv[5] == "causal"
given = {}
if sys.argv[6] == "given":
    out = np.empty((n, width), np.float32)
    given = dict(zip(("output", "lse"), regard.attention(
        *arrays[:3], causal=causal, return_lse=True, out=out)))
regard.gradients(*(x[:40] for x in arrays), threads=threads)
before = peak()
made = regard.gradients(*arrays, causal=causal, threads=threads, **given)
print(peak() - before - sum(x.nbytes for x in made[:3]))
"""
PER_BACKWARD_THREAD = 24 * MIB


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("given", ["computed", "given"])
def test_the_memory_of_a_backward_pass_grows_like_a_copy_of_keys_and_values(dtype, given):
    def grown(length: int) -> int:
        words = *map(str, (length, WIDTH, 1)), dtype, "causal", given
        # What is freed goes back at once, so that it is not used again unseen.
        environment = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
        made = fresh_process.python(LONG_GRADIENTS, *words, start=START + PEAK, **environment)
        return int(well(made))

    short, long = grown(LENGTH // 4), grown(LENGTH)
    np.testing.assert_array_less(long, PER_BACKWARD_THREAD + 2 * ARRAY + SLACK)
    # Twice the slack: a short call touches less of its scratch.
    np.testing.assert_array_less(long - short, 2 * ARRAY * 3 // 4 + 2 * SLACK)


def test_one_row_takes_no_copy_of_the_keys():
    program = """
q, k, v = rng.random((1, 64), np.float32), *(rng.random((400_000, 64), np.float32),) * 2
regard.attention(q, k[:9], v[:9])
before = peak()
regard.attention(q, k, v, threads=2)
print(peak() - before)
"""
    np.testing.assert_array_less(int(well(python(program))), 2 * PER_THREAD + SLACK)


def test_keys_that_threads_share_leave_no_part_of_a_matrix():
    # Some rows, many keys and many threads: what every chunk leaves of every row would be 300 MB.
    program = """
q, k, v = (rng.random(shape, np.float32) for shape in ((700, 16), (100_000, 16), (100_000, 256)))
regard.attention(q[:40], k[:40], v[:40])
before = peak()
regard.attention(q, k, v, threads=16)
print(peak() - before)
"""
    copy_and_output = 4 * (100_000 * 16 + 700 * 256)
    most = 16 * PER_THREAD + copy_and_output + SLACK
    np.testing.assert_array_less(int(well(python(program))), most)


@pytest.mark.parametrize("way", ["plain", "general", "refused", "interrupted"])
def test_memory_does_not_grow_from_call_to_call(way):
    program = """
x = rng.random((4, 64, 33), np.float32)
long = rng.random((4000, 64), np.float32)
class Stop(Exception): pass
def stop(*_):
    raise Stop
signal.signal(signal.SIGALRM, stop)
def call():
    if sys.argv[1] == "plain":
        regard.attention(x, x, x)
    elif sys.argv[1] == "general":
        regard.attention(x, x, x, mask=regard.masks.Causal() | regard.masks.Lengths(9),
                         return_lse=True)
    elif sys.argv[1] == "refused":
        try:
            regard.attention(x, x, x[:, 1:])
        except ValueError:
            pass
    else:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            regard.attention(long, long, long, threads=2)
            time.sleep(1)
        except Stop:
            pass
peaks = []
for _ in range(4):
    for _ in range(40 if sys.argv[1] == "interrupted" else 3000):
        call()
    peaks.append(peak())
# What leaks grows in every round, what a thread takes that first comes to run now, in one.
print(np.diff(peaks).min())
"""
    np.testing.assert_array_less(int(well(python(program, way))), 600 * 1024)


# no memory --------------------------------------------------------------------------------------

LIMITED = """
import resource
def in_use():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
def limited(mib, call):
    # What `call` gives, or "MemoryError", where it may take so much more.
    resource.setrlimit(resource.RLIMIT_AS, (in_use() + (mib << 20), resource.RLIM_INFINITY))
    try:
        return call()
    except MemoryError:
        return "MemoryError"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
native.use_target(sys.argv[1])
threads = int(sys.argv[2])
small = [x[:, :50].copy() for x in (q, k, v)]
right = regard.attention(*small).tobytes()
def sweep(call, expected, sizes):
    seen = []
    for mib in sizes:
        result = limited(mib, call)
        seen.append(isinstance(result, str))
        assert seen[-1] or result.tobytes() == expected, mib
        assert regard.attention(*small).tobytes() == right, mib
    assert seen[0] and not seen[-1], seen
"""


@pytest.mark.sweep
@every_target
@pytest.mark.parametrize("threads", [1, 4])
def test_too_little_memory_is_a_memory_error_and_the_next_call_works(target, threads):
    program = """
q, k, v = (rng.random((n, 64), np.float32) for n in (200, 100_000, 100_000))
v = v[:, :30]
expected = regard.attention(q, k, v, threads=threads).tobytes()
sweep(lambda: regard.attention(q, k, v, threads=threads), expected,
      [0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80, 96, 128, 256, 512])
"""
    well(python(LIMITED + program, target, str(threads)))


@pytest.mark.sweep
@every_target
@pytest.mark.parametrize("threads", [1, 4])
def test_too_little_memory_to_compute_a_row_again_is_a_memory_error_too(target, threads):
    # Such a row is computed apart, which takes memory in the midst of the work.
    program = """
q = np.full((4, 1, 8), 1.7e308)
k, v = (rng.random((4, 150_000, 8)) for _ in range(2))
expected = regard.attention(q, k, v, threads=threads).tobytes()
sweep(lambda: regard.attention(q, k, v, threads=threads), expected,
      [0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 512])
"""
    well(python(LIMITED + program, target, str(threads)))


def test_too_little_memory_for_threads_is_made_up_for_by_fewer():
    program = """
resource.setrlimit(resource.RLIMIT_NPROC, (1, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
big = rng.random((4, 600, 64), np.float32)
expected = regard.attention(big, big, big, threads=1).tobytes()
assert limited(24, lambda: regard.attention(big, big, big, threads=9)).tobytes() == expected
"""
    well(python(LIMITED + program, "baseline", "1"))


def test_sizes_beyond_all_memory_are_a_memory_error():
    # Every axis is of stride 0: only what a call takes for itself is large.
    program = """
one = np.zeros((), np.float32)
for L, S, D, E in ((2**40, 1, 1, 2**10), (1, 1, 1, 2**45), (1, 1, 2**45, 1), (8, 2, 2**40, 1)):
    call = [np.broadcast_to(one, s) for s in ((L, D), (S, D), (S, E))]
    assert limited(512, lambda: regard.attention(*call)) == "MemoryError", (L, S, D, E)
    assert regard.attention(*small).tobytes() == right
"""
    well(python(LIMITED + program, "baseline", "1"))
