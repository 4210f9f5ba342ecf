"""Layers and functions that pool a map of pixels, called as attention: the mean of all asks.

As in CLIP: tokens are the mean and the pixels, with learned positions, which are set in each call
so that the tokens are what a probe asks for. Must not know any probe.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard.diagnosis.forms.images import RESHAPED, in_a_row, is_of_images, sides_of
from regard.diagnosis.forms.packing import joined
from regard.diagnosis.forms.trees import Tree
from regard.diagnosis.reading.documented import documented_axes
from regard.diagnosis.reading.signature import Parameter

POSITIONS = re.compile(
    r"(^|\.)\w*pos(ition\w*|s|_?emb\w*|_?enc\w*|_?table)?(_\w*)?$", re.IGNORECASE
)
ENTRY = re.compile(r"[\[.][\"']?(\w*pos\w*)\b", re.IGNORECASE)
MEAN = re.compile(r"\bmean\(|avg_?pool|AvgPool")
MEAN_LAST = re.compile(r"cat\w*\(\s*[\[(]\s*\w+\s*,[^\]\n]*(mean|avg)", re.IGNORECASE)
SHARE = 1.5  # of a token that is its pixel; the rest are positions
# How pixels (B, HW, M) lie in a map (B, C, H, W), and in two that are reshaped and not exchanged.
ORDERS = ("exchanged", "reshaped", "rows reshaped")
# Calls a layer with a table of positions, an image and what else it gets.
Call = Callable[[Any, Any, dict[str, Any]], Any]


@dataclass(frozen=True)
class Way:
    """How a map lies, and whether the mean is the last token instead of the first one."""

    axes: str
    order: str = ORDERS[0]
    mean_last: bool = False

    def image_of(self, pixels: Any) -> Any:
        """The map of pixels (B, HW, M)."""
        batch, length, width = pixels.shape
        sides = sides_of(length)
        if self.axes == "BHWC":
            turned = pixels.swapaxes(1, 2) if self.order != "exchanged" else pixels
            return in_a_row(turned).reshape(batch, *sides, width)
        if self.order == "exchanged":
            pixels = pixels.swapaxes(1, 2)
        elif self.order == "rows reshaped":
            pixels = pixels.swapaxes(0, 1)
        return in_a_row(pixels).reshape(batch, width, *sides)


class PooledMap:
    """A function of maps as one of tokens, of which the first asks. `__wrapped__` is the function.

    `call` sets its positions.
    """

    pools = True

    def __init__(self, function: Any, call: Call, way: Way, name: str = "x") -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self._call, self._way, self._name = call, way, name
        self.fault = "" if way.order == "exchanged" else RESHAPED

    def __call__(self, *tokens: Any, **given: Any) -> Any:
        """The output (B, 1, E) for tokens (B, L, M): one text at a time, whose positions fit it."""
        x = tokens[0] if tokens else given.pop(self._name)
        found = [self._of_one(x, number, given) for number in range(len(x))]
        return joined(found, 0)

    def _of_one(self, x: Any, number: int, given: dict[str, Any]) -> Any:
        own, pixels = x[number], SHARE * x[number, 1:]
        rest = own[1:] - pixels
        first = (own[0] - pixels.mean(0))[None]
        table = joined([rest, first] if self._way.mean_last else [first, rest], 0)
        out = self._call(table, self._way.image_of(x[:, 1:] - rest), given)
        out = out[0] if isinstance(out, tuple) else out
        return out.reshape(len(x), -1, out.shape[-1])[number : number + 1]


def _ways(axes: Sequence[str], text: str) -> Iterator[Way]:
    """The right ways before those of mistakes."""
    places = (True, False) if MEAN_LAST.search(text) else (False,)
    for order, own, last in itertools.product(ORDERS, axes, places):
        if own == "BCHW" or order != "rows reshaped":
            yield Way(own, order, last)


def pooled_maps(layer: Any, text: str, width: int) -> Iterator[PooledMap]:
    """The ways to call an object that pools a map, if it does; `width` is that of its tokens."""
    positions = next(_tables(layer, width), None) if MEAN.search(text) else None
    if positions is None:
        return
    name, shape, rows = positions

    def call(table: Any, image: Any, given: dict[str, Any]) -> Any:
        own = table.T if shape.index(rows) == len(shape) - 1 else table
        sizes = iter(own.shape)
        own = own.reshape([next(sizes) if size > 1 else 1 for size in shape])
        if hasattr(layer, "named_parameters"):
            import torch

            return torch.func.functional_call(layer, {name: own}, (image,), given)
        object.__setattr__(layer, name, own)
        return layer(image, **given)

    for way in _ways(("BCHW", "BHWC"), text):
        yield PooledMap(layer, call, way)


def _tables(layer: Any, width: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Tables of positions of one row more than a square image has pixels.

    The name of each, its shape and its rows.
    """
    if hasattr(layer, "named_parameters"):
        own = dict(layer.named_parameters())
    else:
        own = dict(getattr(layer, "__dict__", {}))
    for name, value in own.items():
        shape = tuple(int(n) for n in getattr(value, "shape", ()))
        sizes = [n for n in shape if n > 1]
        if not POSITIONS.search(name) or len(sizes) != 2 or width not in sizes:
            continue
        rows = sizes[1 - sizes.index(width)]
        if rows > 2 and math.isqrt(rows - 1) ** 2 == rows - 1:
            yield name, shape, rows


def pooling_functions(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> Iterator[tuple[PooledMap, list[Parameter]]]:
    """The same of a function that gets its positions as an argument, or in a tree of weights."""
    x = next((one for one in parameters if one.required), None)
    axes = "" if x is None else is_of_images(documented_axes(text, [x.name]).get(x.name, ()))
    if x is None or not axes or not MEAN.search(text):
        return
    positions = next((one for one in parameters if POSITIONS.search(one.name)), None)
    trees = [one for one in getattr(function, "_fixed", {}).values() if isinstance(one, Tree)]
    entry = next(filter(POSITIONS.search, ENTRY.findall(text)), "") if trees else ""
    if positions is None and not entry:
        return

    def call(table: Any, image: Any, given: dict[str, Any]) -> Any:
        if positions is not None:
            given = {**given, positions.name: table}
        else:
            trees[0][entry] = table
        return function(**given, **{x.name: image})

    known = [replace(one, keyword=True) for one in parameters if one is not positions]
    known = [replace(one, role="x") if one.name == x.name else one for one in known]
    for way in _ways((axes,), text):
        yield PooledMap(function, call, way, x.name), known
