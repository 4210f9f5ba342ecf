"""The evaluation of declared steps, in NumPy: block by block (some rows of one head), on demand.

One row of a long call costs one block. A run can keep every intermediate, which is what an
explanation reads. Must not know any formula: the textbook has those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from regard.boundary.arrays import Array
from regard.compute.positioned import given_positions
from regard.compute.request import Request
from regard.positions import Absolute
from regard.rules.visibility import Block, Mask
from regard.textbook.mechanisms import Declared
from regard.textbook.operations import compute
from regard.textbook.positions import OTHER
from regard.textbook.steps import (
    INDEX_MAPS,
    LETTERS,
    Ref,
    Step,
    letters_of,
    merging,
    projecting,
    textbook,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


Rows = range | tuple[int, ...]

# Cells of one block of scores: half a MiB in float64, so that a handful of steps stay in cache.
BLOCK_CELLS = 2**16
# What a run may keep of what it has computed before it starts to forget.
KEPT_BYTES = 2**28


def project(inputs: Mapping[str, Array], heads: Mapping[str, int], dtype: np.dtype[Any]) -> Run:
    """A run of the steps from embeddings to queries, keys and values."""
    lead = inputs["embeddings"].shape[:-2]
    return Run(projecting(set(inputs)), inputs, heads, lead=lead, dtype=dtype)


def added_vectors(positions: Absolute, embeddings: Array) -> Array:
    """What positions add to embeddings (…, L, M): (L, M), in float64."""
    rows, width = embeddings.shape[-2:]
    given = positions.given(rows, width)
    steps = projecting({"embeddings", *given})
    inputs = {"embeddings": np.zeros((rows, width)), **given}
    run = Run(steps, inputs, {}, dtype=np.dtype(np.float64))
    return run.value(run.steps["placed_embeddings"].operands[1].step)


def unite(inputs: Mapping[str, Array], dtype: np.dtype[Any]) -> Run:
    """A run of the steps from every head's output to the projected output."""
    output = inputs["output"]
    steps = merging(set(inputs))
    return Run(steps, inputs, {}, lead=output.shape[:-3], dtype=dtype)


