"""Numbers of tokens, one for all batch elements or one for each, and buffers that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arguments import as_integers, check_lead
from regard.boundary.arrays import Array
from regard.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    # One number for all batch elements, or one for each.
    Count = int | NDArray[np.int64]


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
