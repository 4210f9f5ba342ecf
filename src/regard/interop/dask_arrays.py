"""Arrays of a call over dask: made lazy, with the axes of the call, and cut where it is cut.

Must not know what is computed of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import dask.array as da
import numpy as np
from dask.base import tokenize

from regard.boundary.arguments import as_array, read_array
from regard.compute import parts
from regard.compute.parts import CHUNK
from regard.compute.request import Request
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


def name_of(kind: str, request: Request, *others: Any) -> str:
    """A name for the tasks of a call; the arrays are among `others`, by their own names."""
    # dask would hash every number of an array that has no memory, and make it for that.
    query, key, value = (
        np.empty(0, one.dtype) for one in (request.query, request.key, request.value)
    )
    return f"{kind}-{tokenize(replace(request, query=query, key=key, value=value), *others)}"


def aligned(sizes: Sequence[int]) -> tuple[int, ...]:
    """Chunks of keys with boundaries moved to the nearest multiples of `CHUNK`."""
    whole, at = sum(sizes), list(itertools.accumulate(sizes))[:-1]
    inner = sorted({round(one / CHUNK) * CHUNK for one in at} - {0})
    cuts = [0, *(one for one in inner if one < whole), whole]
    return tuple(b - a for a, b in itertools.pairwise(cuts))


def groups_of(request: Request, query: da.Array) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """The chunks of a query along batch and heads, and those of the keys along heads."""
    *outer, heads = query.chunks[:-2]
    if not sum(heads):
        raise ShapeError("query has 0 heads; over dask there must be one or more")
    shared = request.query.shape[-3] // max(request.key.shape[-3], 1)
    if shared > 1 and any(size % shared for size in heads):
        raise ShapeError(
            f"query has chunks of {heads} heads, but {shared} query heads share a key head; "
            f"rechunk it to multiples of {shared}"
        )
    return outer, heads, tuple(size // max(shared, 1) for size in heads)


def slices_of(sizes: Sequence[int]) -> list[slice]:
    """Where chunks of these sizes are."""
    ends = [0, *itertools.accumulate(sizes)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def with_lead(array: da.Array, lead: tuple[int, ...]) -> da.Array:
    """An array (…, H, L, D) with all leading axes of the call; missing axes have length 1."""
    full = array if array.ndim > 2 else array[(None,) * (3 - array.ndim)]
    return da.broadcast_to(full, (*lead, *full.shape[-3:]))


def has_cells(array: Any) -> bool:
    """Whether a mask or a bias goes along with the keys; one that is lazy always does."""
    return isinstance(array, da.Array) or parts.has_cells(array)


def natural(request: Request, array: da.Array) -> da.Array:
    """The result without the axes that the caller does not have."""
    place: tuple[Any, ...] = (slice(None),) * len(request.lead)
    if request.has_heads and request.has_rows:
        return array
    return array[(*place, *([] if request.has_heads else [0]), *([] if request.has_rows else [0]))]
