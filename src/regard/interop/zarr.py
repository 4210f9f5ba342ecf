"""Attention over Zarr arrays on disk: blocks of rows, each read, computed and written by one task.

Owns which blocks are whole, so that a call that was stopped goes on, and that a result appears when
all of it is whole. What a block computes, and where it runs, is in `regard.compute.blocks`. How
arrays lie on disk is in `zarr_files`.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from regard.boundary import answering, taking
from regard.boundary.arguments import as_int
from regard.boundary.arrays import Array
from regard.compute import native
from regard.compute.blocks import Block, Blocks, Progress, call_over, each, has_cells, plan, run
from regard.compute.config import show_config
from regard.compute.options import DEFAULTS
from regard.compute.tiles import CHUNK, QKV, Place, sharing, where, within
from regard.errors import DtypeError, OptionError, ProblemError, Setting, ShapeError, safe_text
from regard.interop import zarr_files
from regard.interop.zarr_files import Output

__all__ = ["Progress", "attention"]

# More keys at once would only wait longer for the first of them to be read.
MOST_KEYS = 2**16


@answering
@taking(DEFAULTS, "return_lse", "out", "kernel")
def attention(
    query: str,
    key: str,
    value: str,
    output: str,
    *,
    lse: str | None = None,
    mask: str | None = None,
    bias: str | None = None,
    chunks: tuple[int, int, int] | None = None,
    memory: int = 2**30,
    executor: Any = None,
    workers: int = 1,
    threads: int | None = None,
    force: bool = False,
    watch: Callable[[Progress], None] | None = None,
    **options: Any,
) -> Progress:
    r"""Scaled dot-product attention, softmax(scale·Q·Kᵀ + bias)·V, from Zarr arrays into another.

    A block of rows is one task: it reads its queries, then keys and values part by part, and writes
    its chunk of the output with a checksum. Until all chunks are whole the output is called
    `output` + ".part". A call that was stopped is made again with the same arguments: chunks whose
    checksum fits their bytes are kept, and the bytes at the end are those of one call of
    `regard.attention`.

    Parameters
    ----------
    query, key, value : str
        Folders of Zarr arrays (…, H, L, D), (…, G, S, D) and (…, G, S, E), which every worker sees
        under this name.
    output : str
        The folder that the output (…, H, L, E) will be.
    lse : str, optional
        The same for the log-sum-exp (…, H, L).
    mask, bias : str, optional
        Folders of Zarr arrays that broadcast to (…, H, L, S).
    chunks : (heads, rows, keys), optional
        Of a block. Otherwise `regard.interop.dask.plan` chooses, in whole chunks of the arrays.
        Keys are rounded up to a multiple of 256.
    memory : int
        Bytes that one worker has for its block.
    executor : distributed.Client or concurrent.futures.Executor, optional
        Computes the blocks. Without one they are computed here one after the other.
    workers : int
        How many blocks the executor computes at the same time; only the choice of chunks asks.
    threads : int, optional
        Of each block; 1 with an executor, else all.
    force : bool
        Replace an output that is there, or an unfinished one that other settings made.
    watch : callable, optional
        Called with a `Progress` before the first block and after each.
    **options
        causal, window, offset, scale, softcap, sink, precision: as for `regard.attention`.

    Returns
    -------
    Progress

    Raises
    ------
    ShapeError, OptionError, DtypeError
        As for `regard.attention`, before anything is computed.
    ProblemError
        If a file is not a Zarr array or damaged, the output is there already, an unfinished one was
        begun with other settings or inputs, or a block could not be made.

    Notes
    -----
    A row whose numbers leave their range is computed again by a task that then holds all keys and
    values of its heads.

    Examples
    --------
    >>> import os, tempfile, numpy as np, regard, zarr
    >>> folder = tempfile.mkdtemp()
    >>> q, k, v = np.random.default_rng(0).normal(size=(3, 4, 1000, 8))
    >>> paths = [os.path.join(folder, name + ".zarr") for name in "qkvo"]
    >>> for path, array in zip(paths, (q, k, v)):
    ...     zarr.create_array(path, shape=array.shape, chunks=(1, 256, 8), dtype="f8")[:] = array
    >>> attention(*paths, causal=True, chunks=(2, 300, 512)).blocks
    8
    >>> made = zarr.open_array(paths[3])[:]
    >>> bool((made == regard.attention(q, k, v, causal=True)).all())
    True
    """
    inputs = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias}
    outputs = {"output": output, "lse": lse}
    job = Job(
        inputs={name: _folder(name, path) for name, path in inputs.items() if path is not None},
        outputs={n: Output(_folder(n, path)) for n, path in outputs.items() if path is not None},
        options=options,
        threads=1 if executor is not None and threads is None else threads,
    )
    call = Call(job)
    for target in job.outputs.values():
        target.check([*job.inputs.values()], force=force)
    memory, workers = as_int("memory", memory, 1), as_int("workers", workers, 1)
    *blocks, keys = _sizes(call, chunks, memory, workers)
    begun = [target.settings() for target in job.outputs.values()]
    settings = _settings(call)
    known: Any = (begun[0] or {}).get("blocks")
    if chunks is None and isinstance(known, list) and begun[0] == settings | {"blocks": known}:
        blocks = known  # any keys give the same bytes, but chunks have their rows
    settings |= {"blocks": blocks}
    _check_begun(job, begun, settings, force=force)
    for (name, target), before in zip(job.outputs.items(), begun, strict=True):
        last = call.request.value.shape[-1:] if name == "output" else ()
        dtype = call.request.dtype if name == "output" else call.request.lse_dtype
        form = ((*call.request.shape[:-1], *last), (*blocks, *last), dtype)
        if before == settings:
            target.check_form(*form)
        else:
            target.begin(*form, settings)
    for_workers = replace(
        job,
        sizes=(*blocks, keys),
        inputs={name: os.path.abspath(path) for name, path in job.inputs.items()},
        outputs={n: Output(os.path.abspath(target.path)) for n, target in job.outputs.items()},
    )
    return _run(
        for_workers,
        Blocks.of_sizes(call.request, for_workers.sizes),
        job.outputs["output"],
        (executor, max(4 * workers, 64)),
        begun=settings in begun,
        watch=watch,
    )


# --- before anything is computed -----------------------------------------------------------------


def _sizes(call: Call, chunks: Any, memory: int, workers: int) -> tuple[int, ...]:
    """Those of a block along (…, H, L), and of a part of its keys: whole chunks of the arrays."""
    request, shared = call.request, sharing(call.request)
    *lead, heads, rows, _ = request.shape
    query, key = (call.arrays[name].chunks for name in ("query", "key"))
    outer = (*(1 for _ in lead), *query)[-len(lead) - 3 : -3]
    batch = tuple(min(chunk, max(whole, 1)) for chunk, whole in zip(outer, lead, strict=True))
    if chunks is None and 0 not in request.shape:
        of_heads = min(heads, math.lcm(query[-3], shared * key[-3]))
        blocks = math.prod(batch) * of_heads // shared  # of those that a plan speaks of
        shapes = (getattr(request, name).shape for name in QKV)
        chosen = plan(*shapes, memory=max(memory // blocks, 1), workers=workers)
        of_keys = min(chosen.keys, MOST_KEYS)
        chunks = (of_heads, *map(_in_chunks, (chosen.rows, of_keys), (query[-2], key[-2])))
    elif chunks is None:
        chunks = (shared, CHUNK, CHUNK)
    if not (isinstance(chunks, tuple) and len(chunks) == 3):
        raise OptionError("chunks must be three numbers, of heads, rows and keys")
    of_heads, of_rows, of_keys = (as_int("chunks", size, 1) for size in chunks)
    if of_heads % shared:
        raise ShapeError(
            f"chunks have {of_heads} heads, but {shared} query heads share a key head; make "
            f"it a multiple of {shared}"
        )
    sizes = (min(of_heads, max(heads, 1)), min(of_rows, max(rows, 1)))
    return (*batch, *sizes, -(-of_keys // CHUNK) * CHUNK)


def _in_chunks(size: int, chunk: int) -> int:
    return max(size // chunk * chunk, chunk)


def _folder(name: str, given: Any) -> str:
    try:
        return str(os.fspath(given))
    except TypeError:
        kind = type(given).__name__
        raise DtypeError(f"{name} must be the folder of a Zarr array, not a {kind}") from None


def _settings(call: Call) -> dict[str, Any]:
    """What the bytes of the output depend on, as JSON; kept with the output."""
    job = call.job
    options = {
        name: option
        for name, option in sorted(job.options.items())
        if option is not None and option is not False
    }
    inputs = {n: zarr_files.identity(path, call.arrays[n]) for n, path in job.inputs.items()}
    versions = {"regard": show_config("dict")["regard"], "target": job.target}
    for name, option in options.items():
        try:
            options[name] = json.loads(json.dumps(option))
        except (TypeError, ValueError):
            raise OptionError(
                f"{name} is a {type(option).__name__}, but over Zarr options are numbers, names "
                "and tuples of them, which are kept with the output; arrays are Zarr arrays: "
                "mask= and bias="
            ) from None
    return {**versions, **options, **inputs}


def _check_begun(job: Job, begun: Sequence[Any], settings: dict[str, Any], *, force: bool) -> None:
    """Refuse to go on with an output of other settings."""
    for target, before in zip(job.outputs.values(), begun, strict=True):
        if before in (None, settings) or force:
            continue
        name = next(n for n in (*settings, *before) if settings.get(n) != before.get(n))
        if name in job.inputs and name in before:
            what = f"another {name}, or {safe_text(job.inputs[name], 200)} has changed since"
        else:
            then, now = (
                f"{name} {safe_text(json.dumps(each[name]), 80)}" if name in each else f"no {name}"
                for each in (before, settings)
            )
            what = f"{then}, not with {now}"
        raise ProblemError(
            f"{safe_text(target.folder, 200)}: was begun with {what}; pass ",
            *(Setting("force", True), " to begin again"),
        )


# --- what a worker does --------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker is told: names of folders, and options."""

    inputs: dict[str, str]
    outputs: dict[str, Output]
    options: dict[str, Any]
    threads: int | None
    sizes: tuple[int, ...] = ()  # of a block along (…, H, L), and of a tile along its keys
    target: str = native.target


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
        qkv = {name: self.arrays[name] for name in QKV}
        others = {name: array for name, array in self.arrays.items() if name not in QKV}
        cells = {name: array for name, array in others.items() if has_cells(array)}
        options = {**job.options, "threads": job.threads, "return_lse": "lse" in job.outputs}
        for name in others.keys() - cells.keys():
            options[name] = zarr_files.read(job.inputs[name], others[name], ())
        self.request = call_over("Zarr arrays", qkv, cells, options)
        self.cells = tuple(cells)
        self.bytes = 0  # that were read

    def read(self, name: str, place: Place) -> Array:
        """What a place needs of an array."""
        array, whole = self.arrays[name], where(self.request, name, place)
        part = zarr_files.read(self.job.inputs[name], array, within(array.shape, whole))
        self.bytes += part.nbytes
        return np.broadcast_to(part, [axis.stop - axis.start for axis in whole])


