"""Programs in a Python process of their own, for what they do to a process and cannot undo."""

from __future__ import annotations

import os
import subprocess
import sys

from places import SUPPORT

WATCHDOG = 120.0  # seconds until a process counts as hanging, on a busy machine too

START = """
import os, signal, sys, threading, time
import numpy as np
import regard
from regard.compute import native
rng = np.random.default_rng(0)
def arrays(*shapes, dtype=np.float32):
    return [rng.normal(size=s).astype(dtype) for s in shapes]
q, k, v = arrays((4, 300, 64), (4, 300, 64), (4, 300, 64))
def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def python(
    program: str,
    *arguments: str,
    start: str = START,
    emulator: tuple[str, ...] = (),
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    before = {name: x for name, x in os.environ.items() if not name.startswith("REGARD_")}
    return subprocess.run(
        [*emulator, sys.executable, "-X", "faulthandler", "-c", start + program, *arguments],
        cwd=SUPPORT,
        env=before | environment,
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )


def well(process: subprocess.CompletedProcess[str]) -> str:
    """What a process that ended well has printed."""
    assert process.returncode == 0, (process.stdout + process.stderr)[-3000:]
    assert process.stderr == ""
    return process.stdout.strip()
