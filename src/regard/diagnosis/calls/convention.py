"""One way of calling a function, the question put to it, and what came back.

Owns the layouts of arrays and the kinds of masks. Must not know how they are found out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.reading.changed_text import Change

# How a mask argument is written, and how that is printed.
MASK_KINDS = {
    "keep": "True = attend",
    "hide": "True = hide",
    "add": "0 and −inf, to be added",
    "keep01": "1 = attend",
    "hide01": "1 = hide",
    "lengths": "the number of visible keys",
    "borders": "where each text begins, and where the last one ends",
    "segments": "the number of the text of each token",
}
# The axes of ready arrays and of embeddings in a probe. A layout names those that a function
# takes, in its order: LHD has the rows before the heads.
READY, EMBEDDED = "BHLD", "BLM"


@dataclass(frozen=True)
class Convention:
    """One way of calling a function: everything that its signature does not say."""

    layout: str = "LD"
    dtype: str = "float64"
    mask: str = "keep"
    mask_shape: str = "full"  # cells (L, S), full (all axes), keys (S,) or (B, S), or (B, 1, 1, S)
    causal_always: bool = False
    mask_instead: bool = False  # a mask that is given takes the place of its causal rule
    aligned: str = "end"  # with more keys than queries: where the first, or the last, ones meet
    window_extra: int = 0  # 1 if the window does not count the query's own key
    scale_divides: bool = False
    transposed: bool = False  # weights stored as (out, in)
    keys: str = ""  # the layout of keys and values, where it is another one
    joined: bool = False  # the function joins what it gets with its context
    shared: bool = False  # keys and values have no axis of heads: all query heads read the same
    mask_of_new: bool | None = None  # with a cache: a mask of keys is that of new ones
    keeps_axis: bool = False  # of a backward pass: lse and δ have an axis of length 1 at the end
    turned_output: bool = False  # (B, H, L, D) goes in, and (B, L, H, D) comes out
    output_at: int | None = None  # position of the output among the results; None: first that fits

    @property
    def one_query(self) -> bool:
        """Whether queries have no axis of rows: there is one for each head or batch element."""
        return "L" not in self.layout

    @property
    def token_axis(self) -> int:
        """The axis of queries and keys, counted from the end."""
        return self.layout.index("L") - len(self.layout)

    @property
    def key_token_axis(self) -> int:
        """The same in keys and values, which may have axes of their own, or be shared by heads."""
        own = self.keys or self.layout
        own = own.replace("H", "") if self.shared else own
        return own.index("L") - len(own)


def spell(layout: str) -> str:
    """A layout as a shape.

    >>> spell("BLHD"), spell("D")
    ('(B, L, H, D)', '(D,)')
    """
    return f"({', '.join(layout)}{',' * (len(layout) == 1)})"


def to_layout(array: Array, axes: str, layout: str) -> Array:
    """A copy of `array` with the axes of `layout` alone, in their order."""
    array = array[tuple(slice(None) if axis in layout else 0 for axis in axes)]
    order = [axis for axis in axes if axis in layout]
    return np.array(array.transpose([order.index(axis) for axis in layout]), order="C")


def from_layout(array: Array, axes: str, layout: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_layout`; `shape` is that of the result."""
    return array.transpose([layout.index(axis) for axis in axes if axis in layout]).reshape(shape)


# The name, which no parameter can have, of the gradient of the output that is given.
UPSTREAM = "d output"


# A look inside: the scores that softmaxes get, or by what q·k is multiplied in them, and its width;
# the steps of integers that the arrays of its last mapping are rounded to, which is no call;
# the results with every normalisation that is left out doubled; with its own defaults instead of an
# empty cache; learned tables; the results where layers of a block are silent, in half precision, or
# with rows that are added to values; or the numbers of the lines that all calls together have run.
Look = Literal[
    "",
    "scores",
    "factors",
    "integers",
    "doubled",
    "defaults",
    "tables",
    "parts",
    "half",
    "values",
    "lines",
]


@dataclass(frozen=True, eq=False)
class Question:
    """One probe as calls of the function: arguments by the names of its parameters."""

    name: str  # of the probe, for messages
    calls: tuple[Mapping[str, Any], ...]  # NumPy arrays, numbers, True, False and None
    cache: str = ""  # the parameter that takes what the call before returned beside the output
    reading: int = 0  # which reading of the function is called
    wrt: tuple[str, ...] = ()  # the parameters whose gradients are asked for instead of a result
    place: int = 0  # the result that they are gradients of; UPSTREAM in `calls` is its own
    change: Change | None = None  # of the code, for as long as the calls take
    looks: Look = ""  # what is asked for instead of results: see Look


@dataclass(frozen=True, eq=False)
class ReturnedArray:
    """One array among the results of a call; `numbers` is None if it is too large to be read."""

    shape: tuple[int, ...]
    dtype: str
    numbers: Array | None  # float64


@dataclass(frozen=True, eq=False)
class CallResult:
    """What one call returned, or what went wrong, in words."""

    arrays: tuple[ReturnedArray, ...] = ()
    names: tuple[str, ...] = ()  # of the arrays, where they came by name
    a_list: bool = False
    problem: str = ""
    kind: str = ""  # one of PROBLEMS
    printed: str = ""
    changed: tuple[str, ...] = ()  # parameters whose arrays the call has changed
    dropped: bool = False  # torch's dropout was called for training


# Calls the function, in this process or in another: one result for each call, up to the first
# that has a problem.
Ask = Callable[[Question], "list[CallResult]"]
PROBLEMS = ("raised", "hung", "prints", "nothing", "type", "detached")


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one probe: an output with the probe's axes, or what went wrong, in words."""

    output: Array | None = None
    weights: Array | None = None
    problem: str = ""
    kind: str = ""  # one of PROBLEMS, shape, or refused
    returned: str = ""
    position: int = 0  # of the output among what was returned
    shape: tuple[int, ...] = ()  # the output's, as it was returned
    dtype: str = ""
    printed: str = ""
    changed: tuple[str, ...] = ()
    dropped: bool = False
    seconds: float = 0.0


def agrees(got: Array, expected: Array, tolerance: float | Array) -> bool:
    """Whether two arrays are equal within a tolerance, NaN and infinities included."""
    if got.shape != expected.shape:
        return False
    if isinstance(tolerance, float) and got.size:
        last, wanted = got.item(-1), expected.item(-1)
        if abs(last - wanted) > tolerance:  # most candidates end here
            return False
    with np.errstate(all="ignore"):
        apart = np.abs(got - expected)
        if (apart > tolerance).any():
            return False
        near = apart <= tolerance
    if near.all():
        return True
    got, expected = got[~near], expected[~near]
    # Equal infinities and NaN are not near.
    return bool(((got == expected) | (np.isnan(got) & np.isnan(expected))).all())
