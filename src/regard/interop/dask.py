"""Attention over dask arrays: a lazy result, computed in tiles of batch, heads, queries and keys.

Owns how a call becomes a graph of tasks. What they compute is in `regard.compute`, in `tiles` and
`recompute_weights`; dask runs them, on the threads or the cluster that its user started.

>>> import dask.array as da, regard.interop.dask
>>> x = da.random.default_rng(0).normal(size=(8, 1024, 64), chunks=(2, 512, 64))
>>> regard.interop.dask.attention(x, x, x, causal=True).chunksize
(2, 512, 64)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np

from regard.boundary import answering, taking
from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.compute import recompute_weights, tiles
from regard.compute.blocks import Block, Blocks, Plan, call_over, hollow, plan, without
from regard.compute.options import DEFAULTS, NOT_OF_WEIGHTS
from regard.compute.results import OutputLse
from regard.compute.tiles import Tile
from regard.errors import OptionError, naming_shapes, safe_text
from regard.interop.dask_arrays import (
    aligned,
    array_of,
    as_lazy,
    cut,
    lazy_cells,
    name_of,
    with_axes,
)

__all__ = ["Plan", "attention", "plan", "weights"]

# Rows of a key head up to which tiles return a state for each chunk of keys, which are then read at
# the same time: so many states are smaller than the keys that they come from.
FEW_ROWS = 64
SPLIT = 8  # states that a task of order="tree" merges


@answering
@taking(DEFAULTS, "out", "kernel")
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    return_lse: bool = False,
    threads: int = 1,
    order: Literal["fold", "tree"] = "fold",
    **options: Any,
) -> Any:
    r"""Scaled dot-product attention as a lazy dask array: softmax(scale·Q·Kᵀ + bias)·V.

    Parameters
    ----------
    query : array_like, (…, H, L, D)
        A dask array, or any array that dask reads in pieces: Zarr, HDF5, NumPy.
    key, value : array_like, (…, G, S, D) and (…, G, S, E)
        Their chunks along heads and keys cut the call; those of `query` cut it along queries.
        Boundaries between keys move to the nearest multiple of 256; arrays with other boundaries
        are rechunked.
    mask : array_like of bool or mask, optional
        As for `regard.attention`; an array may be lazy too, and is rechunked to fit.
    bias : array_like, optional
        The same for numbers to add.
    return_lse : bool
        Also return the log-sum-exp (…, H, L).
    threads : int
        Of each task; its workers run several tasks.
    order : {"fold", "tree"}
        "fold": a task takes the states of rows after earlier keys and goes on, so that the result
        has the bytes of one call of `regard.attention`. "tree": the states of parts are merged in
        a tree of 8 branches, so that parts of the same rows run at the same time. Its bytes depend
        on the chunks, not on timing: each merge of n parts rounds ⌈log₂ n⌉ times where the fold
        rounds once for every 256 keys.
    **options
        causal, window, offset, scale, softcap, sink, precision, positions, score, normalize: as
        for `regard.attention`, where the fused kernel knows them.

    Returns
    -------
    dask.array.Array, (…, H, L, E), or OutputLse of two
        Nothing is computed yet. Parts that a rule hides entirely are no tasks.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `regard.attention`, before any task runs; also for chunks of unknown size, chunks
        that split a group of query heads, and what the fused kernel cannot compute.

    Notes
    -----
    A row whose numbers leave their range is computed again from all its keys, by the task that ends
    it: it then reads the keys of that head once more, and holds them.

    Examples
    --------
    >>> import numpy as np, dask.array as da
    >>> import regard, regard.interop.dask
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 4, 1000, 8))
    >>> lazy = [da.from_array(x, chunks=(2, 300, 8)) for x in (q, k, v)]
    >>> made = regard.interop.dask.attention(*lazy, causal=True).compute()
    >>> bool((made == regard.attention(q, k, v, causal=True)).all())
    True
    """
    if order not in ("fold", "tree"):
        raise OptionError(f'order must be "fold" or "tree", not {safe_text(repr(order), 60)}')
    arrays = {"query": query, "key": key, "value": value}
    lazy = {name: as_lazy(name, array) for name, array in arrays.items()}
    cells, others = lazy_cells(mask=mask, bias=bias)
    options |= {**others, "return_lse": return_lse, "threads": as_int("threads", threads, 1)}
    request = call_over("dask arrays", lazy, cells, options)
    whole = {name: with_axes(request, array) for name, array in lazy.items()}
    whole |= {name: da.broadcast_to(array, request.shape) for name, array in cells.items()}
    blocks, arrays = cut(request, whole, aligned(lazy["key"].chunks[-2]))
    name = name_of("attention", request, order, *(array.name for array in arrays.values()))
    made = _Graph(blocks, arrays, tuple(cells), order == "tree", name)
    tasks: dict[Any, Any] = {}
    for block in blocks:
        made.add(tasks, block)
    chunks = arrays["query"].chunks[:-1]
    widths = request.value.shape[-1:]
    inputs = [*arrays.values()]
    output = array_of(name, tasks, inputs, (*chunks, widths), request.dtype)
    if not request.options.return_lse:
        return request.natural(output)
    seconds = {("lse-" + name, *block): (_second, ("end-" + name, *block)) for block in blocks}
    lse = array_of("lse-" + name, seconds, [output], chunks, request.lse_dtype)
    return OutputLse(request.natural(output), request.natural(lse))


@answering
@taking(DEFAULTS, *NOT_OF_WEIGHTS, "kernel")
def weights(
    query: Any,
    key: Any,
    lse: Any,
    *,
    rows: Any = None,
    mask: Any = None,
    bias: Any = None,
    threads: int = 1,
    **options: Any,
) -> Any:
    r"""The weights of some rows of an earlier call, as a lazy dask array: exp(scores − lse).

    Parameters
    ----------
    query, key : array_like, (…, H, L, D) and (…, G, S, D)
        Those of that call, as for `attention`.
    lse : array_like, (…, H, L)
        As that call returned it with ``return_lse=True``, perhaps lazily.
    rows : int, slice or (rows,) ints, optional
        The queries, in any order. None: all.
    mask, bias
        As for `attention`; give what that call was given.
    threads : int
        Of each task; its workers run several tasks.
    **options
        causal, window, offset, scale, softcap, sink, score, positions: as for `regard.weights`.

    Returns
    -------
    dask.array.Array, (…, H, rows, S)
        The bytes of `regard.weights`. A task makes up to 64 rows of a chunk of heads with all their
        keys, which it holds.

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `regard.weights`: what is wrong with arguments before any task runs, an lse of fewer
        keys by the task that notices it.

    Examples
    --------
    >>> import dask.array as da, regard.interop.dask
    >>> x = da.from_array(np.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]))
    >>> lse = regard.interop.dask.attention(x, x, x, causal=True, return_lse=True).lse
    >>> weights(x, x, lse, rows=-1, causal=True).compute().round(3)
    array([[0.248, 0.248, 0.503]])
    """
    arrays = {"query": query, "key": key, "lse": lse}
    lazy = {name: as_lazy(name, array) for name, array in arrays.items()}
    cells, others = lazy_cells(mask=mask, bias=bias)
    options |= {**others, "threads": as_int("threads", threads, 1)}
    of_query, of_key, of_lse = (hollow(lazy[name]) for name in ("query", "key", "lse"))
    with naming_shapes(query=of_query, key=of_key, lse=of_lse):
        given = {**options, **{name: hollow(array) for name, array in cells.items()}}
        request, _ = recompute_weights.checked(of_query, of_key, of_lse, given)
        recompute_weights.check_score(request)
        chosen, is_one = recompute_weights.row_numbers(rows, request)
    options |= without(cells)
    request, _ = recompute_weights.checked(of_query, of_key, of_lse, options)
    most, count = recompute_weights.MOST_ROWS, chosen.size
    of_rows = tuple(min(most, count - at) for at in range(0, count, most)) or (0,)
    whole = {
        "query": with_axes(request, lazy["query"])[..., chosen, :].rechunk({-2: of_rows}),
        "key": with_axes(request, lazy["key"]),
        "lse": lazy["lse"].reshape(request.shape[:-1])[..., chosen],
    }
    for name, array in cells.items():
        whole[name] = da.broadcast_to(array, request.shape)[..., chosen, :]
    blocks, chunked = cut(request, whole, request.shape[-1:])
    name = name_of("weights", request, chosen, *(array.name for array in chunked.values()))
    tasks: dict[Any, Any] = {}
    for block in blocks:
        place, pieces = blocks.place(block), []
        for first, run in recompute_weights.runs(chosen[place.rows]):
            here = slice(first, first + run.stop - run.start)
            pieces.append((tiles.tile_of(request, place._replace(rows=run)), here, run.start))
        ends = {"key": (*block[:-1], 0, 0), "lse": block}
        inputs = [(array.name, *ends.get(n, (*block, 0))) for n, array in chunked.items()]
        tasks[(name, *block, 0)] = (_rows, pieces, tuple(cells), request.dtype, *inputs)
    chunks = (*chunked["query"].chunks[:-1], request.shape[-1:])
    made = request.natural(array_of(name, tasks, [*chunked.values()], chunks, request.dtype))
    return made[..., 0, :] if is_one else made


# --- the graph of a call of attention ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Sources:
    """How the keys of a head are made once more, by a task that needs all of them."""

    graphs: dict[str, tuple[dict[Any, Any], Any]]

    @classmethod
    def of(cls, arrays: Mapping[str, da.Array], place: tuple[int, ...]) -> _Sources:
        made = {}
        for name, array in arrays.items():
            part = array.blocks[place]
            keys = part.__dask_keys__()
            graph = part.__dask_optimize__(part.__dask_graph__(), keys)
            made[name] = (dict(graph), keys)
        return cls(made)

    def read(self) -> dict[str, Array]:
        return {
            name: da.core.concatenate3(dask.get(graph, keys))
            for name, (graph, keys) in self.graphs.items()
        }


@dataclass(frozen=True, eq=False)
class _Graph:
    """The tasks of a call, under names that end in its own."""

    blocks: Blocks
    arrays: Mapping[str, da.Array]  # in chunks of the blocks and their tiles
    cells: tuple[str, ...]
    is_tree: bool
    name: str

    def add(self, tasks: dict[Any, Any], block: Block) -> None:
        """The tasks of one block of queries."""
        place, request = self.blocks.place(block), self.blocks.request
        query, again = (self.arrays["query"].name, *block, 0), ("again-" + self.name, *block[:-1])
        if again not in tasks:
            sides = {name: self.arrays[name] for name in ("key", "value")}
            tasks[again] = _Sources.of(sides, block[:-1])
        few = tiles.sharing(request) * (place.rows.stop - place.rows.start) <= FEW_ROWS
        states: list[Any] = []
        for number, _, tile in self.blocks.tiles(block):
            before = None if few or self.is_tree or not states else states[-1]
            keys = [(self.arrays[n].name, *block[:-1], number, 0) for n in ("key", "value")]
            cells = [(self.arrays[n].name, *block, number) for n in self.cells]
            states.append(("part-" + self.name, *block, number))
            apart = few and not self.is_tree
            tasks[states[-1]] = (_part, tile, self.cells, apart, before, query, *keys, *cells)
        last = tiles.tile_of(request, place)
        if not self.is_tree and not few:  # the last part ends the block, within one task
            states = [tasks.pop(name) for name in states[-1:]]
        level = 0
        while self.is_tree and len(states) > SPLIT:
            merged = []
            for first in range(0, len(states), SPLIT):
                merged.append(("merge-" + self.name, *block, level, first))
                tasks[merged[-1]] = (_merge, last, query, states[first : first + SPLIT])
            states, level = merged, level + 1
        of_cells = _Sources.of({name: self.arrays[name] for name in self.cells}, block)
        end: Any = (_end, last, query, again, of_cells, states)
        if request.options.return_lse:
            name = ("end-" + self.name, *block)
            tasks[name], end = end, name
        tasks[(self.name, *block, 0)] = (_first, end)


# --- tasks ---------------------------------------------------------------------------------------


def _part(
    tile: Tile,
    names: Sequence[str],
    apart: bool,
    before: Array | None,
    query: Array,
    key: Array,
    value: Array,
    *cells: Array,
) -> Array:
    request = tile.of(query, key, value, **dict(zip(names, cells, strict=True)))
    return tiles.carry(request, before, apart=apart)


def _merge(tile: Tile, query: Array, states: list[Array]) -> Array:
    return tiles.carry(tile.of_no_keys(query), np.concatenate(states))


def _end(
    tile: Tile, query: Array, again: _Sources, of_cells: _Sources, states: list[Array]
) -> tuple[Array, Array]:
    return tiles.end(tile, query, states, lambda: again.read() | of_cells.read())


def _first(pair: tuple[Array, Array]) -> Array:
    return pair[0]


def _second(pair: tuple[Array, Array]) -> Array:
    return pair[1]


def _rows(
    pieces: list[tuple[Tile, slice, int]],
    names: Sequence[str],
    dtype: Any,
    query: Array,
    key: Array,
    lse: Array,
    *cells: Array,
) -> Array:
    """The weights of rows that follow each other in pieces."""
    made = np.empty((*lse.shape, key.shape[-2]), dtype)
    value = np.empty((*key.shape[:-1], 0), dtype)
    for tile, here, first in pieces:
        extras = {n: of[..., here, :] for n, of in zip(names, cells, strict=True)}
        request = recompute_weights.as_dot(tile.of(query[..., here, :], key, value, **extras))
        recompute_weights.fill(made[..., here, :], request, lse[..., here], first)
    return made
