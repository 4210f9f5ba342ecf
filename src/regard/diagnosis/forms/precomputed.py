"""Layers that get keys and values which another of their methods has made of a context.

As in `layer(x, layer.precompute(encoder_states))`. Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.packing import Alternative
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import Parameter, parameters_of

# Both in one argument, and as two that are made in one call.
BOTH = re.compile(r"(\w*)(kv|kvs|keyvalues?|keysvalues|keysandvalues)(cache|states?|pair)?")
MAKES = re.compile(
    r"pre_?comp|project|encode|prepare|make|build|compute|cache|key_?val|keys_and|kv|memory|init",
    re.IGNORECASE,
)


class Precomputed:
    """A layer that gets its context itself. `__wrapped__` is the layer, or its method."""

    adds = False

    def __init__(
        self, layer: Callable[..., Any], make: Callable[..., Any], names: Sequence[str]
    ) -> None:
        self.__wrapped__, self._make, self._names = layer, make, names

    def __call__(self, *given: Any, context: Any, **named: Any) -> Any:
        """What the layer returns for keys and values of the context."""
        made = self._make(context)
        parts = [made] if len(self._names) == 1 else made
        return self.__wrapped__(*given, **dict(zip(self._names, parts, strict=True)), **named)


def from_precomputed(own: Any, target: Any, known: Sequence[Parameter]) -> Alternative | None:
    """The layer with a context in the place of keys and values, if a method of it makes these."""
    asked = [one for one in known[1:] if one.required]
    names = [one.name for one in asked if BOTH.fullmatch(plain(one.name))][:1]
    if not names and known[:1] and role_of(known[0].name) == "x":
        names = [one.name for one in asked if role_of(one.name) in ("key", "value")]
        names = names if len(names) == len(asked) == 2 else []
    rest = {role_of(one.name) for one in asked if one.name not in names}
    if not names or "context" in rest:
        return None
    for name in dir(type(own)):
        method = getattr(own, name) if MAKES.search(name) and name[:1] != "_" else None
        if not (callable(method) and _is_own(own, name)):
            continue
        if sum(one.required for one in parameters_of(method)) == 1:
            context = Parameter("context", "context", keyword=True)
            kept = [replace(one, keyword=not one.required) for one in known]
            taken = [one for one in kept if one.name not in names]
            return Precomputed(target, method, names), [*taken[:1], context, *taken[1:]]
    return None


def _is_own(own: Any, name: str) -> bool:
    """Whether a method is written in the file of the class, and not inherited of a library."""
    method = getattr(type(own), name)
    return getattr(method, "__module__", "") == type(own).__module__
