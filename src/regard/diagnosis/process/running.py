"""What every call of foreign code needs: one at a time, what it prints, how it is ended.

Must not know what is called.
"""

from __future__ import annotations

import io
import os
import threading
from typing import Any

import numpy as np

from regard.boundary.arrays import Array
from regard.errors import safe_text

# Characters that one call may print, and how many of them are kept.
MAX_PRINTED = 2**22
KEPT_PRINTED = 200


class _OneAtATime:
    """What is redirected belongs to the whole process, so one thread at a time calls a function."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):  # a child has no thread that would release it
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


one_at_a_time = _OneAtATime()


class LimitExceeded(BaseException):
    """Raised inside the function, which cannot catch it with `except Exception`."""


def describe_error(error: BaseException) -> str:
    """An exception in one short line, whatever its own `__str__` does."""
    try:
        text = str(error).strip().split("\n")[0]
    except BaseException:
        text = ""
    return safe_text(f"{type(error).__name__}: {text}".rstrip(": "), 160)


class Printed(io.StringIO):
    """Keeps the beginning of what is printed, and ends a call that prints too much."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def write(self, text: str) -> int:
        if self.length < KEPT_PRINTED:
            super().write(text[:KEPT_PRINTED])
        self.length += len(text)
        if self.length > MAX_PRINTED:
            text = f"it printed more than {MAX_PRINTED} characters in one call"
            raise LimitExceeded("prints", text)
        return len(text)

    def kept(self) -> str:
        """The beginning on one line, even if the function has closed this."""
        return "" if self.closed else safe_text(self.getvalue().strip(), KEPT_PRINTED)


def as_numpy(value: Any) -> Array:
    """An array of any framework as a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value.numpy())
    return np.asarray(value)
