"""Arrays whose bytes end, or begin, where a page begins that nobody may touch.

Owns `Pages`, on which reading or writing one byte too far ends the process. For tests in
subprocesses. Must not know the library under test.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

NOTHING, READING, ALL = 0, 1, 3  # PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE


class Pages:
    """Memory between two pages that nobody may touch, for one array at a time."""

    def __init__(self, size: int) -> None:
        page = mmap.PAGESIZE
        self.size = (size + page - 1) // page * page
        self.memory = mmap.mmap(-1, self.size + 2 * page)
        self.start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + page
        self.bytes = np.frombuffer(self.memory, np.uint8)[page : page + self.size]
        protect(self.start - page, page, NOTHING)
        protect(self.start + self.size, page, NOTHING)

    def place(self, x: np.ndarray, end: bool, writable: bool = False) -> np.ndarray:
        """A copy of `x`, flush with the end of the memory or with its beginning."""
        protect(self.start, self.size, ALL)
        assert x.nbytes <= self.size
        first = self.size - x.nbytes if end else 0
        place = self.bytes[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
        place[...] = x
        if not writable:
            protect(self.start, self.size, READING)
        return place


_libc = ctypes.CDLL(None, use_errno=True)


def protect(address: int, size: int, how: int) -> None:
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), how):
        raise OSError(ctypes.get_errno(), "mprotect")
