"""From plain loops to the kernel, one idea per rung: what each is worth on this machine.

    python benchmarks/ladder.py            # check and time; prints the table of cpp/README.md
    python benchmarks/ladder.py --check    # small sizes, nothing timed

Builds ladder.cpp with the system's C++ compiler, compares every rung, and `regard.attention` after
them, with float64, and only then times them: in turns, in one process, the median of all calls.
"""

from __future__ import annotations

import argparse
import ctypes
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from os import environ
from pathlib import Path
from typing import NamedTuple

import numpy as np

import regard

HERE = Path(__file__).resolve().parent
KERNEL = HERE.parent / "src/regard/compute/kernels/cpp"
# The compiler makes no vectors of its own, so that a rung shows one idea; the rest is as in
# CMakeLists.txt. Never -ffast-math.
FLAGS = "-std=c++17 -O3 -fno-tree-vectorize -ffp-contract=off -fno-math-errno -fno-trapping-math"
FLAGS += " -march=native -shared -fPIC -pthread"
LENGTH, WIDTH = 1024, 64
SECONDS, ROUNDS = 0.5, 4  # of timing for each row and number of heads, cut into so many turns
STEPS = 200_000  # of multiply-adds, for the peak
UNIT = 2.0**-24  # half a unit in the last place of 1, float32


class Row(NamedTuple):
    """One line of the table: a rung, or the kernel where `rung` is None."""

    name: str
    adds: str
    rung: int | None
    over: str | None = None  # the line that the gain is counted from
    causal: bool = False
    every_thread: bool = False


