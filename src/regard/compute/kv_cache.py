"""A cache of keys and values for decoding, and attention over its content.

Owns the buffers, the length of each batch element and the position of its first slot. Must not know
how attention on views of the buffers is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np

from regard.boundary import absent, answering, taking
from regard.boundary.arguments import as_int, read_array
from regard.boundary.arrays import Array, lend
from regard.compute import dispatch, native, quantized
from regard.compute.kv_buffers import (
    CHUNK,
    alike,
    as_counts,
    as_dtype,
    as_floats,
    as_rows,
    check_lengths,
    check_pair,
    checked_positions,
    most_of,
    move,
    numbers_of,
    plain_rows,
    rules_of,
    shown,
    tokens_of,
    with_room,
)
from regard.compute.options import BY_POSITION, DEFAULTS, DOT, SOFTMAX, Options
from regard.compute.positioned import Rotation
from regard.compute.request import check_window
from regard.errors import OptionError, naming_shapes
from regard.positions import Rotary
from regard.rules.visibility import Placed

if TYPE_CHECKING:
    import os

    from numpy.typing import NDArray

    from regard.compute.kv_buffers import Count
    from regard.compute.option_types import (
        ArrayIn,
        Ints,
        Numbers,
        PlainStep,
        StepForBoth,
        StepForLse,
        StepForWeights,
        T,
    )
    from regard.compute.results import OutputLse, OutputWeights, OutputWeightsLse


class KVCache:
    """A cache of the keys and values of all tokens so far, for decoding step by step.

    Parameters
    ----------
    capacity : int, optional
        Maximum number of keys, allocated once. If not given, the buffers double when they are
        full, so that n keys cost fewer than 2·n copies.
    window : (left, right), optional
        As for `attention`, for every call. Keys that no later query can see are dropped, 256 at a
        time: at most left + 255 earlier keys are kept. Positions still count from the first token.
    dtype : {None, "bfloat16", "float16", "float32", "float64", "int8"}, optional
        What keys and values are converted to when they are appended. If not given, the first
        `append` decides, and nothing is converted. int8 has one float32 scale per token and head;
        docs/cache.md has its error bound.
    positions : object of `regard.positions`, optional
        As for `attention`. `Rotary` turns each key once, when it is appended, to the place of its
        token; `keys` are turned ones.

    Raises
    ------
    OptionError, DtypeError
        If capacity, window or dtype makes no sense.

    Notes
    -----
    The first `append` sets shapes and dtypes. The buffers are (…, G, capacity, D) and
    (…, G, capacity, E); attention reads them without a copy. With the fused kernel, decoding token
    by token gives the same bytes as one call over the whole text.

    Examples
    --------
    >>> import numpy as np, regard
    >>> query, key, value = np.random.default_rng(0).normal(size=(3, 2, 5, 8))  # H, L, D
    >>> cache = KVCache()
    >>> for t in range(5):
    ...     cache.append(key[:, t : t + 1], value[:, t : t + 1])
    ...     last = cache.attend(query[:, t : t + 1])
    >>> bool(np.allclose(last[:, 0], regard.attention(query, key, value, causal=True)[:, -1]))
    True
    >>> cache
    KVCache(keys (2, 5, 8), values (2, 5, 8), float64, capacity 256, 65,536 bytes)
    """

    @answering
    def __init__(
        self,
        *,
        capacity: int | None = None,
        window: tuple[int | None, int | None] | None = None,
        dtype: Any = None,
        positions: Any = None,
    ) -> None:
        otherwise = " (leave it out to let the room grow)"
        self._fixed = None if capacity is None else as_int("capacity", capacity, 1, otherwise)
        self._window = None if window is None else check_window(window)
        self._dtype = as_dtype(dtype)
        self._positions = None if positions is None else checked_positions(positions)
        self._frequencies: NDArray[np.float64] | None = None  # of rows that are `_turns` wide
        self._turns = 0
        self._buffers: tuple[Array, Array] | None = None
        self._end: Count = 0  # how many keys were appended
        self._start: Count = 0  # the position of the first slot
        self._needed: Count = 0  # the first position that a query may still see

    # --- filling -------------------------------------------------------------------------------

    @answering
    def append(self, key: ArrayIn, value: ArrayIn, *, lengths: Ints | None = None) -> None:
        """Append the keys and values of the next tokens; an error leaves the cache unchanged.

        Parameters
        ----------
        key : array_like, (…, G, T, D)
            Or (T, D) without heads. Leading axes, heads and width as in the first call, and the
            dtype too, unless the cache has a `dtype`.
        value : array_like, (…, G, T, E)
            As many as keys.
        lengths : (…) ints, optional
            How many of the T tokens each batch element has; the rest is padding, not stored.

        Raises
        ------
        ShapeError
            If the arrays do not fit each other or the cache.
        OptionError
            If they exceed the capacity, or a finite number the range of the cache's `dtype`.
        DtypeError
            If their dtype differs from that of the first call, and the cache has no `dtype`.
        """
        fits = None if lengths is not None else plain_rows(self._buffers, key, value)
        if fits is not None and self._buffers is not None:
            # The usual call of a model: one more token, like those before, for which there is room.
            more = fits[0].shape[-2]
            if most_of(self._end - self._start + more) <= self._buffers[0].shape[-2]:
                turned = self._turned(fits[0], "key", self._end)
                self._take([turned, fits[1]], self._buffers, self._start, more)
                return
        arrays = {"key": as_floats("key", key), "value": as_floats("value", value)}
        with naming_shapes(**arrays):
            check_pair(arrays, self._buffers or (), converts=self._dtype is not None)
            tokens = arrays["key"].shape[-2]
            count = check_lengths(lengths, tokens, arrays["key"].shape[:-3])
            arrays["key"] = self._turned(arrays["key"], "key", self._end)
            rows = [as_rows(name, array, self._dtype, count) for name, array in arrays.items()]
            buffers, start = self._with_room(rows, count)
        self._take(rows, buffers, start, count)

    @answering
    def truncate(self, length: Ints) -> None:
        """Forget all but the first `length` tokens.

        Parameters
        ----------
        length : int or (…) ints
            At most the current length. With a window, the next query must not see keys that were
            dropped; removing the tokens of the last `append` is always possible.
        """
        wanted = as_counts("length", length, self._lead)
        if np.any(wanted < 0) or np.any(wanted > self._end):
            raise OptionError(
                f"length is {shown(wanted)} but the cache has {shown(self._end)} tokens; "
                "it can only become shorter"
            )
        if self._left is not None and np.any(np.maximum(0, wanted - self._left) < self._needed):
            raise OptionError(
                f"length is {shown(wanted)}, where a window of {self._left} keys to the left "
                f"needs keys that were dropped: those from {shown(self._needed)} on are kept"
            )
        self._end = wanted

    def reset(self) -> None:
        """Forget all tokens; shapes, dtypes and memory stay."""
        self._end = self._start = self._needed = 0

    # --- attending -----------------------------------------------------------------------------

    @overload
    def attend(self, query: Numbers, **options: Unpack[PlainStep[Array]]) -> Array: ...
    @overload
    def attend(
        self, query: Numbers, **options: Unpack[StepForWeights[Array]]
    ) -> OutputWeights[Array]: ...
    @overload
    def attend(self, query: Numbers, **options: Unpack[StepForLse[Array]]) -> OutputLse[Array]: ...
    @overload
    def attend(
        self, query: Numbers, **options: Unpack[StepForBoth[Array]]
    ) -> OutputWeightsLse[Array]: ...
    @overload
    def attend(self, query: T, **options: Unpack[PlainStep[T]]) -> T: ...
    @overload
    def attend(self, query: T, **options: Unpack[StepForWeights[T]]) -> OutputWeights[T]: ...
    @overload
    def attend(self, query: T, **options: Unpack[StepForLse[T]]) -> OutputLse[T]: ...
    @overload
    def attend(self, query: T, **options: Unpack[StepForBoth[T]]) -> OutputWeightsLse[T]: ...
    @answering
    @taking(DEFAULTS, "offset", "positions")
    def attend(
        self, query: Any, *, lengths: Any = None, causal: bool = True, **options: Any
    ) -> Any:
        """Attention of the last tokens' queries over the cache.

        Parameters
        ----------
        query : array_like, (…, H, L, D)
            Queries of the last L tokens, whose keys are already appended; H is a multiple of G.
            Also (L, D) or (D,).
        lengths : (…) ints, optional
            How many of the L queries each batch element has; they are its last tokens. The rest
            is padding and gives 0.
        causal : bool
            No query sees a later token. False for keys that are not earlier tokens, such as an
            encoder's; there may then be more queries than keys.
        mask, bias
            As for `attention`, broadcastable to (…, H, L, S), where S runs along `keys`.
        window
            As for `attention`, beside the cache's own.
        scale, softcap, sink, precision, return_weights, return_lse, out, kernel, threads
            As for `attention`.
        score, normalize
            As for `attention`. What a score makes of keys, as Cosine does, it makes at each call of
            all of them; General makes new queries alone.

        Returns
        -------
        ndarray, (…, H, L, E), or a named tuple (output[, weights][, lse])
            As `attention` returns it: arrays of another library, if query or out is one.

        Raises
        ------
        ShapeError, OptionError, DtypeError
            As for `attention`; also if there are more queries than tokens, or if the window of a
            query includes keys that were dropped.
        """
        if self._buffers is None:
            raise OptionError("the cache was never appended to; append the keys and values first")
        held = self._end - self._start
        slots = most_of(held)
        rows = self._buffers[0][..., :slots, :], self._buffers[1][..., :slots, :]
        in_bytes = rows[0].dtype == np.int8
        key, value = map(numbers_of, rows) if in_bytes else rows
        (query, out), give_back = lend(query=query, out=options.pop("out", None))
        if type(query) is not np.ndarray:
            query = read_array("query", query)
        with naming_shapes(query=query, key=key, value=value):
            queries = 1 if query.ndim < 2 else query.shape[-2]
            count = check_lengths(lengths, queries, key.shape[:-3])
            position = self._end - count
            if queries == 1 and isinstance(causal, bool):
                causal = False  # nothing is later than the last token
            rules = rules_of(self._window, options.pop("mask", None), held, count, queries)
            positioned = options.get("window") is not None or (
                rules is not None and rules.uses_position
            )
            if causal or positioned:
                self._check_positions(position, count)
            placed = self._positions
            if isinstance(placed, Rotary):
                query, placed = self._turned(query, "query", position), None
            aligned = rules is None and not positioned and (not causal or position == 0)
            offset = None
            if not aligned or placed is not None:  # the cache knows where its tokens are
                first = np.asarray(position - self._start)[..., None]
                offset = Placed(first + np.arange(queries))
            call = Options(
                mask=rules, causal=causal, offset=offset, out=out, positions=placed, **options
            )
            result = None
            if placed is None and call.score is DOT and call.normalize is SOFTMAX:
                fast = native.fast_path_of_bytes if in_bytes else native.fast_path
                result = fast(query, *rows, *call[:BY_POSITION])
            if result is None:
                result = dispatch.run_arrays(query, key, value, call, quantized=in_bytes)
        return give_back(result)

    # --- files ---------------------------------------------------------------------------------

    @answering
    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the cache to a file, in NumPy's NPZ format; `load` gives it back.

        Parameters
        ----------
        path : str or path
            The file; written under another name first, so that it is there as a whole or not at
            all.
        force : bool
            Replace a file that is there already.

        Raises
        ------
        ProblemError
            If the file cannot be written, the cache has more than 4 GiB, or its positions are of a
            class of your own.
        OptionError
            If the cache was never appended to.
        """
        from regard.compute import kv_files

        if self._buffers is None:
            raise OptionError("the cache was never appended to; there is nothing to save")
        held = self._end - self._start
        key, value = (tokens_of(buffer, held) for buffer in self._buffers)
        window = None if self._window is None else (self._window.left, self._window.right)
        dtype = None if self._dtype is None else self._dtype.name
        counts = self._start, self._needed, self._end
        stored = kv_files.Stored(dtype, self._fixed, window, (key, value), *counts, self._positions)
        kv_files.save(path, stored, force=force)

    @classmethod
    @answering
    def load(cls, path: str | os.PathLike[str]) -> KVCache:
        """Read a cache from a file that `save` wrote.

        Raises
        ------
        ProblemError
            If the file cannot be read, is cut off or damaged, is of another version, or is not
            the file of a cache: one line that names the file.

        Examples
        --------
        >>> import os, tempfile, numpy as np
        >>> cache = KVCache(dtype="int8")
        >>> cache.append(np.ones((2, 3, 4)), np.ones((2, 3, 4)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache.save(os.path.join(folder, "text.npz"))
        ...     KVCache.load(os.path.join(folder, "text.npz"))
        KVCache(keys (2, 3, 4), values (2, 3, 4), int8, capacity 3, 96 bytes)
        """
        from regard.compute import kv_files

        stored = kv_files.load(path)
        cache = cls(
            capacity=stored.capacity,
            window=stored.window,
            dtype=stored.dtype,
            positions=stored.positions,
        )
        cache._buffers = stored.buffers
        cache._start, cache._needed, cache._end = stored.start, stored.needed, stored.end
        return cache

    # --- looking -------------------------------------------------------------------------------

    def __copy__(self) -> KVCache:
        """An independent copy."""
        other = KVCache.__new__(KVCache)
        other.__dict__.update(self.__dict__)
        if self._buffers is not None:
            key, value = self._buffers
            other._buffers = key.copy(), value.copy()
        return other

    if not TYPE_CHECKING:  # a checker names what is missing by itself
        __getattr__ = absent

    def __len__(self) -> int:
        """The number of tokens of the longest batch element."""
        return most_of(self._end)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of tokens of each batch element, (…)."""
        return np.full(self._lead, self._end, np.int64)

    @property
    def start(self) -> NDArray[np.int64]:
        """The position of the first key in `keys`, (…); 0 unless a window dropped keys."""
        return np.full(self._lead, self._start, np.int64)

    @property
    def keys(self) -> Array:
        """The keys, (…, G, S, D): a read-only view, undefined beyond `lengths`.

        For an int8 cache a copy in float32: the numbers that attention reads.
        """
        return self._view(0)

    @property
    def values(self) -> Array:
        """The values, (…, G, S, E), as `keys`."""
        return self._view(1)

    @property
    def capacity(self) -> int:
        """The number of keys that fit now."""
        return self._fixed or (0 if self._buffers is None else self._buffers[0].shape[-2])

    @property
    def nbytes(self) -> int:
        """The memory of both buffers."""
        return sum(buffer.nbytes for buffer in self._buffers or ())

    def __repr__(self) -> str:
        window = "" if self._window is None else f", window {self._window.left, self._window.right}"
        placed = "" if self._positions is None else f", {self._positions}"
        if self._buffers is None:
            room = "" if self._fixed is None else f", capacity {self._fixed}"
            dtype = "" if self._dtype is None else f", {self._dtype.name}"
            return f"KVCache(empty{dtype}{room}{window}{placed})"
        dtypes = dict.fromkeys(str(buffer.dtype) for buffer in self._buffers)
        ends = "" if isinstance(self._end, int) else f", lengths {shown(self._end)}"
        return (
            f"KVCache(keys {self.keys.shape}, values {self.values.shape}, {'/'.join(dtypes)}"
            f"{ends}, capacity {self.capacity}{window}{placed}, {self.nbytes:,} bytes)"
        )

    # --- inside --------------------------------------------------------------------------------

    def _turned(self, rows: Array, side: str, first: Count) -> Array:
        """Queries or keys as the tokens from `first` on have them."""
        if not isinstance(self._positions, Rotary):
            return rows
        width = rows.shape[-1]
        if self._frequencies is None or width != self._turns:
            self._positions.fits(width, (0, 0, 0))
            self._turns, self._frequencies = width, self._positions.frequencies_of(width, 0)
        return Rotation.of_tokens(self._positions, rows, side, first, self._frequencies)

    @property
    def _lead(self) -> tuple[int, ...]:
        return () if self._buffers is None else self._buffers[0].shape[:-3]

    @property
    def _left(self) -> int | None:
        return None if self._window is None else self._window.left

    def _view(self, which: int) -> Array:
        if self._buffers is None:
            raise OptionError("the cache was never appended to, so it has no shape yet")
        view = self._buffers[which][..., : most_of(self._end - self._start), :]
        if view.dtype == np.int8:
            view = quantized.floats(view)
        view.flags.writeable = False
        return view

    def _take(
        self, rows: list[Array], buffers: tuple[Array, Array], start: Count, count: Count
    ) -> None:
        """Put rows into buffers that have room for them; from here on nothing can fail."""
        for buffer, array in zip(buffers, rows, strict=True):
            move(array, 0, buffer, self._end - start, count)
        needed, end = self._needed, alike(self._end + count)
        if self._left is not None:
            needed = alike(np.maximum(0, self._end - self._left))
        self._buffers, self._start, self._needed, self._end = buffers, start, needed, end

    def _with_room(self, rows: list[Array], count: Count) -> tuple[tuple[Array, Array], Count]:
        """Buffers with room for so many more, and the position of their first slot."""
        held = self._end - self._start
        if self._buffers is not None and most_of(held + count) <= self._buffers[0].shape[-2]:
            return self._buffers, self._start
        gone: Count = 0
        if self._left is not None:
            seen = np.maximum(0, self._end - self._left)  # by the first of the new tokens
            gone = alike(np.maximum(0, (seen - self._start) // CHUNK * CHUNK))
        buffers = with_room(self._buffers, rows, (gone, held, count), self._fixed)
        return buffers, alike(self._start + gone)

    def _check_positions(self, position: Count, count: Count) -> None:
        """Check that every query is a token of the cache, and that its window was not dropped."""
        if np.any(position < 0):
            raise OptionError(
                f"there are {shown(count)} queries but the cache has {shown(self._end)} "
                "tokens; append their keys first, or pass causal=False if they are not earlier "
                "tokens"
            )
        if self._left is None:
            return
        first = np.maximum(0, position - self._left)
        if np.any((first < self._needed) & (np.asarray(count) > 0)):
            raise OptionError(
                f"the first of {shown(count)} queries sees keys from {shown(first)} on but only "
                f"those from {shown(self._needed)} on are kept: with a window, attend after each "
                "append, to its tokens alone"
            )
