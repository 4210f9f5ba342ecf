"""Layers around attention, called as attention: over images, or with their input added.

Every pixel of an image is a token. Must not know any probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.construction import made_with
from regard.diagnosis.documented import documented_axes
from regard.diagnosis.images import Form, forms_of, is_of_images, sides_of
from regard.diagnosis.norm_functions import without_norm_functions
from regard.diagnosis.signature import Parameter

_INPUTS = (
    "(x|input_tensor|src|tgt|inputs?|input_|identity|residual|shortcut|skip|hidden_states|latents)"
)
RESIDUAL = re.compile(
    rf"\+ *{_INPUTS}\b|\b{_INPUTS} *\+(?!=? *(pos|1))|[\w\])] *\+=? *self\.\w*(drop|att|mha)\w*\("
)


class OfImages:
    """A function of images as one of tokens. `__wrapped__` is the function."""

    def __init__(self, function: Callable[..., Any], name: str, form: Form) -> None:
        self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "function")
        self._name, self._form, self.fault = name, form, form.fault

    def __call__(self, **given: Any) -> Any:
        """The output of each token."""
        tokens = given[self._name]
        batch, length, _ = tokens.shape
        image = self._form.image_of(tokens, sides_of(length))
        result = self.__wrapped__(**given | {self._name: image})
        out, *more = result if isinstance(result, tuple) else (result,)
        out = self._form.tokens_of(out, batch, length)
        return (out, *more) if more else out


def of_images(
    function: Callable[..., Any], parameters: Sequence[Parameter], text: str
) -> list[tuple[Callable[..., Any], list[Parameter]]]:
    """A function of images and weights as functions of tokens, if its text says so."""
    x = next((one for one in parameters if one.required), None)
    if x is None or x.role not in (None, "x"):
        return []
    axes = is_of_images(documented_axes(text, [x.name]).get(x.name, ()))
    known = [replace(one, keyword=True, role="x" if one is x else one.role) for one in parameters]
    forms = [one for one in forms_of(text) if one.axes == axes]
    function = without_norm_functions(function, x.name) if forms else function
    return [(OfImages(function, x.name, form), known) for form in forms]


class AroundAttention:
    """A layer as attention over tokens (B, L, M), without the input that it may add.

    It gets images in a form, or tokens if there is none. `__wrapped__` is the layer.
    """

    def __init__(self, layer: Any, form: Form | None, *, adds: bool) -> None:
        self.__wrapped__ = layer
        self.__name__ = type(layer).__name__
        self._form, self.adds = form, adds
        self.fault = "" if form is None else form.fault
        pairs = re.findall(r"=\((\d+), (\d+)\)", made_with(layer))
        self._image = next(((int(rows), int(columns)) for rows, columns in pairs), (0, 0))

    def __call__(self, x: Any, **given: Any) -> Any:
        """The output of each token, without the input if that is added."""
        if self._form is None:
            result = self.__wrapped__(x, **given)
            out, *more = result if isinstance(result, tuple) else (result,)
            return (out - x, *more)
        batch, length, _ = x.shape
        sides = self._image if math.prod(self._image) == length else sides_of(length)
        image = self._form.image_of(x, sides)
        out = self.__wrapped__(image, **given)
        out = out[0] if isinstance(out, tuple) else out
        out = out - image if self.adds else out
        return self._form.tokens_of(out, batch, length)


def around_attention(layer: Any, text: str, helpers: str) -> Iterator[AroundAttention]:
    """The ways in which a layer may have more around attention, as its code says.

    `helpers` is the code of the classes that it calls, one of which may add the input.
    """
    begin = max(text.find("def forward"), text.find("def __call__"), 0)
    called = text[begin:]  # the constructor adds other things
    first = re.match(r"def \w+\(\s*self,\s*(\w+)", called)
    x = re.escape(first[1]) if first else "x"
    adds = RESIDUAL.search(called) is not None or "+ input_tensor" in helpers
    adds |= (
        re.search(rf"return {x} \+ |\b{x} \+ self\.|\+ {x}\s*$", called, re.MULTILINE) is not None
    )
    parts = layer.modules() if hasattr(layer, "modules") else ()
    convolved = any(type(part).__name__ == "Conv2d" for part in parts)
    forms = [*forms_of(text, convolved=convolved)]
    layer = without_norm_functions(layer, x) if forms else layer
    for form in forms:
        for added in (True, False)[not adds :]:
            yield AroundAttention(layer, form, adds=added)
    if adds and not forms:
        yield AroundAttention(layer, None, adds=True)
