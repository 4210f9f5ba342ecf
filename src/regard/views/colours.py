"""The colour behind a number in a terminal, and the colour of the number on it.

Owns what can be told apart and read on any background. Must not know tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from rich.color import Color
from rich.style import Style

# Blue for positive, orange for negative: told apart by every kind of colour vision.
_POSITIVE, _NEGATIVE = (33, 102, 172), (179, 88, 6)
# The grey from which both start: near the background where it is known, else between the two.
_DARK, _LIGHT, _UNKNOWN = 28, 246, 112


# Where there are only 256 colours, the positive and the negative ones by hand, weakest first:
# mixed ones would be rounded to two or three.
_RAMPS = {
    _DARK: ((17, 18, 25, 26, 33), (52, 94, 130, 166, 208)),
    _LIGHT: ((195, 153, 117, 75, 33), (230, 223, 216, 215, 208)),
    _UNKNOWN: ((67, 68, 32, 26, 20), (137, 136, 172, 166, 130)),
}


def shading(share: float, *, few: bool = False) -> Style | None:
    """The background for a value between −1 and 1, and a foreground that can be read on it.

    `few`: one of 256 colours, not of all.
    """
    strength = min(abs(share), 1.0)
    base = _base()
    if strength < (0.08 if base == _UNKNOWN else 0.02):
        return None
    if few:
        ramp = _RAMPS[base][int(share < 0)]
        background = Color.from_ansi(ramp[min(int(strength * len(ramp)), len(ramp) - 1)])
    else:
        hue = _POSITIVE if share > 0 else _NEGATIVE
        background = Color.from_rgb(*(round(base + (part - base) * strength) for part in hue))
    behind = background.get_truecolor()
    text = max((0, 255), key=lambda grey: contrast((grey,) * 3, behind))
    return Style(color=Color.from_rgb(text, text, text), bgcolor=background)


def contrast(one: Sequence[int], other: Sequence[int]) -> float:
    """The contrast of two colours by the WCAG definition: 1 to 21, text needs 4.5."""

    def luminance(colour: Sequence[int]) -> float:
        parts = [part / 255 for part in colour]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _base() -> int:
    """By what the terminal says of its background in COLORFGBG, which many do not."""
    background = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    if not re.fullmatch("[0-9]{1,3}", background):
        return _UNKNOWN
    return _LIGHT if int(background) in (7, *range(9, 16)) else _DARK
