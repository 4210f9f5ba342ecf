"""The reference kernel: runs the textbook's steps in order, in NumPy.

Owns the evaluation of declared steps: block by block (some rows of one head), on demand, so that
one row of a long call costs one block. Can keep every intermediate, which is what an explanation
reads. Must not know any formula: the textbook has those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.extended_range import HeadInFloat64, extended_range_rows
from regard.compute.request import Request, Result
from regard.compute.visibility import Block, Mask
from regard.textbook.operations import compute
from regard.textbook.steps import LETTERS, Ref, Step, textbook

if TYPE_CHECKING:
    from numpy.typing import NDArray


Rows = range | tuple[int, ...]

name = "reference"

# Cells of one block of scores: half a MiB in float64, so that a handful of steps stay in cache.
BLOCK_CELLS = 2**16
# What a run may keep of what it has computed before it starts to forget.
KEPT_BYTES = 2**28


def status() -> str:
    """Always usable: it needs nothing but NumPy."""
    return "usable"


def supports(request: Request) -> str | None:
    """None: the textbook answers every request."""
    return None


def run(request: Request) -> Result:
    """The answer in the working dtype, or in float64 rounded once for precision="exact"."""
    working = Run.of_request(request, request.accumulator)
    output = np.empty((*request.shape[:-1], request.value.shape[-1]), request.dtype)
    weights = np.empty(request.shape, request.dtype) if request.return_weights else None
    lse = np.empty(request.shape[:-1], request.lse_dtype) if request.return_lse else None
    results = {"output": output, "weights": weights, "lse": lse}

    head_of = lru_cache(maxsize=1)(partial(HeadInFloat64, request))
    for batch in np.ndindex(*request.lead):
        for head in range(request.shape[-3]):
            for rows in working.row_blocks():
                blocks = {
                    step: working.block(step, batch, head, rows)
                    for step, array in results.items()
                    if array is not None
                }
                _redo(working, request, (batch, head, rows), head_of, blocks)
                for step, block in blocks.items():
                    array = results[step]
                    assert array is not None
                    with np.errstate(all="ignore"):
                        array[(*batch, head)][rows.start : rows.stop] = _once(block, array.dtype)
                working.forget()
    if request.out is not None:
        request.out[...] = request.natural(output)
    return Result(
        output=request.out if request.out is not None else request.natural(output),
        weights=None if weights is None else request.natural(weights),
        lse=None if lse is None else request.natural(lse),
    )


def _once(block: Array, dtype: np.dtype[Any]) -> Array:
    """A block, prepared so that the conversion to `dtype` rounds only once.

    NumPy and ml_dtypes take float64 to a half type by way of float32. Numbers that are inexact
    there end in an odd bit, so that rounding again gives what rounding once would have.
    """
    if dtype.itemsize != 2 or block.dtype == np.float32:
        return block
    wide = block.astype(np.float64)
    near = wide.astype(np.float32)
    bits = near.view(np.uint32)
    inexact = np.isfinite(wide) & (near != wide)
    odd = (bits - (np.abs(near) > np.abs(wide)).astype(np.uint32)) | np.uint32(1)
    return np.where(inexact, odd, bits).view(np.float32)


def _redo(
    working: Run,
    request: Request,
    at: tuple[tuple[int, ...], int, range],
    head_of: Callable[[tuple[int, ...], int], HeadInFloat64],
    blocks: dict[str, Array],
) -> None:
    """Compute again what left the range of the working dtype, and what NaN or infinity reaches.

    Where a number that the softmax sees did, the row is redone; else only the cells of the output
    that are not finite.
    """
    batch, head, rows = at
    finite = np.isfinite(working.block("scaled", batch, head, rows))
    if request.bias is not None:
        finite &= np.isfinite(working.block("biased", batch, head, rows))
    seen: NDArray[np.bool_] = np.ones(finite.shape, np.bool_)
    if request.rules is not None:
        seen = working.block("visible", batch, head, rows)
    broken = np.asarray((seen & ~finite).any(axis=-1))
    broken |= ~np.isfinite(working.block("weights", batch, head, rows)).all(axis=-1)
    redone = broken | ~np.isfinite(blocks["output"]).all(axis=-1)
    if not redone.any():
        return
    own = head_of(batch, head)
    fresh = extended_range_rows(own, np.asarray(rows)[redone], seen[redone])
    for step, block in blocks.items():
        old = block[redone]
        again = broken[redone].reshape((-1,) + (1,) * (block.ndim - 1))
        if step == "output":
            again = again | ~np.isfinite(old)
        blocks[step] = block.astype(np.float64)
        blocks[step][redone] = np.where(again, fresh[step], old)


class Run:
    """Declared steps over given arrays, evaluated block by block when asked.

    A block is some rows of one head of one batch element: an array with the step's axes without
    H and G, and with L restricted to those rows.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Mapping[str, Array],
        heads: Mapping[str, int],
        *,
        dtype: np.dtype[Any],
        lead: tuple[int, ...] = (),
        rules: Mask | None = None,
        offset: NDArray[np.int64] | None = None,
    ) -> None:
        self.steps = {step.name: step for step in steps}
        self.inputs = inputs
        self.lead = lead
        self.rules = rules
        self.offset = np.zeros(lead, np.int64) if offset is None else offset
        self.dtype = dtype
        self.sizes = _sizes(steps, inputs, heads)
        self._kept: dict[tuple[Any, ...], Array] = {}
        self._kept_bytes = 0

    @classmethod
    def of_request(
        cls,
        request: Request,
        dtype: np.dtype[Any],
        given: Mapping[str, Array] | None = None,
        heads: Mapping[str, int] = MappingProxyType({}),
        *,
        natural: bool = False,
        softmax: Literal["shifted", "unshifted"] = "shifted",
    ) -> Run:
        """The run of a checked call, from its arrays or from those `given` that make them.

        With `natural` the arrays have only the axes that the caller gave them.
        """
        has_heads, has_rows = (not natural or own for own in (request.has_heads, request.has_rows))
        shaped = request.natural if natural else lambda array, rows=True: array
        inputs: dict[str, Array] = dict(given or {}) or {
            "queries": shaped(request.query),
            "keys": shaped(request.key, rows=False),
            "values": shaped(request.value, rows=False),
        }
        numbers = {
            "width": request.query.shape[-1] if request.scale is None else None,
            "scale": request.scale,
            "softcap": request.softcap,
        }
        inputs |= {name: np.asarray(float(n)) for name, n in numbers.items() if n is not None}
        if request.bias is not None:
            inputs["bias"] = shaped(np.broadcast_to(request.bias, request.shape))
        if request.sink is not None:
            inputs["sink"] = request.sink if has_heads else request.sink[..., 0]
        steps = textbook(
            set(inputs),
            heads=has_heads,
            rows=has_rows,
            masked=request.rules is not None,
            softmax=softmax,
            default_scale=request.scale is None,
        )
        return cls(
            steps,
            inputs,
            heads,
            dtype=dtype,
            lead=request.lead,
            rules=request.rules,
            offset=request.offset,
        )

    def row_blocks(self) -> list[range]:
        """The rows cut into blocks, anchored at row 0 whichever rows are asked for."""
        rows, length = self.sizes.get("L", 1), self._block_length()
        return [range(start, min(start + length, rows)) for start in range(0, rows, length)]

    def _block_length(self) -> int:
        return max(1, BLOCK_CELLS // max(self.sizes.get("S", 1), 1))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a step's whole value, leading axes included."""
        own = tuple(self.sizes[axis] for axis in self.steps[name].axes)
        return (*(self.lead if self._batched(name) else ()), *own)

    def value(self, name: str) -> Array:
        """A step's whole value, put together from its blocks."""
        step = self.steps[name]
        dtype = np.dtype(np.bool_) if step.op == "visible" else self.dtype
        whole = np.empty(self.shape(name), dtype)
        lead = self.lead if self._batched(name) else ()
        head_axis = next((axis for axis in ("H", "G") if axis in step.axes), None)
        blocks = self.row_blocks() if "L" in step.axes else [range(1)]
        for batch in np.ndindex(*lead):
            for head in range(self.sizes[head_axis] if head_axis else 1):
                for rows in blocks:
                    block = self.block(name, batch, head, rows)
                    at = (*batch, head) if head_axis else batch
                    target = whole[(*at, ...)]  # a view, of a single number too
                    if "L" in step.axes:
                        target[rows.start : rows.stop] = block
                    else:
                        target[...] = block
        return whole

    def row(self, name: str, batch: tuple[int, ...], head: int, row: int) -> Array:
        """One row of a step with an L axis; without one, the block itself."""
        if "L" not in self.steps[name].axes:
            return self.block(name, batch, head, range(1))
        length = self._block_length()
        start = row - row % length
        rows = range(start, min(start + length, self.sizes["L"]))
        return np.asarray(self.block(name, batch, head, rows)[row - start])

    def block(self, name: str, batch: tuple[int, ...], head: int, rows: Rows | None) -> Array:
        """Some rows of one head (a key head for a step with axis G); None: all rows."""
        step = self.steps[name]
        key = (
            name,
            batch if self._batched(name) else (),
            head if {"H", "G"} & set(step.axes) else 0,
            rows if "L" in step.axes or step.op == "visible" else None,
        )
        block = self._kept.get(key)
        if block is None:
            block = self._compute(step, batch, head, rows)
            if self._kept_bytes > KEPT_BYTES:
                self.forget()
            self._kept[key] = block
            self._kept_bytes += block.nbytes
        return block

    def forget(self) -> None:
        """Drop what was computed; it is computed again when asked for."""
        self._kept.clear()
        self._kept_bytes = 0

    def _compute(self, step: Step, batch: tuple[int, ...], head: int, rows: Rows | None) -> Array:
        match step.op:
            case "given":
                return self._given_block(step, batch, head, rows)
            case "visible":
                return self._visible(step, batch, head, rows)
            case "split":
                width = self.sizes[step.axes[-1]]
                packed = self._operand(step, step.operands[0], batch, head, rows)
                return packed[..., head * width : (head + 1) * width]
            case "merge":
                own = step.operands[0].step
                heads = range(self.sizes["H"])
                return np.concatenate([self.block(own, batch, h, rows) for h in heads], axis=-1)
        letters = tuple(LETTERS[axis] for axis in step.axes if axis not in ("H", "G"))
        operands = [
            (self._operand(step, ref, batch, head, rows), self._letters(ref))
            for ref in step.operands
        ]
        visible = None
        if step.over == "visible":
            visible = self._visible(self.steps["visible"], batch, head, rows)
        block = compute(step.op, letters, operands, visible, self.dtype)
        # Operands that are the same for every row give one row; the block has them all.
        count = self.sizes.get("L", 1) if rows is None else len(rows)
        shape = [
            count if axis == "L" else self.sizes[axis]
            for axis in step.axes
            if axis not in ("H", "G")
        ]
        return np.broadcast_to(block, shape)

    def _letters(self, ref: Ref) -> tuple[str, ...]:
        axes = self.steps[ref.step].axes
        return tuple(
            letter for letter, axis in zip(ref.index, axes, strict=True) if axis not in ("H", "G")
        )

    def _operand(
        self, step: Step, ref: Ref, batch: tuple[int, ...], head: int, rows: Rows | None
    ) -> Array:
        """The block of an operand that belongs to a block of `step`."""
        axes = self.steps[ref.step].axes
        index = dict(zip(axes, ref.index, strict=True))
        if index.get("G", "").startswith("h"):
            head = head // (self.sizes["H"] // self.sizes["G"])
        # Keys made from the same embeddings as the queries (index j on the axis L): all rows.
        if index.get("L") == "j":
            rows = None
        return self.block(ref.step, batch, head, rows)

    def _given_block(
        self, step: Step, batch: tuple[int, ...], head: int, rows: Rows | None
    ) -> Array:
        array = self.inputs[step.name]
        if array.ndim > len(step.axes):
            array = array[batch]
        for axis in ("H", "G"):
            if axis in step.axes:
                array = array[head]
        if "L" in step.axes and rows is not None:
            array = array[rows.start : rows.stop] if isinstance(rows, range) else array[list(rows)]
        if not step.axes:
            return np.asarray(array)  # a scalar keeps its own precision
        with np.errstate(all="ignore"):
            # Contiguous and aligned: the caller's memory layout must not choose the order of sums.
            return np.require(array, self.dtype, ("C", "A"))

    def _visible(self, step: Step, batch: tuple[int, ...], head: int, rows: Rows | None) -> Array:
        queries, keys = self.sizes.get("L", 1), self.sizes["S"]
        assert self.rules is not None
        asked = np.asarray(rows if "L" in step.axes else (0,), dtype=np.int64)
        shape = (*self.lead, self.sizes.get("H", 1), queries, keys)
        at = Block(shape, batch, head, asked, int(self.offset[batch]))
        cells = np.broadcast_to(self.rules.block(at), (len(asked), keys))
        return cells if "L" in step.axes else cells[0]

    def _batched(self, name: str) -> bool:
        """Whether a step's value has the leading axes: weight matrices, for one, do not."""
        if not self.lead:
            return False
        step = self.steps[name]
        if step.op == "given":
            return self.inputs[name].ndim > len(step.axes)
        return step.op == "visible" or any(self._batched(ref.step) for ref in step.operands)


def _sizes(
    steps: Sequence[Step], inputs: Mapping[str, Array], heads: Mapping[str, int]
) -> dict[str, int]:
    """How long each axis is, from the given arrays and the stated numbers of heads."""
    sizes = dict(heads)
    for step in steps:
        if step.op == "given":
            shape = inputs[step.name].shape
            sizes.update(zip(step.axes, shape[len(shape) - len(step.axes) :], strict=True))
    for packed, head_axis, width in (("HD", "H", "D"), ("GD", "G", "D"), ("GE", "G", "E")):
        if packed in sizes:
            sizes[width] = sizes[packed] // sizes[head_axis]
    # Self-attention: the keys come from the same rows as the queries.
    if "S" not in sizes and "L" in sizes:
        sizes["S"] = sizes["L"]
    if "H" in sizes and "E" in sizes:
        sizes["HE"] = sizes["H"] * sizes["E"]
    return {axis: math.trunc(size) for axis, size in sizes.items()}
