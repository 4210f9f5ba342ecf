"""Functions that keep keys and values in an object they are given: a new one for each question.

Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from regard.diagnosis.forms.adapting import nodes_in
from regard.diagnosis.forms.caches import Remembering, fills_dictionary
from regard.diagnosis.forms.construction import constructed
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter
from regard.errors import OptionError

SWITCHES = ("use_cache", "usecache", "update_cache")


class KeepingInObject(Remembering):
    """A function whose cache is an object: each question begins with an empty one."""

    def __init__(
        self, function: Any, name: str, make: Callable[[], Any], on: Sequence[str]
    ) -> None:
        super().__init__(function, "")
        self._name, self._make, self._on = name, make, on
        self._object = make()

    @property
    def is_pure(self) -> bool:
        """Whether a call leaves nothing behind."""
        return False

    def begin(self) -> None:
        """Forget every earlier call."""
        self._object = self._make()

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function with the object that earlier calls have filled."""
        more: Mapping[str, Any] = {self._name: self._object, **dict.fromkeys(self._on, True)}
        return self.__wrapped__(*given, **{**named, **more})


class GrowingCache:
    """Keys and values so far; every method that adds to them returns both."""

    def __init__(self) -> None:
        self.k: Any = None
        self.v: Any = None

    def update(self, k: Any, v: Any, *rest: Any, **more: Any) -> tuple[Any, Any]:
        """Add tokens along the last axis but one."""
        self.k = k if self.k is None else _joined(self.k, k)
        self.v = v if self.v is None else _joined(self.v, v)
        return self.k, self.v

    append = extend = add = push = insert = store = __call__ = update

    def get(self, *rest: Any) -> tuple[Any, Any]:
        """The keys and values so far."""
        return self.k, self.v

    def __len__(self) -> int:
        return 0 if self.k is None else int(self.k.shape[-2])

    def get_seq_length(self, *rest: Any) -> int:
        """How many tokens there are."""
        return len(self)

    @property
    def keys(self) -> Any:
        """The keys so far."""
        return self.k

    @property
    def values(self) -> Any:
        """The values so far."""
        return self.v


def _joined(first: Any, second: Any) -> Any:
    if hasattr(first, "new_zeros"):
        import torch

        return torch.cat([first, second], -2)
    if isinstance(first, np.ndarray):
        return np.concatenate([first, second], -2)
    import jax.numpy as jnp

    return jnp.concatenate([first, second], -2)


def with_cache_object(
    function: Any, code: Callable[..., Any], parameters: Sequence[Parameter], heads: int | None
) -> tuple[KeepingInObject, list[Parameter]] | None:
    """The function with an object as its cache, if its `code` calls methods of a cache."""
    for one in parameters:
        if role_of(one.name) != "cache":
            continue
        used = _used(code, one.name)
        optional = {role_of(x.name) for x in parameters if not x.required}
        of_context = any(role_of(x.name) == "context" for x in parameters)  # its keys stay
        of_context |= {"key", "value"} <= optional  # or those of the queries, if none are given
        if not (one.required or of_context) and fills_dictionary(code, one.name):
            rest = [x for x in parameters if x is not one]
            return KeepingInObject(function, one.name, dict, ()), rest
        if not used["methods"] - {"get", "setdefault", "items", "keys", "values", "copy"}:
            continue
        make = _maker(code, used["methods"] | used["read"], heads)
        on = [x.name for x in parameters if x.name in SWITCHES]
        rest = [x for x in parameters if x is not one and x.name not in SWITCHES]
        return KeepingInObject(function, one.name, make, on), rest
    return None


def _used(code: Callable[..., Any], name: str) -> dict[str, set[str]]:
    """The methods that the code calls of something with a name, and what else it reads of it."""
    methods: set[str] = set()
    read: set[str] = set()
    for node in nodes_in(code):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == name:
            read.add(node.attr)
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and getattr(called.value, "id", "") == name:
            methods.add(called.attr)
    return {"methods": methods, "read": read - methods}


def _maker(code: Callable[..., Any], used: set[str], heads: int | None) -> Callable[[], Any]:
    """What makes an empty cache: a class beside the function that has what the function uses."""
    module = sys.modules.get(getattr(inspect.unwrap(code), "__module__", "") or "")
    for kind in vars(module).values() if module is not None else ():
        if not inspect.isclass(kind) or kind.__module__ != getattr(module, "__name__", ""):
            continue
        with contextlib.suppress(OptionError, TypeError, ValueError):
            made = constructed(kind, heads)[-1]
            if all(hasattr(made, name) for name in used):
                return lambda: _in_float64(constructed(kind, heads)[-1])
    return GrowingCache


def _in_float64(thing: Any) -> Any:
    for name, value in getattr(thing, "__dict__", {}).items():
        if hasattr(value, "new_zeros") and str(value.dtype) == "torch.float32":
            vars(thing)[name] = value.double()
    return thing
