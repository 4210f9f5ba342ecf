"""Zarr arrays on disk: which may be read, and outputs that are whole or not there.

Owns folders: what is checked before an array is opened, the checksum of each chunk, and the name
that an output has while it is made. Must not know what is computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.codecs import Crc32cCodec
from zarr.storage import LocalStore

from regard.boundary.arrays import Array
from regard.boundary.files import MAX_TEXT_BYTES, about, read_file
from regard.errors import ProblemError, Setting, safe_text

# How bytes of a chunk become numbers. Others are refused: one of them unpickles.
CODECS = {
    *("bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zlib", "zstd", "bz2", "lzma"),
    *("lz4", "shuffle", "delta", "crc32", "crc32c", "adler32", "fletcher32"),
}
# What Zarr raises for bytes that are no chunk, or not the chunk that their checksum belongs to.
DAMAGED = (ValueError, RuntimeError, OSError, KeyError, TypeError)


# --- arrays that are read ------------------------------------------------------------------------


def open_array(path: str) -> Any:
    """The Zarr array in a folder, after a look at what would decode it."""
    with about(path):
        described = _description(path)
        unknown = sorted(set(_codecs(described)) - CODECS)
        if unknown:
            raise ProblemError(
                f"has chunks in {safe_text(unknown[0], 60)}; read are {', '.join(sorted(CODECS))}"
            )
        try:
            return zarr.open_array(LocalStore(path, read_only=True), mode="r")
        except MemoryError:
            raise
        except Exception as error:  # Zarr takes the JSON for what it should be
            raise ProblemError(f"is not a Zarr array: {safe_text(error, 200)}") from None


def _description(path: str) -> Any:
    """What a folder's JSON says of its array."""
    names = [os.path.join(path, name) for name in ("zarr.json", ".zarray")]
    path_of_json = next((name for name in names if os.path.lexists(name)), None)
    if path_of_json is None:
        raise ProblemError("is not a Zarr array: there is no zarr.json or .zarray in it")
    try:
        return json.loads(read_file(path_of_json, MAX_TEXT_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"is not a Zarr array: {safe_text(error, 200)}") from None


def _codecs(described: Any) -> Iterator[str]:
    """The names of all codecs, those inside of others too."""
    if isinstance(described, list):
        for part in described:
            yield from _codecs(part)
    if not isinstance(described, dict):
        return
    for name in ("name", "id"):
        if name in described:
            yield str(described[name]).removeprefix("numcodecs.")
    inside = described.get("configuration", described)
    if isinstance(inside, dict):
        for name in ("codecs", "index_codecs", "filters", "compressor"):
            yield from _codecs(inside.get(name))


def read(path: str, array: Any, where: tuple[slice, ...]) -> Array:
    """A part of an array."""
    try:
        return np.asarray(array[where])
    except DAMAGED as error:
        place = ", ".join(f"{axis.start or 0}:{axis.stop or ''}" for axis in where)
        raise ProblemError(
            f"{safe_text(path, 200)}: cannot be read at [{place}]: {safe_text(error, 200)}"
        ) from None


def identity(path: str, array: Any) -> dict[str, Any]:
    """What tells an array from another, or from itself after a change: sizes and times of files."""
    digest = hashlib.sha256()
    for folder, inside, names in os.walk(path):
        inside.sort()
        for name in sorted(names):
            status = os.stat(os.path.join(folder, name))
            place = os.path.relpath(os.path.join(folder, name), path)
            digest.update(f"{place}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    shape, dtype = list(array.shape), str(array.dtype)
    return {"shape": shape, "dtype": dtype, "files": digest.hexdigest()[:32]}


# --- outputs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """An array that gets its name when all its chunks are whole; until then it is in `folder`."""

    path: str

    @property
    def folder(self) -> str:
        """Where it is made."""
        return os.path.normpath(self.path) + ".part"

    def check(self, inputs: Sequence[str], *, force: bool) -> None:
        """Refuse a name where something is that must stay."""
        for path in (self.path, self.folder):
            for source in inputs:
                ours, read = os.path.realpath(path), os.path.realpath(source)
                if os.path.commonpath([ours, read]) in (ours, read):
                    raise ProblemError(
                        f"{safe_text(path, 200)}: would replace the input "
                        f"{safe_text(source, 200)}; give another name"
                    )
        with about(self.path):
            if os.path.lexists(self.path):
                _description(self.path)  # nothing else is ever replaced
                if not force:
                    raise ProblemError(
                        "already exists; pass ", Setting("force", True), " to replace it"
                    )

    def settings(self) -> Any:
        """What it was begun with; None if it was not."""
        with about(self.folder):
            if not os.path.lexists(self.folder) or not os.listdir(self.folder):
                return None
            match _description(self.folder):
                case {"attributes": {"regard": dict(settings)}}:
                    return settings
            raise ProblemError("is not an unfinished output of regard; remove it")

    def check_form(self, shape: Sequence[int], chunks: Sequence[int], dtype: Any) -> None:
        """Refuse an array that was begun in another form, or without checksums."""
        with about(self.folder):
            array = open_array(self.folder)
            form = (array.shape, array.chunks, array.dtype, array.filters, array.compressors)
            if form != (tuple(shape), tuple(chunks), dtype, (), (Crc32cCodec(),)):
                raise ProblemError("was changed since it was begun; remove it")

    def begin(
        self, shape: Sequence[int], chunks: Sequence[int], dtype: Any, settings: Mapping[str, Any]
    ) -> None:
        """An array without a chunk, in place of what was begun before."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)
        zarr.create_array(
            LocalStore(self.folder),
            shape=tuple(shape),
            chunks=tuple(chunks),
            dtype=dtype,
            compressors=Crc32cCodec(),
            attributes={"regard": dict(settings)},
        )

    def keep(self, block: Sequence[int]) -> bool:
        """Whether the chunk of a block is whole; one that is not is removed."""
        array = self._array()
        at = (*block, *(0 for _ in array.shape[len(block) :]))
        path = os.path.join(self.folder, array.metadata.encode_chunk_key(at))
        if not os.path.lexists(path):
            return False
        try:
            array.get_block_selection(at)
        except DAMAGED:
            os.unlink(path)
            return False
        return True

    def write(self, where: tuple[slice, ...], numbers: Array) -> None:
        """The chunk at a place, with its checksum."""
        self._array()[where] = numbers

    def _array(self) -> Any:
        array = zarr.open_array(LocalStore(self.folder), mode="r+")
        return array.with_config({"write_empty_chunks": True})  # a chunk of zeros is one too

    def appear(self) -> None:
        """Give it its name."""
        if os.path.lexists(self.path):
            shutil.rmtree(self.path)
        os.rename(self.folder, self.path)
