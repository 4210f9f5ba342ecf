"""Buffers of keys or values, and numbers of tokens, one for all batch elements or one for each.

Owns what a buffer holds: floats, or rows of `quantized`; and which keys and queries are padding.
Must not know how attention is called.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import (
    FLOATS,
    as_array,
    as_float_array,
    as_integers,
    check_lead,
    round_once,
)
from regard.boundary.arrays import Array, bfloat16
from regard.compute import quantized
from regard.errors import DtypeError, OptionError, ShapeError, safe_text
from regard.masks import Lengths
from regard.positions import Absolute, Positions, Rotary, as_positions
from regard.rules.visibility import Boolean, Mask, all_of, as_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # One number for all batch elements, or one for each.
    Count = int | NDArray[np.int64]

# Keys outside every window are dropped in multiples of this. The fused kernel cuts keys into such
# chunks from key 0, so every key stays in its chunk and every row keeps its bytes.
CHUNK = 256


def check_lengths(lengths: Any, most: int, lead: tuple[int, ...]) -> Count:
    """How many of `most` tokens each batch element has."""
    if lengths is None:
        return most
    counts = as_counts("lengths", lengths, lead)
    if np.any(np.asarray(counts) < 0) or np.any(np.asarray(counts) > most):
        raise OptionError(
            f"lengths must lie between 0 and the {most} tokens, but they are {shown(counts)}"
        )
    return counts


def as_counts(name: str, value: Any, lead: tuple[int, ...]) -> Count:
    """An int, or one for each batch element."""
    array = as_integers(name, value, "an int, or one int for each batch element")
    check_lead(name, array.shape, lead)
    return alike(np.broadcast_to(array, lead))


def alike(counts: Any) -> Count:
    """One int if all counts are equal, else the array."""
    if isinstance(counts, int):
        return counts
    array = np.asarray(counts)
    if array.size == 0:
        return 0
    first = int(array.flat[0])
    return first if (array == first).all() else array


def most_of(counts: Count) -> int:
    """The largest of the counts."""
    return counts if isinstance(counts, int) else int(counts.max())


def shown(counts: Any) -> str:
    """Counts for a message."""
    if isinstance(counts, int):
        return str(counts)
    array = np.asarray(counts)
    least, most = int(array.min()), int(array.max())
    return str(most) if least == most else f"{least} to {most}"


# --- buffers -------------------------------------------------------------------------------------


def as_dtype(dtype: Any) -> np.dtype[Any] | None:
    """The dtype to convert to; None: as appended."""
    if dtype is None:
        return None
    if isinstance(dtype, str) and dtype == "bfloat16":
        dtype = bfloat16("dtype")
    known: np.dtype[Any] = np.dtype(object)
    with suppress(TypeError):
        known = np.dtype(dtype)
    if known.name not in (*FLOATS, "int8"):
        raise DtypeError(
            f"dtype must be one of {', '.join(FLOATS)}, int8 (None: as they are appended), not "
            f"{safe_text(repr(dtype), 60)}"
        )
    return known.newbyteorder("=")


def as_floats(name: str, value: Any) -> Array:
    """An array of floats in native byte order."""
    array = as_array(name, value)
    if array.dtype.kind in "biu":
        raise DtypeError(
            f"{name} has dtype {array.dtype}; a cache holds one of {', '.join(FLOATS)}"
        )
    return as_float_array(name, array)


def check_pair(arrays: dict[str, Array], buffers: tuple[Array, ...], *, converts: bool) -> None:
    """Check that key and value fit each other and the buffers."""
    key, value = arrays["key"], arrays["value"]
    for name, array in arrays.items():
        if array.ndim < 2:
            raise ShapeError(
                f"{name} has {array.ndim} axes but needs at least 2: (tokens, width) or "
                "(…, G, tokens, width)"
            )
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError(
            f"key has shape {key.shape} but value has {value.shape}; all axes but the last "
            "must match"
        )
    for name, array, buffer in zip(arrays, arrays.values(), buffers, strict=False):
        if not converts and array.dtype != buffer.dtype:
            raise DtypeError(
                f"{name} has dtype {array.dtype} but this cache holds {buffer.dtype}; "
                f"pass {name}.astype({buffer.dtype.name!r}), or start a new cache with "
                f"dtype={buffer.dtype.name!r}, which converts"
            )
        held = numbers_of(buffer)
        if array.shape[:-2] != held.shape[:-2] or array.shape[-1] != held.shape[-1]:
            here, there = ((*a.shape[:-2], "T", a.shape[-1]) for a in (array, held))
            raise ShapeError(
                f"{name} has shape {_axes(here)} but this cache holds {_axes(there)}; "
                "batch, heads and width must match, T may be any number of tokens"
            )


def _axes(axes: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, axes))})"


def plain_rows(
    buffers: tuple[Array, Array] | None, key: Any, value: Any
) -> tuple[Array, Array] | None:
    """Key and value, if they are plain arrays that the buffers take without a change."""
    for array, buffer in zip((key, value), buffers or (None, None), strict=True):
        if type(array) is not np.ndarray or buffer is None or array.ndim != buffer.ndim:
            return None
        if array.dtype != buffer.dtype or buffer.dtype.kind != "f":
            return None
        if array.shape[:-2] != buffer.shape[:-2] or array.shape[-1] != buffer.shape[-1]:
            return None
    return (key, value) if key.shape[-2] == value.shape[-2] else None


def as_rows(name: str, array: Array, dtype: np.dtype[Any] | None, count: Count) -> Array:
    """What a buffer of this dtype holds of an array; `count` tokens of each batch element."""
    if dtype is None or array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        if dtype == np.int8:
            rows, nearest = quantized.quantized(array), array.astype(np.float32, copy=False)
        else:
            rows = nearest = round_once(array, dtype).astype(dtype)
    lost = np.isfinite(array) & ~np.isfinite(nearest)
    if lost.any():
        tokens = np.arange(array.shape[-2]) < np.asarray(count)[..., None]
        lost &= tokens.reshape(*tokens.shape[:-1], *(1,) * min(1, array.ndim - 2), -1, 1)
    if lost.any():
        at = tuple(int(axis[0]) for axis in np.nonzero(lost))
        raise OptionError(
            f"{name} has {array[at]} at {at}, which is beyond the range of {dtype.name}; "
            "scale it down, or use a cache of a wider dtype"
        )
    return rows


def numbers_of(rows: Array) -> Array:
    """A view of the numbers of rows, without scales."""
    return quantized.parts(rows)[0] if rows.dtype == np.int8 else rows


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A buffer with any content; a MemoryError if there is no memory for it."""
    try:
        return np.empty(shape, dtype)
    except ValueError:  # more bytes than a number can say
        raise MemoryError(f"there is no memory for a cache of shape {shape}, {dtype}") from None


