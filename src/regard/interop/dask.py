"""Attention over dask arrays: a lazy result, computed in parts of batch, heads, queries and keys.

Owns how a call becomes a graph of tasks. What a part computes is in `regard.compute.parts`; dask
runs the tasks, on the threads or the cluster that its user started.

>>> import dask.array as da, regard.interop.dask
>>> x = da.random.default_rng(0).normal(size=(8, 1024, 64), chunks=(2, 512, 64))
>>> regard.interop.dask.attention(x, x, x, causal=True).chunksize
(2, 512, 64)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import dask
import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from regard.boundary import answering, taking
from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.compute import parts
from regard.compute.options import DEFAULTS
from regard.compute.parts import Part, Place, Plan, plan
from regard.compute.request import Request, make_request
from regard.compute.results import OutputLse
from regard.errors import OptionError, safe_text
from regard.interop.dask_arrays import (
    aligned,
    as_lazy,
    groups_of,
    has_cells,
    name_of,
    natural,
    slices_of,
    with_lead,
)
from regard.interop.dask_weights import weights

__all__ = ["Plan", "attention", "plan", "weights"]

# Rows of a key head up to which parts return a state for each chunk of keys, which are then read at
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
    lazy = {name: as_lazy(name, one) for name, one in arrays.items()}
    given = {"mask": mask, "bias": bias}
    extras = {name: one for name, one in given.items() if has_cells(one)}
    options |= {name: parts.hollow(one) if name in extras else one for name, one in given.items()}
    request = make_request(
        *(parts.hollow(one) for one in lazy.values()),
        return_lse=return_lse,
        threads=as_int("threads", threads, 1),
        **options,
    )
    reason = parts.refused(request)
    if reason is not None:
        raise OptionError(f"attention over dask arrays needs the fused kernel: {reason}")
    cells = {name: as_lazy(name, one) for name, one in extras.items()}
    request = parts.without_cells(request, cells, options)
    return _Graph(request, lazy, cells, order).results()


@dataclass(frozen=True, eq=False)
class _Sources:
    """How the keys of a head are made once more, by a task that needs all of them."""

    graphs: dict[str, tuple[dict[Any, Any], Any]]

    @classmethod
    def of(cls, **arrays: da.Array) -> _Sources:
        made = {}
        for name, array in arrays.items():
            keys = array.__dask_keys__()
            graph = array.__dask_optimize__(array.__dask_graph__(), keys)
            made[name] = (dict(graph), keys)
        return cls(made)

    def read(self) -> dict[str, Array]:
        return {
            name: da.core.concatenate3(dask.get(graph, keys))
            for name, (graph, keys) in self.graphs.items()
        }


class _Graph:
    """The tasks of one call, in a grid of batch, key heads, queries and keys."""

    def __init__(
        self, request: Request, lazy: dict[str, da.Array], cells: dict[str, da.Array], order: str
    ) -> None:
        self.request = request
        self.order = order
        lead = request.lead
        whole = {name: with_lead(one, lead) for name, one in lazy.items()}
        query, key = whole["query"], whole["key"]
        axis = len(lead)
        outer, heads, groups = groups_of(request, query)
        self.rows, self.keys = query.chunks[axis + 1], aligned(key.chunks[axis + 1])
        self.arrays = {
            "query": query.rechunk((*outer, heads, self.rows, -1)),
            "key": key.rechunk((*outer, groups, self.keys, -1)),
            "value": whole["value"].rechunk((*outer, groups, self.keys, -1)),
        }
        for name, array in cells.items():
            spread = da.broadcast_to(array, request.shape)
            self.arrays[name] = spread.rechunk((*outer, heads, self.rows, self.keys))
        self.extras = tuple(cells)
        self.chunks = (*outer, heads, self.rows)
        self.grid = [slices_of(sizes) for sizes in (*outer, groups, self.rows)]
        self.name = name_of("attention", request, order, *(a.name for a in self.arrays.values()))
        self.tasks: dict[Any, Any] = {}

    def results(self) -> Any:
        request = self.request
        *outer, rows = (range(len(slices)) for slices in self.grid)
        for at in itertools.product(*outer):
            again = ("again-" + self.name, *at)
            self.tasks[again] = self._sources(at)
            for i in rows:
                self._end((*at, i), again)
        inputs = list(self.arrays.values())
        graph = HighLevelGraph.from_collections(self.name, self.tasks, dependencies=inputs)
        widths = request.value.shape[-1:]
        output = da.Array(
            graph, self.name, (*self.chunks, widths), dtype=request.dtype, meta=_meta(request)
        )
        made = natural(request, output)
        blocks = [key for key in self.tasks if key[0] == self.name]
        if not request.options.return_lse:
            return made
        name = "lse-" + self.name
        tasks = {(name, *key[1:-1]): (_second, ("end-" + self.name, *key[1:-1])) for key in blocks}
        of_lse = HighLevelGraph.from_collections(name, tasks, dependencies=[output])
        lse = da.Array(of_lse, name, self.chunks, dtype=request.lse_dtype)
        return OutputLse(made, natural(request, lse))

    def _sources(self, at: tuple[int, ...]) -> _Sources:
        blocks = {name: self.arrays[name].blocks[at] for name in ("key", "value")}
        return _Sources.of(**blocks)

    def _place(self, at: tuple[int, ...], keys: slice) -> Place:
        *batch, heads, rows = (slices[index] for slices, index in zip(self.grid, at, strict=True))
        return Place(tuple(batch), heads, rows, keys)

    def _visible(self, at: tuple[int, ...]) -> Iterator[tuple[int, Place]]:
        for j, keys in enumerate(slices_of(self.keys)):
            place = self._place(at, keys)
            if parts.may_see(self.request, place):
                yield j, place

    def _end(self, at: tuple[int, ...], again: Any) -> None:
        """The tasks of one block of queries."""
        request = self.request
        query = (self.arrays["query"].name, *at, 0)
        rows = self.grid[-1][at[-1]]
        shared = request.query.shape[-3] // request.key.shape[-3]
        few = shared * (rows.stop - rows.start) <= FEW_ROWS
        fold = self.order == "fold"
        states: list[Any] = []
        before: Any = None
        for j, place in self._visible(at):
            name = ("part-" + self.name, *at, j)
            part = parts.part_of(request, place)
            blocks = [(self.arrays[n].name, *at[:-1], j, 0) for n in ("key", "value")]
            extras = [(self.arrays[n].name, *at, j) for n in self.extras]
            taken = None if few or not fold else before
            self.tasks[name] = (
                *(_part, part, self.extras, few and fold, taken, query),
                *(*blocks, *extras),
            )
            before = name
            states.append(name)
        whole = self._place(at, slice(0, request.shape[-1]))
        part = parts.part_of(request, whole)
        if fold and not few:  # the last part ends the block, within one task
            states = [self.tasks.pop(name) for name in states[-1:]]
        level = 0
        while not fold and len(states) > SPLIT:
            merged = []
            for n in range(0, len(states), SPLIT):
                name = ("merge-" + self.name, *at, level, n)
                self.tasks[name] = (_merge, part, query, states[n : n + SPLIT])
                merged.append(name)
            states, level = merged, level + 1
        of_cells = None
        if self.extras:
            of_cells = _Sources.of(**{n: self.arrays[n].blocks[at] for n in self.extras})
        widths = (request.key.shape[-1], request.value.shape[-1])
        end: Any = (_end, part, widths, query, again, of_cells, list(states))
        if request.options.return_lse:
            name = ("end-" + self.name, *at)
            self.tasks[name], end = end, name
        self.tasks[(self.name, *at, 0)] = (_first, end)


def _meta(request: Request) -> Array:
    return np.empty((0,) * len(request.shape), request.dtype)


# --- tasks -----------------------------------------------------------------------------------


def _part(
    part: Part,
    names: Sequence[str],
    apart: bool,
    before: Array | None,
    query: Array,
    key: Array,
    value: Array,
    *cells: Array,
) -> Array:
    request = part.of(query, key, value, dict(zip(names, cells, strict=True)))
    return parts.carry(request, before, apart=apart)


def _merge(part: Part, query: Array, states: list[Array]) -> Array:
    width = states[0].shape[-1] - 3
    request = parts.of_no_keys(part, (query.shape[-1], width), query)
    return parts.merge(request, [one[None] for one in states])


def _end(
    part: Part,
    widths: tuple[int, int],
    query: Array,
    again: _Sources,
    of_cells: _Sources | None,
    states: list[Array],
) -> tuple[Array, Array]:
    whole = query.ndim + 1  # axes of states of several chunks
    found = [one if one.ndim == whole else one[None] for one in states]

    def read() -> dict[str, Array]:
        return again.read() | ({} if of_cells is None else of_cells.read())

    return parts.end(part, widths, query, found, read)


def _first(pair: tuple[Array, Array]) -> Array:
    return pair[0]


def _second(pair: tuple[Array, Array]) -> Array:
    return pair[1]
