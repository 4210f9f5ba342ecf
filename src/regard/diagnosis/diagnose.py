"""`diagnose`: the questions in order, from a function to a verdict.

Can it be called? Is it right, under which assumptions? Where does it depart from the textbook?
Which known mistake is that? Must not know in which process the function is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from typing import Any, Protocol

from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Ask, asking
from regard.diagnosis.door import judge_ways, library_of, name_of, ways_of
from regard.diagnosis.judge import Judgement
from regard.diagnosis.lines import Told, means, tell
from regard.diagnosis.properties import DIFFERS, shown_by_calls
from regard.diagnosis.result import Outcome
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import Task
from regard.diagnosis.verdict import outcome

MOST_OTHERS = 3  # right and wrong ones, on which a change has to hold as well
LARGER = 8  # times as many scores


class Place(Protocol):
    """Where a function is: how it may be called, what it answers, and what its lines make."""

    def ways(self) -> Iterator[Way]:
        """The ways to call it; the last has no adapter."""

    def asking(self, adapter: Adapter) -> Ask:
        """What asks it a problem."""

    def tell(self, adapter: Adapter, task: Task, others: Sequence[Task]) -> Told:
        """What a trace of one problem tells."""

    def means(self, adapter: Adapter, tasks: Sequence[Task]) -> int:
        """Which of some readings of one problem has most of its own steps in the code."""


class Here:
    """A function in this process."""

    def __init__(
        self, function: Any, call: Callable[[Any, Any], Any] | None, stated: Stated
    ) -> None:
        self._function, self._call, self._stated = function, call, stated
        self._library = library_of(function, stated)

    def ways(self) -> Iterator[Way]:
        """The ways to call it."""
        return ways_of(self._function, self._call, self._library, self._stated)

    def asking(self, adapter: Adapter) -> Ask:
        """What asks it a problem."""
        return asking(self._function, adapter, self._library)

    def tell(self, adapter: Adapter, task: Task, others: Sequence[Task]) -> Told:
        """What a trace of one problem tells."""
        return tell(self._function, adapter, self._library, task, others)

    def means(self, adapter: Adapter, tasks: Sequence[Task]) -> int:
        """Which of some readings of one problem has most of its own steps in the code."""
        return means(self._function, adapter, self._library, tasks)


def diagnose(
    function: Any, call: Callable[[Any, Any], Any] | None = None, **statements: Any
) -> Outcome:
    """See `regard.diagnose`."""
    stated = Stated(**statements)
    return diagnose_at(Here(function, call, stated), name_of(function), stated)


def diagnose_at(place: Place, name: str, stated: Stated) -> Outcome:
    """The verdict on a function of this name."""
    found = judge_ways(place.ways(), place.asking, stated)
    if found.task is not None and found.rivals:
        tasks = [found.task, *(replace(found.task, reading=own) for own in found.rivals)]
        found = found.read_as(place.means(found.adapter, tasks))
    task, others = traced(found)
    told = Told() if task is None else place.tell(found.adapter, task, others)
    return outcome(name, found, told, _mistake(place, found, told))


def _mistake(place: Place, found: Judgement, told: Told) -> str:
    """The name of the mistake: what the calls of a right function show, or else what explains."""
    if found.verdict == "fragile":
        return found.observed
    drawn = found.why == DIFFERS or told.why  # its process may have ended
    if found.verdict != "wrong" or told.mistake or drawn:
        return told.mistake or found.observed
    return shown_by_calls(place.asking(found.adapter), found.wrong)


def traced(found: Judgement) -> tuple[Task | None, tuple[Task, ...]]:
    """The problem whose values are looked at, and others that tell whether a change is right.

    Of a right function it is the first in which the most is asked; of one whose equal calls
    differ, the last of the others is the same once more.
    """
    if found.why == DIFFERS and found.task is not None:
        return found.task, (*found.tasks[1:2], found.task)
    if found.task is None:
        most = max((len(one.given.asks) for one in found.tasks), default=0)
        return next((one for one in found.tasks if len(one.given.asks) == most), None), ()
    rest = [one for one in found.tasks if one is not found.task]
    wrong = [one for one in rest if one in found.wrong]
    right = [one for one in rest if one not in found.wrong]
    return found.task, (*_unlike(found.task, wrong), *_unlike(found.task, right))


def _unlike(task: Task, others: list[Task]) -> Iterator[Task]:
    """Some problems, each with sizes that the ones before have not: chance explains one alone.

    Much larger ones would take too long.
    """
    known = _sizes(task)
    others = [one for one in others if prod(one.given.shape) <= LARGER * prod(task.given.shape)]
    for _ in others[:MOST_OTHERS]:
        one = max(others, key=lambda other: len(_sizes(other) - known))
        others = [other for other in others if other is not one]
        known |= _sizes(one)
        yield one


def _sizes(task: Task) -> set[tuple[str, Any]]:
    return {*asdict(task.given.sizes).items(), *((one, True) for one in task.given.asks)}
