"""Attention over arrays in .npy files, computed and written piece by piece.

Owns how such files are read (mapped, never unpickled), how a call is cut so that no result is ever
whole in memory, and that results appear complete or not at all. Must not know the command line.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np

from regard.boundary.arguments import is_float
from regard.boundary.arrays import Array
from regard.boundary.files import about, open_file, write_file
from regard.compute import dispatch
from regard.compute.blocks import Blocks, Progress, run
from regard.compute.evaluation import BLOCK_CELLS
from regard.compute.tiles import QKV, Place, tile_of, where
from regard.errors import ProblemError, safe_text

if TYPE_CHECKING:
    from regard.compute.request import Request


# A call of more cells than this is computed in pieces.
PIECE_CELLS = 2**24
MAX_NPY_HEADER = 4096


def load_npy(path: str) -> Array:
    """The array of an NPY file, mapped into memory; refused unless header and size agree."""
    with about(path), open_file(path, 2**63 - 1) as file:
        dtype, shape, order = _npy_header(file)
        start, size = file.tell(), os.fstat(file.fileno()).st_size
        declared = math.prod(shape) * dtype.itemsize
        if declared != size - start:
            raise ProblemError(
                f"has the shape {safe_text(shape, 200)} of {dtype}, {declared} bytes, "
                f"but {size - start} bytes are there"
            )
        try:
            if not declared:
                return np.empty(shape, dtype)
            flat = np.memmap(file, dtype, "r", offset=start, shape=(math.prod(shape),))
            return np.asarray(flat).reshape(shape, order=order)
        except (ValueError, OverflowError):  # too many axes, or too large beside a size of 0
            raise ProblemError(
                f"has the shape {safe_text(shape, 200)}, which no array has"
            ) from None


def _npy_header(file: BinaryIO) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"]]:
    start = file.read(12)
    if start[:6] != b"\x93NUMPY" or len(start) < 12 or start[6] not in (1, 2):
        raise ProblemError("is not an NPY file")
    length = int.from_bytes(start[8 : 10 if start[6] == 1 else 12], "little")
    if length > MAX_NPY_HEADER:
        raise ProblemError(f"has a header of {length} bytes; at most {MAX_NPY_HEADER} are read")
    file.seek(8)
    read = np.lib.format.read_array_header_1_0
    if start[6] == 2:
        read = np.lib.format.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(file, max_header_size=MAX_NPY_HEADER)
    except Exception as error:  # NumPy reads it as Python: any error means a damaged header
        raise ProblemError(f"has a damaged header: {safe_text(error, 120)}") from None
    if dtype.hasobject:
        raise ProblemError("holds Python objects, and regard unpickles nothing")
    if any(size < 0 for size in shape):
        raise ProblemError(f"has the shape {safe_text(shape, 200)}, which no array has")
    return dtype, shape, "F" if is_fortran else "C"


@dataclass(frozen=True)
class Job:
    """One call of attention over arrays on disk, computed and written in pieces.

    Pieces follow the order in which the results lie in their files, so each is appended when it
    is finished, and no result is ever whole in memory.
    """

    request: Request

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """The shape and the dtype of each result that is wanted."""
        request = self.request
        results = {"output": (request.natural_shape(request.value.shape[-1]), request.dtype)}
        if request.options.return_weights:
            results["weights"] = (request.natural_shape(request.shape[-1]), request.dtype)
        if request.options.return_lse:
            results["lse"] = (request.natural_shape(), request.lse_dtype)
        return results

    def pieces(self) -> list[Place]:
        """Where each piece is, with all keys; one piece if all of it is small."""
        *lead, heads, rows, keys = self.request.shape
        sizes = (*lead, heads, rows)
        if math.prod(self.request.shape) > PIECE_CELLS:
            sizes = (*(1 for _ in lead), heads, rows)
        if heads * rows * keys > PIECE_CELLS:
            # Whole blocks of the kernel, anchored at row 0 as it anchors them: the same bytes as
            # one call, though matrix products of other sizes may round differently.
            block = max(1, BLOCK_CELLS // max(keys, 1))
            length = max(1, PIECE_CELLS // max(keys, 1) // block) * block
            sizes = (*(1 for _ in lead), 1, length)
        blocks = Blocks.of_sizes(self.request, (*(max(size, 1) for size in sizes), max(keys, 1)))
        return [blocks.place(block) for block in blocks]

    def part(self, place: Place) -> Request:
        """The call of one piece: its arrays are views, nothing is copied."""
        request = self.request
        arrays = (getattr(request, name)[where(request, name, place)] for name in QKV)
        return tile_of(request, place).of(*arrays)

    def compute(self, place: Place) -> dict[str, Array]:
        """The results of one piece."""
        made = dispatch.run(self.part(place))
        return {name: getattr(made, name) for name in self.results}

    def memory(self) -> int:
        """About how many bytes it allocates. The inputs are mapped, so they are not among them."""
        keys, width = self.request.shape[-1], self.request.value.shape[-1]
        numbers = width + 1 + (keys if self.request.options.return_weights else 0)
        # A handful of steps for one block of scores, and one head of keys and values, in float64.
        scratch = 2**25 + keys * (self.request.key.shape[-1] + width) * 8
        part = next(map(self.part, self.pieces()), self.request)
        query, key, value, bias = part.query, part.key, part.value, part.options.bias
        # Numbers of other types or byte orders are converted, a piece at a time.
        converted = sum(
            array.size
            for array in (query, key, value, bias)
            if array is not None and not (is_float(array.dtype) and array.dtype.isnative)
        )
        # The kernel copies the keys, and values of half precision, of each head that has many rows.
        if query.shape[-2] * query.shape[-3] > key.shape[-3]:
            size = self.request.accumulator.itemsize
            scratch += (key.size + (value.size if value.dtype.itemsize < size else 0)) * size
        rows = math.prod(query.shape[:-1])
        return int((rows * numbers + converted) * 8 + scratch)

    def write(
        self,
        targets: Mapping[str, str],
        *,
        force: bool,
        watch: Callable[[Progress], None] | None = None,
    ) -> None:
        """Compute everything; the files appear when all is done, or not at all."""
        with ExitStack() as stack:
            files = {
                name: stack.enter_context(write_file(path, force=force))
                for name, path in targets.items()
            }
            for name, file in files.items():
                shape, dtype = self.results[name]
                descr = np.lib.format.dtype_to_descr(dtype)
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)

            def make(place: Place) -> int:
                made = self.compute(place)
                for name, array in made.items():
                    numbers = np.ascontiguousarray(array).reshape(-1)
                    files[name].write(numbers.view(np.uint8).data)
                part = self.part(place)
                read = (part.query, part.key, part.value)
                return sum(array.nbytes for array in (*read, *made.values()))

            pieces = self.pieces()
            for at in run(pieces, make, Progress(0, len(pieces), 0, 0)):
                if watch is not None:
                    watch(at)
