"""NPZ archives: plain arrays by name; for problems, what is no array as JSON in one, `problem`.

Reads without `numpy.load`: every size is compared with a limit before memory is taken for it, names
inside an archive lead nowhere, and nothing is ever unpickled. Must not know the keys.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from regard.boundary import toml_json
from regard.boundary.parse import shown
from regard.errors import ProblemError, safe_text

MAX_MEMBERS = 64
MAX_BYTES = 2**30  # of all arrays, unpacked
MAX_NUMBERS = MAX_BYTES // 8  # every number becomes a float64, however narrow it comes
MAX_RATIO = 200
FREE_BYTES = 16 * 2**20  # an archive this small unpacked may be packed as tightly as it likes
HEADER = "problem"

_Member = tuple[str, zipfile.ZipInfo]  # and the key that it is for

_CHUNK = 2**20
# What zipfile and zlib raise on archives that are damaged, or of a kind they do not know.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    EOFError,
    OverflowError,
    ValueError,
)


def read(file: BinaryIO) -> dict[str, Any]:
    """The mapping that an archive holds; arrays stay arrays."""
    return _assembled(read_arrays(file, MAX_BYTES, MAX_NUMBERS))


def read_arrays(file: BinaryIO, most_bytes: int, most_numbers: int) -> dict[str, NDArray[Any]]:
    """The arrays of an archive, which unpack to so many bytes and numbers at most."""
    try:
        _check_directory(file, most_bytes)
        with zipfile.ZipFile(file) as archive:
            members = [(_key(info), info) for info in archive.infolist()]
            _check_members(members, most_bytes)
            return _read_members(archive, members, most_numbers)
    except ProblemError:
        raise
    except _DAMAGE as error:
        raise ProblemError(f"archive is damaged: {safe_text(error, 120)}") from None


def write(file: BinaryIO, data: Mapping[str, Any]) -> None:
    """An archive of a mapping: the same bytes for the same mapping."""
    arrays: dict[str, NDArray[Any]] = {}
    rest = _without_arrays(data, "", arrays)
    arrays = {HEADER: np.array(toml_json.spell(rest, "json")), **arrays}
    total = sum(array.nbytes for array in arrays.values())
    numbers = sum(array.size for array in arrays.values())
    if total > MAX_BYTES or numbers > MAX_NUMBERS:
        raise ProblemError(
            f"problem has {numbers} numbers, {total} bytes; "
            f"at most {MAX_NUMBERS} and {MAX_BYTES} could be read again"
        )
    write_arrays(file, arrays)


def write_arrays(file: BinaryIO, arrays: Mapping[str, NDArray[Any]]) -> None:
    """An archive of arrays, not packed: the same bytes for the same arrays."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(info, "w") as member:
                np.lib.format.write_array(member, array, version=(1, 0), allow_pickle=False)


# --- the archive ---------------------------------------------------------------------------------


