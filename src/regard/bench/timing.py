"""How long calls take, fairly: in rotation, in blocks, the first calls of each block dropped.

Libraries whose idle threads keep spinning slow down whoever is timed next, so every block begins
with a pause and with calls that are not counted. Must not know what is called.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Budget:
    """What a side may spend on one case. Every side has at least one sample per round."""

    seconds: float = 0.8  # of counted samples, all rounds together
    rounds: int = 5
    fewest_rounds: int = 3  # for calls that alone exceed their share
    pause: float = 0.03  # before a block: what spinning threads of others need to fall asleep
    warm: float = 0.01  # seconds of dropped calls that begin a block
    sample: float = 0.0005  # shorter calls are repeated until a sample takes this long


@dataclass
class Samples:
    """Seconds per call, one number per sample; `repeats` calls made one sample."""

    repeats: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The typical seconds per call."""
        return statistics.median(self.seconds)


def time_in_rotation(calls: Mapping[str, Call], budget: Budget) -> dict[str, Samples]:
    """Seconds per call of each side, all of them taking turns."""
    clock = time.perf_counter
    once = {name: _estimate(call, clock) for name, call in calls.items()}
    slow = max(once.values(), default=0.0) * budget.rounds > budget.seconds
    rounds = budget.fewest_rounds if slow else budget.rounds
    taken = {name: Samples(_repeats(once[name], budget)) for name in calls}
    for order in rotation(list(calls), rounds):
        for name in order:
            one = taken[name]
            time.sleep(budget.pause)
            for _ in range(_warm_calls(once[name], budget)):
                calls[name]()
            for _ in range(_samples(once[name] * one.repeats, rounds, budget)):
                one.seconds.append(_sample(calls[name], one.repeats, clock))
    return taken


def rotation(names: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """In every round all of them, each round beginning with the next one.

    >>> list(rotation("abc", 2))
    [['a', 'b', 'c'], ['b', 'c', 'a']]
    """
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        yield [*names[first:], *names[:first]]


def _estimate(call: Call, clock: Callable[[], float]) -> float:
    """Seconds of one call, the best of a few: the first of all may compile or allocate."""
    best = float("inf")
    begin = clock()
    for _ in range(5):
        best = min(best, _sample(call, 1, clock))
        if clock() - begin > 0.1:
            break
    return best


def _repeats(once: float, budget: Budget) -> int:
    return max(1, round(budget.sample / once))


def _samples(sample: float, rounds: int, budget: Budget) -> int:
    return max(1, int(budget.seconds / rounds / sample))


def _warm_calls(once: float, budget: Budget) -> int:
    """At least two, but a call of a whole second has warmed itself."""
    return 0 if once > 1 else max(1 if once > 0.1 else 2, int(budget.warm / once))


def _sample(call: Call, repeats: int, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in repeat(None, repeats):
        call()
    return (clock() - begin) / repeats
