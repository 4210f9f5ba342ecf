"""Layers in which one token alone asks, as the class token of CaiT: called once for each token.

Keys have no order, so with another token in its place the layer gives what that token would get.
Must not know any probe.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

FIRST = re.compile(r"\w\[:, *(?:0|:1|0:1)(?:, *:)?\]")
LAST = re.compile(r"\w\[:, *(?:-1|-1:)(?:, *:)?\]")


class FirstAsks:
    """A function of tokens (B, L, M) in which one asks, as one in which all do.

    `__wrapped__` is the function.
    """

    def __init__(self, function: Callable[..., Any], place: int) -> None:
        self.__wrapped__, self.place = function, place

    def __call__(self, rows: Any, *given: Any, **named: Any) -> Any:
        """What each token gets, where it takes the place of the one that asks."""
        batch, length, width = rows.shape
        order = np.array([np.roll(np.arange(length), self.place - n) for n in range(length)])
        found = self.__wrapped__(
            rows[:, order.ravel()].reshape(batch * length, length, width), *given, **named
        )
        first = found[0] if isinstance(found, tuple | list) else found
        if first.shape[0] != batch * length or (first.ndim > 2 and first.shape[1] != 1):
            raise ValueError("it returns more than what one token gets")
        return first.reshape(batch, length, first.shape[-1])


def first_asks(function: Callable[..., Any], text: str) -> list[FirstAsks]:
    """How to call a layer whose code takes one token of each text."""
    places = ((FIRST, 0), (LAST, -1))
    return [FirstAsks(function, place) for pattern, place in places if pattern.search(text)][:1]
