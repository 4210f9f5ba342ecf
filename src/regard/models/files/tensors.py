"""A tensor as its file stores it, and its numbers: views of the file, converted where needed.

Owns the types of numbers that weights are stored in. Must not know how a header is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.boundary.files import about, map_file
from regard.errors import ProblemError, safe_text

MAX_FILE_BYTES = 2**36
_FLOATS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4", "F64": "<f8"}
# Quantised types of GGUF files: the numbers of a block, and its bytes.
BLOCKS = {
    **{"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34)},
    **{"Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)},
}
# Bytes of a quantised tensor that are converted at once.
_AT_ONCE = 2**17
# What a product reads without a change, and how many bytes a number has, about.
NARROW = {"F16": 2, "BF16": 2, "Q8_0": 1}


@dataclass(frozen=True)
class Tensor:
    """One tensor as its file declares it, checked; `start` and `end` are bytes of the file."""

    name: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_tensor(tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    """The numbers of a tensor, as float32 or float64; of that type already, a view of the file."""
    with about(tensor.path):
        stored = _bytes_of(tensor)
        if tensor.dtype in BLOCKS:
            return _dequantized(stored, tensor, dtype)
        numbers = stored.view(_FLOATS[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype == "BF16":  # the upper half of a float32
            wide = numbers.astype("<u4")
            wide <<= 16
            numbers = wide.view("<f4")
        with np.errstate(over="ignore"):
            return np.require(numbers, dtype, "A")


def read_rows(tensor: Tensor) -> Array:
    """A matrix of one of the `NARROW` types, in its own numbers: a view of the file."""
    with about(tensor.path):
        kind = "i1" if tensor.dtype == "Q8_0" else _FLOATS[tensor.dtype]
        return _bytes_of(tensor).view(kind).reshape(tensor.shape[0], -1)


def _bytes_of(tensor: Tensor) -> Array:
    name = safe_text(tensor.name, 120)
    if tensor.dtype not in _FLOATS and tensor.dtype not in BLOCKS:
        raise ProblemError(
            f"{name} has the dtype {tensor.dtype}, but weights are {', '.join(_FLOATS)}"
        )
    stored = np.frombuffer(
        map_file(tensor.path, tensor.start, tensor.end, MAX_FILE_BYTES), np.uint8
    )
    size = tensor.end - tensor.start
    if stored.size != size:
        raise ProblemError(f"{name} is cut off: {stored.size} bytes of {size} are there")
    return stored


def _dequantized(stored: Array, tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    numbers, size = BLOCKS[tensor.dtype]
    blocks = stored.reshape(-1, size)
    made = np.empty((len(blocks), numbers), dtype)
    step = max(1, _AT_ONCE // size)
    decode = _decode if numbers == 32 else _library(tensor)
    for start in range(0, len(blocks), step):
        made[start : start + step] = decode(blocks[start : start + step], tensor.dtype)
    return made.reshape(tensor.shape)


def _decode(blocks: Array, kind: str) -> Array:
    """Blocks of 32 numbers: a scale, in Q4_1 what is added, then integers of 8 or 4 bits."""
    scale = blocks[:, :2].view("<f2").astype(np.float32)
    if kind == "Q8_0":
        whole: Array = np.multiply(blocks[:, 2:].view(np.int8), scale, dtype=np.float32)
        return whole
    made, half = np.empty((len(blocks), 32), np.float32), blocks[:, -16:]
    made[:, :16] = half & 15
    made[:, 16:] = half >> 4
    if kind == "Q4_0":
        made -= 8
    made *= scale
    if kind == "Q4_1":
        made += blocks[:, 2:4].view("<f2").astype(np.float32)
    return made


def _library(tensor: Tensor) -> Callable[[Array, str], Array]:
    """How the library gguf decodes larger blocks."""
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ProblemError(
            f"{safe_text(tensor.name, 120)} is quantised as {tensor.dtype}; reading it needs the "
            'library gguf; pip install "regard[models]"'
        ) from None
    return lambda blocks, kind: dequantize(blocks, GGMLQuantizationType[kind])
