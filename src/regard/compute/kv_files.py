"""Caches on file: an NPZ archive of the rows and of the numbers of tokens.

Owns the format and its version. A file is read within stated limits or refused by one
`ProblemError` that names it. Must not know how a cache uses its rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from regard.boundary import npz, toml_json
from regard.boundary.arguments import FLOATS
from regard.boundary.arrays import Array, bfloat16
from regard.boundary.files import about, file_name, open_file, write_file
from regard.boundary.parse import shown
from regard.compute import quantized, spelling
from regard.compute.kv_buffers import CHUNK, alike, checked_positions
from regard.errors import OptionError, ProblemError

if TYPE_CHECKING:
    import os

    from regard.compute.kv_buffers import Count
    from regard.positions import Positions

FORMAT, VERSION = "regard.KVCache", 1
MAX_BYTES = 2**32 - 2**24  # an archive of the plain ZIP kind has fewer than 2^32

_NONE = -1  # where there is no capacity, or no bound of a window
_MOST = 2**62  # tokens


class Stored(NamedTuple):
    """What a file holds: the options of a cache and its content."""

    dtype: str | None
    capacity: int | None
    window: tuple[int | None, int | None] | None
    buffers: tuple[Array, Array]
    start: Count
    needed: Count
    end: Count
    positions: Positions | None = None


def save(path: str | os.PathLike[str], stored: Stored, *, force: bool) -> None:
    """Write a file in one step."""
    place = file_name(path)
    lead = stored.buffers[0].shape[:-3]
    arrays: dict[str, Any] = {
        "format": np.array(FORMAT),
        "version": np.array(VERSION),
        "dtype": np.array(stored.dtype or ""),
        "capacity": np.array(_NONE if stored.capacity is None else stored.capacity),
    }
    if stored.window is not None:
        sides = [_NONE if side is None else min(side, _MOST) for side in stored.window]
        arrays["window"] = np.array(sides)
    if stored.positions is not None:  # as a problem's file spells them
        with about(place):
            spelled = {"positions": spelling.write(stored.positions)}
            arrays["positions"] = np.array(toml_json.spell(spelled, "json"))
    for name in ("start", "needed", "end"):
        arrays[name] = np.full(lead, getattr(stored, name), np.int64)
    for name, rows in zip(("key", "value"), stored.buffers, strict=True):
        arrays[f"{name}_dtype"] = np.array(rows.dtype.name)
        if rows.dtype == np.int8:
            arrays[name], arrays[f"{name}_scale"] = quantized.parts(rows)
        else:
            arrays[name] = rows.view(np.uint16) if rows.dtype.name == "bfloat16" else rows
    size = sum(array.nbytes for array in arrays.values())
    with about(place):
        if size > MAX_BYTES:
            raise ProblemError(f"the cache has {size} bytes; a file holds at most {MAX_BYTES}")
    with write_file(place, force=force) as file, about(place):
        npz.write_arrays(file, arrays)


def load(path: str | os.PathLike[str]) -> Stored:
    """Read a file, and check everything that is in it."""
    place = file_name(path)
    with about(place):
        with open_file(place, MAX_BYTES + npz.FREE_BYTES) as file:
            arrays = npz.read_arrays(file, MAX_BYTES, MAX_BYTES)
        if _text(arrays, "format") != FORMAT:
            raise ProblemError("is not the file of a KVCache")
        version = int(_integers(arrays, "version", ()))
        if version != VERSION:
            raise ProblemError(
                f"has version {version} of the format; this regard reads version {VERSION}"
            )
        capacity, dtype = int(_integers(arrays, "capacity", ())), _text(arrays, "dtype")
        if dtype not in ("", "int8", *FLOATS):
            raise ProblemError(f"dtype is {shown(dtype)}")
        window = None
        if "window" in arrays:
            left, right = (int(side) for side in _integers(arrays, "window", (2,)))
            window = (None if left == _NONE else left, None if right == _NONE else right)
        positions = None
        if "positions" in arrays:
            spelled = toml_json.parse(_text(arrays, "positions"), "json", "positions")
            if not isinstance(spelled, dict) or spelled.keys() != {"positions"}:
                raise ProblemError("positions is not a JSON object that holds positions only")
            positions = _positions(spelled["positions"])
        key, value = _rows(arrays, "key"), _rows(arrays, "value")
        if key.ndim < 2 or key.shape[:-1] != value.shape[:-1]:
            raise ProblemError(f"key has shape {key.shape} and value {value.shape}")
        if dtype and {key.dtype.name, value.dtype.name} != {dtype}:
            raise ProblemError(
                f"dtype is {dtype} but key has {key.dtype.name}, value {value.dtype.name}"
            )
        lead, slots = key.shape[:-3], key.shape[-2]
        start, needed, end = (_integers(arrays, name, lead) for name in ("start", "needed", "end"))
        if arrays:
            raise ProblemError(f"{shown(next(iter(arrays)))} has no place in it")
        dropped = window is not None and window[0] is not None
        if (
            (start % CHUNK).any()
            or not ((start >= 0) & (start <= needed) & (needed <= end)).all()
            or (end - start > slots).any()
            or (needed.any() and not dropped)
        ):
            raise ProblemError("start, needed and end do not fit the keys that are there")
        if capacity != _NONE and not slots <= capacity:
            raise ProblemError(f"capacity is {capacity} but there are {slots} keys")
        counts = (alike(start), alike(needed), alike(end))
        kept = None if capacity == _NONE else capacity
        return Stored(dtype or None, kept, window, (key, value), *counts, positions)


def _positions(spelled: Any) -> Positions | None:
    try:
        return checked_positions(spelling.READ["positions"]("positions", spelled))
    except OptionError as error:
        raise ProblemError(str(error)) from None


def _take(arrays: dict[str, Array], name: str) -> Array:
    if name not in arrays:
        raise ProblemError(f"{name} is missing")
    return arrays.pop(name)


def _text(arrays: dict[str, Array], name: str) -> str:
    array = _take(arrays, name)
    if array.dtype.kind != "U" or array.ndim:
        raise ProblemError(f"{name} must be text, not an array of {array.dtype}")
    return str(array)


def _integers(arrays: dict[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    array = _take(arrays, name)
    if array.dtype.kind not in "iu" or array.shape != shape:
        raise ProblemError(
            f"{name} must be integers of shape {shape}, not {array.dtype} of {array.shape}"
        )
    if array.size and not (array.min() >= _NONE and array.max() <= _MOST):
        raise ProblemError(f"{name} has a value that is not a number of tokens")
    return array.astype(np.int64)


def _rows(arrays: dict[str, Array], name: str) -> Array:
    """The rows of a buffer."""
    dtype, array = _text(arrays, f"{name}_dtype"), _take(arrays, name)
    stored = "uint16" if dtype == "bfloat16" else dtype
    if dtype not in ("int8", *FLOATS) or array.dtype.name != stored:
        raise ProblemError(f"{name} is an array of {array.dtype}, said to be {shown(dtype)}")
    if dtype != "int8":
        whole = np.array(array, array.dtype.newbyteorder("="), order="C")
        return whole.view(bfloat16("the cache")) if dtype == "bfloat16" else whole
    scale = _take(arrays, f"{name}_scale")
    if scale.dtype != np.float32 or scale.shape != (*array.shape[:-1], 1):
        raise ProblemError(f"{name}_scale must be float32, one for each row of {name}")
    return quantized.joined(array, scale)