def mechanism_of(request: Request) -> tuple[str | Declared, str]:
    """The kinds of score and normalisation, as the textbook has them."""
    score, normalize = request.options.score, request.options.normalize
    return score.kind if score else "dot", normalize.kind if normalize else "softmax"


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
        query_positions: NDArray[np.int64] | None = None,
    ) -> None:
        self.steps = {step.name: step for step in steps}
        self.inputs = inputs
        self.lead = lead
        self.rules = rules
        self.dtype = dtype
        self.sizes = _sizes(steps, inputs, heads)
        if query_positions is None:
            rows = np.arange(self.sizes.get("L", 1))
            query_positions = np.broadcast_to(rows, (*lead, len(rows)))
        self.query_positions = query_positions
        self._batched = self._find_batched()
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
        plain = request.options.score is None
        numbers = {
            "width": request.query.shape[-1] if plain and request.options.scale is None else None,
            "scale": request.options.scale,
            "softcap": request.options.softcap,
        }
        inputs |= {name: np.asarray(float(n)) for name, n in numbers.items() if n is not None}
        if request.own_bias is not None:
            inputs["bias"] = shaped(request.own_bias)
        if request.options.sink is not None:
            inputs["sink"] = request.options.sink if has_heads else request.options.sink[..., 0]
        inputs |= {name.replace(".", "_"): own for name, own in request.parameters.items()}
        if request.options.positions is not None:
            own, sizes = given_positions(request, has_heads=has_heads, has_rows=has_rows)
            inputs |= own
            heads = {**heads, **sizes}
        score, normalize = mechanism_of(request)
        if normalize.startswith("hard"):
            inputs["key_numbers"] = np.arange(float(request.shape[-1]))
        steps = textbook(
            set(inputs),
            heads=has_heads,
            rows=has_rows,
            masked=request.rules is not None,
            softmax=softmax,
            default_scale=request.options.scale is None,
            score=score,
            normalize=normalize,
        )
        return cls(
            steps,
            inputs,
            heads,
            dtype=dtype,
            lead=request.lead,
            rules=request.rules,
            query_positions=request.query_positions,
        )

    def continued(self, steps: Sequence[Step], inputs: Mapping[str, Array]) -> Run:
        """A run of further steps too, which refer to these, and what they are given."""
        return Run(
            (*self.steps.values(), *steps),
            {**self.inputs, **inputs},
            {axis: size for axis, size in self.sizes.items() if axis in ("H", "G", *"PQW")},
            dtype=self.dtype,
            lead=self.lead,
            rules=self.rules,
            query_positions=self.query_positions,
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
        return (*(self.lead if name in self._batched else ()), *own)

    def value(self, name: str) -> Array:
        """A step's whole value, put together from its blocks."""
        step = self.steps[name]
        dtype = np.dtype(np.bool_) if step.op == "visible" else self.dtype
        whole = np.empty(self.shape(name), dtype)
        lead = self.lead if name in self._batched else ()
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
        key = self._key(step, batch, head, rows)
        block = self._kept.get(key)
        if block is None:
            over_rows = step.running == "i"
            block = (self._over_rows if over_rows else self.part)(step, batch, head, rows)
            if self._kept_bytes > KEPT_BYTES:
                self.forget()
            self._keep(key, block)
        return block

    def keep(
        self, name: str, batch: tuple[int, ...], head: int, rows: Rows | None, block: Array
    ) -> None:
        """Take a block as it was computed elsewhere, until the run forgets."""
        self._keep(self._key(self.steps[name], batch, head, rows), block)

    def _keep(self, key: tuple[Any, ...], block: Array) -> None:
        self._kept[key] = block
        self._kept_bytes += block.nbytes

    def _key(
        self, step: Step, batch: tuple[int, ...], head: int, rows: Rows | None
    ) -> tuple[Any, ...]:
        return (
            step.name,
            batch if step.name in self._batched else (),
            head if {"H", "G"} & set(step.axes) else 0,
            rows if "L" in step.axes else None,
        )

    def knowing(self, other: Run | None) -> Run:
        """The run, with what another one has computed of the same steps of the same arrays."""
        if other is not None:
            self._kept, self._kept_bytes = dict(other._kept), other._kept_bytes
        return self

    def forget(self) -> None:
        """Drop what was computed; it is computed again when asked for."""
        self._kept.clear()
        self._kept_bytes = 0

    def _over_rows(
        self, step: Step, batch: tuple[int, ...], head: int, _: Rows | None = None
    ) -> NDArray[np.float64]:
        """A sum over all rows, one block of them after the other."""
        total = np.zeros([self.sizes[axis] for axis in step.axes if axis not in ("H", "G")])
        with np.errstate(all="ignore"):
            for rows in self.row_blocks():
                total += self.part(step, batch, head, rows)
        return total

    def part(self, step: Step, batch: tuple[int, ...], head: int, rows: Rows | None) -> Array:
        """Some rows of one head of a step; of a sum over rows, what those rows add to it."""
        match step.op:
            case "given":
                return self._given_block(step, batch, head, rows)
            case "visible":
                return self._visible(step, batch, head, rows)
            case "split":
                width = self.sizes[step.axes[-1]]
                packed, _ = self._operand(step, step.operands[0], batch, head, rows)
                return packed[..., head * width : (head + 1) * width]
            case "merge":
                own = self.steps[step.operands[0].step]
                heads = range(self.sizes[own.axes[0]])
                blocks = [self.block(own.name, batch, h, rows) for h in heads]
                return np.concatenate(blocks, axis=-1)
        letters = tuple(LETTERS[axis] for axis in step.axes if axis not in ("H", "G"))
        operands = [self._operand(step, ref, batch, head, rows) for ref in step.operands]
        visible = None
        if step.over == "visible":
            visible = self.block("visible", batch, head, rows)
        block = compute(step.op, letters, operands, visible, self.dtype)
        # Operands that are the same for every row give one row; the block has them all.
        return np.broadcast_to(block, self._block_shape(step, rows))

    def _block_shape(self, step: Step, rows: Rows | None) -> list[int]:
        """The shape of a block of a step: some of its rows, in one head."""
        count = self.sizes.get("L", 1) if rows is None else len(rows)
        own = [axis for axis in step.axes if axis not in ("H", "G")]
        return [count if axis == "L" else self.sizes[axis] for axis in own]

    def _operand(
        self, step: Step, ref: Ref, batch: tuple[int, ...], head: int, rows: Rows | None
    ) -> tuple[Array, tuple[str, ...]]:
        """The block of an operand that belongs to a block of `step`, and its axes' letters."""
        index = dict(zip(self.steps[ref.step].axes, ref.index, strict=True))
        of_head = index.pop("H", index.pop("G", ""))
        letters = tuple(index.values())
        # Keys made from the same embeddings as the queries (index j on the axis L): all rows.
        taken = range(self.sizes["L"]) if index.get("L") == "j" else rows
        if step.running and step.running in letters_of(of_head):
            count = self.sizes[{"r": "R", "g": "G", "h": "H"}[step.running]]
            first = head * count if step.running == "r" else 0
            heads = range(first, first + count)
            stacked = [self.block(ref.step, batch, own, taken) for own in heads]
            if not stacked:
                shape = (0, *self._block_shape(self.steps[ref.step], taken))
                return np.empty(shape, self.dtype), (step.running, *letters)
            return np.stack(stacked), (step.running, *letters)
        if of_head == "h//(H//G)":
            head = head // (self.sizes["H"] // self.sizes["G"])
        block = self.block(ref.step, batch, head, taken)
        if index.get("S") == "i" and rows is not None:
            block = block.take(rows, letters.index("i"))
        if OTHER in letters:
            axis = letters.index(OTHER)
            places = [INDEX_MAPS[OTHER]({"d": d}, self.sizes) for d in range(self.sizes["D"])]
            block, letters = block.take(places, axis), (*letters[:axis], "d", *letters[axis + 1 :])
        return block, letters

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
        at = Block(shape, batch, head, asked, self.query_positions)
        cells = np.broadcast_to(self.rules.block(at), (len(asked), keys))
        return cells if "L" in step.axes else cells[0]

    def _find_batched(self) -> set[str]:
        """The steps whose values have the leading axes: weight matrices, for one, do not."""
        found: set[str] = set()
        for step in self.steps.values() if self.lead else ():
            if step.op == "given":
                batched = self.inputs[step.name].ndim > len(step.axes)
            else:
                batched = step.op == "visible" or any(r.step in found for r in step.operands)
            if batched:
                found.add(step.name)
        return found


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
    if sizes.get("G"):
        sizes["R"] = sizes["H"] // sizes["G"]
    return {axis: math.trunc(size) for axis, size in sizes.items()}
