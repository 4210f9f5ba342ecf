"""What positions cost: each call with them beside the same call without, in percent.

    python benchmarks/positions.py [lengths …]

8 heads, L = S (512 and 1024), forward and backward. Both calls take turns in one process; the
result is that of the least times, because other programs only ever slow a call down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import regard
from regard.bench.timing import Budget, InThisProcess, time_in_rotation
from regard.compute import native
from regard.positions import Alibi, Positions, RelativeBias, Rotary

HEADS = 8
BUDGET = Budget(seconds=1.0)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
table = np.random.default_rng(1).standard_normal((HEADS, 32))
RULES: dict[str, Positions] = {
    "Rotary": Rotary(),
    "Alibi": Alibi(),
    "RelativeBias": RelativeBias(table),
}


def calls(length: int, width: int, dtype: Any) -> dict[str, Callable[..., Any]]:
    """Direction -> a call that takes positions."""
    rng = np.random.default_rng(0)
    q, k, v, grad = (rng.standard_normal((HEADS, length, width)).astype(dtype) for _ in range(4))
    return {
        "forward": lambda **options: regard.attention(q, k, v, **options),
        "backward": lambda **options: regard.gradients(q, k, v, grad, **options),
    }


def cost(call: Callable[..., Any], rule: Positions) -> float:
    """By how many percent a call with positions takes longer."""
    sides = {
        "with": InThisProcess(lambda: call(positions=rule)),
        "without": InThisProcess(call),
    }
    taken = time_in_rotation(sides, BUDGET)
    least = {name: min(one.seconds) for name, one in taken.items()}
    return 100 * (least["with"] / least["without"] - 1)


def main() -> None:
    sizes = [
        (length, width) for width in (64, 128) for length in map(int, sys.argv[1:] or (512, 1024))
    ]
    print(f"{HEADS} heads, {native.default_threads()} threads, target {native.target}; in %")
    for direction in ("forward", "backward"):
        print(f"\n| {direction} | " + " | ".join(f"{n}, D = {d}" for n, d in sizes) + " |")
        print("|---" + "|---:" * len(sizes) + "|")
        for name, rule in RULES.items():
            for dtype, own in DTYPES.items():
                found = [cost(calls(*size, own)[direction], rule) for size in sizes]
                row = " | ".join(f"{one:.0f}".replace("-", "−") for one in found)
                print(f"| {name}, {dtype} | {row} |", flush=True)


if __name__ == "__main__":
    main()
