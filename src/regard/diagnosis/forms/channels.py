"""Functions of queries, keys and values, made of functions that take them as channels before time.

As in diffusion models: (N, 3 · H · C, T). Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.forms.packing import QKV, Alternative, stacked
from regard.diagnosis.forms.source import code_of
from regard.diagnosis.reading.parameter_names import plain, role_of
from regard.diagnosis.reading.signature import ARRAYS, Parameter

# What says that there are channels, and then time: width, length = qkv.shape; (N, 3 * H * C, T).
CHANNELS = re.compile(
    r"\b(width|channels?|c|ch)\s*,\s*(length|time|[tnl])\s*=\s*\w*qkv\w*\.shape|"
    r"\* ?C\)? ?(,|x) ?[TLN]\b"
)


class OfChannels:
    """Attention over (B, H, L, D) by a function of channels. `__wrapped__` is the function."""

    def __init__(self, function: Callable[..., Any], name: str, heads: str, by_head: bool) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._name, self._heads, self.by_head = name, heads, by_head

    def __call__(self, **given: Any) -> Any:
        """The output with the axes of the queries."""
        columns = [given.pop(f"{self._name}_{one}").swapaxes(-1, -2) for one in ARRAYS]
        batch, heads, _, length = columns[0].shape
        whole = stacked(columns, 2 if self.by_head else 1).reshape(batch, -1, length)
        if hasattr(self.__wrapped__, self._heads):
            setattr(self.__wrapped__, self._heads, heads)
        elif self._heads:
            given[self._heads] = heads
        out = self.__wrapped__(**given, **{self._name: whole})
        return out.reshape(batch, heads, -1, length).swapaxes(-1, -2)


def of_channels(function: Any, parameters: Sequence[Parameter]) -> list[Alternative]:
    """The ways in which heads may lie in one array of channels; none if its text says nothing."""
    whole = next((one for one in parameters if QKV.match(plain(one.name))), None)
    if whole is None or not CHANNELS.search(code_of(function)):
        return []
    names = [one.name for one in parameters if one is not whole]
    held = getattr(function, "__dict__", {})
    heads = next((name for name in (*names, *held) if role_of(name) == "heads"), "")
    inner = [Parameter(f"{whole.name}_{one}", one, keyword=True) for one in ARRAYS]
    rest = [replace(p, keyword=True) for p in parameters if p is not whole and p.name != heads]
    return [
        (OfChannels(function, whole.name, heads, by_head), [*inner, *rest])
        for by_head in (True, False)
    ]
