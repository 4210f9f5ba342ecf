"""The native kernel as a process of its own, for any CPU: compiling it, and calling it by pipe.

`Module` stands where `regard._fused` stands, so that every test of the fused kernel can run on code
for another CPU, under an emulator. The other end is native/kernel_process.cpp. Run with a compiler
and a folder, this compiles it. Knows what `kernels/fused.py` hands over, not what it means.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import math
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np

from places import ROOT, SUPPORT

UNITS = ROOT / "src/regard/compute/kernels/cpp"
LISTED = ROOT / "CMakeLists.txt"
SOURCES = ("targets.cpp", "driver.cpp", "backward_driver.cpp", "extended_range.cpp", "threads.cpp")

RUN, EXPONENTIALS, TARGETS, BACKWARD = range(4)
NO_MEMORY = 1
KINDS = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3, "int8": 4, "bool": 5}
RULES = ("boolean", "lengths", "segments", "window", "all", "any", "negate")


def flags_of(target: str) -> list[str]:
    """What CMakeLists.txt compiles this target's unit with."""
    text = LISTED.read_text("utf-8")
    common = re.search(r"target_compile_options\(target_\$\{target\} PRIVATE(.*?)\$\{", text, re.S)
    own = re.search(rf"set\(flags_{target}(.*?)\)", text, re.S)
    assert common is not None
    return flags_of_all() + common[1].split() + (own[1].split() if own else [])


def flags_of_all() -> list[str]:
    """What CMakeLists.txt compiles every unit with."""
    found = re.search(r"add_compile_options\((.*?)\)", LISTED.read_text("utf-8"), re.S)
    assert found is not None
    return found[1].split()