ROWS = [
    Row("1", "plain loops, an L × S matrix of scores", 1),
    Row("2", "streaming softmax, no matrix", 2, "1"),
    Row("3", "vectors, keys turned into panels", 3, "2"),
    Row("4", "register tiles", 4, "3"),
    Row("5", "its own 2^x", 5, "4"),
    Row("6", "chunks of 256 keys, tasks of 192 rows", 6, "5"),
    Row("6 causal", "hidden keys weigh 0", 6, None, causal=True),
    Row("7 causal", "hidden keys are skipped", 7, "6 causal", causal=True),
    Row("8", "every thread", 7, "6", every_thread=True),
    Row("kernel", "`regard.attention`, one thread", None, "6"),
    Row("kernel causal", "the same, causal", None, "7 causal", causal=True),
    Row("kernel threads", "the same, every thread", None, "8", every_thread=True),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with float64, time nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ladder = build(Path(folder))
        if arguments.check:
            # Heads of rows that fill no tile, and of more than one task and chunk.
            for heads, length in [(1, 32), (2, 224), (3, 288)]:
                errors = check(ladder, inputs(heads, length))
            for name, (error, bound) in errors.items():
                print(f"{name:16} error {error:.1e}, bound {bound:.1e}")
            return
        timings = [time_rows(ladder, inputs(heads, LENGTH)) for heads in (1, 8)]
    print("\n".join(table(*timings, ladder)))


class Inputs(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def inputs(heads: int, length: int) -> Inputs:
    """Normal numbers (H, L, D), each starting at a cache line."""
    generator = np.random.default_rng(heads * length)
    made = []
    for _ in range(3):
        room = np.empty(heads * length * WIDTH + 16, np.float32)
        start = -room.ctypes.data % 64 // 4
        array = room[start : start + heads * length * WIDTH].reshape(heads, length, WIDTH)
        array[...] = generator.standard_normal(array.shape, np.float32)
        made.append(array)
    return Inputs(*made)


def build(folder: Path) -> ctypes.CDLL:
    """ladder.cpp as a library; CXX names another compiler, CXXFLAGS come last."""
    compiler = environ.get("CXX") or shutil.which("c++")
    if not compiler:
        sys.exit("no C++ compiler: install one, or name it in CXX")
    library = folder / "ladder.so"
    flags = [*FLAGS.split(), *shlex.split(environ.get("CXXFLAGS", ""))]
    command = [*shlex.split(compiler), *flags, f"-I{KERNEL}", str(HERE / "ladder.cpp")]
    command += [str(KERNEL / name) for name in ("cpus.cpp", "threads.cpp")]
    if subprocess.run([*command, "-o", str(library)]).returncode:
        sys.exit(f"failed: {shlex.join(command)}")
    ladder = ctypes.CDLL(str(library))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    ladder.climb.argtypes = [ctypes.c_int, *[size] * 4, *[pointer] * 4, ctypes.c_bool, ctypes.c_int]
    ladder.climb.restype = None
    ladder.multiply_add.argtypes = [size, ctypes.c_int]
    ladder.multiply_add.restype = ctypes.c_float
    return ladder


def call(ladder: ctypes.CDLL, row: Row, given: Inputs) -> Callable[[], np.ndarray]:
    """A function that computes one row of the table, set up so that only the work is timed."""
    threads = ladder.threads() if row.every_thread else 1
    if row.rung is None:

        def kernel() -> np.ndarray:
            regard.set_threads(threads)
            return regard.attention(*given, causal=row.causal)

        return kernel
    heads, length, width = given.query.shape
    out = np.empty_like(given.query)
    pointers = [array.ctypes.data for array in (*given, out)]

    def climb() -> np.ndarray:
        ladder.climb(row.rung, heads, length, length, width, *pointers, row.causal, threads)
        return out

    return climb


def check(ladder: ctypes.CDLL, given: Inputs) -> dict[str, tuple[float, float]]:
    """(largest error, bound) of every row; ends the program where the bound is passed.

    A score is off by at most (D + 2)·u·Σ|q k|/√D, which counts twice in a ratio of exponentials;
    the two sums of that ratio have S terms, each rescaled at most S times.
    """
    query, key, value = (array.astype(np.float64) for array in given)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(WIDTH)
    sizes = (np.abs(query) @ np.abs(key).swapaxes(1, 2)).max() / np.sqrt(WIDTH)
    terms = 2 * (WIDTH + 2) * sizes + 4 * (key.shape[1] + 16)
    bound = float(terms * UNIT * np.abs(value).max())
    expected, hidden = {}, ~np.tri(*scores.shape[1:], dtype=bool)
    for causal in (False, True):
        seen = np.where(hidden & causal, -np.inf, scores)
        weights = np.exp(seen - seen.max(-1, keepdims=True))
        expected[causal] = weights / weights.sum(-1, keepdims=True) @ value
    errors = {}
    for row in ROWS:
        error = float(np.abs(call(ladder, row, given)() - expected[row.causal]).max())
        if not error <= bound:  # NaN fails too
            sys.exit(f"{row.name}: off by {error:.1e}, more than rounding explains ({bound:.1e})")
        errors[row.name] = error, bound
    return errors


def time_rows(ladder: ctypes.CDLL, given: Inputs) -> dict[str, list[float]]:
    """Useful GF/s of every call of every row, and of the multiply-adds that set the peak."""
    check(ladder, given)
    heads, length, width = given.query.shape
    full, half = 4 * heads * width * length**2, 2 * heads * width * length * (length + 1)
    flops = {row.name: float(half if row.causal else full) for row in ROWS}
    calls = {row.name: call(ladder, row, given) for row in ROWS}
    peaks = [Row("peak", "", 0), Row("peak threads", "", 0, every_thread=True)]
    for row in peaks:
        threads = ladder.threads() if row.every_thread else 1
        flops[row.name] = 2.0 * 12 * ladder.lanes() * STEPS * threads
        calls[row.name] = lambda threads=threads: ladder.multiply_add(STEPS, threads)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(1, ROUNDS + 1):
        for row in [*peaks, *ROWS]:
            calls[row.name]()  # not counted: caches, clocks and threads as the row before left them
            while len(seconds[row.name]) < turn or sum(seconds[row.name]) < SECONDS * turn / ROUNDS:
                begin = time.perf_counter()
                calls[row.name]()
                seconds[row.name].append(time.perf_counter() - begin)
    return {name: [flops[name] / each * 1e-9 for each in took] for name, took in seconds.items()}


def table(
    one: dict[str, list[float]], eight: dict[str, list[float]], ladder: ctypes.CDLL
) -> list[str]:
    """The table in Markdown, and below it what it was measured against."""
    alone = {name: statistics.median(rates) for name, rates in one.items()}
    middle = {name: statistics.median(rates) for name, rates in eight.items()}
    lines = [
        "| rung | what it adds | GF/s, 1 head | GF/s, 8 heads | of the peak | gain |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in ROWS:
        rate = middle[row.name]
        share = rate / middle["peak threads" if row.every_thread else "peak"]
        gain = f"{rate / middle[row.over]:.2f} × rung {row.over}" if row.over else ""
        figures = f"{alone[row.name]:.1f} | {rate:.1f} | {share:.0%} | {gain}"
        lines.append(f"| {row.name} | {row.adds} | {figures} |")
    quarters = [statistics.quantiles(rates, n=4) for rates in eight.values() if len(rates) > 3]
    spread = max((high - low) / mid for low, mid, high in quarters)
    lines += [
        "",
        f"L = S = {LENGTH}, D = {WIDTH}, float32, vectors of {ladder.lanes()}. The peak is "
        f"{middle['peak']:.0f} GF/s, with {ladder.threads()} threads {middle['peak threads']:.0f}. "
        f"With 8 heads, the middle half of a row's calls lies within {spread:.0%} of its median.",
    ]
    return lines


if __name__ == "__main__":
    main()
