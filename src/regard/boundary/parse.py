"""Strict parsing of user values: numbers, arrays and labels; never rounds or guesses.

A message begins with the name that the caller gives. Must not know what a value is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array, as_numpy
from regard.errors import OptionError, ProblemError, safe_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Booleans = NDArray[np.bool_]

MAX_AXES = 3
# What one recipe of random matrices may draw, and what one text file may come to hold.
MAX_NUMBERS = 10_000_000
# Deeper than any key goes, so that nothing downstream meets a bottomless file.
MAX_DEPTH = 32
# Strings that a file may have for numbers: JSON has no others, and TOML takes them too.
WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
FLOATS = ("float16", "bfloat16", "float32", "float64")


def as_numbers(name: str, value: Any, words: Mapping[str, float] | None = None) -> Array:
    """A read-only float64 copy of an array or nested lists, unless that would round a number.

    `words` maps strings such as "inf" to their numbers.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ProblemError.of(name, "is a MaskedArray, whose mask would be lost; give its data")
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.dtype.itemsize > 4:
            # Float64 holds all integers up to 2**53, and some of those beyond.
            for index in np.argwhere((value > 2**53) | (value < -(2**53))).tolist():
                as_number(f"{name} at {tuple(index)}", int(value[tuple(index)]), words)
        elif value.dtype.kind not in "iu" and value.dtype.name not in FLOATS:
            raise ProblemError.of(
                name,
                f"has the dtype {safe_text(value.dtype, 40)}; "
                "it must hold floating-point numbers of at most 64 bits, or integers",
            )
        return _frozen(value.astype(np.float64, order="C"))
    elif not isinstance(value, (list, tuple)) and hasattr(value, "__array__"):
        return as_numbers(name, as_numpy(name, value))
    shape, cells = _unnested(name, value, "number")
    if set(map(type, cells)) - {float}:
        cells = [
            float(cell)
            if type(cell) is float or (type(cell) is int and abs(cell) <= 2**53)
            else as_number(f"{name} at {_index(position, shape)}", cell, words)
            for position, cell in enumerate(cells)
        ]
    return _frozen(np.array(cells, dtype=np.float64).reshape(shape))


# An array of numbers; infinities and NaN may be words.
read_numbers = partial(as_numbers, words=WORDS)


def as_booleans(name: str, value: Any) -> Booleans:
    """A read-only copy of an array or of nested lists of booleans."""
    if isinstance(value, np.ma.MaskedArray):
        raise ProblemError.of(name, "is a MaskedArray, whose mask would be lost; give its data")
    if isinstance(value, np.ndarray) and (value.dtype == np.bool_ or not value.size):
        return _frozen(value.astype(np.bool_, order="C"))  # of long axes without a number too
    if isinstance(value, np.ndarray):
        value = value.tolist()
    shape, cells = _unnested(name, value, "boolean")
    for position, cell in enumerate(cells):
        if type(cell) is not bool and not isinstance(cell, np.bool_):
            raise ProblemError.of(
                name,
                f"at {_index(position, shape)} is {shown(cell)}; it must be true "
                "(the query may see the key) or false",
            )
    return _frozen(np.array(cells, dtype=np.bool_).reshape(shape))


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array


