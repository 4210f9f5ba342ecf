"""Two builds of regard side by side: `python benchmarks/builds.py PYTHON PYTHON`.

Each PYTHON is an interpreter with a build of its own installed. The calls run in processes of their
own, taking turns; compared is the time on the CPU, of one thread: the median of the ratios of all
rounds. Ends with an error where a call of the second build takes more than `--limit` times as long
as in the first.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

ROUNDS, REPEATS = 11, 9


def measure() -> dict[str, float]:
    """The median time of each call, in this process, in seconds of the CPU."""
    import ml_dtypes
    import numpy as np

    import regard

    random = np.random.default_rng(0)
    calls: dict[str, tuple[int, Callable[[], object]]] = {}

    def add(name: str, times: int, queries: int, keys: int, dtype: object, **options: bool) -> None:
        shapes = ((4, queries, 64), (4, keys, 64), (4, keys, 64))
        q, k, v = (random.standard_normal(shape).astype(dtype) for shape in shapes)
        calls[name] = times, lambda: regard.attention(q, k, v, threads=1, **options)

    add("3 keys", 2000, 3, 3, np.float32)
    add("512 keys, float32", 5, 512, 512, np.float32)
    add("512 keys, float32, causal", 5, 512, 512, np.float32, causal=True)
    add("512 keys, float64", 3, 512, 512, np.float64)
    add("512 keys, float16", 5, 512, 512, np.float16)
    add("512 keys, bfloat16", 5, 512, 512, ml_dtypes.bfloat16)
    add("one query, 4096 keys", 50, 1, 4096, np.float32)
    arrays = [random.standard_normal((4, 256, 64)).astype(np.float32) for _ in range(4)]
    calls["gradients, 256 keys"] = 5, lambda: regard.gradients(*arrays, threads=1)

    found = {}
    for name, (times, call) in calls.items():
        call()
        taken = []
        for _ in range(REPEATS):
            begin = time.thread_time()
            for _ in range(times):
                call()
            taken.append((time.thread_time() - begin) / times)
        found[name] = statistics.median(taken)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python", nargs="*", help="two interpreters, each with a build of regard")
    parser.add_argument("--limit", type=float, default=1.05, help="of second time to first time")
    options = parser.parse_args()
    if not options.python:  # one side, started below
        print(json.dumps(measure()))
        return
    if len(options.python) != 2:
        parser.error("needs two interpreters")
    runs: list[list[dict[str, float]]] = [[], []]
    for _ in range(ROUNDS):
        for side, python in enumerate(options.python):
            child = subprocess.run([python, __file__], capture_output=True, text=True, check=True)
            runs[side].append(json.loads(child.stdout))
    slower = 0
    for name in runs[0][0]:
        first, second = ([run[name] for run in side] for side in runs)
        ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
        slower += ratio > options.limit
        medians = [f"{statistics.median(side) * 1e6:10.1f} µs" for side in (first, second)]
        print(f"{name:28}{'  '.join(medians)}   × {ratio:.3f}")
    print(f"{slower} calls beyond × {options.limit}")
    print(f"load of the machine in the last minute: {os.getloadavg()[0]:.1f}")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
