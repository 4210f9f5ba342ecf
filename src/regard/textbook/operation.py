"""What an operation of the textbook is: its value, its words, how its gradient goes on.

Owns the templates in which operations are written. Must not know which operations there are.

Templates
---------
$0 $1       an operand: its symbol in a formula, its number in a derivation
$b0        its number, in brackets if it is negative
$n0         the operand's name, such as P[she, likes]
$r0         the square root of its number
$a0         the name of the step's own axis 0
$k0         the letter that the operation runs along
⟨$0|, ⟩     what is before the bar, once per term, with what is after it in between; before a
            negative number, − in place of +
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from regard.boundary.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation: what it computes and how it is written.

    `value` takes the operands as arrays with the axes of the result. An operation with a `total`
    runs along one more axis, the last of its first operand, and takes the visible keys before its
    operands (None: all are). Each of its terms is the product of the operands that run along that
    axis; with a `term`, which writes one, it is made of all operands. `formula` and `latex` are the
    right side of a step's formula; a pair is for one and for two operands. The other templates
    write one cell: `lead`, then `names` = `numbers`; `latex_numbers`; and `numpy`.

    `adjoint` says how the gradient of the result goes on to each operand, the last entry to all
    further ones: the operations that make it, each with its operands, which are `d` (the gradient
    of the result), `y` (the result), `_` (what the operation before made) or an operand's number.
    An empty entry: the operand is a setting, which has no gradient.
    """

    value: Callable[..., Array] | None = None  # None: the numbers come from outside
    formula: str | tuple[str, str] = ""
    latex: str | tuple[str, str] = ""
    lead: str = ""
    names: str = ""
    numbers: str = ""
    term: str = ""
    latex_numbers: str = ""
    numpy: str = ""
    hidden: float | None = None  # the value of a cell whose key is hidden
    nonzero: int | None = None  # the operand that `numpy` would divide by
    adjoint: tuple[str, ...] = ("",)
    total: str = ""  # the last line below the terms
    empty: float = 0.0  # the value without any term
    exact: bool = False  # the value is one of the operands
    overflows: bool = False  # finite operands may give ∞ or NaN


def wide(array: Array) -> Array:
    """At least float64: NumPy's own float32 exp is 2.5 ulp off, one rounding is half of one."""
    if array.dtype.kind == "f" and array.dtype.itemsize >= 8:
        return array
    return array.astype(np.float64)


_PLACE = re.compile(r"⟨([^|]*)\|([^⟩]*)⟩|\$([a-z]?)(\d)")


def fill(
    template: str, word: Callable[[str, int], str], terms: Sequence[tuple[int, ...]] = ()
) -> str:
    """A template with its places filled: `word(kind, number)` is what goes into "$kind number".

    `terms` are the operands of each term, by their positions.
    """

    def written(match: re.Match[str]) -> str:
        each, between, kind, number = match.groups()
        if each is None:
            return word(kind, int(number))

        def one(term: tuple[int, ...]) -> str:
            return fill(each, lambda kind, number: word(kind, term[number]))

        parts = [one(term) for term in terms]
        return "".join([*parts[:1], *(_after(between, part) for part in parts[1:])])

    return _PLACE.sub(written, template)


def _after(between: str, part: str) -> str:
    """A further part of a sum or a list; a negative number is subtracted, not added."""
    negative = between == " + " and part.startswith(("−", "-"))
    return f" {part[0]} {part[1:]}" if negative else between + part
