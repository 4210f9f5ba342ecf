"""What judges a case: one small interface, and the engines behind it.

Owns what a judgement has, and how each engine is asked. Must not know what a right judgement is.
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from attention_corpus import Case, callable_of, load


class Judged(NamedTuple):
    """The verdict on one case: right, fragile, wrong, unknown, not_callable, or stopped."""

    verdict: str
    names: tuple[str, ...] = ()  # of the catalogue
    line: int = 0  # of the case's code; 0 where none is said


Judge = Callable[[Case, bool], Judged]


def by_diagnose(case: Case, adapter: bool) -> Judged:
    """`regard.diagnose`, as it is."""
    import regard

    with_calls = "call" in inspect.signature(regard.diagnose).parameters
    return (by_adapters if with_calls else by_reading)(case, adapter)


def by_adapters(case: Case, adapter: bool) -> Judged:
    """An engine that takes adapters and statements, and says lines."""
    import regard

    with tempfile.TemporaryDirectory() as folder:
        function, call = callable_of(case, Path(folder))
        asked: dict[str, Any] = {"call": call, **stated_beside(case)} if adapter else case.stated
        found = regard.diagnose(function, library=case.library, **asked)
    return Judged(found.verdict, tuple(one.name for one in found.mistakes), found.line or 0)


def stated_beside(case: Case) -> dict[str, Any]:
    """What is stated but for what an adapter says itself, which is refused beside it."""
    moot = {"mask", "window"}
    moot |= {name for name in ("causal", "scale") if re.search(rf"\bt\.{name}\b", case.adapter)}
    return {
        name: value
        for name, value in case.stated.items()
        if name not in moot or value in ("start", "end")
    }


def by_reading(case: Case, adapter: bool) -> Judged:
    """An engine that infers the call by itself, and says no lines."""
    import regard

    if adapter:
        raise ValueError("this engine takes no adapter")
    options = {name: value for name, value in case.stated.items() if name != "scale"}
    if options.get("mask") == "attend":
        options["mask"] = "keep"
    with tempfile.TemporaryDirectory() as folder:
        thing = load(case.code, case.function, Path(folder))
        found = regard.diagnose(_made(thing), library=case.library, **options)
    words = {"mistaken": "wrong", "unusable": "not_callable"}
    names = (one.name for one in found.mistakes if one.name != "one_change")  # which names nothing
    return Judged(words.get(found.verdict, found.verdict), tuple(names))


def _made(thing: Any) -> Any:
    """An object of a class that needs no arguments, or its only method; or the thing itself."""
    if not isinstance(thing, type):
        return thing
    parameters = inspect.signature(thing).parameters.values()
    if any(x.default is x.empty and x.kind < x.VAR_POSITIONAL for x in parameters):
        return thing
    methods = [name for name, one in vars(thing).items() if inspect.isfunction(one)]
    public = [name for name in methods if not name.startswith("_")]
    called = any("__call__" in vars(kind) for kind in thing.__mro__)
    return thing() if called or len(public) != 1 else getattr(thing(), public[0])
