"""What numbers cost that overflow or are subnormal, and NaN and infinity: the time of a call with
them over that of the plain call.

Rows that leave the range of float32, that a NaN or an infinity reaches, or whose sums of small
values are small are computed again in float64; rows of float64 whose numbers leave its range, one
by one with exponents that do not end.

python benchmarks/nonfinite.py [--kernel reference] [--dtype float64] [--threads 1]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

import regard

HEADS, LENGTH, WIDTH, ROUNDS = 4, 1024, 64, 5

Arrays = dict[str, np.ndarray]


def cases(arrays: Arrays) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What each case changes of the plain call."""
    dtype = arrays["key"].dtype
    top, root = np.finfo(dtype).max / 2, np.sqrt(np.finfo(dtype).max) * 10
    rng = np.random.default_rng(1)

    def one(name: str, number: float, **more: Any) -> dict[str, Any]:
        changed = arrays[name].copy()
        changed[:, LENGTH // 2, 7] = number
        return {name: changed, **more}

    def every(name: str, number: float) -> Arrays:
        return {name: np.copysign(dtype.type(number), arrays[name])}

    yield (
        "queries and keys beyond the root of the largest number",
        lambda: {name: arrays[name] * root for name in ("query", "key")},
    )
    yield "one huge key", lambda: one("key", top, query=arrays["query"] * 100)
    yield (
        "one huge key, hidden",
        lambda: one("key", top, query=arrays["query"] * 100, mask=np.arange(LENGTH) != LENGTH // 2),
    )
    yield "huge values", lambda: every("value", top)
    yield "one infinite value", lambda: one("value", np.inf)
    yield "infinite values, +∞ and −∞", lambda: every("value", np.inf)
    yield "infinite values, all +∞", lambda: {"value": np.full_like(arrays["value"], np.inf)}
    yield "infinite values, causal", lambda: every("value", np.inf) | {"causal": True}
    yield (
        "infinite values, half hidden",
        lambda: every("value", np.inf) | {"mask": rng.random((LENGTH, LENGTH)) < 0.5},
    )
    yield "one NaN value", lambda: one("value", np.nan)
    yield "NaN values", lambda: every("value", np.nan)
    yield "one NaN key", lambda: one("key", np.nan)
    yield "NaN keys", lambda: every("key", np.nan)
    yield "one infinite key", lambda: one("key", np.inf)
    yield "NaN queries", lambda: every("query", np.nan)
    for name in ("query", "key", "value"):
        yield f"subnormal {name}", partial(every, name, np.finfo(dtype).tiny / 64)
    yield "values of 0", lambda: {"value": np.zeros_like(arrays["value"])}


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=["fused", "reference"])
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((HEADS, LENGTH, WIDTH)).astype(given.dtype)
        for name in ("query", "key", "value")
    }
    how: dict[str, Any] = {"kernel": given.kernel, "threads": given.threads}
    for what, change in cases(arrays):
        call = arrays | change()
        same = {name: call[name] for name in ("mask", "causal") if name in call}
        taken = seconds(arrays | same | how), seconds(call | how)
        print(f"{what:<56}{taken[1] / taken[0]:8.1f} × the time", flush=True)


def seconds(call: dict[str, Any]) -> float:
    """The median of a few calls."""
    taken = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        regard.attention(**call)
        taken.append(time.perf_counter() - begin)
    return sorted(taken[1:])[ROUNDS // 2]


if __name__ == "__main__":
    main()
