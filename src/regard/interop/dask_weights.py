"""Weights of chosen rows over dask arrays, as `regard.weights` recomputes them.

Owns how rows become tasks. What a row's weights are is in `regard.compute.recompute_weights`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import dask.array as da
import numpy as np
from dask.highlevelgraph import HighLevelGraph

from regard.boundary import answering, taking
from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.compute import parts, recompute_weights
from regard.compute.options import DEFAULTS, NOT_OF_WEIGHTS
from regard.compute.parts import Part, Place
from regard.compute.request import Request
from regard.errors import naming_shapes
from regard.interop.dask_arrays import (
    as_lazy,
    groups_of,
    has_cells,
    name_of,
    natural,
    slices_of,
    with_lead,
)

__all__ = ["weights"]


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
    lazy = {"query": as_lazy("query", query), "key": as_lazy("key", key)}
    logs = as_lazy("lse", lse)
    given = {"mask": mask, "bias": bias}
    extras = {name: as_lazy(name, one) for name, one in given.items() if has_cells(one)}
    options |= given | {name: parts.hollow(one) for name, one in extras.items()}
    options["threads"] = as_int("threads", threads, 1)
    hollow = [parts.hollow(one) for one in (*lazy.values(), logs)]
    with naming_shapes(**dict(zip(("query", "key", "lse"), hollow, strict=True))):
        request, _ = recompute_weights.checked(hollow[0], hollow[1], hollow[2], options)
        recompute_weights.check_score(request)
        chosen, is_one = recompute_weights.row_numbers(rows, request)
    request = parts.without_cells(request, extras, options)
    made = _graph(request, lazy, logs.reshape(request.shape[:-1]), extras, chosen)
    whole = natural(request, made)
    return whole[..., 0, :] if is_one else whole


def _graph(
    request: Request,
    lazy: dict[str, da.Array],
    logs: da.Array,
    extras: dict[str, da.Array],
    chosen: Array,
) -> da.Array:
    """A task for each chunk of heads and up to 64 of the chosen rows."""
    query, key = (with_lead(one, request.lead) for one in lazy.values())
    outer, heads, groups = groups_of(request, query)
    count, most = chosen.size, recompute_weights.MOST_ROWS
    rows = tuple(min(most, count - at) for at in range(0, count, most)) or (0,)
    arrays = [
        query[..., chosen, :].rechunk((*outer, heads, rows, -1)),
        key.rechunk((*outer, groups, -1, -1)),
        logs[..., chosen].rechunk((*outer, heads, rows)),
    ]
    for one in extras.values():
        cells = da.broadcast_to(one, request.shape)[..., chosen, :]
        arrays.append(cells.rechunk((*outer, heads, rows, -1)))
    name = name_of("weights", request, chosen, *(one.name for one in arrays))
    tasks: dict[Any, Any] = {}
    grid = [slices_of(sizes) for sizes in (*outer, groups, rows)]
    for at in itertools.product(*(range(len(slices)) for slices in grid)):
        *batch, group, some = (slices[i] for slices, i in zip(grid, at, strict=True))
        pieces = []
        for start, run in recompute_weights.runs(chosen[some]):
            place = Place(tuple(batch), group, run, slice(0, request.shape[-1]))
            here = slice(start, start + run.stop - run.start)
            pieces.append((parts.part_of(request, place), here, run.start))
        blocks = [(arrays[0].name, *at, 0), (arrays[1].name, *at[:-1], 0, 0), (arrays[2].name, *at)]
        blocks += [(one.name, *at, 0) for one in arrays[3:]]
        tasks[(name, *at, 0)] = (_rows, pieces, tuple(extras), request.dtype, *blocks)
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=arrays)
    chunks = (*outer, heads, rows, request.shape[-1:])
    return da.Array(graph, name, chunks, dtype=request.dtype)


def _rows(
    pieces: list[tuple[Part, slice, int]],
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
    for part, here, first in pieces:
        extras = {n: one[..., here, :] for n, one in zip(names, cells, strict=True)}
        request = recompute_weights.as_dot(part.of(query[..., here, :], key, value, extras))
        recompute_weights.fill(made[..., here, :], request, lse[..., here], first)
    return made