def move(source: Array, begin: Count, target: Array, at: Count, count: Count) -> None:
    """Copy `count` tokens of each batch element, from position `begin` to position `at`."""
    if isinstance(begin, int) and isinstance(at, int) and isinstance(count, int):
        target[..., at : at + count, :] = source[..., begin : begin + count, :]
        return
    lead = target.shape[:-3]
    begins, ats, counts = (np.broadcast_to(numbers, lead) for numbers in (begin, at, count))
    for batch in np.ndindex(*lead):
        first, to, number = int(begins[batch]), int(ats[batch]), int(counts[batch])
        target[batch][..., to : to + number, :] = source[batch][..., first : first + number, :]


def tokens_of(rows: Array, count: Count) -> Array:
    """The first `count` tokens of each batch element, and zeros up to the longest."""
    most = most_of(count)
    if isinstance(count, int):
        return rows[..., :most, :]
    whole = np.zeros_like(rows[..., :most, :])
    move(rows, 0, whole, 0, count)
    return whole


def checked_positions(positions: Any) -> Positions | None:
    """Positions that a cache can have: it turns a key once, for good."""
    found = as_positions(positions)
    if isinstance(found, Absolute):
        found.fits(0, ())
    if isinstance(found, Rotary):
        if found.query_positions is not None or found.key_positions is not None:
            raise OptionError(
                "positions has query_positions or key_positions, but a cache counts its tokens; "
                "leave them out"
            )
        if found.depends_on_length:
            raise OptionError(
                "positions has a scaling that turns the first tokens of a longer text by other "
                "angles, but a cache turns each key once; pass the frequencies= of one length"
            )
    return found


def with_room(
    old: tuple[Array, Array] | None,
    rows: list[Array],
    counts: tuple[Count, Count, Count],
    fixed: int | None,
) -> tuple[Array, Array]:
    """New buffers for the tokens of the old ones and more rows; `fixed` is their capacity.

    `counts` are the tokens to leave out at the beginning, those that there are, and those to come.
    """
    gone, held, count = counts
    needed = most_of(held - gone + count)
    slots = fixed
    if slots is None:
        # Twice as much as there was, unless keys that went away made enough room.
        before = 0 if old is None else old[0].shape[-2]
        slots = before if needed <= before else max(needed, 2 * before)
        slots = -(-max(slots, 1) // CHUNK) * CHUNK
    if needed > slots:
        raise OptionError(
            f"the cache keeps {shown(held - gone)} keys and {shown(count)} more make {needed}, but "
            f"its capacity is {slots}; give it a larger capacity, or none, or truncate or reset it"
        )
    key, value = (empty((*x.shape[:-2], slots, x.shape[-1]), x.dtype) for x in rows)
    for before_it, new in zip(old or (), (key, value), strict=False):
        move(before_it, gone, new, 0, held - gone)
    return key, value


def rules_of(
    window: Mask | None, mask: Any, held: Count, count: Count, queries: int
) -> Mask | None:
    """The caller's mask, the cache's window, and padding among keys and among queries."""
    rules: list[Mask] = [] if window is None else [window]
    if not isinstance(held, int):
        rules.append(Lengths(held))
    if not isinstance(count, int) or count < queries:
        # (…, 1, L, 1): rows are the last axis but one
        there = np.arange(queries) < np.asarray(count)[..., None]
        shape = there.shape[:-1]
        rules.append(Boolean(there.reshape(*shape, *((1,) if shape else ()), queries, 1)))
    if mask is not None:
        rules.append(as_mask(mask))
    return all_of(rules)
