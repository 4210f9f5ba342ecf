"""How much memory one long call takes beyond its inputs and results: every kind of mask, gradients.

Each in a process of its own, because a process only tells the most that it ever had. What a mask
itself takes (a boolean matrix has L × S bytes) is the caller's and not counted.

    python benchmarks/memory.py [length]
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import numpy as np

import regard
from regard.bench.cases import dtype_of
from regard.compute import native
from regard.masks import Lengths, Segments

WIDTH = 64
MIB = 2**20


def masks(length: int) -> dict[str, dict[str, Any]]:
    """Options of one call, by the name of what hides keys."""
    half = np.arange(length) // (length // 2)
    segments = Segments(half, half)
    return {
        "none": {},
        "causal": {"causal": True},
        "window": {"window": (1024, 0)},
        "lengths": {"mask": Lengths(np.array([3 * length // 4]))},
        "segments": {"mask": segments},
        "all of them": {"causal": True, "window": (1024, 0), "mask": segments | ~segments},
        "keys": {"mask": np.arange(length) % 3 > 0},
    }


def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 32768
    if len(sys.argv) > 2:
        print(extra_memory(length, int(sys.argv[2]), *sys.argv[3:]))
        return
    most = native.default_threads()
    copy = length * WIDTH * 4
    print(f"L = S = {length}, D = {WIDTH}, MiB beyond inputs and results")
    for name in masks(length):
        tell(name, most * 8 * MIB + copy, length, most, "float32", "attention", name)
    for threads in sorted({1, most}):
        for kind in ("float32", "bfloat16"):
            for what in ("gradients", "gradients with output and lse"):
                for name in ("none", "causal"):
                    words = f"{what}, {kind}, {name}, {threads} threads"
                    tell(words, threads * 24 * MIB + 2 * copy, length, threads, kind, what, name)


def tell(words: str, bar: int, length: int, threads: int, *more: str) -> None:
    command = [sys.executable, __file__, str(length), str(threads), *more]
    # What is freed goes back to the system at once (glibc), so that it is not used again unseen.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**17)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found = int(done.stdout)
    verdict = "" if found <= bar else "  more than promised"
    print(f"{words:<62}{found / MIB:7.1f} of {bar / MIB:.1f}{verdict}", flush=True)


def extra_memory(length: int, threads: int, kind: str, what: str, name: str) -> int:
    rng = np.random.default_rng(0)
    dtype = dtype_of(kind)
    arrays = [
        rng.standard_normal((1, 1, length, WIDTH), np.float32).astype(dtype, copy=False)
        for _ in "qkvg"
    ]
    options = {**masks(length)[name], "threads": threads}
    if what == "attention":
        call, arrays = regard.attention, arrays[:3]
    else:
        call = regard.gradients
    if what.endswith("lse"):
        out = np.empty(arrays[0].shape, np.float32)  # half types: before their rounding
        output, lse = regard.attention(*arrays[:3], return_lse=True, out=out, **options)
        options |= {"output": output, "lse": lse}
    call(*(array[:, :, :64] for array in arrays), threads=threads)  # whatever a first call loads
    reset_peak()
    before = most_memory()
    made = call(*arrays, **options)
    results = [made] if isinstance(made, np.ndarray) else [one for one in made if one is not None]
    return most_memory() - before - sum(one.nbytes for one in results)


def reset_peak() -> None:
    """Make the most that the process ever had what it has now, where the system can."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        pass


def most_memory() -> int:
    """Bytes that were resident at most."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
