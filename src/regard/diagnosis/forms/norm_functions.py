"""Normalisations that are functions, methods or objects of a file, left out as those of torch are.

Each passes on what it gets for the time of a call. Must not call it, nor know any probe.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.norms import NORM, Passing
from regard.diagnosis.reading.signature import Parameter, names_in, text_of

# Names of functions and methods that normalise the features of each token.
NAMES = re.compile(r"_?((layer|rms|group|pre)_?norm\w*|rms|[lg]n_?\d?|norm)", re.IGNORECASE)
# What such code computes: a vector divided by its length is none, nor is a root mean square alone.
MEANS = re.compile(r"\bmean\b|\bvar\b|\bstd\b|\bmoments\b")
DIVIDES = re.compile(r"rsqrt|/|\*\* *-|divide|pow\(-")
# Code that adds what it got to what it computed from that.
ADDS = r"\breturn {x} \+ |\b{x} \+ |\b{x} \+= |\+ {x}\b|residual|shortcut"


class WithoutNorms:
    """A function or an object whose normalisations pass on what they get; `__wrapped__` is it."""

    def __init__(
        self, function: Callable[..., Any], home: dict[str, Any], passing: Passing
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.adds = getattr(function, "adds", False)
        self.fault, self.pools = getattr(function, "fault", ""), getattr(function, "pools", False)
        self.option = getattr(function, "option", "")
        self.passing, self._home = passing, home
        self.left_out = passing.names

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call it without them."""
        kept = {name: self._home[name] for name in self.passing.names if name in self._home}
        self._home.update(dict.fromkeys(kept, self.passing))
        try:
            return self.__wrapped__(*given, **named)
        finally:
            self._home.update(kept)


class WithoutInput:
    """A function without the input that it adds to what it computes. `__wrapped__` is it."""

    left_out = ("residual",)
    adds = True

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self._name = name

    def __call__(self, **given: Any) -> Any:
        """What it adds to its input."""
        result = self.__wrapped__(**given)
        out, *more = result if isinstance(result, tuple) else (result,)
        return (out - given[self._name], *more) if more else out - given[self._name]


def norms_of(thing: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The global names of a file with its functions that normalise, and which of them do."""
    own = inspect.unwrap(thing)
    kind = own if inspect.isfunction(own) or inspect.ismethod(own) else type(own)
    module = sys.modules.get(getattr(kind, "__module__", ""))
    home = getattr(own, "__globals__", None) or getattr(module, "__dict__", {})
    methods = [one for one in vars(type(own)).values() if inspect.isfunction(one)]
    called, seen = [own] if inspect.isroutine(own) else methods, list[str]()
    for function in called:  # and what these call
        for name in names_in(inspect.unwrap(function)):
            one = home.get(name)
            if name not in seen and getattr(one, "__module__", "") == home.get("__name__"):
                seen.append(name)
                called += [one] if inspect.isfunction(one) else []
    names = (n for n in seen if NAMES.fullmatch(n) and inspect.isfunction(home[n]))
    return home, tuple(n for n in names if _normalises(text_of(home[n])))


def _normalises(text: str) -> bool:
    return MEANS.search(text) is not None and DIVIDES.search(text) is not None


def without_norm_functions(thing: Any, called: Callable[..., Any]) -> Callable[..., Any]:
    """What is called of an object, or a function, without the normalisations of its file.

    Those that an object has as methods, or as objects of classes, are replaced in it.
    """
    if isinstance(called, WithoutNorms):
        return called
    home, names = norms_of(thing)
    passing = Passing()
    found = list(names)
    if not inspect.isroutine(thing) and hasattr(thing, "__dict__"):
        parts = [n for n, one in vars(thing).items() if NORM.search(type(one).__name__)]
        named = (n for n in dir(type(thing)) if NAMES.fullmatch(n) and n not in vars(thing))
        methods = [n for n in named if _normalises(text_of(getattr(type(thing), n)))]
        found += [*parts, *methods]
        vars(thing).update(dict.fromkeys((*parts, *methods), passing))
    passing.names = tuple(found)
    return WithoutNorms(called, home, passing) if found else called


def without_input(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> list[tuple[Callable[..., Any], list[Parameter]]]:
    """A function without the input that its code adds, if it does; its first argument is that."""
    x = next((one for one in parameters if one.required), None)
    if x is None or re.search(ADDS.format(x=re.escape(x.name)), text) is None:
        return []
    keyed = [replace(one, keyword=True) for one in parameters]
    return [(WithoutInput(function, x.name), keyed)]
