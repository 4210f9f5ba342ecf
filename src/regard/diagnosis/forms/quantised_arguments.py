"""Functions of keys and values, made of functions that take them as integers with their scales.

The file's own function makes the integers. Must not know any probe.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.adapting import nodes_in
from regard.diagnosis.forms.packing import Alternative, Packing
from regard.diagnosis.reading.parameter_names import role_of
from regard.diagnosis.reading.signature import Parameter

# What makes integers, and is not what reads them.
MAKER = re.compile(
    "^_?(?!.*(de_?quant|un_?pack|decode))\\w*(quant|pack|compress|encode|to_?u?int)|^_?q_?[48]$",
    re.I,
)
# Parts of quantised keys or values by their names: k_codes, key_scale, v_zero_points.
PART = re.compile(
    "^(k|v|key|value)s?_?(cache_?)?(q|u?int[48]?|q?[48]|codes?|quant\\w*|packed|scales?|zeros?|"
    "zps?|zero_?points?|min|mins|offsets?|data|bits)$",
    re.IGNORECASE,
)
SIDES = {"k": "key", "v": "value"}


class OfIntegers(Packing):
    """A function whose keys and values are made integers by the first function that fits it."""

    def __init__(
        self,
        function: Callable[..., Any],
        makers: Sequence[Callable[..., Any]],
        groups: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(function, lambda given: given)
        self._makers, self._groups = makers, groups

    def __call__(self, **given: Any) -> Any:
        """Call the function with integers and scales."""
        for make in self._makers[:-1]:
            with contextlib.suppress(Exception):
                return self.__wrapped__(**self._made(make, given))
        return self.__wrapped__(**self._made(self._makers[-1], given))

    def _made(self, make: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(given)
        for side, names in self._groups.items():
            parts = make(own.pop(f"quantised_{side}"))
            own |= dict(zip(names, [parts] if len(names) == 1 else parts, strict=True))
        return own


def with_quantised(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Alternative | None:
    """The function as one of keys and values, if it takes their integers and scales."""
    makers = [*_makers(function)]
    groups = _tuples(function, parameters) or _groups(parameters)
    if not makers or {*groups} != {*SIDES}:
        return None

    first = {names[0]: side for side, names in groups.items()}
    inside = {name for names in groups.values() for name in names}
    rest = [
        Parameter(f"quantised_{first[one.name]}", SIDES[first[one.name]], keyword=True)
        if one.name in first
        else replace(one, keyword=True)
        for one in parameters
        if one.name in first or one.name not in inside
    ]
    return OfIntegers(function, makers, groups), rest


def _makers(function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The functions of the same file that make integers and scales of one array."""
    place = getattr(inspect.unwrap(function), "__module__", "") or ""
    for name, own in vars(sys.modules.get(place, sys)).items():
        if inspect.isfunction(own) and own.__module__ == place and MAKER.match(name):
            known = inspect.signature(own).parameters.values()
            if sum(one.default is one.empty for one in known) == 1:
                yield own


def _tuples(
    function: Callable[..., Any], parameters: Sequence[Parameter]
) -> Mapping[str, list[str]]:
    """The parameters that code takes apart, of keys and of values."""
    apart = set[str]()
    for node in nodes_in(function):
        takes = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
        if takes or isinstance(node, ast.Starred):
            apart.add(getattr(getattr(node, "value", None), "id", ""))
    roles = {"key": "k", "cache_k": "k", "value": "v", "cache_v": "v"}
    found = dict[str, list[str]]()
    for one in parameters:
        if one.name in apart and one.required and (side := roles.get(role_of(one.name) or "")):
            found[side] = [one.name]
    return found


def _groups(parameters: Sequence[Parameter]) -> Mapping[str, list[str]]:
    """The parameters that are parts of keys, and of values, by their names."""
    found = dict[str, list[str]]()
    for one in parameters:
        if one.required and (part := PART.match(one.name)):
            found.setdefault(part[1][0].lower(), []).append(one.name)
    whole = all(len(names) > 1 and "scale" in "".join(names).lower() for names in found.values())
    return found if whole else {}