@functools.cache
def unit_of(compiler: str, target: str, level: str) -> Path:
    """A target's unit with the flags of the build, but optimised as said; compiled once."""
    folder = tempfile.mkdtemp(prefix="regard-unit-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    given = [flag for flag in flags_of(target) if not flag.startswith("-O")]
    unit = Path(folder, "unit.o")
    source = str(UNITS / f"target_{target}.cpp")
    _compile(compiler, "-fPIC", "-fvisibility=hidden", level, *given, "-c", source, "-o", str(unit))
    return unit


def compile_process(compiler: str, folder: Path, level: str = "-O3") -> Path:
    """The program for the compiler's own CPU, its baseline target only, optimised as said."""
    program = folder / "kernel_process"
    rest = [str(UNITS / name) for name in SOURCES]
    rest += [str(SUPPORT / "native/kernel_process.cpp"), str(unit_of(compiler, "baseline", level))]
    _compile(compiler, level, *flags_of_all(), f"-I{UNITS}", "-pthread", *rest, "-o", str(program))
    return program


def _compile(compiler: str, *arguments: str) -> None:
    command = [*shlex.split(compiler), "-std=c++17", "-Wall", "-Wextra", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr[-3000:]}")


class Module(types.ModuleType):
    """What the package and the tests use of `regard._fused`, answered by another process."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__("regard._fused")
        self.__spec__ = ModuleSpec("regard._fused", None)
        self._one_call = threading.Lock()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._names = [name for name, _ in self.targets()]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def targets(self) -> list[tuple[str, bool]]:
        with self._one_call:
            self._send([integers(TARGETS)])
            count = self._integer()
            found = [(self._receive(16), self._integer()) for _ in range(count)]
        return [(name.rstrip(b"\0").decode(), bool(runs)) for name, runs in found]

    def use(self, target: str, threads: int, spin: int) -> None:
        """The fast path is not answered here: there is nothing to remember."""

    def fast_path(self, *arguments: Any) -> None:
        return None

    fast_path_of_bytes = fast_path

    def usable_cpus(self) -> int:
        return 1

    def exponential(self, x: np.ndarray, target: str) -> np.ndarray:
        with self._one_call:
            self._send([integers(EXPONENTIALS, self._names.index(target), x.size), *block(x)])
            return np.frombuffer(self._receive(x.nbytes), np.float32).copy()

    def run(
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        output: np.ndarray,
        weights: np.ndarray | None,
        lse: np.ndarray | None,
        bias: np.ndarray | None,
        bias_rows: np.ndarray | None,
        sink: np.ndarray | None,
        positions: np.ndarray | None,
        length: np.ndarray | None,
        left: int,
        right: int,
        rules: list[tuple[Any, ...]],
        scale: float,
        softcap: float,
        sigmoid: float,
        wide: bool,
        high: bool,
        threads: int,
        target: str,
        turns: None,  # rows are turned by a kernel of this machine alone
    ) -> None:
        assert turns is None
        inputs = query, key, value, bias, bias_rows, sink, positions, length, left, right, rules
        parts = self._request(RUN, *inputs, scale, softcap, sigmoid, wide, high, threads, target)
        parts += [integers(KINDS[output.dtype.name], weights is not None, lse is not None)]
        parts += [integers(KINDS["float32" if lse is None else lse.dtype.name])]
        with self._one_call:
            self._send(parts)
            if self._integer() == NO_MEMORY:
                raise MemoryError
            for result in (output, weights, lse):
                if result is not None:
                    result.reshape(-1).view(np.uint8)[:] = np.frombuffer(
                        self._receive(result.nbytes), np.uint8
                    )

    def run_backward(
        self,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        output: np.ndarray,
        grad_output: np.ndarray,
        lse: np.ndarray,
        grad_lse: np.ndarray | None,
        d_query: np.ndarray | None,
        d_key: np.ndarray | None,
        d_value: np.ndarray | None,
        d_bias: np.ndarray | None,
        d_scale: np.ndarray | None,
        d_sink: np.ndarray | None,
        beyond: np.ndarray,
        checks: np.ndarray | None,
        longest: np.ndarray | None,
        heads: np.ndarray,
        shared: bool,
        *options: Any,
    ) -> None:
        parts = self._request(BACKWARD, query, key, value, *options)
        parts += [*array(output), *array(grad_output), *block(lse), *block(grad_lse)]
        own = d_query, d_key, d_value
        parts += [integers(*(KINDS["float32" if x is None else x.dtype.name] for x in own))]
        rest = d_scale, d_sink, checks, longest, beyond
        for x in own:
            parts += block(x)
        parts += array(d_bias)
        for x in rest:
            parts += block(x)
        parts += [integers(heads.size), *block(heads), integers(shared)]
        with self._one_call:
            self._send(parts)
            if self._integer() == NO_MEMORY:
                raise MemoryError
            for result in (*own, d_bias, *rest):
                if result is not None and result.size:
                    low, high = np.lib.array_utils.byte_bounds(result)
                    ctypes.memmove(low, self._receive(high - low), high - low)

    def _request(
        self,
        order: int,
        query: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        bias: np.ndarray | None,
        bias_rows: np.ndarray | None,
        sink: np.ndarray | None,
        positions: np.ndarray | None,
        length: np.ndarray | None,
        left: int,
        right: int,
        rules: list[tuple[Any, ...]],
        scale: float,
        softcap: float,
        sigmoid: float,
        wide: bool,
        high: bool,
        threads: int,
        target: str,
    ) -> list[bytes]:
        """What every call begins with."""
        (heads, rows, width), (groups, size, columns) = query.shape[-3:], value.shape[-3:]
        if value.dtype == np.int8:
            columns -= 4  # the scale of the row, as module.cpp counts it
        if np.isnan(scale):
            scale = 1 / math.sqrt(width) if width else 1.0  # as module.cpp does, to the last bit
        batch = int(np.prod(query.shape[:-3], dtype=np.int64))
        parts = [integers(order, self._names.index(target), threads)]
        parts += [integers(batch, heads, groups, rows, size, width, columns, left, right)]
        parts += [integers(wide, high)]
        parts += [struct.pack("=3d", scale, softcap, sigmoid)]
        for x in (query, key, value, bias):
            parts += array(x)
        for x in (bias_rows, sink, positions, length):
            parts += block(x)
        return parts + program(rules)

    def _send(self, parts: list[bytes]) -> None:
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"the kernel's process ended with {self._process.wait(30)}")
        return data

    def _integer(self) -> int:
        return struct.unpack("=q", self._receive(8))[0]


def integers(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}q", *(int(n) for n in numbers))


def block(x: np.ndarray | None) -> list[bytes]:
    """The bytes of an array, from its first to its last, and where they stand modulo 64."""
    if x is None:
        return [integers(-1)]
    low, high = np.lib.array_utils.byte_bounds(x) if x.size else (0, 0)
    return [integers(high - low, low % 64), ctypes.string_at(low, high - low) if x.size else b""]


def array(x: np.ndarray | None) -> list[bytes]:
    """An array (…, heads, rows, columns) as its memory, strides and one offset per batch."""
    if x is None:
        return block(None)
    first = x.__array_interface__["data"][0] - np.lib.array_utils.byte_bounds(x)[0] if x.size else 0
    *lead, head, row, column = x.strides
    offsets = np.zeros((), np.int64)
    for n, stride in zip(x.shape[:-3], lead, strict=True):
        offsets = np.add.outer(offsets, np.arange(n) * stride)
    kind = KINDS[x.dtype.name]
    return [*block(x), integers(first, kind, head, row, column), *block(offsets.reshape(-1))]


def program(rules: list[tuple[Any, ...]]) -> list[bytes]:
    parts = [integers(len(rules))]
    for name, first, second, left, right in rules:
        parts += [integers(RULES.index(name), left, right)]
        parts += array(first if name == "boolean" else None)
        parts += block(first if name == "lengths" else None)
        parts += block(first if name == "segments" else None)
        parts += block(second if name == "segments" else None)
    return parts


if __name__ == "__main__":
    compile_process(sys.argv[1], Path(sys.argv[2]))
