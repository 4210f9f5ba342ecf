"""A call with positions as one without: turned queries and keys, or a bias that needs no matrix.

Owns what a call's positions are. Must not know kernels; the formula of the rotation is the
textbook's, and a second time in cpp/rotate.hpp.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import is_float, round_once, spread
from regard.boundary.arrays import Array
from regard.boundary.cached import cached_property
from regard.compute import native
from regard.compute.request import Request
from regard.errors import ShapeError
from regard.positions import Alibi, RelativeBias, Rotary
from regard.rules import distances, rotary
from regard.textbook.operations import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

Tables = tuple["NDArray[np.float64]", "NDArray[np.float64]"]
Places = range | Array  # consecutive positions, or any


def lowered(request: Request) -> Request:
    """The call that a kernel answers: without positions, which are in its arrays."""
    positions = request.options.positions
    if isinstance(positions, Rotary):
        arrays = {"query": request.query, "key": request.key}
        turned = Rotation.of(positions, request).turned(arrays, request.options.threads)
        plain = request.with_options(positions=None)
        return replace(plain, query=turned["query"], key=turned["key"])
    if positions is None:
        return request
    bias, rows = _along_diagonals(request, positions)
    placed = replace(request.with_options(bias=bias, positions=None), bias_rows=rows)
    if request.options.bias is None:
        return placed
    with np.errstate(all="ignore"):
        both = placed.with_options(bias=request.options.bias + placed.own_bias)
        return replace(both, bias_rows=None)


def turns_of(request: Request) -> tuple[Array, Array, Array, Array, bool] | None:
    """For a kernel that turns rows itself: cosines and sines of queries, then of keys, and whether
    pairs are side by side. None if it cannot, or there is nothing to turn.
    """
    positions = request.options.positions
    if not isinstance(positions, Rotary) or request.options.score is not None:
        return None
    for array in (request.query, request.key):
        if not (is_float(array.dtype) and array.dtype.isnative):
            return None
    rotation = Rotation.of(positions, request)
    return (*rotation.table("query"), *rotation.table("key"), positions.interleaved)


def fast(positions: Any, query: Any, key: Any) -> tuple[Array, Array, bool] | Array | None:
    """What positions are to the fast path, in a call of L queries and L keys without an offset.

    Cosines and sines (L, pairs) of both, and whether pairs are side by side; or a bias (H, L, L).
    None where the general path has to answer, or to say what is wrong.
    """
    for array in (query, key):
        if not isinstance(array, np.ndarray) or array.ndim < 2 or not array.size:
            return None
    rows, width = query.shape[-2:]
    heads = query.shape[-3] if query.ndim > 2 else 1
    if not isinstance(positions, _FAST) or key.shape[-2] != rows:
        return None
    if positions.query_positions is not None or positions.key_positions is not None:
        return None
    try:
        positions.fits(width, (heads, rows, rows))
    except ShapeError:
        return None
    if isinstance(positions, Rotary):
        own = positions.frequencies_of(width, rows)
        return (*rotary.table(own, positions.factor, range(rows)), positions.interleaved)
    dtype = np.dtype(np.float64 if query.dtype == np.float64 else np.float32)
    own, how = _own(positions, heads)
    return _view(_between(own, how, 1 - rows, rows, dtype), rows, rows)


_FAST = (Rotary, Alibi, RelativeBias)


class Rotation:
    """How the rows of one call are turned."""

    def __init__(self, positions: Rotary, places: Mapping[str, Places], width: int) -> None:
        self.positions = positions
        self.places = places
        self.width = width

    @classmethod
    def of(cls, positions: Rotary, request: Request) -> Rotation:
        """That of a call."""
        places = {"query": _query_places(request), "key": _key_places(request)}
        return cls(positions, places, request.query.shape[-1])

    @classmethod
    def of_tokens(
        cls, positions: Rotary, rows: Array, side: str, first: Any, own: NDArray[np.float64]
    ) -> Array:
        """Turned rows (…, H, L, D), (L, D) or (D,) of consecutive tokens from each `first` on.

        `own` are the frequencies of a short text.
        """
        if isinstance(first, int) and rows.ndim > 2 and _turns_at_once(positions, rows):
            made, places = np.empty(rows.shape, rows.dtype), range(first, first + rows.shape[-2])
            turning = rows, made, *rotary.table(own, positions.factor, places)
            turn_rows([turning], interleaved=positions.interleaved)
            return made
        whole = rows if rows.ndim > 2 else rows.reshape((1,) * (3 - rows.ndim) + rows.shape)
        turn = cls(positions, {side: _consecutive(first, whole.shape[-2])}, rows.shape[-1])
        return turn.turned({side: whole})[side].reshape(rows.shape)

    def within(self, batch: tuple[slice, ...], rows: slice, keys: slice) -> Rotation:
        """How a part of the call is turned: at its positions, with the frequencies of all."""
        cuts = {"query": rows, "key": keys}
        places = {side: _cut(self.places[side], batch, cut) for side, cut in cuts.items()}
        part = Rotation(self.positions, places, self.width)
        vars(part)["frequencies"] = self.frequencies
        return part

    @cached_property
    def frequencies(self) -> NDArray[np.float64]:
        """Radians per position of each pair."""
        length = 0
        if self.positions.depends_on_length:
            length = math.floor(max(map(_largest, self.places.values()))) + 1
        return self.positions.frequencies_of(self.width, length)

    def turned(self, arrays: Mapping[str, Array], threads: int | None = None) -> dict[str, Array]:
        """Turned rows (…, H, L, D) of each side, each number rounded once to the array's dtype."""
        return self._turned(arrays, {}, threads, back=False)

    def back(
        self, arrays: Mapping[str, Array], dtypes: Mapping[str, np.dtype[Any]], threads: int | None
    ) -> dict[str, Array]:
        """Rows turned the other way, as gradients go, in place where that is possible.

        They are rounded to their dtype, and then to those given.
        """
        return self._turned(arrays, dtypes, threads, back=True)

    def _turned(
        self,
        arrays: Mapping[str, Array],
        dtypes: Mapping[str, np.dtype[Any]],
        threads: int | None,
        *,
        back: bool,
    ) -> dict[str, Array]:
        made, turns = {}, []
        for side, array in arrays.items():
            cosines, sines = self.table(side)
            rows = array
            if cosines.ndim == 2:  # what batch elements or heads share is turned once
                rows = rows[tuple(slice(0, None if by else 1) for by in rows.strides[:-2])]
            if not is_float(rows.dtype):
                rows = rows.astype(np.float64)
            elif not rows.dtype.isnative:
                rows = rows.astype(rows.dtype.newbyteorder("="))
            dtype = dtypes.get(side, rows.dtype)
            if rows.dtype == dtype and back and rows.flags.carray:
                result = rows
            else:
                result = np.empty(rows.shape, dtype)
                rows = rows if rows.dtype == dtype else np.ascontiguousarray(rows)
            made[side] = spread(result, array.shape)
            turns.append((rows, result, cosines, sines))
        turn_rows(turns, interleaved=self.positions.interleaved, back=back, threads=threads)
        return made

    def table(self, side: str) -> Tables:
        """Cosines and sines (…, rows, pairs)."""
        places, own, factor = self.places[side], self.frequencies, self.positions.factor
        if isinstance(places, range):
            return rotary.table(own, factor, places)
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
    positions = request.options.positions
    query, key = _numbers(_query_places(request)), _numbers(_key_places(request))
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


