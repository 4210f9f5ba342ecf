"""What fits into a page: which heads with all their numbers, and how the rest is pooled.

Owns the budget. Must not know HTML or how numbers are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.errors import OptionError
from regard.explanation.derivation import Values
from regard.explanation.labels import own_head
from regard.explanation.step import ExplainedStep
from regard.explanation.trace import Trace
from regard.textbook.steps import PROJECTED, Step
from regard.views.all_steps import PROJECTIONS
from regard.views.head_view import Head, heads
from regard.views.report.summary import countable
from regard.views.report.tables import MOST_PRINTED
from regard.views.report.whatif import declare, form_of, given_steps, has_gradients

# Up to this many numbers, the page has the computed ones too, as Python computed them.
SMALL = 2**13
# Above this many bytes of arrays, float64 is rounded to 32 bits.
TIGHT = 2**20
# Tiles along a side of a matrix in the overview, and keys named for each row.
TILES, STRONGEST = 32, 3
LEAST_TILES, LEAST_STRONGEST = 8, 1
# base64 writes three bytes as four.
BASE64 = 4 / 3
# Bytes that a head adds beside its numbers (sentences, and where its numbers are), and in the
# overview; bytes for what the plan says, and for what a layer says of its scale.
HEAD_BYTES, TILE_BYTES, SAID_BYTES, LAYER_BYTES = 800, 290, 700, 500


@dataclass(frozen=True)
class PageLayer:
    """One explanation as the page shows it, and the heads that it has all numbers of."""

    explanation: Trace
    every: tuple[tuple[int, Head], ...]  # the number of the batch element, and the head in it
    exact: tuple[tuple[int, Head], ...]


@dataclass(frozen=True)
class Plan:
    """What goes into a page."""

    layers: Mapping[str, PageLayer]
    small: bool = False  # whether computed numbers go in too
    tight: bool = False  # whether numbers may be rounded to 32 bits
    overview: bool = False
    tiles: int = TILES
    strongest: int = STRONGEST
    tables: str = ""  # the printed tables of the first head
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pooled:
    """The weights of one head, tile by tile, and the strongest keys of each row."""

    mean: Array
    largest: Array
    keys: Array  # (L, strongest), positions
    shares: Array  # (L, strongest), their weights


def without_numbers(explanations: Mapping[str, Trace]) -> Plan:
    """The plan of a page without any head, to measure what every page has."""
    return Plan({name: PageLayer(one, (), ()) for name, one in explanations.items()})


def make_plan(
    explanations: Mapping[str, Trace],
    budget: int,
    frame: int = 0,
    print_tables: Callable[[Head], str] = lambda head: "",
) -> Plan:
    """Everything if it fits; else some heads, and the rest pooled.

    First the gradients are left out, then the embeddings. `frame` is how many bytes the page has
    without any head's numbers. `print_tables` writes the tables of the first head, which is done as
    soon as its numbers are known to fit.

    Raises
    ------
    OptionError
        If not even the overview fits.
    """
    room = budget - frame - SAID_BYTES - LAYER_BYTES * len(explanations)
    several = sum(_count(one) for one in explanations.values()) > 1
    overview = several or any(_is_long(one) for one in explanations.values())
    given = (step for one in explanations.values() for step in one.steps.values() if step.given)
    tight = sum(math.prod(step.shape) * 8 * BASE64 for step in given) > TIGHT
    plan = _filled(explanations, room, tight, print_tables) if not overview else None
    if plan is None or not all(layer.exact for layer in plan.layers.values()):
        tiles, strongest = _overview_size(explanations, budget, room)
        left = room - _overview_bytes(explanations, tiles, strongest)
        plan = _filled(explanations, left, tight, print_tables)
        plan = replace(plan, overview=True, tiles=tiles, strongest=strongest)
    return replace(plan, said=tuple(_said(explanations, plan)))


def _overview_size(explanations: Mapping[str, Trace], budget: int, room: float) -> tuple[int, int]:
    """How many tiles along a side, and how many strongest keys of a row, fit for every head."""
    tiles, strongest = TILES, STRONGEST
    while (pooled_bytes := _overview_bytes(explanations, tiles, strongest)) > room * 0.6:
        if tiles <= LEAST_TILES:
            raise OptionError(
                f"budget is {budget} bytes, but an overview of so many heads needs about "
                f"{round(budget - room + 2 * pooled_bytes)}; give a larger one, or fewer layers"
            )
        tiles, strongest = tiles // 2, max(LEAST_STRONGEST, strongest - 1)
    return tiles, strongest


def _filled(
    explanations: Mapping[str, Trace],
    room: float,
    tight: bool,
    print_tables: Callable[[Head], str],
) -> Plan:
    """The heads that fit into so many bytes, with gradients and embeddings if all of them do."""
    forward = {name: _forward(one) for name, one in explanations.items()}
    ready = {name: _ready(one) for name, one in forward.items()}
    counted = all(map(countable, explanations.values()))
    for shown in (explanations if counted else forward, forward, ready):
        every = {name: tuple(_numbered(one)) for name, one in shown.items()}
        costs = list(_costs(every, tight))
        left = room - sum(cost for _, _, cost in costs)
        last = shown == ready
        tables = print_tables(next(iter(every.values()))[0][1]) if left > 0 or last else ""
        left -= len(tables.encode())
        if left > 0 or last:
            break
    room -= len(tables.encode())
    chosen: dict[str, list[tuple[int, Head]]] = {name: [] for name in shown}
    for name, one, cost in costs:
        room -= cost
        if room < 0:
            break
        chosen[name].append(one)
    count = sum(math.prod(step.shape) for one in shown.values() for step in one.steps.values())
    return Plan(
        {name: PageLayer(shown[name], every[name], tuple(chosen[name])) for name in shown},
        small=left - count * 8 * BASE64 > 0 and count <= SMALL,
        tight=tight,
        tables=tables if next(iter(chosen.values())) else "",
    )


def _costs(
    every: Mapping[str, Sequence[tuple[int, Head]]], tight: bool
) -> Iterator[tuple[str, tuple[int, Head], float]]:
    """How many bytes each head adds: the first head of every layer, then the second, and so on."""
    held: set[tuple[Any, ...]] = set()
    sizes = {name: _number_bytes(own[0][1].explanation, tight) for name, own in every.items()}
    for turn in zip_longest(*([(name, *one) for one in own] for name, own in every.items())):
        for name, batch, head in filter(None, turn):
            cost = float(HEAD_BYTES)
            for step, size in sizes[name].items():
                declared = head.source.steps[step]
                batched = len(head.source.shape(step)) > len(declared.axes)
                own = own_head(head.source.sizes, declared, head.number)
                part = (name, step, batch if batched else None, own)
                cost += 0 if part in held else math.prod(head.shape(step)) * size * BASE64
                held.add(part)
            yield name, (batch, head), cost


def _said(explanations: Mapping[str, Trace], plan: Plan) -> Iterator[str]:
    """What a reader has to know of what is left out."""
    shown = {name: layer.explanation for name, layer in plan.layers.items()}
    pairs = [(one, shown[name]) for name, one in explanations.items()]
    if any("embeddings" in one.steps and "embeddings" not in kept.steps for one, kept in pairs):
        yield (
            "The embeddings and the weight matrices are left out: the page starts from Q, K and V."
        )
    if any(has_gradients(one) and not has_gradients(kept) for one, kept in pairs):
        yield "The loss and the gradients are left out: they need all numbers of every head."
    total = sum(len(layer.every) for layer in plan.layers.values())
    kept = sum(len(layer.exact) for layer in plan.layers.values())
    if kept < total:
        keys = f"{plan.strongest} strongest keys" if plan.strongest > 1 else "strongest key"
        yield (
            f"{kept} of {total} heads have all their numbers; of the others the page has the "
            f"weights pooled into at most {plan.tiles} × {plan.tiles} tiles, and the {keys} of "
            "each row."
        )
    steps = [step for one in shown.values() for step in one.steps.values()]
    if plan.tight and any(step.given and _is_rounded(step) for step in steps):
        yield "Given numbers are rounded to 32 bits, and what follows from them is too."


def _numbered(explanation: Trace) -> list[tuple[int, Head]]:
    per = explanation.heads or 1
    return [(number // per, head) for number, head in enumerate(heads(explanation))]


def _count(explanation: Trace) -> int:
    return math.prod(explanation.batch_shape) * (explanation.heads or 1)


def _is_long(explanation: Trace) -> bool:
    sizes = explanation.source.sizes
    return max(sizes.get("L", 1), sizes["S"]) > MOST_PRINTED


def _number_bytes(explanation: Trace, tight: bool) -> dict[str, int]:
    """Bytes per number of each given step: 4 where 32 bits hold all of them, or may round them."""
    given = (step for step in explanation.steps.values() if step.given)
    return {step.name: 4 if tight or not _is_rounded(step) else 8 for step in given}


def _overview_bytes(explanations: Mapping[str, Trace], tiles: int, strongest: int) -> float:
    total = 0.0
    for one in explanations.values():
        sizes = one.source.sizes
        rows, keys = sizes.get("L", 1), sizes["S"]
        cells = min(rows, tiles) * min(keys, tiles) * 2 + rows * min(strongest, keys) * 2
        total += _count(one) * (cells * 2 * BASE64 + TILE_BYTES)
    return total


def _is_rounded(step: ExplainedStep) -> bool:
    """Whether 32 bits are too few for one of a step's numbers."""
    with np.errstate(over="ignore"):
        return not np.array_equal(step.value, step.value.astype(np.float32), equal_nan=True)


def _forward(explanation: Trace) -> Trace:
    """The same attention without its loss and gradients."""
    if not has_gradients(explanation):
        return explanation
    steps = explanation.source.steps.values()
    forward = tuple(step for step in steps if step.phase == "forward")
    return replace(explanation, source=_Ready(explanation.source, forward))


def _ready(explanation: Trace) -> Trace:
    """The same attention from its queries, keys and values on."""
    steps = explanation.source.steps
    if all(steps[name].op == "given" for name in PROJECTIONS):
        return explanation
    given = given_steps(explanation) - {*PROJECTED}
    declared = declare(form_of(explanation), {*PROJECTIONS, *given}, "visible" in steps)
    return Trace(
        _Ready(explanation.source, declared),
        title=explanation.title,
        note=explanation.note,
        labels=explanation.labels,
        row_notes=explanation.row_notes,
        mechanism=explanation.mechanism,
    )


class _Ready:
    """The numbers of a run, of which fewer steps are shown."""

    def __init__(self, source: Values, steps: tuple[Step, ...]) -> None:
        self.steps = {step.name: step for step in steps}
        self.sizes, self.lead, self.inputs = source.sizes, source.lead, source.inputs
        self.rules, self.query_positions = source.rules, source.query_positions
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
