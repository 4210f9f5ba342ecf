"""One tile of a call: some queries of some heads, and some of their keys.

Owns which part of every option a tile takes, whether any of its keys is seen, and how the states of
rows go from one tile to the next. With tiles that begin at multiples of `CHUNK` keys, merged in
order, the bytes are those of one call. Must not know which tiles there are, or who computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.cached import kept_while_it_exists
from regard.compute import dispatch
from regard.compute.kernels import fused
from regard.compute.kernels.fused import CHUNK, carry
from regard.compute.positioned import Places, Rotation, as_places
from regard.compute.request import Request
from regard.masks import Causal, Lengths, Segments, Window
from regard.positions import Alibi, RelativeBias, Rotary
from regard.rules.visibility import All, AnyOf, Boolean, Combined, Mask

__all__ = ["CHUNK", "QKV", "Place", "Tile", "carry", "end", "sharing", "tile_of", "where", "within"]

QKV = ("query", "key", "value")


class Place(NamedTuple):
    """Where a tile is: slices of the leading axes, of query heads, of queries and of keys."""

    batch: tuple[slice, ...]
    heads: slice
    rows: slice
    keys: slice


def sharing(request: Request) -> int:
    """How many query heads share a key head."""
    heads, groups = request.query.shape[-3], request.key.shape[-3]
    return int(max(1, heads // max(1, groups)))


def where(request: Request, name: str, place: Place) -> tuple[slice, ...]:
    """What a tile takes of the array of that name, along all axes of the call."""
    heads, rows, shared = place.heads, place.rows, sharing(request)
    if name in ("key", "value"):
        heads = slice(heads.start // shared, -(-heads.stop // shared))
        rows = place.keys
    last = slice(0, getattr(request, name).shape[-1]) if name in QKV else place.keys
    return (*place.batch, heads, rows, last)


def within(shape: Sequence[int], slices: Sequence[slice]) -> tuple[slice, ...]:
    """The same for an array that broadcasts to these axes."""
    axes = zip(slices[len(slices) - len(shape) :], shape, strict=True)
    return tuple(cut if size > 1 else slice(0, size) for cut, size in axes)


# --- what a tile takes ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Tile:
    """The options of one tile; its arrays come when it is computed."""

    request: Request  # arrays without a number, of the right dtypes and widths; no positions
    positions: Places  # of its queries, counted from its first key
    keys: int
    rotation: Rotation | None = None

    def of(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
    ) -> Request:
        """The tile as a call of its own; `mask` and `bias` are those that come with the keys."""
        options = self.request.options
        if mask is not None:
            cells = Boolean(mask)
            options = options._replace(mask=cells if options.mask is None else options.mask & cells)
        if bias is not None:
            options = options._replace(bias=bias)
        if self.rotation is not None:
            turned = self.rotation.turned({"query": query, "key": key}, options.threads)
            query, key = turned["query"], turned["key"]
        rows = (*query.shape[:-3], query.shape[-2])
        request = replace(
            self.request,
            query=query,
            key=key,
            value=value,
            options=options,
            query_positions=np.broadcast_to(np.asarray(self.positions), rows),
        )
        return dispatch.without_positions(request)

    def of_no_keys(self, query: Array) -> Request:
        """A call of its queries and no key: what makes numbers of scores, and the sink."""
        bias = self.request.options.bias
        bias = None if bias is None else np.zeros((1, 0), bias.dtype)
        plain = self.request.with_options(mask=None, positions=None, bias=bias)
        alone = replace(self, request=plain, rotation=None)
        return alone.of(query, plain.key, plain.value)

    def sees(self) -> bool:
        """False where a rule by position, length, segment or array hides all keys from all rows."""
        positions, rule = np.asarray(self.positions), self.request.options.mask
        if not positions.size or not self.keys:
            return False
        reach = int(positions.min()), int(positions.max())
        return rule is None or _sees(rule, reach, self.keys)


def tile_of(request: Request, place: Place) -> Tile:
    """The tile of a call at a place, with every option cut to it."""
    options, positions, rotation = request.options, request.options.positions, None
    if isinstance(positions, Rotary):
        rotation = _rotation(request).within(place.batch, place.rows, place.keys)
        positions = None
    elif isinstance(positions, Alibi):
        positions = Alibi(positions.slopes_of(request.shape[-3])[place.heads])
    elif isinstance(positions, RelativeBias):
        positions = RelativeBias(
            positions.table[place.heads],
            bidirectional=positions.bidirectional,
            max_distance=positions.max_distance,
        )
    mask, bias, sink = options.mask, options.bias, options.sink
    options = options._replace(
        mask=None if mask is None else _rule(mask, request, place),
        bias=None if bias is None else bias[within(bias.shape, where(request, "bias", place))],
        sink=None if sink is None else np.array(sink[(*place.batch, place.heads)]),
        positions=positions,
        out=None,
    )
    nowhere = place._replace(rows=slice(0, 0), keys=slice(0, 0))
    cut = replace(
        request,
        **{name: getattr(request, name)[where(request, name, nowhere)] for name in QKV},
        options=options,
        query_positions=np.empty(0, np.int64),
        has_heads=True,
        has_rows=True,
    )
    of_rows = np.asarray(request.query_positions[(*place.batch, place.rows)])
    keys = place.keys.stop - place.keys.start
    return Tile(cut, as_places(of_rows - place.keys.start), keys, rotation)


@kept_while_it_exists
def _rotation(request: Request) -> Rotation:
    """Asked for each tile of a call, and not made anew from the positions of all queries."""
    assert isinstance(request.options.positions, Rotary)
    return Rotation.of(request.options.positions, request)


def _rule(rule: Mask, request: Request, place: Place) -> Mask:
    """The rule for the tile's own rows and keys, both counted from 0, as its positions are."""
    batch, keys = place.batch, place.keys
    match rule:
        case Combined():
            return replace(rule, parts=tuple(_rule(part, request, place) for part in rule.parts))
        case Boolean():
            cells = rule.array[within(rule.array.shape, where(request, "mask", place))]
            return replace(rule, array=cells)
        case Lengths():
            lengths = rule.lengths[within(rule.lengths.shape, batch)] - keys.start
            return Lengths(np.clip(lengths, 0, keys.stop - keys.start))
        case Segments():
            sides = ((rule.query, place.rows), (rule.key, keys))
            return Segments(*(of[within(of.shape, (*batch, rows))] for of, rows in sides))
    return rule


