"""`diagnose`: the questions in order, from a function to a verdict.

Can it be called? Is it right, under which assumptions? Where does it depart from the textbook?
Which known mistake is that? Must not know in which process the function is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Ask, asking
from regard.diagnosis.door import judge_ways, library_of, name_of, ways_of
from regard.diagnosis.judge import Judgement
from regard.diagnosis.lines import Told, tell
from regard.diagnosis.properties import DIFFERS, mixed
from regard.diagnosis.result import Outcome
from regard.diagnosis.statements import Stated
from regard.diagnosis.task import Task
from regard.diagnosis.verdict import outcome

MOST_OTHERS = 3  # right and wrong ones, on which a change has to hold as well


class Place(Protocol):
    """Where a function is: how it may be called, what it answers, and what its lines make."""

    def ways(self) -> Iterator[Way]:
        """The ways to call it; the last has no adapter."""

    def asking(self, adapter: Adapter) -> Ask:
        """What asks it a problem."""

    def tell(self, adapter: Adapter, task: Task, others: Sequence[Task]) -> Told:
        """What a trace of one problem tells."""


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


def diagnose(
    function: Any, call: Callable[[Any, Any], Any] | None = None, **statements: Any
) -> Outcome:
    """See `regard.diagnose`."""
    stated = Stated(**statements)
    return diagnose_at(Here(function, call, stated), name_of(function), stated)


def diagnose_at(place: Place, name: str, stated: Stated) -> Outcome:
    """The verdict on a function of this name."""
    found = judge_ways(place.ways(), place.asking, stated)
    task, others = traced(found)
    told = Told() if task is None else place.tell(found.adapter, task, others)
    return outcome(name, found, told, _mistake(place, found, told))


def _mistake(place: Place, found: Judgement, told: Told) -> str:
    """The name of the mistake: what the calls of a right function show, or else what explains."""
    if found.verdict == "fragile":
        return found.observed
    drawn = found.why == DIFFERS or told.why  # its process may have ended
    if found.verdict != "wrong" or told.mistake or drawn or found.task is None:
        return told.mistake
    return mixed(place.asking(found.adapter), found.task.given) or found.observed


def traced(found: Judgement) -> tuple[Task | None, tuple[Task, ...]]:
    """The problem whose values are looked at, and others that tell whether a change is right.

    Of a right function it is the first in which the most is asked; of one whose equal calls
    differ, the other is the same once more.
    """
    if found.why == DIFFERS and found.task is not None:
        return found.task, (found.task,)
    if found.task is None:
        most = max((len(one.given.asks) for one in found.tasks), default=0)
        return next((one for one in found.tasks if len(one.given.asks) == most), None), ()
    rest = [one for one in found.tasks if one is not found.task]
    wrong = [one for one in rest if one in found.wrong][:MOST_OTHERS]
    return found.task, (*wrong, *[one for one in rest if one not in found.wrong][:MOST_OTHERS])
