"""The header of a GGUF file: what it says of a model, and where its tensors are.

Numbers are little-endian. Every count is checked against the file before anything of its size is
made. The library gguf decodes quantised numbers; see tensors.py. Must not know models.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from regard.boundary.files import about, map_file
from regard.errors import ProblemError, safe_text
from regard.models.files.tensors import BLOCKS, MAX_FILE_BYTES, Tensor

MAX_HEADER_BYTES = 2**26
MAX_ENTRIES = 2**22  # keys, tensors, and elements of all arrays
_ALIGNMENT = 32
# By the numbers that files have for them: struct's letter, or NumPy's type.
_SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?")))
_SCALARS |= {10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9
_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K"}
_TYPES |= {30: "BF16"}


def read_gguf(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a GGUF file says by key, and its tensors by name."""
    with about(path):
        data = map_file(path, 0, MAX_FILE_BYTES, MAX_FILE_BYTES)
        if bytes(data[:4]) != b"GGUF":
            raise ProblemError("is not a GGUF file: it does not begin with GGUF")
        header = _Header(data)
        version = header.number("<I")
        if version not in (2, 3):
            raise ProblemError(
                f"is GGUF of version {version}, or of another byte order; 2 and 3 are read"
            )
        tensors, keys = header.count("<Q", "tensors"), header.count("<Q", "keys")
        said: dict[str, Any] = {}
        for _ in range(keys):
            key = header.text()
            if key in said:
                raise ProblemError(f"has {safe_text(key, 120)} twice")
            said[key] = header.value(header.number("<I"))
        entries = [_entry(header) for _ in range(tensors)]
        align = said.get("general.alignment", _ALIGNMENT)
        if not isinstance(align, int) or not 0 < align <= 2**20 or align % 8:
            raise ProblemError(f"general.alignment is {safe_text(repr(align), 40)}")
        begin = -(-header.at // align) * align
        found: dict[str, Tensor] = {}
        for name, kind, shape, offset, size in entries:
            own = safe_text(name, 120)
            if name in found:
                raise ProblemError(f"has the tensor {own} twice")
            if begin + offset + size > len(data):
                raise ProblemError(
                    f"{own} ends at byte {begin + offset + size}, but the file has {len(data)}: "
                    "it is cut off or damaged"
                )
            found[name] = Tensor(name, path, kind, shape, begin + offset, begin + offset + size)
        return said, found


def _entry(header: _Header) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, type, shape, offset and bytes of a tensor; the file has the last axis first."""
    name = header.text()
    own = safe_text(name, 120)
    axes = header.number("<I")
    if not 0 < axes <= 4:
        raise ProblemError(f"{own} has {axes} axes; 1 to 4 are read")
    shape = tuple(header.number("<Q") for _ in range(axes))[::-1]
    number = header.number("<I")
    kind = _TYPES.get(number)
    if kind is None:
        raise ProblemError(
            f"{own} has the type number {number}, which is not supported; supported are "
            f"{', '.join(_TYPES.values())}"
        )
    numbers, size = BLOCKS.get(kind) or (1, _FLOAT_BYTES[kind])
    if min(shape) < 1 or math.prod(shape) >= 2**40 or shape[-1] % numbers:
        raise ProblemError(
            f"{own} has the shape {safe_text(shape, 80)} of {kind}, whose rows are made of blocks "
            f"of {numbers}"
        )
    return name, kind, shape, header.number("<Q"), math.prod(shape) // numbers * size


class _Header:
    """Reads the beginning of a file, value by value."""

    def __init__(self, data: memoryview) -> None:
        self.data = data[:MAX_HEADER_BYTES]
        self.whole = len(data)
        self.at, self.left = 4, MAX_ENTRIES

    def take(self, size: int) -> memoryview:
        """The next bytes."""
        if size > len(self.data) - self.at:
            if self.at + size <= self.whole:
                raise ProblemError(f"has a header of more than {MAX_HEADER_BYTES} bytes")
            raise ProblemError(
                f"is cut off or damaged: its header needs {safe_text(size, 40)} bytes at "
                f"{self.at}, but the file has {self.whole}"
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, letter: str) -> Any:
        return struct.unpack(letter, self.take(struct.calcsize(letter)))[0]

    def count(self, letter: str, what: str) -> int:
        """How many there are of something, each of which takes room and time."""
        number = int(self.number(letter))
        if number > self.left:
            raise ProblemError(f"announces {number} {what}; at most {MAX_ENTRIES} are read")
        self.left -= number
        return number

    def text(self) -> str:
        size = int(self.number("<Q"))
        return bytes(self.take(size)).decode("utf-8", "replace")

    def texts(self, count: int) -> list[str]:
        """Many of them: a vocabulary has some hundred thousand."""
        data, at, found = self.data, self.at, list[str]()
        for _ in range(count):
            begin = at + 8
            end = begin + int.from_bytes(data[at:begin], "little")
            if end > len(data):
                break
            found.append(str(data[begin:end], "utf-8", "replace"))
            at = end
        self.at = at
        return found + [self.text() for _ in range(count - len(found))]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise ProblemError(f"has a value of the type number {kind}, which is not known")
        kind = self.number("<I")
        count = self.count("<Q", "elements of an array")
        if kind == _TEXT:
            return self.texts(count)
        if kind not in _SCALARS:
            raise ProblemError(f"has an array of the type number {kind}, which is not known")
        letter = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * letter.itemsize), letter).tolist()
