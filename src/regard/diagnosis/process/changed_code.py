"""Calls a function as if a line of its code were another one: nothing is loaded again.

Only the code objects of its functions change, and only for as long as a call takes. Must not know
which changes are worth a try.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copy
import functools
import inspect
import itertools
import linecache
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from regard.boundary.cached import cached_property
from regard.diagnosis.process.insides import NOTE, Notes, noting
from regard.diagnosis.process.run_lines import RunLines
from regard.diagnosis.reading.changed_text import MOST_CHARACTERS, Block, Change
from regard.diagnosis.reading.signature import names_in
from regard.diagnosis.reading.source_text import parsed, tree_of_text

MOST_FUNCTIONS = 200
JAX = ("jax", "jnp")
FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, one).compiler_flag for one in __future__.all_feature_names)
)


class ChangedCode:
    """The code of a function, and of what it calls in its own file."""

    def __init__(self, function: Any) -> None:
        reached = list(itertools.islice(_reached(function), MOST_FUNCTIONS))
        self._file = reached[0].__code__.co_filename if reached else ""
        self._functions = [one for one in reached if one.__code__.co_filename == self._file]
        text = "".join(linecache.getlines(self._file)) if reached else ""
        self.blocks: tuple[Block, ...] = ()
        if text and len(text) <= MOST_CHARACTERS:
            with contextlib.suppress(SyntaxError, ValueError):
                self.blocks = tuple(self._blocks_in(text))
        self.lines = RunLines([own for one in self._functions for own in _codes(one.__code__)])
        self._defaults = [_changeable(one) for one in self._functions]
        self._caches = [one for one in map(_cache_of, self._functions) if one is not None]

    def _blocks_in(self, text: str) -> Iterator[Block]:
        """The top-level statements in which the functions are, if they were made of this text."""
        lines = text.splitlines(keepends=True)
        for statement in tree_of_text(text).body:
            decorators = getattr(statement, "decorator_list", [])
            first = min([statement.lineno, *(one.lineno for one in decorators)])
            last = statement.end_lineno or first
            own = [one for one in self._functions if first <= _place(one)[1] <= last]
            block = first, "".join(lines[first - 1 : last])
            codes = self._compiled(*block) if own else {}
            if any(_is_of(codes.get(_place(one)), one.__code__) for one in own):
                yield block

    def _compiled(self, first: int, text: str | ast.Module) -> dict[tuple[str, int], CodeType]:
        flags = self._functions[0].__code__.co_flags & FUTURE
        if isinstance(text, str):
            text = parsed("\n" * (first - 1) + text)
        whole = compile(text, self._file, "exec", flags, dont_inherit=True)
        return {(one.co_name, one.co_firstlineno): one for one in _codes(whole)}

    @contextlib.contextmanager
    def with_change(self, change: Change) -> Iterator[None]:
        """While this lasts the code is changed; a change that is no Python changes nothing."""
        codes: dict[tuple[str, int], CodeType] = {}
        with contextlib.suppress(SyntaxError, ValueError):
            codes = self._compiled(self.blocks[change.block][0], change.of(self.blocks))
        with self._exchanged(codes):
            yield

    @contextlib.contextmanager
    def with_first_defaults(self) -> Iterator[None]:
        """While this lasts lists and dictionaries that are defaults are those of the beginning."""
        now = [one.__defaults__ for one in self._functions]
        for function, defaults in zip(self._functions, self._defaults, strict=True):
            if defaults is not None:
                function.__defaults__ = copy.deepcopy(defaults)
        try:
            yield
        finally:
            for function, before in zip(self._functions, now, strict=True):
                function.__defaults__ = before

    @contextlib.contextmanager
    def noted(self) -> Iterator[Notes]:
        """While this lasts the code notes its values."""
        notes = Notes()
        known = {id(one.__globals__): one.__globals__ for one in self._functions}.values()
        for names in known:
            names[NOTE] = notes
        try:
            with self._exchanged(self._noting_codes):
                yield notes
        finally:
            for names in known:
                names.pop(NOTE, None)

    @cached_property
    def _noting_codes(self) -> dict[tuple[str, int], CodeType]:
        """The code that notes its values."""
        codes: dict[tuple[str, int], CodeType] = {}
        for first, text in self.blocks:
            codes |= self._compiled(first, noting("\n" * (first - 1) + text))
        return codes

    @contextlib.contextmanager
    def _exchanged(self, codes: Mapping[tuple[str, int], CodeType]) -> Iterator[None]:
        """While this lasts the functions have this code."""
        replaced: list[tuple[FunctionType, CodeType]] = []
        try:
            for function in self._functions:
                old, new = function.__code__, codes.get(_place(function))
                if new is not None and new.co_freevars == old.co_freevars:
                    replaced.append((function, old))
                    function.__code__ = new
            self._forget()
            yield
        finally:
            for function, old in replaced:
                function.__code__ = old
            self._forget()

    def _forget(self) -> None:
        """Forget what other code computed: results that are kept, and what JAX has traced."""
        for one in self._caches:
            one.cache_clear()
        jax = sys.modules.get("jax")
        if jax is not None and any(
            name in JAX for one in self._functions for name in one.__globals__
        ):
            jax.clear_caches()


def _changeable(function: FunctionType) -> tuple[Any, ...] | None:
    """A copy of the defaults of a function, if there is a list or a dictionary among them."""
    defaults = function.__defaults__ or ()
    if not any(isinstance(one, list | dict) for one in defaults):
        return None
    with contextlib.suppress(Exception):  # what is in them may be anything
        return copy.deepcopy(defaults)
    return None


def _place(function: FunctionType) -> tuple[str, int]:
    return function.__code__.co_name, function.__code__.co_firstlineno


def _is_of(made: CodeType | None, code: CodeType) -> bool:
    """Whether code was made of the same text, as far as its names say."""
    return made is not None and all(
        getattr(made, name) == getattr(code, name)
        for name in ("co_varnames", "co_freevars", "co_cellvars", "co_names", "co_argcount")
    )


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _cache_of(function: FunctionType) -> Any:
    """What keeps the results of a function, if something does."""
    kept = function.__globals__.get(function.__name__)
    return kept if hasattr(kept, "cache_clear") else None


def _reached(thing: Any) -> Iterator[FunctionType]:
    """A function, or those of an object or of a pair, and what they name of the same file."""
    waiting: list[Any] = list(thing) if isinstance(thing, tuple) else [thing]
    seen: set[int] = set()
    while waiting:
        one = _bare(waiting.pop(0))
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, FunctionType):
            yield one
            waiting += [known for known in _named_by(one) if _is_beside(known, one)]
        elif inspect.isclass(one):
            own = [kind for kind in one.__mro__ if kind.__module__ == one.__module__]
            waiting += [member for kind in own for member in vars(kind).values()]
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


def _named_by(function: FunctionType) -> Iterator[Any]:
    """What the names in the code of a function mean, as far as that is known."""
    known = function.__globals__
    for name in names_in(function):
        if name in known:
            yield known[name]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


def _is_beside(thing: Any, function: FunctionType) -> bool:
    """Whether something is a function or class of the same file."""
    own = _bare(thing)
    is_code = inspect.isfunction(own) or inspect.isclass(own)
    return is_code and own.__module__ == function.__module__
