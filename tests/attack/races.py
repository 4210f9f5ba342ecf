"""Calls from fifty Python threads, to be run with ThreadSanitizer by `nox -s tsan`.

Every answer must be the one that the call has alone on some CPU target, while the target and the
number of threads are changed, the main thread is interrupted and forks. What races is for the
sanitizer to say; `--plant` makes two calls write to one array, which it must report.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np

import regard
from calls import TARGETS
from regard.compute import native

THREADS = 50
Call = Callable[[int | None], list[bytes]]


def calls() -> dict[str, Call]:
    """One for each way through the kernel; the argument is `threads`."""
    rng = np.random.default_rng(0)

    def rows(*shape: int, dtype: str = "f4") -> np.ndarray:
        return rng.normal(size=shape).astype(dtype)

    q, k, v = rows(4, 90, 32), rows(2, 300, 32), rows(2, 300, 20)
    few, keys = rows(2, 1, 16), rows(2, 4000, 16)
    wide, huge = rows(4, 20, 8, dtype="f8"), np.full((1, 12, 16), 3e38, np.float32)
    largest = np.full((1, 4, 8), 1.7e308)
    cache = regard.KVCache(dtype="int8")
    cache.append(rows(1, 2, 500, 16), rows(1, 2, 500, 16))
    rotary = regard.positions.Rotary()

    def attend(*arrays: np.ndarray, **options: object) -> Call:
        def call(threads: int | None) -> list[bytes]:
            found = regard.attention(*arrays, threads=threads, **options)
            return [one.tobytes() for one in (found if isinstance(found, tuple) else (found,))]

        return call

    def slopes(threads: int | None) -> list[bytes]:
        grad = np.ones((4, 90, 20), np.float32)
        wrt = ("query", "key", "value", "scale")
        found = regard.gradients(q, k, v, grad, causal=True, offset="end", threads=threads, wrt=wrt)
        return [one.tobytes() for one in (found.query, found.key, found.value)]

    return {
        "plain": attend(q, k, v),
        "plain, one row": attend(few, keys, keys),
        "float16": attend(*(one.astype("f2") for one in (q, k, v))),
        "positions": attend(q, k, v, positions=rotary, offset="end"),
        "general": attend(q, k, v, causal=True, offset="end", softcap=3.0, return_lse=True),
        "keys split over threads": attend(few, keys, keys, window=(3000, 0), offset="end"),
        "float64": attend(wide, wide, wide, bias=np.ones((4, 20, 20))),
        "again in float64": attend(huge, k[:1, :, :16].copy(), v[:1]),
        "numbers of any size": attend(largest, largest, wide[:1, :4]),
        "int8": lambda _: [cache.attend(few[None]).tobytes()],
        "gradients": slopes,
    }


class Race:
    """Threads that make the calls again and again, and what is wrong with their answers."""

    def __init__(self, seed: int) -> None:
        self.calls, self.seed = calls(), seed
        self.expected: dict[str, list[list[bytes]]] = {name: [] for name in self.calls}
        for target in TARGETS:
            native.use_target(target)
            for name, call in self.calls.items():
                self.expected[name].append(call(1))
        self.wrong: list[str] = []
        self.made = [0] * THREADS
        self.over = threading.Event()

    def check(self, dice: random.Random) -> None:
        name = dice.choice([*self.calls])
        if self.calls[name](dice.choice([None, None, 1, 2, 3, 7])) not in self.expected[name]:
            self.wrong.append(f"{name}: an answer of no target")

    def work(self, number: int) -> None:
        dice = random.Random(self.seed + number)
        while not self.over.is_set():
            try:
                self.check(dice)
            except Exception as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            self.made[number] += 1

    def run(self, seconds: float) -> dict[str, int]:
        """Interrupts, forks and other settings in this thread, calls in the others."""
        dice, counts = random.Random(self.seed), {"interrupts": 0, "forks": 0, "settings": 0}
        workers = [threading.Thread(target=self.work, args=(n,)) for n in range(THREADS)]
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        for one in workers:
            one.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            native.use_target(dice.choice(TARGETS))
            regard.set_threads(dice.choice([None, 1, 2, 5]))
            counts["settings"] += 1
            counts["interrupts"] += self.be_interrupted(dice)
            counts["forks"] += self.fork(dice)
        self.over.set()
        for one in workers:
            one.join()
        return counts | {"calls": sum(self.made)}

    def be_interrupted(self, dice: random.Random) -> bool:
        x = np.ones((4, 4000, 64), np.float32)
        try:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.01, 0.2))
            regard.attention(x, x, x, threads=dice.choice([None, 1, 2]))
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            return True
        return False

    def fork(self, dice: random.Random) -> bool:
        child = os.fork()
        if child == 0:
            for _ in range(3):
                self.check(dice)
            os._exit(1 if self.wrong else 0)
        if os.waitpid(child, 0)[1]:
            self.wrong.append("a child answers wrongly")
        return True


def plant() -> None:
    """Two threads whose calls write to one array: a mistake of the caller."""
    q, k, v = (np.ones((4, 200, 64), np.float32) for _ in range(3))
    out = np.empty_like(q)

    def work() -> None:
        for _ in range(20):
            regard.attention(q, k, v, out=out)

    both = [threading.Thread(target=work) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join()


def main() -> int:
    """Race; 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--plant", action="store_true", help="a race that must be reported")
    asked = parser.parse_args()
    warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads
    if asked.plant:
        plant()
        return 0
    race = Race(asked.seed)
    counts = race.run(asked.seconds)
    print(f"seed {asked.seed}; {counts} on {', '.join(TARGETS)}; {len(race.wrong)} wrong")
    print(*sorted(set(race.wrong)), sep="\n")
    return 1 if race.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