def _query_places(request: Request) -> Places:
    """The positions of the queries: consecutive ones, or (L,), or (…, L)."""
    given = request.options.positions.query_positions if request.options.positions else None
    rows = request.shape[-2]
    if given is not None:
        return given if given.ndim == 1 else np.broadcast_to(given, (*request.lead, rows))
    return as_places(request.query_positions)


def as_places(positions: NDArray[np.int64]) -> Places:
    """Positions (…, L); a range, if they are consecutive and the same in all batch elements."""
    first = int(positions.flat[0]) if positions.size else 0
    consecutive = range(first, first + positions.shape[-1])
    return consecutive if (positions == np.asarray(consecutive)).all() else positions


def _cut(places: Places, batch: tuple[slice, ...], rows: slice) -> Places:
    if isinstance(places, range) or places.ndim == 1:
        return places[rows]
    return np.asarray(places[(*batch, rows)])


def _key_places(request: Request) -> Places:
    given = request.options.positions.key_positions if request.options.positions else None
    rows = request.shape[-1]
    if given is not None:
        return given if given.ndim == 1 else np.broadcast_to(given, (*request.lead, rows))
    return range(rows)


def _consecutive(first: Any, rows: int) -> Places:
    """So many positions from `first` on, or from each number of it."""
    if np.ndim(first):
        return np.asarray(first)[..., None] + np.arange(rows)
    return range(first, first + rows)


def _largest(places: Places) -> float:
    if isinstance(places, range):
        return max(0, places.stop - 1)
    return float(places.max(initial=0))


def _numbers(places: Places) -> Array:
    return np.arange(places.start, places.stop) if isinstance(places, range) else places


def _turns_at_once(positions: Rotary, rows: Array) -> bool:
    """Whether there is nothing to convert, and no length to look at."""
    dtype = rows.dtype
    return dtype.kind == "f" and dtype.isnative and not positions.depends_on_length


# Fewer numbers than this are turned before another thread has begun.
_FEW = 2**14


def turn_rows(
    turns: Sequence[tuple[Array, Array, Array, Array]],
    *,
    interleaved: bool,
    back: bool = False,
    threads: int | None = None,
) -> None:
    """Turn rows (…, H, L, D), each number rounded once; `turns` has (rows, result, cosines, sines).

    Cosines and sines are float64, (L, pairs) or (…, L, pairs), and contiguous. So is the result, of
    the dtype of the rows, which it may be itself, or of a half type where these are float32 and
    contiguous.
    """
    if native.BUILT:
        if threads is None and sum(turn[0].size for turn in turns) < _FEW:
            threads = 1
        threads = min(threads or native.default_threads(), native.MOST_THREADS)
        native.module.rotate(turns, interleaved, back, threads, native.usable_target())
        return
    for turn in turns:
        _turn_in_numpy(*turn, interleaved, -1 if back else 1)