def _sees(rule: Mask, reach: tuple[int, int], keys: int) -> bool:
    """The same for the rule of a tile, whose queries are from one position to another."""
    first, last = reach
    match rule:
        case All():
            return all(_sees(part, reach, keys) for part in rule.parts)
        case AnyOf():
            return any(_sees(part, reach, keys) for part in rule.parts)
        case Causal():
            return last >= 0
        case Window(left, right):
            after = left is not None and keys - 1 < first - left
            before = right is not None and last + right < 0
            return not (after or before)
        case Lengths(lengths):
            return bool(lengths.any())
        case Segments(query, key):
            return bool(query.max() >= key.min() and query.min() <= key.max())
        case Boolean(cells):
            return bool(cells.any())
    return True


# --- states of rows, which `carry` takes on from tile to tile ------------------------------------

# Rows that are made again in one call: more would pack a copy of the keys.
MOST_ROWS = 128


def end(
    tile: Tile, query: Array, states: Sequence[Array], read: Callable[[], dict[str, Array]]
) -> tuple[Array, Array]:
    """Output (…, H, L, E) and lse (…, H, L) of a tile with all keys, from the states of others.

    `states` are (parts, …, H, L, 3 + E) each. `read` gives the keys and values, and the mask and
    bias of cells, where rows left their range and are made again.
    """
    known = np.concatenate(states) if states else None
    output, lse, rows = fused.finish(tile.of_no_keys(query), known)
    if rows.any():
        whole = tile.of(query, **read())
        whole = whole.with_options(return_lse=whole.options.normalize is None)
        for start in range(0, rows.shape[-1], MOST_ROWS):
            some = slice(start, start + MOST_ROWS)
            if rows[..., some].any():
                made = fused.run(whole.of_rows(some))
                output[..., some, :] = made.output
                if made.lse is not None:
                    lse[..., some] = made.lse
    return output, lse
