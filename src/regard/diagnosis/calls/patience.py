"""How long a diagnosis has been thinking: in seconds of the processor, so that load changes little.

Must not know what is thought about.
"""

from __future__ import annotations

import time

# The share of passing time that counts at least: a function may wait, or run in a process apart.
WAITING_SHARE = 1 / 3


class Patience:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._wall, self._processor = time.monotonic(), time.thread_time()

    @property
    def spent(self) -> float:
        """Seconds of the processor in this thread, and at least a third of those that passed."""
        passed = time.monotonic() - self._wall
        return max(time.thread_time() - self._processor, WAITING_SHARE * passed)
