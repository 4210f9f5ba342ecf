"""What fits into a page: which heads with all their numbers, and how the rest is pooled.

Owns the budget. Must not know HTML or how numbers are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import OptionError
from regard.explanation.derivation import Values
from regard.explanation.trace import Trace
from regard.textbook.steps import Step, textbook
from regard.views.head_view import Head, heads

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

# Larger matrices are drawn, not printed.
MOST_PRINTED = 32
# Up to so many numbers, every computed one goes into the page as Python computed it.
SMALL = 2**13
# Where the arrays have more bytes than this, float64 is rounded to 32 bits.
TIGHT = 2**20
# Of one matrix in the overview, and of one row of it.
TILES, STRONGEST = 32, 3
LEAST_TILES, LEAST_STRONGEST = 8, 1
# What base64 makes of three bytes.
BASE64 = 4 / 3
# What one head brings besides its numbers: words, and where its numbers are; in the overview too.
HEAD_BYTES, TILE_BYTES = 1_200, 360


@dataclass(frozen=True)
class Layer:
    """One explanation as the page shows it, and the heads that it has all numbers of."""

    explanation: Trace
    every: tuple[tuple[int, Head], ...]  # the number of the batch element, and the head in it
    exact: tuple[tuple[int, Head], ...]


@dataclass(frozen=True)
class Plan:
    """What goes into a page."""

    layers: Mapping[str, Layer]
    small: bool
    tight: bool
    overview: bool
    tiles: int
    strongest: int
    said: tuple[str, ...]


@dataclass(frozen=True)
class Pooled:
    """The weights of one head, tile by tile, and the strongest keys of each row."""

    mean: Array
    largest: Array
    keys: Array  # (L, strongest), positions
    shares: Array  # (L, strongest), their weights


def make_plan(explanations: Mapping[str, Trace], budget: int, frame: int = 0) -> Plan:
    """Everything if it fits; else without embeddings; else some heads, and the rest pooled.

    `frame` is how many bytes the page has besides the numbers: style, script and printed tables.

    Raises
    ------
    OptionError
        If not even the overview fits.
    """
    several = sum(_count(one) for one in explanations.values()) > 1
    overview = several or any(_is_long(one) for one in explanations.values())
    plan = _planned(explanations, budget, frame, overview)
    if not overview and not all(layer.exact for layer in plan.layers.values()):
        plan = _planned(explanations, budget, frame, overview=True)
    return plan


def _planned(explanations: Mapping[str, Trace], budget: int, frame: int, overview: bool) -> Plan:
    room = budget - frame - _label_bytes(explanations)
    said: list[str] = []

    wide = sum(_given_bytes(one, 8) for one in explanations.values())
    tight = wide > TIGHT
    size = 4 if tight else 8
    tiles, strongest = TILES, STRONGEST
    while overview and _overview_bytes(explanations, tiles, strongest) > room * 0.6:
        if tiles <= LEAST_TILES:
            pooled_bytes = _overview_bytes(explanations, tiles, strongest)
            least = frame + _label_bytes(explanations) + round(2 * pooled_bytes)
            raise OptionError(
                f"budget is {budget} bytes, but an overview of so many heads needs about {least}; "
                "give a larger one, or fewer layers"
            )
        tiles, strongest = tiles // 2, max(LEAST_STRONGEST, strongest - 1)
    left = room - (_overview_bytes(explanations, tiles, strongest) if overview else 0)

    shown = dict(explanations)
    if sum(_given_bytes(one, size) for one in explanations.values()) > left:
        shown = {name: _ready(one) for name, one in explanations.items()}
        if any(shown[name] is not one for name, one in explanations.items()):
            said.append(
                "The embeddings and the weight matrices are left out: the page starts from Q, K "
                "and V."
            )
    chosen = _chosen(shown, size, left)
    every = {name: tuple(_numbered(one)) for name, one in shown.items()}
    total, kept = sum(map(len, every.values())), sum(map(len, chosen.values()))
    if kept < total:
        said.append(
            f"{kept} of {total} heads have all their numbers; of the others the page has the "
            f"weights pooled into at most {tiles} × {tiles} tiles, and "
            + (f"the {strongest} strongest keys" if strongest > 1 else "the strongest key")
            + " of each row."
        )
    if tight and any(_is_rounded(one) for one in shown.values()):
        said.append("Given numbers are rounded to 32 bits, and what follows from them is too.")
    return Plan(
        layers={name: Layer(shown[name], every[name], tuple(chosen[name])) for name in shown},
        small=sum(_numbers(one) for one in shown.values()) <= SMALL and kept == total,
        tight=tight,
        overview=overview,
        tiles=tiles,
        strongest=strongest,
        said=tuple(said),
    )


def _chosen(
    shown: Mapping[str, Trace], size: int, room: float
) -> dict[str, list[tuple[int, Head]]]:
    """The heads whose numbers fit: the first of every layer, then the second, and so on."""
    chosen: dict[str, list[tuple[int, Head]]] = {name: [] for name in shown}
    held: set[tuple[Any, ...]] = set()
    for turn in zip_longest(*([(n, *one) for one in _numbered(e)] for n, e in shown.items())):
        for name, batch, head in filter(None, turn):
            parts = _new_parts(name, batch, head, held)
            cost = sum(parts.values()) * size * BASE64 + HEAD_BYTES
            if cost > room:
                return chosen
            room -= cost
            held |= set(parts)
            chosen[name].append((batch, head))
    return chosen


def _new_parts(
    name: str, batch: int, head: Head, held: set[tuple[Any, ...]]
) -> dict[tuple[Any, ...], int]:
    """How many numbers one more head brings that are not there yet."""
    parts = {}
    for step in head.source.steps.values():
        if step.op == "given":
            sizes = head.source.sizes
            shared = sizes.get("H", 1) // sizes.get("G", 1) if "G" in step.axes else 1
            own = head.number // shared if {"H", "G"} & set(step.axes) else None
            batched = len(head.source.shape(step.name)) > len(step.axes)
            key = (name, step.name, batch if batched else None, own)
            if key not in held:
                parts[key] = int(np.prod(head.shape(step.name)))
    return parts


def _numbered(explanation: Trace) -> list[tuple[int, Head]]:
    per = explanation.heads or 1
    return [(number // per, head) for number, head in enumerate(heads(explanation))]


def _count(explanation: Trace) -> int:
    return int(np.prod(explanation.batch_shape, dtype=int)) * (explanation.heads or 1)


def _is_long(explanation: Trace) -> bool:
    sizes = explanation.source.sizes
    return max(sizes.get("L", 1), sizes["S"]) > MOST_PRINTED


def _numbers(explanation: Trace) -> int:
    return sum(int(np.prod(step.shape, dtype=int)) for step in explanation.steps.values())


def _given_bytes(explanation: Trace, size: int) -> float:
    count = sum(
        int(np.prod(step.shape, dtype=int)) for step in explanation.steps.values() if step.given
    )
    return count * size * BASE64 + _count(explanation) * HEAD_BYTES


def _overview_bytes(explanations: Mapping[str, Trace], tiles: int, strongest: int) -> float:
    total = 0.0
    for one in explanations.values():
        sizes = one.source.sizes
        rows, keys = sizes.get("L", 1), sizes["S"]
        cells = min(rows, tiles) * min(keys, tiles) * 2 + rows * min(strongest, keys) * 2
        total += _count(one) * (cells * 2 * BASE64 + TILE_BYTES)
    return total


def _label_bytes(explanations: Mapping[str, Trace]) -> int:
    """Of all labels, each set of which goes into the page once."""
    sets = {labels for one in explanations.values() for labels in one.labels.values()}
    return sum(len(label) + 12 for labels in sets for label in labels)


def _is_rounded(explanation: Trace) -> bool:
    return any(
        not np.array_equal(step.value, step.value.astype(np.float32), equal_nan=True)
        for step in explanation.steps.values()
        if step.given
    )


def _ready(explanation: Trace) -> Trace:
    """The same attention from its queries, keys and values on."""
    steps = explanation.source.steps
    if all(steps[name].op == "given" for name in ("queries", "keys", "values")):
        return explanation
    given = {name for name in ("bias", "softcap", "sink") if name in steps}
    declared = textbook(
        {"queries", "keys", "values", *given},
        heads="H" in steps["scores"].axes,
        masked="visible" in steps,
        softmax="shifted" if "row_maximum" in steps else "unshifted",
        default_scale="width" in steps,
    )
    return Trace(
        _Ready(explanation.source, declared),
        title=explanation.title,
        note=explanation.note,
        labels=explanation.labels,
        row_notes=explanation.row_notes,
    )


class _Ready:
    """The numbers of a run, of which fewer steps are shown."""

    def __init__(self, source: Values, steps: tuple[Step, ...]) -> None:
        self.steps = {step.name: step for step in steps}
        self.sizes, self.lead = source.sizes, source.lead
        self.rules, self.offset = source.rules, source.offset
        self.shape, self.value = source.shape, source.value
        self.row, self.block, self.row_blocks = source.row, source.block, source.row_blocks


# --- pooling -------------------------------------------------------------------------------------


def pooled(head: Head, tiles: int, strongest: int) -> Pooled:
    """The weights of one head, in at most `tiles` by `tiles` tiles; hidden keys count as 0."""
    rows, keys = head.shape("weights")
    row_edges, key_edges = _edges(rows, tiles), _edges(keys, tiles)
    mean = np.zeros((len(row_edges), len(key_edges)))
    largest = np.zeros_like(mean)
    best = np.zeros((rows, min(strongest, keys)), np.int64)
    shares = np.zeros(best.shape)
    if not mean.size:
        return Pooled(mean, largest, best, shares)
    row_counts = np.diff([*row_edges, rows])
    row_tile = np.repeat(np.arange(len(row_edges)), row_counts)
    for start, weights, _ in head.blocks("weights"):
        here = row_tile[start : start + len(weights)]
        with np.errstate(all="ignore"):
            np.add.at(mean, here, np.add.reduceat(weights, key_edges, axis=1))
            np.maximum.at(largest, here, np.maximum.reduceat(weights, key_edges, axis=1))
            order = _strongest(weights, best.shape[1])
        best[start : start + len(weights)] = order
        shares[start : start + len(weights)] = np.take_along_axis(weights, order, axis=1)
    mean /= row_counts[:, None] * np.diff([*key_edges, keys])
    return Pooled(mean, largest, best, shares)


def _strongest(weights: Array, count: int) -> Array:
    """The positions of so many largest weights of each row, the largest first."""
    if count < weights.shape[1]:
        few = np.argpartition(-weights, count - 1, axis=1)[:, :count]
    else:
        few = np.broadcast_to(np.arange(count), weights.shape)
    order = np.argsort(-np.take_along_axis(weights, few, axis=1), axis=1, kind="stable")
    return np.take_along_axis(few, order, axis=1)


def _edges(size: int, tiles: int) -> list[int]:
    """Where so many tiles, as equal as can be, begin."""
    count = min(size, tiles)
    return [size * tile // count for tile in range(count)]
