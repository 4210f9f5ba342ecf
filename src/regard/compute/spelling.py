"""Scores, normalisations and positions as a file and a command spell them.

A file has the name alone, such as ``score = "cosine"``, or a table with its kind and what it is
given. Must not know the other keys of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from regard import normalizers, positions, scores
from regard.boundary.parse import WORDS, as_number, check_text, read_numbers, shown
from regard.errors import DtypeError, OptionError, ProblemError, ShapeError
from regard.rules.part import Part

_KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "score": {name.lower(): one for name, one in scores.KNOWN.items()},
    "normalize": {name.lower(): one for name, one in normalizers.KNOWN.items()},
    "positions": {name.lower(): one for name, one in positions.KNOWN.items()},
}
_PLAIN = {"score": "dot", "normalize": "softmax", "positions": "none"}


def _read(option: str, name: str, value: Any) -> Part | None:
    """What a file has under `name`: the name of a kind, or a table with a `kind`."""
    table: Mapping[str, Any] = value if isinstance(value, Mapping) else {"kind": value}
    if "kind" not in table:
        raise ProblemError(f"{name} is a table without kind; {_listed(option)}")
    kind = table["kind"]
    kind = kind.item() if isinstance(kind, np.ndarray) and kind.ndim == 0 else kind
    kind = check_text(f"{name}.kind" if table is value else name, kind)
    given = {key: one for key, one in table.items() if key != "kind"}
    if kind == _PLAIN[option] and not given:
        return None
    if kind not in _KINDS[option]:
        raise ProblemError(f"{name} is {shown(kind)}; {_listed(option)}")
    made = _KINDS[option][kind]
    takes = signature(made).parameters
    for key in given:
        if key not in takes:
            known = f"it takes {', '.join(takes)}" if takes else "it takes nothing"
            raise ProblemError(f"{name} has {shown(key)}, which {kind} does not take; {known}")
    for key, parameter in takes.items():
        if parameter.default is Parameter.empty and key not in given:
            raise ProblemError(
                f"{name} is {shown(kind)} without {key}; it needs "
                f"{', '.join(takes)}, in a table of a problem file: [options.{option}]"
            )
    values = {key: _value(f"{name}.{key}", one, takes[key].default) for key, one in given.items()}
    try:
        part: Part = made(**values)
        return part
    except (ShapeError, OptionError, DtypeError) as error:
        raise ProblemError(str(error)) from None


def _value(name: str, value: Any, default: Any) -> Any:
    """A parameter's value; its default says whether it is a flag, a text, a number or an array.

    None: a number, an array, or a table of these.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    single = isinstance(value, (bool, str, int, float))
    if isinstance(default, (bool, str, int)) or (default is None and single):
        return value
    if default is None and isinstance(value, Mapping):
        return {key: _value(f"{name}.{key}", one, None) for key, one in value.items()}
    return (as_number if isinstance(default, float) else read_numbers)(name, value, words=WORDS)


def _listed(option: str) -> str:
    return f"the kinds are {', '.join([_PLAIN[option], *_KINDS[option]])}"


# A key of a file: (name, value) → what the problem has, None for the plain one.
READ: dict[str, Callable[[str, Any], Part | None]] = {
    option: partial(_read, option) for option in _KINDS
}


def write(part: Part) -> Any:
    """What a file has for one: its kind alone, or a table."""
    kind, given = type(part).__name__.lower(), {}
    if kind not in _KINDS[part.option]:
        raise ProblemError(f"{part} cannot be saved: a file cannot hold steps of your own")
    for name, parameter in signature(type(part)).parameters.items():
        own = getattr(part, name)
        if isinstance(own, np.ndarray) or own != parameter.default:
            given[name] = _written(own)
    return {"kind": kind, **given} if given else kind


def _written(own: Any) -> Any:
    if isinstance(own, dict):
        return {name: _written(one) for name, one in own.items()}
    if isinstance(own, (np.ndarray, tuple)):
        numbers = np.array(own, np.float64)
        return numbers if numbers.ndim else float(numbers)
    return own


def spelled(option: str, text: str) -> Part | None:
    """What a command has for one, such as ``cosine`` or ``cosine:temperature=0.5``."""
    kind, _, rest = text.partition(":")
    table: dict[str, Any] = {"kind": kind}
    for part in filter(None, rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals:
            raise OptionError(
                f"--{option} has {shown(part)} after the kind; write name=value, such as "
                "cosine:temperature=0.5"
            )
        words = {"true": True, "false": False}
        try:
            number = int if value.isdecimal() else float
            table[name] = words[value] if value in words else number(value)
        except ValueError:
            table[name] = value
    try:
        return _read(option, f"--{option}", table if rest else kind)
    except ProblemError as error:
        raise OptionError(*error.args) from None
