"""From a function to a judgement: with the user's adapter, or with those that are found.

Owns how a function and its adapters are brought together. Must not know what is asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from regard.diagnosis.call.adapter import Adapter
from regard.diagnosis.call.asking import asking
from regard.diagnosis.call.modules import is_object, subjects_of
from regard.diagnosis.call.search import Search, find_adapters, subject_of
from regard.diagnosis.call.skeleton import skeleton
from regard.diagnosis.judge import Judgement, NotAsked, judge, judge_best
from regard.diagnosis.reading.libraries import framework_of
from regard.diagnosis.statements import Stated


def judge_function(
    function: Any, call: Callable[[Any, Any], Any] | None = None, **statements: Any
) -> Judgement:
    """Whether a function is right, as `call(function, t)` calls it, or as the table does.

    Examples
    --------
    >>> import regard
    >>> judge_function(regard.attention, lambda f, t: f(t.query, t.key, t.value)).verdict
    'right'
    """
    stated = Stated(**statements)
    library = stated.library or library_of(function)
    if call is not None:
        adapter = Adapter(call)
        return judge(asking(function, adapter, library), adapter, stated)
    searches = searches_of(function, library, stated)
    groups = (group for search in searches for group in find_adapters(search))
    found = judge_best(groups, lambda one: asking(function, one, library), stated)
    return found or not_callable(function, searches, library)


def library_of(function: Any) -> str:
    """The library whose arrays a function, an object or a class works on."""
    if not is_object(function):
        return framework_of(function)
    kind = function if inspect.isclass(function) else type(function)
    homes = {one.__module__.partition(".")[0] for one in kind.__mro__}
    own = [one for base in kind.__mro__ for one in vars(base).values() if inspect.isfunction(one)]
    libraries = [*(homes & {"torch", "jax"}), *map(framework_of, own)]
    return next((one for one in libraries if one != "numpy"), "numpy")


def searches_of(function: Any, library: str, stated: Stated) -> list[Search]:
    """What may be called, for a function, an object or a class."""
    if is_object(function):
        subjects = [*subjects_of(function, library)]
    else:
        subject = subject_of(function)
        subjects = [] if subject is None else [subject]
    return [Search(function, one, library, stated) for one in subjects]


def not_callable(function: Any, searches: list[Search], library: str) -> Judgement:
    """The verdict that an adapter is needed, with one to edit and what was tried."""
    unknown = list(dict.fromkeys(name for one in searches for name in one.unknown))
    tried = list(dict.fromkeys(why for one in searches for why in one.tried if why))
    why = "no call that was tried returned anything like a result"
    if unknown:
        why = f"it is not known what {', '.join(unknown)} should get"
    elif not searches:
        why = "it is not known how it is made"
    adapter = skeleton(function, searches, library)
    problems = tuple(NotAsked("a call", why) for why in tried[:8])
    return Judgement("not_callable", why, adapter, not_asked=problems)
