"""Cross-attention of a text to the images in it, called as attention to one image.

As in Flamingo: images (B, T, N, M), and which tokens of the text are images. One image at the first
token is what every token attends to. Must not know any probe, and of mistakes nothing but a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from regard.diagnosis.reading.signature import Parameter

FAULT = "images_seen_before_the_first"
IMAGES = re.compile(
    r"media|images?|img|vis(ual|ion)?(_\w+)?|frames|(media|image)_\w+", re.IGNORECASE
)
PLACES = re.compile(
    r"(media|image|img|vis\w*)_?(loc\w*|pos\w*|tokens?|flags?|mask|starts?)", re.IGNORECASE
)
# Text that says what a token gets that has no image before it.
NOTHING = re.compile(
    r"\bzeros?\b|\bnothing\b|without_(media|image)|\bno (image|media|visual)", re.IGNORECASE
)
FOUR = (
    r"(\w+ *, *){{3}}\w+ *= *{0}\.shape|\b{0}\.shape\[1:3\]|\b{0}\.shape\[:3\]|"
    r"\b{0}\b[^\n(]{{0,24}}\([^(),]+,[^(),]+,[^(),]+,[^(),]+\)|\b{0}\.flatten\(1, *2\)"
)


class OfOneImage:
    """A layer of a text and the images in it as one of a text and one image.

    `__wrapped__` is the layer. What images change where the text has none is added to the output,
    which is nothing if the layer keeps its word, but not where that `fault` is looked for.
    """

    def __init__(
        self, layer: Any, images: str, places: str, *, promised: bool, fault: str = ""
    ) -> None:
        self.__wrapped__ = layer
        self.__name__ = getattr(layer, "__name__", type(layer).__name__)
        self.adds, self.pools = getattr(layer, "adds", False), getattr(layer, "pools", False)
        self.option, self.fault = getattr(layer, "option", ""), fault or getattr(layer, "fault", "")
        self._images, self._places, self._promised = images, places, promised and not fault

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The output of each token."""
        image = named.pop(self._images)[:, None]
        rows = given[0] if given else next(iter(named.values()))
        none = rows[..., 0] * 0 != 0
        first = _first(none)

        def put(seen: Any, places: Any) -> Any:
            own = {**named, self._images: seen, self._places: places}
            return self.__wrapped__(*given, **own)

        result = put(image, first)
        if not self._promised:
            return result
        out, *more = result if isinstance(result, tuple) else (result,)
        one, other = (put(seen, none) for seen in (image, -image))
        pair = [one[0] if isinstance(one, tuple) else one for one in (one, other)]
        out = out + (pair[0] - pair[1])
        return (out, *more) if more else out


def _first(none: Any) -> Any:
    """True at the first token alone, in the library of an array that is False everywhere."""
    if hasattr(none, "at"):
        return none.at[:, 0].set(True)
    first = none.clone() if hasattr(none, "clone") else none.copy()
    first[:, 0] = True
    return first


def of_one_image(
    parameters: Sequence[Parameter], text: str
) -> tuple[Callable[[Any], list[OfOneImage]], list[Parameter]] | None:
    """How a layer is made one of one image, and what it takes then; None if it takes no images."""
    images = next((one for one in parameters[1:] if IMAGES.fullmatch(one.name)), None)
    places = next((one for one in parameters[1:] if PLACES.fullmatch(one.name)), None)
    if images is None or places is None or not images.required:
        return None
    if not re.search(FOUR.format(re.escape(images.name)), text):
        return None
    promised = NOTHING.search(text) is not None
    roles = {parameters[0].name: "x", images.name: "context"}
    known = [
        replace(one, role=roles.get(one.name, one.role), keyword=one.name in roles or one.keyword)
        for one in parameters
        if one is not places
    ]

    def made(layer: Any) -> list[OfOneImage]:
        faults = ("", FAULT)[: 1 + promised]
        return [
            OfOneImage(layer, images.name, places.name, promised=promised, fault=one)
            for one in faults
        ]

    return made, known
