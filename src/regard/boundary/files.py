"""The only module that opens files: regular files of bounded size, written atomically.

Must not know their content. An error of writing names the file; those of reading, and of what was
read, are put under its name by `about`.
"""

from __future__ import annotations

import io
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from regard.boundary.parse import shown
from regard.errors import ProblemError, Setting, safe_text

MAX_TEXT_BYTES = 16 * 2**20  # of a file of text


def file_name(path: Any) -> str:
    """A path as text that the file system takes."""
    try:
        place = os.fsdecode(path)
        os.fsencode(place)
    except (TypeError, UnicodeError):
        raise ProblemError(f"path must be a file name, not {shown(path)}") from None
    if not place or "\0" in place:
        raise ProblemError(f"path must be a file name, not {shown(place)}")
    return place


@contextmanager
def about(source: str) -> Iterator[None]:
    """Every error below is about this file, and says so."""
    try:
        yield
    except MemoryError:
        raise ProblemError(f"{safe_text(source, 200)}: needs more memory than there is") from None
    except ProblemError as error:
        raise ProblemError(f"{safe_text(source, 200)}: {error}") from None


def decode(data: bytes) -> str:
    """The text of a file: UTF-8, with or without a byte-order mark."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ProblemError("text is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProblemError(
            f"text is not UTF-8: byte 0x{data[error.start]:02x} at position {error.start}"
        ) from None


def read_file(path: str, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes."""
    with open_file(path, limit) as file:
        data = file.read(limit + 1)
    if len(data) > limit:  # it grew, or lies about its size as files under /proc do
        raise ProblemError(f"has more than {limit} bytes, the most that are read")
    return data


@contextmanager
def open_file(path: str, limit: int) -> Iterator[BinaryIO]:
    """A regular file of at most `limit` bytes, open for reading."""
    with _plain_errors("cannot be read"):
        _check_kind(os.stat(path))
        with io.BufferedReader(_opened(path)) as file:
            status = os.fstat(file.fileno())
            _check_kind(status)
            if status.st_size > limit:
                raise ProblemError(f"has {status.st_size} bytes; at most {limit} are read")
            yield file


def map_file(path: str, start: int, end: int, limit: int) -> memoryview:
    """Some bytes of a regular file, read from it when they are looked at; fewer if it is shorter.

    The file must not become shorter while they are in use.
    """
    with open_file(path, limit) as file:
        end = min(end, os.fstat(file.fileno()).st_size)
        if end <= start:
            return memoryview(b"")
        before = start % mmap.ALLOCATIONGRANULARITY
        with _plain_errors("cannot be read"):
            mapped = mmap.mmap(
                file.fileno(), end - start + before, access=mmap.ACCESS_READ, offset=start - before
            )
        return memoryview(mapped)[before:]


def begins_with(path: str, mark: bytes) -> bool:
    """Whether a regular file, not a link to one, has these bytes among its first kilobyte."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with io.BufferedReader(_opened(path)) as file:
            return mark in file.read(1024)
    except OSError:
        return False


@contextmanager
def write_file(path: str, *, force: bool) -> Iterator[BinaryIO]:
    """A temporary file beside `path`, renamed to `path` in one step when it is written."""
    place = safe_text(path, 200)
    with _plain_errors(f"{place}: cannot be written"):
        with suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISREG(mode):
                raise ProblemError(
                    f"{place}: is {_kind(mode)}, which is never replaced; give another name"
                )
            if not force:
                raise ProblemError(
                    f"{place}: already exists; pass ", Setting("force", True), " to replace it"
                )
        folder, name = os.path.split(path)
        if folder and not os.path.isdir(folder):
            raise ProblemError(
                f"{place}: cannot be written: there is no folder {safe_text(folder, 120)}"
            )
        beside = os.path.join(folder, f".{name[:40]}.{os.urandom(6).hex()}.part")
        try:
            # A new file with the rights of any other; a link of this name is not followed.
            with open(beside, "xb") as file:
                yield file
            os.replace(beside, path)
        except BaseException:  # an interrupt too leaves nothing behind
            with suppress(OSError):
                os.unlink(beside)
            raise


def _opened(path: str) -> io.FileIO:
    """A file that closes itself, made in one step: an interrupt comes before it or after."""
    flags = os.O_RDONLY
    # Without O_NONBLOCK, opening a FIFO waits for a writer, forever if need be.
    for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    return next(map(io.FileIO, map(os.open, (path,), (flags,))))


def _check_kind(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ProblemError(f"is {_kind(status.st_mode)}, not a file that can be read")


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ProblemError(f"{what}: {error.strerror or type(error).__name__}") from None


def _kind(mode: int) -> str:
    for test, kind in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISREG, "a file"),
    ):
        if test(mode):
            return kind
    return "a device"