def _pair(array: Array, pairs: int, interleaved: bool) -> tuple[Array, Array]:
    """The first and the second features of all pairs, (…, pairs) each."""
    if interleaved:
        return array[..., 0 : 2 * pairs : 2], array[..., 1 : 2 * pairs : 2]
    return array[..., :pairs], array[..., pairs : 2 * pairs]


def _turn_in_numpy(
    array: Array, made: Array, cosines: Array, sines: Array, interleaved: bool, sign: int
) -> None:
    cosines, sines = cosines[..., None, :, :], sign * sines[..., None, :, :]
    pairs, rotate = cosines.shape[-1], OPERATIONS["rotate"].value
    assert rotate is not None
    made[..., 2 * pairs :] = array[..., 2 * pairs :]
    x, y = (one.astype(np.float64) for one in _pair(array, pairs, interleaved))
    first, second = _pair(made, pairs, interleaved)
    with np.errstate(all="ignore"):
        # A half type of float32 is rounded twice, as gradients are that are not turned.
        first[...] = round_once(rotate(x, cosines, y, -sines), array.dtype).astype(array.dtype)
        second[...] = round_once(rotate(y, cosines, x, sines), array.dtype).astype(array.dtype)


def _along_diagonals(request: Request, positions: Any) -> tuple[Array, Array | None]:
    """What is added to each logit, (…, H, P, S), and which of the P rows is that of each query.

    It depends on the difference of positions alone: the row of a position is that of the position
    before moved by one, so that all are a view of H·(P + S − 1) numbers. None: query i has row i.
    """
    dtype, places = request.accumulator, request.query_positions
    heads, rows, keys = request.shape[-3:]
    if 0 in (*places.shape, keys):
        return np.broadcast_to(np.zeros((), dtype), request.shape), None
    least = places.min(axis=-1)
    taken = places - least[..., None]
    span = int(taken.max()) + 1
    made = np.dtype(np.float64) if request.parts else dtype
    own, how = _own(positions, heads)
    if (least == least.flat[0]).all():
        first = int(least.flat[0])
        numbers = _between(own, how, 1 - span - first, keys - first, made)
    else:
        ahead = np.arange(1 - span, keys) - least[..., None, None]
        numbers = np.ascontiguousarray(_numbers_of(own, how, ahead), made)
    bias = spread(_view(numbers, span, keys), (*request.lead, heads, span, keys))
    return bias, None if (taken == np.arange(rows)).all() else taken


def _own(positions: Any, heads: int) -> tuple[Array, tuple[Any, ...]]:
    """Slopes (H,) of Alibi, or the table (H, buckets) of a relative bias and how it is read."""
    if isinstance(positions, Alibi):
        return positions.slopes_of(heads), ()
    return positions.table, (positions.bidirectional, positions.max_distance)


def _numbers_of(own: Array, how: tuple[Any, ...], ahead: Array) -> Array:
    """What is added, (…, H, n), where a key is so far ahead of its query, (n,) or (…, 1, n)."""
    if own.ndim == 1:
        return np.asarray(-own[:, None] * np.abs(ahead))
    heads, buckets = own.shape
    return np.asarray(own[np.arange(heads)[:, None], distances.buckets(ahead, buckets, *how)])


# Numbers of at most so many bytes are kept: those of a model's layers are all the same.
_KEPT_BYTES = 2**20


def _between(own: Array, how: tuple[Any, ...], low: int, high: int, dtype: np.dtype[Any]) -> Array:
    """The same, contiguous, for all differences from low to high."""
    small = len(own) * (high - low) * dtype.itemsize <= _KEPT_BYTES
    make = _kept if small else _kept.__wrapped__
    return make(own.tobytes(), own.dtype, own.shape, how, low, high, dtype)


@lru_cache(maxsize=8)
def _kept(
    own: bytes,
    own_dtype: np.dtype[Any],
    shape: tuple[int, ...],
    how: tuple[Any, ...],
    low: int,
    high: int,
    dtype: np.dtype[Any],
) -> Array:
    numbers = np.frombuffer(own, own_dtype).reshape(shape)
    return np.ascontiguousarray(_numbers_of(numbers, how, np.arange(low, high)), dtype)


def _view(numbers: Array, rows: int, keys: int) -> Array:
    """Numbers (…, H, rows + keys − 1) of differences, as (…, H, rows, keys)."""
    *outer, step = numbers.strides
    view: Array = np.ndarray(
        (*numbers.shape[:-1], rows, keys),
        numbers.dtype,
        numbers,
        (rows - 1) * step,
        (*outer, -step, step),
    )
    view.setflags(write=False)
    return view
