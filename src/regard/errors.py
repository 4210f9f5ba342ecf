"""The errors that regard raises and what their messages look like.

Owns the exception classes and `safe_text`, through which every label, file name or quoted user
text passes before a person sees it. Must not know anything else of regard.

A check raises the short cause (both numbers, both argument names, how to fix it); the function
that the user called adds the shapes of the call once (`naming_shapes`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np


class Setting(NamedTuple):
    """An argument and a value for it, inside a message."""

    name: str
    value: object

    def __str__(self) -> str:
        """The argument in Python."""
        quoted = f'"{self.value}"' if isinstance(self.value, str) else self.value
        return f"{self.name}={quoted}"


class Field(str):
    """A part of a problem that a message begins with."""


class RegardError(Exception):
    """The base of the errors that regard raises.

    The message is the text of all `args`: strings, and a `Setting` for each argument that the
    message proposes, so that a command line or a file can spell it in its own way. A number of
    very many digits is cut.
    """

    def __str__(self) -> str:
        return self.spelled(str)

    @property
    def hint(self) -> tuple[Setting, ...]:
        """The arguments that the message proposes, each with a value."""
        return tuple(part for part in self.args if isinstance(part, Setting))

    def spelled(self, form: Callable[[Setting], str]) -> str:
        """The message with every setting written by `form`."""
        text = "".join(form(x) if isinstance(x, Setting) else str(x) for x in self.args)
        return re.sub(
            r"\d{41,}", lambda number: f"{number[0][:20]}… ({len(number[0])} digits)", text
        )


class ShapeError(RegardError, ValueError):
    """Arrays whose shapes do not fit together."""


class OptionError(RegardError, ValueError):
    """An option whose value makes no sense, or that does not go with another one."""


class DtypeError(RegardError, TypeError):
    """An argument of the wrong kind: a dtype, or a type, that is not accepted."""


class ProblemError(RegardError, ValueError):
    """A problem, or a file that should hold one, that cannot be read.

    `field` is the field of the problem that the message is about, or "".
    """

    def __init__(self, *args: object, field: str = "") -> None:
        super().__init__(*args)
        self.field = field

    @classmethod
    def of(cls, field: str, text: str) -> ProblemError:
        """An error whose message begins with the name of the field."""
        return cls(Field(field), f" {text}", field=field)

    def with_keys(self, keys: Mapping[str, str]) -> ProblemError:
        """The same error as a file has it, where a field is under the key `keys[field]`."""
        key = keys.get(self.field, self.field)
        if self.args and isinstance(self.args[0], Field):
            return ProblemError(key, *self.args[1:])
        return ProblemError(f"{key}: " if key else "", *self.args)


class LabelError(RegardError, KeyError):
    """No step, row or column of that name."""


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
            width = 2 if code < 0x100 else 4 if code < 0x10000 else 8
            character = f"\\{'xuU'[width // 4]}{code:0{width}x}"
        out.append(character)
    line = "".join(out)
    return line if limit is None or len(line) <= limit else line[: max(limit - 1, 0)] + "…"


class naming_shapes(dict[str, object]):
    """A context in which errors about arguments get the shapes of the call's arrays."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, ShapeError | OptionError | DtypeError):
            arrays = {name: one for name, one in self.items() if hasattr(one, "shape")}
            shapes = ", ".join(f"{name} {np.shape(one)}" for name, one in arrays.items())
            raise (type(error)(*error.args, f" ({shapes})") if shapes else error) from None
