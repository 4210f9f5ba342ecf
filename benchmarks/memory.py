"""How much memory one long call takes beyond its inputs and its output, with every kind of mask.

Each in a process of its own, because a process only tells the most that it ever had. What a mask
itself takes (a boolean matrix has L × S bytes) is the caller's and not counted.

    python benchmarks/memory.py [length]
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import numpy as np

import regard
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
        print(extra_memory(length, sys.argv[2]))
        return
    threads = native.default_threads()
    bar = threads * 8 * MIB + length * WIDTH * 4
    print(
        f"L = S = {length}, D = {WIDTH}, float32, {threads} threads; promised: {bar / MIB:.1f} MiB"
    )
    for name in masks(length):
        words = [sys.executable, __file__, str(length), name]
        found = int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
        print(f"{name:<12}{found / MIB:8.1f} MiB {'' if found <= bar else '  more than promised'}")


def extra_memory(length: int, name: str) -> int:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, 1, length, WIDTH), np.float32) for _ in range(3)]
    options = masks(length)[name]
    regard.attention(*(array[:, :, :64] for array in arrays))  # whatever a first call loads
    reset_peak()
    before = most_memory()
    output = regard.attention(*arrays, **options)
    return most_memory() - before - output.nbytes


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
