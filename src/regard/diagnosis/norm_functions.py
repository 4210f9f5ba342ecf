"""Functions that normalise the tokens of a layer, which is judged without them.

As `without_norms` does it for torch's layers: each returns what it gets, for the time of a call.
Must not know any probe.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

from regard.diagnosis.signature import names_in

NAMES = re.compile(r"_?((layer|rms|group)_?norm(alize|alise|alization)?|ln|gn|pre_?norm)\d?", re.I)


class WithoutNorms:
    """A function whose tokens are not normalised. `__wrapped__` is the function itself."""

    def __init__(self, function: Callable[..., Any], first: str, names: tuple[str, ...]) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._first, self.left_out = first, names

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function with its normalisations replaced by nothing."""
        tokens = given[0] if given else named[self._first]
        known = _globals_of(self.__wrapped__)
        before = {name: known[name] for name in self.left_out}

        def nothing(own: Any) -> Callable[..., Any]:
            def norm(x: Any, *more: Any, **options: Any) -> Any:
                alike = math.prod(x.shape) == math.prod(tokens.shape)
                is_whole = alike and max(x.shape) >= tokens.shape[-1] and x.ndim <= tokens.ndim
                return x if is_whole else own(x, *more, **options)

            return norm

        known.update({name: nothing(own) for name, own in before.items()})
        try:
            return self.__wrapped__(*given, **named)
        finally:
            known.update(before)


def without_norm_functions(function: Callable[..., Any], first: str) -> Callable[..., Any]:
    """The function without those of its file that normalise; itself if it calls none."""
    known, called = _globals_of(function), _code_of(function)
    names = (name for name in names_in(called) if NAMES.fullmatch(name))
    found = tuple(name for name in names if inspect.isfunction(known.get(name)))
    return WithoutNorms(function, first, found) if found else function


def _code_of(function: Any) -> Any:
    """The function itself, or the one that is called if an object is."""
    inner = inspect.unwrap(function)
    own = inner if inspect.isroutine(inner) else inspect.getattr_static(type(inner), "__call__")
    return inspect.unwrap(getattr(own, "__func__", own))


def _globals_of(function: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(_code_of(function), "__globals__", {})
    return found
