"""Maps of pixels as tokens: how tokens lie in an image, rightly or as a mistake has them.

Every pixel is a token; or those of a row, or of a column, are a text. Must not know any probe.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FIRST = re.compile(  # B, C, H, W
    r"\b(b|n|bs|bsz|batch\w*)\W+(c\w*|dim\w*|embed\w*)\W+(h|w|height|width|s)\b\W+"
    r"(h|w|height|width|s)\b|\bNCHW\b|\bBCHW\b",
    re.IGNORECASE,
)
LAST = re.compile(  # B, H, W, C
    r"\b(b|n|bs|bsz|batch\w*)\W+((h|height)\W+(w|width)|s\W+s|i\W+j|(ws|window\w*|side|size)\W+\5)\b\W+"
    r"(c\w*|d\w*|embed\w*|_)\b|"
    r"\bNHWC\b|\bBHWC\b",
    re.IGNORECASE,
)
LINES = re.compile(
    r"axial|criss|along (the )?(height|width)|(each|every|within|along|per)[ _-](row|column)|"
    r"(row|column)[ _-]?(wise|att)",
    re.IGNORECASE,
)
# What a map that is reshaped where its axes have to be exchanged is mistaken in.
RESHAPED = "map_reshaped"


@dataclass(frozen=True)
class Form:
    """How tokens (B, L, M) lie in an image."""

    axes: str  # BCHW or BHWC; BCL of columns, as convolutions along a text take them
    lines: str = "pixels"  # a text is all pixels of an image, or each of its rows or columns
    reshaped: str = ""  # in, out or both: where axes are mistaken for others, and not exchanged

    @property
    def fault(self) -> str:
        """The mistake of code that is right only if tokens lie so."""
        return RESHAPED if self.reshaped else ""

    def image_of(self, tokens: Any, sides: tuple[int, int]) -> Any:
        """The image in which the tokens lie, whose height and width are known."""
        batch, length, width = tokens.shape
        if self.axes == "BCL":
            turned = (
                tokens.reshape(batch, width, length) if self.reshaped else tokens.swapaxes(1, 2)
            )
            return in_a_row(turned)
        if self.reshaped in ("in", "both"):
            if self.axes == "BCHW":
                return tokens.reshape(batch, width, *sides)
            return tokens.swapaxes(1, 2).reshape(batch, *sides, width)
        if self.lines == "pixels":
            image = tokens.reshape(batch, *sides, width)
        else:
            image = tokens.reshape(1, batch, length, width)
        image = image.swapaxes(1, 2) if self.lines == "columns" else image
        return in_a_row(_channels_first(image) if self.axes == "BCHW" else image)

    def tokens_of(self, image: Any, batch: int, length: int) -> Any:
        """The tokens that lie in an image."""
        if self.axes == "BCL":
            return image.reshape(batch, length, -1) if self.reshaped else image.swapaxes(1, 2)
        if self.reshaped in ("out", "both"):
            whole = image.reshape(batch, -1, length)
            return image.reshape(batch, length, -1) if self.axes == "BCHW" else whole.swapaxes(1, 2)
        image = _channels_last(image) if self.axes == "BCHW" else image
        image = image.swapaxes(1, 2) if self.lines == "columns" else image
        return image.reshape(batch, length, -1)


def in_a_row(array: Any) -> Any:
    """The array with its numbers in the order of its axes, as `view` of torch asks for."""
    return array.contiguous() if hasattr(array, "contiguous") else array


def _channels_first(image: Any) -> Any:
    return image.swapaxes(1, 3).swapaxes(2, 3)


def _channels_last(image: Any) -> Any:
    return image.swapaxes(2, 3).swapaxes(1, 3)


def sides_of(length: int) -> tuple[int, int]:
    """The height and the width of an image of so many pixels, as near to each other as may be."""
    rows = next(n for n in range(math.isqrt(length), 0, -1) if length % n == 0)
    return rows, length // rows


def forms_of(text: str, *, convolved: bool = False) -> Iterator[Form]:
    """The forms that a text may mean, the likeliest first, and then those of mistakes.

    >>> [one.axes for one in forms_of("b, h, w, c = x.shape")]
    ['BHWC', 'BHWC', 'BHWC', 'BHWC']
    """
    axes = ["BCHW"] * (convolved or FIRST.search(text) is not None)
    axes += ["BHWC"] * (LAST.search(text) is not None)  # also before a layer of convolutions
    lines = ("pixels", *("rows", "columns") * (LINES.search(text) is not None))
    for own in axes:
        yield from (Form(own, one) for one in lines)
    for own in axes:
        yield from (Form(own, reshaped=one) for one in ("in", "out", "both"))


def is_of_images(words: Sequence[str]) -> str:
    """BCHW or BHWC if these are the axes of an image, else nothing.

    >>> is_of_images(("n", "c", "h", "w")), is_of_images(("B", "H", "L", "D"))
    ('BCHW', '')
    """
    whole = ", ".join(words)
    return "BCHW" if FIRST.fullmatch(whole) else "BHWC" if LAST.fullmatch(whole) else ""
