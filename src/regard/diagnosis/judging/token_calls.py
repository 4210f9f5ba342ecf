"""How a function is called with tokens where nothing more is known of it: axes, widths, masks.

Must not know what holds for attention, nor any probe.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.diagnosis.calls.convention import Question
from regard.diagnosis.calls.under_test import FunctionUnderTest
from regard.diagnosis.reading.signature import EDGES, MASKS, OF_KEYS, Callee, Parameter

BATCH, TOKENS, ROWS, REAL = 3, 5, 4, 3
SIDE = 4  # of an image, whose pixels are tokens
LENGTHS = (4, 6, 8, 2, 10, 12)  # of axes that are neither texts nor tokens
MASK = re.compile("mask|adj|pad|valid|edge_?(index|list)|^edges$", re.IGNORECASE)
GRAPH = re.compile("^adj|edge", re.IGNORECASE)
OF_TOKENS = ("x", "query", "key", "value", "context", "key_value")
# The axes that tokens may have: one array of them, or a query and what it reads.
ALONE = ("BTM", "BMT", "TM", "BMhw", "TBM")
READING = (
    ("BM", "BTM"),
    ("BLM", "BTM"),
    ("BOM", "BTM"),
    ("OBM", "TBM"),
    ("BM", "TBM"),
    ("M", "TM"),
    ("LM", "TM"),
)
# What a mask of tokens may be: its numbers where a token is real, and where it is not.
ADDED = "0 for real tokens and −inf for padding"
KINDS: dict[str, tuple[Any, Any]] = {
    "True for real tokens": (True, False),
    "1 for real tokens": (1, 0),
    "True for padding": (False, True),
    ADDED: (0.0, -np.inf),
    "1.0 for real tokens": (1.0, 0.0),
}
LISTED = "edges of a graph, as a list"
COUNTED, SHARE = "the number of real tokens", "the share of real tokens"


@dataclass(frozen=True)
class Way:
    """One way of calling: the axes and widths of each array, and the kind of mask that it needs."""

    axes: Mapping[str, str]
    widths: Mapping[str, int]
    mask: str = ""  # the parameter
    kind: str = ""
    square: bool = False  # a mask (T, T), as of a graph
    lengths: Mapping[str, int] = field(default_factory=dict)  # of axes that are documented
    first: bool = False  # whether padding comes before the text: causal code hides what follows

    def size(self, axis: str, name: str) -> int:
        """How long an axis is."""
        own = {"B": BATCH, "T": TOKENS, "L": ROWS, "O": 1, "M": self.widths.get(name), "1": 1}
        return (own | dict(self.lengths)).get(axis) or SIDE


def _documented(callee: Callee) -> Iterator[Way]:
    """The ways in which the arguments have the axes that the code or its documentation gives."""
    needed = [one for one in callee.parameters if one.required]
    axes = {one.name: callee.axes[one.name] for one in needed if one.name in callee.axes}
    if len(axes) < len(needed) or not any("T" in own for own in axes.values()):
        return
    weights = [one.name for one in needed if (one.role or one.name)[:1] in "wW"]
    if any("T" in axes[name] for name in weights):  # it is the width, and not the tokens
        return
    counted = [one for one in needed if one.role == "lengths" or axes[one.name] == "B"]
    named = (one for one in needed if one.role in OF_KEYS or MASK.search(one.name))
    masks = [*counted, *named]
    mask = next(iter(masks), None)
    kinds = [("", False)]
    if mask is None:
        hides = (one for one in callee.parameters if one.role in (*MASKS, "key_mask"))
        counts = (one for one in callee.parameters if callee.axes.get(one.name) == "B")
        mask = next(iter((*hides, *counts)), None)
    else:
        own = axes.pop(mask.name)
        listed = EDGES.search(mask.name) is not None
        kinds = [(kind, listed or own in ("TT", "BTT")) for kind in kinds_of(callee, mask)]
        if not listed and own not in ("B", "T", "BT", "TT", "BTT", "B11T"):
            return
    letters = list(dict.fromkeys(axis for own in axes.values() for axis in own if axis.islower()))
    widths = [dict(zip(letters, LENGTHS, strict=False))]
    if callee.widths:  # its own weights say how wide arrays are
        some = itertools.product(callee.widths, repeat=min(len(letters), 3))
        widths = [dict(zip(letters, one, strict=False)) for one in some]
    for (kind, square), lengths in itertools.product(kinds, widths):
        yield Way(axes, {}, "" if mask is None else mask.name, kind, square, lengths)


def ways(callee: Callee) -> Iterator[Way]:
    """Every way in which a function may take tokens, the likeliest first."""
    yield from _documented(callee)
    if not (callee.widths or callee.opaque):  # in a layout that nothing says, everything is mixed
        return
    needed = [one for one in callee.parameters if one.required]
    tokens = [one.name for one in callee.parameters if one.role in OF_TOKENS]
    tokens = [one.name for one in needed if one.name in tokens] or tokens[:1]
    masks = [one for one in callee.parameters if one.role in MASKS or one.role == "key_mask"]
    required = next((one for one in masks if one.required), None)
    if not tokens or any(one.name not in tokens and one is not required for one in needed):
        return
    mask = required or next(iter(masks), None)
    kinds = [("", False)]
    if required is not None:
        kinds = [(kind, square) for square in (False, True) for kind in kinds_of(callee, required)]
    orders = [(one,) for one in ALONE] if len(tokens) == 1 else READING
    if required is not None and GRAPH.search(required.name):
        kinds, orders = [one for one in kinds if one[1]], [("TM",)]
    widths = callee.widths or (6,)
    pairs = [(w, w) for w in widths] + [(a, b) for a in widths for b in widths if a != b]
    pairs = [(w, w) for w in widths] if len(tokens) == 1 else pairs
    for (kind, square), axes, (own, other) in itertools.product(kinds, orders, pairs):
        first, rest = tokens[0], tokens[1:]
        yield Way(
            {first: axes[0]} | dict.fromkeys(rest, axes[-1]),
            {first: own} | dict.fromkeys(rest, other),
            "" if mask is None else mask.name,
            kind,
            square,
        )


def kinds_of(callee: Callee, mask: Parameter) -> list[str]:
    """What a mask may be, the likeliest first."""
    if EDGES.search(mask.name):
        return [LISTED]
    if mask.role == "lengths" or callee.axes.get(mask.name) == "B":
        return [COUNTED, SHARE]
    if mask.role == "bias":
        return [ADDED]
    hides = mask.role in ("hide", "key_hide")
    if mask.role == "key_keep" and callee.mask_means != "hide":  # by its name, or by a number
        return ["True for real tokens"]
    return sorted(KINDS, key=lambda kind: kind.startswith("True for padding") != hides)


class Calls:
    """Calls of the function with arrays of tokens; each is one question."""

    def __init__(self, tested: FunctionUnderTest) -> None:
        self.tested, self.count = tested, 0

    def draw(self, way: Way) -> dict[str, Array]:
        rng = np.random.default_rng(7)
        return {
            name: rng.normal(size=[way.size(axis, name) for axis in axes])
            for name, axes in way.axes.items()
        }

    def put(self, way: Way, arrays: Mapping[str, Array], *, real: int) -> Array | None:
        """The first array of its answer, if `real` tokens of the first text are real; or None."""
        given = self._given(way, arrays, real)
        self.count += 1
        name = f"properties {self.count}"
        result = self.tested.put(Question(name, (given,), reading=self.tested.callee.number))[-1]
        return None if result.problem or not result.arrays else result.arrays[0].numbers

    def _given(self, way: Way, arrays: Mapping[str, Array], real: int) -> dict[str, Any]:
        given: dict[str, Any] = dict(arrays)
        if way.kind:
            given[way.mask] = self._mask(way, real)
        callee = self.tested.callee
        dtype = "float32" if callee.narrow or callee.framework == "jax" else "float64"
        return {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in given.items()}

    def factors(self, way: Way, arrays: Mapping[str, Array]) -> Array:
        """By what q·k is multiplied in each softmax that is seen inside, and the width of q."""
        given = self._given(way, arrays, TOKENS)
        own = Question("a look", (given,), reading=self.tested.callee.number, looks="factors")
        result = self.tested.put(own)[-1]
        found = [one.numbers for one in result.arrays if one.shape == (1, 2)]
        found = [one for one in found if one is not None]
        return np.concatenate([np.empty((0, 2)), *found])

    def of_parts(self, way: Way, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of a block whose layers are silenced, by names; see sublayers.py."""
        given = self._given(way, arrays, TOKENS)
        own = Question("layers", (given,), reading=self.tested.callee.number, looks="parts")
        result = self.tested.put(own)[-1]
        found = zip(result.names, result.arrays, strict=False)
        return {name: one.numbers for name, one in found if one.numbers is not None}

    def _mask(self, way: Way, real: int) -> Array:
        if way.kind == COUNTED:
            return np.array([real, *[TOKENS] * (BATCH - 1)])
        if way.kind == SHARE:
            return np.array([real / TOKENS, *[1.0] * (BATCH - 1)])
        seen = np.ones((TOKENS, TOKENS) if way.square else (BATCH, TOKENS), bool)
        seen[:, real:] = not way.square
        seen[0, real:] = False
        if way.square:
            seen[:, real:] = False
        seen = seen[:, ::-1] if way.first else seen
        if way.kind == LISTED:
            return np.stack(np.nonzero(seen)[::-1])
        yes, no = KINDS[way.kind]
        mask = np.asarray(np.where(seen, yes, no))
        axes = self.tested.callee.axes.get(way.mask, "")
        if axes == "T":
            mask = mask[0]
        if axes == "BTT":
            cells = mask if way.square else mask[:, None]
            mask = np.broadcast_to(cells, (BATCH, TOKENS, TOKENS)).copy()
        of_heads = axes == "B11T" or (not axes and way.kind == ADDED and not way.square)
        return np.asarray(mask[:, None, None] if of_heads else mask)
