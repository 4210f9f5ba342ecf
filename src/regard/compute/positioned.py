"""A call with positions as one without: turned queries and keys, or a bias that needs no matrix.

Owns what a call's positions are. Must not know kernels; the formula of the rotation is the
textbook's, and a second time in cpp/rotate.hpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import is_float, round_once
from regard.boundary.arrays import Array
from regard.compute import native, rotary
from regard.compute.request import Request
from regard.positions import Alibi, RelativeBias, Rotary
from regard.textbook.operations import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

Tables = tuple["NDArray[np.float64]", "NDArray[np.float64]"]


def lowered(request: Request) -> Request:
    """The call that a kernel answers: without positions, which are in its arrays."""
    positions = request.positions
    if isinstance(positions, Rotary):
        turn = Rotation.of(positions, request)
        query, key = turn.forward(request.query, "query"), turn.forward(request.key, "key")
        return replace(request, query=query, key=key, positions=None)
    if positions is None:
        return request
    bias = _along_diagonals(request, positions)
    if request.bias is not None:
        with np.errstate(all="ignore"):
            bias = request.bias + bias
    return replace(request, bias=bias, positions=None)


class Rotation:
    """How the rows of one call are turned."""

    def __init__(self, positions: Rotary, places: Mapping[str, Array], width: int) -> None:
        self.positions = positions
        self.places = places
        self.width = width

    @classmethod
    def of(cls, positions: Rotary, request: Request) -> Rotation:
        """That of a call."""
        places = {"query": _query_places(request), "key": _key_places(request)}
        return cls(positions, places, request.query.shape[-1])

    @classmethod
    def of_tokens(cls, positions: Rotary, rows: Array, side: str, first: Any) -> Array:
        """Turned rows (…, H, L, D), (L, D) or (D,) of consecutive tokens from each `first` on."""
        positions.fits(rows.shape[-1], (0, 0, 0))
        whole = rows if rows.ndim > 2 else rows.reshape((1,) * (3 - rows.ndim) + rows.shape)
        places = np.asarray(first)[..., None] + np.arange(whole.shape[-2])
        turn = cls(positions, {side: places}, rows.shape[-1])
        return turn.forward(whole, side).reshape(rows.shape)

    @cached_property
    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each pair."""
        length = max((float(x.max(initial=0)) for x in self.places.values()), default=0.0)
        return self.positions.frequencies_of(self.width, math.floor(length) + 1)

    def forward(self, array: Array, side: str) -> Array:
        """Turned rows (…, H, L, D), each number rounded once to the array's dtype."""
        floats = is_float(array.dtype)
        dtype = array.dtype.newbyteorder("=") if floats else np.dtype(np.float64)
        return _turned(array, self._table(side), self.positions.interleaved, dtype)

    def back(self, array: Array, side: str) -> Array:
        """Rows turned the other way, as their gradients go."""
        cosines, sines = self._table(side)
        return _turned(array, (cosines, -sines), self.positions.interleaved, array.dtype)

    def _table(self, side: str) -> Tables:
        """Cosines and sines (…, rows, pairs)."""
        places, own = self.places[side], self.frequencies
        factor = self.positions.factor
        regular = places.ndim == 1 and places.dtype == np.int64 and places.size > 0
        if regular and getattr(self.positions, f"{side}_positions") is None:
            return rotary.table(own, factor, int(places[0]), places.size)
        return rotary.turned(places, own, factor)

    def given(self) -> tuple[dict[str, Array], dict[str, int]]:
        """What the declared rotation is made of, each feature for itself, and its sizes."""
        own, pairs = np.zeros(self.width), self.frequencies.size
        first, second = _pair(own, pairs, self.positions.interleaved)
        first[...], second[...] = -self.frequencies, self.frequencies
        given = {"frequencies": own}
        if self.positions.factor != 1:
            factors = np.where(np.arange(self.width) < 2 * pairs, self.positions.factor, 1)
            given["rotary_factors"] = factors
        far = 1 if self.positions.interleaved else pairs
        return given, {"P": far, "Q": 2 * far, "W": 2 * pairs}