def _unnested(name: str, value: Any, kind: str) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the cells of nested lists of equal lengths."""
    if not isinstance(value, (list, tuple)):
        raise ProblemError.of(name, f"must be a list of {kind}s or of rows, not {shown(value)}")
    shape: tuple[int, ...] = (len(value),)
    cells = list(value)
    while True:
        cells = [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]
        if not cells or not isinstance(cells[0], (list, tuple)):
            return shape, cells
        if len(shape) == MAX_AXES:
            raise ProblemError.of(name, f"is nested deeper than {MAX_AXES} lists")
        width = len(cells[0])
        for position, row in enumerate(cells):
            where = f"row {position if len(shape) == 1 else _index(position, shape)}"
            if not isinstance(row, (list, tuple)):
                raise ProblemError.of(name, f"{where} is {shown(row)} but the row before is a list")
            if len(row) != width:
                first = f"row {0 if len(shape) == 1 else _index(0, shape)}"
                raise ProblemError.of(
                    name,
                    f"{where} has {len(row)} {kind}s but {first} has {width}; "
                    "all rows must be equally long (rows count from 0)",
                )
        shape = (*shape, width)
        cells = [cell for row in cells for cell in row]


def _index(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(int, np.unravel_index(position, shape)))


def as_number(name: str, value: Any, words: Mapping[str, float] | None = None) -> float:
    """A float equal to the given number; booleans are refused."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, (bool, np.bool_)):
        raise ProblemError.of(name, f"is {shown(value)}; it must be a number")
    if isinstance(value, (int, np.integer)):
        try:
            number = float(int(value))
        except OverflowError:
            number = math.inf
        if number != int(value):
            raise ProblemError.of(
                name,
                f"is {shown(value)}, which a 64-bit float cannot hold exactly; "
                "write it with a decimal point to have it rounded",
            )
        return number
    if isinstance(value, (float, np.float32, np.float16)):
        return float(value)
    if words is not None and isinstance(value, str):
        if value in words:
            return words[value]
        listed = ", ".join(f'"{word}"' for word in words)
        otherwise = f"the only words for numbers are {listed}"
        if re.fullmatch(r"[+-]?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?", value):
            otherwise = f"write {safe_text(value, 40)}, without quotes"
        raise ProblemError.of(name, f"is {shown(value)}; {otherwise}")
    raise ProblemError.of(name, f"must be a number, not {shown(value)}")


def as_number_or_numbers(
    name: str, value: Any, words: Mapping[str, float] | None = None
) -> float | Array:
    """One number, or an array of them."""
    if isinstance(value, (list, tuple)) or np.ndim(value):
        return as_numbers(name, value, words)
    return as_number(name, value, words)


def as_integer(name: str, value: Any, bits: int = 62) -> int:
    """A Python int; booleans and 2.0 are refused."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ProblemError.of(name, f"must be a whole number, not {shown(value)}")
    # Positions are added to each other in 64 bits, so each of them keeps to 62.
    if abs(int(value)) >= 2**bits:
        raise ProblemError.of(name, f"is {shown(int(value))}; it must lie within ±2**{bits}")
    return int(value)


def as_labels(name: str, value: Any) -> tuple[str, ...]:
    """A tuple of any strings."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise ProblemError.of(name, f"must be a list of strings, not {shown(value)}")
    return tuple(check_text(name, label) for label in value)


def check_text(name: str, value: Any) -> str:
    """A string that every format can write."""
    if not isinstance(value, str):
        raise ProblemError.of(
            name, f"has {shown(value)} where a string is expected; put it in quotes"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProblemError.of(
            name, f"has {shown(value)}, which has half of a surrogate pair and is not text"
        ) from None
    return str(value)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise ProblemError.of(name, f"is {shown(value)}; it must be {either(choices)}")


def shown(value: Any) -> str:
    """A value for a message: short, printable, on one line."""
    if isinstance(value, str):
        return f'"{safe_text(value, 40)}"'
    if isinstance(value, (bool, np.bool_)):
        return str(bool(value)).lower()
    if isinstance(value, int):
        bits = value.bit_length()
        return str(value) if bits <= 64 else f"an integer of {bits} bits"
    if isinstance(value, (float, np.number)):
        return safe_text(value, 40)
    if value is None:
        return "nothing"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    return f"a {safe_text(type(value).__name__, 40)}"


def either(choices: Sequence[object]) -> str:
    """Choices joined with "or"."""
    return " or ".join(
        f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices
    )


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(name: str, text: str) -> int:
    """A number of bytes.

    >>> parse_size("budget", "8GB"), parse_size("budget", "1.5 MiB"), parse_size("budget", "100")
    (8000000000, 1572864, 100)
    """
    match = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if match is None or (match[3] and not match[2]):
        raise OptionError(
            f"{name} is {safe_text(text, 60)}; give a number of bytes such as 8GB or 500MiB"
        )
    unit = _UNITS[match[2]]
    if match[3]:
        unit = 1024 ** (len(str(unit)) // 3)
    return int(float(match[1]) * unit)