def _check_directory(file: BinaryIO, most_bytes: int) -> None:
    """Refuse a directory of endless members before it is read; none of ours needs ZIP64."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 42))
    tail = file.read(42)
    end = tail[-22:]
    if len(end) < 22 or end[:4] != b"PK\x05\x06" or end[-2:] != b"\x00\x00":
        raise ProblemError("archive is not an NPZ file, or is cut off")
    if tail[:4] == b"PK\x06\x07":
        raise ProblemError(f"archive is of the ZIP64 kind, for more than {most_bytes} bytes")
    count, length = struct.unpack("<HI", end[10:16])
    if count > MAX_MEMBERS or length > MAX_MEMBERS * 1024:
        raise ProblemError(
            f"archive has {count} members in a directory of {length} bytes; "
            f"at most {MAX_MEMBERS} members and {MAX_MEMBERS * 1024} bytes are read"
        )
    file.seek(0)


def _key(info: zipfile.ZipInfo) -> str:
    """The key that a member of the archive is for."""
    # A key and ".npy": no folder, no way up, nothing that a file system would treat specially.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]{0,99}\.npy", info.orig_filename):
        raise ProblemError(
            f"archive has a member named {shown(info.orig_filename)}; "
            'members are keys followed by ".npy"'
        )
    name = info.orig_filename.removesuffix(".npy")
    if info.flag_bits & 0x1:
        raise ProblemError(f"{name} is encrypted; save it without a password")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ProblemError(
            f"{name} is packed by method {info.compress_type}; only 0 (stored) and 8 (deflated) "
            "are read"
        )
    return name


def _check_members(members: list[_Member], most_bytes: int) -> None:
    if len(members) > MAX_MEMBERS:
        raise ProblemError(f"archive has {len(members)} members; at most {MAX_MEMBERS} are read")
    names = [name for name, _ in members]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(f"{name} appears {names.count(name)} times in the archive")
    unpacked = sum(info.file_size for _, info in members)
    packed = sum(info.compress_size for _, info in members)
    if unpacked > most_bytes:
        raise ProblemError(f"archive unpacks to {unpacked} bytes; at most {most_bytes} are read")
    if unpacked > FREE_BYTES and unpacked > MAX_RATIO * packed:
        raise ProblemError(
            f"archive unpacks from {packed} to {unpacked} bytes; "
            f"above {FREE_BYTES} it may grow {MAX_RATIO} times at most"
        )


# --- one array -----------------------------------------------------------------------------------

_FIELD = re.compile(
    r"\s*'(?:descr'\s*:\s*'(?P<descr>[^'\\]{1,20})'"
    r"|fortran_order'\s*:\s*(?P<fortran>True|False)"
    r"|shape'\s*:\s*\((?P<shape>[0-9,\s]{0,200})\))\s*,?"
)
# Booleans, integers, floats up to 64 bits, text.
_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|U[0-9]{1,8})")


def _read_members(
    archive: zipfile.ZipFile, members: list[_Member], most_numbers: int
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    numbers = 0
    for name, info in members:
        with archive.open(info) as file:
            dtype, shape, order = _read_header(file, name, info.file_size)
            numbers += math.prod(shape)
            if numbers > most_numbers:
                raise ProblemError(
                    f"{name} brings the archive to {numbers} numbers; "
                    f"at most {most_numbers} are read"
                )
            data = _read_exactly(file, math.prod(shape) * dtype.itemsize, name)
            if file.read(1):  # also what makes zipfile compare the checksum
                raise ProblemError(f"{name} has bytes after its last number")
        if dtype == np.bool_ and data.translate(None, b"\x00\x01"):
            raise ProblemError(f"{name} has a boolean that is neither 0 nor 1")
        if dtype.kind == "U" and _has_no_character(data, dtype):
            raise ProblemError(f"{name} has a code point that is not a character")
        arrays[name] = np.frombuffer(data, dtype).reshape(shape, order=order)
    return arrays


def _read_header(file: Any, name: str, size: int) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    """The dtype, shape and order of an array in a member of so many bytes, checked against it."""
    start = _read_exactly(file, 8, name)
    if start[:6] != b"\x93NUMPY" or start[6] not in (1, 2, 3):
        raise ProblemError(f"{name} is not an NPY array")
    length_bytes = 2 if start[6] == 1 else 4
    length = int.from_bytes(_read_exactly(file, length_bytes, name), "little")
    if length > 4096:
        raise ProblemError(f"{name} has a header of {length} bytes; at most 4096 are read")
    header = _read_exactly(file, length, name).decode("latin-1")
    found: dict[str, str] = {}
    inner = header.strip().removeprefix("{").removesuffix("}")
    position = 0
    while match := _FIELD.match(inner, position):
        found |= {key: value for key, value in match.groupdict().items() if value is not None}
        position = match.end()
    if inner[position:].strip() or found.keys() != {"descr", "fortran", "shape"}:
        raise ProblemError(
            f"{name} is not a plain array of numbers, booleans or text; its header is "
            f"{shown(header)}"
        )
    shape = tuple(int(size) for size in re.findall(r"\d+", found["shape"]))
    if not _DTYPE.fullmatch(found["descr"]):
        raise ProblemError(
            f"{name} has the dtype {shown(found['descr'])}; only booleans, integers, floats of at "
            "most 64 bits and text are read"
        )
    dtype = np.dtype(found["descr"])
    if len(shape) > 8:
        raise ProblemError(f"{name} has {len(shape)} axes; at most 8 are read")
    declared = math.prod(shape) * dtype.itemsize
    present = size - 8 - length_bytes - length
    if declared != present:
        raise ProblemError(
            f"{name} has the shape {shape} of {dtype}, {declared} bytes, "
            f"but {present} bytes are there"
        )
    return dtype, shape, "F" if found["fortran"] == "True" else "C"


def _read_exactly(file: Any, count: int, name: str) -> bytearray:
    """So many bytes, in pieces: memory is taken only for what is really there."""
    data = bytearray()
    while len(data) < count:
        piece = file.read(min(_CHUNK, count - len(data)))
        if not piece:
            raise ProblemError(f"{name} is cut off: {len(data)} bytes of {count} are there")
        data += piece
    return data


def _has_no_character(data: bytearray, dtype: np.dtype[Any]) -> bool:
    """Text is stored as 32-bit code points, and a file may hold any 32 bits."""
    points = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
    return bool(points.size) and int(points.max()) > 0x10FFFF


# --- arrays and the rest -------------------------------------------------------------------------


def _assembled(arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
    """The JSON of the header member with every other member put in its place."""
    data: Any = {}
    header = arrays.pop(HEADER, None)
    if header is not None:
        if header.dtype.kind != "U" or header.ndim:
            raise ProblemError(
                f"{HEADER} must be one string of JSON, not an array of {header.dtype}"
            )
        data = toml_json.parse(header.item(), "json", HEADER)
        if not isinstance(data, dict):
            raise ProblemError(f"{HEADER} must be a JSON object, not {shown(data)}")
    for path, array in arrays.items():
        *parents, last = path.split(".")
        table = data
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise ProblemError(f"{path} has no place: {parent} is {shown(table)}")
        if last in table:
            raise ProblemError(f"{path} is both a member and a key of {HEADER}")
        table[last] = array
    return data  # type: ignore[no-any-return]


def _without_arrays(data: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """The same mapping without its arrays, which go to `arrays` under their paths."""
    rest: dict[str, Any] = {}
    for key, value in data.items():
        below = f"{path}.{key}" if path else key
        # Expectations stay whole in the header: there may be more of them than members.
        if isinstance(value, np.ndarray):
            arrays[below] = value
        elif isinstance(value, Mapping) and key != "expect":
            rest[key] = _without_arrays(value, below, arrays)
        else:
            rest[key] = value
    return {key: value for key, value in rest.items() if value != {}}
