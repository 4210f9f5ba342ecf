"""A call that memory does not hold: one plan of blocks, and one loop over them.

Owns how large blocks are, what each computes, and where they run: in this process, on an executor,
or on a cluster of dask's. Must not know where arrays lie, or what becomes of results.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    InvalidStateError,
    ThreadPoolExecutor,
    wait,
)
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from regard.boundary.arguments import as_int, as_integers
from regard.boundary.arrays import Array
from regard.compute import tiles
from regard.compute.kernels import fused
from regard.compute.request import Request, make_request
from regard.compute.tiles import CHUNK, Place, Tile
from regard.errors import OptionError, ShapeError

Block = tuple[int, ...]  # its number along each of (…, H, L)


# --- a call without the numbers of its arrays ----------------------------------------------------


def hollow(array: Any) -> Array:
    """An array of the same shape and dtype without memory, for the checks of a call."""
    return np.asarray(np.broadcast_to(np.zeros((), array.dtype), array.shape))


def has_cells(array: Any) -> bool:
    """Whether a mask or a bias has cells for queries and keys, so that it comes with the keys."""
    shape = getattr(array, "shape", ())
    return len(shape) > 1 and min(shape[-2:]) > 1


def without(cells: Mapping[str, Any]) -> dict[str, Any]:
    """What a call is given in place of a mask and a bias that come with the keys of each tile."""
    return {n: None if n == "mask" else np.zeros((1, 1), x.dtype) for n, x in cells.items()}


def call_over(
    what: str, arrays: Mapping[str, Any], cells: Mapping[str, Any], options: Mapping[str, Any]
) -> Request:
    """A call, checked, without any number of its arrays, and without its `cells`."""
    lent: dict[str, Any] = {name: hollow(array) for name, array in arrays.items()}
    request = make_request(**lent, **{**options, **{n: hollow(x) for n, x in cells.items()}})
    reason = fused.supports(request)
    if request.options.return_weights:
        reason = "weights take a number for each pair; ask for some rows of them"
    if reason is not None:
        raise OptionError(f"attention over {what} needs the fused kernel: {reason}")
    return make_request(**lent, **{**options, **without(cells)}) if cells else request


# --- plans ---------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """How a call is cut, and why."""

    heads: int  # query heads of a block
    rows: int
    keys: int
    tasks: int
    why: str


def plan(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *, memory: int, workers: int
) -> Plan:
    """Chunk sizes for arrays of these shapes, so that blocks are long and every worker has some.

    Parameters
    ----------
    query, key, value : sequence of int
        Shapes (…, H, L, D), (…, G, S, D) and (…, G, S, E), computed in float32.
    memory : int
        Bytes that one worker has for its blocks.
    workers : int
        How many tasks run at the same time.

    Returns
    -------
    Plan
        Query heads, queries and keys of a block, the number of tasks, and the reason in words.

    Raises
    ------
    OptionError, ShapeError
        If the shapes do not fit, or the memory does not hold a block of 256 queries and keys.

    Examples
    --------
    >>> plan((8, 32768, 64), (8, 32768, 64), (8, 32768, 64), memory=2**30, workers=2)[:4]
    (1, 4096, 32768, 64)
    """
    memory, workers = as_int("memory", memory, 1), as_int("workers", workers, 1)
    arrays: list[Array] = []
    for name, given in {"query": query, "key": key, "value": value}.items():
        sizes = as_integers(name, given, "a shape, an int for each axis")
        shape = tuple(sizes.reshape(-1).tolist())
        if len(shape) < 3:
            raise ShapeError(f"{name} is {shape}; plan needs shapes (…, H, L, D)")
        arrays.append(np.broadcast_to(np.zeros((), np.float32), shape))
    request = make_request(*arrays)
    *lead, heads, length, size = request.shape
    groups = request.key.shape[-3]
    shared, batch = heads // groups, math.prod(lead) * groups
    width = request.query.shape[-1] + request.value.shape[-1]

    def needed(rows: int, keys: int) -> int:
        # A block and the next one's keys; a query's rows, states before and after.
        return int(4 * (2 * keys * width + shared * rows * (3 * width + 6)))

    rows, keys = max(min(length, 4096), 1), max(size, 1)
    while rows > 256 and batch * -(-length // rows) < 4 * workers:
        rows //= 2
    while needed(rows, keys) > memory and keys > CHUNK:
        keys = -(-keys // 2 // CHUNK) * CHUNK
    while needed(rows, keys) > memory and rows > 256:
        rows //= 2
    if needed(rows, keys) > memory:
        raise OptionError(
            f"a block of {rows} queries and {keys} keys takes {needed(rows, keys)} bytes, but "
            f"memory is {memory}; give each worker more"
        )
    blocks = batch * -(-length // rows)
    why = (
        f"{blocks} blocks of rows for {workers} workers; a block with {keys} keys takes "
        f"{needed(rows, keys)} of {memory} bytes"
    )
    return Plan(shared, rows, keys, blocks * -(-size // keys), why)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A call cut along each of (…, H, L) into blocks, and along its keys into their tiles."""

    request: Request
    cuts: Sequence[Sequence[slice]]
    keys: Sequence[slice]

    @classmethod
    def of_sizes(cls, request: Request, sizes: Sequence[int]) -> Blocks:
        """Blocks of so many along (…, H, L), and tiles of so many keys; the last are smaller."""
        *cuts, keys = (
            [slice(at, min(at + size, whole)) for at in range(0, whole, size)]
            for whole, size in zip(request.shape, sizes, strict=True)
        )
        return cls(request, cuts, keys)

    def __iter__(self) -> Iterator[Block]:
        return itertools.product(*(range(len(cut)) for cut in self.cuts))

    def place(self, block: Block) -> Place:
        """Where a block is, with all keys."""
        *batch, heads, rows = (cut[number] for cut, number in zip(self.cuts, block, strict=True))
        return Place(tuple(batch), heads, rows, slice(0, self.request.shape[-1]))

    def tiles(self, block: Block) -> Iterator[tuple[int, Place, Tile]]:
        """The number, the place and the options of each tile that sees any of its keys."""
        whole = self.place(block)
        for number, keys in enumerate(self.keys):
            place = whole._replace(keys=keys)
            tile = tiles.tile_of(self.request, place)
            if tile.sees():
                yield number, place, tile

    def compute(
        self, block: Block, read: Callable[[str, Place], Array], cells: Sequence[str] = ()
    ) -> tuple[Array, Array]:
        """Output and lse of a block, tile by tile.

        `read` gives what a place takes of an array; the next tile is read meanwhile. `cells` are
        those of mask and bias that come with the keys.
        """

        def with_keys(place: Place) -> dict[str, Array]:
            return {name: read(name, place) for name in ("key", "value", *cells)}

        whole = self.place(block)
        query, states = read("query", whole), None
        seen = [(place, tile) for _, place, tile in self.tiles(block)]
        read_ahead = _ahead(with_keys, [place for place, _ in seen])
        for (_, tile), arrays in zip(seen, read_ahead, strict=True):
            states = tiles.carry(tile.of(query, **arrays), states)
        last = tiles.tile_of(self.request, whole)
        known = [] if states is None else [states]
        return tiles.end(last, query, known, partial(with_keys, whole))


