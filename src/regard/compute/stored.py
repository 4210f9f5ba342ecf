"""Matrices of weights as they are stored, and the product of rows with them.

A few rows meet the stored numbers in native code, in float32: in one order for each number of the
result, whatever rows are beside it and however many threads there are. Many rows are the machine's
BLAS. Must not know files or models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute import native
from regard.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# int8: groups of so many integers, each after the float16 that they are multiplied by.
GROUP, GROUP_BYTES = 32, 34
# Rows that native code multiplies, of float32 and of what BLAS cannot read: to convert all numbers
# takes as long as a product with about so many rows.
_FEW, _FEW_OF_NARROW = 8, 64
# Numbers that are converted at once.
_AT_ONCE = 2**19


@dataclass(frozen=True, eq=False)
class Stored:
    """A matrix (N, K) of float16, of bfloat16 or of int8 in groups; or, `turned`, its transpose.

    `rows` are contiguous: (N, K) of float16, or of uint16 for the bits of bfloat16; or int8
    (N, 34·⌈K/32⌉).
    """

    rows: Array
    width: int
    turned: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        shape = len(self.rows), self.width
        return shape[::-1] if self.turned else shape

    @property
    def T(self) -> Stored:
        return replace(self, turned=not self.turned)

    def __getitem__(self, some: slice) -> Stored:
        """Some of the rows."""
        return replace(self, rows=self.rows[some])

    def numbers(self, which: Any = slice(None)) -> NDArray[np.float32]:
        """Rows of the matrix that is not turned."""
        rows: Array = self.rows[which]
        if rows.dtype == np.float16:
            return rows.astype(np.float32)
        if rows.dtype == np.uint16:  # the upper half of a float32
            bits = rows.astype(np.uint32)
            bits <<= 16
            return bits.view(np.float32)
        scales, integers = _groups(rows)
        made: Array = np.multiply(integers, scales.astype(np.float32), dtype=np.float32)
        return made.reshape(*rows.shape[:-1], integers.shape[-2] * GROUP)[..., : self.width]

    def is_finite(self) -> bool:
        """Whether no number is NaN or infinite."""
        if self.rows.dtype == np.uint16:
            return bool(((self.rows & 0x7F80) != 0x7F80).all())
        rows = _groups(self.rows)[0] if self.rows.dtype == np.int8 else self.rows
        return bool(np.isfinite(rows).all())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        made = self.numbers()
        return np.asarray(made.T if self.turned else made, dtype)


Matrix = Array | Stored


def rows_of(matrix: Matrix, which: NDArray[np.int64]) -> Array:
    """Some rows of a table."""
    found: Array = matrix.numbers(which) if isinstance(matrix, Stored) else matrix[which]
    return found


def rounded(numbers: Array, kind: str) -> Stored:
    """Rows of float32 as "bfloat16", or as "int8" with the largest of a group as ±127."""
    count, width = numbers.shape
    form = (width, np.uint16) if kind == "bfloat16" else (-(-width // GROUP) * GROUP_BYTES, np.int8)
    made = np.empty((count, form[0]), form[1])
    step = max(1, _AT_ONCE // max(1, width))
    for start in range(0, count, step):
        rows = np.ascontiguousarray(numbers[start : start + step], np.float32)
        _round(rows, made[start : start + step])
    return Stored(made, width)


def _round(rows: Array, to: Array) -> None:
    if to.dtype == np.uint16:
        bits = rows.view(np.uint32)
        to[...] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # to nearest, ties to even
        return
    if missing := -rows.shape[1] % GROUP:
        rows = np.pad(rows, ((0, 0), (0, missing)))
    groups = rows.reshape(len(rows), rows.shape[1] // GROUP, GROUP)
    scales, integers = _groups(to)
    with np.errstate(over="ignore"):
        scales[...] = np.abs(groups).max(axis=-1, keepdims=True, initial=0) / 127
    if not np.isfinite(scales).all():
        raise OptionError("has numbers beyond the range of int8 groups; keep them as bfloat16")
    wide = np.where(scales, scales, 1).astype(np.float32)  # below all scales, numbers become 0
    integers[...] = np.clip(np.rint(groups / wide), -127, 127)


def _groups(rows: Array) -> tuple[Array, Array]:
    """Views of the scales (…, groups, 1) and the integers (…, groups, 32)."""
    groups = rows.reshape(*rows.shape[:-1], rows.shape[-1] // GROUP_BYTES, GROUP_BYTES)
    return groups[..., :2].view(np.float16), groups[..., 2:]


def product(matrices: Sequence[Matrix], dtype: np.dtype[Any]) -> Callable[[Array], Array]:
    """The function from x (…, K) to x·W for matrices W (K, N), side by side."""
    rows = tuple(_as_rows(one) for one in matrices)
    total, few = sum(one.shape[1] for one in matrices), 0
    if native.BUILT and dtype == np.float32 and all(one is not None for one in rows):
        plain = all(isinstance(one, np.ndarray) for one in matrices)
        few = _FEW if plain else _FEW_OF_NARROW

    def multiply(x: Array) -> Array:
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        made = np.empty((len(flat), total), dtype)
        if len(flat) > few or not native.module.product(flat, rows, made):
            _by_blas(flat, matrices, made)
        return made.reshape(*x.shape[:-1], total)

    return multiply


def _as_rows(matrix: Matrix) -> Array | None:
    """What native code reads, if it can."""
    if isinstance(matrix, Stored):
        return matrix.rows if matrix.turned else None
    rows = matrix.T
    return rows if rows.dtype == np.float32 and rows.flags.c_contiguous else None


def _by_blas(x: Array, matrices: Sequence[Matrix], to: Array) -> None:
    start = 0
    for matrix in matrices:
        count = matrix.shape[1]
        if isinstance(matrix, Stored):
            step = max(1, _AT_ONCE // max(1, matrix.width))
            for first in range(0, count, step):
                part = matrix.numbers(slice(first, first + step))
                np.matmul(x, part.T, out=to[:, start + first : start + first + len(part)])
        else:
            np.matmul(x, matrix, out=to[:, start : start + count])
        start += count
