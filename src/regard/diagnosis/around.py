"""Layers around attention, called as attention: over images, or with their input added.

Every pixel of an image is a token. Must not know any probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

FIRST = re.compile(r"\b[bn]\w*\W+c\w*\W+[hw]\w*\W+[hw]\b", re.IGNORECASE)  # B, C, H, W
LAST = re.compile(r"\b[bn]\w*\W+h\w*\W+w\w*\W+[cd]\w*\b", re.IGNORECASE)  # B, H, W, C
_INPUTS = "(x|src|tgt|inputs?|identity|residual|shortcut|skip|hidden_states|latents)"
RESIDUAL = re.compile(rf"\+ *{_INPUTS}\b|\b{_INPUTS} *\+(?!=? *(pos|1))")


class AroundAttention:
    """A layer as attention over tokens (B, L, M), without the input that it may add.

    `axes` are those of what it gets: BLM, or BCHW or BHWC for images. `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, axes: str, *, adds: bool) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._axes, self.adds = axes, adds

    def __call__(self, x: Any, **given: Any) -> Any:
        """The output of each token, without the input if that is added."""
        if self._axes == "BLM":
            result = self.__wrapped__(x, **given)
            out, *more = result if isinstance(result, tuple) else (result,)
            return (out - x, *more)
        batch, length, width = x.shape
        rows = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
        image = x.reshape(batch, rows, length // rows, width)
        image = image.permute(0, 3, 1, 2).contiguous() if self._axes == "BCHW" else image
        out = self.__wrapped__(image, **given)
        out = out[0] if isinstance(out, tuple) else out
        out = out.permute(0, 2, 3, 1) if self._axes == "BCHW" else out
        out = out.reshape(batch, length, -1)
        return out - x if self.adds else out


def around_attention(layer: Any, text: str) -> Iterator[AroundAttention]:
    """The ways in which a layer may have more around attention, as its code says."""
    called = text[max(0, text.find("def forward")) :]  # the constructor adds other things
    adds, axes = RESIDUAL.search(called) is not None, []
    if hasattr(layer, "modules"):
        convolved = any(type(part).__name__ == "Conv2d" for part in layer.modules())
        axes = ["BCHW"] * (convolved or FIRST.search(text) is not None)
        axes += ["BHWC"] * (not convolved and LAST.search(text) is not None)
    for own in axes:
        for added in (True, False)[not adds :]:
            yield AroundAttention(layer, own, adds=added)
    if adds and not axes:
        yield AroundAttention(layer, "BLM", adds=True)