def given_positions(
    request: Request, *, has_heads: bool, has_rows: bool
) -> tuple[dict[str, Array], dict[str, int]]:
    """What the declared steps of a call's positions are given, by step, and their sizes."""
    positions = request.positions
    query, key = _query_places(request), _key_places(request)
    given = {"query_positions": query, "key_positions": key}
    sizes: dict[str, int] = {}
    if isinstance(positions, Rotary):
        own, sizes = Rotation.of(positions, request).given()
        given |= own
    elif isinstance(positions, Alibi):
        given["positions_slopes"] = positions.slopes_of(request.shape[-3])
    elif isinstance(positions, RelativeBias):
        buckets = positions.buckets(key - query[..., None])
        numbers = np.arange(positions.table.shape[1])
        given = {"positions_table": positions.table, "bucket_numbers": numbers, "buckets": buckets}
    for name in ("positions_slopes", "positions_table") if not has_heads else ():
        if name in given:
            given[name] = given[name][0]
    for name in ("query_positions", "buckets") if not has_rows else ():
        if name in given:
            given[name] = (
                given[name][..., 0] if name == "query_positions" else given[name][..., 0, :]
            )
    return given, sizes


def _query_places(request: Request) -> Array:
    """The positions of the queries, (L,), or (…, L) if batch elements differ."""
    given = request.positions.query_positions if request.positions else None
    rows = request.shape[-2]
    if given is not None:
        return given if given.ndim == 1 else np.broadcast_to(given, (*request.lead, rows))
    offset = request.offset
    if offset.size and (offset == offset.flat[0]).all():
        return np.arange(rows) + offset.flat[0]
    return np.asarray(offset[..., None] + np.arange(rows))


def _key_places(request: Request) -> Array:
    given = request.positions.key_positions if request.positions else None
    rows = request.shape[-1]
    if given is not None:
        return given if given.ndim == 1 else np.broadcast_to(given, (*request.lead, rows))
    return np.arange(rows)


def _pair(array: Array, pairs: int, interleaved: bool) -> tuple[Array, Array]:
    """The first and the second features of all pairs, (…, pairs) each."""
    if interleaved:
        return array[..., 0 : 2 * pairs : 2], array[..., 1 : 2 * pairs : 2]
    return array[..., :pairs], array[..., pairs : 2 * pairs]


def _turned(array: Array, tables: Tables, interleaved: bool, dtype: np.dtype[Any]) -> Array:
    """Rows (…, H, L, D) turned by angles (L, pairs) or (…, L, pairs)."""
    shape = array.shape
    if tables[0].ndim == 2:  # what is the same for all batch elements or heads is turned once
        array = array[tuple(slice(0, None if by else 1) for by in array.strides[:-2])]
    if not is_float(array.dtype) or not array.dtype.isnative:
        array = array.astype(dtype)
    made = np.empty(array.shape, dtype)
    if native.BUILT:
        angles = (np.ascontiguousarray(one) for one in tables)
        native.module.rotate(array, made, *angles, interleaved, native.usable_target())
    else:
        _turn_in_numpy(array, made, tables, interleaved)
    return np.broadcast_to(made, shape)


def _turn_in_numpy(array: Array, made: Array, tables: Tables, interleaved: bool) -> None:
    cosines, sines = (one[..., None, :, :] for one in tables)
    pairs, rotate = cosines.shape[-1], OPERATIONS["rotate"].value
    assert rotate is not None
    made[..., 2 * pairs :] = array[..., 2 * pairs :]
    x, y = (one.astype(np.float64) for one in _pair(array, pairs, interleaved))
    first, second = _pair(made, pairs, interleaved)
    with np.errstate(all="ignore"):
        first[...] = round_once(rotate(x, cosines, y, -sines), made.dtype)
        second[...] = round_once(rotate(y, cosines, x, sines), made.dtype)


def _along_diagonals(request: Request, positions: Any) -> Array:
    """What is added to each logit, (…, H, L, S): a view of H·(L + S − 1) numbers.

    It depends on the difference of positions alone, so that row i is row i − 1 moved by one.
    """
    shape, dtype = request.shape, request.accumulator
    heads, rows, keys = shape[-3:]
    if not (rows and keys):
        return np.broadcast_to(np.zeros((), dtype), shape)
    offset = _query_places(replace(request, positions=None))[..., :1, None]
    ahead = np.arange(rows + keys - 1) - (rows - 1) - (offset if offset.ndim > 2 else offset[0])
    if isinstance(positions, Alibi):
        numbers = -positions.slopes_of(heads)[:, None] * np.abs(ahead)
    else:
        numbers = positions.table[np.arange(heads)[:, None], positions.buckets(ahead)]
    numbers = np.ascontiguousarray(numbers, np.float64 if request.parts else dtype)
    *outer, step = numbers.strides
    view = np.lib.stride_tricks.as_strided(
        numbers[..., rows - 1 :],
        (*numbers.shape[:-1], rows, keys),
        (*outer, -step, step),
        writeable=False,
    )
    return np.broadcast_to(view, shape)
