"""What a process holds, and whether it holds more and more: memory, objects, files, threads.

Reads /proc of Linux. Must not know what the process does.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import statistics
import time
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

# Of a whole run after the warm-up, however long: eight bytes in each of a million calls.
MOST_MEMORY = 8.0  # MiB; what is left of it moves by one or two
MOST_OBJECTS = 2000
WARM_UP = 0.3  # of the readings
FEWEST = 5  # readings

M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of glibc's malloc.h


@dataclass(frozen=True)
class Reading:
    """What is held at a moment when no call is under way."""

    memory: float  # MiB that are this process's alone
    objects: int  # that Python's collector knows
    files: int
    threads: int
    children: int
    leftovers: int  # in the folder of the calls
    at: float = field(default_factory=time.monotonic)  # seconds


def keep_no_free_memory() -> None:
    """Have glibc give back what is freed: else what it keeps hides what is lost."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)


def read(folder: Path) -> Reading:
    """Collect what is garbage, give free memory back, and count the rest."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    resident = re.search(r"RssAnon:\s*([0-9]+) kB", status)
    assert resident is not None
    tasks = os.listdir("/proc/self/task")
    children = sum(len(Path(f"/proc/self/task/{n}/children").read_text().split()) for n in tasks)
    return Reading(
        int(resident[1]) / 1024,
        len(gc.get_objects()),
        len(os.listdir("/proc/self/fd")),
        len(tasks),
        children,
        len(list(folder.iterdir())),
    )


def growth(readings: list[Reading], name: str) -> float:
    """The median slope of all pairs of readings, times the time between first and last."""
    pairs = combinations(readings, 2)
    slopes = [(getattr(b, name) - getattr(a, name)) / (b.at - a.at) for a, b in pairs]
    return statistics.median(slopes) * (readings[-1].at - readings[0].at)


def judge(readings: list[Reading]) -> tuple[dict[str, Any], list[str]]:
    """Figures after the warm-up, and what is wrong with them."""
    warm = readings[int(len(readings) * WARM_UP) :]
    if len(readings) < FEWEST:
        return {}, ["too few readings to judge"]
    minutes = (warm[-1].at - warm[0].at) / 60
    found: dict[str, Any] = {"readings": len(warm), "minutes": round(minutes, 2)}
    wrong = []
    for name, most in (("memory", MOST_MEMORY), ("objects", MOST_OBJECTS)):
        grown = growth(warm, name)
        found[name] = {
            "first": round(getattr(warm[0], name), 1),
            "last": round(getattr(warm[-1], name), 1),
            "grown": round(grown, 2),
            "per minute": round(grown / minutes, 3),
            "bound": most,
        }
        if grown > most:
            wrong.append(f"{name} grew by {grown:.1f}; the bound is {most}")
    for name in ("files", "threads", "children", "leftovers"):
        counts = [getattr(one, name) for one in warm]
        found[name] = {"least": min(counts), "most": max(counts)}
        if min(counts) != max(counts):
            wrong.append(f"{name} went from {min(counts)} to {max(counts)}")
    found["each"] = [{k: round(v, 1) for k, v in asdict(one).items()} for one in readings]
    return found, wrong
