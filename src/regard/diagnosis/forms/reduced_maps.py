"""Layers whose keys come from a smaller map of their tokens, called as attention to its pixels.

As in PVT and SegFormer: a strided convolution makes one key of each square of pixels. Here it takes
the first pixel of each, so that these are what is attended to, and all others ask. Must not know
any probe.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from regard.diagnosis.forms.images import RESHAPED, sides_of
from regard.diagnosis.forms.packing import joined
from regard.diagnosis.reading.signature import Parameter

SIDES = ("h|height", "w|width")
# How the code makes a map of tokens: as it should, or by a reshape alone.
ORDERS = ("exchanged", "reshaped")
# What it is called with.
OF_MAPS = (Parameter("x", "x"), Parameter("context", "context"))


class ReducedMap:
    """A layer over the pixels of a map as one of tokens that ask, and of those that are its keys.

    `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, convolution: str, names: Sequence[str], order: str) -> None:
        self.__wrapped__ = copy.deepcopy(layer)
        self.__name__ = type(layer).__name__
        self.fault = "" if order == "exchanged" else RESHAPED
        self.left_out = (convolution,)
        self._x, *self._sides = names
        parts = dict(layer.named_modules())
        self._steps = parts[convolution].stride
        path, _, last = convolution.rpartition(".")
        setattr(self.__wrapped__.get_submodule(path), last, _first_pixels(self._steps, order))

    def __call__(self, x: Any, context: Any) -> Any:
        """The output of each token of `x`."""
        rows, columns = sides_of(context.shape[1])
        sides = rows * self._steps[0], columns * self._steps[1]
        place = context.new_zeros(sides).bool()
        place[:: self._steps[0], :: self._steps[1]] = True
        place = place.flatten()
        found = []
        for asking in x.split(int((~place).sum()), dim=1):
            tokens = context.new_zeros(len(x), len(place), x.shape[-1])
            tokens[:, place] = context
            others = (~place).nonzero()[: asking.shape[1], 0]
            tokens[:, others] = asking
            given = {self._x: tokens, **dict(zip(self._sides, sides, strict=True))}
            out = self.__wrapped__(**given)
            found.append((out[0] if isinstance(out, tuple) else out)[:, others])
        return joined(found, 1)


def _first_pixels(steps: tuple[int, int], order: str) -> Any:
    """A layer that takes the first pixel of each square of a map, however the map was made."""
    import torch

    def first_pixels(image: Any) -> Any:
        if order == "reshaped":
            batch, width = image.shape[:2]
            image = image.reshape(batch, -1, width).transpose(1, 2).reshape(image.shape)
        return image[:, :, :: steps[0], :: steps[1]]

    layer = torch.nn.Identity()
    layer.forward = first_pixels
    return layer


def reduced_maps(layer: Any, known: Sequence[Parameter]) -> list[ReducedMap]:
    """The ways to call a layer that gets tokens and the sides of their map, if it reduces it."""
    names = [one.name for one in known if one.required]
    sides = zip(SIDES, names[1:], strict=False)
    if len(names) != 3 or not all(re.fullmatch(one, name.lower()) for one, name in sides):
        return []
    parts = layer.named_modules() if hasattr(layer, "named_modules") else ()
    found = [name for name, part in parts if _reduces(part)]
    if len(found) != 1:
        return []
    return [ReducedMap(layer, found[0], names, order) for order in ORDERS]


def _reduces(part: Any) -> bool:
    """Whether a part is a convolution of squares of pixels that lie beside each other."""
    sides = getattr(part, "kernel_size", ())
    return len(sides) == 2 and sides == part.stride and max(sides) > 1