def is_whole(job: Job, block: Block) -> bool:
    """Whether every output has the chunk of a block, with the right checksum."""
    return all([target.keep(block) for target in job.outputs.values()])


def make(job: Job, block: Block) -> int:
    """Compute and write a block; returns the bytes that were read and written."""
    if native.target != job.target:
        raise ProblemError(
            f"a worker computes for the CPU target {native.target}, and others for {job.target}; "
            "the bytes would differ: set REGARD_TARGET to one that all of them have"
        )
    call = Call(job)
    blocks = Blocks.of_sizes(call.request, job.sizes)
    made, place = blocks.compute(block, call.read, call.cells), blocks.place(block)
    for name, numbers in zip(("output", "lse"), made, strict=True):
        if name in job.outputs:
            job.outputs[name].write((*place.batch, place.heads, place.rows), numbers)
            call.bytes += numbers.nbytes
    return call.bytes


# --- blocks --------------------------------------------------------------------------------------


def _run(
    job: Job,
    blocks: Blocks,
    output: Output,
    where: tuple[Any, int],
    *,
    begun: bool,
    watch: Callable[[Progress], None] | None,
) -> Progress:
    """Make what is not whole, and give the outputs their names."""
    chance = random.Random(0)
    # The rows of a head are in no order: some are faster, and the time left is known sooner.
    turns = [chance.random() for _ in blocks.cuts[-1]]
    every = sorted(blocks, key=lambda block: (block[:-1], turns[block[-1]]))
    at = begin = Progress(0, len(every), 0, 0)
    try:
        checked = each(every, partial(is_whole, job), *where) if begun else ()
        whole = {block for block, kept in checked if kept}
        begin = begin._replace(blocks=len(whole), kept=len(whole))
        missing = [block for block in every if block not in whole]
        for at in run(missing, partial(make, job), begin, *where):
            if watch is not None:
                watch(at)
        for target in job.outputs.values():
            target.appear()
    except (OSError, CancelledError) as error:
        # A connection of dask's that ended is an OSError too.
        of_dask = type(error).__module__.startswith("distributed.")
        lost = isinstance(error, CancelledError | TimeoutError) or of_dask
        why = "the workers were lost" if lost else getattr(error, "strerror", None) or str(error)
        raise ProblemError(
            f"{safe_text(output.path, 200)}: is not finished: {safe_text(why, 200)}; "
            f"{at.blocks} of {at.of} blocks are in {safe_text(output.folder, 200)}, and the "
            "same call goes on from there"
        ) from error
    return at
