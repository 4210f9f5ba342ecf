"""The errors that regard raises and what their messages look like.

Owns the exception classes and `safe_text`, through which every label, file name or quoted user
text passes before a person sees it. Must not know anything else of regard.

A check raises the short cause (both numbers, both argument names, how to mend it); the door that
the user called adds the shapes of the call once (see `with_shapes`).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from typing import TypeVar

import numpy as np


class ShapeError(ValueError):
    """Arrays whose shapes do not fit together."""


class OptionError(ValueError):
    """An option whose value makes no sense, or does not go with another one."""


class DtypeError(TypeError):
    """An argument of the wrong kind: a dtype, or a type, that is not accepted."""


class ProblemError(ValueError):
    """A problem, or a file that should hold one, that cannot be read."""


class LabelError(KeyError):
    """No step, row or column of that name."""

    def __str__(self) -> str:
        """The message itself: KeyError would show it in quotes."""
        return str(self.args[0]) if self.args else ""


def safe_text(text: object, limit: int | None = None) -> str:
    r"""Untrusted text made inert and put on one line.

    Control, escape, bidirectional and invisible characters become visible escapes such as
    ``\x1b`` and ``\u202e``; letters of every script stay. With `limit`, longer text is cut and
    ends in ``…``.

    >>> safe_text("cat\x1b[31m")
    'cat\\x1b[31m'
    """
    out = []
    for character in str(text)[: None if limit is None else limit + 1]:
        # Cc control, Cf format (bidi, zero width), Cs surrogates, Co private use, Cn unassigned,
        # Zl and Zp line breaks: nothing in these classes has a shape a reader could recognise.
        if unicodedata.category(character) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}:
            code = ord(character)
            out.append(
                f"\\x{code:02x}"
                if code < 0x100
                else f"\\u{code:04x}"
                if code < 0x10000
                else f"\\U{code:08x}"
            )
        else:
            out.append(character)
    line = "".join(out)
    return line if limit is None or len(line) <= limit else line[: max(limit - 1, 0)] + "…"


E = TypeVar("E", bound=Exception)


def with_shapes(error: E, arrays: Mapping[str, object]) -> E:
    """The same error with the shapes of the call added once, for the door to raise."""
    shapes = ", ".join(
        f"{name} {np.shape(array)}" for name, array in arrays.items() if hasattr(array, "shape")
    )
    return type(error)(f"{error} ({shapes})") if shapes else error
