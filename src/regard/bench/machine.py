"""The machine, and the most that it does: multiply-adds, reading, clock.

Owns what shares are shares of. Measured with all threads, in the same run as everything else.
"""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.compute import native

# Read from memory, not from a cache: larger than any, and larger for many threads.
READ_BYTES = 2**29


@dataclass(frozen=True)
class Peak:
    """What one CPU target does at most, all threads together, in operations per second."""

    target: str
    lanes: int  # of float32
    float32: float
    float64: float


@dataclass(frozen=True)
class Limits:
    """What the machine does at most; `clock` is of one thread while all are busy."""

    threads: int
    clock: float
    peaks: tuple[Peak, ...]
    read: float

    def peak(self, dtype: str) -> float:
        """The largest of all targets: the share of a slower target must not look better for it."""
        wide = dtype == "float64"
        return max((peak.float64 if wide else peak.float32 for peak in self.peaks), default=0.0)

    def multiply_adds_per_cycle(self, peak: Peak) -> float:
        """How many vectors one thread multiplies and adds per cycle: 1 or 2 on today's CPUs."""
        return peak.float32 / (self.threads * self.clock * peak.lanes * 2) if self.clock else 0.0


def measured_limits(threads: int) -> Limits | None:
    """What the machine does now; None where the native module is not built."""
    if not native.BUILT:
        return None
    lanes = native.lanes()
    peaks = tuple(
        Peak(
            target,
            lanes[target],
            native.multiply_add_peak(target, threads),
            native.multiply_add_peak(target, threads, wide=True),
        )
        for target, runs in native.targets().items()
        if runs
    )
    data = np.ones(READ_BYTES // 4, np.float32)
    read = native.read_bandwidth(data, threads)
    return Limits(threads, native.clock_frequency(threads), peaks, read)


def largest(measured: list[Limits]) -> Limits:
    """Each figure at its best: a disturbance can only make a machine look slower."""
    return Limits(
        measured[0].threads,
        max(one.clock for one in measured),
        tuple(
            Peak(
                peaks[0].target,
                peaks[0].lanes,
                max(peak.float32 for peak in peaks),
                max(peak.float64 for peak in peaks),
            )
            for peaks in zip(*(one.peaks for one in measured), strict=True)
        ),
        max(one.read for one in measured),
    )


def description(threads: int) -> dict[str, Any]:
    """The machine in words, as plain data."""
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
    # The name is often blank in a virtual machine; family and model still tell the generation.
    numbers = re.findall(r"^(cpu family|model)\s*:\s*(\d+)$", text, re.MULTILINE)[:2]
    words = [found[1]] if found else []
    words += [f"({', '.join(f'{name} {value}' for name, value in numbers)})"] if numbers else []
    return " ".join(words) or platform.processor() or "unknown"


def _blas() -> str:
    config: Any = np.show_config("dicts")
    found = config.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()
