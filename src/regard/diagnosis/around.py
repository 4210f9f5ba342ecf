"""Layers around attention, called as attention: over images, or with their input added.

Every pixel of an image is a token. Must not know any probe.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.construction import made_with
from regard.diagnosis.parameter_names import role_of
from regard.diagnosis.signature import Parameter

FIRST = re.compile(r"\b[bn]\w*\W+c\w*\W+[hw]\w*\W+[hw]\b", re.IGNORECASE)  # B, C, H, W
LAST = re.compile(r"\b[bn]\w*\W+h\w*\W+w\w*\W+[cd]\w*\b", re.IGNORECASE)  # B, H, W, C
_INPUTS = "(x|input_tensor|src|tgt|inputs?|identity|residual|shortcut|skip|hidden_states|latents)"
RESIDUAL = re.compile(
    rf"\+ *{_INPUTS}\b|\b{_INPUTS} *\+(?!=? *(pos|1))|[\w\])] *\+=? *self\.\w*(drop|att|mha)\w*\("
)

IMAGES = re.compile(
    r"\bx\b[^\n]{0,24}\(\s*[bn]\w*\s*,\s*h\w*\s*,\s*w\w*\s*,\s*[cd]\w*\s*\)", re.IGNORECASE
)
# Axes of the tokens of several frames, as (b, m, n, dim) beside a name.
FRAMES = r"(?i:[^\n(]{0,24}\(\s*b\w*\s*,\s*[mtf]\w*\s*,\s*(?![hgw])[a-z]\w*\s*,\s*[dc]\w*\s*\))"
# How tokens (B, L, M) lie in images (B, H, W, C): as their rows, their columns, or all pixels.
LINES = ("rows", "columns", "pixels")


class OfImages:
    """A function of images (B, H, W, C) as one of tokens. `__wrapped__` is the function."""

    def __init__(self, function: Callable[..., Any], name: str, lines: str) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self._name, self._lines = name, lines

    def __call__(self, **given: Any) -> Any:
        """The output of each token."""
        tokens = given[self._name]
        batch, length, width = tokens.shape
        shape = (*_sides(batch, length), width)
        image = self._turned(
            tokens.reshape(shape if self._lines == "pixels" else (1, *tokens.shape))
        )
        result = self.__wrapped__(**given | {self._name: image})
        out, *more = result if isinstance(result, tuple) else (result,)
        out = self._turned(out).reshape(batch, length, -1)
        return (out, *more) if more else out

    def _turned(self, image: Any) -> Any:
        return image.swapaxes(1, 2) if self._lines == "columns" else image


def _sides(batch: int, length: int) -> tuple[int, int, int]:
    rows = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return batch, rows, length // rows


def of_images(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> list[tuple[Callable[..., Any], list[Parameter]]]:
    """A function of images and weights as functions of tokens, if its text says so."""
    x = next((one for one in parameters if one.required), None)
    if x is None or x.name != "x" or IMAGES.search(text) is None:
        return []
    known = [replace(one, keyword=True) for one in parameters]
    return [(OfImages(function, x.name, lines), known) for lines in LINES]


class OfFrames:
    """A layer of (batch, frames, tokens, width) as one of (frames, tokens, width).

    `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, names: Sequence[str]) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._names = names

    def __call__(self, **given: Any) -> Any:
        """The output of each frame of a batch of one."""
        result = self.__wrapped__(**given | {n: given[n][None] for n in self._names if n in given})
        out, *more = result if isinstance(result, tuple) else (result,)
        return (out[0], *more) if more else out[0]


def of_frames(
    layer: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> tuple[Callable[..., Any], list[Parameter]] | None:
    """A layer whose arrays all have an axis of frames, as its text says, as one without it."""
    names = [one.name for one in parameters if one.required]
    if not names or not all(re.search(rf"\b{re.escape(n)}\b{FRAMES}", text) for n in names):
        return None
    return OfFrames(layer, names), [replace(one, keyword=True) for one in parameters]


class AroundAttention:
    """A layer as attention over tokens (B, L, M), without the input that it may add.

    `axes` are those of what it gets: BLM, or BCHW or BHWC for images. `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, axes: str, *, adds: bool) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._axes, self.adds = axes, adds
        pairs = re.findall(r"=\((\d+), (\d+)\)", made_with(layer))
        self._image = next(((int(rows), int(columns)) for rows, columns in pairs), (0, 0))

    def __call__(self, x: Any, **given: Any) -> Any:
        """The output of each token, without the input if that is added."""
        if self._axes == "BLM":
            result = self.__wrapped__(x, **given)
            out, *more = result if isinstance(result, tuple) else (result,)
            return (out - x, *more)
        batch, length, width = x.shape
        sides = (batch, *self._image) if math.prod(self._image) == length else _sides(batch, length)
        image = x.reshape(*sides, width)
        image = _turned(image, (0, 3, 1, 2)) if self._axes == "BCHW" else image
        out = self.__wrapped__(image, **given)
        out = out[0] if isinstance(out, tuple) else out
        out = _turned(out, (0, 2, 3, 1)) if self._axes == "BCHW" else out
        out = out.reshape(batch, length, -1)
        return out - x if self.adds else out


