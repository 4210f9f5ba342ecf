"""The code of living functions exchanged for rewritten code, for as long as a run takes.

Owns which functions of a file are reached from one, and the text of that file. Nothing is loaded
again: modules, objects and what they keep stay as they are. Must not know values.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import linecache
from collections import Counter
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from regard.diagnosis.trace.rewrite import Code, rewritten

MOST_FUNCTIONS = 200


def code_of(thing: Any) -> Code:
    """The rewritten source of a function, a class or an object; `broken` where there is none."""
    for own in _functions(thing):
        file = own.__code__.co_filename
        text = "".join(linecache.getlines(file, own.__globals__))
        if text:
            return rewritten(text, file)
    code = Code("", "")
    code.broken = "its source is not at hand"
    return code


@contextlib.contextmanager
def in_force(thing: Any, code: Code, names: dict[str, Any]) -> Iterator[None]:
    """While this lasts the functions reached from one run rewritten; `names` are what they call."""
    own = [one for one in _functions(thing) if one.__code__.co_filename == code.file]
    every = [*_codes(code.compiled)] if code.compiled else []
    often = Counter(map(_place, every))  # two lambdas on a line cannot be told apart
    made = {_place(one): one for one in every if often[_place(one)] == 1}
    before: list[tuple[FunctionType, CodeType]] = []
    spaces = {id(one.__globals__): one.__globals__ for one in own}.values()
    try:
        for space in spaces:
            space.update(names)
        for one in own:
            new = made.get(_place(one.__code__))
            if new is not None and new.co_freevars == one.__code__.co_freevars:
                before.append((one, one.__code__))
                one.__code__ = new
        yield
    finally:
        for one, old in before:
            one.__code__ = old
        for space in spaces:
            for name in names:
                space.pop(name, None)


def spans(thing: Any, code: Code) -> list[range]:
    """The lines of each function of that code which is reached from a thing."""
    own = (one.__code__ for one in _functions(thing) if one.__code__.co_filename == code.file)
    return [
        range(one.co_firstlineno, 1 + max(last for part in _codes(one) for last in _lines(part)))
        for one in own
    ]


def _lines(code: CodeType) -> list[int]:
    return [code.co_firstlineno, *(line for *_, line in code.co_lines() if line)]


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _functions(thing: Any) -> list[FunctionType]:
    return list(itertools.islice(_reached(thing), MOST_FUNCTIONS))


def _reached(thing: Any) -> Iterator[FunctionType]:
    """A function, or those of a class or an object, and what they name of the same module."""
    waiting, seen = [thing], set()
    if inspect.ismethod(thing):
        waiting.append(type(thing.__self__))
    while waiting:
        one = _bare(waiting.pop(0))
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one
            waiting += [x for x in _named(one) if _module(x) == one.__module__]
        elif inspect.isclass(one):
            kinds = [kind for kind in one.__mro__ if kind.__module__ == one.__module__]
            waiting += [member for kind in kinds for member in vars(kind).values()]
        elif one is thing:
            waiting.append(type(one))


def _bare(thing: Any) -> Any:
    """What a method, a property or a wrapper is made of."""
    if isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, staticmethod | classmethod) or inspect.ismethod(thing):
        thing = thing.__func__
    with contextlib.suppress(Exception):  # an object may have any code behind an attribute
        thing = inspect.unwrap(thing)
    return thing


def _module(thing: Any) -> str:
    own = _bare(thing)
    known = isinstance(own, FunctionType) or inspect.isclass(own)
    return str(own.__module__) if known else ""


def _named(function: FunctionType) -> Iterator[Any]:
    """What the names in the code of a function mean, as far as that is known."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents
