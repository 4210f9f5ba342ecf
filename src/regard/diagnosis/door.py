"""From a function to a judgement: with the user's adapter, or with those that are found.

Owns how a function and its adapters are brought together. Must not know what is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from regard.diagnosis.call import table
from regard.diagnosis.call.adapter import Adapter, Way
from regard.diagnosis.call.asking import Ask
from regard.diagnosis.call.modules import is_object, subjects_of
from regard.diagnosis.call.search import Search, find_adapters, subject_of
from regard.diagnosis.call.skeleton import skeleton
from regard.diagnosis.judge import Judgement, judge_best
from regard.diagnosis.process.libraries import framework_of
from regard.diagnosis.result import NotAsked
from regard.diagnosis.statements import Stated
from regard.errors import OptionError, safe_text

MOST_TOLD = 8  # reasons why calls failed


def judge_ways(ways: Iterator[Way], ask: Callable[[Adapter], Ask], stated: Stated) -> Judgement:
    """The verdict on a function that may be called in these ways, of which the last has none."""
    last = Way()

    def groups() -> Iterator[tuple[Adapter, ...]]:
        nonlocal last
        for last in ways:
            if not last.adapters:
                return
            yield last.adapters

    found = judge_best(groups(), ask, stated)
    if found is not None:
        return found
    why = last.why or "no call that was tried returned anything like a result"
    tried = tuple(NotAsked("a call", one) for one in last.tried)
    return Judgement("not_callable", why, Adapter(_not_called, last.skeleton), not_asked=tried)


def _not_called(function: Any, t: Any) -> Any:
    raise NotImplementedError("this adapter is to be edited first")


def ways_of(
    function: Any, call: Callable[[Any, Any], Any] | None, library: str, stated: Stated
) -> Iterator[Way]:
    """How a function may be called: by the adapter that is given, or else as the table has it."""
    name = name_of(function)
    if call is not None:
        yield Way((Adapter(call),), name)
        return
    searches = _searches(function, library, stated)
    found = False
    for search in searches:
        for group in find_adapters(search):
            found = True
            yield Way(tuple(group), name)
    yield Way(name=name) if found else _not_callable(function, name, searches, library)


def name_of(function: Any) -> str:
    """What a function, a class or an object is called in a verdict."""
    return safe_text(getattr(function, "__name__", type(function).__name__), 60)


def library_of(function: Any, stated: Stated) -> str:
    """The library whose arrays a function, an object or a class works on.

    An OptionError is raised where nothing can be called.
    """
    name = name_of(function)
    if not any(callable(getattr(function, one, None)) for one in table.METHODS):
        what = safe_text(type(function).__name__, 60)
        raise OptionError(f"diagnose needs a function, an object or a class; {name} is a {what}")
    if stated.library:
        return stated.library
    if not is_object(function):
        return framework_of(function)
    kind = function if inspect.isclass(function) else type(function)
    homes = {one.__module__.partition(".")[0] for one in kind.__mro__}
    own = [one for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one)]
    libraries = [*(homes & {"torch", "jax"}), *map(framework_of, own)]
    return next((one for one in libraries if one != "numpy"), "numpy")


def _searches(function: Any, library: str, stated: Stated) -> list[Search]:
    """What may be called, of a function, an object or a class."""
    if is_object(function):
        subjects = [*subjects_of(function, library)]
    else:
        subject = subject_of(function)
        subjects = [] if subject is None else [subject]
    return [Search(function, one, library, stated) for one in subjects]


def _not_callable(function: Any, name: str, searches: list[Search], library: str) -> Way:
    """That an adapter is needed, with one to edit and what was tried."""
    unknown = dict.fromkeys(name for one in searches for name in one.unknown)
    tried = dict.fromkeys(why for one in searches for why in one.tried if why)
    why = "no call that was tried returned anything like a result"
    if unknown:
        why = f"it is not known what {safe_text(', '.join(unknown), 200)} should get"
    elif not searches:
        why = "it is not known how it is made"
    code = skeleton(function, searches, library)
    return Way((), name, why, code, tuple(tried)[:MOST_TOLD])