def _ahead(read: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """What `read` gives for each item; the next one is read meanwhile."""
    with ThreadPoolExecutor(1) as reader:
        coming: deque[Future[Any]] = deque()
        for item in items:
            coming.append(reader.submit(read, item))
            if len(coming) > 1:
                yield coming.popleft().result()
        for last in coming:
            yield last.result()


# --- the loop, and where it runs -----------------------------------------------------------------


class Progress(NamedTuple):
    """How far a call is."""

    blocks: int  # that are whole
    of: int
    kept: int  # that an earlier call made
    bytes: int  # read and written by this call


def run(
    blocks: Iterable[Any],
    task: Callable[[Any], int],
    at: Progress,
    executor: Any = None,
    most: int = 1,
) -> Iterator[Progress]:
    """Do a task for each block, which says how many bytes it moved; yields how far that is."""
    yield at
    for _, moved in each(blocks, task, executor, most):
        at = at._replace(blocks=at.blocks + 1, bytes=at.bytes + moved)
        yield at


def each(
    blocks: Iterable[Any], task: Callable[[Any], Any], executor: Any = None, most: int = 1
) -> Iterator[tuple[Any, Any]]:
    """Each block with what the task gives, as they end: in this process, without an executor.

    An executor is one of `concurrent.futures`, or a client of dask's. At most so many blocks are
    waited for.
    """
    if executor is None:
        yield from ((block, task(block)) for block in blocks)
        return
    submit = executor.submit if isinstance(executor, Executor) else partial(_submit, executor)
    rest, waiting = iter(blocks), dict[Future[Any], Any]()
    try:
        while True:
            for block in itertools.islice(rest, most - len(waiting)):
                waiting[submit(task, block)] = block
            if not waiting:
                return
            for ended in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(ended), ended.result()
    finally:
        for left in waiting:
            left.cancel()


def _submit(client: Any, task: Callable[[Any], Any], block: Any) -> Future[Any]:
    """A task for a dask cluster.

    The executor that dask's client has never ends a task whose result is lost with the scheduler.
    """
    theirs, ours = client.submit(task, block, pure=False), Future[Any]()

    def end(theirs: Any) -> None:
        try:
            outcome, error = theirs.result(), None
        except BaseException as raised:
            outcome, error = None, raised
        with suppress(InvalidStateError):  # it was given up meanwhile
            ours.set_result(outcome) if error is None else ours.set_exception(error)

    theirs.add_done_callback(end)
    ours.add_done_callback(lambda ours: theirs.cancel() if ours.cancelled() else None)
    return ours