def _turned(image: Any, axes: tuple[int, ...]) -> Any:
    if hasattr(image, "permute"):
        return image.permute(*axes).contiguous()
    return image.transpose(axes).copy()


def around_attention(layer: Any, text: str, helpers: str) -> Iterator[AroundAttention]:
    """The ways in which a layer may have more around attention, as its code says.

    `helpers` is the code of the classes that it calls, one of which may add the input.
    """
    called = text[max(0, text.find("def forward")) :]  # the constructor adds other things
    first = re.match(r"def forward\(\s*self,\s*(\w+)", called)
    x = re.escape(first[1]) if first else "x"
    adds = RESIDUAL.search(called) is not None or "+ input_tensor" in helpers
    adds |= (
        re.search(rf"return {x} \+ |\b{x} \+ self\.|\+ {x}\s*$", called, re.MULTILINE) is not None
    )
    axes: list[str] = []
    parts = layer.modules() if hasattr(layer, "modules") else ()
    convolved = any(type(part).__name__ == "Conv2d" for part in parts)
    axes = ["BCHW"] * (convolved or FIRST.search(text) is not None)
    axes += ["BHWC"] * (not convolved and LAST.search(text) is not None)
    for own in axes:
        for added in (True, False)[not adds :]:
            yield AroundAttention(layer, own, adds=added)
    if adds and not axes:
        yield AroundAttention(layer, "BLM", adds=True)


# A layer whose result is added behind an activation, and what attention is added to in each head.
BEHIND = re.compile(r"(\w+) *\+ *(?:\w+\.)*(?:relu|gelu|silu|elu)\( *self\.(\w+)\( *\1 *\) *\)")
TO_HEADS = re.compile(r"\b\w*[qQ]\w* *\+ *[\w.]+(?:\.(?:bmm|matmul|einsum)\(| *@ )")


class WithoutTheRest:
    """A layer as attention alone: what it gives with values that are zeros is taken away.

    `__wrapped__` is the layer, whose layers behind attention add nothing.
    """

    adds = True

    def __init__(self, layer: Any, values: str, behind: str) -> None:
        self.__wrapped__ = copy.deepcopy(layer)
        self.__name__ = type(layer).__name__
        parts = dict(self.__wrapped__.named_modules())
        for name, part in parts.items():
            if behind and name.rpartition(".")[2] == behind:
                for own in part.parameters():
                    own.data.zero_()
        self._zeros = {f"{values}.{n}": 0 * p for n, p in parts[values].named_parameters()}

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The output of attention, before the last layer where that comes with the rest."""
        import torch

        whole = self.__wrapped__(*given, **named)
        rest = torch.func.functional_call(self.__wrapped__, self._zeros, given, named)
        return whole - rest


def without_the_rest(layer: Any, text: str) -> WithoutTheRest | None:
    """A layer that adds attention to the projected queries, and a layer of that sum, if it does."""
    behind = BEHIND.search(text)
    if behind is None or TO_HEADS.search(text) is None or not hasattr(layer, "named_modules"):
        return None
    names = [name for name, part in layer.named_modules() if hasattr(part, "in_features")]
    values = [one for one in names if role_of(one.rpartition(".")[2]) == "W_v"]
    return WithoutTheRest(layer, values[0], behind[2]) if len(values) == 1 else None
