"""Arrays of a call over dask: made lazy, with the axes of the call, and cut where it is cut.

Must not know what is computed of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from regard.boundary.arguments import as_array, read_array
from regard.compute.blocks import Blocks, has_cells
from regard.compute.request import Request
from regard.compute.tiles import CHUNK, QKV, sharing
from regard.errors import ShapeError


def as_lazy(name: str, array: Any) -> da.Array:
    """A dask array, or what dask reads in pieces, as the former."""
    if not isinstance(getattr(array, "dtype", None), np.dtype):
        array = read_array(name, array)
    as_array(name, np.empty(0, array.dtype))  # its dtype is one that regard computes with
    if not isinstance(array, da.Array):
        chunks = getattr(array, "chunks", None) or "auto"
        array = da.from_array(array, chunks=chunks, inline_array=not isinstance(array, np.ndarray))
    if any(math.isnan(size) for size in array.shape):
        raise ShapeError(
            f"{name} has chunks of unknown size, {array.shape}; call its compute_chunk_sizes()"
        )
    return array


def lazy_cells(**given: Any) -> tuple[dict[str, da.Array], dict[str, Any]]:
    """A mask and a bias that come with the keys, as those that are lazy always do; and the rest."""
    cells = {n: as_lazy(n, x) for n, x in given.items() if isinstance(x, da.Array) or has_cells(x)}
    return cells, {name: x for name, x in given.items() if name not in cells}


def name_of(kind: str, request: Request, *others: Any) -> str:
    """A name for the tasks of a call; the arrays are among `others`, by their own names."""
    # dask would hash every number of an array that has no memory, and make it for that.
    none: dict[str, Any] = {name: np.empty(0, getattr(request, name).dtype) for name in QKV}
    return f"{kind}-{tokenize(replace(request, **none), *others)}"


def array_of(
    name: str, tasks: dict[Any, Any], inputs: Sequence[da.Array], chunks: Any, dtype: Any
) -> da.Array:
    """The array that these tasks make."""
    graph = HighLevelGraph.from_collections(name, tasks, dependencies=inputs)
    return da.Array(graph, name, chunks, meta=np.empty((0,) * len(chunks), dtype))


def aligned(sizes: Sequence[int]) -> tuple[int, ...]:
    """Chunks of keys with boundaries moved to the nearest multiples of `CHUNK`."""
    whole, at = sum(sizes), list(itertools.accumulate(sizes))[:-1]
    inner = sorted({round(end / CHUNK) * CHUNK for end in at} - {0})
    cuts = [0, *(end for end in inner if end < whole), whole]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def with_axes(request: Request, array: da.Array) -> da.Array:
    """An array (…, H, L, D) with all leading axes of the call; missing axes have length 1."""
    full = array[(None,) * (3 - array.ndim)]
    return da.broadcast_to(full, (*request.lead, *full.shape[-3:]))


def cut(
    request: Request, arrays: Mapping[str, da.Array], keys: tuple[int, ...]
) -> tuple[Blocks, dict[str, da.Array]]:
    """Blocks as the query is cut, with tiles of so many keys; and all arrays in chunks of these.

    The arrays have all axes, and the names that they have in the call.
    """
    *outer, heads, rows = arrays["query"].chunks[:-1]
    if not sum(heads):
        raise ShapeError("query has 0 heads; over dask there must be one or more")
    shared = sharing(request)
    if any(size % shared for size in heads):
        raise ShapeError(
            f"query has chunks of {heads} heads, but {shared} query heads share a key head; "
            f"rechunk it to multiples of {shared}"
        )
    of_keys = (tuple(size // shared for size in heads), keys, -1)
    chunks = {"query": (heads, rows, -1), "key": of_keys, "value": of_keys, "lse": (heads, rows)}
    cells = (heads, rows, keys)
    cut = {n: array.rechunk((*outer, *chunks.get(n, cells))) for n, array in arrays.items()}
    cuts = [_slices(sizes) for sizes in (*outer, heads, rows)]
    return Blocks(request, cuts, _slices(keys)), cut


def _slices(sizes: Sequence[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]
