"""What `score=`, `normalize=` and `positions=` take: a kind in the textbook, and its own numbers.

Owns how their parameters are read. Must not know steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from regard.boundary.arguments import as_array, as_float_array, as_number
from regard.boundary.arrays import Array
from regard.errors import DtypeError, OptionError, ShapeError, safe_text


class Part:
    """One way to score queries against keys, to make weights of scores, or to use positions.

    `option` is "score", "normalize" or "positions".
    """

    option: ClassVar[str]

    def __init__(self) -> None:
        """Nothing is given; those that take parameters say which."""

    @property
    def kind(self) -> str:
        """Its name in the textbook."""
        return type(self).__name__.lower()

    def parameters(self) -> dict[str, Array]:
        """The numbers that it is given, each under its name; all of them have gradients."""
        numbers = {name: x for name, x in vars(self).items() if not isinstance(x, (bool, str))}
        return {name: np.asarray(x) for name, x in numbers.items()}

    def check(self, width: int) -> None:
        """Raise unless the parameters fit queries and keys of this width."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = vars(self), vars(other)
        return all(_same(mine[name], theirs[name]) for name in mine)

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        given = ", ".join(
            f"{name} {one.shape}" if isinstance(one, np.ndarray) and one.ndim else f"{name}={one!r}"
            for name, one in self._stated().items()
        )
        return f"{type(self).__name__}({given})"

    def _stated(self) -> dict[str, Any]:
        """What its repr shows."""
        return vars(self)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def own_array(name: str, value: Any, axes: int, wanted: str) -> Array:
    """A parameter as an array of its own, with this many axes."""
    array = np.array(as_float_array(name, value))
    if array.ndim != axes:
        raise ShapeError(f"{name} has shape {array.shape} but must be {wanted}")
    array.setflags(write=False)
    return array


def own_finite(name: str, value: Any) -> Array:
    """Numbers of its own, all finite; integers as float64."""
    given = as_array(name, value)
    if given.dtype == np.bool_:
        raise DtypeError(f"{name} has booleans; it must be numbers")
    array = np.array(as_float_array(name, given))
    if not np.isfinite(array.astype(np.float64)).all():
        raise OptionError(f"{name} has a number that is not finite")
    array.setflags(write=False)
    return array


def own_number(name: str, value: Any) -> float:
    """A parameter as a finite number."""
    number = as_number(name, value)
    if not math.isfinite(number):
        raise OptionError(f"{name} is {number}; it must be finite")
    return number


def as_part(option: str, plain: str, value: Any, base: type[Part], known: Mapping[str, Any]) -> Any:
    """An object of `base`; None for the plain one, by its name or by None."""
    if value is None or (isinstance(value, str) and value == plain):
        return None
    if isinstance(value, base):
        return value
    module = f"regard.{base.__module__.rpartition('.')[2]}"
    names = ", ".join(f"{module}.{name}" for name in known)
    shown = safe_text(repr(value), 60)
    if isinstance(value, type) and issubclass(value, base):
        shown = f"the class {value.__name__}, which needs brackets"
    kinds = {name.lower(): name for name in known}
    hint = ""
    if isinstance(value, str) and value.lower() in kinds:
        hint = f"; pass {module}.{kinds[value.lower()]}(…)"
    elif isinstance(value, str):
        raise OptionError(f'{option} is {shown}; it must be "{plain}" or one of {names}')
    raise DtypeError(f'{option} must be "{plain}" or one of {names}, not {shown}{hint}')
