"""Every allocation of the native module fails once: a MemoryError, and the next call works.

An allocator that fails on demand is compiled and loaded before all others, in a process of its own.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import numpy as np
import pytest

from calls import TARGETS
from fresh_process import python, well
from places import SUPPORT

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SOURCE = SUPPORT / "native/failing_memory.cpp"

pytestmark = [
    pytest.mark.needs("fused"),
    pytest.mark.skipif(
        COMPILER is None or sys.platform != "linux", reason="needs a compiler, and LD_PRELOAD"
    ),
]

SWEEP = """
import ctypes
memory = ctypes.CDLL(None)
native.use_target(sys.argv[1])
n, threads = 0, int(sys.argv[2])
call = CALLS[sys.argv[3]]
def bytes_of(result):
    return [x.tobytes() for x in (result if isinstance(result, tuple) else (result,))]
results = []
def work():
    # Memory that a thread keeps from call to call would hide what the first call asks for.
    assert memory.fail_at(b"regard/_fused", n)
    try:
        results.append(bytes_of(call()))
    except MemoryError:
        results.append(None)
    except BaseException as error:
        results.append(error)
    results.append(memory.end_failing())
def in_a_new_thread():
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
expected = bytes_of(call())
refused = 0
for run in (in_a_new_thread, work):
    n = 0
    while True:
        results.clear()
        run()
        outcome, failed = results
        if not failed:
            assert outcome == expected, (n, outcome)
            break
        # What can do without, such as a call that finds no further thread, may succeed.
        assert outcome is None or outcome == expected, (n, outcome)
        refused += outcome is None
        assert bytes_of(call()) == expected, n
        n += 1
        assert n < 5000
print(refused)
"""

CALLS = """
many = rng.normal(size=(40, 2, 3, 8)).astype(np.float32)
far = q[:, :60].astype(np.float64)  # enough work for a second thread
far[:, 7] = 1.7e308  # beyond float64: numbers of any size, which need memory
wide = k.astype(np.float64), v.astype(np.float64)
mask = (regard.masks.Causal() | regard.masks.Lengths(30)) & (rng.random((300, 300)) < 0.8)
CALLS = {
    "plain": lambda: regard.attention(q, k, v),
    "a batch": lambda: regard.attention(many, many, many),
    "general": lambda: regard.attention(
        q, k, v, mask=mask, bias=np.ones((300, 300)), sink=0.5, return_lse=True,
        return_weights=True, threads=threads),
    "keys split": lambda: regard.attention(
        q[:, :1], np.tile(k, (1, 60, 1)), np.tile(v, (1, 60, 1)), threads=threads),
    "rows again": lambda: regard.attention(far, *wide, threads=threads),
    "gradients": lambda: regard.gradients(
        q[:, :100], k, v, v[:, :100], mask=regard.masks.Causal(), offset=9, bias=np.ones((100, 1)),
        sink=0.5, wrt=("bias", "sink", "query", "key", "value"), threads=threads)[:5],
}
"""


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> str:
    library = tmp_path_factory.mktemp("memory") / "failing_memory.so"
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, "-ldl"], check=True, capture_output=True, timeout=120)
    return str(library)


@pytest.mark.sweep
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[-1]] if TARGETS else [])
@pytest.mark.parametrize("threads", [3, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "what", ["plain", "a batch", "general", "keys split", "rows again", "gradients"]
)
def test_every_allocation_that_fails_is_a_memory_error_and_the_next_call_works(
    failing, target, threads, what
):
    printed = well(python(CALLS + SWEEP, target, str(threads), what, LD_PRELOAD=failing))
    np.testing.assert_array_less(0, int(printed))
