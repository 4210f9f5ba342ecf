"""The machine: its description, and its peak multiply-adds, read bandwidth and clock.

Measured with all threads, in the same run as everything else.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from regard.compute import native

# Larger than any cache, so that reads come from memory.
READ_BYTES = 2**29


@dataclass(frozen=True)
class Peak:
    """The peak of one CPU target over all threads, in operations per second."""

    target: str
    lanes: int  # of float32
    float32: float
    float64: float


@dataclass(frozen=True)
class Limits:
    """Peaks of the machine; `clock` in Hz with all threads busy, `read` in bytes per second."""

    threads: int
    clock: float
    peaks: tuple[Peak, ...]
    read: float

    def peak(self, dtype: str) -> float:
        """The largest peak of all targets, whichever target regard uses."""
        wide = dtype == "float64"
        return max((peak.float64 if wide else peak.float32 for peak in self.peaks), default=0.0)

    def multiply_adds_per_cycle(self, peak: Peak) -> float:
        """Vector multiply-adds of one thread per cycle: 1 or 2 on today's CPUs."""
        return peak.float32 / (self.threads * self.clock * peak.lanes * 2) if self.clock else 0.0


def measured_limits(threads: int) -> Limits | None:
    """Measure the peaks, for about half a second; None without the native module."""
    if not native.BUILT:
        return None
    module = native.module
    peaks = tuple(
        Peak(
            target,
            module.lanes(target),
            module.multiply_add_peak(threads, 0.05, False, target),
            module.multiply_add_peak(threads, 0.05, True, target),
        )
        for target, runs in native.targets().items()
        if runs
    )
    data = np.ones(READ_BYTES // 4, np.float32)
    read = module.read_bandwidth(data, threads, 0.2, native.target)
    return Limits(threads, module.clock_frequency(threads, 0.05), peaks, read)


def largest(measured: Sequence[Limits]) -> Limits | None:
    """The largest of each figure: a disturbance only lowers it. None of none."""
    if not measured:
        return None

    def best(name: str, of: Sequence[Limits | Peak]) -> float:
        return float(max(getattr(one, name) for one in of))

    peaks = tuple(
        replace(same[0], float32=best("float32", same), float64=best("float64", same))
        for same in zip(*(one.peaks for one in measured), strict=True)
    )
    return replace(
        measured[0], clock=best("clock", measured), peaks=peaks, read=best("read", measured)
    )


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
