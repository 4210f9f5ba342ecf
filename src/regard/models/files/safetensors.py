"""The tensors of a model directory: safetensors files, whole or in shards.

The format is eight bytes with the length of a header, the header in JSON, then the numbers. A
header is checked against the file before memory is allocated. Must not know models.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

from regard.boundary.files import MAX_TEXT_BYTES, about, decode, open_file, read_file
from regard.boundary.parse import MAX_AXES, shown
from regard.boundary.toml_json import parse
from regard.errors import ProblemError, safe_text
from regard.models.files.tensors import MAX_FILE_BYTES, Tensor

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = MAX_TEXT_BYTES
MAX_SHARDS = 1024

# Bytes of one number. Tensors that are not floats may be in a file, but are never read.
_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def find_tensors(folder: str) -> tuple[str, dict[str, Tensor]]:
    """The file to name in errors, and all tensors of a directory by name."""
    whole, index = os.path.join(folder, WHOLE), os.path.join(folder, INDEX)
    if os.path.lexists(whole):
        return whole, _tensors_of(whole)
    if os.path.lexists(index):
        return index, _tensors_of_shards(folder, index)
    with about(folder):
        raise ProblemError(_nothing_to_read(folder))


def read_json(folder: str, name: str, *, needed: bool = True) -> tuple[str, Any]:
    """The path and content of a JSON file; the content is None if an optional file is absent."""
    path = os.path.join(folder, name)
    with about(path):
        if not needed and not os.path.lexists(path):
            return path, None
        return path, parse(decode(read_file(path, MAX_TEXT_BYTES)), "json")


def read_table(folder: str, name: str, *, needed: bool = True) -> tuple[str, dict[str, Any]]:
    """The path and content of a JSON object; empty if an optional file is absent."""
    path, table = read_json(folder, name, needed=needed)
    if table is not None and not isinstance(table, dict):
        with about(path):
            raise ProblemError(f"must be a table, not {shown(table)}")
    return path, table or {}


def plain_name(name: Any) -> bool:
    """Whether a name from inside a file stays in its own directory."""
    return isinstance(name, str) and bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", name))


# --- one file ------------------------------------------------------------------------------------


def _tensors_of(path: str) -> dict[str, Tensor]:
    with about(path), open_file(path, MAX_FILE_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if start == b"version ":
            raise ProblemError("is a Git LFS pointer, not the file itself; run git lfs pull")
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            raise ProblemError(
                f"is cut off or not a safetensors file: it has {size} bytes, but the first 8 "
                f"announce a header of {length}"
            )
        if length > MAX_HEADER_BYTES:
            raise ProblemError(
                f"has a header of {length} bytes; at most {MAX_HEADER_BYTES} are read"
            )
        header = file.read(length)
        if len(header) != length or header[:1] != b"{":
            raise ProblemError("has a header that is not a JSON object")
        table = parse(decode(header), "json", "header")
        metadata = table.pop("__metadata__", None)
        if metadata is not None and not isinstance(metadata, dict):
            raise ProblemError(f"__metadata__ must be a table, not {shown(metadata)}")
        tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in table.items()}
        _check_layout(list(tensors.values()), 8 + length, size)
        return tensors


def _tensor(path: str, name: str, entry: Any, data: int) -> Tensor:
    """One entry of the header, checked by itself; `data` is where the header ends."""
    own = safe_text(name, 120)
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ProblemError(f"{own} must have exactly dtype, shape and data_offsets in the header")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BYTES:
        raise ProblemError(f"{own} has the dtype {shown(dtype)}; known are {', '.join(_BYTES)}")
    for key, value in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(value, list) or not all(map(_is_size, value)):
            raise ProblemError(f"{key} of {own} is not a list of whole numbers, 0 or more")
    if len(shape) > MAX_AXES:
        raise ProblemError(f"{own} has {len(shape)} axes; at most {MAX_AXES} are read")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ProblemError(
            f"{own} has the data_offsets {safe_text(offsets, 60)}; they must be the first byte "
            "and the end of its data"
        )
    needed, declared = math.prod(shape) * _BYTES[dtype], offsets[1] - offsets[0]
    if needed != declared:
        raise ProblemError(
            f"{own} has the shape {safe_text(tuple(shape), 120)} of {dtype}, {needed} bytes, "
            f"but its data_offsets span {declared}"
        )
    return Tensor(name, path, dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _check_layout(tensors: list[Tensor], data: int, size: int) -> None:
    """Check that the tensors fill the file from `data` to `size`, without gap or overlap."""
    position, previous = data, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.end)):
        own, begin, end = safe_text(tensor.name, 120), tensor.start - data, tensor.end - data
        if tensor.end > size:
            raise ProblemError(
                f"{own} ends at byte {end} of the data, but only {size - data} bytes are there: "
                "the file is cut off or damaged"
            )
        if tensor.start != position:
            what = "overlaps" if tensor.start < position else "leaves a gap after"
            raise ProblemError(
                f"{own} begins at byte {begin} of the data and {what} {previous}, which "
                f"ends at {position - data}"
            )
        position, previous = tensor.end, own
    if position != size:
        raise ProblemError(f"{size - position} bytes at the end belong to no tensor")


# --- several files -------------------------------------------------------------------------------


def _tensors_of_shards(folder: str, index: str) -> dict[str, Tensor]:
    _, table = read_table(folder, INDEX)
    with about(index):
        places = table.get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ProblemError("weight_map must be a table from tensors to files")
        for name, file in places.items():
            if not plain_name(file) or not file.endswith(".safetensors"):
                raise ProblemError(
                    f"weight_map has {safe_text(name, 120)} in {shown(file)}; it must be the name "
                    "of a .safetensors file beside the index"
                )
        if len(set(places.values())) > MAX_SHARDS:
            raise ProblemError(f"weight_map names more than {MAX_SHARDS} files")
    shards = {file: _tensors_of(os.path.join(folder, file)) for file in set(places.values())}
    with about(index):
        for name, file in places.items():
            if name not in shards[file]:
                raise ProblemError(f"{file} has no {safe_text(name, 120)}, but weight_map says so")
    return {name: shards[file][name] for name, file in places.items()}


def _nothing_to_read(folder: str) -> str:
    """Why there are no weights in a directory, and how to get some."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    pickled = [name for name in names if re.fullmatch(r"pytorch_model.*\.(bin|pt)", name)]
    if pickled:
        return (
            f"there is {safe_text(pickled[0], 60)} but no {WHOLE}; pickled weights can run any "
            "code and are never read. If you trust them, convert them with transformers: "
            "AutoModel.from_pretrained(directory).save_pretrained(new_directory)"
        )
    return f"there is neither {WHOLE} nor {INDEX}"
