"""The machine: its description, its free memory, and its peak multiply-adds, reading and clock.

The peaks are measured with all threads, in a process of their own that takes turns with the
libraries: see `Meter`.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.bench.cases import Case
from regard.boundary.arrays import Array
from regard.compute import native

# Larger than most caches, so that reads come from memory.
READ_BYTES = 2**29
# As in `Peak` and in the native module; the last one is 0 without instructions for pairs.
KINDS = ("float32", "float64", "bfloat16")
BURST = 0.05  # seconds of windows, the best of which counts


@dataclass(frozen=True)
class Peak:
    """The peak of one CPU target over all threads, in operations per second."""

    target: str
    lanes: int  # of float32
    float32: float
    float64: float
    bfloat16: float = 0.0  # products of pairs, added in float32; 0 without such instructions


@dataclass(frozen=True)
class Limits:
    """Peaks of the machine; `clock` in Hz with all threads busy, `read` in bytes per second."""

    threads: int
    clock: float
    peaks: tuple[Peak, ...]
    read: float

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Limits:
        """What `asdict` made of limits."""
        return cls(**{**data, "peaks": tuple(Peak(**one) for one in data["peaks"])})

    def what(self, case: Case) -> str | None:
        """What bounds a case: a type of `Peak`, reading so many bytes, or nothing."""
        if case.unit == "GB/s":
            return f"read {min(case.bytes, READ_BYTES)}"
        if case.unit != "GF/s":
            return None
        if case.dtype == "bfloat16" and any(peak.bfloat16 for peak in self.peaks):
            return "bfloat16"
        return "float64" if case.dtype == "float64" else "float32"

    def best(self, kind: str) -> Peak:
        """The target with the largest peak of a type, whichever target regard uses."""
        return max(self.peaks, key=lambda peak: float(getattr(peak, kind)))

    def raised(self, what: str, rate: float) -> Limits:
        """The same where `rate` is no more: a disturbance only lowers a measurement."""
        if what.startswith("read"):
            whole = what == f"read {READ_BYTES}"
            return replace(self, read=max(self.read, rate)) if whole else self
        best = self.best(what)
        more = replace(best, **{what: max(rate, getattr(best, what))})
        return replace(self, peaks=tuple(more if one is best else one for one in self.peaks))

    def multiply_adds_per_cycle(self, peak: Peak) -> float:
        """Vector multiply-adds of one thread per cycle: 1 or 2 on today's CPUs."""
        return peak.float32 / (self.threads * self.clock * peak.lanes * 2) if self.clock else 0.0


class Meter:
    """What the machine can do at most: it takes its turn beside the libraries.

    Its "seconds" are those of one operation or one byte at the best of many windows of about a
    millisecond, so they are never less than the machine needs. What bounds a decode is measured on
    as many bytes as the case reads: caches serve both alike.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._limits = measured_limits(threads)
        self._what: str | None = None
        self._data: Array | None = None

    def limits(self) -> dict[str, Any] | None:
        """The limits measured at the start; None without the native module."""
        return None if self._limits is None else asdict(self._limits)

    def prepare(self, case: Case) -> dict[str, Array] | str:
        """Nothing, or why there is nothing to measure."""
        self.release()
        self._what = None if self._limits is None else self._limits.what(case)
        if self._what is None:
            return "nothing bounds it"
        if self._what.startswith("read"):
            self._data = np.ones(min(case.bytes, READ_BYTES) // 4, np.float32)
        return {}

    def estimate(self) -> float:
        """Seconds of one operation or byte."""
        assert self._limits is not None
        if self._data is not None:
            return 1 / _reading(self._data, self._threads, BURST)
        assert self._what is not None
        target = self._limits.best(self._what).target
        return 1 / _multiply_adds(self._threads, self._what, target)

    def block(self, warm: int, repeats: int, count: int) -> list[float]:
        """One burst, whatever the numbers."""
        return [self.estimate()]

    def release(self) -> None:
        """Let go of the array."""
        self._data = None


def measured_limits(threads: int) -> Limits | None:
    """Measure the peaks, for about half a second; None without the native module."""
    if not native.BUILT:
        return None
    module = native.module
    peaks = tuple(
        Peak(
            target,
            module.lanes(target),
            *(_multiply_adds(threads, kind, target) for kind in KINDS),
        )
        for target, runs in native.targets().items()
        if runs
    )
    read = _reading(np.ones(READ_BYTES // 4, np.float32), threads, 4 * BURST)
    return Limits(threads, module.clock_frequency(threads, BURST), peaks, read)


def _multiply_adds(threads: int, kind: str, target: str) -> float:
    return float(native.module.multiply_add_peak(threads, BURST, KINDS.index(kind), target))


def _reading(data: Array, threads: int, seconds: float) -> float:
    return float(native.module.read_bandwidth(data, threads, seconds, native.target))


def free_memory() -> float:
    """Bytes that processes can still take; infinity where the system does not say."""
    free = float("inf")
    with suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text("ascii")
        free = 1024.0 * int(text.split("MemAvailable:")[1].split()[0])
    with suppress(OSError, ValueError):  # "max": no limit; control groups v2, in a container
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("ascii"))
        free = min(free, limit - int((group / "memory.current").read_text("ascii")))
    return free


def description(threads: int) -> dict[str, Any]:
    """The machine as plain data."""
    return {
        "cpu": _cpu_name(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "system": platform.system(),
        "python": platform.python_version(),
        "target": native.target or "not built",
        "targets": [target for target, runs in native.targets().items() if runs],
        "blas": _blas(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return platform.processor() or "unknown"
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    # A virtual machine may hide the name, but not family and model.
    numbers = re.findall(r"^(cpu family|model)\s*:\s*(\d+)$", text, re.MULTILINE)[:2]
    words = [found[1]] if found else []
    words += [f"({', '.join(f'{name} {value}' for name, value in numbers)})"] if numbers else []
    return " ".join(words) or platform.processor() or "unknown"


def _blas() -> str:
    config: Any = np.show_config("dicts")
    found = config.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()
