"""Times of calls, in rotation and in blocks.

Idle threads of a library may spin for a while and slow the next one down where a process cannot be
stopped, so a block begins with a pause, then uncounted calls. Must not know what is called, nor in
which process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Budget:
    """Time for one library in one case, in seconds; each has at least one sample per round."""

    seconds: float = 0.8  # of counted samples, all rounds together
    rounds: int = 5
    fewest_rounds: int = 3  # where one call per round exceeds `seconds`
    pause: float = 0.03  # before a block, for spinning threads to fall asleep
    warm: float = 0.01  # of uncounted calls at the start of a block
    sample: float = 0.0005  # shorter calls are repeated until a sample takes this long


@dataclass
class Samples:
    """Seconds per call, one number per sample of `repeats` calls, round by round."""

    repeats: int
    rounds: list[list[float]] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """All samples."""
        return [one for block in self.rounds for one in block]

    @property
    def median(self) -> float:
        """Median seconds per call."""
        return statistics.median(self.seconds)

    @property
    def medians(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(block) for block in self.rounds]


class Timed(Protocol):
    """A call that can be timed."""

    def estimate(self) -> float:
        """Seconds of one call."""

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """Seconds per call of `count` samples of `repeats` calls, after `warm` uncounted calls."""


@dataclass(frozen=True)
class InThisProcess:
    """A call in this process."""

    call: Call

    def estimate(self) -> float:
        """The best of a few calls: the first may compile or allocate."""
        best = float("inf")
        begin = time.perf_counter()
        for _ in range(5):
            best = min(best, self._sample(1))
            if time.perf_counter() - begin > 0.1:
                break
        return best

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """See `Timed`."""
        for _ in range(warm):
            self.call()
        return [self._sample(repeats) for _ in range(count)]

    def _sample(self, repeats: int) -> float:
        call = self.call
        begin = time.perf_counter()
        for _ in repeat(None, repeats):
            call()
        return (time.perf_counter() - begin) / repeats


def time_in_rotation(calls: Mapping[str, Timed], budget: Budget) -> dict[str, Samples]:
    """Seconds per call, all calls taking turns."""
    once = {name: call.estimate() for name, call in calls.items()}
    slow = max(once.values(), default=0.0) * budget.rounds > budget.seconds
    rounds = budget.fewest_rounds if slow else budget.rounds
    taken = {name: Samples(max(1, round(budget.sample / once[name]))) for name in calls}
    for order in rotation(list(calls), rounds):
        for name in order:
            one = taken[name]
            time.sleep(budget.pause)
            warm = _warm_calls(once[name], budget)
            count = max(1, int(budget.seconds / rounds / (once[name] * one.repeats)))
            one.rounds.append(calls[name].block(warm, one.repeats, count))
    return taken


def rotation(names: Sequence[T], rounds: int) -> Iterator[list[T]]:
    """All names in every round, each round beginning with the next one.

    >>> list(rotation("abc", 2))
    [['a', 'b', 'c'], ['b', 'c', 'a']]
    """
    for turn in range(rounds):
        first = turn % len(names) if names else 0
        yield [*names[first:], *names[:first]]


def _warm_calls(once: float, budget: Budget) -> int:
    """At least two; one for calls above 0.1 s, none above 1 s."""
    return 0 if once > 1 else max(1 if once > 0.1 else 2, int(budget.warm / once))
