"""A tensor as its file stores it, and its numbers: views of the file, converted where needed.

Owns the types of numbers that weights are stored in. Must not know how a header is written.
"""

from __future__ import annotations

import math
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
        if tensor.dtype in BLOCKS:
            return _dequantized(stored, tensor, dtype)
        numbers = stored.view(_FLOATS[tensor.dtype]).reshape(tensor.shape)
        if tensor.dtype == "BF16":  # the upper half of a float32
            wide = numbers.astype("<u4")
            wide <<= 16
            numbers = wide.view("<f4")
        with np.errstate(over="ignore"):
            return np.require(numbers, dtype, "A")


def _dequantized(stored: Array, tensor: Tensor, dtype: np.dtype[Any]) -> Array:
    try:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise ProblemError(
            f"{safe_text(tensor.name, 120)} is quantised as {tensor.dtype}; reading it needs the "
            'library gguf; pip install "regard[models]"'
        ) from None
    kind = GGMLQuantizationType[tensor.dtype]
    _, block = BLOCKS[tensor.dtype]
    made = np.empty(math.prod(tensor.shape), dtype)
    step, done = max(1, _AT_ONCE // block) * block, 0
    for start in range(0, stored.size, step):
        part = dequantize(stored[start : start + step], kind).reshape(-1)
        made[done : done + part.size] = part
        done += part.size
    return made.reshape(tensor.shape)
