"""One block of a call over Zarr arrays: what it reads, and how it is computed part by part.

Owns what a worker does, who is told names of folders and options. Must not know which blocks there
are left to make, or who asks for them.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.compute import native, parts
from regard.compute.parts import Place
from regard.compute.request import make_request
from regard.errors import OptionError, ProblemError, ShapeError
from regard.interop import zarr_files
from regard.interop.zarr_files import Output

QKV = ("query", "key", "value")

Block = tuple[int, ...]  # its number along each of (…, H, L)


@dataclass(frozen=True)
class Job:
    """What a worker is told: names of folders, and options."""

    inputs: dict[str, str]
    outputs: dict[str, Output]
    options: dict[str, Any]
    threads: int | None
    sizes: tuple[int, ...] = ()  # of a block along (…, H, L), and of a part of its keys
    target: str = native.target
    number: str = field(default_factory=lambda: os.urandom(8).hex())  # no result of another call


class Call:
    """The arrays of a job, opened, and its options, checked."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.arrays = {name: zarr_files.open_array(path) for name, path in job.inputs.items()}
        for name in QKV:
            if self.arrays[name].ndim < 3:
                raise ShapeError(
                    f"{name} has {self.arrays[name].ndim} axes; over Zarr it needs at least "
                    "(H, L, D), with 1 for an axis that it does not have"
                )
        extras = {name: self.arrays[name] for name in self.arrays if name not in QKV}
        cells = {name: one for name, one in extras.items() if parts.has_cells(one)}
        given = {
            name: parts.hollow(one) if name in cells else zarr_files.read(job.inputs[name], one, ())
            for name, one in extras.items()
        }
        query, key, value = (parts.hollow(self.arrays[name]) for name in QKV)
        options = {**job.options, **given, "return_lse": "lse" in job.outputs}
        request = make_request(query, key, value, threads=job.threads, **options)
        reason = parts.refused(request)
        if reason is not None:
            raise OptionError(f"attention over Zarr arrays needs the fused kernel: {reason}")
        self.cells = tuple(cells)
        self.request = parts.without_cells(request, cells, job.options)
        self.shared = max(1, request.shape[-3] // max(1, request.key.shape[-3]))
        self.bytes = 0  # that were read

    def blocks(self) -> list[Block]:
        """Every block. Those of a head are in no order: some are faster, and time left is known."""
        whole = self.request.shape[:-1]
        *outer, rows = (
            range(-(-length // size)) for length, size in zip(whole, self.job.sizes, strict=False)
        )
        shuffled = random.Random(0).sample(rows, len(rows))
        return [(*at, row) for at in itertools.product(*outer) for row in shuffled]

    def place(self, block: Block) -> Place:
        """Where a block is, with all keys."""
        *batch, heads, rows = (
            slice(number * size, min((number + 1) * size, whole))
            for number, size, whole in zip(block, self.job.sizes, self.request.shape, strict=False)
        )
        groups = slice(heads.start // self.shared, heads.stop // self.shared)
        return Place(tuple(batch), groups, rows, slice(0, self.request.shape[-1]))

    def read(self, name: str, place: Place) -> Array:
        """What a place needs of an array."""
        if name in ("key", "value"):
            last = (place.heads, place.keys)
        else:
            last = (self.heads(place), place.rows)
        width = slice(0, self.arrays[name].shape[-1]) if name in QKV else place.keys
        where = (*place.batch, *last, width)
        array = self.arrays[name]
        own = where[len(where) - array.ndim :]
        own = tuple(s if n > 1 else slice(0, n) for s, n in zip(own, array.shape, strict=True))
        found = zarr_files.read(self.job.inputs[name], array, own)
        self.bytes += found.nbytes
        return np.broadcast_to(found, [one.stop - one.start for one in where])

    def heads(self, place: Place) -> slice:
        """The query heads of a place."""
        return slice(place.heads.start * self.shared, place.heads.stop * self.shared)

    def with_keys(self, place: Place) -> tuple[Place, dict[str, Array]]:
        """A place, and all arrays but the query there."""
        return place, {name: self.read(name, place) for name in (*QKV[1:], *self.cells)}

    def compute(self, block: Block) -> dict[str, Array]:
        """The results of a block, from its keys part by part."""
        whole, length = self.place(block), self.job.sizes[-1]
        query = self.read("query", whole)
        keys = range(0, self.request.shape[-1], length)
        every = (whole._replace(keys=slice(k, min(k + length, whole.keys.stop))) for k in keys)
        visible = [one for one in every if parts.may_see(self.request, one)]
        states: Array | None = None
        for place, arrays in _ahead(self.with_keys, visible):
            part = parts.part_of(self.request, place)
            key, value = arrays.pop("key"), arrays.pop("value")
            states = parts.carry(part.of(query, key, value, arrays), states)
        output, lse = parts.end(
            parts.part_of(self.request, whole),
            (self.request.key.shape[-1], self.request.value.shape[-1]),
            query,
            [] if states is None else [states[None]],
            lambda: self.with_keys(whole)[1],
        )
        return {"output": output, "lse": lse}


def _ahead(read: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """What `read` gives for each item; the next one is read meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        coming: Future[Any] | None = None
        for item in [*items, None]:
            ready, coming = coming, None if item is None else reader.submit(read, item)
            if ready is not None:
                yield ready.result()


def is_whole(job: Job, block: Block) -> bool:
    """Whether every output has the chunk of a block, with the right checksum."""
    return all([one.keep(block) for one in job.outputs.values()])


def make(job: Job, block: Block) -> int:
    """Compute and write a block; returns the bytes that were read and written."""
    if native.target != job.target:
        raise ProblemError(
            f"a worker computes for the CPU target {native.target}, and others for {job.target}; "
            "the bytes would differ: set REGARD_TARGET to one that all of them have"
        )
    call = Call(job)
    made, place = call.compute(block), call.place(block)
    for name, one in job.outputs.items():
        one.write((*place.batch, call.heads(place), place.rows), made[name])
    return call.bytes + sum(made[name].nbytes for name in job.outputs)
