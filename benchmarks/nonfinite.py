"""What one NaN or infinity costs: the time of a call with it over the time of the call without.

A row that is not finite is computed again, with care; that must not hold up a service. Rows whose
finite scores overflow are computed again in long double, which is the most that a call can cost.

python benchmarks/nonfinite.py
"""

from __future__ import annotations

import time

import numpy as np

import regard

LENGTH, WIDTH, ROUNDS = 1024, 64, 5
BAD = {
    "NaN in a key": ("key", np.nan),
    "inf in a key": ("key", np.inf),
    "NaN in a value": ("value", np.nan),
    "inf in a value": ("value", np.inf),
    "1e38 throughout the keys": ("key", 1e38),
}


def main() -> None:
    """Print a line for each kind of number."""
    rng = np.random.default_rng(0)
    names = ("query", "key", "value")
    arrays = {name: rng.standard_normal((LENGTH, WIDTH), np.float32) for name in names}
    seconds(arrays)
    for what, (name, number) in BAD.items():
        worse = arrays[name].copy()
        if np.isfinite(number):
            worse *= np.float32(number)
        else:
            worse[LENGTH // 2, 7] = number
        print(f"{what:<26}{seconds({**arrays, name: worse}) / seconds(arrays):8.1f} × the time")


def seconds(arrays: dict[str, np.ndarray]) -> float:
    """The median of a few calls on one thread."""
    taken = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        regard.attention(**arrays, threads=1)
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[ROUNDS // 2]


if __name__ == "__main__":
    main()
